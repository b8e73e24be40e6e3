"""The products of weights and activations against float64, on every tier."""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest

from engine.kernels.cpu.library import KernelError, available_tiers, load_library
from tests.engine.kernels_cpu.calls import multiply, quantised_activations, restored, stored

QUANTISED = ("Q4_0", "Q4_1", "Q8_0")
DENSE = ("F32", "F16", "BF16")


def matrix(n: int, k: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, k)).astype(np.float32)


@pytest.mark.parametrize("kind", [*QUANTISED, *DENSE])
@pytest.mark.parametrize(
    ("rows", "n", "k"),
    [*((rows, 33, 96) for rows in range(1, 10)), (17, 16, 32), (64, 100, 64), (257, 31, 576)],
)
def test_product_equals_float64(kernels: ctypes.CDLL, kind: str, rows: int, n: int, k: int) -> None:
    weights, x, bias = stored(kind, matrix(n, k)), matrix(rows, k, 1), matrix(1, n, 2)[0]
    seen = quantised_activations(x) if kind in QUANTISED else x.astype(np.float64)
    exact = seen @ restored(kind, weights).T + bias
    size = np.abs(seen) @ np.abs(restored(kind, weights)).T
    error = np.abs(multiply(kernels, kind, weights, x, bias) - exact)
    # scales and minima of Q4_1 are rounded to 2^-15 of the row's largest
    relative = 3e-6 if kind != "Q4_1" else 5e-5
    assert (error <= relative * size + 1e-6).all()


def outlying(rows: int, k: int = 2080) -> np.ndarray:
    """Rows of which most have channels far larger than the others, some of them in common."""
    x = matrix(rows, k, 1)
    for row in range(0, rows, 3):
        x[row, [5, 700 + row]] = 90
        x[row + 1 :: 3, k - 1 - 40 * row] = -200
    return x


@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.parametrize("rows", [1, 3, 8, 13])
def test_a_block_with_an_outlier_keeps_its_other_values(
    kernels: ctypes.CDLL, kind: str, rows: int
) -> None:
    weights, x, bias = stored(kind, matrix(40, 2080)), outlying(rows), matrix(1, 40, 2)[0]
    seen, matrix64 = quantised_activations(x), restored(kind, weights)
    out = multiply(kernels, kind, weights, x, bias)
    size = np.abs(seen) @ np.abs(matrix64).T
    assert (np.abs(out - seen @ matrix64.T - bias) <= 5e-5 * size + 1e-6).all()
    # rounding costs no more than it does without the outliers
    plain = np.where(np.abs(x) > 20, 0, x).astype(np.float32)
    lost = (quantised_activations(plain) - plain) @ matrix64.T
    error = out - bias - x.astype(np.float64) @ matrix64.T
    assert np.sqrt(np.mean(error**2)) < 1.5 * np.sqrt(np.mean(lost**2))


@pytest.mark.parametrize("kind", QUANTISED)
def test_outliers_of_other_rows_change_nothing(kernels: ctypes.CDLL, kind: str) -> None:
    weights, x = stored(kind, matrix(70, 2080)), outlying(21)
    together = multiply(kernels, kind, weights, x)
    for row in range(21):
        assert multiply(kernels, kind, weights, x[[row]]).tobytes() == together[[row]].tobytes()
    broken = x.copy()
    broken[6, 5] = np.nan
    out = multiply(kernels, kind, weights, broken)
    assert not np.isfinite(out[6]).any()
    assert np.delete(out, 6, axis=0).tobytes() == np.delete(together, 6, axis=0).tobytes()


@pytest.mark.parametrize("kind", [*QUANTISED, *DENSE])
def test_row_is_the_same_alone_and_anywhere_in_a_batch(kernels: ctypes.CDLL, kind: str) -> None:
    weights, x = stored(kind, matrix(70, 160)), matrix(21, 160, 1)
    together = multiply(kernels, kind, weights, x)
    for start, length in itertools.product((0, 1, 6, 13), (1, 2, 3, 5, 8)):
        part = multiply(kernels, kind, weights, x[start : start + length].copy())
        assert part.tobytes() == together[start : start + length].tobytes()


@pytest.mark.parametrize("kind", [*QUANTISED, *DENSE])
def test_all_tiers_give_the_same_bits(kind: str) -> None:
    weights, x = stored(kind, matrix(48, 2080)), outlying(11)
    libraries = [load_library(tier) for tier in available_tiers()]
    results = {multiply(kernels, kind, weights, x).tobytes() for kernels in libraries if kernels}
    assert len(results) <= 1


@pytest.mark.parametrize("kind", [*QUANTISED, *DENSE])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_stay_in_their_row(kernels: ctypes.CDLL, kind: str, bad: float) -> None:
    weights, x = stored(kind, matrix(40, 64)), matrix(9, 64, 1)
    clean = multiply(kernels, kind, weights, x)
    x[3, 40] = bad
    out = multiply(kernels, kind, weights, x)
    assert not np.isfinite(out[3]).any()
    assert np.delete(out, 3, axis=0).tobytes() == np.delete(clean, 3, axis=0).tobytes()


@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.parametrize("scale", [0.0, 1e-41, 1e-30, 1e30])
def test_tiny_and_huge_activations_keep_their_size(
    kernels: ctypes.CDLL, kind: str, scale: float
) -> None:
    weights, x = stored(kind, matrix(32, 64)), matrix(2, 64, 1) * np.float32(scale)
    out = multiply(kernels, kind, weights, x)
    exact = x.astype(np.float64) @ restored(kind, weights).T
    assert np.isfinite(out).all()
    assert np.abs(out - exact).max() <= 0.05 * np.abs(exact).max() + 1e-33


@pytest.mark.parametrize("kind", QUANTISED)
def test_extreme_integers_do_not_overflow(kernels: ctypes.CDLL, kind: str) -> None:
    """The largest nibbles or bytes (-128 too, which ggml never writes) times +-127."""
    weights = stored(kind, matrix(32, 64))
    quants = {"Q4_0": 2, "Q4_1": 4, "Q8_0": 2}[kind]
    blocks = weights.reshape(32, 2, -1)
    blocks[:, :, quants:] = 0x80 if kind == "Q8_0" else 0xFF
    x = np.full((3, 64), 127, dtype=np.float32)
    x[1] = -127
    x[2, ::2] = -127
    exact = x.astype(np.float64) @ restored(kind, weights).T
    out = multiply(kernels, kind, weights, x)
    assert np.allclose(out, exact, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_scale_that_is_no_number_spoils_its_output_alone(
    kernels: ctypes.CDLL, kind: str, bad: float
) -> None:
    weights, x = stored(kind, matrix(40, 64)), matrix(5, 64, 1)
    clean = multiply(kernels, kind, weights, x)
    weights[7, :2] = np.float16([bad]).view(np.uint8)
    out = multiply(kernels, kind, weights, x)
    assert not np.isfinite(out[:, 7]).any()
    assert np.delete(out, 7, axis=1).tobytes() == np.delete(clean, 7, axis=1).tobytes()


def test_outputs_of_zeros_are_zeros(kernels: ctypes.CDLL) -> None:
    """Q4_1 has no unit then."""
    zeros = stored("Q4_1", np.zeros((33, 64), dtype=np.float32))
    assert not multiply(kernels, "Q4_1", zeros, matrix(3, 64)).any()


def test_no_rows_is_no_work(kernels: ctypes.CDLL) -> None:
    out = multiply(kernels, "Q8_0", stored("Q8_0", matrix(32, 64)), np.empty((0, 64), np.float32))
    assert out.shape == (0, 32)


def test_k_that_is_no_multiple_of_32_is_refused(kernels: ctypes.CDLL) -> None:
    with pytest.raises(KernelError, match="shape"):
        multiply(kernels, "F32", stored("F32", matrix(32, 40)), matrix(1, 40))


def test_exp_is_accurate_and_keeps_nan(kernels: ctypes.CDLL) -> None:
    x = np.linspace(-86, 87, 4096, dtype=np.float32)
    x[-1] = np.nan
    out = np.empty_like(x)
    kernels.paceline_exp(x.ctypes.data, out.ctypes.data, len(x))
    exact = np.exp(x[:-1].astype(np.float64))
    assert (np.abs(out[:-1] - exact) <= 2.5e-7 * exact).all()
    assert np.isnan(out[-1])


def test_half_conversion_is_ieee(kernels: ctypes.CDLL) -> None:
    halves = np.arange(1 << 16, dtype=np.uint16)  # all there are
    out = np.empty(len(halves), dtype=np.float32)
    kernels.paceline_widen_half(halves.ctypes.data, out.ctypes.data, len(halves))
    assert np.array_equal(out, halves.view(np.float16).astype(np.float32), equal_nan=True)
