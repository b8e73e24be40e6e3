"""TorchEngine under the real scheduler: the same answers however a sequence is served."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from torch import Tensor

from engine.arrays import Ints
from engine.batch import Batch
from engine.loading import LoadedModel, load_weights, open_model
from engine.torch_engine import TorchEngine, TorchRunner
from scheduler.limits import SchedulerLimits
from scheduler.loop import ServingLoop
from scheduler.policy import FirstComeFirstServed
from scheduler.scheduler import Scheduler
from scheduler.types import (
    Abort,
    Command,
    Drain,
    Event,
    Finished,
    FinishReason,
    KVCapacity,
    Request,
    SamplingParams,
    StepStats,
    Submit,
    TokenLogprobs,
    Tokens,
)
from tests.support.models import VOCAB_SIZE, dense_logits, save_tiny_model

CPU = torch.device("cpu")
CAPACITY = KVCapacity(num_blocks=128, block_size=8, num_slots=32, max_model_len=256)
GREEDY = SamplingParams(temperature=0.0)


def load_tiny(family: str, directory: Path, **changes: object) -> LoadedModel:
    save_tiny_model(family, directory, **changes)
    return load_weights(open_model(directory), dtype=torch.float32, device=CPU)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_tiny("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_tiny("mistral-window", tmp_path_factory.mktemp("mistral"))


def make_engine(
    model: LoadedModel,
    *,
    runner: TorchRunner | None = None,
    vocab_limit: int | None = None,
    **sizes: int,
) -> TorchEngine:
    return TorchEngine(
        model,
        device=CPU,
        dtype=torch.float32,
        capacity=replace(CAPACITY, **sizes),
        runner=runner,
        vocab_limit=vocab_limit,
    )


class ObservedRunner(TorchRunner):
    """Notes how many tokens and rows of logits a step has; token `poison` turns to NaN."""

    def __init__(self, model: LoadedModel, poison: int = -1) -> None:
        super().__init__(
            model.decoder, num_blocks=128, block_size=8, dtype=torch.float32, device=CPU
        )
        self.num_logit_rows: list[int] = []
        self.num_tokens: list[int] = []
        self._poison = poison

    def forward(self, batch: Batch, outputs: Ints) -> Tensor:
        self.num_tokens.append(len(batch.token_ids))
        hidden = super().forward(batch, outputs)
        hidden[batch.token_ids[outputs] == self._poison] = torch.nan
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        self.num_logit_rows.append(len(hidden))
        return super().logits(hidden)


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    reason: FinishReason | None = None
    message: str = ""
    num_preemptions: int = 0
    pooled: bytes = b""


@dataclass
class Served:
    answers: dict[str, Answer]
    prefix_hits: int = 0
    num_refused_steps: int = 0

    @property
    def token_ids(self) -> dict[str, list[int]]:
        return {name: answer.token_ids for name, answer in self.answers.items()}


class ScriptedInbox:
    """Hands out one list of commands a turn."""

    def __init__(self, turns: Iterable[list[Command]]) -> None:
        self._turns = iter(turns)

    def take(self, *, block: bool) -> list[Command]:
        commands = next(self._turns, None)
        assert commands is not None or not block, "the loop waits for a command that never comes"
        return commands or []


def serve(
    engine: TorchEngine,
    requests: Sequence[Request],
    *,
    depth: int = 0,
    max_step_tokens: int = 256,
    arrivals: Callable[[int], int] = lambda _: 0,
    aborts: Mapping[int, tuple[str, ...]] = MappingProxyType({}),
    watermark_blocks: int = 1,
) -> Served:
    """All requests through scheduler and loop; request i arrives in turn arrivals(i).

    `aborts`: by turn, which requests to end.
    """
    limits = SchedulerLimits(
        max_step_tokens=max_step_tokens,
        max_waiting=1000,
        max_running=engine.capacity.num_slots,
        watermark_blocks=watermark_blocks,
    )
    scheduler = Scheduler(engine.capacity, limits, FirstComeFirstServed())
    turns: dict[int, list[Command]] = {}
    for index, request in enumerate(requests):
        turns.setdefault(arrivals(index), []).append(Submit((request,)))
    for turn, names in aborts.items():
        turns.setdefault(turn, []).append(Abort(names))
    turns.setdefault(max(turns), []).append(Drain())
    served = Served({request.id: Answer() for request in requests})

    def emit(events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Tokens):
                answer = served.answers[event.request_id]
                answer.token_ids.extend(event.token_ids)
                answer.logprobs.extend(event.logprobs)
                answer.prompt_logprobs.extend(event.prompt_logprobs)
                answer.pooled += event.pooled
            elif isinstance(event, Finished):
                answer = served.answers[event.request_id]
                assert answer.reason is None
                answer.reason, answer.message = event.reason, event.message
                answer.num_preemptions = event.num_preemptions
            elif isinstance(event, StepStats):
                served.prefix_hits += event.prefix_hits
                served.num_refused_steps += event.num_refused_steps

    inbox = ScriptedInbox(turns.get(turn, []) for turn in range(max(turns) + 1))
    ticks = itertools.count()
    loop = ServingLoop(scheduler, engine, inbox, emit, lambda: next(ticks) * 1e-3, depth)
    loop.run()
    assert scheduler.stats().num_blocks_used == 0
    return served


def random_prompt(length: int, seed: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(VOCAB_SIZE) for _ in range(length))


def mixed_requests() -> list[Request]:
    """Greedy, seeded, penalised, biased; lengths around block borders."""
    samplings = [
        GREEDY,
        SamplingParams(temperature=0.8, seed=42),
        replace(GREEDY, repetition_penalty=2.0),
        SamplingParams(temperature=1.2, top_p=0.9, seed=7),
        SamplingParams(temperature=1.0, top_k=5, min_p=0.05, seed=-3, presence_penalty=0.5),
        replace(GREEDY, frequency_penalty=1.0, logit_bias=((3, 4.0), (5, -100.0))),
        SamplingParams(temperature=2.0, seed=2**63 + 11, num_logprobs=3),
    ]
    lengths = [1, 7, 8, 9, 33, 64, 90]
    shared = random_prompt(40, seed=99)
    requests = []
    for index in range(14):
        length = lengths[index % 7]
        own = random_prompt(length, seed=index)
        requests.append(
            Request(
                id=f"r{index}",
                prompt=shared + own if index % 3 == 0 else own,
                max_tokens=5 + 4 * (index % 4),
                sampling=samplings[(index * 5) % 7],
            )
        )
    return requests


def alone(model: LoadedModel, requests: Sequence[Request]) -> dict[str, Answer]:
    return {r.id: serve(make_engine(model), [r]).answers[r.id] for r in requests}


WAYS: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "batch": ({}, {}),
    "batch in reverse slots": ({"num_slots": 14}, {"arrivals": lambda i: (13 - i) // 3}),
    "chunks of 16": ({}, {"max_step_tokens": 16}),
    "chunks of 5, arriving one by one": ({}, {"max_step_tokens": 5, "arrivals": lambda i: 2 * i}),
    "preempted": ({"num_blocks": 20}, {"watermark_blocks": 0}),
    "three slots": ({"num_slots": 3}, {}),
    "blocks of 1": ({"block_size": 1, "num_blocks": 1200}, {}),
    "blocks of 32": ({"block_size": 32}, {}),
}


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_the_same_answer_however_it_is_served(
    model: LoadedModel,
    way: tuple[dict[str, int], dict[str, object]],
    depth: int,
    answers_alone: dict[str, Answer],
) -> None:
    """B082 B083 B088: greedy and seeded tokens, and logprobs to the last bit."""
    engine_options, serve_options = way
    served = serve(
        make_engine(model, **engine_options), mixed_requests(), depth=depth, **serve_options
    )
    for name, expected in answers_alone.items():
        answer = served.answers[name]
        assert answer.token_ids == expected.token_ids, name
        assert answer.logprobs == expected.logprobs, name
        assert answer.reason is FinishReason.LENGTH
    if engine_options.get("num_blocks") == 20:
        assert sum(answer.num_preemptions for answer in served.answers.values()) > 0


@pytest.fixture(scope="module")
def answers_alone(model: LoadedModel) -> dict[str, Answer]:
    return alone(model, mixed_requests())


@pytest.mark.parametrize("depth", [0, 1])
def test_cached_prefix_gives_the_cold_answer(
    model: LoadedModel, depth: int, answers_alone: dict[str, Answer]
) -> None:
    requests = mixed_requests()
    again = [replace(request, id=request.id + "-again") for request in requests]
    served = serve(
        make_engine(model),
        requests + again,
        depth=depth,
        arrivals=lambda i: 0 if i < len(requests) else 60,
    )
    assert served.prefix_hits > 0
    for name, expected in answers_alone.items():
        assert served.answers[name].token_ids == expected.token_ids
        assert served.answers[name + "-again"].token_ids == expected.token_ids


def greedy_by_dense(model: LoadedModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(dense_logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def test_greedy_equals_the_dense_model(model: LoadedModel) -> None:
    requests = [
        Request(id=str(length), prompt=random_prompt(length, length), max_tokens=6, sampling=GREEDY)
        for length in (1, 8, 30, 100)
    ]
    served = serve(make_engine(model), requests, max_step_tokens=24, depth=1)
    for request in requests:
        expected = greedy_by_dense(model, request.prompt, 6)
        assert served.answers[request.id].token_ids == expected


@pytest.mark.parametrize("max_step_tokens", [3, 256])
def test_sliding_window_equals_the_dense_model(windowed: LoadedModel, max_step_tokens: int) -> None:
    """B113: prompts of W-1, W, W+1, 3W; chunked or not, decode over the border, twice."""
    window = windowed.config.layer_windows[0]
    assert window == 7
    engine = make_engine(windowed, block_size=4)
    for length in (window - 1, window, window + 1, 3 * window):
        request = Request(
            id="a", prompt=random_prompt(length, length), max_tokens=2 * window, sampling=GREEDY
        )
        expected = greedy_by_dense(windowed, request.prompt, 2 * window)
        pair = [request, replace(request, id="b")]
        served = serve(engine, pair, max_step_tokens=max_step_tokens, arrivals=lambda i: 20 * i)
        assert served.token_ids == {"a": expected, "b": expected}


def expected_prompt_logprobs(model: LoadedModel, prompt: Sequence[int]) -> Tensor:
    table = dense_logits(model, prompt).double().log_softmax(-1)
    return table[:-1].gather(1, torch.tensor(prompt)[1:, None])[:, 0]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("max_step_tokens", [11, 256])
@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_prompt_logprobs_equal_a_full_forward_pass(
    model: LoadedModel, max_tokens: int, max_step_tokens: int, depth: int
) -> None:
    """B080: also for max_tokens 0, and the second time, when the prefix is cached."""
    prompt = random_prompt(50, seed=3)
    sampling = replace(GREEDY, num_logprobs=0, prompt_logprobs=2, logit_bias=((1, 30.0),))
    requests = [
        Request(id=name, prompt=prompt, max_tokens=max_tokens, sampling=sampling) for name in "abc"
    ]
    served = serve(
        make_engine(model),
        requests,
        depth=depth,
        max_step_tokens=max_step_tokens,
        arrivals=lambda i: 30 * (i // 2),
    )
    expected = expected_prompt_logprobs(model, prompt)
    dense = dense_logits(model, prompt)
    for answer in served.answers.values():
        assert [entry.token_id for entry in answer.prompt_logprobs] == list(prompt[1:])
        ours = torch.tensor([entry.logprob for entry in answer.prompt_logprobs]).double()
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)
        for entry, row in zip(answer.prompt_logprobs, dense, strict=False):
            assert [token for token, _ in entry.top] == row.topk(2).indices.tolist()
        assert len(answer.token_ids) == len(answer.logprobs) == max_tokens
        assert answer == served.answers["a"]


def test_prompt_logprobs_never_hold_more_logits_than_the_cap(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B041: memory is bounded by the cap, not by prompt x vocabulary."""
    monkeypatch.setattr("engine.prompt_scores.MAX_LOGITS", 10 * VOCAB_SIZE + 1)
    runner = ObservedRunner(model)
    engine = make_engine(model, runner=runner)
    prompt = random_prompt(95, seed=4)
    request = Request(
        id="a", prompt=prompt, max_tokens=1, sampling=replace(GREEDY, prompt_logprobs=20)
    )
    answer = serve(engine, [request]).answers["a"]
    assert max(runner.num_logit_rows) == 10
    ours = torch.tensor([entry.logprob for entry in answer.prompt_logprobs]).double()
    torch.testing.assert_close(ours, expected_prompt_logprobs(model, prompt), rtol=0, atol=1e-5)


def test_head_runs_only_for_rows_that_sample(model: LoadedModel) -> None:
    runner = ObservedRunner(model)
    engine = make_engine(model, runner=runner)
    request = Request(id="a", prompt=random_prompt(40, 1), max_tokens=3, sampling=GREEDY)
    serve(engine, [request], max_step_tokens=16)
    assert runner.num_logit_rows == [1, 1, 1]


def test_padded_vocabulary_is_never_sampled(model: LoadedModel) -> None:
    """B026: nor does it appear among the logprobs; a prompt may hold such an id."""
    limit = 100
    sampling = SamplingParams(
        temperature=2.0,
        num_logprobs=20,
        prompt_logprobs=20,
        logit_bias=tuple((token, 50.0) for token in range(limit, VOCAB_SIZE)),
    )
    requests = [
        Request(
            id=str(seed),
            prompt=(5, limit + 3, 9),
            max_tokens=40,
            sampling=replace(sampling, seed=seed, repetition_penalty=1.1 + seed * 0.1),
            stop_token_ids=(limit + 4,),
        )
        for seed in range(4)
    ]
    served = serve(make_engine(model, vocab_limit=limit), requests)
    for answer in served.answers.values():
        assert len(answer.token_ids) == 40
        assert max(answer.token_ids) < limit
        for entry in answer.logprobs + answer.prompt_logprobs:
            assert len(entry.top) == 20
            assert max(token for token, _ in entry.top) < limit
        assert answer.prompt_logprobs[0].logprob == -torch.inf


def test_sequence_may_fill_the_last_position(model: LoadedModel) -> None:
    engine = make_engine(model, max_model_len=24, num_blocks=3)
    request = Request(id="a", prompt=random_prompt(20, 1), max_tokens=4, sampling=GREEDY)
    assert len(serve(engine, [request], depth=1).answers["a"].token_ids) == 4


@pytest.mark.parametrize("max_step_tokens", [8, 200, 2000])
def test_warm_up_leaves_no_trace(
    model: LoadedModel, max_step_tokens: int, answers_alone: dict[str, Answer]
) -> None:
    """B136: it runs the largest step and the answers stay what they were."""
    engine = make_engine(model)
    engine.warm_up(max_step_tokens=max_step_tokens)
    served = serve(engine, mixed_requests())
    assert served.token_ids == {name: a.token_ids for name, a in answers_alone.items()}


@pytest.mark.parametrize("max_step_tokens", [8, 200, 300, 511, 2000])
def test_warm_up_runs_a_step_of_all_the_tokens_there_may_be(
    model: LoadedModel, max_step_tokens: int
) -> None:
    runner = ObservedRunner(model)
    make_engine(model, runner=runner).warm_up(max_step_tokens=max_step_tokens)
    assert max(runner.num_tokens) == max_step_tokens


def test_result_tells_the_time(model: LoadedModel) -> None:
    engine = make_engine(model)
    scheduler = Scheduler(
        engine.capacity,
        SchedulerLimits(max_step_tokens=64, max_waiting=4, max_running=4, watermark_blocks=0),
        FirstComeFirstServed(),
    )
    scheduler.handle(Submit((Request(id="a", prompt=(1, 2), max_tokens=1),)), 0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    result = engine.submit(plan).result()
    assert 0 < result.sample_seconds < result.device_seconds
