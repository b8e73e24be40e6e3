"""Two keys, one of them a flood: the other is served at once, gets in, and both are counted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx

from scheduler.limits import SchedulerLimits
from scheduler.policy import Fair
from scheduler.types import StepPlan
from server.config import ServerConfig
from tests.support.http_server import COMPLETIONS, House, TextEngine, eventually, house, in_loop
from tests.support.scripted_engine import _Pending

KEYS = ServerConfig(api_keys=("alice:sk-a", "bob:sk-b", "ops+admin:sk-ops"))
LIMITS = SchedulerLimits(
    max_step_tokens=256, max_waiting=60, max_running=4, watermark_blocks=1, num_tenants=2
)


class Watched(TextEngine):
    """Remembers which request had a row in which step."""

    def __init__(self) -> None:
        super().__init__(step_seconds=0.002)
        self.rows: list[Sequence[str]] = []

    def submit(self, plan: StepPlan) -> _Pending:
        self.rows.append(plan.seq_ids)
        return super().submit(plan)


@asynccontextmanager
async def flooded(num_flood: int, max_tokens: int) -> Any:
    """Alice has asked so often, and her first requests run; no step ends before it is allowed."""
    engine = Watched()
    async with house(engine, KEYS, limits=LIMITS, policy=Fair()) as server:
        engine.running.clear()
        body = {"max_tokens": max_tokens, "ignore_eos": True}
        tasks = [
            asyncio.create_task(post(server, "sk-a", prompt=f"flood {i}", **body))
            for i in range(num_flood)
        ]
        await eventually(lambda: len(engine.rows) > 0)
        try:
            yield server, engine, tasks
        finally:
            engine.running.set()
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


async def post(server: House, key: str, **body: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return await server.client.post(COMPLETIONS, json=body, headers=headers)


@in_loop
async def test_first_token_of_the_other_key_comes_within_three_steps() -> None:
    async with flooded(50, max_tokens=300) as (server, engine, _tasks):
        await eventually(lambda: server.core.num_unfinished_of("alice") == 50)
        asking = asyncio.create_task(post(server, "sk-b", prompt="of bob", max_tokens=3))
        await eventually(lambda: server.core.num_unfinished_of("bob") == 1)
        known = len(engine.rows)
        engine.running.set()
        answer = await asking
        assert answer.status_code == 200
        name = answer.json()["id"].partition("-")[2]
        first = next(i for i, rows in enumerate(engine.rows) if any(name in row for row in rows))
        assert first - known <= 3
        assert server.core.num_unfinished_of("alice") > 40


@in_loop
async def test_flood_is_refused_for_its_share_and_the_other_gets_in() -> None:
    async with flooded(80, max_tokens=40) as (server, engine, tasks):
        await eventually(lambda: sum(task.done() for task in tasks) == 24)
        refused = [task.result() for task in tasks if task.done()]
        assert {answer.status_code for answer in refused} == {429}
        error = refused[0].json()["error"]
        assert error["code"] == "tenant_queue_full"
        assert "its share" in error["message"]
        assert 1 <= int(refused[0].headers["retry-after"]) <= 60
        asking = asyncio.create_task(post(server, "sk-b", prompt="of bob", max_tokens=3))
        await eventually(lambda: server.core.num_unfinished_of("bob") == 1)
        engine.running.set()
        assert (await asking).status_code == 200


@in_loop
async def test_operators_see_what_each_key_got_and_what_waits() -> None:
    async with flooded(20, max_tokens=30) as (server, engine, tasks):
        await eventually(lambda: server.core.num_unfinished_of("alice") == 20)
        engine.running.set()
        headers = {"authorization": "Bearer sk-ops"}

        async def value(name: str, **labels: str) -> float:
            text = (await server.client.get("/metrics", headers=headers)).text
            shown = ",".join(f'{key}="{value}"' for key, value in labels.items())
            return next(
                float(line.rsplit(" ", 1)[1])
                for line in text.splitlines()
                if line.startswith(f"{name}{{{shown}}}")
            )

        await eventually(lambda: any(task.done() for task in tasks))
        assert await value("paceline_tenant_requests_waiting", key="bob") == 0
        asked = await post(server, "sk-b", prompt="of bob", max_tokens=3, ignore_eos=True)
        assert asked.status_code == 200
        await asyncio.wait(tasks)
        tokens = "paceline_tenant_tokens_total"
        assert await value(tokens, key="alice", kind="generated") == 20 * 30
        assert await value(tokens, key="bob", kind="generated") == 3
        used = asked.json()["usage"]["prompt_tokens"]
        assert await value(tokens, key="bob", kind="prompt") == used
        assert await value("paceline_tenant_requests", key="alice") == 0


@in_loop
async def test_a_key_sees_of_the_series_by_key_its_own() -> None:
    async with house(config=KEYS) as server:
        for key, others in (("sk-a", ("bob", "ops")), ("sk-b", ("alice", "ops")), ("sk-ops", ())):
            headers = {"authorization": f"Bearer {key}"}
            text = (await server.client.get("/metrics", headers=headers)).text
            assert "paceline_tenant_tokens_total{" in text
            assert not [name for name in others if f'key="{name}"' in text]
        assert 'key="alice"' in text


@in_loop
async def test_without_keys_there_is_no_series_of_a_key() -> None:
    async with house() as server:
        await server.complete("x", max_tokens=2)
        assert "paceline_tenant" not in (await server.client.get("/metrics")).text
