"""Child processes that compute on untrusted input and can always be ended.

Chat templates and grammars are untrusted programs, and image files are hostile. Nothing inside Python bounds
their time and memory: one call that no signal interrupts may take hours. So a child process computes
(`child_main.py`), under the limits of the system. A thread of the parent watches its computing time and
memory, and kills it past a limit.

A message is eight bytes of length, then that many bytes of JSON. If the JSON has `n_raw`, that many raw bytes
follow. The child's first message says that it is ready. Then each request gets one answer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import psutil

_MAX_MESSAGE_BYTES = (64 << 20) + 4096
_LOOK_SECONDS = 0.02  # between two looks at the child
_START_SECONDS = 60.0  # to start Python and import the libraries, on the slowest disk
_MAIN = "import sys; sys.path += sys.argv[4:]; from hotset.text import child_main as child; "
_MAIN += "child.main(*sys.argv[1:4])"
_KEPT_VARIABLES = (
    "PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT", "TZ", "TZDIR", "LANG", "LC_ALL", "LC_TIME",
    "LC_CTYPE",
)  # fmt: skip


@dataclass(frozen=True)
class ChildLimits:
    """Limits of one answer.

    seconds: computing time. longest: elapsed seconds, for a machine too busy to give the child a core.
    n_bytes: memory, in addition to the memory that the child uses when it is ready.
    """

    seconds: float
    longest: float
    n_bytes: int


class Cause(Enum):
    """Why a child gave no answer."""

    NO_PACKAGE = "a package is not installed"
    NOT_STARTED = "it cannot be started"
    NOT_READY = "it ended as it started"
    TIME = "it took more than its time"
    MEMORY = "it took more than its memory"
    DIED = "it ended, or sent something that is no answer"
    STOPPED = "nobody waits for its answer any more"


class ChildError(Exception):
    """A child gave no answer. detail: the package, the system's reason, the exit code or the limit."""

    def __init__(self, cause: Cause, detail: str) -> None:
        super().__init__(f"{cause.value} ({detail})")
        self.cause, self.detail = cause, detail


class Child:
    """A process that answers requests with a module of hotset, and the pipes to it.

    module: its full name; it has `prepare` (`child_main.py`). packages: the installed packages that it
    imports.
    """

    def __init__(self, module: str, packages: Sequence[str], limits: ChildLimits) -> None:
        self._limits = limits
        self._owner = os.getpid()  # only this process may end the child
        self._ready = False
        options: dict[str, Any] = {"start_new_session": True}  # the terminal's Ctrl-C does not reach it
        if sys.platform == "win32":
            options = {"creationflags": subprocess.CREATE_NO_WINDOW | subprocess.CREATE_NEW_PROCESS_GROUP}
        homes = dict.fromkeys(_home(package) for package in ("hotset", *packages))
        arguments = [module, str(limits.n_bytes), str(limits.seconds), *homes]
        try:
            # Not a fork: the parent has threads. Isolated, without `site`: it starts in half the time.
            self.process = subprocess.Popen(
                [sys.executable or "python3", "-I", "-S", "-c", _MAIN, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ},
                cwd=os.path.abspath(os.sep),
                bufsize=0,
                **options,
            )
        except OSError as error:
            raise ChildError(Cause.NOT_STARTED, f"{sys.executable or 'python3'}: {error.strerror}") from None
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._in: BinaryIO = self.process.stdin  # type: ignore[assignment]
        self._out: BinaryIO = self.process.stdout  # type: ignore[assignment]

    def ask(
        self,
        request: bytes,
        attached: bytes = b"",
        most_raw: int = 0,
        stop: threading.Event | None = None,
        /,
        **expected: type,
    ) -> dict[str, Any]:
        """Send an `encoded` request and return the answer: an `error`, or the expected values (name=type).

        attached: raw bytes after the request, whose JSON has their number as `n_raw`. most_raw: most raw
        bytes after the answer, which are its `raw`. stop: kills the child once it is set. Raises ChildError
        if the child sends neither. After any exception, including KeyboardInterrupt, end the child: the next
        request would read this answer.
        """
        if not self._ready:
            limits = ChildLimits(_START_SECONDS, _START_SECONDS, self._limits.n_bytes)
            with _Watch(self.process, limits, stop) as watch:
                message = self._receive()
            if watch.found is not None and watch.found.cause == Cause.STOPPED:
                raise watch.found
            if message is None:
                raise ChildError(Cause.NOT_READY, f"exit code {self.process.wait()}")
            self._ready = True
        with _Watch(self.process, self._limits, stop) as watch:
            sent = self._send(len(request).to_bytes(8, "big") + request) and self._send(attached)
            answer = self._receive(most_raw) if sent else None
        if watch.found is not None:
            raise watch.found
        if answer is not None and "out_of_memory" in answer:
            raise _too_large(self._limits)
        if answer is not None and "error" in answer:
            expected = {"error": str}
        if answer is not None and all(isinstance(answer.get(name), of) for name, of in expected.items()):
            return answer
        self.process.kill()  # it may still run after a wrong answer
        raise ChildError(Cause.DIED, f"exit code {self.process.wait()}")

    def end(self) -> None:
        """Kill the process and free the pipes; in a forked process, only the pipes. Safe to call twice."""
        if self._owner == os.getpid():
            self.process.kill()
            self.process.wait()
        else:
            self.process.returncode = 0  # otherwise Popen would wait for a child of another process
        self._in.close()
        self._out.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def _send(self, data: bytes) -> bool:
        view = memoryview(data)
        try:
            while view:
                view = view[self._in.write(view) :]
        except OSError:  # it has ended
            return False
        return True

    def _receive(self, most_raw: int = 0) -> dict[str, Any] | None:
        """Return the next message; None if the child ends first, or sends something else."""
        head = self._read(8)
        size = int.from_bytes(head, "big") if head else _MAX_MESSAGE_BYTES + 1
        data = self._read(size) if size <= _MAX_MESSAGE_BYTES else None
        if data is None:
            return None
        try:
            message = json.loads(data.decode("utf-8", "surrogatepass"))
        except (ValueError, RecursionError):
            return None
        if not isinstance(message, dict):
            return None
        n_raw = message.pop("n_raw", 0)
        if n_raw and (type(n_raw) is not int or not 0 < n_raw <= most_raw):
            return None
        if n_raw:
            message["raw"] = self._read(n_raw)
        return message

    def _read(self, n: int) -> bytes | None:
        data = bytearray()
        while len(data) < n:
            piece = self._out.read(min(n - len(data), 1 << 20))
            if not piece:
                return None
            data += piece
        return bytes(data)


class _Watch:
    """A thread that watches the child while it answers, and kills it past a limit. `found`: the error then.

    Computing time and memory count from the first look. stop: kills it too.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], limits: ChildLimits, stop: threading.Event | None
    ) -> None:
        self.found: ChildError | None = None
        self._process, self._limits, self._stop = process, limits, stop
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hotset-child-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        start = time.monotonic()
        if self._done.wait(_LOOK_SECONDS):  # nearly always, and the child is not measured then
            return
        limits = self._limits
        try:
            child = psutil.Process(self._process.pid)
            seconds, n_bytes = _used(child)
            while not self._done.wait(_LOOK_SECONDS):
                now_seconds, now_bytes = _used(child)
                late = time.monotonic() - start > limits.longest
                if self._stop is not None and self._stop.is_set():
                    self.found = ChildError(Cause.STOPPED, "")
                elif late or now_seconds - seconds > limits.seconds:
                    limit = limits.longest if late else limits.seconds
                    self.found = ChildError(Cause.TIME, f"{limit:g} s")
                elif now_bytes - n_bytes > limits.n_bytes:
                    self.found = _too_large(limits)
                if self.found is not None:
                    self._process.kill()
                    return
        except psutil.Error:  # it has ended
            pass


def encoded(message: Mapping[str, Any]) -> bytes:
    """Return a request for `Child.ask`. Raises ValueError or RecursionError for what JSON cannot hold."""
    # Not ASCII, in which JSON's escapes take six bytes for a letter. Lone surrogates pass.
    return json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _home(package: str) -> str:
    """Return the folder from which a package is imported, without importing it."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise ChildError(Cause.NO_PACKAGE, package)
    return str(Path(spec.origin).resolve().parent.parent)


def _used(child: psutil.Process) -> tuple[float, int]:
    """Return seconds of computing time, and bytes of memory."""
    times = child.cpu_times()
    return times.user + times.system, child.memory_info().rss


def _too_large(limits: ChildLimits) -> ChildError:
    return ChildError(Cause.MEMORY, f"{limits.n_bytes >> 20} MiB")
