"""/v1/batches: many requests in one file, answered when there is nothing else to do.

Owns what a batch must be to be taken. Running it is the runner's.
"""

from __future__ import annotations

import codecs
import json
import secrets
import time
from typing import Annotated, Any, Literal

from fastapi import FastAPI
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from server.answers import Json
from server.batches.database import Database, Row, Transaction
from server.batches.files import tenant_of
from server.batches.runner import BatchRunner
from server.body import parse_object
from server.body_route import BodyRoute
from server.errors import ApiError, InvalidRequest, NotFound
from server.inference import Services
from server.middleware import RequestContext
from server.pages import page_of
from server.schemas import Parsed, Strict, parse_strict

WINDOW_SECONDS = 24 * 3600
MAX_LINES = 50_000
MAX_CUSTOM_ID = 512
MAX_ERRORS = 100


class BatchRequest(Strict):
    input_file_id: Annotated[str, Field(max_length=128)]
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
    completion_window: Literal["24h"]
    metadata: dict[str, str] = Field(default_factory=dict, max_length=16)


def parse_batch(raw: dict[str, Any]) -> Parsed[BatchRequest]:
    parsed = parse_strict(BatchRequest, raw)
    # Metadata is given back, so it is not without effect here.
    ignored = tuple(name for name in parsed.ignored if name != "metadata")
    return Parsed(parsed.fields, ignored, parsed.unknown)


class BatchRoutes:
    def __init__(self, services: Services, database: Database, runner: BatchRunner) -> None:
        self._services = services
        self._database = database
        self._runner = runner

    def add_to(self, app: FastAPI) -> None:
        one = "/v1/batches/{batch_id}"
        create = BodyRoute(self._services, parse_batch, self._create)
        app.router.routes += [
            Route("/v1/batches", create, methods=["POST"]),
            Route("/v1/batches", self._list, methods=["GET"]),
            Route(one, self._retrieve, methods=["GET"]),
            Route(one + "/cancel", self._cancel, methods=["POST"]),
        ]

    async def _create(self, fields: BatchRequest, context: RequestContext) -> Json:
        """A file with a bad line makes a failed batch that says which; nothing of it is run."""
        content = await self._database.run(
            lambda of: of.content(context.tenant, fields.input_file_id)
        )
        if content is None:
            raise NotFound(
                f"No file '{fields.input_file_id[:100]}' is here.",
                param="input_file_id",
                code="file_not_found",
            )
        lines, errors = await self._services.workers.run(
            lambda: read_lines(content, fields.endpoint)
        )
        facts = _facts(fields, int(time.time()), num_lines=len(lines), errors=errors)
        await self._database.run(
            lambda of: of.add_batch(context.tenant, facts, [] if errors else lines)
        )
        self._runner.wake()
        return facts

    async def _list(self, request: Request) -> Response:
        tenant = tenant_of(request)
        rows = await self._database.run(lambda of: of.batches(tenant))
        return JSONResponse(page_of(rows, request))

    async def _retrieve(self, request: Request) -> Response:
        return JSONResponse(await self._find(request))

    async def _cancel(self, request: Request) -> Response:
        facts = await self._find(request)
        if facts["status"] not in ("in_progress", "cancelling"):
            raise InvalidRequest(
                f"This batch is {facts['status']}; there is nothing to cancel.",
                code="batch_not_running",
            )

        def cancel(of: Transaction) -> None:
            found = of.batch(tenant_of(request), facts["id"])
            if found is not None and found["status"] == "in_progress":
                of.update_batch(facts["id"], status="cancelling", cancelling_at=int(time.time()))

        await self._database.run(cancel)
        self._runner.cancel(facts["id"])
        return JSONResponse(await self._find(request))

    async def _find(self, request: Request) -> Row:
        tenant, batch_id = tenant_of(request), request.path_params["batch_id"]
        facts = await self._database.run(lambda of: of.batch(tenant, batch_id))
        if facts is None:
            raise NotFound(
                f"No batch '{batch_id[:100]}' is here.", param="batch_id", code="batch_not_found"
            )
        return facts


def read_lines(content: bytes, endpoint: str) -> tuple[list[tuple[str, str]], list[Json]]:
    """(custom_id, body) of each line, and what is wrong with lines."""
    lines: list[tuple[str, str]] = []
    errors: list[Json] = []
    known: set[str] = set()
    # Some editors begin every file with a byte order mark.
    for number, text in enumerate(content.removeprefix(codecs.BOM_UTF8).splitlines(), 1):
        if not text.strip():
            continue
        try:
            lines.append(_read_line(text, endpoint, known))
        except ApiError as error:
            fault = {"code": error.code, "line": number}
            errors.append({**fault, "message": error.message, "param": error.param})
        if len(errors) == MAX_ERRORS:
            break
        if len(lines) > MAX_LINES:
            return [], [_fault("too_many_lines", f"A batch has at most {MAX_LINES} lines.")]
    if not lines and not errors:
        errors = [_fault("empty_file", "The file has no lines.")]
    return lines, errors


def _read_line(text: bytes, endpoint: str, known: set[str]) -> tuple[str, str]:
    line = parse_object(text)
    custom_id = line.get("custom_id")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID:
        raise InvalidRequest(
            f"A line needs a custom_id of 1 to {MAX_CUSTOM_ID} characters.", param="custom_id"
        )
    if custom_id in known:
        raise InvalidRequest(
            "Another line has this custom_id.", param="custom_id", code="duplicate_custom_id"
        )
    known.add(custom_id)
    if line.get("method") != "POST":
        raise InvalidRequest("The method is POST.", param="method")
    if line.get("url") != endpoint:
        raise InvalidRequest(f"The url must be the batch's: {endpoint}.", param="url")
    body = line.get("body")
    if not isinstance(body, dict):
        raise InvalidRequest("The body must be an object.", param="body")
    if body.get("stream") or body.get("background"):
        raise InvalidRequest(
            "A line of a batch is neither streamed nor in the background.", param="body"
        )
    return custom_id, json.dumps(body)


def _fault(code: str, message: str) -> Json:
    return {"code": code, "line": None, "message": message, "param": None}


def _facts(fields: BatchRequest, now: int, *, num_lines: int, errors: list[Json]) -> Row:
    is_bad = bool(errors)
    moments = ("completed", "cancelling", "cancelled", "expired", "finalizing")
    return {
        "id": "batch_" + secrets.token_hex(12),
        "object": "batch",
        "endpoint": fields.endpoint,
        "errors": {"object": "list", "data": errors} if is_bad else None,
        "input_file_id": fields.input_file_id,
        "completion_window": fields.completion_window,
        "status": "failed" if is_bad else "in_progress",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": now,
        "in_progress_at": None if is_bad else now,
        "expires_at": now + WINDOW_SECONDS,
        "failed_at": now if is_bad else None,
        **{f"{moment}_at": None for moment in moments},
        "request_counts": {"total": 0 if is_bad else num_lines, "completed": 0, "failed": 0},
        "metadata": fields.metadata,
    }
