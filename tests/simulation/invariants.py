"""Every invariant of the scheduler, asserted from outside after each of its steps.

`check_invariants` looks at the state, `PlanCheck` at one plan against the state before it.
"""

from __future__ import annotations

from collections import Counter

from scheduler.block_pool import BlockPool
from scheduler.prefix import BlockKey, Digest, KeyChain, sha256
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence
from scheduler.types import StepPlan


def check_invariants(scheduler: Scheduler, digest: Digest = sha256) -> None:
    _check_pool(scheduler)
    _check_lines(scheduler)
    for sequence in scheduler.batch.running:
        _check_running(scheduler, sequence, digest)
    for sequence in scheduler.line:
        assert not sequence.is_running
        assert sequence.block_ids == []
        assert sequence.num_computed == sequence.num_prefill == sequence.num_published == 0


def _check_pool(scheduler: Scheduler) -> None:
    """Invariant 1: free + cached + referenced = all; refs count tables."""
    pool = scheduler.batch.pool
    tables = Counter(b for s in scheduler.batch.running for b in s.block_ids)
    free = set(pool.free_blocks())
    assert len(pool.free_blocks()) == len(free), "a block is free once"
    for block in range(pool.num_blocks):
        assert pool.refs[block] == tables[block], f"block {block}: refs are tables"
        states = (block in free, pool.is_cached(block), tables[block] > 0)
        assert sum(states) == 1, f"block {block} is in one state"
        if pool.is_cached(block):
            assert pool.key_of(block) is not None
        if block in free:
            assert pool.key_of(block) is None
    assert len(free) + pool.num_cached + pool.num_referenced == pool.num_blocks


def _check_lines(scheduler: Scheduler) -> None:
    running = scheduler.batch.running
    keys = [s.key for s in running]
    assert keys == sorted(set(keys)), "those that run are sorted by key"
    for lane in scheduler.line.lanes:
        for members in (lane.waiting, lane.entered):
            turns = [s.turn for s in members]
            assert turns == sorted(set(turns)), "a lane is sorted by turn"
            assert all(s.lane is lane for s in members)
        places = [s.key for s in lane.entered]
        assert places == sorted(set(places)), "a place keeps the order of its lane"
        assert lane.num_running == sum(s.lane is lane for s in running)
        unentered = [s for s in lane.waiting if not s.key]
        assert {id(s) for s in lane.entered}.isdisjoint(id(s) for s in unentered)
    assert len(scheduler.line) == len(list(scheduler.line))
    tenants = Counter(s.request.tenant for s in scheduler.sequences.values())
    assert scheduler.places.num_taken == sum(tenants.values()), "who is gone holds no place"
    assert all(scheduler.places.num_taken_by(t) == n for t, n in tenants.items())
    everyone = {id(s) for s in (*running, *scheduler.line)}
    assert everyone == {id(s) for s in scheduler.sequences.values()}
    assert everyone == {
        id(s) for lane in scheduler.line.lanes for s in (*lane.waiting, *lane.entered)
    }
    slots = [s.slot for s in scheduler.batch.running]
    assert len(set(slots)) == len(slots) <= scheduler.limits.max_running


def _check_running(scheduler: Scheduler, sequence: Sequence, digest: Digest) -> None:
    """Invariant 4, and that published blocks hold what their keys say."""
    size = scheduler.capacity.block_size
    assert 0 < sequence.num_computed <= sequence.num_tokens
    assert sequence.num_computed <= sequence.end <= scheduler.capacity.max_model_len
    assert len(sequence.block_ids) * size >= sequence.num_computed
    assert len(set(sequence.block_ids)) == len(sequence.block_ids)
    keys: list[BlockKey] = []
    num_full = len(sequence.token_ids) // size
    chain = KeyChain(size, digest)
    chain.extend(keys, sequence.request.cache_namespace, sequence.token_ids, num_full)
    for index, block in enumerate(sequence.block_ids):
        key = scheduler.batch.pool.key_of(block)
        if key is not None:
            assert index < num_full, "the host knows the tokens of a published block"
            assert (index + 1) * size <= sequence.num_computed, "a published block is full"
            assert key == keys[index], "a published block holds what its key says"


class PlanCheck:
    """Takes the state before `schedule`; `check` compares the plan with it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        pool = scheduler.batch.pool
        self._published = {b for b in range(pool.num_blocks) if pool.key_of(b) is not None}
        self._taken: set[int] = set()
        self._spy_on(pool)
        self._running = list(scheduler.batch.running)
        self._preemptions = {s: s.num_preemptions for s in self._running}

    def _spy_on(self, pool: BlockPool) -> None:
        def take(count: int) -> list[int]:
            blocks = BlockPool.take(pool, count)
            self._taken.update(blocks)
            return blocks

        pool.take = take  # type: ignore[method-assign]

    def check(self, plan: StepPlan | None) -> None:
        self._check_victims()
        if plan is None:
            return
        scheduler = self._scheduler
        assert plan.seq_ids, "an empty plan is no plan"
        assert len(set(plan.seq_ids)) == len(plan.seq_ids), "one row a sequence"
        assert min(plan.lengths) >= 1
        assert sum(plan.lengths) <= scheduler.limits.max_step_tokens, "the step keeps its budget"
        max_chunk = scheduler.limits.max_chunk_tokens or max(plan.lengths)
        assert max(plan.lengths) <= max_chunk, "a row keeps the chunk limit"
        for row, request_id in enumerate(plan.seq_ids):
            sequence = scheduler.sequences[request_id]
            assert sequence.slot == plan.slots[row], "a row in the plan keeps its slot"
            assert plan.starts[row] + plan.lengths[row] == sequence.num_computed
            self._check_written(sequence, plan.starts[row])
        sources = {source for source, _ in plan.copies}
        targets = [target for _, target in plan.copies]
        assert len(set(targets)) == len(targets)
        assert not sources & set(targets), "copies of a plan are independent"

    def _check_written(self, sequence: Sequence, start: int) -> None:
        """A published block is never written again, and a shared one only if it is just shared."""
        pool, size = self._scheduler.batch.pool, self._scheduler.capacity.block_size
        for index in range(start // size, -(-sequence.num_computed // size)):
            block = sequence.block_ids[index]
            is_new = block in self._taken
            assert is_new or block not in self._published, "a published block is not written"
            is_shared = pool.refs[block] > 1
            assert not is_shared or pool.key_of(block), "a block is shared once it is published"

    def _check_victims(self) -> None:
        """Nobody gives way to a younger one."""
        victims = [s for s in self._running if s.num_preemptions > self._preemptions[s]]
        if not victims:
            return
        stayed = [s for s in self._running if s not in victims]
        entered = [s for s in self._scheduler.batch.running if s not in self._running]
        for victim in victims:
            assert victim.num_preemptions == self._preemptions[victim] + 1
            winners = [s for s in (*stayed, *entered) if s.key < victim.key]
            assert winners or victim is not self._running[0], "the oldest gives way to nobody"
