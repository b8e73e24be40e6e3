"""From the socket to a JSON object: bounded in bytes, time, depth and number, or a written refusal.

The body is strict JSON in UTF-8: no byte order mark, no NaN, no lone surrogate, nothing after the
object. Of a key given twice the last one wins. Nothing here knows what the fields mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from starlette.types import Receive, Scope

from server.errors import (
    BodyTimeout,
    BodyTooLarge,
    InvalidRequest,
    UnsupportedEncoding,
    UnsupportedMediaType,
)

DECODER = msgspec.json.Decoder()
# What clients outside of browsers send where nobody told them a type (curl -d sends the form's).
_UNTYPED = (b"", b"application/x-www-form-urlencoded", b"text/plain")
# The encodings of a body that need no decompression; the protocol's own parser knows chunks.
_PLAIN = {
    b"content-encoding": (b"", b"identity"),
    b"transfer-encoding": (b"chunked", b"identity"),
}
DRAIN_FACTOR = 2
# Members of objects, and lists: each costs far more to read than its bytes, and holds up others.
MAX_PIECES = 100_000


class ClientGone(Exception):
    """The client hung up; there is nobody to answer."""


async def read_body(
    scope: Scope, receive: Receive, *, max_bytes: int, timeout_seconds: float
) -> bytes:
    """The whole body. Raises ClientGone and what of ApiError fits.

    A body beyond the limit is read on and thrown away, up to as much again, since many clients
    look for an answer only when they have sent all; one that is longer still is cut off. Counting
    finds out a length that was not declared, or was a lie.
    """
    check_encoding(scope)
    most = DRAIN_FACTOR * max_bytes
    if declared_length(scope) > most:
        raise too_large(max_bytes, {"connection": "close"})
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_seconds):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                chunk = message.get("body", b"")
                size += len(chunk)
                if size > most:
                    raise too_large(max_bytes, {"connection": "close"})
                if size <= max_bytes:
                    chunks.append(chunk)
                else:
                    chunks.clear()
                if not message.get("more_body", False):
                    break
    except TimeoutError:
        raise BodyTimeout(
            f"The request body did not arrive within {timeout_seconds:g} seconds.",
            headers={"connection": "close"},
        ) from None
    if size > max_bytes:
        raise too_large(max_bytes, {})
    return b"".join(chunks)


def check_encoding(scope: Scope) -> None:
    """Small compressed bodies can be huge, so there are none. Raises UnsupportedEncoding."""
    for name, value in scope["headers"]:
        plain = _PLAIN.get(name)
        if plain is not None and value.strip().lower() not in plain:
            raise UnsupportedEncoding("Send the body as it is: this server decompresses nothing.")


def check_is_json(scope: Scope) -> None:
    """Raises UnsupportedMediaType for a body that says it is something else.

    A page of any site may post a form, a text or an untyped body to this machine without asking
    first; with JSON its browser asks, and CORS decides. So of a browser, which names the Origin,
    only JSON is taken; from elsewhere a missing or careless type is no reason to refuse.
    """
    kind, is_browser = b"", False
    for name, value in scope["headers"]:
        if name == b"content-type":
            kind = value.partition(b";")[0].strip().lower()
        elif name in (b"origin", b"sec-fetch-site"):
            is_browser = True
    if kind in (b"application/json", b"text/json"):
        return
    if kind.startswith(b"application/") and kind.endswith(b"+json"):
        return
    if is_browser or kind not in _UNTYPED:
        raise UnsupportedMediaType("The body must be JSON: send Content-Type: application/json.")


def declared_length(scope: Scope) -> int:
    """0 if there is none. Raises InvalidRequest for one that is no number."""
    for name, value in scope["headers"]:
        if name != b"content-length":
            continue
        if not value.isdigit():
            raise InvalidRequest("The Content-Length header is not a number.")
        return int(value[:18])
    return 0


def too_large(max_bytes: int, headers: dict[str, str]) -> BodyTooLarge:
    return BodyTooLarge(f"The request body is larger than {max_bytes} bytes.", headers=headers)


def parse_object(body: bytes) -> dict[str, Any]:
    """The body's JSON object; raises InvalidRequest for anything else."""
    may_be_many = body.count(b":") + body.count(b"[") > MAX_PIECES  # or these are in texts
    try:
        with _no_collection() if may_be_many else contextlib.nullcontext():
            value = DECODER.decode(body)
    except RecursionError:
        raise InvalidRequest("The body's JSON is nested too deeply.", code="invalid_json") from None
    except msgspec.MsgspecError as error:
        raise InvalidRequest(
            f"The body is not valid JSON in UTF-8: {error}", code="invalid_json"
        ) from None
    if not isinstance(value, dict):
        raise InvalidRequest("The body must be a JSON object.", code="invalid_json")
    if may_be_many:
        _check_pieces(value)
    return value


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """A million new lists make the collector walk through all of them again and again."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _check_pieces(value: dict[str, Any]) -> None:
    num_pieces = 0
    waiting: list[Iterable[Any]] = [(value,)]
    while waiting:
        for item in waiting.pop():
            if isinstance(item, dict):
                num_pieces += len(item)
                waiting.append(item.values())
            elif isinstance(item, list):
                num_pieces += 1
                waiting.append(item)
            else:
                continue
            if num_pieces > MAX_PIECES:
                raise InvalidRequest(
                    f"The limit of a body is {MAX_PIECES} fields and lists; this one has more."
                )
