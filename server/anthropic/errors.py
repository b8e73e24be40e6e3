"""Errors in the form of the Anthropic API: status, type and envelope.

Knows no routes, but whose requests get this form.
"""

from __future__ import annotations

from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from server.answers import Json
from server.errors import MAX_MESSAGE_CHARS, ApiError, cut
from server.sse import Framing, named_event

PATH = "/v1/messages"
MODELS = "/v1/models"
VERSION = b"anthropic-version"  # on every request of this API's clients
REQUEST_ID = b"request-id"  # where this API's clients look

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    409: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
_TOO_LONG = ("context_length_exceeded", "max_input_tokens_exceeded")
OVERLOADED = 529  # this API's own for 503


def is_anthropic(path: str) -> bool:
    return path == PATH or path.startswith(PATH + "/")


def speaks_anthropic(scope: Scope) -> bool:
    """Whether the answer has this API's form. Of the paths that both APIs have, a header tells."""
    path = scope["path"]
    if path == MODELS or path.startswith(MODELS + "/"):
        return any(name == VERSION for name, _ in scope["headers"])
    return is_anthropic(path)


def envelope(error: ApiError, request_id: str | None = None) -> Json:
    """The field at fault has no place of its own here, so the message names it."""
    message = error.message
    if error.code in _TOO_LONG:
        message = f"prompt is too long: {message}"  # by which agents know that they must compact
    if error.param is not None and error.param not in message:
        message = f"{error.param}: {message}"
    body: Json = {
        "type": "error",
        "error": {
            "type": _TYPES.get(error.status, "api_error"),
            "message": cut(message, MAX_MESSAGE_CHARS),
        },
    }
    return body if request_id is None else {**body, "request_id": request_id}


def response(error: ApiError, request_id: str) -> Response:
    status = OVERLOADED if error.status == 503 else error.status
    return JSONResponse(envelope(error, request_id), status_code=status, headers=error.headers)


# Its clients may count events, not comments, as signs of life.
FRAMING = Framing(
    prefix=b"",
    end=b"",
    error=lambda error: named_event("error", envelope(error)),
    keep_alive=named_event("ping", {"type": "ping"}).encode() + b"\n\n",
)
