"""SimulatedEngine: it notices wrong, stale and foreign blocks, and its time is that of a device."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest

from engine.simulated import ShadowKVError, SimulatedEngine, VirtualClock
from scheduler.types import Admission, KVCapacity, SamplingParams, StepPlan

CAPACITY = KVCapacity(num_blocks=8, block_size=4, num_slots=4, max_model_len=32)


def make_engine() -> SimulatedEngine:
    return SimulatedEngine(CAPACITY, lambda _: 1.0, lambda _, tokens: len(tokens))


def plan(
    step: int,
    *rows: tuple[int, int, int, int],
    blocks: Sequence[tuple[int, int, int]] = (),
    admit: dict[int, tuple[int, ...]] | None = None,
    copies: tuple[tuple[int, int], ...] = (),
) -> StepPlan:
    """Rows are (slot, start, length, samples), blocks are (slot, index, block)."""
    slots, starts, lengths, samples = zip(*rows, strict=True)
    return StepPlan(
        step=step,
        seq_ids=tuple(f"s{slot}" for slot in slots),
        slots=array("i", slots),
        starts=array("i", starts),
        lengths=array("i", lengths),
        samples=bytes(samples),
        block_slots=array("i", [b[0] for b in blocks]),
        block_indices=array("i", [b[1] for b in blocks]),
        block_ids=array("i", [b[2] for b in blocks]),
        admissions=tuple(
            Admission(slot, tokens, len(tokens), SamplingParams(), ())
            for slot, tokens in (admit or {}).items()
        ),
        copies=copies,
    )


def started() -> SimulatedEngine:
    """Slot 0 holds six tokens in blocks 0 and 1."""
    engine = make_engine()
    table = [(0, 0, 0), (0, 1, 1)]
    result = engine.submit(plan(1, (0, 0, 6, 1), blocks=table, admit={0: tuple(range(6))}))
    assert result.result().token_ids == ((6,),)
    return engine


def test_right_plans_run() -> None:
    engine = started()
    assert engine.submit(plan(2, (0, 6, 1, 1))).result().token_ids == ((7,),)


def test_row_of_a_shared_prefix_may_run_in_the_same_plan() -> None:
    engine = make_engine()
    tokens = tuple(range(6))
    table = [(0, 0, 0), (0, 1, 1), (1, 0, 0), (1, 1, 2)]
    engine.submit(plan(1, (1, 4, 2, 1), (0, 0, 6, 1), blocks=table, admit={0: tokens, 1: tokens}))


def test_copied_block_can_be_continued() -> None:
    engine = started()
    table = [(1, 0, 0), (1, 1, 2)]
    tokens = tuple(range(6))
    engine.submit(plan(2, (1, 5, 1, 1), blocks=table, admit={1: tokens}, copies=((1, 2),)))


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(plan(3, (0, 6, 1, 1)), id="step left out"),
        pytest.param(plan(2, (0, 6, 0, 1)), id="row without a position"),
        pytest.param(plan(2, (0, 6, 2, 1)), id="position without a token"),
        pytest.param(plan(2, (0, 6, 1, 0)), id="end without a sample"),
        pytest.param(plan(2, (0, 6, 1, 1), blocks=[(0, 1, 5)]), id="table rewritten"),
        pytest.param(plan(2, (0, 6, 1, 1), blocks=[(0, 2, 8)]), id="no such block"),
        pytest.param(
            plan(2, (1, 4, 2, 1), blocks=[(1, 0, 0), (1, 1, 1)], admit={1: (9, 1, 2, 3, 4, 5)}),
            id="foreign prefix",
        ),
        pytest.param(
            plan(2, (1, 4, 1, 1), blocks=[(1, 0, 3), (1, 1, 4)], admit={1: (0, 1, 2, 3, 4)}),
            id="prefix never written",
        ),
        pytest.param(
            plan(2, (1, 5, 1, 1), blocks=[(1, 0, 0), (1, 1, 2)], admit={1: (0, 1, 2, 3, 4, 5)}),
            id="partial block not copied",
        ),
        pytest.param(
            plan(2, (0, 6, 1, 1), (1, 0, 2, 1), blocks=[(1, 0, 1)], admit={1: (7, 8)}),
            id="two writers",
        ),
        pytest.param(plan(2, (1, 0, 2, 1), admit={1: (7, 8)}), id="no block"),
    ],
)
def test_wrong_plan_is_noticed(wrong: StepPlan) -> None:
    with pytest.raises(ShadowKVError):
        started().submit(wrong)


def test_overwritten_block_is_stale_for_its_old_owner() -> None:
    engine = started()
    engine.submit(plan(2, (1, 0, 2, 1), blocks=[(1, 0, 0)], admit={1: (8, 9)}))
    with pytest.raises(ShadowKVError, match="reads its own position 3 in block 0"):
        engine.submit(plan(3, (0, 6, 1, 1)))


def test_time_passes_when_a_result_is_awaited_and_steps_queue() -> None:
    clock = VirtualClock(10.0)
    engine = SimulatedEngine(CAPACITY, lambda p: 0.5 * p.lengths[0], lambda *_: 1, clock)
    first = engine.submit(plan(1, (0, 0, 4, 1), blocks=[(0, 0, 0), (0, 1, 1)], admit={0: (1,) * 4}))
    second = engine.submit(plan(2, (0, 4, 1, 1)))
    assert clock() == 10.0
    assert first.result().device_seconds == 2.0
    assert clock() == 12.0
    second.result()
    assert clock() == 12.5
