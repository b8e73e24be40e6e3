"""/v1/files: what batches are made of and what they make. Kept for the tenant that sent them."""

from __future__ import annotations

import time

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from server.answers import Json
from server.batches.database import Database, Row, Transaction
from server.batches.multipart import Part, parse_form
from server.body import ClientGone, read_body
from server.errors import BodyTooLarge, InvalidRequest, NotFound
from server.inference import Services
from server.pages import page_of

MAX_FILE_BYTES = 128 << 20
MAX_TENANT_BYTES = 4 << 30
MAX_NAME_CHARS = 255
PURPOSES = ("batch",)
MIN_EXPIRY, MAX_EXPIRY = 3600, 30 * 86400


class FileRoutes:
    def __init__(self, services: Services, database: Database) -> None:
        self._services = services
        self._database = database

    def add_to(self, app: FastAPI) -> None:
        one = "/v1/files/{file_id}"
        app.router.routes += [
            Route("/v1/files", _Upload(self._services, self._database), methods=["POST"]),
            Route("/v1/files", self._list, methods=["GET"]),
            Route(one, self._retrieve, methods=["GET"]),
            Route(one, self._delete, methods=["DELETE"]),
            Route(one + "/content", self._content, methods=["GET"]),
        ]

    async def _list(self, request: Request) -> Response:
        tenant, purpose = tenant_of(request), request.query_params.get("purpose")

        def read(of: Transaction) -> list[Row]:
            of.expire_files(int(time.time()))
            return list(of.files(tenant, purpose))

        rows = await self._database.run(read)
        return JSONResponse(page_of([file_object(row) for row in rows], request))

    async def _retrieve(self, request: Request) -> Response:
        tenant, file_id = tenant_of(request), request.path_params["file_id"]
        row = await self._database.run(lambda of: of.file(tenant, file_id))
        return JSONResponse(file_object(_found(row, file_id)))

    async def _content(self, request: Request) -> Response:
        tenant, file_id = tenant_of(request), request.path_params["file_id"]
        content = await self._database.run(lambda of: of.content(tenant, file_id))
        if content is None:
            raise _missing(file_id)
        return Response(content, media_type="application/octet-stream")

    async def _delete(self, request: Request) -> Response:
        tenant, file_id = tenant_of(request), request.path_params["file_id"]
        if not await self._database.run(lambda of: of.delete_file(tenant, file_id)):
            raise _missing(file_id)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})


class _Upload:
    """An ASGI application: a body larger than others may be."""

    def __init__(self, services: Services, database: Database) -> None:
        self._services = services
        self._database = database

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await read_body(
                scope,
                receive,
                max_bytes=MAX_FILE_BYTES,
                timeout_seconds=self._services.body_timeout_seconds,
            )
        except ClientGone:
            return
        content_type = dict(scope["headers"]).get(b"content-type", b"")
        parts = await self._services.workers.run(lambda: parse_form(content_type, body))
        row = await self._keep(scope["paceline"].tenant, parts)
        await JSONResponse(file_object(row))(scope, receive, send)

    async def _keep(self, tenant: str, parts: dict[str, Part]) -> Row:
        for name in ("file", "purpose"):
            if name not in parts:
                raise InvalidRequest(
                    "This field is required.", param=name, code="missing_required_parameter"
                )
        purpose = parts["purpose"].content.decode("utf-8", "replace")
        if purpose not in PURPOSES:
            raise InvalidRequest(f"purpose is one of {', '.join(PURPOSES)}.", param="purpose")
        filename = (parts["file"].filename or "file")[:MAX_NAME_CHARS]
        content = parts["file"].content
        now = int(time.time())
        expires_at = _expiry(parts, now)

        def keep(of: Transaction) -> Row:
            of.expire_files(now)
            if of.num_bytes(tenant) + len(content) > MAX_TENANT_BYTES:
                raise BodyTooLarge("There is no room for more files; please delete some.")
            return of.add_file(tenant, purpose, filename, content, now=now, expires_at=expires_at)

        return await self._database.run(keep)


def _expiry(parts: dict[str, Part], now: int) -> int | None:
    anchor, seconds = (parts.get(f"expires_after[{name}]") for name in ("anchor", "seconds"))
    if anchor is not None and anchor.content != b"created_at":
        raise InvalidRequest("This is created_at.", param="expires_after[anchor]")
    if seconds is None and anchor is not None:
        raise InvalidRequest(
            "This field is required.",
            param="expires_after[seconds]",
            code="missing_required_parameter",
        )
    if seconds is None:
        return None
    if not seconds.content.isdigit() or not MIN_EXPIRY <= int(seconds.content[:9]) <= MAX_EXPIRY:
        raise InvalidRequest(
            f"This is a number of seconds from {MIN_EXPIRY} to {MAX_EXPIRY}.",
            param="expires_after[seconds]",
        )
    return now + int(seconds.content)


def file_object(row: Row) -> Json:
    return {"object": "file", "status": "processed", **row}


def tenant_of(request: Request) -> str:
    tenant: str = request.scope["paceline"].tenant
    return tenant


def _found(row: Row | None, file_id: str) -> Row:
    if row is None:
        raise _missing(file_id)
    return row


def _missing(file_id: str) -> NotFound:
    return NotFound(f"No file '{file_id[:100]}' is here.", param="file_id", code="file_not_found")
