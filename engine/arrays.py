"""Arrays of a step: numpy on the host, where `device` is None, or torch tensors on their device.

Owns the few operations that the two spell differently. torch is imported where a tensor is met, so
an engine on host arrays starts and lives without it. Must not know what the numbers mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

Array: TypeAlias = Any  # NDArray or Tensor; both index, compare, add and assign alike
Ints = NDArray[np.int64]


def to_device(array: NDArray[Any], device: torch.device | None) -> Array:
    """A copy of a host array there; on cuda the copy does not block the host."""
    copy = np.array(array, order="C")
    if device is None:
        return copy
    import torch

    tensor = torch.from_numpy(copy)
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def zeros(shape: tuple[int, ...], dtype: str, device: torch.device | None) -> Array:
    """`dtype` is a name that numpy and torch share."""
    if device is None:
        return np.zeros(shape, dtype=dtype)
    import torch

    return torch.zeros(shape, dtype=getattr(torch, dtype), device=device)


def concatenated(parts: Sequence[Array]) -> Array:
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    import torch

    return torch.cat(list(parts))


def rows_at(rows: Array, indices: Ints, device: torch.device | None) -> Array:
    """rows [n, ...] at ascending, different indices; the array itself where they are all."""
    return rows if len(indices) == len(rows) else rows[to_device(indices, device)]


def largest_magnitudes(rows: Array) -> Array:
    """[rows] float32 of [rows, n]; a nan stays one."""
    if isinstance(rows, np.ndarray):
        # a nan makes either of them a nan
        return np.maximum(rows.max(axis=1), -rows.min(axis=1))
    import torch

    return torch.linalg.vector_norm(rows, torch.inf, 1, dtype=torch.float32)


def to_host(array: Array) -> Array:
    """From cuda into pinned memory without waiting; anything else as it is."""
    if isinstance(array, np.ndarray) or array.device.type != "cuda":
        return array
    import torch

    host = torch.empty(array.shape, dtype=array.dtype, pin_memory=True)
    return host.copy_(array, non_blocking=True)


def column_sums(rows: Array) -> Array:
    """[n] float64 of [rows, n]."""
    if isinstance(rows, np.ndarray):
        return rows.sum(0, dtype=np.float64)
    import torch

    return rows.sum(0, dtype=torch.float64)


def stacked(rows: Sequence[Array]) -> Array:
    """[rows, n] float32 of rows [n] of any precision."""
    if isinstance(rows[0], np.ndarray):
        return np.stack([row.astype(np.float32) for row in rows])
    import torch

    return torch.stack([row.to(torch.float32) for row in rows])


def ban_ids(logits: Array, ids: Array, banned: Array) -> None:
    """Sets logits [vocab] to -inf at ids [n] where banned [n]; an id may come twice."""
    if isinstance(logits, np.ndarray):
        logits[ids[banned]] = -np.inf
        return
    import torch

    # without asking the device how many there are
    ban = torch.zeros(len(ids), device=logits.device).masked_fill_(banned, -torch.inf)
    logits.index_add_(0, ids, ban)
