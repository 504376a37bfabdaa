"""The thread that drives an engine, so that no consumer of an answer has to.

A caller submits a sequence and takes its events; the thread computes whether they are taken or
not. It lives while there is work and a moment longer. Others may have the engine to themselves between two
steps (`exclusive`): scores, taps and comparisons drive it in their own thread then, and what runs goes on
with their steps.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from queue import Empty, SimpleQueue
from typing import TypeVar, cast

from hotset.engine.counters import Counters
from hotset.engine.engine import Engine
from hotset.engine.sequence import Event, EventSink, Sequence
from hotset.errors import InvalidRequestError, OutOfMemoryError, QueueFullError

_T = TypeVar("_T")

_LINGER_SECONDS = 1.0  # that the thread waits for more work before it ends
_AGAIN_SECONDS = 0.01  # between two attempts to end a step: one that is just about to begin does not hear
_LOOK_SECONDS = 0.25  # between two looks whether a consumer waits for something that cannot come any more


class EngineThread:
    """Drives `engine` in a thread of its own. Every method may be called from any thread.

    max_waiting: how many sequences may wait beside as many as run at once (`Engine.max_sequences`); None: any
    number. Servers set it.

    In a forked process, where the thread is not, a new one takes over an engine without sequences; what the
    parent asked for stays with the parent.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.max_waiting: int | None = None
        self._n_refused = 0
        self._closed = False
        self._begin()
        _living.add(self)

    def _begin(self) -> None:
        self.process = os.getpid()
        self._wake = threading.Condition()  # guards what follows
        self._inbox: deque[Sequence] = deque()
        self._guests = 0  # who want the engine between two steps, or have it
        self._thread: threading.Thread | None = None
        self._turn = threading.Lock()  # held by the thread that drives the engine
        self._driver: int | None = None  # the id of that thread

    @property
    def closed(self) -> bool:
        return self._closed

    # ---- requests ----

    def submit(self, sequence: Sequence, events: EventSink | None = None) -> None:
        """Queues a sequence of `Engine.prepare`; its events come from `next_event`, or go to `events`.

        events: called by the thread that computes, which must not wait there. Raises InvalidRequestError once
        it was closed, QueueFullError where too many wait, OutOfMemoryError where no thread can be started.
        """
        self._after_fork()
        with self._wake:
            self._check_open()
            self.check_room()
            sequence.events = SimpleQueue() if events is None else events
            self._inbox.append(sequence)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="hotset-engine", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError as error:
                    self._thread = None
                    self._inbox.remove(sequence)
                    raise OutOfMemoryError(
                        f"the thread that computes answers cannot be started ({error}); end other processes"
                    ) from None
            self._wake.notify_all()
            drives = self._thread.ident == self._driver and not self._guests
        if drives:  # a guest's steps do not take it in
            self.engine.preempt_step(sequence)

    def check_room(self, n: int = 1) -> None:
        """Raises QueueFullError where so many sequences more are too many (`max_waiting`)."""
        if self.max_waiting is None:
            return
        n_there = len(self._inbox) + self.engine.scheduler.n_unfinished
        if n_there + n > self.engine.max_sequences + self.max_waiting:
            self._n_refused += 1
            n_waiting = max(n_there - len(self.engine.scheduler.running), 0)
            raise QueueFullError(n_waiting, self.engine.seconds_to_wait())

    def next_event(self, sequence: Sequence) -> Event:
        """Waits for the next event of a submitted sequence; the one with a finish_reason is the last."""
        queue = cast("SimpleQueue[Event]", sequence.events)  # no sink of the caller's
        while True:
            _check_process(sequence)
            try:
                # Ctrl-C ends the wait; on Windows it does so when the time is over.
                return queue.get(timeout=_LOOK_SECONDS)
            except Empty:
                continue

    def wait_for_end(self, sequence: Sequence) -> None:
        """Waits until every event of a submitted sequence is there.

        For callers without use for a token before the last: to be woken for each takes a core from the step
        that computes the next one, a twentieth of the speed of a small model on two cores.
        """
        while not sequence.all_notified.wait(timeout=_LOOK_SECONDS):
            _check_process(sequence)

    def cancel(self, sequences: Iterable[Sequence]) -> None:
        """Ends what of these still runs, with the step in flight that computes it, and waits for it.

        A thread that drives the engine (a garbage collection may cancel anywhere) does not wait: its next
        step ends them.
        """
        left = [sequence for sequence in sequences if sequence.process == os.getpid()]
        if self._driver == threading.get_ident():
            for sequence in left:
                self.engine.interrupt(sequence)
            return
        while left := [sequence for sequence in left if sequence.finish_reason is None]:
            for sequence in left:
                self.engine.interrupt(sequence)
            self._take_turn(_AGAIN_SECONDS)

    def cancel_soon(self, sequences: Iterable[Sequence]) -> None:
        """Ends what of these still runs, and does not wait: for a thread that must not.

        The next step goes without them. One in flight goes on where others are in it.
        """
        for sequence in sequences:
            if sequence.process == os.getpid() and sequence.finish_reason is None:
                self.engine.interrupt(sequence, spare_others=True)

    def counters(self) -> Counters:
        """The engine's counters, with those whom it has not taken in yet; no step waits for it."""
        counters = self.engine.counters()
        counters.waiting += len(self._inbox)
        counters.refused = self._n_refused
        return counters

    # ---- the engine for others ----

    @contextmanager
    def exclusive(self) -> Iterator[Engine]:
        """The engine, between two steps of the thread, which waits until it is given back."""
        self._after_fork()
        if self._driver == threading.get_ident():  # it has it already
            yield self.engine
            return
        with self._guest(), self._turn:
            self._driver = threading.get_ident()
            try:
                self._check_open()
                self._take_in()
                yield self.engine
            finally:
                self._driver = None

    def close(self) -> None:
        """Ends every sequence as cancelled, the step in flight too, and the thread; safe to call twice."""
        self._after_fork()
        with self._wake:
            self._closed = True
            thread = self._thread
            self._wake.notify_all()
        if self._driver == threading.get_ident():  # a guest closes it
            self.engine.interrupt(None)
            self._take_in()
            return
        while not self._take_turn(_AGAIN_SECONDS):
            self.engine.interrupt(None)
            self.engine.cancel_step()  # of a guest, too
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        _living.discard(self)

    # ---- the thread ----

    def _run(self) -> None:
        while self._wait_for_work():
            with self._turn:
                self._driver = threading.get_ident()
                try:
                    self._take_in()
                    if not self._closed and self.engine.has_work:
                        self.engine.step()
                except BaseException as error:
                    if error is not self.engine.latest_error:  # else those whom it concerns have it
                        self.engine.fail(error if isinstance(error, Exception) else RuntimeError(repr(error)))
                    self.engine.latest_error = None
                finally:
                    self._driver = None

    def _wait_for_work(self) -> bool:
        """Whether there is any; without it for a while the thread ends."""
        with self._wake:
            while not self._closed:
                if self._inbox or (self.engine.has_work and not self._guests):
                    return True
                # A guest wakes this thread when it leaves; what it leaves is not for us to forget.
                timeout = None if self._guests else _LINGER_SECONDS
                if not self._wake.wait(timeout) and not (self._inbox or self._guests or self.engine.has_work):
                    break
            self._thread = None
            return False

    def _take_in(self) -> None:
        """Hands the inbox to the engine; the thread that has the turn does it."""
        while self._inbox:
            self.engine.enqueue(self._inbox[0])  # it is in both for a moment: never in neither
            self._inbox.popleft()
        self.engine.end_interrupted()

    def _take_turn(self, seconds: float) -> bool:
        """Waits that long for the turn, and ends what was interrupted; all, where this is closed."""
        with self._guest():
            if not self._turn.acquire(timeout=seconds):
                return False
            try:
                if self._closed:
                    self.engine.interrupt(None)
                self._take_in()
            finally:
                self._turn.release()
        return True

    @contextmanager
    def _guest(self) -> Iterator[None]:
        wake = self._wake
        with wake:
            self._guests += 1
        try:
            yield
        finally:
            if wake is self._wake:  # else the guest forked: its child begins without any
                with wake:
                    self._guests -= 1
                    wake.notify_all()

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidRequestError("the model has been closed; load it again")

    def _after_fork(self) -> None:
        """In a forked process: begins anew, since thread and locks are as the parent's threads left them."""
        if self.process != os.getpid():
            self._begin()
            self.engine.reset()


def _check_process(sequence: Sequence) -> None:
    if sequence.process != os.getpid():
        raise InvalidRequestError(
            "the answer belongs to the process that asked for it; ask again in this one"
        )


_living: weakref.WeakSet[EngineThread] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Ends the threads before the interpreter does: back from native code, one would find no Python."""
    for thread in list(_living):
        if thread.process == os.getpid():
            thread.close()


def in_turns(threads: Collection[EngineThread], results: Iterator[_T]) -> Iterator[_T]:
    """The results, each computed while no thread takes a step; between two of them whatever else runs."""
    while True:
        with ExitStack() as turns:
            for thread in sorted(threads, key=id):  # one order for all callers: no two wait for each other
                turns.enter_context(thread.exclusive())
            now = next(results, None)
        if now is None:
            return
        yield now
