"""What the scheduler tells about itself: counts between two StepStats, rows of prompts, the KV map.

Facts for those who watch, gathered from plans and from the pool. It must not change anything.
"""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass, field

from scheduler.batch import Batch
from scheduler.draft import Draft
from scheduler.line import Line
from scheduler.types import KVMap, Preempted, PromptRow, StepPlan, StepStats

_CACHED, _SHARED, _FIRST_OWNER = 1, 2, 3


@dataclass(slots=True)
class Counts:
    """What happened since the last StepStats."""

    preempted: list[Preempted] = field(default_factory=list)
    recomputed_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    refused_steps: int = 0

    def add(self, draft: Draft) -> None:
        """What a plan held, once it has run."""
        self.recomputed_tokens += draft.num_recomputed
        self.prefix_queries += draft.num_looked_up
        self.prefix_hits += draft.num_found

    @property
    def preemptions(self) -> int:
        return len(self.preempted)


def step_stats(counts: Counts, batch: Batch, line: Line, *, step: int) -> StepStats:
    """Counts and gauges; what the step itself held is the caller's to add."""
    return StepStats(
        step=step,
        num_running=len(batch.running),
        num_waiting=len(line),
        num_blocks=batch.pool.num_blocks,
        num_blocks_used=batch.pool.num_referenced,
        num_blocks_cached=batch.pool.num_cached,
        num_preemptions=counts.preemptions,
        num_recomputed_tokens=counts.recomputed_tokens,
        num_refused_steps=counts.refused_steps,
        prefix_queries=counts.prefix_queries,
        prefix_hits=counts.prefix_hits,
        preempted=tuple(counts.preempted),
        waiting=line.num_waiting(),
    )


def prompt_rows(plan: StepPlan, num_decodes: int) -> tuple[PromptRow, ...]:
    """The rows of `plan` behind its decodes."""
    if num_decodes == len(plan.seq_ids):
        return ()
    entered = {admission.slot for admission in plan.admissions}
    return tuple(
        PromptRow(
            plan.seq_ids[row],
            plan.slots[row],
            plan.starts[row],
            plan.lengths[row],
            plan.slots[row] in entered,
        )
        for row in range(num_decodes, len(plan.seq_ids))
    )


def kv_map(batch: Batch) -> KVMap:
    """Who holds which block now; it takes time in proportion to the blocks in use."""
    owners = batch.running[: 2**16 - _FIRST_OWNER]
    pool = batch.pool
    blocks = array("H", bytes(2 * pool.num_blocks))
    for block in pool.cached_blocks():
        blocks[block] = _CACHED
    for number, sequence in enumerate(owners, _FIRST_OWNER):
        for block in sequence.block_ids:
            blocks[block] = number if blocks[block] == 0 else _SHARED
    if sys.byteorder == "big":
        blocks.byteswap()
    return KVMap(tuple(sequence.request.id for sequence in owners), blocks.tobytes())
