"""The API's end of the core: streams by request id, back-pressure, abort on exit.

Owns which requests are open and what of their answers is unread. Knows no HTTP and no text, and
starts no process: a supervisor gives it one connection after another. Everything here runs on one
event loop.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from enum import StrEnum

from scheduler.policy import max_total_tokens, never_fits
from scheduler.types import Finished, FinishReason, KVMap, Request, StepStats, Tokens
from server.core_connection import CoreConnection
from server.door import Door, Rates
from server.event_backlog import Answer
from server.wire import (
    Commands,
    CoreInfo,
    Failed,
    FailureKind,
    Group,
    Loading,
    Ready,
    Start,
    Step,
    WireError,
    decode_from_core,
)

# Prompt tokens in one message to the core; more go into the next one.
_MESSAGE_TOKENS = 1 << 20


class CoreState(StrEnum):
    """LOADING before it first was ready; FAILED from a death until it is ready again."""

    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"
    DRAINING = "draining"


class CoreUnavailable(Exception):
    """No core takes requests now: it loads, has died, or the server stops."""

    def __init__(self, message: str, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class NeverFits(Exception):
    """This request would not fit the core even alone."""


_UNAVAILABLE = {
    CoreState.LOADING: CoreUnavailable("the model is still loading", 5.0),
    CoreState.FAILED: CoreUnavailable("the engine has stopped and is being restarted", 2.0),
    CoreState.DRAINING: CoreUnavailable("the server is shutting down", 5.0),
}


class CoreStream:
    """The events of one group of requests, in the order of each request.

    While the reader is slow, tokens of one request are merged, so at most one Tokens and one
    Finished of each request wait here. Ends after the Finished of every request, or with `end`.

    While the reader waits here, `direct` is offered each Tokens on the spot, which spares waking
    a task for each; it returns False for what it cannot take now.
    """

    def __init__(self, request_ids: Iterable[str]) -> None:
        self.unfinished = set(request_ids)
        self.cut_off: set[str] = set()  # whose end is not the core's word
        self.direct: Callable[[Tokens], bool] | None = None
        self._answers: dict[str, Answer] = {}
        self._finished: dict[str, Finished] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False
        self._error: Exception | None = None

    def add_tokens(self, tokens: Tokens) -> None:
        waiter = self._waiter
        # A reader that waits and is not yet woken has seen all that came before.
        if waiter is not None and not waiter.done() and self.direct is not None:
            try:
                if self.direct(tokens):
                    return
            except Exception as error:  # it is the reader's, and goes where the reader is
                self._error = error
                self._wake()
                return
        self._answers.setdefault(tokens.request_id, Answer()).add(tokens)
        self._wake()

    def add_finished(self, finished: Finished) -> None:
        if finished.request_id in self.unfinished:
            self.unfinished.remove(finished.request_id)
            self._finished[finished.request_id] = finished
            self._wake()

    def end(self) -> None:
        """The reader wants no more."""
        self._ended = True
        self._wake()

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __aiter__(self) -> CoreStream:
        return self

    async def __anext__(self) -> Tokens | Finished:
        while True:
            if self._error is not None:
                raise self._error
            if self._ended:
                raise StopAsyncIteration
            if self._answers or self._finished:
                break
            if not self.unfinished:
                raise StopAsyncIteration
            await self._wait()
        for request_id in self._finished:
            if request_id not in self._answers:
                return self._finished.pop(request_id)
        request_id = next(iter(self._answers))
        return self._answers.pop(request_id).take(request_id)


class CoreClient:
    """Everything the HTTP side may ask of the core.

    `on_stats` gets each StepStats; a core that died is reported as one with gauges of 0.
    `on_loading` gets the progress of a load, `on_kv_map` what `inspect` asked for.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.state = CoreState.LOADING
        self.info: CoreInfo | None = None
        self.on_stats: Callable[[StepStats], None] = lambda _stats: None
        self.on_kv_map: Callable[[KVMap], None] = lambda _kv_map: None
        self.on_loading: Callable[[Loading], None] = lambda _loading: None
        self.on_ready: Callable[[CoreInfo], None] = lambda _info: None
        self._clock = clock
        self._connection: CoreConnection | None = None
        self._failure: Failed | None = None  # what the core of this connection said at last
        self._open: set[CoreStream] = set()  # contexts that have not been left
        self._streams: dict[str, CoreStream] = {}  # by id, of requests that somebody waits for
        self._unfinished: set[str] = set()  # by id, of requests that the core still owes an end
        self._rates = Rates()
        self._door: Door | None = None  # once the core was ready
        self._submits: list[Group] = []
        self._aborts: list[str] = []
        self._flush_due = False
        self._last_sign = 0.0
        self._none_open = asyncio.Event()
        self._none_open.set()

    # --- facts ------------------------------------------------------------------------------------

    @property
    def num_open(self) -> int:
        """Streams that have not been left."""
        return len(self._open)

    @property
    def num_unfinished(self) -> int:
        """Requests that the core has been given and has not ended."""
        return len(self._unfinished)

    @property
    def num_waiting(self) -> int:
        """Of these, those that did not run when the core last spoke; the newest count too."""
        return self._door.num_waiting if self._door else 0

    def num_unfinished_of(self, tenant: str) -> int:
        return self._door.num_unfinished_of(tenant) if self._door else 0

    def num_waiting_of(self, tenant: str) -> int | None:
        """None where all tenants wait in one lane."""
        return self._door.num_waiting_of(tenant) if self._door else 0

    def retry_after_seconds(self, tenant: str) -> float:
        """For a request that was not begun in time."""
        return self._door.retry_after_seconds(tenant, self._clock()) if self._door else 1.0

    def last_step_age(self) -> float | None:
        """Seconds since the last sign of life of a core that has work; None if it has none."""
        return self._clock() - self._last_sign if self._unfinished else None

    # --- requests ---------------------------------------------------------------------------------

    @asynccontextmanager
    async def stream(self, requests: Sequence[Request]) -> AsyncIterator[CoreStream]:
        """The events of these requests: all are accepted or none.

        They share a prompt, and their ids are unique among all open requests. Leaving the context
        aborts what is unfinished. Raises CoreUnavailable, QueueFull, WaitTooLong, NeverFits on
        entering.
        """
        stream = self._enter(requests)
        try:
            yield stream
        finally:
            self._leave(stream)

    def _enter(self, requests: Sequence[Request]) -> CoreStream:
        if self.state is not CoreState.READY:
            reason = _UNAVAILABLE[self.state]
            raise CoreUnavailable(str(reason), reason.retry_after_seconds)
        assert self.info is not None
        assert self._door is not None
        if any(never_fits(request, self.info.capacity) for request in requests):
            raise NeverFits(
                f"prompt and answer exceed {max_total_tokens(self.info.capacity)} tokens"
            )
        self._door.check(requests, self._clock())
        stream = CoreStream(request.id for request in requests)
        assert len(stream.unfinished) == len(requests), "ids are unique"
        assert stream.unfinished.isdisjoint(self._unfinished), "ids are unique"
        if not self._unfinished:
            self._last_sign = self._clock()
        self._unfinished |= stream.unfinished
        self._door.enter(requests)
        self._streams |= dict.fromkeys(stream.unfinished, stream)
        self._open.add(stream)
        self._none_open.clear()
        self._submits.append(Group.pack(requests))
        self._flush_soon()
        return stream

    def _leave(self, stream: CoreStream) -> None:
        for request_id in stream.unfinished:
            del self._streams[request_id]
        self.abort(stream.unfinished)
        self._open.discard(stream)
        if not self._open:
            self._none_open.set()

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends requests of streams that go on for others; their Finished still comes."""
        aborts = sorted(request_ids)
        if aborts:
            self._aborts += aborts
            self._flush_soon()

    def inspect(self) -> None:
        """Asks for one KVMap; nothing comes where no core is ready."""
        if self._connection is not None and self.info is not None:
            self._connection.send(Commands(inspect=True))

    def _flush_soon(self) -> None:
        # All commands of one turn of the event loop leave in one message.
        if not self._flush_due:
            self._flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        submits, self._submits = self._submits, []
        aborts, self._aborts = self._aborts, []
        if self._connection is None:
            return  # the connection ended meanwhile, and with it every request
        batch: list[Group] = []
        size = 0
        for group in submits:
            batch.append(group)
            size += len(group.prompt)
            if size > _MESSAGE_TOKENS:
                self._connection.send(Commands(tuple(batch)))
                batch, size = [], 0
        if batch or aborts:
            self._connection.send(Commands(tuple(batch), tuple(aborts)))

    # --- the end of the server --------------------------------------------------------------------

    def drain(self) -> None:
        """Takes no more requests; those that are open go on."""
        self.state = CoreState.DRAINING

    async def wait_until_none_open(self) -> None:
        await self._none_open.wait()

    def end_all(self, message: str) -> None:
        """Ends every open stream with an error, and its requests in the core."""
        ids = set(self._streams)
        self._end_streams(message)
        self.abort(ids)

    def send_drain(self) -> None:
        """Lets the core end by itself once it owes nothing."""
        if self._connection is not None:
            self._connection.send(Commands(drain=True))

    def give_up(self) -> None:
        """No core will come any more."""
        self.state = CoreState.FAILED

    # --- one connection ---------------------------------------------------------------------------

    async def serve(self, sock: socket.socket, start: Start) -> Failed | None:
        """Uses one connection from Start to its end; what the core said at last, if it did.

        However it ends, every open stream ends with an error before this returns.
        """
        connection = CoreConnection(self._receive)
        self._failure = None
        try:
            await connection.open(sock)
            self._connection = connection
            connection.send(start)
            await connection.wait()
        except WireError as error:
            self._failure = Failed(FailureKind.ENGINE, str(error))
        finally:
            self._connection = None
            connection.close()
            self._lose("the engine stopped unexpectedly")
        return self._failure

    def _receive(self, body: bytes) -> None:
        match decode_from_core(body):
            case Step() as step:
                self._receive_step(step)
            case Loading() as loading:
                self.on_loading(loading)
            case Ready(info):
                self.info = info
                self._door = Door(info.limits, self._rates)
                if self.state is not CoreState.DRAINING:
                    self.state = CoreState.READY
                self.on_ready(info)
            case Failed() as failed:
                self._failure = failed

    def _receive_step(self, step: Step) -> None:
        self._last_sign = self._clock()
        for tokens in step.tokens:
            # A stream that was left gets no more; its requests end soon.
            if stream := self._streams.get(tokens.request_id):
                stream.add_tokens(tokens)
        for finished in step.finished:
            self._unfinished.discard(finished.request_id)
            if self._door is not None:
                self._door.end(finished, self._last_sign)
            if stream := self._streams.pop(finished.request_id, None):
                stream.add_finished(finished)
        for stats in step.stats:
            if self._door is not None:
                self._door.observe(stats, self._last_sign)
            self.on_stats(stats)
        if step.kv_map is not None:
            self.on_kv_map(step.kv_map)

    def _end_streams(self, message: str) -> None:
        now = self._clock()
        streams, self._streams = self._streams, {}
        for request_id, stream in streams.items():
            stream.cut_off.add(request_id)
            stream.add_finished(
                Finished(request_id, FinishReason.ERROR, message=message, finished_at=now)
            )

    def _lose(self, message: str) -> None:
        if self.state is CoreState.READY:
            self.state = CoreState.FAILED
        self._end_streams(message)
        self._unfinished.clear()
        self._submits.clear()
        self._aborts.clear()
        if self.info is not None:
            self._door = Door(self.info.limits, self._rates)
            num_blocks = self.info.capacity.num_blocks
            self.on_stats(StepStats(0, 0, 0, num_blocks, 0, 0))
