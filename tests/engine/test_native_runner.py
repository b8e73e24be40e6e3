"""The native kernels behind a TorchEngine: the same answers as the torch reference."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.kernels.cpu.library import available_tiers
from engine.loading import load_weights, open_model
from engine.native_cpu import NativeOptions
from engine.native_runner import load_native, native_engine, native_file
from engine.torch_engine import TorchEngine
from scheduler.limits import SchedulerLimits
from scheduler.loop import Engine
from scheduler.policy import FirstComeFirstServed
from scheduler.scheduler import Scheduler
from scheduler.types import KVCapacity, Request, SamplingParams, Submit, TokenLogprobs, Tokens
from tests.support.models import VOCAB_SIZE, save_tiny_model, tiny_model, write_gguf

pytestmark = pytest.mark.skipif(
    not available_tiers(), reason="the native kernels are not built here"
)

CPU = torch.device("cpu")
CAPACITY = KVCapacity(num_blocks=24, block_size=16, num_slots=4, max_model_len=128)
LIMITS = SchedulerLimits(max_step_tokens=24, max_waiting=8, max_running=4, watermark_blocks=0)
GREEDY = SamplingParams(temperature=0.0, num_logprobs=2)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    save_tiny_model("qwen3", directory)
    return directory


def native(path: Path) -> Engine:
    file = native_file(open_model(path))
    options = NativeOptions(
        num_blocks=24,
        block_size=16,
        max_model_len=128,
        max_step_tokens=32,
        num_threads=1,
        kv_type="float32",
    )
    return native_engine(load_native(file, options), capacity=CAPACITY)


def reference(path: Path) -> TorchEngine:
    model = load_weights(open_model(path), dtype=torch.float32, device=CPU)
    return TorchEngine(model, device=CPU, dtype=torch.float32, capacity=CAPACITY)


def answers(engine: Engine, requests: list[Request]) -> dict[str, list[Tokens]]:
    scheduler = Scheduler(engine.capacity, LIMITS, FirstComeFirstServed())
    found: dict[str, list[Tokens]] = {request.id: [] for request in requests}
    for request in requests:
        scheduler.handle(Submit((request,)), now=0.0)
    while (plan := scheduler.schedule(0.0)) is not None:
        for event in scheduler.apply(plan, engine.submit(plan).result(), 0.0):
            if isinstance(event, Tokens):
                found[event.request_id].append(event)
    return found


def prompt(length: int, seed: int) -> tuple[int, ...]:
    return tuple((seed * 31 + i * 7) % (VOCAB_SIZE - 3) + 3 for i in range(length))


def requests() -> list[Request]:
    return [Request(f"r{i}", prompt(5 + 13 * i, i), 12, sampling=GREEDY) for i in range(5)]


def tokens_of(events: list[Tokens]) -> list[int]:
    return [token for event in events for token in event.token_ids]


def assert_close(ours: list[TokenLogprobs], theirs: list[TokenLogprobs]) -> None:
    assert [entry.token_id for entry in ours] == [entry.token_id for entry in theirs]
    mine = [entry.logprob for entry in ours]
    assert mine == pytest.approx([entry.logprob for entry in theirs], abs=1e-4)


def test_native_answers_equal_the_reference_in_chunks_and_batches(path: Path) -> None:
    ours, theirs = answers(native(path), requests()), answers(reference(path), requests())
    for name, events in theirs.items():
        assert tokens_of(ours[name]) == tokens_of(events)
        assert_close(
            [entry for event in ours[name] for entry in event.logprobs],
            [entry for event in events for entry in event.logprobs],
        )


def test_native_prompt_logprobs_equal_the_reference(path: Path) -> None:
    sampling = replace(GREEDY, prompt_logprobs=1)
    asked = [replace(request, sampling=sampling) for request in requests()[1:4]]
    # Some rows of a step want them, others do not.
    asked += requests()[:1]
    ours, theirs = answers(native(path), asked), answers(reference(path), asked)
    for name, events in theirs.items():
        assert tokens_of(ours[name]) == tokens_of(events)
        expected = [entry for event in events for entry in event.prompt_logprobs]
        assert_close([entry for event in ours[name] for entry in event.prompt_logprobs], expected)
        length = next(len(request.prompt) for request in asked if request.id == name)
        assert len(expected) == (0 if name == "r0" else length - 1)


def test_native_engine_of_a_gguf_file_needs_no_torch(tmp_path: Path) -> None:
    """With every feature of the sampler on: the warm-up has them all."""
    path = tmp_path / "tiny.gguf"
    write_gguf(tiny_model("llama", hidden_size=128, head_dim=32), path)
    program = f"""
import sys
sys.modules["torch"] = None
from server.core_build import build_core, import_libraries
from server.config import DEFAULT_LIMITS, EngineConfig
from server.wire import Start
import_libraries()
config = EngineConfig(model={str(path)!r}, device="cpu", kv_memory=10_000_000)
core = build_core(Start(config, DEFAULT_LIMITS, 100), lambda *_: None)
assert core.info.kernels == "native"
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_native_answers_do_not_depend_on_batch_mates(path: Path) -> None:
    together = answers(native(path), requests())
    for request in requests():
        alone = answers(native(path), [request])
        assert tokens_of(alone[request.id]) == tokens_of(together[request.id])
