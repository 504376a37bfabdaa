"""Guards that every request passes before a route sees it: host, origin, API key and size.

Every web page that a user opens can send requests to a server on 127.0.0.1. So the Host header must be one of
the server's own names, which exposes a page whose name points to 127.0.0.1. A browser's request for a page of
another origin is refused unless that origin is allowed.
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

_OPEN_PATHS = ("/", "/health", "/v1/health", "/favicon.ico")  # no key: cheap, and without secrets
_OPEN_FOLDER = "/page/"  # the page's files; the requests that it makes need the key

_ENDLESS = ("/models/events",)

# RFC 3986's host and port: one name, or an IPv6 address in brackets; no user name, and one port at most.
_HOST = re.compile(r"([\w.~%!$&'()*+,;=-]+|\[[0-9a-fA-F:.]+\])(?::[0-9]{0,5})?", re.ASCII)


def secure(app: FastAPI, settings: ServerSettings) -> None:
    """Put the guards around an application. A request passes the last one first."""
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
    """Add to the application's OpenAPI document how a key is sent, and which routes need none."""
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
    """Middleware that refuses requests by a foreign host name, or for a page of another origin."""

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
        if not given or self._any_host:  # a browser always sends it
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
        """Raise RequestError for another site's page. Links to the server's own page are allowed.

        Such a page may load an image from this address: a GET without an Origin that would load a model.
        """
        if headers.get("sec-fetch-site") not in ("cross-site", "same-site"):  # no page, or the server's own
            return
        is_link = path == "/" and headers.get("sec-fetch-mode") == "navigate"
        if not is_link and not self._any_origin and "origin" not in headers:  # otherwise it was checked
            raise RequestError("pages of other sites may not ask this server", 403, code="origin_not_allowed")


class HeadRequests:
    """Middleware that answers HEAD like GET; the protocol leaves the body out.

    An endless stream supports only GET.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD" and scope["path"] not in _ENDLESS:
            scope = {**scope, "method": "GET", METHOD: "HEAD"}
        await self._app(scope, receive, send)


class ApiKeys:
    """Middleware that refuses requests without a key in `Authorization: Bearer` or in `x-api-key`."""

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
        """Handle a request with a key, within the key's limits."""
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
        """Return the index of a key, or None. All digests are compared, so that the time reveals nothing."""
        of_it = digest(given)
        matches = [hmac.compare_digest(of_it, holder.digest) for holder in self._holders]
        return matches.index(True) if any(matches) else None


class BodyLimits:
    """Middleware that reads the body within limits of size and time, and checks its values (json_limits.py).

    Every body counts as JSON, whatever its content type: `curl -d` labels everything a form. Memory for long
    bodies is limited: each client gets half of the amount that other clients leave.
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
        """Yield a function to call with the size of a body whenever it has grown.

        The function raises RequestError if the body and the other bodies in memory are too large.
        """
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
        """Return the whole body; None if the client left before its end."""
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
        """Return JSON with the model that a body with sound or pictures names; None if the client left."""
        excerpt = modalities.Excerpt()
        if not await self._receive(receive, excerpt.take):
            return None
        return excerpt.body(headers.get("content-type", ""), self._settings.max_nesting)

    async def _receive(self, receive: Receive, take: Callable[[bytes], bool]) -> bool:
        """Give the parts of a body to `take` until it returns False. Return False if the client left."""
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
    """Return the name in a Host header, without a port; an IPv6 address keeps its brackets."""
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
