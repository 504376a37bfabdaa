"""Threads for the text of requests: bodies, templates, tokenizing, grammars. Clients take turns.

Long work has threads of its own, so that a short request waits only for other short ones.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, ParamSpec, TypeVar

from hotset.engine.queue import WaitingQueue
from hotset.errors import QueueFullError

_P = ParamSpec("_P")
_T = TypeVar("_T")

LONG_BYTES = 1 << 16
"""A request with a larger body is a long one."""


@dataclass(eq=False)
class _Job:
    client: str | None
    work: Callable[[], Any]
    result: asyncio.Future[Any]


class TurnTaking:
    """Threads that work for several clients, one job of each in turn. For one event loop.

    max_waiting: jobs that may wait for a thread; `run` refuses further ones with QueueFullError.
    """

    def __init__(self, name: str, n_threads: int) -> None:
        self.max_waiting = math.inf
        self._threads = ThreadPoolExecutor(n_threads, name)
        self._n_threads = self._n_free = n_threads
        self._waiting: WaitingQueue[_Job] = WaitingQueue()
        self._seconds = 0.0  # duration of the last job

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    async def run(self, client: str | None, work: Callable[_P, _T], *args: _P.args, **more: _P.kwargs) -> _T:
        """Return the result of `work`. A call cancelled before its turn does not run `work`."""
        if not self._n_free and len(self._waiting) >= self.max_waiting:
            n_waiting = len(self._waiting)
            raise QueueFullError(n_waiting, self._seconds * (n_waiting / self._n_threads + 1))
        result: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        job = _Job(client, partial(work, *args, **more), result)
        self._waiting.append(job)
        self._begin()
        try:
            return await result
        finally:
            if job in self._waiting:
                self._waiting.remove(job)

    def close(self) -> None:
        """Stop the threads, without waiting: running jobs finish."""
        self._threads.shutdown(wait=False)

    def _begin(self) -> None:
        while self._n_free and len(self._waiting):
            job = self._waiting.pop()
            self._n_free -= 1
            done = asyncio.get_running_loop().run_in_executor(self._threads, job.work)
            done.add_done_callback(partial(self._take, job, time.perf_counter()))

    def _take(self, job: _Job, began: float, done: asyncio.Future[Any]) -> None:
        self._n_free += 1
        self._seconds = time.perf_counter() - began
        error = done.exception()
        if not job.result.done():  # otherwise the client has gone
            if error is None:
                job.result.set_result(done.result())
            else:
                job.result.set_exception(error)
        self._begin()


class Preparation:
    """The threads of one service. bodies: a single thread, since parsing holds the interpreter's lock."""

    def __init__(self) -> None:
        self._bodies = TurnTaking("hotset-json", 1)
        self._short = TurnTaking("hotset-text", 2)
        self._long = TurnTaking("hotset-long-text", 2)

    def limit(self, max_waiting: int) -> None:
        """Set how many jobs of each kind may wait."""
        for threads in (self._bodies, self._short, self._long):
            threads.max_waiting = max_waiting

    def bodies(self) -> TurnTaking:
        return self._bodies

    def text(self, *, long: bool) -> TurnTaking:
        """Return the threads for texts. long: the work may take long: a body of LONG_BYTES, or a grammar."""
        return self._long if long else self._short

    def close(self) -> None:
        for threads in (self._bodies, self._short, self._long):
            threads.close()
