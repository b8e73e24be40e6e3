"""Which form an error takes: that of the API that was asked. Knows no causes."""

from __future__ import annotations

from starlette.responses import Response
from starlette.types import Scope

from server.anthropic import errors as anthropic
from server.errors import ApiError, error_response


def error_answer(error: ApiError, scope: Scope) -> Response:
    """`scope` has a RequestContext already."""
    if anthropic.speaks_anthropic(scope):
        return anthropic.response(error, scope["paceline"].id)
    return error_response(error)
