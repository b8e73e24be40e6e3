"""The grammars of the sequences in their slots: masks before a step samples, progress after it.

Owns the state by slot. A token becomes known to its grammar when the host sees it: at depth 0 right
away, at depth 1 just before the next step samples, while the device is busy with that step's
layers. Must not know models, KV or what a grammar says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from engine.batch import Ints, to_device
from engine.grammar import GrammarCompiler, GrammarError, GrammarState
from scheduler.types import Admission


@dataclass(slots=True)
class GrammarStep:
    """What one step sampled for sequences with a grammar; rows count the sampled rows.

    `errors` and `ended` are complete after `settle`.
    """

    states: dict[int, GrammarState]
    token_ids: Tensor  # [sampled rows] int64, on its way to the host
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

    def __init__(self, compiler: GrammarCompiler | None, device: torch.device) -> None:
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
        self, logits: Tensor, slots: Ints, unwanted: dict[int, Ints]
    ) -> tuple[dict[int, GrammarState], dict[int, str]]:
        """Sets what may not come to -inf in logits [rows, vocab]; the states and faults by row.

        `unwanted` ids of a row may not come either, unless the grammar leaves nothing else.
        """
        if self._last is not None:
            self._last.settle()
            self._last = None
        if not self._states:
            return {}, {}
        states: dict[int, GrammarState] = {}
        errors: dict[int, str] = {}
        for row, slot in enumerate(slots.tolist()):
            state = self._states.get(slot)
            if state is None or state.ended:  # ended: the scheduler drops the row
                continue
            states[row] = state
            try:
                allowed = state.allowed()
            except GrammarError as error:
                errors[row] = str(error)
                continue
            allowed = allowed[: logits.shape[1]]
            later = unwanted.get(row)
            if later is not None:
                without = allowed.copy()
                without[later[later < len(without)]] = False
                allowed = without if without.any() else allowed
            if not allowed.any():
                errors[row] = "the grammar leaves no token"
                continue
            banned = to_device(~allowed, self._device)
            logits[row, : len(allowed)].masked_fill_(banned, -torch.inf)
            logits[row, len(allowed) :] = -torch.inf
        return states, errors

    def watch(
        self, states: dict[int, GrammarState], errors: dict[int, str], token_ids: Tensor
    ) -> GrammarStep | None:
        """After sampling: token_ids [sampled rows] int64 on the device."""
        if not states:
            return None
        arrived = None
        if token_ids.device.type == "cuda":
            host = torch.empty(token_ids.shape, dtype=token_ids.dtype, pin_memory=True)
            token_ids = host.copy_(token_ids, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        self._last = GrammarStep(states, token_ids, arrived, errors)
        return self._last


def unwanted_by_row(early: np.ndarray, slots: Ints, stop_ids: dict[int, Ints]) -> dict[int, Ints]:
    """The stop ids of rows that have not reached min_tokens."""
    rows: Sequence[int] = np.flatnonzero(early).tolist()
    return {row: stop_ids[int(slots[row])] for row in rows}
