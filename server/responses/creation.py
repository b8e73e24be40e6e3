"""POST /v1/responses: from its body to a response that is sent, streamed, or made meanwhile.

Owns the responses in the making. Generation itself is InferenceApp's; a background response runs
the same way, only that nobody listens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from server.answers import Heading, Json
from server.body import parse_object
from server.body_route import send_json
from server.chat import prepare_chat
from server.errors import InvalidRequest, NotFound, Overloaded, envelope, retry_headers
from server.generation import PromptGroup
from server.inference import (
    Endpoint,
    InferenceApp,
    Services,
    as_api_error,
    check_model,
    ignored_headers,
    refuse_unknown,
)
from server.logprobs import TokenNames
from server.middleware import RequestContext
from server.prepare import ServedModel
from server.responses.answers import FRAMING, ResponseFormat, new_id, skeleton
from server.responses.conversion import chat_request, input_items, split
from server.responses.schemas import ResponseRequest
from server.responses.store import ResponseStore, StoredResponse
from server.schemas import ChatRequest, Parsed, parse_chat, parse_strict
from server.sse import run_until_disconnect
from server.timings import RequestClock

MAX_BACKGROUND = 1024


def find(store: ResponseStore, tenant: str, response_id: str, param: str) -> StoredResponse:
    found = store.get(tenant, response_id)
    if found is None:
        raise NotFound(
            f"No response '{response_id[:100]}' is stored here.",
            param=param,
            code="response_not_found",
        )
    return found


def earlier_items(store: ResponseStore, tenant: str, previous: str | None) -> tuple[Json, ...]:
    """All that was said up to the end of the previous response."""
    if previous is None:
        return ()
    found = find(store, tenant, previous, "previous_response_id")
    if found.body["status"] not in ("completed", "incomplete"):
        raise InvalidRequest(
            f"The previous response is {found.body['status']}.", param="previous_response_id"
        )
    return found.items


class ResponseCall:
    """One request to create a response: what its endpoint needs, and where the answer is kept."""

    def __init__(self, store: ResponseStore, tenant: str) -> None:
        self._store = store
        self._tenant = tenant
        self._earlier: tuple[Json, ...] = ()
        self.request = ResponseRequest.model_validate({})
        self.background_id: str | None = None

    def parse(self, raw: Json) -> Parsed[ChatRequest]:
        own, shared = split(raw)
        parsed = parse_strict(ResponseRequest, own)
        self.request = parsed.fields
        if self.request.background:
            if self.request.stream or not self.request.store:
                raise InvalidRequest(
                    "A background response is stored and not streamed.", param="background"
                )
            self.background_id = new_id("resp_")
        previous = self.request.previous_response_id
        self._earlier = earlier_items(self._store, self._tenant, previous)
        if not self._earlier and not self.request.input and not self.request.instructions:
            raise InvalidRequest(
                "This field is required.", param="input", code="missing_required_parameter"
            )
        chat = parse_chat(chat_request(self.request, self._earlier) | shared)
        # Metadata is given back, so it is not without effect here.
        ignored = tuple(name for name in parsed.ignored if name != "metadata")
        return Parsed(chat.fields, ignored, parsed.unknown)

    def make_format(
        self,
        heading: Heading,
        names: TokenNames,
        groups: Sequence[PromptGroup],
        fields: ChatRequest,
    ) -> ResponseFormat:
        del fields
        if self.background_id is not None:
            heading = replace(heading, id=self.background_id)
        return ResponseFormat(heading, names, groups, self.request, self.keep)

    def keep(self, response: Json) -> None:
        if not self.request.store:
            return
        given = input_items(self.request)
        items = (*self._earlier, *given, *response["output"])
        kept = StoredResponse(response, items, len(self._earlier), len(given))
        self._store.put(self._tenant, response["id"], kept)


class CreateResponse:
    """An ASGI application."""

    def __init__(self, services: Services, store: ResponseStore) -> None:
        self._services = services
        self._store = store
        self._running: dict[tuple[str, str], asyncio.Task[None]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context: RequestContext = scope["paceline"]
        clock = RequestClock(received=context.received)
        model = self._services.model()
        body = await self._services.read_body(scope, receive)
        if body is not None:
            work = self._answer(body, model, context, clock, send)
            await run_until_disconnect(receive, work)

    def cancel(self, tenant: str, response_id: str) -> None:
        """Of a background response that runs; it is stored as cancelled."""
        task = self._running.pop((tenant, response_id), None)
        if task is not None:
            task.cancel()
            stored = self._store.get(tenant, response_id)
            if stored is not None:
                body = {**stored.body, "status": "cancelled"}
                self._store.put(tenant, response_id, replace(stored, body=body))

    def close(self) -> None:
        for task in self._running.values():
            task.cancel()

    async def _answer(
        self,
        body: bytes,
        model: ServedModel,
        context: RequestContext,
        clock: RequestClock,
        send: Send,
    ) -> None:
        call = ResponseCall(self._store, context.tenant)
        parsed = await self._services.workers.run(lambda: call.parse(parse_object(body)))
        refuse_unknown(parsed, self._services.config)
        endpoint = Endpoint(call.parse, "resp_", prepare_chat, call.make_format, FRAMING)
        app = InferenceApp(self._services, endpoint)
        if call.background_id is None:
            await app.generate(parsed, model, context, clock, send)
            return
        check_model(parsed.fields.model, model.name)
        if len(self._running) >= MAX_BACKGROUND:
            raise Overloaded(
                "Too many responses run in the background.", headers=retry_headers(5.0)
            )
        started = skeleton(call.request, call.background_id, int(time.time()), model.name)
        call.keep(started)
        work = app.generate(parsed, model, context, clock, _nobody)
        key = (context.tenant, call.background_id)
        self._running[key] = asyncio.create_task(self._in_background(key, call, started, work))
        await send_json(send, started, ignored_headers(parsed.ignored))

    async def _in_background(
        self,
        key: tuple[str, str],
        call: ResponseCall,
        started: Json,
        work: Coroutine[Any, Any, None],
    ) -> None:
        try:
            await work
        except Exception as error:
            told = envelope(as_api_error(error, key[1]))["error"]
            fault = {"code": told["code"], "message": told["message"]}
            call.keep({**started, "status": "failed", "error": fault})
        finally:
            self._running.pop(key, None)


async def _nobody(message: Message) -> None:
    """The listener to an answer that is only stored."""
    del message
