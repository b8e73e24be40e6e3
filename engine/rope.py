"""Rotary position embedding in torch: engine.rope_tables as tensors, and the rotation.

Pairs are (i, i + head_dim / 2), as in Hugging Face checkpoints. It must not know sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine import rope_tables as host
from engine.model_config import RopeConfig


def rope_tables(rope: RopeConfig, head_dim: int, num_positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin for positions 0 .. num_positions - 1: float32 [num_positions, head_dim / 2]."""
    cos, sin = host.rope_tables(rope, head_dim, num_positions)
    return torch.from_numpy(cos), torch.from_numpy(sin)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [tokens, heads, head_dim] by its tokens' rows of the tables [tokens, head_dim / 2].

    The arithmetic is float32 whatever the dtype of x.
    """
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)
