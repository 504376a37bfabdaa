"""Calls of functions, reasoning and forms of answers, as OpenAI's clients request and read them.

The model's text is given: its logits are replaced by a text's, one byte after the other, so that every form
can be tested. With a constraint, the tiny model writes its own text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_schemas import SCHEMAS, Found
from api_schemas import both as both_of
from cases import quick_are
from tiny_server import MESSAGES, with_template
from tool_models import CALL, CLOCK, HERMES, THINKS, WEATHER, written

pytest.importorskip("llguidance")

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SCHEMA = next(schema for schema in SCHEMAS if schema.url == CHAT)
ROME, OSLO = ("get_weather", {"city": "Rome", "days": 2}), ("get_weather", {"city": "Oslo", "days": 2})
LLAMA = HERMES.replace("<tool_call>", "<|python_tag|>")
MISTRAL = HERMES.replace("<tool_call>", "[TOOL_CALLS]")
QWEN = HERMES.replace("<tool_call>", "<tool_call>\n<function=")
QWEN_CALL = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n2\n"
    "</parameter>\n</function>\n</tool_call>"
)
PARAMS = {"temperature": 0, "max_tokens": 120}


async def both(client: httpx.AsyncClient, **body: Any) -> Found:
    return await both_of(client, SCHEMA, {"messages": MESSAGES} | PARAMS | body)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (HERMES, f"I look.\n{CALL}\n" + CALL.replace("Rome", "Oslo")),
        (QWEN, f"I look.\n\n{QWEN_CALL}\n" + QWEN_CALL.replace("Rome", "Oslo")),
        (
            LLAMA,
            '{"name": "get_weather", "parameters": {"city": "Rome", "days": 2}}; '
            '{"name": "get_weather", "parameters": {"city": "Oslo", "days": 2}}',
        ),
        (
            MISTRAL,
            'I look.[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}, '
            '{"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}]',
        ),
    ],
)
async def test_calls_in_the_form_of_the_model(tmp_path: Path, template: str, text: str):
    async with with_template(tmp_path, template) as (client, service):
        written(service.model, text)
        found = await both(client, tools=[WEATHER, CLOCK], max_tokens=400)
        text = "" if template == LLAMA else "I look."
        assert (found.text, found.calls, found.reason) == (text, [ROME, OSLO], "calls")
        one = await both(client, tools=[WEATHER], parallel_tool_calls=False, max_tokens=400)
        assert (one.calls, one.reason) == ([ROME], "calls")


async def test_without_tools_or_with_none_a_call_is_text(tmp_path: Path):
    async with with_template(tmp_path, HERMES) as (client, service):
        written(service.model, CALL)
        for body in ({}, {"tools": [WEATHER], "tool_choice": "none"}, {"tools": []}):
            found = await both(client, **body)
            assert (found.text, found.calls, found.reason) == (CALL, [], "stop")
        prompt = await client.post(COMPLETIONS, json={"prompt": "a", "stop": "zz"} | PARAMS)
        assert prompt.json()["choices"][0]["text"] == CALL


@pytest.mark.parametrize("bad", ['{"city": ', "[1, 2", '{"city": "Rome",}', "nonsense", '{"a": "\\'])
async def test_arguments_that_are_not_json_are_passed_on(tmp_path: Path, bad: str):
    async with with_template(tmp_path, HERMES) as (client, service):
        written(service.model, f'<tool_call>\n{{"name": "get_weather", "arguments": {bad}')
        found = await both(client, tools=[WEATHER])
        assert found.reason in ("calls", "stop")
        assert found.calls or found.text


async def test_a_truncated_call(tmp_path: Path):
    async with with_template(tmp_path, HERMES) as (client, service):
        written(service.model, CALL)
        found = await both(client, tools=[WEATHER], max_tokens=60)
        assert found.reason == "length"
        assert found.calls[0][1].startswith('{"city')


@pytest.mark.parametrize("template", quick_are((HERMES,), [HERMES, LLAMA, MISTRAL, QWEN]))
async def test_a_required_function_is_called(tmp_path: Path, template: str):
    """Use a model with random parameters, whose text still fits the schema."""
    async with with_template(tmp_path, template) as (client, _):
        named = {"type": "function", "function": {"name": "get_weather"}}
        for choice, tools in ((named, [CLOCK, WEATHER]), ("required", [WEATHER])):
            for seed in (1, 2, 3):
                body = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
                found = await both(client, **body, temperature=1.5, seed=seed, max_tokens=300)
                assert found.reason == "calls"
                ((name, arguments),) = found.calls
                assert name == "get_weather"
                assert arguments.keys() == {"city", "days"}
                assert arguments["city"] in ("Rome", "Oslo")
                assert 1 <= arguments["days"] <= 7
        called = set()
        for seed in range(8):
            body = {"tools": [CLOCK, WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
            found = await both(client, **body, temperature=1.5, seed=seed, max_tokens=500)
            ((name, arguments),) = found.calls
            called.add(name)
            assert arguments.keys() == {"city", "days"} or name == "clock"
        assert called == {"clock", "get_weather"}


async def test_strict_tools_with_a_free_choice(tmp_path: Path):
    """A call follows the schema from its beginning; other text is free."""
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}  # type: ignore[operator]
    async with with_template(tmp_path, HERMES) as (client, service):
        script = 'Well.<tool_call>\n{"name": "get_weather", "arguments": {"town": "Paris"}}\n</tool_call>'
        written(service.model, script)
        found = await both(client, tools=[strict, CLOCK], max_tokens=300)
        assert found.text == "Well."
        assert found.calls[0][1].keys() == {"city", "days"}
    async with with_template(tmp_path, LLAMA) as (client, service):
        written(service.model, '{"name": "get_weather", "parameters": {"town": "Paris"}}')
        found = await both(client, tools=[strict], max_tokens=300)
        assert found.calls == [("get_weather", {"town": "Paris"})]


async def test_wrong_tools_are_refused(tmp_path: Path):
    async with with_template(tmp_path, HERMES) as (client, _):

        async def refused(**body: Any) -> str:
            reply = await client.post(CHAT, json={"messages": MESSAGES} | PARAMS | body)
            assert reply.status_code == 400, reply.text
            return str(reply.json()["error"]["message"])

        assert "two tools" in await refused(tools=[WEATHER, WEATHER])
        named = {"type": "function", "function": {"name": "other"}}
        assert "'other'" in await refused(tools=[WEATHER], tool_choice=named)
        assert "has no tools" in await refused(tool_choice="required")
        assert "name" in await refused(tools=[{"type": "function", "function": {"name": "a b"}}])
        broken = {"type": "function", "function": {"name": "f", "parameters": {"$ref": "#/none"}}}
        assert "the schema of the tool 'f' cannot be used" in await refused(
            tools=[broken], tool_choice="required"
        )


async def test_a_template_without_tools_gets_them_as_text(tmp_path: Path):
    async with with_template(tmp_path, "{% for m in messages %}{{ m.content }}{% endfor %}") as (
        client,
        service,
    ):
        body = {"tools": [WEATHER], "parallel_tool_calls": False}
        required = await both(client, **body, tool_choice="required", temperature=1.5, seed=1, max_tokens=400)
        assert required.calls[0][1].keys() == {"city", "days"}
        written(service.model, f"I look.\n{CALL}")
        found = await both(client, **body, max_tokens=400)
        assert (found.text, found.calls, found.reason) == ("I look.", [ROME], "calls")
        assert found.prompt_tokens > (await both(client)).prompt_tokens + len(WEATHER["function"]["name"])


async def test_a_template_that_closes_the_reasoning(tmp_path: Path):
    async with with_template(tmp_path, THINKS) as (client, service):
        written(service.model, "Hmm, hm.")
        found = await both(client, chat_template_kwargs={"closed": True})
        assert (found.reasoning, found.text) == ("", "Hmm, hm.")


async def test_reasoning_effort_reaches_the_template(tmp_path: Path):
    """A template that does not use the effort ignores it; the other one writes it."""
    for template in (HERMES, "{{ reasoning_effort }}"):
        async with with_template(tmp_path, template) as (client, _):
            for effort in ("none", "low", "max"):
                await both(client, reasoning_effort=effort, max_tokens=1)
    told = "{{ enable_thinking }}/{{ reasoning_effort }}"
    async with with_template(tmp_path, told) as (client, _):
        for effort, text in (("none", "False/"), ("high", "True/high"), ("xhigh", "True/high")):
            found = await both(client, reasoning_effort=effort, max_tokens=1)
            assert found.prompt_tokens == 1 + len(text)


async def test_reasoning_before_a_form_is_unconstrained(tmp_path: Path):
    async with with_template(tmp_path, THINKS) as (client, service):
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        written(service.model, 'Hmm {"b".\n</think>\n\n{"a": 3}')
        found = await both(client, response_format=form)
        assert (found.reasoning, found.text) == ('Hmm {"b".', '{"a": 3}')
        written(service.model, f"Hmm.\n</think>\n\n{CALL}")
        named = {"type": "function", "function": {"name": "get_weather"}}
        found = await both(client, tools=[CLOCK, WEATHER], tool_choice=named)
        assert (found.reasoning, found.calls) == ("Hmm.", [ROME])


async def test_forms_of_answers(tmp_path: Path):
    """The tiny model's text follows the form for every seed."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"enum": ["x", "yy"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}

    async with with_template(tmp_path, HERMES) as (client, _):
        for seed in range(6):
            draw = {"temperature": 1.5, "seed": seed}
            found = json.loads((await both(client, response_format=form, **draw)).text)
            assert set(found) == {"a", "b"}
            assert 0 <= found["a"] <= 9
            assert found["b"] in ("x", "yy")
            assert (await both(client, regex="(ab|c){3}", **draw)).text.count("c") <= 3
            assert (await both(client, grammar='root ::= "yes" | "no"', **draw)).text in ("yes", "no")
            body = {"prompt": "a", "json_schema": schema, "max_tokens": 100} | draw
            text = (await client.post(COMPLETIONS, json=body)).json()["choices"][0]["text"]
            assert json.loads(text)["b"] in ("x", "yy")
        found = await both(client, response_format={"type": "json_object"}, temperature=0, max_tokens=30)
        assert found.text.lstrip().startswith("{")
        assert (await both(client, response_format={"type": "text"}, max_tokens=3)).reason == "length"


ROMAN = {"type": "object", "properties": {"city": {"const": "Rome"}}, "required": ["city"],
         "additionalProperties": False}  # fmt: skip


@pytest.mark.parametrize("text", [CALL, '{"city": "Rome"}'])
async def test_tools_together_with_a_form_of_the_answer(tmp_path: Path, text: str):
    """The model calls a tool or answers in the form."""
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": ROMAN}}

    async with with_template(tmp_path, HERMES) as (client, service):
        must = {"tools": [WEATHER], "tool_choice": "required", "response_format": form}
        assert (await both(client, **must)).calls
        free = await both(client, tools=[WEATHER], response_format=form, tool_choice="none")
        assert '{"city":"Rome"}'.startswith("".join(free.text.split()))
        written(service.model, text)
        one = await both(client, tools=[WEATHER], response_format=form)
        expected = ("", [ROME], "calls") if text == CALL else (text, [], "stop")
        assert (one.text, one.calls, one.reason) == expected


async def test_wrong_forms_are_refused(tmp_path: Path):
    async with with_template(tmp_path, HERMES) as (client, _):
        for body in (
            {"response_format": {"type": "json_schema"}}, {"response_format": {"type": "xml"}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"$ref": "#/none"}},
                },
            },
            {"grammar": "root ::= ("}, {"regex": "("}, {"regex": "a", "grammar": 'root ::= "a"'},
            {"json_schema": {}, "response_format": {"type": "json_object"}},
        ):  # fmt: skip
            reply = await client.post(CHAT, json={"messages": MESSAGES} | PARAMS | body)
            assert reply.status_code == 400, (body, reply.text)
