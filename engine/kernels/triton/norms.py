"""RMSNorm with the residual sum before it, and SiLU times up: elementwise kernels of a layer.

One program a row, so a row's result depends on that row alone. The twins are in engine.decoder.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SILU_BLOCK = 1024
MAX_NORM_WARPS = 16


@triton.jit
def _norm_kernel(
    hidden_ptr,  # [rows, WIDTH]
    delta_ptr,  # like hidden, with ADD
    weight_ptr,  # [WIDTH]
    sum_ptr,  # like hidden, with ADD
    out_ptr,  # like hidden
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH
    at = tl.program_id(0).to(tl.int64) * WIDTH + columns
    x = tl.load(hidden_ptr + at, mask=mask, other=0.0)
    dtype = x.dtype
    x = x.to(tl.float32)
    if ADD:
        x += tl.load(delta_ptr + at, mask=mask, other=0.0).to(tl.float32)
        rounded = x.to(dtype)
        tl.store(sum_ptr + at, rounded, mask=mask)
        x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    # The twin rounds before it multiplies by the weight.
    normed = (x * scale).to(dtype).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, (normed * weight).to(dtype), mask=mask)


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of hidden [rows, width], in float32 inside (arXiv 1910.07467)."""
    out = torch.empty_like(hidden)
    if len(hidden):
        _launch_norm(hidden, hidden, weight, hidden, out, eps, add=False)
    return out


def add_rms_norm(
    hidden: Tensor, delta: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(hidden + delta, RMSNorm of it), all [rows, width] and contiguous."""
    total, out = torch.empty_like(hidden), torch.empty_like(hidden)
    if len(hidden):
        _launch_norm(hidden, delta, weight, total, out, eps, add=True)
    return total, out


def _launch_norm(
    hidden: Tensor,
    delta: Tensor,
    weight: Tensor,
    total: Tensor,
    out: Tensor,
    eps: float,
    *,
    add: bool,
) -> None:
    width = hidden.shape[1]
    block = triton.next_power_of_2(width)
    _norm_kernel[(len(hidden),)](
        hidden,
        delta,
        weight,
        total,
        out,
        eps,
        WIDTH=width,
        BLOCK=block,
        ADD=add,
        num_warps=max(1, min(MAX_NORM_WARPS, block // 512)),
    )


@triton.jit
def _gated_silu_kernel(
    x_ptr,  # [rows, 2 * WIDTH]: gate | up
    out_ptr,  # [rows, WIDTH]
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    row = tl.program_id(0).to(tl.int64)
    at = row * (2 * WIDTH) + columns
    gate = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + at + WIDTH, mask=mask, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * WIDTH + columns, result.to(out_ptr.dtype.element_ty), mask=mask)


def gated_silu(x: Tensor) -> Tensor:
    """silu(gate) * up of x [rows, gate | up], contiguous."""
    rows, width = x.shape[0], x.shape[1] // 2
    out = x.new_empty((rows, width))
    if rows:
        grid = (rows, triton.cdiv(width, SILU_BLOCK))
        _gated_silu_kernel[grid](x, out, WIDTH=width, BLOCK=SILU_BLOCK, num_warps=4)
    return out
