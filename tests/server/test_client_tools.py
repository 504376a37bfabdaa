"""Tools of special types that the client runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from api_schemas import events_of
from openai.types.chat import ChatCompletion
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from tiny_server import MESSAGES, client_of, write_model
from tool_models import HERMES, WEATHER, written

from hotset.engine.sampler import TokenLogprobs
from hotset.server.answers import Finished, ToolCallArguments, ToolCallStart
from hotset.server.anthropic import MessagesBody
from hotset.server.anthropic import answer_request as of_messages
from hotset.server.client_tools import FORMS, result_text
from hotset.server.ignored import HEADER
from hotset.server.openai.chat import ChatBody
from hotset.server.openai.client_calls import (
    OPEN,
    ClientCall,
    CustomCalls,
    CustomInput,
    JsonStrings,
    custom_input,
)
from hotset.server.openai.responses import ResponsesBody, answer_request

Json = dict[str, Any]
_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)

PATCH = '*** Begin Patch\n*** Add File: "a.txt"\n+héllo\n*** End Patch'
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}
CUSTOM = {"type": "custom", "name": "patch", "description": "Applies a patch.", "format": GRAMMAR}
TOOLS: list[Json] = [CUSTOM, {"type": "local_shell"}, {"type": "shell"}, {"type": "apply_patch"}]
ACTION = {"type": "exec", "env": {}, "timeout_ms": 5, "user": None, "working_directory": None}
CALLS: list[tuple[str, Any, Json]] = [
    ("patch", {"input": PATCH}, {"type": "custom_tool_call", "name": "patch", "input": PATCH}),
    ("patch", {"text": PATCH}, {"type": "custom_tool_call", "name": "patch", "input": PATCH}),
    (
        "local_shell",
        {"command": ["ls", "-l"], "timeout_ms": 5},
        {"type": "local_shell_call", "action": ACTION | {"command": ["ls", "-l"]}},
    ),
    (
        "local_shell",
        {"command": "ls | wc", "timeout_ms": 5},
        {"type": "local_shell_call", "action": ACTION | {"command": ["bash", "-lc", "ls | wc"]}},
    ),
    (
        "shell",
        {"commands": ["ls"]},
        {"type": "shell_call", "action": {"commands": ["ls"], "timeout_ms": None, "max_output_length": None}},
    ),
    (
        "apply_patch",
        {"type": "update_file", "path": "a.py", "diff": "-a\n+b"},
        {"type": "apply_patch_call", "operation": {"type": "update_file", "path": "a.py", "diff": "-a\n+b"}},
    ),
    (
        "apply_patch",
        {"type": "delete_file", "path": "a.py"},
        {"type": "apply_patch_call", "operation": {"type": "delete_file", "path": "a.py"}},
    ),
    ("shell", {"commands": 3}, {"type": "function_call", "name": "shell", "arguments": '{"commands": 3}'}),
    ("apply_patch", {"type": "chmod"}, {"type": "function_call", "name": "apply_patch"}),
]
"""The name and the arguments that the model writes, and the item that the client receives."""


def call_of(name: str, arguments: Any) -> str:
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"Let me see.\n<tool_call>\n{call}\n</tool_call>"


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    keys = {"tokenizer.chat_template": HERMES, "llama.context_length": 4096}
    return write_model(tmp_path_factory.mktemp("hermes") / "tiny.gguf", **keys)


@pytest.mark.parametrize(("name", "arguments", "item"), CALLS)
async def test_calls_of_a_response(hermes: Path, name: str, arguments: Any, item: Json):
    body = {"input": "hello", "tools": TOOLS, "max_output_tokens": 400, "temperature": 0}

    async with client_of(hermes, load={"n_ctx": 4096}) as (client, service):
        written(service.model, call_of(name, arguments))
        reply = await client.post("/v1/responses", json=body)
        stream = await client.post("/v1/responses", json=body | {"stream": True})
        found = Response.model_validate(reply.json(), strict=False)
        assert found.status == "completed"
        assert reply.json()["output"][0]["content"][0]["text"].strip() == "Let me see."
        got = reply.json()["output"][1]
        assert item.items() <= got.items()
        assert got["status"] == "completed"
        events = events_of(stream.text)
        for event in events:
            if not event["type"].startswith("response.apply_patch"):  # not checked by the library
                _EVENT.validate_python(event)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert item.items() <= done[1].items()
        assert events[-1]["response"]["output"] == done
        if item["type"] == "custom_tool_call":
            deltas = [e["delta"] for e in events if e["type"] == "response.custom_tool_call_input.delta"]
            [end] = [e["input"] for e in events if e["type"] == "response.custom_tool_call_input.done"]
            assert "".join(deltas) == end == PATCH
        elif item["type"] == "apply_patch_call":
            kind = "response.apply_patch_call_operation_diff"
            deltas = [e["delta"] for e in events if e["type"] == f"{kind}.delta"]
            ends = [e["diff"] for e in events if e["type"] == f"{kind}.done"]
            assert "".join(deltas) == "".join(ends) == arguments.get("diff", "")
        elif item["type"] == "shell_call":
            shell = [e for e in events if e["type"].startswith("response.shell_call_command")]
            assert (shell[0]["type"], shell[-1]["command"]) == ("response.shell_call_command.added", "ls")
            assert "".join(e["delta"] for e in shell[1:-1]) == "ls"


@pytest.mark.parametrize(
    ("name", "pieces", "events"),
    [
        ("patch", ['{"in', 'put": "a\\', "n", 'b"}'], ["+a", "+\n", "+b"]),
        ("shell", ['{"commands": ["l', 's", "', 'wc"]}'], ["0", "0+l", "0+s", "0=ls", "1", "1+wc", "1=wc"]),
        (
            "apply_patch",
            ['{"type": "create_file", "path": "a", "diff": "', "+x", '\\n+y"}'],
            ["++x", "+\n+y", "=+x\n+y"],
        ),
    ],
)
def test_a_call_arrives_in_pieces(name: str, pieces: list[str], events: list[str]):
    call, found = ClientCall(FORMS[name] if name != "patch" else FORMS["custom"], "1", name), []
    for piece in [*pieces, None]:
        for kind, fields in call.end() if piece is None else call.push(piece):
            sign = {"delta": "+", "done": "="}.get(kind.rpartition(".")[2], "")
            said = fields.get("delta", fields.get("diff", fields.get("command", "")))
            if kind != OPEN:
                found.append(f"{fields.get('command_index', '')}{sign}{said}")
    assert found == events


@pytest.mark.parametrize(
    ("name", "begun", "item"),
    [
        ("patch", '{"input": "one two', {"type": "custom_tool_call", "input": "one two"}),
        ("shell", '{"commands": ["ls", "wc -', {"type": "shell_call"}),
        ("apply_patch", '{"type": "create_file", "path": "a", "diff": "+', {"type": "apply_patch_call"}),
        ("shell", '{"commands": [', {"type": "function_call", "arguments": '{"commands": ['}),
    ],
)
async def test_a_call_that_does_not_end_is_incomplete(hermes: Path, name: str, begun: str, item: Json):
    text = f'<tool_call>\n{{"name": "{name}", "arguments": {begun}'
    body = {"input": "hello", "tools": TOOLS, "max_output_tokens": len(text), "temperature": 0}

    async with client_of(hermes, load={"n_ctx": 4096}) as (client, service):
        written(service.model, text)
        reply = (await client.post("/v1/responses", json=body)).json()
        stream = await client.post("/v1/responses", json=body | {"stream": True})
        assert (item | {"status": "incomplete"}).items() <= reply["output"][0].items()
        done = [e["item"] for e in events_of(stream.text) if e["type"] == "response.output_item.done"]
        assert {**done[0], "id": "", "call_id": ""} == {**reply["output"][0], "id": "", "call_id": ""}


@pytest.mark.parametrize(
    "value",
    [
        {"a": 'x\n"\\/\t', "b": [], "c": ["", "é\U0001f600", "\ud83d", "\\u00e9"]},
        {"n": 1, "t": True, "z": None, "s": "\ude00\ud83d", "l": ["1", "2"]},
        {"a": "before", "o": {"s": "inside"}, "s": "after"},
    ],
)
@pytest.mark.parametrize("ascii", [True, False])
def test_strings_of_arguments_in_pieces(value: Json, ascii: bool):
    text = json.dumps(value, ensure_ascii=ascii)
    expected: dict[tuple[str, int | None], str] = {}
    for key, one in value.items():
        if isinstance(one, dict):
            break
        strings = enumerate(one) if isinstance(one, list) else [(None, one)]
        expected |= {(key, i): string for i, string in strings if isinstance(string, str)}
    for size in (1, 2, 5, len(text)):
        reader, found, ended = JsonStrings(), dict[tuple[str, int | None], str](), []
        for at in range(0, len(text), size):
            for piece in reader.push(text[at : at + size]):
                place = piece.key, piece.element
                found[place] = found.get(place, "") + piece.text
                ended += [place] * piece.ends
        assert (found, ended) == (expected, list(expected)), size


@pytest.mark.parametrize("url", ["/v1/responses", "/v1/chat/completions"])
async def test_the_regular_expression_of_a_custom_tool_is_enforced(hermes: Path, url: str):
    pytest.importorskip("llguidance")
    regex = {"syntax": "regex", "definition": 'a"[0-9]{2}'}
    tool: Json = {"name": "patch", "format": {"type": "grammar", **regex}}
    body: Json = {"model": "tiny", "temperature": 0}
    if url == "/v1/responses":
        body |= {"input": "hello", "tools": [{"type": "custom", **tool}]}
    else:
        tool["format"] = {"type": "grammar", "grammar": regex}
        body |= {"messages": MESSAGES, "tools": [{"type": "custom", "custom": tool}]}

    async with client_of(hermes, load={"n_ctx": 4096}) as (client, service):
        written(service.model, call_of("patch", {"input": 'b"x7'}))
        reply = await client.post(url, json=body)
        assert HEADER not in reply.headers
        if url == "/v1/responses":
            given = reply.json()["output"][1]["input"]
        else:
            given = reply.json()["choices"][0]["message"]["tool_calls"][0]["custom"]["input"]
        assert re.fullmatch(regex["definition"], given), given
        lark = json.loads(json.dumps(body).replace('"regex"', '"lark"'))
        name = "tools.format.syntax" if "input" in body else "tools.custom.format.grammar.syntax"
        assert (await client.post(url, json=lark)).headers[HEADER] == name


async def test_calls_of_a_chat(hermes: Path):
    custom = {name: value for name, value in CUSTOM.items() if name != "type"}
    tools = [{"type": "custom", "custom": custom}, WEATHER]
    body = {"messages": MESSAGES, "tools": tools, "max_tokens": 500, "temperature": 0}
    call = {"type": "custom", "custom": {"name": "patch", "input": PATCH}}

    async with client_of(hermes, load={"n_ctx": 4096}) as (client, service):
        text = call_of("patch", {"input": PATCH}) + call_of("get_weather", {"city": "Rome"})[11:]
        written(service.model, text)
        reply = await client.post("/v1/chat/completions", json=body)
        stream = await client.post("/v1/chat/completions", json=body | {"stream": True})
        ChatCompletion.model_validate(reply.json())
        first, second = reply.json()["choices"][0]["message"]["tool_calls"]
        assert call.items() <= first.items()
        assert json.loads(second["function"]["arguments"]) == {"city": "Rome"}
        pieces = [
            one
            for event in events_of(stream.text)
            if event["choices"]
            for one in event["choices"][0]["delta"].get("tool_calls", ())
        ]
        texts = [one["custom"]["input"] for one in pieces if one["index"] == 0]
        assert pieces[0].pop("id").startswith("call_")
        assert pieces[0] == {"index": 0, "type": "custom", "custom": {"name": "patch", "input": ""}}
        assert {one["index"] for one in pieces[len(texts) :]} == {1}
        assert "".join(texts) == PATCH
        assert reply.json()["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("end", ["next", "finished"])
@pytest.mark.parametrize(
    ("pieces", "texts"),
    [
        (['{"in', 'put": "a\\', "n", 'b"}'], ["", "a", "\n", "b"]),
        (['{"te', 'xt": "ab"}'], ["", "", "ab"]),
        (["plain ", "text"], ["", "", "plain text"]),
    ],
)
def test_deltas_of_a_custom_call(pieces: list[str], texts: list[str], end: str):
    """A piece without text of the argument has only logprobs; invalid arguments arrive at the end."""
    score = TokenLogprobs(1, 0.0, ())
    last = ToolCallStart(0, 1, "c2", "other") if end == "next" else Finished(0, "tool_calls")
    calls = CustomCalls({"patch"})
    start = ToolCallStart(0, 0, "c1", "patch", [score])
    assert [*calls.push(start)] == [start]
    found = [one for text in pieces for one in calls.push(ToolCallArguments(0, 0, text, [score]))]
    assert all(one.logprobs == [score] for one in found)
    *rest, ended = calls.push(last)
    assert (ended, [type(one) for one in rest + found]) == (last, [CustomInput] * len(texts))
    assert [one.text for one in found + rest] == texts
    for other in ToolCallArguments(0, 1, "{}"), ToolCallArguments(1, 0, "{}"):  # not calls of custom tools
        assert [*calls.push(other)] == [other]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\nb"}', "a\nb"),
        ('{"input": "cut', "cut"),
        ('{"input": "a", "input": "b"}', "a"),
        ('{"input": "a"} more', "a"),
        ('{"text": "a"}', "a"),
        ("plain", "plain"),
    ],
)
def test_a_custom_call_has_the_same_text_whole_and_in_pieces(arguments: str, text: str):
    calls = CustomCalls({"patch"})
    assert len([*calls.push(ToolCallStart(0, 0, "c1", "patch", []))]) == 1
    deltas = [one for letter in arguments for one in calls.push(ToolCallArguments(0, 0, letter, []))]
    *rest, _ = calls.push(Finished(0, "tool_calls"))
    assert "".join(one.text for one in [*deltas, *rest]) == custom_input(arguments) == text


async def test_logprobs_of_reasoning_and_calls_are_in_a_stream(hermes: Path):
    body = {"messages": MESSAGES, "tools": [WEATHER], "max_tokens": 300, "logprobs": True, "temperature": 0}

    async with client_of(hermes, load={"n_ctx": 4096}) as (client, service):
        written(service.model, call_of("get_weather", {"city": "Rome"}))
        reply = await client.post("/v1/chat/completions", json=body)
        stream = await client.post("/v1/chat/completions", json=body | {"stream": True})
        whole = reply.json()["choices"][0]["logprobs"]["content"]
        chunks = [event["choices"][0] for event in events_of(stream.text) if event["choices"]]
        scored = [chunk["logprobs"]["content"] for chunk in chunks if chunk["logprobs"]]
        assert [one["token"] for content in scored for one in content] == [one["token"] for one in whole]
        assert "".join(one["token"] for one in whole) == call_of("get_weather", {"city": "Rome"})
        called = [chunk for chunk in chunks if "tool_calls" in chunk["delta"]]
        assert any(chunk["logprobs"] for chunk in called)


def test_items_of_earlier_turns():
    """The prompt has each call as a call of the tool's function, with its result."""
    shell = [
        {"stdout": "a\n", "stderr": "b", "outcome": {"type": "exit", "exit_code": 1}},
        {"stdout": "", "stderr": "", "outcome": {"type": "timeout"}},
    ]
    items: list[tuple[Json, Json, str, Json, str]] = [
        (
            {"type": "custom_tool_call", "call_id": "1", "name": "patch", "input": PATCH},
            {"type": "custom_tool_call_output", "call_id": "1", "output": [{"type": "text", "text": "ok"}]},
            "patch", {"input": PATCH}, "ok",
        ),
        (
            {
                "type": "local_shell_call", "id": "i2", "call_id": "2", "status": "completed",
                "action": {"type": "exec", "command": ["ls"], "env": {}},
            },
            {"type": "local_shell_call_output", "id": "i2", "output": "x"},
            "local_shell", {"command": ["ls"]}, "x",
        ),
        (
            {"type": "shell_call", "call_id": "3", "action": {"commands": ["ls"]}},
            {"type": "shell_call_output", "call_id": "3", "output": shell},
            "shell", {"commands": ["ls"]}, "a\nb\n[exit code 1]\n[timed out]",
        ),
        (
            {"type": "apply_patch_call", "call_id": "4", "operation": {"type": "delete_file", "path": "a"}},
            {"type": "apply_patch_call_output", "call_id": "4", "status": "failed", "output": "none"},
            "apply_patch", {"type": "delete_file", "path": "a"}, "Error: none",
        ),
        (
            {"type": "custom_tool_call", "call_id": "5", "name": "look", "input": ""},
            {"type": "custom_tool_call_output", "call_id": "5", "output": [{"type": "input_image"}]},
            "look", {"input": ""}, "[image: this model reads only text]",
        ),
    ]  # fmt: skip
    for call, result, name, arguments, text in items:
        body = ResponsesBody.model_validate({"input": [{"role": "user", "content": "hi"}, call, result]})
        _, made, answered = answer_request(body).messages or ()
        [function] = made["tool_calls"]
        assert function["function"]["name"] == name
        assert json.loads(function["function"]["arguments"]) == arguments
        assert answered == {
            "role": "tool", "tool_call_id": function["id"], "name": name, "content": text,
        }  # fmt: skip
    custom = {"id": "1", "type": "custom", "custom": {"name": "patch", "input": PATCH}}
    messages = [*MESSAGES, {"role": "assistant", "tool_calls": [custom]}, {"role": "user", "content": "go"}]
    asked = ChatBody.model_validate({"messages": messages}).request()
    assert asked.messages is not None
    [function] = asked.messages[1]["tool_calls"]
    assert json.loads(function["function"]["arguments"]) == {"input": PATCH}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("bash_20250124", "bash"), ("text_editor_20250728", "str_replace_based_edit_tool"),
        ("text_editor_20250124", "str_replace_editor"), ("memory_20250818", "memory"),
    ],
)  # fmt: skip
def test_anthropics_tools_are_functions(kind: str, name: str):
    body = {
        "messages": MESSAGES, "max_tokens": 5, "tools": [{"type": kind, "name": name, "max_characters": 9}],
        "tool_choice": {"type": "tool", "name": name},
    }  # fmt: skip
    request = of_messages(MessagesBody.model_validate(body))
    assert [tool["function"]["name"] for tool in request.tools] == [name]
    assert request.tools[0]["function"]["parameters"]["properties"]["command"]["type"] == "string"
    assert request.tool_choice == {"name": name}


@pytest.mark.parametrize(
    ("choice", "names", "value"),
    [
        ({"type": "shell"}, 4, {"name": "shell"}),
        ({"type": "custom", "name": "patch"}, 4, {"name": "patch"}),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "local_shell"}]}, 1, "required"),
    ],
)
def test_tool_choice_accepts_anthropics_tools(choice: Json, names: int, value: Any):
    body = ResponsesBody.model_validate({"input": "hi", "tools": TOOLS, "tool_choice": choice})
    request = answer_request(body)
    assert (len(request.tools), request.tool_choice) == (names, value)


HOSTED = {
    "/v1/responses": [
        "web_search", "web_search_preview", "file_search", "code_interpreter", "image_generation", "mcp",
        "tool_search", "computer_use_preview",
    ],
    "/v1/messages": [
        "web_search_20250305", "web_fetch_20250910", "code_execution_20250825", "computer_20250124",
    ],
    "/v1/chat/completions": ["web_search"],
}  # fmt: skip


@pytest.mark.parametrize("url", HOSTED)
async def test_tools_that_a_provider_runs_are_left_out(path: Path, url: str):
    tools = [{"type": kind} for kind in HOSTED[url]]
    body: Json = {"model": "tiny", "max_tokens": 3, "temperature": 0, "tools": tools}
    body |= {"input": "hello"} if url == "/v1/responses" else {"messages": MESSAGES}

    async with client_of(path) as (client, _):
        plain = await client.post(url, json={name: value for name, value in body.items() if name != "tools"})
        reply = await client.post(url, json=body)
        assert reply.status_code == 200, reply.text
        usage = [one.json()["usage"].get("prompt_tokens") for one in (reply, plain)]
        assert usage[0] == usage[1]
        assert all(f"tools.{kind}" in reply.headers[HEADER] for kind in HOSTED[url])


def test_a_shell_in_a_container_is_left_out():
    tools = [{"type": "shell", "environment": {"type": kind}} for kind in ("container_auto", "local")]
    for tool, n in zip(tools, (0, 1), strict=True):
        assert len(answer_request(ResponsesBody.model_validate({"input": "hi", "tools": [tool]})).tools) == n


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", '{"commands": [3]}', "[" * 5000, '"a"'])
def test_odd_arguments_and_results(text: str):
    assert FORMS["custom"].value(text) is not None
    for name in ("local_shell", "shell", "apply_patch"):
        assert FORMS[name].value(text) is None
    for odd in (text, [text], [{"outcome": text}], {"a": text}, 3, None):
        assert isinstance(result_text(odd), str)
