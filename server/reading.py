"""How the text of a chat answer is read: thoughts, content and tool calls, in that order.

Streamed and plain answers are read by the same Reader, so they cannot differ. Knows no HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass

from server.reasoning import Thinking, ThoughtSplitter
from server.tools.call_reader import CallReader
from server.tools.definitions import ToolChoice, ToolPlan
from server.tools.formats import ToolFormat
from server.tools.pieces import CallStart, Content, Piece
from server.tools.pythonic_reader import PythonicReader


@dataclass(frozen=True, slots=True)
class Thought:
    text: str


ChatPiece = Thought | Piece


@dataclass(frozen=True, slots=True)
class Reading:
    """`form` is None where no call may be found: the text is then content, markers and all."""

    thinking: Thinking | None = None
    tools: ToolPlan | None = None
    form: ToolFormat | None = None


AS_IT_IS = Reading()


def _call_reader(reading: Reading) -> CallReader | PythonicReader | None:
    if reading.form is None or reading.tools is None:
        return None
    names = [tool.name for tool in reading.tools.callable]
    return (PythonicReader if reading.form.is_pythonic else CallReader)(reading.form, names)


class ContentFinder:
    """Where in an answer's text its content is, which is all that a stop string may end.

    Thoughts come before it; with the first call it is over. Call `feed` for all text and `finish`
    once: how many characters are (certain by then) passed by, and how many are content, in turns.
    """

    def __init__(self, reading: Reading) -> None:
        self._splitter = None if reading.thinking is None else ThoughtSplitter(reading.thinking)
        self._calls = _call_reader(reading)
        self._num_undecided = 0

    @property
    def is_thinking(self) -> bool:
        return self._splitter is not None and self._splitter.is_thinking

    def feed(self, text: str) -> list[int]:
        self._num_undecided += len(text)
        passed = 0
        if self._splitter is not None and not self._splitter.is_answering:
            _, text = self._splitter.feed(text)
            if self._splitter.is_undecided:
                return []
            passed = self._take(self._num_undecided - len(text))
        if self._calls is None:
            return [passed, self._take(self._num_undecided)]
        content = self._take(self._num_content(self._calls, text))
        return [passed, content, self._take(self._num_undecided) if self._calls.num_calls else 0]

    def finish(self) -> list[int]:
        return [0, self._take(self._num_undecided)]

    def _num_content(self, calls: CallReader | PythonicReader, text: str) -> int:
        """Of the undecided characters, which `text` is the end of."""
        count = 0
        before = self._num_undecided - len(text)
        for end, character in enumerate(text, before + 1):
            if not calls.num_calls:
                calls.feed(character)
            if not calls.num_calls:
                count = end - calls.num_undecided
        return count

    def _take(self, count: int) -> int:
        self._num_undecided -= count
        return count


class Reader:
    """One choice of an answer. Call `feed` for all its text and `finish` once."""

    def __init__(self, reading: Reading) -> None:
        self._splitter = None if reading.thinking is None else ThoughtSplitter(reading.thinking)
        self._calls = _call_reader(reading)
        choice = None if reading.tools is None else reading.tools.choice
        self._is_named = choice is ToolChoice.NAMED
        self._must_call = choice in (ToolChoice.REQUIRED, ToolChoice.NAMED)

    def feed(self, text: str) -> list[ChatPiece]:
        if self._splitter is None:
            return self._answer(text)
        thought, answer = self._splitter.feed(text)
        return [*_thought(thought), *self._answer(answer)]

    def finish(self) -> list[ChatPiece]:
        pieces: list[ChatPiece] = []
        if self._splitter is not None:
            thought, answer = self._splitter.finish()
            pieces = [*_thought(thought), *self._answer(answer)]
        if self._calls is None:
            return pieces
        rest = self._calls.finish()
        if self._must_call:  # then it is the beginning of a call that was cut, and no content
            rest = [piece for piece in rest if not isinstance(piece, Content)]
        return [*pieces, *rest]

    @property
    def has_calls(self) -> bool:
        return self._calls is not None and self._calls.num_calls > 0

    def finish_reason(self, reason: str) -> str:
        """The table: stop with a call is tool_calls, unless the one call was asked for by name.

        A cut answer ends with length, whatever is in it.
        """
        return (
            "tool_calls" if reason == "stop" and self.has_calls and not self._is_named else reason
        )

    def _answer(self, text: str) -> list[ChatPiece]:
        if not text:
            return []
        return [Content(text)] if self._calls is None else [*self._calls.feed(text)]


def _thought(text: str) -> list[ChatPiece]:
    return [Thought(text)] if text else []


@dataclass(slots=True)
class ReadMessage:
    """A whole answer, read."""

    content: str = ""
    thought: str | None = None
    calls: list[tuple[str, str]] | None = None  # name, arguments

    def add(self, pieces: list[ChatPiece]) -> None:
        for piece in pieces:
            match piece:
                case Thought(text):
                    self.thought = (self.thought or "") + text
                case Content(text):
                    self.content += text
                case CallStart(_, name):
                    self.calls = [*(self.calls or []), (name, "")]
                case _:
                    assert self.calls is not None
                    name, arguments = self.calls[-1]
                    self.calls[-1] = (name, arguments + piece.text)
