"""How far next-token distributions are from a reference: KL, agreement, perplexity.

Owns the arithmetic only, in float64; it must not know who computed the logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]


def log_softmax(logits: NDArray[np.floating]) -> Floats:
    """[positions, vocab] logits -> natural log-probabilities."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Means over positions: KL(reference || ours) in nats, share of equal favourites."""

    positions: int
    kl: float
    kl_p99: float
    top1: float
    perplexity: float
    reference_perplexity: float


def compare(reference: Floats, ours: Floats, targets: NDArray[np.int64]) -> Accuracy:
    """Log-probabilities [positions, vocab] of both, and the token that really followed."""
    kl = np.array([_kl(p, q) for p, q in zip(reference, ours, strict=True)])
    rows = np.arange(len(targets))
    return Accuracy(
        positions=len(targets),
        kl=float(kl.mean()),
        kl_p99=float(np.quantile(kl, 0.99)),
        top1=float((reference.argmax(axis=1) == ours.argmax(axis=1)).mean()),
        perplexity=float(np.exp(-ours[rows, targets].mean())),
        reference_perplexity=float(np.exp(-reference[rows, targets].mean())),
    )


def _kl(reference: Floats, ours: Floats) -> float:
    wide = reference.astype(np.float64)
    return float((np.exp(wide) * (wide - ours)).sum())


def coarse_kl(reference: Floats, ids: NDArray[np.int64], ours: Floats) -> float:
    """KL of one position [vocab] as seen through `ids` and one bucket for all other tokens.

    A lower bound of the whole KL (data processing inequality), and the same for everybody whose
    log-probabilities of `ids` are given.
    """
    p, q = np.exp(reference[ids].astype(np.float64)), np.exp(ours.astype(np.float64))
    p_rest, q_rest = max(1 - p.sum(), 1e-12), max(1 - q.sum(), 1e-12)
    return float((p * (reference[ids] - ours)).sum() + p_rest * np.log(p_rest / q_rest))
