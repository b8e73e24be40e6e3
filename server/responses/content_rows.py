"""Which log-probabilities belong to the text of a message, and not to thoughts or calls.

By where their tokens begin, so it does not matter how an answer was cut into pieces. Only the text
before the first call has some.
"""

from __future__ import annotations

from server.answers import Json
from server.reading import ChatPiece, ContentFinder, Reading, Thought
from server.tools.pieces import Content


class ContentRows:
    """`waiting` are (offset in the answer, row) of tokens whose text is not written yet.

    Call `read` with all text, then `of` for each piece that was read of it.
    """

    def __init__(self, reading: Reading) -> None:
        self.waiting: list[tuple[int, Json]] = []
        self._thoughts = ContentFinder(Reading(reading.thinking))
        self._end = 0  # of thoughts, then of what was written of the content
        self._has_called = False

    def read(self, text: str) -> None:
        thoughts = sum(self._thoughts.feed(text)[:1])
        if thoughts:
            self._end += thoughts
            self.waiting = [row for row in self.waiting if row[0] >= self._end]

    def of(self, piece: ChatPiece) -> list[Json]:
        if isinstance(piece, Thought):
            return []
        if self._has_called or not isinstance(piece, Content):
            self._has_called = True
            self.waiting.clear()
            return []
        self._end += len(piece.text)
        due = [row for offset, row in self.waiting if offset < self._end]
        del self.waiting[: len(due)]
        return due
