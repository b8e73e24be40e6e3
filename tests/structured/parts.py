"""Pieces of JSON Schemas, small enough that a small model comes to their end."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def obj(properties: Schema, *, required: list[str] | None = None, **more: Any) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
        **more,
    }


def text(**more: Any) -> Schema:
    return {"type": "string", "maxLength": 12, **more}


def array(items: Any, **more: Any) -> Schema:
    return {"type": "array", "items": items, "maxItems": 3, **more}


INT: Schema = {"type": "integer"}
SMALL: Schema = {"type": "integer", "minimum": 0, "maximum": 99}
