"""A client of a running server: its address, the API key, and its replies."""

from __future__ import annotations

import http.client
import ipaddress
import json
import os
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from hotset.errors import HotsetError
from hotset.escaping import clause

URL = "http://127.0.0.1:8080"  # the default address of a server
NO_KEY = "none"
_KEY = "HOTSET_API_KEY"
_ANSWER_SECONDS = 10.0  # for a running server to answer a question about itself
_LONG = 600.0  # seconds for a request that waits until other requests are answered
_LARGEST = 8 << 20  # bytes of a reply


def api_key() -> str:
    """Return the API key of the environment. Raises HotsetError for one that no header can carry."""
    key = os.environ.get(_KEY) or NO_KEY
    if not key.isascii() or not key.isprintable():
        raise HotsetError("HOTSET_API_KEY must be printable ASCII characters.")
    return key


def is_address(url: str) -> bool:
    """Return whether a text is the URL of a host and perhaps a port."""
    try:
        parts = urllib.parse.urlsplit(url)
        return (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.port != 0
            and url.isprintable()
        )
    except ValueError:
        return False


class NoModelServerError(HotsetError):
    """The error that no server of models answers at an address. is_silent: nothing listens there."""

    def __init__(self, message: str, *, is_silent: bool = False) -> None:
        super().__init__(message)
        self.is_silent = is_silent


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A handler that follows no redirects: their targets would get the key."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _opened(
    url: str, headers: dict[str, str], data: bytes | None = None, seconds: float = _ANSWER_SECONDS
) -> Any:
    """Return the open response to a request. Raises urllib's HTTPError and OSError."""
    handlers: list[urllib.request.BaseHandler] = [_NoRedirects()]
    if _is_loopback(urllib.parse.urlsplit(url).hostname or ""):
        handlers.append(urllib.request.ProxyHandler({}))  # ignores proxies of the environment
    request = urllib.request.Request(url, data, headers)
    return urllib.request.build_opener(*handlers).open(request, timeout=seconds)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def fetched(url: str, path: str, key: str, asked: dict[str, Any] | None = None, *, absent: str = "") -> bytes:
    """Return the body of a reply.

    asked: the JSON of a POST request, which may take long. absent: why a server may not have this path.
    Raises HotsetError if the server wants another key or refuses the request, and NoModelServerError for
    every other failure.
    """
    headers, data, seconds = {"Authorization": f"Bearer {key}"}, None, _ANSWER_SECONDS
    if asked is not None:
        headers |= {"Content-Type": "application/json"}
        data, seconds = json.dumps(asked).encode(), _LONG
    try:
        with _opened(f"{url}{path}", headers, data, seconds) as response:
            return _body(response, seconds)
    except urllib.error.HTTPError as error:
        with error:
            why = _refusal(error) if asked is not None else ""
        if error.code == 401:
            raise HotsetError(f"The server at {url} {_wants_key(key)}.") from None
        if why == f"there is nothing at {path}":
            why = absent or why
        if why:
            raise HotsetError(f"The server at {url} refuses: {why}") from None
        raise no_model_server(url, f"it answers {error.code}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, OSError) and not isinstance(reason, ssl.SSLError | http.client.HTTPException):
            raise NoModelServerError(
                f"No server answers at {url} ({clause(reason.strerror or reason)}): start it with 'hotset "
                f"serve', or {'name another address with' if url == URL else 'leave out'} --url.",
                is_silent=isinstance(reason, ConnectionRefusedError),
            ) from None
        raise no_model_server(url, clause(reason) or type(reason).__name__) from None


def no_model_server(url: str, why: str) -> NoModelServerError:
    return NoModelServerError(f"The program at {url} is not a server of models: {why}.")


def _wants_key(key: str) -> str:
    if key == NO_KEY != api_key():
        return "does not say that it is hotset and gets no API key: name it with --url"
    return "wants an API key: name it in HOTSET_API_KEY"


def _refusal(reply: Any) -> str:
    """Return the message of an error's body, "" if it has none."""
    try:
        error = json.loads(_body(reply))["error"]
        return clause(str(error["message"]))
    except (OSError, ValueError, LookupError, TypeError, RecursionError, http.client.HTTPException):
        return ""


def _body(response: Any, seconds: float = _ANSWER_SECONDS) -> bytes:
    """Return the body of a reply. Raises ValueError if it is too long or takes too long."""
    end, body = time.monotonic() + seconds, bytearray()
    while piece := response.read1(1 << 16):
        body += piece
        if len(body) > _LARGEST or time.monotonic() > end:
            raise ValueError("its reply is too long or too slow")
    return bytes(body)


def running(url: str | None) -> tuple[str, str]:
    """Return address and key of the server for a command: the one at `url`, or at the default address.

    At the default address only a server that says that it is hotset gets the key.
    """
    at = (url or URL).rstrip("/")
    return at, api_key() if url is not None or is_hotset(at) else NO_KEY


def is_hotset(url: str) -> bool:
    """Return whether a ready server says that it is hotset: other servers must not get the key."""
    try:
        with _opened(f"{url}/health", {}) as response:
            return bool(response.headers.get("server") == "hotset")
    except (OSError, ValueError, http.client.HTTPException):  # OSError: also HTTPError of a loading server
        return False
