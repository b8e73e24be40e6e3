"""A refused request: its status, its envelope and the field that it names."""

from __future__ import annotations

import json
from typing import Any

from server.errors import MAX_MESSAGE_CHARS
from server.schemas import ChatRequest, CompletionRequest
from server.unserved import REFUSED
from tests.support.http_server import CHAT, COMPLETIONS, House, TextEngine

USER = [{"role": "user", "content": "greet"}]


def greeter() -> TextEngine:
    return TextEngine({"greet": "Hello"})


async def refused(
    server: House, path: str, body: bytes, *, param: str | None = None, status: int = 400
) -> dict[str, Any]:
    answer = await server.client.post(path, content=body)
    assert answer.status_code == status, (body[:80], answer.status_code, answer.text[:300])
    assert answer.headers["content-type"] == "application/json"
    assert set(answer.json()) == {"error"}
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert "Traceback" not in answer.text
    assert len(answer.text) < MAX_MESSAGE_CHARS + 400
    if param is not None:
        assert str(error["param"]).split("[")[0].split(".")[0] == param, (body[:80], error)
    return error


async def refused_field(server: House, name: str, value: Any, **others: Any) -> None:
    """On both endpoints that know the field, streaming and not."""
    for stream in (False, True):
        for path, schema, base in (
            (CHAT, ChatRequest, {"messages": USER}),
            (COMPLETIONS, CompletionRequest, {"prompt": "greet"}),
        ):
            if name in schema.model_fields or name in REFUSED:
                body = json.dumps({**base, **others, "stream": stream, name: value}).encode()
                await refused(server, path, body, param=name)
