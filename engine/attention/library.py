"""Paged attention by a library that is there on some machines: FlashAttention-3.

It reads this house's KV pool as it is, [blocks, block_size, kv_heads, head_dim], and aligns causal
masks to the end of each sequence. Must not choose whether it is used (engine.attention does).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from engine.arrays import to_device
from engine.attention import Attend
from engine.batch import Batch
from engine.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class Rows:
    """What a library wants to know of a step."""

    query_offsets: Tensor  # [rows + 1] int32
    key_lengths: Tensor  # [rows] int32
    block_table: Tensor  # [rows, blocks] int32
    max_query: int
    max_keys: int


class Library(Protocol):
    """One library's call."""

    def __call__(
        self, q: Tensor, keys: Tensor, values: Tensor, rows: Rows, *, window: int | None
    ) -> Tensor:
        """q [tokens, heads, head_dim]; keys and values of a layer -> like q."""
        ...


class LibraryAttention:
    """Implements engine.attention.Attention by a Library."""

    def __init__(
        self, cache: KVCache, *, windows: tuple[int | None, ...], library: Library
    ) -> None:
        self._cache, self._windows, self._library = cache, windows, library

    def plan(self, batch: Batch) -> Attend:
        """Prepare a step; see engine.attention.Attention."""
        rows = rows_of(batch, self._cache)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._cache.write(layer, batch.kv_slots, k, v)
            keys, values = self._cache.layers[layer]
            window = self._windows[layer]
            return self._library(q.contiguous(), keys, values, rows, window=window)

        return attend


def rows_of(batch: Batch, cache: KVCache, first: int = 0) -> Rows:
    """The rows of a step from `first` on."""
    tables = batch.block_tables[first:]
    tables = np.where(tables < 0, cache.spare_block, tables)
    offsets = batch.offsets[first:] - batch.offsets[first]
    device = cache.layers.device
    return Rows(
        query_offsets=to_device(offsets.astype(np.int32), device),
        key_lengths=to_device(batch.ends[first:].astype(np.int32), device),
        block_table=to_device(tables.astype(np.int32), device),
        max_query=int(batch.lengths[first:].max()),
        max_keys=int(batch.ends[first:].max()),
    )


def flash3(q: Tensor, keys: Tensor, values: Tensor, rows: Rows, *, window: int | None) -> Tensor:
    """FlashAttention-3 (arXiv 2407.08608), by the package flash_attn_interface.

    One split always: how many it would choose depends on the other rows of the step.
    """
    from flash_attn_interface import flash_attn_with_kvcache

    return flash_attn_with_kvcache(
        q,
        keys,
        values,
        cache_seqlens=rows.key_lengths,
        page_table=rows.block_table,
        cu_seqlens_q=rows.query_offsets,
        max_seqlen_q=rows.max_query,
        causal=True,
        window_size=(-1, -1) if window is None else (window - 1, 0),
        num_splits=1,
    )
