"""The server under test: its routes, its model and the bodies it is asked with.

It owns the OpenAI-style requests. It must not know when they are sent, or what the answers' times
mean. A server that refuses `ignore_eos` or `stream_options` is asked again without, and what had
to be left out is reported.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from bench.http_stream import Exchange, HttpClient, RequestFailed
from bench.records import check_status, error_message

Prompt = str | tuple[int, ...]
PROBE_SECONDS = 600.0
ROUTES = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


@dataclass(frozen=True, slots=True)
class Target:
    """Where and how requests are sent. `refused` names the optional fields left out."""

    client: HttpClient
    api: str
    model: str
    refused: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        return ROUTES[self.api]

    def body(self, prompt: Prompt, max_tokens: int) -> bytes:
        """A greedy, streaming request for exactly max_tokens, as far as the server can."""
        fields = self._prompt_fields(prompt) | {
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }
        return encode({name: fields[name] for name in fields if name not in self.refused})

    async def send(self, prompt: Prompt, max_tokens: int, limit_seconds: float) -> Exchange:
        return await self.client.request(
            "POST", self.path, self.body(prompt, max_tokens), limit_seconds
        )

    async def count_prompt(self, prompt: Prompt) -> int | None:
        """How many tokens the server makes of a prompt, by usage.prompt_tokens; None: not said."""
        body = encode(self._prompt_fields(prompt) | {"max_tokens": 1, "temperature": 0})
        exchange = await self.client.request("POST", self.path, body, PROBE_SECONDS)
        check_status(exchange)
        try:
            count = json.loads(exchange.body)["usage"]["prompt_tokens"]
        except (ValueError, KeyError, TypeError):
            return None
        return count if isinstance(count, int) else None

    def _prompt_fields(self, prompt: Prompt) -> dict[str, Any]:
        if self.api == "chat":
            messages = [{"role": "user", "content": prompt}]
            return {"model": self.model, "messages": messages}
        return {"model": self.model, "prompt": prompt}


def encode(body: dict[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


async def connect(client: HttpClient, *, api: str, model: str) -> Target:
    """Find the model ("auto": the first of /v1/models) and the fields that the server accepts.

    Raises RequestFailed where the server cannot be used at all.
    """
    if model == "auto":
        model = await _first_model(client)
    for refused in ((), ("ignore_eos",), ("stream_options",), ("ignore_eos", "stream_options")):
        target = Target(client, api, model, refused)
        exchange = await target.send("Hello", 1, PROBE_SECONDS)
        if exchange.status not in (400, 422):
            check_status(exchange)
            return target
    raise RequestFailed(f"http_{exchange.status}", error_message(exchange.body))


async def _first_model(client: HttpClient) -> str:
    exchange = await client.request("GET", "/v1/models", b"", PROBE_SECONDS)
    check_status(exchange)
    try:
        return str(json.loads(exchange.body)["data"][0]["id"])
    except (ValueError, KeyError, TypeError, IndexError):
        raise RequestFailed("malformed", "/v1/models names no model") from None
