"""Starts the first core process before the server itself is loaded.

Either takes a second to import its libraries; side by side they take one. Imports the standard
library only, as child.py does, or it would be late. Knows nothing of what a core does.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from server.child import command

# Ctrl-C reaches the whole group, while all is still being imported too: the parent decides.
_CORE = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "from server.core_process import main; sys.exit(main(sys.argv[1:]))"
)

# Starts a core that holds the given descriptor.
Spawn = Callable[[int], subprocess.Popen[bytes]]


def spawn_core(
    descriptor: int, plan: str = "", *, log: tuple[str, str] = ("info", "auto")
) -> subprocess.Popen[bytes]:
    """The child, holding `descriptor`. Its stdout is our stderr: stdout is for people's eyes.

    `log` is the level and the form of its lines. `plan`, a server.wire.Plan in JSON, lets it begin
    before it is told to start. Call it from the thread that lives as long as the server: Linux ends
    the child with the thread that started it.
    """
    arguments = [str(descriptor), str(os.getpid()), ",".join(log), *([plan] if plan else [])]
    return subprocess.Popen(
        command(_CORE, *arguments), pass_fds=(descriptor,), stdin=subprocess.DEVNULL, stdout=2
    )


@dataclass(frozen=True, slots=True)
class StartedCore:
    """A child and our end of its connection, both the owner's to end."""

    sock: socket.socket
    process: subprocess.Popen[bytes]


def start_core(spawn: Spawn) -> StartedCore:
    """Raises OSError when there is no descriptor or process to be had."""
    ours, theirs = socket.socketpair()
    try:
        return StartedCore(ours, spawn(theirs.fileno()))
    except OSError:
        ours.close()
        raise
    finally:
        theirs.close()


class EarlyCore:
    """Holds a started core until somebody takes it; ends it on leaving if nobody has."""

    def __init__(self, spawn: Spawn = spawn_core) -> None:
        self._core: StartedCore | None = None
        with contextlib.suppress(OSError):  # whoever wants a core then meets the same, and says so
            self._core = start_core(spawn)

    def take(self) -> StartedCore | None:
        """The core, the first time it is asked for."""
        core, self._core = self._core, None
        return core

    def __enter__(self) -> EarlyCore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        core = self.take()
        if core is not None:
            core.sock.close()
            core.process.kill()
            core.process.wait()
