"""Paged attention against dense attention in float64, on every tier."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from engine.kernels.cpu.library import available_tiers, load_library
from tests.engine.kernels_cpu.calls import attend


class Case:
    """Random keys, values and queries of one sequence, in shuffled blocks of a larger pool."""

    def __init__(self, length: int, kv_heads: int, group: int, head_dim: int, block_size: int = 16):
        rng = np.random.default_rng(length * 31 + head_dim)
        shape = (length, kv_heads, head_dim)
        self.keys = rng.normal(size=shape).astype(np.float32)
        self.values = rng.normal(size=shape).astype(np.float32)
        self.queries = rng.normal(size=(length, kv_heads * group, head_dim)).astype(np.float32)
        self.queries *= np.float32(head_dim**-0.5)
        num_blocks = -(-length // block_size)
        self.block_table = rng.permutation(num_blocks * 2)[:num_blocks].astype(np.int32)
        self.block_size = block_size

    def run(self, kernels: ctypes.CDLL, rows: slice, window: int = 0, *, half: bool = False):
        last = np.arange(1, len(self.keys) + 1, dtype=np.int32)
        first = np.maximum(0, last - window if window else 0).astype(np.int32)
        first = np.zeros_like(last) if not window else first
        return attend(
            kernels,
            self.keys,
            self.values,
            self.queries[rows].copy(),
            first[rows].copy(),
            last[rows].copy(),
            block_table=self.block_table,
            block_size=self.block_size,
            kv_half=half,
        )

    def dense(self, window: int = 0) -> np.ndarray:
        group = self.queries.shape[1] // self.keys.shape[1]
        keys = self.keys.astype(np.float64).repeat(group, axis=1)
        values = self.values.astype(np.float64).repeat(group, axis=1)
        scores = np.einsum("qhd,khd->hqk", self.queries.astype(np.float64), keys)
        position = np.arange(len(keys))
        hidden = position[None, :] > position[:, None]
        if window:
            hidden |= position[None, :] <= position[:, None] - window
        scores[:, hidden] = -np.inf
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        return np.einsum("hqk,khd->qhd", weights / weights.sum(axis=2, keepdims=True), values)


@pytest.mark.parametrize("window", [0, 1, 16, 37, 150])
@pytest.mark.parametrize(
    ("length", "kv_heads", "group", "head_dim", "block_size"),
    [(1, 1, 1, 32, 16), (17, 3, 3, 64, 16), (129, 2, 4, 96, 32), (300, 1, 7, 128, 16)],
)
def test_paged_attention_equals_dense(
    kernels: ctypes.CDLL,
    length: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    window: int,
) -> None:
    case = Case(length, kv_heads, group, head_dim, block_size)
    exact = case.dense(window)
    assert np.abs(case.run(kernels, slice(None), window) - exact).max() < 3e-6
    assert np.abs(case.run(kernels, slice(None), window, half=True) - exact).max() < 4e-3


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("window", [0, 40])
def test_row_is_the_same_alone_and_in_any_chunk(
    kernels: ctypes.CDLL, window: int, half: bool
) -> None:
    case = Case(280, 2, 3, 64)
    whole = case.run(kernels, slice(None), window, half=half)
    for start, stop in ((0, 1), (0, 7), (5, 21), (100, 101), (120, 140), (279, 280)):
        part = case.run(kernels, slice(start, stop), window, half=half)
        assert part.tobytes() == whole[start:stop].tobytes()


@pytest.mark.parametrize("half", [False, True])
def test_all_tiers_give_the_same_bits(half: bool) -> None:
    case = Case(200, 2, 3, 64)
    libraries = [load_library(tier) for tier in available_tiers()]
    results = {case.run(k, slice(None), half=half).tobytes() for k in libraries if k}
    assert len(results) <= 1


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_query_spoils_its_own_row_only(kernels: ctypes.CDLL, bad: float) -> None:
    case = Case(50, 1, 2, 32)
    clean = case.run(kernels, slice(None))
    case.queries[20, 0, 3] = bad
    out = case.run(kernels, slice(None))
    assert np.isnan(out[20, 0]).all()
    out[20, 0] = clean[20, 0]
    assert out.tobytes() == clean.tobytes()
