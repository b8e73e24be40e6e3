"""multipart/form-data (RFC 7578) of a body that is read already: small fields and one file.

Pure: bytes in, parts out. Knows no files and no batches.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from server.errors import InvalidRequest

MAX_PARTS = 32
_BOUNDARY = re.compile(
    rb'multipart/form-data\s*;.*?boundary=(?:"([^"]{1,200})"|([^\s;,"]{1,200}))', re.I
)
_NAME = re.compile(rb'[;\s]name="((?:[^"\\]|\\.)*)"')
_FILENAME = re.compile(rb'[;\s]filename="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Part:
    content: bytes
    filename: str | None = None


def parse_form(content_type: bytes, body: bytes) -> dict[str, Part]:
    """The parts by name; of a name given twice the last. Raises InvalidRequest."""
    found = _BOUNDARY.match(content_type)
    if found is None:
        raise InvalidRequest("The body must be multipart/form-data with a boundary.")
    marker = b"\r\n--" + (found[1] or found[2])
    pieces = (b"\r\n" + body).split(marker, MAX_PARTS + 2)
    if len(pieces) < 2 or not pieces[-1].startswith(b"--"):
        raise InvalidRequest("The form is cut, or has too many parts.")
    parts: dict[str, Part] = {}
    for piece in pieces[1:-1]:
        head, separator, content = piece.partition(b"\r\n\r\n")
        name = _NAME.search(head)
        if not separator or name is None:
            raise InvalidRequest("A part of the form has no name.")
        filename = _FILENAME.search(head)
        shown = None if filename is None else filename[1].decode("utf-8", "replace")
        parts[name[1].decode("utf-8", "replace")] = Part(content, shown)
    return parts
