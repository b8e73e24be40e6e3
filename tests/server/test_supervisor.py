"""Real child processes: deaths, restarts, orphans. The engine in them is scripted."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import psutil
import pytest

from scheduler.types import Finished, FinishReason
from server import supervisor as supervisor_module
from server.config import EngineConfig
from server.core_client import CoreClient, CoreState, CoreUnavailable
from server.core_process import EXIT_DONE
from server.supervisor import CoreGaveUp, Supervisor
from server.wire import Loading, Start
from tests.support.scripted_core import ROOT, spawn
from tests.support.scripted_engine import LIMITS, VOCAB_SIZE, request

START = Start(EngineConfig(), LIMITS, VOCAB_SIZE)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(240):
            await test()

    asyncio.run(limited())


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@asynccontextmanager
async def supervised(how: str) -> AsyncIterator[tuple[CoreClient, Supervisor, asyncio.Task[None]]]:
    client = CoreClient()
    supervisor = Supervisor(client, START, spawn(how))
    task = asyncio.create_task(supervisor.run())
    try:
        yield client, supervisor, task
    finally:
        await supervisor.stop()
        await asyncio.gather(task, return_exceptions=True)
        assert supervisor.pid is None


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_core_that_takes_its_time_to_be_gone_holds_up_nobody() -> None:
    """The event loop answers others while a killed process is on its way out."""
    is_going, may_be_gone = threading.Event(), threading.Event()
    in_time: list[bool] = []

    class Lingering(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            if timeout is None:
                is_going.set()
                in_time.append(may_be_gone.wait(60.0))
            return super().wait(timeout)

    def linger(descriptor: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", "pass"]  # ends at once: its connection closes
        return Lingering(command, pass_fds=(descriptor,), stdin=subprocess.DEVNULL)

    async def test() -> None:
        client = CoreClient()
        task = asyncio.create_task(Supervisor(client, START, linger).run())
        await until(is_going.is_set)
        may_be_gone.set()
        with pytest.raises(CoreGaveUp):
            await task
        assert in_time == [True]

    run(test)


def test_a_killed_core_ends_streams_and_comes_back(tmp_path: Path) -> None:
    """B124: kill -9 with 5 streams open; error events, refusals, then ready again."""
    may_start = tmp_path / "start"
    may_start.touch()

    async def test() -> None:
        async with supervised(f"until {may_start}") as (client, supervisor, _):
            await until(lambda: client.state is CoreState.READY)

            async def watch(name: str) -> None:
                async with client.stream([request(name, max_tokens=1000)]) as stream:
                    async for event in stream:
                        if isinstance(event, Finished):
                            assert event.reason is FinishReason.ERROR
                            return
                raise AssertionError("a stream ended without Finished")

            watchers = [asyncio.create_task(watch(f"r{i}")) for i in range(5)]
            await until(lambda: client.num_unfinished == 5)
            await asyncio.sleep(0.1)
            first_pid = supervisor.pid
            assert first_pid is not None
            may_start.unlink()
            os.kill(first_pid, signal.SIGKILL)
            await asyncio.gather(*watchers)
            assert client.state is CoreState.FAILED
            with pytest.raises(CoreUnavailable):
                async with client.stream([request("new")]):
                    raise AssertionError
            may_start.touch()
            await until(lambda: client.state is CoreState.READY)
            assert supervisor.pid != first_pid
            async with client.stream([request("after")]) as stream:
                events = [event async for event in stream]
            assert isinstance(events[-1], Finished)
            assert events[-1].reason is FinishReason.LENGTH

    run(test)


def test_stopping_leaves_no_process_behind_even_if_the_core_stands_still() -> None:
    """B128: an idle core, a busy one, and one that is stopped by a signal."""

    async def test() -> None:
        for state in ("idle", "busy", "stopped"):
            async with supervised("ready") as (client, supervisor, task):
                await until(lambda client=client: client.state is CoreState.READY)  # type: ignore[misc]
                pid = supervisor.pid
                assert pid is not None
                if state == "busy":
                    async with client.stream([request("a", max_tokens=1000)]):
                        await asyncio.sleep(0.05)
                        await asyncio.wait_for(supervisor.stop(), 20.0)
                if state == "stopped":
                    os.kill(pid, signal.SIGSTOP)
                await asyncio.wait_for(supervisor.stop(), 20.0)
                assert is_gone(pid)
                await task

    run(test)


def test_a_stop_does_not_wait_for_the_pause_before_a_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """B128."""
    monkeypatch.setattr(supervisor_module, "_pause_seconds", lambda _num_deaths: 600.0)

    async def test() -> None:
        async with supervised("dies") as (client, supervisor, task):
            await until(lambda: client.state is CoreState.FAILED)
            await until(lambda: supervisor.pid is None)
            await asyncio.wait_for(supervisor.stop(), 20.0)
            await task

    run(test)


def test_the_first_death_costs_no_pause_and_later_ones_more_and_more() -> None:
    """B124."""
    pauses = [supervisor_module._pause_seconds(num_deaths) for num_deaths in range(1, 9)]
    assert pauses[:4] == [0.0, 0.2, 0.4, 0.8]
    assert pauses == sorted(pauses)
    assert pauses[-1] == 5.0


def test_a_wrong_model_is_final_and_has_its_own_exit_code() -> None:
    async def test() -> None:
        async with supervised("bad model") as (client, _, task):
            with pytest.raises(CoreGaveUp, match="this is no model") as end:
                await task
            assert end.value.exit_code == 2
            assert client.state is CoreState.FAILED

    run(test)


def test_an_engine_that_can_not_be_built_is_final() -> None:
    async def test() -> None:
        async with supervised("broken build") as (_, _, task):
            with pytest.raises(CoreGaveUp, match="no kernels") as end:
                await task
            assert end.value.exit_code == 1

    run(test)


def test_a_model_too_large_for_the_memory_is_a_wrong_setting_and_says_which() -> None:
    async def test() -> None:
        async with supervised("no memory") as (_, _, task):
            with pytest.raises(CoreGaveUp, match=r"out of memory.*: lower --kv-memory") as end:
                await task
            assert end.value.exit_code == 2

    run(test)


def test_a_core_that_keeps_dying_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "MAX_DEATHS", 3)

    async def test() -> None:
        async with supervised("dies") as (client, _, task):
            with pytest.raises(CoreGaveUp, match="died 3 times") as end:
                await task
            assert end.value.exit_code == 1
            assert client.state is CoreState.FAILED

    run(test)


def test_loading_is_reported_and_requests_are_refused_until_it_is_done(tmp_path: Path) -> None:
    """B134."""

    loaded = tmp_path / "loaded"

    async def test() -> None:
        async with supervised(f"until {loaded}") as (client, _, _):
            seen: list[Loading] = []
            client.on_loading = seen.append
            await until(lambda: bool(seen))
            assert client.state is CoreState.LOADING
            with pytest.raises(CoreUnavailable, match="loading"):
                async with client.stream([request("early")]):
                    raise AssertionError
            loaded.touch()
            await until(lambda: client.state is CoreState.READY)
            assert seen[0] == Loading("loading weights", 1, 2)

    run(test)


@contextmanager
def core_of(program: str) -> Iterator[int]:
    """The id of the core that `program` prints; on leaving, it must die with its parent."""
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        try:
            yield pid
        finally:
            parent.kill()
        parent.wait(30)
        deadline = time.monotonic() + 30
        while not is_gone(pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert is_gone(pid)


def test_a_core_ignores_the_signals_of_its_group_and_dies_with_its_parent() -> None:
    """B127: Ctrl-C reaches the whole group; a killed parent leaves no orphan."""
    program = (
        "import asyncio, os, sys\n"
        "from server.core_client import CoreClient, CoreState\n"
        "from server.supervisor import Supervisor\n"
        "from tests.server.test_supervisor import START, spawn, until\n"
        "async def main():\n"
        "    client = CoreClient()\n"
        "    supervisor = Supervisor(client, START, spawn('ready'))\n"
        "    task = asyncio.create_task(supervisor.run())\n"
        "    await until(lambda: client.state is CoreState.READY)\n"
        "    print(supervisor.pid, flush=True)\n"
        "    await task\n"
        "asyncio.run(main())\n"
    )
    with core_of(program) as pid:
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
        time.sleep(0.2)
        assert not is_gone(pid)


def test_a_core_in_the_middle_of_a_long_step_dies_with_its_parent() -> None:
    """B128: it is not asked, so it need not come to the end of the step and read its socket."""
    program = (
        "import asyncio\n"
        "from server.core_client import CoreClient, CoreState\n"
        "from server.supervisor import Supervisor\n"
        "from tests.server.test_supervisor import START, request, spawn, until\n"
        "async def main():\n"
        "    client = CoreClient()\n"
        "    supervisor = Supervisor(client, START, spawn('long step'))\n"
        "    task = asyncio.create_task(supervisor.run())\n"
        "    await until(lambda: client.state is CoreState.READY)\n"
        "    async with client.stream([request('a')]):\n"
        "        await asyncio.sleep(0.3)\n"
        "        print(supervisor.pid, flush=True)\n"
        "        await task\n"
        "asyncio.run(main())\n"
    )
    with core_of(program) as pid:
        assert not is_gone(pid)


def test_a_core_whose_parent_died_before_it_could_look_ends_at_once() -> None:
    """The signal is asked for too late then; the parent's id tells."""
    with subprocess.Popen([sys.executable, "-c", ""]) as parent:
        parent.wait(10)
    ours, theirs = socket.socketpair()  # `ours` stays open: no end of file helps
    command = [sys.executable, "-m", "tests.support.scripted_core", "ready"]
    with ours, theirs:
        arguments = [str(theirs.fileno()), str(parent.pid)]
        with subprocess.Popen(
            [*command, *arguments], pass_fds=(theirs.fileno(),), cwd=ROOT
        ) as core:
            try:
                assert core.wait(10) == EXIT_DONE
            finally:
                core.kill()
