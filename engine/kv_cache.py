"""The KV cache in torch: the pool itself, writing and copying blocks.

Knows blocks. Must not know sequences, sharing or eviction: who holds a block is the scheduler's
business. How many blocks fit is engine.kv_memory's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kv_memory import KVShape

# What a broken row may leave in the pool. A larger (or NaN) value is stored as 0, so that a block's
# next owner, whose mask meets stale entries as 0 * value or value - inf, can never see a NaN. That
# the row is broken shows in its last hidden state (engine.torch_outputs).
MAX_STORED = 1e18


class KVCache:
    """The pool of KV blocks of all layers, allocated once.

    layers [layers, 2, num_blocks + 1, block_size, kv_heads, head_dim]
                    |  the last block is spare: never written, all zero; unused
                    |  table entries point at it
                    0 = keys, 1 = values
    """

    def __init__(
        self,
        config: KVShape,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        scales: Tensor | None = None,
    ) -> None:
        """`scales` [layers, 2, kv_heads] float32: what a stored number stands for, per head.

        For float8; None is 1.
        """
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        self.layers = torch.zeros(
            (config.num_layers, 2, num_blocks + 1, block_size, self.num_kv_heads, self.head_dim),
            dtype=dtype,
            device=device,
        )
        self.scales = scales
        self._gathered = self.layers.new_empty((2, 0))

    @property
    def spare_block(self) -> int:
        """The block that is all zero."""
        return self.num_blocks

    def write(self, layer: int, kv_slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [tokens, kv_heads, head_dim] at kv_slots [tokens] int64.

        A kv slot is block_id * block_size + offset.
        """
        flat = self.layers[layer].flatten(1, 2)
        largest = min(MAX_STORED, torch.finfo(flat.dtype).max)
        for part, new in enumerate((keys, values)):
            if self.scales is not None:
                self._write_scaled(flat[part], kv_slots, new, self.scales[layer, part])
                continue
            new = new.to(flat.dtype)
            flat[part].index_copy_(0, kv_slots, torch.where(new.abs() <= largest, new, 0))

    @staticmethod
    def _write_scaled(flat: Tensor, kv_slots: Tensor, new: Tensor, scales: Tensor) -> None:
        """What is beyond the type's range becomes its largest number."""
        new = new.float()
        new = torch.where(new.abs() <= MAX_STORED, new, 0) / scales[:, None]
        largest = torch.finfo(flat.dtype).max
        stored = new.clamp(-largest, largest).to(flat.dtype)
        # As bytes, since not every operation is there for float8.
        flat.view(torch.uint8).index_copy_(0, kv_slots, stored.view(torch.uint8))

    def gather(self, layer: int, block_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of block_ids [items, blocks] int64.

        Each is [items, blocks * block_size, kv_heads, head_dim] float32, until the next gather:
        they share one buffer, since fresh memory of this size costs as much as the copy.
        """
        pool, flat_ids = self.layers[layer].flatten(2), block_ids.flatten()
        size = flat_ids.numel() * pool.shape[2]
        if self._gathered.shape[1] < size:
            self._gathered = pool.new_empty((2, size))
        gathered = self._gathered[:, :size].unflatten(1, (flat_ids.numel(), -1))
        for part in range(2):
            source, target = pool[part], gathered[part]
            if self.scales is not None:
                source, target = source.view(torch.uint8), target.view(torch.uint8)
            torch.index_select(source, 0, flat_ids, out=target)
        shape = (block_ids.shape[0], -1, self.num_kv_heads, self.head_dim)
        keys, values = (part.view(shape) for part in gathered.to(torch.float32))
        if self.scales is not None:
            keys, values = (
                part * scales[:, None]
                for part, scales in zip((keys, values), self.scales[layer], strict=True)
            )
        return keys, values

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, target) each, in order: a later pair sees an earlier one."""
        for source, target in pairs:
            self.layers[:, :, target].copy_(self.layers[:, :, source])
