"""The main program of a child of `child.py`: set limits, then answer until the parent closes the pipe.

A module of children has `prepare`, which imports its libraries and returns the function that answers a
request. It also has STACK_BYTES, the stack of the thread that computes (0: the main thread). Nothing slow is
imported here, since requests wait for the process to start.
"""

from __future__ import annotations

import json
import math
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

_Answering = Callable[[dict[str, Any]], dict[str, Any]]


def main(module: str, max_bytes: str, max_seconds: str) -> None:
    """Answer until the parent closes the pipe. max_seconds: computing time per answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    answering = import_module(module)

    def run() -> None:
        answer = answering.prepare()
        _limit(int(max_bytes))
        _loop(answer, float(max_seconds))

    if not answering.STACK_BYTES:
        run()
        return
    threading.stack_size(answering.STACK_BYTES)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def _loop(answer: _Answering, max_seconds: float) -> None:
    reply: dict[str, Any] = {}
    _write(reply)
    while True:
        try:
            request = _read()
            if request is None:
                return
            _limit_seconds(max_seconds)
            reply = answer(request)
            del request
            _write(reply)
        except MemoryError:  # also if reading the request or writing the answer raises it
            reply = {}
            _write({"out_of_memory": True})


def _limit(max_bytes: int) -> None:
    """Bound the additional memory, and forbid files and processes.

    On systems without such limits the parent watches the process from outside.
    """
    try:
        import resource
    except ImportError:  # Windows
        return
    limits = {"RLIMIT_CORE": 0, "RLIMIT_FSIZE": 0, "RLIMIT_NPROC": 0}
    with suppress(OSError, ValueError), open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
        limits |= {"RLIMIT_AS": now + max_bytes, "RLIMIT_DATA": now + max_bytes}
    for name, value in limits.items():
        with suppress(AttributeError, OSError, ValueError):
            resource.setrlimit(getattr(resource, name), (value, value))


def _limit_seconds(seconds: float) -> None:
    """End the process after `seconds` of more computing, even if the parent has died."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        most = resource.getrlimit(resource.RLIMIT_CPU)[1]
        soft = math.ceil(time.process_time() + seconds) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (soft, most))


def _read() -> dict[str, Any] | None:
    head = sys.stdin.buffer.read(8)
    if len(head) < 8:
        return None
    data = sys.stdin.buffer.read(int.from_bytes(head, "big"))
    request: dict[str, Any] = json.loads(data.decode("utf-8", "surrogatepass"))
    if "n_raw" in request:
        request["raw"] = sys.stdin.buffer.read(request["n_raw"])
    return request


def _write(message: dict[str, Any]) -> None:
    raw = message.pop("raw", b"")
    if raw:
        message["n_raw"] = len(raw)
    data = json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass")
    sys.stdout.buffer.write(len(data).to_bytes(8, "big"))
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.write(raw)
    sys.stdout.buffer.flush()
