"""Filling in before a suffix: the prompt of models that were trained with FIM tokens.

Owns the names of these tokens by family. The order is prefix, suffix, middle: what the model says
next belongs between the two texts (Bavarian et al. 2022). Knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from server.errors import InvalidRequest
from server.tokenizer import Tokenizer

# (prefix, suffix, middle) of Qwen coder and CodeGemma, StarCoder and SmolLM, DeepSeek, CodeLlama.
MARKERS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
)


@dataclass(frozen=True, slots=True)
class FimTokens:
    prefix: int
    suffix: int
    middle: int


def fim_tokens(tokenizer: Tokenizer) -> FimTokens | None:
    """None for a vocabulary without them."""
    for names in MARKERS:
        ids = [tokenizer.encode(name, add_special_tokens=False) for name in names]
        if all(len(one) == 1 for one in ids):
            return FimTokens(*(one[0] for one in ids))
    return None


def infill_prompt(prompt: Sequence[int], suffix: str, tokenizer: Tokenizer) -> list[int]:
    """The ids of a prompt whose answer stands between `prompt` and `suffix`.

    A BOS stays in front. Raises InvalidRequest for a model without the tokens, TextError.
    """
    tokens = fim_tokens(tokenizer)
    if tokens is None:
        raise InvalidRequest(
            "This model has no tokens for filling in, so there can be no suffix.",
            param="suffix",
            code="unsupported_parameter",
        )
    after = tokenizer.encode(suffix, add_special_tokens=False)
    front = list(prompt[:1]) if prompt and prompt[0] == tokenizer.bos else []
    return [*front, tokens.prefix, *prompt[len(front) :], tokens.suffix, *after, tokens.middle]
