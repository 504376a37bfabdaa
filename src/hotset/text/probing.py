"""Probing of a chat template: small conversations are rendered once per template.

A template accepts a conversation if the rendering has all texts of the conversation. Otherwise the first
rewriting that helps is chosen (text/folding.py). One message to the child process renders the conversations
of a round, within the time limit of one rendering, and there are at most six such messages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hotset.text.folding import Folding, Message, Tools, folded
from hotset.text.tool_calls import Form

RenderAll = Callable[[Sequence[Mapping[str, Any]]], list[str | None]]
"""Renders variables (messages, tools and others); a text is None if the template rejects them or fails."""
Changes = Mapping[str, Any]

_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "zq_weather",
            "description": "Return the weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"zq_city": {"type": "string", "description": "The city."}},
                "required": ["zq_city"],
            },
        },
    }
]


def _said(role: str, n: int = 1) -> Message:
    return {"role": role, "content": f"zq{role}{n}"}


def _called(*numbers: int, id: str = "zqcall00") -> Message:
    calls = [
        {
            "id": f"{id}{n}",
            "type": "function",
            "function": {"name": "zq_weather", "arguments": {"zq_city": f"zqplace{n}"}},
        }
        for n in numbers
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _result(n: int, id: str = "zqcall00") -> Message:
    return {**_said("tool", n), "tool_call_id": f"{id}{n}", "name": "zq_weather"}


@dataclass(frozen=True)
class _Question:
    """A conversation, and the rewritings to try, in this order, if a template does not accept it.

    shown: texts that the template must show, in addition to the contents of the messages.
    """

    messages: Sequence[Message]
    tools: Tools = None
    shown: Sequence[str] = ()
    changes: Sequence[Changes] = ()


_MERGED = {role: frozenset({role}) for role in ("system", "user", "assistant")}
_SYSTEM, _USER, _ANSWER = _said("system"), _said("user"), _said("assistant")
_NEXT, _DEVELOPER = _said("user", 2), _said("developer")
_RENAMED: Changes = {"developer": True}
_ALONE: Changes = {"calls": "alone"}
_AS_TEXT: Changes = {"calls": "text", "results": True}


def _late(which: str) -> list[Changes]:
    merged = {"late_system": which, "merged": _MERGED["user"]}
    return [{"late_system": which}, merged, {**merged, "no_system": True}]


# The questions of one round are independent.
_ROUNDS: Sequence[Sequence[_Question]] = (
    (
        _Question(
            [_USER],
            changes=[
                {"empty_tools": True},
                {"parts": True},
                {"empty_tools": True, "parts": True},
                {"named_functions": True},
                {"named_functions": True, "empty_tools": True},
            ],
        ),
    ),
    (
        _Question([_SYSTEM, _USER], changes=[{"no_system": True}]),
        _Question([_DEVELOPER, _USER], changes=[_RENAMED, {**_RENAMED, "no_system": True}]),
        _Question([_SYSTEM, _said("system", 2), _USER], changes=[{"merged": _MERGED["system"]}]),
        _Question([_SYSTEM, _USER, _ANSWER, _said("system", 2), _NEXT], changes=_late("several")),
        _Question([_USER, _ANSWER, _SYSTEM, _NEXT], changes=_late("one")),
        _Question([_USER, _NEXT], changes=[{"merged": _MERGED["user"]}]),
        _Question([_USER, _ANSWER, _said("assistant", 2), _NEXT], changes=[{"merged": _MERGED["assistant"]}]),
        _Question([_ANSWER, _USER], changes=[{"user_first": True}]),
        _Question(
            [_USER],
            _TOOLS,
            ("zq_weather", "zq_city"),
            [{"tools": "system"}, {"tools": "text"}, {"tools": "text", "no_system": True}],
        ),
        _Question(
            [_USER, _called(1), _result(1)],
            _TOOLS,
            ("zqplace1",),
            [_ALONE, {"calls": "text"}, {"results": True}, {**_ALONE, "results": True}, _AS_TEXT],
        ),
    ),
    (
        _Question(
            [_USER, _called(1, 2), _result(1), _result(2)],
            _TOOLS,
            ("zqplace1", "zqplace2"),
            [{"one_call": True}, {"calls": "text"}, _AS_TEXT],
        ),
        _Question(
            [_USER, _called(1), _result(1), _NEXT],
            _TOOLS,
            ("zqplace1",),
            [{"answered": True}, {"results": True}, _AS_TEXT],
        ),
        _Question(
            [_USER, _called(1, id="call_0123456789_"), _result(1, id="call_0123456789_")],
            _TOOLS,
            ("zqplace1",),
            [{"short_ids": True}],
        ),
    ),
)  # fmt: skip


def probed(render_all: RenderAll, form: Form) -> Folding:
    """Return the folding of a template. Raises the errors of `render_all`.

    form: how its model writes calls.
    """
    folding = Folding()
    for questions in _ROUNDS:
        taken = _taken(render_all, form, [(question, folding) for question in questions])
        tries = [
            (question, _changed(folding, changes))
            for question, is_taken in zip(questions, taken, strict=True)
            if not is_taken
            for changes in question.changes
        ]
        found = iter(_taken(render_all, form, tries)) if tries else iter(())
        helps: dict[int, Changes] = {}
        for question, is_taken in zip(questions, taken, strict=True):
            for changes in () if is_taken else question.changes:
                if next(found):
                    helps.setdefault(id(question), changes)
        for changes in helps.values():
            folding = _changed(folding, changes)
    return folding


def _changed(folding: Folding, changes: Changes) -> Folding:
    merged = folding.merged | changes.get("merged", frozenset())
    return replace(folding, **{**changes, "merged": merged})


def _taken(render_all: RenderAll, form: Form, tries: Sequence[tuple[_Question, Folding]]) -> list[bool]:
    """Return which conversations the template accepts with these foldings.

    Arguments of calls are tried as objects and as text.
    """
    asked: list[Mapping[str, Any]] = []
    owners: list[int] = []
    for i, (question, folding) in enumerate(tries):
        as_text = [_with_text_of_arguments(one) for one in question.messages]
        for messages in (question.messages, as_text) if as_text != question.messages else (as_text,):
            rewritten, tools, more = folded(folding, form, messages, question.tools)
            asked.append({"messages": rewritten, "tools": tools, **more})
            owners.append(i)
    found = [False] * len(tries)
    for i, text in zip(owners, render_all(asked), strict=True):
        question, _ = tries[i]
        shown = (*(one["content"] for one in question.messages), *question.shown)
        found[i] |= text is not None and all(part in text for part in shown)
    return found


def _with_text_of_arguments(message: Message) -> Message:
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}
