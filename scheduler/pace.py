"""Pace: how many prompt tokens a step may take without slowing those who already stream.

Owns a model of the step time, learnt from what steps took, and the budget that follows from a
target. It must not know sequences or blocks; time comes in as measured seconds, so the same results
give the same budgets.

    seconds of a step = what its decodes take alone + seconds of a prompt token x prompt tokens
"""

from __future__ import annotations

# How fast an estimate follows: the weight of the newest step.
_NEWEST = 0.2
# A step is aimed at this share of the target; the rest is planning, transport and noise.
_AIM = 0.9
# A chunk smaller than this tells more about noise than about the cost of a prompt token.
_MIN_MEASURED_TOKENS = 8


class Pace:
    """Budgets prompt tokens so that a step that also decodes stays within `target_seconds`.

    Where nothing decodes nobody waits for the step, so there the budget is `max_tokens`. It never
    falls below `min_tokens`: prompts go on, if slowly, even where the decodes alone take longer
    than the target.
    """

    def __init__(self, target_seconds: float | None, *, min_tokens: int, max_tokens: int) -> None:
        self._target = target_seconds
        self._min_tokens = min(min_tokens, max_tokens)
        self._max_tokens = max_tokens
        self._decode_seconds = 0.0  # of a step without prompt tokens, with `_num_decodes` rows
        self._num_decodes = 0
        self._token_seconds = 0.0  # of a prompt token; 0 before one was measured

    def prompt_tokens(self, num_decodes: int) -> int:
        """How many prompt tokens may join `num_decodes` decodes in one step."""
        if self._target is None or num_decodes == 0 or self._token_seconds == 0.0:
            return self._max_tokens
        left = self._target * _AIM - self._decodes(num_decodes)
        return max(self._min_tokens, min(self._max_tokens, int(left / self._token_seconds)))

    def observe(self, num_prefill_tokens: int, num_decodes: int, seconds: float) -> None:
        """A step of so many prompt tokens and decodes took `seconds` on the device."""
        if seconds <= 0.0:
            return
        if num_prefill_tokens == 0:
            known = self._decodes(num_decodes)
            self._decode_seconds = _follow(known, seconds)
            self._num_decodes = num_decodes
        elif num_prefill_tokens >= _MIN_MEASURED_TOKENS:
            own = seconds - self._decodes(num_decodes)
            # Decodes that were faster than we knew don't make a prompt token free.
            own = max(own, seconds / (num_prefill_tokens + num_decodes))
            self._token_seconds = _follow(self._token_seconds, own / num_prefill_tokens)

    def _decodes(self, num_decodes: int) -> float:
        """Decodes share the reading of the weights, so fewer of them hardly take less."""
        if self._num_decodes == 0:
            return 0.0
        return self._decode_seconds * max(1.0, num_decodes / self._num_decodes)


def _follow(known: float, measured: float) -> float:
    return measured if known == 0.0 else known + _NEWEST * (measured - known)
