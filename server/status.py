"""What the server says about itself: health, readiness, models, version, metrics.

Reads the state of the core and changes nothing.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from server.anthropic.errors import speaks_anthropic
from server.core_client import CoreState
from server.errors import retry_headers
from server.inference import Services, check_model
from server.release import version

Handler = Callable[[Request], Awaitable[Response]]


class StatusRoutes:
    """`add_to` an app; one instance a server."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._created = int(time.time())

    def add_to(self, app: FastAPI) -> None:
        routes: dict[str, Handler] = {
            "/": self.root,
            "/health": self.health,
            "/ready": self.ready,
            "/metrics": self.metrics,
            "/version": self.version,
            "/v1/models": self.models,
            "/v1/models/{model_id:path}": self.model,
        }
        for path, handler in routes.items():
            app.router.add_route(path, handler, methods=["GET"])  # HEAD comes with it

    async def root(self, request: Request) -> Response:
        del request
        return JSONResponse({"name": "paceline", "version": version()})

    async def version(self, request: Request) -> Response:
        del request
        return JSONResponse({"version": version()})

    async def health(self, request: Request) -> Response:
        """Liveness: 503 only where a restart would help, so not while it loads or drains."""
        del request
        core = self._services.core
        if core.state is CoreState.FAILED:
            return self._state(503, "engine failed")
        if self._stalled():
            return self._state(503, "engine stalled")
        return self._state(200, "ok" if core.state is CoreState.READY else core.state.value)

    async def ready(self, request: Request) -> Response:
        """Readiness: 200 where a new request would be taken now."""
        del request
        core = self._services.core
        if core.state is not CoreState.READY:
            return self._state(503, core.state.value)
        if self._stalled():
            return self._state(503, "engine stalled")
        return self._state(200, "ready")

    async def metrics(self, request: Request) -> Response:
        """A tenant's key sees of all keys its own; an operator's, or no key, sees each."""
        body, content_type = self._services.metrics.exposition(
            request.headers.get("accept", ""), request.scope["paceline"].sees
        )
        return Response(body, headers={"content-type": content_type})

    async def models(self, request: Request) -> Response:
        card = self._card()
        if not speaks_anthropic(request.scope):
            return JSONResponse({"object": "list", "data": [card]})
        ends = {"first_id": card["id"], "last_id": card["id"], "has_more": False}
        return JSONResponse({"data": [_anthropic_card(card)], **ends})

    async def model(self, request: Request) -> Response:
        card = self._card()
        check_model(request.path_params["model_id"], card["id"])
        return JSONResponse(_anthropic_card(card) if speaks_anthropic(request.scope) else card)

    def _card(self) -> dict[str, Any]:
        """Raises Unavailable until the model can serve."""
        model = self._services.model()
        limits = model.limits
        most = limits.total - 1  # a token at least is left to the answer, and one to the prompt
        return {
            "id": model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "paceline",
            "max_model_len": limits.total,
            "max_input_tokens": most if limits.input is None else min(most, limits.input),
            "max_output_tokens": most if limits.output is None else min(most, limits.output),
        }

    def _stalled(self) -> bool:
        age = self._services.core.last_step_age()
        return age is not None and age > self._services.config.stall_seconds

    def _state(self, status: int, state: str) -> Response:
        headers = retry_headers(2.0) if status == 503 else {}
        return JSONResponse({"status": state}, status_code=status, headers=headers)


def _anthropic_card(card: dict[str, Any]) -> dict[str, Any]:
    created = datetime.datetime.fromtimestamp(card["created"], datetime.UTC)
    return {
        "type": "model",
        "id": card["id"],
        "display_name": card["id"],
        "created_at": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": card["max_input_tokens"],
        "max_tokens": card["max_output_tokens"],
    }
