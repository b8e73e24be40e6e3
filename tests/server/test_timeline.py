"""Timelines: phases add up, whatever happened on the way, and nothing is kept without bounds."""

from __future__ import annotations

import asyncio
import itertools
import json
from dataclasses import replace
from typing import Any

import pytest

from scheduler.limits import SchedulerLimits
from scheduler.types import (
    FinishReason,
    FirstToken,
    KVCapacity,
    Preempted,
    PromptRow,
    Request,
    StepStats,
)
from server.config import ServerConfig
from server.recorder import Recorder
from server.timeline import MAX_CHUNKS, RequestTimeline, SequenceTimeline
from server.timings import RequestClock
from tests.support.http_server import House, TextEngine, connect, eventually, house, in_loop
from tests.support.load_client import Seen, run_load


class Answer:
    """A choice that says what the test says."""

    num_tokens = 0
    finish_reason: FinishReason | None = None


def stats(step: int, ended: float, *rows: PromptRow, **fields: Any) -> StepStats:
    known = {"num_decode_tokens": 1, "step_seconds": 1.0} | fields
    return StepStats(step, 1, 0, 10, 1, 0, ended_at=ended, prompt_rows=rows, **known)


class Group:
    def __init__(self, request_id: str) -> None:
        self.requests = (Request(request_id, (1, 2, 3), 5),)
        self.choices = (Answer(),)


def recorded(recorder: Recorder, name: str = "r") -> RequestTimeline:
    clock = RequestClock(received=0.0, parsed=1.0, tokenized=2.0)
    return recorder.begin(name, f"answer{name}", "", clock, [Group(f"{name}-0")])


def spans(timeline: RequestTimeline, now: float = 0.0) -> list[tuple[str, float, float]]:
    return [(span.name, span.began, span.ended) for span in timeline.phases(now)]


def test_preemption_cuts_decode_and_the_sum_stays_the_same() -> None:
    recorder = Recorder(4, lambda: 30.0)
    timeline = recorded(recorder)
    recorder.observe_step(stats(1, 5.0, PromptRow("r-0", 3, 0, 3, True)))
    timeline.clock.first_token(FirstToken(4.0, 4.9, 5.0, 0))
    timeline.clock.first_written = 5.5
    recorder.observe_step(stats(2, 9.0, preempted=(Preempted("r-0", 8.0),)))
    recorder.observe_step(stats(3, 13.0, PromptRow("r-0", 1, 0, 5, True), step_seconds=2.0))
    timeline.clock.finished = 20.0
    recorder.end(timeline, "error")
    assert spans(timeline) == [
        ("parse", 0.0, 1.0),
        ("tokenize", 1.0, 2.0),
        ("queue", 2.0, 4.0),
        ("prefill", 4.0, 4.9),
        ("first_sample", 4.9, 5.0),
        ("write", 5.0, 5.5),
        ("decode", 5.5, 8.0),
        ("preempted", 8.0, 11.0),
        ("recompute", 11.0, 13.0),
        ("decode", 13.0, 20.0),
        ("close", 20.0, 30.0),
    ]
    assert timeline.num_preemptions == 1


def test_preemption_planned_while_a_step_runs_belongs_behind_its_rows() -> None:
    """At depth 1 the stats of a step tell of a preemption that came after it began."""
    recorder = Recorder(4, lambda: 30.0)
    timeline = recorded(recorder)
    row = PromptRow("r-0", 0, 0, 2, True)
    recorder.observe_step(stats(1, 5.0, row, preempted=(Preempted("r-0", 4.5),)))
    (stay,) = timeline.sequences[0].stays
    assert stay.preempted == 4.5
    assert spans(timeline, now=7.0)[-2:] == [("prefill", 4.0, 4.5), ("preempted", 4.5, 7.0)]


def test_long_prompt_keeps_its_first_and_newest_chunks() -> None:
    sequence = SequenceTimeline("s", 10, Answer())
    for step in range(1, 1001):
        sequence.add_row(PromptRow("s", 0, step, 1, step == 1), step, step, step + 1)
    (stay,) = sequence.stays
    assert len(stay.chunks) == MAX_CHUNKS
    assert stay.num_omitted == 1000 - MAX_CHUNKS
    assert (stay.chunks[0].step, stay.chunks[-1].step) == (1, 1000)


def test_finished_requests_are_bounded_and_zero_records_nothing() -> None:
    recorder = Recorder(3, lambda: 9.0)
    for index in range(10):
        recorder.end(recorded(recorder, f"r{index}"), "stop")
    assert [timeline.id for timeline in recorder.finished] == ["r7", "r8", "r9"]
    assert not recorder.live
    assert recorder.find("r9") is recorder.finished[-1]
    for name in ("answerr8", "chatcmpl-answerr8", "msg_answerr8", "resp_answerr8"):
        assert recorder.find(name) is recorder.finished[-2]
    assert recorder.find("r0") is None
    off = Recorder(0, lambda: 9.0)
    timeline = recorded(off)
    off.observe_step(stats(1, 5.0, PromptRow("r-0", 0, 0, 3, True)))
    assert (len(off.live), len(off.steps)) == (0, 0)
    off.end(timeline, "stop")
    assert (len(off.finished), timeline.finish) == (0, "stop")


TIGHT = KVCapacity(num_blocks=40, block_size=16, num_slots=16, max_model_len=512)
SMALL_STEPS = SchedulerLimits(
    max_step_tokens=128, max_waiting=64, max_running=16, watermark_blocks=0
)


async def load(server: House, num_requests: int) -> list[Seen]:
    """Long answers that do not fit together, some prompts shared, some streamed."""
    bodies = []
    for index in range(num_requests):
        prompt = "a prompt that many share, word by word" if index % 3 else f"{index} alone " * 4
        fields = {"max_tokens": 30 + index % 60, "stream": index % 4 != 0}
        bodies.append((f"t-{index}", "/v1/completions", {"prompt": prompt, **fields}))
    host, port = server.url.removeprefix("http://").split(":")
    return await run_load(host, int(port), bodies, 12)


@pytest.mark.parametrize("depth", [0, 1])
@in_loop
async def test_phases_add_up_to_what_the_client_waited(depth: int) -> None:
    engine = TextEngine(capacity=TIGHT, step_seconds=0.001)
    async with house(engine, limits=SMALL_STEPS, depth=depth, live=True) as server:
        seen = await load(server, 60)
        answer = (await server.client.get("/admin/requests?limit=1000")).json()
        rows = {row["id"]: row for row in answer["finished"]}
        details = [
            (await server.client.get(f"/admin/requests/{name}/timeline")).json() for name in rows
        ]
    assert len(rows) == 60
    assert not answer["live"]
    assert sum(row["preemptions"] for row in rows.values()) > 5
    assert sum(row["cached_tokens"] > 0 for row in rows.values()) > 10
    assert any("recompute" in row["phases_ms"] for row in rows.values())
    for one in seen:
        row = rows[one.id]
        total = sum(row["phases_ms"].values())
        assert total == pytest.approx(row["e2e_ms"], abs=0.01)
        # The client waits at least from the reading of its request until its answer is composed:
        # when it came is the kernel's guess in ticks, and it may be closed after it was answered.
        told = total - row["phases_ms"]["parse"] - row["phases_ms"].get("close", 0.0)
        assert told <= one.e2e_seconds * 1e3 + 1.0
        assert one.status == 200
    for detail in details:
        _check_detail(detail)


def _check_detail(detail: dict[str, Any]) -> None:
    edges = [(p["start_ms"], p["start_ms"] + p["duration_ms"]) for p in detail["phases"]]
    assert edges[0][0] == 0
    for (_, ended), (began, _) in itertools.pairwise(edges):
        assert began == pytest.approx(ended, abs=0.01)
    assert edges[-1][1] == pytest.approx(detail["e2e_ms"], abs=0.01)
    (sequence,) = detail["sequences"]
    stays = sequence["stays"]
    assert len(stays) == detail["preemptions"] + 1
    for stay in stays:
        position = stay["found_tokens"]
        for chunk in stay["chunks"]:
            assert chunk["start"] == position
            position += chunk["length"]
        assert position >= sequence["prompt_tokens"] or stay["preempted_ms"] is not None
    # A token a step: one from the end of each entry's prefill and one from each decode.
    last = stays[-1]["chunks"][-1]["step"]
    steps = [step["step"] for step in detail["steps"]]
    assert steps == sorted(set(steps))
    assert last in steps


@in_loop
async def test_hang_up_and_refusal_have_their_ends_in_the_timeline() -> None:
    engine = TextEngine(step_seconds=0.002)
    async with house(engine, live=True) as server:
        reader, writer = await connect(server)
        body = json.dumps({"prompt": "x", "max_tokens": 2000, "stream": True}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: t\r\nx-request-id: gone\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        await reader.readuntil(b"data: ")
        live = (await server.client.get("/admin/requests")).json()["live"]
        assert [(row["id"], row["state"]) for row in live] == [("gone", "decode")]
        writer.close()

        async def ended() -> bool:
            return bool((await server.client.get("/admin/requests")).json()["num_live"] == 0)

        await eventually(ended)
        (row,) = (await server.client.get("/admin/requests")).json()["finished"]
        assert row["finish"] == "abort"
        missing = await server.client.get("/admin/requests/nobody/timeline")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "no_timeline")


@in_loop
async def test_trace_file_has_tracks_of_steps_requests_and_slots() -> None:
    async with house(TextEngine(step_seconds=0.001)) as server:
        await asyncio.gather(*(server.complete("x" * 50, max_tokens=9, n=2) for _ in range(4)))
        answer = await server.client.get("/admin/trace?seconds=0")
        wrong = await server.client.get("/admin/trace?seconds=-1")
    assert wrong.status_code == 400
    events = answer.json()["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == {1, 2, 3}
    assert all(event["dur"] >= 0 for event in spans)
    requests = [event for event in spans if event["name"].startswith("request ")]
    assert len(requests) == 4
    for event in requests:
        parts = [s for s in spans if s["pid"] == 2 and s["tid"] == event["tid"] and s is not event]
        assert sum(part["dur"] for part in parts) == pytest.approx(event["dur"], abs=2.0)
    assert any(event["ph"] == "C" for event in events)


@in_loop
async def test_admin_needs_a_key_and_holds_no_text() -> None:
    config = replace(ServerConfig(), api_keys=("ops:secret-key",))
    async with house(TextEngine({"greet": "Hello there"}), config) as server:
        headers = {"authorization": "Bearer secret-key"}
        body = {"prompt": "greet my private words"}
        await server.client.post("/v1/completions", json=body, headers=headers)
        for path in ("/admin/requests", "/admin/trace?seconds=0", "/admin/live"):
            assert (await server.client.get(path)).status_code == 401
        rows = await server.client.get("/admin/requests", headers=headers)
        trace = await server.client.get("/admin/trace?seconds=0", headers=headers)
    assert rows.json()["finished"][0]["key"] == "ops"
    for text in (rows.text, trace.text):
        assert "private" not in text
        assert "Hello" not in text
        assert "secret-key" not in text
