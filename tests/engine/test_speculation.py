"""Speculative decoding: tokens and logprobs are bitwise the same with any drafts as without."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence as Many
from functools import cache
from typing import Any

import numpy as np
import pytest
from drafters import Guesser, steady
from fake_backend import FakeBackend, drain, fake_logits, prompt

from hotset.backends.base import BLOCK_SIZE
from hotset.engine.draft_model import draw
from hotset.engine.engine import Engine
from hotset.engine.lookup import LookupDrafter, LookupText
from hotset.engine.sampler import Sampler, SamplingParams
from hotset.engine.sequence import Sequence
from hotset.engine.speculation import Acceptance, Draft, Speculator, StepTimes
from hotset.errors import InvalidRequestError, StepCancelledError
from hotset.load_parameters import MOST_DRAFTED
from hotset.text.mask import TokenMask
from hotset.text.thinking import ThinkingBudget, ThinkingMarks

__all__ = ["steady"]  # the fixture
N_CTX = 320
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.5, "top_k": 0, "top_p": 0.9},
    {"logprobs": 3, "repetition_penalty": 1.3, "presence_penalty": 0.5, "penalty_last_n": 20},
    {"logit_bias": {3: 4.0, 5: -math.inf}, "frequency_penalty": 0.7, "logprobs": 0},
]

# A draw takes two random numbers, or changes the state for the next one.
STATES: list[dict[str, Any]] = [
    {}, {"xtc_probability": 0.5},
    *({"mirostat": version, "mirostat_tau": 1.5, "mirostat_eta": 0.5} for version in (1, 2)),
]  # fmt: skip


def alone(tokens: list[int], stop_ids: tuple[int, ...] = (), **params: Any) -> Sequence:
    engine = Engine(FakeBackend(), N_CTX)
    sequence = engine.enqueue(prepared(engine, tokens, stop_ids, **params))
    drain(engine)
    return sequence


CLOSING = (11, 12, 13)


def prepared(
    engine: Engine,
    tokens: list[int],
    stop_ids: tuple[int, ...] = (),
    *,
    budget: int | None = None,
    **params: Any,
) -> Sequence:
    """Return a prepared sequence. budget: tokens of reasoning, after which CLOSING is forced."""
    sequence = engine.prepare(tokens, SamplingParams(**params), stop_ids=stop_ids)
    if budget is not None:
        assert sequence.sampler is not None
        marks = ThinkingMarks(b"\xff", (b"\xfe",), (CLOSING,), False, lambda token: bytes([token]))
        sequence.sampler.forcing = ThinkingBudget(marks, budget, is_open=True)
    return sequence


def speculating(
    answers: dict[tuple[int, ...], list[int]], right: float, seed: int = 0, **options: Any
) -> tuple[Engine, Guesser]:
    guesser = Guesser(lambda each: answers[tuple(each.tokens[: each.n_prompt])], 97, right, seed)
    max_sequences = options.pop("max_sequences", 16)
    speculator = Speculator(guesser, MOST_DRAFTED)
    return Engine(FakeBackend(**options), N_CTX, max_sequences, speculator=speculator), guesser


def eight() -> list[tuple[list[int], dict[str, Any]]]:
    return [
        (
            prompt(5 + 17 * i, seed=i),
            {"seed": i, "max_tokens": 10 + 12 * i, "budget": 3 * i if i % 3 else None}
            | KINDS[i % len(KINDS)],
        )
        for i in range(8)
    ]


@cache
def eight_alone() -> list[Sequence]:
    return [alone(tokens, **params) for tokens, params in eight()]


@pytest.mark.parametrize("right", [0.0, 0.8, 1.0])
@pytest.mark.parametrize(
    "options",
    [
        {}, {"n_states": 200}, {"n_states": 20}, {"n_blocks": 9}, {"n_blocks": 6, "n_states": 18},
        {"max_batch": 5}, {"max_sequences": 2, "n_blocks": 7},
    ],
)  # fmt: skip
def test_any_draft_gives_the_same_tokens_and_logprobs(right: float, options: dict[str, Any]) -> None:
    """Check eight sequences at once, greedy and sampled of each kind; few blocks cause preemptions."""
    asked, expected = eight(), eight_alone()
    answers = {tuple(e.tokens[: e.n_prompt]): e.generated for e in expected}
    engine, guesser = speculating(answers, right, **options)
    found = []
    for tokens, params in asked:
        found.append(engine.enqueue(prepared(engine, tokens, **params)))
        engine.step()
    drain(engine)
    for (_, params), one in zip(asked, found, strict=True):
        if (n := params["budget"]) is not None:
            assert tuple(one.generated[n : n + 3]) == CLOSING
    for one, other in zip(found, expected, strict=True):
        assert one.tokens == other.tokens
        assert one.logprobs == other.logprobs
        assert (one.finish_reason, one.n_drafted >= one.n_accepted) == (other.finish_reason, True)
    now = engine.counters()
    assert now.generated_tokens == sum(len(one.generated) for one in found)
    assert now.drafted_tokens == sum(one.n_drafted for one in found)
    assert now.accepted_tokens == sum(one.n_accepted for one in found)
    assert now.generated_tokens == now.answer_steps + now.accepted_tokens
    assert (now.accepted_tokens > 0) == (right > 0)
    assert guesser.forgotten == set(found)
    assert engine.scheduler.pool.n_available == engine.scheduler.pool.n_blocks
    if engine.scheduler.states is not None:
        assert engine.scheduler.states.n_available == engine.backend.n_states


def test_right_drafts_take_fewer_steps() -> None:
    expected = alone(prompt(40), seed=1, max_tokens=120)
    engine, _ = speculating({tuple(prompt(40)): expected.generated}, 1.0)
    sequence = engine.enqueue(engine.prepare(prompt(40), SamplingParams(seed=1, max_tokens=120)))
    drain(engine)
    assert sequence.tokens == expected.tokens
    assert sequence.n_steps < 40
    assert sequence.n_accepted == 120 - sequence.n_steps


def test_sequences_that_were_never_drafted_for_are_forgotten_too() -> None:
    engine, guesser = speculating({}, 0.0)
    found = [engine.enqueue(engine.prepare((1, 2, 3), SamplingParams(max_tokens=1, temperature=0)))]
    found.append(engine.enqueue(engine.prepare_score((1, 2, 3), lambda *_: None)))
    drain(engine)
    assert guesser.forgotten == set(found)


@pytest.mark.parametrize("seed", range(12))
def test_end_of_an_answer_works_inside_a_draft(seed: int) -> None:
    plain = alone(prompt(9, seed), seed=seed, max_tokens=60)
    stop = plain.generated[random.Random(seed).randrange(60)]
    expected = alone(prompt(9, seed), (stop,), seed=seed, max_tokens=60)
    assert expected.finish_reason == "stop"
    engine, _ = speculating({tuple(prompt(9, seed)): plain.generated}, 1.0, seed)
    params = SamplingParams(seed=seed, max_tokens=60)
    sequence = engine.enqueue(engine.prepare(prompt(9, seed), params, stop_ids=(stop,)))
    drain(engine)
    assert (sequence.tokens, sequence.finish_reason) == (expected.tokens, "stop")


def test_blocks_of_rejected_tokens_hold_no_prefix() -> None:
    """Check that an answer's part of the cache is found again, and consists of the generated tokens."""
    tokens = prompt(BLOCK_SIZE - 5)
    expected = alone(tokens, seed=4, max_tokens=150)
    engine, _ = speculating({tuple(tokens): expected.generated}, 0.8)
    sequence = engine.enqueue(engine.prepare(tokens, SamplingParams(seed=4, max_tokens=150)))
    while sequence.finish_reason is None:
        engine.step()
        assert len(sequence.blocks) <= -(-len(sequence.tokens) // BLOCK_SIZE)
        assert sequence.finish_reason or sequence.n_missing == 1
    longer = [*sequence.tokens, 1, 2]
    engine.speculator = engine.scheduler.speculator = None
    again = engine.enqueue(engine.prepare(longer, SamplingParams(seed=5, max_tokens=20)))
    drain(engine)
    assert again.n_reused == (len(sequence.tokens) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert again.tokens == alone(longer, seed=5, max_tokens=20).tokens


@pytest.mark.parametrize("kind", STATES, ids=str)
def test_forced_tokens_are_not_drawn(kind: dict[str, Any]) -> None:
    """Check that later tokens use the random numbers and the mirostat state from before the drafts."""
    sequence = alone(prompt(9), seed=3, max_tokens=40, budget=5, **kind)
    assert tuple(sequence.generated[5:8]) == CLOSING
    sampler = Sampler(SamplingParams(seed=3, **kind), 97, prompt(9))
    for i, token in enumerate(sequence.generated):
        if not 5 <= i < 8:
            before = np.array(sequence.tokens[: 9 + i])
            assert sampler.sample(fake_logits(before, 97)) == token
        sampler.accept(token)


@pytest.mark.parametrize("n_states", [0, 40])
@pytest.mark.parametrize("kind", STATES, ids=str)
def test_cancelled_and_interrupted_steps_can_be_taken_again(n_states: int, kind: dict[str, Any]) -> None:
    """Check that a repeated draw uses the same random numbers, and changes the mirostat state once."""
    asked = [(prompt(30 + i, seed=i), i) for i in range(3)]
    expected = [alone(tokens, seed=i, max_tokens=90, **kind) for tokens, i in asked]
    answers = {tuple(e.tokens[: e.n_prompt]): e.generated for e in expected}
    engine, guesser = speculating(answers, 0.9, n_states=n_states)
    found = [engine.enqueue(prepared(engine, t, seed=i, max_tokens=90, **kind)) for t, i in asked]
    draw = random.Random(3)
    append = engine._append_token
    n_interrupted = 0

    def interrupted(*given: Any) -> None:
        nonlocal n_interrupted
        append(*given)
        if draw.random() < 0.05:
            n_interrupted += 1
            raise KeyboardInterrupt

    engine._append_token = interrupted  # type: ignore[method-assign]
    while engine.has_work:
        engine.backend.cancelled = draw.random() < 0.1
        try:
            engine.step()
        except KeyboardInterrupt:
            assert n_interrupted
    assert n_interrupted > 3
    assert engine.counters().cancelled_steps > 3
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    assert guesser.n_drafted > 50


class Even:
    """A constraint of even tokens, whose mask is sometimes late; 10 tokens complete it."""

    is_slow = False

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._announced, self.n = False, 0

    @property
    def finished(self) -> bool:
        return self.n == 10

    def look_ahead(self) -> None:
        self._announced = True

    def is_busy(self, seconds: float) -> bool:
        return not self._announced or self._random.random() < 0.2

    def mask(self) -> TokenMask:
        assert self._announced
        return TokenMask.of(np.packbits(np.arange(104) % 2 == 0, bitorder="little"), 97)

    def accept(self, token: int) -> None:
        assert token % 2 == 0
        self._announced, self.n = False, self.n + 1


def test_constraints_see_each_token_once() -> None:
    answers, found, expected = {}, [], []
    for i in range(4):
        plain = Engine(FakeBackend(), N_CTX)
        params = SamplingParams(seed=i, max_tokens=8 + i, logprobs=2)
        expected.append(plain.enqueue(plain.prepare(prompt(7, i), params, constraint=Even(0))))
        drain(plain)
        answers[tuple(prompt(7, i))] = expected[i].generated
    engine, _ = speculating(answers, 0.9)
    for i in range(4):
        params = SamplingParams(seed=i, max_tokens=8 + i, logprobs=2)
        found.append(engine.enqueue(engine.prepare(prompt(7, i), params, constraint=Even(i))))
    drain(engine)
    for one, other in zip(found, expected, strict=True):
        assert (one.tokens, one.logprobs, one.finish_reason) == (
            other.tokens, other.logprobs, other.finish_reason,
        )  # fmt: skip
    assert [one.finish_reason for one in found] == ["length", "length", "stop", "stop"]
    assert engine.counters().accepted_tokens > 0


def test_a_failing_draw_ends_one_sequence_with_its_tokens_before() -> None:
    expected = alone(prompt(8), seed=2, max_tokens=40)
    engine, _ = speculating({tuple(prompt(8)): expected.generated}, 1.0)
    sequence = engine.prepare(prompt(8), SamplingParams(seed=2, max_tokens=40))
    assert sequence.sampler is not None
    take, n_left = sequence.sampler.take, 21

    def fail(token: int) -> int:
        nonlocal n_left
        n_left -= 1
        if not n_left:
            raise ValueError("no token")
        return take(token)

    sequence.sampler.take = fail  # type: ignore[method-assign]
    events: list[Any] = []

    class Sink:
        def put(self, event: Any) -> None:
            events.append(event)

    sequence.events = Sink()
    engine.enqueue(sequence)
    drain(engine)
    assert [event.token for event in events] == [*expected.generated[:20], None]
    assert [event.finish_reason for event in events] == [None] * 20 + ["error"]
    assert isinstance(events[-1].error, ValueError)


def test_no_draft_takes_a_block_that_another_would_lose_its_own_for() -> None:
    asked = [(prompt(50, seed=i), i) for i in range(3)]
    expected = [alone(tokens, seed=i, max_tokens=70) for tokens, i in asked]
    answers = {tuple(e.tokens[: e.n_prompt]): e.generated for e in expected}
    for right in (0.0, 1.0):
        engine, _ = speculating(answers, right, n_blocks=6)
        found = [engine.enqueue(engine.prepare(t, SamplingParams(seed=i, max_tokens=70))) for t, i in asked]
        drain(engine)
        assert [one.tokens for one in found] == [one.tokens for one in expected]
        assert engine.counters().preemptions == 0


def test_failed_step_ends_its_sequences() -> None:
    engine, _ = speculating({tuple(prompt(8)): [1] * 200}, 1.0)
    sequence = engine.enqueue(engine.prepare(prompt(8), SamplingParams(seed=2)))
    engine.backend.fail_at_step = 3
    with pytest.raises(RuntimeError):
        drain(engine)
    assert sequence.finish_reason == "error"
    assert not engine.has_work
    assert StepCancelledError is not RuntimeError


# ---- lookup ----


def naive(tokens: list[int], text: list[int] | None = None) -> int:
    """Return the longest earlier match of the end of `tokens`, up to 16 tokens."""
    best = 0
    for source, last, shortest in ((tokens, len(tokens) - 1, 2), (text or [], len(text or []) - 1, 3)):
        for end in range(last):
            n = 0
            while n < min(16, end + 1, len(tokens)) and source[end - n] == tokens[len(tokens) - 1 - n]:
                n += 1
            best = max(best, n if n >= shortest else 0)
    return best


def sequence_of(tokens: list[int]) -> Sequence:
    return Engine(FakeBackend(), 4096).prepare(tokens, SamplingParams(temperature=0))


@pytest.mark.parametrize("has_text", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_lookup_finds_the_longest_match(seed: int, has_text: bool) -> None:
    draw = np.random.default_rng(seed)
    text = draw.integers(0, 6, 300).tolist() if has_text else None
    drafter = LookupDrafter(LookupText(text, 97) if text else None)
    sequence = sequence_of(draw.integers(0, 6, 20).tolist())
    n_found = 0
    for _ in range(60):
        sequence.tokens.append(int(draw.integers(0, 6)))
        [draft] = drafter.draft([(sequence, 5)])
        length = naive(sequence.tokens, text)
        assert bool(draft.tokens) == (length > 0)
        if not draft.tokens:
            continue
        n_found += 1
        assert draft.classes[0] == min(length, 8)
        end = sequence.tokens[-length:]
        places = [
            (source, i + length)
            for source in (sequence.tokens, text or [])
            for i in range(len(source) - length)
            if source[i : i + length] == end
        ]
        assert any(
            all(
                token == (source[at + j] if at + j < len(source) else draft.tokens[j - (len(source) - at)])
                for j, token in enumerate(draft.tokens)
            )
            for source, at in places
        )
    assert n_found > 30


def test_repetitive_text_continues() -> None:
    drafter = LookupDrafter()
    [draft] = drafter.draft([(sequence_of([9, 1, 2, 3, 1, 2, 3, 1, 2]), 8)])
    assert draft.tokens == [3, 1, 2, 3, 1, 2, 3, 1]
    assert draft.classes == [5, 6, 7, 8, 8, 8, 8, 8]
    [nothing] = drafter.draft([(sequence_of([1, 2, 3]), 8)])
    assert nothing == Draft([], [])


@pytest.mark.parametrize("n", [0, 3])
def test_a_text_too_short_to_look_up_is_an_error(n: int) -> None:
    with pytest.raises(InvalidRequestError, match="the text to look up has"):
        LookupText(list(range(n)), 97)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_draft_model_that_is_damaged_drafts_nothing(temperature: float, value: float) -> None:
    row = np.linspace(0, 1, 97, dtype=np.float32)
    draft, sampler = Draft([], []), Sampler(SamplingParams(temperature=temperature, seed=1), 97)
    assert draw(draft, sampler, row)
    assert len(draft.tokens) == len(draft.classes) == 1
    row[40] = value
    assert not draw(draft, sampler, row)
    assert len(draft.tokens) == len(draft.classes) == 1


# ---- the policy ----


def run_policy(monkeypatch: pytest.MonkeyPatch, right: float, cost: float, n: int = 400) -> tuple[float, int]:
    """Return tokens per second and the number of drafted tokens, for drafts that are right this often.

    A step takes 1 second, and `cost` more for each further token.
    """
    draw = random.Random(1)
    sequence = sequence_of([1, 2, 3])
    monkeypatch.undo()

    class Always:
        name, seconds_per_token = "any", 0.0

        def draft(self, wanted: Many[tuple[Sequence, int]]) -> list[Draft]:
            return [Draft([7] * n, [1] * n) for _, n in wanted]

        def forget(self, sequence: Sequence) -> None: ...
        def reset(self) -> None: ...
        def close(self) -> None: ...

    speculator = Speculator(Always(), 8)
    seconds = tokens = drafted = 0.0
    for _ in range(n):
        sequence.draft = []
        speculator.draft([(sequence, 8)], 1)
        n_drafted = len(sequence.draft)
        n_right = 0
        while n_right < n_drafted and draw.random() < right:
            n_right += 1
        taken = 1 + cost * n_drafted
        speculator.step_times.note(1 + n_drafted, taken * math.exp(0.05 * draw.gauss(0, 1)))
        if n_drafted:
            speculator.note_verified(sequence, min(n_right + 1, n_drafted), n_right)
        seconds, tokens, drafted = seconds + taken, tokens + 1 + n_right, drafted + n_drafted
    return tokens / seconds, int(drafted)


@pytest.mark.parametrize(("right", "cost"), [(0.0, 0.15), (0.1, 0.5), (0.02, 0.1), (0.5, 1.0)])
def test_where_drafts_do_not_pay_they_cost_next_to_nothing(
    monkeypatch: pytest.MonkeyPatch, right: float, cost: float
) -> None:
    speed, drafted = run_policy(monkeypatch, right, cost)
    assert speed > 0.98
    assert drafted > 0  # it tries again


@pytest.mark.parametrize(("right", "cost"), [(0.9, 0.1), (0.9, 0.5), (0.5, 0.1), (1.0, 0.05)])
def test_where_drafts_pay_they_are_taken(monkeypatch: pytest.MonkeyPatch, right: float, cost: float) -> None:
    best = max(sum(right**i for i in range(n + 1)) / (1 + cost * n) for n in range(9))
    assert best > 1.3
    assert run_policy(monkeypatch, right, cost)[0] > 0.93 * best


def test_a_sequence_whose_drafts_turn_right_gets_longer_ones() -> None:
    acceptance = Acceptance(Acceptance())
    assert acceptance.rate(3) == 0.5
    for _ in range(200):
        acceptance.note(3, False)
    assert acceptance.rate(3) < 0.02
    for _ in range(40):
        acceptance.note(3, True)
    assert acceptance.rate(3) > 0.75
    assert acceptance.rate(4) == 0.5


def test_times_of_steps_are_learned_and_follow_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    times = StepTimes()
    draw = random.Random(2)
    for i in range(3000):
        n = draw.choice([1, 2, 4, 8])
        slow = 3.0 if i > 1500 else 1.0  # then other work runs too
        times.note(n, slow * (2 + 0.5 * n) * math.exp(draw.gauss(0, 0.05)))
    one = times.seconds(1)
    assert one == pytest.approx(3 * 2.5, rel=0.1)
    for n in (2, 4, 8):
        assert times.seconds(n) / one == pytest.approx((2 + 0.5 * n) / 2.5, rel=0.08)
    assert times.seconds(4) < times.seconds(6) < times.seconds(8) < times.seconds(100)
    assert set(times.measured) == {1, 2, 4, 8}
