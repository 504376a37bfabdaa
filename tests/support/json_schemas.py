"""JSON schemas that replies must follow, in tests and in bench/constrained.py."""

from __future__ import annotations

import json
from typing import Any

NAME = {"type": "string", "maxLength": 8}
SCHEMAS: dict[str, dict[str, Any]] = {
    "flat": {
        "type": "object",
        "properties": {"name": NAME, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "nested": {
        "type": "object",
        "properties": {
            "who": {
                "type": "object",
                "properties": {"first": NAME, "home": {"type": "object", "properties": {"city": NAME},
                                                      "required": ["city"], "additionalProperties": False}},
                "required": ["home"],
                "additionalProperties": False,
            }
        },
        "required": ["who"],
        "additionalProperties": False,
    },
    "enum": {"enum": ["red", "green", 3, None, True, {"a": [1]}]},
    "array": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 5},
    "tuple": {"type": "array", "prefixItems": [NAME, {"type": "null"}], "items": False, "minItems": 2},
    "ref": {
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {"value": {"enum": [1, 2]}, "left": {"$ref": "#/$defs/leaf"}},
                "required": ["value", "left"],
                "additionalProperties": False,
            },
            "leaf": {"anyOf": [{"type": "null"}, {"const": "leaf"}]},
        },
    },
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,5}(é|ß)?$"},
    "number": {"type": "number", "minimum": -12.5, "maximum": 99.75},
    "any_of": {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 9}, {"type": "array", "maxItems": 0},
                         {"type": "object", "properties": {"k": {"const": "v"}}, "required": ["k"],
                          "additionalProperties": False}]},
    "all_of": {"allOf": [{"type": "string", "minLength": 2}, {"maxLength": 4}]},
}  # fmt: skip

LONG_TO_COMPILE = json.dumps(
    {"allOf": [{"type": "integer", "multipleOf": prime} for prime in (9973, 9967, 9949, 9941)]}
)
"""A schema that takes llguidance most of a minute and gigabytes."""
