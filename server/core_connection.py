"""One connection to a core: bodies of messages in as their bytes come, messages out.

What the core said before it closed is read, even where a command that met the closed end broke the
connection first: the last words of a core say why it ends. Knows no requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import cast

from server.wire import FrameBuffer, ToCore, encode

_READ_BYTES = 1 << 18


class CoreConnection(asyncio.Protocol):
    """Gives each body to `receive`, in order; its error ends the connection, and `wait` raises it.

    Everything runs on the event loop that `open` was called on.
    """

    def __init__(self, receive: Callable[[bytes], None]) -> None:
        self._receive = receive
        self._frames = FrameBuffer()
        self._transport: asyncio.Transport | None = None
        self._rest: socket.socket | None = None  # the same socket, for what the transport leaves
        self._lost = asyncio.Event()
        self._error: Exception | None = None

    async def open(self, sock: socket.socket) -> None:
        """Takes `sock` over."""
        with contextlib.suppress(OSError):  # no descriptor is left: then without it
            self._rest = sock.dup()
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=sock)

    def send(self, message: ToCore) -> None:
        assert self._transport is not None
        self._transport.write(encode(message))

    async def wait(self) -> None:
        """Until the connection has ended and all that came was received."""
        await self._lost.wait()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """What is still to come is nobody's."""
        self._forget_rest()
        if self._transport is not None:
            self._transport.abort()

    # --- asyncio.Protocol -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._frames.feed(data):
                self._receive(body)
        except Exception as error:  # it is the waiter's
            self._error = error
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        with contextlib.suppress(OSError):  # nothing is left, or nothing will come
            while (rest := self._rest) and (data := rest.recv(_READ_BYTES, socket.MSG_DONTWAIT)):
                self.data_received(data)
        self._forget_rest()
        self._lost.set()

    def _forget_rest(self) -> None:
        if self._rest is not None:
            self._rest.close()
            self._rest = None
