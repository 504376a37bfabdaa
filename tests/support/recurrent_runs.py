"""Engines over backends with recurrent states: requests, their logits, and the expected logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from fake_backend import drain

from hotset.backends.base import Backend, Batch, StepResult
from hotset.engine.engine import Engine
from hotset.engine.sampler import SamplingParams
from hotset.engine.sequence import Sequence as Request
from hotset.errors import StepCancelledError

N_CTX = 256


def prompt(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, n]).integers(0, 260, n).tolist()


def score(engine: Engine, tokens: list[int], first: int = 0) -> np.ndarray:
    """Return the logits of the positions from `first` on, [n, n_vocab]."""
    rows: list[np.ndarray] = []
    sequence = engine.enqueue(
        engine.prepare_score(tokens, lambda _, logits: rows.append(logits.copy()), first=first)
    )
    drain(engine)
    assert sequence.finish_reason == "length", sequence.error
    return np.concatenate(rows)


def score_together(engine: Engine, texts: Sequence[list[int]]) -> list[np.ndarray]:
    """Return the logits of every position of each text, [n, n_vocab], from requests that share steps."""
    rows: list[list[np.ndarray]] = [[] for _ in texts]
    for text, into in zip(texts, rows, strict=True):
        engine.enqueue(engine.prepare_score(text, lambda _, logits, into=into: into.append(logits.copy())))  # type: ignore[misc]
    drain(engine)
    return [np.concatenate(found) for found in rows]


def ask(engine: Engine, tokens: list[int], **params: Any) -> tuple[Request, list[np.ndarray]]:
    """Queue a request; return it and the logits from which its tokens are drawn, as they arrive."""
    rows: list[np.ndarray] = []
    sequence = engine.enqueue(engine.prepare(tokens, SamplingParams(**params)))
    assert sequence.sampler is not None
    job = sequence.sampler.job

    def noted(logits: np.ndarray, *more: Any) -> Any:
        rows.append(logits.copy())
        return job(logits, *more)

    sequence.sampler.job = noted  # type: ignore[method-assign]
    sequence.sampler.takes_candidates = lambda _: False  # type: ignore[method-assign]
    return sequence, rows


def assert_are_of_one_step(alone: Backend, sequence: Request, rows: list[np.ndarray]) -> None:
    """Assert that an answer's logits equal the logits that another backend computes in one step."""
    assert sequence.finish_reason == "length", sequence.error
    found = score(Engine(alone, N_CTX), sequence.tokens[:-1], sequence.n_prompt - 1)
    np.testing.assert_array_equal(np.array(rows), found)


class Unsteady:
    """A backend whose steps are sometimes cancelled, before or after all was written, and sometimes fail."""

    def __init__(self, inner: Backend, seed: int) -> None:
        self.inner, self._draw = inner, np.random.default_rng(seed)
        self.n_steps = self.n_cancelled = self.n_failed = 0
        self.fails = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def step(self, batch: Batch) -> StepResult:
        draw = self._draw.random()
        if draw < 0.4:
            self.n_cancelled += 1
            if draw < 0.3:
                self.inner.step(batch)
            raise StepCancelledError
        result = self.inner.step(batch)
        self.n_steps += 1
        if self.fails and self.n_steps % 40 == 0:
            self.n_failed += 1
            raise RuntimeError("fails as requested")
        return result
