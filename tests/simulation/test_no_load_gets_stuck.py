"""No load gets the scheduler into a state that it does not leave, though work could go on faster.

Loads with and without a loop, bursts, tenants, shared prefixes, clients that hang up, little KV, a
machine that changes its pace: each is served to its end, prompts get what the target of TPOT leaves
them, and nobody waits who could begin.
"""

from __future__ import annotations

from itertools import groupby

import pytest

from tests.simulation.loads import BLOCK, Load, Step

TARGET = 0.1
# Steps in which the pace may find out; then it is held to what it knows.
PATIENCE = 60


def is_paced(step: Step) -> bool:
    """A step of decodes and prompts in which a prompt would have taken more."""
    return bool(step.stats.num_decode_tokens and step.stats.num_prefill_tokens and step.wants)


def check_pace(load: Load, steps: list[Step]) -> None:
    """Of paced steps, one after another: they keep to the target and use it."""
    last = steps[PATIENCE:]
    for first in range(0, len(last) - 19, 20):
        part = last[first : first + 20]
        seconds = sum(step.stats.device_seconds for step in part) / len(part)
        tokens = [step.stats.num_prefill_tokens for step in part]
        if max(tokens) > BLOCK:
            assert seconds < 1.3 * TARGET, f"steps take too long at {part[0].at:.2f}"
        if min(tokens) < load.limits.max_step_tokens // 2:
            assert seconds > 0.6 * TARGET, f"prompts starve at {part[0].at:.2f}"


# 41: one alone, then 40 at once whose prompts starved where decodes had to be seen alone.
@pytest.mark.parametrize("seed", [*range(30), 41])
def test_no_load_gets_stuck(seed: int) -> None:
    load = Load(seed)
    load.run()
    assert not load.unfinished
    assert load.num_finished
    for (paced, _), steps in groupby(load.steps, key=lambda step: (is_paced(step), step.phase)):
        if paced:
            check_pace(load, list(steps))
    for fits, steps in groupby(load.steps, key=lambda step: step.fits):
        idle = [step for step in steps if fits and not step.stats.num_prefill_tokens]
        assert len(idle) < 10, f"somebody could have begun at {idle[0].at:.2f}"
