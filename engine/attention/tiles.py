"""How a batch becomes products of one fixed shape: query tiles times key ranges.

Pure planning on the host, for engine.attention.reference. Knows positions; must not do arithmetic
on keys or values.

             range 0        range 1        range 2
             keys 0..63     64..127        128..191
    tile 40  [M, D]x[D, R]  [M, D]x[D, R]  [M, D]x[D, R]   queries 160..163; M = 4 x group
    tile 41  ...            ...            ...             queries 164..167

Tiles and ranges lie at absolute positions, so a query always has the same place in the same
products, however its sequence was cut into rows. A decode is a tile in which one query counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from engine.arrays import Ints
from engine.batch import Batch

# A row of at most so many tiles joins the others in batched products.
MAX_BATCHED_TILES = 2


@dataclass(frozen=True, slots=True)
class TileShape:
    """Queries of a tile, keys of a range, and the limits of one product."""

    queries: int
    keys: int
    block_size: int
    max_gathered: int  # items of a product where each has keys of its own
    max_tiles: int  # tiles of a product that share one key range


@dataclass(frozen=True, slots=True)
class Mask:
    """What the tiles first .. last - 1 of a product see; the others see the whole range."""

    first: int
    last: int
    visible: NDArray[np.bool_]  # [last - first, queries, keys]


@dataclass(frozen=True, slots=True)
class Product:
    """One batched product: `tiles` times a key range of each, or one range for all of them.

    `merges` are (first, last, tile): partial results first .. last - 1 belong to the tiles from
    `tile` on. In plan order a tile meets its ranges in ascending order.
    """

    tiles: Ints  # [items]
    blocks: Ints  # [items or 1, blocks of a range], the spare block where the table has none
    masks: tuple[Mask, ...]
    merges: tuple[tuple[int, int, int], ...]


class TilePlan:
    """The tiles of a batch under one window, and their products."""

    def __init__(
        self, batch: Batch, shape: TileShape, *, window: int | None, spare_block: int
    ) -> None:
        """`window`: how many keys a query sees, its own included; None for all."""
        self._batch, self._shape, self._window = batch, shape, window
        self._spare_block = spare_block
        first_tile, last_tile = batch.starts // shape.queries, (batch.ends - 1) // shape.queries
        counts = last_tile - first_tile + 1
        row = np.repeat(np.arange(len(counts)), counts)
        before = np.cumsum(counts) - counts
        first = (np.arange(len(row)) - before[row] + first_tile[row]) * shape.queries

        lowest = np.maximum(first, batch.starts[row]) + 1 - (window or np.inf)
        lowest = np.maximum(lowest, 0).astype(np.int64)
        last = np.minimum(first + shape.queries, batch.ends[row]) - 1
        first_range = lowest // shape.keys
        num_ranges = last // shape.keys - first_range + 1

        # Batched tiles come first, those with most ranges leading: range by range, a prefix of them
        # takes part. The tiles of a long row follow, in their order.
        batched = counts[row] <= MAX_BATCHED_TILES
        order = np.lexsort((np.where(batched, -num_ranges, 0), ~batched))
        self._row, self._first = row[order], first[order]
        self._first_range, self._num_ranges = first_range[order], num_ranges[order]
        self._num_batched = int(batched.sum())

    @property
    def num_tiles(self) -> int:
        return len(self._row)

    def token_of_query(self) -> Ints:
        """[tiles, queries]: each place's token; a place outside its row repeats a neighbour."""
        batch, row = self._batch, self._row[:, None]
        positions = self._first[:, None] + np.arange(self._shape.queries)
        inside = np.clip(positions, batch.starts[row], batch.ends[row] - 1)
        return batch.offsets[row] + inside - batch.starts[row]

    def place_of_token(self) -> Ints:
        """[tokens]: tile * queries + place in the tile."""
        positions = self._first[:, None] + np.arange(self._shape.queries)
        row = self._row[:, None]
        real = (positions >= self._batch.starts[row]) & (positions < self._batch.ends[row])
        places = np.empty(self._batch.offsets[-1], dtype=np.int64)
        places[self.token_of_query()[real]] = np.flatnonzero(real)
        return places

    def products(self) -> Iterator[Product]:
        yield from self._batched_products()
        yield from self._long_row_products()

    def _batched_products(self) -> Iterator[Product]:
        """Tiles of different sequences, each with keys of its own."""
        counts = self._num_ranges[: self._num_batched]
        if not len(counts):
            return
        # taking_part[j] = number of tiles with more than j ranges
        taking_part = len(counts) - np.searchsorted(
            counts[::-1], np.arange(counts[0]), side="right"
        )
        step = np.repeat(np.arange(counts[0]), taking_part)
        tile = np.arange(len(step)) - (np.cumsum(taking_part) - taking_part)[step]
        size = self._shape.max_gathered
        for begin in range(0, len(step), size):
            tiles, steps = tile[begin : begin + size], step[begin : begin + size]
            ranges = self._first_range[tiles] + steps
            cuts = [0, *(np.flatnonzero(np.diff(steps)) + 1).tolist(), len(steps)]
            yield Product(
                tiles=tiles,
                blocks=self._blocks(self._row[tiles], ranges),
                masks=self._masks(tiles, ranges),
                merges=tuple((a, b, int(tiles[a])) for a, b in pairwise(cuts)),
            )

    def _long_row_products(self) -> Iterator[Product]:
        """Consecutive tiles of one sequence, which share a key range."""
        tile = self._num_batched
        while tile < self.num_tiles:
            row_end = int(np.searchsorted(self._row[tile:], self._row[tile], side="right")) + tile
            last = min(tile + self._shape.max_tiles, row_end)
            tiles = np.arange(tile, last)
            ends = self._first_range[tiles] + self._num_ranges[tiles]
            for key_range in range(int(self._first_range[tile]), int(ends.max())):
                seen = tiles[(self._first_range[tiles] <= key_range) & (ends > key_range)]
                yield Product(
                    tiles=seen,
                    blocks=self._blocks(self._row[tile : tile + 1], np.array([key_range])),
                    masks=self._masks(seen, np.full(len(seen), key_range)),
                    merges=((0, len(seen), int(seen[0])),),
                )
            tile = last

    def _blocks(self, rows: Ints, ranges: Ints) -> Ints:
        """[items, blocks of a range]"""
        per_range = self._shape.keys // self._shape.block_size
        tables = self._batch.block_tables
        index = ranges[:, None] * per_range + np.arange(per_range)
        ids = tables[rows[:, None], np.minimum(index, tables.shape[1] - 1)].astype(np.int64)
        return np.where((index < tables.shape[1]) & (ids >= 0), ids, self._spare_block)

    def _masks(self, tiles: Ints, ranges: Ints) -> tuple[Mask, ...]:
        """One mask for each run of tiles that do not see their whole range."""
        queries, keys = self._shape.queries, self._shape.keys
        first_query, first_key = self._first[tiles], ranges * keys
        partial = first_key + keys - 1 > first_query
        if self._window is not None:
            partial |= first_key <= first_query + queries - 1 - self._window
        edges = np.flatnonzero(np.diff(partial, prepend=False, append=False))
        masks = []
        for begin, end in edges.reshape(-1, 2).tolist():
            query = first_query[begin:end, None, None] + np.arange(queries)[:, None]
            key = first_key[begin:end, None, None] + np.arange(keys)
            visible = key <= query
            if self._window is not None:
                visible &= key > query - self._window
            masks.append(Mask(first=begin, last=end, visible=visible))
        return tuple(masks)
