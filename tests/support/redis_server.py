"""A real Redis on a socket in a folder of its own, or a reason why there is none."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class RedisServer:
    """`start` and `kill` as often as wanted; nothing is kept on disk."""

    def __init__(self, folder: Path) -> None:
        self._socket = folder / "redis.sock"
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"unix://{self._socket}"

    def start(self) -> None:
        command = ["redis-server", "--port", "0", "--unixsocket", str(self._socket)]
        command += ["--save", "", "--appendonly", "no", "--dir", str(self._socket.parent)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        for _ in range(600):
            if self._socket.exists():
                return
            assert self._process.poll() is None, "redis-server ended"
            time.sleep(0.02)
        raise AssertionError("redis-server did not start")

    def pause(self) -> None:
        """It keeps its connections and says nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        self._socket.unlink(missing_ok=True)


@contextmanager
def redis_server(folder: Path) -> Iterator[RedisServer]:
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed here (apt install redis-server)")
    pytest.importorskip("redis", reason="the extra `redis` is not installed here")
    server = RedisServer(folder)
    server.start()
    try:
        yield server
    finally:
        server.kill()
