"""Pace: prompts share a step with decodes only as far as the target of TPOT allows."""

from __future__ import annotations

import pytest
from hypothesis import example, given
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


def observe(pace: Pace, truth: tuple[float, float, float], num_prefill: int, decodes: int) -> float:
    fixed, of_decode, of_token = truth
    seconds = fixed + of_decode * decodes + of_token * num_prefill
    pace.observe(num_prefill, decodes, seconds)
    return seconds


def test_estimates_follow_a_machine_that_slows_down() -> None:
    pace = Pace(0.100, min_tokens=1, max_tokens=10_000)
    budgets = []
    for of_token in (0.001, 0.004):
        for _ in range(100):
            observe(pace, (0.010, 0.0, of_token), pace.prompt_tokens(4), 4)
        budgets.append(pace.prompt_tokens(4))
    assert budgets == [pytest.approx(80, rel=0.1), pytest.approx(20, rel=0.1)]


def test_many_decodes_are_not_taken_for_as_many_lone_ones() -> None:
    """A lone stream, then many at once with prompts behind them: no step decodes alone again."""
    pace = Pace(0.100, min_tokens=16, max_tokens=512)
    truth = (0.0037, 0.0005, 0.00035)
    observe(pace, truth, 128, 0)
    for _ in range(60):
        observe(pace, truth, 0, 1)
    seconds = [observe(pace, truth, pace.prompt_tokens(20), 20) for _ in range(20)]
    assert min(seconds) > 0.070
    assert max(seconds) < 0.110


def test_prompts_that_were_nearly_free_and_no_longer_are_do_not_make_steps_swing() -> None:
    """What is learnt in a step of the whole budget is not lost again in one of the least."""
    pace = Pace(0.100, min_tokens=16, max_tokens=512)
    for _ in range(100):
        for num_prefill in (8, 100, 512):
            observe(pace, (0.010, 1e-5, 1e-6), num_prefill, 20)
    truth = (0.001, 1e-5, 0.002)
    seconds = [observe(pace, truth, pace.prompt_tokens(20), 20) for _ in range(100)]
    assert min(seconds[50:]) > 0.080
    assert max(seconds[50:]) < 0.110


SECONDS = st.floats(1e-4, 1e-3)


@given(
    truth=st.tuples(st.floats(1e-3, 2e-2), SECONDS, SECONDS),
    history=st.lists(
        st.tuples(st.integers(0, 512), st.integers(1, 64), st.floats(1e-4, 10)), max_size=30
    ),
    decodes=st.integers(1, 40),
)
def test_what_was_learnt_wrongly_does_not_last(
    truth: tuple[float, float, float], history: list[tuple[int, int, float]], decodes: int
) -> None:
    """Though from here on no step has decodes alone, or prompts alone."""
    pace = Pace(0.100, min_tokens=16, max_tokens=512)
    for num_prefill, num_decodes, seconds in history:
        pace.observe(num_prefill, num_decodes, seconds)
    for _ in range(150):
        tokens = pace.prompt_tokens(decodes)
        seconds = observe(pace, truth, tokens, decodes)
    assert 0.080 < seconds < 0.100 or (tokens == 512 and seconds < 0.1)


@example([(89, 0, 2.3e-308)], 1)
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
