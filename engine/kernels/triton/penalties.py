"""Penalties on tokens that a sequence already has, from counts taken from the token table.

As in engine.sampler, the twin: counts are made at each step and kept nowhere. Integer sums do not
depend on their order, so the atomics that make them do not either.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from engine.arrays import Ints, to_device

POSITIONS, COLUMNS = 1024, 4096  # of a program


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
    _count_kernel[(len(rows), triton.cdiv(int(lengths.max()), POSITIONS))](
        token_table, on_device, counts, token_table.stride(0), vocab, BLOCK=POSITIONS, num_warps=4
    )
    _penalise_kernel[(len(rows), triton.cdiv(vocab, COLUMNS))](
        logits, on_device, counts, vocab, logits.stride(0), BLOCK=COLUMNS, num_warps=4
    )
