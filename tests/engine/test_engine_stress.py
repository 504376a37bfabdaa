"""A thousand requests that start, leave, fail and run out of blocks at any time without affecting others."""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from functools import cache

import numpy as np
import pytest
from fake_backend import FakeBackend, drain, fake_logits

from hotset.backends.base import BLOCK_SIZE
from hotset.engine.driver import EngineThread
from hotset.engine.engine import Engine
from hotset.engine.sampler import SamplingParams
from hotset.engine.sequence import Owner, Sequence

N_CTX = 384
BASES = [np.random.default_rng(i).integers(0, 97, 300).tolist() for i in range(4)]


def drawn_prompt(draw: random.Random) -> tuple[int, ...]:
    """Return a part of one of a few texts, often whole blocks of it, and often with its own end."""
    n = draw.choice([draw.randint(1, 300), BLOCK_SIZE * draw.randint(1, 4), 200])
    own = [draw.randrange(97) for _ in range(draw.choice([0, 1, 30]))]
    return (*draw.choice(BASES)[:n], *own)


@cache
def expected(tokens: tuple[int, ...], seed: int, n: int) -> list[int]:
    engine = Engine(FakeBackend(), N_CTX)
    sequence = engine.enqueue(engine.prepare(tokens, SamplingParams(seed=seed, max_tokens=n)))
    drain(engine)
    return sequence.generated


def check_blocks(engine: Engine) -> None:
    """Check that running sequences hold every block as often as it counts, and that each has a slot."""
    pool = engine.scheduler.pool
    held = Counter(block for sequence in engine.scheduler.running for block in sequence.blocks)
    assert [held[block] for block in range(pool.n_blocks)] == pool.references
    assert pool.n_available == sum(1 for n in pool.references if not n)
    if engine.scheduler.states is not None:
        states = engine.scheduler.states
        taken = Counter(slot for sequence in engine.scheduler.running for slot in sequence.states.values())
        assert [taken[slot] for slot in range(states.n_states)] == states.references
        assert states.n_available == sum(1 for n in states.references if not n)
        assert states.n_idle <= states.n_kept <= pool.n_findable
        for sequence in engine.scheduler.running:
            assert not sequence.n_computed or sequence.n_computed in sequence.states
        assert not any(sequence.states for sequence in engine.scheduler.waiting)
    slots = [sequence.slot for sequence in engine.scheduler.running]
    assert sorted(slots + engine.scheduler.free_slots) == list(range(engine.max_sequences))
    for sequence in engine.scheduler.running:
        table = engine.scheduler.block_tables[sequence.slot]
        assert table[: len(sequence.blocks)].tolist() == sequence.blocks
        assert sequence.n_computed <= len(sequence.blocks) * BLOCK_SIZE
        assert sequence.n_registered <= len(sequence.blocks)
    assert all(sequence.slot < 0 and not sequence.blocks for sequence in engine.scheduler.waiting)


@pytest.mark.parametrize(
    ("n", "n_blocks", "max_sequences", "max_batch", "n_states"),
    [
        pytest.param(1000, 6, 4, 64, 0, marks=pytest.mark.slow), (250, 9, 16, 200, 0),
        pytest.param(250, 64, 8, 33, 0, marks=pytest.mark.slow), (250, 9, 16, 200, 12),
        pytest.param(400, 6, 4, 64, 11, marks=pytest.mark.slow),
        pytest.param(400, 64, 8, 33, 18, marks=pytest.mark.slow),
        pytest.param(400, 64, 8, 100, 200, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_thousand_requests_come_and_go(
    monkeypatch: pytest.MonkeyPatch, n: int, n_blocks: int, max_sequences: int, max_batch: int, n_states: int
) -> None:
    """Check models with and without recurrent states, with slots for all prefixes or for very few."""
    draw = random.Random(n_blocks + 1)  # a seed with which everything checked at the end occurs
    backend = FakeBackend(n_blocks=n_blocks, max_batch=max_batch, n_states=n_states)
    ticks = itertools.count()  # chunks depend on the time of steps, which must not be random
    monkeypatch.setattr(
        "hotset.engine.engine.time.perf_counter", lambda: 1e-4 * next(ticks) + 1e-3 * backend.n_tokens_seen
    )
    engine = Engine(backend, N_CTX, max_sequences)
    asked: list[tuple[Sequence, tuple[int, ...], int, int]] = []
    scored: list[tuple[Sequence, tuple[int, ...], int, dict[int, float]]] = []
    n_failed = 0

    def ask() -> None:
        tokens, seed, n_new = drawn_prompt(draw), draw.randrange(3), draw.choice([1, 5, 90])
        if draw.random() < 0.1:
            first, found = draw.randrange(len(tokens)), dict[int, float]()

            def keep(position: int, rows: np.ndarray) -> None:
                for i, row in enumerate(rows):
                    assert position + i not in found
                    found[position + i] = float(row[0])

            scored.append(
                (engine.enqueue(engine.prepare_score(tokens, keep, first=first)), tokens, first, found)
            )
            return
        sequence = engine.enqueue(
            engine.prepare(
                tokens,
                SamplingParams(seed=seed, max_tokens=n_new),
                reuse_prefix=draw.random() < 0.9,
                owner=Owner.of(draw.choice([None, "a", "b"]), 0.0 if draw.random() < 0.02 else None),
            )
        )
        asked.append((sequence, tokens, seed, n_new))

    while len(asked) + len(scored) < n or engine.has_work:
        if len(asked) + len(scored) < n:
            for _ in range(draw.choice([0, 0, 1, 2, 6]) if len(engine.scheduler.waiting) < 20 else 0):
                ask()
        there = [*engine.scheduler.running, *engine.scheduler.waiting]
        if there and draw.random() < 0.08:
            stop = engine.cancel if draw.random() < 0.5 else engine.interrupt
            stop(draw.choice(there))
        backend.cancelled = draw.random() < 0.05
        if draw.random() < 0.03:
            backend.fail_at_step = len(backend.batches)
        try:
            engine.step()
        except RuntimeError:
            n_failed += 1
        backend.fail_at_step = None
        check_blocks(engine)
    reasons = Counter(sequence.finish_reason for sequence, *_ in asked + scored)
    assert set(reasons) == {"length", "cancelled", "timeout", "error"}
    assert min(reasons.values()) > 1
    assert n_failed > 3
    for sequence, tokens, seed, n_new in asked:
        right = expected(tokens, seed, n_new)
        assert sequence.generated == right[: len(sequence.generated)]
        assert sequence.finish_reason != "length" or sequence.generated == right
    for sequence, tokens, first, found in scored:
        if sequence.finish_reason == "length":
            assert list(found) == list(range(first, len(tokens)))
        for position, logit in found.items():
            assert logit == fake_logits(np.array(tokens[: position + 1]), 97)[0]
    now = engine.counters()
    assert (now.finished, now.cancelled) == (reasons["length"], reasons["cancelled"])
    assert (now.failed, now.timed_out) == (reasons["error"], reasons["timeout"])
    assert (now.running, now.waiting, now.blocks_used) == (0, 0, 0)
    assert now.reused_tokens > 0
    assert (now.preemptions > 0) == (n_blocks < 64)
    assert (engine.scheduler.block_tables == -1).all()


def test_threads_that_ask_and_leave_at_any_moment_get_their_own() -> None:
    """Check requests at random times: only their order depends on the machine."""
    backend = FakeBackend(n_blocks=12, max_batch=64)
    thread = EngineThread(Engine(backend, N_CTX, 6))
    wrong: list[str] = []

    def client(number: int) -> None:
        draw = random.Random(number)
        for _ in range(25):
            tokens, seed, n = drawn_prompt(draw), draw.randrange(3), draw.choice([1, 5, 90])
            sequence = thread.engine.prepare(
                tokens, SamplingParams(seed=seed, max_tokens=n), owner=Owner(str(number))
            )
            thread.submit(sequence)
            right, leaves_after = expected(tokens, seed, n), draw.choice([0, 1, 3, 100, 100])
            got: list[int] = []
            while len(got) < leaves_after:
                event = thread.next_event(sequence)
                got += [] if event.token is None else [event.token]
                if event.finish_reason is not None:
                    break
            thread.cancel([sequence])
            if got != right[: len(got)] or (leaves_after > n and got != right):
                wrong.append(f"{number}: {got} instead of {right}")

    clients = [threading.Thread(target=client, args=(number,)) for number in range(6)]
    for each in clients:
        each.start()
    for each in clients:
        each.join()
    assert not wrong
    with thread.exclusive() as engine:
        check_blocks(engine)
        assert engine.scheduler.pool.n_available == 12
        assert not engine.has_work
    thread.close()
