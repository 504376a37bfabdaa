"""Reasoning and calls of functions in the dialects that are not chat completions, whole and as streams."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from test_server_tools import CALL, HERMES, THINKS, WEATHER, run, written
from test_tool_calls import PUBLISHED, TEMPLATES, TOOLS
from tiny_server import MESSAGES, events_of

from hotset.server import shapes
from hotset.server.service import Service

FUNCTION = WEATHER["function"]
ARGUMENTS = {"city": "Rome", "days": 2}
WRITTEN = f"look it up\n</think>\n\nLet me see.\n{CALL}"

ANTHROPIC = {
    "model": "tiny",
    "max_tokens": 200,
    "temperature": 0,
    "messages": MESSAGES,
    "tools": [
        {
            "name": FUNCTION["name"],
            "description": FUNCTION["description"],
            "input_schema": FUNCTION["parameters"],
        }
    ],
}
RESPONSES = {
    "max_output_tokens": 200,
    "temperature": 0,
    "input": "hello",
    "tools": [{"type": "function", "strict": None, **FUNCTION}],
}
OLLAMA = {
    "model": "tiny",
    "messages": MESSAGES,
    "tools": [WEATHER],
    "options": {"temperature": 0, "num_predict": 200},
}


async def asked(client: httpx.AsyncClient, where: str, body: dict[str, Any], shape: Any) -> dict[str, Any]:
    reply = await client.post(where, json=body)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    shape.model_validate(found)
    return found


def test_anthropic(tmp_path: Path):
    async def work(client: httpx.AsyncClient, service: Service) -> None:
        written(service, WRITTEN)
        message = await asked(client, "/v1/messages", ANTHROPIC, shapes.MessageReply)
        thinking, text, call = message["content"]
        assert thinking["thinking"].strip() == "look it up"
        assert text["text"].strip() == "Let me see."
        assert (call["name"], call["input"]) == ("get_weather", ARGUMENTS)
        assert message["stop_reason"] == "tool_use"
        assert message["usage"]["output_tokens_details"]["thinking_tokens"] > 0
        events, _ = events_of((await client.post("/v1/messages", json=ANTHROPIC | {"stream": True})).text)
        starts = [
            event["content_block"]["type"] for event in events if event["type"] == "content_block_start"
        ]
        assert starts == ["thinking", "text", "tool_use"]
        pieces = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        assert json.loads("".join(piece.get("partial_json", "") for piece in pieces)) == ARGUMENTS
        assert "".join(piece.get("text", "") for piece in pieces) == text["text"]
        # What the model called, and what came of it, are the next request's.
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "rain"}
        more = [
            {"role": "assistant", "content": message["content"]},
            {"role": "user", "content": [result]},
        ]
        body = ANTHROPIC | {"messages": [*MESSAGES, *more]}
        counted = await client.post(
            "/v1/messages/count_tokens", json={key: body[key] for key in ("model", "messages", "tools")}
        )
        assert counted.status_code == 200, counted.text
        again = await asked(client, "/v1/messages", body, shapes.MessageReply)
        usage = again["usage"]
        assert counted.json()["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]

    run(tmp_path, THINKS, work)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_anthropic_asks_for_a_call(tmp_path: Path, choice: dict[str, Any]):
    """The tiny model writes for itself, and what it writes is a call."""

    async def work(client: httpx.AsyncClient, service: Service) -> None:
        only = choice | {"disable_parallel_tool_use": True}
        body = ANTHROPIC | {"tool_choice": only, "max_tokens": 900}  # it is free to write much white space
        message = await asked(client, "/v1/messages", body, shapes.MessageReply)
        (call,) = [block for block in message["content"] if block["type"] == "tool_use"]
        assert call["name"] == "get_weather"
        assert call["input"]["city"] in ("Rome", "Oslo")
        assert 1 <= call["input"]["days"] <= 7
        assert message["stop_reason"] == "tool_use"

    run(tmp_path, HERMES, work)


def test_responses(tmp_path: Path):
    async def work(client: httpx.AsyncClient, service: Service) -> None:
        written(service, WRITTEN)
        response = await asked(client, "/v1/responses", RESPONSES, shapes.ResponseReply)
        reasoning, message, call = response["output"]
        assert reasoning["content"][0]["text"].strip() == "look it up"
        assert message["content"][0]["text"].strip() == "Let me see."
        assert (call["name"], json.loads(call["arguments"])) == ("get_weather", ARGUMENTS)
        assert response["status"] == "completed"
        assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
        events, _ = events_of((await client.post("/v1/responses", json=RESPONSES | {"stream": True})).text)
        assert [item["type"] for item in events[-1]["response"]["output"]] == [
            "reasoning",
            "message",
            "function_call",
        ]
        deltas = [
            event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"
        ]
        assert "".join(deltas) == call["arguments"]
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}
        conversation = [{"role": "user", "content": "hello"}, *response["output"], output]
        body = RESPONSES | {"input": conversation, "tool_choice": {"type": "function", "name": "get_weather"}}
        again = await asked(client, "/v1/responses", body, shapes.ResponseReply)
        assert again["output"][-1]["name"] == "get_weather"

    run(tmp_path, THINKS, work)


Found = tuple[str, list[tuple[str, Any]]]  # text; names and arguments of calls


async def openai_finds(client: httpx.AsyncClient, tools: list[Any]) -> tuple[Found, Found]:
    """Of a whole answer, and of a stream."""
    body = {"model": "tiny", "messages": MESSAGES, "tools": tools, "temperature": 0, "max_tokens": 900}
    message = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]
    calls = [call["function"] for call in message.get("tool_calls", ())]
    events, _ = events_of((await client.post("/v1/chat/completions", json=body | {"stream": True})).text)
    text, pieces = "", {}
    for delta in (event["choices"][0]["delta"] for event in events):
        text += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            name, arguments = pieces.get(call["index"], ("", ""))
            function = call["function"]
            pieces[call["index"]] = function.get("name", name), arguments + function["arguments"]
    whole = [(call["name"], json.loads(call["arguments"])) for call in calls]
    streamed = [(name, json.loads(arguments)) for name, arguments in pieces.values()]
    return (message["content"] or "", whole), (text, streamed)


async def anthropic_finds(client: httpx.AsyncClient, tools: list[Any]) -> tuple[Found, Found]:
    given = [
        {"name": one["function"]["name"], "input_schema": one["function"]["parameters"]} for one in tools
    ]
    body = ANTHROPIC | {"tools": given, "max_tokens": 900}
    blocks = (await client.post("/v1/messages", json=body)).json()["content"]
    whole = [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    events, _ = events_of((await client.post("/v1/messages", json=body | {"stream": True})).text)
    names = {e["index"]: e["content_block"].get("name") for e in events if e["type"] == "content_block_start"}
    pieces, streamed = dict.fromkeys(names, ""), ""
    for event in (event for event in events if event["type"] == "content_block_delta"):
        pieces[event["index"]] += event["delta"].get("partial_json", "")
        streamed += event["delta"].get("text", "")
    calls = [(name, json.loads(pieces[i] or "{}")) for i, name in names.items() if name]
    return (text, whole), (streamed, calls)


async def responses_finds(client: httpx.AsyncClient, tools: list[Any]) -> tuple[Found, Found]:
    given = [{"type": "function", "strict": None, **one["function"]} for one in tools]
    body = RESPONSES | {"model": "tiny", "tools": given, "max_output_tokens": 900}
    items = (await client.post("/v1/responses", json=body)).json()["output"]
    whole = [(one["name"], json.loads(one["arguments"])) for one in items if one["type"] == "function_call"]
    text = "".join(one["content"][0]["text"] for one in items if one["type"] == "message")
    events, _ = events_of((await client.post("/v1/responses", json=body | {"stream": True})).text)
    streamed = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    done = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    deltas: dict[str, str] = {}
    for event in (one for one in events if one["type"] == "response.function_call_arguments.delta"):
        deltas[event["item_id"]] = deltas.get(event["item_id"], "") + event["delta"]
    assert [one["arguments"] for one in done] == [deltas[one["item_id"]] for one in done]
    return (text, whole), (streamed, [(one["name"], json.loads(one["arguments"])) for one in done])


async def ollama_finds(client: httpx.AsyncClient, tools: list[Any]) -> tuple[Found, Found]:
    body = OLLAMA | {"tools": tools, "options": {"temperature": 0, "num_predict": 900}}

    def found(messages: list[Any]) -> Found:
        calls = [call["function"] for message in messages for call in message.get("tool_calls", ())]
        text = "".join(message["content"] for message in messages)
        return text, [(call["name"], call["arguments"]) for call in calls]

    whole = (await client.post("/api/chat", json=body | {"stream": False})).json()
    lines = (await client.post("/api/chat", json=body)).text.splitlines()
    return found([whole["message"]]), found([json.loads(line)["message"] for line in lines])


@pytest.mark.parametrize("name", list(dict(TEMPLATES)))
def test_a_form_is_the_same_whole_and_streamed_in_every_schema(tmp_path: Path, name: str):
    """The tiny model's tokens are bytes, so that every letter and every mark is cut."""
    marks = next(template for form, template in TEMPLATES if form == name)
    emitted, text, calls = next((e, t, c) for form, e, t, c in PUBLISHED if form == name)
    tools = [
        {"type": "function", "function": {"name": key, "parameters": {"type": "object", **schema}}}
        for key, schema in TOOLS.items()
    ]

    async def work(client: httpx.AsyncClient, service: Service) -> None:
        written(service, emitted)
        for finds in (openai_finds, anthropic_finds, responses_finds, ollama_finds):
            whole, streamed = await finds(client, tools)
            assert whole == streamed == (text, calls), finds

    run(tmp_path, HERMES.replace("<tool_call>", "") + f"{{# {marks} #}}", work)


def test_ollama(tmp_path: Path):
    async def work(client: httpx.AsyncClient, service: Service) -> None:
        written(service, WRITTEN)
        whole = await asked(client, "/api/chat", OLLAMA | {"stream": False}, shapes.OllamaChatReply)
        message = whole["message"]
        assert message["thinking"].strip() == "look it up"
        assert message["content"].strip() == "Let me see."
        (call,) = message["tool_calls"]
        assert call["function"] == {"index": 0, "name": "get_weather", "arguments": ARGUMENTS}
        lines = [json.loads(line) for line in (await client.post("/api/chat", json=OLLAMA)).text.splitlines()]
        assert "".join(line["message"].get("thinking", "") for line in lines) == message["thinking"]
        assert "".join(line["message"]["content"] for line in lines) == message["content"]
        calls = [call for line in lines for call in line["message"].get("tool_calls", ())]
        assert [one["function"] for one in calls] == [call["function"]]
        more = [message, {"role": "tool", "tool_name": "get_weather", "content": "rain"}]
        body = OLLAMA | {"messages": [*MESSAGES, *more], "stream": False}
        await asked(client, "/api/chat", body, shapes.OllamaChatReply)

    run(tmp_path, THINKS, work)
