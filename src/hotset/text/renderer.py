"""Templates are rendered in a process of their own, which can be ended for certain.

A template is a program of the author of a model file, or of a task file of `hotset eval`. Jinja's sandbox
keeps it from the machine, but nothing inside Python keeps it from time and memory: a comparison, a sort or a
constant that the compiler folds can take hours in one call that no signal interrupts. So a child
(`jinja_child.py`) compiles and renders, under the system's limits where there are any, and a thread of the
parent looks at its clock and memory and kills it.

The child is started once and kept, so that a render costs a message. It holds one template, so that no file
meets the text of another's conversation. It ends with its Renderer, with the process, and with its pipe.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from hotset.errors import TokenizerError

MAX_SECONDS = 1.0
"""How long a template may compute, at compiling and at each rendering (a real one takes milliseconds)."""
MAX_WAIT_SECONDS = 10.0
"""How long it may take by the clock, where the machine is too busy to give it a core."""
MAX_BYTES = 256 << 20
"""How much memory a template may take."""
MAX_TEXT_CHARS = 16 << 20
"""The longest text that a template may put out."""
_LOOK_SECONDS = 0.02  # between two looks at the child
_START_SECONDS = 60.0  # for Python and Jinja, on the slowest disk
_MAX_MESSAGE_BYTES = 4 * MAX_TEXT_CHARS + 4096

_KEPT_VARIABLES = (
    "PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT", "TZ", "TZDIR", "LANG", "LC_ALL", "LC_TIME",
    "LC_CTYPE",
)  # fmt: skip


class RefusedError(TokenizerError):
    """A template that refuses its variables, or fails on them within its limits."""


@dataclass(frozen=True)
class TemplateKind:
    """environment: the child's Jinja environment (`jinja_child.py`). The rest is for messages:
    the template, what it is rendered with, what to do about it, and what to do where none can be rendered."""

    environment: str
    noun: str
    given: str
    remedy: str
    instead: str


CHAT = TemplateKind(
    "chat", "chat template", "these messages", "use another file, or give a prompt as text",
    "give a prompt as text instead",
)  # fmt: skip
TASK = TemplateKind(
    "task", "template", "this question", "change the task file", "take a file of questions instead"
)


class Renderer:
    """Compiles and renders one template in a child process. Several threads may use it, in turn.

    The child starts with `start`, or when it is needed, and again after it was ended.
    """

    def __init__(self, kind: TemplateKind = CHAT) -> None:
        self._kind = kind
        self._source = ""
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._end_child: weakref.finalize[Any, Any] | None = None

    def start(self) -> None:
        """Starts the child and does not wait for it. Raises TokenizerError where none can be started."""
        self._after_fork()
        with self._lock:
            self._start()

    def compile(self, source: str) -> None:
        """Takes the template. Raises TokenizerError where it does not compile, or takes too much at it."""
        self._after_fork()
        with self._lock:
            self._source = source
            self._compiled()

    def render(self, variables: dict[str, Any]) -> str:
        """The text of plain JSON variables. Raises TokenizerError where the template fails or wants too much,
        and ValueError or RecursionError for variables that JSON cannot hold."""
        return self._rendered({"render": variables})

    def render_all(self, conversations: Sequence[Mapping[str, Any]]) -> list[str | None]:
        """Render several in the time and memory of one. Return their texts, None for those that fail.

        Raises TokenizerError if the template takes too much.
        """
        request = _encoded({"renders": conversations})
        self._after_fork()
        with self._lock:
            answer = self._asked(self._compiled(), request)
        texts: list[str | None] = answer["texts"]
        return texts

    def literal(self, variables: dict[str, Any]) -> Any:
        """The value of the Python literal that the text is: plain JSON. Errors as `render`, also for other
        text. The child reads it, since a text can be made that takes the parser down."""
        return json.loads(self._rendered({"render": variables, "literal": True}))

    def _rendered(self, message: dict[str, Any]) -> str:
        request = _encoded(message)
        self._after_fork()
        with self._lock:
            answer = self._asked(self._compiled(), request)
        error, reason = answer.get("error"), str(answer.get("reason"))
        if error == "refused":
            raise RefusedError(f"The {self._kind.noun} refuses {self._kind.given}: {reason}")
        if error is not None:
            raise RefusedError(f"The {self._kind.noun} failed on {self._kind.given} ({reason}).")
        return str(answer["text"])

    def close(self) -> None:
        """Ends the child; safe to call twice. A later use would start another one."""
        self._after_fork()
        with self._lock:
            self._drop()

    # ---- the child; the lock is held ----

    def _start(self) -> _Child:
        if self._child is not None and self._child.process.poll() is not None:
            self._drop()  # it was ended between two renderings
        if self._child is None:
            self._child = _Child(self._kind)
            self._end_child = weakref.finalize(self, self._child.end)  # with this object, and at exit
        return self._child

    def _compiled(self) -> _Child:
        child = self._start()
        if child.compiled:
            return child
        answer = self._asked(child, _encoded({"source": self._source, "environment": self._kind.environment}))
        if answer.get("error") == "syntax":
            raise TokenizerError(
                f"The {self._kind.noun} is not valid Jinja (line {answer.get('line')}: "
                f"{answer.get('reason')})."
            )
        if "error" in answer:
            raise TokenizerError(f"The {self._kind.noun} does not compile ({answer.get('reason')}).")
        child.compiled = True
        return child

    def _asked(self, child: _Child, request: bytes) -> dict[str, Any]:
        """The child's answer. Whatever goes wrong ends the child: the next one starts anew."""
        try:
            answer = child.ask(request)
        except BaseException:  # Ctrl-C too: the answer that is still to come would be taken for the next
            self._drop()
            raise
        if answer.get("error") == "memory":
            self._drop()  # what it has taken does not come back
            raise _too_large(self._kind)
        return answer

    def _drop(self) -> None:
        self._child = None
        if self._end_child is not None:
            self._end_child()
            self._end_child = None

    def _after_fork(self) -> None:
        """A forked process leaves the child to its parent, and the lock, which a thread may have held."""
        if self._owner != os.getpid():
            self._owner = os.getpid()
            self._lock = threading.Lock()
            self._drop()


class _Child:
    """The process and the pipes to it. owner: the process that started it, which alone may end it."""

    def __init__(self, kind: TemplateKind) -> None:
        self._kind = kind
        self.owner = os.getpid()
        self.compiled = False
        self._ready = False
        paths = [_home("hotset"), _home("jinja2"), _home("markupsafe")]
        code = "import sys; sys.path += sys.argv[4:]; from hotset.text import jinja_child as child; "
        code += "child.main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))"
        limits = [str(MAX_BYTES), str(MAX_TEXT_CHARS), str(2 * MAX_WAIT_SECONDS)]
        options: dict[str, Any] = {"start_new_session": True}  # the terminal's Ctrl-C does not reach it
        if sys.platform == "win32":
            options = {"creationflags": subprocess.CREATE_NO_WINDOW | subprocess.CREATE_NEW_PROCESS_GROUP}
        try:
            # Not a fork: the parent has threads. Isolated, without `site`: it starts in half the time.
            self.process = subprocess.Popen(
                [sys.executable or "python3", "-I", "-S", "-c", code, *limits, *dict.fromkeys(paths)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ},
                cwd=os.path.abspath(os.sep),
                bufsize=0,
                **options,
            )
        except OSError as error:
            raise TokenizerError(
                f"The process that renders {kind.noun}s cannot be started "
                f"({sys.executable or 'python3'}: {error.strerror}): {kind.instead}."
            ) from None
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._in: BinaryIO = self.process.stdin  # type: ignore[assignment]
        self._out: BinaryIO = self.process.stdout  # type: ignore[assignment]

    def ask(self, request: bytes) -> dict[str, Any]:
        """Sends a message and waits for the answer. Raises TokenizerError where the child had to be ended."""
        if not self._ready:
            with _Watch(self.process, self._kind, _START_SECONDS, _START_SECONDS):
                message = self._receive()
            if message is None:
                raise TokenizerError(
                    f"The process that renders {self._kind.noun}s ended as it started "
                    f"(exit code {self.process.wait()}): {self._kind.instead}."
                )
            self._ready = True
        with _Watch(self.process, self._kind, MAX_SECONDS, MAX_WAIT_SECONDS) as watch:
            answer = self._receive() if self._send(request) else None
        if answer is not None:
            return answer
        if watch.found is not None:
            raise watch.found
        raise TokenizerError(
            f"The {self._kind.noun} brought down the process that renders it (exit code "
            f"{self.process.wait()})."
        )

    def end(self) -> None:
        """Kills the process and frees the pipes; in a forked process only the pipes."""
        if self.owner == os.getpid():
            self.process.kill()
            self.process.wait()
        else:
            self.process.returncode = 0  # Popen would look for a child that is another's
        self._in.close()
        self._out.close()

    def _send(self, request: bytes) -> bool:
        view = memoryview(len(request).to_bytes(8, "big") + request)
        try:
            while view:
                view = view[self._in.write(view) :]
        except OSError:  # it has ended
            return False
        return True

    def _receive(self) -> dict[str, Any] | None:
        """The next message; None where the child ends first, or sends what it never would of itself."""
        head = self._read(8)
        size = int.from_bytes(head, "big") if head else _MAX_MESSAGE_BYTES + 1
        data = self._read(size) if size <= _MAX_MESSAGE_BYTES else None
        if data is None:
            return None
        try:
            message = json.loads(data.decode("utf-8", "surrogatepass"))
        except (ValueError, RecursionError):
            return None
        return message if isinstance(message, dict) else None

    def _read(self, n: int) -> bytes | None:
        data = bytearray()
        while len(data) < n:
            piece = self._out.read(min(n - len(data), 1 << 20))
            if not piece:
                return None
            data += piece
        return bytes(data)


class _Watch:
    """Looks at the child while it answers, and kills it past a limit; `found` then is the sentence.

    seconds: of its own computing. longest: by the clock. Memory counts from what the child had at first.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], kind: TemplateKind, seconds: float, longest: float
    ) -> None:
        self.found: TokenizerError | None = None
        self._kind = kind
        self._process = process
        self._seconds = seconds
        self._longest = longest
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hotset-template-watch", daemon=True)

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        start = time.monotonic()
        if self._done.wait(_LOOK_SECONDS):  # nearly always: nothing more is done then
            return
        try:
            child = psutil.Process(self._process.pid)
            seconds, n_bytes = _used(child)
            while not self._done.wait(_LOOK_SECONDS):
                now_seconds, now_bytes = _used(child)
                late = time.monotonic() - start > self._longest
                if late or now_seconds - seconds > self._seconds:
                    limit = self._longest if late else self._seconds
                    self.found = TokenizerError(
                        f"The {self._kind.noun} runs for more than {limit:g} s and was ended: "
                        f"{self._kind.remedy}."
                    )
                elif now_bytes - n_bytes > MAX_BYTES:
                    self.found = _too_large(self._kind)
                if self.found is not None:
                    self._process.kill()
                    return
        except psutil.Error:  # it has ended
            pass


def _used(child: psutil.Process) -> tuple[float, int]:
    """Seconds of computing, and bytes of memory."""
    times = child.cpu_times()
    return times.user + times.system, child.memory_info().rss


def _too_large(kind: TemplateKind) -> TokenizerError:
    return TokenizerError(
        f"The {kind.noun} takes more than {MAX_BYTES >> 20} MB of memory and was ended: {kind.remedy}."
    )


def _encoded(message: Mapping[str, Any]) -> bytes:
    # Not in ASCII, where JSON's escapes make six bytes of a letter; lone surrogates pass.
    return json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _home(package: str) -> str:
    """The folder from which a package is imported; the package itself is not."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise TokenizerError(f"Templates need the package {package}, which is not installed.")
    return str(Path(spec.origin).resolve().parent.parent)
