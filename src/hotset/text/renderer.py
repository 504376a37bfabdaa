"""Templates of chats and task files, each rendered in a process of its own (`child.py`, `jinja_child.py`).

The child is started once and kept, so a rendering costs one message. It holds one template, so no template
can see another one's conversations. It ends with its Renderer, with the process, and with its pipe.
"""

from __future__ import annotations

import json
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hotset.errors import TokenizerError
from hotset.text.child import Cause, Child, ChildError, ChildLimits, encoded

LIMITS = ChildLimits(seconds=1.0, longest=10.0, n_bytes=256 << 20)
"""Limits of compiling a template, and of each rendering. A usual one takes milliseconds."""


class ProcessError(TokenizerError):
    """The process that renders templates cannot be used, whatever the template."""


class RefusedError(TokenizerError):
    """Raised if a template rejects its variables, or fails on them within its limits."""


@dataclass(frozen=True)
class TemplateKind:
    """A kind of templates.

    environment: the child's Jinja environment (`jinja_child.py`). The other fields are parts of messages: the
    template, its input, the remedy, and the remedy if none can be rendered.
    """

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


_SENTENCES = {
    Cause.NO_PACKAGE: "Templates need the package {detail}, which is not installed.",
    Cause.NOT_STARTED: "The process that renders {noun}s cannot be started ({detail}): {instead}.",
    Cause.NOT_READY: "The process that renders {noun}s ended as it started ({detail}): {instead}.",
    Cause.TIME: "The {noun} runs for more than {detail} and was ended: {remedy}.",
    Cause.MEMORY: "The {noun} takes more than {detail} of memory and was ended: {remedy}.",
    Cause.DIED: "The {noun} brought down the process that renders it ({detail}).",
}  # with fields of TemplateKind and ChildError


class Renderer:
    """A child process that compiles and renders one template. Several threads may use it, in turn.

    The child starts with `start`, or on first use, and again after it was ended.
    """

    def __init__(self, kind: TemplateKind = CHAT) -> None:
        self._kind = kind
        self._source = ""
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._child: Child | None = None
        self._compiled_child: Child | None = None  # the child that has the template
        self._end_child: weakref.finalize[Any, Any] | None = None

    def start(self) -> None:
        """Start the child without waiting for it. Raises TokenizerError if it cannot be started."""
        self._after_fork()
        with self._lock:
            self._start()

    def compile(self, source: str) -> None:
        """Compile a template. Raises TokenizerError if it is invalid or exceeds its limits."""
        self._after_fork()
        with self._lock:
            self._source = source
            self._compiled()

    def render(self, variables: dict[str, Any]) -> str:
        """Return the text for plain JSON variables.

        Raises TokenizerError if the template fails or exceeds its limits, and ValueError or RecursionError
        for variables that JSON cannot hold.
        """
        return self._rendered({"render": variables})

    def render_all(self, conversations: Sequence[Mapping[str, Any]]) -> list[str | None]:
        """Render several within the time and memory of one. Return their texts, None for those that fail.

        Raises TokenizerError if the template exceeds its limits.
        """
        request = encoded({"renders": conversations})
        self._after_fork()
        with self._lock:
            answer = self._asked(self._compiled(), request, texts=list)
        texts: list[str | None] = answer["texts"]
        return texts

    def literal(self, variables: dict[str, Any]) -> Any:
        """Parse the text as a Python literal and return its value as plain JSON.

        Raises like `render`, also for other text. The child parses it, since a crafted text can crash the
        parser.
        """
        return json.loads(self._rendered({"render": variables, "literal": True}))

    def _rendered(self, message: dict[str, Any]) -> str:
        request = encoded(message)
        self._after_fork()
        with self._lock:
            answer = self._asked(self._compiled(), request, text=str)
        error, reason = answer.get("error"), str(answer.get("reason"))
        if error == "refused":
            raise RefusedError(f"The {self._kind.noun} refuses {self._kind.given}: {reason}")
        if error is not None:
            raise RefusedError(f"The {self._kind.noun} failed on {self._kind.given} ({reason}).")
        return str(answer["text"])

    def close(self) -> None:
        """End the child; safe to call twice. Later use would start another one."""
        self._after_fork()
        with self._lock:
            self._drop()

    # ---- the child; these methods need the lock ----

    def _start(self) -> Child:
        if self._child is not None and self._child.process.poll() is not None:
            self._drop()  # it was ended between two renderings
        if self._child is None:
            try:
                self._child = Child("hotset.text.jinja_child", ("jinja2", "markupsafe"), LIMITS)
            except ChildError as error:
                raise self._error(error) from None
            self._end_child = weakref.finalize(self, self._child.end)  # with this object, and at exit
        return self._child

    def _compiled(self) -> Child:
        child = self._start()
        if child is self._compiled_child:
            return child
        answer = self._asked(child, encoded({"source": self._source, "environment": self._kind.environment}))
        if answer.get("error") == "syntax":
            raise TokenizerError(
                f"The {self._kind.noun} is not valid Jinja (line {answer.get('line')}: "
                f"{answer.get('reason')})."
            )
        if "error" in answer:
            raise TokenizerError(f"The {self._kind.noun} does not compile ({answer.get('reason')}).")
        self._compiled_child = child
        return child

    def _asked(self, child: Child, request: bytes, **expected: type) -> dict[str, Any]:
        """Return the child's answer. Any exception ends the child; the next request starts another one."""
        try:
            return child.ask(request, **expected)
        except BaseException as error:
            self._drop()
            if isinstance(error, ChildError):
                raise self._error(error) from None
            raise

    def _error(self, error: ChildError) -> TokenizerError:
        of_template = error.cause in (Cause.TIME, Cause.MEMORY, Cause.DIED)
        raised = TokenizerError if of_template else ProcessError
        return raised(_SENTENCES[error.cause].format(detail=error.detail, **asdict(self._kind)))

    def _drop(self) -> None:
        self._child = self._compiled_child = None
        if self._end_child is not None:
            self._end_child()
            self._end_child = None

    def _after_fork(self) -> None:
        """Leave the child to the parent in a forked process, and replace the lock, which may be held."""
        if self._owner != os.getpid():
            self._owner = os.getpid()
            self._lock = threading.Lock()
            self._drop()
