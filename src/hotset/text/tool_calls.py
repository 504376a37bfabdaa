"""Calls of functions as models write them, taken out of the text while it comes.

Which form a model uses is said by its chat template, of which it was trained on the renderings:

| form | the template's text has | what the model writes |
|---|---|---|
| harmony | `<|channel|>`, `<|message|>` | `<|channel|>commentary to=functions.NAME<|message|>{...}<|call|>` |
| mistral | `[TOOL_CALLS]` | `[TOOL_CALLS]` and `[{"name": ..., "arguments": {...}}]` or `NAME[ARGS]{...}` |
| hermes | `<tool_call>`, no `<function=` | `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` |
| llama | `<|python_tag|>`, or both `<|start_header_id|>` and `"parameters"` | first of all, or behind |
| | | `<|python_tag|>`: `{"name": ..., "parameters": {...}}` |

The first row that fits counts; without one the answer is text. Marks may be special tokens, which a decoder
leaves out: `MARKS` has those that must be handed on as text.

A parser is fed pieces of any size and gives parts; how the answer was cut changes nothing. What does not keep
to the form is handed on as it stands, as text, or as arguments once a call has begun: nothing is an error.
White space between text and calls belongs to the form and is left out.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Collection
from typing import Literal

from hotset.text.parts import CallArguments, CallStart, Part, Reasoning, Text, first_of, held_back, merged

Form = Literal["harmony", "mistral", "hermes", "llama"]

MARKS: dict[Form, tuple[str, ...]] = {
    "harmony": (
        "<|channel|>",
        "<|message|>",
        "<|start|>",
        "<|constrain|>",
        "<|end|>",
        "<|call|>",
        "<|return|>",
    ),
    "mistral": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama": ("<|python_tag|>",),
}

_SPACE = " \t\r\n"
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,128}")


def form_of(template: str) -> Form | None:
    """How a model with this chat template writes calls; None where it is not known."""
    if "<|channel|>" in template and "<|message|>" in template:
        return "harmony"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template and "<function=" not in template:
        return "hermes"
    if "<|python_tag|>" in template or ("<|start_header_id|>" in template and '"parameters"' in template):
        return "llama"
    return None


def new_id(form: Form) -> str:
    """An id for a call. Mistral's templates take nothing but nine letters and digits."""
    if form == "mistral":
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"


def parser_of(
    form: Form, names: Collection[str] | None = None, make_id: Callable[[], str] | None = None
) -> ToolCallParser:
    """A parser for one answer.

    names: of the functions that may be called; what looks like a call without any mark (llama) is one only
    of these. make_id: gives the id of each call; default: a random one.
    """
    kinds = {"harmony": _Harmony, "mistral": _Mistral, "hermes": _Hermes, "llama": _Llama}
    return kinds[form](names, make_id or (lambda: new_id(form)))


class ToolCallParser:
    """Takes the calls out of one answer. n_calls: how many there are so far."""

    def __init__(self, names: Collection[str] | None, make_id: Callable[[], str]) -> None:
        self.n_calls = 0
        self._names = names
        self._make_id = make_id
        self._buffer = ""  # what came and is not decided on
        self._parts: list[Part] = []
        self._blank = ""  # white space that is text only if more follows
        self._state: Callable[[bool], bool] = self._begin

    def push(self, text: str) -> list[Part]:
        """Takes the next piece of the answer, and gives what is certain."""
        self._buffer += text
        return self._run(final=False)

    def finish(self) -> list[Part]:
        """The rest, once nothing more comes."""
        parts = self._run(final=True)
        if self._blank and not self.n_calls:
            parts = merged([*parts, Text(self._blank)])
        self._blank = ""
        return parts

    def _run(self, final: bool) -> list[Part]:
        """Lets states consume the buffer until none can go on. A state that has returned False for want of
        text must take the whole buffer at the end."""
        while self._state(final):
            pass
        parts, self._parts = self._parts, []
        return merged(parts)

    # ---- states: each takes from the buffer, and says whether the next may go on ----

    def _begin(self, final: bool) -> bool:
        raise NotImplementedError

    def _take(self, n: int) -> str:
        taken, self._buffer = self._buffer[:n], self._buffer[n:]
        return taken

    def _text_until(self, marks: tuple[str, ...], final: bool) -> str:
        """Gives text up to a mark, which is taken and returned; "" while there is none."""
        at, mark = first_of(self._buffer, marks)
        if mark:
            self._text(self._take(at))
            self._take(len(mark))
            return mark
        n_held = 0 if final else held_back(self._buffer, marks)
        self._text(self._take(len(self._buffer) - n_held))
        return ""

    # ---- parts ----

    def _text(self, text: str) -> None:
        text = self._blank + text
        shown = text.rstrip(_SPACE)
        self._blank = text[len(shown) :]
        if shown:
            self._parts.append(Text(shown))

    def _start(self, name: str) -> int:
        self._blank = ""
        self._parts.append(CallStart(self.n_calls, self._make_id(), name))
        self.n_calls += 1
        return self.n_calls - 1

    def _arguments(self, text: str) -> None:
        if text:
            self._parts.append(CallArguments(self.n_calls - 1, text))


class _Object:
    """A JSON object that is read as it comes, far enough to find a name and the text of the arguments.

    It is as lenient as can be: whether the arguments are JSON is for whoever gets them to see.
    stop: a letter that ends the reading where it stands outside of strings, "" for none.
    """

    def __init__(self, stop: str = "") -> None:
        self.raw = ""
        self.name: str | None = None
        self.has_arguments = False  # whether they have begun
        self.done = False
        self._stop = stop
        self._arguments = ""  # that nobody has taken yet
        self._depth = 0
        self._in_string = self._escaped = False
        self._word = ""  # the string that is read
        self._key: str | None = None
        self._value: str | None = None  # of the key; None before its colon
        self._streams = False  # whether the value is handed on while it is read: objects and lists are

    def read(self, text: str) -> int:
        """Reads to the end of the object, or to a letter that stops it; returns how many characters."""
        for i, letter in enumerate(text):
            if letter == self._stop and not self._in_string:
                return i
            self.take(letter)
            if self.done:
                return i + 1
        return len(text)

    def take(self, letter: str) -> None:
        """Reads one more."""
        self.raw += letter
        depth = self._depth
        closes_string = False
        if self._in_string:
            self._word += letter
            closes_string = letter == '"' and not self._escaped
            self._escaped = letter == "\\" and not self._escaped
            self._in_string = not closes_string
        elif letter == '"':
            self._in_string, self._word = True, letter
        elif letter in "{[":
            self._depth += 1
        elif letter in "}]":
            self._depth -= 1
        if depth == 0:  # the brace that it begins with
            return
        if self._value is not None:
            self._take_of_value(letter, ends=depth == 1 and not self._in_string and letter in ",}]")
        elif depth == 1 and closes_string:
            self._key = _string(self._word)
        elif depth == 1 and letter == ":" and not self._in_string:
            self._value = ""
        self.done = self._depth == 0

    def _take_of_value(self, letter: str, ends: bool) -> None:
        assert self._value is not None
        if ends:
            self.end_value()
            return
        if not self._value and letter in _SPACE:
            return
        if self._key in ("arguments", "parameters"):
            if not self._value:
                self.has_arguments, self._streams = True, letter in "{["
            if self._streams and not (self._depth == 1 and letter in _SPACE):  # (behind it)
                self._arguments += letter
        self._value += letter

    def end_value(self) -> None:
        """Nothing more comes of the value that is read."""
        value = (self._value or "").rstrip(_SPACE)
        if self._key == "name" and self.name is None:
            self.name = _string(value) or None
        elif self._key in ("arguments", "parameters") and not self._streams:
            inner = _string(value)  # some models write JSON in a string
            self._arguments += "{}" if value == "null" else value if inner is None else inner
        self._key = self._value = None

    def take_arguments(self) -> str:
        """The text of the arguments that has come since the last call."""
        taken, self._arguments = self._arguments, ""
        return taken


def _string(text: str) -> str | None:
    """What a JSON string says; None for what is none."""
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None


class _Balanced:
    """A JSON value that is read until its brackets are closed."""

    def __init__(self) -> None:
        self.done = False
        self._depth = 0
        self._in_string = self._escaped = False

    def read(self, text: str) -> int:
        """How many characters of `text` belong to it."""
        for i, letter in enumerate(text):
            if self._in_string:
                self._in_string = self._escaped or letter != '"'
                self._escaped = letter == "\\" and not self._escaped
            elif letter == '"':
                self._in_string = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self.done = True
                    return i + 1
        return len(text)


class _ObjectCalls(ToolCallParser):
    """Calls that are objects, one after the other, behind a mark or none.

    _separators: what may stand between objects. _end: the mark that ends them; "": whatever else comes.
    _held: what was taken from the buffer since the mark and is text unless a call follows.
    """

    _separators = ",[]"
    _end = ""
    _is_checked = False  # whether a call must have arguments, and one of the names

    def __init__(self, names: Collection[str] | None, make_id: Callable[[], str]) -> None:
        super().__init__(names, make_id)
        self._held = ""
        self._object = _Object()
        self._is_started = False

    def _plain(self, final: bool) -> bool:
        """Text, up to the next mark."""
        raise NotImplementedError

    def _text_to(self, mark: str, then: Callable[[bool], bool], final: bool) -> bool:
        """Text up to the mark of calls, behind which it goes on with `then`; False while there is none."""
        if not self._text_until((mark,), final):
            return False
        self._held, self._state = mark, then
        return True

    def _between(self, final: bool) -> bool:
        """Before an object, or behind one."""
        n = len(self._buffer) - len(self._buffer.lstrip(_SPACE + self._separators))
        skipped = self._take(n)
        if self._held:  # else a call stands before it, and it is of the form
            self._held += skipped
        if self._buffer[:1] == "{":
            self._object, self._is_started = _Object(self._end[:1]), False
            self._state = self._inside
            return True
        if not final and (not self._buffer or (self._end and self._end.startswith(self._buffer))):
            return False
        if self._end and not self._held and (self._buffer.startswith(self._end) or self._is_cut()):
            self._take(len(self._end))
        self._text(self._held)
        self._held, self._state = "", self._plain
        return True

    def _inside(self, final: bool) -> bool:
        found = self._object
        self._take(found.read(self._buffer))
        is_cut = bool(self._end) and (self._buffer.startswith(self._end) or (final and self._is_cut()))
        if self._buffer and not found.done and not is_cut:
            if not final and self._end.startswith(self._buffer):
                return False
            found.take(self._take(1))  # it only begins as the mark does
            return True
        is_over = found.done or is_cut or final
        if is_over and not found.done:
            found.end_value()
        if not self._is_started and self._is_call(found, is_over):
            assert found.name is not None
            self._start(found.name)
            self._is_started, self._held = True, ""
        if self._is_started:
            self._arguments(found.take_arguments())
        if not is_over:
            return False
        if self._is_started:
            if not found.has_arguments:
                self._arguments("{}")
            self._state = self._between
        else:
            self._text(self._held + found.raw)
            self._held, self._state = "", self._plain
        return True

    def _is_cut(self) -> bool:
        """Whether the buffer begins the mark at the end; of more than a bracket, which may as well be one."""
        return len(self._buffer) > 1 and self._end.startswith(self._buffer)

    def _is_call(self, found: _Object, is_over: bool) -> bool:
        """Whether it is one for certain. Cut off before its arguments it is none."""
        if found.name is None:
            return False
        if self._is_checked:
            return found.has_arguments and (self._names is None or found.name in self._names)
        return found.has_arguments or found.done


class _Hermes(_ObjectCalls):
    _end = "</tool_call>"

    def _begin(self, final: bool) -> bool:
        return self._plain(final)

    def _plain(self, final: bool) -> bool:
        return self._text_to("<tool_call>", self._between, final)


class _Llama(_ObjectCalls):
    _separators = ";,[]"
    _is_checked = True

    def _begin(self, final: bool) -> bool:
        """The beginning of the answer: an object there may be a call without a mark."""
        blank = len(self._buffer) - len(self._buffer.lstrip(_SPACE))
        if blank == len(self._buffer) and not final:
            return False
        self._text(self._take(blank))
        self._state = self._between if self._buffer[:1] == "{" else self._plain
        return True

    def _plain(self, final: bool) -> bool:
        if not self._text_to("<|python_tag|>", self._between, final):
            return False
        self._is_checked = False
        return True


class _Mistral(_ObjectCalls):
    def __init__(self, names: Collection[str] | None, make_id: Callable[[], str]) -> None:
        super().__init__(names, make_id)
        self._value = _Balanced()
        self._is_empty = True

    def _begin(self, final: bool) -> bool:
        return self._plain(final)

    def _plain(self, final: bool) -> bool:
        return self._text_to("[TOOL_CALLS]", self._head, final)

    def _head(self, final: bool) -> bool:
        """Behind the mark: a list, an object, or a name."""
        self._held += self._take(len(self._buffer) - len(self._buffer.lstrip(_SPACE)))
        if not self._buffer and not final:
            return False
        self._state = self._between if self._buffer[:1] in ("[", "{", "") else self._named
        return True

    def _named(self, final: bool) -> bool:
        """A name, perhaps an id, and arguments."""
        name = _NAME.match(self._buffer)
        rest = self._buffer[name.end() :].lstrip(_SPACE) if name else self._buffer
        if name and rest.startswith("[CALL_ID]"):
            id = _NAME.match(rest, len("[CALL_ID]"))
            rest = rest[id.end() :] if id else rest
        if name and rest.startswith(("[ARGS]", "{")):
            self._take(len(self._buffer) - len(rest.removeprefix("[ARGS]")))
            self._start(name[0])
            self._held, self._value, self._is_empty = "", _Balanced(), True
            self._state = self._value_of_name
            return True
        if name and not final and (not rest or "[ARGS]".startswith(rest) or "[CALL_ID]".startswith(rest)):
            return False
        self._text(self._held)
        self._held, self._state = "", self._plain
        return True

    def _value_of_name(self, final: bool) -> bool:
        value = self._take(self._value.read(self._buffer))
        self._arguments(value)
        self._is_empty = self._is_empty and not value
        if not self._value.done and not final:
            return False
        if self._is_empty:
            self._arguments("{}")
        self._state = self._plain
        return True


class _Harmony(ToolCallParser):
    """Messages of channels: analysis is reasoning, what has a recipient is a call, all else is text."""

    _heads = ("<|start|>", "<|channel|>", "to=")
    _ends = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")

    def __init__(self, names: Collection[str] | None, make_id: Callable[[], str]) -> None:
        super().__init__(names, make_id)
        self._emit: Callable[[str], None] = self._text
        self._is_empty = False  # a call without arguments so far

    def _begin(self, final: bool) -> bool:
        """Before a message. What has no head is text."""
        blank = len(self._buffer) - len(self._buffer.lstrip(_SPACE))
        begun = self._buffer[blank:]
        if begun.startswith(self._heads):
            self._take(blank)
            self._state = self._head
        elif not begun or (not final and any(mark.startswith(begun) for mark in self._heads)):
            if final:
                self._text(self._take(blank))
            return False
        else:
            self._emit, self._state = self._text, self._body
        return True

    def _head(self, final: bool) -> bool:
        at = self._buffer.find("<|message|>")
        if at < 0:
            if final:
                self._text(self._take(len(self._buffer)))
            return False
        head = self._take(at)
        self._take(len("<|message|>"))
        recipient = re.search(r"\bto=([^\s<]+)", head)
        channel = re.search(r"<\|channel\|>\s*(\w+)", head)
        if recipient:
            self._start(recipient[1].removeprefix("functions."))
            self._emit, self._is_empty = self._arguments_of_message, True
        elif channel and channel[1] == "analysis":
            self._emit = self._think
        else:
            self._emit = self._text
        self._state = self._body
        return True

    def _think(self, text: str) -> None:
        self._parts.append(Reasoning(text))

    def _arguments_of_message(self, text: str) -> None:
        self._is_empty = self._is_empty and not text
        self._arguments(text)

    def _body(self, final: bool) -> bool:
        at, mark = first_of(self._buffer, self._ends)
        n_held = 0 if final or mark else held_back(self._buffer, self._ends)
        self._emit(self._take(at if mark else len(self._buffer) - n_held))
        if (mark or final) and self._is_empty:
            self._arguments_of_message("{}")
        if not mark:
            return False
        if mark not in ("<|start|>", "<|channel|>"):  # which begin the next
            self._take(len(mark))
        self._state = self._begin
        return True
