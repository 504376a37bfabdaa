"""Values that are not written as JSON: literals of Python and Gemma, and text whose type is in a schema."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

TYPES = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
_MAX_SCHEMAS = 256  # schemas that are examined for the types of one argument
_KINDS = (
    (str, ["string"]),
    (bool, ["boolean"]),
    (int, ["number", "integer"]),
    (float, ["number"]),
    (list, ["array"]),
    (Mapping, ["object"]),
)

_TOKEN = re.compile(
    r"\s*(?:(?P<raw><escape>.*?<escape>|<\|\"\|>.*?<\|\"\|>)"
    r"|(?P<string>\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*')"
    r"|(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"
    r"|(?P<word>[A-Za-z_][\w.\-]*)"
    r"|(?P<mark>[\[\]{}(),:]))\s*",
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(.)|[\r\n\0]", re.DOTALL)
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}


def quoted(text: str) -> str:
    """Return text as a JSON string."""
    return json.dumps(sendable(text), ensure_ascii=False)


def sendable(text: str) -> str:
    """Replace halves of surrogate pairs, which escapes may leave and UTF-8 cannot encode."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def as_json(text: str) -> str | None:
    """Convert a literal of JSON, Python or Gemma to JSON; None for other text."""
    text = text.strip()
    if is_json(text):
        return text
    parts: list[str] = []
    at = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            return None
        at = found.end()
        part = _part(found, is_key=text.startswith(":", at))
        if part is None:
            return None
        if parts and not {part[0], parts[-1][0]} & set("[]{},:"):
            return None  # two values side by side
        if part in ("]", "}") and parts and parts[-1] == ",":
            parts.pop()
        parts.append(part)
    joined = "".join({",": ", ", ":": ": "}.get(part, part) for part in parts)
    return joined if is_json(joined) else None


def _part(found: re.Match[str], is_key: bool) -> str | None:
    """Return a token as JSON; None for one that JSON lacks."""
    text = found[found.lastgroup or 0]
    if found.lastgroup == "raw":
        return quoted(re.split(r"<escape>|<\|\"\|>", text)[1])
    if found.lastgroup == "string":
        try:
            return quoted(ast.literal_eval(_ESCAPE.sub(_escape, text)))
        except (ValueError, SyntaxError):
            return None
    if found.lastgroup == "word":
        return quoted(text) if is_key else _WORDS.get(text)
    if found.lastgroup == "mark":
        return {"(": "[", ")": "]"}.get(text, text)
    return text.removeprefix("+")


def _escape(found: re.Match[str]) -> str:
    """Return part of a string with escapes that Python accepts: of line ends, and of other backslashes."""
    if found[1] is None or found[1] in "\r\n\0":
        return f"\\x{ord(found[0][-1]):02x}"
    return found[0] if found[1] in "\\'\"abfnrtvxuUN01234567" else f"\\\\{found[1]}"


def typed(text: str, types: frozenset[str]) -> str:
    """Return a model's text as JSON of one of the types; a string if no other type fits."""
    value = None if types == {"string"} else as_json(text)
    if value is None or ("string" in types and not _kinds_of(json.loads(value)) & types):
        return quoted(text)
    return value


def _kinds_of(value: Any) -> frozenset[str]:
    """Return the JSON types of a value. A whole number has both types of numbers."""
    for kind, names in _KINDS:
        if isinstance(value, kind):
            return frozenset(names)
    return frozenset({"null"} if value is None else {"array", "object"})


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Return the JSON types that a schema allows; all of TYPES if it does not state them, or is too deep.

    root: the schema in which references of the form "#/..." are resolved.
    """
    return _types_of(schema, root, [_MAX_SCHEMAS]) or TYPES


def _types_of(schema: Any, root: Mapping[str, Any], left: list[int]) -> frozenset[str]:
    """Return the types, or TYPES after `left` schemas, since references may be circular."""
    left[0] -= 1
    if not isinstance(schema, Mapping) or left[0] < 0:
        return TYPES
    found = TYPES
    if isinstance(schema.get("$ref"), str):
        found &= _types_of(resolved(schema["$ref"], root), root, left)
    for values in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
        if isinstance(values, list):
            found &= frozenset().union(*map(_kinds_of, values))
    if "type" in schema:
        names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        names = [name for name in names if isinstance(name, str)]
        found &= {*names, *(["integer"] if "number" in names else [])}
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            found &= frozenset().union(*(_types_of(one, root, left) for one in schema[key]))
    for one in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
        found &= _types_of(one, root, left)
    return found


def resolved(reference: str, root: Any) -> Any:
    """Return the value that a JSON pointer leads to; None if it leads nowhere."""
    if not reference.startswith("#"):
        return None
    for key in reference[1:].strip("/").split("/") if reference[1:].strip("/") else ():
        key = key.replace("~1", "/").replace("~0", "~")
        if isinstance(root, Mapping):
            root = root.get(key)
        elif isinstance(root, list) and key.isdigit() and int(key) < len(root):
            root = root[int(key)]
        else:
            return None
    return root


def properties_of(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schemas of named arguments."""
    if isinstance(schema.get("$ref"), str):
        schema = resolved(schema["$ref"], schema) or {}
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}
