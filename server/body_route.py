"""The way of one request that generates nothing: body, checks, work, one JSON answer.

Endpoints that ask the core for tokens go through inference.py. Knows no route. A timeline that the
work began ends here, with the last byte.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from server.answers import Json
from server.body import parse_object
from server.inference import Services, ignored_headers, refuse_unknown
from server.middleware import RequestContext
from server.schemas import Parsed, Strict
from server.sse import run_until_disconnect

FieldsT = TypeVar("FieldsT", bound=Strict)
Headers = list[tuple[bytes, bytes]]


class BodyRoute(Generic[FieldsT]):
    """An ASGI application. `answer` runs on the event loop; slow work it hands to a worker."""

    def __init__(
        self,
        services: Services,
        parse: Callable[[dict[str, Any]], Parsed[FieldsT]],
        answer: Callable[[FieldsT, RequestContext], Awaitable[Json]],
    ) -> None:
        self._services = services
        self._parse = parse
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await self._services.read_body(scope, receive)
        if body is not None:
            await run_until_disconnect(receive, self._run(body, scope["paceline"], send))

    async def _run(self, body: bytes, context: RequestContext, send: Send) -> None:
        otherwise = "error"
        try:
            parsed = await self._services.workers.run(lambda: self._parse(parse_object(body)))
            refuse_unknown(parsed, self._services.config)
            answer = await self._answer(parsed.fields, context)
            await send_json(send, answer, ignored_headers(parsed.ignored))
        except asyncio.CancelledError:
            otherwise = "abort"  # the client hung up
            raise
        finally:
            if context.timeline is not None:
                self._services.recorder.end(context.timeline, otherwise)


async def send_json(send: Send, answer: Json, headers: Headers) -> None:
    data = msgspec.json.encode(answer)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(data)).encode()),
        *headers,
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": data})
