"""A model hub and a package index on 127.0.0.1, with the faults of real ones."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType


class FakeHub:
    """Serves repositories from memory.

    repositories: "owner/name" → path → bytes. corrupt: paths whose bytes differ from the listing. cut_after:
    path → bytes after which each reply breaks off (once per entry of the list). no_ranges: reply from the
    beginning to every request. gated: repositories whose files are refused. sizes, checksums: path → wrong
    values in the listing. details: "owner/name" → more data of its listing. answers: path, or "owner/name"
    for its listing → a function that replies instead, possibly with raw bytes. requests: (method path, Range
    header, Authorization header) of every request.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.corrupt: set[str] = set()
        self.cut_after: dict[str, list[int]] = {}
        self.no_ranges = False
        self.gated: set[str] = set()
        self.sizes: dict[str, object] = {}
        self.checksums: dict[str, object] = {}
        self.details: dict[str, dict[str, object]] = {}
        self.answers: dict[str, Callable[[BaseHTTPRequestHandler], None]] = {}
        self.requests: list[tuple[str, str | None, str | None]] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.requests.append((self.path, self.headers.get("Range"), self.headers.get("Authorization")))
                with suppress(ConnectionError):  # the client has left
                    hub.answer(self)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self) -> FakeHub:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def asked(self, fragment: str) -> list[tuple[str, str | None, str | None]]:
        return [request for request in self.requests if fragment in request[0]]

    # -- answers -------------------------------------------------------------------------------

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path.partition("?")[0]
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/[^/]+)?", path):
            self._listing(request, match[1])
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            self._file(request, match[1], match[2])
        else:
            self._json(request, {"error": "not found"}, 404)

    def _listing(self, request: BaseHTTPRequestHandler, repo: str) -> None:
        if repo in self.answers:
            self.answers[repo](request)
            return
        files = self.repositories.get(repo)
        if files is None:
            self._json(request, {"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
            return
        siblings = []
        for path, data in files.items():
            entry: dict[str, object] = {"rfilename": path, "size": len(data), "blobId": _git_id(data)}
            if path.endswith((".gguf", ".pt")):
                entry["lfs"] = {
                    "sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 1,
                }  # fmt: skip
            if path in self.sizes:
                entry["size"] = self.sizes[path]
            if path in self.checksums:
                entry.pop("lfs", None)
                entry["blobId"] = self.checksums[path]
            siblings.append(entry)
        listing = {"_id": "1", "id": repo, "modelId": repo, "sha": "c0ffee", "siblings": siblings}
        self._json(request, listing | self.details.get(repo, {}))

    def _file(self, request: BaseHTTPRequestHandler, repo: str, path: str) -> None:
        if repo in self.gated:
            self._json(request, {"error": "gated"}, 403)
            return
        if path in self.answers:
            self.answers[path](request)
            return
        data = self.repositories[repo][path]
        if path in self.corrupt:
            data = bytes([data[0] ^ 1]) + data[1:]
        self._bytes(request, path, data)

    def _bytes(self, request: BaseHTTPRequestHandler, path: str, data: bytes) -> None:
        start = 0
        match = re.fullmatch(r"bytes=(\d+)-", request.headers.get("Range") or "")
        if match and not self.no_ranges:
            start = int(match[1])
        if start and start >= len(data):
            request.send_response(416)
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        request.send_response(206 if start else 200)
        if start:
            request.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        request.send_header("Content-Length", str(len(data) - start))
        request.end_headers()
        splits = self.cut_after.get(path)
        if splits:
            request.wfile.write(data[start : start + splits.pop(0)])
            request.wfile.flush()
            request.close_connection = True
            return
        request.wfile.write(data[start:])

    def _json(
        self,
        request: BaseHTTPRequestHandler,
        value: object,
        status: int = 200,
        headers: dict[str, str] | None = None,
    ) -> None:
        body = json.dumps(value).encode()
        request.send_response(status)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(body)))
        for name, text in (headers or {}).items():
            request.send_header(name, text)
        request.end_headers()
        request.wfile.write(body)


def _git_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
