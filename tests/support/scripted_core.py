"""A core process with a scripted engine: real sockets, signals and deaths, no model.

`spawn(how)` gives what a Supervisor calls instead of starting the real core. `how` is read in the
child: "ready", "until FILE" (ready once there is that file), "bad model", "broken build", "no
memory", "dies" (ready, then exits), "steady" (steps of 40 ms, and KV for far fewer than may run),
"long step" (ready, then steps of a minute).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from engine.errors import ModelFileError
from scheduler.policy import FirstComeFirstServed
from server import core_process
from server.core_build import Core, Report
from server.core_process import main
from server.wire import Start
from tests.support.scripted_engine import CAPACITY, ScriptedEngine, info_for

ROOT = Path(__file__).resolve().parent.parent.parent


def spawn(how: str) -> Callable[[int], subprocess.Popen[bytes]]:
    def start(descriptor: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.support.scripted_core"]
        return subprocess.Popen(
            [*command, how, str(descriptor), str(os.getpid()), "info,text"],
            pass_fds=(descriptor,),
            stdin=subprocess.DEVNULL,
            stdout=2,
            cwd=ROOT,
        )

    return start


def die(_loop: core_process.ServingLoop) -> None:
    """After the word that it is ready, which is sent in any case."""
    raise SystemExit(7)


def run(how: str, arguments: list[str]) -> int:
    def build(start: Start, report: Report) -> Core:
        report("loading weights", 1, 2)
        while how.startswith("until ") and not Path(how.removeprefix("until ")).exists():
            time.sleep(0.01)
        if how == "bad model":
            raise ModelFileError("tiny.gguf: this is no model")
        if how == "broken build":
            raise RuntimeError("no\nkernels")
        if how == "no memory":
            raise RuntimeError("CUDA out of memory. Tried to allocate 9 GiB")
        if how == "dies":
            core_process.ServingLoop.run = die  # type: ignore[method-assign]
        capacity = replace(CAPACITY, num_slots=start.limits.max_running)
        step_seconds = 0.005
        if how == "steady":
            capacity, step_seconds = replace(capacity, num_blocks=200), 0.04
        if how == "long step":
            step_seconds = 60.0
        engine = ScriptedEngine(capacity=capacity, step_seconds=step_seconds)
        info = info_for(engine, start.limits)
        return Core(engine, start.limits, FirstComeFirstServed(), info, depth=0)

    return main(arguments, build)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2:]))
