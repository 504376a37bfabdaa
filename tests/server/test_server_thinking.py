"""Limits of reasoning, and conversations that are too long, in all API schemas."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from api_schemas import SCHEMAS, ApiSchema
from tiny_server import MESSAGES, with_template
from tool_models import HERMES, THINKS, written

from hotset.server.ignored import HEADER

pytest.importorskip("llguidance")

CHATS = [schema for schema in SCHEMAS if schema.is_chat]
TEXT = "a long thought that has no end, and goes on and on, and on and on, and on and on and on and on"
SWITCH = THINKS.replace("not closed", "enable_thinking is not false")
PARAMS = {"temperature": 0, "max_tokens": 60}


# How each schema's clients limit the reasoning to 8 tokens.
BUDGETS: dict[str, list[dict[str, Any]]] = {
    "chat": [{"reasoning_budget_tokens": 8}, {"thinking_budget_tokens": 8}, {"reasoning": {"max_tokens": 8}}],
    "responses": [{"reasoning": {"max_tokens": 8}}],
    "messages": [{"thinking": {"type": "enabled", "budget_tokens": 8}}],
    "ollama-chat": [{"options": {"reasoning_budget_tokens": 8}}],
}


@pytest.mark.parametrize("schema", CHATS, ids=repr)
async def test_the_answer_begins_when_the_budget_is_used_up(tmp_path: Path, schema: ApiSchema) -> None:
    async with with_template(tmp_path, THINKS) as (client, service):
        written(service.model, TEXT)
        for given in BUDGETS.get(schema.name, [{"reasoning_budget_tokens": 8}]):
            body = schema.body(**PARAMS)
            body |= given | ({"options": body["options"] | given["options"]} if "options" in given else {})
            found, _ = await schema.whole(client, body)
            streamed = await schema.streamed(client, body)
            assert (streamed.text, streamed.reasoning) == (found.text, found.reasoning)
            assert found.reasoning.strip() == TEXT[:8].strip()
            n = 8 + len("</think>")
            assert TEXT[n:].startswith(found.text[:20].lstrip())
            assert found.tokens == 60
            assert found.reasoning_tokens in (None, *range(8, n + 1))


async def test_the_servers_budget_and_its_message(tmp_path: Path) -> None:
    """A request may set another budget, and -1 removes the limit."""
    async with with_template(
        tmp_path, THINKS, reasoning_budget=6, reasoning_budget_message=" That is enough."
    ) as (client, service):
        written(service.model, TEXT)

        async def reasoning(**more: Any) -> str:
            body = {"messages": MESSAGES, **PARAMS, **more}
            reply = (await client.post("/v1/chat/completions", json=body)).json()
            return str(reply["choices"][0]["message"].get("reasoning_content") or "")

        assert await reasoning() == TEXT[:6] + " That is enough."
        assert await reasoning(reasoning_budget_tokens=9, reasoning_budget_message="!") == TEXT[:9] + "!"
        assert await reasoning(reasoning_budget_tokens=-1) == TEXT[:60].strip()
        assert await reasoning(reasoning_effort="max") == TEXT[:60].strip()
        assert await reasoning(reasoning_budget_tokens=0) == ""


async def test_each_answer_to_a_request_has_its_own_budget(tmp_path: Path) -> None:
    async with with_template(tmp_path, THINKS) as (client, _):
        body = {"messages": MESSAGES, "n": 3, "seed": 4, "max_tokens": 40, "reasoning_budget_tokens": 5}
        bias = {str(id): -100 for id in range(259) if not 97 <= id < 123}
        one = (await client.post("/v1/chat/completions", json=body | {"logit_bias": bias})).json()
        again = (await client.post("/v1/chat/completions", json=body | {"logit_bias": bias})).json()
        assert one["choices"] == again["choices"]
        messages = [choice["message"] for choice in one["choices"]]
        assert [len(message["reasoning_content"]) for message in messages] == [5, 5, 5]
        assert len({message["content"] for message in messages}) == 3


async def test_continued_reasoning_counts(tmp_path: Path) -> None:
    async with with_template(tmp_path, HERMES + "{# </think> #}") as (client, service):
        written(service.model, TEXT)
        begun = [*MESSAGES, {"role": "assistant", "content": "<think>12345"}]
        body = {"messages": begun, **PARAMS, "reasoning_budget_tokens": 8}
        message = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]
        assert message["reasoning_content"] == TEXT[:3]


async def test_a_schema_follows_when_the_budget_is_used_up(tmp_path: Path) -> None:
    async with with_template(tmp_path, THINKS) as (client, service):
        schema = {
            "type": "object",
            "properties": {"a": {"type": "boolean"}},
            "required": ["a"],
            "additionalProperties": False,
        }
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        written(service.model, TEXT)
        body = {"messages": MESSAGES, **PARAMS, "response_format": form, "reasoning_budget_tokens": 12}
        body |= {"max_tokens": 200, "logit_bias": {str(ord(one)): -100 for one in " \t\n"}}
        message = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]
        assert len(message["reasoning_content"]) == 12
        assert re.fullmatch(r'\{\s*"a"\s*:\s*(true|false)\s*\}', message["content"])


@pytest.mark.parametrize("off", [{"enable_thinking": False}, {"reasoning_budget_tokens": 0}])
async def test_without_reasoning_a_form_applies_from_the_first_token(
    tmp_path: Path, off: dict[str, Any]
) -> None:
    """This includes a form that begins like reasoning."""
    async with with_template(tmp_path, SWITCH) as (client, _):
        body = {"messages": MESSAGES, **PARAMS, "regex": "<think>ab</think>c[de]"}
        message = (await client.post("/v1/chat/completions", json=body | off)).json()["choices"][0]["message"]
        assert message["content"] in ("<think>ab</think>cd", "<think>ab</think>ce")
        assert not message.get("reasoning_content")


EFFORTS: dict[str, tuple[dict[str, Any], str]] = {
    "chat": ({"reasoning_effort": "high"}, "reasoning_effort"),
    "responses": ({"reasoning": {"effort": "low"}}, "reasoning"),
    "messages": ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
    "ollama-chat": ({"think": "max"}, "think"),
}


@pytest.mark.parametrize("schema", CHATS, ids=repr)
@pytest.mark.parametrize(
    ("template", "is_heeded"),
    [
        (HERMES, False), (THINKS, True),
        (HERMES + "{# reasoning_effort #}", True), (HERMES + "{# thinking_effort #}", True),
    ],
)  # fmt: skip
async def test_an_effort_without_effect_is_reported(
    tmp_path: Path, schema: ApiSchema, template: str, is_heeded: bool
) -> None:
    given, name = EFFORTS[schema.name]
    is_budget = "budget" in str(given)

    async with with_template(tmp_path, template) as (client, _):
        body = schema.body(temperature=0, max_tokens=4)
        reply = await client.post(schema.url, json=body | given)
        heeded = template == THINKS if is_budget else is_heeded
        assert reply.headers.get(HEADER) == (None if heeded else name), reply.text
        off = {"thinking": {"type": "disabled"}} if is_budget else {"reasoning_effort": "none"}
        assert HEADER not in (await client.post(schema.url, json=body | off)).headers


async def test_an_effort_for_a_prompt_without_a_template_is_reported(tmp_path: Path) -> None:
    async with with_template(tmp_path, THINKS) as (client, _):
        body = {"prompt": "a", "max_tokens": 2, "reasoning_effort": "low", "reasoning_budget_tokens": 9}
        reply = await client.post("/v1/completions", json=body)
        assert reply.headers[HEADER] == "reasoning_effort"


# ---- conversations that are too long ----


def long_talk(n: int) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = [{"role": "system", "content": "Be kind."}]
    for i in range(n):
        turns += [{"role": "user", "content": f"question {i} " + "x" * 40}]
        turns += [{"role": "assistant", "content": f"answer {i} " + "y" * 40}]
    return [*turns, {"role": "user", "content": "the last"}]


TRUNCATES = {"chat": {"truncation": "auto"}, "responses": {"truncation": "auto"}, "ollama-chat": {}}


@pytest.mark.parametrize("schema", [one for one in CHATS if one.name in TRUNCATES], ids=repr)
async def test_the_oldest_turns_are_dropped(tmp_path: Path, schema: ApiSchema) -> None:
    async with with_template(tmp_path, HERMES, n_ctx=512) as (client, _):
        body = schema.body(long_talk(20), max_tokens=4, temperature=0) | TRUNCATES[schema.name]
        reply = await client.post(schema.url, json=body)
        assert reply.status_code == 200, reply.text
        assert 1 <= int(reply.headers["x-hotset-dropped-turns"]) <= 20
        found = schema.read(reply.json())
        assert found.prompt_tokens <= 512 - 4
        streamed = await client.post(schema.url, json=body | {"stream": True})
        assert streamed.headers["x-hotset-dropped-turns"] == reply.headers["x-hotset-dropped-turns"]
        short = schema.body(long_talk(1), max_tokens=4, temperature=0) | TRUNCATES[schema.name]
        assert "x-hotset-dropped-turns" not in (await client.post(schema.url, json=short)).headers
        refused = body | ({"truncate": False} if schema.name == "ollama-chat" else {"truncation": "disabled"})
        reply = await client.post(schema.url, json=refused)
        assert reply.status_code == 400
        assert "maximum context length is 512 tokens" in schema.error(reply)
