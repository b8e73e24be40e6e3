"""An Inbox that holds a request with a grammar back until its grammar is compiled.

Compiling runs in a thread beside the loop, so that no step waits for it; the scheduler never sees
that there is anything to wait for. Other requests pass; a Drain waits for those held back, since
they were accepted before it. Knows nothing of what a grammar says.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from scheduler.types import Abort, Command, Drain, Submit
from server.heap import give_back

_THREADS = 1
# The thread that compiles stands back behind those that compute.
_NICENESS = 10


class Source(Protocol):
    """Where commands come from; server.core_channel.CoreInbox."""

    def take(self, *, block: bool) -> list[Command]: ...
    def wake_on(self, descriptor: int) -> None: ...


class Compiler(Protocol):
    """engine.grammar.GrammarCompiler, as far as it is used here."""

    def prepare(self) -> None: ...
    def knows(self, spec: bytes) -> bool: ...
    def start(self, spec: bytes) -> object: ...


class GrammarInbox:
    """The Inbox of a ServingLoop."""

    def __init__(self, source: Source, compiler: Compiler) -> None:
        self._source = source
        self._compiler = compiler
        self._held: deque[tuple[Submit, Future[None]]] = deque()
        self._drain: Drain | None = None
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammar")
        self._bell, self._ring = os.pipe()
        os.set_blocking(self._bell, False)
        os.set_blocking(self._ring, False)
        source.wake_on(self._bell)
        # Before anybody is served, not with the first grammar: it holds the interpreter lock.
        self._pool.submit(self._prepare)

    def take(self, *, block: bool) -> list[Command]:
        """What came and what has become ready. Raises what the source raises."""
        ready: list[Command] = self._released(set())
        for command in self._source.take(block=block and not ready):
            self._sort(command, ready)
        self._hear()
        ready += self._released(set())
        if self._drain is not None and not self._held:
            ready.append(self._drain)
            self._drain = None
        return ready

    def close(self) -> None:
        """Ends the thread after what it is at; nothing may be taken any more."""
        self._pool.shutdown(cancel_futures=True)
        os.close(self._bell)
        os.close(self._ring)

    def _sort(self, command: Command, ready: list[Command]) -> None:
        match command:
            case Submit(requests) if requests[0].grammar and not self._compiler.knows(
                requests[0].grammar
            ):
                work = self._pool.submit(self._compile, requests[0].grammar)
                self._held.append((command, work))
                work.add_done_callback(self._wake)  # done comes before the bell
            case Abort(request_ids):
                # The scheduler must know a request before it can end it.
                ready += self._released(set(request_ids))
                ready.append(command)
            case Drain():
                self._drain = command
            case _:
                ready.append(command)

    def _released(self, wanted: set[str]) -> list[Command]:
        """Submits whose grammar is ready, or one of whose requests is in `wanted`."""
        held, self._held = self._held, deque()
        released: list[Command] = []
        for submit, work in held:
            if work.done() or wanted.intersection(request.id for request in submit.requests):
                work.cancel()
                released.append(submit)
            else:
                self._held.append((submit, work))
        return released

    def _prepare(self) -> None:
        self._compiler.prepare()
        give_back()

    def _compile(self, spec: bytes) -> None:
        _stand_back()
        # A grammar that fails fails again at admission, where its request can be told.
        with contextlib.suppress(ValueError):
            self._compiler.start(spec)

    def _wake(self, _: Future[None]) -> None:
        with contextlib.suppress(OSError):  # full of rings that nobody heard yet, or closed
            os.write(self._ring, b"!")

    def _hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._bell, 4096)


def _stand_back() -> None:
    if sys.platform == "linux":  # elsewhere it would be the whole process
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
