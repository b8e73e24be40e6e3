"""The clock of a request: its parts add up, and are the same wherever they are told."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.types import FirstToken
from server.timings import TTFT_PARTS, RequestClock
from tests.support.http_server import TextEngine, events, house, in_loop

PARTS = tuple(f"{part}_ms" for part in (*TTFT_PARTS, "decode"))
instants = st.one_of(st.none(), st.floats(0, 1e7, allow_nan=False))


@given(st.floats(0, 1e7), st.lists(instants, min_size=7, max_size=7))
def test_parts_add_up_exactly_whatever_the_instants(
    received: float, later: list[float | None]
) -> None:
    timings = RequestClock(received, *later).parts()
    parts = [getattr(timings, part) for part in (*TTFT_PARTS, "decode")]
    assert all(part >= 0 for part in parts)
    assert round(timings.total_seconds * 1e6) == sum(parts)
    last = max([received, *(instant for instant in later if instant is not None)])
    assert timings.total_seconds == pytest.approx(last - received, abs=2e-6, rel=1e-9)


def test_first_token_of_the_first_choice_is_what_counts() -> None:
    """B118: nothing that comes later, such as a re-prefill, changes it."""
    clock = RequestClock(1.0, parsed=1.1, tokenized=1.2)
    clock.first_token(FirstToken(1.5, 1.9, 2.0, 0))
    clock.first_token(FirstToken(5.0, 6.0, 7.0, 0))
    timings = clock.parts()
    assert (timings.queue, timings.prefill, timings.first_sample) == (300_000, 400_000, 100_000)


def check(timings: dict[str, Any]) -> None:
    assert set(timings) == {*PARTS, "ttft_ms", "total_ms"}
    assert sum(timings[part] for part in PARTS) == pytest.approx(timings["total_ms"], abs=1e-3)
    ttft = sum(timings[f"{part}_ms"] for part in TTFT_PARTS)
    assert ttft == pytest.approx(timings["ttft_ms"], abs=1e-3)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("usage", [False, True])
@in_loop
async def test_timings_come_on_demand_and_add_up_to_the_duration(stream: bool, usage: bool) -> None:
    """In the answer, or the last chunk; within a millisecond of the metric, below the client's."""
    engine = TextEngine({"greet": "Hello"}, step_seconds=0.01)
    async with house(engine) as server:
        options = {"stream_options": {"include_usage": True}} if stream and usage else {}
        begin = time.monotonic()
        answer = await server.chat("greet", timings=True, stream=stream, **options)
        elapsed_ms = (time.monotonic() - begin) * 1e3
        metric_ms = 1e3 * await server.metric("paceline_request_duration_seconds_sum")
        ttft_ms = 1e3 * await server.metric("paceline_time_to_first_token_seconds_sum")
        parts_ms = {
            f"{part}_ms": 1e3
            * await server.metric("paceline_time_to_first_token_part_seconds_sum", part=part)
            for part in TTFT_PARTS
        }
    body = events(answer.text)[-1] if stream else answer.json()
    if stream:
        assert body["choices"] == []
        assert ("usage" in body) == usage
        assert all("timings" not in chunk for chunk in events(answer.text)[:-1])
    timings = body["timings"]
    check(timings)
    assert timings["total_ms"] == pytest.approx(metric_ms, abs=1)
    assert timings["ttft_ms"] == pytest.approx(ttft_ms, abs=1)
    for part, value in parts_ms.items():
        assert timings[part] == pytest.approx(value, abs=1)
    assert timings["total_ms"] <= elapsed_ms
    # Six tokens: the first step is prefill, the others decode.
    assert timings["prefill_ms"] + timings["first_sample_ms"] >= 9
    assert timings["decode_ms"] >= 40


@in_loop
async def test_waiting_is_told_as_queue_time() -> None:
    engine = TextEngine()
    async with house(engine) as server:
        engine.running.clear()
        blocked = asyncio.create_task(server.chat("x", max_tokens=1))
        await asyncio.sleep(0.05)
        waiting = asyncio.create_task(server.chat("x", max_tokens=1, timings=True))
        await asyncio.sleep(0.2)
        engine.running.set()
        await blocked
        timings = (await waiting).json()["timings"]
    assert timings["queue_ms"] >= 150
    assert timings["queue_ms"] >= 0.8 * timings["total_ms"]


@in_loop
async def test_no_timings_unless_asked() -> None:
    async with house() as server:
        for fields in ({}, {"timings": False}, {"timings": None}):
            assert "timings" not in (await server.complete("x", **fields)).json()
