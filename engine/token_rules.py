"""Rules on single tokens and on sequences of them: allowed_token_ids and bad_words.

Owns what each slot's sequence may not say, apart from grammars. A sequence without rules costs
nothing. Must not know text: words come as the ids that spell them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.arrays import Array, Ints, ban_ids, to_device
from scheduler.types import Admission

if TYPE_CHECKING:
    import torch

_ANY = -1  # of a prefix: whatever stands there


@dataclass(frozen=True, slots=True)
class _Rules:
    """`banned` [vocab] bool, or None; word i is prefixes[i], any number of _ANY first, lasts[i]."""

    banned: Array  # or None
    prefixes: Array  # [words, longest prefix] int64
    lasts: Array  # [words] int64


class TokenRules:
    """By slot."""

    def __init__(self, *, vocab_limit: int, device: torch.device | None) -> None:
        self._vocab_limit = vocab_limit
        self._device = device
        self._rules: dict[int, _Rules] = {}

    def admit(self, admission: Admission) -> None:
        sampling = admission.sampling
        self._rules.pop(admission.slot, None)
        words = [word for word in sampling.bad_words if word[-1] < self._vocab_limit]
        if not sampling.allowed_token_ids and not words:
            return
        banned = None
        if sampling.allowed_token_ids:
            flags = np.ones(self._vocab_limit, dtype=np.bool_)
            flags[[token for token in sampling.allowed_token_ids if token < self._vocab_limit]] = 0
            banned = to_device(flags, self._device)
        longest = max((len(word) for word in words), default=1) - 1
        prefixes = np.full((len(words), longest), _ANY, dtype=np.int64)
        for row, word in enumerate(words):
            if len(word) > 1:
                prefixes[row, longest - len(word) + 1 :] = word[:-1]
        lasts = np.array([word[-1] for word in words], dtype=np.int64)
        self._rules[admission.slot] = _Rules(
            banned, to_device(prefixes, self._device), to_device(lasts, self._device)
        )

    def apply(
        self, logits: Array, slots: Ints, lengths: Ints, num_prompt: Ints, token_table: Array
    ) -> None:
        """Sets to -inf in logits [rows, vocab] what may not be next.

        A word counts where all of it is generated: the prompt may hold its beginning.
        """
        for row, slot in enumerate(slots.tolist()):
            rules = self._rules.get(slot)
            if rules is None:
                continue
            if rules.banned is not None:
                logits[row][rules.banned] = -np.inf
            if not len(rules.lasts):
                continue
            width = rules.prefixes.shape[1]
            length, first = int(lengths[row]), int(num_prompt[row])
            have = min(width, length - first)
            # A prefix that reaches back into the prompt can not match.
            known = rules.prefixes[:, width - have :]
            recent = token_table[slot, length - have : length]
            matches = ((known == _ANY) | (known == recent)).all(1)
            matches &= (rules.prefixes[:, : width - have] == _ANY).all(1)
            ban_ids(logits[row], rules.lasts, matches)
