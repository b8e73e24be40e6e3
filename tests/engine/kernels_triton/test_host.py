"""The host never waits within a step, and a layer is ten launches: seen on the meta device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.cuda_engine import TritonSampling
from engine.cuda_graphs import bucket_sizes
from engine.cuda_runner import CudaRunner
from engine.torch_engine import TorchEngine
from scheduler.types import KVCapacity, SamplingParams
from tests.gpu.counting import META, LiveBytes, counted
from tests.gpu.shapes import MODELS, plan, random_model

GREEDY = SamplingParams(temperature=0.0)
EVERYTHING = SamplingParams(
    temperature=0.7,
    top_p=0.9,
    top_k=40,
    min_p=0.05,
    presence_penalty=0.1,
    repetition_penalty=1.1,
    logit_bias=((3, 1.0),),
    allowed_token_ids=(1, 2, 3, 4),
    bad_words=((1,), (2, 3)),
    min_tokens=4,
    num_logprobs=2,
    prompt_logprobs=1,
)


class RecordedWork:
    """Stands in for a CUDA graph: nothing is left to launch at replay."""

    def record(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        return (lambda: None), work()


def engine_on_meta(name: str, recorder: RecordedWork | None = None) -> TorchEngine:
    model = random_model(MODELS[name], dtype=torch.bfloat16, device=META, max_positions=4096)
    sizes = {"num_blocks": 512, "block_size": 16}
    runner = CudaRunner(
        model.decoder,
        **sizes,
        dtype=torch.bfloat16,
        device=META,
        max_rows=8,
        max_model_len=2048,
        recorder=recorder,
    )
    return TorchEngine(
        model,
        device=META,
        dtype=torch.bfloat16,
        capacity=KVCapacity(**sizes, num_slots=8, max_model_len=2048),
        runner=runner,
        sampler_kernels=TritonSampling(),
    )


def launches(counts: Counter[str]) -> int:
    return sum(count for name, count in counts.items() if name != "upload")


@pytest.mark.parametrize("sampling", [GREEDY, EVERYTHING])
def test_no_step_waits_for_the_device(sampling: SamplingParams) -> None:
    """Prefill, mixed and decode steps, with every feature of the sampler."""
    with counted():
        engine = engine_on_meta("tiny")
        engine.submit(plan([0, 0], [700, 1], block_size=16, sampling=sampling))
        engine.submit(plan([700, 1], [1, 30], block_size=16))
        engine.submit(plan([701, 31], [1, 1], block_size=16))


def test_captures_and_replays_do_not_wait_either_and_leave_few_launches() -> None:
    """Beside the graph: its inputs, the logits, the greedy choice and the token's place."""
    with counted() as counts:
        engine = engine_on_meta("tiny", RecordedWork())
        engine.submit(plan([5, 9], [1, 1], block_size=16, sampling=GREEDY))
        for _ in bucket_sizes(8):
            engine.submit(plan([6, 10], [1, 1], block_size=16))
        counts.clear()
        engine.submit(plan([6, 10], [1, 1], block_size=16))
        assert counts["attention_kernel"] == 0
        assert launches(counts) <= 16


def test_live_bytes_are_what_is_held_at_once() -> None:
    with LiveBytes() as live:
        kept = torch.zeros(1000, device=META)  # 4,000 bytes in units of 512
        for _ in range(5):
            del_at_once = torch.zeros(2048, dtype=torch.int8, device=META)
            del del_at_once
        view = kept.view(10, 100)
        view.add_(1)
    assert live.peak == 4096 + 2048


def test_a_wait_would_be_seen() -> None:
    with counted(), pytest.raises(RuntimeError):
        torch.zeros(1, device=META).item()
    with counted(), pytest.raises((RuntimeError, NotImplementedError)):
        torch.zeros(3, device=META)[torch.zeros(3, dtype=torch.bool, device=META)]


def test_a_decode_step_launches_ten_kernels_a_layer() -> None:
    counts_by_layers = []
    for num_layers in (1, 3):
        config = replace(MODELS["tiny"], num_layers=num_layers, layer_windows=(None,) * num_layers)
        MODELS["changed"] = config
        try:
            with counted() as counts:
                engine = engine_on_meta("changed")
                engine.submit(plan([5, 9], [1, 1], block_size=16, sampling=GREEDY))
                counts.clear()
                engine.submit(plan([6, 10], [1, 1], block_size=16))
                counts_by_layers.append(launches(counts))
        finally:
            del MODELS["changed"]
    assert counts_by_layers[1] - counts_by_layers[0] == 2 * 10
