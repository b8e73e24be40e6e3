"""The one line of the log that a request gets, whatever became of it.

Owns which facts are in it: ids, key name, sizes, phases, finish. A prompt only where the operator
asked for it, an answer or a key never. Probes get no line.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from starlette.types import Scope

from server.timeline_json import summary

if TYPE_CHECKING:
    from server.middleware import RequestContext

log = logging.getLogger("paceline.request")

_MAX_PATH = 200
_PROBES = frozenset({"/health", "/ready", "/metrics"})
_COLUMNS = (
    "answer_id",
    "finish",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "num_sequences",
    "preemptions",
    "ttft_ms",
    "tpot_ms",
    "e2e_ms",
    "phases_ms",
)


def log_request(context: RequestContext, scope: Scope, status: int, now: float) -> None:
    """After the last byte; `status` 0 means that the client left before there was any."""
    if scope["path"] not in _PROBES and log.isEnabledFor(logging.INFO):
        log.info("request", extra={"fields": fields_of(context, scope, status, now)})


def fields_of(context: RequestContext, scope: Scope, status: int, now: float) -> dict[str, Any]:
    path = scope["path"]
    fields = {
        "id": context.id,
        "key": context.tenant or None,
        "client": scope["client"][0] if scope.get("client") else None,
        "method": scope["method"],
        "path": path if len(path) <= _MAX_PATH else path[:_MAX_PATH] + "...",
        "status": status,
        "duration_ms": round((now - context.received) * 1e3, 3),
    }
    if context.timeline is not None:
        known = summary(context.timeline, now)
        fields |= {name: known[name] for name in _COLUMNS}
    if context.prompts:
        fields["prompts"] = context.prompts
    return fields
