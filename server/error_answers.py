"""Which form an error takes: that of the API whose path was asked. Knows paths, not causes."""

from __future__ import annotations

from starlette.responses import Response
from starlette.types import Scope

from server.anthropic import errors as anthropic
from server.errors import ApiError, error_response


def error_answer(error: ApiError, scope: Scope) -> Response:
    """`scope` has a RequestContext already."""
    if anthropic.is_anthropic(scope["path"]):
        return anthropic.response(error, scope["paceline"].id)
    return error_response(error)
