"""How an answer is written: what the two endpoints have in common.

A format turns deltas into the JSON of events and collected choices into one body. Knows no sockets
and no core.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from scheduler.types import FinishReason
from server.choice import Delta
from server.logprobs import Entry
from server.sse import to_json

Json = dict[str, Any]


@dataclass(slots=True)
class CollectedChoice:
    """All deltas of one choice, for an answer in one piece."""

    texts: list[str] = field(default_factory=list)
    rows: list[Any] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop: str | None = None

    def add(self, delta: Delta, rows: list[Any]) -> None:
        """`rows` are the format's own for the entries of this delta."""
        self.texts.append(delta.text)
        self.rows += rows
        self.finish_reason = delta.finish_reason
        self.stop = delta.stop

    @property
    def text(self) -> str:
        return "".join(self.texts)


class AnswerFormat(Protocol):
    """Chat or completion; one instance an answer."""

    def opening(self, usage: Json) -> list[str]:
        """Events right before the first text of any choice; `usage` is of the prompt."""
        ...

    def events(self, index: int, delta: Delta, usage: Json | None) -> list[str]: ...

    def rows(self, entries: list[Entry]) -> list[Any]:
        """Entries as the body will hold them, made one delta at a time: many are slow to write."""
        ...

    def closing(self, usage: Json, timings: Json | None) -> list[str]:
        """Events after all choices; whether usage is wanted is the format's to know."""
        ...

    def body(self, choices: list[CollectedChoice], usage: Json, timings: Json | None) -> Json: ...


@dataclass(frozen=True, slots=True)
class Heading:
    """What every event and the body of one answer repeat."""

    id: str
    created: int
    model: str

    def fields(self, kind: str) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


class EventWriter:
    """The JSON of events of one answer: the unchanging head is encoded once.

    Where usage comes at the end (`with_usage`), it is null before, as the API says.
    """

    def __init__(self, heading: Heading, kind: str, *, with_usage: bool) -> None:
        self._head = to_json(heading.fields(kind))[:-1] + ',"choices":['
        self._end = '],"usage":null}' if with_usage else "]}"

    def choice(self, choice: str, usage: Json | None) -> str:
        end = self._end if usage is None else '],"usage":' + to_json(usage) + "}"
        return self._head + choice + end

    def closing(self, usage: Json | None, timings: Json | None) -> list[str]:
        """One event, or none where neither is wanted."""
        if usage is None and timings is None:
            return []
        end = "]"
        if usage is not None:
            end += ',"usage":' + to_json(usage)
        if timings is not None:
            end += ',"timings":' + to_json(timings)
        return [self._head + end + "}"]
