"""A file of requests, answered by the routes of the server without a socket: OpenAI's batch format.

Each answer is appended as a line when it is ready. A line that is not a request gets an error record instead
of an answer. A killed run leaves whole lines, and at most a torn one at the end. The next run locks the file,
removes the torn line and writes the missing answers.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from fastapi import FastAPI
from starlette.types import Message

from hotset.errors import HotsetError, InvalidRequestError
from hotset.escaping import clause
from hotset.files import check_output, lock, missing, open_regular
from hotset.parameters import shown
from hotset.reporter import Reporter
from hotset.server.app import create_app
from hotset.server.errors import RequestError, problem_of, response_of
from hotset.server.json_limits import check_json
from hotset.server.replies import dumped_exactly
from hotset.server.service import Service
from hotset.server.settings import ServerSettings

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/rerank")
AHEAD = 2  # requests in flight for each answer that is computed, so that the next one is ready
MAX_LINE_BYTES = 64 << 20  # of a request
SETTINGS = ServerSettings(max_queue=1 << 30, max_held_bytes=1 << 50)
"""Of a service that only a batch uses: the batch itself limits the requests in flight."""
_MAX_ANSWER_BYTES = 1 << 30  # of a line that is read back
_BOM = b"\xef\xbb\xbf"
_BLANK = b" \t\r\n"  # white space in JSON
_EXAMPLE = '{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {...}}'
_LINE_START = b'{"id":"batch_req_'  # of every line that this module writes

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Request:
    """The place of a request in its file: its line, from 1, and its bytes."""

    number: int
    custom_id: str
    url: str
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class Rejected:
    """A line that is not a request. custom_id: None if it has none of its own. code: for programs."""

    number: int
    custom_id: str | None
    code: str
    message: str


class RequestFile:
    """The checked lines of a file of requests: requests by custom_id, the others by number.

    Open until `close`.

    max_nesting: of the JSON of a line. Raises InvalidRequestError for a missing file, and for a file that
    has lines but no request.
    """

    def __init__(self, path: Path, max_nesting: int) -> None:
        self.path, self._max_nesting = path, max_nesting
        self.requests: dict[str, Request] = {}
        self.rejected: dict[int, Rejected] = {}
        try:
            self._file = open_regular(path)
        except FileNotFoundError:
            raise InvalidRequestError(missing(path, remedy="name a file of requests")) from None
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self.requests) + len(self.rejected)

    def line(self, request: Request) -> bytes:
        """Return the JSON of a request on one line. Raises InvalidRequestError if the file was changed."""
        return self._again(request)[0].strip(_BLANK)

    def body(self, request: Request) -> dict[str, Any]:
        """Return the body of a request. Raises InvalidRequestError if the file was changed."""
        body: dict[str, Any] = self._again(request)[1]["body"]
        return body

    def _again(self, request: Request) -> tuple[bytes, dict[str, Any]]:
        self._file.seek(request.start)
        line = self._file.read(request.size)
        with suppress(_RejectedError):
            given = _parsed(line, self._max_nesting)
            if given["custom_id"] == request.custom_id:
                return line, given
        raise InvalidRequestError(f"{self.path} was changed while it was in use; run the same command again")

    def reject(self, request: Request, code: str, message: str) -> None:
        """Replace a request, valid by itself, by an error record."""
        del self.requests[request.custom_id]
        self.rejected[request.number] = Rejected(request.number, request.custom_id, code, message)

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        self._file.close()

    def __enter__(self) -> RequestFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> None:
        for number, (start, size, line) in enumerate(_lines(self._file, MAX_LINE_BYTES), 1):
            if number == 1 and line.startswith(_BOM):
                start, size, line = start + len(_BOM), size - len(_BOM), line[len(_BOM) :]
            if not line.strip(_BLANK):
                continue
            try:
                if size > MAX_LINE_BYTES:
                    raise _RejectedError("line_too_long", f"it has more than {MAX_LINE_BYTES} bytes")
                given = _parsed(line, self._max_nesting)
                custom_id = given["custom_id"]
                if earlier := self.requests.get(custom_id):
                    raise _RejectedError(
                        "duplicate_custom_id",
                        f"it has the custom_id of line {earlier.number}, {clause(shown(custom_id))}; "
                        "give each request its own",
                    )
            except _RejectedError as error:
                self.rejected[number] = Rejected(number, error.custom_id, error.code, str(error))
            else:
                self.requests[custom_id] = Request(number, custom_id, given["url"], start, size)
        if self.rejected and not self.requests:
            first = next(iter(self.rejected.values()))
            raise InvalidRequestError(
                f"{self.path} has no request: line {first.number} cannot be used, since {first.message}"
            )


class _RejectedError(Exception):
    """The reason that a line is not a request."""

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code, self.custom_id = code, custom_id


def _parsed(line: bytes, max_nesting: int) -> dict[str, Any]:
    """Return a request with a custom_id, a url and a body. Raises _RejectedError."""
    try:
        check_json(line, max_nesting)
        # Decode first: given bytes, json would guess the encoding and accept surrogates that UTF-8 forbids.
        given = json.loads(line.decode(), parse_constant=_not_json, parse_float=_finite)
    except (ValueError, RecursionError, RequestError) as error:
        raise _RejectedError("invalid_json_line", f"it is not JSON ({clause(error)})") from None
    found = given.get("custom_id") if isinstance(given, dict) else None
    custom_id = found if isinstance(found, str) and found else None
    if not isinstance(given, dict) or not isinstance(given.get("body"), dict):
        raise _RejectedError("invalid_request", f"it is not a request such as {_EXAMPLE}", custom_id)
    if custom_id is None:
        raise _RejectedError("invalid_request", "it has no custom_id, a text by which its answer is found")
    method, url = given.get("method", "POST"), given.get("url")
    if method != "POST" or url not in URLS:
        message = f"it asks for {clause(shown(method))} {clause(shown(url))}; a batch has POST and "
        raise _RejectedError("invalid_request", message + " or ".join(URLS), custom_id)
    return given


def _not_json(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{clause(text)} is larger than any number that can be computed with")
    return number


class BatchRun:
    """The requests of a file, and a file with their answers.

    Only this run writes the answers until `close` (POSIX).

    Error records are written at once. Raises the errors of RequestFile. Raises InvalidRequestError for
    answers to other requests, or if another process writes them. Raises HotsetError if the file cannot be
    written.
    """

    def __init__(self, requests: Path, answers: Path, max_nesting: int) -> None:
        self._path = answers
        check_output(answers, [requests])
        with ExitStack() as undone:
            self.file = undone.enter_context(RequestFile(requests, max_nesting))
            self._target = undone.enter_context(_opened(answers))
            if not lock(self._target, wait=False):  # this run is the only one that writes the answers
                raise InvalidRequestError(f"another process is writing {answers}; wait until it has ended")
            self._resume()
            self._undone = undone.pop_all()

    @property
    def n_done(self) -> int:
        return len(self._done) + len(self._recorded)

    @property
    def n_left(self) -> int:
        return len(self.file) - self.n_done

    async def run(self, service: Service, progress: Reporter) -> None:
        """Answer the requests that have no answer yet. Only whole lines are written, however it ends."""
        app = create_app(service)
        async with app.router.lifespan_context(app):
            await service.loaded()
            n_workers = min(AHEAD * service.model.engine.max_sequences, self.n_left)
            left = iter([one for one in self.file.requests.values() if one.custom_id not in self._done])

            progress.advance("requests", self.n_done, len(self.file), "requests")

            async def work() -> None:
                for request in left:
                    body = self.file.body(request)
                    line, status = await answer_line(app, request.custom_id, request.url, body)
                    self._append(line)
                    self._done.add(request.custom_id)
                    self.n_failed += status != 200
                    progress.advance("requests", self.n_done, len(self.file), "requests")

            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(n_workers):
                        group.create_task(work())
            except BaseExceptionGroup as failed:  # the first error ended the other workers
                raise failed.exceptions[0] from None

    def close(self) -> None:
        """Let other runs write the answers. A second call does nothing."""
        self._undone.close()

    def __enter__(self) -> BatchRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- answers ----

    def _resume(self) -> None:
        """Count the existing answers, remove a torn line, and write missing error records."""
        self.n_failed = 0  # among those done: error records, and answers with a status other than 200
        self._done: set[str] = set()
        self._recorded: set[int] = set()  # lines that have their error record
        end = 0
        with os.fdopen(os.dup(self._target.fileno()), "rb") as file:
            file.seek(0)
            for number, (start, size, line) in enumerate(_lines(file, _MAX_ANSWER_BYTES), 1):
                if size > _MAX_ANSWER_BYTES or not (line.endswith(b"\n") or _may_be_torn(line)):
                    raise self._foreign(number)
                if line.endswith(b"\n"):
                    self._count(line, number)
                    end = start + size
        if os.fstat(self._target.fileno()).st_size > end:
            self._target.truncate(end)
        for number, rejected in self.file.rejected.items():
            if number not in self._recorded:
                self._append(error_line(rejected))
                self._recorded.add(number)
                self.n_failed += 1

    def _count(self, line: bytes, number: int) -> None:
        try:
            answer = json.loads(line)
            if answer["response"] is None:
                of, status = answer["error"]["line"], 0
                is_new = type(of) is int and of in self.file.rejected and of not in self._recorded
            else:
                of, status = answer["custom_id"], answer["response"]["status_code"]
                is_new = isinstance(of, str) and of in self.file.requests and of not in self._done
        except (ValueError, RecursionError, TypeError, KeyError):
            is_new = False
        if not is_new:
            raise self._foreign(number)
        (self._recorded if isinstance(of, int) else self._done).add(of)
        self.n_failed += status != 200

    def _foreign(self, number: int) -> InvalidRequestError:
        return InvalidRequestError(
            f"{self._path}, line {number}, answers no request of {self.file.path}; write to another file"
        )

    def _append(self, line: bytes) -> None:
        """Write a line whole or not at all. Raises HotsetError if the disk has no room."""
        end = os.fstat(self._target.fileno()).st_size
        left = memoryview(line)
        try:
            while left:
                left = left[self._target.write(left) :]
        except OSError as error:
            with suppress(OSError):  # the next run removes the torn line
                self._target.truncate(end)
            raise HotsetError(
                f"{self._path} cannot be written ({error.strerror}); it has {self.n_done} of "
                f"{len(self.file)} answers, and the same command goes on once there is room"
            ) from None


async def answer_line(app: FastAPI, custom_id: str, url: str, body: dict[str, Any]) -> tuple[bytes, int]:
    """Return an application's answer to a request of a batch as a line, and the HTTP status."""
    if body.get("stream"):
        refused = RequestError("stream is not for a batch; leave it out", param="stream")
        status, content = 400, bytes(response_of(problem_of(refused), url).body)
    else:
        if body.get("model") is None:  # the batch has one, and its requests need not name it
            body = body | {"model": app.state.host.name}
        # A lone surrogate arrives unchanged, and the application checks it as it would over HTTP.
        status, content = await _asked(app, url, dumped_exactly(body))
    request_id = uuid.uuid4().hex
    response = {"status_code": status, "request_id": request_id, "body": json.loads(content)}
    return _record(request_id, custom_id, response, None), status


def error_line(rejected: Rejected) -> bytes:
    """Return the error record of a line that is not a request."""
    error = {"code": rejected.code, "message": f"line {rejected.number}: {rejected.message}"}
    return _record(uuid.uuid4().hex, rejected.custom_id, None, {**error, "line": rejected.number})


def _record(
    request_id: str, custom_id: str | None, response: dict[str, Any] | None, error: dict[str, Any] | None
) -> bytes:
    line = {"id": f"batch_req_{request_id}", "custom_id": custom_id, "response": response, "error": error}
    return dumped_exactly(line) + b"\n"


# ---- files ----


def _opened(path: Path) -> BinaryIO:
    """Open the answers for reading and appending, without a buffer.

    So a write has reached the file, or it raises.
    """
    try:
        return path.open("a+b", buffering=0)
    except OSError as error:
        raise HotsetError(f"{path} cannot be written ({error.strerror}); choose another folder.") from None


def _lines(file: BinaryIO, most: int) -> Iterator[tuple[int, int, bytes]]:
    """Yield start, size and content of each line with its end. Content ends after `most` + 1 bytes."""
    start = 0
    while line := file.readline(most + 1):
        size, rest = len(line), line
        while not rest.endswith(b"\n") and (rest := file.readline(1 << 20)):
            size += len(rest)
        yield start, size, line
        start += size


def _may_be_torn(rest: bytes) -> bool:
    """Return whether a last line without its end begins like a line of this module.

    A power cut may leave zeros.
    """
    rest = rest.rstrip(b"\0")
    return rest.startswith(_LINE_START) or _LINE_START.startswith(rest)


async def _asked(app: FastAPI, url: str, body: bytes) -> tuple[int, bytes]:
    """Return status and body of the application's reply to a POST."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    status, parts = 500, []

    async def receive() -> Message:
        if not messages:  # the client does not disconnect
            await asyncio.Event().wait()
        return messages.pop()

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            parts.append(message.get("body", b""))

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": url,
        "raw_path": url.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"user-agent", b"batch")],
        "client": None,
        "server": None,
    }
    try:
        await app(scope, receive, send)
    except Exception as error:  # the application has replied with status 500 and raises the error for a log
        if not parts:
            raise
        _log.warning("a request of the batch failed", exc_info=error)
    return status, b"".join(parts)
