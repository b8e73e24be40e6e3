"""How long a request may wait to be begun: the server's limit, or the client's own, by a header.

Owns the headers and the words of a wait that was too long. The instant travels as Request.deadline;
who is begun and who is not is the scheduler's to decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from scheduler.types import Request
from server.errors import InvalidRequest, Overloaded, Unavailable, retry_headers
from server.plain_number import plain_number

HEADER = "x-request-timeout-seconds"
# What the clients of OpenAI and Anthropic tell: how long they wait for the next byte.
READ_TIMEOUT = b"x-stainless-read-timeout"
MAX_SECONDS = 86_400.0


class Late(Unavailable):
    """Not begun in time; nothing of it was computed."""


@dataclass(frozen=True, slots=True)
class Patience:
    """By when a request must have been begun; `of_client`: it is the client's own limit."""

    until: float
    seconds: float
    of_client: bool

    def late(self, retry_after_seconds: float) -> Late:
        code, message = (
            "queue_timeout",
            f"The server is busy: the request waited {self.seconds:g} s and was not begun.",
        )
        if self.of_client:
            code, message = (
                "deadline_exceeded",
                f"The request could not be begun within the {self.seconds:g} s that it may take.",
            )
        return Late(message, code=code, headers=retry_headers(retry_after_seconds))

    def hopeless(self, wait_seconds: float, retry_after_seconds: float) -> Overloaded:
        """A request that comes now would wait clearly longer."""
        whose = "your request may take" if self.of_client else "a request may wait here"
        return Overloaded(
            f"The server is busy: the wait is about {wait_seconds:.0f} s, longer than the "
            f"{self.seconds:g} s that {whose}.",
            code="queue_wait_too_long",
            headers=retry_headers(retry_after_seconds),
        )


def patience(
    headers: Sequence[tuple[bytes, bytes]],
    *,
    received: float,
    now: float,
    max_queue_seconds: float | None,
    streams: bool,
) -> Patience | None:
    """The earlier of both limits: from its arrival the client's, from now the server's.

    A stream has bytes while it waits, so a client's read timeout says nothing about one. Raises
    InvalidRequest for a header that is no number of seconds.
    """
    limits = []
    if max_queue_seconds is not None:
        limits.append(Patience(now + max_queue_seconds, max_queue_seconds, of_client=False))
    found = dict(headers)
    wished = found.get(HEADER.encode())
    if wished is not None:
        seconds = _seconds(wished)
        if seconds is None:
            raise InvalidRequest(
                f"{HEADER} is a number of seconds, above 0 and up to {MAX_SECONDS:g}.",
                param=HEADER,
            )
        limits.append(Patience(received + seconds, seconds, of_client=True))
    elif not streams and READ_TIMEOUT in found:
        seconds = _seconds(found[READ_TIMEOUT])
        if seconds is not None:  # it is not said to us
            limits.append(Patience(received + seconds, seconds, of_client=True))
    return min(limits, key=lambda limit: limit.until, default=None)


def _seconds(text: bytes) -> float | None:
    seconds = plain_number(text.decode("latin-1"))
    return seconds if seconds is not None and 0 < seconds <= MAX_SECONDS else None


def hurry(requests: Sequence[Request], patience: Patience | None) -> tuple[Request, ...]:
    """The same requests, to be begun in time."""
    if patience is None:
        return tuple(requests)
    return tuple(replace(request, deadline=patience.until) for request in requests)
