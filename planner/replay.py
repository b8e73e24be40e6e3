"""Replays a trace through the scheduler that serves, in virtual time.

Owns the joining of trace, loop and cost, and what each request saw. It has no scheduling of its
own: the loop, the scheduler and the policy are the ones in scheduler/, so a plan made here cannot
drift from what the server does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.traces import TraceRow
from engine.simulated import SimulatedResult, VirtualClock
from planner.cost import Cost
from scheduler.limits import SchedulerLimits
from scheduler.loop import ServingLoop
from scheduler.policy import Policy
from scheduler.scheduler import Scheduler
from scheduler.types import (
    Command,
    Drain,
    Event,
    Finished,
    FinishReason,
    KVCapacity,
    Request,
    StepPlan,
    StepResult,
    StepStats,
    Submit,
    Tokens,
)


@dataclass(slots=True)
class Replayed:
    """One request as a client would have seen it; instants in seconds from the trace's start."""

    arrival: float
    input_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    scheduled_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    num_preemptions: int = 0
    refusal: str = ""

    @property
    def ttft(self) -> float | None:
        return None if self.first_token_at is None else self.first_token_at - self.arrival

    @property
    def tpot(self) -> float | None:
        """(last - first) / (n - 1); None for a single token."""
        if self.first_token_at is None or self.last_token_at is None or self.output_tokens < 2:
            return None
        return (self.last_token_at - self.first_token_at) / (self.output_tokens - 1)


@dataclass(slots=True)
class Replay:
    """What came of a trace: the requests in order of arrival, and the steps it took."""

    requests: list[Replayed]
    num_steps: int = 0
    busy_seconds: float = 0.0
    makespan: float = 0.0
    num_preemptions: int = 0
    max_blocks_used: int = 0
    num_blocks: int = 0
    steps: list[StepStats] = field(default_factory=list)


class CostEngine:
    """Implements scheduler.loop.Engine with nothing but a cost: tokens have no meaning here."""

    def __init__(self, capacity: KVCapacity, cost: Cost, clock: VirtualClock) -> None:
        self.capacity = capacity
        self._cost = cost
        self._clock = clock
        self._free_at = 0.0

    def submit(self, plan: StepPlan) -> SimulatedResult:
        seconds = self._cost(plan)
        self._free_at = max(self._free_at, self._clock()) + seconds
        # The request's own number as its answer: no two answers share a prefix by accident.
        token_ids = tuple(
            (int(request_id),) if samples else ()
            for request_id, samples in zip(plan.seq_ids, plan.samples, strict=True)
        )
        result = StepResult(plan.step, token_ids, device_seconds=seconds)
        return SimulatedResult(result, self._free_at, self._clock)


class _Arrivals:
    """Inbox that delivers each request when the virtual clock has reached its arrival."""

    def __init__(self, requests: Sequence[Request], clock: VirtualClock) -> None:
        self._requests = requests
        self._clock = clock
        self._next = 0

    def take(self, *, block: bool) -> list[Command]:
        if self._next == len(self._requests):
            return [Drain()] if block else []
        if block:
            self._clock.advance_to(self._requests[self._next].arrival)
        first = self._next
        while (
            self._next < len(self._requests) and self._requests[self._next].arrival <= self._clock()
        ):
            self._next += 1
        return [Submit((request,)) for request in self._requests[first : self._next]]


def replay(
    rows: Sequence[TraceRow],
    *,
    block_tokens: int,
    capacity: KVCapacity,
    limits: SchedulerLimits,
    policy: Policy,
    cost: Cost,
    depth: int = 0,
    max_queue_seconds: float | None = None,
) -> Replay:
    """Serves `rows` to the end. `block_tokens` is the size of the trace's own blocks, 0 if none.

    A session of the trace is a tenant. What is not begun in `max_queue_seconds` is refused.
    Raises ValueError if a row has no arrival time.
    """
    requests = _requests(rows, block_tokens, max_queue_seconds)
    outcome = Replay(
        [Replayed(r.arrival, len(r.prompt), r.max_tokens) for r in requests],
        num_blocks=capacity.num_blocks,
    )
    clock = VirtualClock()

    def note(events: list[Event]) -> None:
        for event in events:
            _note(event, outcome, clock())

    loop = ServingLoop(
        Scheduler(capacity, limits, policy),
        CostEngine(capacity, cost, clock),
        _Arrivals(requests, clock),
        note,
        clock,
        depth,
    )
    loop.run()
    outcome.makespan = clock() - (requests[0].arrival if requests else 0.0)
    return outcome


def _note(event: Event, outcome: Replay, now: float) -> None:
    match event:
        case StepStats():
            if event.device_seconds:
                outcome.num_steps += 1
                outcome.busy_seconds += event.device_seconds
                outcome.steps.append(event)
            outcome.num_preemptions += event.num_preemptions
            outcome.max_blocks_used = max(outcome.max_blocks_used, event.num_blocks_used)
        case Tokens():
            seen = outcome.requests[int(event.request_id)]
            if event.first is not None:
                seen.scheduled_at = event.first.scheduled_at
                seen.cached_tokens = event.first.cached_tokens
                seen.first_token_at = now
            seen.last_token_at = now
        case Finished():
            seen = outcome.requests[int(event.request_id)]
            seen.num_preemptions = event.num_preemptions
            if event.reason in (FinishReason.ERROR, FinishReason.EXPIRED):
                seen.refusal = event.message


def _requests(
    rows: Sequence[TraceRow], block_tokens: int, max_queue_seconds: float | None
) -> list[Request]:
    """Prompts whose tokens are equal exactly where the trace's blocks are."""
    names: dict[str, int] = {}
    requests = []
    for number, row in enumerate(rows):
        if row.arrival_seconds is None:
            raise ValueError(f"request {number + 1} of the trace has no arrival time")
        own = -1 - number  # no block has a negative name
        prompt: list[int] = []
        for key in row.block_keys:
            name = names.setdefault(key, len(names))
            prompt += [name] * min(block_tokens, row.input_tokens - len(prompt))
        prompt += [own] * (max(1, row.input_tokens) - len(prompt))
        requests.append(
            Request(
                id=str(number),
                prompt=tuple(prompt),
                max_tokens=max(1, row.output_tokens),
                tenant=row.session,
                arrival=row.arrival_seconds,
                deadline=None
                if max_queue_seconds is None
                else row.arrival_seconds + max_queue_seconds,
            )
        )
    return requests
