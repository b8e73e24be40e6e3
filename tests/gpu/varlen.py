"""torch's own paged attention, for comparison: the server does not use it."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention.library import Rows


def varlen(q: Tensor, keys: Tensor, values: Tensor, rows: Rows, *, window: int | None) -> Tensor:
    """torch.nn.attention.varlen with a block table (torch 2.12): blocks of a multiple of 256.

    One split always: with several its FlashAttention-2 writes wrong rows (pytorch#194167).
    """
    from torch.nn.attention.varlen import varlen_attn

    left = -1 if window is None else window - 1
    out = varlen_attn(
        q,
        keys,
        values,
        rows.query_offsets,
        None,
        rows.max_query,
        rows.max_keys,
        window_size=(left, 0),
        enable_gqa=True,
        seqused_k=rows.key_lengths,
        block_table=rows.block_table,
        num_splits=1,
    )
    assert isinstance(out, torch.Tensor)
    return out
