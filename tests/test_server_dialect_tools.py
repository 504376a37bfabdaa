"""Reasoning and calls of functions in the dialects that are not chat completions, whole and as streams."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from test_server_tools import CALL, HERMES, THINKS, WEATHER, run, written
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
