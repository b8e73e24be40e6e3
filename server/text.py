"""What counts as text: Unicode without lone surrogates, which JSON lets in and UTF-8 does not.

Knows nothing of HTTP; whoever takes text from a client calls `reject_surrogates` before using it.
"""

from __future__ import annotations


class TextError(ValueError):
    """A string that is not valid Unicode text; the message may be shown to the client."""


def reject_surrogates(text: str) -> str:
    """`text` itself; raises TextError if it holds a surrogate code point without its partner."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TextError(
            f"the text is not valid Unicode: lone surrogate U+{ord(text[error.start]):04X}"
            f" at character {error.start}"
        ) from None
    return text
