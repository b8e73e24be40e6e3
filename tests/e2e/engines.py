"""The default model in both CPU engines, and a way to serve requests on them without a server."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from engine.default_model import find_default_model
from engine.errors import ModelFileError
from engine.loading import LoadedModel, load_weights, open_model
from engine.native_cpu import NativeOptions, refusal
from engine.native_runner import load_native, native_engine, native_file
from engine.torch_engine import TorchEngine
from scheduler.limits import SchedulerLimits
from scheduler.loop import Engine, ServingLoop
from scheduler.policy import FirstComeFirstServed
from scheduler.scheduler import Scheduler
from scheduler.types import (
    Command,
    Drain,
    Event,
    Finished,
    FinishReason,
    KVCapacity,
    Request,
    StepStats,
    Submit,
    Tokens,
)

CPU = torch.device("cpu")
BLOCK_SIZE = 16
MAX_MODEL_LEN = 512
MAX_RUNNING = 32
MAX_STEP_TOKENS = 512


def default_model_path() -> Path:
    """Skips the test where the package with the model is not installed."""
    try:
        return find_default_model()
    except ModelFileError as error:
        pytest.skip(str(error))


@functools.cache
def _torch_model(path: Path) -> LoadedModel:
    return load_weights(open_model(path), dtype=torch.float32, device=CPU)


def make_engine(kind: str, *, num_blocks: int) -> Engine:
    """`kind`: reference, all of it in torch with float32, or native, perhaps with int16 KV."""
    path = default_model_path()
    capacity = KVCapacity(num_blocks, BLOCK_SIZE, MAX_RUNNING, MAX_MODEL_LEN)
    if kind == "reference":
        model = _torch_model(path)
        return TorchEngine(model, device=CPU, dtype=torch.float32, capacity=capacity)
    file = native_file(open_model(path))
    if reason := refusal(file.config):
        pytest.skip(reason)
    options = NativeOptions(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        max_step_tokens=MAX_STEP_TOKENS,
        kv_type="int16" if "int16" in kind else "int8",
        num_threads=1,  # the answers of any number are the same bits
    )
    return native_engine(load_native(file, options), capacity=capacity)


@dataclass
class Served:
    """Token ids by request, and how they came about."""

    token_ids: dict[str, list[int]] = field(default_factory=dict)
    reasons: dict[str, FinishReason] = field(default_factory=dict)
    num_steps: int = 0
    num_preemptions: int = 0
    prefix_hits: int = 0
    most_running: int = 0


class _Rounds:
    """Hands out one list of commands whenever the loop has nothing left to do."""

    def __init__(self, rounds: Sequence[list[Command]]) -> None:
        self._rounds = list(rounds)

    def take(self, *, block: bool) -> list[Command]:
        assert self._rounds or not block, "the loop waits for a command that never comes"
        return self._rounds.pop(0) if block else []


def serve(
    engine: Engine,
    *rounds: Sequence[Request],
    depth: int = 0,
    max_chunk_tokens: int | None = None,
    watermark_blocks: int = 1,
    prefix_caching: bool = False,
) -> Served:
    """Rounds of requests through the real scheduler and loop, each after the one before it.

    Those of a round come at once. Every request must end once, and no block may be lost.
    """
    limits = SchedulerLimits(
        max_step_tokens=MAX_STEP_TOKENS,
        max_waiting=1000,
        max_running=MAX_RUNNING,
        watermark_blocks=watermark_blocks,
        prefix_caching=prefix_caching,
        max_chunk_tokens=max_chunk_tokens,
    )
    scheduler = Scheduler(engine.capacity, limits, FirstComeFirstServed())
    served = Served({request.id: [] for requests in rounds for request in requests})

    def emit(events: list[Event]) -> None:
        for event in events:
            match event:
                case Tokens():
                    served.token_ids[event.request_id] += event.token_ids
                case Finished():
                    assert event.request_id not in served.reasons, "ended twice"
                    assert event.reason is not FinishReason.ERROR, event.message
                    served.reasons[event.request_id] = event.reason
                    served.num_preemptions += event.num_preemptions
                case StepStats():
                    served.num_steps += 1
                    served.prefix_hits += event.prefix_hits
                    served.most_running = max(served.most_running, event.num_running)

    commands: list[list[Command]] = [[Submit((request,)) for request in one] for one in rounds]
    commands[-1].append(Drain())
    ServingLoop(scheduler, engine, _Rounds(commands), emit, lambda: 0.0, depth).run()
    assert served.reasons.keys() == served.token_ids.keys()
    assert scheduler.stats().num_blocks_used == 0
    return served
