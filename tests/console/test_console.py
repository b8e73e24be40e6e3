"""The console without a browser, and a short visit with one where there is a Chromium."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from server.config import ServerConfig
from server.console_routes import FILES, console_paths
from tests.console.browser import Visit, browser, missing
from tests.console.walk import KEY, load, see_empty, see_live
from tests.support.http_server import TextEngine, connect, eventually, house, in_loop
from tests.support.scripted_server import running_server

SOURCES = sorted(path for path in FILES.iterdir() if path.suffix != ".svg")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_console_asks_no_other_host_and_carries_no_library(path: Path) -> None:
    """It works offline, and nothing in it is a copy of somebody's release."""
    text = path.read_text()
    loaded = re.findall(r"""(?:src|href|from|import|fetch|url)\s*[=(]?\s*["'`](https?:)?//""", text)
    assert not loaded
    assert max(len(line) for line in text.splitlines()) < 300, "minified code"
    assert len(text.splitlines()) < 400


@in_loop
async def test_page_is_open_and_its_data_is_not() -> None:
    config = replace(ServerConfig(), api_keys=("secret-key",))
    async with house(config=config) as server:
        for path in sorted(console_paths()):
            answer = await server.client.get(path, follow_redirects=True)
            assert answer.status_code in (200, 404), path
            assert (answer.status_code == 200) or path.startswith("/console/lib/")
            assert "secret-key" not in answer.text
        page = await server.client.get("/console/")
        assert "frame-ancestors 'none'" in page.headers["content-security-policy"]
        # Every file the page asks for is served.
        for name in re.findall(r'(?:src|href)="(/console/[^"]+)"', page.text):
            assert name in console_paths()
        for name in ("/console/../auth.py", "/console/lib/x.js", "/console/%2e%2e/auth.py"):
            assert (await server.client.get(name)).status_code in (401, 404)
        assert (await server.client.get("/admin/live")).status_code == 401


@in_loop
async def test_live_feed_tells_steps_requests_and_blocks_then_is_quiet() -> None:
    engine = TextEngine(step_seconds=0.002)
    async with house(engine, live=True) as server:
        reader, writer = await connect(server)
        writer.write(b"GET /admin/live?map=1 HTTP/1.1\r\nhost: t\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")

        async def tick() -> dict[str, object]:
            event = await reader.readuntil(b"\n\n")
            found: dict[str, object] = json.loads(event[event.index(b"{") :])
            return found

        assert (await tick())["state"] == "ready"
        answers = [asyncio.create_task(server.complete("x" * 64, max_tokens=300)) for _ in range(3)]
        held: set[str] = set()
        steps = requests = finished = 0
        while finished < 3:
            seen = await tick()
            finished += len(seen["latencies"])  # type: ignore[arg-type]
            steps += len(seen["steps"])  # type: ignore[arg-type]
            requests = max(requests, seen["num_requests"])  # type: ignore[call-overload]
            if isinstance(seen["kv"], dict):
                cells = memoryview(base64.b64decode(seen["kv"]["cells"])).cast("H")
                assert len(cells) == engine.capacity.num_blocks
                held |= {seen["kv"]["owners"][cell - 3] for cell in cells if cell >= 3}
        assert steps > 20
        assert requests == 3
        assert len(held) == 3
        await asyncio.gather(*answers)
        writer.close()
        steps_before = engine.num_steps
        await asyncio.sleep(0.5)
        assert engine.num_steps == steps_before


@in_loop
async def test_viewers_are_bounded_and_leave_their_place() -> None:
    async with house(live=True) as server:
        viewers = []
        for _ in range(16):
            reader, writer = await connect(server)
            writer.write(b"GET /admin/live HTTP/1.1\r\nhost: t\r\n\r\n")
            assert b" 200 " in await reader.readline()
            await reader.readuntil(b"\n\n")
            viewers.append(writer)
        refused = await server.client.get("/admin/live")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_viewers")
        for writer in viewers:
            writer.close()

        async def free() -> bool:
            async with server.client.stream("GET", "/admin/live") as answer:
                return answer.status_code == 200

        await eventually(free)


@pytest.mark.timeout(300)
def test_visit_under_load_sees_steps_and_blocks() -> None:
    """A short walk; `make test-console` is the whole one."""
    if reason := missing():
        pytest.skip(reason)
    flags = ("--api-key", KEY, "--log-level", "warning", "--max-running", "20")
    with running_server("ready", *flags) as (_process, client):
        url = str(client.base_url)
        with load(url, 12), browser("dark", "phone") as context:
            visit = Visit(context, url)
            assert visit.asks_for_key()
            visit.log_in(KEY)
            visit.wait_ready()
            steps, blocks = see_live(visit)
            visit.check()
        assert steps > 0
        assert blocks > 0
        see_empty(url)
