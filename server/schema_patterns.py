"""Patterns of JSON Schema, put so that the compiler keeps them inside a JSON string.

Between quotes a character may be written as an escape. Where a negated class leaves control
characters but not `"` or the backslash, the compiler lets all escapes through, those of `"` and of
the backslash too. Such a class is narrowed: it leaves no control characters any more. What may be
said becomes less, and all of it is valid. Pure: text in, text out.
"""

from __future__ import annotations

import re
import warnings

_CONTROLS = r"\x00-\x1f"


def kept_in_strings(pattern: str) -> str:
    parts: list[str] = []
    at = 0
    while at < len(pattern):
        if pattern[at] == "\\":
            size = 2
        elif pattern[at] == "[":
            size = _class_size(pattern, at)
        else:
            size = 1
        piece = pattern[at : at + size]
        if piece.startswith("[^") and _is_leaky(piece):
            # A "]" in the first place is a character; it is no more in the first place.
            escaped = "\\" * piece.startswith("[^]")
            piece = f"[^{_CONTROLS}{escaped}{piece[2:]}"
        parts.append(piece)
        at += size
    return "".join(parts)


def _class_size(pattern: str, start: int) -> int:
    """From "[" to its "]"; classes within are passed over with it."""
    at, depth = start, 0
    while at < len(pattern):
        match pattern[at]:
            case "\\":
                at += 1
            case "[":
                depth += 1
                at += pattern.startswith("^", at + 1)
                at += pattern.startswith("]", at + 1)  # the first is a character
            case "]":
                depth -= 1
                if depth == 0:
                    return at + 1 - start
        at += 1
    return len(pattern) - start


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
