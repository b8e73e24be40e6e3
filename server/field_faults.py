"""From the complaints of the validator to the one refusal that a client reads.

Owns the choice among them, the path of the field and the words: a client sends JSON, so it is told
of objects, arrays and null, never of Python's types. Knows no field.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from server.errors import InvalidRequest

_OBJECT = "Input should be a JSON object"
_ARRAY = "Input should be a JSON array"
_WORDS = {
    "dict_type": _OBJECT,
    "model_type": _OBJECT,
    "list_type": _ARRAY,
    "tuple_type": _ARRAY,
    "string_type": "Input should be a string",
    "none_required": "Input should be null",
}
_PHRASES = (
    ("Dictionary should", "The object should"),
    ("List should", "The array should"),
    (" after validation", ""),
)
_LITERALS = {"Input should be False": "false", "Input should be True": "true"}


def first_fault(error: ValidationError) -> InvalidRequest:
    faults = error.errors(include_url=False, include_input=False, include_context=False)
    # Each member of a union has its own complaint: the deepest saw most, and "wrong type" least.
    fault = max(
        (fault for fault in faults if fault["loc"][:1] == faults[0]["loc"][:1]),
        key=lambda fault: (len(fault["loc"]), not fault["type"].endswith("_type")),
    )
    param = _path(fault["loc"])
    if fault["type"] == "missing":
        return InvalidRequest(
            "This field is required.", param=param, code="missing_required_parameter"
        )
    return InvalidRequest(f"Invalid value for '{param[:60]}': {_words(fault)}.", param=param)


def _words(fault: Any) -> str:
    message: str = _WORDS.get(fault["type"], fault["msg"])
    if message in _LITERALS:
        return f"Input should be {_LITERALS[message]}"
    for pythonic, plain in _PHRASES:
        message = message.replace(pythonic, plain)
    return message


def _path(location: Sequence[str | int]) -> str:
    """`messages[0].content`: without the names that the validator gives to members of a union."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif "[" not in part and part != "str" and not part.startswith("constrained-"):
            path += f".{part}" if path else part
    return path
