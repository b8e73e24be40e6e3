"""A step without memory becomes smaller steps, or the end of one request; others notice nothing.

With the torch engine on the CPU and a runner that raises what a device out of memory raises.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.arrays import Ints
from engine.batch import Batch
from engine.loading import LoadedModel
from engine.step_result import PendingStep
from engine.torch_engine import TorchEngine, TorchRunner
from scheduler.loop import EngineFailed, OutOfMemory
from scheduler.types import FinishReason, Pooling, Request, StepPlan
from tests.engine.test_torch_engine import (
    CAPACITY,
    CPU,
    GREEDY,
    Answer,
    load_tiny,
    make_engine,
    mixed_requests,
    random_prompt,
    serve,
)
from tests.gpu.shapes import plan

# What says it: the allocator, a library, the driver and the CPU's allocator.
ERRORS = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
)


class ShortRunner(TorchRunner):
    """Raises where it is told to, after the layers have written their KV, or instead of logits."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        layers: Callable[[int, Batch], bool] = lambda _step, _batch: False,
        head: Callable[[int, int], bool] = lambda _step, _rows: False,
    ) -> None:
        super().__init__(
            model.decoder, num_blocks=128, block_size=8, dtype=torch.float32, device=CPU
        )
        self._layers, self._head = layers, head
        self.step = self.num_raised = 0

    def forward(self, batch: Batch, outputs: Ints) -> Tensor:
        self.step += 1
        hidden = super().forward(batch, outputs)
        self._maybe_raise(self._layers(self.step, batch))
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        self._maybe_raise(self._head(self.step, len(hidden)))
        return super().logits(hidden)

    def _maybe_raise(self, is_short: bool) -> None:
        if is_short:
            self.num_raised += 1
            raise ERRORS[self.num_raised % len(ERRORS)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_tiny("llama", tmp_path_factory.mktemp("llama"))


def requests() -> list[Request]:
    """Every sampling, log-probabilities of prompts, and a mean over a prompt."""
    scored = replace(GREEDY, prompt_logprobs=1, num_logprobs=1)
    pooled = replace(GREEDY, pooling=Pooling.MEAN)
    return [
        *(replace(request, max_tokens=5) for request in mixed_requests()[:5]),
        Request("scored", random_prompt(20, seed=50), 4, sampling=scored),
        Request("pooled", random_prompt(15, seed=51), 0, sampling=pooled),
    ]


@pytest.fixture(scope="module")
def undisturbed(model: LoadedModel) -> dict[str, Answer]:
    return serve(make_engine(model), requests()).answers


SHORTAGES = {
    "now and then": {"layers": lambda step, _: step in (3, 10, 11, 30)},
    "when logits are made": {"head": lambda step, _: step in (2, 9, 25)},
    "more than 20 tokens": {"layers": lambda _, batch: len(batch.token_ids) > 20},
    "more than one row": {"layers": lambda _, batch: len(batch.lengths) > 1},
    "logits of more than 2 rows": {"head": lambda _, rows: rows > 2},
}


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("shortage", SHORTAGES.values(), ids=SHORTAGES.keys())
def test_nobody_fails_and_every_answer_is_the_same(
    model: LoadedModel,
    shortage: dict[str, Callable[..., bool]],
    depth: int,
    undisturbed: dict[str, Answer],
) -> None:
    runner = ShortRunner(model, **shortage)
    served = serve(
        make_engine(model, runner=runner), requests(), depth=depth, arrivals=lambda i: i // 4
    )
    assert served.num_refused_steps == runner.num_raised > 0
    for name, expected in undisturbed.items():
        answer = served.answers[name]
        assert answer.reason is FinishReason.LENGTH, answer.message
        assert answer.token_ids == expected.token_ids, name
        assert answer.logprobs == expected.logprobs, name
        assert answer.prompt_logprobs == expected.prompt_logprobs, name
        assert answer.pooled == expected.pooled, name


class HeavyEngine(TorchEngine):
    """Has no memory for a step with a row of the request `heavy`."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        submit = self._steps.submit

        def checked(plan: StepPlan) -> PendingStep:
            if not self.has_memory(plan):
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return submit(plan)

        self._steps.submit = checked

    @staticmethod
    def has_memory(plan: StepPlan) -> bool:
        return "heavy" not in plan.seq_ids


@pytest.mark.parametrize("depth", [0, 1])
def test_the_smallest_row_alone_fails_alone(
    model: LoadedModel, depth: int, undisturbed: dict[str, Answer]
) -> None:
    """The server gets rid of what fits nowhere; its batch mates come to their ends."""
    engine = HeavyEngine(model=model, device=CPU, dtype=torch.float32, capacity=CAPACITY)
    heavy = Request("heavy", random_prompt(30, seed=77), 5, sampling=GREEDY)
    everyone = [*requests()[:3], heavy, *requests()[3:]]
    served = serve(engine, everyone, depth=depth)
    answer = served.answers.pop("heavy")
    assert answer.reason is FinishReason.ERROR
    assert "no memory left for this request" in answer.message
    for name, expected in undisturbed.items():
        assert served.answers[name].reason is FinishReason.LENGTH
        assert served.answers[name].token_ids == expected.token_ids, name


def test_where_nothing_fits_each_request_ends_with_an_error(model: LoadedModel) -> None:
    """The loop does not spin, and the engine serves the next when there is memory."""

    class FullEngine(HeavyEngine):
        @staticmethod
        def has_memory(plan: StepPlan) -> bool:
            return plan.seq_ids == ("late",)

    engine = FullEngine(model=model, device=CPU, dtype=torch.float32, capacity=CAPACITY)
    late = Request("late", random_prompt(9, seed=1), 3, sampling=GREEDY)
    served = serve(engine, [*requests()[:6], late])
    reasons = {name: answer.reason for name, answer in served.answers.items()}
    assert reasons.pop("late") is FinishReason.LENGTH
    assert set(reasons.values()) == {FinishReason.ERROR}


def test_another_error_of_a_step_is_none_of_memory(model: LoadedModel) -> None:
    class Broken(TorchRunner):
        def forward(self, batch: Batch, outputs: Ints) -> Tensor:
            rows, tokens = len(batch.lengths), len(outputs)
            raise RuntimeError(f"shape mismatch in {tokens} tokens of {rows} rows")

    runner = Broken(model.decoder, num_blocks=128, block_size=8, dtype=torch.float32, device=CPU)
    with pytest.raises(EngineFailed, match="shape mismatch"):
        serve(make_engine(model, runner=runner), requests()[:1])


@pytest.mark.parametrize("error", ERRORS, ids=range(len(ERRORS)))
def test_the_engine_holds_nothing_of_the_step_it_gave_up(
    model: LoadedModel, error: Exception
) -> None:
    """The tensors of the attempt are gone before the next, or that would not fit either."""
    held: list[weakref.ref[Tensor]] = []

    class Holding(TorchRunner):
        def forward(self, batch: Batch, outputs: Ints) -> Tensor:
            hidden = super().forward(batch, outputs)
            held.append(weakref.ref(hidden))
            raise type(error)(str(error))

    runner = Holding(model.decoder, num_blocks=128, block_size=8, dtype=torch.float32, device=CPU)
    with pytest.raises(OutOfMemory) as caught:
        make_engine(model, runner=runner).submit(plan([0], [5], block_size=8))
    assert caught.value.__context__ is None
    assert [ref() for ref in held] == [None]
