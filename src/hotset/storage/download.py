"""Download of one file over HTTP: resumed, checked, and bounded whatever the server does.

A file is written next to its target as NAME.part, and renamed once its size and checksum, read again from the
disk, are right. So an interrupted download continues where it stopped and is never taken for a model. Only
one process at a time writes a file (NAME.lock).
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import shutil
import ssl
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPMessage, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import IO, Any

from hotset.errors import DownloadError, FormatError
from hotset.escaping import clause
from hotset.files import open_regular
from hotset.reporter import Reporter
from hotset.units import human_size

TIMEOUT = 10.0  # seconds to connect, and of silence while reading: a dead network fails quickly
HEADERS = (1 << 20, 30.0)  # the most bytes and seconds for redirects and headers, before the contents
STALL = (1 << 15, 30.0)  # contents have stalled if fewer than these bytes arrive in these seconds
WORTH = 1 << 20  # an attempt that brings fewer bytes counts as a failure: one per request would be an attack
_RETRIES = 4  # consecutive failures after which it gives up
_CHUNK = 1 << 20
_UNCHECKED = "{} has no checksum in the listing: only its size was compared."


@dataclass(frozen=True)
class Checksum:
    """A checksum of a file, in lower-case hex: `sha256` of its bytes, or `git`, its id as a git blob."""

    kind: str
    value: str

    def start(self, size: int) -> Any:
        if self.kind == "sha256":
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)


def is_whole(path: Path, size: int, checksum: Checksum | None = None) -> bool:
    """Return whether a file exists with that many bytes and, if a checksum is given, with that checksum."""
    try:
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_size != size:
                return False
            if checksum is None:
                return True
            digest = checksum.start(size)
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    except (OSError, FormatError):
        return False
    return bool(digest.hexdigest() == checksum.value)


# -- requests ------------------------------------------------------------------------------------


class Allowance:
    """A limit on the bytes that a server may still send, and on its slowness, so that every answer ends."""

    def __init__(self) -> None:
        n_bytes, seconds = HEADERS
        self.allow(n_bytes, seconds)

    def allow(self, n_bytes: float, seconds: float, least: float = float("inf")) -> None:
        """Allow at most `n_bytes` from now on, of which at least `least` must arrive in any `seconds`."""
        self._left, self._least, self._seconds = n_bytes, least, seconds
        self._start()

    def _start(self) -> None:
        self._came, self._end = 0, time.monotonic() + self._seconds

    def take(self, n_bytes: int) -> None:
        """Count received bytes. Raises OSError if they exceed the limit, or arrive too slowly."""
        self._left -= n_bytes
        self._came += n_bytes
        if self._left < 0:
            raise OSError("it sends more than expected")
        if time.monotonic() > self._end:
            if self._came < self._least:
                raise TimeoutError("it sends too slowly")
            self._start()


class _Metered(io.RawIOBase):
    """The bytes of a connection, counted as they arrive, including HTTP headers, chunks and trailers."""

    def __init__(self, raw: io.RawIOBase, allowance: Allowance) -> None:
        self._raw, self._allowance = raw, allowance

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._raw.fileno()

    def readinto(self, buffer: Any) -> int | None:
        n_bytes = self._raw.readinto(buffer)
        self._allowance.take(n_bytes or 0)
        return n_bytes

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Response(HTTPResponse):
    def __init__(self, allowance: Allowance, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fp = io.BufferedReader(_Metered(self.fp.detach(), allowance))


class _Handler(urllib.request.HTTPSHandler, urllib.request.HTTPHandler):
    """A handler that opens connections whose answers are metered."""

    def __init__(self, allowance: Allowance) -> None:
        super().__init__()
        self._allowance = allowance

    def _connect(self, kind: Callable[..., HTTPConnection], host: str, **options: Any) -> HTTPConnection:
        connection = kind(host, **options)
        connection.response_class = partial(_Response, self._allowance)  # type: ignore[assignment]
        return connection

    def http_open(self, req: urllib.request.Request) -> HTTPResponse:
        return self.do_open(partial(self._connect, HTTPConnection), req)

    def https_open(self, req: urllib.request.Request) -> HTTPResponse:
        context = ssl.create_default_context()
        if sys.platform == "darwin" and not os.environ.get("SSL_CERT_FILE"):
            import certifi  # python.org's builds for macOS have no certificates

            context.load_verify_locations(certifi.where())
        return self.do_open(partial(self._connect, HTTPSConnection), req, context=context)


class Redirects(urllib.request.HTTPRedirectHandler):
    """A handler that follows redirects to HTTP(S) only, never from HTTPS to HTTP.

    Only redirects within a host get the token.
    """

    def __init__(self, token: str | None) -> None:
        self._token = token

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        old, new = urllib.parse.urlsplit(req.full_url), urllib.parse.urlsplit(newurl)
        if new.scheme not in ("http", "https") or (old.scheme == "https") > (new.scheme == "https"):
            raise urllib.error.HTTPError(newurl, code, "not followed", headers, fp)
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request and (old.scheme, old.netloc) == (new.scheme, new.netloc):
            _authorize(request, self._token)
        return request


def _authorize(request: urllib.request.Request, token: str | None) -> None:
    if token:  # unredirected: not copied to the target of a redirect, which is usually another host
        request.add_unredirected_header("Authorization", f"Bearer {token}")


def _open(
    url: str, headers: Mapping[str, str], token: str | None, allowance: Allowance
) -> AbstractContextManager[HTTPResponse]:
    try:
        request = urllib.request.Request(url, headers={"User-Agent": "hotset", **headers})
        _authorize(request, token)
        opener = urllib.request.build_opener(_Handler(allowance), Redirects(token))
        response: AbstractContextManager[HTTPResponse] = opener.open(request, timeout=TIMEOUT)
    except (ValueError, OverflowError) as error:  # in this URL, or in a redirect's
        raise urllib.error.URLError(f"an invalid address ({error})") from None
    return response


def read_url(url: str, token: str | None, limit: int, seconds: float) -> bytes:
    """Return a small answer.

    Raises urllib's HTTPError, or OSError or HTTPException if no answer arrives, it is larger than `limit`
    bytes, or it takes longer than `seconds`.
    """
    allowance = Allowance()
    with _open(url, {}, token, allowance) as response:
        allowance.allow(limit, seconds)
        return response.read()


def cause(error: BaseException) -> str:
    """Return why a request failed."""
    reason = getattr(error, "reason", None) or error
    return clause(reason) or type(reason).__name__


def http_message(code: int, label: str, host: str) -> str:
    """Return an error message for an unsuccessful HTTP status."""
    if code in (401, 403):
        return (
            f"{host} refuses {label} ({code}): accept the model's conditions on its page, "
            "then log in with 'hf auth login' or set HF_TOKEN."
        )
    if code == 404:
        return f"{host} has no {label} (404)."
    if 300 <= code < 400:
        return f"{host} redirects {label} ({code}) to an address that is not followed, or in a circle."
    return f"{host} answered {code} for {label}: try again later."


# -- files ---------------------------------------------------------------------------------------


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Raise OSError as DownloadError while files are written into `folder`."""
    try:
        yield
    except OSError as error:
        remedy = (
            "free some space, or set"
            if error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", None))
            else "set"
        )
        raise DownloadError(
            f"{folder} cannot be written ({error.strerror or error}): {remedy} HOTSET_HOME to another folder."
        ) from None


@contextmanager
def alone(target: Path, progress: Reporter | None = None) -> Iterator[None]:
    """Hold the lock of a target, after waiting for any other process that holds it. Creates the folder."""
    from filelock import FileLock, Timeout

    path = target.with_name(target.name + ".lock")
    reported = False
    with writing(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        while True:
            # The holder deletes the lock file. So by the time we get the lock, it may be of a file without a
            # name, and another process may hold a new one. It is the right one if the name still refers to
            # the file that it referred to before the lock was opened.
            with path.open("ab") as before:
                lock = FileLock(path)
                try:
                    lock.acquire(timeout=0)
                except Timeout:
                    if progress is not None and not reported:
                        progress.say(f"Another process is fetching {target.name}: waiting for it.")
                    reported = True
                    lock.acquire()
                try:
                    if os.path.samestat(os.fstat(before.fileno()), path.stat()):
                        break
                except FileNotFoundError:
                    pass
            lock.release()
    try:
        yield
    finally:
        with suppress(OSError):  # Windows cannot delete an open file; the next download uses it again
            path.unlink()
        lock.release()


def install(part: Path, target: Path) -> None:
    """Rename a complete file to its name, durably: after a power cut it has its contents or no name."""
    with part.open("rb+") as file:
        os.fsync(file.fileno())
    os.replace(part, target)


def check_room(n_bytes: int, folder: Path, label: str) -> None:
    """Raise DownloadError if the disk of `folder` has less than `n_bytes` free."""
    with writing(folder):
        free = shutil.disk_usage(folder).free
    if n_bytes > free:
        raise DownloadError(
            f"{label} needs {human_size(n_bytes)}, but {folder} has {human_size(free)} free: "
            "free some space, or set HOTSET_HOME to a folder on a larger disk."
        )


def download(
    url: str,
    target: Path,
    *,
    size: int,
    checksum: Checksum | None = None,
    check: bool = False,
    token: str | None = None,
    label: str | None = None,
    progress: Reporter | None = None,
) -> None:
    """Fetch `url` into `target`, continuing a TARGET.part of an earlier attempt.

    size: the expected bytes. A target of that size is not fetched again, unless `check` is set and its
    checksum is wrong. Raises DownloadError; a file with the wrong size or checksum is deleted.
    """
    report, label = progress or Reporter(), label or target.name
    known = checksum if check else None
    if check and target.exists():
        report.say(f"Checking {label}.")
    if is_whole(target, size, known):
        if check and checksum is None:
            report.say(_UNCHECKED.format(label))
        return
    with alone(target, report):
        if is_whole(target, size, known):  # another process has fetched it
            return
        if check and target.exists():
            report.say(f"{label} is damaged: fetching it again.")
        part = target.with_name(target.name + ".part")
        _fetch_part(url, part, size, token, label, report)
        if size >= _CHUNK and checksum is not None:
            report.say(f"Checking {label}.")
        if not is_whole(part, size, checksum):
            with suppress(OSError):
                part.unlink()
            raise DownloadError(
                f"{label} from {urllib.parse.urlsplit(url).netloc} does not match its checksum or size: "
                "nothing was kept, so try again, and do not trust that server if it repeats."
            )
        with writing(target.parent):
            install(part, target)
    if checksum is None:
        report.say(_UNCHECKED.format(label))


class PartFile:
    """The file being written, and the number of bytes it has."""

    def __init__(self, path: Path) -> None:
        self._folder = path.parent
        with writing(self._folder):
            self._file = path.open("ab")
            self.have = self._file.seek(0, os.SEEK_END)

    def write(self, chunk: bytes) -> None:
        with writing(self._folder):
            self._file.write(chunk)
        self.have += len(chunk)

    def restart(self) -> None:
        with writing(self._folder):
            self._file.truncate(0)
        self.have = 0

    def close(self) -> None:
        with writing(self._folder):
            self._file.close()


def _fetch_part(url: str, path: Path, size: int, token: str | None, label: str, report: Reporter) -> None:
    part = PartFile(path)
    try:
        check_room(size - part.have, path.parent, label)
        if part.have > size:
            part.restart()
        report.advance(label, part.have, size)
        _receive(part, url, size, token, label, report)
    finally:
        part.close()


def _receive(part: PartFile, url: str, size: int, token: str | None, label: str, report: Reporter) -> None:
    """Fetch until `size` bytes are here, continuing after lost connections, or give up after failures."""
    host = urllib.parse.urlsplit(url).netloc
    most, failures, restarts, answered = part.have, 0, 0, False
    while part.have < size:
        why = "it stops sending"
        try:
            allowance = Allowance()
            headers = {"Range": f"bytes={part.have}-"} if part.have else {}
            with _open(url, headers, token, allowance) as response:
                answered = True
                if not _continues(response, part.have):
                    part.restart()
                if response.status == 206 and not _continues(response, part.have):
                    why = "it sends another part than was requested"
                else:
                    # More than twice the size: the framing of small chunks can cost as much as their bytes.
                    allowance.allow(2 * (size - part.have) + (1 << 20), STALL[1], STALL[0])
                    _copy(response, part, size, label, report)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code != 416 or not part.have:
                raise DownloadError(http_message(error.code, label, host)) from None
            if restarts:  # the file is shorter than the listing says
                return
            answered = True
            restarts += 1  # the server's file is shorter than our part, which is of another file
            part.restart()
        except (OSError, HTTPException) as error:
            why = cause(error)
        if part.have >= size:
            return
        failures = 0 if part.have >= most + WORTH else failures + 1
        most = max(most, part.have)
        if failures > _RETRIES or not answered:
            kept = (
                f" ({human_size(part.have)} of {human_size(size)} are kept: run it again to continue)"
                if part.have
                else ""
            )
            raise DownloadError(f"{label} could not be fetched from {host}: {why}{kept}.")
        time.sleep(0.25 * 2**failures if failures else 0)


def _continues(response: HTTPResponse, have: int) -> bool:
    """Return whether an answer begins at byte `have` of the file."""
    if response.status != 206:
        return have == 0
    return response.headers.get("Content-Range", "").startswith(f"bytes {have}-")


def _copy(response: HTTPResponse, part: PartFile, size: int, label: str, report: Reporter) -> None:
    """Write the answer as it arrives, so that a lost connection loses little; at most `size` + a chunk."""
    reported = 0.0
    while part.have <= size and (chunk := response.read1(_CHUNK)):
        part.write(chunk)
        if time.monotonic() - reported > 0.1 or part.have >= size:  # not for every packet
            reported = time.monotonic()
            report.advance(label, part.have, size)
