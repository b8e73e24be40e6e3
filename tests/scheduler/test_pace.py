"""Pace: prompts share a step with decodes only as far as the target of TPOT allows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.simulated import SimulatedEngine, VirtualClock
from scheduler.limits import SchedulerLimits
from scheduler.loop import ServingLoop
from scheduler.pace import Pace
from scheduler.policy import FirstComeFirstServed
from scheduler.scheduler import Scheduler
from scheduler.types import (
    Command,
    Drain,
    Event,
    KVCapacity,
    Request,
    StepPlan,
    StepStats,
    Submit,
)

DECODE, TOKEN = 0.004, 0.001  # seconds of a step's decodes, and of each prompt token


def cost(plan: StepPlan) -> float:
    num_decodes = sum(1 for n in plan.lengths if n == 1)
    return (DECODE if num_decodes else 0.0) + TOKEN * (sum(plan.lengths) - num_decodes)


class Script:
    """Commands at virtual times; ends with a drain."""

    def __init__(self, clock: VirtualClock, commands: list[tuple[float, Command]]) -> None:
        self.clock = clock
        self.commands = commands

    def take(self, *, block: bool) -> list[Command]:
        if block and self.commands:
            self.clock.advance_to(self.commands[0][0])
        ready = [c for at, c in self.commands if at <= self.clock()]
        self.commands = self.commands[len(ready) :]
        return ready


def steps_of(target: float | None) -> list[StepStats]:
    """A stream decodes; a prompt of 1,000 tokens arrives after a while."""
    capacity = KVCapacity(num_blocks=200, block_size=16, num_slots=4, max_model_len=2000)
    limits = SchedulerLimits(
        max_step_tokens=256,
        max_waiting=10,
        max_running=4,
        watermark_blocks=0,
        max_step_seconds=target,
    )
    clock = VirtualClock()
    stream = Request("stream", tuple(range(40)), 300)
    long = Request("long", tuple(range(1000, 2000)), 2)
    script = Script(clock, [(0.0, Submit((stream,))), (0.2, Submit((long,))), (0.2, Drain())])
    stats: list[StepStats] = []

    def emit(events: list[Event]) -> None:
        stats.extend(e for e in events if isinstance(e, StepStats) and e.device_seconds)

    engine = SimulatedEngine(capacity, cost, lambda _, tokens: len(tokens), clock)
    scheduler = Scheduler(capacity, limits, FirstComeFirstServed())
    ServingLoop(scheduler, engine, script, emit, clock).run()
    return stats


def test_steps_that_decode_keep_to_the_target() -> None:
    mixed = [s for s in steps_of(0.050) if s.num_prefill_tokens and s.num_decode_tokens]
    assert sum(s.num_prefill_tokens for s in mixed) == 1000
    assert max(s.device_seconds for s in mixed) <= 0.050
    assert len(mixed) > 1000 / 256


def test_without_a_target_a_prompt_takes_the_whole_budget() -> None:
    mixed = [s for s in steps_of(None) if s.num_prefill_tokens and s.num_decode_tokens]
    assert max(s.num_prefill_tokens for s in mixed) == 255


def test_prompts_go_on_even_where_decodes_alone_miss_the_target() -> None:
    mixed = [s for s in steps_of(0.001) if s.num_prefill_tokens and s.num_decode_tokens]
    assert sum(s.num_prefill_tokens for s in mixed) == 1000
    assert {s.num_prefill_tokens for s in mixed[:-1]} == {16}  # the least: a block


def test_nothing_is_held_back_where_nobody_decodes() -> None:
    pace = Pace(0.010, min_tokens=16, max_tokens=512)
    pace.observe(100, 0, 1.0)
    assert pace.prompt_tokens(0) == 512
    assert pace.prompt_tokens(1) == 16


def test_estimates_follow_a_machine_that_slows_down() -> None:
    pace = Pace(0.100, min_tokens=1, max_tokens=10_000)
    pace.observe(0, 4, 0.010)
    pace.observe(100, 4, 0.010 + 0.1)
    fast = pace.prompt_tokens(4)
    for _ in range(50):
        pace.observe(100, 4, 0.010 + 0.4)
    assert pace.prompt_tokens(4) == pytest.approx(fast / 4, rel=0.05)


@given(
    st.lists(
        st.tuples(st.integers(0, 600), st.integers(0, 64), st.floats(0, 10, allow_nan=False)),
        max_size=30,
    ),
    st.integers(0, 100),
)
def test_budget_stays_within_its_bounds(steps: list[tuple[int, int, float]], decodes: int) -> None:
    pace = Pace(0.05, min_tokens=16, max_tokens=512)
    for num_prefill, num_decodes, seconds in steps:
        if num_prefill or num_decodes:
            pace.observe(num_prefill, num_decodes, seconds)
    assert 16 <= pace.prompt_tokens(decodes) <= 512
