"""The native sampler against its definition in NumPy, token by token, for random parameters and logits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from cases import quick_are
from sampling_reference import CHOICES, MIROSTAT, ReferenceSampler
from sampling_reference import token_logprobs as reference_logprobs

from hotset import _core
from hotset.engine.sampler import Sampler, SamplingParams, row_logprobs, token_logprobs
from hotset.errors import HotsetError
from hotset.text.mask import TokenMask


class Allowed:
    """A constraint that allows a random part of the vocabulary at each token."""

    finished = is_slow = False

    def __init__(self, rng: np.random.Generator, n_vocab: int) -> None:
        self.n_vocab = n_vocab
        share = rng.choice([0.001, 0.2, 1.0])
        self.masks = [np.packbits(rng.random(n_vocab) < share, bitorder="little") for _ in range(3)]
        self.n = 0

    def look_ahead(self) -> None:
        pass

    def is_busy(self, seconds: float) -> bool:
        return False

    def mask(self) -> TokenMask:
        return TokenMask.of(self.masks[self.n % 3], self.n_vocab)

    def accept(self, token: int) -> None:
        self.n += 1


def some_options(rng: np.random.Generator, n_vocab: int) -> dict[str, Any]:
    """Return parameters, each with its default or one of its choices, so that different choices meet."""
    share = rng.choice([0.15, 0.4, 0.8])
    options = {
        name: values[rng.integers(len(values))] for name, values in CHOICES.items() if rng.random() < share
    }
    if rng.random() < 0.2:
        options |= {name: values[rng.integers(len(values))] for name, values in MIROSTAT.items()}
    if rng.random() < 0.3:
        ids = rng.choice(n_vocab, min(n_vocab, int(rng.integers(1, 40))), replace=False).tolist()
        options["logit_bias"] = {id: float(rng.choice([-math.inf, -3.0, 2.5, 1e300])) for id in ids}
    return options


def some_logits(rng: np.random.Generator, n_vocab: int) -> np.ndarray:
    """Return rows of all kinds: flat, peaked, with ties, with values that are not finite, and huge ones."""
    row = rng.standard_normal(n_vocab).astype(np.float32) * np.float32(rng.choice([1e-4, 0.3, 1.0, 3.0, 8.0]))
    match rng.integers(12):
        case 0:
            row = np.round(row)
        case 1:
            row[:] = -0.5
        case 2:
            row[rng.random(n_vocab) < 0.9] = -math.inf
        case 3:
            row[rng.integers(n_vocab)] = rng.choice([math.nan, math.inf])
        case 4:
            row[:] = -math.inf
            row[rng.integers(n_vocab, size=2)] = 1.0
        case 5:
            row *= np.float32(1e37)
        case 6:  # a few likely tokens, as from a model that is nearly certain
            row[rng.integers(n_vocab, size=3)] += np.float32(20)
        case 7:
            row = (row.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        case 8:
            row[:] = np.where(rng.random(n_vocab) < 0.5, np.float32(0), np.float32(-0.0))
        case _:
            pass
    return row


def tokens_of(sampler: Any, rows: list[np.ndarray]) -> list[int | str]:
    """Return the tokens of an answer, with an error for each that cannot be drawn."""
    found: list[int | str] = []
    for row in rows:
        try:
            token = sampler.sample(row)
        except HotsetError:
            found.append("error")
            continue
        sampler.accept(token)
        found.append(token)
    return found


@pytest.mark.parametrize("seed", quick_are(range(6), range(60)))
@pytest.mark.parametrize(
    ("n_vocab", "n_cases"), [(1, 10), (2, 15), (63, 30), (300, 30), (5000, 20), (40_001, 5)]
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_tokens_of_a_seed_equal_the_definition(n_vocab: int, n_cases: int, seed: int) -> None:
    rng = np.random.default_rng([seed, n_vocab])
    for _ in range(n_cases):
        params = SamplingParams(seed=int(rng.integers(2**63)), **some_options(rng, n_vocab))
        prompt = rng.integers(0, min(n_vocab, 9), rng.integers(60)).tolist()
        forbidden = rng.integers(0, n_vocab, 2).tolist() if rng.random() < 0.3 else []
        breakers = [(1,), (2, 3), (2, 3, 3)] if rng.random() < 0.5 else []
        rows = [some_logits(rng, n_vocab) for _ in range(8)]
        state = int(rng.integers(2**32)) if rng.random() < 0.2 else None

        found = []
        for kind in (Sampler, ReferenceSampler):
            rule = None if state is None else Allowed(np.random.default_rng(state), n_vocab)
            found.append(tokens_of(kind(params, n_vocab, prompt, forbidden, rule, breakers), rows))
        assert found[0] == found[1], params


FULL = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


@pytest.mark.parametrize(
    "options",
    [
        FULL, {"top_k": 0}, {**FULL, "top_p": 0.9}, {**FULL, "min_p": 1e-6}, {**FULL, "typical_p": 0.9},
        {**FULL, "typical_p": 0.5, "top_p": 0.8, "min_p": 1e-5}, {**FULL, "top_n_sigma": 2.0},
        {**FULL, "xtc_probability": 1.0, "xtc_threshold": 1e-4, "dry_multiplier": 0.8, "dynatemp_range": 0.5},
        {**FULL, "dynatemp_range": 0.7, "typical_p": 0.95}, {"top_k": 20_000, "typical_p": 0.9},
        {"mirostat": 1}, {"mirostat": 2, "mirostat_tau": 16.0}, {"mirostat": 1, "mirostat_tau": 16.0},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("scale", quick_are((3.0,), (0.2, 1.0, 3.0, 6.0)))
def test_tokens_of_a_large_vocabulary(options: dict[str, Any], scale: float) -> None:
    n_vocab = 152_064
    rng = np.random.default_rng(5)
    params = SamplingParams(seed=9, **options)
    rows = [rng.standard_normal(n_vocab).astype(np.float32) * np.float32(scale) for _ in range(4)]
    sampler, reference = (kind(params, n_vocab, [1, 2, 1, 2]) for kind in (Sampler, ReferenceSampler))
    assert tokens_of(sampler, rows) == tokens_of(reference, rows)


def test_sequences_draw_the_same_tokens_together_and_alone() -> None:
    """Check draws on all threads of a pool, fast and slow ones mixed, some with logprobs."""
    n_vocab, n_rows = 6400, 10
    rng = np.random.default_rng(3)
    n_tops = [None, 0, 3, None]
    all_options = [some_options(rng, n_vocab) | {"logprobs": n_tops[i % 4]} for i in range(40)]
    rows = rng.standard_normal((n_rows, len(all_options), n_vocab)).astype(np.float32)
    largest = rows.reshape(n_rows, len(all_options), -1, 64).max(axis=-1)

    def samplers() -> list[Sampler]:
        return [
            Sampler(SamplingParams(seed=i, **options), n_vocab, [1, 2])
            for i, options in enumerate(all_options)
        ]

    alone, together = samplers(), samplers()
    runtime = _core.Runtime(4)
    try:
        for i in range(n_rows):
            expected = [sampler.sample(rows[i, j]) for j, sampler in enumerate(alone)]
            jobs = [sampler.job(rows[i, j], largest[i, j]) for j, sampler in enumerate(together)]
            drawn = _core.draw_tokens(jobs, runtime)
            assert [token for token, _ in drawn] == expected
            for row, sampler, (_, logprobs) in zip(rows[i], together, drawn, strict=True):
                n_top = sampler.params.logprobs
                assert logprobs == (None if n_top is None else row_logprobs(row[None], n_top)[0])
            for one, other, token in zip(alone, together, expected, strict=True):
                one.accept(token)
                other.accept(token)
    finally:
        runtime.close()


@pytest.mark.parametrize("n_vocab", [1, 7, 64, 1000, 8191, 8193, 50_000])
@pytest.mark.parametrize("seed", quick_are(range(8), range(80)))
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_logprobs_equal_the_definition(n_vocab: int, seed: int) -> None:
    rng = np.random.default_rng([seed, n_vocab])
    rows = np.array(
        [row for row in (some_logits(rng, n_vocab) for _ in range(5)) if math.isfinite(row.max())]
    )
    token, n_top = int(rng.integers(n_vocab)), int(rng.choice([0, 1, 20, n_vocab]))
    runtime = _core.Runtime(3)
    try:
        found = row_logprobs(rows.reshape(-1, n_vocab), n_top, runtime)
    finally:
        runtime.close()
    for row, logprobs in zip(rows, found, strict=True):
        assert token_logprobs(row, token, logprobs) == reference_logprobs(row, token, n_top)
