"""Rewriting of conversations, so that a chat template accepts them and shows all of their texts.

Templates may reject or leave out system messages, neighbouring messages of one role, tools, several calls at
once, or results. `text/probing.py` probes a template, and a `Folding` lists the rewritings that it needs.
docs/guides/serve.md has the table.

Every rewriting is local: it looks at a message and its neighbours, or at the messages before the first
answer. So the text of a conversation remains a prefix of the longer conversation, and prefix caching works.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, Literal

from hotset.text.tool_calls import Form

Message = dict[str, Any]
Tools = Sequence[Mapping[str, Any]] | None

_TOOLS = """\
You may call functions. Their JSON schemas are in <tools></tools>:
<tools>
{}
</tools>
To call one, write its name and its arguments like this, and nothing behind it:
{}
Then you get the result."""
_EXAMPLE = [("the_name", {"an_argument": "its value"})]
_SYSTEM_ROLES = ("system", "developer")
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")


@dataclass(frozen=True, kw_only=True)
class Folding:
    """The rewritings that one template needs. The default has none.

    empty_tools: without tools, `tools` is an empty list (the template iterates over it).
    named_functions: tools are also a text `functions`, and today's date is `datetime` (Firefunction).
    parts: contents are lists of parts.
    developer: the role `developer` becomes `system`.
    late_system: system messages before the first answer move to the front, and later ones get the role of the
    user. "several" does so only if there is more than one (DeepSeek R1 shows the last).
    no_system: system messages at the front become the beginning of the first user message.
    merged: roles whose neighbouring messages become one message.
    user_first: an answer at the beginning gets an empty user message before it.
    tools: "system" puts them into the system message under the key `tools` (Phi-4-mini), "text" describes
    them in the system text.
    calls: "alone" leaves out the text that comes with calls (DeepSeek V3), "text" writes calls as text.
    one_call: several calls of a message become messages of one call, each followed by its result.
    results: results become text of the user.
    short_ids: ids of calls become nine letters and digits (Mistral).
    answered: a short answer separates results from a user message that follows.
    """

    empty_tools: bool = False
    named_functions: bool = False
    parts: bool = False
    developer: bool = False
    late_system: Literal["template", "several", "one"] = "template"
    no_system: bool = False
    merged: frozenset[str] = frozenset()
    user_first: bool = False
    tools: Literal["template", "system", "text"] = "template"
    calls: Literal["template", "alone", "text"] = "template"
    one_call: bool = False
    results: bool = False
    short_ids: bool = False
    answered: bool = False

    def variables(self, tools: Tools) -> dict[str, Any]:
        """Return the variables that the template needs in addition to tools."""
        if not self.named_functions:
            return {}
        functions = json.dumps(tools or [], ensure_ascii=False, indent=4)
        return {"functions": functions, "datetime": datetime.now().strftime("%Y-%m-%d")}

    def __str__(self) -> str:
        """Return the rewritings for a log line; "" without any."""
        found = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                detail = (
                    value
                    if isinstance(value, str)
                    else " and ".join(sorted(value))
                    if value is not True
                    else ""
                )
                found.append(f"{field.name} ({detail})" if detail else field.name)
        return ", ".join(found)


AS_TEXT: Mapping[str, Any] = {
    "developer": True,
    "late_system": "one",
    "no_system": True,
    "merged": frozenset({"user", "assistant"}),
    "user_first": True,
    "tools": "text",
    "calls": "text",
    "results": True,
}
"""Fields of a Folding that nearly every template accepts: two alternating roles, and only text."""


def folded(
    folding: Folding, form: Form, messages: Sequence[Message], tools: Tools
) -> tuple[list[Message], Tools, dict[str, Any]]:
    """Return the messages, tools and further variables to render a conversation with.

    messages: results of `checked_calls`, whose arguments may also be objects. form: how the model writes
    calls.
    """
    found, variables = list(messages), folding.variables(tools)
    if folding.tools != "template" and tools:
        found = _with_tools(found, tools) if folding.tools == "system" else _described(form, found, tools)
    if folding.tools == "text" or not tools:
        tools = [] if folding.empty_tools else None
    if folding.short_ids:
        found = _with_short_ids(found)
    if folding.calls == "text":
        found = [_with_text_of_calls(form, message) for message in found]
    elif folding.one_call:
        found = _one_by_one(found)
    if folding.results:
        found = _with_results(found)
    found = _in_turn(folding, _with_systems(folding, found))
    if folding.calls == "alone":
        found = [{**one, "content": None} if "tool_calls" in one else one for one in found]
    if folding.parts:
        found = [_with_parts(message) for message in found]
    return found, tools, variables


# ---- tools, calls and results ----


def _described(form: Form, messages: list[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = _TOOLS.format(schemas, form.written(_EXAMPLE))
    if messages and messages[0]["role"] in _SYSTEM_ROLES:
        return [{**messages[0], "content": _joined(messages[0]["content"], text)}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _with_tools(messages: list[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    text = json.dumps([tool.get("function", tool) for tool in tools], ensure_ascii=False)
    if messages and messages[0]["role"] in _SYSTEM_ROLES:
        return [{**messages[0], "tools": text}, *messages[1:]]
    system = {"role": "system", "content": "You are a helpful assistant with some tools.", "tools": text}
    return [system, *messages]


def _with_text_of_calls(form: Form, message: Message) -> Message:
    if "tool_calls" not in message:
        return message
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
    return {**rest, "content": "\n".join(filter(None, (message["content"], form.written(calls))))}


def _one_by_one(messages: list[Message]) -> list[Message]:
    """Return messages in which a message with several calls becomes one per call, each before its results."""
    found: list[Message] = []
    i = 0
    while i < len(messages):
        message = messages[i]
        i += 1
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            found.append(message)
            continue
        end = next((n for n in range(i, len(messages)) if messages[n]["role"] != "tool"), len(messages))
        results = messages[i:end]
        i = end
        for n, call in enumerate(calls):
            found.append({**message, "content": "" if n else message["content"], "tool_calls": [call]})
            id = call.get("id")
            found += [one for one in results if id is not None and one.get("tool_call_id") == id]
            results = [one for one in results if id is None or one.get("tool_call_id") != id]
        found += results
    return found


def _with_results(messages: list[Message]) -> list[Message]:
    """Turn results of functions into user messages, and join neighbours and a user text after them."""
    found: list[Message] = []
    is_result = False
    for message in messages:
        was_result, is_result = is_result, message["role"] == "tool"
        if is_result:
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            message = {"role": "user", "content": text}
        if was_result and message["role"] == "user":
            message = {**message, "content": f"{found.pop()['content']}\n{message['content']}"}
        found.append(message)
    return found


def _with_short_ids(messages: list[Message]) -> list[Message]:
    """Shorten ids to nine letters and digits. A result without an id belongs to the first unanswered call."""
    found: list[Message] = []
    waiting: list[str] = []
    n_calls = 0
    for message in messages:
        if "tool_calls" in message:
            calls = []
            for call in message["tool_calls"]:
                n_calls += 1
                calls.append({**call, "id": _short(call.get("id") or str(n_calls))})
            waiting += [call["id"] for call in calls]
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool":
            given = message.get("tool_call_id")
            id = _short(given) if given or not waiting else waiting[0]
            waiting = [one for one in waiting if one != id]
            message = {**message, "tool_call_id": id}
        found.append(message)
    return found


def _short(id: Any) -> str:
    text = str(id)
    return text if _SHORT_ID.fullmatch(text) else hashlib.sha256(text.encode()).hexdigest()[:9]


# ---- roles ----


def _with_systems(folding: Folding, messages: list[Message]) -> list[Message]:
    if folding.developer:
        messages = [{**one, "role": "system"} if one["role"] == "developer" else one for one in messages]
    n_systems = sum(message["role"] in _SYSTEM_ROLES for message in messages)
    is_late = folding.late_system == "one" or (folding.late_system == "several" and n_systems > 1)
    if not (is_late or folding.no_system):
        return messages
    answer = next((i for i, one in enumerate(messages) if one["role"] == "assistant"), len(messages))
    front = [one for one in messages[:answer] if one["role"] in _SYSTEM_ROLES]
    rest = [one for one in messages[:answer] if one["role"] not in _SYSTEM_ROLES]
    rest += [_as_user(one) for one in messages[answer:]]
    if not (folding.no_system and front):
        return [*front, *rest]
    text = _joined(*(one["content"] for one in front))
    if rest and rest[0]["role"] == "user":
        return [{**rest[0], "content": _joined(text, rest[0]["content"])}, *rest[1:]]
    return [{"role": "user", "content": text}, *rest]


def _as_user(message: Message) -> Message:
    return {**message, "role": "user"} if message["role"] in _SYSTEM_ROLES else message


def _in_turn(folding: Folding, messages: list[Message]) -> list[Message]:
    """Return the messages in the order of roles that the template needs."""
    found: list[Message] = []
    for message in messages:
        last = found[-1] if found else None
        role, before = message["role"], last["role"] if last else "system"
        if folding.user_first and role == "assistant" and before in _SYSTEM_ROLES:
            found.append({"role": "user", "content": ""})
        elif folding.answered and role == "user" and before == "tool":
            found.append({"role": "assistant", "content": "OK."})
        elif (
            last and role == before and role in folding.merged and not _are_two_calls(folding, last, message)
        ):
            message = _as_one(found.pop(), message)
        found.append(message)
    return found


def _are_two_calls(folding: Folding, first: Message, second: Message) -> bool:
    return folding.one_call and "tool_calls" in first and "tool_calls" in second


def _as_one(first: Message, second: Message) -> Message:
    both = {**first, **second, "content": _joined(first["content"], second["content"])}
    calls = [*first.get("tool_calls", ()), *second.get("tool_calls", ())]
    return {**both, "tool_calls": calls} if calls else both


def _joined(*texts: str) -> str:
    return "\n\n".join(filter(None, texts))


def _with_parts(message: Message) -> Message:
    content = message["content"]
    return (
        {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message
    )
