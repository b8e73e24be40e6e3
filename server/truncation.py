"""truncate_prompt_tokens: prompts that are too long, cut instead of refused, where the client asks.

Owns how much is kept. A BOS that the model begins with stays where the beginning is cut.
"""

from __future__ import annotations

from collections.abc import Sequence

from server.errors import InvalidRequest
from server.prepare import ServedModel
from server.schemas import GenerationFields


def truncate_prompt(
    prompt: Sequence[int], fields: GenerationFields, model: ServedModel, *, wanted: int | None
) -> list[int]:
    """The prompt, or so much of it as was asked for; -1 asks for what leaves room for the answer.

    `wanted` is the length of the answer, by default a token.
    """
    limit = fields.truncate_prompt_tokens
    if limit is None:
        return list(prompt)
    if limit == 0:
        raise InvalidRequest(
            "At least one token must be left; -1 keeps what fits.", param="truncate_prompt_tokens"
        )
    if limit == -1:
        limit = max(model.limits.total - (1 if wanted is None else wanted), 1)
        if model.limits.input is not None:
            limit = min(limit, model.limits.input)
    if len(prompt) <= limit:
        return list(prompt)
    if fields.truncation_side == "right":
        return list(prompt[:limit])
    if prompt[0] == model.tokenizer.bos and limit > 1:
        return [prompt[0], *prompt[len(prompt) - limit + 1 :]]
    return list(prompt[len(prompt) - limit :])
