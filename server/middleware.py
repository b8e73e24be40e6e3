"""Around every request: its id, its arrival, and the last catch for what nobody expected.

Pure ASGI, so nothing here buffers a body or hides a disconnect. Knows no route.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.anthropic.errors import REQUEST_ID as ANTHROPIC_REQUEST_ID
from server.anthropic.errors import speaks_anthropic
from server.error_answers import error_answer
from server.errors import ApiError
from server.request_log import log_request
from server.timeline import RequestTimeline

if TYPE_CHECKING:
    from server.otel import Tracing
    from server.sse import BodyWriter

log = logging.getLogger("paceline.http")

REQUEST_ID = b"x-request-id"
# The key in a scope of the instant when the first byte of the request was read.
RECEIVED = "paceline.received"
# The key of the BodyWriter of its answer.
BODY_WRITER = "paceline.body_writer"
_SANE_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")


@dataclass(slots=True)
class RequestContext:
    """Facts of one HTTP request, in scope["paceline"]. `tenant` is the key's, "" without keys.

    `sees` is the tenant whose requests may be shown to it; None is everybody's.

    `headers` are the request's; () for one that is made here.

    `timeline` is there once a generating request has its prompt; `prompts` only if the log is to
    have them. `writer` is there if the connection has a way past `send` (sse.py).
    """

    id: str
    received: float
    tenant: str = ""
    sees: str | None = None
    headers: Sequence[tuple[bytes, bytes]] = ()
    writer: BodyWriter | None = None
    timeline: RequestTimeline | None = None
    prompts: list[str] = field(default_factory=list)


class ContextMiddleware:
    """Puts RequestContext into the scope, `x-request-id` on every response, a line into the log."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        count_error: Callable[[ApiError], None],
        tracing: Tracing | None = None,
        model_name: Callable[[], str] = str,
    ) -> None:
        self._app = app
        self._count_error = count_error
        self._tracing = tracing
        self._model_name = model_name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        received = scope.get(RECEIVED) or time.monotonic()
        context = RequestContext(
            _request_id(scope),
            received,
            headers=scope["headers"],
            writer=scope.get(BODY_WRITER),
        )
        scope["paceline"] = context
        ids = [(REQUEST_ID, context.id.encode())]
        if speaks_anthropic(scope):
            ids.append((ANTHROPIC_REQUEST_ID, context.id.encode()))
        span = None
        if self._tracing is not None:
            span = self._tracing.begin(scope["path"], scope["headers"], received)
        if span is not None:
            ids += span.headers()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *ids]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            log.exception("request %s failed", context.id)
            if status:
                raise
            failure = ApiError("The server failed to answer this request.", code="internal_error")
            self._count_error(failure)
            await error_answer(failure, scope)(scope, receive, send_with_id)
        finally:
            now = time.monotonic()
            log_request(context, scope, status, now)
            if span is not None:
                span.end(status, context.timeline, self._model_name(), now)


def _request_id(scope: Scope) -> str:
    """The client's own, if it is short and harmless; else a new one."""
    for name, value in scope["headers"]:
        if name == REQUEST_ID and _SANE_ID.fullmatch(value):
            return str(value, "ascii")
    return uuid.uuid4().hex
