"""The step loop on a backend without a model: the tokens do not depend on the schedule."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import pytest
from cases import quick_if
from fake_backend import FakeBackend, drain, fake_logits, prompt

from hotset.backends.base import BLOCK_SIZE, Batch, StepResult
from hotset.engine.engine import Engine
from hotset.engine.pacing import PrefillBudget
from hotset.engine.perplexity import perplexity_chunks
from hotset.engine.sampler import SamplingParams
from hotset.engine.sequence import Owner, Sequence
from hotset.errors import ContextLengthError, InvalidRequestError, OutOfMemoryError


def engine(n_ctx: int = 512, max_sequences: int = 16, **options: Any) -> Engine:
    return Engine(FakeBackend(**options), n_ctx, max_sequences)


def generate(engine: Engine, tokens: list[int], stop_ids: tuple[int, ...] = (), **params: Any) -> Sequence:
    sequence = engine.enqueue(engine.prepare(tokens, SamplingParams(**params), stop_ids=stop_ids))
    drain(engine)
    assert engine.scheduler.pool.n_available == engine.scheduler.pool.n_blocks
    return sequence


def test_greedy_tokens_equal_the_models():
    sequence = generate(engine(), [1, 2, 3], temperature=0, max_tokens=150)
    expected = [1, 2, 3]
    for _ in range(150):
        expected.append(int(np.argmax(fake_logits(np.array(expected), 97))))
    assert sequence.tokens == expected
    assert sequence.finish_reason == "length"


@pytest.mark.parametrize("max_batch", [1, 7, 64, 512])
def test_chunks_of_a_prompt_do_not_change_the_answer(max_batch: int):
    whole = generate(engine(), prompt(300), seed=3, max_tokens=20)
    chunked = engine(max_batch=max_batch)
    assert generate(chunked, prompt(300), seed=3, max_tokens=20).tokens == whole.tokens
    assert chunked.backend.batches[0] == min(max_batch, 64)


@pytest.mark.parametrize(
    ("max_sequences", "n_blocks", "max_batch"),
    quick_if(
        lambda _, n_blocks, max_batch: (n_blocks, max_batch) in ((4, 40), (5, 3), (64, 512)),
        [2, 16],
        [4, 5, 9, 64],
        [3, 40, 512],
    ),
)
def test_same_seed_gives_the_same_tokens_in_any_batch(max_batch: int, n_blocks: int, max_sequences: int):
    """Check that sequences are preempted and computed again if blocks are few, and wait if slots are few."""
    options = [
        {"seed": i, "max_tokens": 30 + 25 * i, "repetition_penalty": 1.0 + 0.1 * (i % 2)} for i in range(6)
    ]
    prompts = [prompt(20 + 13 * i, seed=i) for i in range(6)]
    alone = [generate(engine(256), p, **o).tokens for p, o in zip(prompts, options, strict=True)]
    batched = engine(256, max_sequences, max_batch=max_batch, n_blocks=n_blocks)
    sequences = []
    for p, o in zip(prompts, options, strict=True):
        sequences.append(batched.enqueue(batched.prepare(p, SamplingParams(**o))))
        batched.step()
        batched.step()
    drain(batched)
    assert [sequence.tokens for sequence in sequences] == alone
    assert {sequence.finish_reason for sequence in sequences} == {"length"}
    assert batched.scheduler.pool.n_available == n_blocks


def test_preempted_sequence_is_computed_again_and_continues():
    alone = [generate(engine(256), prompt(60, seed=i), seed=i, max_tokens=100).tokens for i in range(2)]
    tight = engine(256, n_blocks=4)
    sequences = [
        tight.enqueue(
            tight.prepare(prompt(60, seed=i), SamplingParams(seed=i, max_tokens=100), reuse_prefix=False)
        )
        for i in range(2)
    ]
    preempted = False
    while tight.has_work:
        before = set(tight.scheduler.running)
        tight.step()
        preempted |= any(s in tight.scheduler.waiting for s in before)
    assert preempted
    assert tight.counters().preemptions >= 1
    assert tight.backend.n_tokens_seen > 2 * 159
    assert [sequence.tokens for sequence in sequences] == alone


def test_preempted_sequence_reuses_its_remaining_blocks():
    alone = [generate(engine(256), prompt(60, seed=i), seed=i, max_tokens=100).tokens for i in range(2)]
    tight = engine(256, n_blocks=5)
    old, new = (
        tight.enqueue(tight.prepare(prompt(60, seed=i), SamplingParams(seed=i, max_tokens=100)))
        for i in range(2)
    )
    while new not in tight.scheduler.waiting or new.n_computed == 0:
        tight.step()
    n_generated = len(new.generated)
    assert len(new.tokens) == 2 * BLOCK_SIZE + 1
    tight.cancel(old)
    seen = tight.backend.n_tokens_seen
    tight.step()
    assert tight.backend.n_tokens_seen - seen == 1  # its two full blocks were still in the cache
    assert len(new.generated) == n_generated + 1
    drain(tight)
    assert new.tokens == alone[1]


def test_preempted_sequence_precedes_waiting_ones():
    tight = engine(256, max_sequences=2, n_blocks=4)
    old, new, third = (
        tight.enqueue(tight.prepare(prompt(60, seed=i), SamplingParams(seed=i, max_tokens=100)))
        for i in range(3)
    )
    tight.step()
    while list(tight.scheduler.waiting) == [third]:
        tight.step()
    assert list(tight.scheduler.waiting) == [new, third]
    while old.finish_reason is None:
        tight.step()
    tight.step()
    assert tight.scheduler.running[0] is new


def test_logits_of_a_preempted_sequence_are_handed_out_once():
    tight = engine(256, n_blocks=6, max_batch=2)
    tight.enqueue(tight.prepare(prompt(60), SamplingParams(seed=0, max_tokens=190)))
    positions: list[int] = []
    for _ in range(60):
        tight.step()
    scored = tight.enqueue(
        tight.prepare_score(
            prompt(190, seed=1),
            lambda position, rows: positions.extend(range(position, position + len(rows))),
            first=20,
        )
    )
    preempted = False
    while tight.has_work:
        ran = scored in tight.scheduler.running
        tight.step()
        preempted |= ran and scored in tight.scheduler.waiting and bool(positions)
    assert preempted
    assert positions == list(range(20, 190))


def test_blocks_after_a_reused_prefix_are_found_only_after_it():
    long = prompt(4 * BLOCK_SIZE + 1)
    reusing = engine()
    generate(reusing, long[: 2 * BLOCK_SIZE + 1], seed=1, max_tokens=1)
    assert generate(reusing, long, seed=1, max_tokens=1).n_reused == 2 * BLOCK_SIZE
    assert generate(reusing, long, seed=1, max_tokens=1).n_reused == 4 * BLOCK_SIZE
    assert generate(reusing, long[2 * BLOCK_SIZE :], seed=1, max_tokens=1).n_reused == 0


def test_decoding_comes_before_prompts_and_shares_their_batch():
    shared = engine(max_batch=32)
    first = shared.enqueue(shared.prepare(prompt(10), SamplingParams(seed=1, max_tokens=50)))
    shared.step()
    shared.enqueue(shared.prepare(prompt(100, seed=2), SamplingParams(seed=2, max_tokens=1)))
    for n_generated in range(2, 6):
        shared.step()
        assert len(first.generated) == n_generated
    assert shared.backend.batches == [10, 17, 32, 32, 23]  # 1 + 16, 1 + 31, 1 + 31, 1 + 22


@pytest.mark.parametrize("n_answers", [0, 3])
@pytest.mark.parametrize("n_long", [1, 2])
def test_a_short_prompt_comes_through_while_long_ones_are_read(
    n_answers: int, n_long: int, monkeypatch: pytest.MonkeyPatch
):
    note = PrefillBudget.note  # with constant times, so that chunks do not depend on the machine

    def note_steady(
        self: PrefillBudget, units: float, n_answers: int, seconds: float, n_rows: int = 0
    ) -> None:
        note(self, units, n_answers, 1e-3 * (1 + units), n_rows)

    monkeypatch.setattr(PrefillBudget, "note", note_steady)
    shared = engine(1024, n_blocks=200)
    asked = [(prompt(9, seed=i), {"seed": i, "max_tokens": 60}) for i in range(n_answers)]
    asked += [(prompt(900, seed=i), {"seed": i, "max_tokens": 3}) for i in range(n_long)]
    sequences = [shared.enqueue(shared.prepare(tokens, SamplingParams(**params))) for tokens, params in asked]
    for _ in range(3):
        shared.step()
    long = sequences[n_answers]
    for seed in range(4):
        asked.append((prompt(20 + seed, seed=seed), {"seed": seed, "max_tokens": 5}))
        n_computed = long.n_computed
        sequences.append(shared.enqueue(shared.prepare(asked[-1][0], SamplingParams(**asked[-1][1]))))
        shared.step()
        assert len(sequences[-1].generated) == 1
        assert long.n_computed > n_computed  # and no sequence waits forever
    drain(shared)
    for (tokens, params), sequence in zip(asked, sequences, strict=True):
        assert sequence.tokens == generate(engine(1024), tokens, **params).tokens


def test_a_shared_prefix_is_computed_once_and_changes_nothing():
    common = prompt(200)
    fresh = engine()
    whole = generate(fresh, [*common, 5, 6], seed=9, max_tokens=40)
    assert whole.n_reused == 0
    reusing = engine()
    generate(reusing, [*common, 7], seed=1, max_tokens=10)
    seen = reusing.backend.n_tokens_seen
    again = generate(reusing, [*common, 5, 6], seed=9, max_tokens=40)
    assert again.n_reused == 200 // BLOCK_SIZE * BLOCK_SIZE
    assert again.tokens == whole.tokens
    assert reusing.backend.n_tokens_seen - seen == 202 - again.n_reused + 39
    refused = reusing.enqueue(
        reusing.prepare([*common, 5, 6], SamplingParams(seed=9, max_tokens=40), reuse_prefix=False)
    )
    drain(reusing)
    assert refused.n_reused == 0
    assert refused.tokens == whole.tokens


def test_a_prompt_that_is_all_in_the_cache_still_computes_its_last_token():
    exact = prompt(2 * BLOCK_SIZE)
    reusing = engine()
    first = generate(reusing, exact, seed=1, max_tokens=5)
    again = generate(reusing, exact, seed=1, max_tokens=5)
    assert again.n_reused == BLOCK_SIZE
    assert again.tokens == first.tokens


def test_an_answer_is_reused_as_the_prefix_of_the_next_turn():
    chatting = engine()
    turn = generate(chatting, prompt(50), seed=1, max_tokens=100)
    following = generate(chatting, [*turn.tokens, 3, 4], seed=2, max_tokens=10)
    assert following.n_reused == 2 * BLOCK_SIZE
    assert following.tokens == generate(engine(), [*turn.tokens, 3, 4], seed=2, max_tokens=10).tokens


def test_a_running_sequence_shares_its_blocks():
    shared = engine(n_blocks=6, n_ctx=256)  # too few for 4 + 4
    long = shared.enqueue(shared.prepare(prompt(200), SamplingParams(seed=1, max_tokens=30)))
    shared.step()
    shared.step()
    short = shared.enqueue(shared.prepare([*prompt(200), 1], SamplingParams(seed=2, max_tokens=30)))
    shared.step()
    assert short.n_reused == 3 * BLOCK_SIZE
    assert short.blocks[:3] == long.blocks[:3]
    drain(shared)
    assert shared.scheduler.pool.n_available == 6
    assert short.tokens == generate(engine(), [*prompt(200), 1], seed=2, max_tokens=30).tokens


@pytest.mark.parametrize(("n_blocks", "n_running"), [(2, 1), (3, 2), (4, 2), (5, 3), (6, 3), (7, 4)])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_sequence_is_let_in_where_a_block_is_spare_for_each_that_runs(
    n_blocks: int, n_running: int, at_once: bool
):
    """Check sequences of one block each: the third needs a block, and the two before it one each to grow."""
    shared = engine(128, n_blocks=n_blocks)
    for i in range(5):
        shared.enqueue(shared.prepare(prompt(40, seed=i), SamplingParams(seed=i, max_tokens=30)))
        if not at_once:
            shared.step()
    shared.step()
    assert len(shared.scheduler.running) == n_running
    drain(shared)


def test_first_waiting_sequence_blocks_later_ones_without_blocks():
    shared = engine(256, n_blocks=5)
    long = prompt(200)
    first = shared.enqueue(shared.prepare(long, SamplingParams(seed=1, max_tokens=40)))
    while not first.generated:
        shared.step()
    shared.enqueue(
        shared.prepare([*long[:BLOCK_SIZE], *prompt(150, seed=2)], SamplingParams(seed=2, max_tokens=3))
    )
    shared.enqueue(shared.prepare(prompt(5), SamplingParams(seed=3, max_tokens=3)))
    n_free = shared.scheduler.pool.n_available
    shared.step()
    assert (len(shared.scheduler.running), len(shared.scheduler.waiting)) == (1, 2)
    assert shared.scheduler.pool.n_available == n_free  # the prefix that it found was released
    assert shared.scheduler.pool.references.count(2) == 0


@pytest.mark.parametrize("n", [2, 5])
@pytest.mark.parametrize("max_batch", [16, 512])
@pytest.mark.parametrize("reuses", [True, False])
def test_several_answers_of_one_prompt_compute_it_once(n: int, max_batch: int, reuses: bool):
    tokens = prompt(3 * BLOCK_SIZE + 10)
    shared = engine(max_batch=max_batch)
    sequences = [
        shared.enqueue(shared.prepare(tokens, SamplingParams(seed=i, max_tokens=6), reuse_prefix=reuses))
        for i in range(n)
    ]
    drain(shared)
    for i, sequence in enumerate(sequences):
        assert sequence.generated == generate(engine(), tokens, seed=i, max_tokens=6).generated
        assert sequence.n_reused == (3 * BLOCK_SIZE if i and reuses else 0)
    n_prompt = len(tokens) + (n - 1) * (10 if reuses else len(tokens))
    assert shared.backend.n_tokens_seen == n_prompt + n * 5
    assert shared.scheduler.pool.n_available == shared.scheduler.pool.n_blocks


@pytest.mark.parametrize("n_steps", [1, 2, 3, 4])
def test_follower_continues_when_the_first_client_leaves(n_steps: int):
    tokens = prompt(300)
    shared = engine(max_batch=50)
    leading, second, third = (
        shared.enqueue(
            shared.prepare([*tokens[:n], *prompt(40, seed=n)], SamplingParams(seed=1, max_tokens=5))
        )
        for n in (300, 290, 128)
    )
    for _ in range(n_steps):
        shared.step()
    shared.cancel(leading)
    drain(shared)
    for sequence, n in ((second, 290), (third, 128)):
        alone = generate(engine(), [*tokens[:n], *prompt(40, seed=n)], seed=1, max_tokens=5)
        assert sequence.tokens == alone.tokens
    assert shared.scheduler.pool.n_available == shared.scheduler.pool.n_blocks


def test_a_step_that_was_cancelled_leaves_no_block_behind_where_others_take_over():
    shared = engine()
    leading, second = (
        shared.enqueue(shared.prepare(prompt(150), SamplingParams(seed=i, max_tokens=4))) for i in range(2)
    )
    shared.step()
    shared.cancel(leading)
    shared.backend.cancelled = True
    shared.step()  # its blocks are allocated, but empty
    third = shared.enqueue(shared.prepare(prompt(150), SamplingParams(seed=3, max_tokens=4)))
    drain(shared)
    assert third.n_reused == 2 * BLOCK_SIZE
    assert second.generated == generate(engine(), prompt(150), seed=1, max_tokens=4).generated
    assert shared.scheduler.pool.n_available == shared.scheduler.pool.n_blocks


def test_clients_take_turns_and_requests_of_one_keep_their_order():
    shared = engine(max_sequences=1)
    order = [
        shared.enqueue(
            shared.prepare(prompt(5, seed=i), SamplingParams(seed=i, max_tokens=2), owner=Owner(client))
        )
        for i, client in enumerate("aaaabac")
    ]
    began: list[int] = []
    while shared.has_work:
        shared.step()
        began += [i for i, each in enumerate(order) if each.started and i not in began]
    assert began == [0, 4, 6, 1, 2, 3, 5]
    assert len(shared.scheduler.waiting) == 0


@pytest.mark.parametrize("waits", [True, False])
def test_a_sequence_whose_time_is_over_ends(waits: bool, monkeypatch: pytest.MonkeyPatch):
    now = [10.0]
    monkeypatch.setattr("hotset.engine.engine.time.perf_counter", lambda: now[0])
    shared = engine(max_sequences=1)
    others = [
        shared.enqueue(shared.prepare(prompt(5), SamplingParams(seed=1, max_tokens=30))) for _ in range(waits)
    ]
    late = shared.enqueue(shared.prepare(prompt(7), SamplingParams(seed=2), owner=Owner.of(None, 3)))
    later = shared.enqueue(
        shared.prepare(prompt(8), SamplingParams(seed=3, max_tokens=4), owner=Owner.of(None, 300))
    )
    for _ in range(3):
        shared.step()
        now[0] += 0.9
    assert late.finish_reason is None
    now[0] = 13.0
    shared.step()
    assert (late.finish_reason, len(late.generated)) == ("timeout", 0 if waits else 3)
    drain(shared)
    assert later.generated == generate(engine(), prompt(8), seed=3, max_tokens=4).generated
    assert [each.finish_reason for each in others] == ["length"] * waits
    with pytest.raises(InvalidRequestError, match="seconds"):
        shared.enqueue(shared.prepare(prompt(7), SamplingParams(seed=1), owner=Owner.of(None, -1)))


def test_reused_tokens_do_not_count_as_speed(monkeypatch: pytest.MonkeyPatch):
    """Check that the speed of a prompt counts only its computed tokens; every step takes a second here."""
    now = [100.0]
    monkeypatch.setattr("hotset.engine.engine.time.perf_counter", lambda: now[0])

    class Slow(FakeBackend):
        def step(self, batch: Batch) -> StepResult:
            now[0] += 1.0
            return super().step(batch)

    slow = Engine(Slow(), 512, prompt_seconds=math.inf)
    first = generate(slow, prompt(100), seed=1, max_tokens=5)
    assert (first.n_reused, first.prompt_per_second) == (0, 100.0)
    assert first.predicted_per_second == 1.0
    assert (first.started, first.first_token, first.last_token) == (100.0, 101.0, 105.0)
    again = generate(slow, prompt(100), seed=1, max_tokens=1)
    assert (again.n_reused, again.prompt_per_second) == (64, 36.0)
    assert again.predicted_per_second == 0.0


@pytest.mark.parametrize("n_steps", [0, 1, 2, 5])
def test_cancelling_frees_blocks_and_disturbs_no_other(n_steps: int):
    alone = generate(engine(), prompt(70), seed=1, max_tokens=40)
    shared = engine(max_batch=64)
    kept = shared.enqueue(shared.prepare(prompt(70), SamplingParams(seed=1, max_tokens=40)))
    dropped = shared.enqueue(shared.prepare(prompt(90, seed=5), SamplingParams(seed=2)))
    for _ in range(n_steps):
        shared.step()
    shared.cancel(dropped)
    shared.cancel(dropped)
    assert dropped.finish_reason == "cancelled"
    in_use = -(-kept.n_computed // BLOCK_SIZE)
    assert shared.scheduler.pool.n_available == shared.scheduler.pool.n_blocks - in_use
    drain(shared)
    assert kept.tokens == alone.tokens
    shared.cancel(kept)
    assert kept.finish_reason == "length"
    assert (shared.scheduler.block_tables == -1).all()


def test_stop_tokens_end_the_answer():
    free = generate(engine(), prompt(10), seed=4, max_tokens=60).generated
    token = free[20]
    first = free.index(token)
    stopped = generate(engine(), prompt(10), stop_ids=(token,), seed=4, max_tokens=60)
    assert stopped.generated == free[: first + 1]
    assert stopped.finish_reason == "stop"


def test_ignore_eos_forbids_the_stop_tokens():
    stop_ids = tuple(range(0, 97, 2))
    sequence = generate(engine(), prompt(10), stop_ids=stop_ids, seed=4, max_tokens=60, ignore_eos=True)
    assert len(sequence.generated) == 60
    assert all(token % 2 for token in sequence.generated)


def test_ignore_eos_is_stronger_than_a_bias_for_the_stop_token():
    sequence = generate(
        engine(), prompt(10), stop_ids=(7,), seed=4, max_tokens=20, ignore_eos=True,
        logit_bias={7: 1e6, 8: 100},
    )  # fmt: skip
    assert sequence.generated == [8] * 20
    assert generate(engine(), prompt(10), stop_ids=(7,), seed=4, logit_bias={7: 1e6}).generated == [7]


def test_a_prompt_that_does_not_fit_is_an_error():
    small = engine(n_ctx=100)
    with pytest.raises(ContextLengthError, match="the prompt has 100 tokens"):
        small.enqueue(small.prepare(prompt(100)))
    with pytest.raises(ContextLengthError, match="101 tokens do not fit"):
        small.enqueue(small.prepare_score(prompt(101), lambda position, rows: None))
    assert not small.has_work


def test_generation_ends_at_the_end_of_the_context():
    sequence = generate(engine(n_ctx=100), prompt(99), seed=1)
    assert (len(sequence.generated), sequence.finish_reason) == (1, "length")
    sequence = generate(engine(n_ctx=100), prompt(10), seed=1, max_tokens=1000)
    assert (len(sequence.tokens), sequence.finish_reason) == (100, "length")


@pytest.mark.parametrize("tokens", [[], [97], [-1], [[1, 2]], [[1], [2, 3]], [1.5], ["a"], [2**70], [True]])
def test_a_prompt_that_is_not_token_ids_is_an_error(tokens: Any):
    with pytest.raises(InvalidRequestError, match=r"prompt must be|prompt is empty|not in the vocabulary"):
        engine().prepare(tokens)


def test_a_cache_smaller_than_a_context_is_an_error():
    with pytest.raises(OutOfMemoryError, match="lower n_ctx to 256"):
        engine(n_ctx=257, n_blocks=4)


def test_engine_continues_after_a_failed_step():
    shared = engine(max_batch=16)
    first = shared.enqueue(shared.prepare(prompt(10), SamplingParams(seed=1, max_tokens=10)))
    waiting = shared.enqueue(shared.prepare(prompt(40, seed=1), SamplingParams(seed=2, max_tokens=10)))
    shared.backend.fail_at_step = 3
    with pytest.raises(RuntimeError, match="fails as requested"):
        drain(shared)
    for sequence in (first, waiting):
        assert sequence.finish_reason == "error"
        assert isinstance(sequence.error, RuntimeError)
    assert not shared.has_work
    assert shared.scheduler.pool.n_available == shared.scheduler.pool.n_blocks
    expected = generate(engine(), prompt(10), seed=1, max_tokens=10).tokens
    assert generate(shared, prompt(10), seed=1, max_tokens=10).tokens == expected


def test_error_of_one_sequence_does_not_affect_others():
    shared = engine()

    def fail(position: int, rows: np.ndarray) -> None:
        raise ValueError("no")

    failing = shared.enqueue(shared.prepare_score(prompt(20), fail))
    fine = shared.enqueue(shared.prepare(prompt(30), SamplingParams(seed=1, max_tokens=5)))
    drain(shared)
    assert failing.finish_reason == "error"
    assert isinstance(failing.error, ValueError)
    assert fine.tokens == generate(engine(), prompt(30), seed=1, max_tokens=5).tokens


class Interrupted(FakeBackend):
    """A backend that is interrupted after the second step's work, as by Ctrl-C."""

    def step(self, batch: Batch) -> StepResult:
        result = super().step(batch)
        if len(self.batches) == 2:
            raise KeyboardInterrupt
        return result


def test_an_interrupted_step_can_be_taken_again():
    interrupted = Engine(Interrupted(), 512)
    sequence = interrupted.enqueue(interrupted.prepare(prompt(30), SamplingParams(seed=1, max_tokens=8)))
    interrupted.step()
    with pytest.raises(KeyboardInterrupt):
        interrupted.step()
    drain(interrupted)
    assert sequence.tokens == generate(engine(), prompt(30), seed=1, max_tokens=8).tokens


def test_logprobs_come_with_every_token():
    sequence = generate(engine(), [1, 2], seed=1, max_tokens=6, logprobs=2)
    assert [entry.token for entry in sequence.logprobs] == sequence.generated
    logits = fake_logits(np.array(sequence.tokens[:4]), 97).astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum())
    assert sequence.logprobs[2].logprob == pytest.approx(expected[sequence.tokens[4]], abs=1e-5)
    assert len(sequence.logprobs[2].top) == 2


@pytest.mark.parametrize(("first", "max_batch"), [(0, 512), (0, 7), (99, 512), (130, 33), (199, 64)])
def test_scores_are_the_logits_from_the_first_position_on(first: int, max_batch: int):
    tokens = prompt(200)
    scoring = engine(max_batch=max_batch)
    other = scoring.enqueue(scoring.prepare(prompt(20, seed=3), SamplingParams(seed=3, max_tokens=40)))
    rows: dict[int, np.ndarray] = {}
    for _ in range(2):  # the second time with a reused prefix, if `first` allows it
        rows.clear()
        sequence = scoring.enqueue(
            scoring.prepare_score(
                tokens,
                lambda position, logits: rows.update(
                    {position + i: row.copy() for i, row in enumerate(logits)}
                ),
                first=first,
            )
        )
        drain(scoring)
        assert sequence.finish_reason == "length"
        assert list(rows) == list(range(first, 200))
        for position, row in rows.items():
            assert (row == fake_logits(np.array(tokens[: position + 1]), 97)).all()
    assert sequence.n_reused == first // BLOCK_SIZE * BLOCK_SIZE
    assert len(other.generated) == 40


def test_scoring_bounds_the_logits_of_one_step(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hotset.engine.scheduler.MAX_LOGITS_BYTES", 10 * 4 * 97)
    scoring = Engine(FakeBackend(), 512, prompt_seconds=math.inf)
    sizes = []
    scoring.enqueue(
        scoring.prepare_score(prompt(100), lambda position, rows: sizes.append(len(rows)), first=65)
    )
    drain(scoring)
    assert sizes == [10, 10, 10, 5]
    assert scoring.backend.batches == [75, 10, 10, 5]


# ---- statistics ----


def test_statistics_are_requested_only_if_wanted():
    plain = engine()
    sequence = generate(plain, prompt(20), seed=1, max_tokens=5)
    assert plain.backend.n_stats_asked == 0
    assert (plain.step_stats, sequence.step_stats) == (None, [])


def test_every_token_has_the_statistics_of_its_step():
    counting = Engine(FakeBackend(max_batch=16), 512)
    counting.collect_stats = True
    sequence = generate(counting, prompt(40), seed=1, max_tokens=5)
    assert counting.backend.batches == [16, 16, 8, 1, 1, 1, 1]
    assert counting.backend.n_stats_asked == 7
    assert [stats.n_tokens for stats in sequence.step_stats] == [
        8,
        1,
        1,
        1,
        1,
    ]  # the prompt gave the first
    assert [stats.active.tolist() for stats in sequence.step_stats] == [
        [80, 24], [10, 4], [10, 5], [10, 6], [10, 7],
    ]  # fmt: skip
    assert sequence.step_stats[-1] is counting.step_stats


def test_sequences_side_by_side_each_have_the_steps_that_they_were_in():
    counting = Engine(FakeBackend(), 512)
    counting.collect_stats = True
    long, short = (
        counting.enqueue(counting.prepare(prompt(9, seed=i), SamplingParams(seed=i, max_tokens=n)))
        for i, n in enumerate((6, 3))
    )
    drain(counting)
    assert counting.backend.batches == [18, 2, 2, 1, 1, 1]
    assert [stats.n_tokens for stats in long.step_stats] == [18, 2, 2, 1, 1, 1]
    assert [stats.n_tokens for stats in short.step_stats] == [18, 2, 2]


# ---- perplexity ----


def plain_perplexity(tokens: list[int], n_ctx: int, chunks: int, bos_id: int | None) -> tuple[float, float]:
    """Compute the perplexity with llama-perplexity's arithmetic, token by token."""
    losses = []
    for i in range(chunks):
        chunk = tokens[i * n_ctx : (i + 1) * n_ctx]
        seen = [bos_id, *chunk[1:]] if bos_id is not None else chunk
        for position in range(n_ctx // 2, n_ctx - 1):
            logits = fake_logits(np.array(seen[: position + 1]), 97).astype(np.float64)
            losses.append(np.log(np.exp(logits).sum()) - logits[chunk[position + 1]])
    nll, nll2 = np.mean(losses), np.mean(np.square(losses))
    return float(np.exp(nll)), float(np.exp(nll) * np.sqrt((nll2 - nll**2) / (len(losses) - 1)))


@pytest.mark.parametrize(("n_ctx", "max_batch"), [(64, 512), (65, 20), (128, 128)])
@pytest.mark.parametrize("bos_id", [None, 1])
@pytest.mark.parametrize("chunks", [None, 2, 99])
def test_perplexity_is_llama_perplexitys(n_ctx: int, max_batch: int, bos_id: int | None, chunks: int | None):
    tokens = prompt(300)
    n_chunks = min(chunks or 99, 300 // n_ctx)
    scoring = engine(max_batch=max_batch)
    results = list(perplexity_chunks(scoring, tokens, n_ctx=n_ctx, chunks=chunks, bos_id=bos_id))
    assert [result.chunk for result in results] == list(range(1, n_chunks + 1))
    for i, result in enumerate(results):
        ppl, error = plain_perplexity(tokens, n_ctx, i + 1, bos_id)
        assert result.ppl == pytest.approx(ppl, rel=1e-6)
        assert result.error == pytest.approx(error, rel=1e-5)
        assert result.n_scored == (i + 1) * (n_ctx - 1 - n_ctx // 2)
    assert scoring.scheduler.pool.n_available == scoring.scheduler.pool.n_blocks


def test_perplexity_refuses_unmeasurable_input():
    scoring = engine(n_ctx=128)
    with pytest.raises(InvalidRequestError, match="at least 128 tokens, but the text has 127"):
        next(perplexity_chunks(scoring, prompt(127), n_ctx=64))
    with pytest.raises(ContextLengthError, match="does not fit in the context of 128"):
        next(perplexity_chunks(scoring, prompt(1000), n_ctx=256))
    with pytest.raises(InvalidRequestError, match="n_ctx of at least 4"):
        next(perplexity_chunks(scoring, prompt(100), n_ctx=2))
    with pytest.raises(InvalidRequestError, match="at least one chunk"):
        next(perplexity_chunks(scoring, prompt(200), n_ctx=64, chunks=0))


# ---- cost ----


class Instant(FakeBackend):
    """A backend that takes no time: its logits are prepared."""

    def step(self, batch: Batch) -> StepResult:
        if not hasattr(self, "_ready"):
            self._ready = fake_logits(np.zeros(1, np.int64), self.n_vocab)[None]
        return StepResult(self._ready)


def test_a_decode_step_costs_little_python():
    """Check that a step of one sequence makes few calls, equally many at any depth: 5 to 10 µs of Python."""
    quick = Engine(Instant(n_vocab=1000, n_blocks=64), 4096)
    quick.enqueue(quick.prepare([1, 2, 3], SamplingParams(temperature=0)))
    quick.step()

    def calls_of_a_step() -> int:
        n = 0

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal n
            n += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            quick.step()
        finally:
            sys.setprofile(None)
        return n

    calls = [calls_of_a_step() for _ in range(1500)]
    assert max(calls) <= 120  # Python 3.11 makes 90
