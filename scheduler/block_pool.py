"""The KV budget: take, share, publish and release blocks; the prefix cache with its LRU.

A block is in exactly one of three states:

    free        no content worth keeping           -> take
    cached      published, in no table, LRU order  -> share revives it, take evicts the oldest
    referenced  in refs[b] >= 1 block tables, published or not

It must not know sequences, plans or policies, and nothing of what a key is made of.
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.prefix import BlockKey


class BlockPool:
    """Blocks 0 .. num_blocks - 1 and who may find what in them."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: dict[int, None] = {}  # least recently used first
        self._keys: dict[int, BlockKey] = {}  # of published blocks
        self._published: dict[bytes, int] = {}  # digest -> block

    @property
    def num_available(self) -> int:
        """Blocks that `take` could give."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_referenced(self) -> int:
        return self.num_blocks - self.num_available

    def take(self, count: int) -> list[int]:
        """`count` private blocks, each in one table; evicts cached ones when no free one is left.

        The caller has checked num_available: there is no half an answer.
        """
        assert count <= self.num_available, "more blocks taken than there are"
        taken = []
        for _ in range(count):
            block = self._free.pop() if self._free else self._evict()
            self.refs[block] = 1
            taken.append(block)
        return taken

    def _evict(self) -> int:
        block = next(iter(self._cached))
        del self._cached[block]
        self._forget(block)
        return block

    def share(self, blocks: Iterable[int]) -> None:
        """One more table holds each of these blocks, which are referenced or cached."""
        for block in blocks:
            if self.refs[block] == 0:
                del self._cached[block]
            self.refs[block] += 1

    def release(self, table: list[int]) -> None:
        """A table lets go of its blocks, the last first: tails of prefixes go before heads."""
        for block in reversed(table):
            assert self.refs[block] > 0, f"block {block} released twice"
            self.refs[block] -= 1
            if self.refs[block] == 0:
                if block in self._keys:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def find(self, key: BlockKey) -> int | None:
        """The block with exactly this content: one with the same hash alone does not count."""
        block = self._published.get(key.digest)
        return block if block is not None and self._keys[block] == key else None

    def publish(self, block: int, key: BlockKey) -> bool:
        """Lets others find this full block, which is never written again.

        If a block with this content is published already that one stays. False if the hash names
        another content: then blocks after this one must not be published either, since their keys
        know their past by that hash only.
        """
        assert self.refs[block] > 0, "only a block in use has content"
        if key.digest in self._published:
            return self.find(key) is not None
        assert block not in self._keys, "a block has one content"
        self._published[key.digest] = block
        self._keys[block] = key
        return True

    def unpublish(self, block: int) -> None:
        """Nobody finds this block any more; whoever holds it keeps it."""
        if block not in self._keys:
            return
        self._forget(block)
        if self.refs[block] == 0:
            del self._cached[block]
            self._free.append(block)

    def clear(self) -> None:
        """Unpublishes everything: what is in the KV memory can no longer be trusted."""
        for block in list(self._keys):
            self.unpublish(block)

    def _forget(self, block: int) -> None:
        del self._published[self._keys.pop(block).digest]

    def key_of(self, block: int) -> BlockKey | None:
        """What a published block holds; None for any other block."""
        return self._keys.get(block)

    def is_cached(self, block: int) -> bool:
        return block in self._cached

    def cached_blocks(self) -> tuple[int, ...]:
        return tuple(self._cached)

    def free_blocks(self) -> tuple[int, ...]:
        return tuple(self._free)
