"""The server of the overhead measurement: everything real but the model.

The core is a process with an engine of a fixed pace; each token's text is the
instant at which its step ended, so that a client on the same machine can tell what came on top.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable

import tokenizers
from tokenizers import models

from scheduler.policy import FirstComeFirstServed
from scheduler.types import KVCapacity, StepPlan, StepResult, StepStats
from server import app
from server.config import parse_settings
from server.core_build import Core, Report
from server.core_process import main as core_main
from server.logs import configure_logging
from server.metrics import Metrics
from server.serve import bind, live
from server.tallies import Count, Distribution
from server.timings import Timings
from server.token_pieces import Spelling, TokenPieces
from server.tokenizer import Tokenizer
from server.tokenizer_parts import TokenizerParts
from server.wire import CoreInfo, Start

NUM_WORDS = 1 << 16
TICKS = 10_000  # of a second; words come round every 6.5 seconds
EOS = NUM_WORDS
UNWATCHED = "unwatched"  # the first flag of a server without metrics
CAPACITY = KVCapacity(num_blocks=8192, block_size=16, num_slots=512, max_model_len=1024)


def tokenizer() -> Tokenizer:
    """Token i is the text `i` in four hexadecimal digits, and a comma."""
    pieces = [f"{number:04x}," for number in range(NUM_WORDS)] + ["<|eos|>"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    special = frozenset({EOS})
    return Tokenizer(
        TokenizerParts(
            backend=tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<|eos|>")),
            pieces=TokenPieces(
                pieces, spelling=Spelling.BYTE_LEVEL, literal_ids=special, special_ids=special
            ),
            bos=None,
            prefix=(),
            suffix=(),
            eos_token_ids=special,
            strips_first_space=False,
            chat_template=None,
        )
    )


class PacedEngine:
    """Steps of a fixed real length, on a grid if it can be kept, and nothing computed in them.

    Unlike engine/simulated.py it checks no KV: on 500 rows that alone would take most of a step.
    """

    def __init__(self, step_seconds: float) -> None:
        self.capacity = CAPACITY
        self._step_seconds = step_seconds
        self._ends = 0.0

    def submit(self, plan: StepPlan) -> PacedResult:
        now = time.monotonic()
        on_grid = self._ends + self._step_seconds
        self._ends = on_grid if on_grid > now else now + self._step_seconds
        word = (int(self._ends * TICKS) % NUM_WORDS,)
        rows = tuple([word if samples else () for samples in plan.samples])
        result = StepResult(plan.step, rows, device_seconds=self._step_seconds)
        return PacedResult(result, self._ends)


class PacedResult:
    def __init__(self, value: StepResult, ends: float) -> None:
        self._value = value
        self._ends = ends

    def result(self) -> StepResult:
        time.sleep(max(0.0, self._ends - time.monotonic()))
        return self._value


def run_core(step_seconds: float, arguments: list[str]) -> int:
    def build(start: Start, _report: Report) -> Core:
        engine = PacedEngine(step_seconds)
        info = CoreInfo(
            model_name="paced",
            max_model_len=CAPACITY.max_model_len,
            context_length=CAPACITY.max_model_len,
            vocab_size=NUM_WORDS + 1,
            eos_token_ids=(EOS,),
            capacity=CAPACITY,
            limits=start.limits,
            dtype="none",
            device="cpu",
            kernels="paced",
        )
        return Core(engine, start.limits, FirstComeFirstServed(), info, depth=1)

    return core_main(arguments, build)


def spawn(step_seconds: str) -> Callable[[int], subprocess.Popen[bytes]]:
    def start(descriptor: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.overhead.server", "core", step_seconds]
        return subprocess.Popen(
            [*command, str(descriptor), str(os.getpid()), "info,auto"],
            pass_fds=(descriptor,),
            stdout=2,
        )

    return start


class Uncounted(Count):
    def inc(self, amount: int = 1) -> None:
        """What a server without metrics does."""


class Unobserved(Distribution):
    def observe(self, value: float) -> None:
        """What a server without metrics does."""


class NoMetrics(Metrics):
    """For comparison: all series exist, and nothing that grows with tokens or steps is counted."""

    def _make_token_series(self) -> None:
        super()._make_token_series()
        self.generated_tokens = Uncounted("generated", "")
        self.itl = Unobserved("gaps", "", ())

    def observe_step(self, stats: StepStats) -> None: ...
    def observe_first_text(self, timings: Timings, request_id: str = "") -> None: ...
    def observe_end(
        self, timings: Timings, request_id: str = "", tpot_seconds: float | None = None
    ) -> None: ...


def main(step_seconds: str, flags: list[str]) -> int:
    if flags[0] == UNWATCHED:
        flags.pop(0)
        app.Metrics = NoMetrics  # type: ignore[misc]
    settings = parse_settings(flags, {})
    configure_logging(settings.server.log_level, settings.server.log_format)
    with bind("127.0.0.1", settings.server.port) as listener:
        print(listener.getsockname()[1], flush=True)
        return live(settings, listener, tokenizer(), spawn(step_seconds))


if __name__ == "__main__":
    if sys.argv[1] == "core":
        sys.exit(run_core(float(sys.argv[2]), sys.argv[3:]))
    sys.exit(main(sys.argv[1], ["--port", "0", *sys.argv[2:]]))
