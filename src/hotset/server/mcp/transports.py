"""Transports of messages to an MCP server and back: the SDK's, within limits.

A server's process leads a group of its own, which is ended as a whole. If hotset itself is killed
(`kill -9`), a shell that waits for the end of a pipe ends the group. On Windows nothing ends it: a server
only finds the end of its input.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any

import anyio
import httpx2
import psutil
from mcp.client.stdio import get_default_environment
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCError, JSONRPCRequest, JSONRPCResponse, jsonrpc_message_adapter

from hotset.escaping import clause
from hotset.server.mcp.file import McpServer
from hotset.server.mcp.limits import Limits, McpServerError, check_message, meter_of

_KEPT_STDERR = 4096  # bytes; the last line tells why a server ended
_LOOK_SECONDS = 0.01
_HEAD_BYTES = 1024  # added to the size of each reply or line, so that empty ones count
_EVENT_END = re.compile(rb"\n\r?\n|\r\r")
_MOST_OPEN = 64  # unanswered requests of a server
_GUARD = 'read -r _; kill -s TERM -- "-$0"; sleep 2; kill -s KILL -- "-$0"'

_OWN_GROUP: dict[str, Any] = {"start_new_session": True}
if sys.platform == "win32":
    _OWN_GROUP = {"creationflags": subprocess.CREATE_NO_WINDOW | subprocess.CREATE_NEW_PROCESS_GROUP}


class StdioTransport:
    """A server as a process. ended: set when it has ended; `fault` is then the reason."""

    def __init__(self, server: McpServer, limits: Limits) -> None:
        self.fault: str | None = None
        self.ended = asyncio.Event()
        self._server, self._limits = server, limits
        self._count = meter_of(limits)
        self._stderr = b""
        self._n_open = 0
        self._is_stopping = False

    async def __aenter__(self) -> Any:
        self._process = await self._started()
        self._guard = _guard(self._process.pid)
        self._received, received = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        sent, self._sent = anyio.create_memory_object_stream[SessionMessage](0)
        work = (self._read(), self._write(), self._keep_stderr())
        self._tasks = [asyncio.create_task(one) for one in work]
        return received, sent

    async def __aexit__(self, *_: object) -> None:
        try:
            await self._stop()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._received.close()
            self._sent.close()

    async def _started(self) -> asyncio.subprocess.Process:
        server = self._server
        env = get_default_environment() | dict(server.env)
        assert server.command is not None
        program = shutil.which(server.command, path=env.get("PATH"))
        if program is None:
            raise McpServerError(
                f"cannot be started: there is no program {clause(server.command)!r}; install it, "
                "or give its full path as `command`"
            )
        try:
            return await asyncio.create_subprocess_exec(
                program,
                *server.args,
                env=env,
                cwd=server.cwd,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                limit=self._limits.message_bytes,
                **_OWN_GROUP,
            )
        except OSError as error:
            why = error.strerror or type(error).__name__
            where = "" if server.cwd is None else f" in the folder {clause(str(server.cwd))!r}"
            raise McpServerError(f"cannot be started{where} ({clause(why)})") from None

    async def _read(self) -> None:
        assert self._process.stdout is not None
        fault = None
        try:
            while True:
                line = await self._process.stdout.readuntil(b"\n")
                self._count(len(line) + _HEAD_BYTES)
                await asyncio.sleep(0)  # lets other tasks run: reading a buffered line does not wait
                if not line.lstrip().startswith(b"{"):
                    continue  # a line that belongs on stderr
                check_message(line, self._limits)
                try:
                    message = jsonrpc_message_adapter.validate_json(line, by_name=False)
                except ValueError:
                    continue  # not a message of JSON-RPC
                self._n_open += isinstance(message, JSONRPCRequest)
                if self._n_open > _MOST_OPEN:
                    raise McpServerError(f"sent more than {_MOST_OPEN} requests at once and was ended")
                await self._received.send(SessionMessage(message))
        except asyncio.IncompleteReadError:
            if not await self._exits_within(self._limits.stop_seconds):
                fault = "closed its output"
        except asyncio.LimitOverrunError:
            fault = f"sent a message of more than {self._limits.message_bytes} bytes and was ended"
        except McpServerError as error:
            fault = str(error)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            return  # the transport is being ended
        self._end(fault or f"ended{self._last_words()}")

    def _end(self, fault: str) -> None:
        """Record why it ended, unless a reason is known or it is being stopped."""
        if self._is_stopping or self.ended.is_set():
            return
        self.fault = fault
        self._kill()
        self._received.close()
        self.ended.set()

    def _last_words(self) -> str:
        """Return the exit code and the last line of stderr, for a message."""
        lines = [line for line in self._stderr.decode("utf-8", "replace").splitlines() if line.strip()]
        code = self._process.returncode
        return f" (exit code {code})" + (f": {clause(lines[-1])}" if lines else "")

    async def _write(self) -> None:
        assert self._process.stdin is not None
        try:
            while True:
                message = (await self._sent.receive()).message
                self._n_open -= isinstance(message, JSONRPCResponse | JSONRPCError)
                line = message.model_dump_json(by_alias=True, exclude_unset=True)
                self._process.stdin.write(line.encode() + b"\n")
                async with asyncio.timeout(self._limits.write_seconds):
                    await self._process.stdin.drain()
        except TimeoutError:
            self._end("does not read its input and was ended")
        except (OSError, anyio.EndOfStream, anyio.ClosedResourceError):
            return  # it has ended

    async def _keep_stderr(self) -> None:
        assert self._process.stderr is not None
        try:
            while piece := await self._process.stderr.read(_KEPT_STDERR):
                self._count(len(piece))
                self._stderr = (self._stderr + piece)[-_KEPT_STDERR:]
                await asyncio.sleep(0)  # lets other tasks run
        except McpServerError as error:
            self._end(str(error))

    # ---- its end ----

    async def _stop(self) -> None:
        process, seconds, self._is_stopping = self._process, self._limits.stop_seconds, True
        assert process.stdin is not None
        try:
            process.stdin.close()
            if not await self._exits_within(seconds) and sys.platform != "win32":
                _signal_group(process.pid, signal.SIGTERM)
                await self._exits_within(seconds)
        finally:
            self._kill()
            await self._exits_within(seconds)
            process._transport.close()  # type: ignore[attr-defined]  # noqa: SLF001 # children may hold its pipes
            if self._guard is not None:
                assert self._guard.stdin is not None
                self._guard.kill()
                self._guard.wait()
                self._guard.stdin.close()

    async def _exits_within(self, seconds: float) -> bool:
        """Return whether it exits.

        `Process.wait` would also wait for other processes that hold its pipes.
        """
        for _ in range(max(1, round(seconds / _LOOK_SECONDS))):
            if self._process.returncode is not None:
                return True
            await asyncio.sleep(_LOOK_SECONDS)
        return False

    def _kill(self) -> None:
        """Kill the process, and those that it started and that are still in its group."""
        if sys.platform != "win32":
            _signal_group(self._process.pid, signal.SIGKILL)
            return
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self._process.pid)
            for one in (*process.children(recursive=True), process):
                with contextlib.suppress(psutil.Error):
                    one.kill()


def _signal_group(leader: int, which: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, which)


def _guard(leader: int) -> subprocess.Popen[bytes] | None:
    """Start a shell that ends a group of processes when this process has ended for any reason."""
    if sys.platform == "win32":
        return None
    return subprocess.Popen(
        ["/bin/sh", "-c", _GUARD, str(leader)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        **_OWN_GROUP,
    )


# ---- HTTP ----


class HttpTransport:
    """A server at an address. ended: set after a reply that is not accepted; `fault` is then the reason."""

    def __init__(self, server: McpServer, limits: Limits) -> None:
        self.fault: str | None = None
        self.ended = asyncio.Event()
        self._server, self._limits = server, limits
        self._count = meter_of(limits)

    async def __aenter__(self) -> Any:
        assert self._server.url is not None
        limits = self._limits
        client = httpx2.AsyncClient(
            headers={"accept-encoding": "identity", **self._server.headers},
            timeout=httpx2.Timeout(limits.start_seconds, read=limits.call_seconds),
            event_hooks={"response": [self._received]},
        )
        streams = streamable_http_client(
            self._server.url, http_client=client, max_sse_event_size=limits.message_bytes
        )
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(client)
            found = await stack.enter_async_context(streams)
            self._stack = stack.pop_all()
        return found

    async def __aexit__(self, *error: Any) -> None:
        await self._stack.__aexit__(*error)

    async def _received(self, response: httpx2.Response) -> None:
        with self._noting():
            self._count(_HEAD_BYTES)
            if (status := response.status_code) in (401, 403):
                raise McpServerError(f"refuses (status {status}): give it a key among its headers")
            if response.headers.get("content-encoding", "identity").lower() != "identity":
                raise McpServerError("sends compressed replies, although hotset requests uncompressed ones")
            if (response.charset_encoding or "utf-8").lower().replace("_", "-") not in ("utf-8", "utf8"):
                raise McpServerError("sends text that is not UTF-8")
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        has_events = response.headers.get("content-type", "").lower().startswith("text/event-stream")
        response.stream = _Body(response.stream, self._bounded(response.stream, has_events))

    async def _bounded(self, stream: httpx2.AsyncByteStream, has_events: bool) -> AsyncIterator[bytes]:
        """Yield the pieces of a reply: one message, or events that each end with a blank line.

        Each message is checked when it is complete, and passed on afterwards.
        """
        most, size, tail = self._limits.message_bytes, 0, b""
        held: list[bytes] = []
        async for piece in stream:
            seen = tail + piece
            ends = [found.end() for found in _EVENT_END.finditer(seen)] if has_events else []
            with self._noting():
                self._count(len(piece))
                if size + (ends[0] - len(tail) if ends else len(piece)) > most:
                    raise McpServerError(f"sent a message of more than {most} bytes")
            size = len(seen) - ends[-1] if ends else size + len(piece)
            tail = seen[-2:]
            held.append(piece)
            if ends:
                whole = b"".join(held)
                complete, held = whole[: len(whole) - size], [whole[len(whole) - size :]]
                with self._noting():
                    self._check_events(complete)
                yield complete
        rest = b"".join(held)
        with self._noting():
            if has_events:
                self._check_events(rest)
            else:
                check_message(rest, self._limits)
        yield rest

    def _check_events(self, events: bytes) -> None:
        data: list[bytes] = []
        for line in (*events.splitlines(), b""):
            if line.startswith(b"data:"):
                data.append(line.removeprefix(b"data:"))
            elif not line and data:
                check_message(b"\n".join(data), self._limits)
                data.clear()

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Keep the server's fault: the SDK gives fewer details of an error within a stream."""
        try:
            yield
        except McpServerError as error:
            self.fault = self.fault or str(error)
            self.ended.set()
            raise


class _Body(httpx2.AsyncByteStream):
    """The body of a reply, as `pieces`."""

    def __init__(self, stream: httpx2.AsyncByteStream, pieces: AsyncIterator[bytes]) -> None:
        self._stream, self._pieces = stream, pieces

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._pieces

    async def aclose(self) -> None:
        await self._stream.aclose()
