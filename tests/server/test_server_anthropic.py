"""Anthropic's API schema: bodies into turns, deltas into blocks and events, and both over HTTP."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from anthropic import types
from pydantic import TypeAdapter

import hotset
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
from hotset.server.anthropic import MessagesBody, MessageWriter, answer_request
from hotset.server.replies import dumped

HELLO = {"role": "user", "content": "hello"}
BODY = {"model": "tiny", "max_tokens": 24, "messages": [HELLO], "temperature": 0}
USAGE = Usage(prompt_tokens=30, cached_tokens=20, completion_tokens=9, reasoning_tokens=4)
EVENT = TypeAdapter(types.RawMessageStreamEvent)


def request(**fields: Any):
    return answer_request(MessagesBody.model_validate(BODY | fields))


def turns(*messages: dict[str, Any], **fields: Any) -> list[Any]:
    found = request(messages=list(messages), **fields).messages
    assert found is not None
    return list(found)


# ---- bodies ----


def test_fields_without_effect_are_accepted():
    accepted: dict[str, Any] = {
        "metadata": {"user_id": "me"}, "service_tier": "auto", "mcp_servers": [], "speed": "standard",
        "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}, "inference_geo": "eu",
        "cache_control": {"type": "ephemeral"}, "tools": [], "tool_choice": {"type": "auto"},
        "output_config": {},
    }  # fmt: skip
    assert request(**accepted) == request()
    text = {"type": "text", "text": "hello", "citations": None, "cache_control": None}
    assert turns({"role": "user", "content": [text]}) == [HELLO]
    used = {"type": "tool_use", "id": "a", "name": "f", "input": {}, "caller": {"type": "direct"}}
    turns(HELLO, {"role": "assistant", "content": [used]}, HELLO)


@pytest.mark.parametrize("as_text", [False, True])
def test_billing_lines_are_left_out_of_the_prompt(as_text: bool) -> None:
    """They differ in each request of Claude Code, which would prevent any reuse of the cache."""
    header = "x-anthropic-billing-header: cc_version=2.1.197.01c; cc_entrypoint=cli; cch={};"
    later = "Keep this. x-anthropic-billing-header: of the text"

    def system(cch: str) -> Any:
        texts = [header.format(cch), "be brief\n\n", later]
        return "\n".join(texts) if as_text else [{"type": "text", "text": text} for text in texts]

    found = turns(HELLO, system=system("36ee5"))
    assert found == turns(HELLO, system=system("0aaa9"))
    assert found[0] == {"role": "system", "content": f"be brief\n\n\n{later}"}
    assert turns(HELLO, system=header) == [HELLO]
    assert turns({"role": "user", "content": header})[0]["content"] == header


def test_thinking_is_a_variable_of_the_template():
    def variables(**fields: Any) -> Any:
        return request(**fields).thinking.variables

    on = {"type": "enabled", "budget_tokens": 2048}
    assert variables(thinking=on) == {"enable_thinking": True}
    assert variables(thinking=on | {"display": "summarized"}) == {"enable_thinking": True}
    assert variables(thinking={"type": "disabled", "budget_tokens": 2048}) == {"enable_thinking": False}
    assert variables(output_config={"effort": "low"}) == {"reasoning_effort": "low"}
    assert variables() == {}
    assert request(thinking=on).thinking.budget == 2048
    assert not request(thinking=on | {"display": "omitted"}).thinking.shown


def test_system_is_a_text_or_blocks():
    assert turns(HELLO, system="be brief")[0] == {"role": "system", "content": "be brief"}
    blocks = [
        {"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "be kind"},
    ]
    assert turns(HELLO, system=blocks)[0] == {"role": "system", "content": "be brief\nbe kind"}
    assert turns(HELLO) == [HELLO]


def test_an_empty_list_of_blocks_is_an_empty_message():
    assert turns({"role": "user", "content": []}) == [{"role": "user", "content": ""}]


def test_consecutive_turns_of_one_role_are_joined():
    again = {"role": "user", "content": [{"type": "text", "text": "and"}, {"type": "text", "text": "now"}]}
    assert turns(HELLO, again) == [{"role": "user", "content": "hello\nand\nnow"}]


def test_tools_and_their_results():
    call = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Bonn"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"}
    thought = {"type": "thinking", "thinking": "look it up", "signature": ""}
    text = {"type": "text", "text": "let me see"}
    found = turns(
        HELLO,
        {"role": "assistant", "content": [thought, text, call]},
        {"role": "user", "content": [result, {"type": "text", "text": "so?"}]},
    )
    assert found[1:] == [
        {
            "role": "assistant", "content": "let me see", "reasoning_content": "look it up",
            "tool_calls": [
                {
                    "id": "toolu_1", "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Bonn"}'},
                },
            ],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "name": "weather", "content": "rain"},
        {"role": "user", "content": "so?"},
    ]  # fmt: skip
    failed = {**result, "content": [{"type": "text", "text": "no network"}], "is_error": True}
    found = turns(HELLO, {"role": "assistant", "content": [call]}, {"role": "user", "content": [failed]})
    assert found[-1]["content"] == "Error: no network"
    assert found[-2]["content"] == ""


@pytest.mark.parametrize(
    ("role", "block", "message"),
    [
        ("user", {"type": "thinking", "thinking": "hm"}, "thinking cannot be in a message of the user"),
        ("assistant", {"type": "tool_result", "tool_use_id": "x"}, "tool_result cannot be in"),
    ],
)
def test_misplaced_blocks_are_refused(role: str, block: dict[str, Any], message: str):
    with pytest.raises(InvalidRequestError, match=message):
        turns(HELLO, {"role": role, "content": [block]})


def test_a_tool_has_the_form_that_templates_expect():
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    tool = {"name": "weather", "description": "of a city", "input_schema": schema}
    function = {"name": "weather", "description": "of a city", "parameters": schema}
    for choice, expected in [
        (None, "auto"),
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "weather"}, {"name": "weather"}),
    ]:
        asked = request(tools=[tool], tool_choice=choice)
        assert list(asked.tools) == [{"type": "function", "function": function}]
        assert asked.tool_choice == expected
        assert asked.parallel_tool_calls
    one = request(
        tools=[tool | {"strict": True}], tool_choice={"type": "auto", "disable_parallel_tool_use": True}
    )
    assert not one.parallel_tool_calls
    assert one.tools[0]["function"]["strict"]


# ---- deltas ----


def told(*deltas: Delta, usage: Usage = USAGE, **how: bool) -> tuple[list[Any], dict[str, Any]]:
    """Return the events, checked against Anthropic's own types, and the message."""
    writer = MessageWriter("tiny", max_tokens=9, **how)
    events = writer.start(Usage(30, 0, 0))
    for delta in deltas:
        events += writer.push(delta)
    events += writer.end(usage)
    json.dumps(events)
    events = [event for event in events if event["type"] != "ping"]
    return [EVENT.validate_python(event, strict=True) for event in events], writer.message


def test_text_is_one_block():
    events, message = told(TextDelta(0, "he"), TextDelta(0, ""), TextDelta(0, "llo"), Finished(0, "stop"))
    assert [event.type for event in events] == [
        "message_start", "content_block_start", "content_block_delta", "content_block_delta",
        "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    assert events[0].message.content == []
    assert events[0].message.usage.input_tokens == 30
    assert message["content"] == [{"type": "text", "text": "hello", "citations": None}]
    assert message["stop_reason"] == events[-2].delta.stop_reason == "end_turn"
    usage = events[-2].usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (10, 20, 9)
    assert usage.output_tokens_details.thinking_tokens == 4
    types.Message.model_validate(message, strict=True)
    # Required by the API's schema, but not by the client's types.
    absent = {"stop_details", "container"}
    assert {name: message[name] for name in absent} == dict.fromkeys(absent)
    absent = {"cache_creation", "inference_geo", "server_tool_use"}
    assert {name: message["usage"][name] for name in absent} == dict.fromkeys(absent)
    assert message["usage"]["service_tier"] == "standard"


def test_thinking_text_and_calls_are_blocks_in_their_order():
    deltas = [
        ReasoningDelta(0, "let"),
        ReasoningDelta(0, " me"),
        TextDelta(0, "so"),
        ToolCallStart(0, 0, "toolu_1", "weather"),
        ToolCallArguments(0, 0, '{"city"'),
        ToolCallArguments(0, 0, ': "Bonn"}'),
        ToolCallStart(0, 1, "toolu_2", "time"),
        Finished(0, "tool_calls"),
    ]
    events, message = told(*deltas)
    caller = {"caller": {"type": "direct"}}
    assert message["content"] == [
        {"type": "thinking", "thinking": "let me", "signature": ""},
        {"type": "text", "text": "so", "citations": None},
        {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Bonn"}} | caller,
        {"type": "tool_use", "id": "toolu_2", "name": "time", "input": {}} | caller,
    ]
    assert message["stop_reason"] == "tool_use"
    opened = [event.index for event in events if event.type == "content_block_start"]
    closed = [event.index for event in events if event.type == "content_block_stop"]
    assert opened == closed == [0, 1, 2, 3]
    pieces = [
        event.delta.partial_json
        for event in events
        if event.type == "content_block_delta" and event.delta.type == "input_json_delta"
    ]
    assert "".join(pieces) == '{"city": "Bonn"}'
    types.Message.model_validate(message)


def test_edits_of_the_context_are_reported():
    events, message = told(TextDelta(0, "so"), Finished(0, "stop"), manages_context=True)
    assert message["context_management"] == {"applied_edits": []}
    assert events[-2].to_dict()["context_management"] == {"applied_edits": []}


NESTED = '{"a": ' + "[" * 60 + "]" * 60 + "}"  # deeper than a request may be nested


@pytest.mark.parametrize(
    "arguments", ['{"city": ', "[1]", "null", "[" * 100_000, '{"a": NaN}', '{"a": [1e999]}', NESTED]
)
def test_arguments_that_are_not_an_object_are_passed_on(arguments: str):
    _, message = told(
        ToolCallStart(0, 0, "a", "f"), ToolCallArguments(0, 0, arguments), Finished(0, "tool_calls")
    )
    assert message["content"][0]["input"] == {"INVALID_JSON": arguments}
    assert dumped(message)


@pytest.mark.parametrize(
    ("finished", "n_tokens", "reason"),
    [
        (Finished(0, "length"), 9, "max_tokens"),
        (Finished(0, "length"), 8, "model_context_window_exceeded"),
        (Finished(0, "stop"), 9, "end_turn"),
        (Finished(0, "stop", "###"), 5, "stop_sequence"),
    ],
)
def test_stop_reasons(finished: Finished, n_tokens: int, reason: str):
    events, message = told(finished, usage=Usage(3, 0, n_tokens))
    assert message["stop_reason"] == reason
    assert message["stop_sequence"] == finished.stop
    assert message["content"] == []
    assert [event.type for event in events] == ["message_start", "message_delta", "message_stop"]


# ---- over HTTP ----


async def test_count_tokens(model: hotset.Model, client: httpx.AsyncClient):
    body = {"model": "tiny", "messages": [HELLO], "system": "be brief"}
    counted = (await client.post("/v1/messages/count_tokens", json=body)).json()
    expected = model.encode_chat([{"role": "system", "content": "be brief"}, HELLO])
    assert counted == {"input_tokens": len(expected)}
    asked = body | {"max_tokens": 1, "temperature": 0}
    usage = (await client.post("/v1/messages?beta=true", json=asked)).json()["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted["input_tokens"]


async def test_errors_have_anthropics_types(client: httpx.AsyncClient):
    async def refused(message: str, status: int = 400, **fields: Any) -> str:
        body = {key: value for key, value in (BODY | fields).items() if value != "absent"}
        reply = await client.post("/v1/messages", json=body)
        assert reply.status_code == status, reply.text
        error = reply.json()["error"]
        assert message in error["message"]
        return str(error["type"])

    assert await refused("messages is missing", messages="absent") == "invalid_request_error"
    await refused("has no tools", tool_choice={"type": "tool", "name": "f"})
