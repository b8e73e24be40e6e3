"""The attention interface, and the choice of an implementation for a device.

An implementation owns the KV cache of all layers in the layout it likes.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from engine.batch import Batch
from engine.kv_cache import KVCache

if TYPE_CHECKING:
    from engine.attention.triton import TritonAttention

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
        if find_spec("triton") is not None:
            return fused_attention(cache, num_heads=num_heads, windows=windows)
        if flash3_serves(cache):
            from engine.attention.library import LibraryAttention, flash3

            return LibraryAttention(cache, windows=windows, library=flash3)
    from engine.attention.reference import ReferenceAttention

    return ReferenceAttention(cache, num_heads=num_heads, windows=windows)


def fused_attention(
    cache: KVCache,
    *,
    num_heads: int,
    windows: tuple[int | None, ...],
    deterministic: bool = False,
) -> TritonAttention:
    """Triton's kernels; for long rows FlashAttention-3 where it is there.

    Decode rows are Triton's in every step, so a captured graph never holds the library, and a row
    computes alike in and out of a graph. Deterministic mode is Triton's alone: there a row must
    have the same bits as a prefill and as a decode.
    """
    from engine.attention.library import flash3
    from engine.attention.triton import TritonAttention

    use_library = not deterministic and flash3_serves(cache)
    return TritonAttention(
        cache,
        num_heads=num_heads,
        windows=windows,
        deterministic=deterministic,
        library=flash3 if use_library else None,
    )


def flash3_serves(cache: KVCache) -> bool:
    """Whether FlashAttention-3 is there, and takes a cache like this."""
    return (
        find_spec("flash_attn_interface") is not None
        and cache.layers.dtype.itemsize == 2  # float8 would want queries in float8 too
        and cache.head_dim % 8 == 0
        and cache.head_dim <= 256
    )
