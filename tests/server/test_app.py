"""What is around the endpoints: probes, models, unknown paths, ids, CORS, bugs."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading

import httpx
import pytest

from scheduler.limits import SchedulerLimits
from server import inference
from server.app import create_app, start_template
from server.chat_template import ChatTemplate
from server.config import ServerConfig
from server.core_client import CoreClient
from tests.support.http_server import (
    CHAT,
    COMPLETIONS,
    MODEL,
    TextEngine,
    eventually,
    house,
    in_loop,
    shared_tokenizer,
)


def client_of(core: CoreClient, config: ServerConfig | None = None) -> httpx.AsyncClient:
    app = create_app(core, shared_tokenizer(), config or ServerConfig())
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test")


@in_loop
async def test_loading_server_is_alive_and_not_ready() -> None:
    """B134: nothing hangs; models are not listed before the model can serve."""
    async with client_of(CoreClient()) as client:
        assert (await client.get("/health")).status_code == 200
        for path in ("/ready", "/v1/models", f"/v1/models/{MODEL}"):
            answer = await client.get(path)
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) >= 1
        for path in (CHAT, COMPLETIONS):
            answer = await client.post(path, json={"prompt": "x", "messages": []})
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "model_loading"
            assert int(answer.headers["retry-after"]) >= 1


@in_loop
async def test_draining_server_is_alive_and_takes_nothing_new() -> None:
    """B127: running streams finish."""
    async with house(TextEngine({"greet": "Hello"}, step_seconds=0.01)) as server:
        running = asyncio.create_task(server.chat("greet", stream=True))
        await eventually(lambda: server.core.num_unfinished == 1)
        server.core.drain()
        refused = await server.chat("greet", stream=True)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "server_draining"
        assert "retry-after" in refused.headers
        assert (await server.client.get("/health")).status_code == 200
        assert (await server.client.get("/ready")).status_code == 503
        assert (await running).text.endswith("data: [DONE]\n\n")


@in_loop
async def test_drain_limit_ends_a_stream_with_an_error_event() -> None:
    """B127."""
    async with house(TextEngine(step_seconds=0.005), live=True) as server:
        lines = []
        body = {"prompt": "x", "max_tokens": 1500, "stream": True}
        async with server.client.stream("POST", COMPLETIONS, json=body) as answer:
            async for line in answer.aiter_lines():
                lines.append(line)
                if len(lines) == 6:
                    server.core.drain()
                    server.core.end_all("the server is shutting down")
    data = [line for line in lines if line]
    assert data[-1] == "data: [DONE]"
    assert "shutting down" in data[-2]


@in_loop
async def test_frozen_engine_is_unhealthy_until_it_moves() -> None:
    """B125: only while work is pending; an idle engine stays healthy."""
    config = ServerConfig(stall_seconds=0.2)
    async with house(config=config) as server:
        await asyncio.sleep(0.3)
        assert (await server.client.get("/health")).status_code == 200
        server.engine.running.clear()
        answer = asyncio.create_task(server.chat("x", max_tokens=3))
        await eventually(lambda: server.core.num_unfinished == 1)
        await asyncio.sleep(0.3)
        assert (await server.client.get("/health")).status_code == 503
        assert (await server.client.get("/ready")).status_code == 503
        server.engine.running.set()
        assert (await answer).status_code == 200
        assert (await server.client.get("/health")).status_code == 200


@in_loop
async def test_dead_engine_is_told_everywhere() -> None:
    """B124: a plain request in flight gets its error, new ones 503 at once."""
    async with house(TextEngine(step_seconds=0.005)) as server:
        running = asyncio.create_task(server.chat("x", max_tokens=1000))
        await eventually(lambda: server.core.num_unfinished == 1)
        server.engine.fail_step.set()
        answer = await running
        assert answer.status_code in (500, 503)
        await eventually(lambda: server.core.state == "failed")
        assert (await server.client.get("/health")).status_code == 503
        assert (await server.client.get("/ready")).status_code == 503
        assert (await server.client.get("/v1/models")).status_code == 503
        refused = await server.chat("x")
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "engine_unavailable"
        # Gauges of a dead engine do not keep their last values.
        assert await server.metric("paceline_requests_running") == 0
        assert await server.metric("paceline_requests_finished_total", reason="error") == 1


@in_loop
async def test_what_the_model_card_promises_is_taken_to_the_token() -> None:
    """B028: a prompt of the longest input leaves room for an answer; one more is refused."""
    async with house() as server:
        (card,) = (await server.client.get("/v1/models")).json()["data"]
        longest = [65] * card["max_input_tokens"]
        taken = await server.complete(longest, max_tokens=1)
        assert taken.status_code == 200
        assert (await server.complete([*longest, 65], max_tokens=1)).status_code == 400
        answer = await server.complete([65], max_tokens=10**6, ignore_eos=True)
        assert answer.json()["usage"]["completion_tokens"] == card["max_output_tokens"]


@in_loop
async def test_model_card_tells_the_limits() -> None:
    async with house(config=ServerConfig(max_input_tokens=100)) as server:
        listed = (await server.client.get("/v1/models")).json()
        card = (await server.client.get(f"/v1/models/{MODEL}")).json()
        assert listed == {"object": "list", "data": [card]}
        assert card["id"] == MODEL
        assert card["object"] == "model"
        assert card["max_model_len"] == 2048
        assert card["max_input_tokens"] == 100
        for name in ("other", "a/b", "../scripted", "scripted/", "%2e%2e"):
            missing = await server.client.get(f"/v1/models/{name}")
            assert missing.status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("POST", "/v1/completions/", 404),
        ("GET", "/redoc", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/health", 405),
        ("OPTIONS", CHAT, 405),
        ("GET", "/" + "x" * 5000, 404),
    ],
)
@in_loop
async def test_every_error_has_the_envelope(method: str, path: str, status: int) -> None:
    async with house() as server:
        answer = await server.client.request(method, path)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert len(answer.text) < 1000
    assert answer.headers["x-request-id"]
    assert ("allow" in answer.headers) == (status == 405)


@in_loop
async def test_root_answers_get_and_head() -> None:
    async with house() as server:
        root = await server.client.get("/")
        assert root.json()["name"] == "paceline"
        head = await server.client.head("/")
        assert (head.status_code, head.content) == (200, b"")
        assert (await server.client.get("/version")).json()["version"]


@in_loop
async def test_bug_is_a_500_in_the_envelope_without_its_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = shared_tokenizer()

    def broken(*_args: object, **_kwargs: object) -> None:
        raise ZeroDivisionError("secret detail")

    async with house() as server:
        with monkeypatch.context() as patch:
            patch.setattr(type(tokenizer), "encode", broken)
            for stream in (False, True):
                answer = await server.complete("x", stream=stream)
                assert answer.status_code == 500
                assert answer.json()["error"]["code"] == "internal_error"
                assert "secret" not in answer.text
                assert answer.headers["x-request-id"]
        assert (await server.complete("x")).status_code == 200


@in_loop
async def test_request_id_is_echoed_if_it_is_sane() -> None:
    """B164: else a new one is made; on errors and streams too."""
    async with house(TextEngine({"greet": "Hello"})) as server:

        async def id_for(given: str | bytes | None, **fields: object) -> str:
            headers = {} if given is None else {"x-request-id": given}
            body = {"prompt": "greet", **fields}
            answer = await server.client.post(COMPLETIONS, json=body, headers=headers)  # type: ignore[arg-type]
            assert len(answer.headers.get_list("x-request-id")) == 1
            assert "mine" not in answer.text
            return str(answer.headers["x-request-id"])

        for fields in ({}, {"stream": True}, {"n": 0}):
            assert await id_for("mine-1.a_B", **fields) == "mine-1.a_B"
            assert await id_for(None, **fields) != await id_for(None, **fields)
            for odd in ("x" * 129, "x" * 100_000, "a b", "", "é".encode(), b"a\x1b[31m", "a;b"):
                made = await id_for(odd, **fields)
                assert len(made) == 32
                assert made.isalnum()


@in_loop
async def test_cors_is_off_by_default() -> None:
    async with house() as server:
        headers = {"origin": "http://a.example", "access-control-request-method": "POST"}
        preflight = await server.client.options(CHAT, headers=headers)
        assert preflight.status_code == 405
        answer = await server.client.get("/v1/models", headers=headers)
    assert not [name for name in answer.headers if name.startswith("access-control")]


@in_loop
async def test_a_preflight_that_is_refused_is_an_error_like_others() -> None:
    config = ServerConfig(cors_origins=("http://a.example",))
    asked = {"origin": "http://b.example", "access-control-request-method": "POST"}
    async with house(config=config) as server:
        answer = await server.client.options(CHAT, headers=asked)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "cors_refused"
        assert "access-control-allow-origin" not in answer.headers
        assert "Origin" in answer.headers["vary"]
        assert await server.metric("paceline_requests_refused_total", reason="cors_refused") == 1


@in_loop
async def test_cors_preflight_needs_no_key() -> None:
    config = ServerConfig(cors_origins=("http://a.example",), api_keys=("k",))
    async with house(config=config) as server:
        headers = {
            "origin": "http://a.example",
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
        }
        preflight = await server.client.options(CHAT, headers=headers)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "http://a.example"
        assert preflight.headers["x-request-id"]
        answer = await server.client.get("/v1/models", headers=headers)
        assert answer.status_code == 401
        assert answer.headers["access-control-allow-origin"] == "http://a.example"
        other = await server.client.options(CHAT, headers={**headers, "origin": "http://evil"})
        assert other.status_code == 400
        assert "access-control-allow-origin" not in other.headers
        readable = answer.headers["access-control-expose-headers"].split(", ")
        assert {"x-request-id", "request-id", "retry-after"} < set(readable)
        assert {"x-paceline-ignored-params", "x-paceline-answer-cache"} < set(readable)


@in_loop
async def test_list_of_prompts_is_taken_whole_or_not_at_all() -> None:
    """B133: the place of the first prompt is free again if the second finds none."""
    tight = SchedulerLimits(max_step_tokens=64, max_waiting=1, max_running=1, watermark_blocks=0)
    async with house(TextEngine({"greet": "Hello"}), limits=tight) as server:
        server.engine.running.clear()
        before = asyncio.create_task(server.complete("greet"))
        await eventually(lambda: server.core.num_unfinished == 1)
        answer = await server.complete(["greet", "greet"])
        assert answer.status_code == 429
        assert server.core.num_open == 1
        server.engine.running.set()
        assert (await before).status_code == 200
        await eventually(lambda: server.core.num_unfinished == 0)
        assert (await server.complete(["greet", "greet"])).status_code == 200
        assert await server.metric("paceline_requests_accepted_total") == 3


@in_loop
async def test_what_waits_to_be_read_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """B040: prompts queue for the tokenizer up to a limit, then 429."""
    monkeypatch.setattr(inference, "MAX_PREPARING", 2)
    monkeypatch.setattr(inference, "PREPARE_THREADS", 1)
    gate = threading.Event()
    tokenizer = shared_tokenizer()
    encode = type(tokenizer).encode

    def slow(*args: object, **kwargs: object) -> object:
        gate.wait(10)
        return encode(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(type(tokenizer), "encode", slow)
    async with house() as server:
        try:
            tasks = [asyncio.create_task(server.complete("x", max_tokens=1)) for _ in range(2)]
            await asyncio.sleep(0.05)
            refused = await server.complete("x")
            health = await server.client.get("/health")
        finally:
            gate.set()
        taken = await asyncio.gather(*tasks)
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "prepare_queue_full"
    assert health.status_code == 200
    assert [answer.status_code for answer in taken] == [200, 200]


@in_loop
async def test_two_hundred_streams_at_once_with_hang_ups_leave_nothing() -> None:
    """B131, B137: a third leaves at random moments; every request ends once."""
    chance = random.Random(7)
    roomy = SchedulerLimits(
        max_step_tokens=256, max_waiting=300, max_running=16, watermark_blocks=1
    )
    async with house(TextEngine({"greet": "Hello " * 5}), limits=roomy, live=True) as server:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, limits=limits, timeout=30) as client:

            async def one(leaves_after: float | None) -> str:
                body = {"prompt": "greet", "max_tokens": 100, "stream": True}
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(leaves_after):
                        return (await client.post(COMPLETIONS, json=body)).text
                return "left"

            ends = await asyncio.gather(
                *(one(chance.uniform(0, 0.5) if i % 3 == 0 else None) for i in range(200))
            )
        whole = [text for text in ends if text != "left"]
        assert len(whole) >= 133
        assert all(text.endswith("data: [DONE]\n\n") for text in whole)
        await eventually(lambda: server.core.num_unfinished == 0 and server.core.num_open == 0)
        text = (await server.client.get("/metrics")).text
        accepted = await server.metric("paceline_requests_accepted_total")
        reasons = ("stop", "length", "abort", "error")
        ended = [await server.metric("paceline_requests_finished_total", reason=r) for r in reasons]
    assert sum(ended) == accepted
    assert ended[0] >= len(whole)
    assert "paceline_requests_running 0.0" in text
    assert "paceline_kv_usage_ratio 0.0" in text


def test_broken_chat_template_is_told_and_does_no_more(caplog: pytest.LogCaptureFixture) -> None:
    start_template(ChatTemplate("{% if %}"))
    assert "chat template is broken" in caplog.text
    caplog.clear()
    start_template(None)
    assert not caplog.text
