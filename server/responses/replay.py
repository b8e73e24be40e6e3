"""The events of a response that is stored, told again: the same ones, under the same numbers.

Pure. What is stored are the finished items and how their texts were cut into deltas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from server.answers import Json
from server.reading import ChatPiece, Thought
from server.responses.output_items import OutputItems
from server.responses.store import StoredResponse
from server.sse import named_event
from server.tools.pieces import CallArguments, CallStart, Content

LAST_EVENTS = {
    "completed": "response.completed",
    "incomplete": "response.incomplete",
    "failed": "response.failed",
    "cancelled": "response.incomplete",  # the API has no event for it
}
# What was written of these is not kept.
ENDED_EARLY = ("failed", "cancelled")


def replay(stored: StoredResponse, starting_after: int) -> Iterator[str]:
    """Events with a number above `starting_after`.

    Of one that failed or was cancelled nothing but the end is known, which comes in any case.
    """
    status = stored.body["status"]
    for number, event in enumerate(_events(stored)):
        if status in ENDED_EARLY and event["type"] == LAST_EVENTS[status]:
            number = max(number, starting_after + 1)
        if number > starting_after:
            yield named_event(event["type"], {**event, "sequence_number": number})


def _events(stored: StoredResponse) -> Iterator[Json]:
    response = stored.body
    begun = {
        **response,
        "status": "in_progress",
        "output": [],
        "usage": None,
        "error": None,
        "incomplete_details": None,
    }
    begun.pop("timings", None)
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    given = iter(_ids(response["output"]))
    namespaces = {i["name"]: i["namespace"] for i in response["output"] if "namespace" in i}
    items = OutputItems(lambda _kind: next(given), namespaces)
    for item, cuts in zip(response["output"], stored.cuts, strict=False):
        for piece, rows in _pieces(item, cuts):
            yield from items.add(piece, rows)
    yield from items.finish(is_cut=response["status"] == "incomplete")
    yield {"type": LAST_EVENTS[response["status"]], "response": response}


def _ids(output: Sequence[Json]) -> Iterator[str]:
    for item in output:
        yield item["id"]
        if item["type"] == "function_call":
            yield item["call_id"]


def _pieces(item: Json, cuts: Sequence[Sequence[int]]) -> Iterator[tuple[ChatPiece, list[Any]]]:
    """What the item was made of. Log-probabilities are of messages only."""
    kind = item["type"]
    if kind == "function_call":
        yield CallStart(0, item["name"]), []
        text, rows = item["arguments"], []
    else:
        part = item["content"][0]
        text, rows = part["text"], part.get("logprobs", [])
    make = _MAKE[kind]
    start, first = 0, 0
    for length, num_rows in cuts:
        yield make(text[start : start + length]), rows[first : first + num_rows]
        start, first = start + length, first + num_rows


def _arguments(text: str) -> CallArguments:
    return CallArguments(0, text)


_MAKE: dict[str, Callable[[str], ChatPiece]] = {
    "message": Content,
    "reasoning": Thought,
    "function_call": _arguments,
}
