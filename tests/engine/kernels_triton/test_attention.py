"""Triton attention in the interpreter: dense attention, bits no batch mate changes."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.attention.triton import TritonAttention
from engine.batch import Batch
from engine.kv_cache import KVCache
from tests.engine.test_attention import QKV, Shape, dense, random_sequence

CPU = torch.device("cpu")
CHUNK = 128
FULL = os.environ.get("KERNEL_TESTS") == "all"  # `make test-kernels`


@dataclass(frozen=True)
class Row:
    sequence: QKV
    start: int
    end: int


class Cache:
    """Sequences in a paged cache, in blocks dealt out at random; the rest is stale."""

    def __init__(
        self,
        shape: Shape,
        *,
        window: int | None = None,
        block_size: int = 16,
        deterministic: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.cache = KVCache(shape, num_blocks=160, block_size=block_size, dtype=dtype, device=CPU)
        self.cache.layers[:, :, :160] = 1e18
        self.window = window
        self.attention = TritonAttention(
            self.cache,
            num_heads=shape.num_heads,
            windows=(window,),
            deterministic=deterministic,
            chunk=CHUNK,
        )

    def run(self, rows: list[Row], *, seed: int = 0) -> list[Tensor]:
        """One step; what each sequence has before its row is in the cache already."""
        block_size = self.cache.block_size
        free = np.random.default_rng(seed).permutation(160)
        counts = [-(-row.end // block_size) for row in rows]
        tables = np.full((len(rows), max(counts)), -1, dtype=np.int32)
        for index, count in enumerate(counts):
            tables[index, :count], free = free[:count], free[count:]
        slots = [
            torch.tensor(
                [tables[i, p // block_size] * block_size + p % block_size for p in range(row.end)],
                dtype=torch.int64,
            )
            for i, row in enumerate(rows)
        ]
        for row, of_row in zip(rows, slots, strict=True):
            if row.start:
                keys, values = row.sequence.k[: row.start], row.sequence.v[: row.start]
                self.cache.write(0, of_row[: row.start], keys, values)
        lengths = np.array([row.end - row.start for row in rows])
        starts = np.array([row.start for row in rows])
        batch = Batch(
            starts=starts,
            lengths=lengths,
            offsets=np.concatenate(([0], np.cumsum(lengths))),
            block_tables=tables,
            token_ids=torch.zeros(int(lengths.sum()), dtype=torch.int64),
            positions=torch.cat([torch.arange(row.start, row.end) for row in rows]),
            kv_slots=torch.cat([s[row.start :] for row, s in zip(rows, slots, strict=True)]),
        )
        q, k, v = (
            torch.cat([getattr(row.sequence, name)[row.start : row.end] for row in rows])
            for name in "qkv"
        )
        out = self.attention.plan(batch)(0, q, k, v)
        return list(out.split(lengths.tolist()))


def assert_equal_to_dense(shape: Shape, rows: list[tuple[int, int]], **options: object) -> None:
    cache = Cache(shape, **options)
    step = [Row(random_sequence(shape, end, i), start, end) for i, (start, end) in enumerate(rows)]
    for row, result in zip(step, cache.run(step), strict=True):
        expected = dense(row.sequence, cache.window)[row.start : row.end]
        torch.testing.assert_close(result.double(), expected, rtol=2e-5, atol=2e-5)


def test_mixed_rows_equal_dense_attention() -> None:
    """Decodes at the start, at block and chunk borders, a short row, a long one, a resumed one."""
    shape = Shape(num_heads=6, num_kv_heads=2, head_dim=16)
    rows = [(0, 1), (15, 16), (16, 17), (127, 128), (128, 129), (299, 300), (60, 63), (100, 240)]
    assert_equal_to_dense(shape, rows)


@pytest.mark.parametrize("window", [1, 7, 64, 100, 200])
def test_sliding_window_equals_dense_attention(window: int) -> None:
    shape = Shape(num_heads=2, num_kv_heads=1, head_dim=16)
    assert_equal_to_dense(shape, [(0, 1), (299, 300), (190, 194), (90, 180)], window=window)


@pytest.mark.parametrize("seed", range(60 if FULL else 3))
def test_random_steps_equal_dense_attention(seed: int) -> None:
    """Any rows, heads, window and block size."""
    random = np.random.default_rng(seed)
    kv_heads, group = int(random.integers(1, 4)), int(random.integers(1, 9))
    head_dim = int(random.choice([16, 24, 64, 80, 96, 128, 256] if FULL else [16, 24, 64]))
    rows = []
    for _ in range(int(random.integers(1, 6))):
        end = int(random.choice([1, 16, 17, 128, 129, random.integers(1, 300)]))
        length = int(random.choice([1, 2, end, random.integers(1, end + 1)]))
        rows.append((max(0, end - length), end))
    assert_equal_to_dense(
        Shape(num_heads=kv_heads * group, num_kv_heads=kv_heads, head_dim=head_dim),
        rows,
        window=random.choice([None, None, 5, 64, 130]),
        block_size=int(random.choice([8, 16, 32])),
        deterministic=bool(random.integers(2)),
    )


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_dims(head_dim: int) -> None:
    shape = Shape(num_heads=2, num_kv_heads=1, head_dim=head_dim)
    assert_equal_to_dense(shape, [(140, 141), (3, 40)])


def test_wide_heads_have_smaller_tiles_in_deterministic_mode() -> None:
    """And the same bits still, whether a sequence is prefilled or decoded."""
    shape = Shape(num_heads=2, num_kv_heads=1, head_dim=256)
    assert_equal_to_dense(shape, [(140, 141), (3, 70)], deterministic=True, window=90)
    sequence = random_sequence(shape, 140, 0)
    whole = Cache(shape, deterministic=True).run([Row(sequence, 0, 140)])[0]
    decode = Cache(shape, deterministic=True).run([Row(sequence, 139, 140)])[0]
    assert torch.equal(whole[139:], decode)


@pytest.mark.parametrize("group", range(1, 9))
def test_groups_of_query_heads(group: int) -> None:
    shape = Shape(num_heads=group, num_kv_heads=1, head_dim=16)
    assert_equal_to_dense(shape, [(140, 141), (3, 40)])


@pytest.mark.parametrize("block_size", [1, 8, 32, 48])
def test_block_sizes(block_size: int) -> None:
    shape = Shape(num_heads=2, num_kv_heads=2, head_dim=16)
    rows = [(63, 64), (40, 70)] if block_size > 1 else [(30, 31), (0, 40)]
    assert_equal_to_dense(shape, rows, block_size=block_size)


def test_a_decode_has_the_same_bits_alone_and_in_any_batch() -> None:
    shape = Shape(num_heads=4, num_kv_heads=2, head_dim=16)
    row = Row(random_sequence(shape, 300, 0), 299, 300)
    mates = [Row(random_sequence(shape, n, n), n - 1, n) for n in (1, 17, 200, 333)]
    alone = Cache(shape).run([row])[0]
    together = Cache(shape).run([*mates[:2], row, *mates[2:]], seed=1)[2]
    assert torch.equal(alone, together)


@pytest.mark.parametrize("window", [None, 90])
def test_deterministic_bits_do_not_depend_on_how_a_sequence_is_cut(window: int | None) -> None:
    """One prefill, pieces of it, and decodes one by one: equal to the last bit."""
    shape = Shape(num_heads=2, num_kv_heads=1, head_dim=16)
    sequence = random_sequence(shape, 200, 0)
    options = {"window": window, "deterministic": True}
    whole = Cache(shape, **options).run([Row(sequence, 0, 200)])[0]
    resumed = Cache(shape, **options).run([Row(sequence, 150, 200)])[0]
    short = Cache(shape, **options).run([Row(sequence, 197, 200)])[0]
    decode = Cache(shape, **options).run([Row(sequence, 199, 200)])[0]
    assert torch.equal(whole[150:], resumed)
    assert torch.equal(whole[197:], short)
    assert torch.equal(whole[199:], decode)


def test_stale_values_behind_the_end_of_a_block_are_not_seen() -> None:
    """A broken row may have left infinities in a block that now belongs to another sequence."""
    shape = Shape(num_heads=2, num_kv_heads=1, head_dim=16)
    cache = Cache(shape)
    cache.cache.layers[:] = torch.nan
    row = Row(random_sequence(shape, 21, 0), 20, 21)
    result = cache.run([row])[0]
    torch.testing.assert_close(result, dense(row.sequence, None)[20:].float())


def test_a_step_without_short_rows_or_without_long_ones() -> None:
    shape = Shape(num_heads=2, num_kv_heads=1, head_dim=16)
    assert_equal_to_dense(shape, [(0, 30)])
    assert_equal_to_dense(shape, [(29, 30)])


@pytest.mark.parametrize("head_dim", [16, 256])
def test_an_fp8_cache_is_read_with_the_scales_of_its_heads(head_dim: int) -> None:
    """Equal to the same numbers in a float32 cache, decode and prefill."""
    shape = Shape(num_heads=4, num_kv_heads=2, head_dim=head_dim)
    scales = torch.tensor([[[0.5, 2.0], [0.25, 0.125]]])
    narrow = KVCache(
        shape,
        num_blocks=8,
        block_size=16,
        dtype=torch.float8_e4m3fn,
        device=CPU,
        scales=scales,
    )
    exact = KVCache(shape, num_blocks=8, block_size=16, dtype=torch.float32, device=CPU)
    values = torch.randn(narrow.layers.shape, generator=torch.Generator().manual_seed(0))
    narrow.layers.copy_(values)
    exact.layers.copy_(narrow.layers)
    exact.layers *= scales[:, :, None, None, :, None]
    batch = Batch(
        starts=np.array([90, 0]),
        lengths=np.array([1, 40]),
        offsets=np.array([0, 1, 41]),
        block_tables=np.array([[5, 2, 0, 7, 1, 3], [6, 4, 2, -1, -1, -1]], dtype=np.int32),
        token_ids=torch.zeros(41, dtype=torch.int64),
        positions=torch.zeros(41, dtype=torch.int64),
        kv_slots=torch.zeros(41, dtype=torch.int64),
    )
    q = torch.randn((41, 4, head_dim), generator=torch.Generator().manual_seed(1))
    results = []
    for cache in (narrow, exact):
        attention = TritonAttention(cache, num_heads=4, windows=(None,), chunk=CHUNK)
        out = torch.empty_like(q)
        attention.run(attention.columns(batch, None), 0, q, out)
        results.append(out)
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)
