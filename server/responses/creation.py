"""POST /v1/responses: from its body to a response that is sent, streamed, or made meanwhile.

Owns the order of these steps. Generation itself is InferenceApp's; a background response runs the
same way, only that nobody, or anybody, listens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from starlette.types import Receive, Scope, Send

from server.answers import Heading, Json
from server.body import parse_object
from server.body_route import send_json
from server.chat import prepare_chat
from server.errors import ApiError, InvalidRequest, NotFound
from server.field_names import Names, client_names
from server.generation import PromptGroup
from server.inference import (
    Endpoint,
    InferenceApp,
    Services,
    check_model,
    ignored_headers,
    refuse_unknown,
)
from server.logprobs import TokenNames
from server.middleware import RequestContext
from server.prepare import ServedModel
from server.responses.answers import Cuts, ResponseFormat, error_event, framing, skeleton
from server.responses.background import BackgroundRuns, write_events
from server.responses.conversion import NAMES, chat_request, input_items, split
from server.responses.offered_tools import OfferedTools, offered_tools
from server.responses.output_items import OutputItems, new_id
from server.responses.schemas import ResponseRequest
from server.responses.store import ResponseStore, StoredResponse
from server.schemas import ChatRequest, Parsed, parse_chat, parse_strict
from server.sse import run_until_disconnect
from server.timings import RequestClock


async def find(store: ResponseStore, tenant: str, response_id: str, param: str) -> StoredResponse:
    found = await store.get((tenant, response_id))
    if found is None:
        raise NotFound(
            f"No response '{response_id[:100]}' is stored here.",
            param=param,
            code="response_not_found",
        )
    return found


async def earlier_items(
    store: ResponseStore, tenant: str, previous: str | None
) -> tuple[Json, ...]:
    """All that was said up to the end of the previous response."""
    if previous is None:
        return ()
    found = await find(store, tenant, previous, "previous_response_id")
    if found.body["status"] not in ("completed", "incomplete"):
        raise InvalidRequest(
            f"The previous response is {found.body['status']}.", param="previous_response_id"
        )
    if any(_is_cut_call(item) for item in found.body["output"]):
        raise InvalidRequest(
            "The previous response was cut within a call, so it cannot be continued.",
            param="previous_response_id",
        )
    return found.items


def _is_cut_call(item: Json) -> bool:
    return bool(item["type"] == "function_call" and item["status"] == "incomplete")


class ResponseCall:
    """One request to create a response: what its endpoint needs, and where the answer is kept.

    First `read`, then `look_back`, then `chat`.
    """

    def __init__(self, store: ResponseStore, tenant: str) -> None:
        self._store = store
        self._tenant = tenant
        self._earlier: tuple[Json, ...] = ()
        self._shared: Json = {}
        self._tools = OfferedTools()
        self._own: Parsed[ResponseRequest] | None = None
        self._form: ResponseFormat | None = None
        self._made: tuple[Json, Cuts] | None = None
        self.request = ResponseRequest.model_validate({})
        self.background_id: str | None = None
        self.failure: ApiError | None = None  # told in an event, since others were sent before

    def read(self, raw: Json) -> None:
        own, self._shared = split(raw)
        self._own = parse_strict(ResponseRequest, own)
        self.request = self._own.fields
        if self.request.stream_options is not None and not self.request.stream:
            raise InvalidRequest("stream_options needs stream: true.", param="stream_options")
        if self.request.background:
            if not self.request.store:
                raise InvalidRequest("A background response is stored.", param="background")
            self.background_id = new_id("resp_")

    async def look_back(self) -> None:
        """Raises Unavailable where the answer could not be kept."""
        previous = self.request.previous_response_id
        self._earlier = await earlier_items(self._store, self._tenant, previous)
        if self.request.store:
            await self._store.check()

    def chat(self) -> Parsed[ChatRequest]:
        assert self._own is not None
        if not self._earlier and not self.request.input and not self.request.instructions:
            if "input" in self.request.model_fields_set:
                raise InvalidRequest("The input must not be empty.", param="input")
            raise InvalidRequest(
                "This field is required.", param="input", code="missing_required_parameter"
            )
        self._tools = offered_tools(self.request)
        fields = chat_request(self.request, self._earlier, self._tools) | self._shared
        with client_names(self._names()):
            chat = parse_chat(fields)
        # Metadata is given back, so it is not without effect here.
        ignored = [name for name in self._own.ignored if name != "metadata"]
        unheard = self._tools.unheard
        return Parsed(chat.fields, (*ignored, *unheard), (*self._own.unknown, *unheard))

    def _names(self) -> Names:
        return [*NAMES, *self._tools.names()]

    def endpoint(self) -> Endpoint[ChatRequest]:
        return Endpoint(
            parse_chat,
            "resp_",
            prepare_chat,
            self._format,
            framing(self._error),
            self._settle,
            self._names(),
        )

    def stored(self, response: Json, cuts: Cuts = ()) -> StoredResponse:
        given = input_items(self.request)
        items = (*self._earlier, *given, *response["output"])
        return StoredResponse(response, items, len(self._earlier), len(given), cuts)

    def _format(
        self,
        heading: Heading,
        names: TokenNames,
        groups: Sequence[PromptGroup],
        fields: ChatRequest,
    ) -> ResponseFormat:
        del fields
        if self.background_id is not None:
            heading = replace(heading, id=self.background_id)
        items = OutputItems(namespaces=self._tools.namespaces)
        self._form = ResponseFormat(heading, names, groups, self.request, items, self._keep)
        return self._form

    def _keep(self, response: Json, cuts: Cuts) -> None:
        self._made = response, cuts

    async def _settle(self) -> None:
        """What was made is there before its maker is told of its end."""
        assert self._made is not None
        response, cuts = self._made
        key = (self._tenant, response["id"])
        if self.background_id is not None:
            # Deleted meanwhile, it stays so.
            await self._store.replace(key, self.stored(response, cuts))
        elif self.request.store:
            await self._store.put(key, self.stored(response, cuts))

    def _error(self, error: ApiError) -> str:
        self.failure = error
        # Without a form only comments were sent.
        return error_event(error, 0) if self._form is None else self._form.error(error)


class CreateResponse:
    """An ASGI application."""

    def __init__(self, services: Services, store: ResponseStore, runs: BackgroundRuns) -> None:
        self._services = services
        self._store = store
        self._runs = runs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context: RequestContext = scope["paceline"]
        clock = RequestClock(received=context.received)
        model = self._services.model()
        body = await self._services.read_body(scope, receive)
        if body is not None:
            work = self._answer(body, model, context, clock, send)
            await run_until_disconnect(receive, work)

    async def _answer(
        self,
        body: bytes,
        model: ServedModel,
        context: RequestContext,
        clock: RequestClock,
        send: Send,
    ) -> None:
        call = ResponseCall(self._store, context.tenant)
        await self._services.workers.run(lambda: call.read(parse_object(body)))
        await call.look_back()
        parsed = await self._services.workers.run(call.chat)
        refuse_unknown(parsed, self._services.config)
        app = InferenceApp(self._services, call.endpoint())
        if call.background_id is None:
            await app.generate(parsed, model, context, clock, send)
            return
        check_model(parsed.fields.model, model.name)
        self._runs.check_room()
        started = call.stored(
            skeleton(call.request, call.background_id, int(time.time()), model.name)
        )
        key = (context.tenant, call.background_id)
        await self._store.put(key, started)
        # It outlives this connection: it must not write to it, nor keep to what its client waits.
        unheard = replace(context, writer=None, headers=())
        self._runs.begin(
            key,
            started,
            lambda listener: app.generate(parsed, model, unheard, clock, listener),
            lambda: call.failure,
        )
        headers = ignored_headers(parsed.ignored)
        if call.request.stream:
            events = self._runs.events(key, starting_after=-1)
            await write_events(events, send, headers, self._services.config.keepalive_seconds)
        else:
            await send_json(send, started.body, headers)
