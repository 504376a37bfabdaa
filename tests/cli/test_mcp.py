"""`hotset mcp`: what a client of the Model Context Protocol sends, and what it gets."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_runs import COMMAND, inside

import hotset
from hotset.cli import mcp

HELLO = {
    "protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"},
}  # fmt: skip
PLACED = ("--backend", "reference")


def request(id: Any, method: str, **params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": id, "method": method, "params": params}


def call(id: Any, name: str, **arguments: Any) -> dict[str, Any]:
    return request(id, "tools/call", name=name, arguments=arguments)


def replies(model: Path, *messages: Any) -> list[dict[str, Any]]:
    """Of a server that gets these messages, texts as they stand, and the end."""
    lines = [one if isinstance(one, str) else json.dumps(one) for one in messages]
    done = inside("mcp", model, *PLACED, stdin="".join(f"{line}\n" for line in lines))
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(one["jsonrpc"] == "2.0" for one in found)
    return found


def test_a_client_begins_and_sees_the_tools(model: Path):
    began, pong, listed = replies(
        model,
        request(1, "initialize", **HELLO),
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        request("a", "ping"),
        request(2, "tools/list"),
    )
    assert began["id"] == 1
    assert began["result"]["protocolVersion"] == "2025-06-18"
    assert began["result"]["serverInfo"]["name"] == "hotset"
    assert "tools" in began["result"]["capabilities"]
    assert pong == {"jsonrpc": "2.0", "id": "a", "result": {}}
    tools = listed["result"]["tools"]
    assert [tool["name"] for tool in tools] == ["chat", "embed", "list_models"]
    assert all(tool["inputSchema"]["additionalProperties"] is False for tool in tools)
    (other,) = replies(model, request(1, "initialize", **HELLO | {"protocolVersion": "1999-01-01"}))
    assert other["result"]["protocolVersion"] == mcp.PROTOCOLS[0]


def test_the_tools_do_what_the_library_does(model: Path):
    sampled = {"max_tokens": 40, "temperature": 0.7, "seed": 3}
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello"}]
    with hotset.load(model, backend="reference") as loaded:
        expected = loaded.chat(messages, **sampled).completion
        vectors = loaded.embed(["one", "two"])
    asked = call(1, "chat", prompt="Hello", system="Be short.", **sampled)
    asked["params"]["_meta"] = {"progressToken": "p"}
    *notes, chat, embed, listed = replies(
        model, asked, call(2, "embed", texts=["one", "two"]), call(3, "list_models")
    )
    assert chat["result"]["content"] == [{"type": "text", "text": expected.text}]
    assert chat["result"]["structuredContent"]["tokens"] == len(expected.tokens)
    assert not chat["result"]["isError"]
    progress = [note["params"]["progress"] for note in notes]
    assert progress == list(range(16, len(expected.tokens) + 1, 16))
    found = embed["result"]["structuredContent"]["vectors"]
    assert np.abs(np.array(found) - vectors).max() < 1e-6
    assert json.loads(embed["result"]["content"][0]["text"])["vectors"] == found
    (only,) = [one for one in listed["result"]["structuredContent"]["models"] if one["is_default"]]
    assert only == {"name": str(model), "size": model.stat().st_size, "is_default": True}


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("chat", {}, "chat needs the argument prompt"),
        ("chat", {"prompt": 3}, "prompt must be a text"),
        ("chat", {"prompt": "a", "tempature": 0}, "chat has no argument 'tempature'"),
        ("chat", {"prompt": "a", "temperature": -1}, "temperature must be at least 0"),
        ("chat", {"prompt": "a", "max_tokens": 0}, "max_tokens must be at least 1"),
        ("chat", {"prompt": "a", "id": 1, "token": 2}, "chat has no argument 'id'"),
        ("chat", {"prompt": "a", "model": "/etc/passwd"}, "there is no model '/etc/passwd'"),
        ("chat", {"prompt": "a", "model": ["x"]}, "model must be a text"),
        ("embed", {"texts": "a"}, "texts must be a list of texts"),
        ("embed", {"texts": [""]}, "none of them empty"),
        ("embed", {"texts": []}, "the number of texts must be between 1"),
        ("list_models", {"all": True}, "list_models has no argument 'all'; it has none"),
        ("list_models", [], "arguments must be an object"),
    ],
)
def test_what_is_wrong_with_a_call_is_told_to_the_agent(model: Path, name: str, arguments: Any, message: str):
    asked = request(1, "tools/call", name=name, arguments=arguments)
    (found,) = replies(model, asked)
    assert found["result"]["isError"]
    assert message in found["result"]["content"][0]["text"]


@pytest.mark.parametrize(
    ("message", "code", "id"),
    [
        ("{", -32700, None),
        ("[" * 100_000, -32700, None),
        ("[]", -32600, None),
        ("3", -32600, None),
        ({"id": 1, "method": "ping"}, -32600, 1),
        ({"jsonrpc": "2.0", "id": [1], "method": "ping"}, -32600, None),
        ({"jsonrpc": "2.0", "id": True, "method": "ping"}, -32600, None),
        ({"jsonrpc": "2.0", "id": 1, "method": ["ping"]}, -32600, 1),
        ({"jsonrpc": "2.0", "id": 1, "method": "ping", "params": [1]}, -32600, 1),
        (request(1, "resources/list"), -32601, 1),
        (request(1, "tools/call", name="rm"), -32602, 1),
        (request(1, "tools/call", name={"x": []}), -32602, 1),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_is_no_request_is_an_error_and_the_next_is_answered(
    model: Path, message: Any, code: int, id: Any
):
    wrong, pong = replies(model, message, request(2, "ping"))
    assert (wrong["error"]["code"], wrong["id"]) == (code, id)
    assert pong == {"jsonrpc": "2.0", "id": 2, "result": {}}


def test_notifications_and_answers_get_no_reply(model: Path):
    unknown = {"jsonrpc": "2.0", "method": "notifications/unknown", "params": 3}
    assert replies(model, unknown, {"jsonrpc": "2.0", "id": 7, "result": {}}, "", "  ") == []


def test_a_line_without_end_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mcp, "MAX_LINE", 100)
    wrong, pong = replies(model, "x" * 1000, request(1, "ping"))
    assert (wrong["error"]["code"], pong["id"]) == (-32700, 1)


def test_a_cancelled_call_has_no_reply_and_those_behind_it_have(model: Path):
    """With a process and pipes, so that the cancellation comes while the answer is made."""
    server = subprocess.Popen(
        [*COMMAND, "mcp", str(model), *PLACED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdin is not None
    assert server.stdout is not None

    def send(message: Any) -> None:
        assert server.stdin is not None
        server.stdin.write(json.dumps(message) + "\n")
        server.stdin.flush()

    asked = call(1, "chat", prompt="Hello", max_tokens=450, temperature=0)
    asked["params"]["_meta"] = {"progressToken": 1}
    with server:
        send(asked)
        assert json.loads(server.stdout.readline())["method"] == "notifications/progress"
        send({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 1}})
        send(request(2, "ping"))
        server.stdin.close()
        left = [json.loads(line) for line in server.stdout]
    ids = [one["id"] for one in left if "id" in one]
    assert ids == [2]
    assert server.returncode == 0
