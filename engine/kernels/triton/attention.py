"""Paged attention in Triton: mixed rows over block tables, fixed splits of the keys, and a combine.

Knows the arithmetic and the layout of its columns. Must not know how a step is planned
(engine.attention.triton does that) nor what the rows are for.

A query meets the keys in tiles of BLOCK_N at absolute positions, tiles in chunks of CHUNK keys, and
chunks in ascending order. Neither depends on the batch, so neither does the result. A key that is
masked changes no bit. With FOLD a long row merges its chunks in registers, with the arithmetic of
`combine_kernel`, so that a query has the same bits in a prefill as in a decode.

    keys      0 ... 511          512 ... 1023       1024 ...
    decode    item (row, 0)      item (row, 1)      item (row, 2)      -> partials -> combine
    prefill   item (row, first query of a tile): all chunks in turn   -> out
"""

from __future__ import annotations

import triton
import triton.language as tl

COMBINE_STAGES = tl.constexpr(4)


@triton.jit
def merge_partials(peak, total, weighted, new_peak, new_total, new_weighted):
    """Online softmax of two key ranges (arXiv 1805.02867), in base 2. Empty ranges change no bit.

    peak, total [M]; weighted [M, D]. The fused products are spelled out, so that every kernel
    that merges rounds alike.
    """
    joint = tl.maximum(peak, new_peak)
    finite = tl.where(joint == float("-inf"), 0.0, joint)
    old_scale = tl.exp2(peak - finite)
    new_scale = tl.exp2(new_peak - finite)
    total = tl.fma(total, old_scale, new_total * new_scale)
    old_scales = tl.broadcast_to(old_scale[:, None], weighted.shape)
    weighted = tl.fma(weighted, old_scales, new_weighted * new_scale[:, None])
    return joint, total, weighted


@triton.jit
def _attend_range(
    q,  # [BLOCK_M, D_PADDED] of the dot's dtype
    keys_ptr,  # at the kv head
    values_ptr,
    table_ptr,  # block table of the row
    first,  # multiple of BLOCK_N
    last,  # keys first .. last - 1
    position,  # [BLOCK_M] of the queries
    scale,  # includes log2(e), and the keys' own scale
    SLOT_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D_PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Softmax partials of one key range: peak, total [BLOCK_M], weighted [BLOCK_M, D_PADDED]."""
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    weighted = tl.zeros([BLOCK_M, D_PADDED], tl.float32)
    dims = tl.arange(0, D_PADDED)
    for start in range(first, last, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        known = key < last
        block = tl.load(table_ptr + key // BLOCK_SIZE, mask=known, other=0)
        slot = block.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE
        mask = known[:, None]
        if HEAD_DIM != D_PADDED:
            mask = mask & (dims < HEAD_DIM)[None, :]
        at = slot[:, None] * SLOT_STRIDE + dims[None, :]
        k = tl.load(keys_ptr + at, mask=mask, other=0.0)
        if k.dtype != DOT:
            k = k.to(DOT)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        visible = known[None, :] & (key[None, :] <= position[:, None])
        if WINDOW > 0:
            visible = visible & (key[None, :] > position[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        finite = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(scores - finite[:, None])
        decay = tl.exp2(peak - finite)
        total = total * decay + tl.sum(weights, 1)
        weighted = weighted * decay[:, None]
        v = tl.load(values_ptr + at, mask=mask, other=0.0)
        if v.dtype != DOT:
            v = v.to(DOT)
        weighted = tl.dot(weights.to(DOT), v, weighted, input_precision=PRECISION)
        peak = new_peak
    return peak, total, weighted


@triton.jit
def attention_kernel(
    q_ptr,  # [tokens, heads, HEAD_DIM]
    keys_ptr,  # [slots, kv_heads, HEAD_DIM] of one layer
    values_ptr,
    key_scales_ptr,  # [kv_heads] float32, with SCALED
    value_scales_ptr,
    out_ptr,  # like q
    weighted_ptr,  # [items, kv_heads, BLOCK_M, HEAD_DIM] float32, with PARTIAL
    sums_ptr,  # [items, kv_heads, BLOCK_M, 2] float32: peak, total
    num_items_ptr,  # [1] int32
    items_ptr,  # [items, 2] int32: row, and its split (PARTIAL) or its first query
    rows_ptr,  # [rows, 4] int32: first token, start, length, first item
    table_ptr,  # [rows, width] int32
    width_ptr,  # [1] int32
    softmax_scale,  # float: head_dim ** -0.5 * log2(e)
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a kv head
    GROUP_PADDED: tl.constexpr,  # power of two
    HEAD_DIM: tl.constexpr,
    D_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0 = none
    BLOCK_M: tl.constexpr,  # queries x GROUP_PADDED
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,  # multiple of BLOCK_N
    PARTIAL: tl.constexpr,
    FOLD: tl.constexpr,
    SCALED: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Softmax(q k) v of each item for each kv head; a program takes every num_programs-th one.

    So one launch fits any number of items, which a captured graph relies on.
    """
    num_work = tl.load(num_items_ptr) * KV_HEADS
    width = tl.load(width_ptr)
    in_tile = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, D_PADDED)
    in_group = in_tile % GROUP_PADDED
    for work in range(tl.program_id(0), num_work, tl.num_programs(0)):
        item = work // KV_HEADS
        kv_head = work % KV_HEADS
        row = tl.load(items_ptr + item * 2)
        which = tl.load(items_ptr + item * 2 + 1)
        first_token = tl.load(rows_ptr + row * 4)
        start = tl.load(rows_ptr + row * 4 + 1)
        length = tl.load(rows_ptr + row * 4 + 2)
        first_query = 0 if PARTIAL else which

        query = first_query + in_tile // GROUP_PADDED
        real = (query < length) & (in_group < GROUP)
        position = start + query
        head = kv_head * GROUP + in_group
        of_q = (first_token + query).to(tl.int64) * (KV_HEADS * GROUP) + head
        at = of_q[:, None] * HEAD_DIM + dims[None, :]
        mask = real[:, None] & (dims < HEAD_DIM)[None, :]
        q = tl.load(q_ptr + at, mask=mask, other=0.0)
        if q.dtype != DOT:
            q = q.to(DOT)

        # Keys that some query of the tile sees.
        last_query = tl.minimum(first_query + BLOCK_M // GROUP_PADDED, length) - 1
        end = start + last_query + 1
        begin = 0
        if WINDOW > 0:
            begin = tl.maximum(start + first_query + 1 - WINDOW, 0) // BLOCK_N * BLOCK_N
        if PARTIAL:
            begin = tl.maximum(begin, which * CHUNK)
            end = tl.minimum(end, (which + 1) * CHUNK)

        scale = softmax_scale
        if SCALED:
            scale = scale * tl.load(key_scales_ptr + kv_head)
        keys = keys_ptr + kv_head * HEAD_DIM
        values = values_ptr + kv_head * HEAD_DIM
        table = table_ptr + row.to(tl.int64) * width
        if FOLD:
            peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            weighted = tl.zeros([BLOCK_M, D_PADDED], tl.float32)
            for chunk in range(begin // CHUNK * CHUNK, end, CHUNK):
                new_peak, new_total, new_weighted = _attend_range(
                    q, keys, values, table,
                    tl.maximum(begin, chunk), tl.minimum(end, chunk + CHUNK), position, scale,
                    KV_HEADS * HEAD_DIM, BLOCK_SIZE, WINDOW, HEAD_DIM, D_PADDED,
                    BLOCK_M, BLOCK_N, DOT, PRECISION,
                )  # fmt: skip
                peak, total, weighted = merge_partials(
                    peak, total, weighted, new_peak, new_total, new_weighted
                )
        else:
            peak, total, weighted = _attend_range(
                q, keys, values, table, begin, end, position, scale,
                KV_HEADS * HEAD_DIM, BLOCK_SIZE, WINDOW, HEAD_DIM, D_PADDED,
                BLOCK_M, BLOCK_N, DOT, PRECISION,
            )  # fmt: skip
        if SCALED:
            weighted = weighted * tl.load(value_scales_ptr + kv_head)

        if PARTIAL:
            place = (item.to(tl.int64) * KV_HEADS + kv_head) * BLOCK_M + in_tile
            tl.store(weighted_ptr + place[:, None] * HEAD_DIM + dims[None, :], weighted, mask=mask)
            tl.store(sums_ptr + place * 2, peak, mask=real)
            tl.store(sums_ptr + place * 2 + 1, total, mask=real)
        else:
            total = tl.where(total == 0, 1.0, total)  # only where no query is
            result = weighted / total[:, None]
            tl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def combine_kernel(
    out_ptr,  # [tokens, heads, HEAD_DIM]
    weighted_ptr,  # [items, kv_heads, BLOCK_M, HEAD_DIM] float32
    sums_ptr,  # [items, kv_heads, BLOCK_M, 2] float32
    rows_ptr,  # [rows, 4] int32: first token, start, length, first item or -1
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D_PADDED: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Merges the splits of one (row, kv head), in ascending order, and divides."""
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    first_token = tl.load(rows_ptr + row * 4)
    start = tl.load(rows_ptr + row * 4 + 1)
    length = tl.load(rows_ptr + row * 4 + 2)
    first_item = tl.load(rows_ptr + row * 4 + 3)
    if first_item < 0:
        return
    in_tile = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, D_PADDED)
    query = in_tile // GROUP_PADDED
    in_group = in_tile % GROUP_PADDED
    real = (query < length) & (in_group < GROUP)
    mask = real[:, None] & (dims < HEAD_DIM)[None, :]

    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(start + 1 - WINDOW, 0) // BLOCK_N * BLOCK_N
    first_split = begin // CHUNK
    num_splits = (start + length - 1) // CHUNK + 1 - first_split
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    weighted = tl.zeros([BLOCK_M, D_PADDED], tl.float32)
    # A merge waits for the one before it, so the loads have to run ahead.
    for split in tl.range(0, num_splits, num_stages=COMBINE_STAGES):
        place = ((first_item + split).to(tl.int64) * KV_HEADS + kv_head) * BLOCK_M + in_tile
        new_weighted = tl.load(
            weighted_ptr + place[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0
        )
        new_peak = tl.load(sums_ptr + place * 2, mask=real, other=float("-inf"))
        new_total = tl.load(sums_ptr + place * 2 + 1, mask=real, other=0.0)
        peak, total, weighted = merge_partials(
            peak, total, weighted, new_peak, new_total, new_weighted
        )
    head = kv_head * GROUP + in_group
    of_out = (first_token + query).to(tl.int64) * (KV_HEADS * GROUP) + head
    at = of_out[:, None] * HEAD_DIM + dims[None, :]
    total = tl.where(total == 0, 1.0, total)  # only where no query is
    result = weighted / total[:, None]
    tl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=mask)
