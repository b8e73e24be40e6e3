"""Files and batches: whose they are, what a form is, and each line once whatever happens."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.batches import runner, service
from server.batches.database import Database
from server.batches.multipart import parse_form
from server.config import ConfigError, ServerConfig
from server.errors import InvalidRequest
from tests.support.http_server import (
    COMPLETIONS,
    House,
    TextEngine,
    eventually,
    house,
    in_loop,
    run,
)

ROOT = Path(__file__).parents[2]
KEY = {"authorization": "Bearer sk-conformance"}


def line(custom_id: str, **body: Any) -> str:
    row = {"custom_id": custom_id, "method": "POST", "url": COMPLETIONS, "body": body}
    return json.dumps(row)


def form(*lines: str, name: str = "lines.jsonl") -> dict[str, Any]:
    return {"files": {"file": (name, "\n".join(lines).encode())}, "data": {"purpose": "batch"}}


async def start(server: House, *lines: str, **headers: str) -> dict[str, Any]:
    sent = await server.client.post("/v1/files", **form(*lines), headers=headers)
    assert sent.status_code == 200, sent.text
    body = {
        "input_file_id": sent.json()["id"],
        "endpoint": COMPLETIONS,
        "completion_window": "24h",
    }
    made = await server.client.post("/v1/batches", json=body, headers=headers)
    assert made.status_code == 200, made.text
    batch: dict[str, Any] = made.json()
    return batch


async def ended(server: House, batch_id: str, **headers: str) -> dict[str, Any]:
    async def is_over() -> bool:
        found = await server.client.get(f"/v1/batches/{batch_id}", headers=headers)
        return found.json()["status"] not in ("in_progress", "cancelling")

    await eventually(is_over, 100.0)
    batch: dict[str, Any] = (
        await server.client.get(f"/v1/batches/{batch_id}", headers=headers)
    ).json()
    return batch


@contextmanager
def serving(folder: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    command = [sys.executable, "-m", "tests.clients.serving", str(folder)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        assert server.stdin is not None
        try:
            yield server.stdout.readline().strip(), server
        finally:
            server.kill()


def poll(url: str, batch_id: str, wanted: Any) -> dict[str, Any]:
    for _ in range(6000):  # minutes: a busy machine is slow
        found = httpx.get(f"{url}/v1/batches/{batch_id}", headers=KEY, timeout=30)
        batch: dict[str, Any] = found.json()
        if wanted(batch):
            return batch
        time.sleep(0.05)
    raise AssertionError(f"the batch stays as it is: {batch}")


def test_each_line_is_answered_once_though_the_server_is_killed(tmp_path: Path) -> None:
    """500 lines; kill -9 in the middle of them, twice."""
    lines = [line(f"line-{i}", prompt=f"hello {i}", max_tokens=60) for i in range(500)]
    with serving(tmp_path) as (url, server):
        sent = httpx.post(f"{url}/v1/files", **form(*lines), headers=KEY, timeout=30).json()
        body = {
            "input_file_id": sent["id"],
            "endpoint": COMPLETIONS,
            "completion_window": "24h",
        }
        batch = httpx.post(f"{url}/v1/batches", json=body, headers=KEY, timeout=30).json()
        poll(url, batch["id"], lambda b: b["request_counts"]["completed"] > 40)
        server.kill()
    with serving(tmp_path) as (url, server):
        poll(url, batch["id"], lambda b: b["request_counts"]["completed"] > 200)
        server.kill()
    with serving(tmp_path) as (url, server):
        batch = poll(url, batch["id"], lambda b: b["status"] == "completed")
        assert batch["request_counts"] == {"total": 500, "completed": 500, "failed": 0}
        content = httpx.get(
            f"{url}/v1/files/{batch['output_file_id']}/content", headers=KEY, timeout=30
        )
    rows = [json.loads(row) for row in content.text.splitlines()]
    assert [row["custom_id"] for row in rows] == [f"line-{i}" for i in range(500)]
    assert all(row["response"]["status_code"] == 200 for row in rows)


def test_nobody_sees_the_files_and_batches_of_another_tenant(tmp_path: Path) -> None:
    async def check() -> None:
        keys = ("alice:sk-a", "bob:sk-b")
        config = ServerConfig(api_keys=keys, data_dir=str(tmp_path))
        alice, bob = ({"authorization": f"Bearer sk-{name}"} for name in "ab")
        async with house(TextEngine({"hi": "Hello."}), config, live=True) as server:
            made = await start(server, line("a", prompt="hi"), **alice)
            made = await ended(server, made["id"], **alice)
            files = (made["input_file_id"], made["output_file_id"])
            paths = [f"/v1/batches/{made['id']}", *(f"/v1/files/{file}" for file in files)]
            paths += [path + "/content" for path in paths[1:]]
            for path in paths:
                assert (await server.client.get(path, headers=alice)).status_code == 200
                assert (await server.client.get(path, headers=bob)).status_code == 404
            for path in ("/v1/files", "/v1/batches"):
                assert (await server.client.get(path, headers=bob)).json()["data"] == []
                assert (await server.client.get(path, headers=alice)).json()["data"]
            body = {
                "input_file_id": made["input_file_id"],
                "endpoint": COMPLETIONS,
                "completion_window": "24h",
            }
            taken = await server.client.post("/v1/batches", json=body, headers=bob)
            assert taken.status_code == 404
            for method, tail in (
                ("POST", f"/v1/batches/{made['id']}/cancel"),
                ("DELETE", paths[1]),
            ):
                gone = await server.client.request(method, tail, headers=bob)
                assert gone.status_code == 404

    run(check)


def test_no_line_begins_while_somebody_waits_for_an_answer(tmp_path: Path) -> None:
    async def check() -> None:
        engine = TextEngine({"batched": "Yes."}, step_seconds=0.005)
        config = ServerConfig(data_dir=str(tmp_path))
        async with house(engine, config, live=True) as server:
            body = {"prompt": "endless", "max_tokens": 150, "stream": True}
            async with server.client.stream("POST", COMPLETIONS, json=body) as answer:
                lines = answer.aiter_lines()
                await anext(lines)
                batch = await start(server, *(line(str(i), prompt="batched") for i in range(8)))
                async for _ in lines:
                    assert server.core.num_open <= 1
            batch = await ended(server, batch["id"])
            assert batch["request_counts"]["completed"] == 8

    run(check)


def test_a_batch_that_is_too_old_gives_up_what_it_has_not_done(tmp_path: Path) -> None:
    async def check() -> None:
        config = ServerConfig(data_dir=str(tmp_path))
        database = Database(tmp_path)
        facts = {
            "id": "batch_old",
            "status": "in_progress",
            "endpoint": COMPLETIONS,
            "expires_at": int(time.time()) - 1,
            "output_file_id": None,
        }
        await database.run(lambda of: of.add_batch("", facts, [("a", "{}"), ("b", "{}")]))
        database.close()
        async with house(TextEngine(), config, live=True) as server:
            batch = await ended(server, "batch_old")
            assert batch["status"] == "expired"
            assert batch["output_file_id"] is None
            content = await server.client.get(f"/v1/files/{batch['error_file_id']}/content")
            rows = [json.loads(row) for row in content.text.splitlines()]
            assert [row["error"]["code"] for row in rows] == ["batch_expired"] * 2

    run(check)


def test_a_full_disk_is_said_and_computes_no_line_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Files are refused; results wait for room; nothing is broken once there is some."""
    opened: list[Database] = []

    class Opened(Database):
        def __init__(self, folder: Path) -> None:
            super().__init__(folder)
            opened.append(self)

        async def limit(self, pages: int) -> None:
            def execute() -> None:
                self._connection.execute(f"PRAGMA max_page_count = {pages}")

            await asyncio.get_running_loop().run_in_executor(self._thread, execute)

    monkeypatch.setattr(service, "Database", Opened)
    monkeypatch.setattr(runner, "STORAGE_SECONDS", 0.05)
    monkeypatch.setattr(runner, "QUIET_SECONDS", 0.0)

    async def check() -> None:
        engine = TextEngine({"batched": "Yes. " * 60})
        async with house(engine, ServerConfig(data_dir=str(tmp_path)), live=True) as server:
            batch = await start(server, *(line(str(i), prompt="batched") for i in range(40)))
            await opened[0].limit(1)  # which is as few as there are now
            sent = await server.client.post("/v1/files", **form("x" * 100_000))
            assert sent.status_code == 503
            assert sent.json()["error"]["code"] == "store_unavailable"
            assert "retry-after" in sent.headers
            await eventually(lambda: " waits: " in caplog.text, 100.0)
            await opened[0].limit(1 << 30)
            found = await ended(server, batch["id"])
            assert found["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
            assert len(engine.by_request) == 40
            assert (await server.client.post("/v1/files", **form("x"))).status_code == 200

    run(check)


def test_a_folder_has_one_server(tmp_path: Path) -> None:
    async def check() -> None:
        config = ServerConfig(data_dir=str(tmp_path))
        async with house(TextEngine(), config, live=True):
            with pytest.raises(ConfigError, match=r"--data-dir .*another server has it"):
                async with house(TextEngine(), config):
                    pass

    run(check)


@in_loop
async def test_without_a_folder_there_are_no_files_and_no_batches() -> None:
    async with house(TextEngine()) as server:
        for path in ("/v1/files", "/v1/batches"):
            assert (await server.client.get(path)).status_code == 404


def test_a_file_may_begin_with_a_mark_and_what_had_no_effect_is_told(tmp_path: Path) -> None:
    """Editors write a byte order mark; a line has no headers to tell by, and no priority."""

    async def check() -> None:
        engine = TextEngine({"hi": "Hello"})
        async with house(engine, ServerConfig(data_dir=str(tmp_path)), live=True) as server:
            plain = line("a", prompt="hi")
            more = line("b", prompt="hi", user="u", unknown=1, priority=-5)
            batch = await ended(server, (await start(server, "\ufeff" + plain, more))["id"])
            assert batch["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
            told = (await server.client.get(f"/v1/files/{batch['output_file_id']}/content")).text
            first, second = (json.loads(row)["response"] for row in told.splitlines())
            assert "ignored_params" not in first
            assert second["ignored_params"] == ["priority", "user", "unknown"]

    run(check)


def test_a_file_ends_some_time_after_it_was_made_and_after_nothing_else(tmp_path: Path) -> None:
    async def check() -> None:
        async with house(config=ServerConfig(data_dir=str(tmp_path))) as server:
            for fields, param in (
                ({"anchor": "created_at", "seconds": "3600"}, None),
                ({"seconds": "3600"}, None),
                ({"anchor": "last_used", "seconds": "3600"}, "expires_after[anchor]"),
                ({"anchor": "created_at"}, "expires_after[seconds]"),
                ({"anchor": "created_at", "seconds": "5"}, "expires_after[seconds]"),
            ):
                sent = form(line("a", prompt="hi"))
                sent["data"] |= {f"expires_after[{name}]": text for name, text in fields.items()}
                answer = await server.client.post("/v1/files", **sent)
                if param is None:
                    made = answer.json()
                    assert made["expires_at"] == made["created_at"] + 3600
                else:
                    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)

    run(check)


def part(head: str, content: bytes) -> bytes:
    return (
        b"--B\r\nContent-Disposition: form-data; " + head.encode() + b"\r\n\r\n" + content + b"\r\n"
    )


def test_a_form_is_read_as_it_was_sent() -> None:
    content = b"\r\n--b\r\n--\x00\xff\r\n"
    body = part('name="purpose"', b"batch") + part('name="file"; filename="a b.jsonl"', content)
    parts = parse_form(b'multipart/form-data; boundary="B"', body + b"--B--\r\n")
    assert parts["purpose"].content == b"batch"
    assert parts["file"].content == content
    assert parts["file"].filename == "a b.jsonl"


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        (b"application/json", b"{}"),
        (b"multipart/form-data", b"--B--"),
        (b"multipart/form-data; boundary=B", b""),
        (b"multipart/form-data; boundary=B", part('name="a"', b"cut")),
        (b"multipart/form-data; boundary=B", part("nameless", b"x") + b"--B--"),
        (b"multipart/form-data; boundary=B", b"--B\r\nno head--B--"),
        (b"multipart/form-data; boundary=B", part('name="a"', b"x") * 40 + b"--B--"),
    ],
)
def test_a_bad_form_is_refused(content_type: bytes, body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_form(content_type, body)
