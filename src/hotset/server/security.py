"""Who may ask, from where, and how much at a time: what every request passes before a route sees it.

A server on 127.0.0.1 is still asked by every web page that its user opens. So the name by which it is called
must be one of its own (a page whose name is pointed at 127.0.0.1 gives itself away by it), and a request that
a browser sends for a page of another origin is refused unless that origin was named.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import re
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hotset.escaping import clause
from hotset.server import modalities
from hotset.server.answers import Answer
from hotset.server.errors import RequestError, problem_of, response_of
from hotset.server.json_limits import check_json
from hotset.server.key_limits import Holder
from hotset.server.keys import NamedKey, digest
from hotset.server.preparation import LONG_BYTES, TurnTaking
from hotset.server.settings import LOOPBACK_NAMES, ServerSettings
from hotset.server.streams import ANSWERS, API_KEY, HOLDER, METHOD, N_BYTES, client_of
from hotset.server.vectors import Vectors

_OPEN_PATHS = ("/", "/health", "/v1/health", "/favicon.ico")  # no key: they reveal nothing and cost nothing
_OPEN_FOLDER = "/page/"  # what the page is made of; what it asks for needs the key

_ENDLESS = ("/models/events",)

# RFC 3986's host and port: one name, or an address of IPv6 in brackets; neither a user's name nor two ports.
_HOST = re.compile(r"([\w.~%!$&'()*+,;=-]+|\[[0-9a-fA-F:.]+\])(?::[0-9]{0,5})?", re.ASCII)


def secure(app: FastAPI, settings: ServerSettings) -> None:
    """Puts the guards around an application; the last is asked first."""
    app.add_middleware(BodyLimits, settings=settings)
    if settings.has_keys:
        app.add_middleware(ApiKeys, keys=settings.api_keys, named=settings.named_keys)
        _describe_keys(app)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=("GET", "HEAD", "POST", "DELETE"),
            allow_headers=("*",),
        )
    app.add_middleware(Names, settings=settings)


def _describe_keys(app: FastAPI) -> None:
    """Says in the application's OpenAPI document how a key is sent, and what asks for none."""
    document = app.openapi

    def described() -> dict[str, Any]:
        found = document()
        found.setdefault("components", {})["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        found["security"] = [{"bearer": []}, {"x-api-key": []}]
        for path, operations in found["paths"].items():
            if _is_open(path):
                for operation in operations.values():
                    operation["security"] = []
        return found

    app.openapi = described  # type: ignore[method-assign]


class Names:
    """Refuses what comes by a name that is not the server's, or for a page of another origin."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._any_origin = "*" in settings.cors_origins
        self._origins = frozenset(origin.rstrip("/").lower() for origin in settings.cors_origins)
        self._any_host = "*" in settings.allowed_hosts
        self._any_address = settings.serves_any_address
        named = [*settings.allowed_hosts, settings.host]
        if self._any_address:
            named.append(socket.gethostname())
        self._hosts = frozenset({*LOOPBACK_NAMES, *(_host(name) for name in named if name)})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            try:
                self._check_host(headers.getlist("host"))
                self._check_origin(headers.get("origin"), headers.get("host"))
                self._check_site(headers, scope["path"])
            except RequestError as error:
                await _refuse(error, scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check_host(self, given: list[str]) -> None:
        if not given or self._any_host:  # a browser always says it
            return
        if len(given) > 1 or not (form := _HOST.fullmatch(given[0].strip())):
            raise RequestError("the Host header is a name or an address, and a port", code="invalid_host")
        host = _host(form[1])
        if host in self._hosts or (self._any_address and _is_address(host)):
            return
        raise RequestError(
            f"this server is not called {clause(repr(host))}; if it is, start it with --allowed-host "
            f"{clause(host)}",
            403,
            code="host_not_allowed",
        )

    def _check_origin(self, origin: str | None, host: str | None) -> None:
        if origin is None or self._any_origin or origin.lower() in self._origins:
            return
        if host is not None and origin.partition("://")[2].lower() == host.lower():
            return
        raise RequestError(
            f"pages of {clause(repr(origin))} may not ask this server; to let them, start it with "
            f"--cors-origin {clause(origin)}",
            403,
            code="origin_not_allowed",
        )

    def _check_site(self, headers: Headers, path: str) -> None:
        """A page of another site may ask for an image of this address, whose GET has no Origin and would load
        a model. It may link to the server's own page."""
        if headers.get("sec-fetch-site") not in ("cross-site", "same-site"):  # not by a page, or its own
            return
        is_link = path == "/" and headers.get("sec-fetch-mode") == "navigate"
        if not is_link and not self._any_origin and "origin" not in headers:  # else that was checked
            raise RequestError("pages of other sites may not ask this server", 403, code="origin_not_allowed")


class HeadRequests:
    """Answers HEAD as GET without the body, which the protocol leaves out; a stream that has no end is for
    GET alone."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD" and scope["path"] not in _ENDLESS:
            scope = {**scope, "method": "GET", METHOD: "HEAD"}
        await self._app(scope, receive, send)


class ApiKeys:
    """Refuses what comes without one of the keys, in `Authorization: Bearer` or in `x-api-key`."""

    def __init__(self, app: ASGIApp, keys: Iterable[str], named: Iterable[NamedKey] = ()) -> None:
        self._app = app
        self._holders = [Holder(f"key {i}", digest(key)) for i, key in enumerate(keys)]
        self._holders += [Holder.of(key) for key in named]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _is_open(scope["path"]):
            headers = Headers(scope=scope)
            scheme, _, bearer = headers.get("authorization", "").partition(" ")
            given = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
            found = self.find(given)
            if found is None:
                what = "this API key is not known" if given else "an API key is needed"
                error = RequestError(
                    f"{what}; send one as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                    401,
                    code="invalid_api_key",
                )
                await _refuse(error, scope, receive, send, {"WWW-Authenticate": "Bearer"})
                return
            await self._held(self._holders[found], scope, receive, send)
            return
        await self._app(scope, receive, send)

    async def _held(self, holder: Holder, scope: Scope, receive: Receive, send: Send) -> None:
        """A request of a holder of a key, within its limits."""
        try:
            holder.check()
        except RequestError as error:
            await _refuse(error, scope, receive, send)
            return
        scope[API_KEY], scope[HOLDER] = holder.name, holder
        if holder.tokens is None:
            await self._app(scope, receive, send)
            return
        answers: list[Answer | Vectors] = scope.setdefault(ANSWERS, [])
        try:
            await self._app(scope, receive, send)
        finally:
            holder.tokens.take(sum(answer.total_tokens for answer in answers))

    def find(self, given: str) -> int | None:
        """Which of the keys it is; all digests, of one length, are compared, so that each takes as long."""
        of_it = digest(given)
        matches = [hmac.compare_digest(of_it, holder.digest) for holder in self._holders]
        return matches.index(True) if any(matches) else None


class BodyLimits:
    """Reads the body, of as many bytes as are allowed, in the time that is, and checks what it may hold
    (json_limits.py).

    It is taken for JSON whatever its type is said to be: `curl -d` calls everything a form. Of the memory for
    long bodies a client gets half of what others leave.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app, self._settings = app, settings
        self._held: Counter[str | None] = Counter()  # bytes by client
        self._threads = TurnTaking("hotset-limits", 1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self._app(scope, receive, send)
            return
        client = client_of(Request(scope))
        with self._holding(client) as hold:
            await self._called(scope, receive, send, client, hold)

    @contextmanager
    def _holding(self, client: str | None) -> Iterator[Callable[[int], None]]:
        """What is to be called with the size of a body whenever it has grown: it raises RequestError where
        that is too much beside what is held."""
        held = 0

        def hold(size: int) -> None:
            nonlocal held
            if size <= LONG_BYTES:
                return
            others = self._held.total() - self._held[client]
            if self._held[client] - held + size > (self._settings.max_held_bytes - others) // 2:
                raise RequestError(
                    "too many long bodies of requests are in memory; try again in a moment",
                    429,
                    code="queue_full",
                    retry_after=1,
                )
            self._held[client] += size - held
            held = size

        try:
            yield hold
        finally:
            self._held[client] -= held
            if not self._held[client]:
                del self._held[client]

    async def _called(
        self, scope: Scope, receive: Receive, send: Send, client: str | None, hold: Callable[[int], None]
    ) -> None:
        try:
            headers = Headers(scope=scope)
            if scope["path"] in modalities.ROUTES:
                body = await self._excerpt(headers, receive)
            else:
                body = await self._read(headers, receive, hold)
            if body is None:
                return
            if len(body) <= LONG_BYTES:
                check_json(body, self._settings.max_nesting)
            else:
                await self._threads.run(client, check_json, body, self._settings.max_nesting)
        except RequestError as error:
            await _refuse(error, scope, receive, send, {"Connection": "close"})
            return
        scope["headers"] = [
            *((name, value) for name, value in scope["headers"] if name != b"content-type"),
            (b"content-type", b"application/json"),
        ]
        scope[N_BYTES] = len(body)
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        await self._app(scope, replay, send)

    async def _read(self, headers: Headers, receive: Receive, hold: Callable[[int], None]) -> bytes | None:
        """The whole body; None where the client went before its end."""
        most = self._settings.max_body_bytes
        said = headers.get("content-length", "")
        if said.isdecimal() and (len(said) > 18 or int(said) > most):
            raise _too_large(most)
        parts, size = [], 0

        def take(part: bytes) -> bool:
            nonlocal size
            size += len(part)
            if size > most:
                raise _too_large(most)
            hold(size)
            parts.append(part)
            return True

        return b"".join(parts) if await self._receive(receive, take) else None

    async def _excerpt(self, headers: Headers, receive: Receive) -> bytes | None:
        """In place of a body with sound or pictures, JSON with the model that it names."""
        excerpt = modalities.Excerpt()
        if not await self._receive(receive, excerpt.take):
            return None
        return excerpt.body(headers.get("content-type", ""), self._settings.max_nesting)

    async def _receive(self, receive: Receive, take: Callable[[bytes], bool]) -> bool:
        """Gives `take` the parts of a body, as long as it says True; False where the client went before."""
        try:
            async with asyncio.timeout(self._settings.max_body_seconds):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return False
                    more = take(message.get("body", b"")) and message.get("more_body", False)
                return True
        except TimeoutError:
            raise RequestError(
                f"the body did not arrive within {self._settings.max_body_seconds:g} s", 408, code="timeout"
            ) from None


def _too_large(most: int) -> RequestError:
    return RequestError(
        f"the body is larger than {most} bytes, the most that this server takes", 413, code="body_too_large"
    )


def _is_open(path: str) -> bool:
    return path in _OPEN_PATHS or (path.startswith(_OPEN_FOLDER) and ".." not in path)


def _host(given: str) -> str:
    """The name in a Host header, without a port; an address of IPv6 in brackets."""
    given = given.strip().lower()
    try:
        if isinstance(ipaddress.ip_address(given), ipaddress.IPv6Address):
            return f"[{given}]"
    except ValueError:
        pass
    try:
        host = urlsplit(f"//{given}").hostname or ""
    except ValueError:
        return ""
    return f"[{host}]" if ":" in host else host.rstrip(".")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


async def _refuse(
    error: RequestError, scope: Scope, receive: Receive, send: Send, headers: dict[str, str] | None = None
) -> None:
    await response_of(problem_of(error), scope["path"], headers)(scope, receive, send)
