"""The connection to one MCP server: it lists and calls the server's tools."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
import time
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any, Literal

import httpx2
import mcp_types
from mcp import Client, MCPError

from hotset.errors import QueueFullError
from hotset.escaping import clause, escaped_text
from hotset.server.mcp.file import McpServer
from hotset.server.mcp.limits import Limits, McpServerError
from hotset.server.mcp.transports import HttpTransport, StdioTransport

_TOOL_NAME = re.compile(r"[A-Za-z0-9_./-]{1,80}")
_PAGES = 64  # most pages of a list of tools
_SETTLE_SECONDS = 0.5  # from a server's notice that its tools changed until hotset lists them

State = Literal["starting", "ready", "failed"]
_log = logging.getLogger("hotset.server")


@dataclass(frozen=True)
class McpTool:
    """A tool.

    name: the model's name for it. own_name: its server's name for it. parameters: a JSON schema. digest: of
    the facts that a user consents to: the server's program or address, and the description.
    """

    name: str
    own_name: str
    description: str
    parameters: Mapping[str, Any]
    digest: str


@dataclass(frozen=True)
class ServerStatus:
    """The state of a server. problem: why it failed, or which tools are left out; "": no problem."""

    name: str
    state: State = "starting"
    problem: str = ""
    tools: tuple[McpTool, ...] = ()


@dataclass(frozen=True)
class ToolResult:
    """The result of a call as text. is_error: whether the tool reports a failure."""

    text: str
    is_error: bool


class Connection:
    """A server of the file, in the event loop of McpClients. `status` may be read anywhere."""

    def __init__(self, server: McpServer, limits: Limits) -> None:
        self.status = ServerStatus(server.name)
        self._server, self._limits = server, limits
        self._client: Client | None = None
        self._task: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()  # it is ready, or has failed
        self._changed = asyncio.Event()  # the server reports other tools
        self._n_calls = 0
        self._logged = ""  # the last problem

    def start(self) -> None:
        """Connect, unless it is connected or connecting."""
        if self._task is None or self._task.done():
            self.status = replace(self.status, state="starting", problem="")
            self._settled.clear()
            self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """End the connection, and the server's process."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def restart(self) -> None:
        await self.close()
        self.start()

    async def call(self, tool: McpTool, arguments: dict[str, Any]) -> ToolResult:
        """Call a tool. Raises McpServerError if the server fails, QueueFullError if it has too many calls."""
        if self._n_calls >= self._limits.calls:
            raise QueueFullError(self._n_calls, 1)
        self._n_calls += 1
        try:
            self.start()
            await self._settled.wait()
            if (client := self._client) is None:
                raise McpServerError(self.status.problem or "is being ended")
            return await self._called(client, tool, arguments)
        finally:
            self._n_calls -= 1

    async def _called(self, client: Client, tool: McpTool, arguments: dict[str, Any]) -> ToolResult:
        # Client.call_tool would check the result against the server's own schema. Regular expressions in
        # that schema can keep all threads of Python busy for years.
        params = mcp_types.CallToolRequestParams(name=tool.own_name, arguments=arguments)
        request, seconds = mcp_types.CallToolRequest(params=params), self._limits.call_seconds
        began = time.monotonic()
        try:
            async with asyncio.timeout(seconds):  # the SDK's timeout begins only when the request is written
                result = await client.session.send_request(request, mcp_types.CallToolResult, seconds)
        except TimeoutError:
            raise McpServerError(f"did not answer {tool.own_name} within {seconds:g} s") from None
        except MCPError as error:
            if time.monotonic() - began >= seconds:
                raise McpServerError(f"did not answer {tool.own_name} within {seconds:g} s") from None
            if error.code == mcp_types.CONNECTION_CLOSED and await self._is_ending(client):
                raise McpServerError(self.status.problem or "broke the connection") from None
            return ToolResult(self._bounded(error.message), is_error=True)
        except ValueError:
            raise McpServerError(f"sent no result of {tool.own_name} that MCP knows") from None
        return ToolResult(self._bounded(_text_of(result)), is_error=bool(result.is_error))

    async def _is_ending(self, client: Client) -> bool:
        """Return whether the connection broke, and wait until `status` has the reason."""
        for _ in range(20):
            if self._client is not client:
                if self._task is not None:
                    await asyncio.wait({self._task}, timeout=4 * self._limits.stop_seconds)
                return True
            await asyncio.sleep(0.01)
        return False

    def _bounded(self, text: str) -> str:
        most = self._limits.result_chars
        if len(text) > most:
            text = f"{text[:most]}\n[cut: the first {most} of {len(text)} characters]"
        return escaped_text(text)

    # ---- the connection ----

    async def _run(self) -> None:
        """Connect, and stay until the connection ends."""
        kind = StdioTransport if self._server.url is None else HttpTransport
        transport = kind(self._server, self._limits)
        problem = ""
        try:
            await self._session(transport)
            problem = "ended"
        except Exception as error:
            problem = _said(error, self._limits.start_seconds)
        finally:
            self._client = None
            problem = transport.fault or problem
            self.status = replace(self.status, state="failed", problem=problem or "was ended")
            if problem and self.status.problem != self._logged:
                _log.warning("the MCP server %s %s", self._server.name, self.status.problem)
                self._logged = self.status.problem
            self._settled.set()

    async def _session(self, transport: StdioTransport | HttpTransport) -> None:
        limits = self._limits
        async with AsyncExitStack() as stack:
            client = Client(
                transport,
                read_timeout_seconds=limits.start_seconds,
                client_info=mcp_types.Implementation(name="hotset", version=version("hotset")),
                message_handler=self._heard,
                cache=None,
            )
            async with asyncio.timeout(limits.start_seconds):
                await stack.enter_async_context(client)
                await self._list(client)
            self._client = client
            self._settled.set()
            ended = asyncio.ensure_future(transport.ended.wait())
            try:
                await self._stay(client, ended)
            finally:
                self._client = None
                ended.cancel()

    async def _stay(self, client: Client, ended: asyncio.Future[Any]) -> None:
        """Stay until the connection ends, and list the tools again if the server reports a change."""
        while not ended.done():
            changed = asyncio.ensure_future(self._changed.wait())
            try:
                await asyncio.wait({ended, changed}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                changed.cancel()
            if not ended.done():
                await asyncio.sleep(_SETTLE_SECONDS)
                self._changed.clear()
                async with asyncio.timeout(self._limits.start_seconds):
                    await self._list(client)

    async def _heard(self, message: Any) -> None:
        if isinstance(message, mcp_types.ToolListChangedNotification):
            self._changed.set()

    async def _list(self, client: Client) -> None:
        found: list[mcp_types.Tool] = []
        cursor = None
        for _ in range(_PAGES):
            page = await client.list_tools(cursor=cursor)
            found += page.tools
            cursor = page.next_cursor
            if cursor is None or len(found) > self._limits.tools:
                break
        tools, left_out = self._taken(found)
        more = "" if cursor is None else f"has more than {len(found)} tools; "
        self.status = ServerStatus(self._server.name, "ready", f"{more}{left_out}".removesuffix("; "), tools)

    def _taken(self, found: Iterable[mcp_types.Tool]) -> tuple[tuple[McpTool, ...], str]:
        """Return the tools that a model can use, and a note on the others."""
        limits, taken, n_bytes = self._limits, dict[str, McpTool](), 0
        left_out: list[str] = []
        for tool in found:
            name = self._server.prefix + re.sub(r"[./]", "_", tool.name)
            schema = _dumped(tool.input_schema)
            description = escaped_text((tool.description or "")[: limits.description_chars])
            n_bytes += len(schema) + len(description)
            if (
                not _TOOL_NAME.fullmatch(tool.name)
                or name in taken
                or len(taken) == limits.tools
                or n_bytes > limits.listing_bytes
                or not 0 < len(schema) <= limits.schema_bytes
                or _nesting(tool.input_schema) > limits.schema_nesting
            ):
                left_out.append(tool.name)
                continue
            said = (self._server.identity, tool.name, tool.description, schema)
            digest = hashlib.sha256(repr(said).encode("utf-8", "backslashreplace")).hexdigest()
            taken[name] = McpTool(name, tool.name, description, tool.input_schema, digest)
        if not left_out:
            return tuple(taken.values()), ""
        names = clause(", ".join(left_out[:4]) + (" and others" if len(left_out) > 4 else ""))
        return tuple(taken.values()), (
            f"has tools that are left out, for their names, their schemas or their number ({len(left_out)}): "
            f"{names}"
        )


def _dumped(schema: Mapping[str, Any]) -> str:
    """Return a schema as JSON; "" if it has numbers that JSON does not have, such as NaN."""
    try:
        return json.dumps(schema, allow_nan=False)
    except ValueError:
        return ""


def _nesting(value: Any) -> int:
    """Return the levels of lists and objects in a value from JSON."""
    levels, level = 0, [value]
    while level:
        inner = [one for one in level if isinstance(one, dict | list)]
        level = [part for one in inner for part in (one.values() if isinstance(one, dict) else one)]
        levels += bool(inner)
    return levels


def _text_of(result: mcp_types.CallToolResult) -> str:
    """Return a result as text for a model. Other content is replaced by its type."""
    parts = []
    for block in result.content:
        match block:
            case mcp_types.TextContent():
                parts.append(block.text)
            case mcp_types.EmbeddedResource(resource=mcp_types.TextResourceContents() as resource):
                parts.append(resource.text)
            case mcp_types.EmbeddedResource():
                parts.append(f"[a file that is not text: {clause(block.resource.uri)}]")
            case mcp_types.ResourceLink():
                parts.append(f"[a resource: {clause(block.uri)}]")
            case _:
                parts.append(f"[{block.type} ({clause(block.mime_type)}), which is not shown]")
    if not parts and result.structured_content is not None:
        parts.append(json.dumps(result.structured_content, ensure_ascii=False))
    return "\n".join(parts)


def _said(error: BaseException, seconds: float) -> str:
    """Return an error as words that follow the server's name. seconds: the limit that timed out."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, McpServerError):
        return str(error)
    if isinstance(error, TimeoutError):
        return f"did not answer within {seconds:g} s"
    if isinstance(error, httpx2.TimeoutException):
        return "did not answer in time"
    if isinstance(error, MCPError):
        return f"refuses: {clause(error.message)}"
    return f"cannot be reached ({clause(str(error) or type(error).__name__)})"
