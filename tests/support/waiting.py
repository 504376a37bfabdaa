"""Waits for events, on machines under any load.

A test that waits passes as soon as the event occurs. The limit only ends a test that would wait forever. It
is far beyond any machine's needs and never decides a result.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

WATCHDOG = 180.0  # seconds after which a test gives up: a process, a reply, a thread, an event


def until(condition: Callable[[], T], what: str = "") -> T:
    """Return the first true value of `condition`. Fails with `what` after the watchdog's time."""
    end = time.monotonic() + WATCHDOG
    while not (found := condition()):
        assert time.monotonic() < end, what or "what the test waits for did not happen"
        time.sleep(0.002)
    return found


def within(seconds: float, work: Callable[[], Any]) -> Any:
    """Return the result of `work`, or raise its exception; fail if it takes longer."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(work())
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it hangs"
    if isinstance(result[0], BaseException):
        raise result[0]
    return result[0]


def when(event: threading.Event, work: Callable[[], object]) -> None:
    """Run `work` in a thread of its own once the event is set."""

    def run() -> None:
        if event.wait(WATCHDOG):
            work()

    threading.Thread(target=run, daemon=True).start()
