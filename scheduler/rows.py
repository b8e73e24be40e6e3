"""Rows: what a step computes, who gets in, and who gives way for it.

The one rule: decodes first, then prompts that run, then admissions; each row takes what it still
needs, within what is left of the step's budget. When blocks run out the last in line gives way. It
must not know commands, results, nor what a plan is sent to.
"""

from __future__ import annotations

from scheduler.batch import Batch
from scheduler.draft import Draft
from scheduler.entry import Entry
from scheduler.limits import SchedulerLimits
from scheduler.line import Line
from scheduler.pace import Pace
from scheduler.policy import Policy
from scheduler.sequence import Sequence
from scheduler.trace import Counts
from scheduler.types import KVCapacity, Preempted

# A step passes over so many of a lane who wait for a leader, and hashes so many tokens of prompts
# that are new to it (a few milliseconds), or one prompt: a long line must not hold up who streams.
MAX_PASSED = 64
MAX_NEW_TOKENS = 1 << 16


class Rows:
    """Fills drafts from `batch` and `line`, and counts what happens to sequences on the way."""

    def __init__(
        self,
        batch: Batch,
        line: Line,
        policy: Policy,
        *,
        capacity: KVCapacity,
        limits: SchedulerLimits,
    ) -> None:
        self.counts = Counts()
        self.pace = Pace(
            limits.max_step_seconds,
            min_tokens=max(capacity.block_size, limits.max_step_tokens // 32),
            max_tokens=limits.max_step_tokens,
        )
        self._batch = batch
        self._line = line
        self._outranks = policy.outranks
        self._block_size = capacity.block_size
        self._max_chunk = limits.max_chunk_tokens or limits.max_step_tokens
        self._now = 0.0

    def fill(self, draft: Draft, now: float) -> None:
        """Gives an empty draft its rows; none if no sequence can move.

        Inside each group of rows the policy's key decides.
        """
        self._now = now
        self._make_way(draft.step)
        blocks_ran_out = self._plan_decodes(draft)
        draft.left = min(draft.left, self.pace.prompt_tokens(draft.num_decodes))
        for sequence in self._batch.running:
            if sequence.is_prefilling and draft.left:
                self._plan_prefill(sequence, draft)
        if draft.left and self._batch.has_free_slot and not blocks_ran_out:
            self._admit(draft)
        self._use_up(draft)

    def _plan_decodes(self, draft: Draft) -> bool:
        """One token for each decoding sequence; True if blocks ran out on the way.

        Going by key, every running sequence with a larger key than ours is not in the plan yet.
        There are more than the budget only while memory is short: each began with a row beside
        all the others.
        """
        decodes = [s for s in self._batch.running if s.num_prefill <= s.num_computed < s.end]
        num_preemptions = self.counts.preemptions
        for sequence in decodes:
            if not sequence.is_running or not draft.left:
                break  # gave way to an older one, as did all behind it; or has to wait
            num_blocks = len(sequence.block_ids)
            if sequence.num_computed == num_blocks * self._block_size:
                if not self._free_a_block(sequence):
                    break
                sequence.block_ids += self._batch.pool.take(1)
                draft.add_blocks(sequence, num_blocks)
            draft.add(sequence, 1)
        draft.num_decodes = len(draft.rows)
        return self.counts.preemptions > num_preemptions

    def _free_a_block(self, sequence: Sequence) -> bool:
        """Preempts from the end of the line until a block is there; False if it was our turn."""
        while self._batch.pool.num_available == 0:
            victim = self._batch.running[-1]
            self.preempt(victim)
            if victim is sequence:
                return False
        return True

    def _plan_prefill(self, sequence: Sequence, draft: Draft) -> None:
        """A first chunk that leaves half the remaining budget to the prompts behind.

        What they don't want comes back in `_use_up`. Full blocks are published at once: this plan
        writes them before anything that finds them can read.
        """
        length = min(
            sequence.num_prefill - sequence.num_computed,
            draft.left,
            self._max_chunk,
            max(self._block_size, draft.left // 2),
        )
        row = len(draft.rows)
        draft.add(sequence, length)
        draft.published += [(row, b) for b in self._batch.publish(sequence, sequence.num_computed)]

    def _use_up(self, draft: Draft) -> None:
        """Gives what is left of the budget to the chunks of the plan, the first in line first."""
        for row in range(draft.num_decodes, len(draft.rows)):
            sequence = draft.rows[row]
            length = min(
                sequence.num_prefill - sequence.num_computed,
                draft.left,
                self._max_chunk - draft.lengths[row],
            )
            if length > 0:
                draft.extend(row, length)
                published = self._batch.publish(sequence, sequence.num_computed)
                draft.published += [(row, block) for block in published]

    # --- admission and preemption -----------------------------------------------------------------

    def _admit(self, draft: Draft) -> None:
        """Admits in line, each with all blocks for what it knows, until one doesn't fit.

        Nobody overtakes a sequence that waits for room; those that wait for a leader are passed.
        """
        turns = self._line.turns(MAX_PASSED)
        num_new = 0
        while draft.left and self._batch.has_free_slot:
            sequence = turns.first()
            if sequence is None or sequence.num_pending:
                return  # or its next token is on its way
            new = self._batch.num_new_tokens(sequence)
            if num_new and num_new + new > MAX_NEW_TOKENS:
                return
            num_new += new
            entry = self._batch.find_entry(sequence, draft.step)
            if entry is None:
                turns.passed()
                continue
            if not self._batch.fits(sequence, entry):
                return
            self._enter(sequence, entry, draft)
            turns.entered()
            self._plan_prefill(sequence, draft)

    def _enter(self, sequence: Sequence, entry: Entry, draft: Draft) -> None:
        self._line.enter(sequence, entry.num_computed)
        self._batch.enter(sequence, entry)
        draft.admit(sequence)
        if entry.copy_source is not None:
            draft.copies.append((entry.copy_source, sequence.block_ids[len(entry.blocks)]))
        if sequence.scheduled_at is None:
            sequence.scheduled_at = self._now
            sequence.num_cached = entry.num_cached
            if entry.was_looked_up:
                draft.num_looked_up += sequence.num_prompt
                draft.num_found += entry.num_cached

    def _make_way(self, step: int) -> None:
        """Preempts running sequences if that lets the first in line enter: nobody goes in vain."""
        first = self._line.first() if self._batch.running else None
        if first is None or first.num_pending:
            return
        victims = self._line.victims(first, self._batch.running, self._outranks)
        entry = self._batch.find_entry(first, step) if victims else None
        if entry is None or self._batch.fits(first, entry):
            return
        if not self._batch.fits(first, entry, without=victims):
            return  # all of them would not be enough
        for victim in victims:
            victim.gave_way |= victim.lane is not first.lane
            self.preempt(victim)
            if self._batch.fits(first, entry):
                return

    def preempt(self, sequence: Sequence) -> None:
        """Back in line, with its tokens but without KV; its place in line is still its own."""
        sequence.num_lost = max(sequence.num_lost, sequence.num_computed)
        sequence.num_preemptions += 1
        self.counts.preempted.append(Preempted(sequence.request.id, self._now))
        self._line_up(sequence)

    def turn_back(self, sequence: Sequence) -> None:
        """It has entered with a plan that never was. If that was its first, it has not begun."""
        if not sequence.num_preemptions:
            sequence.scheduled_at = None
        self._line_up(sequence)

    def _line_up(self, sequence: Sequence) -> None:
        self._batch.leave(sequence)
        self._line.fall_back(sequence)
