"""Conversations rewritten for templates that refuse them or leave texts out.

Each of the small templates has one property of published ones.
"""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from typing import Any

import pytest

from hotset.generation import checked_messages
from hotset.text import renderer
from hotset.text.chat import ChatTemplate
from hotset.text.folding import Folding
from hotset.text.messages import rendered
from hotset.text.parts import CallArguments, CallStart
from hotset.text.tool_calls import parser_of

IN_TURN = """\
{%- macro check(loop, role) %}{% if (role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('the roles must alternate') }}{% endif %}{% endmacro %}"""
SHOWN = "{{- '<' + message.role + '>' + message.content }}"
EACH = "{%- for message in messages %}"
CALLS = """\
{%- for call in message.tool_calls or [] %}
{{- '(' + call.function.name + (call.function.arguments | tojson) + ')' }}{% endfor %}"""
TOOLS_SHOWN = "{%- if tools %}{{ '<tools>' + (tools | tojson) }}{% endif %}"
ALL = TOOLS_SHOWN + EACH + SHOWN + CALLS + "{% endfor %}"

TEMPLATES = {
    "takes all": ALL,
    # Two alternating roles; a leading system message joins the first user message (Gemma 3).
    "gemma3": IN_TURN
    + """\
{%- set first = '' %}
{%- if messages[0].role == 'system' %}{% set first = messages[0].content + '\n' %}
{%- set messages = messages[1:] %}{% endif %}
{%- for message in messages %}{{ check(loop, message.role) }}
{{- '<start_of_turn>' + message.role + '\n' + (first if loop.first else '') + message.content | trim }}
{%- endfor %}""",
    # The same without a system role (Gemma 2).
    "gemma2": IN_TURN + EACH + "{{ check(loop, message.role) }}" + SHOWN + "{% endfor %}",
    # A system message only at the beginning, and no further roles (Qwen 3.5).
    "leading system": TOOLS_SHOWN
    + EACH
    + """\
{%- if message.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}{% endif %}
{%- if message.role == 'developer' %}{{ raise_exception('unexpected role') }}{% endif %}"""
    + SHOWN
    + CALLS
    + "{% endfor %}",
    # Later system messages are dropped silently (MiniMax).
    "drops systems": TOOLS_SHOWN
    + EACH
    + "{% if loop.first or message.role not in ('system', 'developer') %}"
    + SHOWN
    + CALLS
    + "{% endif %}{% endfor %}",
    # The last system message counts (DeepSeek R1).
    "last system": """\
{%- set ns = namespace(system='') %}{% for message in messages if message.role == 'system' %}
{%- set ns.system = message.content %}{% endfor %}{{- ns.system }}"""
    + TOOLS_SHOWN
    + "{%- for message in messages if message.role != 'system' %}"
    + SHOWN
    + CALLS
    + "{% endfor %}",
    # One call in a message (Llama 3.1), or the first of several (gpt-oss).
    "one call": ALL.replace(
        EACH,
        EACH + "{% if message.tool_calls and message.tool_calls | length > 1 %}"
        "{{ raise_exception('single tool-calls') }}{% endif %}",
    ),
    "first call": ALL.replace("message.tool_calls or []", "(message.tool_calls or [])[:1]"),
    # Roles in turn except for calls and results, ids of nine letters (Mistral).
    "mistral": TOOLS_SHOWN
    + """\
{%- set ns = namespace(i=0) %}{% for message in messages %}
{%- if message.role == 'system' and loop.index0 %}{{ raise_exception('late') }}{% endif %}
{%- if message.role in ('user', 'assistant') and not message.tool_calls %}
{%- if (message.role == 'user') != (ns.i % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}
{%- set ns.i = ns.i + 1 %}{% endif %}
{%- for call in message.tool_calls or [] %}{% if call.id | length != 9 %}
{{- raise_exception('length 9') }}{% endif %}{% endfor %}
{%- if message.role == 'tool' and message.tool_call_id | length != 9 %}
{{- raise_exception('length 9') }}{% endif %}"""
    + SHOWN
    + CALLS
    + "{% endfor %}",
    # `tools` is iterated over, even if it is null (Hermes).
    "iterates": "{%- for tool in tools %}{{ tool | tojson }}{% endfor %}"
    + EACH
    + SHOWN
    + CALLS
    + "{% endfor %}",
    # Tools under another name, as text (Firefunction).
    "functions": "{{- functions + datetime }}" + EACH + SHOWN + CALLS + "{% endfor %}",
    # Contents are lists of parts.
    "parts": TOOLS_SHOWN
    + EACH
    + "{{- '<' + message.role + '>' }}{% for part in message.content %}"
    + "{{- part.text if part.type == 'text' }}{% endfor %}"
    + CALLS
    + "{% endfor %}",
    # A list that grows (Kimi K2), and a filter's result as JSON.
    "appends": "{%- set seen = [] %}"
    + "{%- for message in messages %}{% set _ = seen.append(message) %}{% endfor %}"
    + "{%- if tools %}{{ tools | map(attribute='function') | tojson }}{% endif %}"
    + "{%- for message in seen %}"
    + SHOWN
    + CALLS
    + "{% endfor %}",
    # Calls only in place of a text (DeepSeek V3), neither tools nor results.
    "calls alone": EACH
    + "{%- if message.content is none %}"
    + CALLS
    + "{%- elif message.role != 'tool' %}"
    + SHOWN
    + "{% endif %}{% endfor %}",
}  # fmt: skip


def said(role: str, n: int = 1) -> dict[str, Any]:
    return {"role": role, "content": f"{role} says {n}"}


def called(*cities: str) -> dict[str, Any]:
    calls = [
        {
            "id": f"call_{city}",
            "type": "function",
            "function": {"name": "weather", "arguments": json.dumps({"city": city})},
        }
        for city in cities
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def result(city: str) -> dict[str, Any]:
    return {
        "role": "tool",
        "tool_call_id": f"call_{city}",
        "name": "weather",
        "content": f"{len(city)} degrees",
    }


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
SYSTEM, USER, ANSWER, NEXT = said("system"), said("user"), said("assistant"), said("user", 2)
ROUND = [USER, called("Rome"), result("Rome")]
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], Any]] = {
    "ordinary": ([USER, ANSWER, NEXT], None),
    "system": ([SYSTEM, USER], None),
    "late system": ([SYSTEM, USER, ANSWER, said("system", 2), NEXT], None),
    "one late system": ([USER, ANSWER, SYSTEM, NEXT], None),
    "two systems": ([SYSTEM, said("system", 2), USER], None),
    "developer": ([said("developer"), USER], None),
    "two users": ([USER, NEXT], None),
    "two answers": ([USER, ANSWER, said("assistant", 2), NEXT], None),
    "answer first": ([ANSWER, USER], None),
    "tools": ([SYSTEM, USER], TOOLS),
    "results": ([SYSTEM, *ROUND], TOOLS),
    "results without tools": (ROUND, None),
    "several results": ([SYSTEM, USER, called("Rome", "Berlin"), result("Rome"), result("Berlin")], TOOLS),
    "result and user": ([*ROUND, NEXT], TOOLS),
    "rounds": ([SYSTEM, *ROUND, called("Berlin"), result("Berlin"), ANSWER, NEXT], TOOLS),
}  # fmt: skip


def texts_of(messages: list[dict[str, Any]], tools: Any) -> list[str]:
    found = [message["content"] for message in messages if message["content"]]
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    return (
        found
        + [json.loads(call["function"]["arguments"])["city"] for call in calls]
        + ["weather"] * bool(tools)
    )


def shows(text: str | None, messages: list[dict[str, Any]], tools: Any) -> bool:
    return text is not None and all(part in text for part in texts_of(messages, tools))


def text_of(template: ChatTemplate, messages: list[dict[str, Any]], tools: Any = None) -> str:
    return rendered(template, checked_messages(messages), tools=tools)


def of_itself(template: ChatTemplate, messages: list[dict[str, Any]], tools: Any) -> str | None:
    plain = checked_messages(messages)
    for message in plain:
        for call in message.get("tool_calls", ()):
            call["function"] = {**call["function"], "arguments": json.loads(call["function"]["arguments"])}
    try:
        return template.render(plain, True, tools)
    except renderer.RefusedError:
        return None


each_template = pytest.mark.parametrize("name", TEMPLATES)


@each_template
def test_every_conversation_is_shown_and_an_accepted_one_is_not_changed(name: str) -> None:
    with ChatTemplate(TEMPLATES[name]) as template:
        for kind, (messages, tools) in CONVERSATIONS.items():
            text = text_of(template, messages, tools)
            assert shows(text, messages, tools), kind
            own = of_itself(template, messages, tools)
            if shows(own, messages, tools):
                assert text == own, kind


@each_template
def test_a_turn_is_a_prefix_of_the_next(name: str) -> None:
    with ChatTemplate(TEMPLATES[name]) as template:
        for kind, (messages, tools) in CONVERSATIONS.items():
            # One of these templates always writes the system message first.
            more = [] if name == "last system" else [said("system", 4)]
            answered = [*messages, said("assistant", 3), *more, said("user", 5)]
            text, longer = text_of(template, messages, tools), text_of(template, answered, tools)
            assert longer.startswith(text), kind


@pytest.mark.parametrize(
    ("name", "folding"),
    [
        ("takes all", Folding()),
        ("appends", Folding()),
        ("iterates", Folding(empty_tools=True)),
        ("parts", Folding(parts=True)),
        ("one call", Folding(one_call=True)),
        ("first call", Folding(one_call=True)),
    ],
)
def test_probe_finds_missing_features_of_a_template(
    name: str, folding: Folding, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "hotset.text"), ChatTemplate(TEMPLATES[name]) as template:
        assert template.folding == folding
    assert (f"rewritten for the chat template: {folding}." in caplog.text) == (folding != Folding())


def test_an_agent_can_use_gemma() -> None:
    """Check that the system text describes tools, results become user text, and calls come from JSON."""
    messages = [SYSTEM, *ROUND, NEXT]
    with ChatTemplate(TEMPLATES["gemma3"]) as template:
        text, form = text_of(template, messages, TOOLS), template.form
    turns = re.split("<start_of_turn>(user|assistant)\n", text)[1:]
    assert turns[::2] == ["user", "assistant", "user"]
    first, call, last = turns[1::2]
    assert first.startswith("system says 1")
    assert json.dumps(TOOLS[0]) in first
    assert first.endswith("user says 1")
    assert last == "<tool_response>\n4 degrees\n</tool_response>\nuser says 2"
    answers = [call, '```json\n{"name": "weather", "arguments": {"city": "Rome"}}\n```', call.split("\n")[1]]
    for answer in answers:
        parser = parser_of(form, {"weather"})
        parts = [*parser.push(answer), *parser.finish()]
        assert [part.name for part in parts if isinstance(part, CallStart)] == ["weather"]
        arguments = "".join(part.text for part in parts if isinstance(part, CallArguments))
        assert json.loads(arguments) == {"city": "Rome"}


def test_results_follow_their_calls_where_a_message_has_one() -> None:
    messages = [USER, called("Rome", "Berlin"), result("Berlin"), result("Rome")]
    with ChatTemplate(TEMPLATES["one call"]) as template:
        text = text_of(template, messages)
    first, second = text.split("<assistant>")[1:]
    assert first == '(weather{"city": "Rome"})<tool>4 degrees'
    assert second == '(weather{"city": "Berlin"})<tool>6 degrees'


def test_a_system_message_behind_the_first_question_moves_to_the_front() -> None:
    for name in ("gemma3", "gemma2", "leading system", "mistral"):
        with ChatTemplate(TEMPLATES[name]) as template:
            text = text_of(template, [USER, SYSTEM, NEXT])
            assert text.index("system says 1") < text.index("user says 1") < text.index("user says 2")


def test_calls_and_results_without_ids_get_some() -> None:
    messages = [USER, called("Rome"), result("Rome")]
    del messages[1]["tool_calls"][0]["id"], messages[2]["tool_call_id"]
    source = (
        TEMPLATES["mistral"]
        + EACH
        + "{{ message.tool_call_id or message.tool_calls and message.tool_calls[0].id }}|{% endfor %}"
    )
    with ChatTemplate(source) as template:
        ids = text_of(template, messages).rpartition("degrees")[2].split("|")
    assert ids[1] == ids[2]
    assert re.fullmatch("[a-zA-Z0-9]{9}", ids[1])


def test_a_template_that_takes_too_long_is_not_probed_and_still_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(renderer, "LIMITS", replace(renderer.LIMITS, seconds=0.2))
    loop = "{% for a in range(99999) %}"
    slow = "{% if tools %}" + loop + loop + "{% endfor %}{% endfor %}{% endif %}"
    with ChatTemplate(slow + EACH + SHOWN + "{% endfor %}") as template:
        assert text_of(template, [SYSTEM, USER]) == "<system>system says 1<user>user says 1"
    assert "was not probed" in caplog.text


def test_an_ordinary_conversation_does_not_wait_for_the_probe(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hotset.text"), ChatTemplate(TEMPLATES["gemma2"]) as template:
        text_of(template, [USER, ANSWER, NEXT])
        assert not caplog.records
        text_of(template, [SYSTEM, USER])
        assert len(caplog.records) == 1
