"""The line: who waits, whose turn it is, and what each tenant has been served.

A policy puts every request into a lane: one for all, or one a tenant. Inside a lane the policy's
own order holds. Between lanes that wait, the one that has been served least for its weight goes
first. It must not know blocks, plans or the clock.

What is served is counted when it is: a prompt as its sequence enters, a token as it is generated.
So a large max_tokens costs nothing, and nothing has to be given back but what of a prompt was
never computed. The rule is start-time fair queueing (Goyal, Vin, Cheng 1996) with counters in
place of estimates (VTC; Sheng et al. 2024).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from operator import attrgetter

from scheduler.sequence import Key, Sequence
from scheduler.types import Request

# What a token costs: of a prompt, of a prompt and found in the cache, generated.
PROMPT_COST, CACHED_COST, GENERATED_COST = 1.0, 0.125, 2.0

_by_key, _by_turn = attrgetter("key"), attrgetter("turn")


@dataclass(slots=True, eq=False)
class Lane:
    """Those who wait together. `served` is what they were served / `weight`.

    `waiting` and `entered` (once, and not finished) are sorted by turn.
    """

    name: str
    weight: float
    served: float = 0.0
    waiting: list[Sequence] = field(default_factory=list)
    entered: list[Sequence] = field(default_factory=list)
    num_running: int = 0

    def charge(self, cost: float) -> None:
        self.served += cost / self.weight


def _claim(sequence: Sequence) -> tuple[float, float, Key]:
    """The smallest is next. Of lanes served alike the one that runs less for its weight is."""
    lane = sequence.lane
    return lane.served, lane.num_running / lane.weight, sequence.turn


class Turns:
    """Whose turn it is while they enter; nothing else may happen to the line meanwhile."""

    def __init__(self, lanes: Iterable[Lane], max_passed: int) -> None:
        self._max_passed = max_passed
        # Of each lane its claim and how many of it were passed over. Claims never tie.
        self._heap = [(_claim(lane.waiting[0]), 0, lane) for lane in lanes if lane.waiting]
        heapify(self._heap)

    def first(self) -> Sequence | None:
        if not self._heap:
            return None
        _, num_passed, lane = self._heap[0]
        return lane.waiting[num_passed]

    def entered(self) -> None:
        """The first has entered, which changes what its lane may claim."""
        self._go_on(0)

    def passed(self) -> None:
        """The first has to wait for a reason of its own."""
        self._go_on(1)

    def _go_on(self, num_more: int) -> None:
        _, num_passed, lane = heappop(self._heap)
        num_passed += num_more
        if num_passed < min(len(lane.waiting), self._max_passed):
            heappush(self._heap, (_claim(lane.waiting[num_passed]), num_passed, lane))


class Line:
    """All lanes. `weights` are those that are not 1."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._lanes: dict[str, Lane] = {}

    def __len__(self) -> int:
        return sum(len(lane.waiting) for lane in self._lanes.values())

    def __iter__(self) -> Iterator[Sequence]:
        for lane in self._lanes.values():
            yield from lane.waiting

    @property
    def lanes(self) -> tuple[Lane, ...]:
        return tuple(self._lanes.values())

    def lane(self, name: str) -> Lane:
        """The lane of that name, of which somebody is about to join."""
        lane = self._lanes.get(name)
        if lane is None:
            lane = self._lanes[name] = Lane(name, self._weights.get(name, 1.0))
        return lane

    def join(self, sequence: Sequence) -> None:
        """It was accepted."""
        self._wait(sequence)

    def _wait(self, sequence: Sequence) -> None:
        """A lane of which nobody waited until now has no claim from the time before."""
        lane = sequence.lane
        if not lane.waiting:
            lane.served = max(lane.served, self._level(lane))
        insort(lane.waiting, sequence, key=_by_turn)

    def _level(self, lane: Lane) -> float:
        """Where the others are: the least served of those that wait, or else the most served."""
        others = [other for other in self._lanes.values() if other is not lane]
        waiting = [other.served for other in others if other.waiting]
        if waiting:
            return min(waiting)
        return max((other.served for other in others if other.entered), default=0.0)

    def first(self) -> Sequence | None:
        """Whose turn it is."""
        waiting = (lane.waiting[0] for lane in self._lanes.values() if lane.waiting)
        return min(waiting, key=_claim, default=None)

    def turns(self, max_passed: int) -> Turns:
        """For those who let in one after the other, and pass over up to so many of each lane."""
        return Turns(self._lanes.values(), max_passed)

    def key(self, sequence: Sequence) -> Key:
        """Its place among all that have entered; it is given once, as it enters.

        Lanes stand as they were served, each in its own order. The only one of a lane that runs
        stands before the second of any other lane.
        """
        if sequence.key:
            return sequence.key
        lane = sequence.lane
        place: Key = (lane.served, 1.0)
        if lane.num_running == 0:
            seconds = [o.entered[1] for o in self._lanes.values() if len(o.entered) > 1]
            place = min([place, *((s.key[0], 0.0) for s in seconds if s.lane is not lane)])
        index = bisect_right(lane.entered, sequence.turn, key=_by_turn)
        if index:
            place = max(place, lane.entered[index - 1].key[:2])
        if index < len(lane.entered):
            place = min(place, lane.entered[index].key[:2])
        return (*place, *sequence.turn)

    def enter(self, sequence: Sequence, num_found: int) -> None:
        """It gets a slot; `num_found` of its prompt need not be computed."""
        lane = sequence.lane
        self._stop_waiting(sequence)
        if not sequence.key:
            sequence.key = self.key(sequence)
            insort(lane.entered, sequence, key=_by_turn)
            found = sequence.num_found = min(num_found, sequence.num_prompt)
            lane.charge(PROMPT_COST * (sequence.num_prompt - found) + CACHED_COST * found)
        lane.num_running += 1

    def fall_back(self, sequence: Sequence) -> None:
        """It gave up its slot and waits again."""
        sequence.lane.num_running -= 1
        self._wait(sequence)

    def leave(self, sequence: Sequence) -> None:
        """It is finished, and still has its slot if it had one."""
        lane = sequence.lane
        if sequence.is_running:
            lane.num_running -= 1
        else:
            self._stop_waiting(sequence)
        if sequence.key:
            del lane.entered[bisect_left(lane.entered, sequence.turn, key=_by_turn)]
            num_computed = max(sequence.num_computed, sequence.num_lost, sequence.num_found)
            if not sequence.has_sampled and num_computed < sequence.num_prompt:
                lane.charge(PROMPT_COST * (num_computed - sequence.num_prompt))
        if not any(lane.waiting or lane.entered for lane in self._lanes.values()):
            self._lanes.clear()  # nobody was kept waiting by what was served until now

    def _stop_waiting(self, sequence: Sequence) -> None:
        waiting = sequence.lane.waiting
        del waiting[bisect_left(waiting, sequence.turn, key=_by_turn)]

    def victims(
        self,
        first: Sequence,
        running: list[Sequence],
        outranks: Callable[[Request, Request], bool],
    ) -> list[Sequence]:
        """Who of those that run, by key, may have to make room for `first`; the last goes first.

        In its own lane whom it outranks. If nothing of its lane runs, the lane that runs most for
        its weight gives, as long as it keeps one; each gives way so once in its life, so what is
        computed again is bounded.
        """
        key = self.key(first)
        later = running[bisect_right(running, key, key=_by_key) :][::-1]
        if first.lane.num_running:
            own = (s for s in later if s.lane is first.lane)
            return [s for s in own if outranks(first.request, s.request)]
        several = [lane for lane in self._lanes.values() if lane.num_running > 1]
        if not several:
            return []
        giver = max(several, key=lambda lane: lane.num_running / lane.weight)
        theirs = [s for s in later if s.lane is giver][: giver.num_running - 1]
        return [s for s in theirs if not s.gave_way]

    def num_waiting(self) -> tuple[tuple[str, int], ...]:
        """By name of the lane, where somebody waits."""
        return tuple((n, len(lane.waiting)) for n, lane in self._lanes.items() if lane.waiting)
