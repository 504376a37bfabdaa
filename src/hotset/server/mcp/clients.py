"""The MCP servers of one hotset server, in an event loop of their own.

A separate thread reads their messages, so that a flood of messages delays no token.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from hotset.server.mcp.connection import Connection, McpTool, ServerStatus, ToolResult
from hotset.server.mcp.file import McpServer
from hotset.server.mcp.limits import Limits

_T = TypeVar("_T")


class McpClients:
    """The clients of all servers. `start` and `close` wait for the thread; other methods are for the loop."""

    def __init__(self, servers: Sequence[McpServer], limits: Limits | None = None) -> None:
        limits = limits or Limits()
        self._connections = {server.name: Connection(server, limits) for server in servers}
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve()), name="hotset-mcp", daemon=True
        )
        self._began = threading.Event()
        self._close_seconds = 4 * limits.stop_seconds

    def start(self) -> None:
        """Begin to connect, and do not wait for it."""
        for name in ("mcp", "client", "httpx2"):  # the SDK logs what servers send
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
        self._thread.start()
        self._began.wait()

    def close(self) -> None:
        """End all servers. A second call does nothing."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(self._close_seconds)

    @property
    def statuses(self) -> list[ServerStatus]:
        return [one.status for one in self._connections.values()]

    def find(self, name: str) -> tuple[str, McpTool] | None:
        """Return the server of a tool, and the tool; None if no tool has this name."""
        found = (
            (status.name, tool) for status in self.statuses for tool in status.tools if tool.name == name
        )
        return next(found, None)

    def has(self, server: str) -> bool:
        return server in self._connections

    async def call(self, server: str, tool: McpTool, arguments: dict[str, Any]) -> ToolResult:
        """Return the result of Connection.call. Cancelling this cancels the call."""
        return await self._there(self._connections[server].call(tool, arguments))

    async def restart(self, server: str) -> None:
        await self._there(self._connections[server].restart())

    async def _there(self, work: Coroutine[Any, Any, _T]) -> _T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._began.set()
        for one in self._connections.values():
            one.start()
        await self._stop.wait()
        await asyncio.gather(*(one.close() for one in self._connections.values()))
