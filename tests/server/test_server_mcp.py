"""Tools of MCP servers: the file, processes and addresses, hostile servers, and permission to call."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from fake_chat_server import served
from mcp.server.mcpserver import MCPServer
from paths import ROOT
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from tiny_server import client_of, key_of, write_model
from waiting import until

from hotset.errors import InvalidRequestError, QueueFullError
from hotset.server import shapes
from hotset.server.mcp.clients import McpClients
from hotset.server.mcp.connection import ServerStatus, ToolResult
from hotset.server.mcp.file import McpServer, read_servers
from hotset.server.mcp.limits import Limits, McpServerError

SCRIPT = ROOT / "tests" / "support" / "mcp_stdio.py"
TOO_MUCH = "sent a message with too many values, or nested too deeply, and was ended"
SMALL = Limits(message_bytes=1 << 17, minute_bytes=1 << 20, stop_seconds=0.5)


def process(name: str, how: str = "", **env: str) -> McpServer:
    """Return the server of tests/support/mcp_stdio.py."""
    return McpServer(name=name, command=sys.executable, args=("-I", "-S", str(SCRIPT), how), env=env)


@contextmanager
def clients_of(*servers: McpServer, limits: Limits = SMALL) -> Iterator[McpClients]:
    """Yield clients for which each server's state is known."""
    clients = McpClients(servers, limits)
    clients.start()
    try:
        until(lambda: all(status.state != "starting" for status in clients.statuses))
        yield clients
    finally:
        clients.close()


def call(clients: McpClients, name: str, /, **arguments: Any) -> ToolResult:
    found = clients.find(name)
    assert found is not None
    return asyncio.run(clients.call(*found, arguments))


def status_of(clients: McpClients, name: str) -> ServerStatus:
    return next(status for status in clients.statuses if status.name == name)


# ---- the file ----


def write(path: Path, **servers: Any) -> Path:
    path.write_text(json.dumps({"mcpServers": servers}))
    return path


def test_the_file_of_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEARCH_KEY", "s3cret")
    monkeypatch.delenv("NONE", raising=False)
    path = write(
        tmp_path / "mcp.json",
        files={"command": "npx", "args": ["-y", "${NONE:-server}", ""], "env": {"A": "${env:SEARCH_KEY}"},
               "alwaysAllow": ["read"]},
        search={"type": "streamable-http", "url": "https://mcp.example/mcp",
                "headers": {"Authorization": "Bearer ${SEARCH_KEY}"}},
        off={"disabled": True},
    )  # fmt: skip
    files, search = read_servers(path)
    assert (files.command, files.args, files.env) == ("npx", ("-y", "server", ""), {"A": "s3cret"})
    assert files.unused == ("alwaysAllow",)
    assert (search.url, search.headers) == ("https://mcp.example/mcp", {"Authorization": "Bearer s3cret"})
    assert "s3cret" not in repr((files, search))


@pytest.mark.parametrize(
    ("servers", "why"),
    [
        ({}, "names no MCP servers"),
        ({"a": []}, "a is an object"),
        ({"a": {}}, "a needs a command, or a url"),
        ({"a": {"command": "x", "url": "https://x"}}, "a needs a command, or a url"),
        ({"a": {"command": ""}}, "command is empty"),
        ({"a": {"command": ["x"]}}, "command is text, not a list"),
        ({"a": {"command": "x", "args": "y"}}, "args is a list"),
        ({"a": {"command": "x", "args": [7]}}, "args is text, not a int"),
        ({"a": {"command": "x", "env": {"A": 1}}}, "env is text"),
        ({"a": {"command": "x", "env": {"A": "${NO_SUCH_VARIABLE}"}}}, "has no NO_SUCH_VARIABLE"),
        ({"a": {"command": "x\0"}}, "zero byte"),
        ({"a": {"command": "x", "type": "http"}}, "type is stdio here"),
        ({"a": {"url": "https://x", "type": "sse"}}, "the older transport sse"),
        ({"a": {"url": "file:///etc/passwd"}}, "begins with https"),
        ({"a": {"url": "https://x", "headers": {"A": "b\r\nC: d"}}}, "header 'A' has characters"),
        ({"a": {"url": "https://x", "headers": {"A B": "c"}}}, "header 'A B' has characters"),
        ({"a": {"command": "x", "disabled": "no"}}, "disabled must be True or False"),
        ({"a\n": {"command": "x"}}, "server's name"),
        ({"a" * 41: {"command": "x"}}, "server's name"),
        ({"a b": {"command": "x"}, "A_b": {"command": "x"}}, "could have the same names"),
        ({"a": {"command": "x"}, "a__b": {"command": "x"}}, "could have the same names"),
        ({f"s{i}": {"command": "x"} for i in range(33)}, "33 MCP servers, and 32"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, servers: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidRequestError, match=why):
        read_servers(write(tmp_path / "mcp.json", **servers))


@pytest.mark.parametrize("text", ["{", "[]", "7", '{"mcpServers": 7}', "[" * 100_000])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "mcp.json").write_text(text)
    with pytest.raises(InvalidRequestError, match=r"not a JSON file|names no MCP servers"):
        read_servers(tmp_path / "mcp.json")


# ---- processes ----


def test_tools_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTSET_API_KEY", "s3cret")
    with clients_of(process("a b", SECRET="x")) as clients:
        status = status_of(clients, "a b")
        assert (status.state, status.problem, status.tools[0].name) == ("ready", "", "a_b__echo")
        assert call(clients, "a_b__echo", text="hé\n1") == ToolResult("hé\n1", False)
        assert call(clients, "a_b__add", a=1, b=2) == ToolResult('{"sum": 3}', False)
        assert call(clients, "a_b__fail") == ToolResult("it failed", True)
        assert call(clients, "a_b__variable", name="SECRET").text == "x"
        assert call(clients, "a_b__variable", name="HOTSET_API_KEY").text == "not set"
        assert call(clients, "a_b__parts").text.split("\n") == [
            "red \\x1b[31m\\u202e<b>bold</b>", "[image (image/png), which is not shown]", "of a file",
            "[a file that is not text: file:///a.bin]", "[a resource: file:///b.txt]",
        ]  # fmt: skip
        long = call(clients, "a_b__long", n=100_000).text
        assert long == "x" * 50_000 + "\n[cut: the first 50000 of 100000 characters]"
        call(clients, "a_b__grow")
        until(lambda: clients.find("a_b__more") is not None)  # after the server's notification of more tools
        assert clients.find("a_b__none") is None


def test_a_process_that_ends_is_restarted() -> None:
    with clients_of(process("a")) as clients:
        first = call(clients, "a__pid").text
        with pytest.raises(McpServerError, match=r"^ended \(exit code 3\): nothing left to do$"):
            call(clients, "a__die")
        assert (status_of(clients, "a").state, len(status_of(clients, "a").tools)) == ("failed", 11)
        second = call(clients, "a__pid").text
        asyncio.run(clients.restart("a"))
        third = call(clients, "a__pid").text
        assert len({first, second, third}) == 3
        until(lambda: not any(psutil.pid_exists(int(one)) for one in (first, second)))


def test_calls_that_take_too_long() -> None:
    limits = Limits(call_seconds=0.1, stop_seconds=0.5)
    with clients_of(process("a"), limits=limits) as clients:
        with pytest.raises(McpServerError, match=r"did not answer wait within 0.1 s"):
            call(clients, "a__wait")
        assert call(clients, "a__echo", text="still there").text == "still there"


def test_calls_that_are_cancelled_or_too_many() -> None:
    async def work(clients: McpClients) -> None:
        found, echo = clients.find("a__wait"), clients.find("a__echo")
        assert found is not None
        assert echo is not None
        calls = [asyncio.ensure_future(clients.call(*found, {})) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError):
            await clients.call(*echo, {"text": "x"})
        for one in calls:
            one.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        while True:  # until the clients notice it
            with suppress(QueueFullError):
                assert (await clients.call(*echo, {"text": "x"})).text == "x"
                break

    with clients_of(process("a"), limits=Limits(calls=2, stop_seconds=0.5)) as clients:
        asyncio.run(work(clients))


def test_hostile_processes() -> None:
    hows = ("many", "odd", "pages", "endless", "flood", "lines", "talks", "wide", "nested", "fails")
    with clients_of(*(process(how, how) for how in hows), McpServer(name="no", command="no-such")) as clients:
        said = {status.name: (status.state, status.problem) for status in clients.statuses}
        assert said["endless"] == ("failed", "sent a message of more than 131072 bytes and was ended")
        for how in ("wide", "nested"):
            assert said[how] == ("failed", TOO_MUCH)
        for how in ("flood", "lines", "talks"):
            assert said[how] == ("failed", "sent more than 1048576 bytes in a minute and was ended")
        assert said["fails"] == ("failed", "ended (exit code 2): no licence \\x1b[31mfound")
        hint = "; install it, or give its full path as `command`"
        assert said["no"] == ("failed", f"cannot be started: there is no program 'no-such'{hint}")
        many, odd, pages = (status_of(clients, name) for name in ("many", "odd", "pages"))
        assert (len(many.tools), len(pages.tools)) == (256, 2)
        assert "or their number (344): tool256, tool257, tool258, tool259 and others" in many.problem
        assert pages.problem.startswith("has more than 64 tools")
        assert [one.name for one in odd.tools] == ["odd__ok", "odd__a_b"]
        assert odd.problem.endswith("(5): bad name\\x1b, deep, large, nan and others")
        assert len(odd.tools[0].description) == 4096


def test_processes_that_do_not_read() -> None:
    limits = Limits(write_seconds=0.2, stop_seconds=0.1)
    with clients_of(process("asks", "asks"), process("deaf", "deaf"), limits=limits) as clients:
        status = status_of(clients, "asks")
        assert (status.state, status.problem) == (
            "failed",
            "sent more than 64 requests at once and was ended",
        )
        for _ in range(2):  # the process is restarted
            with pytest.raises(McpServerError, match=r"^does not read its input and was ended$"):
                call(clients, "deaf__echo", text="x" * 1_000_000)


def test_a_process_that_does_not_answer() -> None:
    limits = Limits(start_seconds=0.2, stop_seconds=0.1)
    with clients_of(process("a", "silent"), limits=limits) as clients:
        status = status_of(clients, "a")
        assert (status.state, status.problem) == ("failed", "did not answer within 0.2 s")


def are_gone(pids: list[int]) -> bool:
    def is_gone(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    return all(map(is_gone, pids))


def test_processes_end_with_the_clients(tmp_path: Path) -> None:
    """This includes processes that ignore SIGTERM and the end of their input, and their children."""
    with clients_of(process("a", "stays", PIDS=str(tmp_path / "pids"))):
        pids = [int(one) for one in (tmp_path / "pids").read_text().split()]
        assert not are_gone(pids)
    until(lambda: are_gone(pids))


@pytest.mark.skipif(sys.platform == "win32", reason="the guard is a shell")
def test_processes_end_when_the_server_is_killed(tmp_path: Path) -> None:
    code = """
import sys, time
from hotset.server.mcp.file import McpServer
from hotset.server.mcp.clients import McpClients

script, pids = sys.argv[1:]
command = ("-I", "-S", script, "stays")
clients = McpClients([McpServer(name="a", command=sys.executable, args=command, env={"PIDS": pids})])
clients.start()
while clients.statuses[0].state == "starting":
    time.sleep(0.01)
print(clients.statuses[0].state, flush=True)
time.sleep(1000)
"""
    command = [sys.executable, "-c", code, str(SCRIPT), str(tmp_path / "pids")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        pids = [int(one) for one in (tmp_path / "pids").read_text().split()]
        assert not are_gone(pids)
        os.kill(parent.pid, signal.SIGKILL)
    until(lambda: are_gone(pids))


# ---- addresses ----


def sdk_server() -> Starlette:
    """Return a server of the SDK, which speaks the newest version of the protocol."""
    server = MCPServer("sdk")

    @server.tool()
    def add(a: int, b: int) -> int:
        """Return a sum."""
        return a + b

    @server.tool()
    def long(n: int) -> str:
        """Return many letters."""
        return "x" * n

    return server.streamable_http_app()


def hostile_app() -> Starlette:
    async def large(_: Request) -> Response:
        return Response(b" " * (1 << 20) + b"{}", media_type="application/json")

    async def packed(_: Request) -> Response:
        body = gzip.compress(b" " * (1 << 24))
        return Response(body, headers={"content-encoding": "gzip"}, media_type="application/json")

    async def flood(_: Request) -> Response:
        note = {
            "jsonrpc": "2.0",
            "method": "notifications/message",
            "params": {"level": "info", "data": "x" * 9999},
        }

        async def events() -> AsyncIterator[bytes]:
            while True:
                yield b"data: " + json.dumps(note).encode() + b"\n\n"
                await asyncio.sleep(0)

        return StreamingResponse(events(), media_type="text/event-stream")

    async def event(_: Request) -> Response:
        async def lines() -> AsyncIterator[bytes]:
            while True:
                yield b"data: " + b"x" * 9999 + b"\r\n"
                await asyncio.sleep(0)

        return StreamingResponse(lines(), media_type="text/event-stream")

    async def wide(_: Request) -> Response:
        return Response(b'{"a": [{}' + b",{}" * 9000 + b"]}", media_type="application/json")

    async def hidden(_: Request) -> Response:
        """Neither an unterminated string outside the data nor another event hides the answer."""
        body = b'id: "\ndata: "\n\rdata: [{}' + b",{}" * 9000 + b"]\n\n"
        return Response(body, media_type="text/event-stream")

    async def utf16(_: Request) -> Response:
        return Response(b"{}", headers={"content-type": "application/json; charset=utf-16"})

    async def denied(_: Request) -> Response:
        return Response("no", 401)

    async def text(_: Request) -> Response:
        return Response("hello", media_type="text/plain")

    async def away(_: Request) -> Response:
        return Response(status_code=307, headers={"location": "http://127.0.0.1:1/mcp"})

    pages = (large, packed, flood, event, wide, hidden, utf16, denied, text, away)
    return Starlette(
        routes=[Route(f"/{one.__name__}", one, methods=["GET", "POST", "DELETE"]) for one in pages]
    )


def test_servers_at_an_address() -> None:
    with ExitStack() as stack:
        good = stack.enter_context(served(sdk_server()))
        bad = stack.enter_context(served(hostile_app()))
        names = (
            "large", "packed", "flood", "event", "wide", "hidden", "utf16", "denied", "text", "away",
        )  # fmt: skip
        servers = [McpServer(name=one, url=f"{bad}/{one}") for one in names]
        servers += [
            McpServer(name="sdk", url=f"{good}/mcp"),
            McpServer(name="gone", url="http://127.0.0.1:1/"),
        ]
        clients = stack.enter_context(clients_of(*servers))
        assert call(clients, "sdk__add", a=2, b=3) == ToolResult("5", False)
        assert call(clients, "sdk__add", a="x").is_error
        assert call(clients, "sdk__long", n=40_000).text == "x" * 40_000
        with pytest.raises(McpServerError, match=r"^sent a message of more than 131072 bytes$"):
            call(clients, "sdk__long", n=140_000)
        assert call(clients, "sdk__add", a=2, b=3).text == "5"  # a new connection was made
        said = {status.name: status.problem for status in clients.statuses if status.state == "failed"}
        assert said == {
            "large": "sent a message of more than 131072 bytes",
            "packed": "sends compressed replies, although hotset requests uncompressed ones",
            "flood": "sent more than 1048576 bytes in a minute and was ended",
            "event": "sent a message of more than 131072 bytes",
            "wide": TOO_MUCH,
            "hidden": TOO_MUCH,
            "utf16": "sends text that is not UTF-8",
            "denied": "refuses (status 401): give it a key among its headers",
            "text": "refuses: Unexpected content type: text/plain; charset=utf-8",
            "away": said["away"],
            "gone": "cannot be reached (All connection attempts failed)",
        }
        assert said["away"].startswith("refuses: Redirect to")


# ---- routes ----


async def ready(client: httpx.AsyncClient) -> dict[str, Any]:
    """Return the servers when none of them is starting."""
    while True:
        reply = await client.get("/mcp/servers")
        found: dict[str, Any] = shapes.McpServersReply.model_validate(reply.json()).model_dump()
        if all(one["state"] != "starting" for one in found["servers"]):
            return found
        await asyncio.sleep(0.005)


async def test_tools_are_listed_and_called(tmp_path: Path) -> None:
    async with client_of(
        write_model(tmp_path / "tiny.gguf"), mcp_servers=(process("a"), process("b", "fails"))
    ) as (client, _):
        first, second = (await ready(client))["servers"]
        digests = {tool.pop("digest") for tool in first["tools"]}
        assert len(digests) == len(first["tools"])
        assert (first["name"], first["state"], first["tools"][0]) == ("a", "ready", {
            "name": "a__echo", "tool": "echo", "description": "Says it again.",
            "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
        })  # fmt: skip
        assert (second["name"], second["state"], second["tools"]) == ("b", "failed", [])
        reply = await client.post("/mcp/call", json={"name": "a__echo", "arguments": {"text": "hi"}})
        assert (reply.status_code, reply.json()) == (200, {"content": "hi", "is_error": False})
        listed = (await ready(client))["servers"][0]["tools"][0]["digest"]
        assert listed in digests
        meant = {"name": "a__echo", "arguments": {"text": "hi"}, "digest": listed}
        assert (await client.post("/mcp/call", json=meant)).status_code == 200
        wrong: list[tuple[str, Any, int, str]] = [
            ("/mcp/call", meant | {"digest": "0" * 64}, 409, "has changed"),
            ("/mcp/call", {"name": "a__none"}, 404, "there is no tool 'a__none'"),
            ("/mcp/call", {"name": "a b"}, 400, "name"),
            ("/mcp/call", {"name": "a__echo", "arguments": []}, 400, "arguments"),
            (
                "/mcp/call",
                {"name": "a__die"},
                502,
                "the MCP server 'a' ended (exit code 3): nothing left to do",
            ),
            ("/mcp/call", {"name": "a__echo", "arguments": {"text": "\ud83d"}}, 400, "surrogate"),
            ("/mcp/restart", {"server": "c"}, 404, "there is no MCP server 'c'"),
        ]
        for path, body, status, message in wrong:
            reply = await client.post(path, content=json.dumps(body))
            assert reply.status_code == status, reply.text
            assert message in reply.json()["error"]["message"]
        assert (await client.post("/mcp/restart", json={"server": "a"})).status_code == 200
        assert (await ready(client))["servers"][0]["state"] == "ready"


async def test_who_may_call_tools(tmp_path: Path) -> None:
    """Keys that may manage models; without keys only this machine and its own page."""
    asked = (
        ("GET", "/mcp/servers", None),
        ("POST", "/mcp/call", {"name": "a"}),
        ("POST", "/mcp/restart", {"server": "a"}),
    )

    async def statuses(client: httpx.AsyncClient, **headers: str) -> set[int]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return {
            (await client.request(method, path, json=body, headers=named)).status_code
            for method, path, body in asked
        }

    model = write_model(tmp_path / "tiny.gguf")
    async with client_of(model) as (client, _):
        assert await statuses(client) == {200, 404}
        assert await statuses(client, origin="http://localhost") == {200, 404}
        assert await statuses(client, origin="https://evil.example") == {403}
        assert await statuses(client, host="evil.example") == {403}
        assert await statuses(client, x_forwarded_for="10.0.0.1") == {403}
    async with client_of(model, cors_origins=("*",)) as (client, _):
        assert await statuses(client, origin="https://evil.example") == {403}
    keys = key_of("root", manages=True), key_of("user", manages=False)
    async with client_of(model, named_keys=keys) as (client, _):
        assert await statuses(client) == {401}
        assert await statuses(client, x_api_key="user") == {403}
        assert await statuses(client, x_api_key="root") == {200, 404}
