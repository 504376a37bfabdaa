"""Takes the tool calls out of one answer, in the form that its model uses."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from hotset.text.parts import CallArguments, CallStart, Part, ReasoningChunk, Text, merged
from hotset.text.tool_calls.nulls import NullFilter, without_null
from hotset.text.tool_calls.reader import SPACE, Reader, Steps

Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schemas of the arguments, by the name of the function."""


class AnswerReader(Protocol):
    """What a parser must know of a form (forms.py)."""

    def read(self, parser: ToolCallParser) -> Steps[None]:
        """Reads a whole answer."""


class ToolCallParser(Reader):
    """Takes the calls out of one answer. n_calls: how many there are so far.

    tools: the functions that may be called; None: any. A set of names stands for schemas that say nothing.
    make_id: gives the id of each call that the model does not number itself.
    """

    def __init__(
        self, form: AnswerReader, tools: Schemas | Collection[str] | None, make_id: Callable[[], str]
    ) -> None:
        super().__init__()
        self.n_calls = 0
        self.tools: Schemas | None = (
            tools if isinstance(tools, Mapping) or tools is None else {name: {} for name in tools}
        )
        self._make_id = make_id
        self._is_empty = False  # whether the last call has no arguments so far
        self._nulls: NullFilter | None = None  # of the last call, if its arguments need one
        self._parts: list[Part] = []
        self._blank: list[str] = []  # white space that is text only if more text follows
        self._ids: set[str] = set()
        self._steps = form.read(self)

    def push(self, text: str) -> list[Part]:
        """Takes the next piece of the answer, and gives what is certain."""
        self.add(text)
        next(self._steps, None)
        return self._new_parts()

    def finish(self) -> list[Part]:
        """The rest, once nothing more comes."""
        self.is_final = True
        for _ in self._steps:
            raise AssertionError("a form waits for text after the end")
        self._end_call()
        if self._blank and not self.n_calls:
            self._parts.append(Text("".join(self._blank)))
        self._blank = []
        return self._new_parts()

    def _new_parts(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return merged(parts)

    # ---- what a form gives ----

    def reasoning(self, text: str) -> None:
        self._parts.append(ReasoningChunk(text))

    def text(self, text: str) -> None:
        shown = text.rstrip(SPACE)
        if shown:
            self._end_call()
            self._parts += [*map(Text, self._blank), Text(shown)]
            self._blank = []
        if len(shown) < len(text):
            self._blank.append(text[len(shown) :])

    def reject(self) -> None:
        """What was taken since `hold` is no call but text."""
        self.text(self.drop())

    def start(self, name: str, id: str | None = None) -> None:
        """What was taken since `hold` begins a call. White space before it belongs to the form."""
        self.drop()
        self._end_call()
        self._is_empty = True
        self._blank = []
        if id is None or id in self._ids:
            id = self._make_id()
        self._ids.add(id)
        self._parts.append(CallStart(self.n_calls, id, name))
        self.n_calls += 1
        names = without_null(self.schema(name))
        self._nulls = NullFilter(names) if names else None

    def arguments(self, text: str) -> None:
        self._is_empty &= not text
        if text := text if self._nulls is None else self._nulls.push(text):
            self._parts.append(CallArguments(self.n_calls - 1, text))

    def _end_call(self) -> None:
        """Arguments that broke off before they began are no JSON either."""
        if self._is_empty:
            self.arguments("{")
        if self._nulls is not None and (rest := self._nulls.rest()):
            self._parts.append(CallArguments(self.n_calls - 1, rest))
        self._nulls = None

    def knows(self, name: str) -> bool:
        """Whether a function of this name may be called."""
        return self.tools is None or name in self.tools

    def schema(self, name: str) -> Mapping[str, Any]:
        """The schema of its arguments; an empty one where it is not known."""
        return (self.tools or {}).get(name) or {}
