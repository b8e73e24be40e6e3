"""Drawing one token a row from a distribution: temperature, top_k, top_p, min_p, inverse CDF.

Rows are independent and every sum runs in a fixed order, so a row's token is a function of its own
logits and parameters. Must not know slots, penalties or where the uniform numbers come from.

The candidates of a row, in the order of the filters, each on what the one before left:
top_k: the k best, equal logits by the lower id; top_p: the shortest head of the ranking whose share
reaches top_p; min_p: those at least min_p times as probable as the best. The best always stays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.logprobs import ranked_ids, row_sums

# Candidates ranked at first; most distributions reach their top_p within it.
MIN_RANKED = 128
WIDEN_FACTOR = 8


@dataclass(frozen=True, slots=True)
class Filters:
    """Per-row columns on the device. top_k = vocab, top_p = 1 and min_p = 0 filter nothing."""

    top_k: Tensor  # [rows] int64, 1 .. vocab
    top_p: Tensor  # [rows] float64
    min_p: Tensor  # [rows] float32


def weights_of(logits: Tensor, peaks: Tensor, temperatures: Tensor) -> Tensor:
    """exp((logit - peak) / temperature): the best weighs exactly 1, nothing can overflow.

    logits [rows, vocab] float32, peaks their maxima [rows], temperatures [rows] float32. As powers
    of two, since exp takes ten times as long where it underflows: behind a mask, nearly everywhere.
    """
    scale = math.log2(math.e) / temperatures
    return (logits - peaks[:, None]).mul_(scale[:, None]).exp2_()


def draw_from_all(weights: Tensor, min_p: Tensor, uniforms: Tensor) -> Tensor:
    """[rows] int64: inverse CDF over ids in order.

    weights [rows, vocab] float32, min_p [rows] float32, uniforms [rows] float64.
    """
    kept = torch.where(weights < min_p[:, None], 0, weights)
    return _inverse_cdf(kept.cumsum(1, dtype=torch.float64), uniforms)


def draw_from_best(
    logits: Tensor, weights: Tensor, filters: Filters, uniforms: Tensor, *, max_top_k: int
) -> Tensor:
    """[rows] int64: inverse CDF over the candidates, best first; max_top_k is top_k's maximum.

    On the CPU a few tokens are ranked, and more only for rows whose candidates reach further, which
    changes no result. On cuda, where to ask would be to wait, max_top_k are ranked at once.
    """
    vocab = logits.shape[1]
    if logits.device.type == "cuda":
        return _draw_ranked(logits, weights, filters, uniforms, max_top_k)[0]
    below_vocab = torch.where(filters.top_k < vocab, filters.top_k, 0)
    num_ranked = min(vocab, max(MIN_RANKED, int(below_vocab.max())))
    tokens = torch.empty(len(logits), dtype=torch.int64)
    rows = torch.arange(len(logits))
    while len(rows):
        of_rows = Filters(filters.top_k[rows], filters.top_p[rows], filters.min_p[rows])
        drawn, short = _draw_ranked(
            logits[rows], weights[rows], of_rows, uniforms[rows], num_ranked
        )
        tokens[rows] = drawn
        rows = rows[short] if num_ranked < vocab else rows[:0]
        num_ranked = min(vocab, num_ranked * WIDEN_FACTOR)
    return tokens


def _draw_ranked(
    logits: Tensor, weights: Tensor, filters: Filters, uniforms: Tensor, num_ranked: int
) -> tuple[Tensor, Tensor]:
    """Tokens [rows] int64 from the num_ranked best, and where those were too few [rows] bool."""
    vocab = logits.shape[1]
    ids = ranked_ids(logits, num_ranked)
    ranked = weights.gather(1, ids)
    cdf = ranked.cumsum(1, dtype=torch.float64)
    of_top_k = cdf.gather(1, filters.top_k.clamp(max=num_ranked)[:, None] - 1)[:, 0]
    wanted = filters.top_p * torch.where(filters.top_k < vocab, of_top_k, row_sums(weights))
    short = (filters.top_k > num_ranked) & (cdf[:, -1] < wanted)

    rank = torch.arange(num_ranked, device=logits.device)
    before = F.pad(cdf[:, :-1], (1, 0))
    kept = (rank < filters.top_k[:, None]) & (ranked >= filters.min_p[:, None])
    kept &= (before < wanted[:, None]) | (filters.top_p >= 1)[:, None]
    last = kept.sum(1, keepdim=True).clamp_(min=1) - 1
    # Beyond the last candidate the CDF stands still, so that nothing there is drawn.
    cdf = torch.where(rank <= last, cdf, cdf.gather(1, last))
    return ids.gather(1, _inverse_cdf(cdf, uniforms)[:, None])[:, 0], short


def _inverse_cdf(cdf: Tensor, uniforms: Tensor) -> Tensor:
    """The first column whose cumulative weight exceeds uniform * total: never one of weight 0."""
    totals = cdf[:, -1:].contiguous()
    # A product that rounds up to the total would find no column.
    targets = torch.minimum(uniforms[:, None] * totals, torch.nextafter(totals, -totals))
    columns = torch.searchsorted(cdf, targets, right=True)[:, 0]
    return columns.clamp_(max=cdf.shape[1] - 1)  # only a row of NaN gets there
