"""Paged attention on CUDA devices: plans a step for the Triton kernels and launches them.

Owns the choice of tiles and the columns that the kernels read. Must not know the model beyond heads
and windows. Lengths are known on the host, so a step is one upload and no wait.

The columns are one int32 buffer, so that a captured graph finds each step at the same address:

    header: split items, long items, width, 0 | rows [rows, 4] | split items [.., 2]
                                              | long items [.., 2] | block tables [rows, width]
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from engine.arrays import Ints, to_device
from engine.attention import Attend
from engine.attention.library import Library, Rows, rows_of
from engine.batch import Batch
from engine.kernels.triton.attention import attention_kernel, combine_kernel
from engine.kernels.triton.launch import dot_precision, dot_type, num_multiprocessors
from engine.kv_cache import KVCache
from engine.model_config import ModelConfig

CHUNK = 512
BLOCK_N = 64
# Query rows of a tile: a tensor core instruction has 16 (mma) or 64 (wgmma).
SPLIT_TILE = 16
LONG_TILE = 128
FIXED_TILE = 64  # deterministic: the same instruction for a decode and for a prefill
SPLIT_PROGRAMS_PER_MULTIPROCESSOR = 2
ALIGNMENT = 4  # int32 to 16 bytes
NO_KEYS = -(1 << 30)  # start of a row before any split
# The block table's load comes one stage before the keys', so 5 stages keep two tiles in flight.
STAGES, WIDE_STAGES = 5, 3
WIDE_HEAD = 256


@dataclass(frozen=True, slots=True)
class Space:
    """The room of the columns: exact for an eager step, the most there can be for a graph."""

    num_rows: int
    num_split_items: int
    num_long_items: int

    @property
    def bounds(self) -> tuple[int, int, int, int]:
        """Where rows, split items, long items and block tables begin."""
        rows = ALIGNMENT
        split = rows + 4 * self.num_rows
        long = split + _aligned(2 * self.num_split_items)
        return rows, split, long, long + _aligned(2 * self.num_long_items)


@dataclass(frozen=True, slots=True)
class HostColumns:
    """A step under one window, on the host."""

    rows: NDArray[np.int32]  # [rows, 4]: first token, start, length, first split item or -1
    split_items: NDArray[np.int32]  # [items, 2]: row, split
    long_items: NDArray[np.int32]  # [items, 2]: row, first query
    tables: NDArray[np.int32]  # [rows, width]

    @classmethod
    def empty(cls) -> HostColumns:
        return cls(*(np.zeros((0, width), dtype=np.int32) for width in (4, 2, 2, 0)))

    @property
    def space(self) -> Space:
        return Space(len(self.rows), len(self.split_items), len(self.long_items))

    def packed(self, space: Space) -> NDArray[np.int32]:
        """In a buffer of `space`, up to the end of the block tables.

        An unused row is one token that sees no keys: attention leaves zeros there, not whatever
        was in memory.
        """
        rows, split, long, tables = space.bounds
        buffer = np.zeros(tables + self.tables.size, dtype=np.int32)
        buffer[:3] = len(self.split_items), len(self.long_items), self.tables.shape[1]
        unused = np.arange(len(self.rows), space.num_rows)
        columns = np.zeros((space.num_rows, 4), dtype=np.int32)
        columns[: len(self.rows)] = self.rows
        columns[unused, :3] = np.stack((unused, np.full_like(unused, NO_KEYS), unused * 0 + 1), 1)
        buffer[rows:split] = columns.ravel()
        buffer[split : split + self.split_items.size] = self.split_items.ravel()
        buffer[long : long + self.long_items.size] = self.long_items.ravel()
        buffer[tables:] = self.tables.ravel()
        return buffer


class Columns:
    """The columns on the device, with room for the partial results of the split items."""

    def __init__(self, buffer: Tensor, space: Space, partials: tuple[Tensor, Tensor]) -> None:
        rows, split, long, tables = space.bounds
        self.space = space
        self.buffer = buffer
        self.num_split_items, self.num_long_items = buffer[:1], buffer[1:2]
        self.width = buffer[2:3]
        self.rows = buffer[rows:split]
        self.split_items, self.long_items = buffer[split:long], buffer[long:tables]
        self.tables = buffer[tables:]
        self.weighted, self.sums = partials
        # What a library attends to: rows from a token on.
        self.library_rows: Rows | None = None
        self.library_token = 0


class TritonAttention:
    """Implements engine.attention.Attention; and, for a runner that writes the cache itself, its
    parts: `columns` once a step, `run` for each layer.
    """

    def __init__(
        self,
        cache: KVCache,
        *,
        num_heads: int,
        windows: tuple[int | None, ...],
        deterministic: bool = False,
        chunk: int = CHUNK,
        library: Library | None = None,
    ) -> None:
        """`library` attends from the first row on that is too long to be split; not with
        `deterministic`. None: this file's kernels do.

        `chunk`: keys of a split, a multiple of BLOCK_N.
        `deterministic`: a query's result has the same bits however its sequence is cut into rows.
        """
        self.cache, self.windows = cache, windows
        assert library is None or not deterministic
        self._library = library
        self._fold, self._chunk = deterministic, chunk
        self._kv_heads, self._head_dim = cache.num_kv_heads, cache.head_dim
        self._group = num_heads // cache.num_kv_heads
        self._group_padded = triton.next_power_of_2(self._group)
        self._split_tile = max(FIXED_TILE if deterministic else SPLIT_TILE, self._group_padded)
        scaled = cache.scales is not None
        long_tile = long_tile_of(cache.head_dim, deterministic=deterministic, scaled=scaled)
        self._long_tile = max(long_tile, self._group_padded)
        self._split_queries = self._split_tile // self._group_padded
        self._long_queries = self._long_tile // self._group_padded
        self._device = cache.layers.device

    def plan(self, batch: Batch) -> Attend:
        """Prepare a step; see engine.attention.Attention."""
        steps = {window: self.columns(batch, window) for window in dict.fromkeys(self.windows)}

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.cache.write(layer, batch.kv_slots, k, v)
            q = q.contiguous()
            out = torch.empty_like(q)
            self.run(steps[self.windows[layer]], layer, q, out)
            return out

        return attend

    def columns(self, batch: Batch, window: int | None) -> Columns:
        """A step's columns, uploaded."""
        host = self.host_columns(batch, window)
        buffer = to_device(host.packed(host.space), self._device)
        columns = Columns(buffer, host.space, self.partials(len(host.split_items)))
        first = self._first_of_library(batch)
        if self._library is not None and first < len(batch.lengths):
            columns.library_rows = rows_of(batch, self.cache, first)
            columns.library_token = int(batch.offsets[first])
        return columns

    def _first_of_library(self, batch: Batch) -> int:
        """The row from which on the library attends: decodes come first in a step."""
        long = batch.lengths > self._split_queries
        return int(long.argmax()) if self._library is not None and long.any() else len(long)

    def partials(self, num_items: int) -> tuple[Tensor, Tensor]:
        """Room for `num_items` split items: weighted values and (peak, total)."""
        shape = (num_items, self._kv_heads, self._split_tile)
        return (
            torch.empty((*shape, self._head_dim), dtype=torch.float32, device=self._device),
            torch.empty((*shape, 2), dtype=torch.float32, device=self._device),
        )

    def max_split_items(self, num_rows: int, max_model_len: int) -> int:
        """Of decode rows that are as long as they may be: no more for shorter ones."""
        return num_rows * -(-max_model_len // self._chunk)

    def host_columns(self, batch: Batch, window: int | None) -> HostColumns:
        """Short rows become one item a split, long rows one item a tile of queries."""
        starts, lengths = batch.starts, batch.lengths
        is_short = lengths <= self._split_queries
        if self._library is not None:
            is_short[self._first_of_library(batch) :] = False
        lowest = np.maximum(starts + 1 - window, 0) if window else np.zeros_like(starts)
        first_split = lowest // BLOCK_N * BLOCK_N // self._chunk
        num_splits = np.where(is_short, (batch.ends - 1) // self._chunk + 1 - first_split, 0)
        row, place = _expanded(num_splits)
        split_items = np.stack((row, place + first_split[row]), axis=1)

        is_long = ~is_short & (self._library is None)
        num_tiles = np.where(is_long, -(-lengths // self._long_queries), 0)
        long_row, tile = _expanded(num_tiles)
        first_query = tile * self._long_queries
        # The tiles that see most keys come first, so that none of them is left over at the end.
        order = np.argsort(-(starts[long_row] + first_query), kind="stable")
        long_items = np.stack((long_row, first_query), axis=1)[order]

        first_item = np.where(is_short, np.cumsum(num_splits) - num_splits, -1)
        rows = np.stack((batch.offsets[:-1], starts, lengths, first_item), axis=1)
        return HostColumns(
            rows=rows.astype(np.int32),
            split_items=split_items.astype(np.int32),
            long_items=long_items.astype(np.int32),
            tables=batch.block_tables,
        )

    def run(self, columns: Columns, layer: int, q: Tensor, out: Tensor) -> None:
        """Attention of q [tokens, heads, head_dim], contiguous, into `out`, alike."""
        space = columns.space
        if space.num_split_items:
            programs = (
                SPLIT_PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors(self._device),
                space.num_split_items * self._kv_heads,
            )
            self._attend(columns, layer, q, out, partial=True, num_programs=min(programs))
            combine_kernel[(space.num_rows, self._kv_heads)](
                out,
                columns.weighted,
                columns.sums,
                columns.rows,
                **self._shape(layer, partial=True),
                BLOCK_M=self._split_tile,
                num_warps=4,
            )
        if columns.library_rows is not None:
            assert self._library is not None
            keys, values = self.cache.layers[layer]
            first, window = columns.library_token, self.windows[layer]
            rows = columns.library_rows
            out[first:] = self._library(q[first:], keys, values, rows, window=window)
        if space.num_long_items:
            programs = space.num_long_items * self._kv_heads
            self._attend(columns, layer, q, out, partial=False, num_programs=programs)

    def _attend(
        self,
        columns: Columns,
        layer: int,
        q: Tensor,
        out: Tensor,
        *,
        partial: bool,
        num_programs: int,
    ) -> None:
        keys, values = self.cache.layers[layer]
        key_scales = value_scales = None
        scales = self.cache.scales
        if scales is not None:
            key_scales, value_scales = scales[layer]
        tile = self._split_tile if partial else self._long_tile
        attention_kernel[(num_programs,)](
            q,
            keys,
            values,
            key_scales,
            value_scales,
            out,
            columns.weighted,
            columns.sums,
            columns.num_split_items if partial else columns.num_long_items,
            columns.split_items if partial else columns.long_items,
            columns.rows,
            columns.tables,
            columns.width,
            self._head_dim**-0.5 * math.log2(math.e),
            **self._shape(layer, partial=partial),
            BLOCK_SIZE=self.cache.block_size,
            BLOCK_M=tile,
            PARTIAL=partial,
            FOLD=self._fold and not partial,
            SCALED=scales is not None,
            DOT=dot_type(q.dtype),
            PRECISION=dot_precision(q.dtype),
            **launch_options(tile, self._head_dim),
        )

    def _shape(self, layer: int, *, partial: bool) -> dict[str, int]:
        """The constants that all kernels share."""
        scaled = self.cache.scales is not None
        block_n = key_tile(self._head_dim, deterministic=self._fold, narrow=scaled and not partial)
        return {
            "KV_HEADS": self._kv_heads,
            "GROUP": self._group,
            "GROUP_PADDED": self._group_padded,
            "HEAD_DIM": self._head_dim,
            "D_PADDED": max(16, triton.next_power_of_2(self._head_dim)),
            "WINDOW": self.windows[layer] or 0,
            "BLOCK_N": block_n,
            "CHUNK": self._chunk,
        }


def partial_bytes(config: ModelConfig, *, num_tokens: int, deterministic: bool) -> int:
    """Of the partial results that so many tokens of KV can call for, rounded up."""
    tile = FIXED_TILE if deterministic else SPLIT_TILE
    of_item = 4 * config.num_kv_heads * max(tile, config.num_heads // config.num_kv_heads)
    return -(-of_item * (config.head_dim + 2) * num_tokens // CHUNK)


def long_tile_of(head_dim: int, *, deterministic: bool, scaled: bool) -> int:
    """Query rows of a tile of a long row. Wide heads leave a float8 cache registers for half."""
    is_wide = head_dim >= WIDE_HEAD
    return FIXED_TILE if deterministic or (scaled and is_wide) else LONG_TILE


def key_tile(head_dim: int, *, deterministic: bool, narrow: bool) -> int:
    """Keys of a tile, which divide BLOCK_N: as many as compile for sm_90 without spills.

    `deterministic`: the same for decodes and prefills. `narrow`: for the long rows of a float8
    cache.
    """
    if head_dim < WIDE_HEAD:
        return BLOCK_N
    if deterministic:
        return BLOCK_N // 4
    return BLOCK_N // 2 if narrow else BLOCK_N


def launch_options(tile: int, head_dim: int) -> dict[str, int]:
    """Warps and stages of the attention kernel; those that compile for sm_90 without spills."""
    return {
        "num_warps": 8 if tile >= FIXED_TILE else 4,
        "num_stages": STAGES if head_dim < WIDE_HEAD else WIDE_STAGES,
    }


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


def _expanded(counts: Ints) -> tuple[Ints, Ints]:
    """For each of counts[i] things of i: i, and which of them it is."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
