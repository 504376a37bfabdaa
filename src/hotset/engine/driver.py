"""The thread that runs an engine's steps, independently of the threads that consume the answers.

A caller submits a sequence and reads its events; the thread computes whether or not they are read. It ends
soon after it runs out of work. Another thread can take the engine between two steps (`exclusive`) and run the
steps itself, for scores, taps and comparisons; running sequences continue in these steps.
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

LINGER_SECONDS = 1.0  # how long the thread waits for more work before it ends
_AGAIN_SECONDS = 0.01  # between two attempts to cancel a step: one that has not begun yet misses the first
_LOOK_SECONDS = 0.25  # between two checks whether a waiting consumer was forked away from its engine


class EngineThread:
    """A thread that runs the steps of `engine`. Every method may be called from any thread.

    max_waiting: how many sequences may wait in addition to the `Engine.max_sequences` that run; None: any
    number. Servers set it.

    A forked process does not have its parent's thread. There, a new thread starts with an empty engine; the
    parent's sequences stay with the parent.
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
        self._wake = threading.Condition()  # guards the attributes below
        self._inbox: deque[Sequence] = deque()
        self._guests = 0  # threads in `exclusive` or waiting to enter it
        self._thread: threading.Thread | None = None
        self._turn = threading.Lock()  # held by the thread that runs the engine
        self._driver: int | None = None  # the id of that thread

    @property
    def closed(self) -> bool:
        return self._closed

    # ---- requests ----

    def submit(self, sequence: Sequence, events: EventSink | None = None) -> None:
        """Queue a sequence from `Engine.prepare`. Its events go to `events`, or are read with `next_event`.

        events: called by the thread that runs the steps, so it must not block. Raises InvalidRequestError
        after `close`, QueueFullError if too many sequences wait, and OutOfMemoryError if no thread can be
        started.
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
        if drives:  # the steps of an exclusive caller do not take in new sequences
            self.engine.preempt_step(sequence)

    def check_room(self, n: int = 1) -> None:
        """Raise QueueFullError if `n` more sequences would exceed `max_waiting`."""
        if self.max_waiting is None:
            return
        n_there = len(self._inbox) + self.engine.scheduler.n_unfinished
        if n_there + n > self.engine.max_sequences + self.max_waiting:
            self._n_refused += 1
            n_waiting = max(n_there - len(self.engine.scheduler.running), 0)
            raise QueueFullError(n_waiting, self.engine.seconds_to_wait())

    def next_event(self, sequence: Sequence) -> Event:
        """Wait for the next event of a submitted sequence. The last event has a finish_reason."""
        queue = cast("SimpleQueue[Event]", sequence.events)  # not a caller's sink
        while True:
            _check_process(sequence)
            try:
                # Ctrl-C interrupts this wait; on Windows only once the timeout has passed.
                return queue.get(timeout=_LOOK_SECONDS)
            except Empty:
                continue

    def wait_for_end(self, sequence: Sequence) -> None:
        """Wait until a submitted sequence has all its events.

        For callers that need no token early: waking a thread for each token takes a core from the next step,
        which costs 5% of the speed of a small model on two cores.
        """
        while not sequence.all_notified.wait(timeout=_LOOK_SECONDS):
            _check_process(sequence)

    def cancel(self, sequences: Iterable[Sequence]) -> None:
        """Cancel the unfinished sequences among these, with the step that computes them, and wait.

        A thread that runs the engine does not wait (a garbage collection may call this anywhere): its next
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
        """Cancel the unfinished sequences among these without waiting.

        The next step runs without them. A step in flight continues if it also computes other sequences.
        """
        for sequence in sequences:
            if sequence.process == os.getpid() and sequence.finish_reason is None:
                self.engine.interrupt(sequence, spare_others=True)

    def counters(self) -> Counters:
        """Return the engine's counters, including sequences in the inbox, without waiting for a step."""
        counters = self.engine.counters()
        counters.waiting += len(self._inbox)
        counters.refused = self._n_refused
        return counters

    # ---- the engine for others ----

    @contextmanager
    def exclusive(self) -> Iterator[Engine]:
        """Yield the engine between two steps; the thread waits until the block ends."""
        self._after_fork()
        if self._driver == threading.get_ident():  # this thread already has the engine
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
        """Cancel every sequence and the step in flight, and end the thread; safe to call twice."""
        self._after_fork()
        with self._wake:
            self._closed = True
            thread = self._thread
            self._wake.notify_all()
        if self._driver == threading.get_ident():  # called inside `exclusive`
            self.engine.interrupt(None)
            self._take_in()
            return
        while not self._take_turn(_AGAIN_SECONDS):
            self.engine.interrupt(None)
            self.engine.cancel_step()  # also ends the step of an exclusive caller
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
                    if error is not self.engine.latest_error:  # otherwise its sequences already have it
                        self.engine.fail(error if isinstance(error, Exception) else RuntimeError(repr(error)))
                    self.engine.latest_error = None
                finally:
                    self._driver = None

    def _wait_for_work(self) -> bool:
        """Return True as soon as there is work, or False after a while without any: the thread must end."""
        with self._wake:
            while not self._closed:
                if self._inbox or (self.engine.has_work and not self._guests):
                    return True
                # An exclusive caller wakes this thread when it leaves, perhaps with work.
                timeout = None if self._guests else LINGER_SECONDS
                if not self._wake.wait(timeout) and not (self._inbox or self._guests or self.engine.has_work):
                    break
            self._thread = None
            return False

    def _take_in(self) -> None:
        """Hand the inbox to the engine; only for the thread that holds the turn."""
        while self._inbox:
            self.engine.enqueue(self._inbox[0])  # briefly in both: `counters` must never miss it
            self._inbox.popleft()
        self.engine.end_interrupted()

    def _take_turn(self, seconds: float) -> bool:
        """Wait at most `seconds` for the turn, then end interrupted sequences (all, if closed).

        Returns whether it got the turn.
        """
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
            if wake is self._wake:  # otherwise this is a forked child, whose count starts at zero
                with wake:
                    self._guests -= 1
                    wake.notify_all()

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidRequestError("the model has been closed; load it again")

    def _after_fork(self) -> None:
        """Start again in a forked process: the parent's thread is gone and its locks may be held."""
        if self.process != os.getpid():
            self._begin()
            self.engine.reset()


def _check_process(sequence: Sequence) -> None:
    if sequence.process != os.getpid():
        raise InvalidRequestError(
            "the answer belongs to the process that requested it; send the request again in this process"
        )


_living: weakref.WeakSet[EngineThread] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """End the threads before the interpreter exits: native code must not return to a finalised Python."""
    for thread in list(_living):
        if thread.process == os.getpid():
            thread.close()


def in_turns(threads: Collection[EngineThread], results: Iterator[_T]) -> Iterator[_T]:
    """Yield the results, computing each while no thread runs a step; steps run between two of them."""
    while True:
        with ExitStack() as turns:
            for thread in sorted(threads, key=id):  # the same order in all callers avoids deadlock
                turns.enter_context(thread.exclusive())
            now = next(results, None)
        if now is None:
            return
        yield now
