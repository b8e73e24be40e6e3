"""A number as people write it in keys and headers: digits, and a point among them or before them.

What else float() takes (nan, inf, 1e3, signs, blanks, underscores) is none. Standard library only.
"""

from __future__ import annotations

import re

_NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?|\.[0-9]+")


def plain_number(text: str) -> float | None:
    return float(text) if _NUMBER.fullmatch(text) else None
