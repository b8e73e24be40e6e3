"""How long a model may think: after so many tokens nothing but the end of the thoughts may come.

Owns the count of one sequence, for models whose closing marker is text, cut into tokens in more
ways than one. What may be said otherwise is the grammar's business; knows no masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ThoughtRules:
    """`opening` is b"" where the prompt has opened the thoughts."""

    budget: int
    opening: bytes
    closing: bytes
    tokens: Sequence[bytes]
    # What is left of the closing marker -> the ids that go on with it.
    endings: dict[bytes, Ids]

    @classmethod
    def of(
        cls, budget: int, opening: bytes, closing: bytes, tokens: Sequence[bytes]
    ) -> ThoughtRules:
        left = [closing[at:] for at in range(len(closing))]
        pieces = {rest[:size] for rest in left for size in range(1, len(rest) + 1)}
        ids = [(token, index) for index, token in enumerate(tokens) if token in pieces]
        endings = {
            rest: np.array([index for token, index in ids if rest.startswith(token)], np.int64)
            for rest in left
        }
        return cls(budget, opening, closing, tokens, endings)


class ThoughtBudget:
    """Tell it every token; ask what must come."""

    def __init__(self, rules: ThoughtRules) -> None:
        self._rules = rules
        self._is_thinking = not rules.opening
        self._is_over = False
        self._num_tokens = 0
        self._tail = b""  # what may be the beginning of a marker

    def forced(self) -> Ids | None:
        """The ids of which one must come; None where any may."""
        rules = self._rules
        if self._is_over or not self._is_thinking or self._num_tokens < rules.budget:
            return None
        for size in range(min(len(self._tail), len(rules.closing) - 1), -1, -1):
            if rules.closing.startswith(self._tail[len(self._tail) - size :]):
                return rules.endings[rules.closing[size:]]
        raise AssertionError("nothing is a beginning, too")

    def accept(self, token_id: int) -> bool:
        """False for one that may not come."""
        if self._is_over:
            return True
        forced = self.forced()
        if forced is not None and token_id not in forced:
            return False
        self._tail += self._rules.tokens[token_id]
        if not self._is_thinking:
            self._open()
        elif self._rules.closing in self._tail:
            self._is_over = True
        else:
            self._num_tokens += 1
            self._tail = self._tail[-len(self._rules.closing) :]
        return True

    def _open(self) -> None:
        """An answer that begins otherwise has no thoughts."""
        opening, said = self._rules.opening, self._tail.lstrip()
        if said.startswith(opening):
            self._is_thinking = True
            self._tail = said[len(opening) :]
            self._is_over = self._rules.closing in self._tail
        elif not opening.startswith(said):
            self._is_over = True
