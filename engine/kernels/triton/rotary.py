"""Everything between the qkv product and attention in one kernel: q/k norm, rotation, KV store.

One program for a (token, kv head), so a token's result depends on that token alone. The twins are
engine.rope, engine.decoder.RMSNorm and KVCache.write. A token whose kv slot is negative is padding:
it is rotated like any other and stored nowhere.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.kv_cache import MAX_STORED


@triton.jit
def _rotated(x_ptr, weight_ptr, cos, sin, at, half, mask, eps, HEAD_DIM, NORM, dtype):
    """Both halves of heads [M, D/2] after norm and rotation, float32 rounded to dtype between."""
    first = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + at + HEAD_DIM // 2, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        in_half = half < HEAD_DIM // 2
        w1 = tl.load(weight_ptr + half, mask=in_half, other=0.0).to(tl.float32)
        w2 = tl.load(weight_ptr + half + HEAD_DIM // 2, mask=in_half, other=0.0).to(tl.float32)
        first = ((first * scale).to(dtype).to(tl.float32) * w1[None, :]).to(dtype).to(tl.float32)
        second = ((second * scale).to(dtype).to(tl.float32) * w2[None, :]).to(dtype).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _storable(x, scale, dtype, LIMIT, SCALED):
    """What may enter the cache: nothing huge, nothing that is not finite."""
    x = tl.where(tl.abs(x) <= LIMIT, x, 0.0)
    if SCALED:
        x = tl.minimum(tl.maximum(x / scale, -448.0), 448.0)  # float8_e4m3's largest number
    return x.to(dtype)


@triton.jit
def _rotate_and_store_kernel(
    qkv_ptr,  # [tokens, (heads + 2 kv_heads) * HEAD_DIM]
    q_norm_ptr,  # [HEAD_DIM], with NORM
    k_norm_ptr,
    cos_ptr,  # [positions, HEAD_DIM / 2] float32
    sin_ptr,
    positions_ptr,  # [tokens] int64
    kv_slots_ptr,  # [tokens] int64
    key_scales_ptr,  # [kv_heads] float32, with SCALED
    value_scales_ptr,
    q_out_ptr,  # [tokens, heads, HEAD_DIM]
    keys_ptr,  # [slots, kv_heads, HEAD_DIM] of one layer
    values_ptr,
    eps,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    NORM: tl.constexpr,
    SCALED: tl.constexpr,
    LIMIT: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    half = tl.arange(0, HALF_PADDED)
    in_half = half < HEAD_DIM // 2
    in_group = tl.arange(0, GROUP_PADDED)
    position = tl.load(positions_ptr + token)
    cos = tl.load(cos_ptr + position * (HEAD_DIM // 2) + half, mask=in_half, other=0.0)[None, :]
    sin = tl.load(sin_ptr + position * (HEAD_DIM // 2) + half, mask=in_half, other=0.0)[None, :]
    dtype = qkv_ptr.dtype.element_ty
    heads = KV_HEADS * GROUP
    in_row = qkv_ptr + token * ((heads + 2 * KV_HEADS) * HEAD_DIM)

    head = kv_head * GROUP + in_group
    at = head[:, None] * HEAD_DIM + half[None, :]
    mask = (in_group < GROUP)[:, None] & in_half[None, :]
    first, second = _rotated(
        in_row, q_norm_ptr, cos, sin, at, half, mask, eps, HEAD_DIM, NORM, dtype
    )
    q_out = q_out_ptr + token * (heads * HEAD_DIM)
    tl.store(q_out + at, first.to(dtype), mask=mask)
    tl.store(q_out + at + HEAD_DIM // 2, second.to(dtype), mask=mask)

    slot = tl.load(kv_slots_ptr + token)
    if slot < 0:
        return
    one = tl.arange(0, 1)
    at = (heads + kv_head + one)[:, None] * HEAD_DIM + half[None, :]
    mask = (one == 0)[:, None] & in_half[None, :]
    first, second = _rotated(
        in_row, k_norm_ptr, cos, sin, at, half, mask, eps, HEAD_DIM, NORM, dtype
    )
    v1 = tl.load(in_row + at + KV_HEADS * HEAD_DIM, mask=mask, other=0.0).to(tl.float32)
    v2 = tl.load(in_row + at + KV_HEADS * HEAD_DIM + HEAD_DIM // 2, mask=mask, other=0.0)
    key_scale = 1.0
    value_scale = 1.0
    if SCALED:
        key_scale = tl.load(key_scales_ptr + kv_head)
        value_scale = tl.load(value_scales_ptr + kv_head)
    stored = keys_ptr.dtype.element_ty
    place = (slot * KV_HEADS + kv_head) * HEAD_DIM + (one[:, None] + half[None, :])
    first = first.to(dtype).to(tl.float32)
    second = second.to(dtype).to(tl.float32)
    other_half = place + HEAD_DIM // 2
    tl.store(keys_ptr + place, _storable(first, key_scale, stored, LIMIT, SCALED), mask=mask)
    tl.store(keys_ptr + other_half, _storable(second, key_scale, stored, LIMIT, SCALED), mask=mask)
    v2 = v2.to(tl.float32)
    tl.store(values_ptr + place, _storable(v1, value_scale, stored, LIMIT, SCALED), mask=mask)
    tl.store(values_ptr + other_half, _storable(v2, value_scale, stored, LIMIT, SCALED), mask=mask)


def rotate_and_store(
    qkv: Tensor,  # [tokens, (heads + 2 kv_heads) * head_dim]
    *,
    norms: tuple[Tensor, Tensor, float] | None,  # weights of q and k [head_dim], eps
    tables: tuple[Tensor, Tensor],  # cos, sin [positions, head_dim / 2] float32
    positions: Tensor,  # [tokens] int64
    kv_slots: Tensor,  # [tokens] int64, negative = padding
    q_out: Tensor,  # [tokens, heads, head_dim]
    keys: Tensor,  # [blocks, block_size, kv_heads, head_dim]
    values: Tensor,
    scales: tuple[Tensor, Tensor] | None = None,  # of keys and values [kv_heads], float8 caches
) -> None:
    """Norm and rotate q into `q_out`, norm and rotate k into the cache, copy v into the cache."""
    num_tokens, num_heads, head_dim = q_out.shape
    if not num_tokens:
        return
    kv_heads = keys.shape[2]
    group = num_heads // kv_heads
    q_norm, k_norm, eps = norms or (None, None, 0.0)
    key_scales, value_scales = scales or (None, None)
    _rotate_and_store_kernel[(num_tokens, kv_heads)](
        qkv,
        q_norm,
        k_norm,
        *tables,
        positions,
        kv_slots,
        key_scales,
        value_scales,
        q_out,
        keys,
        values,
        eps,
        KV_HEADS=kv_heads,
        GROUP=group,
        GROUP_PADDED=triton.next_power_of_2(group),
        HEAD_DIM=head_dim,
        HALF_PADDED=triton.next_power_of_2(head_dim // 2),
        NORM=norms is not None,
        SCALED=scales is not None,
        LIMIT=MAX_STORED,
        num_warps=1 if group * head_dim <= 256 else 4,
    )
