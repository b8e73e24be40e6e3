"""Log-probabilities of chosen tokens with the best alternatives, in bounded memory.

Works on rows of logits; must not know what the rows are for. Also owns the ranking rule that the
sampler shares: by logit, and equal logits by the lower id. What makes them of logits is torch; the
kernels of the CPU do the same on host arrays (engine.native_sampling).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.arrays import Array, concatenated
from scheduler.types import TokenLogprobs

if TYPE_CHECKING:
    from torch import Tensor

# Logits that exist at once while prompt log-probabilities are computed: 64 MiB of float32.
MAX_LOGITS = 1 << 24
SUM_WIDTH = 1024
ID_MASK = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Of some rows, on one device."""

    chosen: Array  # [rows] float32
    top: Array  # [rows, k] float32, best first
    top_ids: Array  # [rows, k] int64

    @classmethod
    def of(cls, logits: Tensor, token_ids: Tensor, *, num_top: int) -> Logprobs:
        """Natural logs of softmax(logits [rows, vocab] float32) at token_ids [rows] int64."""
        peak = logits.amax(1, keepdim=True)
        total = row_sums((logits - peak).exp_())[:, None]
        normaliser = peak + total.log().float()
        num_top = min(num_top, logits.shape[1])
        if num_top:
            top_ids = ranked_ids(logits, num_top)
        else:
            top_ids = token_ids.new_empty((len(token_ids), 0))
        return cls(
            chosen=(logits.gather(1, token_ids[:, None]) - normaliser)[:, 0],
            top=logits.gather(1, top_ids) - normaliser,
            top_ids=top_ids,
        )

    @classmethod
    def joined(cls, parts: list[Logprobs]) -> Logprobs:
        return cls(
            chosen=concatenated([part.chosen for part in parts]),
            top=concatenated([part.top for part in parts]),
            top_ids=concatenated([part.top_ids for part in parts]),
        )


def ranked_ids(logits: Tensor, num_top: int) -> Tensor:
    """[rows, num_top] int64 ids by descending logit (float32), equal ones by ascending id.

    One int64 key a token, unique in its row, so that no sort needs to be stable: the float's bits
    in an order that integers share, above the complement of the id.
    """
    import torch

    bits = (logits + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0, its equal
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
    ids = torch.arange(logits.shape[1], device=logits.device)
    keys = (ordered << 32) | (ID_MASK - ids)
    best = keys.topk(num_top, dim=1, sorted=True).values
    return ID_MASK - (best & ID_MASK)


def row_sums(values: Tensor) -> Tensor:
    """[rows] float64 sums of [rows, n] float32, the same bits however many rows there are.

    A plain sum of a single long row is split among threads; sums of SUM_WIDTH columns are not.
    """
    import torch

    whole = values.shape[1] // SUM_WIDTH * SUM_WIDTH
    rest = values[:, whole:].sum(1, dtype=torch.float64)
    if not whole:
        return rest
    parts = values[:, :whole].unflatten(1, (-1, SUM_WIDTH)).sum(2)
    return parts.sum(1, dtype=torch.float64) + rest


def as_token_logprobs(
    token_ids: list[int], logprobs: Logprobs, num_top: list[int]
) -> list[TokenLogprobs]:
    """Host copies as the border type; row i keeps its first num_top[i] alternatives."""
    rows = zip(
        token_ids,
        logprobs.chosen.tolist(),
        logprobs.top_ids.tolist(),
        logprobs.top.tolist(),
        num_top,
        strict=True,
    )
    return [
        TokenLogprobs(token, chosen, tuple(zip(ids[:count], values[:count], strict=True)))
        for token, chosen, ids, values, count in rows
    ]
