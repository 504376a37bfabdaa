"""Recurrent states on a Vulkan device: exact after splits, reuse, preemption and cancellation.

Like tests/backends/test_recurrent.py for the CPU, every comparison requires equality with the same tokens in
one step of another backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import quick_are
from drafters import Guesser, steady
from recurrent_runs import N_CTX, Unsteady, ask, assert_are_of_one_step, drain, prompt, score, score_together
from vulkan_runs import validated, vulkan

from hotset.backends.base import Backend
from hotset.engine.engine import Engine
from hotset.engine.speculation import Speculator
from hotset.formats.gguf import GGUFFile, open_gguf
from hotset.load_parameters import MOST_DRAFTED

pytest.importorskip("torch")
tiny_models = pytest.importorskip("tiny_models")

__all__ = ["steady", "validated"]  # the fixtures

RECIPES = ["lfm2moe", "qwen3next", "kimi-linear", "falcon-h1", "rwkv6", "rwkv7", "mamba", "jamba", "qwen4exp"]


@pytest.fixture(params=quick_are(("falcon-h1",), RECIPES))
def gguf(request: pytest.FixtureRequest, run_folder: Path) -> Iterator[GGUFFile]:
    with open_gguf(tiny_models.shared_gguf(request.param, run_folder)) as gguf:
        yield gguf


def backend(gguf: GGUFFile, **options: Any) -> Backend:
    return vulkan(gguf, **{"n_blocks": 16, "n_states": 40, "max_batch": 256, "kv_type": "f16", **options})


def test_bits_depend_on_no_cut_and_no_neighbour(gguf: GGUFFile) -> None:
    texts = [prompt(n, n) for n in (150, 70, 3)]
    alone = backend(gguf)
    whole = [score(Engine(alone, N_CTX), text) for text in texts]
    for max_batch in (5, 67, 256):
        engine = Engine(backend(gguf, max_batch=max_batch), N_CTX)
        for found, expected in zip(score_together(engine, texts), whole, strict=True):
            np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
def test_prefixes_and_preempted_sequences_continue_from_their_states(gguf: GGUFFile) -> None:
    alone, shared = backend(gguf), prompt(140)
    engine = Engine(backend(gguf, n_blocks=5, n_states=12, max_batch=70), N_CTX)
    ask(engine, shared, temperature=0, max_tokens=20)
    drain(engine)
    for tail, n in ((prompt(50, 1), 128), (prompt(1, 2), 128), (prompt(4, 3), 128)):
        sequence, rows = ask(engine, shared + tail, seed=1, max_tokens=5)
        drain(engine)
        assert sequence.n_reused == n
        assert_are_of_one_step(alone, sequence, rows)
    asked = [ask(engine, prompt(60, i), seed=i, max_tokens=60) for i in range(4)]
    drain(engine)
    assert engine.counters().preemptions > 0
    for sequence, rows in asked:
        assert_are_of_one_step(alone, sequence, rows)
    assert engine.scheduler.states is not None
    assert engine.scheduler.states.n_available == 12


def test_drafted_tokens_that_turn_wrong_leave_no_trace(gguf: GGUFFile) -> None:
    """Check that a request continues from the state after the last token that was drafted right."""
    alone, one = backend(gguf), backend(gguf)
    expected, _ = ask(engine := Engine(one, N_CTX), prompt(60), temperature=0, max_tokens=30, logprobs=1)
    drain(engine)
    guesser = Guesser(lambda _: expected.generated, 260, 0.8)
    engine = Engine(one, N_CTX, speculator=Speculator(guesser, MOST_DRAFTED))
    sequence, rows = ask(engine, prompt(60), temperature=0, max_tokens=30, logprobs=1)
    drain(engine)
    assert (sequence.tokens, sequence.logprobs) == (expected.tokens, expected.logprobs)
    assert 0 < engine.counters().accepted_tokens < 30
    assert_are_of_one_step(alone, sequence, rows)


@pytest.mark.slow
def test_cancelled_steps_leave_usable_states(gguf: GGUFFile) -> None:
    alone, unsteady = backend(gguf), Unsteady(backend(gguf, n_blocks=9, n_states=12, max_batch=70), seed=3)
    engine = Engine(unsteady, N_CTX)  # type: ignore[arg-type]
    shared, asked = prompt(130), []
    for i in range(6):
        asked.append(ask(engine, shared[: 130 - 7 * (i % 4)] + prompt(i, 5), seed=i, max_tokens=12))
        for _ in range(3):
            engine.step()
    drain(engine)
    assert unsteady.n_cancelled > 5
    for sequence, rows in asked:
        assert_are_of_one_step(alone, sequence, rows)
