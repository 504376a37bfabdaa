"""Tools and calls as text of messages, for chat templates that do not show them to the model.

| the template's text | what it leaves out | what the model gets instead |
|---|---|---|
| has no `tools` | tools | text before the first question, with an example of a call |
| has no `tools` and no `tool_calls` | results, too | a message of the user |
| has `message['tools']` (Phi-4-mini) | tools | tools where it looks for them: in the system message |
| has no `tool_calls` (LFM2, Granite 3) | calls | calls as text, in the form of the model |
| has `message['content'] is none` (DeepSeek V3, R1) | calls beside a text | the calls, without that text |
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hotset.text.tool_calls import Form, form_of

Message = dict[str, Any]

_ASKS_FOR_NULL = re.compile(r"""message\[["']content["']\] is none *-?%}""")
_TOOLS = """\
You may call functions. Their JSON schemas are in <tools></tools>:
<tools>
{}
</tools>
To call one, write its name and its arguments like this, and nothing behind it:
{}
Then you get the result."""
_EXAMPLE = [("the_name", {"an_argument": "its value"})]


def adapted(
    template: str, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None
) -> tuple[list[Message], Sequence[Mapping[str, Any]] | None]:
    """Messages and tools such that this chat template shows all of them.

    messages: as `checked_calls` makes them, but that arguments may be objects.
    """
    found, form = list(messages), form_of(template)
    if "tool_calls" not in template:
        found = [_with_text_of_calls(form, message) for message in found]
    elif _ASKS_FOR_NULL.search(template):
        found = [{**one, "content": None} if "tool_calls" in one else one for one in found]
    if "tools" not in template:
        found = found if "tool_calls" in template else _with_results(found)
        return _with_tools(form, found, tools), None
    if "message['tools']" in template and tools:
        found = _with_tools_of_system(found, tools)
    return found, tools


def _with_text_of_calls(form: Form, message: Message) -> Message:
    if "tool_calls" not in message:
        return message
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
    return {**rest, "content": "\n".join(filter(None, (message["content"], form.written(calls))))}


def _with_results(messages: list[Message]) -> list[Message]:
    """Results of functions as messages of the user: one, where several or a text of the user follow."""
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


def _with_tools(
    form: Form, messages: list[Message], tools: Sequence[Mapping[str, Any]] | None
) -> list[Message]:
    if not tools:
        return messages
    schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = _TOOLS.format(schemas, form.written(_EXAMPLE))
    first = next((i for i, message in enumerate(messages) if message["role"] == "user"), 0)
    message = messages[first]
    message = {**message, "content": f"{text}\n\n{message['content']}"}
    return [*messages[:first], message, *messages[first + 1 :]]


def _with_tools_of_system(messages: list[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    text = json.dumps([tool.get("function", tool) for tool in tools], ensure_ascii=False)
    if messages[0]["role"] == "system":
        return [{**messages[0], "tools": text}, *messages[1:]]
    return [
        {"role": "system", "content": "You are a helpful assistant with some tools.", "tools": text},
        *messages,
    ]
