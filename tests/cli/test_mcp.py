"""`hotset mcp`: with the SDK's client, and with lines that no client should send."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import mcp_types as types
import numpy as np
import pytest
from cli_runs import COMMAND, hotset, inside
from mcp import Client, MCPError, StdioServerParameters, stdio_client

from hotset import load
from hotset.cli import mcp_server
from hotset.settings import LoadSettings

PLACED = ("--device", "reference")
HELLO = {
    "jsonrpc": "2.0", "id": "hello", "method": "initialize", "params": {
        "protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"},
    },
}  # fmt: skip


def with_client(model: Path, use: Callable[[Client], Awaitable[Any]], mode: str = "auto") -> Any:
    """Run `use` with a client of a server process."""
    command, *arguments = [*COMMAND, "mcp", str(model), *PLACED]
    transport = stdio_client(StdioServerParameters(command=command, args=arguments))

    async def run() -> Any:
        async with Client(transport, mode=mode) as client:
            return await use(client)

    return asyncio.run(run())


def replies(model: Path, *messages: Any) -> list[dict[str, Any]]:
    """Return the replies of a server process to these messages; a text is sent unchanged."""
    lines = [one if isinstance(one, str) else json.dumps(one) for one in (HELLO, *messages)]
    done = hotset("mcp", model, *PLACED, stdin="".join(f"{line}\n" for line in lines))
    found = [json.loads(line) for line in done.stdout.splitlines()]
    (began,) = [one for one in found if one["id"] == "hello"]
    assert began["result"]["serverInfo"]["name"] == "hotset"
    return [one for one in found if one is not began]


def request(id: Any, method: str, **params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": id, "method": method, "params": params}


@pytest.mark.parametrize("mode", ["legacy", "auto"])
def test_tools_return_the_results_of_the_library(model: Path, mode: str):
    sampled = {"max_tokens": 40, "temperature": 0.7, "seed": 3}
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello"}]
    with load(model, device="reference") as loaded:
        expected = loaded.chat(messages, **sampled).completion
        vectors = loaded.embed(["one", "two"])
    progress = []

    async def note(done: float, total: float | None, _: str | None) -> None:
        progress.append((done, total))

    async def use(client: Client) -> None:
        assert client.server_info is not None
        assert client.server_info.name == "hotset"
        tools = (await client.list_tools()).tools
        assert [tool.name for tool in tools] == ["chat", "embed", "list_models"]
        assert all(tool.input_schema["additionalProperties"] is False for tool in tools)
        asked = {"prompt": "Hello", "system": "Be short.", **sampled}
        chat = await client.call_tool("chat", asked, progress_callback=note)
        assert chat.content == [types.TextContent(text=expected.text)]
        assert chat.structured_content is not None
        assert chat.structured_content["tokens"] == len(expected.tokens)
        assert not chat.is_error
        embed = await client.call_tool("embed", {"texts": ["one", "two"]})
        assert embed.structured_content is not None
        assert np.abs(np.array(embed.structured_content["vectors"]) - vectors).max() < 1e-6
        assert isinstance(embed.content[0], types.TextContent)
        assert json.loads(embed.content[0].text) == embed.structured_content
        listed = (await client.call_tool("list_models", {})).structured_content
        assert listed is not None
        (only,) = [one for one in listed["models"] if one["is_default"]]
        assert only == {"name": str(model), "size": model.stat().st_size, "is_default": True}

    with_client(model, use, mode)
    assert progress == [(n, 40) for n in range(16, len(expected.tokens) + 1, 16)]


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Any]:
    """Yield a server in this process. Tests with this fixture never load its model."""
    models = mcp_server.LocalModels(str(model), model, LoadSettings(device="reference"))
    yield mcp_server.server_of(models)
    asyncio.run(models.close())


async def called(server: Any, name: str, arguments: Any) -> types.CallToolResult:
    async with Client(server) as client:
        return await client.call_tool(name, arguments)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("chat", {}, "chat: 'prompt' is a required property"),
        ("chat", {"prompt": 3}, "prompt: 3 is not of type 'string'"),
        ("chat", {"prompt": "a", "tempature": 0}, "'tempature' was unexpected"),
        ("chat", {"prompt": "a", "temperature": -1}, "temperature must be at least 0, not -1"),
        ("chat", {"prompt": "a", "max_tokens": 0}, "max_tokens must be at least 1, not 0"),
        ("chat", {"prompt": "a", "context": 1}, "'context' was unexpected"),
        ("chat", {"prompt": "a", "model": "/etc/passwd"}, "there is no model '/etc/passwd'"),
        ("chat", {"prompt": "a", "model": ["x"]}, "model: ['x'] is not of type 'string'"),
        ("embed", {"texts": "a"}, "texts: 'a' is not of type 'array'"),
        ("embed", {"texts": ["b", ""]}, "texts.1: '' should be non-empty"),
        ("embed", {"texts": []}, "texts: [] should be non-empty"),
        ("embed", {"texts": 5 * ["x" * 1000], "all": 1}, "'all' was unexpected"),
        ("list_models", {"all": True}, "'all' was unexpected"),
    ],
)
def test_bad_arguments_are_reported_to_the_agent(server: Any, name: str, arguments: Any, message: str):
    found = asyncio.run(called(server, name, arguments))
    assert found.is_error
    assert isinstance(found.content[0], types.TextContent)
    assert message in found.content[0].text
    assert len(found.content[0].text) < 500


def test_an_unknown_tool_is_refused(server: Any):
    with pytest.RaisesGroup(
        pytest.RaisesExc(MCPError, match="there is no tool 'rm'"), flatten_subgroups=True
    ):
        asyncio.run(called(server, "rm", {}))


WRONG = [
    ("{", -32700, None),
    ("[" * 100_000, -32700, None),
    ("null", -32700, None),
    ("[]", -32700, None),
    ("3", -32700, None),
    ({"id": 1, "method": "ping"}, -32700, None),
    ({"jsonrpc": "2.0", "id": 1, "method": "ping", "params": [1]}, -32700, None),
    (request(1, "resources/list"), -32601, 1),
    (request(1, "tools/call", name={"x": []}), -32602, 1),
    (request(1, "tools/call", name="list_models", arguments=[]), -32602, 1),
]


def test_bad_lines_get_an_error_and_the_next_request_an_answer(model: Path):
    *wrong, pong = replies(model, *(message for message, *_ in WRONG), request(2, "ping"))
    assert sorted((one["error"]["code"], str(one["id"])) for one in wrong) == sorted(
        (code, str(id)) for _, code, id in WRONG
    )
    assert pong == {"jsonrpc": "2.0", "id": 2, "result": {}}


def test_notifications_and_answers_get_no_reply(model: Path):
    unknown = {"jsonrpc": "2.0", "method": "notifications/unknown", "params": {}}
    assert replies(model, unknown, {"jsonrpc": "2.0", "id": 7, "result": {}}, "", "  ") == []


def test_a_line_is_cut_after_its_limit(model: Path):
    """A request that the limit cuts is refused; the rest of its line is discarded."""
    long = json.dumps(request(1, "ping", text="x" * mcp_server.MAX_LINE))
    wrong, pong = replies(model, long, request(2, "ping"))
    assert (wrong["error"]["code"], wrong["id"], pong["id"]) == (-32700, None, 2)


def test_requests_before_the_end_of_the_input_are_answered(model: Path):
    asked = [
        request(
            id, "tools/call", name="chat", arguments={"prompt": "Hello", "max_tokens": 3, "temperature": 0}
        )
        for id in (1, 2)
    ]
    assert [one["id"] for one in replies(model, *asked)] == [1, 2]


def test_requests_above_the_limit_are_refused(model: Path):
    n = mcp_server.MAX_OPEN + 6
    asked = [
        request(
            id, "tools/call", name="chat", arguments={"prompt": "Hello", "max_tokens": 400, "temperature": 0}
        )
        for id in range(n)
    ]
    cancels = [
        {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": id}}
        for id in range(n)
    ]
    found = replies(model, *asked, *cancels)
    refused = {one["id"]: one["error"]["message"] for one in found if "error" in one}
    assert list(refused) == list(range(mcp_server.MAX_OPEN, n))
    assert all("wait for an answer" in message for message in refused.values())


def test_a_cancelled_call_has_no_reply_after_many_cancellations(model: Path):
    """The second call is cancelled after 2,000 cancellations of calls that do not exist."""

    async def use(client: Client) -> types.CallToolResult:
        began = asyncio.Event()

        async def note(*_: Any) -> None:
            began.set()

        for id in range(1000, 3000):
            params = types.CancelledNotificationParams(request_id=id)
            await client.session.send_notification(types.CancelledNotification(params=params))
        asked = {"prompt": "Hello", "max_tokens": 450, "temperature": 0}
        long = asyncio.create_task(client.call_tool("chat", asked, progress_callback=note))
        await began.wait()
        behind = asyncio.create_task(
            client.call_tool("chat", {"prompt": "Hello", "max_tokens": 2, "temperature": 0})
        )
        long.cancel()
        return await behind

    found = with_client(model, use)
    assert found.structured_content["tokens"] == 2


def test_an_interrupt_ends_the_server_while_it_waits_for_a_line(model: Path):
    server = subprocess.Popen(
        [*COMMAND, "mcp", str(model), *PLACED],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert server.stdin is not None
    assert server.stdout is not None
    with server:
        server.stdin.write(json.dumps(HELLO) + "\n")
        server.stdin.flush()
        assert "serverInfo" in server.stdout.readline()
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 130
        assert server.stderr is not None
        assert server.stderr.read() == ""


def test_missing_sdk_is_named_with_the_command_to_install_it(model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hotset.cli.serve.find_spec", lambda name: None if name == "mcp" else name)
    done = inside("mcp", model, *PLACED, returns=1)
    assert "hotset mcp needs mcp; install it with: pip install '.[mcp]'" in " ".join(done.stderr.split())
