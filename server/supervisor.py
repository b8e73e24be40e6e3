"""Starts the core process, watches it and starts it again.

Owns the child and the rule of restarts: a core that never became ready is not tried again, one
that died comes back, at once the first time and then after a growing pause, and too many deaths in
a minute are the end. Knows nothing of requests: what a death means for them is the client's
business.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import subprocess
import time
from collections import deque

from server.core_client import CoreClient, CoreState
from server.early_core import EarlyCore, Spawn, spawn_core, start_core
from server.wire import Failed, FailureKind, Start

log = logging.getLogger("paceline.supervisor")

MAX_DEATHS = 5
DEATH_WINDOW_SECONDS = 60.0
_FIRST_PAUSE_SECONDS = 0.2
_LONGEST_PAUSE_SECONDS = 5.0
_EXIT_SECONDS = 1.0


class CoreGaveUp(Exception):
    """There will be no core: one line for people, and the exit code of the server."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Supervisor:
    """Runs one core after another for `client`."""

    def __init__(
        self,
        client: CoreClient,
        start: Start,
        spawn: Spawn = spawn_core,
        early: EarlyCore | None = None,
    ) -> None:
        """`early` may hold the first core; the others come from `spawn`."""
        self._client = client
        self._start = start
        self._spawn = spawn
        self._early = early
        self._deaths: deque[float] = deque()
        self._stop_wanted = asyncio.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """Of the core that lives now."""
        return self._process.pid if self._process else None

    async def run(self) -> None:
        """Returns after `stop`. Raises CoreGaveUp."""
        try:
            while not self._stop_wanted.is_set():
                failure, exit_code = await self._live_once()
                if not self._stop_wanted.is_set():
                    await self._after_death(failure, exit_code)
        finally:
            self._ended.set()

    async def stop(self) -> None:
        """Ends the core: an idle one by itself, any other by force. No child is left behind."""
        self._stop_wanted.set()
        if self._client.state is not CoreState.FAILED and not self._client.num_unfinished:
            self._client.send_drain()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), _EXIT_SECONDS)
        if self._process is not None:
            self._process.kill()
        await self._ended.wait()

    async def _live_once(self) -> tuple[Failed | None, int]:
        core = self._early.take() if self._early else None
        try:
            core = core or start_core(self._spawn)
        except OSError as error:  # no descriptor or process left
            return Failed(FailureKind.ENGINE, f"the engine could not be started: {error}"), 1
        process = self._process = core.process
        try:
            failure = await self._client.serve(core.sock, self._start)
            # The connection is gone, so this core is of no use, dead or not.
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, _EXIT_SECONDS)
        finally:
            process.kill()
            # Giving back a GPU's memory takes its time, and the server has others to answer.
            exit_code = await asyncio.to_thread(process.wait)
            self._process = None
        return failure, exit_code

    async def _after_death(self, failure: Failed | None, exit_code: int) -> None:
        reason = failure.message if failure else _describe(exit_code)
        if self._client.info is None:
            model = failure is not None and failure.kind is FailureKind.MODEL
            self._client.give_up()
            if failure is None:
                reason = f"the engine ended before it was ready: {reason}"
            raise CoreGaveUp(reason, 2 if model else 1)
        now = time.monotonic()
        self._deaths.append(now)
        while self._deaths[0] < now - DEATH_WINDOW_SECONDS:
            self._deaths.popleft()
        if len(self._deaths) >= MAX_DEATHS:
            self._client.give_up()
            raise CoreGaveUp(f"the engine died {MAX_DEATHS} times in a minute: {reason}", 1)
        pause = _pause_seconds(len(self._deaths))
        when = f"in {pause:.1f} s" if pause else "at once"
        log.error("the engine ended (%s); it starts again %s", reason, when)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stop_wanted.wait(), pause)


def _pause_seconds(num_deaths: int) -> float:
    """None after a death alone in its minute: clients wait. Then growing."""
    if num_deaths <= 1:
        return 0.0
    return min(_FIRST_PAUSE_SECONDS * 2.0 ** (num_deaths - 2), _LONGEST_PAUSE_SECONDS)


def _describe(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"
