"""One draw a row without a sort: temperature, top_k, top_p, min_p, inverse CDF, in one kernel.

The same choice as engine.draw, its twin: candidates are ranked by logit, equal logits by the lower
id, and a row with top_k or top_p draws along that ranking, any other along the ids. Where the twin
sorts, this kernel bisects: float bits in integer order are a key, and sums over all keys above
a threshold answer every question about the ranking. Weights are summed in float64 in a fixed
order, so a row's token is a function of its own logits and parameters; it can differ from the
twin's only where a draw hits a border between two tokens to within the rounding of exp.

    key  high |-- candidates --|t|t|t|........ low      t: equal logits at the border, by id
                               ^ threshold, and how many of its ties are candidates
"""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from engine.arrays import Ints, to_device

BLOCK = 4096
# Columns of the parameters, 64 bits each.
ROW, TEMPERATURE, TOP_K, TOP_P, MIN_P, SEED, INDEX, RANKED = range(8)


@triton.jit
def _mix(z):
    """SplitMix64's finaliser; see engine.random."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _uniform(seed, index):
    """engine.random.uniform of uint64 values: float64 in [0, 1) with 53 bits."""
    weyl = tl.full([1], 0x9E3779B97F4A7C15, tl.uint64)
    state = _mix(seed + weyl) + (index + 1) * weyl
    return tl.sum((_mix(state) >> 11).to(tl.float64) * 1.1102230246251565e-16, 0)


@triton.jit
def _keys(logits):
    """int32 in the order of float32 logits."""
    bits = (logits + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _weight_of(key, peak, scale):
    """The weight of a token with this key, as every sum has it."""
    bits = key.to(tl.int32)
    logit = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return tl.exp2((logit - peak) * scale).to(tl.float64)


@triton.jit
def _load(logits_ptr, start, vocab, BLOCK: tl.constexpr):
    """A block of logits and where it is real; the rest is below everything."""
    column = start + tl.arange(0, BLOCK)
    mask = column < vocab
    return tl.load(logits_ptr + column, mask=mask, other=float("-inf")), mask


@triton.jit
def _measure(logits_ptr, vocab, peak, scale, threshold, BLOCK: tl.constexpr):
    """How many tokens have a key of at least `threshold`, and the sum of their weights."""
    count = tl.zeros([BLOCK], tl.int32)
    weight = tl.zeros([BLOCK], tl.float64)
    threshold = threshold.to(tl.int32)
    for start in range(0, vocab, BLOCK):
        logits, mask = _load(logits_ptr, start, vocab, BLOCK)
        above = mask & (_keys(logits) >= threshold)
        weights = tl.exp2((logits - peak) * scale).to(tl.float64)
        count += above.to(tl.int32)
        weight += tl.where(above, weights, 0.0)
    return tl.sum(count, 0), tl.sum(weight, 0)


@triton.jit
def _border(logits_ptr, vocab, peak, scale, lowest, highest, wanted, COUNT, BLOCK: tl.constexpr):
    """The highest key at or above which there is at least `wanted` (tokens, or weight).

    Between `lowest`, which is known to suffice, and `highest`; both int64, so nothing overflows.
    """
    while lowest < highest:
        middle = (lowest + highest + 1) >> 1
        count, weight = _measure(logits_ptr, vocab, peak, scale, middle, BLOCK)
        enough = weight >= wanted
        if COUNT:
            enough = count >= wanted
        if enough:
            lowest = middle
        else:
            highest = middle - 1
    return lowest


@triton.jit
def _ranking_at(logits_ptr, vocab, peak, scale, border, BLOCK: tl.constexpr):
    """Tokens above the border and their weight; ties at the border and the weight of each."""
    count, _ = _measure(logits_ptr, vocab, peak, scale, border, BLOCK)
    above, above_weight = _measure(logits_ptr, vocab, peak, scale, border + 1, BLOCK)
    ties = (count - above).to(tl.int64)
    return above.to(tl.int64), above_weight, ties, _weight_of(border, peak, scale)


@triton.jit
def _candidates(logits_ptr, vocab, peak, scale, top, top_k, top_p, BLOCK: tl.constexpr):
    """top_k, then top_p of what it left: each keeps a head of the ranking, down to a border."""
    bottom = tl.full([], -2139095041, tl.int64)  # the key of -inf
    border = bottom
    if top_k < vocab:
        border = _border(logits_ptr, vocab, peak, scale, bottom, top, top_k, True, BLOCK)
    above, above_weight, ties, tie_weight = _ranking_at(
        logits_ptr, vocab, peak, scale, border, BLOCK
    )
    ties = tl.minimum(ties, top_k - above)
    if top_p < 1:
        wanted = top_p * (above_weight + ties * tie_weight)
        if above_weight >= wanted:
            border = _border(logits_ptr, vocab, peak, scale, border, top, wanted, False, BLOCK)
            above, above_weight, ties, tie_weight = _ranking_at(
                logits_ptr, vocab, peak, scale, border, BLOCK
            )
        # A tie stays while the weight before it is short of what is wanted.
        short = tl.maximum(wanted - above_weight, 0.0)
        needed = tl.ceil(short / tl.maximum(tie_weight, 1e-300))
        ties = tl.minimum(ties.to(tl.float64), needed).to(tl.int64)
        if above == 0:
            ties = tl.maximum(ties, 1)
    return border, above, above_weight, ties, tie_weight


@triton.jit
def _weight_from(logits_ptr, vocab, peak, scale, min_p, BLOCK: tl.constexpr):
    """How many tokens weigh at least min_p, and the sum of their weights."""
    count = tl.zeros([BLOCK], tl.int32)
    weight = tl.zeros([BLOCK], tl.float64)
    for start in range(0, vocab, BLOCK):
        logits, mask = _load(logits_ptr, start, vocab, BLOCK)
        weights = tl.exp2((logits - peak) * scale).to(tl.float64)
        kept = mask & (weights >= min_p)
        count += kept.to(tl.int32)
        weight += tl.where(kept, weights, 0.0)
    return tl.sum(count, 0), tl.sum(weight, 0)


@triton.jit
def _draw_along_ranking(
    logits_ptr, vocab, peak, scale, top_k, top_p, min_p, uniform, BLOCK: tl.constexpr
):
    """The token of the ranking where the cumulative weight exceeds a share of the candidates'."""
    top = tl.sum(_keys(tl.full([1], 0.0, tl.float32) + peak), 0).to(tl.int64)
    border, above, above_weight, ties, tie_weight = _candidates(
        logits_ptr, vocab, peak, scale, top, top_k, top_p, BLOCK
    )
    candidates = above_weight + ties * tie_weight
    if min_p > 0:
        # Weights fall along the ranking, so min_p cuts a head off it too.
        count, weight = _weight_from(logits_ptr, vocab, peak, scale, min_p, BLOCK)
        if count <= above:
            candidates = weight
    # A product that rounds up to the total would find no place.
    target = tl.minimum(uniform * candidates, candidates * 0.9999999999999997)
    if target < above_weight:
        # Above the border: the highest key with more than the target at or above it.
        border += 1
        while border < top:
            middle = (border + top + 1) >> 1
            _, weight = _measure(logits_ptr, vocab, peak, scale, middle, BLOCK)
            if weight > target:
                border = middle
            else:
                top = middle - 1
        above, above_weight, ties, tie_weight = _ranking_at(
            logits_ptr, vocab, peak, scale, border, BLOCK
        )
    place = tl.floor((target - above_weight) / tl.maximum(tie_weight, 1e-300))
    place = tl.minimum(tl.maximum(place, 0.0), (ties - 1).to(tl.float64)).to(tl.int64)
    return _nth_of_key(logits_ptr, vocab, border, place, BLOCK)


@triton.jit
def _nth_of_key(logits_ptr, vocab, key, place, BLOCK: tl.constexpr):
    """The id of the token number `place` (from 0) among those with this key, by id."""
    before = tl.full([], 0, tl.int32)
    token = tl.full([], 0, tl.int32)
    for start in range(0, vocab, BLOCK):
        logits, mask = _load(logits_ptr, start, vocab, BLOCK)
        equal = (mask & (_keys(logits) == key)).to(tl.int32)
        rank = before + tl.cumsum(equal, 0) - equal
        found = (equal == 1) & (rank == place)
        token += tl.sum(tl.where(found, start + tl.arange(0, BLOCK), 0), 0)
        before += tl.sum(equal, 0)
    return token


@triton.jit
def _draw_along_ids(logits_ptr, vocab, peak, scale, min_p, uniform, BLOCK: tl.constexpr):
    """The first id where the cumulative weight exceeds a share of the total."""
    _, total = _weight_from(logits_ptr, vocab, peak, scale, min_p, BLOCK)
    target = uniform * total
    before = tl.full([], 0.0, tl.float64)
    token = tl.full([], 0, tl.int32)  # the last candidate so far, until the place is found
    found = tl.full([], 0, tl.int32)
    for start in range(0, vocab, BLOCK):
        logits, mask = _load(logits_ptr, start, vocab, BLOCK)
        weights = tl.exp2((logits - peak) * scale).to(tl.float64)
        kept = mask & (weights >= min_p) & (weights > 0)
        weights = tl.where(kept, weights, 0.0)
        cumulative = before + tl.cumsum(weights, 0)
        column = start + tl.arange(0, BLOCK)
        first = tl.min(tl.where(kept & (cumulative > target), column, vocab), 0)
        last = tl.max(tl.where(kept, column, 0), 0)
        here = tl.where(first < vocab, first, tl.maximum(token, last))
        token = tl.where(found == 1, token, here)
        found = tl.where(first < vocab, 1, found)
        before += tl.sum(weights, 0)
    return token


@triton.jit
def _draw_kernel(
    logits_ptr,  # [rows, stride] float32
    peaks_ptr,  # [rows] float32
    params_ptr,  # [draws, 8] int64, see ROW ...
    tokens_ptr,  # [rows] int64
    vocab,
    stride,
    BLOCK: tl.constexpr,
):
    of_row = params_ptr + tl.program_id(0) * 8
    row = tl.load(of_row)
    temperature = tl.load(of_row + 1).to(tl.float64, bitcast=True).to(tl.float32)
    scale = 1.4426950408889634 / temperature  # weights are powers of two, as the twin's
    top_k = tl.load(of_row + 2)
    top_p = tl.load(of_row + 3).to(tl.float64, bitcast=True)
    min_p = tl.load(of_row + 4).to(tl.float64, bitcast=True)
    uniform = _uniform(
        tl.load(of_row + 5).to(tl.uint64, bitcast=True),
        tl.load(of_row + 6).to(tl.uint64, bitcast=True),
    )
    ranked = tl.load(of_row + 7)
    peak = tl.load(peaks_ptr + row)
    logits_ptr += row * stride
    if peak - peak != 0:
        return  # a broken row keeps its greedy token; the step's result reports it
    token = tl.full([], 0, tl.int32)
    if ranked == 0:
        token = _draw_along_ids(logits_ptr, vocab, peak, scale, min_p, uniform, BLOCK)
    else:
        token = _draw_along_ranking(
            logits_ptr, vocab, peak, scale, top_k, top_p, min_p, uniform, BLOCK
        )
    tl.store(tokens_ptr + row, token.to(tl.int64))


def draw(
    logits: Tensor,  # [rows, vocab] float32; rows may be longer than vocab
    peaks: Tensor,  # [rows] float32: their maxima
    token_ids: Tensor,  # [rows] int64: the greedy choice, replaced in the rows that draw
    columns: NDArray[np.void],  # [draws] of engine.sampler.SLOT_COLUMNS
    *,
    rows: Ints,  # [draws]: which rows they are
    indices: Ints,  # [draws]: how many tokens each has generated before
) -> None:
    """Draw the next token of `rows`; equal to engine.draw's, see above."""
    params = np.zeros((len(rows), 8), dtype=np.int64)
    params[:, ROW], params[:, INDEX] = rows, indices
    for place, name in ((TEMPERATURE, "temperature"), (TOP_P, "top_p"), (MIN_P, "min_p")):
        params[:, place] = columns[name].astype(np.float64).view(np.int64)
    for place, name in ((TOP_K, "top_k"), (SEED, "seed"), (RANKED, "ranked")):
        params[:, place] = columns[name]
    _draw_kernel[(len(rows),)](
        logits,
        peaks,
        to_device(params, logits.device),
        token_ids,
        logits.shape[1],
        logits.stride(0),
        BLOCK=BLOCK if logits.shape[1] > 1024 else 1024,
        num_warps=8,
    )
