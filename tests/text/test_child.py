"""Processes of templates, grammars and images: their limits, their deaths, and hostile replies."""

from __future__ import annotations

import io
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import wine
from json_schemas import LONG_TO_COMPILE
from tiny_tokenizers import bpe_metadata
from waiting import until

from hotset.errors import HotsetError
from hotset.text import constraint, renderer
from hotset.text.chat import ChatTemplate
from hotset.text.child import Cause, Child, ChildError, ChildLimits, encoded
from hotset.text.constraint import Grammars
from hotset.text.tokenizer import load_tokenizer
from hotset.vision import pictures

pytest.importorskip("llguidance")
Image = pytest.importorskip("PIL.Image")
posix = pytest.mark.skipif(os.name == "nt", reason="a script stands in for Python")


@dataclass(frozen=True)
class Kind:
    """A kind of child process.

    hello: a request. expected: the types in its answer. slow, large: requests that take too much time or
    memory. use: starts a child as the program does. sentences: messages for the user, by cause. attached,
    heavy: raw bytes after hello, and after slow and large. most_raw: most raw bytes after an answer.
    """

    module: str
    packages: tuple[str, ...]
    hello: dict[str, Any]
    expected: dict[str, type]
    slow: dict[str, Any]
    large: dict[str, Any]
    use: Callable[[], object]
    sentences: dict[Cause, str]
    attached: bytes = b""
    heavy: bytes = b""
    most_raw: int = 0

    def started(self, limits: ChildLimits) -> Child:
        return Child(self.module, self.packages, limits)

    def greet(self, child: Child) -> dict[str, Any]:
        """Send hello, and return the answer."""
        return child.ask(encoded(self.hello), self.attached, self.most_raw, **self.expected)


def source(text: str) -> dict[str, Any]:
    return {"source": text, "environment": "chat"}


def grammar(kind: str, text: str) -> dict[str, Any]:
    return {"kind": kind, "text": text, "around": None, "marks": []}


def use_a_template() -> object:
    with ChatTemplate("{{ messages[0].content }}") as template:
        return template.render([{"role": "user", "content": "hello"}])


def png(side: int) -> bytes:
    """Return a black square."""
    file = io.BytesIO()
    Image.new("RGB", (side, side)).save(file, "PNG")
    return file.getvalue()


SMALL, LARGE = png(2), png(4000)


def use_an_image() -> object:
    return pictures.decoded(SMALL)


def image_request(data: bytes) -> dict[str, Any]:
    return {"n_pixels": 1 << 24, "n_raw": len(data)}


def use_a_grammar() -> object:
    return Grammars(load_tokenizer(bpe_metadata())).constraint("regex", "hello")


KINDS = {
    "template": Kind(
        "hotset.text.jinja_child", ("jinja2", "markupsafe"),
        source("hello"), {},
        source("{{ (9 ** 999999) ** 9999 }}"), source("{{ 'a'|center(99999) }}" * 10_000),
        use_a_template,
        {
            Cause.NOT_STARTED: r"that renders chat templates cannot be started \(/no/such/python: \w",
            Cause.NOT_READY: r"that renders chat templates ended as it started \(exit code 3\)",
            Cause.TIME: r"chat template runs for more than 0\.1 s and was ended",
            Cause.MEMORY: "chat template takes more than 256 MiB of memory and was ended",
            Cause.DIED: r"chat template brought down the process that renders it \(exit code ",
        },
    ),
    "grammar": Kind(
        "hotset.text.grammar_child", ("llguidance",),
        grammar("regex", "hello"), {"grammar": str, "ignored": list},
        grammar("json_schema", LONG_TO_COMPILE), grammar("json_schema", LONG_TO_COMPILE),
        use_a_grammar,
        {
            Cause.NOT_STARTED: r"that tries a grammar .* cannot be started \(/no/such/python: \w",
            Cause.NOT_READY: r"that tries a grammar .* ended as it started \(exit code 3\)",
            Cause.TIME: r"does not compile within 600 s of computing and 1024 MiB",
            Cause.MEMORY: "does not compile within 3 s of computing and 1024 MiB",
            Cause.DIED: "does not compile within 3 s of computing and 1024 MiB",
        },
    ),
    "image": Kind(
        "hotset.formats.image_child", ("PIL",),
        image_request(SMALL), {"height": int, "width": int, "raw": bytes},
        image_request(LARGE), image_request(LARGE),
        use_an_image,
        {
            Cause.NOT_STARTED: r"that decodes images cannot be started \(/no/such/python: \w",
            Cause.NOT_READY: r"that decodes images ended as it started \(exit code 3\)",
            Cause.TIME: r"image takes more than 0\.1 s to decode",
            Cause.MEMORY: "image takes more than 1024 MiB of memory to decode",
            Cause.DIED: r"image brought down the process that decodes it \(exit code ",
        },
        SMALL, LARGE, 3 << 24,
    ),
}  # fmt: skip
LIMITS = ChildLimits(seconds=60.0, longest=600.0, n_bytes=1 << 30)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


def fault(kind: Kind, child: Child, request: dict[str, Any]) -> ChildError:
    with pytest.raises(ChildError) as raised:
        child.ask(encoded(request), kind.heavy, kind.most_raw, **kind.expected)
    return raised.value


def replace_python(monkeypatch: pytest.MonkeyPatch, folder: Path, lines: list[str]) -> None:
    """Start a shell script in place of Python."""
    path = folder / "python"
    path.write_text("\n".join(["#!/bin/sh", *lines]))
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


def message(data: bytes) -> str:
    """Return the line of a script that sends a message."""
    octal = "".join(f"\\{byte:03o}" for byte in len(data).to_bytes(8, "big") + data)
    return f"printf {shlex.quote(octal)}"


READY = message(b"{}")


@wine.lacks("the computing time of other processes")
def test_computing_time_is_bounded(kind: Kind) -> None:
    with kind.started(ChildLimits(seconds=0.1, longest=600.0, n_bytes=1 << 30)) as child:
        error = fault(kind, child, kind.slow)
        assert (error.cause, error.detail) == (Cause.TIME, "0.1 s")
        assert child.process.wait() != 0


def test_time_by_the_clock_is_bounded(kind: Kind) -> None:
    with kind.started(ChildLimits(seconds=600.0, longest=0.1, n_bytes=1 << 30)) as child:
        error = fault(kind, child, kind.slow)
        assert (error.cause, error.detail) == (Cause.TIME, "0.1 s")


def test_memory_is_bounded_by_the_parent_where_the_system_has_no_limits(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = subprocess.Popen

    def unlimited(arguments: list[str], **options: Any) -> Any:
        at = arguments.index(str(16 << 20))
        return started([*arguments[:at], str(1 << 40), *arguments[at + 1 :]], **options)

    monkeypatch.setattr(subprocess, "Popen", unlimited)
    with kind.started(ChildLimits(seconds=600.0, longest=600.0, n_bytes=16 << 20)) as child:
        error = fault(kind, child, kind.large)
        assert (error.cause, error.detail) == (Cause.MEMORY, "16 MiB")


def test_a_child_ends_once_it_is_stopped(kind: Kind) -> None:
    """Stop while the child starts, and while it computes."""
    stop = threading.Event()
    stop.set()
    for greeted in (False, True):
        with kind.started(LIMITS) as child:
            if greeted:
                kind.greet(child)
            with pytest.raises(ChildError) as raised:
                child.ask(encoded(kind.slow), kind.heavy, kind.most_raw, stop, **kind.expected)
            assert raised.value.cause == Cause.STOPPED
            assert child.process.wait() != 0


@pytest.mark.skipif(sys.platform != "linux", reason="/proc shows the limits")
def test_the_system_ends_a_child_whose_parent_does_not(kind: Kind) -> None:
    with kind.started(LIMITS) as child:
        kind.greet(child)
        process = psutil.Process(child.process.pid)
        for name in (psutil.RLIMIT_FSIZE, psutil.RLIMIT_NPROC, psutil.RLIMIT_CORE):
            assert process.rlimit(name) == (0, 0)
        assert LIMITS.seconds < process.rlimit(psutil.RLIMIT_CPU)[0] <= LIMITS.seconds + 10
        most = process.memory_info().vms + LIMITS.n_bytes
        assert LIMITS.n_bytes <= process.rlimit(psutil.RLIMIT_AS)[0] <= most


def test_a_child_loads_nothing_heavy_and_knows_no_secrets(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    with kind.started(LIMITS) as child:
        kind.greet(child)
        process = psutil.Process(child.process.pid)
        assert not any("numpy" in entry.path or "tokenizers" in entry.path for entry in process.memory_maps())
        assert "HF_TOKEN" not in process.environ()


@pytest.mark.parametrize("end", ["", "os.kill(os.getpid(), 9)"], ids=["exit", "killed"])
def test_a_child_ends_with_its_parent(kind: Kind, end: str) -> None:
    code = (
        "import os; from hotset.text.child import Child, ChildLimits; "
        f"child = Child({kind.module!r}, {kind.packages!r}, ChildLimits(1, 10, 1 << 30)); "
        "print(child.process.pid, flush=True); " + end
    )
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert ended.stderr == ""
    until(lambda: not psutil.pid_exists(int(ended.stdout)))


# ---- messages, and processes afterwards ----


def check_sentence(kind: Kind, cause: Cause) -> None:
    before = set(psutil.Process().children())
    with pytest.raises(HotsetError, match=kind.sentences[cause]) as raised:
        kind.use()
    assert "\n" not in str(raised.value)
    assert set(psutil.Process().children()) <= before


def test_missing_python_gives_one_message(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    check_sentence(kind, Cause.NOT_STARTED)


@posix
@pytest.mark.parametrize(
    ("cause", "lines"),
    [
        (Cause.NOT_READY, ["exit 3"]),
        (Cause.NOT_READY, [message(b"[]"), "exit 3"]),
        (Cause.TIME, [READY, "exec sleep 600"]),
        (Cause.MEMORY, [READY, message(b'{"out_of_memory": true}'), "exec sleep 600"]),
        (Cause.DIED, [READY]),
        (Cause.DIED, [READY, "kill -SEGV $$"]),
        (Cause.DIED, [READY, "printf '\\000\\000\\000'"]),  # half a length
        (Cause.DIED, [READY, "printf '\\000\\000\\000\\000\\000\\000\\000\\011{}'"]),  # half a message
        (Cause.DIED, [READY, "printf '\\377\\377\\377\\377\\377\\377\\377\\377{}'", "exec sleep 600"]),
        (Cause.DIED, [READY, message(b"no JSON"), "exec sleep 600"]),
        (Cause.DIED, [READY, message(b"\xff\xfe"), "exec sleep 600"]),
        (Cause.DIED, [READY, message(b"[" * 100_000), "exec sleep 600"]),
        (Cause.DIED, [READY, message(b'"a text"'), "exec sleep 600"]),
        (Cause.DIED, [READY, READY, message(b'{"text": 5, "grammar": 5}'), "exec sleep 600"]),
        (Cause.DIED, [READY, message(b'{"error": []}'), "exec sleep 600"]),
        (Cause.DIED, [READY, message(b'{"n_raw": -1}'), "exec sleep 600"]),
        (Cause.DIED, [READY, message(b'{"n_raw": 1e99}'), "exec sleep 600"]),
        (Cause.DIED, [READY, message(b'{"n_raw": 99}'), "exit 3"]),
    ],
)
def test_hostile_child_cannot_harm_the_parent(
    kind: Kind, cause: Cause, lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_python(monkeypatch, tmp_path, lines)
    if cause is Cause.TIME:
        for module in (renderer, constraint, pictures):
            monkeypatch.setattr(module, "LIMITS", ChildLimits(seconds=600.0, longest=0.1, n_bytes=1 << 30))
    check_sentence(kind, cause)


@posix
def test_an_interruption_leaves_no_child_behind(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_python(monkeypatch, tmp_path, [READY, "head -c 8 >&2", "kill -INT $PPID", "exec sleep 600"])
    before = set(psutil.Process().children())
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            kind.use()
    finally:
        signal.signal(signal.SIGINT, handler)
    assert set(psutil.Process().children()) <= before
