"""The log of the API process: JSON for machines, one plain line for people.

Owns the set-up of `logging` for the command; nothing calls it on import. A record may bring
`extra={"fields": {...}}`: JSON has them as keys, plain text as name=value behind the message.
"""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import Any

import msgspec


def configure_logging(level: str, form: str = "text") -> None:
    """Everything goes to stderr; `form` auto is text on a terminal and JSON elsewhere."""
    if form == "auto":
        form = "text" if sys.stderr.isatty() else "json"
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    for noisy in ("uvicorn.error", "httpx", "httpcore", "asyncio"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, logging.getLogger().level))


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = getattr(record, "fields", {})
    return fields


class JsonFormatter(logging.Formatter):
    """One object a line; nothing a client sends can make a second line."""

    def format(self, record: logging.LogRecord) -> str:
        shown = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            shown["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(shown, enc_hook=str).decode()


class TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        pairs = [f"{name}={_text(value)}" for name, value in _fields(record).items() if _is(value)]
        return " ".join([super().format(record), *pairs])


def _is(value: object) -> bool:
    return value is not None and value != ""


def _text(value: object) -> str:
    """Plain where it is one word, else JSON: no value can pose as another or as a new line."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{_text(part)}" for name, part in value.items()) + "}"
    text = str(value)
    if text.isascii() and text.isprintable() and not set(text) & set(' ="{}'):
        return text
    return msgspec.json.encode(value, enc_hook=str).decode()
