"""Reasoning in a model's text: where it begins and ends, and what is told apart by that.

Owns one answer's text up to the end of its thoughts. Knows no HTTP, no tools and no tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

OPENING, CLOSING = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Thinking:
    """`is_open`: the prompt ends inside the thoughts, so that the answer begins with them."""

    is_open: bool


class _State(Enum):
    START = auto()
    THINKING = auto()
    CLOSED = auto()  # white space after the thoughts is passed over
    ANSWER = auto()


class ThoughtSplitter:
    """Call `feed` for all text and `finish` once: (thought, answer) that are certain by then.

    White space around the thoughts belongs to nobody.
    """

    def __init__(self, thinking: Thinking) -> None:
        self._state = _State.THINKING if thinking.is_open else _State.START
        self._held = ""
        self._began = False  # a thought has been given out

    @property
    def is_thinking(self) -> bool:
        return self._state is _State.THINKING

    @property
    def is_undecided(self) -> bool:
        """What came so far may be thoughts or answer; `feed` tells it as a whole then."""
        return self._state is _State.START

    @property
    def is_answering(self) -> bool:
        return self._state is _State.ANSWER

    def feed(self, text: str) -> tuple[str, str]:
        if self._state is _State.ANSWER:
            return "", text
        text, self._held = self._held + text, ""
        if self._state is _State.START:
            stripped = text.lstrip()
            if OPENING.startswith(stripped[: len(OPENING)]) and len(stripped) < len(OPENING):
                self._held = text
                return "", ""
            if not stripped.startswith(OPENING):
                self._state = _State.ANSWER
                return "", text
            self._state = _State.THINKING
            text = stripped[len(OPENING) :]
        thought = ""
        if self._state is _State.THINKING:
            thought, found, text = text.partition(CLOSING)
            if not found:
                return self._shown(thought, keep=_partial(thought)), ""
            self._state = _State.CLOSED
            thought = self._shown(thought.rstrip(), keep=0)
        text = text.lstrip()
        if text:
            self._state = _State.ANSWER
        return thought, text

    def finish(self) -> tuple[str, str]:
        held, self._held = self._held, ""
        if self._state is _State.THINKING:
            return self._shown(held.rstrip(), keep=0), ""
        return "", held

    def _shown(self, thought: str, *, keep: int) -> str:
        """Holds back `keep` characters and the white space before them."""
        if not self._began:
            thought = thought.lstrip()
        end = len(thought[: len(thought) - keep].rstrip()) if keep < len(thought) else 0
        if keep or end < len(thought):
            self._held = thought[end:]
        self._began = self._began or end > 0
        return thought[:end]


def _partial(text: str) -> int:
    for size in range(min(len(CLOSING) - 1, len(text)), 0, -1):
        if CLOSING.startswith(text[-size:]):
            return size
    return 0
