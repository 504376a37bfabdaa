"""Calls of tools that have a type of their own, while the model writes them.

`ClientCall` makes the events of /v1/responses, and `CustomCalls` makes the deltas of a chat.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from itertools import chain
from typing import Any, NamedTuple

from hotset.server.answers import Delta, ToolCallArguments, ToolCallStart
from hotset.server.client_tools import CUSTOM, FORMS, CallForm

Step = tuple[str, dict[str, Any]]
"""The type of an event and its fields; the type OPEN begins the item with these fields."""
OPEN = "open"

_BEGIN = re.compile(r"\s*\{")
_KEY = re.compile(r'\s*"((?:[^"\\]|\\.)*)"\s*:\s*(?=\S)', re.DOTALL)
_NEXT = re.compile(r"\s*,")
_STRING = re.compile(r'\s*,?\s*"')
_END_OF_LIST = re.compile(r"\s*\]")
_WORD = re.compile(r'[^\s,}\]\["{]+(?=[\s,}\]])')  # a number, true, false or null
# Characters of a string, up to its end or to an incomplete escape.
_CHARACTERS = re.compile(r'(?:[^"\\]|\\(?:u(?:[0-9a-fA-F]{4}|(?![0-9a-fA-F]{0,3}\Z))|[^u]))*', re.DOTALL)
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.)", re.DOTALL)
_CONTROLS = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\", "/": "/"}


class StringPiece(NamedTuple):
    """A piece of a string in an object. element: its index in a list; None for a value of the object."""

    key: str
    element: int | None
    text: str
    ends: bool


class JsonStrings:
    """A reader of the strings of a JSON object while it is written: values, and elements of lists.

    After a nested object or list, and after anything that is not JSON, no more strings are found.
    """

    def __init__(self) -> None:
        self._text, self._at = "", 0  # unread text begins at `_at`
        self._next = self._begin
        self._key, self._index = "", -1
        self._high = ""  # the first half of a surrogate pair whose second half has not arrived

    def push(self, text: str) -> Iterator[StringPiece]:
        """Add more of the object, and yield the pieces of strings in it."""
        self._text, self._at = self._text[self._at :] + text, 0
        while (found := self._next()) is not None:
            yield from found

    def _taken(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        match = pattern.match(self._text, self._at)
        if match is not None:
            self._at = match.end()
        return match

    def _begin(self) -> list[StringPiece] | None:
        return self._then(self._name) if self._taken(_BEGIN) else None

    def _name(self) -> list[StringPiece] | None:
        match = self._taken(_KEY)
        if match is None:
            return None
        self._key, self._index = _decoded(match[1]), -1
        first = self._text[self._at]
        if first in '"[':
            self._at += 1
        return self._then({'"': self._characters, "[": self._element}.get(first, self._word))

    def _element(self) -> list[StringPiece] | None:
        if self._taken(_STRING):
            self._index += 1
            return self._then(self._characters)
        return self._then(self._after) if self._taken(_END_OF_LIST) else None

    def _word(self) -> list[StringPiece] | None:
        return self._then(self._after) if self._taken(_WORD) else None

    def _after(self) -> list[StringPiece] | None:
        return self._then(self._name) if self._taken(_NEXT) else None

    def _characters(self) -> list[StringPiece] | None:
        match = self._taken(_CHARACTERS)
        assert match is not None
        text, ends = self._high + _decoded(match[0]), self._text.startswith('"', self._at)
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
        self._high = "" if ends or not "\ud800" <= text[-1:] <= "\udbff" else text[-1]
        text = text.removesuffix(self._high)
        if ends:
            self._at += 1
            self._next = self._after if self._index < 0 else self._element
        elif not text:
            return None
        return [StringPiece(self._key, self._index if self._index >= 0 else None, text, ends)]

    def _then(self, state: Any) -> list[StringPiece]:
        self._next = state
        return []


def _decoded(text: str) -> str:
    """Return the characters of a part of a JSON string. An escape that JSON does not have is unchanged."""

    def character(match: re.Match[str]) -> str:
        code = match[1]
        return chr(int(code[1:], 16)) if len(code) > 1 else _CONTROLS.get(code, match[0])

    return _ESCAPE.sub(character, text) if "\\" in text else text


class ClientCall:
    """One call while the model writes its arguments. form: the tool's. name: of the function.

    An item begins when it is certain that the arguments fit its type, and a function call otherwise.
    """

    def __init__(self, form: CallForm, id: str, name: str) -> None:
        self.form, self.id, self.name = form, id, name
        self.value: Any = None  # of the item's field, once the item has begun; None before
        self.arguments = ""  # so far
        self._strings = JsonStrings()
        self._given: dict[str, str] = {}  # strings that arrived before the item
        self._is_over = False  # whether the string that is sent piece by piece has ended

    def push(self, text: str) -> Iterator[Step]:
        """Add more of the arguments, and yield the events for it."""
        self.arguments += text
        for piece in self._strings.push(text):
            if self.form is FORMS["shell"]:
                if piece.key == "commands" and piece.element is not None:
                    yield from self._command(piece)
            elif self._is_over or piece.element is not None:
                continue
            elif self.form is FORMS["apply_patch"]:
                yield from self._operation(piece)
            elif self.form is CUSTOM and piece.key == "input":
                yield from self._input(piece.text)
                self._is_over = piece.ends

    def end(self) -> Iterator[Step]:
        """Yield the last events: the arguments are complete, or the answer has ended."""
        found = self.form.value(self.arguments)
        if self.value is None and found is not None:
            yield from self._whole(found)
        if self.value is None:
            yield OPEN, {"name": self.name, "arguments": ""}
            if self.arguments:
                yield "response.function_call_arguments.delta", {"delta": self.arguments}
            return
        if self.form is FORMS["shell"] and not self._is_over and self.value["commands"]:
            yield self._of_command("done", command=self.value["commands"][-1])
        if "diff" in self.value and self.form is FORMS["apply_patch"]:
            yield "response.apply_patch_call_operation_diff.done", {"diff": self.value["diff"]}
        if found is not None and self.form is not CUSTOM:
            self.value = found

    def _whole(self, value: Any) -> Iterator[Step]:
        """Yield the events of a call whose arguments are complete."""
        if self.form is CUSTOM:
            yield from self._input(value)
        elif self.form is FORMS["shell"]:
            yield from self._begin({**value, "commands": []})
            for i, command in enumerate(value["commands"]):
                yield from self._command(StringPiece("commands", i, command, ends=True))
        elif value.get("diff"):
            yield from self._begin({**value, "diff": ""})
            yield from self._diff(value["diff"])
        else:
            yield from self._begin(value)

    def _begin(self, value: Any, **named: str) -> Iterator[Step]:
        self.value = value
        yield OPEN, {**named, self.form.field: value}

    def _input(self, text: str) -> Iterator[Step]:
        if self.value is None:
            yield from self._begin("", name=self.name)
        self.value += text
        if text:
            yield "response.custom_tool_call_input.delta", {"delta": text}

    def _command(self, piece: StringPiece) -> Iterator[Step]:
        if self.value is None:
            yield from self._begin({"commands": [], "timeout_ms": None, "max_output_length": None})
        commands = self.value["commands"]
        if piece.element == len(commands):
            commands.append("")
            yield self._of_command("added", command="")
        elif piece.element != len(commands) - 1 or self._is_over:
            return  # the arguments have a second list of commands
        commands[-1] += piece.text
        if piece.text:
            yield self._of_command("delta", delta=piece.text)
        self._is_over = piece.ends
        if piece.ends:
            yield self._of_command("done", command=commands[-1])

    def _of_command(self, kind: str, **fields: str) -> Step:
        index = len(self.value["commands"]) - 1
        return f"response.shell_call_command.{kind}", {"command_index": index, **fields}

    def _operation(self, piece: StringPiece) -> Iterator[Step]:
        begun = self._given
        if piece.key != "diff":
            begun[piece.key] = begun.get(piece.key, "") + piece.text
            return
        if self.value is None:
            if begun.get("type") not in ("create_file", "update_file") or "path" not in begun:
                self._is_over = True  # wait for the whole arguments
                return
            yield from self._begin({"type": begun["type"], "path": begun["path"], "diff": ""})
        yield from self._diff(piece.text)
        self._is_over = piece.ends

    def _diff(self, text: str) -> Iterator[Step]:
        self.value["diff"] += text
        if text:
            yield "response.apply_patch_call_operation_diff.delta", {"delta": text}


def custom_input(arguments: str) -> str:
    """Return the text of a custom tool's call, complete or cut off, as its stream has it."""
    call = ClientCall(CUSTOM, "", "")
    return _input_in(chain(call.push(arguments), call.end()))


class CustomInput(ToolCallArguments):
    """More of the text of a call of a custom tool."""


class CustomCalls:
    """A filter of a chat's deltas that turns calls of custom tools into text. names: of these tools."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._calls: dict[int, tuple[int, ClientCall]] = {}  # the open call of each answer

    def push(self, delta: Delta) -> Iterator[Delta]:
        """Yield the delta; arguments of a custom tool become a piece of its text."""
        known = self._calls.get(delta.index)
        if known is not None and isinstance(delta, ToolCallArguments):
            text = _input_in(known[1].push(delta.text))
            if text or delta.logprobs:
                yield CustomInput(delta.index, delta.call, text, delta.logprobs)
            return
        if known is not None:
            del self._calls[delta.index]
            if text := _input_in(known[1].end()):
                yield CustomInput(delta.index, known[0], text)
        if isinstance(delta, ToolCallStart) and delta.name in self._names:
            self._calls[delta.index] = delta.call, ClientCall(CUSTOM, delta.id, delta.name)
        yield delta


def _input_in(steps: Iterator[Step]) -> str:
    return "".join(fields["delta"] for kind, fields in steps if kind != OPEN)
