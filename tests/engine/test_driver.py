"""The thread that drives the engine: cancelled, forked or failing requests do not change others' tokens."""

from __future__ import annotations

import gc
import itertools
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fake_backend import FakeBackend, drain, prompt
from waiting import WATCHDOG, until, when

from hotset.backends.base import Batch, StepResult
from hotset.engine import driver
from hotset.engine.driver import EngineThread
from hotset.engine.engine import Engine
from hotset.engine.pacing import PrefillBudget, PrefillChunk, divide, weigher
from hotset.engine.sampler import SamplingParams
from hotset.engine.sequence import Event, Owner, Sequence
from hotset.errors import (
    HotsetError,
    InvalidRequestError,
    OutOfMemoryError,
    QueueFullError,
    StepCancelledError,
)


def expected(tokens: list[int], **params: Any) -> list[int]:
    engine = Engine(FakeBackend(), 2048)
    sequence = engine.enqueue(engine.prepare(tokens, SamplingParams(**params)))
    drain(engine)
    return sequence.generated


class Gated(FakeBackend):
    """A backend that starts a step only with a permit, and stops in its middle until there is another."""

    def __init__(self, can_cancel: bool = True, **options: Any) -> None:
        super().__init__(**options)
        self.permits = threading.Semaphore(0)
        self.is_inside = threading.Event()
        self.told = threading.Event()
        self.asked = threading.Event()
        self.can_cancel = can_cancel

    def cancel(self) -> None:
        self.asked.set()
        if self.can_cancel:
            self.told.set()

    def step(self, batch: Batch) -> StepResult:
        self.thread = threading.current_thread()
        self.is_inside.set()
        while not self.permits.acquire(timeout=0.001):
            if self.told.is_set():
                self.told.clear()
                raise StepCancelledError
        self.is_inside.clear()
        return super().step(batch)


@pytest.fixture
def gated() -> Iterator[tuple[Gated, EngineThread]]:
    backend = Gated()
    thread = EngineThread(Engine(backend, 512))
    yield backend, thread
    backend.permits.release(1000)
    thread.close()


@pytest.fixture
def thread() -> Iterator[EngineThread]:
    thread = EngineThread(Engine(FakeBackend(), 512))
    yield thread
    thread.close()


def ask(thread: EngineThread, tokens: list[int], **params: Any) -> Sequence:
    sequence = thread.engine.prepare(tokens, SamplingParams(**params))
    thread.submit(sequence)
    return sequence


def events(thread: EngineThread, sequence: Sequence) -> list[Event]:
    taken = [thread.next_event(sequence)]
    while taken[-1].finish_reason is None:
        taken.append(thread.next_event(sequence))
    return taken


def tokens_of(thread: EngineThread, sequence: Sequence) -> list[int]:
    return [event.token for event in events(thread, sequence) if event.token is not None]


def test_an_event_for_each_token_and_the_end_with_the_last(thread: EngineThread) -> None:
    sequence = ask(thread, prompt(20), seed=1, max_tokens=30, logprobs=1)
    taken = events(thread, sequence)
    assert [event.token for event in taken] == expected(prompt(20), seed=1, max_tokens=30)
    assert [event.finish_reason for event in taken] == [None] * 29 + ["length"]
    assert [event.logprobs for event in taken] == sequence.logprobs
    assert all(event.error is None for event in taken)
    times = [event.time for event in taken]
    assert times == sorted(times)
    assert sequence.events is not None
    assert sequence.events.empty()


def test_caller_can_wait_only_for_the_end(thread: EngineThread) -> None:
    sequence = ask(thread, prompt(20), seed=1, max_tokens=30)
    thread.wait_for_end(sequence)
    assert sequence.events is not None
    assert sequence.events.qsize() == 30
    assert tokens_of(thread, sequence) == expected(prompt(20), seed=1, max_tokens=30)


@pytest.mark.parametrize("how", ["cancel", "close", "fail"])
def test_waiter_learns_of_any_end(gated: tuple[Gated, EngineThread], how: str) -> None:
    backend, thread = gated
    sequence = ask(thread, prompt(20), seed=1, max_tokens=30)
    assert backend.is_inside.wait(WATCHDOG)
    if how == "fail":
        backend.fail_at_step = 0
        backend.permits.release(1000)
    else:
        {"cancel": lambda: thread.cancel([sequence]), "close": thread.close}[how]()
    thread.wait_for_end(sequence)
    assert sequence.finish_reason == ("error" if how == "fail" else "cancelled")


def test_events_go_where_the_caller_says(thread: EngineThread) -> None:
    told: list[Event] = []

    class Sink:
        def put(self, event: Event) -> None:
            told.append(event)

    tokens = prompt(9)
    sequence = thread.engine.prepare(tokens, SamplingParams(temperature=0, max_tokens=5))
    thread.submit(sequence, Sink())
    thread.wait_for_end(sequence)
    assert [event.token for event in told] == expected(tokens, temperature=0, max_tokens=5)
    assert [event.finish_reason for event in told] == [None] * 4 + ["length"]


def test_a_stop_token_comes_with_its_reason(thread: EngineThread) -> None:
    free = expected(prompt(10), seed=4, max_tokens=60)
    sequence = thread.engine.prepare(prompt(10), SamplingParams(seed=4), stop_ids=(free[9],))
    thread.submit(sequence)
    taken = events(thread, sequence)
    assert [event.token for event in taken] == free[: free.index(free[9]) + 1]
    assert taken[-1].finish_reason == "stop"


def test_it_computes_whether_anybody_takes_or_not(thread: EngineThread) -> None:
    slow, quick = (ask(thread, prompt(9, i), seed=i, max_tokens=50) for i in range(2))
    assert tokens_of(thread, quick) == expected(prompt(9, 1), seed=1, max_tokens=50)
    assert len(slow.generated) >= 49
    assert tokens_of(thread, slow) == expected(prompt(9), seed=0, max_tokens=50)


def test_consumers_in_many_threads_get_their_own(thread: EngineThread) -> None:
    got: dict[int, list[int]] = {}

    def consume(i: int) -> None:
        got[i] = tokens_of(thread, ask(thread, prompt(5 + i, i), seed=i, max_tokens=20))

    threads = [threading.Thread(target=consume, args=(i,)) for i in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert got == {i: expected(prompt(5 + i, i), seed=i, max_tokens=20) for i in range(8)}


@pytest.mark.parametrize("can_cancel", [True, False])
def test_cancelling_ends_one_answer_and_disturbs_no_other(can_cancel: bool) -> None:
    backend = Gated(can_cancel)
    thread = EngineThread(Engine(backend, 512))
    kept, dropped = (ask(thread, prompt(30, i), seed=i, max_tokens=20) for i in range(2))
    backend.permits.release(3)
    for sequence in (kept, dropped):
        thread.next_event(sequence)
    assert backend.is_inside.wait(WATCHDOG)
    if not can_cancel:  # then the step runs to its end
        when(backend.asked, lambda: backend.permits.release(1000))
    thread.cancel([dropped])
    assert dropped.finish_reason == "cancelled"
    assert dropped.slot == -1
    assert events(thread, dropped)[-1].finish_reason == "cancelled"
    thread.cancel([dropped])
    backend.permits.release(1000)
    assert tokens_of(thread, kept) == expected(prompt(30), seed=0, max_tokens=20)[1:]
    assert thread.engine.scheduler.pool.n_available == thread.engine.scheduler.pool.n_blocks
    thread.close()


def test_a_request_can_be_cancelled_before_it_has_begun(gated: tuple[Gated, EngineThread]) -> None:
    backend, thread = gated
    first = ask(thread, prompt(5), seed=1, max_tokens=5)
    assert backend.is_inside.wait(WATCHDOG)
    second = ask(thread, prompt(6), seed=1)
    threading.Timer(0.05, backend.permits.release).start()  # it is not in the step, which goes on for others
    thread.cancel([second])
    assert [event.finish_reason for event in events(thread, second)] == ["cancelled"]
    never = thread.engine.prepare(prompt(6), SamplingParams(seed=1))
    thread.engine.interrupt(never)
    backend.permits.release(1000)
    assert tokens_of(thread, first) == expected(prompt(5), seed=1, max_tokens=5)
    assert never.finish_reason == "cancelled"


def test_ctrl_c_interrupts_the_wait_and_the_request_can_be_cancelled(
    gated: tuple[Gated, EngineThread],
) -> None:
    backend, thread = gated
    sequence = ask(thread, prompt(5), seed=1)
    waits = threading.Event()

    class Queue:
        def get(self, timeout: float) -> Event:
            waits.set()
            return queue.get(timeout=timeout)

        put = property(lambda self: queue.put)

    def press() -> None:
        waits.wait(WATCHDOG)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def wait() -> None:
        threading.Thread(target=press).start()
        thread.next_event(sequence)

    queue, sequence.events = sequence.events, Queue()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        wait()
    thread.cancel([sequence])
    assert sequence.finish_reason == "cancelled"
    again = ask(thread, prompt(5), seed=1, max_tokens=3)
    backend.permits.release(1000)
    assert tokens_of(thread, again) == expected(prompt(5), seed=1, max_tokens=3)


def test_more_than_may_wait_are_refused(gated: tuple[Gated, EngineThread]) -> None:
    backend = gated[0]
    thread = EngineThread(Engine(backend, 512, 2))
    thread.max_waiting = 3
    sequences = [ask(thread, prompt(5, i), seed=i, max_tokens=4) for i in range(5)]
    assert backend.is_inside.wait(WATCHDOG)
    refused = thread.engine.prepare(prompt(6), SamplingParams(seed=9, max_tokens=2))
    with pytest.raises(QueueFullError, match=r"requests are already waiting.* try again in 1 s") as full:
        thread.submit(refused)
    assert 0.0 <= full.value.seconds < WATCHDOG
    thread.check_room(0)
    threading.Timer(0.05, backend.permits.release).start()  # a waiting request does not end the step
    thread.cancel([sequences[3]])
    with pytest.raises(QueueFullError):
        thread.check_room(2)
    thread.submit(refused)
    backend.permits.release(1000)
    sequences[3] = refused
    got = [tokens_of(thread, each) for each in sequences]
    assert got[:3] == [expected(prompt(5, i), seed=i, max_tokens=4) for i in range(3)]
    assert got[3] == expected(prompt(6), seed=9, max_tokens=2)
    for each in sequences:
        thread.wait_for_end(each)
    thread.check_room(5)
    thread.close()


def test_counters_are_current_during_a_step() -> None:
    backend = Gated(n_blocks=10)
    thread = EngineThread(Engine(backend, 512, 2))
    thread.max_waiting = 1
    running = [ask(thread, prompt(130, 1), seed=i, max_tokens=4) for i in range(2)]
    assert backend.is_inside.wait(WATCHDOG)
    waiting = ask(thread, prompt(5), seed=1)
    with pytest.raises(QueueFullError):
        ask(thread, prompt(5), seed=1)
    now = thread.counters()  # during a step
    assert (now.running + now.waiting, now.steps, now.refused) == (3, 0, 1)
    threading.Timer(0.05, backend.permits.release, (1000,)).start()
    thread.cancel([waiting])
    for each in running:
        thread.wait_for_end(each)
    with thread.exclusive() as engine:
        engine.enqueue(engine.prepare(prompt(9), SamplingParams(seed=1)))
        backend.fail_at_step = len(backend.batches)
        with pytest.raises(RuntimeError):
            engine.step()
        engine.enqueue(engine.prepare(prompt(9), SamplingParams(seed=1), owner=Owner.of(None, 0)))
        engine.step()
    then = thread.counters()
    assert (then.finished, then.cancelled, then.timed_out, then.failed) == (2, 1, 1, 1)
    assert then.prompt_tokens + then.generated_tokens >= 132 + 8
    assert then.prompt_tokens == 130 + 2 + (5 if waiting.started else 0)
    assert (then.reused_tokens, then.preemptions) == (128, 0)
    assert then.generated_tokens == 8 + len(waiting.generated)
    assert then.steps == len(backend.batches)
    assert then.step_seconds > 0.0
    assert (then.running, then.waiting) == (0, 0)
    assert (then.blocks, then.blocks_used, then.blocks_cached) == (10, 0, 2)
    thread.close()


def test_wait_is_learned_from_finished_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Clocked(n_blocks=200)
    monkeypatch.setattr("hotset.engine.engine.time.perf_counter", lambda: backend.now)
    engine = Engine(backend, 1024, 4)
    assert engine.seconds_to_wait() == 0.0
    running = [
        engine.enqueue(engine.prepare(prompt(5, i), SamplingParams(seed=i, max_tokens=10))) for i in range(4)
    ]
    for _ in range(4):
        engine.step()
    assert engine.seconds_to_wait() == pytest.approx(backend.now / 4)  # no request has ended yet
    while engine.has_work:
        engine.step()
    seconds = backend.now
    running += [engine.enqueue(engine.prepare(prompt(5, i), SamplingParams(seed=i))) for i in range(2)]
    engine.step()
    assert engine.seconds_to_wait() == pytest.approx(seconds / 2)


def test_failed_step_reaches_its_requests_and_the_engine_continues() -> None:
    backend = Gated()
    thread = EngineThread(Engine(backend, 512, 2))
    failing = [ask(thread, prompt(5, i), seed=i, max_tokens=9) for i in range(2)]
    assert backend.is_inside.wait(WATCHDOG)
    waiting = ask(thread, prompt(7), seed=5, max_tokens=9)
    backend.fail_at_step = 2
    backend.permits.release(1000)
    for sequence in failing:
        last = events(thread, sequence)[-1]
        assert (last.token, last.finish_reason) == (None, "error")
        assert isinstance(last.error, RuntimeError)
    assert tokens_of(thread, waiting) == expected(prompt(7), seed=5, max_tokens=9)
    thread.close()


def test_engine_fault_ends_running_requests_but_not_the_thread(
    thread: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise ValueError("a fault")

    with thread.exclusive() as engine:
        sequences = [ask(thread, prompt(5, i), seed=i) for i in range(3)]
        monkeypatch.setattr(engine.scheduler, "schedule", broken)
    for sequence in sequences:
        last = events(thread, sequence)[-1]
        assert last.finish_reason == "error"
        assert isinstance(last.error, ValueError)
    monkeypatch.undo()
    assert tokens_of(thread, ask(thread, prompt(5), seed=0, max_tokens=4)) == expected(
        prompt(5), seed=0, max_tokens=4
    )


def test_closing_ends_everything(gated: tuple[Gated, EngineThread]) -> None:
    backend, thread = gated
    sequences = [ask(thread, prompt(5, i), seed=i) for i in range(3)]
    backend.permits.release()
    thread.next_event(sequences[0])
    assert backend.is_inside.wait(WATCHDOG)
    late = ask(thread, prompt(4), seed=9)
    thread.close()
    thread.close()
    assert not backend.thread.is_alive()
    for sequence in (*sequences, late):
        assert events(thread, sequence)[-1].finish_reason == "cancelled"
    assert not thread.engine.has_work
    with pytest.raises(InvalidRequestError, match="has been closed"):
        ask(thread, prompt(5), seed=1)
    with pytest.raises(InvalidRequestError, match="has been closed"), thread.exclusive():
        pass


def test_closing_from_inside_a_turn(thread: EngineThread) -> None:
    sequence = ask(thread, prompt(5), seed=1)
    with thread.exclusive() as engine:
        thread.close()
        assert not engine.has_work
    assert events(thread, sequence)[-1].finish_reason in ("cancelled", "length")


def test_the_engine_is_ones_own_between_two_steps(gated: tuple[Gated, EngineThread]) -> None:
    backend, thread = gated
    sequence = ask(thread, prompt(9), seed=2, max_tokens=12)
    backend.permits.release(1000)
    thread.next_event(sequence)
    rows: list[int] = []
    with thread.exclusive() as engine, thread.exclusive() as again:
        assert again is engine
        n_steps = len(backend.batches)
        assert not backend.is_inside.wait(0.05)
        assert len(backend.batches) == n_steps
        score = engine.enqueue(
            engine.prepare_score(prompt(40), lambda position, logits: rows.append(len(logits)))
        )
        while score.finish_reason is None:
            engine.step()
    assert sum(rows) == 40
    # Running requests got their tokens from the guest's steps too.
    assert tokens_of(thread, sequence) == expected(prompt(9), seed=2, max_tokens=12)[1:]


def test_a_guest_is_let_in_while_answers_run(thread: EngineThread) -> None:
    running = [ask(thread, prompt(5, i), seed=i) for i in range(4)]
    n = [len(running[0].tokens)]
    for _ in range(20):
        with thread.exclusive():
            n.append(len(running[0].tokens))
    assert n[-1] < 512  # the thread lets others in before it is finished
    thread.cancel(running)


@pytest.mark.parametrize("kind", ["cancel", "collection"])
def test_cancelling_in_the_thread_that_steps_does_not_wait_for_itself(
    thread: EngineThread, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a garbage collection may close another stream anywhere, also during a step."""
    other = thread.engine.prepare(prompt(9), SamplingParams(seed=1))

    def stream() -> Iterator[Event]:
        try:
            thread.submit(other)
            while True:
                yield thread.next_event(other)
        finally:
            thread.cancel([other])

    step, n_steps = thread.engine.backend.step, itertools.count()

    def stepped(batch: Batch) -> StepResult:
        """Take two steps, and wait for another thread to request the engine, so the stream cannot end."""
        if threading.current_thread() is not threading.main_thread() and next(n_steps) >= 2:
            until(lambda: thread._guests > 0)
        return step(batch)

    monkeypatch.setattr(thread.engine.backend, "step", stepped)
    left = [stream()]
    next(left[0])

    def while_stepping(position: int, rows: np.ndarray) -> None:
        if kind == "cancel":
            thread.cancel([other])
        left.clear()
        gc.collect()

    with thread.exclusive() as engine:
        score = engine.enqueue(engine.prepare_score(prompt(20), while_stepping))
        while score.finish_reason is None:
            engine.step()
    taken = events(thread, other)
    assert taken[-1].finish_reason == "cancelled"
    left.clear()


def test_the_thread_ends_when_nothing_is_left_and_comes_again(
    thread: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "LINGER_SECONDS", 0.0)
    step, running = thread.engine.backend.step, list[threading.Thread]()

    def stepped(batch: Batch) -> StepResult:
        running.append(threading.current_thread())
        return step(batch)

    monkeypatch.setattr(thread.engine.backend, "step", stepped)
    for seed in range(3):
        running.clear()
        sequence = ask(thread, prompt(5), seed=seed, max_tokens=4)
        assert tokens_of(thread, sequence) == expected(prompt(5), seed=seed, max_tokens=4)
        assert len(set(running)) == 1
        running[0].join(WATCHDOG)
        assert not running[0].is_alive()


def test_failed_thread_start_gives_one_message(thread: EngineThread, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        with pytest.raises(OutOfMemoryError, match=r"cannot be started \(can't start new thread\)"):
            ask(thread, prompt(5), seed=1)
    assert tokens_of(thread, ask(thread, prompt(5), seed=1, max_tokens=4)) == expected(
        prompt(5), seed=1, max_tokens=4
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_forked_process_starts_with_its_own_state(gated: tuple[Gated, EngineThread]) -> None:
    backend, thread = gated
    sequence = ask(thread, prompt(5), seed=1, max_tokens=6)
    backend.permits.release()
    thread.next_event(sequence)
    assert backend.is_inside.wait(WATCHDOG)
    thread._wake.acquire()  # as if held by another thread
    pid = os.fork()
    if pid == 0:
        try:
            backend.permits = threading.Semaphore(1000)
            with thread.exclusive() as engine:
                assert not engine.has_work
                assert engine.scheduler.pool.n_available == engine.scheduler.pool.n_blocks
            mine = tokens_of(thread, ask(thread, prompt(8), seed=3, max_tokens=5))
            ok = mine == expected(prompt(8), seed=3, max_tokens=5)
            try:
                thread.next_event(sequence)
                ok = False
            except HotsetError as error:
                ok = ok and "belongs to the process that requested it" in str(error)
            thread.cancel([sequence])
            thread.close()
            os._exit(0 if ok else 1)
        except BaseException:
            os._exit(2)
    thread._wake.release()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    backend.permits.release(1000)
    assert tokens_of(thread, sequence) == expected(prompt(5), seed=1, max_tokens=6)[1:]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_process_forked_inside_a_turn_has_an_engine_too(thread: EngineThread) -> None:
    with thread.exclusive():
        pid = os.fork()
        if pid == 0:
            signal.alarm(int(WATCHDOG))
            with thread.exclusive() as engine:
                assert not engine.has_work
    if pid == 0:
        try:
            mine = tokens_of(thread, ask(thread, prompt(8), seed=3, max_tokens=5))
            os._exit(0 if mine == expected(prompt(8), seed=3, max_tokens=5) else 1)
        except BaseException:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_closing_ends_a_step_of_a_guest() -> None:
    backend = Gated()
    thread = EngineThread(Engine(backend, 512))
    ended: list[str | None] = []

    def score() -> None:
        with thread.exclusive() as engine:
            sequence = engine.enqueue(engine.prepare_score(prompt(9), lambda position, rows: None))
            while sequence.finish_reason is None:
                engine.step()
            ended.append(sequence.finish_reason)

    guest = threading.Thread(target=score)
    guest.start()
    assert backend.is_inside.wait(WATCHDOG)
    thread.engine._in_flight = frozenset()  # as in a step in which the guest uses the backend directly
    thread.close()
    guest.join(WATCHDOG)
    assert ended == ["cancelled"]


def test_leaving_the_interpreter_while_it_computes_is_clean() -> None:
    """Check that the thread ends before the interpreter."""
    code = (
        "import atexit, sys; atexit.register(lambda: print(thread.closed, sequence.finish_reason));"
        "sys.path.insert(0, sys.argv[1]); from test_driver import *;"
        "thread = EngineThread(Engine(FakeBackend(), 4000));"
        "sequence = ask(thread, prompt(5), seed=1); thread.next_event(sequence); print('left')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, os.path.dirname(__file__)],
        capture_output=True, text=True, timeout=WATCHDOG,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "left\nTrue cancelled\n", "")


# ---- the prefill token budget ----


class Clocked(FakeBackend):
    """A backend with a clock: a step takes 10 ms and another 1 ms per token."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.now = 0.0
        self.seconds: list[float] = []

    def step(self, batch: Batch) -> StepResult:
        self.seconds.append(0.01 + 0.001 * len(batch.tokens))
        self.now += self.seconds[-1]
        return super().step(batch)


def test_a_long_prompt_does_not_stop_a_running_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Clocked(n_blocks=200, max_batch=2048)
    monkeypatch.setattr("hotset.engine.engine.time.perf_counter", lambda: backend.now)
    engine = Engine(backend, 8192)
    running = engine.enqueue(engine.prepare(prompt(10), SamplingParams(seed=1, max_tokens=200)))
    for _ in range(5):
        engine.step()
    assert engine.backend.batches == [10, 1, 1, 1, 1]
    long = engine.enqueue(engine.prepare(prompt(3000), SamplingParams(seed=2, max_tokens=3)))
    n_before = len(running.generated)
    backend.batches.clear()
    backend.seconds.clear()
    while not long.generated:
        engine.step()
    assert len(running.generated) - n_before == len(backend.batches)  # a token in every step
    assert backend.batches[0] == 17  # before the time of a token is known
    assert max(backend.seconds) < 0.08
    assert sorted(backend.batches)[len(backend.batches) // 2] == pytest.approx(50, abs=3)
    while engine.has_work:
        engine.step()
    assert running.generated == expected(prompt(10), seed=1, max_tokens=200)


def test_scores_of_a_long_prompt_do_not_stop_a_running_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the budget when reading rows of logits, which is outside the backend's step, takes time too."""
    backend = Clocked(n_blocks=200, max_batch=2048)
    monkeypatch.setattr("hotset.engine.engine.time.perf_counter", lambda: backend.now)
    engine = Engine(backend, 8192)
    running = engine.enqueue(engine.prepare(prompt(10), SamplingParams(seed=1, max_tokens=400)))
    engine.enqueue(
        engine.prepare(prompt(200, 5), SamplingParams(seed=2, max_tokens=1))
    )  # the first has no scores
    for _ in range(10):
        engine.step()
    positions: list[int] = []

    def read(position: int, rows: np.ndarray) -> None:
        positions.extend(range(position, position + len(rows)))
        backend.now += 0.003 * len(rows)

    scored = engine.enqueue(engine.prepare_score(prompt(2000, 3), read))
    backend.batches.clear()
    seconds = []
    while not scored.finish_reason:
        begun, n_before = backend.now, len(running.generated)
        engine.step()
        seconds.append(backend.now - begun)
        assert len(running.generated) == n_before + 1
    assert positions == list(range(2000))
    assert max(seconds[1:]) < 0.08  # the first step measures the time of a row
    assert sorted(backend.batches)[len(backend.batches) // 2] == pytest.approx(12, abs=2)
    after = engine.enqueue(engine.prepare(prompt(300, 4), SamplingParams(seed=2, max_tokens=1)))
    backend.batches.clear()
    while not after.finish_reason:
        engine.step()
    assert backend.batches[0] == pytest.approx(40, abs=3)  # the time of scores is not another prompt's
    while engine.has_work:
        engine.step()
    assert running.generated == expected(prompt(10), seed=1, max_tokens=400)


def test_time_of_logits_is_separated_from_time_of_tokens() -> None:
    share = PrefillBudget(0.1)
    share.note(10, 0, 0.03, n_rows=10)  # without other measurements, all time counts for the units
    assert share.of_row(1) == 0
    share.note(64, 0, 0.064)
    fitting = share.mixed
    share.note(20, 0, 0.06, n_rows=20)
    assert share.of_row(1) == pytest.approx(2)
    assert share.mixed == fitting
    share.note(20, 0, 60.0, n_rows=20)  # however slow, a step has room for a few rows
    assert share.mixed / (1 + share.of_row(1)) == pytest.approx(4)
    assert share.pure / (1 + share.of_row(0)) == pytest.approx(64)  # and no request waits for this one
    share.note(64, 0, 0.032, n_rows=4)  # faster than the estimate of only its units: the rows cost nothing
    assert share.of_row(1) == 0
    assert share.seconds_of(64, 0) == pytest.approx(0.032)


def test_prompt_without_answers_takes_longer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check steps of 50 ms, or 16 times as long as a decode step, so that fixed costs are small."""
    backend = Clocked(n_blocks=200, max_batch=2048)
    monkeypatch.setattr("hotset.engine.engine.time.perf_counter", lambda: backend.now)
    engine = Engine(backend, 8192)
    for n_alone in (64, 165):  # before and after the decode step's 11 ms are known
        backend.batches.clear()
        long = engine.enqueue(engine.prepare(prompt(3000, n_alone), SamplingParams(seed=2, max_tokens=3)))
        while not long.generated:
            engine.step()
        assert sorted(backend.batches)[len(backend.batches) // 2] == pytest.approx(n_alone, abs=3)
        while engine.has_work:
            engine.step()
    whole = Engine(FakeBackend(max_batch=100), 512, prompt_seconds=math.inf)
    whole.enqueue(whole.prepare(prompt(250), SamplingParams(seed=1, max_tokens=2)))
    while whole.has_work:
        whole.step()
    assert whole.backend.batches == [100, 100, 50, 1]


def test_share_of_a_prompt_follows_measured_times() -> None:
    share = PrefillBudget(0.1)
    assert (share.mixed, share.pure) == (16, 64)
    for n in (32, 64, 128, 256, 512):  # a fast machine: it doubles
        share.note(share.mixed, 1, 0.001)
        assert (share.mixed, share.pure) == (n, max(n, 64))
    share.note(512, 1, 0.4)  # too slow: it shrinks at once
    assert share.mixed == 128
    share.note(5, 1, 0.01)  # the small end of a prompt changes nothing
    assert share.mixed == 128
    share.note(128, 1, 12.8)
    assert share.mixed == 16  # the minimum
    assert share.pure == 64  # before the time of a step without a prompt is known
    share.note(0, 3, 0.8)  # if decode steps take longer than the limit, they set it
    share.note(16, 3, 1.0)
    assert share.mixed == 32
    share.note(32, 3, 2.4)
    assert share.mixed == pytest.approx(16)
    share.note(64, 0, 6.4)  # 16 decode steps
    assert share.pure == pytest.approx(128)
    assert share.seconds_of(10, 0) == pytest.approx(1.0)
    assert share.seconds_of(10, 1) == pytest.approx(1.8)
    whole = PrefillBudget(math.inf)
    whole.note(8, 0, 50.0)
    assert (whole.mixed, whole.pure) == (math.inf, math.inf)


def test_where_no_answer_runs_steps_grow_as_long_as_that_pays() -> None:
    def grown(step_cost: float) -> list[float]:
        share = PrefillBudget(0.05)
        share.note(0, 1, 0.04)  # a decode step; 16 of these are 0.64 s
        sizes = []
        for _ in range(8):
            units = min(share.pure, 512)
            share.note(units, 0, step_cost + 0.02 * units)
            sizes.append(share.pure)
        return sizes

    assert grown(0.04)[-1] == pytest.approx(30)  # dense: fixed costs are small for 30 tokens
    assert grown(0.4)[-1] == 256  # sparse: a prompt reads all neurons, ten times as many as a decode step


@pytest.mark.parametrize(
    ("missing", "budget", "n_max", "given"),
    [
        ([4000], 128, 512, [128]),
        ([4000], 128, 100, [100]),
        ([160], 128, 512, [160]),  # no extra step for the few remaining tokens
        ([160], 128, 150, [128]),
        ([161], 128, 512, [128]),
        ([4000, 30], 128, 512, [16, 30]),  # a step that finishes a prompt is short
        ([30, 4000], 128, 512, [30, 16]),
        ([4000, 90], 128, 512, [16, 90]),
        ([4000, 120], 128, 512, [64, 64]),
        ([4000, 3000, 2000], 128, 512, [64, 0, 64]),  # the oldest, and the one with the fewest missing tokens
        ([4000, 20, 20, 20, 20], 128, 512, [16, 20, 20, 20, 20]),
        ([100, 100, 100], 128, 512, [100, 16, 0]),
        ([5], 0.5, 512, [1]),
        ([5, 3], 1, 1, [1, 0]),
        ([5, 3], 8, 0, [0, 0]),
        ([700, 700], math.inf, 512, [512, 0]),
        ([700, 100], math.inf, 512, [412, 100]),
        ([], 128, 512, []),
    ],
)
def test_a_step_is_divided_among_prompts(
    missing: list[int], budget: float, n_max: int, given: list[int]
) -> None:
    assert divide([PrefillChunk(n, 1.0) for n in missing], budget, n_max) == given


def test_a_token_far_behind_in_a_prompt_weighs_more() -> None:
    weight = weigher(lambda depth: 100.0 + 0.1 * depth)
    assert [weight(at) for at in (0, 1000)] == [1.0, 3.0]
    chunks = [PrefillChunk(4000, weight(1000)), PrefillChunk(50, weight(0))]
    assert divide(chunks[:1], 120, 512) == [40]
    assert divide(chunks, 120, 512) == [5, 50]
    assert weigher(None)(4000) == 1.0


# ---- a step with long prompts is ended for a short one ----


class Cancellable(Gated):
    """A backend that stays in a step until the test ends it."""

    def __init__(self) -> None:
        super().__init__(n_blocks=200, max_batch=512)
        self.n_cancelled = 0

    def cancel(self) -> None:
        self.n_cancelled += 1
        super().cancel()


@pytest.mark.parametrize(
    ("n_new", "elapsed", "why"),
    [(30, 0.3, ""), (30, 0.6, "it is half done"), (300, 0.1, "the new one is no shorter")],
)
def test_a_short_prompt_ends_a_step_that_has_just_begun(
    monkeypatch: pytest.MonkeyPatch, n_new: int, elapsed: float, why: str
) -> None:
    now = [0.0]
    monkeypatch.setattr("hotset.engine.engine.time.perf_counter", lambda: now[0])
    backend = Cancellable()
    thread = EngineThread(Engine(backend, 2048, prompt_seconds=1.0))
    long = ask(thread, prompt(1000), seed=1, max_tokens=3)

    def step(seconds: float) -> None:
        assert backend.is_inside.wait(WATCHDOG)
        now[0] += seconds
        backend.is_inside.clear()
        backend.permits.release()
        assert backend.is_inside.wait(WATCHDOG)

    step(0.64)
    step(1.0)  # 10 ms per token
    now[0] += elapsed
    n_computed = long.n_computed
    for ends in (not why, False):  # only once: the repeated step is not ended
        backend.is_inside.clear()
        short = ask(thread, prompt(n_new), seed=2, max_tokens=3)
        assert backend.n_cancelled == int(not why)
        if ends:
            assert backend.is_inside.wait(WATCHDOG)
            assert (long.n_computed, short.slot) == (n_computed, 1)
    backend.permits.release(10000)
    assert tokens_of(thread, short) == expected(prompt(n_new), seed=2, max_tokens=3)
    assert tokens_of(thread, long) == expected(prompt(1000), seed=1, max_tokens=3)
    thread.close()
