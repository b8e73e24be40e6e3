"""Tables of rotary position embedding: frequencies of every scaling type, cosines and sines.

Pairs are (i, i + head_dim / 2), as in Hugging Face checkpoints. In numpy: the native kernels
take them as they are, engine.rope makes tensors of them. It must not know sequences: what
a position gets depends on that position and on constants of the server only. So `dynamic`, which
the reference recomputes from the longest sequence of a batch, is here computed once for the
longest sequence that the server admits (at least max_position_embeddings); the two agree when a
sequence has that length, and whenever the server admits no more than max_position_embeddings.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from engine.model_config import RopeConfig

Floats = NDArray[np.float32]


def rope_tables(rope: RopeConfig, head_dim: int, num_positions: int) -> tuple[Floats, Floats]:
    """cos and sin for positions 0 .. num_positions - 1: float32 [num_positions, head_dim / 2]."""
    frequencies = inverse_frequencies(rope, head_dim, num_positions)
    angles = np.arange(num_positions, dtype=np.float32)[:, None] * frequencies
    factor = np.float32(rope.attention_factor)
    return np.cos(angles) * factor, np.sin(angles) * factor


def inverse_frequencies(rope: RopeConfig, head_dim: int, num_positions: int) -> Floats:
    """Radians a position: float32 [head_dim / 2]. num_positions matters to `dynamic` only."""
    theta = rope.theta
    if rope.type == "dynamic":
        theta = _dynamic_theta(rope, head_dim, num_positions)
    # numpy's arithmetic with a Python float stays in the float32 of the array
    periods = theta ** (np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)
    frequencies: Floats = 1.0 / periods
    if rope.type == "linear":
        frequencies = frequencies / rope.factor
    elif rope.type == "llama3":
        frequencies = _llama3(rope, frequencies)
    elif rope.type == "yarn":
        frequencies = _yarn(rope, head_dim, periods)
    if rope.frequency_factors:
        frequencies = frequencies / np.array(rope.frequency_factors, dtype=np.float32)
    return frequencies


def _dynamic_theta(rope: RopeConfig, head_dim: int, num_positions: int) -> float:
    """NTK-aware base (bloc97 and emozilla) for sequences of num_positions."""
    original = rope.original_max_position_embeddings
    growth = rope.factor * max(num_positions, original) / original - (rope.factor - 1)
    return rope.theta * growth ** (head_dim / (head_dim - 2))


def _llama3(rope: RopeConfig, frequencies: Floats) -> Floats:
    """Llama 3.1: long waves are stretched by `factor`, short ones kept, a ramp between."""
    length = rope.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    ramp = (length / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    ramp = np.clip(ramp, 0, 1)
    return (1 - ramp) * frequencies / rope.factor + ramp * frequencies


def _yarn(rope: RopeConfig, head_dim: int, periods: Floats) -> Floats:
    """YaRN (arXiv 2309.00071): a ramp over dimensions from extrapolation to interpolation."""

    def dimension(rotations: float) -> float:
        turns = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low)
    ramp = np.clip(ramp, 0, 1)
    return ramp / (rope.factor * periods) + (1 - ramp) / periods
