"""Logs, exemplars and router gauges: what is told, and what never is."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from dataclasses import replace

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from server.config import ServerConfig, parse_settings
from server.logs import JsonFormatter, TextFormatter
from tests.support.http_server import TextEngine, connect, eventually, house, in_loop

OPENMETRICS = {"accept": "application/openmetrics-text; version=1.0.0"}


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    return [getattr(r, "fields", {}) for r in caplog.records if r.name == "paceline.request"]


@in_loop
async def test_request_has_one_line_with_its_facts(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    config = replace(ServerConfig(), api_keys=("team-a:secret-key", "ops+admin:other-key"))
    async with house(TextEngine({"greet": "Hello"}), config) as server:
        headers = {"authorization": "Bearer secret-key", "x-request-id": "my-id"}
        body = {"prompt": "greet my private words", "stream": True}
        await server.client.post("/v1/completions", json=body, headers=headers)
        await server.client.get("/health")
        await server.client.get("/v1/models")
        await server.client.get("/admin/requests", headers=headers)
    first, second, third = lines(caplog)
    assert (first["id"], first["key"], first["status"]) == ("my-id", "team-a", 200)
    assert (first["prompt_tokens"], first["completion_tokens"]) == (22, 6)
    assert first["finish"] == "stop"
    assert isinstance(first["phases_ms"], dict)
    assert sum(first["phases_ms"].values()) == pytest.approx(first["e2e_ms"], abs=0.01)
    assert (second["path"], second["key"], second["status"]) == ("/v1/models", None, 401)
    assert (third["path"], third["key"], third["status"]) == ("/admin/requests", "team-a", 403)
    for text in (str(first), str(second), caplog.text):
        assert "private" not in text
        assert "Hello" not in text
        assert "secret-key" not in text


@in_loop
async def test_prompt_is_logged_only_where_it_was_asked_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with house(config=replace(ServerConfig(), log_prompts=True)) as server:
        await server.complete("words to log", max_tokens=2)
    assert lines(caplog)[0]["prompts"] == ["words to log"]
    assert not ServerConfig().log_prompts
    assert parse_settings(["--log-prompts"], {}).server.log_prompts


def test_json_line_is_one_object_whatever_is_in_it() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    record = logging.LogRecord("paceline", logging.INFO, "", 0, 'a "b"\nc %s', ("é",), None)
    record.fields = {"path": '/x"\n', "phases_ms": {"queue": 1.5}, "key": None}
    handler.emit(record)
    assert stream.getvalue().count("\n") == 1
    found = json.loads(stream.getvalue())
    assert found["message"] == 'a "b"\nc é'
    assert (found["level"], found["phases_ms"], found["path"]) == ("info", {"queue": 1.5}, '/x"\n')
    text = TextFormatter().format(record)
    assert r'path="/x\"\n"' in text
    assert "phases_ms={queue:1.5}" in text
    assert "key=" not in text


@in_loop
async def test_exemplars_name_the_request_where_openmetrics_is_asked_for() -> None:
    async with house() as server:
        headers = {"x-request-id": "x" * 128}
        body = {"prompt": "a", "max_tokens": 3}
        await server.client.post("/v1/completions", json=body, headers=headers)
        answer = await server.client.get("/metrics", headers=OPENMETRICS)
        plain = await server.client.get("/metrics")
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")
    exemplars = {
        sample.name: sample.exemplar.labels["request_id"]
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
        if sample.exemplar
    }
    assert exemplars["paceline_time_to_first_token_seconds_bucket"] == "x" * 100
    assert exemplars["paceline_request_duration_seconds_bucket"] == "x" * 100
    assert plain.headers["content-type"].startswith("text/plain")
    assert "x" * 100 not in plain.text


@in_loop
async def test_router_gauges_follow_the_load_and_fall_without_a_request() -> None:
    """B115: 32 streams dropped at once; the gauges that routers read are back at once."""
    labels = {"model_name": "scripted"}
    async with house(TextEngine(step_seconds=0.002), live=True) as server:
        size = {"block_size": "16", "num_gpu_blocks": "256", **labels}
        assert await server.metric("vllm:cache_config_info", **size) == 1
        body = json.dumps({"prompt": "x" * 40, "max_tokens": 1000, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-length: {len(body)}\r\n\r\n"
        writers = []
        for _ in range(32):
            _, writer = await connect(server)
            writer.write(head.encode() + body)
            writers.append(writer)

        async def read() -> tuple[float, float, float]:
            names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
            found = [await server.metric(f"vllm:{name}", **labels) for name in names]
            return found[0], found[1], found[2]

        async def loaded() -> bool:
            running, waiting, usage = await read()
            return running == 16 and waiting == 16 and usage > 0.1

        await eventually(loaded)
        for writer in writers:
            writer.close()

        async def quiet() -> bool:
            return await read() == (0, 0, 0)

        await eventually(quiet)
        assert await server.metric("paceline_engine_ready") == 1
        assert await server.metric("paceline_engine_silence_seconds") == 0


@in_loop
async def test_limits_are_counted_as_met_or_missed_once_a_request() -> None:
    config = replace(ServerConfig(), ttft_limit_seconds=30.0, tpot_limit_seconds=0.0001)
    async with house(TextEngine(step_seconds=0.002), config) as server:
        await asyncio.gather(*(server.complete("a", max_tokens=n) for n in (1, 4, 5)))
        count = "paceline_slo_requests_total"
        assert await server.metric(count, met="true", slo="ttft") == 3
        assert await server.metric(count, met="false", slo="ttft") == 0
        # One token has no time per further token.
        assert await server.metric(count, met="false", slo="tpot") == 2
        assert await server.metric("paceline_slo_limit_seconds", slo="tpot") == 0.0001
