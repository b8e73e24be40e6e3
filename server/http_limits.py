"""The HTTP/1.1 protocol of uvicorn with limits on the head of a request and on its patience.

httptools collects a header for as long as it grows, and uvicorn gives a connection any time to
send one. Here a head beyond the limit gets 431, one that does not arrive in time 408, what is cut
off or is no HTTP 400, each after the answers to what came before it, and the connection is closed.
Bodies are limited where they are read. Knows no routes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from server.arrival import arrived_at
from server.middleware import BODY_WRITER, RECEIVED

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application, ASGISendEvent

log = logging.getLogger("paceline.http")

# A new connection has this long to send its first head, a begun head to end.
HEAD_SECONDS = 30.0
MAX_HEADERS = 256
# An idle connection stays for longer than those before us keep theirs (load balancers, Go: 60 to
# 120 s), so that it is they who close it: a request that meets our closing gets a reset, or a 502.
IDLE_SECONDS = 130
# While half of the descriptors are taken by connections, an idle one makes room sooner.
IDLE_SECONDS_IN_A_CROWD = 5


class Refusal(NamedTuple):
    status: int
    reason: str
    message: str
    code: str


_NOT_HTTP = Refusal(400, "Bad Request", "this is not an HTTP request", "bad_request")
_NO_HOST = Refusal(400, "Bad Request", "an HTTP/1.1 request has one Host header", "bad_request")
_CUT = Refusal(400, "Bad Request", "the request ends before its end", "bad_request")
_LATE = Refusal(408, "Request Timeout", "the request did not arrive in time", "request_timeout")
_LARGE_HEAD = Refusal(
    431,
    "Request Header Fields Too Large",
    "the head of the request is too large",
    "headers_too_large",
)


class ChunkWriter:
    """A BodyWriter of one answer: writes what `send` would have written, without its detours."""

    __slots__ = ("_cycle", "_transport")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._transport = cycle.transport

    def is_open(self) -> bool:
        cycle = self._cycle
        return (
            cycle.response_started
            and cycle.chunked_encoding is True
            and not cycle.flow.write_paused
            and not cycle.response_complete
            and not cycle.disconnected
        )

    def write(self, part: bytes) -> None:
        self._transport.write(b"%x\r\n%b\r\n" % (len(part), part))


class UnchunkedSend:
    """The `send` of an HTTP/1.0 answer: that client knows no chunks, so what is written without a
    length ends with the connection (RFC 9112, 6.1)."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._send = cycle.send
        self._has_length = True

    async def __call__(self, message: ASGISendEvent) -> None:
        if message["type"] == "http.response.start":
            names = [name.lower() for name, _ in message.get("headers", ())]
            self._has_length = b"content-length" in names
            if not self._has_length:
                self._cycle.chunked_encoding = False
        elif message["type"] == "http.response.body" and not self._has_length:
            self._cycle.expected_content_length = len(message.get("body", b""))
        await self._send(message)


def limited(
    *, max_header_bytes: int, count_refusal: Callable[[str], None]
) -> type[LimitedProtocol]:
    """The protocol of one server."""
    names = {"max_header_bytes": max_header_bytes, "count_refusal": staticmethod(count_refusal)}
    return type("Limited", (LimitedProtocol,), names)


class LimitedProtocol(HttpToolsProtocol):
    """Counts the bytes of a head as they arrive, finished header or not."""

    max_header_bytes = 64 << 10
    head_seconds = HEAD_SECONDS
    count_refusal: Callable[[str], None] | None = None  # told the code; no route sees these

    _head_bytes = 0  # received of a head that is not complete
    _headers_size = 0  # of complete headers
    _in_head = False
    _in_body = False
    _refusal = _NOT_HTTP
    _last_words: Refusal | None = None  # to be said once what came before has been answered
    _running: RequestResponseCycle | None = None
    _rereads_head = False
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # uvloop would keep what is written to the end of its turn: until all other streams have
        # had theirs. With no buffer allowed it writes at once what the socket takes.
        transport.set_write_buffer_limits(high=0)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)
        # What it tells is the request that came last; the one that runs may be another.
        if self._running is not None:
            self._running.disconnected = True
            self._running.message_event.set()

    def eof_received(self) -> None:
        """A client that closes its sending side is gone; one that was still speaking is told."""
        if self._in_body or self._in_head:
            self._refuse(_CUT)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing() or self._last_words is not None:
            return
        if not self._in_body:
            if not self._in_head:
                data = data.lstrip(b"\r\n")  # some send it behind a body (RFC 9112, 2.2)
                if not data:
                    return
            self._head_bytes += len(data)
        self._unset_keepalive_if_required()
        self._parse(memoryview(data))
        if self._in_head and self._timer is None:
            self._start_timer()
        if not self._in_body and self._head_bytes > self.max_header_bytes:
            self._refuse(_LARGE_HEAD)

    def _parse(self, rest: memoryview) -> None:
        while True:
            try:
                self.parser.feed_data(rest)
            except httptools.HttpParserUpgrade as offer:
                rest = rest[offer.args[0] :]
                self._decline_upgrade()
            except httptools.HttpParserError:
                self._refuse(self._refusal)
                return
            else:
                return

    def _decline_upgrade(self) -> None:
        """An offer to speak another protocol is passed over (RFC 9110, 7.8): Java's client makes it
        with every request. The parser took it, so another one reads the rest of the request."""
        about_body = (b"content-length", b"transfer-encoding")
        lines = [b"%b: %b\r\n" % header for header in self.headers if header[0] in about_body]
        self.parser = httptools.HttpRequestParser(self)
        self._rereads_head = True
        self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(lines))

    def on_message_begin(self) -> None:
        if self._rereads_head:
            return
        super().on_message_begin()
        self._in_head = True
        self._headers_size = 0
        # What waits for its turn of the event loop is part of the request's time.
        arrived = arrived_at(self.transport.get_extra_info("socket"), time.monotonic())
        self.scope[RECEIVED] = arrived  # type: ignore[literal-required]

    def on_url(self, url: bytes) -> None:
        if self._rereads_head:
            return
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._rereads_head:
            return
        self._count(len(name) + len(value))
        if len(self.headers) >= MAX_HEADERS:
            self._refusal = _LARGE_HEAD
            raise ValueError("too many headers")
        super().on_header(name, value.strip(b" \t"))  # the parser leaves what is behind it

    def on_headers_complete(self) -> None:
        if self._rereads_head:
            self._rereads_head = False
            self._in_body = self.cycle.more_body = True
            return
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        if num_hosts > 1 or (not num_hosts and self.parser.get_http_version() == "1.1"):
            self._refusal = _NO_HOST
            raise ValueError("no host, or several")  # RFC 9112, 3.2
        self._in_head = False
        self._stop_timer()
        super().on_headers_complete()
        self._in_body = True
        assert self.cycle is not None
        self.cycle.scope[BODY_WRITER] = ChunkWriter(self.cycle)  # type: ignore[literal-required]
        if self.parser.get_http_version() == "1.0":
            self.cycle.send = UnchunkedSend(self.cycle)  # type: ignore[method-assign]

    def on_message_complete(self) -> None:
        self._in_body = False
        self._head_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        is_last = not self.pipeline
        is_crowd = 2 * len(self.connections) > resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.timeout_keep_alive = IDLE_SECONDS_IN_A_CROWD if is_crowd else IDLE_SECONDS
        super().on_response_complete()
        if is_last and self._last_words is not None:
            self._say(self._last_words)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _count(self, size: int) -> None:
        self._headers_size += size
        if self._headers_size > self.max_header_bytes:
            self._refusal = _LARGE_HEAD
            raise ValueError("the head is too large")

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(self.head_seconds, self._expire)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        self._timer = None
        if self._in_head:
            self._refuse(_LATE)
        else:
            self.transport.close()

    def _refuse(self, refusal: Refusal) -> None:
        """The request that is being read cannot be: those before it are answered first."""
        self._stop_timer()
        self._in_head = False
        if self._in_body and self.pipeline:
            self.pipeline.popleft()  # itself; it has not begun
            self._last_words = refusal
        elif self._in_body and self.cycle.response_started:
            self.transport.close()  # another answer would mix with its own
        elif self._in_body or self.cycle is None or self.cycle.response_complete:
            self._say(refusal)
        else:
            self._last_words = refusal

    def _say(self, refusal: Refusal) -> None:
        if self.transport.is_closing():
            return
        request_id = uuid.uuid4().hex
        if self.count_refusal is not None:
            self.count_refusal(refusal.code)
        log.debug("request %s: a connection is refused: %s", request_id, refusal.message)
        error: dict[str, Any] = {"message": refusal.message, "type": "invalid_request_error"}
        body = json.dumps({"error": {**error, "param": None, "code": refusal.code}}).encode()
        head = (
            f"HTTP/1.1 {refusal.status} {refusal.reason}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nx-request-id: {request_id}\r\n"
            "connection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
