"""Regular expressions of clients, put so that the compiler takes them as they are meant.

A class holds characters: to the compiler `[`, `&&`, `--` and `~~` in one are signs of other things,
which neither JSON Schema nor Python knows.

In JSON, between quotes, a character may be written as an escape. Where a negated class leaves
control characters but not `"` or the backslash, the compiler lets all escapes through, those of `"`
and of the backslash too. Such a class is narrowed: it leaves no control characters any more. What
may be said becomes less, and all of it is valid. Pure: text in, text out.
"""

from __future__ import annotations

import re
import warnings

_CONTROLS = r"\x00-\x1f"
_ESCAPE = r"\\(?:[pPxu]\{[^{}]*+\}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)"
_POSIX = r"\[:\^?[a-z]+:\]"
# The first "]" of a class is a character.
_CLASS = re.compile(rf"\[(\^?)(\]?(?:{_ESCAPE}|{_POSIX}|[^\]\\])*+)\]", re.DOTALL)
_PIECE = re.compile(rf"{_CLASS.pattern}|{_ESCAPE}|.", re.DOTALL)
_MEMBER = re.compile(
    rf"(?P<several>{_POSIX}|\\[dDwWsSpP](?:\{{[^{{}}]*+\}})?)|{_ESCAPE}|.", re.DOTALL
)
_SIGNS = frozenset("[&~-")


def of_characters(pattern: str) -> str:
    """The same, with classes that hold nothing but characters."""
    return _PIECE.sub(lambda piece: _plain(piece), pattern)


def kept_in_strings(pattern: str) -> str:
    """`of_characters`, for what stands between quotes."""
    return _PIECE.sub(lambda piece: _narrowed(_plain(piece)), pattern)


def _narrowed(piece: str) -> str:
    if not piece.startswith("[^") or not _is_leaky(piece):
        return piece
    # A "]" in the first place is a character; it is no more in the first place.
    escaped = "\\" * piece.startswith("[^]")
    return f"[^{_CONTROLS}{escaped}{piece[2:]}"


def _plain(piece: re.Match[str]) -> str:
    if piece[2] is None:
        return piece[0]
    parts: list[str] = []
    may_begin_range = is_range = False
    members = list(_MEMBER.finditer(piece[2]))
    for number, member in enumerate(members):
        text = member[0]
        is_last = number + 1 == len(members)
        if text == "-" and may_begin_range and not is_last and not members[number + 1]["several"]:
            may_begin_range, is_range = False, True
        else:
            text = "\\" * (text in _SIGNS) + text
            may_begin_range = not is_range and not member["several"]
            is_range = False
        parts.append(text)
    return f"[{piece[1]}{''.join(parts)}]"


def _is_leaky(text: str) -> bool:
    """Whether it leaves a control character, but not both of the two that must be escaped."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = re.compile(text, re.ASCII)
    except (re.error, OverflowError, RecursionError):
        return True  # of a syntax that is not Python's
    if made.match('"') and made.match("\\"):
        return False
    return any(made.match(chr(code)) for code in range(0x20))
