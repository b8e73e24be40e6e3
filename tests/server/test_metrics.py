"""The numbers at /metrics mean what their help says."""

from __future__ import annotations

import asyncio
import time

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from scheduler.limits import SchedulerLimits
from scheduler.loop import OutOfMemory, PendingResult
from scheduler.types import KVCapacity, StepPlan, StepStats
from server.metrics import Metrics
from tests.support.http_server import (
    COMPLETIONS,
    House,
    TextEngine,
    connect,
    eventually,
    house,
    in_loop,
    metric,
)

REASONS = ("stop", "length", "abort", "error")


async def read(server: House) -> str:
    return (await server.client.get("/metrics")).text


@in_loop
async def test_exposition_has_every_promised_series() -> None:
    promised = [
        "time_to_first_token_seconds",
        "time_per_output_token_seconds",
        "inter_token_latency_seconds",
        "request_duration_seconds",
        "queue_seconds",
        "prefill_seconds",
        "decode_seconds",
        "time_to_first_token_part_seconds",
        "prompt_tokens",
        "cached_prompt_tokens",
        "generated_tokens",
        "requests_finished",
        "requests_accepted",
        "requests_refused",
        "requests_running",
        "requests_waiting",
        "kv_usage_ratio",
        "preemptions",
        "refused_steps",
        "prefix_queries",
        "prefix_hits",
        "step_seconds",
        "step_tokens",
        "event_loop_lag_seconds",
    ]
    async with house() as server:
        families = list(text_string_to_metric_families(await read(server)))
    names = {family.name for family in families}
    assert {f"paceline_{name}" for name in promised} <= names
    assert all(family.name.startswith(("paceline_", "vllm:")) for family in families)
    assert all(len(family.documentation) > 20 for family in families)
    assert not [name for name in names if name.endswith("_created")]


def test_buckets_are_fine_enough_for_a_fast_model() -> None:
    """From 1 ms to minutes; gaps between tokens from 0.5 ms."""
    registry = CollectorRegistry()
    Metrics(registry)
    bounds: dict[str, list[float]] = {}
    for family in registry.collect():
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                bounds.setdefault(family.name, []).append(float(sample.labels["le"]))
    for name in ("time_to_first_token", "request_duration", "queue", "prefill", "decode"):
        found = sorted(bounds[f"paceline_{name}_seconds"])
        assert found[0] <= 0.001
        assert found[-2] >= 120
    for name in ("time_per_output_token", "inter_token_latency"):
        found = sorted(bounds[f"paceline_{name}_seconds"])
        assert found[0] <= 0.0005
        assert found[-2] >= 30


@in_loop
async def test_generated_tokens_are_the_sum_of_completion_tokens() -> None:
    """B118: ten answers of one token each, then a longer one, a batch and n of them."""
    total = 0
    async with house(TextEngine({"greet": "Hello"})) as server:
        for _ in range(10):
            answer = (await server.complete("x", max_tokens=1)).json()
            total += answer["usage"]["completion_tokens"]
        assert total == 10
        assert await server.metric("paceline_generated_tokens_total") == 10
        assert await server.metric("paceline_time_per_output_token_seconds_count") == 0
        for prompt, n in (("greet", 1), (["greet", "x"], 2), ("greet", 3)):
            answer = (await server.complete(prompt, n=n, stop="l")).json()
            total += answer["usage"]["completion_tokens"]
        assert await server.metric("paceline_generated_tokens_total") == total


@in_loop
async def test_prompt_of_several_choices_counts_once() -> None:
    """B121: n=4 with a prompt of 100 tokens; cached tokens are those of usage."""
    async with house() as server:
        usages = [
            (await server.complete([97] * 100, n=4, max_tokens=5)).json()["usage"] for _ in range(2)
        ]
        text = await read(server)
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert [usage["prompt_tokens"] for usage in usages] == [100, 100]
    assert cached > 0
    assert metric(text, "paceline_prompt_tokens_total") == 200
    assert metric(text, "paceline_cached_prompt_tokens_total") == cached
    assert metric(text, "paceline_requests_accepted_total") == 8
    assert metric(text, "paceline_requests_finished_total", reason="length") == 8
    assert metric(text, "paceline_time_to_first_token_seconds_count") == 2
    assert metric(text, "paceline_time_per_output_token_seconds_count") == 8
    assert metric(text, "paceline_request_duration_seconds_count") == 2


@in_loop
async def test_every_step_has_a_sample_in_the_step_histogram() -> None:
    """B121: prefill-only steps too: a prompt of three chunks."""
    async with house() as server:
        await server.complete([97] * 600, max_tokens=4)
        await eventually(lambda: server.core.num_unfinished == 0)
        text = await read(server)
    counts = [
        metric(text, "paceline_step_seconds_count", kind=kind)
        for kind in ("prefill", "decode", "mixed")
    ]
    assert sum(counts) == server.engine.num_steps
    assert counts[0] >= 2
    assert metric(text, "paceline_step_tokens_total", kind="prefill") == 600
    assert metric(text, "paceline_step_tokens_total", kind="decode") == 3


@in_loop
async def test_preemption_counts_no_token_twice_and_observes_no_ttft_again() -> None:
    """B118: a pool so small that sequences lose their KV in the middle."""
    capacity = KVCapacity(num_blocks=12, block_size=4, num_slots=4, max_model_len=40)
    limits = SchedulerLimits(max_step_tokens=64, max_waiting=16, max_running=4, watermark_blocks=0)
    async with house(TextEngine(capacity=capacity), limits=limits) as server:
        answers = await asyncio.gather(
            *(server.complete([97 + i] * 8, max_tokens=24) for i in range(4))
        )
        text = await read(server)
    used = sum(answer.json()["usage"]["completion_tokens"] for answer in answers)
    assert metric(text, "paceline_preemptions_total") > 0
    assert metric(text, "paceline_generated_tokens_total") == used == 4 * 24
    assert metric(text, "paceline_time_to_first_token_seconds_count") == 4
    assert metric(text, "paceline_queue_seconds_count") == 4


class CrampedEngine(TextEngine):
    """Has no memory for a step of more than 20 tokens, nor for any with a `7` among them."""

    def submit(self, plan: StepPlan) -> PendingResult:
        admitted = {admission.slot: admission.token_ids for admission in plan.admissions}
        self.tokens = {**self.tokens, **admitted}
        heavy = any(ord("7") in self.tokens[slot] for slot in plan.slots)
        if heavy or sum(plan.lengths) > 20:
            raise OutOfMemory("no room")
        return super().submit(plan)

    tokens: dict[int, tuple[int, ...]] = {}  # noqa: RUF012 - replaced, never changed


@in_loop
async def test_steps_without_memory_are_counted_and_the_server_serves_on() -> None:
    """One request that fits nowhere fails, with an error of ours; all others get their answers."""
    async with house(CrampedEngine()) as server:
        prompts = [[97 + i] * 15 for i in range(4)]
        answers = await asyncio.gather(
            *(server.complete(prompt, max_tokens=12) for prompt in prompts),
            server.complete("7", max_tokens=4),  # answers are letters
        )
        *good, bad = answers
        assert [answer.status_code for answer in good] == [200] * 4
        assert all(answer.json()["usage"]["completion_tokens"] == 12 for answer in good)
        assert bad.status_code == 500
        assert "no memory left for this request" in bad.json()["error"]["message"]
        assert (await server.client.get("/health")).status_code == 200
        await eventually(lambda: server.core.num_unfinished == 0)
        text = await read(server)
    assert metric(text, "paceline_refused_steps_total") > 0
    assert metric(text, "paceline_requests_finished_total", reason="error") == 1
    assert metric(text, "paceline_requests_finished_total", reason="length") == 4


@in_loop
async def test_ends_by_reason_add_up_to_what_was_accepted() -> None:
    """B116: whatever way a request ends."""
    engine = TextEngine({"greet": "Hello"}, step_seconds=0.001)
    async with house(engine, live=True) as server:
        await server.complete(["greet", "x"], n=2, max_tokens=8)
        await server.complete("greet", stop="l")
        await server.complete("greet", n=0)  # refused: not accepted
        body = '{"prompt":"x","max_tokens":1500,"n":3}'
        _, writer = await connect(server)
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write((head + body).encode())
        await eventually(lambda: server.core.num_unfinished == 3)
        writer.close()
        await eventually(lambda: server.core.num_unfinished == 0)
        engine.fail_step.set()
        await server.complete("x")
        text = await read(server)
    ends = [metric(text, "paceline_requests_finished_total", reason=reason) for reason in REASONS]
    assert ends == [3, 2, 3, 1]
    assert metric(text, "paceline_requests_accepted_total") == sum(ends)
    assert metric(text, "paceline_requests_refused_total", reason="invalid_value") == 1


@in_loop
async def test_what_is_no_request_yet_is_counted_as_refused() -> None:
    """B116, B151: a head that is too large, garbage, and a body that ends before its length."""
    async with house(live=True) as server:
        for said in (
            b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 100_000,
            b"hello\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{",
        ):
            reader, writer = await connect(server)
            writer.write(said)
            writer.write_eof()
            assert (await reader.read()).startswith(b"HTTP/1.1 4")
            writer.close()
        text = await read(server)
    assert metric(text, "paceline_requests_refused_total", reason="headers_too_large") == 1
    assert metric(text, "paceline_requests_refused_total", reason="bad_request") == 2


@pytest.mark.parametrize("begun", [False, True], ids=["a status", "an event"])
@in_loop
async def test_an_error_is_counted_once_before_and_after_the_first_text(begun: bool) -> None:
    """B116: the step fails."""
    engine = TextEngine({"greet": "Hello"}, step_seconds=0.001)
    async with house(engine, live=True) as server:
        if not begun:
            engine.fail_step.set()
        body = {"prompt": "x", "max_tokens": 1500, "stream": True}
        async with server.client.stream("POST", COMPLETIONS, json=body) as answer:
            said = ""
            async for line in answer.aiter_lines():
                said += line
                engine.fail_step.set()
        assert answer.status_code == (200 if begun else 500)
        assert "generation_failed" in said
        text = await read(server)
    assert metric(text, "paceline_requests_refused_total", reason="generation_failed") == 1
    assert metric(text, "paceline_requests_finished_total", reason="error") == 1


@in_loop
async def test_ttft_is_that_of_the_first_text_not_of_the_role() -> None:
    """B119: a prompt of 14 chunks; what the server measured is within what the client saw."""
    limits = SchedulerLimits(max_step_tokens=32, max_waiting=8, max_running=4, watermark_blocks=0)
    engine = TextEngine({"greet": "Hello"}, step_seconds=0.02)
    async with house(engine, limits=limits, live=True) as server:
        await server.chat("warm", max_tokens=1)
        before = await server.metric("paceline_time_to_first_token_seconds_sum")
        begin = time.monotonic()
        seen: list[tuple[str, float]] = []
        body = {
            "messages": [{"role": "user", "content": "greet" + "x" * 400}],
            "stream": True,
            "max_tokens": 5,
        }
        async with server.client.stream("POST", "/v1/chat/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line:
                    seen.append((line, time.monotonic() - begin))
        ttft = await server.metric("paceline_time_to_first_token_seconds_sum") - before
    role = next(at for line, at in seen if '"role"' in line)
    first = next(at for line, at in seen if '"content":"H"' in line)
    # Steps cannot be shorter than they are told to be; nothing else here has a limit.
    prefill = 13 * engine.step_seconds
    assert prefill < ttft < first + 0.05
    assert prefill < role <= first


@in_loop
async def test_gaps_are_observed_for_text_only() -> None:
    """One gap less than pieces of text, for each choice; held-back text makes one piece."""
    async with house(TextEngine({"greet": "abc", "thai": "ไทย"})) as server:
        for prompt in ("greet", "thai"):
            before = await server.metric("paceline_inter_token_latency_seconds_count")
            answer = await server.complete(prompt, stream=True, max_tokens=30)
            pieces = answer.text.count('"text":"') - 1  # but for the end
            after = await server.metric("paceline_inter_token_latency_seconds_count")
            assert after - before == pieces - 1


def test_counters_do_not_fall_when_the_core_starts_again() -> None:
    """B122: events are increments; gauges follow the newest turn."""
    metrics = Metrics(CollectorRegistry())
    for start in (1, 1):  # a new core counts its steps from one again
        metrics.observe_step(
            StepStats(start, 3, 2, 10, 5, 1, 100, 7, 1, 20, 50, 40, 0.001, 0.02, 0.01)
        )
        busy = metrics.exposition()[0].decode()
        assert metric(busy, "paceline_kv_usage_ratio") == 0.5
        assert metric(busy, "paceline_requests_running") == 3
        assert metric(busy, "paceline_requests_waiting") == 2
        metrics.observe_step(StepStats(start + 1, 0, 0, 10, 0, 6))
    text = metrics.exposition()[0].decode()
    assert metric(text, "paceline_step_tokens_total", kind="prefill") == 200
    assert metric(text, "paceline_preemptions_total") == 2
    assert metric(text, "paceline_recomputed_tokens_total") == 40
    assert metric(text, "paceline_prefix_queries_total") == 100
    assert metric(text, "paceline_prefix_hits_total") == 80
    assert metric(text, "paceline_step_seconds_count", kind="mixed") == 2
    assert metric(text, "paceline_requests_running") == 0
    assert metric(text, "paceline_kv_usage_ratio") == 0
    assert metric(text, "paceline_kv_cached_ratio") == 0.6


@in_loop
async def test_scraping_many_times_is_consistent() -> None:
    """B122."""
    async with house() as server:
        last = 0.0
        for _ in range(50):
            await server.complete("x", max_tokens=2)
            generated = await server.metric("paceline_generated_tokens_total")
            assert generated == last + 2
            last = generated
