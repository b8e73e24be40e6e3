"""POST /v1/chat/completions: messages to a prompt, deltas to chat chunks.

Owns what is particular to chat; the way through the core is in inference.py.
"""

from __future__ import annotations

from typing import Any

import msgspec

from server.answers import CollectedChoice, EventWriter, Heading, Json
from server.chat_template import TemplateError
from server.choice import Delta
from server.errors import InvalidRequest
from server.generation import PromptGroup
from server.logprobs import Entry, TokenNames, chat_content
from server.prepare import LogprobsWish, ServedModel, check_length, make_group
from server.requests import RequestOrigin
from server.schemas import ChatRequest
from server.sse import quote, to_json
from server.text import TextError


def prepare_chat(
    fields: ChatRequest, model: ServedModel, origin: RequestOrigin
) -> list[PromptGroup]:
    if fields.top_logprobs and not fields.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true.", param="top_logprobs")
    text = _render(fields, model)
    check_length(len(text), model)
    prompt = model.tokenizer.encode_chat(text)
    if not prompt:
        raise InvalidRequest("The messages make an empty prompt.", param="messages")
    logprobs = LogprobsWish(fields.top_logprobs if fields.logprobs else None)
    wanted = _wanted_tokens(fields)
    return [make_group(fields, prompt, model, origin, wanted_tokens=wanted, logprobs=logprobs)]


def _wanted_tokens(fields: ChatRequest) -> int | None:
    if fields.max_tokens is None or fields.max_completion_tokens is None:
        return fields.max_tokens or fields.max_completion_tokens
    if fields.max_tokens != fields.max_completion_tokens:
        raise InvalidRequest(
            "max_tokens and max_completion_tokens contradict each other; give one of them.",
            param="max_tokens",
        )
    return fields.max_tokens


def _render(fields: ChatRequest, model: ServedModel) -> str:
    template = model.tokenizer.chat_template
    if template is None:
        raise InvalidRequest(
            "This model has no chat template; use /v1/completions.", code="no_chat_template"
        )
    if not fields.messages:
        raise InvalidRequest("There must be at least one message.", param="messages")
    messages = [message.model_dump(exclude_none=True) for message in fields.messages]
    # The content alone must fit, before the template copies it about.
    check_length(_num_chars(messages), model)
    try:
        return template.render(messages, add_generation_prompt=fields.add_generation_prompt)
    except (TemplateError, TextError) as error:
        param = error.param if isinstance(error, TemplateError) else None
        raise InvalidRequest(
            str(error), param=param or "messages", code="chat_template_error"
        ) from None


def _num_chars(messages: list[dict[str, Any]]) -> int:
    total = 0
    for message in messages:
        content = message.get("content", "")
        parts = [content] if isinstance(content, str) else [part["text"] for part in content]
        total += sum(len(part) for part in parts)
    return total


class ChatFormat:
    """An AnswerFormat. Roles of all choices open the stream, in order: clients index by it."""

    def __init__(
        self, heading: Heading, names: TokenNames, num_choices: int, fields: ChatRequest
    ) -> None:
        self._heading = heading
        self._names = names
        self._num_choices = num_choices
        self._logprobs = fields.logprobs
        self._with_usage = fields.includes_usage()
        self._writer = EventWriter(heading, "chat.completion.chunk")

    def opening(self, usage: Json) -> list[str]:
        del usage
        role = {"role": "assistant", "content": ""}
        return [
            self._writer.choice(
                to_json({"index": index, "delta": role, "logprobs": None, "finish_reason": None}),
                None,
            )
            for index in range(self._num_choices)
        ]

    def events(self, index: int, delta: Delta, usage: Json | None) -> list[str]:
        """Text and the end of a choice are two events."""
        made = []
        logprobs = self._logprobs_of(delta.entries)
        if delta.text:
            content = f'{{"index":{index},"delta":{{"content":{quote(delta.text)}}},"logprobs":'
            made.append(self._writer.choice(f'{content}{logprobs},"finish_reason":null}}', usage))
            logprobs = "null"
        if delta.finish_reason is not None:
            end = f'{{"index":{index},"delta":{{}},"logprobs":{logprobs},"finish_reason":'
            made.append(self._writer.choice(f'{end}"{delta.finish_reason.value}"}}', usage))
        return made

    def rows(self, entries: list[Entry]) -> list[Any]:
        return [msgspec.Raw(msgspec.json.encode(row)) for row in chat_content(entries, self._names)]

    def closing(self, usage: Json, timings: Json | None) -> list[str]:
        return self._writer.closing(usage if self._with_usage else None, timings)

    def body(self, choices: list[CollectedChoice], usage: Json, timings: Json | None) -> Json:
        body = self._heading.fields("chat.completion")
        body["choices"] = [self._choice(index, choice) for index, choice in enumerate(choices)]
        body["usage"] = usage
        if timings is not None:
            body["timings"] = timings
        return body

    def _choice(self, index: int, choice: CollectedChoice) -> Json:
        logprobs = None
        if self._logprobs:
            logprobs = {"content": choice.rows, "refusal": None}
        return {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
        }

    def _logprobs_of(self, entries: list[Entry]) -> str:
        if not entries:
            return "null"
        return to_json({"content": chat_content(entries, self._names), "refusal": None})
