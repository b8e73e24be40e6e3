"""How many KV blocks a GPU has room for, by a trial step and not by a margin.

Owns the arithmetic; the memory is behind a protocol, so that it is tested without a GPU. Must not
know what an engine does in its trial, except that nothing it serves later needs more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


class DeviceMemory(Protocol):
    """Bytes, as the allocator of the device sees them."""

    def total(self) -> int:
        """Of the device."""
        ...

    def used_by_others(self) -> int:
        """What is taken and is not this process's allocator's: other processes, the context, and
        what the driver keeps for each captured graph.
        """
        ...

    def reserved(self) -> int:
        """What the allocator holds now, tensors and its own slack, with empty caches dropped."""
        ...

    def peak_reserved(self) -> int:
        """The most it held since the last `reset_peak`."""
        ...

    def reset_peak(self) -> None: ...


class CudaMemory:
    """Implements DeviceMemory for a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total(self) -> int:
        return torch.cuda.mem_get_info(self._device)[1]

    def used_by_others(self) -> int:
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free - torch.cuda.memory_reserved(self._device)

    def reserved(self) -> int:
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self._device)

    def peak_reserved(self) -> int:
        return torch.cuda.max_memory_reserved(self._device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What the trial found; bytes."""

    total: int
    others: int
    weights: int
    step: int  # the largest step, captured graphs included
    block_bytes: int
    num_blocks: int

    def describe(self) -> str:
        gib = 1 << 30
        return (
            f"GPU memory: {self.total / gib:.2f} GiB = {self.others / gib:.2f} others + "
            f"{self.weights / gib:.2f} weights + {self.step / gib:.2f} largest step + "
            f"{(self.num_blocks + 1) * self.block_bytes / gib:.2f} KV ({self.num_blocks} blocks "
            f"and a spare one) + "
            f"{(self.total - self.others - self.weights - self.step) % self.block_bytes} bytes"
        )


def plan_memory(
    trial: Callable[[int], int],
    memory: DeviceMemory,
    *,
    trial_blocks: int,
    block_bytes: int,
    granule: int = 1,
) -> MemoryPlan:
    """Blocks that fit beside the weights and the largest step, to the last one.

    `trial(num_blocks)` builds an engine with a KV pool of `trial_blocks` blocks, runs the largest
    step it may be asked for, captures its graphs, and lets go of it; it returns `used_by_others`
    as it was while all of that was there. Weights are loaded before.
    The pool comes in units of `granule` bytes. Raises ValueError if no block fits.
    """
    weights = memory.reserved()
    memory.reset_peak()
    others = trial(trial_blocks)
    pool = -(-(trial_blocks + 1) * block_bytes // granule) * granule
    step = max(0, memory.peak_reserved() - weights - pool)
    total, others = memory.total(), max(others, memory.used_by_others())
    room = (total - others - weights - step) // granule * granule
    num_blocks = room // block_bytes - 1
    if num_blocks < 1:
        raise ValueError(
            f"no KV block of {block_bytes} bytes fits: of {total} bytes others use {others}, the "
            f"weights {weights}, the largest step {step}, and one block is kept spare"
        )
    return MemoryPlan(total, others, weights, step, block_bytes, num_blocks)
