"""What a reader of tool calls hands out: content, beginnings of calls, and their arguments.

Owns which white space belongs to nobody and the numbers of the calls. Knows no syntax.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    index: int
    text: str


Piece = Content | CallStart | CallArguments


class Pieces:
    """Of one answer, in order; `take` those that are new."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._out: list[Piece] = []
        self._blank: list[str] = []  # white space that is content only if content follows
        self._after_call = False

    def take(self) -> list[Piece]:
        out, self._out = self._out, []
        return out

    def add_content(self, text: str) -> None:
        """White space beside calls is nobody's content; elsewhere it waits for what follows it."""
        body = text.rstrip()
        if body:
            lead = "".join(self._blank)
            self._blank.clear()
            shown = (lead + body).lstrip() if self._after_call else lead + body
            self._after_call = False
            self._out.append(Content(shown))
        if len(body) < len(text):
            self._blank.append(text[len(body) :])

    def start_call(self, name: str) -> None:
        self._blank.clear()
        self._after_call = True
        self._out.append(CallStart(self.num_calls, name))
        self.num_calls += 1

    def add_arguments(self, text: str) -> None:
        """Of the newest call."""
        if text:
            self._out.append(CallArguments(self.num_calls - 1, text))

    def end(self) -> None:
        """Nothing follows: an answer without calls is given as it was written."""
        if self.num_calls == 0 and self._blank:
            self._out.append(Content("".join(self._blank)))
