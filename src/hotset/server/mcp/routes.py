"""Routes of the page for MCP servers: list their tools, restart a server, call a tool.

A tool may do whatever its server may, so only clients that may manage models can call one. The operator's
file is the only source of the programs that run. The page asks the user before each call.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from pydantic import Field

from hotset.escaping import clause
from hotset.server.body import BodyRoute
from hotset.server.errors import RequestError
from hotset.server.manage import check_allowed
from hotset.server.mcp.file import McpServer
from hotset.server.mcp.limits import McpServerError
from hotset.server.replies import JsonReply
from hotset.server.rows import Body
from hotset.server.shapes import McpCallReply, McpServerReply, McpServersReply, McpToolReply
from hotset.server.streams import while_connected
from hotset.server.tool_fields import ToolName

if TYPE_CHECKING:
    from hotset.server.mcp.clients import McpClients
    from hotset.server.mcp.connection import ServerStatus


def opened(servers: Sequence[McpServer]) -> McpClients | None:
    """Return the clients of MCP servers, which begin to connect; None without servers."""
    if not servers:
        return None
    from hotset.server.mcp.clients import McpClients  # the SDK is an extra, and takes a second

    clients = McpClients(servers)
    clients.start()
    return clients


def check_caller(http: Request) -> None:
    """Raise RequestError (403) if a client may not call tools; the rule is that for managing models."""
    check_allowed(http, "tools are called", "call tools")


router = APIRouter(route_class=BodyRoute, dependencies=[Depends(check_caller)])


class RestartBody(Body):
    server: Annotated[str, Field(max_length=100)]


class CallBody(Body):
    """A call. digest: the listed digest of the tool; the call fails if it has changed. None: no check."""

    name: ToolName
    arguments: dict[str, Any] = Field(default={})
    digest: Annotated[str, Field(max_length=64)] | None = None


@router.get("/mcp/servers", responses={200: {"model": McpServersReply}})
async def servers(http: Request) -> Response:
    """Return the MCP servers of --mcp, and their tools."""
    clients: McpClients | None = http.app.state.mcp_clients
    statuses = [] if clients is None else clients.statuses
    return JsonReply(McpServersReply.written(servers=[_entry(status) for status in statuses]))


@router.post("/mcp/restart", responses={200: {"model": McpServersReply}})
async def restart(body: RestartBody, http: Request) -> Response:
    """Connect to a server again, and do not wait for it. A process is ended and started again."""
    clients: McpClients | None = http.app.state.mcp_clients
    if clients is None or not clients.has(body.server):
        raise RequestError(
            f"there is no MCP server {clause(repr(body.server))}", 404, param="server", code="not_found"
        )
    await while_connected(http, clients.restart(body.server))
    return await servers(http)


@router.post("/mcp/call", responses={200: {"model": McpCallReply}})
async def call(body: CallBody, http: Request) -> Response:
    """Call a tool, and wait for its result. A client that disconnects cancels the call."""
    clients: McpClients | None = http.app.state.mcp_clients
    found = None if clients is None else clients.find(body.name)
    if clients is None or found is None:
        raise RequestError(f"there is no tool {clause(repr(body.name))}", 404, param="name", code="not_found")
    server, tool = found
    if body.digest not in (None, tool.digest):
        raise RequestError(
            f"the tool {body.name!r} has changed: look at it again under Tools, and ask again",
            409,
            param="digest",
            code="tool_changed",
        )
    try:
        json.dumps(body.arguments, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RequestError(
            "the arguments have half of a surrogate pair, which is not a character; leave it out",
            param="arguments",
        ) from None
    try:
        result = await while_connected(http, clients.call(server, tool, body.arguments))
    except McpServerError as error:
        raise RequestError(f"the MCP server {server!r} {error}", 502, code="mcp_server_failed") from None
    return JsonReply(McpCallReply.written(content=result.text, is_error=result.is_error))


def _entry(status: ServerStatus) -> dict[str, Any]:
    tools = [
        McpToolReply.written(
            name=one.name,
            tool=one.own_name,
            description=one.description,
            parameters=dict(one.parameters),
            digest=one.digest,
        )
        for one in status.tools
    ]
    return McpServerReply.written(name=status.name, state=status.state, problem=status.problem, tools=tools)
