"""The KV cache: how many tokens fit a memory budget, the pool itself, writing and copying blocks.

Knows bytes and blocks. Must not know sequences, sharing or eviction: who holds a block is the
scheduler's business.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

GIB = 1 << 30
GB = 10**9

# What a broken row may leave in the pool. A larger (or NaN) value is stored as 0, so that a block's
# next owner, whose mask meets stale entries as 0 * value or value - inf, can never see a NaN.
MAX_STORED = 1e18


class ElementSize(Protocol):
    """What the size of a KV element is asked of: a torch.dtype, or Int8KV."""

    @property
    def itemsize(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Int8KV:
    """KV in 8 bits with a float32 scale for each position of a head, keys and values apart."""

    itemsize: int = 1
    scale_bytes: int = 4


class KVShape(Protocol):
    """The part of a model's configuration that decides the size of its KV."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


def kv_bytes_per_token(config: KVShape, dtype: ElementSize) -> int:
    """2 (keys and values) x layers x kv_heads x (head_dim x bytes of one element + scale)."""
    per_head = config.head_dim * dtype.itemsize + _scale_bytes(dtype)
    return 2 * config.num_layers * config.num_kv_heads * per_head


def _scale_bytes(dtype: ElementSize) -> int:
    return dtype.scale_bytes if isinstance(dtype, Int8KV) else 0


def blocks_for(memory_bytes: int, *, bytes_per_token: int, block_size: int) -> int:
    """Whole blocks that fit `memory_bytes` beside the one spare block that the pool always has.

    Raises ValueError if not even one fits.
    """
    block_bytes = bytes_per_token * block_size
    num_blocks = memory_bytes // block_bytes - 1
    if num_blocks < 1:
        raise ValueError(
            f"a KV memory of {memory_bytes} bytes holds no block: {block_size} tokens x "
            f"{bytes_per_token} bytes = {block_bytes} bytes, and one block is kept spare"
        )
    return num_blocks


def useful_blocks(*, max_running: int, max_model_len: int, block_size: int) -> int:
    """Blocks that `max_running` sequences of full length hold; beyond it only the prefix cache."""
    return max_running * -(-max_model_len // block_size)


def available_memory(device: torch.device) -> int:
    """Bytes that are free now: of the GPU, or of the machine's (or container's) RAM."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(_available_ram(), _cgroup_headroom(), _address_headroom())


def _available_ram() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cgroup_headroom() -> int:
    """What the container may still take (cgroup v2); without a limit, more than any machine has."""
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if not (limit.exists() and used.exists()):
        return 1 << 62
    text = limit.read_text().strip()
    return 1 << 62 if text == "max" else max(0, int(text) - int(used.read_text()))


def _address_headroom() -> int:
    """What `ulimit -v` lets this process still map; without a limit, more than any machine has."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    statm = Path("/proc/self/statm")
    if limit == resource.RLIM_INFINITY or not statm.exists():
        return 1 << 62
    mapped = int(statm.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    return max(0, limit - mapped)


def describe(config: KVShape, dtype: ElementSize, *, num_blocks: int, block_size: int) -> str:
    """The KV budget as printed at start: the formula and its result."""
    tokens = num_blocks * block_size
    total = tokens * kv_bytes_per_token(config, dtype)
    element = f"{config.head_dim} head_dim x {dtype.itemsize} bytes"
    if scale := _scale_bytes(dtype):
        element = f"({config.head_dim} head_dim x {dtype.itemsize} byte + {scale} of scale)"
    return (
        f"KV cache: 2 x {config.num_layers} layers x {config.num_kv_heads} kv_heads x "
        f"{element} x {tokens} tokens = {total} bytes "
        f"= {total / GIB:.2f} GiB = {total / GB:.2f} GB ({num_blocks} blocks of {block_size})"
    )


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
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        self.layers = torch.zeros(
            (config.num_layers, 2, num_blocks + 1, block_size, self.num_kv_heads, self.head_dim),
            dtype=dtype,
            device=device,
        )
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
            new = new.to(flat.dtype)
            flat[part].index_copy_(0, kv_slots, torch.where(new.abs() <= largest, new, 0))

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
            torch.index_select(pool[part], 0, flat_ids, out=gathered[part])
        shape = (block_ids.shape[0], -1, self.num_kv_heads, self.head_dim)
        keys, values = gathered.to(torch.float32)
        return keys.view(shape), values.view(shape)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, target) each, in order: a later pair sees an earlier one."""
        for source, target in pairs:
            self.layers[:, :, target].copy_(self.layers[:, :, source])
