"""A light HTTP/1.1 client for measuring: keeps connections alive, stamps every read.

It owns sockets and HTTP framing. It must not know JSON, SSE or tokens: a body is kept as the pieces
that arrived, each with its time, so nothing is parsed while the server is being measured.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httptools

CONNECT_SECONDS = 30.0
MAX_BODY_BYTES = 256 * 1024 * 1024


class RequestFailed(Exception):
    """One exchange that did not end well. `kind` is the name under which it is counted."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


@dataclass(slots=True)
class Exchange:
    """A request and what came back; times are seconds of time.perf_counter."""

    sent_at: float
    done: asyncio.Future[None]
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    num_bytes: int = 0
    ended_at: float = 0.0

    @property
    def body(self) -> bytes:
        return b"".join(piece for _, piece in self.pieces)


class _Connection(asyncio.Protocol):
    """One socket, one exchange at a time. httptools calls the on_* methods as bytes arrive."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.exchange: Exchange | None = None
        self.reusable = True
        self._parser = httptools.HttpResponseParser(self)
        self._now = 0.0
        self._framed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def start(self, data: bytes) -> Exchange:
        assert self.transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._framed = False
        loop = asyncio.get_running_loop()
        self.exchange = Exchange(sent_at=time.perf_counter(), done=loop.create_future())
        self.transport.write(data)
        return self.exchange

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        if self.exchange is None or self.exchange.done.done():
            self.reusable = False  # bytes that no request asked for
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail("malformed", f"not HTTP: {error}")

    def on_header(self, name: bytes, value: bytes) -> None:
        key = name.decode("latin-1").lower()
        self._framed = self._framed or key in ("content-length", "transfer-encoding")
        if self.exchange is not None:
            self.exchange.headers[key] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self.exchange is not None:
            self.exchange.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        exchange = self.exchange
        if exchange is None:
            return
        exchange.pieces.append((self._now, body))
        exchange.num_bytes += len(body)
        if exchange.num_bytes > MAX_BODY_BYTES:
            self._fail("malformed", f"more than {MAX_BODY_BYTES} bytes of body")

    def on_message_complete(self) -> None:
        if not self._parser.should_keep_alive():
            self.reusable = False
        self._finish(self._now)

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        exchange = self.exchange
        if exchange is None or exchange.done.done():
            return
        if exchange.status and not self._framed and exc is None:
            self._finish(time.perf_counter())  # HTTP/1.0 style: the close is the end of the body
        else:
            self._fail("disconnect", f"the server hung up: {exc or 'connection closed'}")

    def _finish(self, now: float) -> None:
        if self.exchange is not None and not self.exchange.done.done():
            self.exchange.ended_at = now
            self.exchange.done.set_result(None)

    def _fail(self, kind: str, message: str) -> None:
        self.reusable = False
        if self.exchange is not None and not self.exchange.done.done():
            self.exchange.ended_at = time.perf_counter()
            self.exchange.done.set_exception(RequestFailed(kind, message))
        self.abort()

    def abort(self) -> None:
        self.reusable = False
        if self.transport is not None:
            self.transport.abort()


class HttpClient:
    """Requests to one origin. Idle connections are reused, newest first.

    `url` may end in /v1 or not; paths given to `request` start with /v1 or name a server route.
    """

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"not an http(s) URL: {url}")
        self.base_path = parts.path.rstrip("/").removesuffix("/v1")
        self._host = parts.hostname
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._ssl else 80)
        lines = [f"Host: {parts.netloc.rpartition('@')[2]}", "User-Agent: paceline-bench"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self._head = "\r\n".join(lines)
        self._idle: list[_Connection] = []

    async def request(
        self,
        method: str,
        path: str,
        body: bytes,
        limit_seconds: float,
        *,
        on_start: Callable[[Exchange], None] | None = None,
    ) -> Exchange:
        """Send one request and wait for all of the answer. Raises RequestFailed.

        `on_start` gets the exchange as soon as it is sent, to look at while it grows.
        A kept connection that turns out to be dead before any answer is replaced once.
        """
        head = f"{method} {self.base_path}{path} HTTP/1.1\r\n{self._head}\r\n"
        if body:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        data = head.encode("latin-1") + b"\r\n" + body
        while True:
            kept = self._take_idle()
            connection = kept or await self._connect()
            exchange = connection.start(data)
            if on_start is not None:
                on_start(exchange)
            try:
                async with asyncio.timeout(limit_seconds):
                    await exchange.done
            except TimeoutError:
                connection.abort()
                message = f"no end of the answer within {limit_seconds:g} s"
                raise RequestFailed("timeout", message) from None
            except asyncio.CancelledError:
                connection.abort()
                raise
            except RequestFailed as failed:
                if kept is not None and failed.kind == "disconnect" and not exchange.status:
                    continue
                raise
            self._keep(connection)
            return exchange

    def close(self) -> None:
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    def _take_idle(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
        return None

    def _keep(self, connection: _Connection) -> None:
        connection.exchange = None
        if connection.reusable:
            self._idle.append(connection)
        else:
            connection.abort()

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, connection = await loop.create_connection(
                    _Connection, self._host, self._port, ssl=self._ssl
                )
        except (OSError, TimeoutError) as error:
            raise RequestFailed("connect", f"cannot connect: {error or 'timed out'}") from None
        return connection
