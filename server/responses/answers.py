"""How an answer is written for the Responses API: output items, and events in their order.

An AnswerFormat of one choice. OutputItems makes both the items and the events that tell of them, so
a stream, a plain answer and what is stored are the same. What becomes of a finished response is not
known here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from scheduler.types import FinishReason
from server.answers import CollectedChoice, Heading, Json
from server.choice import Delta
from server.errors import MAX_MESSAGE_CHARS, ApiError, cut
from server.generation import PromptGroup
from server.logprobs import Entry, TokenNames, chat_content
from server.reading import ChatPiece, Reader, Reading
from server.responses.content_rows import ContentRows
from server.responses.offered_tools import shown_tools
from server.responses.output_items import OutputItems
from server.responses.schemas import ResponseRequest
from server.sse import Framing, named_event


def framing(error: Callable[[ApiError], str]) -> Framing:
    """No [DONE]: the last event says that it is the last."""
    return Framing(prefix=b"", end=b"", error=error)


def error_event(error: ApiError, number: int) -> str:
    body = {
        "type": "error",
        "code": error.code,
        "message": cut(error.message, MAX_MESSAGE_CHARS),
        "param": error.param,
        "sequence_number": number,
    }
    return named_event("error", body)


# Of each output item, the deltas as (characters, log-probabilities).
Cuts = tuple[tuple[tuple[int, int], ...], ...]


class ResponseFormat:
    """`keep` gets the finished response and its cuts, before its last event is written."""

    def __init__(
        self,
        heading: Heading,
        names: TokenNames,
        groups: Sequence[PromptGroup],
        request: ResponseRequest,
        items: OutputItems,
        keep: Callable[[Json, Cuts], None],
    ) -> None:
        (group,) = groups
        self._names = names
        reading = group.reading or Reading()
        self._reader = Reader(reading)
        self._rows = ContentRows(reading)
        self._items = items
        self._skeleton = skeleton(request, heading.id, heading.created, heading.model)
        self._keep = keep
        self._sequence = 0
        self._reason: FinishReason | None = None

    def opening(self, usage: Json) -> list[str]:
        del usage
        response = self._skeleton
        return self._numbered(
            [
                {"type": "response.created", "response": response},
                {"type": "response.in_progress", "response": response},
            ]
        )

    def events(self, index: int, delta: Delta, usage: Json | None) -> list[str]:
        del index, usage
        self._rows.waiting += self.rows(delta.entries)
        return self._numbered(self._read(delta.text, delta.finish_reason))

    def rows(self, entries: list[Entry]) -> list[Any]:
        offsets = [entry.offset for entry in entries]
        return list(zip(offsets, chat_content(entries, self._names), strict=True))

    def closing(self, usage: Json, timings: Json | None) -> list[str]:
        response = self._finished(usage, timings)
        kind = f"response.{response['status']}"
        return self._numbered([{"type": kind, "response": response}])

    def body(self, choices: list[CollectedChoice], usage: Json, timings: Json | None) -> Json:
        (choice,) = choices
        self._rows.waiting = choice.rows
        self._read(choice.text, choice.finish_reason)
        return self._finished(usage, timings)

    def _read(self, text: str, reason: FinishReason | None) -> list[Json]:
        pieces: list[ChatPiece] = self._reader.feed(text)
        if reason is not None:
            pieces += self._reader.finish()
            self._reason = reason
        self._rows.read(text)
        made = []
        for piece in pieces:
            made += self._items.add(piece, self._rows.of(piece))
        if reason is not None:
            made += self._items.finish(is_cut=reason is FinishReason.LENGTH)
        return made

    def _finished(self, usage: Json, timings: Json | None) -> Json:
        is_cut = self._reason is FinishReason.LENGTH
        response = {
            **self._skeleton,
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._items.done,
            "usage": used(usage),
        }
        if timings is not None:
            response["timings"] = timings
        self._keep(response, tuple(map(tuple, self._items.cuts)))
        return response

    def error(self, error: ApiError) -> str:
        """The event of an answer that failed, its last."""
        return error_event(error, self._sequence)

    def _numbered(self, events: list[Json]) -> list[str]:
        made = []
        for event in events:
            made.append(named_event(event["type"], {**event, "sequence_number": self._sequence}))
            self._sequence += 1
        return made


def used(usage: Json) -> Json:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
    }


def skeleton(request: ResponseRequest, response_id: str, created: int, model: str) -> Json:
    """The response before there is any output."""
    form = request.text.format if request.text is not None else None
    shown: Json = {"type": "text"}
    if form is not None:
        shown = form.model_dump(exclude_none=True, by_alias=True)
    effort = request.reasoning.effort if request.reasoning is not None else None
    return {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "background": request.background,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata,
        "model": model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls,
        "previous_response_id": request.previous_response_id,
        "reasoning": {"effort": effort, "summary": None},
        "service_tier": "default",
        "store": request.store,
        "temperature": request.temperature,
        "text": {"format": shown, "verbosity": "medium"},
        "tool_choice": request.tool_choice,
        "tools": shown_tools(request),
        "top_logprobs": request.top_logprobs,
        "top_p": request.top_p,
        "truncation": request.truncation,
        "usage": None,
        "user": request.user,
    }
