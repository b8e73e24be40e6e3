"""Paged attention in plain torch, for every device: the arithmetic others are compared with.

A query's result depends on its own sequence alone, bit for bit on the CPU: not on batch mates, nor
on how its sequence was cut into rows. Must not know the model beyond heads and windows.

How: engine.attention.tiles makes every query meet the same matrix products in the same order.
Their partial results merge by the online softmax (Milakov and Gimelshein, arXiv 1805.02867), in
which a key range that is masked altogether changes no bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.arrays import to_device
from engine.attention import Attend
from engine.attention.tiles import Product, TilePlan, TileShape
from engine.batch import Batch
from engine.kv_cache import KVCache

# Keys of a product: short sequences waste the rest of their last range.
KV_RANGE = 64
# Rows of a product: queries of a tile times heads of a group, if that group is not larger itself.
MAX_TILE_ROWS = 16
# Rows come in multiples of this: MKL has other kernels below 4 rows, and threads share out rows.
ROW_MULTIPLE = 4
# Bytes of keys and values, or of scores, that one product works on: about a core's cache.
MAX_PRODUCT_BYTES = 4 << 20
LOWEST = torch.finfo(torch.float32).min


class ReferenceAttention:
    """Implements engine.attention.Attention."""

    def __init__(self, cache: KVCache, *, num_heads: int, windows: tuple[int | None, ...]) -> None:
        """`windows`, one a layer: how many keys a query sees, its own included; None for all."""
        self._cache = cache
        self._windows = windows
        self._kv_heads = cache.num_kv_heads
        self._group = num_heads // cache.num_kv_heads
        queries = 1
        while queries * 2 * self._group <= MAX_TILE_ROWS:
            queries *= 2
        self._padding = -queries * self._group % ROW_MULTIPLE
        keys = cache.block_size * max(1, KV_RANGE // cache.block_size)
        kv_bytes = 2 * 4 * keys * self._kv_heads * cache.head_dim
        score_bytes = 4 * keys * self._kv_heads * queries * self._group
        self._shape = TileShape(
            queries=queries,
            keys=keys,
            block_size=cache.block_size,
            max_gathered=max(1, MAX_PRODUCT_BYTES // kv_bytes),
            max_tiles=max(1, MAX_PRODUCT_BYTES // score_bytes),
        )

    def plan(self, batch: Batch) -> Attend:
        """Prepare a step; see engine.attention.Attention."""
        steps = {window: self._step(batch, window) for window in dict.fromkeys(self._windows)}

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._cache.write(layer, batch.kv_slots, k, v)
            return self._attend(steps[self._windows[layer]], layer, q)

        return attend

    def _step(self, batch: Batch, window: int | None) -> _Step:
        device = self._cache.layers.device
        tiles = TilePlan(batch, self._shape, window=window, spare_block=self._cache.spare_block)
        return _Step(
            num_tiles=tiles.num_tiles,
            token_of_query=to_device(tiles.token_of_query().reshape(-1), device),
            place_of_token=to_device(tiles.place_of_token(), device),
            products=[_DeviceProduct.of(product, device) for product in tiles.products()],
        )

    def _attend(self, step: _Step, layer: int, q: Tensor) -> Tensor:
        """q [tokens, heads, head_dim] -> the same shape and dtype."""
        queries, group, kv_heads = self._shape.queries, self._group, self._kv_heads
        head_dim = q.shape[-1]
        scaled = q.to(torch.float32) * head_dim**-0.5
        tiled = scaled.index_select(0, step.token_of_query)
        tiled = tiled.view(step.num_tiles, queries, kv_heads, group, head_dim)
        tiled = tiled.permute(2, 0, 1, 3, 4).flatten(2, 3)
        tiled = F.pad(tiled, (0, 0, 0, self._padding))

        state = _Partial.empty(tiled)
        for product in step.products:
            keys, values = self._cache.gather(layer, product.blocks)
            part = _multiply(tiled[:, product.tiles], keys, values, product.biases, group=group)
            for first, last, tile in product.merges:
                state.merge(tile, part, first, last)

        out = (state.weighted / state.total)[:, :, : queries * group]
        out = out.unflatten(2, (queries, group)).permute(1, 2, 0, 3, 4)
        out = out.reshape(step.num_tiles * queries, kv_heads * group, head_dim)
        return out.index_select(0, step.place_of_token).to(q.dtype)


@dataclass(frozen=True, slots=True)
class _DeviceProduct:
    """A Product on the device; masks as 0 / -inf to add."""

    tiles: slice | Tensor
    blocks: Tensor  # [items or 1, blocks of a range] int64
    biases: tuple[tuple[int, int, Tensor], ...]  # first, last, [last - first, queries, 1, keys]
    merges: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, product: Product, device: torch.device) -> _DeviceProduct:
        tiles, last = product.tiles, int(product.tiles[-1]) + 1
        in_a_row = len(product.merges) == 1
        biases = []
        for mask in product.masks:
            visible = to_device(mask.visible[:, :, None], device)
            bias = torch.zeros(visible.shape, device=device).masked_fill_(~visible, -torch.inf)
            biases.append((mask.first, mask.last, bias))
        return cls(
            tiles=slice(int(tiles[0]), last) if in_a_row else to_device(tiles, device),
            blocks=to_device(product.blocks, device),
            biases=tuple(biases),
            merges=product.merges,
        )


@dataclass(frozen=True, slots=True)
class _Step:
    """What all layers of a step with the same window share."""

    num_tiles: int
    token_of_query: Tensor  # [tiles * queries] int64
    place_of_token: Tensor  # [tokens] int64
    products: list[_DeviceProduct]


@dataclass(slots=True)
class _Partial:
    """Softmax over some of the keys: the peak score, the sum of exp(score - peak), and the values
    weighted likewise. Shapes [kv_heads, tiles, rows, 1], the same, [kv_heads, tiles, rows, dim].
    """

    peak: Tensor
    total: Tensor
    weighted: Tensor

    @classmethod
    def empty(cls, queries: Tensor) -> _Partial:
        """Over no keys at all, for queries [kv_heads, tiles, rows, dim]."""
        one = (*queries.shape[:-1], 1)
        return cls(
            peak=queries.new_full(one, -torch.inf),
            total=queries.new_zeros(one),
            weighted=torch.zeros_like(queries),
        )

    def merge(self, tile: int, other: _Partial, first: int, last: int) -> None:
        """Take in other[first:last] for the tiles from `tile` on."""
        size = last - first
        peak, total, weighted = (
            tensor.narrow(1, tile, size) for tensor in (self.peak, self.total, self.weighted)
        )
        other_peak = other.peak.narrow(1, first, size)
        new_peak = torch.maximum(peak, other_peak)
        finite = new_peak.clamp(min=LOWEST)  # where no key was visible yet, -inf - -inf is NaN
        scale, other_scale = (peak - finite).exp_(), (other_peak - finite).exp_()
        peak.copy_(new_peak)
        total.mul_(scale).add_(other.total.narrow(1, first, size) * other_scale)
        weighted.mul_(scale).add_(other.weighted.narrow(1, first, size) * other_scale)


def _multiply(
    queries: Tensor,  # [kv_heads, items, rows, dim] float32, scaled
    keys: Tensor,  # [items or 1, keys, kv_heads, dim] float32
    values: Tensor,  # like keys
    biases: tuple[tuple[int, int, Tensor], ...],
    *,
    group: int,
) -> _Partial:
    kv_heads, items, rows, _ = queries.shape
    num_keys = keys.shape[1]
    scores = queries.new_empty((kv_heads, items, rows, num_keys))
    # A product a head: so the strided keys need no copy into another order. The results must be
    # contiguous, or torch makes each item a call of its own.
    for head in range(kv_heads):
        of_head = keys[:, :, head].expand(items, -1, -1)
        torch.bmm(queries[head], of_head.transpose(1, 2), out=scores[head])
    for first, last, bias in biases:
        real = scores[:, first:last, : bias.shape[1] * group]
        real.unflatten(2, (-1, group)).add_(bias)
    peak = scores.amax(-1, keepdim=True)
    weights = scores.sub_(peak.clamp(min=LOWEST)).exp_()
    weighted = queries.new_empty(queries.shape)
    for head in range(kv_heads):
        of_head = values[:, :, head].expand(items, -1, -1)
        torch.bmm(weights[head], of_head, out=weighted[head])
    return _Partial(peak=peak, total=weights.sum(-1, keepdim=True), weighted=weighted)
