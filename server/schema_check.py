"""What a JSON Schema must be before it becomes a grammar: well-formed, small, enforceable.

Owns the limits, the list of keywords and the rewriting of what says the same in other words. Pure:
no compiler here. A keyword of JSON Schema that the compiler can not enforce is refused by name;
words that are not JSON Schema's are annotations, as the standard says.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any

from server.schema_patterns import kept_in_strings

MAX_DEPTH = 48
MAX_NODES = 20_000
MAX_BYTES = 512 << 10
MAX_PATTERN_CHARS = 2_000
MAX_INTEGER = 2**63
# The compiler counts in remainders; powers of ten cost nothing.
MAX_DIVISOR = 10_000

Schema = dict[str, Any]

TYPES = frozenset({"null", "boolean", "object", "array", "number", "string", "integer"})
# Keywords of JSON Schema (drafts 4 to 2020-12) that can not be enforced token by token.
NOT_ENFORCED = frozenset(
    {
        "$dynamicRef",
        "$recursiveRef",
        "contains",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "else",
        "extends",
        "if",
        "maxContains",
        "minContains",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
        "uniqueItems",
    }
)
# Formats of pydantic's: those that say what a text is for and take any; one version of UUIDs.
_FREE_FORMATS = frozenset({"password", "binary", "path", "file-path", "directory-path"})
_UUIDS = {
    f"uuid{n}": f"^[0-9a-f]{{8}}-[0-9a-f]{{4}}-{n}[0-9a-f]{{3}}-[89ab][0-9a-f]{{3}}-[0-9a-f]{{12}}$"
    for n in range(1, 9)
}
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_SINGLE = frozenset({"items", "additionalProperties"})
_BOUNDS = (
    ("minimum", "maximum"),
    ("exclusiveMinimum", "exclusiveMaximum"),
    ("minLength", "maxLength"),
    ("minItems", "maxItems"),
    ("minProperties", "maxProperties"),
)


class SchemaError(ValueError):
    """A schema that is not one, or that can not be enforced; one line that names the keyword."""


def checked(schema: Any) -> Schema:
    """A copy, ready for the compiler. Raises SchemaError."""
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise SchemaError("the schema must be an object")
    _check_size(schema)
    copy: Schema = json.loads(json.dumps(schema))
    for path, node in _schemas(copy):
        try:
            _check_node(node)
        except SchemaError as error:
            raise SchemaError(f"{error} (at {path})"[:400]) from None
    return copy


def _check_size(value: Any) -> None:
    """Depth and count before anything recursive, then bytes."""
    stack = [(value, 1)]
    num_nodes = 0
    while stack:
        item, depth = stack.pop()
        num_nodes += 1
        if depth > MAX_DEPTH:
            raise SchemaError(f"the schema is nested deeper than {MAX_DEPTH} levels")
        if num_nodes > MAX_NODES:
            raise SchemaError(f"the schema has more than {MAX_NODES} values")
        if isinstance(item, dict):
            stack += [(child, depth + 1) for child in item.values()]
        elif isinstance(item, list):
            stack += [(child, depth + 1) for child in item]
    try:
        size = len(json.dumps(value, ensure_ascii=False, allow_nan=False).encode())
    except ValueError:
        raise SchemaError("the schema holds a number or a text that JSON has not") from None
    if size > MAX_BYTES:
        raise SchemaError(f"the schema has {size} bytes, the limit is {MAX_BYTES}")


def _schemas(root: Schema) -> Iterator[tuple[str, Schema]]:
    """Every object in the place of a schema, with where it is; enum and const hold none."""
    stack: list[tuple[str, Any]] = [("#", root)]
    while stack:
        path, node = stack.pop()
        if isinstance(node, bool):
            continue
        if not isinstance(node, dict):
            raise SchemaError(f"a schema must be an object or a boolean (at {path})"[:400])
        yield path, node
        for name, value in node.items():
            where = f"{path}/{name}"
            if name in _MAPS and isinstance(value, dict):
                stack += [(f"{where}/{key}", child) for key, child in value.items()]
            elif name in _LISTS and isinstance(value, list):
                stack += [(f"{where}/{index}", child) for index, child in enumerate(value)]
            elif name in _SINGLE:
                stack.append((where, value))


def _check_node(node: Schema) -> None:
    if node.get("uniqueItems") is False:
        del node["uniqueItems"]  # says nothing
    node.pop("x-guidance", None)  # the compiler's own switches are not the client's
    for name, value in node.items():
        if name in NOT_ENFORCED:
            raise SchemaError(f"the keyword '{name}' is not supported: it cannot be enforced")
        check = _SHAPES.get(name)
        if check is not None:
            check(name, value)
    if node.get("format") in _FREE_FORMATS:
        del node["format"]
    elif node.get("format") in _UUIDS and "pattern" not in node:
        node["pattern"] = _UUIDS[node.pop("format")]
    if "pattern" in node:
        node["pattern"] = kept_in_strings(node["pattern"])
    if "patternProperties" in node:
        found = node["patternProperties"]
        node["patternProperties"] = {kept_in_strings(key): found[key] for key in found}
    _check_bounds(node)
    one_of = node.get("oneOf")
    if one_of is not None and "anyOf" not in node and _are_disjoint(one_of):
        node["anyOf"] = node.pop("oneOf")


def _check_bounds(node: Schema) -> None:
    for low, high in _BOUNDS:
        if low in node and high in node and node[low] > node[high]:
            raise SchemaError(f"{low} {node[low]} is greater than {high} {node[high]}")
    lows = [node[name] for name in ("minimum", "exclusiveMinimum") if name in node]
    highs = [node[name] for name in ("maximum", "exclusiveMaximum") if name in node]
    if lows and highs and max(lows) >= min(highs):
        touches = max(lows) == min(highs)
        if not touches or "exclusiveMinimum" in node or "exclusiveMaximum" in node:
            raise SchemaError("minimum and maximum leave no number")
    required = node.get("required", [])
    if node.get("minProperties", 0) > len(required) and node.get("minProperties", 0) > 1:
        # A property given twice would count twice.
        raise SchemaError(
            "the keyword 'minProperties' is supported up to the number of required properties only"
        )


def _are_disjoint(branches: list[Any]) -> bool:
    """Whether no value can satisfy two of them: by type, or by a constant that each requires."""
    if not all(isinstance(branch, dict) for branch in branches):
        return False
    types = [_types(branch) for branch in branches]
    if all(types) and sum(map(len, types)) == len(frozenset().union(*types)):
        return True
    if not all(branch.get("type") == "object" for branch in branches):
        return False
    common = set.intersection(*(set(branch.get("required", [])) for branch in branches))
    return any(_tells_apart(name, branches) for name in common)


def _types(branch: Schema) -> frozenset[str]:
    given = branch.get("type", [])
    types = frozenset([given] if isinstance(given, str) else given)
    # An integer is a number, too.
    return types | {"integer"} if "number" in types else types


def _tells_apart(name: str, branches: list[Schema]) -> bool:
    values: list[str] = []
    for branch in branches:
        rule = branch.get("properties", {}).get(name)
        if not isinstance(rule, dict) or not ("const" in rule or "enum" in rule):
            return False
        own = [rule["const"]] if "const" in rule else rule["enum"]
        if not all(isinstance(value, str) for value in own):
            return False
        values += dict.fromkeys(own)
    return len(values) == len(set(values))


# --- the shape of each keyword's value (the metaschema, as far as it matters here) ----------------


def _type(name: str, value: Any) -> None:
    given = value if isinstance(value, list) else [value]
    if not given or not all(isinstance(item, str) and item in TYPES for item in given):
        raise SchemaError(f"'{name}' must be one of {', '.join(sorted(TYPES))}, or a list of them")


def _map(name: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise SchemaError(f"'{name}' must be an object of schemas")
    if name == "patternProperties":
        for pattern in value:
            _pattern(name, pattern)


def _list(name: str, value: Any) -> None:
    if not isinstance(value, list) or not value:
        raise SchemaError(f"'{name}' must be a list of schemas, and not empty")


def _single(name: str, value: Any) -> None:
    if not isinstance(value, dict | bool):
        hint = "; a list of schemas is 'prefixItems'" if isinstance(value, list) else ""
        raise SchemaError(f"'{name}' must be a schema{hint}")


def _strings(name: str, value: Any) -> None:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise SchemaError(f"'{name}' must be a list of strings")
    if len(set(value)) != len(value):
        raise SchemaError(f"'{name}' names something twice")


def _enum(name: str, value: Any) -> None:
    if not isinstance(value, list) or not value:
        raise SchemaError(f"'{name}' must be a list, and not empty")


def _number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise SchemaError(f"'{name}' must be a number")
    if isinstance(value, int) and abs(value) >= MAX_INTEGER:
        raise SchemaError(f"'{name}' is beyond 64 bits")
    if name == "multipleOf":
        _divisor(value)


def _divisor(value: float) -> None:
    if value <= 0:
        raise SchemaError("'multipleOf' must be positive")
    digits = Decimal(repr(value)).normalize().as_tuple().digits
    if int("".join(map(str, digits))) > MAX_DIVISOR:
        raise SchemaError(f"'multipleOf' is supported up to {MAX_DIVISOR}, times a power of ten")


def _count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise SchemaError(f"'{name}' must be a whole number, not below 0")


def _text(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise SchemaError(f"'{name}' must be a string")


def _pattern(name: str, value: Any) -> None:
    _text(name, value)
    if len(value) > MAX_PATTERN_CHARS:
        raise SchemaError(f"'{name}' has more than {MAX_PATTERN_CHARS} characters")


def _reference(name: str, value: Any) -> None:
    _text(name, value)
    if not value.startswith("#"):
        raise SchemaError(f"'{name}' must point into this schema, that is begin with '#'")


_SHAPES: Mapping[str, Callable[[str, Any], None]] = {
    "type": _type,
    "enum": _enum,
    "required": _strings,
    "pattern": _pattern,
    "format": _text,
    "$ref": _reference,
    **dict.fromkeys(_MAPS, _map),
    **dict.fromkeys(_LISTS, _list),
    **dict.fromkeys(_SINGLE, _single),
    **dict.fromkeys(
        ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), _number
    ),
    **dict.fromkeys(
        ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
        _count,
    ),
}
