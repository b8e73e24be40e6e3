"""The size of the KV cache: what a token takes, and how many blocks fit a memory budget.

Knows bytes and blocks. Must not know the pool itself, nor torch but for the memory of a GPU.
"""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

GIB = 1 << 30
GB = 10**9


class ElementSize(Protocol):
    """What the size of a KV element is asked of: a torch.dtype, or IntegerKV."""

    @property
    def itemsize(self) -> int: ...


@dataclass(frozen=True, slots=True)
class IntegerKV:
    """KV as integers with a float32 scale for each position of a head, keys and values apart."""

    itemsize: int
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
    return dtype.scale_bytes if isinstance(dtype, IntegerKV) else 0


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


def available_memory(device: str) -> int:
    """Bytes that are free now: of the GPU ("cuda"), or of the machine's (or container's) RAM."""
    if device.startswith("cuda"):
        import torch

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
    unit = "byte" if dtype.itemsize == 1 else "bytes"
    element = f"{config.head_dim} head_dim x {dtype.itemsize} {unit}"
    if scale := _scale_bytes(dtype):
        element = f"({element} + {scale} of scale)"
    return (
        f"KV cache: 2 x {config.num_layers} layers x {config.num_kv_heads} kv_heads x "
        f"{element} x {tokens} tokens = {total} bytes "
        f"= {total / GIB:.2f} GiB = {total / GB:.2f} GB ({num_blocks} blocks of {block_size})"
    )
