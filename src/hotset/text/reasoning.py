"""What a model thinks before it answers, taken apart from the answer while it comes.

Which marks a model thinks between is said by its chat template:

| the template's text has | marks |
|---|---|
| `<|channel|>` and `<|message|>` | none: harmony's channel `analysis` (tool_calls.py reads it) |
| `[THINK]` and `[/THINK]`, `<seed:think>`, `<|START_THINKING|>` | these |
| `<|channel>` and `<channel|>` (Gemma 4) | `<|channel>thought`, `<channel|>` |
| `</think>` | `<think>`, `</think>` |

Only what the answer begins with is reasoning. Where the rendered prompt ends with the opening mark (some
templates put it there), the answer begins inside; where it ends with the closing one (thinking is turned
off), or with neither, the answer says for itself. White space next to the marks belongs to them. Reasoning
that is never closed is reasoning to the end; where the end truncates the closing mark, its beginning is left
out.
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
    """The marks between which a model with this chat template thinks; None where it does not."""
    if "<|channel|>" in template and "<|message|>" in template:
        return None
    for found_by, marks in _MARKS:
        if all(part in template for part in found_by):
            return marks
    return None


EFFORT_BUDGETS: Mapping[str, int] = {
    "none": 0, "minimal": 512, "low": 512, "medium": 2048, "high": 8192, "xhigh": -1, "max": -1,
}  # fmt: skip
"""Budgets in tokens of the reasoning efforts, for templates that do not know these; -1 sets no limit."""

_EFFORT_VARIABLES = ("reasoning_effort", "thinking_effort")

_NEAREST_EFFORT = {"minimal": "low", "xhigh": "high", "max": "high"}


class Effort(NamedTuple):
    """variables: of the chat template. budget: in tokens, 0 turns thinking off; None and -1 set no limit."""

    variables: dict[str, Any]
    budget: int | None


def effort_of(template: str, variables: Mapping[str, Any], budget: int | None) -> Effort:
    """Return how a model with this template is told how much to think, and the budget that enforces it.

    variables: those of the request; `enable_thinking` and `reasoning_effort` count. A template that knows no
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
    if "enable_thinking" in told:  # the name that templates of DeepSeek and Granite have for it
        told.setdefault("thinking", told["enable_thinking"])
    return Effort(told, budget)


def effort_variable(template: str) -> str | None:
    """Return the variable by which a template is told how much to think; None if it has none."""
    return next((name for name in _EFFORT_VARIABLES if name in template), None)


def is_open(marks: Marks, prompt: str) -> bool:
    """Whether an answer to this rendered prompt begins inside."""
    return prompt.rstrip(_SPACE).endswith(marks[0])


class ReasoningParser:
    """Takes the reasoning out of one answer.

    is_open: whether the answer begins inside. ends: what begins the answer even if reasoning was not closed.
    """

    def __init__(self, marks: Marks, is_open: bool, ends: tuple[str, ...] = ()) -> None:
        self._open, self._close = marks
        self._closes = (self._close, *ends)
        self._buffer = ""
        self._state = "begun" if is_open else "before"
        self._blank = ""  # of the reasoning, which is it only if more follows

    def push(self, text: str) -> list[Part]:
        """Takes the next piece of the answer, and gives what is certain."""
        self._buffer += text
        return self._run(final=False)

    def finish(self) -> list[Part]:
        """The rest, once nothing more comes."""
        return self._run(final=True)

    def _run(self, final: bool) -> list[Part]:
        parts: list[Part] = []
        if self._state == "before":
            begun = self._buffer.lstrip(_SPACE)
            if begun.startswith(self._open):
                self._buffer, self._state = begun[len(self._open) :], "begun"
            elif final or not self._open.startswith(begun):
                self._state = "answer"
        if self._state == "begun":  # white space behind the mark
            self._buffer = self._buffer.lstrip(_SPACE)
            if self._buffer:
                self._state = "inside"
        if self._state == "inside":
            parts += self._inside(final)
        if self._state == "closed":  # white space behind the other
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
        if final and n_held == 1:  # a bracket may as well be one
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
