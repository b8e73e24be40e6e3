"""Whose requests a key sees: its tenant's, or everybody's where it is marked as an operator's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from server.config import ServerConfig
from server.live import OTHERS
from tests.support.http_server import (
    COMPLETIONS,
    House,
    TextEngine,
    connect,
    eventually,
    house,
    in_loop,
)

TENANTS = ServerConfig(api_keys=("alice:sk-a", "bob:sk-b"))
OPERATED = ServerConfig(api_keys=("alice:sk-a", "bob:sk-b", "ops+admin:sk-ops"))
ADMIN = ("/admin/requests", "/admin/requests/shared/timeline", "/admin/trace?seconds=0")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def get(server: House, path: str, key: str) -> Any:
    answer = await server.client.get(path, headers=bearer(key))
    assert answer.status_code == 200, answer.text
    return answer.json()


async def ask(server: House, key: str, **fields: Any) -> str:
    """The id of the answer; both tenants choose the same x-request-id."""
    headers = {**bearer(key), "x-request-id": "shared"}
    body = {"prompt": f"of {key}", "max_tokens": 3, "ignore_eos": True, **fields}
    answer = await server.client.post(COMPLETIONS, json=body, headers=headers)
    assert answer.status_code == 200
    return str(answer.json()["id"]).partition("-")[2]


async def ticks_until_a_map(server: House, key: str) -> Any:
    """The newest tick, with what has finished in all of them."""
    reader, writer = await connect(server, limit=1 << 20)
    head = f"GET /admin/live?map=1 HTTP/1.1\r\nhost: t\r\nauthorization: Bearer {key}\r\n\r\n"
    writer.write(head.encode())
    finished: list[Any] = []
    latencies: list[Any] = []
    try:
        await reader.readuntil(b"\r\n\r\n")
        while True:  # the test has a limit of its own
            line = await reader.readuntil(b"\n")
            if not line.startswith(b"data: "):
                continue
            tick = json.loads(line[6:])
            finished += tick["finished"]
            latencies += tick["latencies"]
            if tick["kv"] is not None:
                return {**tick, "finished": finished, "latencies": latencies}
    finally:
        writer.close()


@in_loop
async def test_key_of_a_tenant_sees_no_request_of_another() -> None:
    async with house(config=TENANTS) as server:
        ids = {key: await ask(server, key) for key in ("sk-a", "sk-b")}
        for key, other in (("sk-a", "sk-b"), ("sk-b", "sk-a")):
            listed = await get(server, "/admin/requests", key)
            assert [row["answer_id"] for row in listed["finished"]] == [ids[key]]
            found = await get(server, "/admin/requests/shared/timeline", key)
            assert found["answer_id"] == ids[key]
            path = f"/admin/requests/cmpl-{ids[other]}/timeline"
            hidden = await server.client.get(path, headers=bearer(key))
            assert hidden.status_code == 404
            trace = json.dumps(await get(server, "/admin/trace?seconds=0", key))
            assert ids[key] in trace
            assert ids[other] not in trace


@in_loop
@pytest.mark.parametrize(
    ("config", "sees_all"), [(TENANTS, "none"), (OPERATED, "sk-ops")], ids=["tenants", "operated"]
)
async def test_live_feed_shows_a_key_what_it_may_see(config: ServerConfig, sees_all: str) -> None:
    engine = TextEngine(step_seconds=0.01)
    async with house(engine, config, live=True) as server:
        old = await ask(server, "sk-b")
        body = {"prompt": "x", "max_tokens": 1500, "ignore_eos": True, "stream": True}
        async with server.client.stream(
            "POST", COMPLETIONS, json=body, headers=bearer("sk-b")
        ) as answer:
            assert answer.status_code == 200
            await eventually(lambda: server.core.num_unfinished == 1)
            for key in ("sk-a", "sk-b", "sk-ops"):
                if config is TENANTS and key == "sk-ops":
                    continue
                if config is OPERATED and key != "sk-ops":
                    refused = await server.client.get("/admin/live", headers=bearer(key))
                    assert refused.status_code == 403
                    continue
                tick = await ticks_until_a_map(server, key)
                may_see = key in ("sk-b", sees_all)
                assert tick["num_requests"] == len(tick["requests"]) == may_see
                assert [row["answer_id"] for row in tick["finished"]] == [old] * may_see
                assert len(tick["latencies"]) == may_see
                assert len(tick["kv"]["owners"]) == 1
                assert (tick["kv"]["owners"] == [OTHERS]) == (not may_see)


@in_loop
async def test_where_an_operator_has_a_key_only_it_opens_admin() -> None:
    async with house(config=OPERATED) as server:
        ids = {await ask(server, key) for key in ("sk-a", "sk-b", "sk-ops")}
        for path in ADMIN:
            for key in ("sk-a", "sk-b"):
                answer = await server.client.get(path, headers=bearer(key))
                assert answer.status_code == 403
                error = answer.json()["error"]
                assert (error["type"], error["code"]) == ("permission_error", "admin_key_needed")
            assert (await server.client.get(path)).status_code == 401
            await get(server, path, "sk-ops")
        listed = await get(server, "/admin/requests", "sk-ops")
        assert {row["answer_id"] for row in listed["finished"]} == ids
        assert {row["key"] for row in listed["finished"]} == {"alice", "bob", "ops"}


@in_loop
async def test_without_keys_everything_is_shown() -> None:
    async with house() as server:
        answer = await server.complete("x", max_tokens=2)
        (row,) = (await server.client.get("/admin/requests")).json()["finished"]
    assert answer.json()["id"].endswith(row["answer_id"])
