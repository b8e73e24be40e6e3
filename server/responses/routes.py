"""The routes of the Responses API besides creating: retrieve, cancel, delete, list input, count."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from server.answers import Json
from server.body_route import BodyRoute
from server.errors import InvalidRequest
from server.inference import Services, check_model
from server.middleware import RequestContext
from server.responses.conversion import chat_prompt, split
from server.responses.creation import CreateResponse, earlier_items, find
from server.responses.schemas import CountRequest
from server.responses.store import ResponseStore, StoredResponse
from server.schemas import Parsed, parse_chat, parse_strict
from server.text_routes import chat_tokens

PATH = "/v1/responses"


class ResponseRoutes:
    """All but `create`, which is routed where it is used. `close` ends what runs meanwhile."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._store = ResponseStore(services.now)
        self.create = CreateResponse(services, self._store)

    def add_to(self, app: FastAPI) -> None:
        count = BodyRoute(self._services, _parse_count, self._count)
        one = PATH + "/{response_id}"
        app.router.routes += [
            Route(PATH + "/input_tokens", count, methods=["POST"]),
            Route(one, self._retrieve, methods=["GET"]),
            Route(one, self._delete, methods=["DELETE"]),
            Route(one + "/cancel", self._cancel, methods=["POST"]),
            Route(one + "/input_items", self._input_items, methods=["GET"]),
        ]

    def close(self) -> None:
        self.create.close()

    async def _retrieve(self, request: Request) -> Response:
        if request.query_params.get("stream", "false") != "false":
            raise InvalidRequest("A stored response is not streamed.", param="stream")
        return JSONResponse(self._find(request).body)

    async def _delete(self, request: Request) -> Response:
        """Of one that still runs, too: it is cancelled first."""
        self._find(request)
        tenant, response_id = _key(request)
        self.create.cancel(tenant, response_id)
        self._store.delete(tenant, response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    async def _cancel(self, request: Request) -> Response:
        found = self._find(request)
        if not found.body["background"]:
            raise InvalidRequest("Only background responses can be cancelled.")
        self.create.cancel(*_key(request))
        return JSONResponse(self._find(request).body)

    async def _input_items(self, request: Request) -> Response:
        """The newest first, unless `order` is asc."""
        found = self._find(request)
        given = found.items[: found.num_earlier + found.num_input]
        data = [{"id": f"item_{index}", **item} for index, item in enumerate(given)]
        if request.query_params.get("order", "desc") != "asc":
            data.reverse()
        return JSONResponse(
            {
                "object": "list",
                "data": data,
                "first_id": data[0]["id"] if data else None,
                "last_id": data[-1]["id"] if data else None,
                "has_more": False,
            }
        )

    async def _count(self, fields: CountRequest, context: RequestContext) -> Json:
        model = self._services.model()
        check_model(fields.model, model.name)
        earlier = earlier_items(self._store, context.tenant, fields.previous_response_id)

        def count() -> int:
            return len(chat_tokens(parse_chat(chat_prompt(fields, earlier)).fields, model))

        num_tokens = await self._services.workers.run(count)
        return {"object": "response.input_tokens", "input_tokens": num_tokens}

    def _find(self, request: Request) -> StoredResponse:
        return find(self._store, *_key(request), "response_id")


def _parse_count(raw: dict[str, Any]) -> Parsed[CountRequest]:
    own, _ = split(raw)
    return parse_strict(CountRequest, own)


def _key(request: Request) -> tuple[str, str]:
    return request.scope["paceline"].tenant, request.path_params["response_id"]
