"""Batch: the running sequences, and the slots and blocks they hold.

Entering, growing, publishing and leaving are here, so a sequence and the pool can't disagree about
who holds what. Who enters and who must leave is the scheduler's decision.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, insort
from collections import Counter
from itertools import chain
from operator import attrgetter

from scheduler.block_pool import BlockPool
from scheduler.entry import Entry, EntryFinder
from scheduler.prefix import KeyChain
from scheduler.sequence import NO_SLOT, Sequence
from scheduler.types import KVCapacity

_by_key = attrgetter("key")
_NEVER_PUBLISH = sys.maxsize


class Batch:
    """`running` is sorted by key. `chain` None turns the prefix cache off."""

    def __init__(
        self,
        capacity: KVCapacity,
        max_running: int,
        watermark_blocks: int,
        chain: KeyChain | None,
    ) -> None:
        self.running: list[Sequence] = []
        self.pool = BlockPool(capacity.num_blocks)
        self._block_size = capacity.block_size
        self._watermark_blocks = watermark_blocks
        self._chain = chain
        self._entries = EntryFinder(self.pool, chain, capacity.block_size)
        self._free_slots = list(range(max_running - 1, -1, -1))

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    def num_blocks(self, sequence: Sequence) -> int:
        """What it takes to hold all that is known of `sequence`."""
        return -(-len(sequence.token_ids) // self._block_size)

    def num_new_tokens(self, sequence: Sequence) -> int:
        """What `find_entry` has to hash, at most."""
        if self._chain is None:
            return 0
        return len(sequence.token_ids) - len(sequence.block_keys) * self._block_size

    def find_entry(self, sequence: Sequence, step: int) -> Entry | None:
        """The best way in; None while there is a leader worth waiting for."""
        if sequence.waits_for_leader:
            return None
        return self._entries.find(sequence, self.running, step)

    def fits(self, sequence: Sequence, entry: Entry, without: list[Sequence] | None = None) -> bool:
        """Whether there are a slot and all blocks, and enough left for those that run to grow.

        Or would be, `without` some of them.
        """
        refs, leaving = self.pool.refs, without or []
        some_stay = len(self.running) > len(leaving)
        num_new = self.num_blocks(sequence) - len(entry.blocks)
        left = self.pool.num_available - num_new - (self._watermark_blocks if some_stay else 0)
        has_slot = self.has_free_slot or bool(leaving)
        if not has_slot or left + sum(len(other.block_ids) for other in leaving) < 0:
            return False  # not even if none of them shared a block, which takes longer to count
        held = Counter(chain.from_iterable(other.block_ids for other in leaving))
        freed = sum(1 for block, count in held.items() if refs[block] == count)
        revived = sum(1 for block in entry.blocks if refs[block] == held[block])
        return left + freed - revived >= 0

    def enter(self, sequence: Sequence, entry: Entry) -> None:
        """Gives `sequence`, which fits, a slot and blocks for all it knows."""
        num_shared = len(entry.blocks)
        self.pool.share(entry.blocks)
        new = self.pool.take(self.num_blocks(sequence) - num_shared)
        sequence.block_ids = entry.blocks + new
        sequence.slot = self._free_slots.pop()
        sequence.num_computed = entry.num_computed
        sequence.num_prefill = len(sequence.token_ids)
        sequence.num_published = num_shared
        insort(self.running, sequence, key=_by_key)

    def leave(self, sequence: Sequence) -> None:
        """Takes slot and blocks back. Plans in flight may write them, but before any new owner."""
        del self.running[bisect_left(self.running, sequence.key, key=_by_key)]
        self.pool.release(sequence.block_ids)
        self._free_slots.append(sequence.slot)
        sequence.slot = NO_SLOT
        sequence.block_ids = []
        sequence.num_computed = sequence.num_prefill = sequence.num_published = 0
        sequence.prefilled_step = 0

    def publish(self, sequence: Sequence, end: int) -> list[int]:
        """Offers the full blocks below position `end`, whose tokens are known, to later prompts."""
        first, last = sequence.num_published, end // self._block_size
        if self._chain is None or last <= first:
            return []
        keys, blocks = sequence.block_keys, sequence.block_ids[first:last]
        self._chain.extend(keys, sequence.request.cache_namespace, sequence.token_ids, last)
        sequence.num_published = last
        for block, key in zip(blocks, keys[first:last], strict=True):
            if not self.pool.publish(block, key):
                sequence.num_published = _NEVER_PUBLISH
                break
        return blocks
