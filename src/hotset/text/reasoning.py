"""Reasoning before an answer, separated from the answer while it arrives.

The chat template shows between which marks a model thinks:

| the template's text has | marks |
|---|---|
| `<|channel|>` and `<|message|>` | none: harmony's channel `analysis` (tool_calls reads it) |
| `[THINK]` and `[/THINK]`, `<seed:think>`, `<|START_THINKING|>` | these |
| `<|channel>` and `<channel|>` (Gemma 4) | `<|channel>thought`, `<channel|>` |
| `</think>` | `<think>`, `</think>` |

Reasoning can only be at the beginning of the answer. If the rendered prompt ends with the opening mark (some
templates put it there), the answer begins inside the reasoning. If it ends with the closing mark (thinking is
turned off) or with neither, the answer shows whether it has reasoning. White space next to marks belongs to
them. Reasoning that is never closed continues to the end. If the end cuts the closing mark, the beginning
of the mark is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from hotset.text.parts import Part, ReasoningChunk, Text, first_of, held_back, merged

Marks = tuple[str, str]

_SPACE = " \t\r\n"
_MARKS: tuple[tuple[tuple[str, ...], Marks], ...] = (
    (("[THINK]", "[/THINK]"), ("[THINK]", "[/THINK]")),
    (("<seed:think>", "</seed:think>"), ("<seed:think>", "</seed:think>")),
    (("<|START_THINKING|>", "<|END_THINKING|>"), ("<|START_THINKING|>", "<|END_THINKING|>")),
    (("<|channel>", "<channel|>"), ("<|channel>thought", "<channel|>")),
    (("</think>",), ("<think>", "</think>")),
)


def marks_of(template: str) -> Marks | None:
    """Return the marks between which a model with this template thinks; None without such marks."""
    if "<|channel|>" in template and "<|message|>" in template:
        return None
    for found_by, marks in _MARKS:
        if all(part in template for part in found_by):
            return marks
    return None


EFFORT_BUDGETS: Mapping[str, int] = {
    "none": 0, "minimal": 512, "low": 512, "medium": 2048, "high": 8192, "xhigh": -1, "max": -1,
}  # fmt: skip
"""Budgets in tokens of reasoning efforts, for templates without a variable for them; -1 sets no limit."""

_EFFORT_VARIABLES = ("reasoning_effort", "thinking_effort")

_NEAREST_EFFORT = {"minimal": "low", "xhigh": "high", "max": "high"}


class Effort(NamedTuple):
    """An effort. variables: of the template. budget: tokens; 0: no thinking, None and -1: no limit."""

    variables: dict[str, Any]
    budget: int | None


def effort_of(template: str, variables: Mapping[str, Any], budget: int | None) -> Effort:
    """Return the variables that tell a template how much to think, and the budget that enforces it.

    variables: of the request; `enable_thinking` and `reasoning_effort` count. A template without a
    reasoning effort gets a budget instead, unless the request has one. A budget of 0 and `enable_thinking:
    false` mean the same.
    """
    told, effort = dict(variables), variables.get("reasoning_effort")
    if (name := effort_variable(template)) is not None:
        if effort is not None:
            is_known = effort not in _NEAREST_EFFORT or f"'{effort}'" in template or f'"{effort}"' in template
            told[name] = effort if is_known else _NEAREST_EFFORT[effort]
    elif budget is None and isinstance(effort, str):
        budget = EFFORT_BUDGETS.get(effort)
    if effort == "none" or told.get("enable_thinking") is False:
        budget = 0
    if budget == 0:
        told["enable_thinking"] = False
    if "enable_thinking" in told:  # templates of DeepSeek and Granite call it `thinking`
        told.setdefault("thinking", told["enable_thinking"])
    return Effort(told, budget)


def effort_variable(template: str) -> str | None:
    """Return the name of the template's variable for the reasoning effort; None if it has none."""
    return next((name for name in _EFFORT_VARIABLES if name in template), None)


def is_open(marks: Marks, prompt: str) -> bool:
    """Return whether an answer to this rendered prompt begins inside the reasoning."""
    return prompt.rstrip(_SPACE).endswith(marks[0])


class ReasoningParser:
    """A parser that separates the reasoning from one answer.

    is_open: whether the answer begins inside. ends: marks that begin the answer even in unclosed reasoning.
    """

    def __init__(self, marks: Marks, is_open: bool, ends: tuple[str, ...] = ()) -> None:
        self._open, self._close = marks
        self._closes = (self._close, *ends)
        self._buffer = ""
        self._state = "begun" if is_open else "before"
        self._blank = ""  # white space that is part of the reasoning only if more follows

    def push(self, text: str) -> list[Part]:
        """Take in the next piece of the answer, and return the parts that are certain."""
        self._buffer += text
        return self._run(final=False)

    def finish(self) -> list[Part]:
        """Return the remaining parts after the last piece."""
        return self._run(final=True)

    def _run(self, final: bool) -> list[Part]:
        parts: list[Part] = []
        if self._state == "before":
            begun = self._buffer.lstrip(_SPACE)
            if begun.startswith(self._open):
                self._buffer, self._state = begun[len(self._open) :], "begun"
            elif final or not self._open.startswith(begun):
                self._state = "answer"
        if self._state == "begun":  # white space after the opening mark
            self._buffer = self._buffer.lstrip(_SPACE)
            if self._buffer:
                self._state = "inside"
        if self._state == "inside":
            parts += self._inside(final)
        if self._state == "closed":  # white space after the closing mark
            self._buffer = self._buffer.lstrip(_SPACE)
            if self._buffer:
                self._state = "answer"
        if self._state == "answer":
            parts.append(Text(self._buffer))
            self._buffer = ""
        return merged(parts)

    def _inside(self, final: bool) -> list[Part]:
        at, mark = first_of(self._buffer, self._closes)
        n_held = held_back(self._buffer, (self._close,) if final else self._closes)
        if final and n_held == 1:  # one bracket may just as well be text
            n_held = 0
        end = at if at >= 0 else len(self._buffer) - n_held
        text = self._blank + self._buffer[:end]
        shown = text.rstrip(_SPACE)
        self._blank = text[len(shown) :]
        self._buffer = "" if final and at < 0 else self._buffer[end:]
        if mark:
            n = len(mark) if mark == self._close else 0
            self._buffer, self._state = self._buffer[n:], "closed"
        return [ReasoningChunk(shown)]
