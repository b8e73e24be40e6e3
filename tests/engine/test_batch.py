"""Slot tables: plans become the right flat tensors."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from engine.batch import Outputs, SlotTables
from scheduler.types import StepPlan

CPU = torch.device("cpu")
BLOCK = 4


def make_tables(num_slots: int = 5, max_model_len: int = 40) -> SlotTables:
    return SlotTables(
        num_slots=num_slots, max_model_len=max_model_len, block_size=BLOCK, device=CPU
    )


def plan(
    rows: Sequence[tuple[int, int, int]], blocks: Sequence[tuple[int, int, int]] = ()
) -> StepPlan:
    """rows (slot, start, length), blocks (slot, index, id)."""
    return StepPlan(
        step=0,
        seq_ids=tuple(str(slot) for slot, *_ in rows),
        slots=array("q", [row[0] for row in rows]),
        starts=array("q", [row[1] for row in rows]),
        lengths=array("q", [row[2] for row in rows]),
        samples=b"\1" * len(rows),
        block_slots=array("q", [block[0] for block in blocks]),
        block_indices=array("q", [block[1] for block in blocks]),
        block_ids=array("q", [block[2] for block in blocks]),
    )


def test_rows_become_flat_tokens_positions_and_kv_slots() -> None:
    tables = make_tables()
    tables.admit(3, [10, 11, 12, 13, 14, 15])
    tables.admit(0, [20, 21])
    step = plan([(3, 2, 4), (0, 1, 1)], [(3, 0, 7), (3, 1, 2), (0, 0, 9)])
    tables.set_blocks(step)
    batch = tables.batch(step)
    assert batch.token_ids.tolist() == [12, 13, 14, 15, 21]
    assert batch.positions.tolist() == [2, 3, 4, 5, 1]
    assert batch.kv_slots.tolist() == [7 * 4 + 2, 7 * 4 + 3, 2 * 4, 2 * 4 + 1, 9 * 4 + 1]
    assert batch.offsets.tolist() == [0, 4, 5]
    assert batch.ends.tolist() == [6, 2]
    assert batch.block_tables.tolist() == [[7, 2], [9, -1]]


def test_outputs_are_the_last_token_of_a_row_or_all_of_it() -> None:
    tables = make_tables()
    step = plan([(3, 0, 4), (0, 0, 1), (1, 0, 3)], [(3, 0, 7), (0, 0, 9), (1, 0, 2)])
    tables.set_blocks(step)
    batch = tables.batch(step)
    outputs = Outputs.of(batch, np.array([False, False, False]))
    assert (outputs.tokens.tolist(), outputs.offsets.tolist()) == ([3, 4, 7], [0, 1, 2, 3])
    outputs = Outputs.of(batch, np.array([False, True, True]))
    assert (outputs.tokens.tolist(), outputs.offsets.tolist()) == ([3, 4, 5, 6, 7], [0, 1, 2, 5])
    outputs = Outputs.of(batch, np.array([True, False, False]))
    assert (outputs.tokens.tolist(), outputs.offsets.tolist()) == ([0, 1, 2, 3, 4, 7], [0, 4, 5, 6])


def test_sampled_token_is_read_by_the_next_batch() -> None:
    tables = make_tables()
    tables.admit(1, [5])
    tables.write_tokens(np.array([1]), np.array([1]), torch.tensor([77]))
    step = plan([(1, 1, 1)], [(1, 0, 0)])
    tables.set_blocks(step)
    assert tables.batch(step).token_ids.tolist() == [77]


def test_token_after_the_last_position_has_a_place() -> None:
    tables = make_tables(max_model_len=3)
    tables.write_tokens(np.array([0]), np.array([3]), torch.tensor([1]))
    assert tables.token_table[1:].count_nonzero() == 0


def test_admission_forgets_the_blocks_of_the_one_before() -> None:
    tables = make_tables()
    tables.admit(1, [5, 6])
    tables.set_blocks(plan([], [(1, 0, 3)]))
    tables.admit(1, [7, 8])
    with pytest.raises(AssertionError, match="beyond its block table"):
        tables.batch(plan([(1, 0, 1)]))


def test_any_plan_equals_the_loop_over_its_tokens() -> None:
    draw = random.Random(0)
    for _ in range(50):
        tables, num_slots = make_tables(), 5
        texts = [[draw.randrange(99) for _ in range(draw.randint(1, 40))] for _ in range(num_slots)]
        ids = draw.sample(range(200), 50)
        blocks = [(slot, index, ids[slot * 10 + index]) for slot in range(5) for index in range(10)]
        rows = []
        for slot in draw.sample(range(num_slots), draw.randint(1, num_slots)):
            start = draw.randrange(len(texts[slot]))
            rows.append((slot, start, draw.randint(1, len(texts[slot]) - start)))
        for slot, text in enumerate(texts):
            tables.admit(slot, text)
        step = plan(rows, blocks)
        tables.set_blocks(step)
        batch = tables.batch(step)
        tokens = [(slot, p) for slot, start, length in rows for p in range(start, start + length)]
        assert batch.token_ids.tolist() == [texts[slot][p] for slot, p in tokens]
        assert batch.positions.tolist() == [p for _, p in tokens]
        assert batch.kv_slots.tolist() == [
            ids[slot * 10 + p // BLOCK] * BLOCK + p % BLOCK for slot, p in tokens
        ]
