"""The answer cache: the same request, tenant, scope and data version, or nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.types import FinishReason
from server.answer_cache import AnswerCache, CachedAnswer, MemoryAnswers, answer_key
from server.choice import Delta
from server.config import ServerConfig
from server.schemas import parse_chat
from tests.server.test_anthropic import accumulated as anthropic_accumulated
from tests.server.test_anthropic import named_events
from tests.support.http_server import (
    CHAT,
    COMPLETIONS,
    MODEL,
    House,
    TextEngine,
    events,
    house,
    in_loop,
    run,
    texts,
)
from tests.support.redis_server import redis_server

WISH = {"scope": "tenant", "data_version": "1"}
USER = [{"role": "user", "content": "greet"}]


def answer(text: str) -> CachedAnswer:
    return CachedAnswer((Delta(text, [], FinishReason.STOP),), {"completion_tokens": 1})


# Few and similar values, so that near misses are common: a bar or a comma must not merge parts.
WORDS = st.sampled_from(["", "a", "b", "a,b", 'a"', "a|b", "tenant", "user"])
NAMES = st.sampled_from(["a", "b", "ab", "a,b", 'a","b'])


@st.composite
def situations(draw: Any) -> tuple[Any, ...]:
    scope = draw(st.sampled_from(["tenant", "user"]))
    wish = {"scope": scope, "data_version": draw(NAMES)}
    if scope == "user":
        wish["user"] = draw(NAMES)
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": draw(NAMES)}],
        "temperature": draw(st.sampled_from([0, 0.0])),
        "answer_cache": wish,
    }
    if draw(st.booleans()):
        body["max_tokens"] = draw(st.sampled_from([1, 2]))
    if draw(st.booleans()):
        body["seed"] = draw(st.sampled_from([0, 1]))
    tenant, model, kind = draw(WORDS), draw(NAMES), draw(st.sampled_from(["chat", "cmpl"]))
    meaning = (
        tenant,
        model,
        kind,
        scope,
        wish.get("user"),
        wish["data_version"],
        body["messages"][0]["content"],
        body.get("max_tokens"),
        body.get("seed"),
    )
    return meaning, body, tenant, model, kind


@asynccontextmanager
async def cache_in(url: str) -> AsyncIterator[AnswerCache]:
    """In memory without a URL."""
    if not url:
        yield MemoryAnswers(lambda: 0.0)
        return
    from server.redis_answers import RedisAnswers
    from server.redis_link import RedisLink

    link = RedisLink(url, asyncio.get_running_loop().time, [].append)
    await link._redis.flushall()
    try:
        yield RedisAnswers(link)
    finally:
        await link.close()


@pytest.fixture(scope="module", params=["memory", "redis"])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of both that can hold the answers."""
    if request.param == "memory":
        yield ""
        return
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@settings(max_examples=300, deadline=None)
@given(st.lists(situations(), min_size=2, max_size=12))
def test_an_answer_is_found_exactly_by_who_may_see_it_and_what_was_asked(
    url: str,
    given_situations: list[tuple[Any, ...]],
) -> None:
    """Never across a tenant, a scope, a user, a model, a data version, or another request."""

    async def check() -> None:
        known: dict[tuple[Any, ...], str] = {}
        async with cache_in(url) as cache:
            for number, (meaning, body, tenant, model, kind) in enumerate(given_situations):
                key = answer_key(parse_chat(body).fields, tenant=tenant, model=model, kind=kind)
                found = await cache.get(key)
                shown = None if found is None else found.deltas[0].text
                assert shown == known.get(meaning)
                known[meaning] = str(number)
                await cache.put(key, answer(str(number)), 10)

    run(check)


def test_what_the_model_is_shown_in_another_order_is_another_request() -> None:
    """Tools are written into the prompt as they were sent; a schema's order is the answer's."""
    a, b = {"type": "integer"}, {"type": "string"}
    keys = set()
    for properties in ({"a": a, "b": b}, {"b": b, "a": a}):
        schema = {"type": "object", "properties": properties}
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        for extra in ({"tools": [tool]}, {"response_format": form}):
            body = {"messages": USER, "temperature": 0, "answer_cache": WISH, **extra}
            fields = parse_chat(body).fields
            keys.add(answer_key(fields, tenant="", model=MODEL, kind="chat"))
            same = parse_chat(dict(reversed(body.items()))).fields
            assert answer_key(same, tenant="", model=MODEL, kind="chat") in keys
    assert len(keys) == 4


@in_loop
async def test_answers_end_with_their_time_and_the_least_used_goes_first() -> None:
    clock = [0.0]
    size = answer("x" * 1000).size()
    cache = MemoryAnswers(lambda: clock[0], max_bytes=3 * size)
    for name in "abc":
        await cache.put(("", name.encode()), answer(name * 1000), 10)
    assert await cache.get(("", b"a")) is not None
    await cache.put(("", b"d"), answer("d" * 1000), 5)
    assert cache.num_bytes <= 3 * size
    assert await cache.get(("", b"b")) is None
    assert await cache.get(("", b"a")) is not None
    clock[0] = 5.0
    assert await cache.get(("", b"d")) is None
    assert await cache.get(("", b"a")) is not None
    clock[0] = 10.0
    assert await cache.get(("", b"a")) is None
    await cache.put(("", b"e"), replace(answer("e"), deltas=(Delta("e" * 10_000),)), 10)
    assert await cache.get(("", b"e")) is None


async def chat(server: House, **fields: Any) -> httpx.Response:
    headers = fields.pop("headers", {})
    body = {"messages": USER, "temperature": 0, "answer_cache": WISH, **fields}
    made = await server.client.post(CHAT, json=body, headers=headers)
    assert made.status_code == 200, made.text
    return made


def result(made: httpx.Response) -> str:
    return made.headers["x-paceline-answer-cache"]


def without(made: httpx.Response, *names: str) -> dict[str, Any]:
    body: dict[str, Any] = made.json()
    body["usage"].pop("answer_cache")
    return {key: value for key, value in body.items() if key not in ("id", "created", *names)}


@in_loop
async def test_a_hit_is_the_same_answer_marked_and_without_the_engine() -> None:
    """Plain, and replayed as a stream where that is asked for; counted in the metrics."""
    async with house(TextEngine({"greet": "Hello, čau."})) as server:
        extra = {"n": 2, "logprobs": True, "top_logprobs": 1}
        first = await chat(server, **extra)
        assert result(first) == "miss"
        server.engine.scripts.clear()  # type: ignore[attr-defined]
        again = await chat(server, **extra, user="someone", priority=3)
        assert result(again) == again.json()["usage"]["answer_cache"] == "hit"
        assert without(again) == without(first)
        options = {"stream": True, "stream_options": {"include_usage": True}}
        stream = await chat(server, **extra, **options)
        assert result(stream) == "hit"
        chunks = events(stream.text)
        assert texts(chunks) == {0: "Hello, čau.", 1: "Hello, čau."}
        rows = [
            row
            for chunk in chunks
            for choice in chunk["choices"]
            if choice["index"] == 0 and choice["logprobs"]
            for row in choice["logprobs"]["content"]
        ]
        assert rows == first.json()["choices"][0]["logprobs"]["content"]
        assert chunks[-1]["usage"]["answer_cache"] == "hit"
        assert await server.metric("paceline_answer_cache_total", result="hit") == 2
        assert await server.metric("paceline_answer_cache_total", result="miss") == 1


@in_loop
async def test_an_answer_that_was_streamed_is_kept_too() -> None:
    async with house(TextEngine({"greet": "Hello."})) as server:
        stream = await chat(server, stream=True)
        assert result(stream) == "miss"
        plain = await chat(server)
        assert result(plain) == "hit"
        assert plain.json()["choices"][0]["message"]["content"] == "Hello."


@in_loop
async def test_nothing_crosses_a_key_a_user_a_version_or_a_kind() -> None:
    config = ServerConfig(api_keys=("alice:sk-a", "bob:sk-b"))
    alice, bob = ({"authorization": f"Bearer sk-{name}"} for name in "ab")
    of_ann = {"scope": "user", "user": "ann", "data_version": "1"}
    async with house(TextEngine({"greet": "Hello."}), config) as server:
        assert result(await chat(server, headers=alice)) == "miss"
        assert result(await chat(server, headers=bob)) == "miss"
        assert result(await chat(server, headers=alice, answer_cache=of_ann)) == "miss"
        for changed in ({"user": "bea"}, {"data_version": "2"}):
            wish = {**of_ann, **changed}
            assert result(await chat(server, headers=alice, answer_cache=wish)) == "miss"
        assert result(await chat(server, headers=alice, answer_cache=of_ann)) == "hit"
        assert result(await chat(server, headers=alice)) == "hit"
        assert result(await chat(server, headers=alice, max_tokens=3)) == "miss"
        body = {"model": MODEL, "messages": USER, "max_tokens": 3, "temperature": 0}
        for expected in ("miss", "hit"):
            made = await server.client.post(
                "/v1/messages", json={**body, "answer_cache": WISH}, headers=alice
            )
            assert result(made) == expected
        made = await server.client.post(
            "/v1/messages", json={**body, "answer_cache": WISH, "stream": True}, headers=alice
        )
        message = anthropic_accumulated(named_events(made.text))
        assert message["content"] == [{"type": "text", "text": "Hel"}]
        assert message["stop_reason"] == "max_tokens"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 1.0}, "answer_cache"),
        ({"answer_cache": {"scope": "user", "data_version": "1"}}, "answer_cache.user"),
        ({"answer_cache": {**WISH, "user": "x"}}, "answer_cache.user"),
        ({"answer_cache": {"scope": "tenant"}}, "answer_cache.data_version"),
        ({"answer_cache": {**WISH, "scope": "all"}}, "answer_cache.scope"),
        ({"best_of": 3, "n": 1}, "answer_cache"),
    ],
)
@in_loop
async def test_a_wish_that_cannot_be_kept_is_refused(fields: dict[str, Any], param: str) -> None:
    async with house(TextEngine({"greet": "Hello."})) as server:
        body = {"prompt": "greet", "temperature": 0, "answer_cache": WISH, **fields}
        made = await server.client.post(COMPLETIONS, json=body)
        assert made.status_code == 400
        assert made.json()["error"]["param"] == param


@in_loop
async def test_without_a_wish_nothing_is_kept_or_said() -> None:
    async with house(TextEngine({"greet": "Hello."})) as server:
        body = {"prompt": "greet", "temperature": 0}
        for _ in range(2):
            made = await server.client.post(COMPLETIONS, json=body)
            assert "x-paceline-answer-cache" not in made.headers
            assert "answer_cache" not in made.json()["usage"]
