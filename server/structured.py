"""response_format and structured_outputs: from fields to the grammar that the answer obeys.

The rule: exactly one constraint, or none; whatever looks like one and selects none is refused.
Knows no compiler: what passes here may still be refused by it (grammar_checks.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Mapping
from typing import Any

from server.errors import InvalidRequest
from server.grammar_text import (
    WHITESPACE,
    GrammarTextError,
    Part,
    choice_part,
    ebnf_part,
    json_part,
    regex_part,
)
from server.schema_check import SchemaError, checked
from server.schemas import GenerationFields

MAX_REGEX_CHARS = 4_096
MAX_GRAMMAR_CHARS = 64 << 10
MAX_CHOICES = 1_000
MAX_CHOICE_CHARS = 4_096
MAX_WHITESPACE_CHARS = 64

ANY_OBJECT = {"type": "object"}
# What a response_format may hold, by its type.
_NAMES: Mapping[str, Container[str]] = {
    "text": ("type",),
    "json_object": ("type", "schema"),
    "json_schema": ("type", "json_schema"),
}
_WRAPPER_NAMES = ("name", "description", "schema", "strict")


def answer_part(
    response_format: Mapping[str, Any] | None, structured: Mapping[str, Any] | None
) -> Part | None:
    """The constraint on the answer, if there is one. Raises InvalidRequest."""
    part = None if response_format is None else _of_response_format(response_format)
    if structured is None:
        return part
    if part is not None:
        raise InvalidRequest(
            "response_format and structured_outputs cannot be used together.",
            param="structured_outputs",
        )
    return _of_structured_outputs(structured)


def constraint_field(fields: GenerationFields) -> str | None:
    """The one field that constrains the answer, if there is one."""
    names = ("response_format", "structured_outputs", "tools")
    found = [name for name in names if getattr(fields, name, None)]
    return found[0] if len(found) == 1 else None


def schema_part(schema: Any, param: str, whitespace: str = WHITESPACE) -> Part:
    """A schema of the client at `param`. Raises InvalidRequest."""
    try:
        return json_part(checked(schema), whitespace)
    except SchemaError as error:
        raise InvalidRequest(
            f"This schema cannot be used: {error}.", param=param, code="invalid_schema"
        ) from None


def _of_response_format(given: Mapping[str, Any]) -> Part | None:
    param = "response_format"
    given = {name: value for name, value in given.items() if value is not None}
    _check_names(param, given, _NAMES.get(str(given.get("type")), given))
    match given.get("type"):
        case "text":
            return None
        case "json_object":
            if "schema" in given:  # as llama.cpp and others take it
                return schema_part(given["schema"], f"{param}.schema")
            return json_part(ANY_OBJECT)
        case "json_schema":
            wrapper = given.get("json_schema")
            if not isinstance(wrapper, dict) or wrapper.get("schema") is None:
                raise InvalidRequest(
                    "response_format json_schema needs json_schema: {name, schema}.",
                    param=f"{param}.json_schema",
                )
            _check_names(f"{param}.json_schema", wrapper, _WRAPPER_NAMES)
            # Not strict means that the schema is a wish; ours is kept either way.
            if not isinstance(wrapper.get("strict") or False, bool):
                raise InvalidRequest(
                    "strict must be true or false.", param=f"{param}.json_schema.strict"
                )
            return schema_part(wrapper["schema"], f"{param}.json_schema.schema")
    raise InvalidRequest(
        "response_format.type must be text, json_object or json_schema.", param=f"{param}.type"
    )


def _check_names(param: str, given: Mapping[str, Any], known: Container[str]) -> None:
    """A constraint under another name must not be dropped."""
    for name, value in given.items():
        if name not in known and value is not None:
            raise InvalidRequest(
                "There is no such field here.",
                param=f"{param}.{name[:60]}",
                code="unsupported_parameter",
            )


def _of_structured_outputs(given: Mapping[str, Any]) -> Part:
    param = "structured_outputs"
    wanted = {name: value for name, value in given.items() if value is not None}
    whitespace = wanted.pop("whitespace_pattern", None)
    unknown = sorted(wanted.keys() - _READERS.keys())
    if unknown:
        raise InvalidRequest(
            f"structured_outputs has no '{unknown[0][:60]}' here; it has {', '.join(_READERS)}.",
            param=f"{param}.{unknown[0][:60]}",
        )
    if wanted.get("json_object") is False:
        del wanted["json_object"]
    if len(wanted) != 1:
        raise InvalidRequest(
            f"structured_outputs needs exactly one of {', '.join(_READERS)}.", param=param
        )
    ((name, value),) = wanted.items()
    if whitespace is not None:
        if name not in ("json", "json_object"):
            raise InvalidRequest(
                "whitespace_pattern is for json only.", param=f"{param}.whitespace_pattern"
            )
        _check_text(f"{param}.whitespace_pattern", whitespace, MAX_WHITESPACE_CHARS)
    try:
        return _READERS[name](f"{param}.{name}", value, whitespace or WHITESPACE)
    except GrammarTextError as error:
        raise InvalidRequest(
            f"This grammar cannot be used: {error}.", param=f"{param}.{name}", code="invalid_schema"
        ) from None


def _read_json(param: str, value: Any, whitespace: str) -> Part:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise InvalidRequest("The schema is not valid JSON.", param=param) from None
    return schema_part(value, param, whitespace)


def _read_json_object(param: str, value: Any, whitespace: str) -> Part:
    if value is not True:
        raise InvalidRequest("json_object must be true.", param=param)
    return json_part(ANY_OBJECT, whitespace)


def _read_regex(param: str, value: Any, _: str) -> Part:
    return regex_part(_check_text(param, value, MAX_REGEX_CHARS))


def _read_grammar(param: str, value: Any, _: str) -> Part:
    return ebnf_part(_check_text(param, value, MAX_GRAMMAR_CHARS))


def _read_choice(param: str, value: Any, _: str) -> Part:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_CHOICES:
        raise InvalidRequest(f"choice must be a list of 1 to {MAX_CHOICES} texts.", param=param)
    for option in value:
        _check_text(param, option, MAX_CHOICE_CHARS)
    return choice_part(list(dict.fromkeys(value)))


def _check_text(param: str, value: Any, max_chars: int) -> str:
    if not isinstance(value, str) or not value.strip() or len(value) > max_chars:
        raise InvalidRequest(f"This must be a text of 1 to {max_chars} characters.", param=param)
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise InvalidRequest("This text is not valid Unicode: a lone surrogate.", param=param)
    return value


_READERS: Mapping[str, Callable[[str, Any, str], Part]] = {
    "json": _read_json,
    "json_object": _read_json_object,
    "regex": _read_regex,
    "choice": _read_choice,
    "grammar": _read_grammar,
}
