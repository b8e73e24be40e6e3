"""Reference attention: equal to dense attention, and bit for bit its own sequence's business."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.attention import select_attention
from engine.batch import SlotTables
from engine.kv_cache import KVCache
from scheduler.types import StepPlan

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Shape:
    num_layers: int = 1
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 16


@dataclass(frozen=True)
class QKV:
    """One sequence: q [length, heads, dim], k and v [length, kv_heads, dim]."""

    q: Tensor
    k: Tensor
    v: Tensor


def random_sequence(shape: Shape, length: int, seed: int) -> QKV:
    generator = torch.Generator().manual_seed(seed)

    def normal(heads: int) -> Tensor:
        return torch.randn((length, heads, shape.head_dim), generator=generator)

    return QKV(normal(shape.num_heads) * 3, normal(shape.num_kv_heads), normal(shape.num_kv_heads))


def dense(sequence: QKV, window: int | None) -> Tensor:
    """The textbook, in float64."""
    length, heads, dim = sequence.q.shape
    group = heads // sequence.k.shape[1]
    k = sequence.k.double().repeat_interleave(group, 1)
    v = sequence.v.double().repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", sequence.q.double(), k) * dim**-0.5
    query, key = torch.arange(length)[:, None], torch.arange(length)
    hidden = key > query
    if window is not None:
        hidden |= key <= query - window
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


class Pool:
    """A paged cache whose blocks are dealt out in random order, with stale values in them."""

    def __init__(
        self,
        shape: Shape,
        *,
        window: int | None = None,
        block_size: int = 16,
        num_blocks: int = 160,
        num_slots: int = 12,
        seed: int = 0,
    ) -> None:
        self.cache = KVCache(
            shape, num_blocks=num_blocks, block_size=block_size, dtype=torch.float32, device=CPU
        )
        self.cache.layers[:, :, :num_blocks] = 1e18
        self.attention = select_attention(
            self.cache, num_heads=shape.num_heads, windows=(window,) * shape.num_layers
        )
        self.tables = SlotTables(
            num_slots=num_slots, max_model_len=2048, block_size=block_size, device=CPU
        )
        self.free = np.random.default_rng(seed).permutation(num_blocks).tolist()
        self.owned: dict[int, int] = {}

    def step(self, rows: list[tuple[int, QKV, int, int]]) -> list[Tensor]:
        """Compute rows (slot, sequence, start, end); the result of each."""
        block_slots, block_indices, block_ids = array("q"), array("q"), array("q")
        for slot, _, _, end in rows:
            for index in range(self.owned.get(slot, 0), -(-end // self.cache.block_size)):
                block_slots.append(slot)
                block_indices.append(index)
                block_ids.append(self.free.pop())
                self.owned[slot] = index + 1
        plan = StepPlan(
            step=0,
            seq_ids=tuple(str(slot) for slot, *_ in rows),
            slots=array("q", [slot for slot, *_ in rows]),
            starts=array("q", [start for _, _, start, _ in rows]),
            lengths=array("q", [end - start for _, _, start, end in rows]),
            samples=bytes(len(rows)),
            block_slots=block_slots,
            block_indices=block_indices,
            block_ids=block_ids,
        )
        self.tables.set_blocks(plan)
        batch = self.tables.batch(plan)
        q, k, v = (
            torch.cat([getattr(seq, name)[start:end] for _, seq, start, end in rows])
            for name in "qkv"
        )
        out = self.attention.plan(batch)(0, q, k, v)
        return list(out.split(batch.lengths.tolist()))

    def run(self, slot: int, sequence: QKV, cuts: list[int]) -> Tensor:
        """The whole sequence alone, in rows that end at `cuts`."""
        starts = [0, *cuts[:-1]]
        return torch.cat(
            [self.step([(slot, sequence, a, b)])[0] for a, b in zip(starts, cuts, strict=True)]
        )


SHAPES = {
    "grouped": Shape(),
    "multi-head": Shape(num_heads=3, num_kv_heads=3, head_dim=8),
    "multi-query": Shape(num_heads=5, num_kv_heads=1, head_dim=20),
    "wide group": Shape(num_heads=32, num_kv_heads=1, head_dim=12),
    "smollm2": Shape(num_heads=9, num_kv_heads=3, head_dim=64),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("length", [1, 5, 127, 128, 129, 300])
def test_paged_equals_dense(shape: Shape, length: int) -> None:
    sequence = random_sequence(shape, length, seed=length)
    result = Pool(shape).run(0, sequence, [length])
    torch.testing.assert_close(result.double(), dense(sequence, None), rtol=0, atol=1e-5)


@pytest.mark.parametrize("window", [1, 7, 16, 128, 130])
def test_window_counts_the_query_itself(window: int) -> None:
    """B113: prompts of W-1, W, W+1 and 3W tokens see exactly W keys, chunked or not."""
    shape = Shape()
    for length in (window - 1, window, window + 1, 3 * window):
        if length == 0:
            continue
        sequence = random_sequence(shape, length, seed=window)
        expected = dense(sequence, window)
        whole = Pool(shape, window=window).run(0, sequence, [length])
        torch.testing.assert_close(whole.double(), expected, rtol=0, atol=1e-5)
        cuts = [*range(5, length, 5), length]
        assert torch.equal(Pool(shape, window=window, seed=3).run(1, sequence, cuts), whole)


def test_layers_may_have_different_windows() -> None:
    shape = Shape(num_layers=2)
    pool = Pool(shape)
    attention = select_attention(pool.cache, num_heads=shape.num_heads, windows=(None, 9))
    sequence = random_sequence(shape, 40, seed=1)
    pool.run(0, sequence, [40])
    plan = StepPlan(
        step=0,
        seq_ids=("0",),
        slots=array("q", [0]),
        starts=array("q", [0]),
        lengths=array("q", [40]),
        samples=b"\0",
        block_slots=array("q"),
        block_indices=array("q"),
        block_ids=array("q"),
    )
    attend = attention.plan(pool.tables.batch(plan))
    for layer, window in enumerate((None, 9)):
        result = attend(layer, sequence.q, sequence.k, sequence.v)
        torch.testing.assert_close(result.double(), dense(sequence, window), rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("chunk", [1, 3, 16, 64, 200])
def test_chunking_changes_no_bit(shape: Shape, chunk: int) -> None:
    length = 290 if chunk > 1 else 150
    sequence = random_sequence(shape, length, seed=5)
    whole = Pool(shape).run(0, sequence, [length])
    chunked = Pool(shape, seed=1).run(3, sequence, [*range(chunk, length, chunk), length])
    assert torch.equal(chunked, whole)


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_batch_mates_change_no_bit(shape: Shape, window: int | None) -> None:
    """Decodes and chunks of many lengths in one step equal each sequence alone."""
    lengths = [1, 2, 17, 128, 129, 130, 257, 400, 64, 33]
    sequences = [random_sequence(shape, length, seed=i) for i, length in enumerate(lengths)]
    alone = [
        Pool(shape, window=window, seed=i).run(0, sequence, [len(sequence.q)])
        for i, sequence in enumerate(sequences)
    ]
    pool = Pool(shape, window=window)
    done = [0] * len(lengths)
    parts: list[list[Tensor]] = [[] for _ in lengths]
    rng = np.random.default_rng(0)
    while any(d < length for d, length in zip(done, lengths, strict=True)):
        rows = []
        for i in rng.permutation(len(lengths)).tolist():
            size = int(rng.choice([1, 1, 7, 40, 150]))
            end = min(lengths[i], done[i] + size)
            if end > done[i]:
                rows.append((i, sequences[i], done[i], end))
                done[i] = end
        for (i, *_), result in zip(rows, pool.step(rows), strict=True):
            parts[i].append(result)
    for i, expected in enumerate(alone):
        assert torch.equal(torch.cat(parts[i]), expected), f"sequence of {lengths[i]}"


@pytest.mark.parametrize("block_size", [1, 8, 48, 256])
def test_any_block_size_equals_dense(block_size: int) -> None:
    shape = Shape()
    sequence = random_sequence(shape, 150, seed=2)
    pool = Pool(shape, block_size=block_size, num_blocks=160 if block_size < 48 else 8)
    torch.testing.assert_close(
        pool.run(0, sequence, [70, 71, 150]).double(), dense(sequence, None), rtol=0, atol=1e-5
    )


def test_broken_row_leaves_nothing_to_the_next_owner_of_its_blocks() -> None:
    shape = Shape()
    pool = Pool(shape, num_blocks=4)
    broken = random_sequence(shape, 64, seed=0)
    broken.k[10] = torch.nan
    broken.v[20] = torch.inf
    broken.k[63] = -torch.inf
    broken.v[63] = torch.nan
    pool.run(0, broken, [64])
    healthy = random_sequence(shape, 37, seed=1)
    pool.free = [3, 2, 1, 0]
    result = pool.run(1, healthy, [36, 37])
    assert torch.equal(result, Pool(shape).run(0, healthy, [37]))
