"""From a prompt's ids and the fields to the requests and choices that answer it.

Owns what both endpoints do alike before the core is asked; runs in a worker thread. Knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from server.choice import Choice, Echo, TextRules
from server.errors import InvalidRequest
from server.generation import PromptGroup
from server.grammar_text import Grammar
from server.logprobs import TokenNames
from server.reading import AS_IT_IS, Reading
from server.requests import (
    RequestOrigin,
    TokenLimits,
    build_requests,
    check_min_tokens,
    context_exceeded,
    resolve_max_tokens,
    sampling_params,
    stop_tokens,
)
from server.schemas import ChatRequest, CompletionRequest, GenerationFields
from server.text import TextError
from server.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What preparing needs to know of the one model. `max_group` is how many sequences the core
    takes at once."""

    name: str
    tokenizer: Tokenizer
    token_names: TokenNames
    limits: TokenLimits
    eos_token_ids: tuple[int, ...]
    max_group: int
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"


@dataclass(frozen=True, slots=True)
class LogprobsWish:
    """As in SamplingParams: None reports nothing."""

    generated: int | None = None
    prompt: int | None = None


def check_length(num_chars: int, model: ServedModel) -> None:
    """Refuses unread a text that cannot fit, since tokenising it could take seconds."""
    limits = model.limits
    most = limits.total if limits.input is None else min(limits.total, limits.input)
    if num_chars > model.tokenizer.max_chars_for(most):
        raise context_exceeded(f"more than {most} tokens", limits.total)


def check_prompt_logprobs(fields: ChatRequest | CompletionRequest) -> None:
    if fields.prompt_logprobs is not None and fields.stream:
        raise InvalidRequest(
            "prompt_logprobs come in one piece: no stream.", param="prompt_logprobs"
        )


def make_group(
    fields: GenerationFields,
    prompt: Sequence[int],
    model: ServedModel,
    origin: RequestOrigin,
    *,
    wanted_tokens: int | None,
    logprobs: LogprobsWish,
    echo: Echo | None = None,
    first_index: int = 0,
    grammar: Grammar | None = None,
    reading: Reading | None = None,
    shows_special: bool = False,
) -> PromptGroup:
    """Raises InvalidRequest for whatever the core could not take."""
    limits = model.limits
    if model.tokenizer.vocab_size > limits.vocab_size:
        _check_rows(prompt, model)
    max_tokens = resolve_max_tokens(len(prompt), wanted_tokens, limits)
    check_min_tokens(fields, max_tokens)
    if fields.num_sequences > model.max_group:
        raise InvalidRequest(
            f"This server holds at most {model.max_group} sequences, so there cannot be "
            f"{fields.num_sequences} of one prompt.",
            param="n",
        )
    if fields.allowed_token_ids is not None and grammar is not None:
        raise InvalidRequest(
            "allowed_token_ids and a constraint on the answer's form cannot be used together.",
            param="allowed_token_ids",
        )
    stops = stop_tokens(
        fields, model.eos_token_ids, limits.vocab_size, has_grammar=grammar is not None
    )
    requests = build_requests(
        fields,
        prompt,
        origin,
        max_tokens=max_tokens,
        sampling=sampling_params(
            fields,
            limits.vocab_size,
            num_logprobs=logprobs.generated,
            prompt_logprobs=logprobs.prompt,
            encode=lambda text, param: _encode(model.tokenizer, text, param),
        ),
        stop_token_ids=stops,
        grammar=b"" if grammar is None else grammar.spec(),
    )
    rules = TextRules(
        stops=fields.stops(),
        include_stop=fields.include_stop_str_in_output,
        min_tokens=fields.min_tokens,
        stop_token_ids=stops,
        logprobs=logprobs.generated is not None,
        reading=reading or AS_IT_IS,
    )
    hides_special = fields.skip_special_tokens and not shows_special
    detokenizer = model.tokenizer.detokenizer
    choices = tuple(
        Choice(rules, detokenizer(prompt, skip_special_tokens=hides_special), echo)
        for _ in requests
    )
    return PromptGroup(requests, choices, first_index, grammar=grammar, reading=reading)


def _check_rows(prompt: Sequence[int], model: ServedModel) -> None:
    """Some tokenizers have tokens, for padding or of a later model, that the model has no row for.

    Such a text can be written and cannot be read.
    """
    highest = max(prompt, default=0)
    if highest >= model.limits.vocab_size:
        name = model.token_names(highest)[0]
        raise InvalidRequest(f"The prompt has a token that this model does not know: '{name}'.")


def _encode(tokenizer: Tokenizer, text: str, param: str) -> list[int]:
    try:
        return tokenizer.encode(text, add_special_tokens=False)
    except TextError as error:
        raise InvalidRequest(str(error), param=param) from None
