"""Log-probabilities of prompt tokens: which rows of a step owe them, and their values.

Values come from the model's own logits: penalties and bias concern generated tokens only. Logits
are made in slices, so that a long prompt never has all of its own at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engine.arrays import Array, Ints, to_device
from engine.batch import Batch, Outputs
from engine.logprobs import MAX_LOGITS, Logprobs
from scheduler.types import Admission

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class ScoredPrompts:
    """`logprobs` of the rows one after the other: counts[i] positions of rows[i]."""

    rows: tuple[int, ...]
    counts: tuple[int, ...]
    num_top: tuple[int, ...]  # alternatives wanted by each row
    token_ids: Array  # [positions] int64: the prompt tokens whose probabilities these are
    logprobs: Logprobs


class PromptScorer:
    """Knows by slot how long the prompt is and whether its log-probabilities are asked for."""

    def __init__(
        self,
        *,
        num_slots: int,
        vocab_size: int,
        vocab_limit: int,
        device: torch.device | None,
        logprobs: Callable[..., Logprobs],
    ) -> None:
        """Ids from `vocab_limit` on are padding and have no probability.

        `logprobs` is Logprobs.of or its equal.
        """
        self._logprobs = logprobs
        self._num_prompt_tokens = np.zeros(num_slots, dtype=np.int64)
        self._num_top = np.full(num_slots, -1, dtype=np.int64)
        self._wanted = False  # by any slot
        self._vocab_limit = vocab_limit
        self._slice = max(1, MAX_LOGITS // vocab_size)
        self._device = device

    def admit(self, admission: Admission) -> None:
        """Reset the slot."""
        wanted = admission.sampling.prompt_logprobs
        self._num_prompt_tokens[admission.slot] = admission.num_prompt_tokens
        self._num_top[admission.slot] = -1 if wanted is None else wanted
        self._wanted = bool((self._num_top >= 0).any())

    def wanted(self, slots: Ints) -> NDArray[np.bool_]:
        """Which of them need the hidden states of all their tokens."""
        return self._num_top[slots] >= 0

    def score(
        self,
        batch: Batch,
        slots: Ints,
        *,
        outputs: Outputs,
        hidden: Array,  # [outputs, hidden]
        logits: Callable[[Array], Array],  # [rows, hidden] -> [rows, vocab] float32
        token_table: Array,
    ) -> ScoredPrompts | None:
        """One entry for each position p of a row with p + 1 inside the prompt; None if no row."""
        if not self._wanted:
            return None
        counts = np.minimum(batch.ends, self._num_prompt_tokens[slots] - 1) - batch.starts
        counts = np.where(self._num_top[slots] >= 0, np.maximum(counts, 0), 0)
        rows = np.flatnonzero(counts)
        if not len(rows):
            return None
        counts = counts[rows]
        row = np.repeat(rows, counts)
        place = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        tokens = to_device(outputs.offsets[row] + place, self._device)
        next_position = to_device(batch.starts[row] + place + 1, self._device)
        targets = token_table[to_device(slots[row], self._device), next_position]

        num_top = self._num_top[slots[rows]]
        most = min(int(num_top.max()), self._vocab_limit)
        parts = []
        for begin in range(0, len(tokens), self._slice):
            part = slice(begin, begin + self._slice)
            scores = logits(hidden[tokens[part]])
            scores[:, self._vocab_limit :] = -np.inf
            parts.append(self._logprobs(scores, targets[part], num_top=most))
        return ScoredPrompts(
            rows=tuple(rows.tolist()),
            counts=tuple(counts.tolist()),
            num_top=tuple(num_top.tolist()),
            token_ids=targets,
            logprobs=Logprobs.joined(parts),
        )
