"""The whole path that cuda takes, on the CPU in the interpreter: the tokens of the reference."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import engine.cuda_engine
from engine.attention.triton import partial_bytes
from engine.batch import Batch
from engine.cuda_engine import Limits, TritonSampling, make_sized_cuda_engine
from engine.cuda_graphs import bucket_sizes
from engine.cuda_runner import CudaRunner, pieces
from engine.gpu_linear import TritonLinear
from engine.kv_memory import kv_bytes_per_token
from engine.loading import LoadedModel, open_model
from engine.torch_engine import TorchEngine
from scheduler.types import FinishReason, KVCapacity, Request, SamplingParams
from server.config import DEFAULT_LIMITS, EngineConfig
from server.core_build import _build_cuda
from server.wire import Start
from tests.engine.test_torch_engine import (
    GREEDY,
    load_tiny,
    make_engine,
    random_prompt,
    serve,
)
from tests.support.gpu_linears import convert_linears

CPU = torch.device("cpu")
NUM_LAYERS = 3 if os.environ.get("KERNEL_TESTS") == "all" else 1  # `make test-kernels`
NUM_SLOTS, MAX_MODEL_LEN = 4, 64


class ReplayedWork:
    """Stands in for a CUDA graph: replay repeats the work on the same tensors."""

    def __init__(self) -> None:
        self.num_replays = 0

    def record(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        result = work()

        def replay() -> None:
            self.num_replays += 1
            result.copy_(work())

        return replay, result


class FailingRecorder:
    def record(self, _work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        raise RuntimeError("capture is not permitted")


def make_runner(model: LoadedModel, **options: object) -> CudaRunner:
    return CudaRunner(
        model.decoder,
        **{
            "num_blocks": 48,
            "block_size": 8,
            "dtype": torch.float32,
            "device": CPU,
            "max_rows": NUM_SLOTS,
            "max_model_len": MAX_MODEL_LEN,
            **options,
        },
    )


def make_cuda_path(model: LoadedModel, runner: CudaRunner) -> TorchEngine:
    return TorchEngine(
        model,
        device=CPU,
        dtype=torch.float32,
        capacity=KVCapacity(48, 8, NUM_SLOTS, MAX_MODEL_LEN),
        runner=runner,
        sampler_kernels=TritonSampling(),
    )


def requests(samplings: Sequence[SamplingParams]) -> list[Request]:
    """Prompts around block borders; they end at different steps."""
    return [
        Request(
            id=str(i),
            prompt=random_prompt((8, 1, 9, 30)[i], seed=i),
            max_tokens=(3, 8, 2, 3)[i],
            sampling=sampling,
        )
        for i, sampling in enumerate(samplings)
    ]


EVERY_SAMPLING = [
    SamplingParams(temperature=0.8, seed=42),
    replace(GREEDY, repetition_penalty=2.0, frequency_penalty=0.5),
    SamplingParams(temperature=1.2, top_p=0.9, seed=7),
    SamplingParams(top_k=5, min_p=0.05, seed=-3, presence_penalty=0.5, num_logprobs=2),
]
FAMILIES = {"llama": EVERY_SAMPLING, "qwen3": [GREEDY] * 4, "mistral-window": [GREEDY] * 4}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_tiny("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_overlap_and_kernels_give_the_tokens_of_the_reference(
    family: str, tmp_path: Path
) -> None:
    """Plain, with q/k norms, with a sliding window. Chunked prefills and decodes mixed, at depth 1,
    over graph buckets with padding rows.
    """
    model = load_tiny(family, tmp_path, num_hidden_layers=NUM_LAYERS)
    work = requests(FAMILIES[family])
    expected = serve(make_engine(model), work).answers
    recorder = ReplayedWork()
    runner = make_runner(model, recorder=recorder)
    served = serve(
        make_cuda_path(model, runner),
        work,
        depth=1,
        max_step_tokens=24,
        arrivals=lambda i: i // 3,
    )
    for name, answer in served.answers.items():
        assert answer.token_ids == expected[name].token_ids
        for ours, theirs in zip(answer.logprobs, expected[name].logprobs, strict=True):
            assert ours.token_id == theirs.token_id
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
    assert runner.graphs is not None
    assert runner.graphs.num_captured == len(bucket_sizes(NUM_SLOTS))
    assert recorder.num_replays > 0


def test_deterministic_mode_keeps_every_bit_in_any_company(tmp_path: Path) -> None:
    """Alone in one prefill; in a batch, cut into chunks: tokens and log-probabilities are equal."""
    model = load_tiny("qwen3", tmp_path, num_hidden_layers=1)
    convert_linears(model.decoder, "invariant", dtype=torch.float32)
    one, *mates = requests([replace(GREEDY, num_logprobs=2), GREEDY, GREEDY])
    one = replace(one, prompt=random_prompt(25, seed=9))
    alone = serve(make_cuda_path(model, make_runner(model, deterministic=True)), [one])
    runner = make_runner(model, deterministic=True, recorder=ReplayedWork())
    together = serve(
        make_cuda_path(model, runner), [mates[0], one, mates[1]], depth=1, max_step_tokens=9
    )
    assert together.answers[one.id].token_ids == alone.answers[one.id].token_ids
    assert together.answers[one.id].logprobs == alone.answers[one.id].logprobs


def test_converted_products_are_the_model(llama: LoadedModel, tmp_path: Path) -> None:
    """The CPU keeps its weights packed; what comes out of there are the weights that went in."""
    model = load_tiny("llama", tmp_path)
    x = torch.randn((3, 64), generator=torch.Generator().manual_seed(0))
    expected = llama.decoder.layers[0].qkv(x)
    convert_linears(model.decoder, "invariant", dtype=torch.float32)
    torch.testing.assert_close(model.decoder.layers[0].qkv(x), expected)
    assert isinstance(model.decoder.head, TritonLinear)


class ScriptedMemory:
    """Room for the weights, `step` bytes and 9.5 blocks of `block_bytes`."""

    def __init__(self, *, block_bytes: int, step: int, trial_blocks: int) -> None:
        self.size = 1000 + step + block_bytes * 19 // 2
        self.peak = 1000 + step + block_bytes * (trial_blocks + 1)

    def total(self) -> int:
        return self.size

    def used_by_others(self) -> int:
        return 0

    def reserved(self) -> int:
        return 1000

    def peak_reserved(self) -> int:
        return self.peak

    def reset_peak(self) -> None:
        pass


def test_the_engine_takes_the_blocks_that_a_trial_step_leaves(llama: LoadedModel) -> None:
    """The trial is a real one: the largest step with everything on. And the result serves."""
    block_bytes = 8 * kv_bytes_per_token(llama.config, torch.float32)
    block_bytes += 2 * partial_bytes(llama.config, num_tokens=8, deterministic=False)
    limits = Limits(block_size=8, num_slots=2, max_model_len=32, max_step_tokens=6)
    made, memory = make_sized_cuda_engine(
        llama,
        limits,
        device=CPU,
        dtype=torch.float32,
        memory=ScriptedMemory(block_bytes=block_bytes, step=777, trial_blocks=4),
        graphs=False,
    )
    assert (memory.step, memory.num_blocks) == (777, 8)
    assert made.capacity.num_blocks == 8
    work = [Request(id="0", prompt=(5, 6, 7), max_tokens=2, sampling=GREEDY)]
    assert serve(made, work).token_ids == serve(make_engine(llama), work).token_ids


def test_memory_that_went_since_the_trial_costs_blocks_and_not_the_start(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = engine.cuda_engine._made

    def cramped(model: LoadedModel, **options: Any) -> tuple[TorchEngine, CudaRunner]:
        if options["capacity"].num_blocks > 6:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return made(model, **options)

    monkeypatch.setattr(engine.cuda_engine, "_made", cramped)
    block_bytes = 8 * kv_bytes_per_token(llama.config, torch.float32)
    block_bytes += 2 * partial_bytes(llama.config, num_tokens=8, deterministic=False)
    built, plan = make_sized_cuda_engine(
        llama,
        Limits(block_size=8, num_slots=2, max_model_len=32, max_step_tokens=6),
        device=CPU,
        dtype=torch.float32,
        memory=ScriptedMemory(block_bytes=block_bytes, step=777, trial_blocks=4),
        graphs=False,
    )
    assert built.capacity.num_blocks == plan.num_blocks == 6


def test_a_capture_that_fails_leaves_eager_steps(llama: LoadedModel) -> None:
    work = [replace(request, max_tokens=3) for request in requests([GREEDY] * 2)]
    expected = serve(make_engine(llama), work)
    runner = make_runner(llama, recorder=FailingRecorder())
    assert serve(make_cuda_path(llama, runner), work).token_ids == expected.token_ids
    assert runner.graphs is not None
    assert runner.graphs.num_captured == 0


class CrampedRunner(CudaRunner):
    """Runs out of memory on more than `limit` tokens at once."""

    limit = 16

    def _eager(self, batch: Batch) -> Tensor:
        if len(batch.token_ids) > self.limit:
            raise torch.OutOfMemoryError("no memory")
        return super()._eager(batch)


def test_a_step_beyond_memory_is_computed_in_pieces(llama: LoadedModel) -> None:
    """Nobody fails and nobody notices: rows are cut, which changes no token."""
    work = [replace(request, max_tokens=2) for request in requests([GREEDY] * 4)]
    expected = serve(make_engine(llama), work)
    runner = CrampedRunner(
        llama.decoder,
        num_blocks=48,
        block_size=8,
        dtype=torch.float32,
        device=CPU,
        max_rows=4,
        max_model_len=MAX_MODEL_LEN,
    )
    assert serve(make_cuda_path(llama, runner), work).token_ids == expected.token_ids


def test_memory_that_is_short_for_the_smallest_piece_makes_smaller_steps(
    llama: LoadedModel,
) -> None:
    """Pieces end at 16 tokens; below them the scheduler has less in a step. Nobody fails."""
    work = [replace(request, max_tokens=2) for request in requests([GREEDY] * 3)]
    expected = serve(make_engine(llama), work)
    runner = CrampedRunner(
        llama.decoder,
        num_blocks=48,
        block_size=8,
        dtype=torch.float32,
        device=CPU,
        max_rows=4,
        max_model_len=MAX_MODEL_LEN,
    )
    runner.limit = 5
    served = serve(make_cuda_path(llama, runner), work)
    assert served.token_ids == expected.token_ids
    assert served.num_refused_steps > 0


def test_a_broken_token_in_a_prompt_fails_its_request(tmp_path: Path) -> None:
    """As in test_faulty_rows.py."""
    broken = load_tiny("llama", tmp_path)
    broken.decoder.embedding[7] = torch.nan
    good, bad = (
        Request(id=name, prompt=(*range(20, 30), token, *range(31, 41)), max_tokens=1)
        for name, token in (("good", 30), ("bad", 7))
    )
    runner = make_runner(broken)
    served = serve(make_cuda_path(broken, runner), [good, bad])
    assert served.answers["good"].reason is FinishReason.LENGTH
    assert served.answers["bad"].reason is FinishReason.ERROR


@pytest.mark.parametrize("max_tokens", [1, 3, 4, 7, 12, 100])
def test_pieces_cover_the_batch_in_order(max_tokens: int) -> None:
    starts, lengths = np.array([5, 0, 9, 2]), np.array([1, 7, 1, 3])
    batch = Batch(
        starts=starts,
        lengths=lengths,
        offsets=np.concatenate(([0], np.cumsum(lengths))),
        block_tables=np.arange(8, dtype=np.int32).reshape(4, 2),
        token_ids=torch.arange(12),
        positions=torch.cat([torch.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)]),
        kv_slots=torch.arange(12) + 100,
    )
    parts = pieces(batch, max_tokens)
    assert torch.equal(torch.cat([part.token_ids for part in parts]), batch.token_ids)
    for part in parts:
        assert 0 < len(part.token_ids) <= max_tokens
        assert (part.lengths > 0).all()
        assert part.offsets.tolist() == [0, *np.cumsum(part.lengths).tolist()]
        rows = [torch.arange(start, end) for start, end in zip(part.starts, part.ends, strict=True)]
        assert torch.equal(torch.cat(rows), part.positions)
    assert [row for part in parts for row in part.block_tables[:, 0].tolist()] == sorted(
        row for part in parts for row in part.block_tables[:, 0].tolist()
    )


def test_buckets_end_with_the_first_that_holds_every_row() -> None:
    assert bucket_sizes(1) == (1,)
    assert bucket_sizes(3) == (1, 2, 4)
    assert bucket_sizes(9) == (1, 2, 4, 8, 16)
    assert bucket_sizes(256)[-1] == bucket_sizes(1000)[-1] == 256


@pytest.mark.parametrize("deterministic", [False, True])
def test_server_builds_the_fused_engine_and_it_gives_the_reference_tokens(
    deterministic: bool, tmp_path: Path
) -> None:
    """What `paceline serve` does on cuda, with the KV budget given, on the interpreter's CPU."""
    model = load_tiny("llama", tmp_path, num_hidden_layers=1)
    config = EngineConfig(
        model=str(tmp_path), kv_memory=1 << 20, max_model_len=64, deterministic=deterministic
    )
    limits = replace(DEFAULT_LIMITS, max_running=2, max_step_tokens=32)
    start = Start(config, limits, model.config.vocab_size)
    built = _build_cuda(start, open_model(tmp_path), "cpu", lambda *_: None)
    request = Request("a", random_prompt(5, 1), 3, sampling=GREEDY)
    reference = make_engine(model, num_slots=2, max_model_len=64)
    assert serve(built.engine, [request]) == serve(reference, [request])
