"""Special tokens that a client spells out in a message stay text: only the template makes turns.

A template sets people's words between markers such as <|im_end|>. Words that spell a marker would
end their turn and could begin another, of the system for example. So a mark is put into each such
spelling before the template runs, and what has the mark in it is encoded as plain text. Knows no
HTTP and no template.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import Any

import tokenizers

# Noncharacters of Unicode: set aside for a program's own use, not for text that is exchanged. A
# mark is so many of them, which nobody can guess: no text has to be searched for one.
_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
_MARK_CHARS = 12


@dataclass(frozen=True, slots=True)
class MarkedText:
    """`marked` has `mark` in each special token that is only text; "" if there is none."""

    marked: str
    mark: str = ""

    @property
    def text(self) -> str:
        return self.marked.replace(self.mark, "") if self.mark else self.marked


class SpecialTokens:
    """The special tokens of one vocabulary as they are written. Safe to use from any thread."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._tokens = {t.content: (i, t) for i, t in added.items() if t.special and t.content}
        longest_first = sorted(self._tokens, key=len, reverse=True)
        self._source = "|".join(re.escape(text) for text in longest_first)
        self._any = re.compile(self._source) if self._tokens else None
        self._plain: tokenizers.Tokenizer | None = None

    def is_in(self, text: str) -> bool:
        return self._any is not None and self._any.search(text) is not None

    def unmarked(self, mark: str) -> re.Pattern[str]:
        """Finds those that are meant as tokens."""
        return re.compile(f"(?:{self._source})(?!{mark})")

    def encode(self, text: MarkedText) -> list[int]:
        """Token ids: of spellings without the mark the token, of all else what plain text has."""
        if self._plain is None:
            plain = tokenizers.Tokenizer.from_str(self._backend.to_str())
            plain.encode_special_tokens = True
            self._plain = plain
        ids: list[int] = []
        at, strips = 0, False
        for match in self.unmarked(text.mark).finditer(text.marked):
            token_id, token = self._tokens[match[0]]
            part = text.marked[at : match.start()]
            ids += self._encode_plain(part.rstrip() if token.lstrip else part, text.mark, strips)
            ids.append(token_id)
            at, strips = match.end(), token.rstrip
        return ids + self._encode_plain(text.marked[at:], text.mark, strips)

    def _encode_plain(self, part: str, mark: str, strips: bool) -> list[int]:
        """`strips`: the token before takes the white space that follows it."""
        assert self._plain is not None
        part = part.replace(mark, "")
        part = part.lstrip() if strips else part
        ids: list[int] = self._plain.encode(part, add_special_tokens=False).ids if part else []
        return ids


class Shield:
    """Marks the special tokens in what one request says. `mark` is "" where there are none."""

    def __init__(self, special: SpecialTokens, *said: Any) -> None:
        self.mark = ""
        if any(special.is_in(text) for value in said for text in _texts(value)):
            self.mark = "".join(secrets.choice(_MARKS) for _ in range(_MARK_CHARS))
            self._unmarked = special.unmarked(self.mark)

    def __call__(self, value: Any, *, free: frozenset[str] = frozenset()) -> Any:
        """The same value with marks in its texts, except in the tokens that are `free` to stand."""
        if not self.mark:
            return value
        if isinstance(value, str):
            return self._marked(value, free)
        if isinstance(value, dict):
            return {self(key, free=free): self(item, free=free) for key, item in value.items()}
        if isinstance(value, list):
            return [self(item, free=free) for item in value]
        return value

    def _marked(self, text: str, free: frozenset[str]) -> str:
        def mark(match: re.Match[str]) -> str:
            spelling = match[0]
            return spelling if spelling in free else spelling[0] + self.mark + spelling[1:]

        while (marked := self._unmarked.sub(mark, text)) != text:
            text = marked  # one may stand inside another
        return text


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for pair in value.items() for item in pair for text in _texts(item)]
    if isinstance(value, list):
        return [text for item in value for text in _texts(item)]
    return []
