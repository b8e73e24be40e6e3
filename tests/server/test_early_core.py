"""The core that starts before the server: taken once, never left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

from server.config import EngineConfig
from server.core_client import CoreClient, CoreState
from server.early_core import EarlyCore
from server.supervisor import Supervisor
from server.wire import Start
from tests.support.scripted_core import spawn
from tests.support.scripted_engine import LIMITS, VOCAB_SIZE


def test_a_core_that_nobody_takes_is_ended() -> None:
    children: list[subprocess.Popen[bytes]] = []

    def watched(descriptor: int) -> subprocess.Popen[bytes]:
        children.append(spawn("ready")(descriptor))
        return children[-1]

    with EarlyCore(watched):
        assert children[0].poll() is None
    assert children[0].returncode is not None


def test_the_first_core_is_the_early_one_and_the_next_is_not() -> None:
    spawned: list[int] = []

    def later(descriptor: int) -> subprocess.Popen[bytes]:
        child = spawn("ready")(descriptor)
        spawned.append(child.pid)
        return child

    async def check(early: EarlyCore) -> None:
        client = CoreClient()
        supervisor = Supervisor(client, Start(EngineConfig(), LIMITS, VOCAB_SIZE), later, early)
        running = asyncio.create_task(supervisor.run())
        try:
            await ready(client)
            assert not spawned
            first = supervisor.pid
            assert first is not None
            os.kill(first, signal.SIGKILL)
            while supervisor.pid in (None, first):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await ready(client)
            assert spawned == [supervisor.pid]
        finally:
            await supervisor.stop()
            await asyncio.gather(running, return_exceptions=True)

    with EarlyCore(spawn("ready")) as early:
        asyncio.run(asyncio.wait_for(check(early), 60))


async def ready(client: CoreClient) -> None:
    while client.state is not CoreState.READY:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def test_no_core_to_be_had_leaves_it_to_the_supervisor() -> None:
    def none_left(_descriptor: int) -> subprocess.Popen[bytes]:
        raise OSError("no process left")

    with EarlyCore(none_left) as early:
        assert early.take() is None


def test_starting_early_needs_the_standard_library_only() -> None:
    code = "import sys; n = set(sys.modules); import server.early_core; print(set(sys.modules) - n)"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert "server.early_core" in found
    for library in ("torch", "msgspec", "fastapi", "uvicorn"):
        assert f"'{library}'" not in found
