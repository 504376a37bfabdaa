"""Arguments that a model sets to null although their schema does not allow it.

Small models write `"timeout": null` for an optional argument that they do not need. Clients that check the
schema reject such a call. Without the argument it means the same and is accepted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from hotset.text.tool_calls.reader import MAX_HEAD, SPACE
from hotset.text.tool_calls.values import properties_of, resolved, types_of

# Keywords that may require an argument, or make others depend on it.
_CONDITIONS = frozenset(
    {
        "allOf",
        "anyOf",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "if",
        "minProperties",
        "oneOf",
    }
)
_HEAD = re.compile(r'\s*(?:,\s*)?("(?:[^"\\]|\\.)*")\s*:\s*', re.DOTALL)
_BEGUN = re.compile(r'\s*(?:,\s*)?(?:"(?:[^"\\]|\\.)*(?:\\|"\s*)?)?', re.DOTALL)  # of a head
_MARK = re.compile(r'["{}\[\],]')
_IN_STRING = re.compile(r'["\\]')
_NULL = "null"


def without_null(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of arguments that a function's schema makes optional and never null."""
    if isinstance(schema.get("$ref"), str):
        schema = resolved(schema["$ref"], schema) or {}
    if not isinstance(schema, Mapping) or _CONDITIONS & schema.keys():
        return frozenset()
    required = schema["required"] if isinstance(schema.get("required"), list) else []
    return frozenset(
        name
        for name, one in properties_of(schema).items()
        if isinstance(one, Mapping)
        and name not in required
        and True not in (one.get("required"), one.get("nullable"))  # keywords of older drafts and of OpenAPI
        and "null" not in types_of(one, schema)
    )


class NullFilter:
    """A filter that drops the null members of a JSON object, as the object arrives. names: of these members.

    Other texts are passed on unchanged. How a text is split changes nothing.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._buffer, self._at = "", 0  # text, and how many characters of it were taken
        self._read = self._start
        self._has_members = self._has_comma = False  # passed some on; the next comma must be left out
        self._depth, self._in_string, self._is_escaped = 0, False, False

    def push(self, text: str) -> str:
        """Take the next piece, and return the text that is certain."""
        self._buffer, self._at = self._buffer[self._at :] + text, 0
        passed = []
        while self._at < len(self._buffer) and (found := self._read()) is not None:
            passed.append(found)
        return "".join(passed)

    def rest(self) -> str:
        """Return the text that was held back, after the last piece."""
        return self._take(len(self._buffer))

    # Each reader takes some of the buffer and returns the text to pass on; None: it needs more text.

    def _take(self, end: int) -> str:
        taken, self._at = self._buffer[self._at : end], end
        return taken

    def _all(self) -> str:
        self._read = self._all
        return self._take(len(self._buffer))

    def _start(self) -> str | None:
        begun = self._buffer.lstrip(SPACE)
        if not begun:
            return None
        if begun[0] != "{":
            return self._all()
        self._read = self._member
        return self._take(len(self._buffer) - len(begun) + 1)

    def _member(self) -> str | None:
        """Read the comma before a member, its key, and whether its value is null; or the end."""
        head = _HEAD.match(self._buffer, self._at)
        end = len(self._buffer) if head is None else head.end()
        if end - self._at > MAX_HEAD or (head is None and not _BEGUN.fullmatch(self._buffer, self._at)):
            return self._all()
        value = self._buffer[end : end + len(_NULL) + 1]
        if head is None or _NULL.startswith(value):
            return None
        if value[:-1] == _NULL and value[-1] in f"{SPACE},}}" and _text(head[1]) in self._names:
            self._take(end + len(_NULL))
            self._has_comma = not self._has_members
            return ""
        self._read = self._value
        passed = self._take(end)
        if self._has_comma:
            self._has_comma, passed = False, passed.lstrip(f"{SPACE},")
        self._has_members = True
        return passed

    def _value(self) -> str:
        """Continue in a value, up to the comma or the bracket after it."""
        at = self._at
        while at < len(self._buffer):
            if self._is_escaped:
                self._is_escaped, at = False, at + 1
                continue
            found = (_IN_STRING if self._in_string else _MARK).search(self._buffer, at)
            if found is None:
                break
            at = found.end()
            mark = found[0]
            if mark == "\\":
                self._is_escaped = True
            elif mark == '"':
                self._in_string = not self._in_string
            elif not self._depth and mark in ",}]":
                self._read = self._member
                return self._take(found.start())
            elif mark != ",":
                self._depth += 1 if mark in "{[" else -1
        return self._take(len(self._buffer))


def _text(key: str) -> str | None:
    """Return the text of a key; None for escapes that JSON does not have."""
    try:
        return str(json.loads(key, strict=False))
    except ValueError:
        return None
