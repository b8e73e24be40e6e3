"""How an answer is written for the Anthropic API: blocks, and named events in their order.

An AnswerFormat of one choice. Thoughts, texts and tool calls are blocks, one open at a time; the
same Reader makes the pieces of streams and of plain answers.

    message_start (content_block_start content_block_delta* content_block_stop)*
    message_delta message_stop
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any

from server.answers import CollectedChoice, Heading, Json
from server.anthropic.schemas import MessagesChat
from server.choice import Delta
from server.generation import PromptGroup
from server.logprobs import Entry, TokenNames
from server.reading import ChatPiece, Reader, Reading, Thought
from server.sse import named_event
from server.tools.pieces import CallStart, Content

# Clients that stream arguments know this name for what is no JSON, such as a call that was cut.
INVALID_JSON = "INVALID_JSON"


class MessagesFormat:
    def __init__(
        self,
        heading: Heading,
        names: TokenNames,
        groups: Sequence[PromptGroup],
        fields: MessagesChat,
    ) -> None:
        del names  # there are no log-probabilities in this API
        (group,) = groups
        self._heading = heading
        self._reading = group.reading or Reading()
        self._reader = Reader(self._reading)
        self._is_cut_by_context = group.requests[0].max_tokens < (fields.max_tokens or 0)
        self._shows_thoughts = fields.include_reasoning
        # Edits of the context are told of where they were asked for; none is ever made.
        self._extras: Json = (
            {"context_management": {"applied_edits": []}} if fields.has_context_management else {}
        )
        self._index = -1  # of the newest block
        self._open = ""  # its type; "" when it is closed
        self._ending: Json = {}

    def opening(self, usage: Json) -> list[str]:
        message = self._message([], None, None, usage)
        return [named_event("message_start", {"type": "message_start", "message": message})]

    def events(self, index: int, delta: Delta, usage: Json | None) -> list[str]:
        del index, usage
        pieces = self._reader.feed(delta.text)
        if delta.finish_reason is not None:
            pieces += self._reader.finish()
        made = [event for piece in pieces for event in self._piece(piece)]
        if delta.finish_reason is not None:
            made += self._close()
            reason = self._reader.finish_reason(delta.finish_reason.value)
            self._ending = {
                "stop_reason": self._stop_reason(self._reader, reason, delta.stop),
                "stop_sequence": delta.stop,
            }
        return made

    def rows(self, entries: list[Entry]) -> list[Any]:
        del entries
        return []

    def closing(self, usage: Json, timings: Json | None) -> list[str]:
        ending = {"type": "message_delta", "delta": self._ending, "usage": used(usage)}
        ending |= self._extras
        if timings is not None:
            ending["timings"] = timings
        return [
            named_event("message_delta", ending),
            named_event("message_stop", {"type": "message_stop"}),
        ]

    def body(self, choices: list[CollectedChoice], usage: Json, timings: Json | None) -> Json:
        (choice,) = choices
        reader = Reader(self._reading)
        pieces = [*reader.feed(choice.text), *reader.finish()]
        assert choice.finish_reason is not None
        reason = reader.finish_reason(choice.finish_reason.value)
        stop_reason = self._stop_reason(reader, reason, choice.stop)
        message = self._message(self._blocks(pieces), stop_reason, choice.stop, usage)
        message |= self._extras
        return message if timings is None else {**message, "timings": timings}

    def _message(
        self, content: list[Json], stop_reason: str | None, stop: str | None, usage: Json
    ) -> Json:
        return {
            "id": self._heading.id,
            "type": "message",
            "role": "assistant",
            "model": self._heading.model,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": stop,
            "usage": used(usage),
        }

    def _stop_reason(self, reader: Reader, reason: str, stop: str | None) -> str:
        """A call is a tool_use here even where it was asked for by name."""
        if stop is not None:
            return "stop_sequence"
        if reason == "length":
            return "model_context_window_exceeded" if self._is_cut_by_context else "max_tokens"
        return "tool_use" if reader.has_calls else "end_turn"

    def _blocks(self, pieces: Sequence[ChatPiece]) -> list[Json]:
        """The blocks that a client makes of the events of the same pieces."""
        blocks: list[Json] = []
        arguments = ""
        for piece in pieces:
            match piece:
                case Content(text) | Thought(text):
                    kind = "text" if isinstance(piece, Content) else "thinking"
                    if not blocks or blocks[-1]["type"] != kind:
                        blocks.append(_block(kind, ""))
                    if kind == "text" or self._shows_thoughts:
                        blocks[-1][kind] += text
                case CallStart(_, name):
                    arguments = ""
                    blocks.append(_tool_use(name, {}))
                case _:
                    arguments += piece.text
                    blocks[-1]["input"] = _input(arguments)
        return blocks

    def _piece(self, piece: ChatPiece) -> list[str]:
        match piece:
            case Content(text):
                return self._text("text", "text_delta", text)
            case Thought(text):
                return self._text("thinking", "thinking_delta", text)
            case CallStart(_, name):
                return [*self._close(), self._start(_tool_use(name, {}))]
            case _:
                partial = {"type": "input_json_delta", "partial_json": piece.text}
                return [self._delta(partial)]

    def _text(self, block: str, delta: str, text: str) -> list[str]:
        made = []
        if self._open != block:
            made = [*self._close(), self._start(_block(block, ""))]
        if block == "thinking" and not self._shows_thoughts:
            return made
        return [*made, self._delta({"type": delta, block: text})]

    def _start(self, block: Json) -> str:
        self._index += 1
        self._open = block["type"]
        start = {"type": "content_block_start", "index": self._index, "content_block": block}
        return named_event("content_block_start", start)

    def _delta(self, delta: Json) -> str:
        event = {"type": "content_block_delta", "index": self._index, "delta": delta}
        return named_event("content_block_delta", event)

    def _close(self) -> list[str]:
        if not self._open:
            return []
        self._open = ""
        stop = {"type": "content_block_stop", "index": self._index}
        return [named_event("content_block_stop", stop)]


def used(usage: Json) -> Json:
    """Tokens found in the prefix cache are told apart from those that were read anew."""
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {
            "thinking_tokens": usage["completion_tokens_details"]["reasoning_tokens"]
        },
    }


def _block(kind: str, text: str) -> Json:
    block: Json = {"type": kind, kind: text}
    if kind == "thinking":
        block["signature"] = ""
    return block


def _tool_use(name: str, given: Json) -> Json:
    return {
        "type": "tool_use",
        "id": f"toolu_{secrets.token_hex(12)}",
        "name": name,
        "input": given,
    }


def _input(text: str) -> Json:
    if not text.strip():
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {INVALID_JSON: text}
    return value if isinstance(value, dict) else {INVALID_JSON: text}
