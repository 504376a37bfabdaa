"""Images that a message gives by address: fetched only with --allow-remote-images, from public addresses.

A client could otherwise use the server to reach machines that only the server reaches. So each host name is
resolved here, every address that it has must be public, and the connection goes to the checked address
itself: a second lookup could return another one. Redirects are checked in the same way.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit

from hotset.errors import InvalidRequestError, StepCancelledError
from hotset.escaping import clause
from hotset.parameters import shown
from hotset.server.errors import RequestError
from hotset.server.settings import ServerSettings
from hotset.text.image_text import GivenImage, ImageText, images_of
from hotset.units import human_size

MOST_BYTES = 20 << 20
"""The largest image that is fetched."""
MOST_IMAGES = 100
"""Images of one request, each of which may take seconds."""
MOST_FETCHED = 16
"""Images of one request that are fetched."""
SECONDS = 10.0
"""Time for all images of a request."""
_LOOK_SECONDS = 0.02  # between two looks at a connection
_MOST_REDIRECTS = 3
_REDIRECTS = (301, 302, 303, 307, 308)
_RELAYS = ipaddress.ip_network("192.88.99.0/24")  # of 6to4; Python calls it public

Resolve = Callable[[str, int], Sequence[str]]
Ask = Callable[[SplitResult, str, float], tuple[bytes, str | None]]


def with_fetched(
    messages: Sequence[Mapping[str, Any]], settings: ServerSettings, stop: threading.Event
) -> list[Mapping[str, Any]]:
    """Return messages whose images all have their data. It takes a thread's time.

    Raises RequestError for more than MOST_IMAGES, InvalidRequestError if an address must not or cannot be
    fetched, and StepCancelledError once `stop` is set.
    """
    if (n := sum(len(images_of(message.get("content"))) for message in messages)) > MOST_IMAGES:
        raise RequestError(f"a request may have {MOST_IMAGES} images, not {n}", param="messages")
    given = {
        name: image
        for message in messages
        for name, image in images_of(message.get("content")).items()
        if image.address
    }
    if not given:
        return list(messages)
    if not settings.allow_remote_images:
        raise InvalidRequestError(
            "an image has an address, and this server opens none; send the image as a data URL, or start the "
            "server with --allow-remote-images"
        )
    if len(given) > MOST_FETCHED:
        raise InvalidRequestError(f"a request may have {MOST_FETCHED} images by address, not {len(given)}")
    until = time.monotonic() + SECONDS
    found = {
        name: replace(image, data=fetched(image.address, until, stop=stop), address="")
        for name, image in given.items()
    }
    return [_filled(message, found) for message in messages]


def _filled(message: Mapping[str, Any], found: Mapping[str, GivenImage]) -> Mapping[str, Any]:
    content = message.get("content")
    images = images_of(content)
    if not images:
        return message
    own = {name: found.get(name, image) for name, image in images.items()}
    return {**message, "content": ImageText(str(content), own)}


def resolved(host: str, port: int) -> list[str]:
    """Return the addresses of a host. Raises OSError."""
    return [str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


def fetched(
    address: str,
    until: float,
    resolve: Resolve = resolved,
    ask: Ask | None = None,
    stop: threading.Event | None = None,
) -> bytes:
    """Return the bytes at an address. until: time.monotonic() seconds.

    resolve: returns the addresses of a host. ask: None: `answer_of`. Raises InvalidRequestError with the
    reason if it fails, and StepCancelledError once `stop` is set.
    """
    stop = stop or threading.Event()
    ask = ask or partial(answer_of, stop=stop)
    url = address
    try:
        for _ in range(_MOST_REDIRECTS + 1):
            if stop.is_set():
                raise StepCancelledError
            parts = _checked_url(url)
            place = _public_address(parts, resolve)
            data, moved = ask(parts, place, until)
            if moved is None:
                return data
            url = urljoin(url, moved)
        raise ValueError("it redirects too often")
    except (OSError, ValueError, http.client.HTTPException) as error:
        if stop.is_set():
            raise StepCancelledError from None
        late = isinstance(error, TimeoutError)
        reason = "it takes too long" if late else clause(error) or type(error).__name__
        raise InvalidRequestError(f"the image {shown(address[:80])} cannot be fetched: {reason}") from None


def _checked_url(url: str) -> SplitResult:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
        raise ValueError("its address must be http or https, without a user")
    if any(ord(letter) <= 32 or ord(letter) == 127 for letter in url):
        raise ValueError("its address has white space")
    return parts


def _port(parts: SplitResult) -> int:
    return parts.port or (443 if parts.scheme == "https" else 80)


def _public_address(parts: SplitResult, resolve: Resolve) -> str:
    """Return an address of the URL's host. Raises ValueError if it has one that is not public."""
    assert parts.hostname is not None
    found = resolve(parts.hostname, _port(parts))
    if not found:
        raise ValueError("its host has no address")
    for one in found:
        if not is_public(one):
            raise ValueError("its host is not on the public internet")
    return found[0]


def is_public(address: str) -> bool:
    """Return whether an IP address is one of the public internet, also inside an IPv6 address."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    inner = None
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if inner is None and ip in ipaddress.ip_network("64:ff9b::/96"):
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is None and int(ip) >> 32 == 0:  # an IPv4-compatible address
            inner = ipaddress.IPv4Address(int(ip))
    if inner is not None:
        return is_public(str(inner))
    local = isinstance(ip, ipaddress.IPv6Address) and ip.is_site_local
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or local or ip in _RELAYS)


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def answer_of(
    parts: SplitResult, place: str, until: float, *, stop: threading.Event
) -> tuple[bytes, str | None]:
    """Return the bytes of a URL from the host at `place`, or the address to which it has moved.

    A server that sends byte by byte is cut off at `until`, because the timeout of a socket starts again with
    each byte. Raises TimeoutError then, and OSError, ValueError or HTTPException, also once `stop` is set.
    """
    assert parts.hostname is not None
    connection = http.client.HTTPConnection(parts.hostname, _port(parts), timeout=_left(until))
    own = socket.socket(socket.AF_INET6 if ":" in place else socket.AF_INET)
    own.settimeout(_left(until))
    try:
        with _cut_off(own, until, stop):
            own.connect((place, _port(parts)))
    except OSError:
        own.close()
        raise
    if parts.scheme == "https":
        context = ssl.create_default_context()
        own = context.wrap_socket(own, server_hostname=parts.hostname, do_handshake_on_connect=False)
    with own, _cut_off(own, until, stop):
        if isinstance(own, ssl.SSLSocket):
            own.do_handshake()
        connection.sock = own
        return _received(connection, (parts.path or "/") + (f"?{parts.query}" if parts.query else ""))


@contextmanager
def _cut_off(connection: socket.socket, until: float, stop: threading.Event) -> Iterator[None]:
    """Shut a connection down at `until`, and once `stop` is set. Raises TimeoutError if it is late."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_LOOK_SECONDS):
            if stop.is_set() or time.monotonic() >= until:
                with suppress(OSError):  # it has ended
                    connection.shutdown(socket.SHUT_RDWR)
                return

    thread = threading.Thread(target=watch, name="hotset-fetch-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        _left(until)


def _received(connection: http.client.HTTPConnection, path: str) -> tuple[bytes, str | None]:
    connection.request("GET", path, headers={"User-Agent": "hotset", "Accept": "image/*"})
    answer = connection.getresponse()
    if answer.status in _REDIRECTS:
        return b"", answer.getheader("Location") or ""
    if answer.status != 200:
        raise ValueError(f"its server replied {answer.status}")
    data = answer.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"it is larger than {human_size(MOST_BYTES)}")
    return data, None
