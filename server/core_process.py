"""The engine process: has the core built, runs the loop, talks over one socket.

It imports nothing heavy, so that a thread of a test can use `run_core` without torch; core_build
builds the real engine. Knows no HTTP and no text.

The parent hands over a connected Unix socket pair as a file descriptor: a private channel, with
no name in the file system that another user could connect to or that could be left behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from engine.errors import ModelFileError
from scheduler.limits import SchedulerLimits
from scheduler.loop import Engine, EngineFailed, ServingLoop
from scheduler.policy import Policy
from scheduler.scheduler import Scheduler
from server.core_build import Core, Report, build_core, import_libraries, pack_early
from server.core_channel import ConnectionClosed, CoreInbox, EventOutbox
from server.grammar_inbox import GrammarInbox
from server.heap import give_back
from server.logs import configure_logging
from server.step_profile import StepProfile
from server.wire import CoreInfo, Failed, FailureKind, Loading, Plan, Ready, Start

log = logging.getLogger("paceline.core")

EXIT_DONE = 0
EXIT_ENGINE = 1
EXIT_MODEL = 2
_FLUSH_SECONDS = 2.0

Build = Callable[[Start, Report], Core]


def run_core(sock: socket.socket, build: Build, clock: Callable[[], float] = time.monotonic) -> int:
    """Serves one connection to its end and closes it; the exit code of the process.

    Whatever goes wrong ends in a Failed message, unless nobody is left to read it.
    """
    inbox = CoreInbox(sock)
    outbox = EventOutbox(sock)
    try:
        return _serve(inbox, outbox, build, clock)
    except ConnectionClosed:
        return EXIT_DONE
    finally:
        outbox.close(_FLUSH_SECONDS)
        _close(sock)


def _serve(inbox: CoreInbox, outbox: EventOutbox, build: Build, clock: Callable[[], float]) -> int:
    start = inbox.receive_start()

    def report(stage: str, done: int, total: int) -> None:
        outbox.send(Loading(stage, done, total))

    try:
        core = build(start, report)
        scheduler = Scheduler(core.engine.capacity, core.limits, core.policy)
    except ModelFileError as error:
        outbox.send(Failed(FailureKind.MODEL, _one_line(error)))
        return EXIT_MODEL
    except Exception as error:
        if _is_out_of_memory(error):
            hint = "lower --kv-memory, --max-running or --max-step-tokens, or allow more memory"
            outbox.send(Failed(FailureKind.MODEL, f"{_one_line(error)}: {hint}"))
            return EXIT_MODEL
        log.exception("the engine could not be built")
        outbox.send(Failed(FailureKind.ENGINE, _one_line(error)))
        return EXIT_ENGINE
    outbox.send(Ready(core.info))
    commands = inbox if core.grammars is None else GrammarInbox(inbox, core.grammars)
    profile = StepProfile(clock, core.kernel_seconds) if start.config.profile_steps else None
    engine = profile.engine(core.engine) if profile else core.engine
    emit = profile.emit(outbox.emit) if profile else outbox.emit
    loop = ServingLoop(scheduler, engine, commands, emit, clock, core.depth)
    try:
        loop.run()
    except ConnectionClosed:
        raise
    except Exception as error:
        if not isinstance(error, EngineFailed):
            log.exception("the loop broke")
        outbox.send(Failed(FailureKind.ENGINE, _one_line(error)))
        return EXIT_ENGINE
    finally:
        if profile:
            print(profile.table(), file=sys.stderr, flush=True)
        if isinstance(commands, GrammarInbox):
            commands.close()
    return EXIT_DONE


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _is_out_of_memory(error: Exception) -> bool:
    """Python, the kernels, and torch on either device each have an error of their own for it."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(
        words in text for words in ("out of memory", "can't allocate memory")
    )


def _close(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the other end may have been faster
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


# --- the same core in a thread --------------------------------------------------------------------


@dataclass(slots=True)
class CoreThread:
    """A core in this process: `sock` is the caller's end, and the caller's to close."""

    sock: socket.socket
    thread: threading.Thread
    exit_codes: list[int] = field(default_factory=list)

    def stop(self, timeout_seconds: float = 10.0) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.thread.join(timeout_seconds)
        assert not self.thread.is_alive(), "the core did not end with its connection"


def start_core_thread(
    engine: Engine, limits: SchedulerLimits, policy: Policy, *, info: CoreInfo, depth: int = 0
) -> CoreThread:
    """Runs `engine` behind the real protocol in a thread; the peer still sends Start first."""
    ours, theirs = socket.socketpair()
    codes: list[int] = []

    def build(_start: Start, _report: Report) -> Core:
        return Core(engine, limits, policy, info, depth)

    def run() -> None:
        codes.append(run_core(theirs, build))

    thread = threading.Thread(target=run, name="core", daemon=True)
    thread.start()
    return CoreThread(ours, thread, codes)


# --- the process ----------------------------------------------------------------------------------


def main(argv: Sequence[str], build: Build | None = None) -> int:
    """The child: FD PARENT_PID LEVEL,FORM [PLAN]. `build` replaces the real engine in tests."""
    descriptor, parent_pid = (int(argument) for argument in argv[:2])
    _die_with(parent_pid)
    os.set_inheritable(descriptor, False)
    for number in (signal.SIGINT, signal.SIGTERM):
        # Ctrl-C and a stopped unit reach the whole group; the parent decides when we end.
        signal.signal(number, signal.SIG_IGN)
    configure_logging(*argv[2].split(","))
    if build is None:
        import_libraries()
        packed = None
        with contextlib.suppress(msgspec.DecodeError):  # a name that is no text
            packed = pack_early(msgspec.json.decode(argv[3], type=Plan)) if argv[3:] else None

    def build_once(start: Start, report: Report) -> Core:
        core = build(start, report) if build else build_core(start, report, packed)
        # What is loaded stays: the collector need not walk it again and again.
        gc.collect()
        gc.freeze()
        give_back()
        return core

    return run_core(socket.socket(fileno=descriptor), build_once)


def _die_with(parent_pid: int) -> None:
    """Asks Linux to kill us when the parent dies, even in the middle of a long step."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent_pid:
        raise SystemExit(EXIT_DONE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
