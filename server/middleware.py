"""Around every request: its id, its arrival, and the last catch for what nobody expected.

Pure ASGI, so nothing here buffers a body or hides a disconnect. Knows no route.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import ApiError, error_response

log = logging.getLogger("paceline.http")

REQUEST_ID = b"x-request-id"
_SANE_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")


@dataclass(slots=True)
class RequestContext:
    """Facts of one HTTP request, in scope["paceline"]. `tenant` is the key's, "" without keys."""

    id: str
    received: float
    tenant: str = ""


class ContextMiddleware:
    """Puts RequestContext into the scope and `x-request-id` on every response."""

    def __init__(self, app: ASGIApp, *, count_error: Callable[[ApiError], None]) -> None:
        self._app = app
        self._count_error = count_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        context = RequestContext(_request_id(scope), time.monotonic())
        scope["paceline"] = context
        header = (REQUEST_ID, context.id.encode())
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message.get("headers", ()), header]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            log.exception("request %s failed", context.id)
            if started:
                raise
            failure = ApiError("The server failed to answer this request.", code="internal_error")
            self._count_error(failure)
            await error_response(failure)(scope, receive, send_with_id)


def _request_id(scope: Scope) -> str:
    """The client's own, if it is short and harmless; else a new one."""
    for name, value in scope["headers"]:
        if name == REQUEST_ID and _SANE_ID.fullmatch(value):
            return str(value, "ascii")
    return uuid.uuid4().hex
