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
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from engine.batch import Ints, to_device

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
def _weight_of(key, peak, temperature):
    """The weight of a token with this key, as every sum has it."""
    bits = key.to(tl.int32)
    logit = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return tl.exp((logit - peak) / temperature).to(tl.float64)


@triton.jit
def _load(logits_ptr, start, vocab, BLOCK: tl.constexpr):
    """A block of logits and where it is real; the rest is below everything."""
    column = start + tl.arange(0, BLOCK)
    mask = column < vocab
    return tl.load(logits_ptr + column, mask=mask, other=float("-inf")), mask


@triton.jit
def _measure(logits_ptr, vocab, peak, temperature, threshold, BLOCK: tl.constexpr):
    """How many tokens have a key of at least `threshold`, and the sum of their weights."""
    count = tl.zeros([BLOCK], tl.int32)
    weight = tl.zeros([BLOCK], tl.float64)
    threshold = threshold.to(tl.int32)
    for start in range(0, vocab, BLOCK):
        logits, mask = _load(logits_ptr, start, vocab, BLOCK)
        above = mask & (_keys(logits) >= threshold)
        weights = tl.exp((logits - peak) / temperature).to(tl.float64)
        count += above.to(tl.int32)
        weight += tl.where(above, weights, 0.0)
    return tl.sum(count, 0), tl.sum(weight, 0)


@triton.jit
def _border(
    logits_ptr, vocab, peak, temperature, lowest, highest, wanted, COUNT, BLOCK: tl.constexpr
):
    """The highest key at or above which there is at least `wanted` (tokens, or weight).

    Between `lowest`, which is known to suffice, and `highest`.
    """
    while lowest < highest:
        middle = (lowest + highest + 1) >> 1  # int64: no overflow
        count, weight = _measure(logits_ptr, vocab, peak, temperature, middle, BLOCK)
        enough = weight >= wanted
        if COUNT:
            enough = count >= wanted
        if enough:
            lowest = middle
        else:
            highest = middle - 1
    return lowest


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
        # Along the ids: the total first, then the block and the place where it is exceeded.
        sums = tl.zeros([BLOCK], tl.float64)
        for start in range(0, vocab, BLOCK):
            logits, mask = _load(logits_ptr, start, vocab, BLOCK)
            weights = tl.exp((logits - peak) / temperature).to(tl.float64)
            sums += tl.where(mask & (weights >= min_p), weights, 0.0)
        target = uniform * tl.sum(sums, 0)
        before = tl.full([], 0.0, tl.float64)
        last = tl.full([], 0, tl.int32)  # the last candidate, if rounding finds no place
        open_ = tl.full([], 1, tl.int32)
        for start in range(0, vocab, BLOCK):
            logits, mask = _load(logits_ptr, start, vocab, BLOCK)
            weights = tl.exp((logits - peak) / temperature).to(tl.float64)
            kept = mask & (weights >= min_p) & (weights > 0)
            weights = tl.where(kept, weights, 0.0)
            cumulative = before + tl.cumsum(weights, 0)
            column = start + tl.arange(0, BLOCK)
            beyond = kept & (cumulative > target)
            first = tl.min(tl.where(beyond, column, vocab), 0)
            if (open_ == 1) & (first < vocab):
                last = first
                open_ = tl.full([], 0, tl.int32)
            if open_ == 1:
                last = tl.maximum(last, tl.max(tl.where(kept, column, 0), 0))
            before += tl.sum(weights, 0)
        token = last
    else:
        top = tl.sum(_keys(tl.full([1], 0.0, tl.float32) + peak), 0).to(tl.int64)
        bottom = tl.full([], -2139095041, tl.int64)  # the key of -inf
        # top_k, then top_p of what it left, then min_p: each is a head of the ranking.
        border = bottom
        if top_k < vocab:
            border = _border(logits_ptr, vocab, peak, temperature, bottom, top, top_k, True, BLOCK)
        count, weight = _measure(logits_ptr, vocab, peak, temperature, border, BLOCK)
        above, above_weight = _measure(logits_ptr, vocab, peak, temperature, border + 1, BLOCK)
        ties = tl.minimum(top_k, count.to(tl.int64)) - above
        tie_weight = _weight_of(border, peak, temperature)
        total = above_weight + ties * tie_weight
        if top_p < 1:
            wanted = top_p * total
            if above_weight >= wanted:
                border = _border(
                    logits_ptr, vocab, peak, temperature, border, top, wanted, False, BLOCK
                )
                count, weight = _measure(logits_ptr, vocab, peak, temperature, border, BLOCK)
                above, above_weight = _measure(
                    logits_ptr, vocab, peak, temperature, border + 1, BLOCK
                )
                ties = (count - above).to(tl.int64)
                tie_weight = _weight_of(border, peak, temperature)
            # A tie stays while the weight before it is short of what is wanted.
            short = tl.maximum(wanted - above_weight, 0.0)
            needed = tl.ceil(short / tl.maximum(tie_weight, 1e-300))
            ties = tl.minimum(ties.to(tl.float64), needed).to(tl.int64)
            if above == 0:
                ties = tl.maximum(ties, 1)
        # The draw: where along the ranking the cumulative weight exceeds the target.
        candidates = above_weight + ties * tie_weight
        if min_p > 0:
            # Weights fall along the ranking, so min_p cuts a head off it too.
            kept_count = tl.zeros([BLOCK], tl.int32)
            kept_weight = tl.zeros([BLOCK], tl.float64)
            for start in range(0, vocab, BLOCK):
                logits, mask = _load(logits_ptr, start, vocab, BLOCK)
                weights = tl.exp((logits - peak) / temperature).to(tl.float64)
                kept = mask & (weights >= min_p)
                kept_count += kept.to(tl.int32)
                kept_weight += tl.where(kept, weights, 0.0)
            if tl.sum(kept_count, 0) <= above:
                candidates = tl.sum(kept_weight, 0)
        # A product that rounds up to the total would find no place.
        target = tl.minimum(uniform * candidates, candidates * 0.9999999999999997)
        if target < above_weight:
            # Some key above the border: the highest with more than the target at or above it.
            key = border + 1
            high = top
            while key < high:
                middle = (key + high + 1) >> 1
                _, weight = _measure(logits_ptr, vocab, peak, temperature, middle, BLOCK)
                if weight > target:
                    key = middle
                else:
                    high = middle - 1
            border = key
            count, weight = _measure(logits_ptr, vocab, peak, temperature, border, BLOCK)
            above, above_weight = _measure(logits_ptr, vocab, peak, temperature, border + 1, BLOCK)
            ties = (count - above).to(tl.int64)
            tie_weight = _weight_of(border, peak, temperature)
        place = tl.floor((target - above_weight) / tl.maximum(tie_weight, 1e-300))
        place = tl.minimum(tl.maximum(place, 0.0), (ties - 1).to(tl.float64)).to(tl.int64)
        token = _nth_of_key(logits_ptr, vocab, border, place, BLOCK)
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


@triton.jit
def _count_kernel(
    tokens_ptr,  # [slots, positions] int64
    params_ptr,  # [rows, 8] int64: row of logits, slot, length, prompt tokens, ...
    counts_ptr,  # [rows, vocab] int64, zero: known in the high half, output in the low
    positions,
    vocab,
    BLOCK: tl.constexpr,
):
    of_row = params_ptr + tl.program_id(0) * 8
    slot = tl.load(of_row + 1)
    length = tl.load(of_row + 2)
    num_prompt_tokens = tl.load(of_row + 3)
    position = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    known = position < length
    token = tl.load(tokens_ptr + slot * positions + position, mask=known, other=0)
    known = known & (token < vocab)
    one = (position >= num_prompt_tokens).to(tl.int64) + 4294967296
    counts = counts_ptr + tl.program_id(0).to(tl.int64) * vocab
    tl.atomic_add(counts + token, one, mask=known)


@triton.jit
def _penalise_kernel(
    logits_ptr,  # [rows, stride] float32, changed in place
    params_ptr,  # ..., then repetition, presence, frequency as float64
    counts_ptr,
    vocab,
    stride,
    BLOCK: tl.constexpr,
):
    of_row = params_ptr + tl.program_id(0) * 8
    row = tl.load(of_row)
    repetition = tl.load(of_row + 4).to(tl.float64, bitcast=True).to(tl.float32)
    presence = tl.load(of_row + 5).to(tl.float64, bitcast=True).to(tl.float32)
    frequency = tl.load(of_row + 6).to(tl.float64, bitcast=True).to(tl.float32)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < vocab
    count = tl.load(counts_ptr + tl.program_id(0).to(tl.int64) * vocab + column, mask=mask, other=0)
    output = (count & 0xFFFFFFFF).to(tl.float32)
    at = logits_ptr + row * stride + column
    logits = tl.load(at, mask=mask & (count > 0), other=0.0)
    repeated = tl.where(logits > 0, logits / repetition, logits * repetition)
    penalty = frequency * output + presence * (output > 0).to(tl.float32)
    tl.store(at, repeated - penalty, mask=mask & (count > 0))


def penalise(
    logits: Tensor,  # [rows, vocab] float32, changed in place
    token_table: Tensor,  # [slots, positions] int64
    columns: NDArray[np.void],  # [penalised rows] of SLOT_COLUMNS
    *,
    rows: Ints,
    slots: Ints,
    lengths: Ints,  # known tokens of each
) -> None:
    """Repetition (prompt and output), presence and frequency (output) penalties of `rows`."""
    vocab = logits.shape[1]
    params = np.zeros((len(rows), 8), dtype=np.int64)
    params[:, 0], params[:, 1], params[:, 2] = rows, slots, lengths
    params[:, 3] = columns["num_prompt_tokens"]
    for place, name in ((4, "repetition"), (5, "presence"), (6, "frequency")):
        params[:, place] = columns[name].astype(np.float64).view(np.int64)
    on_device = to_device(params, logits.device)
    counts = torch.zeros((len(rows), vocab), dtype=torch.int64, device=logits.device)
    _count_kernel[(len(rows), triton.cdiv(int(lengths.max()), 1024))](
        token_table, on_device, counts, token_table.stride(0), vocab, BLOCK=1024, num_warps=4
    )
    _penalise_kernel[(len(rows), triton.cdiv(vocab, BLOCK))](
        logits, on_device, counts, vocab, logits.stride(0), BLOCK=BLOCK, num_warps=4
    )
