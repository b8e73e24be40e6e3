"""A child process of this house: how it is started, and messages to and from one over a socket.

Both ends of a killable child are here: `Child` in the parent, `send` and `receive` in the worker,
whose stdin is the socket. A message is a 4-byte big-endian length and that many bytes. Imports the
standard library only. Knows nothing of what a child does, nor how much it may take.
"""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import struct
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

# The child finds this very code, and no package of the same name in the current folder (-P).
_ROOT = str(Path(__file__).resolve().parent.parent)
_FIND = "import sys; sys.path.append(sys.argv.pop(1)); "


def command(statement: str, *arguments: str) -> list[str]:
    """The command of a Python that runs `statement` with `arguments` in sys.argv[1:]."""
    return [sys.executable, "-P", "-c", _FIND + statement, _ROOT, *arguments]


def limit_memory(num_bytes: int) -> None:
    """Of this process, by the kernel. A limit that it was born with (ulimit -v) stays, if lower."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


class Child:
    """The process and its socket; ended with `end`, or when nobody holds this any more."""

    def __init__(self, statement: str, *, stderr: int | None = None) -> None:
        """`stderr` as in subprocess.Popen: None is ours."""
        self._channel, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                command(statement),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )
        self.end = weakref.finalize(self, _end, self._process, self._channel)

    @property
    def pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        return self._process.poll() is None

    def exit_code(self) -> int | None:
        """How the child ended; None if it still has not, shortly after its socket closed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1)
        return self._process.returncode

    def send(self, message: bytes, timeout: float) -> None:
        """Raises OSError at the end of the child, or if it does not read for `timeout`."""
        self._channel.settimeout(timeout)
        send(self._channel, message)

    def receive(self, timeout: float) -> dict[str, Any]:
        """The next reply; raises OSError after a silence of `timeout`, EOFError at the end."""
        self._channel.settimeout(timeout)
        message = receive(self._channel)
        if message is None:
            raise EOFError
        reply: dict[str, Any] = json.loads(message)
        return reply


def _end(process: subprocess.Popen[bytes], channel: socket.socket) -> None:
    channel.close()
    process.kill()
    process.wait()


def send(channel: socket.socket, message: bytes) -> None:
    channel.sendall(struct.pack(">I", len(message)) + message)


def receive(channel: socket.socket) -> bytes | None:
    """The next message, or None if the other end closed first."""
    header = _read(channel, 4)
    return None if header is None else _read(channel, struct.unpack(">I", header)[0])


def _read(channel: socket.socket, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        part = channel.recv(min(count - len(data), 1 << 20))
        if not part:
            return None
        data += part
    return bytes(data)
