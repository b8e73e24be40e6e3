"""The attention interface, and the choice of an implementation for a device.

An implementation owns the KV cache of all layers in the layout it likes.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Protocol

from torch import Tensor

from engine.batch import Batch
from engine.kv_cache import KVCache

# attend(layer, q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim]) -> like q
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Attention(Protocol):
    """Paged causal attention over a batch of rows of any lengths."""

    def plan(self, batch: Batch) -> Attend:
        """Prepare a step; the returned function stores a layer's k and v, then attends."""
        ...


def select_attention(
    cache: KVCache, *, num_heads: int, windows: tuple[int | None, ...]
) -> Attention:
    """The implementation for the device that the cache is on; chosen once, at start."""
    # Here, since the implementations import the protocol above, and some need what only a machine
    # with a GPU has.
    if cache.layers.device.type == "cuda":
        if find_spec("flash_attn_interface") is not None:
            from engine.attention.library import LibraryAttention, flash3

            return LibraryAttention(cache, windows=windows, library=flash3)
        if find_spec("triton") is not None:
            from engine.attention.triton import TritonAttention

            return TritonAttention(cache, num_heads=num_heads, windows=windows)
    from engine.attention.reference import ReferenceAttention

    return ReferenceAttention(cache, num_heads=num_heads, windows=windows)
