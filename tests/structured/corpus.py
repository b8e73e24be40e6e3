"""JSON Schemas to be obeyed, and others to be refused by name; hand-made and generated.

`ACCEPTED` must compile, and every finished output must validate. `REFUSED` maps a schema to the
word that the refusal must hold.
"""

from __future__ import annotations

import random
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

TREE: Schema = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": obj({"value": SMALL, "children": array({"$ref": "#/$defs/node"}, maxItems=2)})
    },
}
MUTUAL: Schema = {
    "$ref": "#/definitions/list",
    "definitions": {
        "list": {"type": "array", "items": {"$ref": "#/definitions/box"}, "maxItems": 2},
        "box": obj({"inside": {"anyOf": [{"$ref": "#/definitions/list"}, {"type": "null"}]}}),
    },
}

HAND_MADE: dict[str, Schema] = {
    "empty": {"type": ["null", "boolean", "integer"]},
    "integer": INT,
    "number": {"type": "number"},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "types": {"type": ["integer", "null"]},
    "text": text(),
    "text-length": text(minLength=3),
    "text-exact": text(minLength=5, maxLength=5),
    "minimum": {"type": "integer", "minimum": 10},
    "maximum": {"type": "integer", "maximum": -3},
    "range": {"type": "integer", "minimum": -5, "maximum": 1203},
    "exclusive": {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 6},
    "exclusive-half": {"type": "integer", "minimum": -9, "exclusiveMaximum": 0.5},
    "number-range": {"type": "number", "minimum": 0, "maximum": 1},
    "number-exclusive": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 2.5},
    "number-negative": {"type": "number", "maximum": -0.25, "minimum": -1000},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 1000},
    "large-bound": {"type": "integer", "minimum": 0, "maximum": 10**15},
    "enum": {"enum": ["red", "green", "blue"]},
    "enum-mixed": {"enum": [1, "one", None, True, [1, 2], {"a": 1}]},
    "enum-unicode": {"enum": ["开心", "naïve", "😀", '"quoted"', "back\\slash", "tab\there"]},
    "enum-typed": {"type": "string", "enum": ["a", "b", 1]},
    "const": {"const": {"a": [1, "x"]}},
    "const-text": obj({"kind": {"const": "point"}, "x": SMALL}),
    "pattern": {"type": "string", "pattern": "^[a-z]{2,5}$"},
    "pattern-open": {"type": "string", "pattern": "[0-9]{3}", "maxLength": 10},
    "pattern-or": {"type": "string", "pattern": "^(yes|no|maybe)$"},
    "pattern-digits": {"type": "string", "pattern": r"^\d{3}-\d{4}$"},
    "pattern-word": {"type": "string", "pattern": r"^\w{1,8}$"},
    "pattern-unicode": {"type": "string", "pattern": "^[٠-٩]{3}$"},  # noqa: RUF001
    "pattern-escape": {"type": "string", "pattern": r"^\"[^\"\\]{1,5}\"$"},
    "pattern-length": {"type": "string", "pattern": "^[ab]+$", "minLength": 2, "maxLength": 6},
    "pattern-any": {"type": "string", "pattern": "^.{0,10}$"},
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "format": "time"},
    "date-time": {"type": "string", "format": "date-time"},
    "email": {"type": "string", "format": "email"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "ipv6": {"type": "string", "format": "ipv6"},
    "array": array(SMALL),
    "array-min": array(SMALL, minItems=2),
    "array-exact": array({"type": "boolean"}, minItems=3),
    "array-tuple": {"type": "array", "prefixItems": [SMALL, text()], "items": False, "minItems": 2},
    "array-tuple-open": {"type": "array", "prefixItems": [SMALL], "items": INT, "maxItems": 4},
    "array-nested": array(array(array(SMALL))),
    "array-not-unique": array(SMALL, uniqueItems=False),
    "object": obj({"name": text(), "age": SMALL}),
    "object-optional": obj({"a": SMALL, "b": text(), "c": {"type": "null"}}, required=["b"]),
    "object-no-required": obj({"a": SMALL, "b": SMALL}, required=[]),
    "object-no-properties": {"type": "object", "additionalProperties": False},
    "object-map": {"type": "object", "additionalProperties": SMALL, "maxProperties": 3},
    "object-rest": obj({"id": SMALL}, additionalProperties=text()),
    "object-unicode": obj({"é": SMALL, "名前": text(), 'quo"te': SMALL, "back\\slash": SMALL}),
    "object-pattern": {
        "type": "object",
        "patternProperties": {"^x_": SMALL},
        "additionalProperties": False,
        "maxProperties": 3,
    },
    "object-required-unlisted": {"type": "object", "required": ["z"], "maxProperties": 1},
    "object-min": obj({"a": SMALL}, required=[], minProperties=1),
    "nested": obj({"a": obj({"b": obj({"c": obj({"d": SMALL})})})}),
    "any-of": {"anyOf": [SMALL, text(), obj({"a": SMALL})]},
    "any-of-objects": {"anyOf": [obj({"a": SMALL}), obj({"b": text()})]},
    "one-of-types": {"oneOf": [{"type": "string", "maxLength": 5}, SMALL, {"type": "null"}]},
    "one-of-tagged": {
        "oneOf": [
            obj({"kind": {"const": "circle"}, "radius": SMALL}),
            obj({"kind": {"const": "square"}, "side": SMALL}),
        ]
    },
    "all-of": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 8}]},
    "all-of-objects": {
        "allOf": [
            {"type": "object", "properties": {"a": SMALL}, "required": ["a"]},
            {"properties": {"b": {"type": "boolean"}}, "required": ["b"]},
        ],
        "maxProperties": 2,
    },
    "ref": {"$ref": "#/$defs/p", "$defs": {"p": obj({"x": SMALL, "y": SMALL})}},
    "ref-twice": obj({"a": {"$ref": "#/$defs/n"}, "b": {"$ref": "#/$defs/n"}})
    | {"$defs": {"n": SMALL}},
    "ref-beside": {"$ref": "#/$defs/n", "minimum": 3, "$defs": {"n": SMALL}},
    "ref-chain": {
        "$ref": "#/$defs/a",
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/c"}, "c": SMALL},
    },
    "tree": TREE,
    "mutual": MUTUAL,
    "self": obj({"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}),
    "titles": obj({"a": SMALL | {"title": "A", "description": "not", "examples": [{"not": 1}]}}),
    "default": obj({"a": SMALL | {"default": 3}}),
    "names-of-keywords": obj({"not": SMALL, "if": SMALL, "type": text(), "enum": SMALL}),
    "annotation": text(**{"x-order": 3, "deprecated": True}),
    "draft-7": {"$schema": "http://json-schema.org/draft-07/schema#", **obj({"a": SMALL})},
}

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


ACCEPTED: dict[str, Schema] = HAND_MADE | generated(150)

# (schema, what the refusal names)
REFUSED: list[tuple[Any, str]] = [
    ({"not": {"type": "string"}}, "not"),
    ({"if": {"type": "string"}, "then": {"minLength": 1}}, "if"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "contains": {"type": "integer"}}, "contains"),
    ({"type": "array", "minContains": 2}, "minContains"),
    ({"type": "object", "propertyNames": {"pattern": "^a"}}, "propertyNames"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"type": "object", "dependentSchemas": {"a": {}}}, "dependentSchemas"),
    ({"type": "object", "dependencies": {"a": ["b"]}}, "dependencies"),
    ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
    ({"type": "array", "unevaluatedItems": False}, "unevaluatedItems"),
    ({"$dynamicRef": "#x"}, "$dynamicRef"),
    ({"$ref": "http://example.com/schema"}, "$ref"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    ({"type": "string", "format": "no-such-format"}, "format"),
    ({"type": "string", "pattern": "("}, "regex"),
    ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    ({"type": "string", "pattern": r"(a)\1"}, "backreference"),
    ({"type": "not-a-type"}, "type"),
    ({"type": ["string", 5]}, "type"),
    ({"type": None}, "type"),
    ({"type": []}, "type"),
    ({"properties": {"foo": "bar"}}, "schema must be"),
    ({"properties": []}, "properties"),
    ({"items": [{"type": "integer"}]}, "items"),
    ({"enum": []}, "enum"),
    ({"required": "a"}, "required"),
    ({"required": ["a", "a"]}, "required"),
    ({"type": "integer", "minimum": "3"}, "minimum"),
    ({"type": "integer", "minimum": True}, "minimum"),
    ({"type": "integer", "multipleOf": 0}, "multipleOf"),
    ({"type": "integer", "maximum": 10**30}, "maximum"),
    ({"type": "integer", "minimum": -(2**63) - 1}, "minimum"),
    ({"type": "integer", "minimum": 5, "maximum": 1}, "minimum"),
    ({"type": "integer", "minimum": 5, "exclusiveMaximum": 5}, "minimum"),
    ({"type": "string", "minLength": 5, "maxLength": 1}, "minLength"),
    ({"type": "string", "minLength": -1}, "minLength"),
    ({"type": "string", "maxLength": 1.5}, "maxLength"),
    ({"type": "array", "minItems": 3, "maxItems": 2}, "minItems"),
    ({"type": "object", "minProperties": 3}, "minProperties"),
    ({"anyOf": []}, "anyOf"),
    ({"allOf": {}}, "allOf"),
    ({"anyOf": [1]}, "schema must be"),
    ("type: string", "object"),
    ([], "object"),
    (5, "object"),
    (False, "object"),
]
