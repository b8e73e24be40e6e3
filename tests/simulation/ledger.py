"""A second account of what each lane was served, kept from plans and events alone.

It holds the line's counters against its own, and every entry against the rule: of lanes that wait
the one that was served least for its weight goes first.
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.line import Line
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence
from scheduler.types import Event, Finished, StepPlan, Tokens

PROMPT, CACHED, GENERATED = 1.0, 0.125, 2.0
NEAR = 1e-6


class Ledger:
    """Told of everything that a rig does with its scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._line = scheduler.line
        self._served: dict[str, float] = {}
        self._known: dict[str, Sequence] = {}
        self._found: dict[str, int] = {}  # of the prompt, by those that have entered
        self._computed: dict[str, int] = {}  # positions in plans
        self._sampled: set[str] = set()
        self._now = 0.0
        self._line.enter = self._enter  # type: ignore[method-assign]
        self._line.fall_back = self._fall_back  # type: ignore[method-assign]

    def levels(self) -> dict[str, float | None]:
        """By lane where one that begins to wait now must start; None where somebody waits."""
        found: dict[str, float | None] = {"": self._level("")}
        for lane in self._line.lanes:
            found[lane.name] = None if lane.waiting else self._level(lane.name)
        return found

    def _level(self, name: str) -> float:
        others = [lane for lane in self._line.lanes if lane.name != name]
        waiting = [lane.served for lane in others if lane.waiting]
        return min(waiting, default=max((o.served for o in others if o.entered), default=0.0))

    def submitted(self, ids: Iterable[str], levels: dict[str, float | None]) -> None:
        """`levels` are those before it."""
        for request_id in ids:
            sequence = self._scheduler.sequences.get(request_id)
            if sequence is None:
                continue
            self._known[request_id] = sequence
            name = sequence.lane.name
            served = self._served.get(name, 0.0)
            level = levels[name] if name in levels else self._level(name)
            self._served[name] = served if level is None else max(served, level)
            levels[name] = None

    def planning(self, now: float) -> None:
        self._now = now

    def _enter(self, sequence: Sequence, num_found: int) -> None:
        deadline = sequence.request.deadline
        assert sequence.has_begun or deadline is None or self._now < deadline, "late, yet begun"
        for lane in self._line.lanes:
            ready = [s for s in lane.waiting if s.leader is None]
            if lane is not sequence.lane and ready:
                assert sequence.lane.served <= lane.served + NEAR, "the least served goes first"
        Line.enter(self._line, sequence, num_found)
        request_id = sequence.request.id
        if request_id not in self._found:
            num_found = self._found[request_id] = min(num_found, sequence.num_prompt)
            new = sequence.num_prompt - num_found
            self._add(sequence, PROMPT * new + CACHED * num_found)

    def _fall_back(self, sequence: Sequence) -> None:
        level = self.levels()[sequence.lane.name]
        Line.fall_back(self._line, sequence)
        if level is not None:
            served = self._served.get(sequence.lane.name, 0.0)
            self._served[sequence.lane.name] = max(served, level)

    def planned(self, plan: StepPlan) -> None:
        for request_id, start, length in zip(plan.seq_ids, plan.starts, plan.lengths, strict=True):
            end = max(self._computed.get(request_id, 0), start + length)
            self._computed[request_id] = end

    def told(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, Tokens):
                sequence = self._known[event.request_id]
                if event.token_ids or event.first is not None:
                    self._sampled.add(event.request_id)
                    self._add(sequence, GENERATED)
            elif isinstance(event, Finished) and event.request_id in self._known:
                sequence = self._known.pop(event.request_id)
                found = self._found.pop(event.request_id, None)
                if found is not None and event.request_id not in self._sampled:
                    computed = max(found, self._computed.get(event.request_id, 0))
                    self._add(sequence, PROMPT * min(0, computed - sequence.num_prompt))

    def _add(self, sequence: Sequence, cost: float) -> None:
        name = sequence.lane.name
        self._served[name] = self._served.get(name, 0.0) + cost / sequence.lane.weight

    def check(self) -> None:
        if not self._scheduler.sequences:
            assert not self._line.lanes, "an idle line remembers nothing"
            self._served.clear()
        for lane in self._line.lanes:
            assert abs(lane.served - self._served.get(lane.name, 0.0)) < NEAR, "each pays its own"
