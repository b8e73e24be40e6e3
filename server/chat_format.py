"""How a chat answer is written: reading its text into pieces, pieces into chunks or one message.

An AnswerFormat. Each piece is a chunk of its own, since clients read one tool call a chunk; id and
name of a call come once, with its first chunk, since clients join what they are sent.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence
from typing import Any

import msgspec

from server.answers import CollectedChoice, EventWriter, Heading, Json
from server.choice import Delta
from server.generation import PromptGroup
from server.logprobs import Entry, TokenNames, chat_content, prompt_columns
from server.reading import ChatPiece, Reader, Reading, ReadMessage, Thought
from server.schemas import ChatRequest
from server.sse import quote, to_json
from server.tools.pieces import CallStart, Content

_ID_LETTERS = string.ascii_letters + string.digits


class ChatFormat:
    """Roles of all choices open the stream, in order: clients index by it."""

    def __init__(
        self,
        heading: Heading,
        names: TokenNames,
        groups: Sequence[PromptGroup],
        fields: ChatRequest,
    ) -> None:
        (group,) = groups
        self._heading = heading
        self._names = names
        self._choices = group.choices
        self._logprobs = fields.logprobs
        self._prompt_logprobs = fields.prompt_logprobs is not None
        self._shows_thoughts = fields.include_reasoning
        self._reading = group.reading or Reading()
        self._readers = [Reader(self._reading) for _ in group.choices]
        # Log-probabilities of text that is read but not written yet.
        self._waiting: list[list[Entry]] = [[] for _ in group.choices]
        self._with_usage = fields.includes_usage()
        self._writer = EventWriter(heading, "chat.completion.chunk", with_usage=self._with_usage)

    def opening(self, usage: Json) -> list[str]:
        del usage
        role = {"role": "assistant", "content": ""}
        return [
            self._writer.choice(
                to_json({"index": index, "delta": role, "logprobs": None, "finish_reason": None}),
                None,
            )
            for index in range(len(self._choices))
        ]

    def events(self, index: int, delta: Delta, usage: Json | None) -> list[str]:
        """Every piece and the end of a choice are events of their own."""
        reader = self._readers[index]
        pieces = reader.feed(delta.text)
        if delta.finish_reason is not None:
            pieces += reader.finish()
        self._waiting[index] += delta.entries
        made = []
        for body in filter(None, map(self._delta, pieces)):
            logprobs = self._take_logprobs(index)
            chunk = f'{{"index":{index},"delta":{body},"logprobs":{logprobs},"finish_reason":null}}'
            made.append(self._writer.choice(chunk, usage))
        if delta.finish_reason is not None:
            logprobs = self._take_logprobs(index)
            end = f'{{"index":{index},"delta":{{}},"logprobs":{logprobs},"finish_reason":'
            reason = reader.finish_reason(delta.finish_reason.value)
            made.append(self._writer.choice(f'{end}"{reason}"}}', usage))
        return made

    def rows(self, entries: list[Entry]) -> list[Any]:
        return [msgspec.Raw(msgspec.json.encode(row)) for row in chat_content(entries, self._names)]

    def closing(self, usage: Json, timings: Json | None) -> list[str]:
        return self._writer.closing(usage if self._with_usage else None, timings)

    def body(self, choices: list[CollectedChoice], usage: Json, timings: Json | None) -> Json:
        body = self._heading.fields("chat.completion")
        body["choices"] = [self._choice(index, choice) for index, choice in enumerate(choices)]
        if self._prompt_logprobs:
            entries = self._choices[0].prompt_logprobs
            body["prompt_logprobs"] = prompt_columns(entries, self._names)
        body["usage"] = usage
        if timings is not None:
            body["timings"] = timings
        return body

    def _choice(self, index: int, choice: CollectedChoice) -> Json:
        reader = Reader(self._reading)
        read = ReadMessage()
        read.add(reader.feed(choice.text))
        read.add(reader.finish())
        assert choice.finish_reason is not None
        return {
            "index": index,
            "message": self._message(read),
            "logprobs": {"content": choice.rows, "refusal": None} if self._logprobs else None,
            "finish_reason": reader.finish_reason(choice.finish_reason.value),
        }

    def _message(self, read: ReadMessage) -> Json:
        message: Json = {"role": "assistant", "content": read.content, "refusal": None}
        if read.calls is not None:
            message["content"] = read.content or None
            message["tool_calls"] = [
                {
                    "id": self._call_id(),
                    "type": "function",
                    "function": {"name": name, "arguments": arguments},
                }
                for name, arguments in read.calls
            ]
        if read.thought is not None and self._shows_thoughts:
            # The two names that clients look for.
            message |= {"reasoning": read.thought, "reasoning_content": read.thought}
        return message

    def _delta(self, piece: ChatPiece) -> str:
        """The delta of one piece as JSON; "" for one that is not to be shown."""
        match piece:
            case Content(text):
                return f'{{"content":{quote(text)}}}'
            case Thought(text):
                thought = quote(text)
                both = f'{{"reasoning":{thought},"reasoning_content":{thought}}}'
                return both if self._shows_thoughts else ""
            case CallStart(index, name):
                function = {"name": name, "arguments": ""}
                call = {"index": index, "id": self._call_id(), "type": "function"}
                return to_json({"tool_calls": [{**call, "function": function}]})
            case _:
                function = {"arguments": piece.text}
                return to_json({"tool_calls": [{"index": piece.index, "function": function}]})

    def _call_id(self) -> str:
        """Mistral's templates take nine letters and digits only."""
        form = self._reading.form
        is_mistral = form is not None and form.opening == "[TOOL_CALLS]"
        size, prefix = (9, "") if is_mistral else (24, "call_")
        return prefix + "".join(secrets.choice(_ID_LETTERS) for _ in range(size))

    def _take_logprobs(self, index: int) -> str:
        entries = self._waiting[index]
        if not entries:
            return "null"
        self._waiting[index] = []
        return to_json({"content": chat_content(entries, self._names), "refusal": None})
