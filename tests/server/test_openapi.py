"""The OpenAPI document tells of every route and every field, and what it tells is true."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from starlette.routing import Route

from server.config import ServerConfig
from server.openapi.document import document
from server.openapi.examples import example
from server.unserved import REFUSED
from tests.support.http_server import MODEL, House, TextEngine, house, in_loop, run

SPEC = document("test", None, True)
PARTS = SPEC["components"]["schemas"]
USER = [{"role": "user", "content": "greet"}]
# What each body needs besides the field that is tried.
BASES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER, "max_tokens": 4},
    "/v1/chat/completions/input_tokens": {"messages": USER},
    "/v1/completions": {"prompt": "greet", "max_tokens": 4},
    "/v1/embeddings": {"input": "greet"},
    "/v1/responses": {"input": "greet", "max_output_tokens": 4},
    "/v1/responses/input_tokens": {"input": "greet"},
    "/v1/messages": {"model": MODEL, "messages": USER, "max_tokens": 4},
    "/v1/messages/count_tokens": {"model": MODEL, "messages": USER},
    "/tokenize": {"prompt": "greet"},
    "/detokenize": {"tokens": [1]},
    "/v1/batches": {
        "input_file_id": "file-0",
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    },
    "/apply-template": {"messages": USER},
}
NEEDS: dict[str, dict[str, Any]] = {
    "stream_options": {"stream": True},
    "max_completion_tokens": {"max_tokens": None},
    "add_generation_prompt": {"continue_final_message": False},
    "n": {"best_of": None},
    "answer_cache": {"seed": 1},
}
# Vectors need an engine with hidden states, batches a file; both have tests of their own.
SKIPPED = {"/v1/embeddings", "/v1/batches"}


def fields_of(path: str) -> dict[str, Any]:
    body = SPEC["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    properties: dict[str, Any] = PARTS[body["$ref"].rsplit("/", 1)[1]]["properties"]
    return properties


def answer_schema(path: str, method: str = "post") -> dict[str, Any]:
    content = SPEC["paths"][path][method]["responses"]["200"]["content"]
    schema: dict[str, Any] = content["application/json"]["schema"]
    return schema


def test_every_route_is_told_of_and_every_told_route_is_there(tmp_path: Path) -> None:
    """With files and batches, and without."""

    async def check() -> None:
        for folder in ("", str(tmp_path)):
            async with house(config=ServerConfig(data_dir=folder), live=True) as server:
                routed = {
                    (method.lower(), re.sub(r":path\}", "}", route.path))
                    for route in server.app.routes
                    if isinstance(route, Route) and not route.path.startswith("/console")
                    for method in (route.methods or set()) - {"HEAD"}
                }
                page = (await shown(server, "/docs")).text
            paths = document("test", None, bool(folder))["paths"]
            assert all(f"{path}<" in page for path in paths)
            assert {(method, path) for path in paths for method in paths[path]} == routed

    run(check)


@pytest.mark.parametrize("path", sorted(BASES))
def test_every_field_has_an_example_that_its_own_schema_takes_and_a_default(path: str) -> None:
    assert {
        p for p, methods in SPEC["paths"].items() if "requestBody" in methods.get("post", {})
    } == {*BASES, "/v1/files"}
    for name, field in fields_of(path).items():
        for given in field.get("examples", []):
            schema = {**field, "components": SPEC["components"]}
            jsonschema.Draft202012Validator(schema).validate(given)
        assert "default" in field or name in BASES[path] or field.get("required"), name


@pytest.mark.parametrize("path", sorted(set(BASES) - SKIPPED))
@in_loop
async def test_the_server_takes_every_example_and_answers_as_told(path: str) -> None:
    async with house(TextEngine({"greet": '{"city": "Paris"}'})) as server:
        for name, field in fields_of(path).items():
            for given in field.get("examples", []):
                body = {**BASES[path], **NEEDS.get(name, {}), name: given}
                if name == "top_logprobs" and "chat" in path:
                    body["logprobs"] = True
                answer = await server.client.post(path, json=body)
                assert answer.status_code == 200, (name, answer.text)
                if answer.headers["content-type"] == "application/json":
                    jsonschema.validate(answer.json(), answer_schema(path))


@in_loop
async def test_errors_have_the_form_that_is_told() -> None:
    async with house() as server:
        for path in BASES:
            answer = await server.client.post(path, json={"model": 7})
            told = SPEC["paths"][path]["post"]["responses"]["4XX"]["content"]["application/json"]
            name = told["schema"]["$ref"].rsplit("/", 1)[1]
            jsonschema.validate(answer.json(), PARTS[name])


async def shown(server: House, path: str) -> httpx.Response:
    answer = await server.client.get(path)
    assert answer.status_code == 200
    return answer


def bounds_of(field: dict[str, Any]) -> list[Any]:
    """Of the field and of each form that it may have."""
    names = ("minimum", "maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
    forms = [field, *field.get("anyOf", [])]
    forms += [form["items"] for form in forms if isinstance(form.get("items"), dict)]
    return [form[name] for form in forms for name in names if name in form]


@in_loop
async def test_the_page_shows_range_default_and_example_of_each_field() -> None:
    """Without a script and without anything from elsewhere."""
    async with house() as server:
        page = (await shown(server, "/docs")).text
        told = (await shown(server, "/openapi.json")).json()["paths"]
        assert told.keys() == document("test")["paths"].keys()
    assert "<script" not in page
    assert "http://" not in page.replace("http://127.0.0.1", "")
    assert "https://" not in page
    for path in BASES.keys() - {"/v1/batches"}:
        section = page.split(f"POST {path}<", 1)[1].split("<h2>", 1)[0]
        rows = {row.split("</code>", 1)[0]: row for row in section.split("<tr><td><code>")[1:]}
        for name, field in fields_of(path).items():
            kind, default, *examples = rows[name].split("<td>")[1:]
            if name == "model":  # shown as its one value, once that is known
                continue
            assert kind.strip(), name
            given = json.dumps(field.get("default"), ensure_ascii=False)
            assert html.unescape(default) in ("required", f"<code>{given}</code>"), name
            assert all(str(bound) in kind for bound in bounds_of(field)), (name, kind)
            for made in field.get("examples", []):
                assert json.dumps(made, ensure_ascii=False) in html.unescape(examples[0])
    assert "number from 0 to 2<td><code>1.0</code><td><code>0.7</code>" in page


@in_loop
async def test_the_document_is_guarded_like_everything_else() -> None:
    async with house(config=ServerConfig(api_keys=("secret",))) as server:
        for path in ("/docs", "/openapi.json"):
            assert (await server.client.get(path)).status_code == 401


def test_an_example_is_missed_by_name() -> None:
    with pytest.raises(KeyError, match="no_such_field"):
        example("ChatRequest", "no_such_field")


def test_the_handbook_names_every_field_that_is_refused() -> None:
    text = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    assert not [name for name in REFUSED if not re.search(rf"`{name}\b", text)]


@pytest.mark.parametrize("path", sorted(BASES))
def test_the_handbook_names_every_route_and_field(path: str) -> None:
    text = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    assert path in text
    missing = [name for name in fields_of(path) if not re.search(rf"`{name}\b", text)]
    assert not missing
