"""Paged attention against dense attention in float64, on every tier."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from engine.kernels.cpu.library import KV_KINDS, available_tiers, load_library
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

    def run(self, kernels: ctypes.CDLL, rows: slice, window: int = 0, *, kv: str = "float32"):
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
            kv_type=kv,
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


def rounded(x: np.ndarray) -> np.ndarray:
    """What int8 KV makes of [positions, heads, head_dim]: a scale for each position of a head."""
    largest = np.abs(x).max(axis=2, keepdims=True)
    whole = np.rint(x * (np.float32(127) / largest))
    return (whole * (largest / np.float32(127))).astype(np.float32)


def spread(x: np.ndarray) -> np.ndarray:
    """The Hadamard transform of [..., head_dim] by blocks, not normalised."""
    block = x.shape[-1] & -x.shape[-1]
    x = x.reshape(*x.shape[:-1], -1, block)
    step = 1
    while step < block:
        pairs = x.reshape(*x.shape[:-1], -1, 2, step)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = np.stack((a + b, a - b), axis=-2).reshape(x.shape)
        step *= 2
    return x.reshape(*x.shape[:-2], -1)


def spread_and_rounded(keys: np.ndarray) -> np.ndarray:
    """What int8 KV makes of keys."""
    return spread(rounded(spread(keys))) / np.float32(keys.shape[-1] & -keys.shape[-1])


@pytest.mark.parametrize("window", [0, 1, 16, 37, 300])
@pytest.mark.parametrize(
    ("length", "kv_heads", "group", "head_dim", "block_size"),
    [
        *((1, 1, 1, 32, 16), (17, 3, 3, 64, 16), (129, 2, 4, 96, 32), (300, 1, 7, 128, 16)),
        *((40, 2, 8, 80, 16), (140, 1, 5, 256, 48), (600, 2, 3, 64, 16)),
    ],
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
    for kv, allowed in (("float32", 3e-6), ("int16", 1e-3)):
        assert np.abs(case.run(kernels, slice(None), window, kv=kv) - exact).max() < allowed
    # against what the 8 bits stand for, there is no error but that of queries and weights
    case.keys, case.values = spread_and_rounded(case.keys), rounded(case.values)
    exact = case.dense(window)
    assert np.abs(case.run(kernels, slice(None), window, kv="int8") - exact).max() < 1e-3


@pytest.mark.parametrize("kv", ["int16", "int8"])
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256, 1024])
def test_the_largest_integers_do_not_overflow(kernels: ctypes.CDLL, head_dim: int, kv: str) -> None:
    """All products have one sign and are as large as they get, with scores and with values."""
    case = Case(300, 1, 2, head_dim)
    case.keys[:] = case.values[:] = case.queries[:] = 1
    case.queries /= np.float32(head_dim)
    assert case.run(kernels, slice(None), kv=kv) == pytest.approx(1, abs=1e-3)
    case.keys[::2] = -1  # scores of 1 and -1
    case.values[::2] = 0
    exact = case.dense()
    assert np.abs(case.run(kernels, slice(None), kv=kv) - exact).max() < 1e-3


def test_a_dim_far_above_the_others_leaves_them_their_bits(kernels: ctypes.CDLL) -> None:
    """Biases of some models make a dim of all keys hundreds of times the others."""
    case = Case(200, 1, 3, 64)
    case.keys[:, :, 5] += 200
    case.queries[:, :, 5] = 0.001
    error = np.abs(case.run(kernels, slice(None), kv="int16") - case.dense())
    assert error.max() < 5e-3


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
def test_in_8_bits_a_large_dim_of_keys_does_not_drown_the_others(
    kernels: ctypes.CDLL, head_dim: int
) -> None:
    case = Case(200, 1, 3, head_dim)
    case.values[:] = np.rint(case.values)
    case.keys[:, :, 7] += 40
    exact = case.dense()
    error = np.abs(case.run(kernels, slice(None), kv="int8") - exact).mean()
    case.keys = rounded(case.keys)
    assert error < 0.5 * np.abs(case.dense() - exact).mean()


@pytest.mark.parametrize("kv", KV_KINDS)
@pytest.mark.parametrize("window", [0, 40])
def test_row_is_the_same_alone_and_in_any_chunk(kernels: ctypes.CDLL, window: int, kv: str) -> None:
    case = Case(280, 2, 3, 64)
    whole = case.run(kernels, slice(None), window, kv=kv)
    for start, stop in ((0, 1), (0, 7), (5, 21), (100, 101), (120, 140), (279, 280)):
        part = case.run(kernels, slice(start, stop), window, kv=kv)
        assert part.tobytes() == whole[start:stop].tobytes()


@pytest.mark.parametrize("kv", KV_KINDS)
def test_all_tiers_give_the_same_bits(kv: str) -> None:
    case = Case(200, 2, 3, 64)
    libraries = [load_library(tier) for tier in available_tiers()]
    results = {case.run(k, slice(None), kv=kv).tobytes() for k in libraries if k}
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


@pytest.mark.parametrize("kv", KV_KINDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("what", ["keys", "values"])
def test_bad_position_spoils_only_those_that_see_it(
    kernels: ctypes.CDLL, what: str, bad: float, kv: str
) -> None:
    case = Case(50, 2, 2, 32)
    clean = case.run(kernels, slice(None), kv=kv)
    getattr(case, what)[20, 0, 3] = bad
    for position in (19, 20, 49):
        out = case.run(kernels, slice(position, position + 1), kv=kv)[0]
        if position == 19:
            assert out.tobytes() == clean[position].tobytes()
            continue
        assert not np.isfinite(out[:2]).all()
        assert out[2:].tobytes() == clean[position, 2:].tobytes()


@pytest.mark.parametrize("kv", ["int16", "int8"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("what", ["keys", "values"])
def test_bad_position_leaves_earlier_rows_of_its_own_chunk(
    kernels: ctypes.CDLL, what: str, bad: float, kv: str
) -> None:
    case = Case(50, 2, 2, 32)
    clean = case.run(kernels, slice(None), kv=kv)
    getattr(case, what)[20, 0, 3] = bad
    out = case.run(kernels, slice(None), kv=kv)
    assert out[:20].tobytes() == clean[:20].tobytes()
    assert np.isnan(out[20:, :2]).all()


def test_zeros_and_tiny_values_are_kept_in_8_bits(kernels: ctypes.CDLL) -> None:
    case = Case(40, 1, 1, 32)
    case.keys[7], case.values[7:9] = 0, 0
    case.values[9], case.values[10] = 1e-37, 1e-20  # the first is below what is told from zero
    case.keys, case.values = case.keys * np.float32(1e3), case.values
    out = case.run(kernels, slice(None), kv="int8")
    assert np.isfinite(out).all()
    only = Case(1, 1, 1, 32)
    only.values[:] = 1e-20
    assert only.run(kernels, slice(None), kv="int8") == pytest.approx(1e-20, rel=1e-6)
