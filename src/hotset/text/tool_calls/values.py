"""Values that are not written as JSON: literals of Python and Gemma, and text by a JSON schema."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

TYPES = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
_MAX_SCHEMAS = 256  # that are looked at for the types of one argument
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
    """Text as a JSON string."""
    return json.dumps(sendable(text), ensure_ascii=False)


def sendable(text: str) -> str:
    """Text in which escapes have left no half of a surrogate pair, which UTF-8 cannot encode."""
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
    """A literal of JSON, Python or Gemma as JSON; None for other text."""
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
    """A token as JSON writes it."""
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
    """Part of a string as Python accepts it: line ends are escaped, and backslashes before other letters."""
    if found[1] is None or found[1] in "\r\n\0":
        return f"\\x{ord(found[0][-1]):02x}"
    return found[0] if found[1] in "\\'\"abfnrtvxuUN01234567" else f"\\\\{found[1]}"


def typed(text: str, types: frozenset[str]) -> str:
    """What a model wrote as text, as JSON of one of the types: a string where it is nothing else."""
    value = None if types == {"string"} else as_json(text)
    if value is None or ("string" in types and not _kinds_of(json.loads(value)) & types):
        return quoted(text)
    return value


def _kinds_of(value: Any) -> frozenset[str]:
    """The JSON types of a value. A whole number is of both types of numbers."""
    for kind, names in _KINDS:
        if isinstance(value, kind):
            return frozenset(names)
    return frozenset({"null"} if value is None else {"array", "object"})


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """The JSON types that a schema allows; all of TYPES where it does not say, or is too deep to see.

    root: what references of the form "#/..." are resolved in.
    """
    return _types_of(schema, root, [_MAX_SCHEMAS]) or TYPES


def _types_of(schema: Any, root: Mapping[str, Any], left: list[int]) -> frozenset[str]:
    """left: how many schemas may still be looked at; references may go round in circles."""
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
    """What a JSON pointer leads to; None where it leads nowhere."""
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
    """The schemas of named arguments."""
    if isinstance(schema.get("$ref"), str):
        schema = resolved(schema["$ref"], schema) or {}
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}
