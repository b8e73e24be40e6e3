"""Counter-based uniform numbers: a pure function of (seed, index), computed on the device.

SplitMix64's finaliser (Steele, Lea and Flood, OOPSLA 2014) over a Weyl sequence, on int64 tensors
whose products wrap modulo 2^64. Keeps no state, so a draw depends on nothing else in the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

WEYL = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def signed64(value: int) -> int:
    """Any integer modulo 2^64, as the int64 with the same bits."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def uniform(seeds: Tensor, indices: Tensor) -> Tensor:
    """[n] float64 in [0, 1) with 53 random bits, for seeds [n] and indices [n] int64.

    mix(mix(seed + W) + (index + 1) * W) with W the golden ratio: the seed is mixed on its own
    first, so neighbouring seeds (those of n > 1 samples) do not share shifted streams.
    """
    state = _mix(seeds + signed64(WEYL)) + (indices + 1) * signed64(WEYL)
    return _shift_right(_mix(state), 11).double() * 2.0**-53


def _mix(z: Tensor) -> Tensor:
    for shift, multiplier in zip((30, 27), MULTIPLIERS, strict=True):
        z = (z ^ _shift_right(z, shift)) * signed64(multiplier)
    return z ^ _shift_right(z, 31)


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """A logical shift: int64's own repeats the sign bit."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
