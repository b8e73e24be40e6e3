"""JSON Schemas to be obeyed, and others to be refused by name; hand-made and generated.

`ACCEPTED` must compile, and every finished output must validate. `REFUSED` maps a schema to the
word that the refusal must hold.
"""

from __future__ import annotations

from typing import Any

from tests.structured.generated import generated
from tests.structured.parts import INT, SMALL, Schema, array, obj, text

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
    "uuid-version": {"type": "string", "format": "uuid4"},
    "format-free": obj({"secret": text(format="password"), "at": text(format="path", maxLength=9)}),
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
    "linked-list": {
        "type": "object",
        "properties": {"head": {"$ref": "#/$defs/cell"}},
        "required": ["head"],
        "additionalProperties": False,
        "$defs": {
            "cell": {
                "type": ["object", "null"],
                "properties": {"value": SMALL, "next": {"$ref": "#/$defs/cell"}},
                "required": ["value", "next"],
                "additionalProperties": False,
            }
        },
    },
    "three-in-a-ring": {
        "$ref": "#/$defs/a",
        "$defs": {
            "a": obj({"b": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/b"}]}}),
            "b": obj({"c": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/c"}]}}),
            "c": obj({"a": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/a"}]}}),
        },
    },
    "json-itself": {
        "$ref": "#/$defs/value",
        "$defs": {
            "value": {
                "anyOf": [
                    {"type": ["null", "boolean"]},
                    SMALL,
                    {"type": "array", "items": {"$ref": "#/$defs/value"}, "maxItems": 2},
                    {
                        "type": "object",
                        "additionalProperties": {"$ref": "#/$defs/value"},
                        "maxProperties": 2,
                    },
                ]
            }
        },
    },
    "ref-escaped": {
        "$ref": "#/$defs/a~1b%20c",
        "$defs": {"a/b c": SMALL},
    },
    "ref-into-properties": obj({"a": SMALL, "b": {"$ref": "#/properties/a"}}),
    "ref-nested-defs": obj(
        {"a": {"$ref": "#/$defs/outer/$defs/inner"}},
    )
    | {"$defs": {"outer": {"$defs": {"inner": SMALL}}}},
    "nullable-types": obj({"a": {"type": ["string", "null"], "maxLength": 5}}),
    "nullable-any-of": obj({"a": {"anyOf": [{"type": "null"}, {"enum": ["x", "ÿ"]}]}}),
    "nullable-enum": {"enum": [None, "null", 0, False]},
    "const-number": {"const": -0.5},
    "const-null": {"const": None},
    "const-list": {"const": [[], {}, "é\u2028"]},
    "const-empty": obj({"a": {"const": ""}, "b": {"const": {}}, "c": {"const": []}}),
    "enum-objects": {"enum": [{"a": 1}, {"b": [True, None]}, []]},
    "enum-one": obj({"role": {"type": "string", "enum": ["assistant"]}}),
    "enum-controls": {"enum": ["\x00", "\x1f\x7f", "\u2028\u2029", "\ufeff", "a\nb\r\n"]},
    "enum-astral": {"enum": ["𐍈", "👩‍👩‍👧", "🇨🇿", "e\u0301"]},
    "enum-and-type": {"type": ["integer", "string"], "enum": [1, "1", 1.5, None]},
    "enum-of-hundreds": {"enum": [f"Wert {number}" for number in range(400)]},
    "multiple-of-ten": {"type": "integer", "multipleOf": 10, "minimum": -50, "maximum": 50},
    # 0.01 is no number of base 2, by which jsonschema reckons.
    "multiple-of-quarter": {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 10},
    "multiple-twice": {
        "allOf": [{"type": "integer", "multipleOf": 4}, {"multipleOf": 6}],
        "minimum": 0,
        "maximum": 100,
    },
    "bounds-one-value": {"type": "integer", "minimum": 7, "maximum": 7},
    "bounds-around-zero": {"type": "number", "minimum": -0.05, "maximum": 0.05},
    "bounds-64-bits": {"type": "integer", "minimum": -(2**53), "maximum": 2**53},
    "bounds-fraction-of-integer": {"type": "integer", "minimum": 0.5, "maximum": 3.5},
    "tuple": {
        "type": "array",
        "prefixItems": [SMALL, {"type": "boolean"}, text()],
        "items": False,
        "minItems": 3,
    },
    "tuple-optional": {"type": "array", "prefixItems": [SMALL, text()], "items": False},
    "tuple-of-tuples": array(
        {
            "type": "array",
            "prefixItems": [{"enum": ["x", "y"]}, SMALL],
            "items": False,
            "minItems": 2,
        }
    ),
    "array-empty": {"type": "array", "maxItems": 0},
    "array-of-one": array({"const": "x"}, minItems=1, maxItems=1),
    "array-anything": {"type": "array", "items": {"type": ["boolean", "null"]}, "minItems": 1},
    "map-of-lists": {
        "type": "object",
        "additionalProperties": array(SMALL),
        "maxProperties": 2,
    },
    "map-beside-properties": {
        "type": "object",
        "properties": {"id": SMALL, "é": SMALL},
        "required": ["id"],
        "additionalProperties": {"type": "boolean"},
    },
    "pattern-properties-two": {
        "type": "object",
        "patternProperties": {"^s_[a-z]$": text(), "^n_[a-z]$": SMALL},
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 3,
    },
    "pattern-properties-beside": {
        "type": "object",
        "properties": {"id": SMALL},
        "required": ["id"],
        "patternProperties": {"^x-": {"type": "boolean"}},
        "additionalProperties": False,
        "maxProperties": 3,
    },
    "one-of-in-array": array(
        {
            "oneOf": [
                obj({"type": {"const": "text"}, "text": text()}),
                obj({"type": {"const": "image"}, "width": SMALL, "height": SMALL}),
                obj({"type": {"enum": ["line", "rule"]}}),
            ]
        }
    ),
    "one-of-number-text": {"oneOf": [{"type": "number", "minimum": 0, "maximum": 1}, text()]},
    "any-of-nested": {"anyOf": [{"anyOf": [SMALL, {"anyOf": [{"type": "null"}]}]}, text()]},
    "any-of-overlapping": {
        "anyOf": [obj({"a": SMALL}), obj({"a": SMALL, "b": SMALL}), obj({"a": text()})]
    },
    "any-of-beside-properties": {
        "type": "object",
        "properties": {"a": SMALL, "b": SMALL},
        "additionalProperties": False,
        "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
    },
    "all-of-refs": {
        "allOf": [{"$ref": "#/$defs/named"}, {"$ref": "#/$defs/aged"}],
        "maxProperties": 2,
        "$defs": {
            "named": {"type": "object", "properties": {"n": text()}, "required": ["n"]},
            "aged": {"type": "object", "properties": {"a": SMALL}, "required": ["a"]},
        },
    },
    "all-of-texts": {
        "allOf": [{"type": "string", "pattern": "^a"}, {"pattern": "z$"}, {"maxLength": 6}]
    },
    "hostname": {"type": "string", "format": "hostname", "maxLength": 30},
    "uri": {"type": "string", "format": "uri", "maxLength": 40},
    "duration": {"type": "string", "format": "duration"},
    "formats-together": obj(
        {"id": {"type": "string", "format": "uuid"}, "on": {"type": "string", "format": "date"}}
    ),
    "format-nullable": {"type": ["string", "null"], "format": "ipv4"},
    "pattern-anchors-inside": {"type": "string", "pattern": "^(a|bc)d?$"},
    "pattern-classes": {"type": "string", "pattern": r"^[^\s\d]{2,4}\.[\w-]{1,3}$"},
    "pattern-negated-quote": {"type": "string", "pattern": '^[^"\\\\]{1,4}$'},
    "pattern-no-backslash": {"type": "string", "pattern": r"^[^\\]{1,3}\.$"},
    "pattern-no-quote": array({"type": "string", "pattern": '^[^"]{1,2}$'}, minItems=2),
    "pattern-no-ascii": {"type": "string", "pattern": "^[^ -~]{1,2}x$"},
    "pattern-properties-no-quote": {
        "type": "object",
        "patternProperties": {'^[^"a]{2}$': SMALL},
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 2,
    },
    "pattern-emoji": {"type": "string", "pattern": "^[😀-😂]{1,2}$"},
    "pydantic": {
        "$defs": {
            "Kind": {"enum": ["a", "b"], "title": "Kind", "type": "string"},
            "Part": {
                "properties": {
                    "kind": {"$ref": "#/$defs/Kind", "description": "which"},
                    "price": {
                        "anyOf": [{"type": "number", "minimum": 0, "maximum": 9}, {"type": "null"}],
                        "default": None,
                    },
                },
                "required": ["kind", "price"],
                "title": "Part",
                "type": "object",
                "additionalProperties": False,
            },
        },
        "properties": {"parts": array({"$ref": "#/$defs/Part"})},
        "required": ["parts"],
        "title": "Order",
        "type": "object",
        "additionalProperties": False,
    },
    "wide": obj({f"field_{number}": {"type": "boolean"} for number in range(18)}),
    "deep": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1},
    "titles": obj({"a": SMALL | {"title": "A", "description": "not", "examples": [{"not": 1}]}}),
    "default": obj({"a": SMALL | {"default": 3}}),
    "names-of-keywords": obj({"not": SMALL, "if": SMALL, "type": text(), "enum": SMALL}),
    "annotation": text(**{"x-order": 3, "deprecated": True}),
    "draft-7": {"$schema": "http://json-schema.org/draft-07/schema#", **obj({"a": SMALL})},
}

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
    ({"type": "integer", "multipleOf": 99_991}, "multipleOf"),
    ({"type": "integer", "multipleOf": -2}, "multipleOf"),
    ({"type": "array", "uniqueItems": True, "items": {"enum": [1, 2]}}, "uniqueItems"),
    ({"$defs": {"a": {"not": {}}}, "$ref": "#/$defs/a"}, "not"),
    ({"$ref": "#/$defs/missing"}, "missing"),
    ({"type": "object", "properties": {"a": {}}, "maxProperties": 1}, "maxProperties"),
    ({"$recursiveRef": "#"}, "$recursiveRef"),
    ({"type": "object", "patternProperties": {"(": {}}}, "regex"),
    ({"type": "array", "prefixItems": {}}, "prefixItems"),
    ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, "oneOf"),
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
