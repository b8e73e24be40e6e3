"""The core's end of the socket: commands in, events out, for a loop that must not wait on us.

Owns the inbox of the ServingLoop and the outgoing buffer. Knows neither engines nor schedules.

    ServingLoop --take--> CoreInbox    <-- recv --  socket
    ServingLoop --emit--> EventOutbox  -- send -->  socket     (a thread takes over when it is full)

There is no reader thread: one non-blocking read a turn costs a microsecond, and a thread would
have to win the interpreter lock from a kernel that may hold it for a whole step. For the same
reason the loop itself writes; only what the socket does not take at once is left to a thread.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator

from scheduler.types import Abort, Command, Drain, Event, Inspect
from server.event_backlog import EventBacklog
from server.wire import (
    Commands,
    FrameBuffer,
    FromCore,
    Start,
    ToCore,
    WireError,
    decode_to_core,
    encode,
)

_READ_BYTES = 1 << 18


class ConnectionClosed(ConnectionError):
    """The other end is gone: nobody wants the answers any more."""


class CoreInbox:
    """Commands from the socket; the Inbox of a ServingLoop."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._frames = FrameBuffer()
        self._messages: list[ToCore] = []
        self._bell: int | None = None

    def wake_on(self, descriptor: int) -> None:
        """`take` also stops waiting when there is something to read from `descriptor`."""
        self._bell = descriptor

    def receive_start(self) -> Start:
        """Waits for the first message. Raises ConnectionClosed, WireError."""
        while not self._messages:
            self._wait()
            self._read()
        first = self._messages.pop(0)
        if not isinstance(first, Start):
            raise WireError("the first message to the core was not a Start")
        return first

    def take(self, *, block: bool) -> list[Command]:
        """What came since the last call; waits for something, or the bell, if `block`.

        Raises ConnectionClosed.
        """
        self._read()
        rang = False
        while block and not self._messages and not rang:
            rang = self._wait()
            self._read()
        messages, self._messages = self._messages, []
        return [command for message in messages for command in _commands(message)]

    def _wait(self) -> bool:
        """Whether it was the bell."""
        # poll, not select: a descriptor may be above 1023.
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        if self._bell is not None:
            poll.register(self._bell, select.POLLIN)
        return any(descriptor == self._bell for descriptor, _ in poll.poll())

    def _read(self) -> None:
        while True:
            try:
                data = self._sock.recv(_READ_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError as error:
                raise ConnectionClosed("the connection of the core broke") from error
            if not data:
                raise ConnectionClosed("the connection of the core was closed")
            self._messages += [decode_to_core(body) for body in self._frames.feed(data)]


def _commands(message: ToCore) -> Iterator[Command]:
    if not isinstance(message, Commands):
        raise WireError("the core was told to start twice")
    for group in message.submits:
        yield group.unpack()
    if message.aborts:
        yield Abort(message.aborts)
    if message.drain:
        yield Drain()
    if message.inspect:
        yield Inspect()


class EventOutbox:
    """Sends without making the caller wait; what does not fit goes out by a thread.

    A reader that is slow, or stopped, costs memory up to the answers that are in the making
    (EventBacklog), and never a step. A reader that is gone is noticed by the inbox; from then on
    events are dropped, since every request of that reader ends with it.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._backlog = EventBacklog()
        self._rest = memoryview(b"")  # the unsent end of a frame
        self._closed = False
        self._gone = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="core-outbox", daemon=True)
        self._thread.start()

    def emit(self, events: list[Event]) -> None:
        """The `emit` of a ServingLoop."""
        with self._changed:
            if self._gone:
                return
            self._backlog.add(events)
            if not self._rest and self._backlog:
                self._send_now(encode(self._backlog.take()))
            self._notify()

    def send(self, message: FromCore) -> None:
        """Sends Loading, Ready or Failed, in order with the events before and after it."""
        with self._changed:
            frames = [bytes(self._rest)]
            while self._backlog:
                frames.append(encode(self._backlog.take()))
            self._send_now(b"".join([*frames, encode(message)]))
            self._notify()

    def close(self, timeout_seconds: float) -> None:
        """Waits for the rest to leave, so long as that moves, and ends the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout_seconds)

    def _notify(self) -> None:
        if self._rest or self._backlog:
            self._changed.notify()

    def _send_now(self, frame: bytes | memoryview) -> None:
        try:
            sent = self._sock.send(frame, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._gone = True
            return
        self._rest = memoryview(frame)[sent:]

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._sock, select.POLLOUT)
        while True:
            with self._changed:
                while not (self._rest or self._backlog or self._closed or self._gone):
                    self._changed.wait()
                if self._gone or not (self._rest or self._backlog):
                    return
            poll.poll()
            with self._changed:
                if self._rest or self._backlog:  # or the loop was faster
                    self._send_now(self._rest or encode(self._backlog.take()))
