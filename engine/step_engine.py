"""StepEngine: runs step plans on any device, one code for all.

Owns the slot tables, the sampler and the order of work in a step. How a batch becomes hidden states
is a ModelRunner's business; what to run next is the scheduler's. On the host, where `device` is
None, nothing here needs torch.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from engine.arrays import Array, Ints, largest_magnitudes, rows_at
from engine.batch import Batch, Outputs, SlotTables
from engine.grammar import GrammarCompiler
from engine.pooling import Pooler
from engine.prompt_scores import PromptScorer
from engine.sampler import Chooser, Sampler, Samples
from engine.step_result import PendingStep, StepTensors, StepTimer
from scheduler.types import Admission, KVCapacity, SamplingParams, StepPlan

if TYPE_CHECKING:
    import torch


class ModelRunner(Protocol):
    """The model with its KV cache, in whatever layout suits it; steps run in submission order."""

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy KV blocks of all layers, (source, target) each, in order."""
        ...

    def forward(self, batch: Batch, outputs: Ints) -> Array:
        """Store the KV of all tokens; hidden states of `outputs` after the final norm.

        `outputs` are tokens of the batch, ascending; each row's last is one, which is not finite
        where any token of the row is not. [outputs, hidden]
        """
        ...

    def logits(self, hidden: Array) -> Array:
        """[rows, hidden] -> [rows, vocab_size] float32, which the caller may overwrite."""
        ...


class StepEngine:
    """Implements scheduler.loop.Engine: `submit` queues a step, the result waits for the device."""

    def __init__(
        self,
        runner: ModelRunner,
        chooser: Chooser,
        *,
        vocab_size: int,
        device: torch.device | None,
        capacity: KVCapacity,
        vocab_limit: int | None = None,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """`runner` and `chooser` work on `device`; None is the host, and numpy arrays.

        `vocab_limit`: the tokenizer's size, if the model's `vocab_size` is padded. `grammars` is
        what serves sequences with a grammar; without it they fail.
        """
        self.capacity = capacity
        self._device = device
        self._vocab_size = vocab_size
        self._runner = runner
        self._tables = SlotTables(
            num_slots=capacity.num_slots,
            max_model_len=capacity.max_model_len,
            block_size=capacity.block_size,
            device=device,
        )
        vocab_limit = min(vocab_limit or vocab_size, vocab_size)
        self._sampler = Sampler(
            num_slots=capacity.num_slots,
            vocab_size=vocab_size,
            vocab_limit=vocab_limit,
            device=device,
            chooser=chooser,
            grammars=grammars,
        )
        self._prompts = PromptScorer(
            num_slots=capacity.num_slots,
            vocab_size=vocab_size,
            vocab_limit=vocab_limit,
            device=device,
            logprobs=chooser.logprobs,
        )
        self._pooler = Pooler()
        self._faults: dict[int, str] = {}  # of the sequence in a slot; it fails alone

    def submit(self, plan: StepPlan) -> PendingStep:
        """Queue a step; on the cpu it is done at return. Steps run in the order of submission."""
        timer = StepTimer(self._device)
        timer.mark()
        for admission in plan.admissions:
            self._admit(admission)
        self._tables.set_blocks(plan)
        if plan.copies:
            self._runner.copy_blocks(plan.copies)
        batch = self._tables.batch(plan)
        slots = np.asarray(plan.slots, dtype=np.int64)
        sampled = np.flatnonzero(np.frombuffer(plan.samples, dtype=np.uint8))
        whole = self._prompts.wanted(slots) | self._pooler.wanted(slots)
        outputs = Outputs.of(batch, whole)
        hidden = self._runner.forward(batch, outputs.tokens)
        timer.mark()

        prompts = self._prompts.score(
            batch,
            slots,
            outputs=outputs,
            hidden=hidden,
            logits=self._runner.logits,
            token_table=self._tables.token_table,
        )
        samples = None
        if len(sampled):
            last = rows_at(hidden, outputs.offsets[1:][sampled] - 1, self._device)
            samples = self._sample(batch, slots, sampled, last)
        pooled = self._pooler.pool(slots, sampled, outputs=outputs, hidden=hidden)
        tensors = StepTensors(
            hidden_peaks=largest_magnitudes(hidden),
            sampled=tuple(sampled.tolist()),
            samples=samples,
            prompts=prompts,
            pooled=pooled,
        )
        faults = {
            row: self._faults[slot] for row, slot in enumerate(plan.slots) if slot in self._faults
        }
        return PendingStep(plan, outputs, tensors, faults=faults, timer=timer)

    def warm_up(self, *, max_step_tokens: int) -> None:
        """Run the largest step that may come, so that memory runs out now or never.

        As many prompt tokens as a step may have, all with prompt log-probabilities, then every slot
        sampling with all features on. To be called before any sequence is admitted.
        """
        capacity = self.capacity
        longest = min(
            max_step_tokens,
            capacity.max_model_len - 1,
            capacity.num_blocks * capacity.block_size,
        )
        everything = SamplingParams(
            temperature=1.0,
            top_p=1.0 - 1e-9,
            min_p=1e-9,
            presence_penalty=0.1,
            repetition_penalty=1.1,
            num_logprobs=1,
            prompt_logprobs=1,
        )
        num_whole, rest = divmod(max_step_tokens, longest)
        lengths = [*[longest] * num_whole, *[rest] * (rest > 0)]
        self._warm_up_step(lengths, longest, everything)
        num_decodes = min(max_step_tokens, capacity.num_slots)
        self._warm_up_step([1] * num_decodes, longest, everything)

    def _warm_up_step(self, lengths: list[int], end: int, sampling: SamplingParams) -> None:
        """Rows that end at position `end`, on shared blocks, whose contents are nobody's yet."""
        lengths = lengths[: self.capacity.num_slots]
        num_rows, num_blocks = len(lengths), -(-end // self.capacity.block_size)
        rows, blocks = range(num_rows), range(num_blocks)
        plan = StepPlan(
            step=0,
            seq_ids=tuple(str(row) for row in rows),
            slots=array("q", rows),
            starts=array("q", [end - length for length in lengths]),
            lengths=array("q", lengths),
            samples=b"\1" * num_rows,
            block_slots=array("q", [row for row in rows for _ in blocks]),
            block_indices=array("q", [block for _ in rows for block in blocks]),
            block_ids=array("q", [block for _ in rows for block in blocks]),
            admissions=tuple(Admission(row, (0,) * end, end, sampling, ()) for row in rows),
        )
        self.submit(plan).result()

    def _admit(self, admission: Admission) -> None:
        """Reset a slot; a sequence with a fault runs as a harmless one until it is dropped.

        The ids that it may have stay: others may share the KV of its prompt by now.
        """
        self._faults.pop(admission.slot, None)
        fault = self._sampler.fault(admission)
        if fault:
            self._faults[admission.slot] = fault
            admission = replace(
                admission,
                token_ids=tuple(
                    token if 0 <= token < self._vocab_size else 0 for token in admission.token_ids
                ),
                sampling=SamplingParams(temperature=0.0),
                stop_token_ids=(),
            )
        self._tables.admit(admission.slot, admission.token_ids)
        self._sampler.admit(admission)
        self._prompts.admit(admission)
        self._pooler.admit(admission)

    def _sample(self, batch: Batch, slots: Ints, sampled: Ints, hidden: Array) -> Samples:
        """Sample rows `sampled` and write their tokens where the next step will look.

        `hidden` are the states of their last tokens.
        """
        slots, ends = slots[sampled], batch.ends[sampled]
        logits = self._runner.logits(hidden)
        samples = self._sampler.sample(logits, slots, ends, self._tables.token_table)
        self._tables.write_tokens(slots, ends, samples.token_ids)
        return samples
