"""Whole steps and whole requests through the engine that cuda takes, with random weights."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from engine.cuda_engine import make_cuda_engine
from engine.cuda_graphs import bucket_sizes
from engine.cuda_runner import CudaRunner
from engine.kv_memory import available_memory, kv_bytes_per_token
from engine.loading import LoadedModel
from engine.torch_engine import TorchEngine
from scheduler.limits import SchedulerLimits
from scheduler.loop import ServingLoop
from scheduler.policy import FirstComeFirstServed
from scheduler.scheduler import Scheduler
from scheduler.types import (
    Command,
    Drain,
    Event,
    KVCapacity,
    Request,
    SamplingParams,
    StepPlan,
    StepStats,
    Submit,
    Tokens,
)
from tests.gpu.guard import Result, guarded
from tests.gpu.roofline import MEMORY_STEPS, Shape, costs, peak_bytes
from tests.gpu.shapes import MODELS, plan, random_model
from tests.gpu.timing import sleep
from tests.support.gpu_linears import convert_linears

BLOCK_SIZE = 16
GREEDY = SamplingParams(temperature=0.0)
MEMORY_SHARE = 0.85  # of what is free beside the weights


@dataclass(frozen=True)
class Sizes:
    main: str  # the model that serves requests end to end
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    prefill: int
    repeats: int
    max_rows: int
    max_model_len: int
    requests: int
    prompt: int
    output: int
    dtype: torch.dtype


FULL = Sizes(
    main="Qwen3-8B",
    batches=(1, 8, 64, 256),
    contexts=(1024, 8192),
    prefill=2048,
    repeats=20,
    max_rows=256,
    max_model_len=8320,
    requests=256,
    prompt=1024,
    output=1024,
    dtype=torch.bfloat16,
)
DRY = Sizes(
    main="tiny",
    batches=(1, 2),
    contexts=(20,),
    prefill=40,
    repeats=1,
    max_rows=2,
    max_model_len=64,
    requests=2,
    prompt=20,
    output=3,
    dtype=torch.float32,
)


def capacity_for(model: LoadedModel, sizes: Sizes, device: torch.device) -> KVCapacity:
    """As much KV as the sizes can use, or as the device has."""
    useful = sizes.max_rows * -(-sizes.max_model_len // BLOCK_SIZE)
    block_bytes = BLOCK_SIZE * kv_bytes_per_token(model.config, sizes.dtype)
    fitting = int(available_memory(str(device)) * MEMORY_SHARE) // block_bytes
    return KVCapacity(min(useful, fitting), BLOCK_SIZE, sizes.max_rows, sizes.max_model_len)


def make_engine(
    model: LoadedModel, sizes: Sizes, device: torch.device, *, deterministic: bool = False
) -> TorchEngine:
    return make_cuda_engine(
        model,
        device=device,
        dtype=sizes.dtype,
        capacity=capacity_for(model, sizes, device),
        deterministic=deterministic,
        graphs=device.type == "cuda",
    )


def wrapped(step: StepPlan, num_blocks: int) -> StepPlan:
    """Where rows need more blocks than there are, they share: only the time is of interest."""
    ids = step.block_ids
    return replace(step, block_ids=type(ids)("q", [block % num_blocks for block in ids]))


def run_steps(engine: TorchEngine, step: StepPlan, *, repeats: int, depth: int) -> Result:
    """The same step again and again, `depth` of them in flight besides the newest."""
    in_flight: deque = deque()
    host, device_seconds, ends = [], [], [time.perf_counter()]
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        in_flight.append(engine.submit(step))
        host.append(time.perf_counter() - begin)
        if len(in_flight) > depth:
            device_seconds.append(in_flight.popleft().result().device_seconds)
            ends.append(time.perf_counter())
    while in_flight:
        in_flight.popleft().result()
    busy = busy_seconds(engine, step, host_seconds=max(host))
    took = statistics.median(
        [b - a for a, b in itertools.pairwise(ends[1:])] or [ends[-1] - ends[0]]
    )
    return {
        "step_milliseconds": took * 1e3,
        "device_milliseconds": statistics.median(device_seconds) * 1e3,
        "busy_milliseconds": busy * 1e3,
        "host_milliseconds": statistics.median(host) * 1e3,
        "idle_share": max(0.0, 1 - busy / took),
    }


def busy_seconds(engine: TorchEngine, step: StepPlan, *, host_seconds: float) -> float:
    """Of the step on the device, with no wait for the host: it is queued behind a sleep."""
    found = []
    for _ in range(3):
        if torch.cuda.is_available():
            sleep(2 * host_seconds)
        found.append(engine.submit(step).result().device_seconds)
    return statistics.median(found)


def decode_steps(
    name: str, engine: TorchEngine, sizes: Sizes, *, mode: str, depth: int
) -> Iterator[Result]:
    for context in sizes.contexts:
        for batch in sizes.batches:
            step = wrapped(
                plan([context] * batch, [1] * batch, block_size=BLOCK_SIZE, sampling=GREEDY),
                engine.capacity.num_blocks,
            )
            engine.submit(step).result()
            again = replace(step, admissions=())
            result = run_steps(engine, again, repeats=sizes.repeats, depth=depth)
            floor = costs(MODELS[name], Shape("", batch, context)).floor_seconds
            yield {
                "name": f"{name} decode {batch} x {context} {mode} depth {depth}",
                **result,
                "floor_milliseconds": floor * 1e3,
                "share_of_floor": floor * 1e3 / result["step_milliseconds"],
            }


def capture_all(engine: TorchEngine, sizes: Sizes) -> Result:
    """Decode steps until every bucket is captured; what one capture costs."""
    runner = engine._runner
    assert isinstance(runner, CudaRunner)
    graphs = runner.graphs
    if graphs is None:
        return {"name": "graphs", "captured": 0}
    count = len(bucket_sizes(sizes.max_rows))
    begin = time.perf_counter()
    # A row alone is eager, and so captures a bucket, until its own is captured: the last.
    step = plan([5], [1], block_size=BLOCK_SIZE, sampling=GREEDY)
    for _ in range(count + 1):
        engine.submit(step).result()
    return {
        "name": "graphs",
        "captured": graphs.num_captured,
        "buckets": count,
        "seconds": time.perf_counter() - begin,
    }


def prefill_step(name: str, engine: TorchEngine, sizes: Sizes) -> Iterator[Result]:
    step = plan([0], [sizes.prefill], block_size=BLOCK_SIZE, sampling=GREEDY)
    engine.submit(step).result()
    result = run_steps(engine, replace(step, admissions=()), repeats=sizes.repeats, depth=0)
    floor = costs(MODELS[name], Shape("", 0, 0, sizes.prefill)).floor_seconds
    yield {
        "name": f"{name} prefill {sizes.prefill}",
        **result,
        "floor_milliseconds": floor * 1e3,
        "share_of_floor": floor * 1e3 / result["step_milliseconds"],
    }


def waits(name: str, engine: TorchEngine, device: torch.device) -> Iterator[Result]:
    """Whether submitting a prefill or a decode step ever waits for the device."""
    steps = {
        "prefill": plan([0, 0], [30, 7], block_size=BLOCK_SIZE, sampling=GREEDY),
        "decode": plan([30, 7], [1, 1], block_size=BLOCK_SIZE),
    }
    for what, step in steps.items():
        engine.submit(step).result()
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            pending = engine.submit(step)
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        pending.result()
        yield {"name": f"{name} {what} without a wait", "passed": True}


def graphs_against_eager(name: str, engine: TorchEngine, sizes: Sizes) -> Iterator[Result]:
    """The same greedy requests with and without graphs: how many answers are equal."""
    runner = engine._runner
    assert isinstance(runner, CudaRunner)
    vocab = MODELS[name].vocab_size
    count = min(8, sizes.max_rows)
    requests = [
        request(i, prompt=3 + i, output=min(16, sizes.output), vocab=vocab) for i in range(count)
    ]
    answers = []
    graphs = runner.graphs
    for setting in (graphs, None):
        runner.graphs = setting
        events, _, _ = serve(engine, requests, depth=1, max_step_tokens=2048)
        answers.append([[e.token_ids for e in events[one.id]] for one in requests])
    runner.graphs = graphs
    equal = sum(a == b for a, b in zip(*answers, strict=True))
    yield {"name": f"{name} graphs against eager", "equal": equal, "requests": count}


def step_memory(name: str, engine: TorchEngine, device: torch.device) -> Iterator[Result]:
    """The peak of a step beside what stays: predicted on the meta device, and measured."""
    for what, (starts, lengths) in MEMORY_STEPS.items():
        result: Result = {
            "name": f"{name} memory, {what}",
            "predicted_megabytes": peak_bytes(name, starts=starts, lengths=lengths) / 1e6,
        }
        if device.type == "cuda":
            step = wrapped(
                plan(starts, lengths, block_size=BLOCK_SIZE, sampling=GREEDY),
                engine.capacity.num_blocks,
            )
            engine.submit(step).result()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            engine.submit(replace(step, admissions=())).result()
            peak = torch.cuda.max_memory_allocated() - before
            result["measured_megabytes"] = peak / 1e6
        yield result


class Once:
    """An inbox with everything in it from the start."""

    def __init__(self, commands: list[Command]) -> None:
        self._commands = commands

    def take(self, *, block: bool) -> list[Command]:
        assert self._commands or not block
        commands, self._commands = self._commands, []
        return commands


def serve(
    engine: TorchEngine, requests: list[Request], *, depth: int, max_step_tokens: int
) -> tuple[dict[str, list[Tokens]], list[StepStats], float]:
    """All requests at once: their events, the steps' statistics and the seconds it took."""
    limits = SchedulerLimits(
        max_step_tokens=max_step_tokens,
        max_waiting=len(requests),
        max_running=engine.capacity.num_slots,
        watermark_blocks=1,
        prefix_caching=False,
    )
    events: dict[str, list[Tokens]] = {request.id: [] for request in requests}
    stats: list[StepStats] = []

    def emit(batch: list[Event]) -> None:
        for event in batch:
            if isinstance(event, Tokens):
                events[event.request_id].append(event)
            elif isinstance(event, StepStats):
                stats.append(event)

    commands: list[Command] = [*(Submit((request,)) for request in requests), Drain()]
    scheduler = Scheduler(engine.capacity, limits, FirstComeFirstServed())
    begin = time.perf_counter()
    ServingLoop(scheduler, engine, Once(commands), emit, time.perf_counter, depth).run()
    return events, stats, time.perf_counter() - begin


def request(index: int, *, prompt: int, output: int, vocab: int, **sampling: object) -> Request:
    return Request(
        id=str(index),
        prompt=tuple((index * 7919 + i * 31) % vocab for i in range(prompt)),
        max_tokens=output,
        sampling=replace(GREEDY, **sampling),
    )


def few_requests(sizes: Sizes) -> int:
    """For a peer that may not get through all of them in its time."""
    return max(1, sizes.requests // 8)


def end_to_end(
    name: str, engine: TorchEngine, sizes: Sizes, *, output: int, mode: str, depth: int
) -> Iterator[Result]:
    vocab = MODELS[name].vocab_size
    requests = [
        request(i, prompt=sizes.prompt, output=output, vocab=vocab) for i in range(sizes.requests)
    ]
    events, stats, took = serve(engine, requests, depth=depth, max_step_tokens=2048)
    tokens = sum(len(event.token_ids) for of_one in events.values() for event in of_one)
    assert tokens == sizes.requests * output
    steps = [stat for stat in stats if stat.num_decode_tokens and not stat.num_prefill_tokens]
    yield {
        "name": f"{name} {sizes.requests} x {sizes.prompt}/{output} {mode} depth {depth}",
        "seconds": took,
        "output_tokens_per_second": tokens / took,
        "decode_step_milliseconds": 1e3 * statistics.median([s.step_seconds for s in steps] or [0]),
        "plan_milliseconds": 1e3 * statistics.median([s.plan_seconds for s in steps] or [0]),
    }


def measure_deterministic(sizes: Sizes, device: torch.device) -> Iterator[Result]:
    """One request alone and among others: equal to the last bit? And what it costs."""
    name = sizes.main
    model = random_model(
        MODELS[name], dtype=sizes.dtype, device=device, max_positions=sizes.max_model_len
    )
    convert_linears(model.decoder, "invariant", dtype=sizes.dtype)
    engine = make_engine(model, sizes, device, deterministic=True)
    capture = capture_all(engine, sizes)
    vocab = model.config.vocab_size
    one = request(0, prompt=sizes.prompt // 2 + 3, output=8, vocab=vocab, num_logprobs=1)
    mates = [
        request(i, prompt=1 + i * 5 % sizes.prompt, output=3 + i % 9, vocab=vocab)
        for i in range(1, min(sizes.max_rows, 48))
    ]
    answers = []
    for requests, budget in (([one], 2048), ([one, *mates], 2048), ([one, *mates], 64)):
        events, _, _ = serve(engine, requests, depth=1, max_step_tokens=budget)
        answers.append([(event.token_ids, event.logprobs) for event in events["0"]])
    yield {
        "name": f"{name} deterministic",
        "equal_alone_in_a_batch_and_in_chunks": answers[0] == answers[1] == answers[2],
        "capture": capture,
    }
    steps = decode_steps(name, engine, sizes, mode="deterministic", depth=1)
    yield from guarded(f"{name} deterministic", steps)
    short = max(1, sizes.output // 8)
    served = end_to_end(name, engine, sizes, output=short, mode="deterministic", depth=1)
    yield from guarded(f"{name} deterministic", served)


def measure_model(name: str, sizes: Sizes, device: torch.device) -> Iterator[Result]:
    model = random_model(
        MODELS[name], dtype=sizes.dtype, device=device, max_positions=sizes.max_model_len
    )
    engine = make_engine(model, sizes, device)
    runner = engine._runner
    assert isinstance(runner, CudaRunner)
    yield {**capture_all(engine, sizes), "model": name}
    captured = decode_steps(name, engine, sizes, mode="graphs", depth=1)
    yield from guarded(f"{name} graphs", captured)
    yield from guarded(f"{name} prefill", prefill_step(name, engine, sizes))
    if name == sizes.main:
        short = max(1, sizes.output // 8)
        few = replace(sizes, requests=few_requests(sizes))
        for of, output, depth in (
            (sizes, sizes.output, 1),
            (sizes, short, 1),
            (sizes, short, 0),
            (few, short, 1),
        ):
            served = end_to_end(name, engine, of, output=output, mode="graphs", depth=depth)
            yield from guarded(f"{name} end to end", served)
    yield from guarded(f"{name} waits", waits(name, engine, device))
    yield from guarded(f"{name} graphs", graphs_against_eager(name, engine, sizes))
    yield from guarded(f"{name} memory", step_memory(name, engine, device))
    graphs, runner.graphs = runner.graphs, None
    brief = replace(sizes, contexts=sizes.contexts[:1], repeats=min(sizes.repeats, 5))
    eager = decode_steps(name, engine, brief, mode="eager", depth=1)
    yield from guarded(f"{name} eager", eager)
    runner.graphs = graphs
    serial = decode_steps(name, engine, brief, mode="graphs", depth=0)
    yield from guarded(f"{name} graphs", serial)
