"""ServingLoop: order of effects at depths 0 and 1, failures, drain, and that it never spins."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from engine.simulated import SimulatedEngine, VirtualClock
from scheduler.limits import SchedulerLimits
from scheduler.loop import EngineFailed, PendingResult, ServingLoop
from scheduler.policy import FirstComeFirstServed
from scheduler.scheduler import Scheduler
from scheduler.types import (
    Abort,
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
)
from tests.simulation.rig import next_token

CAPACITY = KVCapacity(num_blocks=16, block_size=4, num_slots=4, max_model_len=64)


@dataclass
class Script:
    """An inbox that hands out one entry a call and notes whether it was asked to wait."""

    entries: list[list[Command]]
    waits: list[bool] = field(default_factory=list)

    def take(self, *, block: bool) -> list[Command]:
        self.waits.append(block)
        if self.entries:
            return self.entries.pop(0)
        assert not block, "the loop would sleep for ever"
        return []


class Recorder:
    """An engine that notes the order of submits and results, and fails where it is told to."""

    def __init__(self, *, fail_submit: int = 0, fail_result: int = 0) -> None:
        self.clock = VirtualClock()
        self.engine = SimulatedEngine(CAPACITY, lambda _: 2.0, next_token, self.clock)
        self.capacity = CAPACITY
        self.calls: list[tuple[str, int]] = []
        self.fail_submit, self.fail_result = fail_submit, fail_result

    def submit(self, plan: StepPlan) -> PendingResult:
        self.calls.append(("submit", plan.step))
        if plan.step == self.fail_submit:
            raise ValueError("no room")
        return Pending(self, plan.step, self.engine.submit(plan))


@dataclass
class Pending:
    recorder: Recorder
    step: int
    inner: PendingResult

    def result(self) -> StepResult:
        self.recorder.calls.append(("result", self.step))
        if self.step == self.recorder.fail_result:
            raise OSError("device lost")
        return self.inner.result()


def run(
    entries: list[list[Command]], *, depth: int = 0, engine: Recorder | None = None
) -> tuple[list[Event], Recorder, Script]:
    engine = engine or Recorder()
    scheduler = Scheduler(CAPACITY, SchedulerLimits(16, 10, 4, 0), FirstComeFirstServed())
    events: list[Event] = []
    inbox = Script(entries)
    loop = ServingLoop(scheduler, engine, inbox, events.extend, engine.clock, depth)
    try:
        loop.run()
    except EngineFailed as error:
        events.append(Finished("loop", FinishReason.ERROR, str(error)))
    return events, engine, inbox


def submit(*ids: str, max_tokens: int = 3) -> Submit:
    return Submit(tuple(Request(i, (1, 2, 3), max_tokens) for i in ids))


def test_serial_loop_waits_for_each_step() -> None:
    _, engine, _ = run([[submit("a")], [Drain()]])
    steps = [("submit", i // 2 + 1) if i % 2 == 0 else ("result", i // 2 + 1) for i in range(6)]
    assert engine.calls == steps


def test_overlapped_loop_submits_the_next_step_first() -> None:
    _, engine, _ = run([[submit("a")], [Drain()]], depth=1)
    assert engine.calls == [
        ("submit", 1),
        ("submit", 2),
        ("result", 1),
        ("submit", 3),
        ("result", 2),
        ("result", 3),
    ]


@pytest.mark.parametrize("depth", [0, 1])
def test_answers_do_not_depend_on_depth(depth: int) -> None:
    events, _, _ = run([[submit("a", "b")], [submit("c")], [Drain()]], depth=depth)
    reasons = {e.request_id: e.reason for e in events if isinstance(e, Finished)}
    assert reasons == dict.fromkeys("abc", FinishReason.LENGTH)
    assert isinstance(events[-1], StepStats)
    assert events[-1].num_running == 0


@pytest.mark.parametrize("depth", [0, 1])
def test_idle_loop_sleeps_and_busy_loop_does_not(depth: int) -> None:
    """B104: it waits for a command exactly when there is nothing to do."""
    _, _, inbox = run([[], [], [submit("a", max_tokens=1)], [Drain()]], depth=depth)
    assert inbox.waits[:3] == [True, True, True]
    assert True not in inbox.waits[4:]


def test_gauges_return_to_zero_when_the_last_client_leaves() -> None:
    """B115: after an abort no step follows, and the stats come all the same."""
    events, _, _ = run([[submit("a", max_tokens=50)], [Abort(("a",))], [Drain()]])
    last = [e for e in events if isinstance(e, StepStats)][-2]
    assert (last.num_running, last.num_waiting, last.num_blocks_used) == (0, 0, 0)


@pytest.mark.parametrize("depth", [0, 1])
def test_failed_step_ends_every_request_and_the_loop(depth: int) -> None:
    """B124's half of the core: open streams get an error, then the process can go."""
    for engine, text in (
        (Recorder(fail_submit=2), "refused a step: no room"),
        (Recorder(fail_result=2), "failed in a step: device lost"),
    ):
        events, _, _ = run([[submit("a", "b", max_tokens=9)]], depth=depth, engine=engine)
        failed = [e for e in events if isinstance(e, Finished)]
        assert {e.request_id for e in failed} == {"a", "b", "loop"}
        assert all(text in e.message for e in failed)


def test_drain_ends_the_loop_after_the_last_answer() -> None:
    events, _, _ = run([[submit("a"), Drain(), submit("late")]])
    reasons = {e.request_id: e.reason for e in events if isinstance(e, Finished)}
    assert reasons == {"late": FinishReason.ERROR, "a": FinishReason.LENGTH}


@pytest.mark.parametrize("depth", [0, 1])
def test_step_seconds_add_up_to_the_time_of_the_device(depth: int) -> None:
    events, engine, _ = run([[submit("a", max_tokens=5)], [Drain()]], depth=depth)
    stats = [e for e in events if isinstance(e, StepStats) and e.step_seconds]
    assert [s.step_seconds for s in stats] == [2.0] * 5
    assert engine.clock() == 10.0


def test_scheduler_that_cannot_move_is_a_failure_not_a_spin() -> None:
    """B104: nothing in flight, somebody waiting, and no plan: that would never change."""
    engine = Recorder()
    scheduler = Scheduler(CAPACITY, SchedulerLimits(16, 10, 4, 0), FirstComeFirstServed())
    scheduler.handle(submit("a"), 0.0)
    scheduler.sequences["a"].num_pending = 1  # waits for a token that never comes
    events: list[Event] = []
    loop = ServingLoop(scheduler, engine, Script([[]]), events.extend, engine.clock)
    with pytest.raises(EngineFailed, match="neither move"):
        loop.run()
    assert isinstance(events[0], Finished)
