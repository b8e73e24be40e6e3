"""Server-sent events: one event a write, keep-alive comments, and what a hang-up ends.

A connection that takes bytes at once may be written to without `send` (BodyWriter).

The response begins with the first event or comment, so until then an error can still be a plain
HTTP answer. JSON in events is ASCII: many clients take U+2028, U+0085 and others for line ends.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

from starlette.types import Receive, Send

from server.errors import ApiError, envelope

to_json: Callable[[Any], str] = json.JSONEncoder(
    ensure_ascii=True, allow_nan=False, separators=(",", ":")
).encode
quote: Callable[[str], str] = json.encoder.encode_basestring_ascii

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


@dataclass(frozen=True, slots=True)
class Framing:
    """What surrounds the texts of an event stream: before each, at the end, for an error, and
    where there has been none for long."""

    prefix: bytes
    end: bytes
    error: Callable[[ApiError], str]
    keep_alive: bytes = b": keep-alive\n\n"


OPENAI_FRAMING = Framing(
    b"data: ", b"data: [DONE]\n\n", error=lambda error: to_json(envelope(error))
)


def named_event(name: str, data: Any) -> str:
    """For a framing without a prefix."""
    return f"event: {name}\ndata: {to_json(data)}"


class BodyWriter(Protocol):
    """A way past `send` for a part of the body of a response that has begun."""

    def is_open(self) -> bool:
        """Whether `write` may be called now: the client reads as fast as we write."""
        ...

    def write(self, part: bytes) -> None: ...


class EventStream:
    """The answer to one streaming request; a context that sends comments while nothing else does.

    A slow reader makes `write` wait, so it holds one event here and no more. `headers` may grow
    until the first event. With a `writer`, `write_now` needs no `await` while it `is_open`.
    """

    def __init__(
        self,
        send: Send,
        headers: list[tuple[bytes, bytes]],
        keepalive_seconds: float,
        framing: Framing = OPENAI_FRAMING,
        writer: BodyWriter | None = None,
    ) -> None:
        self.started = False
        self._writer = writer
        self._send = send
        self._headers = headers
        self._keepalive_seconds = keepalive_seconds
        self._framing = framing
        self._writing = asyncio.Lock()
        self._now = asyncio.get_running_loop().time
        self._last_write = self._now()
        self._ticker: asyncio.Task[None] | None = None

    async def __aenter__(self) -> EventStream:
        self._ticker = asyncio.create_task(self._keep_alive())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop_ticker()

    async def write(self, data: str) -> None:
        """One event. `data` is JSON without line ends, after its name if the framing asks so."""
        await self._write(self._framing.prefix + data.encode("ascii") + b"\n\n")

    def is_open(self) -> bool:
        """Whether `write_now` may be called: nothing else writes, and nothing waits to be read."""
        writer = self._writer
        return writer is not None and not self._writing.locked() and writer.is_open()

    def write_now(self, data: str) -> None:
        """As `write`, but at once."""
        assert self._writer is not None
        self._writer.write(self._framing.prefix + data.encode("ascii") + b"\n\n")
        self._last_write = self._now()

    async def end(self) -> None:
        """The end that clients wait for; nothing may follow."""
        self._stop_ticker()
        if self._framing.end or not self.started:
            await self._write(self._framing.end)
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def fail(self, error: ApiError) -> None:
        """An error after the first byte: an event, and the end."""
        await self.write(self._framing.error(error))
        await self.end()

    async def _write(self, event: bytes) -> None:
        async with self._writing:
            if not self.started:
                self.started = True
                headers = [*_HEADERS, *self._headers]
                await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            await self._send({"type": "http.response.body", "body": event, "more_body": True})
            self._last_write = self._now()

    async def _keep_alive(self) -> None:
        while True:
            silent = self._now() - self._last_write
            if silent < self._keepalive_seconds:
                await asyncio.sleep(self._keepalive_seconds - silent)
            else:
                await self._write(self._framing.keep_alive)

    def _stop_ticker(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
            self._ticker = None


async def run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Runs `work`; a client that hangs up cancels it, and then there is nobody to tell.

    The request body has been read, so the next message can only be the disconnect.
    """
    worker = asyncio.create_task(work)
    watcher = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            worker.result()
    finally:
        for task in (worker, watcher):
            task.cancel()
        await asyncio.wait({worker, watcher})


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
