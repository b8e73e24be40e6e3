"""The log lines of the API process: one format, one line a request, no probe noise.

Owns the set-up of `logging` for the command; nothing calls it on import.
"""

from __future__ import annotations

import logging

_MAX_PATH = 200
_PROBES = ("/health", "/ready", "/metrics")


def configure_logging(level: str) -> None:
    """Everything goes to stderr; prompts and keys are in none of it."""
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(message)s")
    for noisy in ("uvicorn.error", "httpx", "httpcore", "asyncio"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, logging.getLogger().level))
    logging.getLogger("uvicorn.access").addFilter(keep_request_line)


def keep_request_line(record: logging.LogRecord) -> bool:
    """Drops the lines of probes and cuts long paths: a client must not fill the log."""
    if not isinstance(record.args, tuple) or len(record.args) != 5:
        return True
    client, method, path, version, status = record.args
    path = str(path)
    if path.partition("?")[0] in _PROBES:
        return False
    if len(path) > _MAX_PATH:
        record.args = (client, method, path[:_MAX_PATH] + "...", version, status)
    return True
