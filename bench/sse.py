"""Server-sent events out of timed pieces of a body.

It owns the line rules of an event stream. It must not know what the data means.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def events(pieces: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """Yield (arrival time, data) of each event, comments left out.

    An event's time is that of the piece that completes it. Several `data:` lines of one event are
    joined by a newline. What follows the last blank line is yielded too, as WHATWG clients drop it
    but some servers end without one.
    """
    rest = b""
    lines: list[bytes] = []
    now = 0.0
    for now, piece in pieces:
        *complete, rest = (rest + piece).split(b"\n")
        for line in complete:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                lines.append(line[5:].removeprefix(b" "))
            elif not line and lines:
                yield now, b"\n".join(lines)
                lines = []
    if rest.startswith(b"data:"):
        lines.append(rest[5:].removeprefix(b" ").removesuffix(b"\r"))
    if lines:
        yield now, b"\n".join(lines)
