"""What the service promises, in one place: the alerts and the dashboards are built from it.

The limits themselves, in seconds, are settings of the server, which counts who kept them. After a
change here run both build.py beside this file.
"""

from __future__ import annotations

# The share of requests that must be within a limit, and the share that must be answered.
SHARE_WITHIN = 0.99
SHARE_ANSWERED = 0.999

# Refusals that are the server's doing; a 4xx that the client caused spends no budget.
OURS = (
    "queue_full",
    "queue_timeout",
    "queue_wait_too_long",
    "prepare_queue_full",
    "grammar_queue_full",
    "engine_unavailable",
    "model_loading",
    "server_draining",
    "unavailable",
    "internal_error",
)

RUNBOOKS = "docs/operations.md"
