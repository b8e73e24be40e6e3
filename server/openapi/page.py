"""/openapi.json and /docs: the document for programs, and for people as one page without scripts.

Nothing is loaded from elsewhere, so it works without a network.
"""

from __future__ import annotations

import functools
import html
import json
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from server.answers import Json
from server.core_client import CoreClient
from server.openapi.document import document
from server.release import version

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:70rem;padding:0 1rem;
color:#1c2024;background:#fff}
table{border-collapse:collapse;width:100%}td,th{border-top:1px solid #d9dde1;padding:.3rem .6rem;
text-align:left;vertical-align:top}code{font-size:.9em;overflow-wrap:anywhere}
td:first-child{white-space:nowrap}div{overflow-x:auto}
h2{margin-top:2.5rem}h2 small{font-weight:normal;color:#60656c}
@media(prefers-color-scheme:dark){body{color:#e6e8ea;background:#16181a}
td,th{border-color:#3a3f44}h2 small{color:#a0a6ad}}
"""


def add_openapi(app: FastAPI, core: CoreClient, *, with_batches: bool) -> None:
    def served() -> str | None:
        return None if core.info is None else core.info.model_name

    async def openapi(request: Request) -> Response:
        del request
        return JSONResponse(document(version(), served(), with_batches))

    async def docs(request: Request) -> Response:
        del request
        return HTMLResponse(page(version(), served(), with_batches))

    app.router.add_route("/openapi.json", openapi, methods=["GET"])
    app.router.add_route("/docs", docs, methods=["GET"])


@functools.cache
def page(version: str, served: str | None = None, with_batches: bool = False) -> str:
    made = document(version, served, with_batches)
    parts = made["components"]["schemas"]
    sections = [
        _section(path, method, operation, parts)
        for path, methods in made["paths"].items()
        for method, operation in methods.items()
    ]
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width">'
        f"<title>Paceline API</title><style>{_STYLE}</style><h1>Paceline {html.escape(version)}"
        f"</h1><p>{html.escape(made['info']['description'])} For programs: "
        f'<a href="openapi.json">openapi.json</a>.</p>{"".join(sections)}</html>'
    )


def _section(path: str, method: str, operation: Json, parts: Json) -> str:
    title = f"<h2><code>{method.upper()} {html.escape(path)}</code> "
    title += f"<small>{html.escape(operation['summary'])}</small></h2>"
    if "requestBody" not in operation:
        return title
    ((media_type, content),) = operation["requestBody"]["content"].items()
    schema = content["schema"]
    if "$ref" in schema:
        schema = parts[schema["$ref"].rsplit("/", 1)[1]]
    else:
        title += f"<p>A form, <code>{media_type}</code>.</p>"
    required = schema.get("required", [])
    rows = [
        f"<tr><td><code>{html.escape(name)}</code><td>{_range(field, parts)}"
        f"<td>{'required' if name in required else _code(field.get('default'))}"
        f"<td>{_code(field['examples'][0]) if 'examples' in field else ''}"
        for name, field in schema["properties"].items()
    ]
    head = "<div><table><tr><th>field<th>type and range<th>default<th>example"
    return title + head + "".join(rows) + "</table></div>"


def _code(value: Any) -> str:
    return f"<code>{html.escape(json.dumps(value, ensure_ascii=False))}</code>"


def _range(field: Json, parts: Json) -> str:
    """`integer from 0 to 20` and the like, for one field or an option of it."""
    options = [
        option
        for option in field.get("anyOf") or field.get("oneOf") or ()
        if option.get("type") != "null"
    ]
    if options:
        return ", ".join(
            [" or ".join(_range(option, parts) for option in options), *_bounds(field)]
        )
    if "$ref" in field:
        part = parts[field["$ref"].rsplit("/", 1)[1]]
        return "object: " + ", ".join(map(html.escape, part.get("properties", {})))
    if "enum" in field or "const" in field:
        values = field.get("enum", [field.get("const")])
        return " or ".join(_code(value) for value in values)
    words = [str(field.get("type", "anything"))]
    if field.get("items"):
        words[0] += f" of {_apart(_range(field['items'], parts))}"
    if isinstance(field.get("additionalProperties"), dict):
        words[0] += f" of {_apart(_range(field['additionalProperties'], parts))}"
    words[0] += "".join(
        f" {word} {field[name]}" for name, word in _NUMBERS.items() if name in field
    )
    return ", ".join([*words, *_bounds(field)])


def _bounds(field: Json) -> list[str]:
    sizes = (
        ("minLength", "maxLength", "characters"),
        ("minItems", "maxItems", "items"),
        ("minProperties", "maxProperties", "entries"),
    )
    found = (_size(field.get(low), field.get(high), what) for low, high, what in sizes)
    return [words for words in found if words]


def _size(low: int | None, high: int | None, what: str) -> str:
    if low == high:
        return "" if low is None else f"exactly {low} {what}"
    if high is None:
        return f"at least {low} {what}"
    return f"{low} to {high} {what}" if low else f"at most {high} {what}"


_NUMBERS = {"minimum": "from", "maximum": "to", "exclusiveMaximum": "below"}


def _apart(words: str) -> str:
    """Of a part, so that its own commas are not the whole's."""
    return f"({words})" if "," in words else words
