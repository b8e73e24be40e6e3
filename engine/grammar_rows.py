"""The grammars of the sequences in their slots: masks before a step samples, progress after it.

Owns the state by slot. A token becomes known to its grammar when the host sees it: at depth 0 right
away, at depth 1 just before the next step samples, while the device is busy with that step's
layers. Must not know models, KV or what a grammar says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from engine.arrays import Array, Ints, to_host
from engine.errors import GrammarError
from engine.grammar import GrammarCompiler, GrammarState, Words, num_words
from scheduler.types import Admission

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """What may come next in some rows of a step; valid until the next step's."""

    rows: Ints  # [masks] ascending
    words: Words  # [masks, words], one bit for each logit of a row, or more


@dataclass(slots=True)
class GrammarStep:
    """What one step sampled for sequences with a grammar; rows count the sampled rows.

    `errors` and `ended` are complete after `settle`.
    """

    states: dict[int, GrammarState]
    token_ids: Array  # [sampled rows] int64, on its way to the host
    arrived: torch.cuda.Event | None
    errors: dict[int, str] = field(default_factory=dict)
    ended: list[int] = field(default_factory=list)
    _settled: bool = False

    def settle(self) -> None:
        """Tell the grammars their tokens, once; waits for the device if it must."""
        if self._settled:
            return
        self._settled = True
        if self.arrived is not None:
            self.arrived.synchronize()
        token_ids = self.token_ids.tolist()
        for row, state in self.states.items():
            if row in self.errors or state.ended:
                continue
            try:
                state.accept([token_ids[row]])
            except GrammarError as error:
                self.errors[row] = str(error)
            else:
                if state.ended:
                    self.ended.append(row)


class GrammarRows:
    """By slot; a sequence without a grammar costs nothing here."""

    def __init__(
        self,
        compiler: GrammarCompiler | None,
        device: torch.device | None,
        *,
        num_slots: int,
        vocab_limit: int,
    ) -> None:
        """`vocab_limit`: how many logits a row has; ids behind the grammars' may never come."""
        self._compiler = compiler
        self._device = device
        if compiler is not None:
            self._num_words = num_words(compiler.vocab_size)  # of a grammar's mask
            width = max(self._num_words, num_words(vocab_limit))
            self._words = np.zeros((num_slots, width), dtype=np.uint32)
        self._states: dict[int, GrammarState] = {}
        self._last: GrammarStep | None = None

    def admit(self, admission: Admission) -> str:
        """Resets the slot; why the sequence can not be served, or "".

        What a sequence generated before it was preempted is replayed.
        """
        self._states.pop(admission.slot, None)
        if not admission.grammar:
            return ""
        if self._compiler is None:
            return "this engine has no vocabulary for grammars"
        try:
            state = self._compiler.start(admission.grammar)
            state.accept(admission.token_ids[admission.num_prompt_tokens :])
        except GrammarError as error:
            return f"the grammar can not be used: {error}"
        self._states[admission.slot] = state
        return ""

    def masks(
        self, slots: Ints, unwanted: dict[int, Ints]
    ) -> tuple[TokenMasks | None, dict[int, GrammarState], dict[int, str]]:
        """The masks of a step, if it has any, and the states and faults by row.

        `unwanted` ids of a row may not come either, unless the grammar leaves nothing else. A row
        with a fault has no mask: it ends, whatever it samples.
        """
        if self._last is not None:
            self._last.settle()
            self._last = None
        if not self._states:
            return None, {}, {}
        states = {
            row: state
            for row, slot in enumerate(slots.tolist())
            # Ended: the scheduler drops the row.
            if (state := self._states.get(slot)) is not None and not state.ended
        }
        if not states:
            return None, {}, {}
        words = self._words[: len(states)]
        errors: dict[int, str] = {}
        for (row, state), allowed in zip(states.items(), words[:, : self._num_words], strict=True):
            try:
                state.write_allowed(allowed)
            except GrammarError as error:
                errors[row] = str(error)
            else:
                _leave_out(allowed, unwanted.get(row))
        rows = np.fromiter(states, dtype=np.int64)
        for row in rows[~words.any(axis=1)].tolist():
            errors.setdefault(row, "the grammar leaves no token")
        if errors:
            masked = [row not in errors for row in states]
            rows, words = rows[masked], words[masked]
        return (TokenMasks(rows, words) if len(rows) else None), states, errors

    def watch(
        self, states: dict[int, GrammarState], errors: dict[int, str], token_ids: Array
    ) -> GrammarStep | None:
        """After sampling: token_ids [sampled rows] int64 on the device."""
        if not states:
            return None
        arrived = None
        if self._device is not None and self._device.type == "cuda":
            import torch

            token_ids = to_host(token_ids)
            arrived = torch.cuda.Event()
            arrived.record()
        self._last = GrammarStep(states, token_ids, arrived, errors)
        return self._last


def _leave_out(words: Words, ids: Ints | None) -> None:
    """Takes `ids` out of a mask, unless nothing else is in it."""
    if ids is None or not len(ids):
        return
    bits = np.zeros_like(words)
    ids = ids[ids < 32 * len(words)]
    np.bitwise_or.at(bits, ids >> 5, np.uint32(1) << (ids & 31).astype(np.uint32))
    rest = words & ~bits
    if rest.any():
        words[:] = rest


def unwanted_by_row(early: np.ndarray, slots: Ints, stop_ids: dict[int, Ints]) -> dict[int, Ints]:
    """The stop ids of rows that have not reached min_tokens."""
    rows: Sequence[int] = np.flatnonzero(early).tolist()
    return {row: stop_ids[int(slots[row])] for row in rows}
