"""One server process: started on a free port, waited for, weighed, ended with its children.

It owns the process group. It must not know what is sent to the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.http_stream import HttpClient, RequestFailed
from bench.peers.rivals import ROOT, Rival

STOP_SECONDS = 15.0
PROBE_SECONDS = 5.0


class StartFailed(Exception):
    """The server did not become ready; the message holds the end of its log."""


@dataclass(frozen=True, slots=True)
class Running:
    """A ready server. start_seconds: from the spawn to the first healthy answer."""

    url: str
    group: int
    start_seconds: float

    def resident_mib(self) -> float | None:
        """Resident memory of its whole process group; None where /proc is not Linux's."""
        total = 0
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(fields[2]) == self.group:
                    total += int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
        return total / 2**20 if total else None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(rival: Rival, gguf: Path, log: Path) -> Iterator[Running]:
    """Start a rival and end it, whatever happens. Raises StartFailed."""
    port = free_port()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as output:
        started = time.monotonic()
        process = subprocess.Popen(
            rival.command(rival.model(gguf), port),
            cwd=ROOT,
            env={**os.environ, **dict(rival.environment)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            asyncio.run(_ready(url, rival, lambda: process.poll() is None, log))
            yield Running(url, process.pid, time.monotonic() - started)
        finally:
            _end(process)


async def _ready(url: str, rival: Rival, alive: Callable[[], bool], log: Path) -> None:
    client = HttpClient(url, {})
    deadline = time.monotonic() + rival.start_seconds
    try:
        while time.monotonic() < deadline:
            if not alive():
                raise StartFailed(f"{rival.name} ended: {_tail(log)}")
            with contextlib.suppress(RequestFailed):
                exchange = await client.request("GET", rival.health, b"", PROBE_SECONDS)
                if exchange.status == 200:
                    return
            await asyncio.sleep(0.1)
    finally:
        client.close()
    raise StartFailed(f"{rival.name} not ready in {rival.start_seconds:g} s: {_tail(log)}")


def _tail(log: Path) -> str:
    return " | ".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-3:])


def _end(process: subprocess.Popen[bytes]) -> None:
    for stop in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, stop)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            continue
        break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # children that outlived it
