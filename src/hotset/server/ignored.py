"""Reports of fields that have no effect: in a header of the reply, and once in the log."""

from __future__ import annotations

import re
from collections.abc import Mapping

from fastapi import Request

from hotset.server.errors import RequestError
from hotset.server.logs import Notices
from hotset.server.rows import MAX_IGNORED, MAX_NAME
from hotset.server.service import Host

HEADER = "x-hotset-ignored"
_IGNORED = "hotset.ignored"  # the Ignored of a request, in its scope
_UNSAFE = re.compile(r"[^A-Za-z0-9_.\-/@$\[\]]")
_MAX_PATH = 2 * MAX_NAME


class Ignored:
    """The ignored fields of one request. client: the client's program. is_strict: refuse ignored fields."""

    def __init__(self, client: str, notices: Notices, *, is_strict: bool) -> None:
        self._client, self._notices, self._is_strict = client, notices, is_strict
        self._names: dict[str, None] = {}

    def add(self, name: str, reason: str) -> None:
        """Report a field. Raises RequestError if the server is strict."""
        name = _UNSAFE.sub("?", name[:_MAX_PATH])
        if self._is_strict:
            raise RequestError(
                f"the parameter {name} is not supported: {reason}; leave it out",
                param=name,
                code="unsupported_parameter",
            )
        if name not in self._names and len(self._names) < MAX_IGNORED:
            self._names[name] = None
            self._notices.log(f"{self._client} sends {name}, which is ignored: {reason}")

    @property
    def is_full(self) -> bool:
        """Return whether the report is full, so that further fields are left out."""
        return len(self._names) == MAX_IGNORED

    @property
    def headers(self) -> Mapping[str, str]:
        return {HEADER: ", ".join(self._names)} if self._names else {}


def ignored_of(http: Request) -> Ignored:
    """Return the report of a request."""
    found: Ignored | None = http.scope.get(_IGNORED)
    if found is None:
        host: Host = http.app.state.host
        notices: Notices = http.app.state.ignored
        client = client_type(http.headers.get("user-agent", ""))
        found = http.scope[_IGNORED] = Ignored(client, notices, is_strict=host.settings.strict_requests)
    return found


def client_type(user_agent: str) -> str:
    """Return the name of a program, without its version: "claude-cli" for "claude-cli/2.0 (external)"."""
    found = re.match(r"[A-Za-z0-9_.-]{1,40}", user_agent)
    return found.group() if found else "a client"
