"""Names for the contents of KV blocks: chained hashes over a namespace and exact tokens.

A key holds what its hash stands for, so that two contents of one hash are told apart. Nothing
here may know which block, if any, holds the content.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

Digest = Callable[[bytes], bytes]

# The first byte says what was hashed, so no namespace can pose as a parent and its tokens.
_ROOT, _BLOCK = b"\x00", b"\x01"


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


class BlockKey(NamedTuple):
    """The content of one full block: its tokens, and by `parent` all tokens before them."""

    digest: bytes
    parent: bytes
    tokens: bytes  # int32 each


class KeyChain:
    """Computes the keys of a sequence's leading full blocks."""

    def __init__(self, block_size: int, digest: Digest = sha256) -> None:
        self._block_size = block_size
        self._digest = digest

    def extend(
        self, keys: list[BlockKey], namespace: bytes, token_ids: Sequence[int], num_blocks: int
    ) -> None:
        """Appends to `keys` until it names the first `num_blocks` blocks of `token_ids`."""
        if len(keys) >= num_blocks:
            return
        first, size = len(keys), self._block_size
        parent = keys[-1].digest if keys else self._digest(_ROOT + namespace)
        ids = array("i", token_ids[first * size : num_blocks * size])
        data, width = ids.tobytes(), size * ids.itemsize
        for begin in range(0, len(data), width):
            tokens = data[begin : begin + width]
            digest = self._digest(_BLOCK + parent + tokens)
            keys.append(BlockKey(digest, parent, tokens))
            parent = digest
