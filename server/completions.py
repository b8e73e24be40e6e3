"""POST /v1/completions: the four forms of a prompt, echo, and text chunks.

Owns what is particular to completions; the way through the core is in inference.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from server.answers import CollectedChoice, EventWriter, Heading, Json
from server.choice import Choice, Delta, Echo
from server.errors import InvalidRequest
from server.generation import PromptGroup
from server.grammar_text import Grammar
from server.infill import infill_prompt
from server.logprobs import (
    Entry,
    TokenNames,
    completion_columns,
    completion_rows,
    prompt_columns,
)
from server.prepare import (
    LogprobsWish,
    ServedModel,
    check_length,
    check_prompt_logprobs,
    make_group,
)
from server.requests import RequestOrigin, check_tokens
from server.schemas import CompletionRequest
from server.sse import quote, to_json
from server.structured import answer_part
from server.text import TextError
from server.tokenizer import Tokenizer
from server.truncation import truncate_prompt

# Sequences of one HTTP request: prompts times n.
MAX_SEQUENCES = 1024

PromptForm = str | list[int]


def prepare_completion(
    fields: CompletionRequest, model: ServedModel, origin: RequestOrigin
) -> list[PromptGroup]:
    """A group for each prompt, in order; choices count through all of them."""
    prompts = read_prompts(fields.prompt)
    _check_fields(fields, len(prompts))
    if len(prompts) * fields.num_sequences > model.max_group:  # it would be too busy for ever
        raise InvalidRequest(
            f"This server holds at most {model.max_group} sequences; these are more.",
            param="n" if len(prompts) == 1 else "prompt",
        )
    answer = answer_part(fields.response_format, fields.structured_outputs)
    grammar = None if answer is None else Grammar("start: @answer", {"answer": answer})
    generated = fields.logprobs
    if generated is None and fields.num_sequences > fields.n:
        generated = 0  # to find the best by
    logprobs = LogprobsWish(generated, fields.logprobs if fields.echo else fields.prompt_logprobs)
    check_length(len(fields.suffix), model)
    wanted = _wanted_tokens(fields, model)
    groups = []
    for index, prompt in enumerate(prompts):
        token_ids = tokenize_prompt(prompt, model)
        if fields.suffix:
            token_ids = _infill(token_ids, fields.suffix, model.tokenizer)
        token_ids = truncate_prompt(token_ids, fields, model, wanted=wanted)
        groups.append(
            make_group(
                fields,
                token_ids,
                model,
                RequestOrigin(f"{origin.id}-{index}", origin.arrival, origin.tenant),
                wanted_tokens=wanted,
                logprobs=logprobs,
                echo=_echo(fields, prompt, token_ids, model.tokenizer),
                first_index=index * fields.num_sequences,
                grammar=grammar,
            )
        )
    return groups


def _check_fields(fields: CompletionRequest, num_prompts: int) -> None:
    if fields.best_of is not None and fields.best_of < fields.n:
        raise InvalidRequest("best_of must be at least n.", param="best_of")
    if fields.num_sequences > fields.n and fields.stream:
        raise InvalidRequest("The best are known at the end: no stream.", param="best_of")
    check_prompt_logprobs(fields)
    if fields.echo and (fields.suffix or fields.prompt_logprobs is not None):
        raise InvalidRequest(
            "echo goes with neither suffix nor prompt_logprobs; it has logprobs of its own.",
            param="echo",
        )
    if fields.max_tokens == 0 and not fields.echo:
        raise InvalidRequest("max_tokens 0 needs echo: true.", param="max_tokens")
    if fields.truncate_prompt_tokens is not None and (fields.echo or fields.suffix):
        raise InvalidRequest(
            "A prompt that is cut is neither echoed nor filled in.", param="truncate_prompt_tokens"
        )
    if num_prompts * fields.num_sequences > MAX_SEQUENCES:
        raise InvalidRequest(
            f"The number of prompts times n must be at most {MAX_SEQUENCES}.", param="prompt"
        )


def _wanted_tokens(fields: CompletionRequest, model: ServedModel) -> int:
    """The default is no wish of the client's, so it is not refused as one."""
    if "max_tokens" in fields.model_fields_set or model.limits.output is None:
        return fields.max_tokens
    return min(fields.max_tokens, model.limits.output)


def read_prompts(value: Any, param: str = "prompt") -> list[PromptForm]:
    """A string, a list of strings, a list of ids or a list of those; none empty or mixed."""
    if value is None:
        raise InvalidRequest(
            "This field is required.", param=param, code="missing_required_parameter"
        )
    if isinstance(value, str):
        prompts: list[PromptForm] = [value]
    elif _is_ids(value):
        prompts = [value]
    elif isinstance(value, list) and (
        all(isinstance(item, str) for item in value) or all(_is_ids(item) for item in value)
    ):
        prompts = value
    else:
        raise InvalidRequest(
            f"The {param} must be a string, a list of strings, a list of token ids or a list of "
            "lists of token ids.",
            param=param,
        )
    if not prompts or not all(prompts):
        raise InvalidRequest(f"The {param} must not be empty.", param=param)
    return prompts


def _is_ids(value: Any) -> bool:
    # bool is a subclass of int; `type` tells them apart.
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def tokenize_prompt(prompt: PromptForm, model: ServedModel, param: str = "prompt") -> list[int]:
    if not isinstance(prompt, str):
        check_tokens(prompt, model.limits.vocab_size, param)
        return prompt
    check_length(len(prompt), model)
    try:
        token_ids = model.tokenizer.encode(prompt, add_special_tokens=True)
    except TextError as error:
        raise InvalidRequest(str(error), param=param) from None
    if not token_ids:
        raise InvalidRequest(f"The {param} has no tokens.", param=param)
    return token_ids


def _echo(
    fields: CompletionRequest, prompt: PromptForm, token_ids: list[int], tokenizer: Tokenizer
) -> Echo | None:
    """The text as it was given, or what the ids decode to; offsets come from decoding one by one.

    Where a text does not come back from its ids as it was, offsets stay within it.
    """
    if not fields.echo:
        return None
    hide_special = fields.skip_special_tokens if isinstance(prompt, list) else False
    decoded, offsets = _walk(token_ids, tokenizer, skip_special_tokens=hide_special)
    if isinstance(prompt, str) and decoded != prompt:
        # A BOS of ours is not part of the client's text.
        decoded, offsets = _walk(token_ids, tokenizer, skip_special_tokens=True)
    text = prompt if isinstance(prompt, str) else decoded
    return Echo(
        text,
        tuple(token_ids),
        tuple(min(offset, len(text)) for offset in offsets),
        logprobs=fields.logprobs is not None,
    )


def _walk(
    token_ids: list[int], tokenizer: Tokenizer, *, skip_special_tokens: bool
) -> tuple[str, list[int]]:
    detokenizer = tokenizer.detokenizer((), skip_special_tokens=skip_special_tokens)
    pieces = []
    offsets = []
    length = 0
    for token_id in token_ids:
        offsets.append(length)
        pieces.append(detokenizer.add([token_id]))
        length += len(pieces[-1])
    return "".join(pieces) + detokenizer.finish(), offsets


def _infill(prompt: list[int], suffix: str, tokenizer: Tokenizer) -> list[int]:
    try:
        return infill_prompt(prompt, suffix, tokenizer)
    except TextError as error:
        raise InvalidRequest(str(error), param="suffix") from None


class CompletionFormat:
    """An AnswerFormat. A stream has no opening: its first text is the first event."""

    def __init__(
        self,
        heading: Heading,
        names: TokenNames,
        groups: list[PromptGroup],
        fields: CompletionRequest,
    ) -> None:
        self._groups = groups
        self._num_choices = fields.n
        self._prompt_logprobs = fields.prompt_logprobs is not None
        self._heading = heading
        self._names = names
        self._logprobs = fields.logprobs is not None
        self._with_usage = fields.includes_usage()
        self._writer = EventWriter(heading, "text_completion", with_usage=self._with_usage)

    def opening(self, usage: Json) -> list[str]:
        del usage
        return []

    def events(self, index: int, delta: Delta, usage: Json | None) -> list[str]:
        """Text and the end of a choice are two events."""
        made = []
        logprobs = self._logprobs_of(delta.entries)
        if delta.text:
            content = f'{{"index":{index},"text":{quote(delta.text)},"logprobs":'
            made.append(self._writer.choice(f'{content}{logprobs},"finish_reason":null}}', usage))
            logprobs = "null"
        if delta.finish_reason is not None:
            end = f'{{"index":{index},"text":"","logprobs":{logprobs},"finish_reason":'
            made.append(self._writer.choice(f'{end}"{delta.finish_reason.value}"}}', usage))
        return made

    def rows(self, entries: list[Entry]) -> list[Any]:
        return completion_rows(entries, self._names)

    def closing(self, usage: Json, timings: Json | None) -> list[str]:
        return self._writer.closing(usage if self._with_usage else None, timings)

    def body(self, choices: list[CollectedChoice], usage: Json, timings: Json | None) -> Json:
        body = self._heading.fields("text_completion")
        body["choices"] = [
            self._choice(index, choices[found], group)
            for index, (group, found) in enumerate(self._best())
        ]
        body["usage"] = usage
        if timings is not None:
            body["timings"] = timings
        return body

    def _best(self) -> Iterator[tuple[PromptGroup, int]]:
        """Of each prompt's candidates the n with the highest mean log-probability, best first.

        Where all are returned, they stay in order.
        """
        for group in self._groups:
            order = list(range(len(group.choices)))
            if len(order) > self._num_choices:
                order.sort(key=lambda at: -_mean_logprob(group.choices[at]))
            for at in order[: self._num_choices]:
                yield group, group.first_index + at

    def _choice(self, index: int, choice: CollectedChoice, group: PromptGroup) -> Json:
        made = {
            "index": index,
            "text": choice.text,
            "logprobs": completion_columns(choice.rows) if self._logprobs else None,
            "finish_reason": choice.finish_reason,
        }
        if self._prompt_logprobs:
            made["prompt_logprobs"] = prompt_columns(group.choices[0].prompt_logprobs, self._names)
        return made

    def _logprobs_of(self, entries: list[Entry]) -> str:
        return to_json(completion_columns(self.rows(entries))) if entries else "null"


def _mean_logprob(choice: Choice) -> float:
    return choice.sum_logprobs / max(1, choice.num_tokens)
