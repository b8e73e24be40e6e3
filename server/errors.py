"""One short tree of errors, and the one envelope that each becomes, as HTTP status or stream event.

Every text that reaches a client passes through `envelope`, which cuts it: an error never echoes an
input at length. Nothing here knows routes, schemas or the core.
"""

from __future__ import annotations

import math
from typing import Any

from starlette.responses import JSONResponse, Response

MAX_MESSAGE_CHARS = 600
MAX_PARAM_CHARS = 100


class ApiError(Exception):
    """An answer other than success. `headers` go with the HTTP response."""

    status = 500
    type = "server_error"
    default_code: str | None = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.default_code
        self.headers = headers or {}


class InvalidRequest(ApiError):
    status = 400
    type = "invalid_request_error"
    default_code = "invalid_value"


class Unauthorized(ApiError):
    status = 401
    type = "authentication_error"
    default_code = "invalid_api_key"


class Forbidden(ApiError):
    status = 403
    type = "permission_error"
    default_code = "admin_key_needed"


class NotFound(ApiError):
    status = 404
    type = "not_found_error"
    default_code = "not_found"


class MethodNotAllowed(ApiError):
    status = 405
    type = "invalid_request_error"
    default_code = "method_not_allowed"


class BodyTimeout(ApiError):
    status = 408
    type = "invalid_request_error"
    default_code = "request_timeout"


class BodyTooLarge(ApiError):
    status = 413
    type = "invalid_request_error"
    default_code = "request_too_large"


class UnsupportedEncoding(ApiError):
    status = 415
    type = "invalid_request_error"
    default_code = "unsupported_encoding"


class UnsupportedMediaType(ApiError):
    status = 415
    type = "invalid_request_error"
    default_code = "unsupported_media_type"


class Overloaded(ApiError):
    status = 429
    type = "rate_limit_error"
    default_code = "queue_full"


class Unavailable(ApiError):
    status = 503
    type = "service_unavailable_error"
    default_code = "unavailable"


class GenerationFailed(ApiError):
    """The core ended a request with an error: ours, not the client's."""

    status = 500
    type = "server_error"
    default_code = "generation_failed"


def retry_headers(seconds: float) -> dict[str, str]:
    """Both forms that clients read; whole seconds, at least one, and below what they give up at."""
    seconds = min(max(seconds, 0.1), 100.0)
    return {
        "retry-after": str(math.ceil(seconds)),
        "retry-after-ms": str(math.ceil(seconds * 1000)),
    }


def cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


def envelope(error: ApiError) -> dict[str, Any]:
    param = None if error.param is None else cut(error.param, MAX_PARAM_CHARS)
    return {
        "error": {
            "message": cut(error.message, MAX_MESSAGE_CHARS),
            "type": error.type,
            "param": param,
            "code": error.code,
        }
    }


def error_response(error: ApiError) -> Response:
    return JSONResponse(envelope(error), status_code=error.status, headers=error.headers)
