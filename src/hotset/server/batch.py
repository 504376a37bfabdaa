"""A file of requests, answered by the routes of the server without a socket: OpenAI's batch format.

Each answer is appended as a line when it is there, in one write. What a killed run leaves is whole lines, and
at most a torn one at the end, which the next run takes away before it goes on with what is missing.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from fastapi import FastAPI
from starlette.types import Message

from hotset.errors import InvalidRequestError
from hotset.escaping import clause
from hotset.files import appending, check_target, open_regular
from hotset.parameters import shown
from hotset.reporter import Reporter
from hotset.server.app import create_app
from hotset.server.errors import RequestError, problem_of, response_of
from hotset.server.replies import dumped
from hotset.server.security import check_nesting
from hotset.server.service import Service

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
AHEAD = 2  # requests on their way for each answer that is computed: there is always a next one
_MAX_LINE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Request:
    """Where a request stands in its file."""

    custom_id: str
    url: str
    start: int
    size: int


class Batch:
    """The requests of a file, checked, and the answers that are there of an earlier run.

    Raises InvalidRequestError for a line that is no request, a custom_id that is there twice, and answers
    that are not of these requests.
    """

    def __init__(self, requests: Path, answers: Path, max_nesting: int) -> None:
        self._path, self._answers, self._max_nesting = requests, answers, max_nesting
        check_target(answers, [requests])
        self.requests = {request.custom_id: request for request in self._read()}
        self._resume()

    @property
    def n_left(self) -> int:
        return len(self.requests) - self.n_done

    async def run(self, service: Service, progress: Reporter) -> None:
        """Answers what is missing. Cancelled, it leaves whole lines."""
        app = create_app(service)
        async with app.router.lifespan_context(app):
            await service.loaded()
            n_workers = AHEAD * service.model.engine.max_sequences
            with open_regular(self._path) as source, appending(self._answers) as target:
                _hold(target, self._answers)
                self._resume()  # another run may have gone on while the model was loaded
                left = iter([one for one in self.requests.values() if one.custom_id not in self._done])

                async def work() -> None:
                    for request in left:
                        line = await self._answered(app, source, request)
                        target.write(line)
                        target.flush()
                        self.n_done += 1
                        progress.advance("requests", self.n_done, len(self.requests))

                async with asyncio.TaskGroup() as group:
                    for _ in range(min(n_workers, self.n_left)):
                        group.create_task(work())

    async def _answered(self, app: FastAPI, source: BinaryIO, request: Request) -> bytes:
        """The line of one answer."""
        source.seek(request.start)
        body = json.loads(source.read(request.size))["body"]
        line, status = await answer_line(app, request.custom_id, request.url, body)
        self.n_failed += status != 200
        return line

    # ---- files ----

    def _read(self) -> Iterator[Request]:
        known: set[str] = set()
        with self._opened() as file:
            start = 0
            for number, line in enumerate(_lines(file, self._path), 1):
                if line.strip():
                    request = self._request(line, f"{self._path}, line {number}", start)
                    if request.custom_id in known:
                        raise InvalidRequestError(
                            f"{self._path}, line {number}, has the custom_id of a line before it, "
                            f"{clause(shown(request.custom_id))}; give each request its own"
                        )
                    known.add(request.custom_id)
                    yield request
                start += len(line)

    def _opened(self) -> BinaryIO:
        try:
            return open_regular(self._path)
        except FileNotFoundError:
            raise InvalidRequestError(f"{self._path} is not there; name a file of requests") from None

    def _request(self, line: bytes, where: str, start: int) -> Request:
        try:
            check_nesting(line, self._max_nesting)
            given = json.loads(line)
        except (ValueError, RecursionError, RequestError) as error:
            raise InvalidRequestError(f"{where}, is not JSON ({clause(error)})") from None
        example = '{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {...}}'
        if not isinstance(given, dict) or not isinstance(given.get("body"), dict):
            raise InvalidRequestError(f"{where}, is no request such as {example}")
        custom_id, method, url = given.get("custom_id"), given.get("method", "POST"), given.get("url")
        if not isinstance(custom_id, str) or not custom_id:
            raise InvalidRequestError(f"{where}, has no custom_id, a text by which its answer is found")
        if method != "POST" or url not in URLS:
            raise InvalidRequestError(
                f"{where}, asks for {clause(shown(method))} {clause(shown(url))}; a batch has POST and "
                + " or ".join(URLS)
            )
        return Request(custom_id, url, start, len(line))

    def _resume(self) -> None:
        """Counts the answers that are there, and takes a torn line away."""
        self.n_done = 0
        self.n_failed = 0  # among those: answers with a status other than 200
        self._done: set[str] = set()
        try:
            file = open_regular(self._answers)
        except FileNotFoundError:
            return
        end = 0
        with file:
            for number, line in enumerate(_lines(file, self._answers), 1):
                if not line.endswith(b"\n"):
                    break
                end += len(line)
                self._count(line, number)
            torn = file.seek(0, 2) > end
        if torn:
            with self._answers.open("r+b") as rest:
                rest.truncate(end)

    def _count(self, line: bytes, number: int) -> None:
        try:
            answer = json.loads(line)
            custom_id, status = answer["custom_id"], answer["response"]["status_code"]
        except (ValueError, RecursionError, TypeError, KeyError):
            custom_id, status = None, 0
        if custom_id not in self.requests or custom_id in self._done:
            raise InvalidRequestError(
                f"{self._answers}, line {number}, answers no request of {self._path}; write to another file"
            )
        self._done.add(custom_id)
        self.n_done += 1
        self.n_failed += status != 200


async def answer_line(app: FastAPI, custom_id: str, url: str, body: Any) -> tuple[bytes, int]:
    """What an application answers to a request of a batch: its line, and the status."""
    if body.get("stream"):
        refused = RequestError("stream is not for a batch; leave it out", param="stream")
        status, content = 400, bytes(response_of(problem_of(refused), url).body)
    else:
        status, content = await _asked(app, url, dumped(body))
    request_id = uuid.uuid4().hex
    response = {"status_code": status, "request_id": request_id, "body": json.loads(content)}
    line = {
        "id": f"batch_req_{request_id}",
        "custom_id": custom_id,
        "response": response,
        "error": None,
    }
    return dumped(line) + b"\n", status


def _hold(target: BinaryIO, path: Path) -> None:
    """Makes this run the only one that writes the answers, until they are closed (POSIX)."""
    if fcntl is None:
        return
    try:
        fcntl.flock(target.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InvalidRequestError(f"another process is writing {path}; wait until it has ended") from None
    except OSError:  # a file system without locks
        pass


def _lines(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """The lines of a file, with their ends."""
    while line := file.readline(_MAX_LINE_BYTES + 1):
        if len(line) > _MAX_LINE_BYTES:
            raise InvalidRequestError(f"{path} has a line of more than {_MAX_LINE_BYTES} bytes")
        yield line


async def _asked(app: FastAPI, url: str, body: bytes) -> tuple[int, bytes]:
    """Status and body of what the application answers, as a server of HTTP would ask it."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    status, parts = 500, []

    async def receive() -> Message:
        if not messages:  # whoever asks does not go away
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
        "headers": [(b"content-type", b"application/json")],
        "client": None,
        "server": None,
    }
    await app(scope, receive, send)
    return status, b"".join(parts)
