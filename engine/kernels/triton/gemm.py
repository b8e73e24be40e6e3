"""x W^T with a weight that is dense, int8 or int4, in one kernel whose arithmetic no batch changes.

The inputs are summed in chunks of CHUNK_K, chunks in ascending order, by tiles of one shape. So a
row's bits depend on that row and the weight alone, wherever `tile_rows` is fixed: few rows take
a program a chunk and a sum of the partial results, many rows one program for all chunks.

The weight is the left side of the tile's product: its rows fill the tensor core however few tokens
there are, and a quantised weight is widened in registers.

    dense  weight [outputs, inputs]
    int8   weight [outputs, inputs] int8, scale [outputs]
    int4   weight [outputs, inputs / 2] uint8: of each group of GROUP inputs the first half in the
           low nibbles, the second half in the high ones; scale, zero [outputs, inputs / GROUP];
           a weight is (nibble - zero) * scale
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.launch import dot_precision, dot_type

BLOCK_N, BLOCK_K = 128, 64
FIXED_ROWS = 64  # tokens of a tile where the bits must not depend on the batch
SPLIT_UP_TO = 256  # rows; beyond them tiles of rows fill the device
WANTED_PROGRAMS = 264  # two for each multiprocessor of an H200
MAX_CHUNKS = 8
WARPS, STAGES = 8, 4  # with these every form compiles for sm_90 without spills
PIECE = 1 << 23  # elements of a weight that are quantised at once


@triton.jit
def _chunk_sum(
    x_ptr, weight_ptr, scale_ptr, zero_ptr, token, of_token, output, of_output, first,
    K: tl.constexpr, CHUNK_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, BITS: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, BLOCK_M] float32: the products of inputs first .. first + CHUNK_K - 1."""
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    last = tl.minimum(first + CHUNK_K, K)
    x_rows = x_ptr + token[None, :].to(tl.int64) * K
    for start in range(first, last, BLOCK_K):
        if BITS == 4:
            half = tl.arange(0, BLOCK_K // 2)
            group = start // BLOCK_K
            packed = tl.load(
                weight_ptr + output[:, None].to(tl.int64) * (K // 2) + (start // 2 + half)[None, :],
                mask=of_output[:, None],
                other=0,
            )
            at = output * (K // BLOCK_K) + group
            scale = tl.load(scale_ptr + at, mask=of_output, other=0.0)[:, None]
            zero = tl.load(zero_ptr + at, mask=of_output, other=0.0)[:, None]
            x_low = tl.load(x_rows + (start + half)[:, None], mask=of_token[None, :], other=0.0)
            x_high = tl.load(
                x_rows + (start + BLOCK_K // 2 + half)[:, None], mask=of_token[None, :], other=0.0
            )
            low = (((packed & 0xF).to(tl.float32) - zero) * scale).to(DOT)
            high = (((packed >> 4).to(tl.float32) - zero) * scale).to(DOT)
            sums = tl.dot(low, x_low.to(DOT), sums, input_precision=PRECISION)
            sums = tl.dot(high, x_high.to(DOT), sums, input_precision=PRECISION)
        else:
            k = start + tl.arange(0, BLOCK_K)
            x_mask = of_token[None, :]
            weight_mask = of_output[:, None]
            if K % BLOCK_K != 0:
                x_mask = x_mask & (k < last)[:, None]
                weight_mask = weight_mask & (k < last)[None, :]
            x = tl.load(x_rows + k[:, None], mask=x_mask, other=0.0)
            weight = tl.load(
                weight_ptr + output[:, None].to(tl.int64) * K + k[None, :],
                mask=weight_mask,
                other=0,
            )
            sums = tl.dot(weight.to(DOT), x.to(DOT), sums, input_precision=PRECISION)
    if BITS == 8:
        sums = sums * tl.load(scale_ptr + output, mask=of_output, other=0.0)[:, None]
    return sums


# The number of tokens changes from step to step: specialised by it (1, a multiple of 16, any other)
# each form and shape would be compiled three times, while requests wait.
@triton.jit(do_not_specialize=["num_tokens"])
def _gemm_kernel(
    x_ptr,  # [tokens, K]
    weight_ptr,  # [N, K], or [N, K / 2] with BITS 4
    scale_ptr,  # [N] or [N, K / BLOCK_K] float32, with BITS 8 or 4
    zero_ptr,  # like scale, with BITS 4
    bias_ptr,  # [N], with BIAS
    out_ptr,  # [tokens, N]
    partial_ptr,  # [chunks, tokens, N] float32, with PARTIAL
    num_tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    CHUNK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BITS: tl.constexpr,
    BIAS: tl.constexpr,
    PARTIAL: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    of_token = token < num_tokens
    of_output = output < N
    at = token[None, :].to(tl.int64) * N + output[:, None]
    mask = of_token[None, :] & of_output[:, None]
    if PARTIAL:
        chunk = tl.program_id(2)
        sums = _chunk_sum(
            x_ptr, weight_ptr, scale_ptr, zero_ptr, token, of_token, output, of_output,
            chunk * CHUNK_K, K, CHUNK_K, BLOCK_M, BLOCK_N, BLOCK_K, BITS, DOT, PRECISION,
        )  # fmt: skip
        tl.store(partial_ptr + chunk.to(tl.int64) * num_tokens * N + at, sums, mask=mask)
    else:
        total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for first in range(0, K, CHUNK_K):
            total += _chunk_sum(
                x_ptr, weight_ptr, scale_ptr, zero_ptr, token, of_token, output, of_output,
                first, K, CHUNK_K, BLOCK_M, BLOCK_N, BLOCK_K, BITS, DOT, PRECISION,
            )  # fmt: skip
        if BIAS:
            bias = tl.load(bias_ptr + output, mask=of_output, other=0.0).to(tl.float32)
            total += bias[:, None]
        tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def _sum_chunks_kernel(
    partial_ptr,  # [CHUNKS, tokens, N] float32
    bias_ptr,  # [N], with BIAS
    out_ptr,  # [tokens, N]
    num_tokens,
    N: tl.constexpr,
    CHUNKS: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = output < N
    total = tl.zeros([BLOCK], tl.float32)
    for chunk in tl.static_range(CHUNKS):
        total += tl.load(
            partial_ptr + (chunk * num_tokens + token) * N + output, mask=mask, other=0.0
        )
    if BIAS:
        total += tl.load(bias_ptr + output, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * N + output, total.to(out_ptr.dtype.element_ty), mask=mask)


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight [outputs, inputs] in one of the forms above."""

    data: Tensor
    inputs: int
    bits: int  # 16 = dense
    scale: Tensor | None = None
    zero: Tensor | None = None
    group: int = BLOCK_K

    @property
    def outputs(self) -> int:
        return self.data.shape[0]

    @property
    def num_chunks(self) -> int:
        """Chunks of the inputs: from the weight's shape alone, so that no batch changes them."""
        tiles = triton.cdiv(self.outputs, BLOCK_N)
        blocks = triton.cdiv(self.inputs, self.group)
        chunks = max(1, min(MAX_CHUNKS, WANTED_PROGRAMS // tiles, blocks // 8))
        # Chunks of whole blocks may leave fewer.
        return triton.cdiv(blocks, triton.cdiv(blocks, chunks))

    @property
    def chunk(self) -> int:
        """Inputs of a chunk."""
        blocks = triton.cdiv(self.inputs, self.group)
        return triton.cdiv(blocks, self.num_chunks) * self.group


def multiply(
    x: Tensor,  # [tokens, inputs], contiguous
    weight: Weight,
    bias: Tensor | None = None,  # [outputs]
    *,
    tile_rows: int | None = FIXED_ROWS,
) -> Tensor:
    """[tokens, outputs] of x's dtype. tile_rows None: as suits the number of tokens."""
    num_tokens = len(x)
    out = x.new_empty((num_tokens, weight.outputs))
    if not num_tokens:
        return out
    if tile_rows is None:
        tile_rows = min(FIXED_ROWS, max(16, triton.next_power_of_2(num_tokens)))
    chunks = weight.num_chunks
    partial = num_tokens <= SPLIT_UP_TO and chunks > 1
    partials = None
    if partial:
        shape = (chunks, num_tokens, weight.outputs)
        partials = torch.empty(shape, dtype=torch.float32, device=x.device)
    tiles = (triton.cdiv(num_tokens, tile_rows), triton.cdiv(weight.outputs, BLOCK_N))
    _gemm_kernel[(*tiles, chunks if partial else 1)](
        x,
        weight.data,
        weight.scale,
        weight.zero,
        bias,
        out,
        partials,
        num_tokens,
        N=weight.outputs,
        K=weight.inputs,
        CHUNK_K=weight.chunk,
        BLOCK_M=tile_rows,
        BLOCK_N=BLOCK_N,
        BLOCK_K=weight.group,
        BITS=weight.bits,
        BIAS=bias is not None,
        PARTIAL=partial,
        DOT=dot_type(x.dtype),
        PRECISION=dot_precision(x.dtype),
        num_warps=WARPS,
        num_stages=STAGES,
    )
    if partials is not None:
        _sum_chunks_kernel[(num_tokens, triton.cdiv(weight.outputs, 1024))](
            partials,
            bias,
            out,
            num_tokens,
            N=weight.outputs,
            CHUNKS=chunks,
            BIAS=bias is not None,
            BLOCK=1024,
            num_warps=4,
        )
    return out


def dense(weight: Tensor) -> Weight:
    """A weight as it is."""
    return Weight(weight, weight.shape[1], 16)


def row_pieces(weight: Tensor) -> list[slice]:
    """Its rows in pieces, each quantised alone: float32 copies of a whole weight would be large."""
    size = max(1, PIECE // weight.shape[1])
    return [slice(begin, begin + size) for begin in range(0, len(weight), size)]


def quantise_int8(weight: Tensor) -> Weight:
    """Symmetric, one scale an output channel; weight [outputs, inputs] of a float type."""
    scale = weight.new_empty(len(weight), dtype=torch.float32)
    data = torch.empty_like(weight, dtype=torch.int8)
    for rows in row_pieces(weight):
        exact = weight[rows].float()
        scale[rows] = exact.abs().amax(1).clamp(min=1e-30) / 127
        data[rows] = (exact / scale[rows, None]).round().clamp(-127, 127).to(torch.int8)
    return Weight(data, weight.shape[1], 8, scale)


def quantise_int4(weight: Tensor) -> Weight:
    """Asymmetric by groups of 128 inputs, or of 64 or 32 where 128 does not divide them."""
    outputs, inputs = weight.shape
    group = next((size for size in (128, 64, 32) if inputs % size == 0), None)
    if group is None:
        raise ValueError(f"{inputs} inputs are no multiple of 32, which int4 weights need")
    packed = weight.new_empty((outputs, inputs // 2), dtype=torch.uint8)
    scales = weight.new_empty((outputs, inputs // group), dtype=torch.float32)
    zeros = torch.empty_like(scales)
    for rows in row_pieces(weight):
        groups = weight[rows].float().view(-1, inputs // group, group)
        lowest = groups.amin(2, keepdim=True).clamp(max=0)
        scale = ((groups.amax(2, keepdim=True).clamp(min=0) - lowest) / 15).clamp(min=1e-30)
        zero = (-lowest / scale).round()
        nibbles = ((groups / scale).round() + zero).clamp(0, 15).to(torch.uint8)
        low, high = nibbles.chunk(2, dim=2)
        packed[rows] = (low | (high << 4)).flatten(1)
        scales[rows], zeros[rows] = scale[:, :, 0], zero[:, :, 0]
    return Weight(packed, inputs, 4, scales, zeros, group)


def dequantise(weight: Weight) -> Tensor:
    """[outputs, inputs] float32: the numbers that the kernel multiplies by; the twin's side."""
    if weight.bits == 16:
        return weight.data.float()
    assert weight.scale is not None
    if weight.bits == 8:
        return weight.data.float() * weight.scale[:, None]
    assert weight.zero is not None
    packed = weight.data.view(weight.outputs, -1, weight.group // 2)
    nibbles = torch.cat((packed & 0xF, packed >> 4), dim=2).float()
    exact = (nibbles - weight.zero[:, :, None]) * weight.scale[:, :, None]
    return exact.view(weight.outputs, weight.inputs)
