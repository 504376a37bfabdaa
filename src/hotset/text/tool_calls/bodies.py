"""The ways in which forms write calls. Each body reads the text after one of its opening marks.

A body returns whether there is a call. If not, its caller makes the text taken so far text again
(`reject`). A call that has begun remains one; later text that breaks the form is passed on as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hotset.text.tool_calls.arguments import Arguments, Json
from hotset.text.tool_calls.parser import ToolCallParser
from hotset.text.tool_calls.reader import MAX_NAME, SPACE, Sink, Steps
from hotset.text.tool_calls.values import sendable

_NAME_KEYS = ("name", "tool_name")
_ARGUMENTS_KEYS = ("arguments", "parameters")
Calls = Sequence[tuple[str, Any]]
"""Names and arguments. Arguments that are not a mapping are a text that a model wrote instead."""
_CALL_KEYS = (*_NAME_KEYS, *_ARGUMENTS_KEYS, "id", "tool_call_id", "type")
_MAX_BRACES = 4  # before one object: Qwen2.5-Coder's template shows {{"name": ...}}


@dataclass(frozen=True)
class Objects:
    """A form like `<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>`.

    It holds objects or a list. Surplus braces before an object or its arguments, and missing ones after it,
    are ignored. opening: the marks; a required call begins with the first. end: "" without one.
    is_checked: only an object with arguments and a known name is a call, since no mark shows it. as_list,
    name_key, arguments_key: how a required call is written.
    """

    opening: tuple[str, ...] = ()
    end: str = ""
    is_checked: bool = False
    as_list: bool = False
    name_key: str = "name"
    arguments_key: str = "arguments"

    def written(self, calls: Calls, *, is_bare: bool) -> str:
        objects = [{self.name_key: name, self.arguments_key: arguments} for name, arguments in calls]
        if is_bare or not self.opening:
            return "\n".join(json.dumps(one, ensure_ascii=False) for one in objects)
        if self.as_list:
            return f"{self.opening[0]}{json.dumps(objects, ensure_ascii=False)}{self.end}"
        texts = (json.dumps(one, ensure_ascii=False) for one in objects)
        return "\n".join(f"{self.opening[0]}\n{text}\n{self.end}" for text in texts)

    def read(self, parser: ToolCallParser, _: str) -> Steps[bool]:
        n = 0
        while True:
            if n:
                parser.hold()
            yield from parser.space(",;[]}" if n else ",;[]")
            if not (yield from parser.peek("{")):
                break
            found = yield from self._object(parser)
            if not found:
                if n:
                    parser.reject()
                return n > 0
            n += 1
        if not n:
            return False
        if self.end:
            yield from parser.closed(self.end)
        return True

    def _object(self, parser: ToolCallParser) -> Steps[bool]:
        """Read one call. Return False if the object is not one."""
        call = _Call(parser, self.is_checked)
        stops = (",", self.end) if self.end else (",",)
        yield from _braces(parser, _MAX_BRACES)
        while True:
            yield from parser.space()
            if (yield from parser.at("}")):
                return call.ends(is_whole=True)
            key: list[str] = []
            if not (yield from parser.at('"')) or not (yield from parser.quoted('"', key.append)):
                return call.ends(is_whole=False)
            yield from parser.space()
            if self.is_checked and "".join(key[:-1]) not in _CALL_KEYS:
                return call.ends(is_whole=False)
            if not (yield from parser.at(":")):
                return call.ends(is_whole=False)
            yield from parser.space()
            n_surplus = 0
            while n_surplus < _MAX_BRACES and (yield from parser.peek("{{")):
                n_surplus += len(parser.take(1))
            sink = call.value_of("".join(key[:-1]), bool((yield from parser.peek("{", "["))))
            stop = yield from parser.value(sink, stops)
            call.end_value()
            for _ in range(n_surplus):
                yield from parser.at("}")
            if stop is None:
                return call.ends(is_whole=False)
            yield from parser.space()
            yield from parser.at(",")


def _braces(parser: ToolCallParser, most: int) -> Steps[None]:
    """Take the braces that open an object, at most `most`, with the white space between them."""
    for _ in range(most):
        yield from parser.space()
        if not (yield from parser.at("{")):
            return


class _Call:
    """The known parts of a call while its object is read. It starts with its name and first arguments."""

    def __init__(self, parser: ToolCallParser, is_checked: bool) -> None:
        self._parser, self._is_checked = parser, is_checked
        self._name: str | None = None
        self._is_started = self._has_arguments = False
        self._waiting: list[str] = []  # arguments that come before the name
        self._value: list[str] = []
        self._key = ""

    def value_of(self, key: str, is_nested: bool) -> Sink:
        """Return the sink for the value of a key."""
        self._key, self._value = key, []
        if key in _ARGUMENTS_KEYS and not self._has_arguments:
            self._has_arguments = True
            self._start()
            if is_nested:
                return self._emit
            self._key = "arguments"
            return self._value.append
        self._key = "name" if key in _NAME_KEYS and self._name is None else ""
        return self._value.append if self._key else lambda _: None

    def end_value(self) -> None:
        text = "".join(self._value).rstrip(SPACE)
        if self._key == "name":
            name = _string(text)
            self._name = name if name and len(name) <= MAX_NAME else None
            self._start()
        elif self._key == "arguments" and text:
            inner = _string(text)  # some models write JSON in a string
            self._emit("{}" if text == "null" else text if inner is None else inner)
        self._key = ""

    def ends(self, is_whole: bool) -> bool:
        if is_whole and self._name and not self._has_arguments and not self._is_checked:
            self._has_arguments = True
            self._start()
            self._emit("{}")
        return self._is_started

    def _start(self) -> None:
        if self._name is None or not self._has_arguments or self._is_started:
            return
        if self._is_checked and not self._parser.knows(self._name):
            return
        self._parser.start(self._name)
        self._is_started = True
        waiting, self._waiting = self._waiting, []
        self._emit("".join(waiting))

    def _emit(self, text: str) -> None:
        if self._is_started:
            self._parser.arguments(text)
        else:
            self._waiting.append(text)


def _string(text: str) -> str | None:
    """Return the value of a JSON string; None for other text."""
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    return sendable(value) if isinstance(value, str) else None


Head = Callable[[ToolCallParser], Steps[tuple[str, str | None] | None]]


@dataclass(frozen=True)
class Named:
    """A form like `<tool_call><function=get_weather><parameter=city>Rome</parameter></function></tool_call>`.

    call: the mark that begins a call; "" for none. Its name follows, then after_name, the arguments, and end.
    section: the opening marks of a list of calls; a required call has the first. many: whether one section
    may hold several. gap: whether a line end may be between the marks. between: characters allowed between
    calls. head: reads name and id if they are more than a name and after_name. is_checked: only a known name
    is a call.
    """

    call: str
    arguments: Arguments
    after_name: str = ""
    end: str = ""
    section: tuple[str, ...] = ()
    section_end: str = ""
    many: bool = False
    gap: bool = False
    between: str = ""
    head: Head | None = None
    in_head: tuple[str, ...] = ()
    is_checked: bool = False

    @property
    def opening(self) -> tuple[str, ...]:
        return (*self.section, self.call) if self.call else self.section

    def written(self, calls: Calls, *, is_bare: bool) -> str:
        """Return calls as text, for a form with JSON arguments or Python calls."""
        if isinstance(self.arguments, Json):
            between = "\n" * self.gap
            texts = [
                f"{self.call}{name}{self.after_name}{json.dumps(arguments, ensure_ascii=False)}{self.end}"
                for name, arguments in calls
            ]
            return f"{''.join(self.section[:1])}{between.join(texts)}{self.section_end}"
        texts = []
        for name, arguments in calls:
            pairs = arguments.items() if isinstance(arguments, Mapping) else [("arguments", arguments)]
            texts.append(f"{name}({', '.join(f'{key}={value!r}' for key, value in pairs)})")
        text = f"[{', '.join(texts)}]"
        return text if is_bare else f"{self.section[0]}{text}{self.section_end}"

    def read(self, parser: ToolCallParser, opened: str) -> Steps[bool]:
        n = 0
        while True:
            if n:
                parser.hold()
            if n or not self.call or opened != self.call:
                yield from parser.space(self.between)
                begins = (yield from parser.at(self.call)) if self.call else (yield from parser.is_at_name())
                if not begins:
                    break
            is_whole = yield from self._call(parser)
            if is_whole is None:
                if n:
                    parser.reject()
                return n > 0
            n += 1
            if not is_whole or not (self.section_end or self.between):
                return True
        if n and self.section_end and not (yield from parser.closed(self.section_end)):
            parser.reject()
        return n > 0

    def _call(self, parser: ToolCallParser) -> Steps[bool | None]:
        """Read a call. Return whether it keeps to the form until it ends; None without a call."""
        found = yield from (self.head or self._name)(parser)
        if found is None or (self.is_checked and not parser.knows(found[0])):
            return None
        parser.start(*found)
        end = self.end.strip()
        ends = tuple(mark for mark in (end, self.section_end) if mark)
        if not (yield from self.arguments.read(parser, found[0], ends)):
            yield from parser.at(*ends)
            return False
        if end:
            yield from parser.space()
            yield from parser.closed(end)
        return True

    def _name(self, parser: ToolCallParser) -> Steps[tuple[str, None] | None]:
        name = yield from parser.name()
        yield from parser.space()
        if self.after_name:
            is_call = yield from parser.at(self.after_name.strip())
        else:
            is_call = yield from parser.peek(self.arguments.opening, *([self.end] if self.end else []))
        return (name, None) if name and is_call else None


def kimi_head(parser: ToolCallParser) -> Steps[tuple[str, str | None] | None]:
    """Read `functions.get_weather:0<|tool_call_argument_begin|>`, all of which is the id."""
    id = yield from parser.head("<|tool_call_argument_begin|>")
    found = re.fullmatch(r"(?:functions\.)?([A-Za-z0-9_.\-]{1,128}?)(?::\d+)?", (id or "").strip())
    return (found[1], found[0]) if found else None


def mistral_head(parser: ToolCallParser) -> Steps[tuple[str, str | None] | None]:
    """Read `get_weather[CALL_ID]a1b2c3d4e[ARGS]`, in which id and marks may be missing."""
    name = yield from parser.name()
    yield from parser.space()
    id = None
    if (yield from parser.at("[CALL_ID]")):
        id = yield from parser.name()
        yield from parser.space()
    is_call = (yield from parser.at("[ARGS]")) or (yield from parser.peek("{"))
    return (name, id or None) if name and is_call else None


_RECIPIENT = re.compile(rf"\bto=(?:functions\.)?([^\s<]{{1,{MAX_NAME}}})(?![^\s<])")
_HARMONY_HEADS = ("<|start|>", "<|channel|>", "to=")
_HARMONY_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")


def read_harmony(parser: ToolCallParser) -> Steps[None]:
    """Read messages of channels: analysis is reasoning, one with a recipient is a call, others are text."""
    while True:
        parser.hold()
        yield from parser.space()
        is_call, sink = False, parser.text
        if (yield from parser.peek(*_HARMONY_HEADS)):
            head = yield from parser.head("<|message|>")
            if head is None:  # not a message
                parser.take(1)
                parser.reject()
            else:
                parser.drop()
                recipient = _RECIPIENT.search(head)
                channel = re.search(r"<\|channel\|>\s*(\w+)", head)
                if recipient:
                    parser.start(recipient[1])
                    is_call, sink = True, parser.arguments
                elif channel and channel[1] == "analysis":
                    sink = parser.reasoning
        else:
            parser.reject()
        n = parser.n_taken
        mark = yield from parser.until(_HARMONY_ENDS, sink)
        if not mark:
            return
        if is_call and parser.n_taken == n:
            parser.arguments("{}")
        if mark not in _HARMONY_HEADS:  # a head begins the next message
            parser.take(len(mark))
