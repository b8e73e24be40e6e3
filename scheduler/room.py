"""Room: how many tokens a step may have while the engine is short of memory.

Halves when a step was refused for lack of it, and doubles again after steps that fitted: the more
refusals there were, the more of those. So what is refused again and again is tried less and less,
and those who run get on. It must not know sequences; the same steps give the same room.
"""

from __future__ import annotations

# Steps that must fit before the room doubles: before any refusal (each doubles it), and at most.
_FIRST_PATIENCE, _MAX_PATIENCE = 4, 128


class Room:
    """`tokens` is the budget of the next step, from 1 to `max_tokens`."""

    def __init__(self, max_tokens: int) -> None:
        self.tokens = max_tokens
        self._max_tokens = max_tokens
        self._patience = _FIRST_PATIENCE
        self._fitted = 0  # steps since the last change

    def refuse(self, num_tokens: int) -> None:
        """A step of so many tokens did not fit."""
        self.tokens = max(1, num_tokens // 2)
        self._patience = min(2 * self._patience, _MAX_PATIENCE)
        self._fitted = 0

    def relieve(self) -> None:
        """What asked for too much is gone: the room comes back soon."""
        self._patience = _FIRST_PATIENCE
        self._fitted = 0

    def fit(self) -> None:
        """A step fitted."""
        if self.tokens == self._max_tokens and self._patience == _FIRST_PATIENCE:
            return
        self._fitted += 1
        if self._fitted < self._patience:
            return
        self._fitted = 0
        if self.tokens < self._max_tokens:
            self.tokens = min(2 * self.tokens, self._max_tokens)
        else:
            self._patience //= 2
