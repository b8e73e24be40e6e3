"""What operators ask: the requests of now and before, one timeline, a trace file, the live feed.

Reads the recorder and changes nothing. Like every route but the probes it needs a key where keys
are set, and shows a tenant's key that tenant's requests only; no answer holds a prompt or a
generated text.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import islice
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from server.errors import InvalidRequest, NotFound
from server.inference import Services
from server.live import LiveFeed
from server.middleware import RequestContext
from server.timeline_json import collect, detail, summary, trace

Handler = Callable[[Request], Awaitable[Response]]
MAX_TRACE_SECONDS = 120.0
MAX_ROWS = 1000


class AdminRoutes:
    """`add_to` an app; one instance a server."""

    def __init__(self, services: Services) -> None:
        self._recorder = services.recorder
        self._feed = LiveFeed(services.core, services.recorder, services.config)
        services.core.on_kv_map = self._feed.take_kv_map

    def add_to(self, app: FastAPI) -> None:
        routes: dict[str, Handler] = {
            "/admin/requests": self.requests,
            "/admin/requests/{request_id}/timeline": self.timeline,
            "/admin/trace": self.trace,
            "/admin/live": self.live,
        }
        for path, handler in routes.items():
            app.router.add_route(path, handler, methods=["GET"])

    async def requests(self, request: Request) -> Response:
        """Those that run or wait, oldest first, and the finished ones, newest first."""
        limit = int(_number(request, "limit", default=100, high=MAX_ROWS))
        recorder, sees = self._recorder, _sees(request)
        now = recorder.now()
        live = recorder.running(sees)
        finished = islice(recorder.ended(sees), limit)
        return _json(
            {
                "object": "list",
                "num_live": len(live),
                "live": [summary(timeline, now) for timeline in live[:limit]],
                "finished": [summary(timeline, now) for timeline in finished],
            }
        )

    async def timeline(self, request: Request) -> Response:
        name = request.path_params["request_id"]
        timeline = self._recorder.find(name, _sees(request))
        if timeline is None:
            raise NotFound(f"No request '{name[:100]}' is remembered here.", code="no_timeline")
        return _json(detail(timeline, self._recorder))

    async def trace(self, request: Request) -> Response:
        """Waits `seconds`, then answers with what happened meanwhile; 0 is the past minute."""
        seconds = _number(request, "seconds", default=10, high=MAX_TRACE_SECONDS)
        began = self._recorder.now() - (0 if seconds else 60)
        await asyncio.sleep(seconds)
        ended = self._recorder.now()
        steps, timelines = collect(self._recorder, began, ended, _sees(request))
        # It may be megabytes; streams go on meanwhile.
        body = await asyncio.to_thread(lambda: msgspec.json.encode(trace(steps, timelines, ended)))
        headers = {"content-disposition": 'attachment; filename="paceline-trace.json"'}
        return Response(body, media_type="application/json", headers=headers)

    async def live(self, request: Request) -> Response:
        """Server-sent events for the console; `map=1` asks for the KV map too."""
        with_map = request.query_params.get("map") == "1"
        ticks = self._feed.ticks(with_map=with_map, sees=_sees(request))
        first = await anext(ticks)

        async def body() -> AsyncIterator[bytes]:
            yield _event(first)
            async for tick in ticks:
                yield _event(tick)

        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        return StreamingResponse(body(), media_type="text/event-stream", headers=headers)


def _sees(request: Request) -> str | None:
    context: RequestContext = request.scope["paceline"]
    return context.sees


def _event(tick: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(tick) + b"\n\n"


def _json(body: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")


def _number(request: Request, name: str, *, default: float, high: float) -> float:
    text = request.query_params.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= high:
        raise InvalidRequest(f"{name} is a number from 0 to {high:g}.", param=name)
    return value
