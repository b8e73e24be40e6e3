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
from numpy.typing import NDArray

from engine.arrays import Array, Ints, to_device, to_host
from engine.errors import GrammarError
from engine.grammar import GrammarCompiler, GrammarState, Words, num_words
from scheduler.types import Admission

if TYPE_CHECKING:
    import torch

_ALL = np.uint32(0xFFFFFFFF)
# [256, 8] float32, by byte of a mask: 0 for each bit that is set, lowest first, -inf for the rest.
_BYTE_BIASES = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"),
    np.float32(0),
    np.float32(-np.inf),
)


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

    def __init__(self, compiler: GrammarCompiler | None, device: torch.device | None) -> None:
        self._compiler = compiler
        self._device = device
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

    def mask(
        self, logits: Array, slots: Ints, unwanted: dict[int, Ints]
    ) -> tuple[dict[int, GrammarState], dict[int, str]]:
        """Sets what may not come to -inf in logits [rows, vocab]; the states and faults by row.

        `unwanted` ids of a row may not come either, unless the grammar leaves nothing else.
        """
        if self._last is not None:
            self._last.settle()
            self._last = None
        if not self._states:
            return {}, {}
        rows = [
            (row, state)
            for row, slot in enumerate(slots.tolist())
            # Ended: the scheduler drops the row.
            if (state := self._states.get(slot)) is not None and not state.ended
        ]
        if not rows:
            return {}, {}
        assert self._compiler is not None
        vocab_size = self._compiler.vocab_size
        # From the first to the last of these rows, so that it is one operation for all of them.
        low, high = rows[0][0], rows[-1][0] + 1
        words = np.full((high - low, num_words(vocab_size)), _ALL, dtype=np.uint32)
        errors: dict[int, str] = {}
        for row, state in rows:
            allowed = words[row - low]
            try:
                state.write_allowed(allowed)
            except GrammarError as error:
                errors[row] = str(error)
            else:
                _leave_out(allowed, unwanted.get(row))
                if not allowed.any():
                    errors[row] = "the grammar leaves no token"
            if row in errors:
                allowed[:] = _ALL  # it ends with its error, whatever it samples
        width = min(32 * words.shape[1], logits.shape[1])
        biases = _biases(words)
        if self._device is not None:
            biases = to_device(biases, self._device)
        logits[low:high, :width] += biases[:, :width]
        if width < logits.shape[1]:
            at = to_device(np.array([row for row, _ in rows]), self._device)  # a list would wait
            logits[at, width:] = -np.inf
        return dict(rows), errors

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


def _biases(words: Words) -> NDArray[np.float32]:
    """[rows, words] -> [rows, 32 * words]: 0 for what may come, -inf for the rest.

    By bytes, and to be added: filling by a mask takes several times as long.
    """
    biases = np.take(_BYTE_BIASES, words.view(np.uint8), axis=0, mode="clip")
    return biases.reshape(len(words), -1)


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
