"""The way of one generating request: body, checks, prompt, core, answer.

Owns the order of these steps and where each may end; the two endpoints differ only in the parts
they bring (Endpoint). Knows no route and no key.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from scheduler.places import most_places
from server.answer_cache import (
    AnswerCache,
    CachedAnswer,
    Recording,
    Replay,
    answer_key,
    check_wish,
)
from server.answers import AnswerFormat, CollectedChoice, Heading
from server.body import ClientGone, check_is_json, parse_object, read_body
from server.choice import Delta
from server.config import ServerConfig
from server.core_client import CoreClient
from server.errors import ApiError, InvalidRequest, NotFound, Overloaded, retry_headers
from server.field_names import Names, client_names, renamed
from server.generation import Direct, Generation, PromptGroup, unavailable
from server.grammar_checks import GrammarChecks
from server.logprobs import TokenNames
from server.metrics import Metrics
from server.middleware import RequestContext
from server.patience import Patience, patience
from server.prepare import ServedModel
from server.recorder import Recorder
from server.requests import RequestOrigin, TokenLimits
from server.schemas import AnswerCacheWish, GenerationFields, Parsed, StreamOptions
from server.sse import OPENAI_FRAMING, EventStream, Framing, run_until_disconnect
from server.structured import constraint_field
from server.timings import RequestClock
from server.tokenizer import Tokenizer

log = logging.getLogger("paceline.http")

FieldsT = TypeVar("FieldsT", bound=GenerationFields)
T = TypeVar("T")

IGNORED_HEADER = b"x-paceline-ignored-params"
ANSWER_CACHE_HEADER = b"x-paceline-answer-cache"
# Larger bodies are parsed in a worker thread.
INLINE_BODY_BYTES = 64 << 10
PREPARE_THREADS = 2
MAX_PREPARING = 1024


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[FieldsT]):
    """What is particular to one endpoint."""

    parse: Callable[[dict[str, Any]], Parsed[FieldsT]]
    id_prefix: str
    prepare: Callable[[FieldsT, ServedModel, RequestOrigin], list[PromptGroup]]
    make_format: Callable[[Heading, TokenNames, list[PromptGroup], FieldsT], AnswerFormat]
    framing: Framing = OPENAI_FRAMING
    settle: Callable[[], Awaitable[None]] | None = None  # before the end of the answer is sent
    names: Names = ()  # what the client calls the fields of a chat request


class Workers:
    """A few threads for what would hold up the event loop, and a bound on what waits for them."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(PREPARE_THREADS, thread_name_prefix="prepare")
        self._num_open = 0

    async def run(self, work: Callable[[], T]) -> T:
        if self._num_open >= MAX_PREPARING:
            raise Overloaded(
                "The server is busy reading prompts.",
                code="prepare_queue_full",
                headers=retry_headers(1.0),
            )
        self._num_open += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._num_open -= 1

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class Services:
    """What all requests share."""

    core: CoreClient
    tokenizer: Tokenizer
    token_names: TokenNames
    config: ServerConfig
    metrics: Metrics
    recorder: Recorder
    workers: Workers
    grammars: GrammarChecks
    answers: AnswerCache
    body_timeout_seconds: float
    now: Callable[[], float] = time.monotonic

    async def read_body(self, scope: Scope, receive: Receive) -> bytes | None:
        """The whole JSON body within its limits; None if the client hung up. Raises ApiError."""
        check_is_json(scope)
        try:
            return await read_body(
                scope,
                receive,
                max_bytes=self.config.max_body_bytes,
                timeout_seconds=self.body_timeout_seconds,
            )
        except ClientGone:
            return None

    def begin_timeline(
        self,
        context: RequestContext,
        answer_id: str,
        clock: RequestClock,
        groups: Sequence[PromptGroup],
    ) -> None:
        """The prompts are known and about to go to the core."""
        context.timeline = self.recorder.begin(context.id, answer_id, context.tenant, clock, groups)
        if self.config.log_prompts:
            context.prompts = [
                self.tokenizer.decode(group.requests[0].prompt, skip_special_tokens=False)
                for group in groups
            ]

    def patience(self, context: RequestContext, *, streams: bool) -> Patience | None:
        """Raises InvalidRequest."""
        return patience(
            context.headers,
            received=context.received,
            now=self.now(),
            max_queue_seconds=self.config.max_queue_seconds,
            streams=streams,
        )

    def model(self) -> ServedModel:
        """Raises Unavailable unless the core is known and takes requests."""
        info = self.core.info
        if info is None or self.core.state != "ready":
            raise unavailable(self.core.state, 2.0)
        return ServedModel(
            name=info.model_name,
            tokenizer=self.tokenizer,
            token_names=self.token_names,
            limits=TokenLimits(
                total=info.max_model_len,
                input=self.config.max_input_tokens,
                output=self.config.max_output_tokens,
                vocab_size=min(info.vocab_size, self.tokenizer.vocab_size),
            ),
            eos_token_ids=info.eos_token_ids,
            max_group=most_places(info.limits),
            tool_parser=self.config.tool_parser,
            reasoning_parser=self.config.reasoning_parser,
        )


class InferenceApp(Generic[FieldsT]):
    """An ASGI application for one endpoint. Errors before the first byte are raised."""

    def __init__(self, services: Services, endpoint: Endpoint[FieldsT]) -> None:
        self._services = services
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context: RequestContext = scope["paceline"]
        clock = RequestClock(received=context.received)
        model = self._services.model()
        body = await self._services.read_body(scope, receive)
        if body is None:
            return
        await run_until_disconnect(receive, self._answer(model, context, clock, body, send))

    async def _answer(
        self,
        model: ServedModel,
        context: RequestContext,
        clock: RequestClock,
        body: bytes,
        send: Send,
    ) -> None:
        await self.generate(await self._parse(body), model, context, clock, send)

    async def generate(
        self,
        parsed: Parsed[FieldsT],
        model: ServedModel,
        context: RequestContext,
        clock: RequestClock,
        send: Send,
    ) -> None:
        """From right types to the last byte; cancelling it frees the core of it."""
        fields = parsed.fields
        check_model(fields.model, model.name)
        clock.parsed = self._services.now()
        one = OneAnswer(self._services, self._endpoint, model, context, clock, parsed)
        otherwise = "error"
        try:
            with client_names(self._endpoint.names):
                await (one.stream(send) if fields.stream else one.plain(send))
        except asyncio.CancelledError:
            otherwise = "abort"  # the client hung up
            raise
        finally:
            one.close(otherwise)

    async def _parse(self, body: bytes) -> Parsed[FieldsT]:
        def parse() -> Parsed[FieldsT]:
            parsed = self._endpoint.parse(parse_object(body))
            refuse_unknown(parsed, self._services.config)
            return parsed

        if len(body) <= INLINE_BODY_BYTES:
            return parse()
        return await self._services.workers.run(parse)


def refuse_unknown(parsed: Parsed[Any], config: ServerConfig) -> None:
    """With --strict-requests, an unknown name is a mistake, not a word for somebody else."""
    if config.strict_requests and parsed.unknown:
        raise InvalidRequest(
            f"The field '{parsed.unknown[0][:60]}' would do nothing here.",
            param=parsed.unknown[0],
            code="unknown_parameter",
        )


def check_model(wanted: str | None, served: str) -> None:
    """Exact match with what is served; no name means the one there is."""
    if wanted is not None and wanted != served:
        raise NotFound(
            f"The model '{wanted[:100]}' does not exist here; this server has '{served}'.",
            param="model",
            code="model_not_found",
        )


class OneAnswer(Generic[FieldsT]):
    """One request with right types, on its way to its answer."""

    def __init__(
        self,
        services: Services,
        endpoint: Endpoint[FieldsT],
        model: ServedModel,
        context: RequestContext,
        clock: RequestClock,
        parsed: Parsed[FieldsT],
    ) -> None:
        self._services = services
        self._endpoint = endpoint
        self._model = model
        self._context = context
        self._clock = clock
        self._fields = parsed.fields
        self._groups: list[PromptGroup] = []
        self._headers = ignored_headers(parsed.ignored)
        if parsed.ignored:
            log.info("request %s: without effect: %s", context.id, self._headers[0][1].decode())

    async def plain(self, send: Send) -> None:
        generation, form, num_choices = await self._prepare()
        choices = [CollectedChoice() for _ in range(num_choices)]

        async def collect(index: int, delta: Delta) -> None:
            choices[index].add(delta, form.rows(delta.entries))

        await generation.run(collect)
        body = msgspec.json.encode(form.body(choices, generation.usage(), self._timings()))
        await self._settle()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            *self._headers,
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def stream(self, send: Send) -> None:
        """Raises ApiError while nothing has been sent; after that it becomes an event."""
        keepalive = self._services.config.keepalive_seconds
        framing = self._endpoint.framing
        writer = self._context.writer
        async with EventStream(send, self._headers, keepalive, framing, writer) as events:
            try:
                await self._run_stream(events)
            except Exception as error:
                if not events.started:
                    raise
                failure = renamed(as_api_error(error, self._context.id), self._endpoint.names)
                self._services.metrics.count_error(failure)
                await events.fail(failure)
            else:
                await events.end()

    async def _run_stream(self, events: EventStream) -> None:
        generation, form, _ = await self._prepare()
        options = self._fields.stream_options or StreamOptions()
        opened = False

        def made(index: int, delta: Delta) -> list[str]:
            usage = generation.usage() if options.continuous_usage_stats else None
            return form.events(index, delta, usage)

        async def write(index: int, delta: Delta) -> None:
            nonlocal opened
            if not opened:
                opened = True
                for event in form.opening(generation.usage()):
                    await events.write(event)
            for event in made(index, delta):
                await events.write(event)

        def write_now(index: int, delta: Delta) -> None:
            for event in made(index, delta):
                events.write_now(event)

        if isinstance(generation, Generation):
            generation.direct = Direct(lambda: opened and events.is_open(), write_now)
        await generation.run(write)
        last = form.closing(generation.usage(), self._timings())
        await self._settle()
        for event in last:
            await events.write(event)

    async def _settle(self) -> None:
        if self._endpoint.settle is not None:
            await self._endpoint.settle()

    def close(self, otherwise: str) -> None:
        """After the last byte; `otherwise` is why choices without a reason of their own ended."""
        timeline = self._context.timeline
        if timeline is not None:
            timeline.num_cached = sum(group.cached_tokens or 0 for group in self._groups)
            self._services.recorder.end(timeline, otherwise)

    async def _prepare(self) -> tuple[Generation | Recording | Replay, AnswerFormat, int]:
        """Template and tokenizer run in a worker thread."""
        services = self._services
        wish = check_wish(self._fields)
        limit = services.patience(self._context, streams=self._fields.stream)
        answer_id = uuid.uuid4().hex
        origin = RequestOrigin(answer_id, self._clock.received, self._context.tenant)
        groups = await services.workers.run(
            lambda: self._endpoint.prepare(self._fields, self._model, origin)
        )
        # The groups of one answer share their grammar.
        if groups[0].grammar is not None:
            try:
                await services.grammars.check(groups[0].grammar, groups[0].requests[0].grammar)
            except InvalidRequest as error:
                error.param = error.param or constraint_field(self._fields)
                raise
        self._clock.tokenized = services.now()
        self._groups = groups
        services.begin_timeline(self._context, answer_id, self._clock, groups)
        heading = Heading(self._endpoint.id_prefix + answer_id, int(time.time()), self._model.name)
        num_choices = sum(len(group.choices) for group in groups)
        form = self._endpoint.make_format(heading, self._model.token_names, groups, self._fields)
        generation = Generation(
            services.core,
            services.metrics,
            self._clock,
            services.now,
            groups,
            self._context.id,
            limit,
        )
        if wish is None:
            return generation, form, num_choices
        return await self._cached(wish, generation), form, num_choices

    async def _cached(self, wish: AnswerCacheWish, generation: Generation) -> Recording | Replay:
        """What is kept is shown; else what is made is kept."""
        services = self._services
        key = answer_key(
            self._fields,
            tenant=self._context.tenant,
            model=self._model.name,
            kind=self._endpoint.id_prefix,
        )
        found = await services.answers.get(key)
        result = "miss" if found is None else "hit"
        services.metrics.answer_cache[result].inc()
        self._headers.append((ANSWER_CACHE_HEADER, result.encode()))
        if found is not None:
            return Replay(found, self._groups)

        async def keep(answer: CachedAnswer) -> None:
            await services.answers.put(key, answer, wish.ttl_seconds)

        return Recording(generation, keep)

    def _timings(self) -> dict[str, Any] | None:
        return self._clock.parts().as_object() if self._fields.timings else None


def as_api_error(error: Exception, request_id: str) -> ApiError:
    """Ours as they are; anything else is a bug, told to the log and hidden from the client."""
    if isinstance(error, ApiError):
        return error
    log.error("request %s failed", request_id, exc_info=error)
    return ApiError("The server failed to answer this request.", code="internal_error")


def ignored_headers(names: tuple[str, ...]) -> list[tuple[bytes, bytes]]:
    """At most twenty names, of harmless characters; they are the client's words."""
    if not names:
        return []
    shown = [re.sub(r"[^A-Za-z0-9_.-]", "?", name[:64]) for name in names[:20]]
    if len(names) > len(shown):
        shown.append("...")
    return [(IGNORED_HEADER, ", ".join(shown).encode())]
