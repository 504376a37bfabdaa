"""A proxy that records the requests of an agent to a server, one line of JSON each.

    python tests/clients/record.py UPSTREAM PORT FILE

A line has the method, the path, the body as JSON, the status of the reply, and the usage that it reports.
"""

from __future__ import annotations

import http.client
import json
import re
import sys
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

_USAGE = re.compile(rb'"usage":(\{(?:[^{}]|\{[^{}]*\})*\})')
_OF_A_CONNECTION = {"connection", "transfer-encoding", "host", "content-length", "keep-alive"}


def handler(upstream: str, file: Path) -> type[BaseHTTPRequestHandler]:
    """Return a handler that passes requests on to `upstream` and adds a line to `file` for each."""
    host, lock = urllib.parse.urlsplit(upstream).netloc, threading.Lock()

    class Recorder(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"] or 0))
            headers = {
                name: value for name, value in self.headers.items() if name.lower() not in _OF_A_CONNECTION
            }
            connection = http.client.HTTPConnection(host)
            connection.request(self.command, self.path, body, headers)
            reply = connection.getresponse()
            self.send_response(reply.status)
            for name, value in reply.getheaders():
                if name.lower() not in _OF_A_CONNECTION:
                    self.send_header(name, value)
            self.send_header("Connection", "close")
            self.end_headers()
            said = bytearray()
            try:
                while piece := reply.read1(1 << 16):
                    said += piece
                    self.wfile.write(piece)
            except ConnectionError:  # the agent has left
                pass
            connection.close()
            self._note(body, reply.status, bytes(said))

        def do_POST(self) -> None:
            self.do_GET()

        def do_HEAD(self) -> None:
            self.do_GET()

        def _note(self, body: bytes, status: int, said: bytes) -> None:
            line: dict[str, Any] = {"method": self.command, "path": self.path, "status": status}
            line["body"] = json.loads(body) if body else None
            usages = list(map(json.loads, _USAGE.findall(said)))
            line["usage"] = usages[-1] if usages else None
            if status >= 400:
                line["reply"] = said.decode(errors="replace")[:2000]
            with lock, file.open("a") as out:
                out.write(json.dumps(line, ensure_ascii=False) + "\n")

        def log_message(self, *_: Any) -> None:
            pass

    return Recorder


if __name__ == "__main__":
    upstream, port, file = sys.argv[1:]
    ThreadingHTTPServer(("127.0.0.1", int(port)), handler(upstream, Path(file))).serve_forever()
