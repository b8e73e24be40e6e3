"""The real server with the default model in a process of its own, for checks over HTTP."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def real_server(*flags: str) -> Iterator[str]:
    """Its URL, once it is ready; it ends with the block."""
    with real_process(*flags) as (url, _):
        yield url


@contextmanager
def real_process(*flags: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The same, with the process."""
    port = free_port()
    command = [sys.executable, "-m", "server", "serve", "--port", str(port)]
    with subprocess.Popen(
        [*command, "--log-level", "warning", *flags],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        url = f"http://127.0.0.1:{port}"
        try:
            _wait(process, url)
            yield url, process
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, "the server ended by itself"
        try:
            if httpx.get(url + "/ready", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise AssertionError("the server did not become ready")
