"""One line per request: client, route, model, status and cost. Texts of requests and answers are left out.

    {"time": "2026-11-26T07:30:00.123Z", "id": "3f0c…", "client": "127.0.0.1", "method": "POST",
     "path": "/v1/chat/completions", "status": 200, "seconds": 1.204, "model": "smollm2-135m",
     "prompt_tokens": 31, "cached_tokens": 0, "completion_tokens": 64, "reasons": ["stop"],
     "queue_seconds": 0.002, "first_token_seconds": 0.041}

In text form each value follows its name. Fields after `seconds` are present if they apply. The short form
is uvicorn's line with the cost of an answer; `hotset serve` writes it to stderr by default:

    INFO:     127.0.0.1 - "POST /v1/chat/completions HTTP/1.1" 200 OK - smollm2-135m, 31 + 64 tokens, 1.20 s

A thread writes the lines, so a slow disk or terminal delays no client. Traces (tracing.py) have the same
figures.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import re
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hotset.errors import InvalidRequestError
from hotset.escaping import escaped
from hotset.files import check_output
from hotset.server.answers import Answer
from hotset.server.streams import ANSWERS, API_KEY, METHOD, SERVICE
from hotset.server.vectors import Vectors

log = logging.getLogger("hotset.server")

MAX_WAITING = 10_000  # lines that wait to be written; further ones are left out and counted
_MAX_PATH = 256  # characters
_ID = re.compile(r"[\w.-]{1,64}", re.ASCII)  # an X-Request-Id that a client may choose
_STDERR = "-"


@dataclass(frozen=True)
class Handled:
    """A request that has finished. fields: of its line. answers: the answers computed for it."""

    scope: Scope
    fields: Mapping[str, Any]
    answers: Sequence[Answer | Vectors]


class RequestSink(Protocol):
    """A receiver of finished requests: the request log, or traces."""

    def write(self, request: Handled) -> None:
        """Take a request without waiting."""

    def close(self) -> None:
        """Write the remaining requests, and close; may wait."""


class LogWriter:
    """A thread that appends lines to a file ("-": stderr). Raises InvalidRequestError.

    form: json, text or short; short leaves out requests for the page's files.
    """

    def __init__(self, path: str, form: str) -> None:
        self._form = form
        self._path = path
        self._file: BinaryIO | None = None if path == _STDERR else _opened(Path(path))
        self._lines: queue.Queue[str | None] = queue.Queue(MAX_WAITING)
        self._n_left_out = 0
        self._n_lost = 0  # lines lost since the last successful write
        self._thread = threading.Thread(target=self._run, name="hotset-request-log", daemon=True)
        self._thread.start()

    def write(self, request: Handled) -> None:
        if self._form == "short" and request.fields["path"].startswith("/page/"):
            return
        try:
            self._lines.put_nowait(self._line(request))
        except queue.Full:
            self._n_left_out += 1

    def close(self) -> None:
        self._lines.put(None)
        self._thread.join()
        if self._file is not None:
            self._file.close()

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._append(line + "\n")
            except (OSError, ValueError) as error:  # the disk is full, the terminal closed
                if not self._n_lost:
                    reason = getattr(error, "strerror", None) or error
                    log.warning("the request log %s cannot be written (%s)", self._path, reason)
                self._n_lost += 1
            else:
                self._tell_lost()
            if self._lines.empty():
                self._tell()
        self._tell_lost()
        self._tell()

    def _tell_lost(self) -> None:
        if self._n_lost:
            n, self._n_lost = self._n_lost, 0
            log.warning("%d lines of the request log were lost", n)

    def _append(self, line: str) -> None:
        """Write a line whole or not at all."""
        if self._file is None:
            print(line, end="", file=sys.stderr, flush=True)
            return
        end = self._file.seek(0, os.SEEK_END)
        left = memoryview(line.encode(errors="backslashreplace"))
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            with suppress(OSError):  # a device cannot be truncated
                self._file.truncate(end)
            raise

    def _line(self, request: Handled) -> str:
        fields = request.fields
        if self._form == "short":
            return _short(fields, request.scope.get("http_version", "1.1"))
        if self._form == "json":
            return json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
        shown = {name: ",".join(map(str, of)) if isinstance(of, list) else of for name, of in fields.items()}
        return " ".join(f"{name}={json.dumps(of) if ' ' in str(of) else of}" for name, of in shown.items())

    def _tell(self) -> None:
        if self._n_left_out:
            n, self._n_left_out = self._n_left_out, 0
            log.warning("%d lines of the request log were left out: they came too fast", n)


def _short(fields: Mapping[str, Any], version: str) -> str:
    status = fields["status"]
    phrase = next((one.phrase for one in HTTPStatus if one == status), "Client Closed Request")
    line = (
        f'INFO:     {fields["client"] or "local"} - "{fields["method"]} {fields["path"]} HTTP/{version}" '
        f"{status} {phrase}"
    )
    if "prompt_tokens" not in fields:
        return line
    tokens = " + ".join(
        str(fields[name]) for name in ("prompt_tokens", "completion_tokens") if name in fields
    )
    return f"{line} - {fields.get('model', '')}, {tokens} tokens, {fields['seconds']:.2f} s"


class RequestLog:
    """Middleware that gives finished requests to sinks, and replies an X-Request-Id."""

    def __init__(self, app: ASGIApp, sinks: Sequence[RequestSink]) -> None:
        self._app, self._sinks = app, sinks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, arrived = time.perf_counter(), datetime.now(UTC)
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _ID.fullmatch(given) else uuid.uuid4().hex
        answers: list[Answer | Vectors] = []
        scope[ANSWERS] = answers
        status = 0

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            client = scope.get("client")
            fields: dict[str, Any] = {
                "time": arrived.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
                "id": request_id,
                "client": scope.get(API_KEY) or (client[0] if client else None),
                "method": scope.get(METHOD) or scope["method"],
                "path": escaped(scope["path"], _MAX_PATH),
                "status": status or 499,  # the client left before there was a reply
                "seconds": round(time.perf_counter() - began, 4),
            }
            if (service := scope.get(SERVICE)) is not None:
                fields["model"] = service.name
            for answer in answers:
                fields |= _cost(answer)
            for sink in self._sinks:
                sink.write(Handled(scope, fields, answers))


def _cost(answer: Answer | Vectors) -> dict[str, Any]:
    """Return the fields with the cost of an answer."""
    if isinstance(answer, Vectors):
        return {"prompt_tokens": answer.total_tokens, "reasons": sorted(set(answer.reasons))}
    usage = answer.usage
    found: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
        "reasons": sorted(set(answer.reasons)),
    }
    for name, moment in (("queue_seconds", "started"), ("first_token_seconds", "first_token")):
        reached = [at for one in answer.generations if (at := getattr(one.sequence, moment))]
        if reached:
            found[name] = round(min(reached) - answer.asked, 4)
    return found


def _opened(path: Path) -> BinaryIO:
    check_output(path)
    try:
        path.touch(mode=0o600)  # only this user may read a new file: it has the addresses of clients
        # Without a buffer, close() has nothing left to write and cannot fail.
        return path.open("ab", buffering=0)
    except OSError as error:
        raise InvalidRequestError(f"the request log {path} cannot be written ({error.strerror})") from None
