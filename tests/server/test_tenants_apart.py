"""Every route that returns what is kept, asked by another tenant's key: it is not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
from starlette.routing import Route

from server.config import ServerConfig
from tests.server.test_batches import form, line
from tests.support.http_server import COMPLETIONS, House, TextEngine, house, in_loop

SECRET = "the secret of alice, which is long enough to fill some blocks of the cache. " * 3
# What a route with a name in its path is asked for, by that name.
NAMES = {
    "request_id": "request",
    "response_id": "response",
    "file_id": "file",
    "batch_id": "batch",
}
# Routes without a name in the path that tell what is kept, or what others do.
LISTS = ("/admin/requests", "/admin/trace", "/v1/files", "/v1/batches", "/metrics")
# They tell of the model and the server alone, or make something new; /admin/live has its own test.
OTHERS = {
    "/",
    "/health",
    "/ready",
    "/version",
    "/v1/models",
    "/v1/models/{model_id:path}",
    "/admin/live",
    "/openapi.json",
    "/docs",
}


async def ask(server: House, key: str, method: str, path: str, **options: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}", "x-request-id": "of-everybody"}
    return await server.client.request(method, path, headers=headers, **options)


async def kept_for(server: House, key: str) -> dict[str, str]:
    """One of everything that is kept, by the names above."""
    body = {"prompt": SECRET, "max_tokens": 2, "ignore_eos": True}
    completion = await ask(server, key, "POST", COMPLETIONS, json=body)
    response = await ask(server, key, "POST", "/v1/responses", json={"input": SECRET})
    file = await ask(server, key, "POST", "/v1/files", **form(line("secret-line", **body)))
    batch = {
        "input_file_id": file.json()["id"],
        "endpoint": COMPLETIONS,
        "completion_window": "24h",
        "metadata": {"of": "alice's secret"},
    }
    made = await ask(server, key, "POST", "/v1/batches", json=batch)
    answers = {"request": completion, "response": response, "file": file, "batch": made}
    for name, answer in answers.items():
        assert answer.status_code == 200, (name, answer.text)
    return {name: answer.json()["id"] for name, answer in answers.items()}


def routes(server: House) -> list[tuple[str, str]]:
    found = []
    for route in server.app.routes:
        assert isinstance(route, Route)
        found += [
            (method, route.path) for method in sorted(route.methods or ()) if method != "HEAD"
        ]
    return found


@in_loop
async def test_nothing_that_is_kept_is_there_for_another_key(tmp_path: Path) -> None:
    """Walks the routes of the app, so a new one is not forgotten. Deleting and cancelling too."""
    config = ServerConfig(api_keys=("alice:sk-a", "bob:sk-b"), data_dir=str(tmp_path))
    async with house(TextEngine({"secret": "Well"}), config) as server:
        ids = await kept_for(server, "sk-a")
        bare = {i.partition("-")[2] or i.partition("_")[2] for i in ids.values()}
        num_named = 0
        for method, path in routes(server):
            if path in LISTS and method == "GET":
                answer = await ask(server, "sk-b", "GET", path, params={"seconds": "0"})
                assert answer.status_code == 200, (path, answer.text)
                assert not [i for i in bare if i in answer.text], path
                assert "alice" not in answer.text, path
            elif "{" in path and path not in OTHERS:
                name = path.partition("{")[2].partition("}")[0]
                asked = path.replace(f"{{{name}}}", ids[NAMES[name]])
                for shown in (asked, asked + "?stream=true"):
                    answer = await ask(server, "sk-b", method, shown)
                    assert answer.status_code == 404, (method, shown, answer.text)
                    assert "Well" not in answer.text
                num_named += 1
            else:
                makes = method == "POST" or path in OTHERS or path.startswith("/console")
                assert makes, f"{path}: does it tell what is kept?"
        assert num_named >= 10
        await still_there(server, ids)


async def still_there(server: House, ids: dict[str, str]) -> None:
    """For its own key: nothing was deleted or cancelled by the other."""
    paths = {
        "request": "/admin/requests/{}/timeline",
        "response": "/v1/responses/{}",
        "file": "/v1/files/{}",
        "batch": "/v1/batches/{}",
    }
    for name, path in paths.items():
        answer = await ask(server, "sk-a", "GET", path.format(ids[name]))
        assert answer.status_code == 200, name
        assert answer.json().get("status") not in ("cancelled", "cancelling")


@in_loop
async def test_what_is_kept_cannot_be_used_by_its_name(tmp_path: Path) -> None:
    config = ServerConfig(api_keys=("alice:sk-a", "bob:sk-b"), data_dir=str(tmp_path))
    async with house(TextEngine({"secret": "Well"}), config) as server:
        ids = await kept_for(server, "sk-a")
        body = {"input": "go on", "previous_response_id": ids["response"]}
        for path in ("/v1/responses", "/v1/responses/input_tokens"):
            answer = await ask(server, "sk-b", "POST", path, json=body)
            assert answer.status_code == 404, (path, answer.text)
        batch = {
            "input_file_id": ids["file"],
            "endpoint": COMPLETIONS,
            "completion_window": "24h",
        }
        answer = await ask(server, "sk-b", "POST", "/v1/batches", json=batch)
        assert answer.status_code == 404


@in_loop
async def test_caches_tell_nothing_of_another_key() -> None:
    config = ServerConfig(api_keys=("alice:sk-a", "bob:sk-b"))
    wish = {"scope": "tenant", "data_version": "1"}
    body = {"prompt": SECRET, "max_tokens": 2, "temperature": 0, "answer_cache": wish}
    async with house(TextEngine(), config) as server:

        async def seen(key: str) -> tuple[str, int]:
            answer = await ask(server, key, "POST", COMPLETIONS, json=body)
            cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            return answer.headers["x-paceline-answer-cache"], cached

        assert await seen("sk-a") == ("miss", 0)
        assert (await seen("sk-a"))[0] == "hit"
        assert await seen("sk-b") == ("miss", 0)
        listed = json.loads((await ask(server, "sk-b", "GET", "/admin/requests")).text)
        assert {row["key"] for row in listed["finished"]} == {"bob"}
