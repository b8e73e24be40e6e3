"""Prompts pooled into one vector each: the mean of their hidden states, or the last of them.

Knows by slot what is asked for and what was summed in earlier chunks. Sums are of double precision,
so that where a prompt was cut into chunks does not show. Must not know how hidden states are made.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.arrays import Array, Ints, column_sums, stacked
from engine.batch import Outputs
from scheduler.types import Admission, Pooling


@dataclass(frozen=True, slots=True)
class PooledPrompts:
    """vectors[i] [hidden] float32 belongs to row rows[i] of the step."""

    rows: tuple[int, ...]
    vectors: Array


@dataclass(slots=True)
class _Prompt:
    pooling: Pooling
    num_tokens: int
    total: Array = None  # [hidden] float64: of the positions so far


class Pooler:
    """One for all slots of an engine."""

    def __init__(self) -> None:
        self._prompts: dict[int, _Prompt] = {}  # by slot

    def admit(self, admission: Admission) -> None:
        """Reset the slot. A mean begins anew, so such a sequence enters at position 0.

        After a preemption past the prompt there is nothing left to pool.
        """
        self._prompts.pop(admission.slot, None)
        pooling = admission.sampling.pooling
        if pooling is not None and len(admission.token_ids) == admission.num_prompt_tokens:
            self._prompts[admission.slot] = _Prompt(pooling, admission.num_prompt_tokens)

    def wanted(self, slots: Ints) -> NDArray[np.bool_]:
        """Which of them need the hidden states of all their tokens."""
        if not self._prompts:
            return np.zeros(len(slots), dtype=np.bool_)
        means = [slot for slot, p in self._prompts.items() if p.pooling is Pooling.MEAN]
        return np.isin(slots, means)

    def pool(
        self,
        slots: Ints,
        sampled: Ints,
        *,
        outputs: Outputs,
        hidden: Array,  # [outputs, hidden]
    ) -> PooledPrompts | None:
        """The prompts that end in this step, at rows that sample; None if there is none."""
        if not self._prompts:
            return None
        ending = set(sampled.tolist())
        rows, vectors = [], []
        for row, slot in enumerate(slots.tolist()):
            prompt = self._prompts.get(slot)
            if prompt is None:
                continue
            states = hidden[outputs.offsets[row] : outputs.offsets[row + 1]]
            if prompt.pooling is Pooling.MEAN:
                total = column_sums(states)
                prompt.total = total if prompt.total is None else prompt.total + total
            if row not in ending:
                continue
            vector = states[-1]
            if prompt.total is not None:
                vector = prompt.total / prompt.num_tokens
            rows.append(row)
            vectors.append(vector)
            del self._prompts[slot]
        return PooledPrompts(tuple(rows), stacked(vectors)) if rows else None
