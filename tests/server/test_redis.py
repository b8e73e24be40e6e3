"""Servers that share a Redis: what one made the other knows, and what happens when it is away."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.config import ConfigError, ServerConfig, parse_settings
from server.responses.store import StoredResponse
from tests.server.test_answer_cache import chat, result, without
from tests.server.test_responses import RESPONSES, SCRIPTS, accumulated, ask
from tests.support.http_server import TextEngine, eventually, house, in_loop, run
from tests.support.redis_server import RedisServer, redis_server

pytest.importorskip("redis", reason="the extra `redis` is not installed here")

from server.redis_link import RedisGone, RedisLink, name_of
from server.responses.redis_store import RedisResponses, _lease

KEYS = ("alice:sk-a", "bob:sk-b")
ALICE, BOB = ({"authorization": f"Bearer sk-{name}"} for name in "ab")


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """For tests that stop it."""
    with redis_server(tmp_path) as server:
        yield server


def link_to(server: RedisServer, failures: list[str] | None = None) -> RedisLink:
    clock = asyncio.get_running_loop().time
    return RedisLink(server.url, clock, [].append if failures is None else failures.append)


def test_an_answer_of_one_server_is_a_hit_at_the_other(redis: RedisServer) -> None:
    config = ServerConfig(redis_url=redis.url, api_keys=KEYS)
    extra = {"n": 2, "logprobs": True, "top_logprobs": 3}

    async def check() -> None:
        async with (
            house(TextEngine({"greet": "Hello, čau."}), config, live=True) as one,
            house(TextEngine({"greet": "Something else."}), config, live=True) as other,
        ):
            made = await chat(one, headers=ALICE, **extra)
            assert result(made) == "miss"
            again = await chat(other, headers=ALICE, **extra)
            assert result(again) == "hit"
            assert without(again) == without(made)
            stream = await chat(other, headers=ALICE, stream=True, **extra)
            assert result(stream) == "hit"
            assert result(await chat(other, headers=BOB, **extra)) == "miss"

    run(check)


def test_a_response_of_one_server_is_known_at_the_other(redis: RedisServer) -> None:
    config = ServerConfig(redis_url=redis.url, api_keys=KEYS)

    async def check() -> None:
        async with (
            house(TextEngine(SCRIPTS), config, live=True) as one,
            house(TextEngine(SCRIPTS), config, live=True) as other,
        ):
            streamed = await ask(one, headers=ALICE, stream=True)
            made = accumulated(streamed.text)
            path = f"{RESPONSES}/{made['id']}"
            found = await other.client.get(path, headers=ALICE)
            assert found.json() == made
            again = await other.client.get(path + "?stream=true", headers=ALICE)
            assert again.text == streamed.text
            assert (await other.client.get(path, headers=BOB)).status_code == 404
            later = await ask(other, "and then?", previous_response_id=made["id"], headers=ALICE)
            assert later.json()["output"][0]["content"][0]["text"] == "Later."
            assert (await other.client.delete(path, headers=ALICE)).status_code == 200
            assert (await one.client.get(path, headers=ALICE)).status_code == 404

    run(check)


def test_a_background_response_is_followed_and_cancelled_from_the_other(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.responses.background.HOLD_SECONDS", 0.05)
    config = ServerConfig(redis_url=redis.url)

    async def check() -> None:
        async with (
            house(TextEngine(SCRIPTS, step_seconds=0.02), config, live=True) as one,
            house(TextEngine(SCRIPTS), config, live=True) as other,
        ):
            started = (await ask(one, background=True)).json()
            path = f"{RESPONSES}/{started['id']}"
            whole = accumulated((await other.client.get(path + "?stream=true")).text)
            assert whole["output"][0]["content"][0]["text"] == SCRIPTS["greet"]
            for end in ("/cancel", ""):
                started = (await ask(one, "endless", background=True)).json()
                path = f"{RESPONSES}/{started['id']}"
                await eventually(lambda: one.core.num_open > 0)
                method = "POST" if end else "DELETE"
                ended = await other.client.request(method, path + end)
                assert ended.status_code == 200
                await eventually(lambda: one.core.num_open == 0)
                found = await one.client.get(path)
                assert (found.json()["status"] == "cancelled") if end else found.status_code == 404

    run(check)


def test_a_response_whose_server_is_gone_is_told_as_failed(redis: RedisServer) -> None:
    async def check() -> None:
        link = link_to(redis)
        store = RedisResponses(link)
        key = ("", "resp_lost")
        await store.put(key, StoredResponse({"status": "in_progress"}, (), 0, 0))
        assert await store.hold([key]) == []
        found = await store.get(key)
        assert found is not None
        assert found.body["status"] == "in_progress"
        await link.delete(_lease(key))
        found = await store.get(key)
        assert found is not None
        assert found.body["status"] == "failed"
        assert "stopped" in found.body["error"]["message"]
        await link.close()

    run(check)


NAMES = st.sampled_from(["", "a", "b", "ab", "a,b", 'a","b', "lease"])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(NAMES, NAMES, st.booleans()), min_size=2, max_size=12))
def test_a_response_is_found_exactly_under_the_tenant_and_id_that_it_has(
    redis: RedisServer, steps: list[tuple[str, str, bool]]
) -> None:
    async def check() -> None:
        link = link_to(redis)
        store = RedisResponses(link)
        for tenant, response_id, _ in steps:
            await store.delete((tenant, response_id))
        known: dict[tuple[str, str], int] = {}
        for number, (tenant, response_id, is_deleted) in enumerate(steps):
            key = (tenant, response_id)
            found = await store.get(key)
            assert (None if found is None else found.num_input) == known.get(key)
            if is_deleted:
                assert await store.delete(key) == (known.pop(key, None) is not None)
            else:
                body = StoredResponse({"status": "completed"}, (), 0, number)
                await store.put(key, body)
                known[key] = number
        await link.close()

    run(check)


def test_no_request_fails_while_redis_is_gone_but_those_that_need_it(
    own_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """One line an outage; what is not kept is counted, and a response that cannot be is refused."""
    config = ServerConfig(redis_url=own_redis.url)

    async def check() -> None:
        async with house(TextEngine(SCRIPTS | {"greet": "Hello."}), config, live=True) as server:
            assert result(await chat(server)) == "miss"
            assert result(await chat(server)) == "hit"
            made = (await ask(server)).json()
            own_redis.kill()
            for _ in range(3):
                assert result(await chat(server)) == "miss"
            for stream in (False, True):
                refused = await ask(server, stream=stream)
                assert refused.status_code == 503
                assert refused.json()["error"]["code"] == "store_unavailable"
                assert int(refused.headers["retry-after"]) >= 1
            found = await server.client.get(f"{RESPONSES}/{made['id']}")
            assert found.status_code == 503
            assert (await ask(server, store=False)).status_code == 200
            assert await server.metric("paceline_redis_failures_total", use="answer_cache") >= 3
            assert await server.metric("paceline_redis_failures_total", use="responses") >= 3
            own_redis.start()

            async def is_kept() -> bool:
                return (await ask(server)).status_code == 200

            await eventually(is_kept, 10.0)
            assert result(await chat(server)) == "miss"
            assert result(await chat(server)) == "hit"

    with caplog.at_level(logging.WARNING, "paceline.redis"):
        run(check)
    told = [record.getMessage() for record in caplog.records if record.name == "paceline.redis"]
    assert [line.split(",")[0] for line in told] == ["redis fails", "redis answers again"]


def test_a_background_response_ends_in_order_though_redis_is_gone(
    own_redis: RedisServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot be kept, which is no reason for a task to die of it."""
    monkeypatch.setattr("server.responses.background.HOLD_SECONDS", 0.01)
    config = ServerConfig(redis_url=own_redis.url)

    async def check() -> None:
        engine = TextEngine(SCRIPTS, step_seconds=0.02)
        async with house(engine, config, live=True) as server:
            started = (await ask(server, background=True)).json()
            await eventually(lambda: server.core.num_open > 0)
            own_redis.kill()
            await eventually(lambda: server.core.num_open == 0, 20.0)
            own_redis.start()
            path = f"{RESPONSES}/{started['id']}"

            async def is_forgotten() -> bool:
                return (await server.client.get(path)).status_code == 404

            await eventually(is_forgotten, 20.0)
        gc.collect()

    run(check, 60.0)
    assert not [record for record in caplog.records if record.name == "asyncio"]


def test_a_redis_that_says_nothing_is_waited_for_once(
    own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.redis_link.PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr("server.redis_link.PAUSE_SECONDS", 3600.0)
    config = ServerConfig(redis_url=own_redis.url)

    async def check() -> None:
        async with house(TextEngine({"greet": "Hello."}), config, live=True) as server:
            assert result(await chat(server)) == "miss"
            own_redis.pause()
            for _ in range(20):
                assert result(await chat(server)) == "miss"
            own_redis.go_on()

    run(check)


def test_a_call_that_is_given_up_leaves_its_answer_to_nobody(redis: RedisServer) -> None:
    """The reply to a cancelled call must not be taken for the reply to the next one."""

    async def check() -> None:
        link = link_to(redis)
        names = [name_of("responses", str(number)) for number in range(40)]
        for name in names:
            await link.put(name, name.encode(), 60)
        for turns in range(12):
            tasks = [asyncio.create_task(link.get(name)) for name in names]
            for _ in range(turns):
                await asyncio.sleep(0)
            for task in tasks[::2]:
                task.cancel()
            await asyncio.wait(tasks)
            for name, task in zip(names, tasks, strict=True):
                if not task.cancelled():
                    assert task.result() == name.encode()
            assert await link.get(names[0]) == names[0].encode()
        await link.close()

    run(check)


def test_a_value_of_another_name_is_not_believed(redis: RedisServer) -> None:
    async def check() -> None:
        failures: list[str] = []
        link = link_to(redis, failures)
        one, other = name_of("answer_cache", "1"), name_of("answer_cache", "2")
        await link.put(one, b"secret", 60)
        whole = await link._redis.get(one)
        await link._redis.set(other, whole)
        with pytest.raises(RedisGone):
            await link.get(other)
        assert failures == ["answer_cache"]
        await link.close()

    run(check)


def test_a_damaged_value_is_as_good_as_none(redis: RedisServer) -> None:
    async def damage(link: RedisLink) -> None:
        names: Any = await link._redis.keys("*")
        for name in names:
            whole: Any = await link._redis.get(name)
            await link._redis.set(name, whole[: len(whole) - 3])

    async def check() -> None:
        link = link_to(redis)
        await link._redis.flushall()
        config = ServerConfig(redis_url=redis.url)
        async with house(TextEngine(SCRIPTS | {"greet": "Hello."}), config, live=True) as server:
            assert result(await chat(server)) == "miss"
            made = (await ask(server)).json()
            await damage(link)
            again = await chat(server)
            assert again.status_code == 200
            assert result(again) == "miss"
            assert result(await chat(server)) == "hit"
            found = await server.client.get(f"{RESPONSES}/{made['id']}")
            assert found.status_code == 404
            assert await server.metric("paceline_redis_failures_total", use="responses") == 1
        await link.close()

    run(check)


@pytest.mark.parametrize("url", ["http://x", "localhost", ""])
def test_an_address_of_something_else_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--redis-url"):
        parse_settings(["--redis-url", url], {})


@in_loop
async def test_a_redis_that_is_not_there_is_told_at_the_start(
    caplog: pytest.LogCaptureFixture,
) -> None:
    link = RedisLink("redis://127.0.0.1:9/0", asyncio.get_running_loop().time, [].append)
    await link.greet()
    await link.greet()
    await link.close()
    assert [record.name for record in caplog.records] == ["paceline.redis"]
    assert "connecting to 127.0.0.1:9" in caplog.text


@in_loop
async def test_an_address_that_cannot_be_read_is_not_shown() -> None:
    with pytest.raises(ConfigError, match="--redis-url") as caught:
        async with house(config=ServerConfig(redis_url="redis://:secret@host:port/0")):
            pass
    assert "secret" not in str(caught.value)


def test_what_is_kept_ends_with_its_time(redis: RedisServer) -> None:
    async def check() -> None:
        link = link_to(redis)
        name = name_of("answer_cache", "short")
        await link.put(name, b"x", 0.05)

        async def is_gone() -> bool:
            return await link.get(name) is None

        await eventually(is_gone)
        await link.replace(name, b"y", 60)
        assert await link.get(name) is None
        await link.put(name, b"y", 60)
        remaining: Any = await link._redis.pttl(name)
        assert 0 < remaining <= 60_000
        await link.close()

    run(check)
