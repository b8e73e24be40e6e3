"""A step plan in the making: columns that grow, then freeze.

Adding a row is what advances a sequence, so the two can't disagree. It must not decide anything:
which rows, and how long, is the scheduler's choice.
"""

from __future__ import annotations

from array import array

from scheduler.sequence import Sequence
from scheduler.types import Admission, StepPlan


class Draft:
    """The rows of step `step` so far; `left` is what remains of its token budget."""

    def __init__(self, step: int, budget: int) -> None:
        self.step = step
        self.left = budget
        self.rows: list[Sequence] = []
        self.lengths: list[int] = []
        self.entered: list[Sequence] = []  # with this plan
        self.num_decodes = 0  # the leading rows
        self.num_recomputed = 0  # tokens that were computed before a preemption
        self.num_looked_up = 0  # prompt tokens of those that enter for the first time
        self.num_found = 0  # of these, in the prefix cache
        self.copies: list[tuple[int, int]] = []
        self.published: list[tuple[int, int]] = []  # (row, block that it writes)
        self._starts: list[int] = []
        self._samples = bytearray()
        self._block_slots: list[int] = []
        self._block_indices: list[int] = []
        self._block_ids: list[int] = []
        self._admissions: list[Admission] = []

    def admit(self, sequence: Sequence) -> None:
        """`sequence` has just got its slot and its blocks."""
        request = sequence.request
        self.entered.append(sequence)
        self._admissions.append(
            Admission(
                slot=sequence.slot,
                token_ids=tuple(sequence.token_ids),
                num_prompt_tokens=len(request.prompt),
                sampling=request.sampling,
                stop_token_ids=request.stop_token_ids,
                grammar=request.grammar,
            )
        )
        self.add_blocks(sequence, 0)

    def add_blocks(self, sequence: Sequence, first: int) -> None:
        """The table of `sequence` has grown from `first` blocks on."""
        for index in range(first, len(sequence.block_ids)):
            self._block_slots.append(sequence.slot)
            self._block_indices.append(index)
            self._block_ids.append(sequence.block_ids[index])

    def add(self, sequence: Sequence, length: int) -> None:
        """A row of the next `length` positions of `sequence`."""
        assert 1 <= length <= self.left, "a row has a position and keeps the budget"
        self.rows.append(sequence)
        self.lengths.append(length)
        self._starts.append(sequence.num_computed)
        self._samples.append(self._advance(sequence, length))

    def extend(self, row: int, length: int) -> None:
        """Row `row` computes `length` more positions, which it has not sampled past."""
        assert 1 <= length <= self.left
        self.lengths[row] += length
        self._samples[row] = self._advance(self.rows[row], length)

    def _advance(self, sequence: Sequence, length: int) -> bool:
        self.left -= length
        sequence.num_computed += length
        reaches_end = sequence.num_computed == len(sequence.token_ids) + sequence.num_pending
        if reaches_end:
            sequence.num_pending += 1
            if sequence.num_computed == sequence.num_prefill:
                sequence.prefilled_step = self.step
        return reaches_end

    def take_back(self) -> None:
        """Undo what the rows have advanced."""
        for sequence, length, samples in zip(self.rows, self.lengths, self._samples, strict=True):
            sequence.num_computed -= length
            sequence.num_pending -= samples

    def plan(self) -> StepPlan:
        """No row is added or extended after this."""
        for row in range(self.num_decodes, len(self.rows)):
            end = self._starts[row] + self.lengths[row]
            lost = min(end, self.rows[row].num_lost) - self._starts[row]
            self.num_recomputed += max(0, lost)
        return StepPlan(
            step=self.step,
            seq_ids=tuple([sequence.request.id for sequence in self.rows]),
            slots=array("i", [sequence.slot for sequence in self.rows]),
            starts=array("i", self._starts),
            lengths=array("i", self.lengths),
            samples=bytes(self._samples),
            block_slots=array("i", self._block_slots),
            block_indices=array("i", self._block_indices),
            block_ids=array("i", self._block_ids),
            admissions=tuple(self._admissions),
            copies=tuple(self.copies),
        )
