"""Pace: how many prompt tokens a step may take without slowing those who already stream.

Owns a model of the step time, learnt from what steps took, and the budget that follows from a
target. It must not know sequences or blocks; time comes in as measured seconds, so the same results
give the same budgets.

    seconds of a step = fixed + seconds of a decode x decodes + seconds of a prompt token x tokens

Each step corrects all three, a larger term by more of itself: the normalised least mean squares
rule (Widrow and Hoff, 1960) in relative terms. Under load every step has prompt tokens and decodes
may never be seen alone, so none of them may wait for a step that shows it. An excess goes to small
terms too: in proportion alone, one that is next to nothing would stay so, and the others swing.
"""

from __future__ import annotations

# How fast the model follows: the weight of the newest step.
_NEWEST = 0.2
# A step is aimed at this share of the target; the rest is planning, transport and noise.
_AIM = 0.9
# Below the resolution of any clock that times a step.
_LEAST = 1e-9
# Of an excess, beside the square of its share, for any term that has a part in the step.
_LEAST_PART = 0.03
# What of the first step is taken for fixed: decodes wait for the weights, prompts for products.
_FIXED_OF_DECODES = 0.9
_FIXED_OF_PROMPTS = 0.1


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
        self._fixed = 0.0
        self._of_decode = 0.0
        self._of_token = 0.0  # of a prompt; 0 before anything was measured

    def prompt_tokens(self, num_decodes: int) -> int:
        """How many prompt tokens may join `num_decodes` decodes in one step."""
        if self._target is None or num_decodes == 0 or self._of_token == 0.0:
            return self._max_tokens
        left = self._target * _AIM - self._fixed - self._of_decode * num_decodes
        return int(max(self._min_tokens, min(self._max_tokens, left / self._of_token)))

    def observe(self, num_prefill_tokens: int, num_decodes: int, seconds: float) -> None:
        """A step of so many prompt tokens and decodes took `seconds` on the device."""
        if seconds < _LEAST:
            return
        if self._of_token == 0.0:
            share = _FIXED_OF_PROMPTS if num_prefill_tokens else _FIXED_OF_DECODES
            self._fixed = share * seconds
            self._of_decode = self._of_token = (seconds - self._fixed) / (
                num_prefill_tokens + num_decodes
            )
            return
        terms = (
            self._fixed,
            self._of_decode * num_decodes,
            self._of_token * num_prefill_tokens,
        )
        expected = sum(terms)
        # A step that something else held up for long tells no more than one of twice the time.
        error = min(seconds / expected - 1.0, 1.0)
        least = _LEAST_PART if error > 0.0 else 0.0
        parts = [(term / expected) ** 2 + least if term else 0.0 for term in terms]
        step = _NEWEST * error * expected / sum(parts)
        fixed, decodes, prompts = (step * part for part in parts)
        self._fixed += fixed
        if num_decodes:
            self._of_decode += decodes / num_decodes
        if num_prefill_tokens:
            self._of_token += prompts / num_prefill_tokens
