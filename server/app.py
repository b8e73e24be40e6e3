"""create_app: routes, middleware, error handlers and lifespan, put together.

Everything that does the work is in other files; here is only what is connected with what.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from scheduler.types import StepStats
from server.admin import AdminRoutes
from server.answer_cache import AnswerCache, MemoryAnswers
from server.anthropic.errors import REQUEST_ID as ANTHROPIC_REQUEST_ID
from server.anthropic.routes import add_anthropic
from server.auth import OPEN_PATHS, ApiKeys, AuthMiddleware
from server.batches.service import BatchService
from server.chat import prepare_chat
from server.chat_format import ChatFormat
from server.chat_template import ChatTemplate, TemplateError
from server.completions import CompletionFormat, prepare_completion
from server.config import ConfigError, ServerConfig
from server.console_routes import add_console, console_paths
from server.core_client import CoreClient, CoreState
from server.embeddings import embeddings_route
from server.error_answers import error_answer
from server.errors import ApiError, InvalidRequest, MethodNotAllowed, NotFound, error_response
from server.grammar_checks import GrammarChecks
from server.inference import (
    ANSWER_CACHE_HEADER,
    IGNORED_HEADER,
    Endpoint,
    InferenceApp,
    Services,
    Workers,
)
from server.keys import tenants
from server.logprobs import TokenNames
from server.metrics import CoreFacts, Metrics, SloLimits
from server.middleware import REQUEST_ID, ContextMiddleware
from server.openapi.page import add_openapi
from server.process_watch import watch_process
from server.recorder import Recorder
from server.responses.routes import ResponseRoutes
from server.responses.store import MemoryResponses, ResponseStore
from server.schemas import parse_chat, parse_completion
from server.status import StatusRoutes
from server.text_routes import TextRoutes
from server.tokenizer import Tokenizer

if TYPE_CHECKING:
    from server.otel import Tracing

log = logging.getLogger("paceline.http")

BODY_TIMEOUT_SECONDS = 60.0

# Of our headers, what a script in a browser may read.
_EXPOSED = [REQUEST_ID.decode(), ANTHROPIC_REQUEST_ID.decode(), "retry-after", "retry-after-ms"]
_EXPOSED += [IGNORED_HEADER.decode(), ANSWER_CACHE_HEADER.decode()]

CHAT = Endpoint(parse_chat, "chatcmpl-", prepare_chat, ChatFormat)
COMPLETIONS = Endpoint(parse_completion, "cmpl-", prepare_completion, CompletionFormat)


def create_app(
    core: CoreClient,
    tokenizer: Tokenizer,
    config: ServerConfig,
    *,
    body_timeout_seconds: float = BODY_TIMEOUT_SECONDS,
    tracing: Tracing | None = None,
    grammars: GrammarChecks | None = None,
) -> FastAPI:
    """The ASGI application of one server. It does not own the core; it only asks it."""
    if config.otel and tracing is None:
        from server.otel import Tracing

        tracing = Tracing()
    metrics = Metrics(
        limits=SloLimits(config.ttft_limit_seconds, config.tpot_limit_seconds),
        read_core=lambda: _core_facts(core),
        tenants=tenants(config.api_keys),
        read_tenant=lambda name: (core.num_unfinished_of(name), core.num_waiting_of(name)),
    )
    recorder = Recorder(config.timelines, time.monotonic)

    def observe_step(stats: StepStats) -> None:
        metrics.observe_step(stats)
        recorder.observe_step(stats)

    core.on_stats = observe_step
    shared = _shared(config, metrics)
    services = Services(
        core=core,
        tokenizer=tokenizer,
        token_names=TokenNames(tokenizer.token_bytes),
        config=config,
        metrics=metrics,
        recorder=recorder,
        workers=Workers(),
        grammars=grammars or GrammarChecks(tokenizer),
        answers=shared.answers,
        body_timeout_seconds=body_timeout_seconds,
    )

    responses = ResponseRoutes(services, shared.responses)
    endpoints: dict[str, ASGIApp] = {
        "/v1/chat/completions": InferenceApp(services, CHAT),
        "/v1/completions": InferenceApp(services, COMPLETIONS),
        "/v1/embeddings": embeddings_route(services),
        "/v1/responses": responses.create,
    }
    batches = BatchService(services, endpoints) if config.data_dir else None

    @contextlib.asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        probe = asyncio.create_task(
            watch_process(metrics.loop_lag.observe, metrics.descriptors_exhausted.inc)
        )
        template = tokenizer.chat_template
        # Its child takes a moment to start; neither the port nor the first chat need wait for it.
        warming = asyncio.create_task(asyncio.to_thread(start_template, template))
        greeting = asyncio.create_task(shared.greet())
        try:
            async with batches.running() if batches else contextlib.nullcontext():
                yield
        finally:
            probe.cancel()
            await warming
            await greeting
            if template is not None:
                template.close()
            await responses.close()
            await shared.close()
            services.workers.close()
            if tracing is not None:
                # It may wait for whoever takes the last spans.
                await asyncio.to_thread(tracing.close)
            services.grammars.close()

    app = FastAPI(
        title="Paceline",
        lifespan=lifespan,
        openapi_url=None,  # FastAPI does not see the models; openapi/ does
        redirect_slashes=False,
    )
    app.state.count_refusal = metrics.count_refusal  # for what never becomes a request
    StatusRoutes(services).add_to(app)
    TextRoutes(services).add_to(app)
    AdminRoutes(services).add_to(app)
    add_console(app)
    for path, endpoint in endpoints.items():
        app.router.routes.append(Route(path, endpoint, methods=["POST"]))
    responses.add_to(app)
    add_anthropic(app, services)
    if batches is not None:
        batches.add_to(app)
    add_openapi(app, core, with_batches=batches is not None)
    _handle_errors(app, metrics)
    _wrap(app, config, metrics)
    app.add_middleware(
        ContextMiddleware,
        count_error=metrics.count_error,
        tracing=tracing,
        model_name=lambda: _core_facts(core).model_name,
    )
    return app


@dataclass(frozen=True, slots=True)
class _Shared:
    """What servers on one Redis have in common, or this process alone."""

    answers: AnswerCache
    responses: ResponseStore
    greet: Callable[[], Coroutine[Any, Any, None]]
    close: Callable[[], Awaitable[None]]


def _shared(config: ServerConfig, metrics: Metrics) -> _Shared:
    if not config.redis_url:
        own = MemoryAnswers(time.monotonic), MemoryResponses(time.monotonic)
        return _Shared(*own, _nothing, _nothing)
    from server.redis_answers import RedisAnswers
    from server.redis_link import RedisLink
    from server.responses.redis_store import RedisResponses

    try:
        link = RedisLink(
            config.redis_url, time.monotonic, lambda use: metrics.redis_failures[use].inc()
        )
    except ValueError:  # it may hold a password, so it is not shown
        raise ConfigError("--redis-url: it is not the address of a Redis") from None
    return _Shared(RedisAnswers(link), RedisResponses(link), link.greet, link.close)


async def _nothing() -> None:
    """There is no connection to open or to close."""


def _core_facts(core: CoreClient) -> CoreFacts:
    return CoreFacts(
        model_name=core.info.model_name if core.info is not None else "",
        capacity=core.info.capacity if core.info is not None else None,
        ready=core.state is CoreState.READY,
        silence_seconds=core.last_step_age() or 0.0,
    )


def _wrap(app: FastAPI, config: ServerConfig, metrics: Metrics) -> None:
    """The last one added is the outermost. A preflight is answered before keys are asked for."""
    open_paths = OPEN_PATHS | console_paths() | ({"/metrics"} if config.open_metrics else set())
    app.add_middleware(
        AuthMiddleware,
        keys=ApiKeys(config.api_keys),
        open_paths=open_paths,
        count_error=metrics.count_error,
    )
    if config.cors_origins:
        app.add_middleware(
            _Cors, origins=list(config.cors_origins), count_error=metrics.count_error
        )


class _Cors(CORSMiddleware):
    """A preflight that is refused is an error like others."""

    def __init__(
        self, app: ASGIApp, *, origins: list[str], count_error: Callable[[ApiError], None]
    ) -> None:
        super().__init__(
            app,
            allow_origins=origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=_EXPOSED,
        )
        self._count_error = count_error

    def preflight_response(self, request_headers: Headers) -> Response:
        plain = super().preflight_response(request_headers)
        if plain.status_code < 400:
            return plain
        error = InvalidRequest(f"{bytes(plain.body).decode()}.", code="cors_refused")
        self._count_error(error)
        answer = error_response(error)
        kept = {name: value for name, value in plain.headers.items() if name not in answer.headers}
        answer.headers.update(kept)
        return answer


def _handle_errors(app: FastAPI, metrics: Metrics) -> None:
    async def answer(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        metrics.count_error(error)
        return error_answer(error, request.scope)

    async def translate(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return await answer(request, _of_router(request, error))

    app.add_exception_handler(ApiError, answer)
    app.add_exception_handler(HTTPException, translate)


def _of_router(request: Request, error: HTTPException) -> ApiError:
    headers = dict(error.headers or {})
    if error.status_code == 404:
        return NotFound("There is no such path here.", headers=headers)
    if error.status_code == 405:
        return MethodNotAllowed(f"{request.method[:20]} is not allowed here.", headers=headers)
    return InvalidRequest(str(error.detail), headers=headers)


def start_template(template: ChatTemplate | None) -> None:
    """Compiles the model's chat template; one that is no good leaves the other endpoints alone."""
    try:
        if template is not None:
            template.start()
    except TemplateError as error:
        log.warning("chat requests will be refused, the model's chat template is broken: %s", error)
