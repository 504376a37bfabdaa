"""A parser that takes the tool calls out of one answer, in the form of its model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from hotset.text.parts import CallArguments, CallStart, Part, ReasoningChunk, Text, merged
from hotset.text.tool_calls.nulls import NullFilter, without_null
from hotset.text.tool_calls.reader import SPACE, Reader, Steps

Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schemas of the arguments, by the name of the function."""


class AnswerReader(Protocol):
    """The interface of a form that a parser needs (forms.py)."""

    def read(self, parser: ToolCallParser) -> Steps[None]:
        """Read a whole answer."""


class ToolCallParser(Reader):
    """A parser of the calls in one answer. n_calls: calls so far.

    tools: the functions that may be called; None: any. A set of names means empty schemas.
    make_id: returns the id of each call that the model does not number itself.
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
        """Take in the next piece of the answer, and return the parts that are certain."""
        self.add(text)
        next(self._steps, None)
        return self._new_parts()

    def finish(self) -> list[Part]:
        """Return the remaining parts after the last piece."""
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

    # ---- called by forms ----

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
        """Pass the text taken since `hold` on as text: it is not a call."""
        self.text(self.drop())

    def start(self, name: str, id: str | None = None) -> None:
        """Begin a call with the text taken since `hold`. White space before it belongs to the form."""
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
        """Finish the last call. Arguments that broke off before their beginning must not be valid JSON."""
        if self._is_empty:
            self.arguments("{")
        if self._nulls is not None and (rest := self._nulls.rest()):
            self._parts.append(CallArguments(self.n_calls - 1, rest))
        self._nulls = None

    def knows(self, name: str) -> bool:
        """Return whether a function of this name may be called."""
        return self.tools is None or name in self.tools

    def schema(self, name: str) -> Mapping[str, Any]:
        """Return the schema of a function's arguments; an empty one if it is not known."""
        return (self.tools or {}).get(name) or {}
