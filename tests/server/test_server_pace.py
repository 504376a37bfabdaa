"""How events pass from the engine's thread to the event loop: quickly, but not one call per token."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from hotset.engine.sampler import TokenLogprobs
from hotset.engine.sequence import Event, FinishReason
from hotset.server.answers import (
    MOST_LOGPROBS,
    Answer,
    AnswerRequest,
    Delta,
    Finished,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from hotset.server.service import PACE_SECONDS, Mail, Sink

ENOUGH = 8  # iterations of a loop in which it does all due work


class Clock(asyncio.SelectorEventLoop):
    """An event loop with a manual clock, which counts the calls from other threads."""

    now = 100.0
    n_calls = 0

    def time(self) -> float:
        return self.now

    def call_soon_threadsafe(self, *args, **more):
        self.n_calls += 1
        return super().call_soon_threadsafe(*args, **more)


class Stream:
    """A sequence's connection to the loop, and the tokens that arrived."""

    def __init__(self, loop: Clock, *, delivery: str = "each", mail: Mail | None = None) -> None:
        self.loop, self.came = loop, []
        self.mail = mail or Mail()
        self.mail.loop = loop
        self.sink = Sink(self.mail, lambda event: self.came.append(event.token), delivery)
        self.n_put = 0

    def put(self, n: int = 1, finish_reason: FinishReason | None = None) -> None:
        """Report n tokens in the engine's thread, one after the other."""

        def tell() -> None:
            for _ in range(n):
                self.sink.put(Event(self.n_put, None, 0.0, finish_reason, None))
                self.n_put += 1

        thread = threading.Thread(target=tell)
        thread.start()
        thread.join()

    async def after(self, seconds: float) -> int:
        """Advance the clock, and return how many tokens have arrived."""
        self.loop.now += seconds
        for _ in range(ENOUGH):
            await asyncio.sleep(0)
        return len(self.came)


def in_loop(work: Callable[[Clock], object]) -> None:
    with asyncio.Runner(loop_factory=Clock) as runner:
        runner.run(work(runner.get_loop()))


def test_quick_tokens_arrive_together():
    async def work(loop: Clock) -> None:
        stream = Stream(loop)
        stream.put()
        assert await stream.after(0.004) == 1  # the first immediately
        stream.put()
        assert await stream.after(0.001) == 2  # the rate is not known yet
        n_calls = loop.n_calls
        for n_there in (2, 6, 10):
            for _ in range(4):
                stream.put()
                assert await stream.after(PACE_SECONDS / 5) == n_there
            assert await stream.after(PACE_SECONDS / 5) == n_there + 4
        assert loop.n_calls == n_calls  # the loop polled
        assert stream.came == list(range(14))

    in_loop(work)


def test_the_end_arrives_immediately():
    async def work(loop: Clock) -> None:
        stream = Stream(loop)
        for _ in range(5):
            stream.put()
            await stream.after(0.001)
        assert stream.came == [0, 1]
        stream.put(finish_reason="stop")
        assert await stream.after(0.0) == 6

    in_loop(work)


def test_another_answers_first_token_arrives_immediately_with_all_waiting_tokens():
    async def work(loop: Clock) -> None:
        one = Stream(loop)
        other = Stream(loop, mail=one.mail)
        for _ in range(4):
            one.put()
            await one.after(0.001)
        assert one.came == [0, 1]
        other.put()
        assert await other.after(0.0) == 1
        assert one.came == [0, 1, 2, 3]

    in_loop(work)


def test_slow_tokens_arrive_immediately():
    async def work(loop: Clock) -> None:
        stream = Stream(loop)
        for n in range(1, 6):
            stream.put()
            assert await stream.after(0.0) == n
            assert await stream.after(1.5 * PACE_SECONDS) == n

    in_loop(work)


def test_a_long_step_does_not_delay_the_token_before_it():
    async def work(loop: Clock) -> None:
        stream = Stream(loop)
        for _ in range(4):
            stream.put()
            await stream.after(0.001)
        assert stream.came == [0, 1]
        assert await stream.after(PACE_SECONDS) == 4
        assert await stream.after(PACE_SECONDS) == 4  # the loop polls without result, and stops
        stream.put()
        assert await stream.after(0.0) == 5

    in_loop(work)


def test_an_answer_in_one_piece_calls_the_loop_only_at_its_end():
    async def work(loop: Clock) -> None:
        stream = Stream(loop, delivery="end")
        stream.put(50)
        assert await stream.after(1.0) == 0
        assert not loop.n_calls
        stream.put(finish_reason="length")
        assert await stream.after(0.0) == 51
        assert loop.n_calls == 1

    in_loop(work)


def test_events_of_whole_answers_do_not_delay_other_answers():
    async def work(loop: Clock) -> None:
        mail = Mail()
        wholes = [Stream(loop, delivery="end", mail=mail) for _ in range(2)]
        for whole in wholes:
            came: list[int | None] = whole.came

            def take(event: Event, came: list[int | None] = came) -> None:
                loop.now += 0.001
                came.append(event.token)

            whole.sink = Sink(mail, take, "end")
            whole.put(50)
            whole.put(finish_reason="length")
        other = Stream(loop, mail=mail)
        await asyncio.sleep(0)
        other.put()
        for _ in range(4):
            await asyncio.sleep(0)
        assert other.came == [0]
        assert all(0 < len(whole.came) < 20 for whole in wholes)
        while len(wholes[0].came) + len(wholes[1].came) < 102:
            await asyncio.sleep(0)
        assert wholes[0].came == wholes[1].came == list(range(51))

    in_loop(work)


def test_a_closed_loop_is_not_called():
    loop = Clock()
    stream = Stream(loop)
    loop.close()
    stream.put(3, finish_reason="cancelled")
    assert not stream.came


def test_deltas_of_one_kind_and_answer_are_joined():
    came: list[Delta] = [
        ReasoningDelta(0, "a"), TextDelta(1, "x", [1]), ReasoningDelta(0, "b"), TextDelta(0, "c", [2]),
        TextDelta(1, "y", [3]), TextDelta(0, "d", [4]), ToolCallStart(0, 0, "id0", "f"),
        ToolCallArguments(0, 0, "{"), ToolCallArguments(0, 0, "}"), ToolCallStart(0, 1, "id1", "g"),
        ToolCallArguments(0, 1, "["), Finished(1, "stop"), ToolCallArguments(0, 1, "]"),
        TextDelta(0, "e", [5]),
    ]  # fmt: skip
    together = [
        ReasoningDelta(0, "ab"), TextDelta(1, "xy", [1, 3]), TextDelta(0, "cd", [2, 4]),
        ToolCallStart(0, 0, "id0", "f"), ToolCallArguments(0, 0, "{}"), ToolCallStart(0, 1, "id1", "g"),
        ToolCallArguments(0, 1, "[]"), Finished(1, "stop"), TextDelta(0, "e", [5]),
    ]  # fmt: skip
    scored = [TextDelta(2, "a", [i], [TokenLogprobs(i, 0.0, ())]) for i in range(2 * MOST_LOGPROBS)]
    for half in (scored[:MOST_LOGPROBS], scored[MOST_LOGPROBS:]):  # more logprobs make two deltas
        tokens, logprobs = [one.tokens[0] for one in half], [one.logprobs[0] for one in half]
        together.append(TextDelta(2, "a" * len(half), tokens, logprobs))
    came += scored
    answer = Answer(AnswerRequest(), [], lambda *_: None, lambda _: None, 0.0)
    for delta in came:
        answer._add(delta)

    async def read() -> list[Delta]:
        return [delta async for delta in answer]

    assert asyncio.run(read()) == together
