"""Constraints that are meant to hurt: deep, huge, exponential, ambiguous, catastrophic.

`bomb(name, salt)` gives the field structured_outputs; another salt makes it unknown to any cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def _doubling(keyword: str) -> dict[str, Any]:
    steps = {f"d{i}": {keyword: [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)}
    return {"$ref": "#/$defs/d0", "$defs": {**steps, "d40": {"type": "integer"}}}


_WORD = {"type": "string", "pattern": "^[a-z]{1,50}$"}
_SCHEMAS: dict[str, Callable[[], dict[str, Any]]] = {
    "deep": lambda: _nested(900),
    "cross product": lambda: {
        "allOf": [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(40)]
    },
    "small cross product": lambda: {
        "allOf": [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(11)]
    },
    "doubling allOf": lambda: _doubling("allOf"),
    "doubling anyOf": lambda: _doubling("anyOf"),
    "counted pattern": lambda: {"type": "string", "pattern": "^((a{1,99}){1,99}){1,99}b$"},
    "patterns": lambda: {
        "anyOf": [{"type": "string", "pattern": f"^[a-z]{{0,{i}}}x[a-z]*$"} for i in range(1, 500)]
    },
    "many names": lambda: {"type": "object", "properties": {f"p{i}": _WORD for i in range(3000)}},
    "large enum": lambda: {"enum": [f"value {i}" * 3 for i in range(15_000)]},
    "long enum": lambda: {"enum": [f"value {i}" * 900 for i in range(60)]},
    "divisor": lambda: {"type": "integer", "multipleOf": 999_983},
    "divisors": lambda: {
        "type": "object",
        "properties": {f"p{i}": {"type": "integer", "multipleOf": 9_000 + i} for i in range(500)},
    },
    "long list": lambda: {"type": "array", "items": {"enum": ["a"]}, "minItems": 10**6},
    "nested lists": lambda: {
        "type": "array",
        "minItems": 990,
        "items": {"type": "array", "minItems": 990, "items": {"type": "array", "minItems": 990}},
    },
    "long text": lambda: {"type": "string", "minLength": 10**6},
}
_TEXTS: dict[str, tuple[str, str]] = {
    "nested groups": ("regex", "(" * 2_000 + "a" + ")" * 2_000),
    "nested repeats": ("regex", "((((a{1,100}){1,100}){1,100}){1,100}){1,100}"),
    "states": ("regex", "(.*)a.{12}(.*)b.{12}c"),
    "unicode": ("regex", r"(\p{L}{1,200}\p{N}{1,200}){1,50}"),
    "gaps": ("regex", ".*[ab].*" * 300),
    "ambiguous": ("grammar", 'start: s\ns: s s | "a" | '),
    "expression": ("grammar", 'start: e\ne: e "+" e | e "*" e | e e | /[a-z]/ | "(" e ")"'),
    "brackets": ("grammar", "start: " + "(" * 30_000 + '"a"'),
    "ebnf doubling": (
        "grammar",
        "root ::= r0\n"
        + "".join(f"r{i} ::= r{i + 1} r{i + 1}\n" for i in range(60))
        + 'r60 ::= "b"',
    ),
    "ebnf rules": (
        "grammar",
        "root ::= r0\n"
        + "".join(f'r{i} ::= r{i + 1} r{i + 1} | "a"\n' for i in range(490))
        + 'r490 ::= "b"',
    ),
}
NAMES = (*_SCHEMAS, *_TEXTS)


def bomb(name: str, salt: int) -> dict[str, Any]:
    if name in _SCHEMAS:
        return {"json": {**_SCHEMAS[name](), "title": f"bomb {salt}"}}
    kind, text = _TEXTS[name]
    if kind == "regex":
        return {"regex": f"({text})|q{salt}"}
    unused = f'\nunused_{salt} ::= "x"' if "::=" in text else f'\nunused_{salt}: "x"'
    return {"grammar": text + unused}
