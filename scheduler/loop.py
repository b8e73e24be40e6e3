"""The loop that joins scheduler and engine, and the protocols of what it needs.

Depth 0 waits for each step before it plans the next; depth 1 plans and submits the next step
while the engine is busy with one. The only effects of the core are here: it must not decide what
runs, nor know what is behind `engine`, `inbox` and `emit`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from scheduler.scheduler import Scheduler
from scheduler.types import Command, Event, KVCapacity, StepPlan, StepResult, StepStats


class PendingResult(Protocol):
    def result(self) -> StepResult:
        """Waits for the step to end; raises if it failed."""
        ...


class Engine(Protocol):
    """Runs plans in the order of submission, each writing a layer's KV before reading it."""

    @property
    def capacity(self) -> KVCapacity: ...

    def submit(self, plan: StepPlan) -> PendingResult:
        """Returns before the device is done; raises OutOfMemory for a plan that does not fit."""
        ...


class Inbox(Protocol):
    def take(self, *, block: bool) -> list[Command]:
        """The commands that have come; with `block` waits until there is one."""
        ...


class OutOfMemory(MemoryError):
    """There was no memory for a plan, now. All its sequences must be admitted again.

    Plans submitted before it are whole.
    """


class EngineFailed(RuntimeError):
    """A step failed as a whole: every request has been ended, the engine must be built anew."""


@dataclass(frozen=True, slots=True)
class _Submitted:
    plan: StepPlan
    pending: PendingResult
    plan_seconds: float
    submitted_at: float


class ServingLoop:
    """Runs until a Drain has come and all that was accepted has finished."""

    def __init__(
        self,
        scheduler: Scheduler,
        engine: Engine,
        inbox: Inbox,
        emit: Callable[[list[Event]], None],
        clock: Callable[[], float],
        depth: int = 0,
    ) -> None:
        assert depth in (0, 1)
        self._scheduler = scheduler
        self._engine = engine
        self._inbox = inbox
        self._emit = emit
        self._clock = clock
        self._depth = depth
        self._in_flight: deque[_Submitted] = deque()
        self._last_result_at = 0.0

    def run(self) -> None:
        """Raises EngineFailed after ending every request, if the engine fails."""
        while self._in_flight or not self._scheduler.drained:
            self._turn()

    def _turn(self) -> None:
        idle = self._scheduler.idle and not self._in_flight
        commands = self._inbox.take(block=idle)
        events = [
            event
            for command in commands
            for event in self._scheduler.handle(command, self._clock())
        ]
        events += self._scheduler.expire(self._clock())
        if events:
            self._emit(events)
        submitted = self._submit_next()
        if self._in_flight and (not submitted or len(self._in_flight) > self._depth):
            self._finish_oldest()
        elif not submitted:
            if not self._scheduler.idle:
                raise self._failed("the scheduler can neither move nor wait for a result")
            if commands or events:
                self._emit([self._scheduler.stats()])  # no step will say that things are quiet

    def _submit_next(self) -> bool:
        """Whether there was a plan."""
        started_at = self._clock()
        plan = self._scheduler.schedule(started_at)
        if plan is None:
            return False
        planned_at = self._clock()
        try:
            pending = self._engine.submit(plan)
        except MemoryError:
            self._emit(self._scheduler.take_back(plan, self._clock()))
            return True
        except Exception as error:
            raise self._failed(f"the engine refused a step: {error}") from error
        self._in_flight.append(_Submitted(plan, pending, planned_at - started_at, planned_at))
        return True

    def _finish_oldest(self) -> None:
        done = self._in_flight.popleft()
        try:
            result = done.pending.result()
        except Exception as error:
            raise self._failed(f"the engine failed in a step: {error}") from error
        now = self._clock()
        # A step begins when it is submitted, or when the one before it leaves the device.
        step_seconds = now - max(done.submitted_at, self._last_result_at)
        self._last_result_at = now
        *events, stats = self._scheduler.apply(done.plan, result, now)
        assert isinstance(stats, StepStats)
        times = replace(
            stats, plan_seconds=done.plan_seconds, step_seconds=step_seconds, ended_at=now
        )
        self._emit([*events, times])

    def _failed(self, message: str) -> EngineFailed:
        self._in_flight.clear()
        self._emit(self._scheduler.fail_all(message, self._clock()))
        return EngineFailed(message)
