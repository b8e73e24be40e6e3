"""Keys: every route, every form of a key, and what a Host header must not change."""

from __future__ import annotations

import pytest
from starlette.routing import Route

from server.anthropic.errors import is_anthropic
from server.auth import ApiKeys
from server.config import ServerConfig
from server.console_routes import console_paths
from server.requests import cache_namespace
from tests.support.http_server import (
    CHAT,
    COMPLETIONS,
    House,
    TextEngine,
    connect,
    house,
    in_loop,
)

KEYS = ServerConfig(api_keys=("alice:sk-a", "bob:sk-b", "sk-plain"))


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@in_loop
async def test_two_different_keys_are_none() -> None:
    """Which of them counts would be a matter of who looks."""
    async with house(config=KEYS) as server:
        for name, before in (("authorization", "Bearer "), ("x-api-key", "")):
            for second, status in (("sk-b", 401), ("wrong", 401), ("sk-a", 200)):
                headers = [(name, before + "sk-a"), (name, before + second)]
                answer = await server.client.get("/v1/models", headers=headers)
                assert answer.status_code == status, (name, second)


@in_loop
async def test_every_route_but_the_probes_asks_for_a_key() -> None:
    """B149, B160: walks the routes of the app, so a new one is not forgotten."""
    async with house(config=KEYS) as server:
        routes = [route for route in server.app.routes if isinstance(route, Route)]
        assert len(routes) == len(server.app.routes) >= 9
        for route in routes:
            path = route.path.replace("{model_id:path}", "scripted")
            if path in console_paths():
                continue  # files without secrets; the page asks for the key itself
            path = path.replace("/admin/trace", "/admin/trace?seconds=0")
            for method in (*(route.methods or ()), "OPTIONS", "DELETE"):
                answer = await server.client.request(method, path)
                if path in ("/health", "/ready"):
                    assert answer.status_code in (200, 405)
                    continue
                assert answer.status_code == 401, (method, path)
                if method != "HEAD":
                    error = answer.json()["error"]
                    assert error["type"] == "authentication_error"
                    assert is_anthropic(path) or error["code"] == "invalid_api_key"
                assert answer.headers["x-request-id"]
                if path == "/admin/live":
                    continue  # with a key it has no end; tests/console reads it
                with_key = await server.client.request(method, path, headers=bearer("sk-a"))
                assert with_key.status_code != 401


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer "},
        {"authorization": "Bearer wrong"},
        {"authorization": "Basic sk-a"},
        {"authorization": "sk-a"},
        {"authorization": "Bearer alice:sk-a"},
        {"authorization": "Bearer sk-a sk-b"},
        {"x-api-key": ""},
        {"x-api-key": "sk-"},
        {"authorization": "Bearer wrong", "x-api-key": "sk-a"},
    ],
)
@in_loop
async def test_wrong_key_is_refused(headers: dict[str, str]) -> None:
    async with house(config=KEYS) as server:
        answer = await server.client.post(COMPLETIONS, json={"prompt": "x"}, headers=headers)
    assert answer.status_code == 401
    assert "sk-" not in answer.text


@in_loop
async def test_both_forms_of_a_key_are_taken() -> None:
    async with house(config=KEYS) as server:
        for key in ("sk-a", "sk-b", "sk-plain"):
            for headers in (bearer(key), {"authorization": f"bearer {key}"}, {"x-api-key": key}):
                answer = await server.client.get("/v1/models", headers=headers)
                assert answer.status_code == 200
        both = {**bearer("sk-a"), "x-api-key": "sk-a"}
        assert (await server.client.get("/v1/models", headers=both)).status_code == 200


@in_loop
async def test_metrics_are_open_only_if_told() -> None:
    async with house(config=KEYS) as server:
        assert (await server.client.get("/metrics")).status_code == 401
    config = ServerConfig(api_keys=("k",), open_metrics=True)
    async with house(config=config) as server:
        assert (await server.client.get("/metrics")).status_code == 200
        assert (await server.client.get("/metrics/")).status_code == 401
        assert (await server.client.get("/version")).status_code == 401


async def raw(server: House, head: str, body: str = "") -> bytes:
    reader, writer = await connect(server)
    length = f"content-length: {len(body)}\r\nconnection: close\r\n"
    writer.write(f"{head}\r\n{length}\r\n{body}".encode("latin-1"))
    answer = await reader.read()
    writer.close()
    return answer


@in_loop
async def test_host_header_and_odd_paths_open_no_door() -> None:
    """B149: the decision uses the path that the router sees, and exempts exact matches only."""
    hosts = ["x/health?", "x/docs#", "x/v1/../health", "x/ready#", "x?/health", ""]
    paths = [COMPLETIONS, "//v1/completions", "/v1/completions/", "/v1%2fcompletions"]
    paths += ["/health/../v1/completions", "/health/", "//health", "/health%2f", "/HEALTH"]
    paths += ["/ready/..", "/v1/models/../../health", "/health;x", "/health%00"]
    async with house(TextEngine(), KEYS, live=True) as server:
        for host in hosts:
            for path in paths:
                head = f"POST {path} HTTP/1.1\r\nhost: {host}"
                answer = await raw(server, head, '{"prompt":"x"}')
                status = int(answer.split(b" ", 2)[1])
                assert status in (400, 401, 404), (host, path, answer[:200])
                assert b"text_completion" not in answer
        assert await server.metric("paceline_requests_accepted_total") == 0
        assert (await raw(server, "GET /health HTTP/1.1\r\nhost: x")).startswith(b"HTTP/1.1 200")
        assert server.engine.num_steps == 0


@in_loop
async def test_prefix_cache_is_apart_for_each_key() -> None:
    """B152: by what the server knows; no salt reaches another's cache, the same tenant hits."""
    secret = "a secret prefix that fills several blocks of the cache, " * 3

    async def cached(server: House, key: str, **fields: str) -> int:
        answer = await server.client.post(
            COMPLETIONS, json={"prompt": secret, "max_tokens": 1, **fields}, headers=bearer(key)
        )
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    async with house(config=KEYS) as server:
        assert await cached(server, "sk-a") == 0
        assert await cached(server, "sk-a") > 0
        assert await cached(server, "sk-a", cache_salt="s") == 0
        assert await cached(server, "sk-a", cache_salt="s") > 0
        for salt in ("s", "alice", "alice\x00s", "a"):
            assert await cached(server, "sk-b", cache_salt=salt) == 0
        assert await cached(server, "sk-plain") == 0


def test_cache_namespaces_never_collide() -> None:
    """B152: parts have lengths, and absent is not empty."""
    values = [None, "", "a", "b", "ab", "a\x00", "\x00a", "\x01", "aa"]
    tenants = ["", "a", "ab", "\x01\x01\x00\x00\x00a"]
    seen = {
        cache_namespace(tenant, adapter, salt)
        for tenant in tenants
        for adapter in values
        for salt in values
    }
    assert len(seen) == len(tenants) * len(values) ** 2


def test_name_of_a_key_is_its_tenant() -> None:
    keys = ApiKeys(["team:one", "team:two", "plain", "http://odd"])
    assert keys.find(b"one") == keys.find(b"two") == ("team", False)
    plain = keys.find(b"plain")
    assert plain is not None
    assert plain.tenant.startswith("key-")
    assert "plain" not in plain.tenant
    assert keys.find(b"//odd") == ("http", False)
    assert keys.find(b"team") is None
    assert keys.find(b"") is None
    assert not ApiKeys([])
    assert not keys.has_admins


def test_mark_of_an_operator_is_no_part_of_name_or_key() -> None:
    keys = ApiKeys(["team:one", "team+admin:two"])
    assert keys.has_admins
    assert keys.find(b"two") == ("team", True)
    assert keys.find(b"one") == ("team", False)
    assert keys.find(b"team+admin:two") is None
    # A slip in the one mark that closes /admin to the others must not leave it open.
    for entry in ("+admin:three", "a+root:four", "a+Admin:five", "a+admin+:six"):
        with pytest.raises(ValueError, match="a mark is"):
            ApiKeys([entry])


@in_loop
async def test_official_paths_work_with_a_key() -> None:
    async with house(TextEngine({"greet": "Hello"}), KEYS) as server:
        body = {"messages": [{"role": "user", "content": "greet"}]}
        answer = await server.client.post(CHAT, json=body, headers=bearer("sk-b"))
    assert answer.json()["choices"][0]["message"]["content"] == "Hello"
