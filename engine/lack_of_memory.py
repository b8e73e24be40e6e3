"""Lack of memory as torch reports it, on any device.

Owns how it is told from other errors and what is given back after it. Must not know steps.
"""

from __future__ import annotations

import torch


def is_out_of_memory(error: Exception) -> bool:
    """Of the allocator, a library or the driver, which do not all say it by the type."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error)
    return any(
        words in text for words in ("out of memory", "ALLOC_FAILED", "can't allocate memory")
    )


def release_memory(device: torch.device) -> None:
    """Give what the allocator holds and nobody uses back to the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
