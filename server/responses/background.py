"""Responses that are made while nobody needs to listen: they run, are cancelled, and are followed.

Owns the tasks of this process. A wish to cancel may come by way of the store, from a client of
another server. Knows no bodies.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

from starlette.types import Send

from server.errors import ApiError, Overloaded, Unavailable, envelope, retry_headers
from server.inference import as_api_error
from server.responses.answers import framing
from server.responses.event_log import EventLog
from server.responses.replay import ENDED_EARLY, replay
from server.responses.store import Key, ResponseStore, StoredResponse
from server.sse import EventStream

MAX_BACKGROUND = 1024
HOLD_SECONDS = 2.0
# Between looks at a response that another server makes.
LOOK_SECONDS = 0.5

Work = Callable[[Send], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class _Run:
    task: asyncio.Task[None]
    log: EventLog


class BackgroundRuns:
    def __init__(self, store: ResponseStore) -> None:
        self._store = store
        self._runs: dict[Key, _Run] = {}
        self._holder: asyncio.Task[None] | None = None

    def check_room(self) -> None:
        if len(self._runs) >= MAX_BACKGROUND:
            raise Overloaded(
                "Too many responses run in the background.", headers=retry_headers(5.0)
            )

    def begin(
        self,
        key: Key,
        started: StoredResponse,
        work: Work,
        failure: Callable[[], ApiError | None],
    ) -> None:
        """`started` is stored already; `failure` is what the work told in an event."""
        log = EventLog()
        task = asyncio.create_task(self._run(key, started, work, failure, log))
        self._runs[key] = _Run(task, log)
        if self._holder is None or self._holder.done():
            self._holder = asyncio.create_task(self._hold())

    async def cancel(self, key: Key) -> None:
        """Of a response that is being made; it is stored as cancelled."""
        run = self._runs.pop(key, None)
        if run is None:
            await self._store.ask_to_cancel(key)
        else:
            run.task.cancel()
            await asyncio.wait({run.task})
        stored = await self._store.get(key)
        if stored is not None and stored.body["status"] == "in_progress":
            body = {**stored.body, "status": "cancelled"}
            await self._store.replace(key, replace(stored, body=body))

    async def events(self, key: Key, starting_after: int) -> AsyncIterator[str]:
        """Those with a higher number, of a response that is stored: as they come, or again."""
        number = starting_after
        run = self._runs.get(key)
        if run is not None:
            async for event in run.log.after(number):
                number += 1
                yield event
        stored = await self._finished(key)
        if stored is None:
            return
        if run is None or stored.body["status"] in ENDED_EARLY:
            for event in replay(stored, number):
                yield event

    async def _finished(self, key: Key) -> StoredResponse | None:
        """None if it is deleted."""
        while (stored := await self._store.get(key)) is not None:
            if stored.body["status"] != "in_progress":
                return stored
            await asyncio.sleep(LOOK_SECONDS)
        return None

    async def close(self) -> None:
        tasks = [run.task for run in self._runs.values()]
        if self._holder is not None:
            tasks.append(self._holder)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _hold(self) -> None:
        while self._runs:
            for key in await self._store.hold(list(self._runs)):
                # The wish stays where it was read, for the next turn.
                with contextlib.suppress(Unavailable):
                    await self.cancel(key)
            await asyncio.sleep(HOLD_SECONDS)

    async def _run(
        self,
        key: Key,
        started: StoredResponse,
        work: Work,
        failure: Callable[[], ApiError | None],
        log: EventLog,
    ) -> None:
        error: ApiError | None = None
        try:
            await work(log.send)
            error = failure()
        except Exception as caught:
            error = as_api_error(caught, key[1])
        finally:
            self._runs.pop(key, None)
            await log.end()
        if error is not None:
            # What cannot be told now is told by the end of the lease.
            with contextlib.suppress(Unavailable):
                await self._store.replace(key, _failed(started, error))


def _failed(started: StoredResponse, error: ApiError) -> StoredResponse:
    told = envelope(error)["error"]
    fault = {"code": told["code"], "message": told["message"]}
    return replace(started, body={**started.body, "status": "failed", "error": fault})


async def write_events(
    events: AsyncIterator[str],
    send: Send,
    headers: list[tuple[bytes, bytes]],
    keepalive_seconds: float,
) -> None:
    """An answer of these events and nothing else."""
    async with EventStream(send, headers, keepalive_seconds, _FRAMING) as stream:
        async for event in events:
            await stream.write(event)
        await stream.end()


def _no_error(error: ApiError) -> str:
    raise AssertionError(f"events are written as they were made, not {error}")


_FRAMING = framing(_no_error)
