"""JSON Schemas made at random of everything that is supported; the same for the same seed."""

from __future__ import annotations

import random

from tests.structured.parts import Schema, obj

_FIELDS = ("name", "id", "count", "größe", "tags", "price", "state", "notes", "x", "y", "is_ok")


def generated(count: int, seed: int = 7) -> dict[str, Schema]:
    """Nested schemas of everything that is supported; the same for the same seed."""
    draw = random.Random(seed)
    return {f"generated-{index}": _any(draw, 0) for index in range(count)}


def _any(draw: random.Random, depth: int) -> Schema:
    leaves = [_integer, _number, _text, _pattern, _enum, _plain]
    nodes = [_object, _object, _array, _choice]
    if depth == 0:
        return draw.choice([_object, _array, _choice, _reference])(draw, depth)
    return draw.choice(leaves if depth > 2 else leaves + nodes)(draw, depth)


def _integer(draw: random.Random, _: int) -> Schema:
    low = draw.randint(-1000, 1000)
    high = low + draw.randint(1, 5000)
    schema: Schema = {"type": "integer"}
    if draw.random() < 0.7:
        schema[draw.choice(["minimum", "exclusiveMinimum"])] = low
    if draw.random() < 0.7:
        schema[draw.choice(["maximum", "exclusiveMaximum"])] = high + 1
    return schema


def _number(draw: random.Random, _: int) -> Schema:
    low = round(draw.uniform(-50, 50), 2)
    return {"type": "number", "minimum": low, "maximum": round(low + draw.uniform(1, 90), 2)}


def _text(draw: random.Random, _: int) -> Schema:
    low = draw.randint(0, 4)
    return {"type": "string", "minLength": low, "maxLength": low + draw.randint(0, 12)}


def _pattern(draw: random.Random, _: int) -> Schema:
    classes = ["[a-z]", "[A-Z0-9]", "[äöü]", r"\d", "x", r"[^\"\\]", "(on|off)", r"\."]
    parts = [draw.choice(classes) + draw.choice(["", "?", "{1,3}", "{2}"]) for _ in range(3)]
    return {"type": "string", "pattern": "^" + "".join(parts) + "$"}


def _enum(draw: random.Random, _: int) -> Schema:
    values = ["on", "off", "größer", "開", "😀😃", 'a"b', "c\\d", 0, -3, 2.5, None, True]
    return {"enum": draw.sample(values, draw.randint(1, 5))}


def _plain(draw: random.Random, _: int) -> Schema:
    return {"type": draw.choice(["boolean", "null", ["boolean", "null"]])}


def _array(draw: random.Random, depth: int) -> Schema:
    low = draw.randint(0, 2)
    return {
        "type": "array",
        "items": _any(draw, depth + 1),
        "minItems": low,
        "maxItems": low + draw.randint(0, 2),
    }


def _object(draw: random.Random, depth: int) -> Schema:
    names = draw.sample(_FIELDS, draw.randint(1, 4))
    properties = {name: _any(draw, depth + 1) for name in names}
    return obj(properties, required=[name for name in names if draw.random() < 0.7])


def _choice(draw: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(draw, depth + 1) for _ in range(draw.randint(2, 3))]}


def _reference(draw: random.Random, depth: int) -> Schema:
    """A definition used twice, once inside itself."""
    inner = {"anyOf": [{"$ref": "#/$defs/item"}, {"type": "null"}]}
    item = obj({"value": _any(draw, depth + 2), "next": inner})
    return {**obj({"first": {"$ref": "#/$defs/item"}, "other": inner}), "$defs": {"item": item}}
