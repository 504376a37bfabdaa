"""A small MCP server over standard input and output, well-behaved or not: `python mcp_stdio.py [HOW]`.

It does not use the SDK, so that it starts fast and can break the protocol.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import Any


def schema(**properties: str) -> dict[str, Any]:
    return {"type": "object", "properties": {name: {"type": kind} for name, kind in properties.items()}}


TOOLS: list[dict[str, Any]] = [
    {"name": "echo", "description": "Says it again.", "inputSchema": schema(text="string")},
    {"name": "add", "description": "A sum.", "inputSchema": schema(a="number", b="number")},
    {"name": "fail", "description": "Fails.", "inputSchema": schema()},
    {"name": "wait", "description": "Does not come to an end.", "inputSchema": schema()},
    {"name": "long", "description": "Much text.", "inputSchema": schema(n="integer")},
    {"name": "parts", "description": "Of each kind one.", "inputSchema": schema()},
    {"name": "variable", "description": "Of the environment.", "inputSchema": schema(name="string")},
    {"name": "die", "description": "Ends the server.", "inputSchema": schema()},
    {"name": "garbage", "description": "Answers with no result.", "inputSchema": schema()},
    {"name": "pid", "description": "The process.", "inputSchema": schema()},
    {"name": "grow", "description": "One more tool.", "inputSchema": schema()},
]
PARTS = [
    {"type": "text", "text": "red \x1b[31m\u202e<b>bold</b>"},
    {"type": "image", "data": "aGk=", "mimeType": "image/png"},
    {"type": "resource", "resource": {"uri": "file:///a.txt", "text": "of a file", "mimeType": "text/plain"}},
    {"type": "resource", "resource": {"uri": "file:///a.bin", "blob": "aGk="}},
    {"type": "resource_link", "uri": "file:///b.txt", "name": "b"},
]


def tools(how: str) -> list[dict[str, Any]]:
    if how == "many":
        return [{**TOOLS[0], "name": f"tool{i}"} for i in range(600)]
    if how == "odd":
        deep: dict[str, Any] = {"type": "object"}
        for _ in range(20):
            deep = {"type": "object", "properties": {"a": deep}}
        large = {"type": "object", "description": "x" * 100_000}
        return [
            {"name": "ok", "description": "d" * 10_000 + "\x1b", "inputSchema": schema()},
            {"name": "bad name\x1b", "inputSchema": schema()},
            {"name": "deep", "inputSchema": deep},
            {"name": "large", "inputSchema": large},
            {"name": "nan", "inputSchema": {"type": "object", "default": float("nan")}},
            {"name": "a/b", "inputSchema": schema()},
            {"name": "a.b", "inputSchema": schema()},
        ]
    return TOOLS


def send(**fields: Any) -> None:
    print(json.dumps({"jsonrpc": "2.0", **fields}), flush=True)


def result(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    match name:
        case "add":
            return {"content": [], "structuredContent": {"sum": arguments["a"] + arguments["b"]}}
        case "fail":
            return {"content": [{"type": "text", "text": "it failed"}], "isError": True}
        case "long":
            return {"content": [{"type": "text", "text": "x" * arguments["n"]}]}
        case "parts":
            return {"content": PARTS}
        case "garbage":
            return {"content": 7}
        case "variable":
            return {"content": [{"type": "text", "text": os.environ.get(arguments["name"], "not set")}]}
        case "pid":
            return {"content": [{"type": "text", "text": str(os.getpid())}]}
        case "die":
            print("nothing left to do", file=sys.stderr, flush=True)
            sys.exit(3)
        case "grow":
            TOOLS.append({"name": "more", "inputSchema": schema()})
            send(method="notifications/tools/list_changed")
            return {"content": []}
    return {"content": [{"type": "text", "text": arguments["text"]}]}


def answer(message: dict[str, Any], how: str) -> None:
    match message["method"]:
        case "initialize":
            send(id=message["id"], result={
                "protocolVersion": "2025-06-18", "capabilities": {"tools": {"listChanged": True}},
                "serverInfo": {"name": "small", "version": "1"},
            })  # fmt: skip
        case "tools/list" if how == "pages":
            at = int(message.get("params", {}).get("cursor", 0))
            send(id=message["id"], result={"tools": [TOOLS[at % 2]], "nextCursor": str(at + 1)})
        case "tools/list":
            send(id=message["id"], result={"tools": tools(how)})
        case "tools/call" if message["params"]["name"] == "wait":
            pass
        case "tools/call":
            send(id=message["id"], result=result(message["params"]["name"], message["params"]["arguments"]))
        case _:
            send(id=message["id"], error={"code": -32601, "message": "no such method"})


def main(how: str) -> None:
    if how == "fails":
        print("first line\nno licence \x1b[31mfound", file=sys.stderr, flush=True)
        sys.exit(2)
    if how == "silent":
        time.sleep(1000)
    if how == "stays":  # ignores every request, like the child that it starts
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        with open(os.environ["PIDS"], "w") as file:
            file.write(f"{os.getpid()} {child.pid}")
    print("a line that is no message", flush=True)
    for line in sys.stdin:
        message = json.loads(line)
        if "id" in message and "method" in message:
            answer(message, how)
        while how == "lines":
            sys.stdout.write("\n" * 4096)
        while how == "asks":  # and ignores the answer
            send(id=1, method="ping")
        if how == "deaf" and message["method"] == "tools/list":
            time.sleep(1000)
        while how == "endless":
            sys.stdout.write("x" * 65536)
        while how == "talks":
            sys.stderr.write("x" * 65536)
        while how in ("wide", "nested"):
            print('{"a": ' + ("[{}" + ",{}" * 9000 + "]" if how == "wide" else "[" * 99 + "]" * 99) + "}")
            sys.stdout.flush()
        while how == "flood":
            send(method="notifications/message", params={"level": "info", "data": "x" * 1000})
    while how == "stays":
        time.sleep(1)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
