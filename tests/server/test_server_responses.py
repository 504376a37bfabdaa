"""/v1/responses: items into turns, deltas into items and events, and both over HTTP."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types import responses as types
from pydantic import TypeAdapter, ValidationError
from tiny_server import client_of

from hotset.errors import InvalidRequestError
from hotset.server.answers import (
    Delta,
    Finished,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
    Usage,
)
from hotset.server.errors import invalid_body
from hotset.server.openai.response_writer import ResponseWriter
from hotset.server.openai.responses import ResponsesBody, answer_request, head, tool_names

BODY = {"model": "tiny", "input": "hello", "temperature": 0, "max_output_tokens": 24}
USAGE = Usage(prompt_tokens=30, cached_tokens=20, completion_tokens=9, reasoning_tokens=4)
EVENT = TypeAdapter(types.ResponseStreamEvent)


def request(**fields: Any):
    return answer_request(ResponsesBody.model_validate(BODY | fields))


def turns(*items: dict[str, Any], **fields: Any) -> list[Any]:
    found = request(input=list(items), **fields).messages
    assert found is not None
    return list(found)


# ---- bodies ----


def test_formats_and_logprobs():
    assert request(text={"format": {"type": "json_object"}}).params.json_object
    assert request(text={"format": {"type": "text"}}).params.form is None
    assert request().params.logprobs is None
    assert request(include=["message.output_text.logprobs"]).params.logprobs == 0


def test_input_is_a_text_or_items():
    assert request().messages == [{"role": "user", "content": "hello"}]
    found = request(instructions="be brief").messages
    assert found == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    parts = [{"type": "input_text", "text": "hel"}, {"type": "input_text", "text": "lo"}]
    assert turns({"role": "developer", "content": "be kind"}, {"role": "user", "content": parts}) == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hello"},
    ]


def test_fields_without_effect_are_accepted():
    accepted: dict[str, Any] = {
        "store": True, "background": False, "truncation": "disabled", "service_tier": "flex", "user": "me",
        "max_tool_calls": 3, "prompt_cache_key": "k", "prompt_cache_retention": "24h", "metadata": {},
        "include": ["reasoning.encrypted_content", "web_search_call.results"], "tools": [],
        "tool_choice": "auto", "parallel_tool_calls": True, "text": {"format": {"type": "text"}},
    }  # fmt: skip
    assert request(**accepted) == request()
    item = {"role": "user", "content": [{"type": "input_text", "text": "hello"}]}
    nulls = dict.fromkeys(("type", "id", "status", "phase"))
    assert turns(item | nulls) == turns(item) == request().messages
    said = {"role": "assistant", "phase": "commentary", "content": "hm"}
    assert turns(item, said, item)[1] == {"role": "assistant", "content": "hm"}
    asked = request(reasoning={"effort": "low", "summary": "auto"}, text={"verbosity": "low"})
    assert asked.thinking.variables == {"enable_thinking": True, "reasoning_effort": "low"}
    assert asked.template == {"verbosity": "low"}


def test_text_reasoning_and_calls_of_the_model_are_one_turn():
    schema = {"type": "object", "properties": {}}
    thought = {"type": "reasoning_text", "text": "hm"}
    items = [
        {"role": "user", "content": "hello"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [thought]},
        {
            "type": "message", "id": "msg_1", "status": "completed", "role": "assistant",
            "content": [{"type": "output_text", "text": "let me see", "annotations": []}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "id": "fc_2", "call_id": "call_2", "name": "g", "arguments": "{"},
        {"type": "function_call_output", "call_id": "call_2", "output": "2"},
        {
            "type": "function_call_output", "call_id": "call_1",
            "output": [{"type": "input_text", "text": "1"}],
        },
    ]  # fmt: skip
    calls = [
        {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}},
        {"id": "call_2", "type": "function", "function": {"name": "g", "arguments": "{"}},
    ]
    assert turns(*items)[1:] == [
        {"role": "assistant", "content": "let me see", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_2", "name": "g", "content": "2"},
        {"role": "tool", "tool_call_id": "call_1", "name": "f", "content": "1"},
    ]
    alone = turns(items[0], {"type": "function_call_output", "call_id": "call_9", "output": "9"})
    assert alone[-1] == {"role": "tool", "tool_call_id": "call_9", "content": "9"}
    tool = {"type": "function", "name": "f", "description": "of x", "parameters": schema, "strict": True}
    function = {"name": "f", "description": "of x", "parameters": schema, "strict": True}
    asked = request(tools=[tool], tool_choice={"type": "function", "name": "f"})
    assert list(asked.tools) == [{"type": "function", "function": function}]
    assert asked.tool_choice == {"name": "f"}
    assert asked.parallel_tool_calls
    assert not request(tools=[tool], parallel_tool_calls=False).parallel_tool_calls
    assert request(tools=[tool], tool_choice="required").tool_choice == "required"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input": [{"role": "wizard", "content": "a"}]}, "role must be one of user, assistant"),
        ({"previous_response_id": "resp_1"}, "previous_response_id: nothing is stored"),
        ({"conversation": "conv_1"}, "conversation: nothing is stored"),
        ({"prompt": {"id": "p"}}, "prompt: no prompts are stored"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0.id: nothing is stored"),
        ({"input": [{"role": "user", "content": [{"type": "input_audio", "input_audio": "x"}]}]},
         "a part of type input_audio cannot be read"),
    ],
)  # fmt: skip
def test_unsupported_fields_are_refused_by_name(fields: dict[str, Any], message: str):
    with pytest.raises(ValidationError) as caught:
        ResponsesBody.model_validate(BODY | fields)
    errors = [{**error, "loc": ("body", *error["loc"])} for error in caught.value.errors()]
    assert message in invalid_body(errors).message


# ---- deltas ----


def told(*deltas: Delta) -> tuple[list[Any], dict[str, Any]]:
    """Return the events, checked against OpenAI's own types, and the response."""
    body = ResponsesBody.model_validate(BODY)
    writer = ResponseWriter(head("tiny", body, request().params), None, None)  # type: ignore[arg-type]
    events = json.loads(json.dumps(writer.start(1_700_000_000)))
    for delta in deltas:
        events += json.loads(json.dumps(writer.push(delta)))  # a copy of the present state
    events += json.loads(json.dumps(writer.end(USAGE)))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    found = [EVENT.validate_python(event) for event in events]
    assert [event.type for event in found] == [event["type"] for event in events]
    return found, events[-1]["response"]


def test_text_is_one_item():
    events, response = told(TextDelta(0, "he"), TextDelta(0, ""), TextDelta(0, "llo"), Finished(0, "stop"))
    assert [event.type for event in events] == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.content_part.added", "response.output_text.delta", "response.output_text.delta",
        "response.output_text.done", "response.content_part.done", "response.output_item.done",
        "response.completed",
    ]  # fmt: skip
    assert events[0].response.output == []
    assert events[2].item.content == []
    assert events[3].part.text == ""
    assert events[6].text == "hello"
    (item,) = response["output"]
    assert item == {
        "type": "message", "id": item["id"], "status": "completed", "role": "assistant",
        "content": [{"type": "output_text", "text": "hello", "annotations": [], "logprobs": []}],
    }  # fmt: skip
    assert response["status"] == "completed"
    assert response["usage"]["input_tokens_details"]["cached_tokens"] == 20
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == 4
    assert response["usage"]["total_tokens"] == 39
    assert types.Response.model_validate(response).output_text == "hello"


def test_reasoning_text_and_calls_are_items_in_their_order():
    events, response = told(
        ReasoningDelta(0, "let"),
        ReasoningDelta(0, " me"),
        TextDelta(0, "so"),
        ToolCallStart(0, 0, "call_1", "f"),
        ToolCallArguments(0, 0, '{"x"'),
        ToolCallArguments(0, 0, ": 1}"),
        ToolCallStart(0, 1, "call_2", "g"),
        Finished(0, "tool_calls"),
    )
    reasoning, message, first, second = response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "let me"}]
    assert reasoning["summary"] == []
    assert message["content"][0]["text"] == "so"
    assert (first["call_id"], first["name"], first["arguments"]) == ("call_1", "f", '{"x": 1}')
    assert (second["call_id"], second["name"], second["arguments"]) == ("call_2", "g", "")
    assert {item["status"] for item in response["output"]} == {"completed"}
    for kind in ("added", "done"):
        of_kind = [event for event in events if event.type == f"response.output_item.{kind}"]
        assert [event.output_index for event in of_kind] == [0, 1, 2, 3]
        assert [event.item.id for event in of_kind] == [item["id"] for item in response["output"]]
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert pieces == ['{"x"', ": 1}"]
    assert response["status"] == "completed"


def test_a_truncated_answer_is_incomplete():
    events, response = told(TextDelta(0, "he"), Finished(0, "length"))
    assert events[-1].type == "response.incomplete"
    assert response["status"] == response["output"][0]["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}


# ---- over HTTP ----


@pytest.mark.parametrize(
    "fields",
    [{}, {"instructions": "brief"}, {"tools": [{"type": "function", "name": "f"}]}, {"truncation": "auto"}],
    ids=str,
)
async def test_the_prompt_of_a_request_is_the_answers(path: Path, fields: dict[str, Any]):
    async with client_of(path, load={"n_ctx": 1024}) as (client, service):
        reply = (await client.post("/v1/responses", json=BODY | fields)).json()
        assert len(service.prompt(request(**fields), threading.Event())) == reply["usage"]["input_tokens"]


async def test_a_response_repeats_its_request(client: httpx.AsyncClient):
    form = {"type": "json_schema", "name": "answer", "schema": {"type": "boolean"}}
    tool = {"type": "function", "name": "f", "parameters": None}
    asked = {
        "top_logprobs": 1, "metadata": {"a": "b"}, "text": {"format": form}, "tools": [tool],
        "tool_choice": "none", "reasoning": {"summary": "auto"}, "store": True,
    }  # fmt: skip

    body = (await client.post("/v1/responses", json=BODY | asked)).json()
    response = types.Response.model_validate(body, strict=True)
    assert response.output_text in ("true", "false")
    logprobs = response.output[0].content[0].logprobs
    assert "".join(one.token for one in logprobs) == response.output_text
    assert [len(one.top_logprobs) for one in logprobs] == [1] * len(logprobs)
    assert body["created_at"] <= body["completed_at"]
    assert (body["presence_penalty"], body["frequency_penalty"], body["max_tool_calls"]) == (0, 0, None)
    assert body["tools"] == [tool | {"description": None, "strict": None}]
    assert body["text"] == {"format": form | {"description": None, "strict": False}}
    assert body["reasoning"] == {"effort": None, "summary": "auto"}
    assert (body["store"], body["temperature"], body["metadata"]) == (False, 0, {"a": "b"})


# ---- namespaces of functions, as Codex has them ----

AGENTS = {
    "type": "namespace",
    "name": "agents",
    "description": "Other agents.",
    "tools": [{"type": "function", "name": "spawn", "parameters": {"type": "object"}, "strict": False}],
}
PLAIN = {"type": "function", "name": "spawn"}


def test_functions_of_a_namespace_have_its_name_as_prefix():
    body = ResponsesBody.model_validate(BODY | {"tools": [PLAIN, AGENTS], "client_metadata": {"a": {"b": 1}}})
    functions = [tool["function"]["name"] for tool in answer_request(body).tools]
    assert functions == ["spawn", "agents__spawn"]
    writer = ResponseWriter(head("tiny", body, request().params), None, None, tool_names(body.tools))  # type: ignore[arg-type]
    writer.start(1_700_000_000)
    for delta in (
        ToolCallStart(0, 0, "call_1", "agents__spawn"), ToolCallArguments(0, 0, "{}"),
        ToolCallStart(0, 1, "call_2", "spawn"), Finished(0, "tool_calls"),
    ):  # fmt: skip
        writer.push(delta)
    first, second = types.Response.model_validate(writer.response | {"usage": None}).output
    assert (first.namespace, first.name, first.arguments) == ("agents", "spawn", "{}")
    assert (second.namespace, second.name) == (None, "spawn")
    assert writer.response["tools"][1]["name"] == "agents"


def test_calls_of_a_namespace_have_it_in_the_reply():
    call = {
        "type": "function_call",
        "call_id": "1",
        "namespace": "agents",
        "name": "spawn",
        "arguments": "{}",
    }
    output = {"type": "function_call_output", "call_id": "1", "output": "ok"}
    asked, answered = turns(call, output)
    assert asked["tool_calls"][0]["function"]["name"] == "agents__spawn"
    assert answered["name"] == "agents__spawn"


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([AGENTS | {"name": "a" * 127}], "names of 128 characters"),
        ([AGENTS | {"tools": [PLAIN] * 600}] * 2, "1024 tools"),
        ([PLAIN | {"name": "agents__spawn"}, AGENTS], "'agents__spawn' twice, of two namespaces"),
        ([AGENTS | {"name": "a__b"}, AGENTS | {"name": "a", "tools": [PLAIN | {"name": "b__spawn"}]}],
         "'a__b__spawn' twice"),
    ],
)  # fmt: skip
def test_namespaces_have_the_limits_of_tools(tools: list[Any], message: str):
    with pytest.raises(InvalidRequestError, match=message):
        request(tools=tools)
