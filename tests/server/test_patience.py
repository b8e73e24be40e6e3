"""How long a request may wait to be begun: by flag, by header, and what becomes of it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from scheduler.limits import SchedulerLimits
from server.config import ServerConfig
from server.errors import InvalidRequest
from server.patience import HEADER, patience
from tests.support.http_server import (
    COMPLETIONS,
    MODEL,
    House,
    TextEngine,
    eventually,
    house,
    in_loop,
)

ONE_SLOT = SchedulerLimits(max_step_tokens=64, max_waiting=8, max_running=1, watermark_blocks=1)
PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3},
    "/v1/completions": {"prompt": "x", "max_tokens": 3},
    "/v1/messages": {
        "model": MODEL,
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 3,
    },
    "/v1/responses": {"input": "x", "max_output_tokens": 16},
    "/v1/embeddings": {"input": ["x", "y"]},
}


class Busy:
    """A server whose only slot is held by a long answer."""

    def __init__(self, **config: Any) -> None:
        self._config = ServerConfig(**config)

    async def __aenter__(self) -> House:
        engine = TextEngine(step_seconds=0.02)
        self._house = house(engine, self._config, limits=ONE_SLOT)
        self.server = await self._house.__aenter__()
        body = {"prompt": "long", "max_tokens": 1900, "ignore_eos": True, "stream": True}
        self._stream = self.server.client.stream("POST", COMPLETIONS, json=body)
        self._task = asyncio.create_task(self._hold())
        await eventually(lambda: engine.num_steps > 2)
        return self.server

    async def _hold(self) -> None:
        async with self._stream as answer:
            await answer.aread()

    async def __aexit__(self, *error: Any) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})
        await self._house.__aexit__(*error)


@pytest.mark.parametrize("path", sorted(PATHS))
@in_loop
async def test_request_that_is_not_begun_in_time_ends_with_503(path: str) -> None:
    async with Busy() as server:
        headers = {HEADER: "0.1"}
        answer = await server.client.post(path, json=PATHS[path], headers=headers)
        assert answer.status_code in (503, 529), answer.text
        assert "could not be begun within the 0.1 s" in answer.text
        assert int(answer.headers["retry-after"]) >= 1
        if path != "/v1/messages":
            assert answer.json()["error"]["code"] == "deadline_exceeded"
        await eventually(lambda: server.core.num_unfinished == 1)
        refused = "paceline_requests_refused_total"
        assert await server.metric(refused, reason="deadline_exceeded") == 1
        listed = (await server.client.get("/admin/requests")).json()["finished"]
        assert listed[0]["finish"].startswith("expired")
    assert server.engine.num_steps > 0


@in_loop
async def test_limit_of_the_server_ends_what_waits_too_long() -> None:
    async with Busy(max_queue_seconds=0.1) as server:
        answer = await server.complete("x", max_tokens=3)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "queue_timeout"
        assert await server.metric("paceline_requests_finished_total", reason="expired") == 1
        assert server.core.num_unfinished == 1


@in_loop
async def test_stream_that_has_begun_gets_an_event_and_another_a_status() -> None:
    async with Busy(keepalive_seconds=0.05) as server:
        body = {"prompt": "x", "max_tokens": 3, "stream": True}
        late = await server.client.post(COMPLETIONS, json=body, headers={HEADER: "0.4"})
        assert late.status_code == 200
        assert late.text.startswith(": keep-alive")
        assert '"deadline_exceeded"' in late.text
        assert late.text.endswith("data: [DONE]\n\n")
        refused = "paceline_requests_refused_total"
        assert await server.metric(refused, reason="deadline_exceeded") == 1
    async with Busy() as server:
        early = await server.client.post(COMPLETIONS, json=body, headers={HEADER: "0.1"})
        assert early.status_code == 503


@in_loop
async def test_what_has_begun_is_not_cut_by_its_deadline() -> None:
    async with house(TextEngine(step_seconds=0.02)) as server:
        body = {"prompt": "x", "max_tokens": 30, "ignore_eos": True}
        answer = await server.client.post(COMPLETIONS, json=body, headers={HEADER: "0.2"})
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 30


@pytest.mark.parametrize("value", ["", "soon", "0", "-1", "nan", "inf", "1e9"])
@in_loop
async def test_header_that_is_no_time_is_refused(value: str) -> None:
    async with house(TextEngine({"greet": "Hi"})) as server:
        answer = await server.client.post(
            COMPLETIONS, json={"prompt": "greet"}, headers={HEADER: value}
        )
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == HEADER
        assert json.loads(answer.text)["error"]["code"] == "invalid_value"


def limit(headers: dict[str, str], *, streams: bool = False, most: float | None = None) -> Any:
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    return patience(pairs, received=100.0, now=101.0, max_queue_seconds=most, streams=streams)


def test_earlier_of_both_limits_counts() -> None:
    assert limit({}) is None
    assert limit({HEADER: "5"}).until == 105.0
    assert limit({HEADER: "5"}, most=3.0).until == 104.0
    assert not limit({HEADER: "5"}, most=3.0).of_client
    assert limit({HEADER: "5"}, most=30.0).of_client
    assert limit({HEADER: "5"}, streams=True).until == 105.0


def test_read_timeout_of_a_client_library_counts_without_a_stream_only() -> None:
    """While a stream waits it has bytes, so its client waits on."""
    told = {"x-stainless-read-timeout": "20"}
    assert limit(told).until == 120.0
    assert limit(told, streams=True) is None
    assert limit({**told, HEADER: "50"}).until == 150.0
    for odd in ("None", "", "x", "-3", "inf"):
        assert limit({"x-stainless-read-timeout": odd}) is None
    with pytest.raises(InvalidRequest):
        limit({HEADER: "x"})
