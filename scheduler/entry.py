"""How a waiting sequence would enter the batch: which computed blocks it can have for nothing.

Two sources: the prefix cache, and a running sibling of the same Submit (n > 1), whose prompt is
shared block by block and whose last, partial block is copied:

    prompt of 10, blocks of 4     leader   [0 1 2 3] [4 5 6 7] [8 9 a b]
                                              |         |       copied, 9 is computed again
                                  sibling  [0 1 2 3] [4 5 6 7] [8 9 . .]

What is just being computed by a running sequence is worth waiting for. It must not take blocks or
change the pool: a look is all it is, so nothing is held for those who wait.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from scheduler.block_pool import BlockPool
from scheduler.prefix import KeyChain
from scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Entry:
    """Start at `num_computed`: share `blocks`, and copy `copy_source` to be the block after."""

    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    copy_source: int | None = None
    # Whether the prefix cache was asked. A fork isn't a hit: a sibling's prompt is its own.
    was_looked_up: bool = False

    @property
    def num_cached(self) -> int:
        return self.num_computed if self.was_looked_up else 0


class EntryFinder:
    """Looks for the best entry, or for the leader to wait for."""

    def __init__(self, pool: BlockPool, chain: KeyChain | None, block_size: int) -> None:
        self._pool = pool
        self._chain = chain
        self._block_size = block_size

    def find(self, sequence: Sequence, running: Iterable[Sequence], step: int) -> Entry | None:
        """The entry in step `step`; None if `sequence` had better wait for its new leader.

        At least the last token is left to compute, since its logits yield the next.
        """
        sequence.leader = None
        if sequence.needs_every_position:
            return Entry()
        cached = self._cached(sequence)
        source = self._fork_source(sequence, step)
        if source is not None:
            fork = self._fork(sequence, source)
            return fork if fork.num_computed > cached.num_computed else cached
        if sequence.leader is None and self._chain is not None:
            self._follow_prefix(sequence, len(cached.blocks), running)
        return cached if sequence.leader is None else None

    def _cached(self, sequence: Sequence) -> Entry:
        if self._chain is None:
            return Entry()
        limit = (len(sequence.token_ids) - 1) // self._block_size
        self._chain.extend(
            sequence.block_keys, sequence.request.cache_namespace, sequence.token_ids, limit
        )
        blocks: list[int] = []
        for key in islice(sequence.block_keys, limit):
            block = self._pool.find(key)
            if block is None:
                break
            blocks.append(block)
        return Entry(blocks, len(blocks) * self._block_size, was_looked_up=True)

    def _fork_source(self, sequence: Sequence, step: int) -> Sequence | None:
        """A sibling whose prompt was written by an earlier plan: copies run before rows."""
        for sibling in sequence.family:
            if not sibling.is_running:
                continue
            if 0 < sibling.prefilled_step < step:
                sequence.leader = None
                return sibling
            sequence.leader, sequence.leader_end = sibling, sibling.num_prefill
        return None

    def _fork(self, sequence: Sequence, source: Sequence) -> Entry:
        num_computed = min(sequence.num_prompt, len(sequence.token_ids) - 1)
        num_full, tail = divmod(num_computed, self._block_size)
        return Entry(
            source.block_ids[:num_full],
            num_computed,
            source.block_ids[num_full] if tail else None,
        )

    def _follow_prefix(
        self, sequence: Sequence, num_found: int, running: Iterable[Sequence]
    ) -> None:
        """Makes the running prefill that will publish our next block, if there is one, leader."""
        limit = (len(sequence.token_ids) - 1) // self._block_size
        if num_found == limit:
            return
        keys = sequence.block_keys
        for other in running:
            if not other.is_prefilling or other.num_published > num_found:
                continue
            last = min(limit, len(other.block_keys), other.num_prefill // self._block_size)
            end = num_found
            while end < last and keys[end] == other.block_keys[end]:
                end += 1
            if end > num_found:
                sequence.leader, sequence.leader_end = other, end * self._block_size
                return
