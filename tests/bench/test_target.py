"""What is asked of a server, and what is left out when it refuses."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bench.http_stream import HttpClient, RequestFailed
from bench.target import Target, connect
from tests.bench.fake_server import Answer, FakeServer, Script, client_of, fake_server, honest


def connected(script: Script, *, api: str = "completions") -> tuple[Target, FakeServer]:
    async def run() -> tuple[Target, FakeServer]:
        async with fake_server(script) as fake, client_of(fake) as client:
            return await connect(client, api=api, model="auto"), fake

    return asyncio.run(run())


def refusing(*names: str) -> Script:
    def script(body: dict[str, Any]) -> Answer:
        if any(name in body for name in names):
            return Answer([(0, b'{"error":{"message":"unknown field"}}')], "422 Unprocessable")
        return honest(body)

    return script


def test_model_is_the_servers_first() -> None:
    target, fake = connected(honest)
    assert target.model == "fake"
    assert fake.bodies[0] == {
        "model": "fake",
        "prompt": "Hello",
        "max_tokens": 1,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }


def test_chat_sends_messages() -> None:
    target, fake = connected(honest, api="chat")
    assert target.path == "/v1/chat/completions"
    assert fake.bodies[0]["messages"] == [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize(
    "names", [(), ("ignore_eos",), ("stream_options",), ("ignore_eos", "stream_options")]
)
def test_only_the_refused_fields_are_left_out(names: tuple[str, ...]) -> None:
    target, fake = connected(refusing(*names))
    assert target.refused == names
    assert not any(name in fake.bodies[-1] for name in names)


def test_server_that_refuses_everything_is_an_error_in_its_words() -> None:
    with pytest.raises(RequestFailed, match="unknown field"):
        connected(refusing("prompt"))


@pytest.mark.parametrize("status", ["401 Unauthorized", "404 Not Found", "503 Busy"])
def test_other_refusals_end_at_once(status: str) -> None:
    with pytest.raises(RequestFailed) as caught:
        connected(lambda _: Answer([(0, b"{}")], status))
    assert caught.value.kind == f"http_{status[:3]}"


def test_prompt_tokens_are_the_servers_count() -> None:
    async def run() -> int | None:
        async with fake_server(honest) as fake, client_of(fake) as client:
            return await Target(client, "completions", "m").count_prompt("one two")

    assert asyncio.run(run()) == 5


@pytest.mark.parametrize("url", ["http://h/v1", "http://h", "http://h/v1/", "h"])
def test_url_with_or_without_v1_is_the_same(url: str) -> None:
    assert HttpClient(url, {}).base_path == ""


def test_path_before_v1_is_kept() -> None:
    assert HttpClient("http://h/proxy/v1", {}).base_path == "/proxy"


@pytest.mark.parametrize("url", ["ftp://h", "http://", ""])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="URL"):
        HttpClient(url, {})
