"""The single kernels of the C interface as functions of numpy arrays."""

from __future__ import annotations

import ctypes
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from engine.kernels.cpu.library import KINDS, KV_KINDS, check

Floats = NDArray[np.float32]
BLOCK = 32


def stored(kind: str, weights: Floats) -> NDArray[np.uint8]:
    """The matrix as a file holds it: [outputs, bytes of a row]."""
    if kind == "F32":
        return weights.view(np.uint8)
    if kind == "F16":
        return weights.astype(np.float16).view(np.uint8)
    if kind == "BF16":
        return (weights.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return gguf.quantize(weights, gguf.GGMLQuantizationType[kind])


def restored(kind: str, rows: NDArray[np.uint8]) -> NDArray[np.float64]:
    """The values that stored bytes stand for."""
    return gguf.dequantize(rows, gguf.GGMLQuantizationType[kind]).astype(np.float64)


def multiply(
    kernels: ctypes.CDLL, kind: str, rows: Any, x: Floats, bias: Floats | None = None
) -> Floats:
    """x [rows, k] times a stored matrix [n, bytes of a row], plus bias [n]."""
    out = np.full((len(x), len(rows)), np.nan, dtype=np.float32)
    check(
        kernels.paceline_multiply(
            KINDS[kind], len(rows), x.shape[1], rows.ctypes.data, rows.shape[1],
            None if bias is None else bias.ctypes.data, len(x), x.ctypes.data, out.ctypes.data,
        )
    )  # fmt: skip
    return out


def quantised_activations(x: Floats) -> NDArray[np.float64]:
    """What the kernels make of activations: 8 bits, a scale for each 32 values of a row.

    A block with a value beyond 16 times the row's root mean square has a second term.
    """
    first = _rounded(x)
    second = _rounded((x - first).astype(np.float32))
    largest = np.abs(x.reshape(len(x), -1, BLOCK)).max(axis=2)
    refined = largest > 16 * np.sqrt(np.mean(x.astype(np.float64) ** 2, axis=1, keepdims=True))
    return first + second * np.repeat(refined, BLOCK, axis=1)


def _rounded(x: Floats) -> NDArray[np.float64]:
    blocks = x.reshape(len(x), -1, BLOCK)
    largest = np.abs(blocks).max(axis=2, keepdims=True)
    inverse = np.divide(
        np.float32(127), largest, out=np.zeros_like(largest), where=largest > np.float32(1e-35)
    )
    whole = np.rint(blocks * inverse).astype(np.float64)
    return (whole * (largest / np.float32(127))).reshape(x.shape)


def attend(
    kernels: ctypes.CDLL,
    keys: Floats,  # [positions, kv_heads, head_dim]
    values: Floats,
    queries: Floats,  # [queries, heads, head_dim], scaled
    first: NDArray[np.int32],
    last: NDArray[np.int32],
    *,
    block_table: NDArray[np.int32],
    block_size: int = 16,
    kv_type: str = "float32",
) -> Floats:
    """Attention of queries over positions first <= p < last each, through a paged pool."""
    out = np.full_like(queries, np.nan)
    check(
        kernels.paceline_attend(
            KV_KINDS[kv_type], block_size, int(block_table.max()) + 1, keys.shape[1],
            queries.shape[1] // keys.shape[1], keys.shape[2], len(keys), keys.ctypes.data,
            values.ctypes.data, block_table.ctypes.data, len(queries), queries.ctypes.data,
            first.ctypes.data, last.ctypes.data, out.ctypes.data,
        )
    )  # fmt: skip
    return out
