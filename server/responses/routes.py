"""The routes of the Responses API besides creating: retrieve, cancel, delete, list input, count."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from server.answers import Json
from server.body_route import BodyRoute
from server.errors import InvalidRequest
from server.field_names import client_names
from server.inference import Services, check_model
from server.middleware import RequestContext
from server.pages import page_of
from server.responses.background import BackgroundRuns, write_events
from server.responses.conversion import NAMES, chat_prompt, split
from server.responses.creation import CreateResponse, earlier_items, find
from server.responses.offered_tools import offered_tools
from server.responses.schemas import ResponseRequest
from server.responses.store import ResponseStore, StoredResponse
from server.schemas import Parsed, parse_chat, parse_strict
from server.sse import run_until_disconnect
from server.text_routes import chat_tokens

PATH = "/v1/responses"


class ResponseRoutes:
    """All but `create`, which is routed where it is used. `close` ends what runs meanwhile."""

    def __init__(self, services: Services, store: ResponseStore) -> None:
        self._services = services
        self._store = store
        self._runs = BackgroundRuns(store)
        self.create = CreateResponse(services, store, self._runs)

    def add_to(self, app: FastAPI) -> None:
        count = BodyRoute(self._services, _parse_count, self._count)
        one = PATH + "/{response_id}"
        app.router.routes += [
            Route(PATH + "/input_tokens", count, methods=["POST"]),
            Route(one, _Retrieve(self._services, self._store, self._runs), methods=["GET"]),
            Route(one, self._delete, methods=["DELETE"]),
            Route(one + "/cancel", self._cancel, methods=["POST"]),
            Route(one + "/input_items", self._input_items, methods=["GET"]),
        ]

    async def close(self) -> None:
        await self._runs.close()

    async def _delete(self, request: Request) -> Response:
        """Of one that still runs, too: it is cancelled first."""
        await self._find(request)
        await self._runs.cancel(_key(request))
        await self._store.delete(_key(request))
        response_id = request.path_params["response_id"]
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    async def _cancel(self, request: Request) -> Response:
        found = await self._find(request)
        if not found.body["background"]:
            raise InvalidRequest("Only background responses can be cancelled.")
        await self._runs.cancel(_key(request))
        return JSONResponse((await self._find(request)).body)

    async def _input_items(self, request: Request) -> Response:
        found = await self._find(request)
        given = found.items[: found.num_earlier + found.num_input]
        data = [{"id": f"item_{index}", **item} for index, item in enumerate(given)]
        return JSONResponse(page_of(data[::-1], request))

    async def _count(self, fields: ResponseRequest, context: RequestContext) -> Json:
        model = self._services.model()
        check_model(fields.model, model.name)
        earlier = await earlier_items(self._store, context.tenant, fields.previous_response_id)

        def count() -> int:
            offered = offered_tools(fields)
            prompt = chat_prompt(fields, earlier, offered)
            with client_names([*NAMES, *offered.names()]):
                return len(chat_tokens(parse_chat(prompt).fields, model))

        num_tokens = await self._services.workers.run(count)
        return {"object": "response.input_tokens", "input_tokens": num_tokens}

    async def _find(self, request: Request) -> StoredResponse:
        return await find(self._store, *_key(request), "response_id")


class _Retrieve:
    """An ASGI application: the response, or its events after `starting_after`."""

    def __init__(self, services: Services, store: ResponseStore, runs: BackgroundRuns) -> None:
        self._services = services
        self._store = store
        self._runs = runs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        stream, starting_after = _wish(request)
        found = await find(self._store, *_key(request), "response_id")
        if not stream:
            await JSONResponse(found.body)(scope, receive, send)
            return
        events = self._runs.events(_key(request), starting_after)
        silence = self._services.config.keepalive_seconds
        await run_until_disconnect(receive, write_events(events, send, [], silence))


def _wish(request: Request) -> tuple[bool, int]:
    """Whether events are wanted, and after which number. Raises InvalidRequest."""
    asked = request.query_params
    stream = asked.get("stream", "false")
    if stream not in ("true", "false"):
        raise InvalidRequest("stream is true or false.", param="stream")
    if asked.get("include_obfuscation", "false") != "false":
        raise InvalidRequest("Events are not padded here.", param="include_obfuscation")
    after = asked.get("starting_after")
    if after is None:
        return stream == "true", -1
    if stream == "false":
        raise InvalidRequest("starting_after needs stream=true.", param="starting_after")
    if not (after.isascii() and after.isdigit()):
        raise InvalidRequest("starting_after is a number of an event.", param="starting_after")
    return True, int(after[:15])


def _parse_count(raw: dict[str, Any]) -> Parsed[ResponseRequest]:
    """All fields of a request for an answer are taken here too; what is refused there is here."""
    own, _ = split(raw)
    parsed = parse_strict(ResponseRequest, own)
    unheard = offered_tools(parsed.fields).unheard
    return Parsed(parsed.fields, (*parsed.ignored, *unheard), (*parsed.unknown, *unheard))


def _key(request: Request) -> tuple[str, str]:
    return request.scope["paceline"].tenant, request.path_params["response_id"]
