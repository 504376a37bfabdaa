"""The sampler compared with a plain dense reference, and the matching of stop strings."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from cases import quick_are

from hotset.backends.base import LOGIT_GROUP, N_CANDIDATES
from hotset.engine.sampler import (
    Sampler,
    SamplingParams,
    TokenLogprobs,
    draw_tokens,
    row_logprobs,
    token_logprobs,
)
from hotset.engine.stop import StopMatcher
from hotset.errors import HotsetError, InvalidRequestError
from hotset.text.mask import TokenMask

N_VOCAB = 3000  # more than k groups, so that top_k selects groups before it sorts


def some_logits(seed: int = 0, n: int = N_VOCAB, scale: float = 2.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(n) * scale).astype(np.float32)


def plain_distribution(logits: np.ndarray, params: SamplingParams, tokens: list[int]) -> np.ndarray:
    """Return the probabilities of `params` over the whole vocabulary, computed directly: float64."""
    values = logits.astype(np.float64)
    for token, bias in params.logit_bias.items():
        values[token] += bias
    if params.penalty_last_n != 0:
        recent = tokens if params.penalty_last_n < 0 else tokens[-params.penalty_last_n :]
        for token in set(recent):
            penalty = params.repetition_penalty
            values[token] = values[token] / penalty if values[token] > 0 else values[token] * penalty
            values[token] -= recent.count(token) * params.frequency_penalty + params.presence_penalty
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    if params.temperature == 0:
        return np.eye(1, len(values), order[0])[0]
    if params.top_k:
        order = order[: params.top_k]
    weights = [math.exp(values[i] - values[order[0]]) for i in order]
    kept, mass = [], 0.0
    for i, weight in zip(order, weights, strict=True):
        kept.append(i)
        mass += weight
        if mass >= params.top_p * sum(weights) and params.top_p < 1:
            break
    kept = [i for i, w in zip(kept, weights, strict=False) if w >= params.min_p * weights[0]]
    probabilities = np.zeros(len(values))
    probabilities[kept] = np.exp((values[kept] - values[order[0]]) / params.temperature)
    return probabilities / probabilities.sum()


PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"temperature": 1.5, "top_k": 200, "top_p": 0.5, "min_p": 0.0},
    {"top_k": 0},
    {"top_k": 0, "min_p": 0.0, "top_p": 0.7},
    {"top_k": 0, "min_p": 0.2, "top_p": 1.0},
    {"top_k": 0, "min_p": 0.0, "top_p": 1.0, "temperature": 0.3},
    {"top_k": 5, "top_p": 1.0, "min_p": 0.0},
    {"top_k": N_VOCAB + 5, "top_p": 0.9},
    {"top_p": 0.0},
    {"min_p": 1.0},
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.7, "presence_penalty": 0.4},
    {"repetition_penalty": 0.7, "frequency_penalty": -0.5, "penalty_last_n": -1},
    {"presence_penalty": 2.0, "penalty_last_n": 3, "top_k": 0},
    {"logit_bias": {7: 11.5, 8: -math.inf, 9: -3}, "top_k": 10},
    {"logit_bias": {7: 11.5}, "repetition_penalty": 1.4, "temperature": 0},
]

# Together with other filters (defined in test_samplers.py).
MORE: list[dict[str, Any]] = [
    {"top_n_sigma": 1.5},
    {"top_n_sigma": 1.5, "top_k": 0},
    {"typical_p": 0.5, "top_k": 0},
    {"typical_p": 0.5, "xtc_probability": 0.5, "xtc_threshold": 0.02},
    {"xtc_probability": 0.9, "xtc_threshold": 0.01, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    {"dynatemp_range": 0.8, "dynatemp_exponent": 2.0},
    {"mirostat": 1},
    {"mirostat": 2, "mirostat_tau": 2.0},
    {"dry_multiplier": 0.8, "dry_allowed_length": 0},
    {"dry_multiplier": 0.8, "dry_allowed_length": 0, "temperature": 0},
]


@pytest.mark.parametrize("options", quick_are(PARAMS[::2], PARAMS), ids=str)
def test_draws_follow_the_plain_distribution(options: dict[str, Any]):
    params = SamplingParams(seed=11, **options)
    logits = some_logits(3)
    likely = np.argsort(-logits)[:6].tolist()
    history = [*likely, 1, 2, 3, likely[0], likely[0]] * 2
    expected = plain_distribution(logits, params, history)
    sampler = Sampler(params, N_VOCAB, history)
    n = 4000
    counts = np.bincount([sampler.sample(logits) for _ in range(n)], minlength=N_VOCAB)
    assert not counts[expected == 0].any(), "drew a token that the filters exclude"
    # Pearson's statistic over tokens that are expected at least 5 times, with the others in one cell. For c
    # cells its mean is c - 1 and its standard deviation sqrt(2 (c - 1)); seven of these never occur by
    # chance.
    common = expected * n >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common] * n, expected[~common].sum() * n)
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    freedom = max(len(wanted) - 1, 1)
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    assert statistic <= freedom + 7 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("options", PARAMS, ids=str)
@pytest.mark.parametrize("seed", quick_are((0,), range(3)))
def test_candidates_equal_the_plain_distribution(options: dict[str, Any], seed: int):
    """Check that exactly the allowed tokens can be drawn, with exact probabilities (to float64 rounding)."""
    params = SamplingParams(seed=0, **options)
    logits = some_logits(seed)
    history = (
        np.random.default_rng(seed).integers(0, N_VOCAB, 100).tolist() + np.argsort(-logits)[:3].tolist()
    )
    expected = plain_distribution(logits, params, history)
    sampler = Sampler(params, N_VOCAB, history)
    got = np.zeros(N_VOCAB)
    for u in np.linspace(0, 1, 400, endpoint=False):
        sampler.generator = Fixed(float(u))
        got[sampler.sample(logits)] += 1 / 400
    assert not got[expected == 0].any()
    # Evenly spaced numbers hit each interval of the cumulative distribution in proportion, to within one.
    assert np.abs(got - expected).max() <= 1.01 / 400


@dataclass
class Fixed:
    """A generator that returns one number."""

    number: float

    def random(self) -> float:
        return self.number


def test_the_largest_number_below_one_draws_an_allowed_token():
    for options in PARAMS:
        sampler = Sampler(SamplingParams(seed=0, **options), N_VOCAB)
        sampler.generator = Fixed(math.nextafter(1.0, 0.0))
        logits = some_logits(1)
        assert plain_distribution(logits, sampler.params, [])[sampler.sample(logits)] > 0


@pytest.mark.parametrize("n", [1, 63, 64, 65, 1000, 4096 + 17])
@pytest.mark.parametrize("k", [1, 2, 15, 40])
@pytest.mark.parametrize("kind", ["normal", "ties", "equal", "infinite"])
def test_top_k_equals_a_full_sort(n: int, k: int, kind: str):
    logits = some_logits(n, n)
    if kind == "ties":
        logits = np.round(logits)
    elif kind == "equal":
        logits[:] = -1.5
    elif kind == "infinite":
        logits[::2] = -np.inf
    expected = sorted(range(n), key=lambda i: (-logits[i], i))[:k]
    assert row_logprobs(logits[None], k)[0][1] == expected


N_GROUPED = LOGIT_GROUP * 200  # enough groups for the 40 of the default


def grouped(logits: np.ndarray) -> np.ndarray:
    """Return the largest logit of each group, as backends do."""
    return np.asarray(logits.reshape(-1, LOGIT_GROUP).max(axis=1))


@pytest.mark.parametrize("options", [*PARAMS, *MORE, {"logit_bias": dict.fromkeys(range(99), 1.0)}], ids=str)
@pytest.mark.parametrize(
    "kind",
    quick_are(("ties", "forbidden", "nan"), ["normal", "ties", "equal", "forbidden", "infinite", "nan"]),
)
def test_the_largest_of_groups_change_no_token(options: dict[str, Any], kind: str):
    params = SamplingParams(seed=3, **options)
    rng = np.random.default_rng(1)
    history = rng.integers(0, N_GROUPED, 30).tolist()
    forbidden = [2, 70, N_GROUPED - 1]
    by_groups, plain = (Sampler(params, N_GROUPED, history, forbidden) for _ in range(2))
    for i in range(10):
        logits = some_logits(i, N_GROUPED)
        match kind:
            case "ties":
                logits = np.round(logits)
            case "equal":
                logits[:] = -0.5
            case "forbidden":
                logits[20:] = -np.inf
            case "infinite" | "nan":
                logits[[700, N_GROUPED - 5]] = np.inf if kind == "infinite" else np.nan
        logits.flags.writeable = False
        expected = sampled(plain, logits)
        assert sampled(by_groups, logits, largest=grouped(logits)) == expected
        if isinstance(expected, int):
            for sampler in (plain, by_groups):
                sampler.accept(expected)


def sampled(sampler: Sampler, logits: np.ndarray, **more: Any) -> int | str:
    """Return a token, or the error."""
    try:
        return sampler.sample(logits, **more)
    except HotsetError as error:
        return str(error)


LOWERING: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 1.0},
    {"repetition_penalty": 4.0, "penalty_last_n": -1, "temperature": 0},
    {"logit_bias": dict.fromkeys(range(80), -9.0)}, {"logit_bias": {N_VOCAB - 1: -1.0}},
    {"logit_bias": dict.fromkeys(range(99), -9.0), "top_k": 29},
    {"top_k": 120, "top_p": 1.0, "min_p": 0.0},
    {"temperature": 0, "top_k": 0, "mirostat": 2, "top_n_sigma": 1.0},
]  # fmt: skip


@pytest.mark.parametrize("options", [*PARAMS, *MORE, *LOWERING], ids=str)
@pytest.mark.parametrize("kind", ["normal", "ties", "equal", "recent", "nan", "few"])
@pytest.mark.filterwarnings("error")
def test_the_largest_logits_decide_where_they_are_said_to(options: dict[str, Any], kind: str):
    """Check rows of several kinds.

    recent: penalties lower the most likely tokens, as far as they count. nan: one logit is NaN. few: only
    some, or none, are finite.
    """
    params = SamplingParams(seed=3, **options)
    history = np.random.default_rng(1).integers(0, N_VOCAB, 30).tolist()
    by_candidates, plain = (Sampler(params, N_VOCAB, history, [2, 70]) for _ in range(2))
    n_taken = 0
    for i in range(10):
        logits = some_logits(i)
        match kind:
            case "ties":
                logits = np.round(logits)
            case "equal":
                logits[:] = -0.5
            case "recent":
                logits[history] += 20
            case "nan":
                logits[11 * i] = np.nan
            case "few":
                logits[2 * i :] = -np.inf
        ahead = np.where(np.isnan(logits), np.float32(np.inf), logits)
        chosen = np.sort(np.argsort(-ahead, kind="stable")[:N_CANDIDATES])
        expected = sampled(plain, logits)
        if by_candidates.takes_candidates(1):
            n_taken += 1
            assert sampled(by_candidates, logits[chosen], candidates=chosen) == expected
        else:
            sampled(by_candidates, logits)
        for sampler in (by_candidates, plain):
            sampler.accept(expected if isinstance(expected, int) else i)
    assert n_taken in ((10,) if options in LOWERING else (0, 10))


def test_requests_that_need_all_logits():
    none = [
        {"top_k": 0}, {"top_k": 0, "min_p": 0.5}, {"top_k": 129}, {"top_k": N_VOCAB}, {"mirostat": 1},
        {"top_n_sigma": 1.0}, {"dry_multiplier": 0.5}, {"logprobs": 0}, {"logit_bias": {1: 0.5}},
        {"repetition_penalty": 0.9}, {"frequency_penalty": -1}, {"presence_penalty": -1},
        {"top_k": 120, "logit_bias": dict.fromkeys(range(9), -1.0)},
    ]  # fmt: skip
    for options in none:
        assert not Sampler(SamplingParams(seed=1, **options), N_VOCAB).takes_candidates(1), options
    constraint = Allowed([1], N_VOCAB)
    assert not Sampler(SamplingParams(seed=1), N_VOCAB, constraint=constraint).takes_candidates(1)
    penalised = Sampler(SamplingParams(seed=1, top_k=120, presence_penalty=1), N_VOCAB, range(7))
    assert penalised.takes_candidates(2)
    assert not penalised.takes_candidates(3)  # each drawn token may have a lower logit in the next row
    assert Sampler(SamplingParams(seed=1, top_k=128), N_VOCAB).takes_candidates(17)
    sampler = Sampler(SamplingParams(temperature=0), N_VOCAB)
    logits = np.full(N_CANDIDATES, np.nan, np.float32)
    with pytest.raises(HotsetError, match="not numbers"):
        sampler.sample(logits, candidates=np.arange(N_CANDIDATES))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0},
        {"temperature": 0, "logit_bias": {7: -100, 9000: 1}},
        {"repetition_penalty": 1.3, "presence_penalty": 0.2},
        {"top_k": 7, "top_p": 1.0, "min_p": 0.3},
    ],
    ids=str,
)
def test_groups_that_cannot_matter_are_not_read(options: dict[str, Any]):
    """Check that they are not read: here they would cause an error or another token."""
    sampler, plain = (Sampler(SamplingParams(seed=4, **options), N_GROUPED, [5, 400]) for _ in range(2))
    for i in range(5):
        logits = some_logits(i, N_GROUPED)
        largest = grouped(logits)
        read = np.argsort(-largest)[:60]
        read = np.union1d(read, np.array([5, 400, 7, 9000]) // LOGIT_GROUP)
        poisoned = np.full_like(logits, np.nan)
        of_groups = poisoned.reshape(-1, LOGIT_GROUP)
        of_groups[read] = logits.reshape(-1, LOGIT_GROUP)[read]
        assert np.isnan(poisoned).sum() > N_GROUPED / 2
        assert sampler.sample(poisoned, largest) == plain.sample(logits)


class Allowed:
    """A constraint that always allows the same tokens."""

    finished = False
    is_slow = False

    def __init__(self, ids: list[int], n: int) -> None:
        allowed = np.zeros(n, bool)
        allowed[ids] = True
        self.bits = np.packbits(allowed, bitorder="little")
        self.accepted: list[int] = []

    def look_ahead(self) -> None:
        pass

    def is_busy(self, seconds: float) -> bool:
        return False

    def mask(self) -> TokenMask:
        return TokenMask.of(self.bits, N_VOCAB)

    def accept(self, token: int) -> None:
        self.accepted.append(token)


@pytest.mark.parametrize("n_allowed", quick_are((3, 300), [1, 3, 17, 300, N_VOCAB - 8]))
@pytest.mark.parametrize("options", [*PARAMS, *MORE], ids=str)
def test_constrained_draw_ignores_forbidden_tokens(n_allowed: int, options: dict[str, Any]):
    """Check few and many allowed tokens, which are handled differently, and masks of other lengths."""
    rng = np.random.default_rng(n_allowed)
    ids = sorted(rng.choice(N_VOCAB - 8, n_allowed, replace=False).tolist())
    others = sorted({*range(N_VOCAB)} - {*ids})
    for n in (N_VOCAB - 8, N_VOCAB + 37):
        rule = Allowed(ids, n)
        bound = Sampler(SamplingParams(seed=7, **options), N_VOCAB, [1, 2, 3], constraint=rule)
        biased = Sampler(SamplingParams(seed=7, **options), N_VOCAB, [1, 2, 3], forbidden=others)
        drawn = []
        for i in range(12):
            logits = some_logits(i)
            drawn.append(bound.sample(logits))
            assert drawn[-1] == biased.sample(logits)
            bound.accept(drawn[-1])
            biased.accept(drawn[-1])
        assert rule.accepted == drawn, "and not the prompt"
        assert {*drawn} <= {*ids}


def test_constraint_without_allowed_tokens_is_an_error():
    for options in ({}, {"temperature": 0}, {"top_k": 0}):
        sampler = Sampler(SamplingParams(seed=0, **options), N_VOCAB, constraint=Allowed([], N_VOCAB))
        with pytest.raises(InvalidRequestError, match="the answer cannot continue"):
            sampler.sample(some_logits())


def test_logits_are_left_as_they_are():
    logits = some_logits()
    logits.flags.writeable = False
    Sampler(SamplingParams(seed=0, logit_bias={1: 5}, repetition_penalty=1.2), N_VOCAB, [1, 2]).sample(logits)
    assert (logits == some_logits()).all()


def test_one_number_is_drawn_per_token_for_any_logits():
    params = SamplingParams(seed=5)
    alone, mixed = Sampler(params, N_VOCAB), Sampler(params, N_VOCAB)
    for i in range(5):
        alone.sample(some_logits(i))
        mixed.sample(some_logits(i + 50, scale=0.01 if i % 2 else 20))
    assert alone.sample(some_logits(99)) == mixed.sample(some_logits(99))


@pytest.mark.usefixtures("any_seed")
def test_a_seed_is_reported_and_repeats():
    first = Sampler(SamplingParams(), N_VOCAB)
    again = Sampler(SamplingParams(seed=first.seed), N_VOCAB)
    logits = some_logits(scale=0.5)
    assert [first.sample(logits) for _ in range(20)] == [again.sample(logits) for _ in range(20)]
    assert Sampler(SamplingParams(), N_VOCAB).seed != first.seed


def test_penalties_forget_tokens_that_left_the_window():
    params = SamplingParams(temperature=0, presence_penalty=100, penalty_last_n=4)
    sampler = Sampler(params, N_VOCAB)
    logits = some_logits()
    ranking = np.argsort(-logits).tolist()
    drawn = []
    for _ in range(12):
        drawn.append(sampler.sample(logits))
        sampler.accept(drawn[-1])
    assert drawn == [ranking[i % 5] for i in range(12)]


@pytest.mark.parametrize("logits", [[-1.0, -1.2], [1.2, 1.0], [0.1, -0.1]], ids=str)
def test_a_repetition_penalty_lowers_logits_of_either_sign(logits: list[float]):
    params = SamplingParams(temperature=0, repetition_penalty=2)
    expected = 1 if logits[0] != 0.1 else 0  # 0.1 / 2 is still above -0.1
    assert Sampler(params, 2, [0]).sample(np.array(logits, np.float32)) == expected
    assert Sampler(params, 2, [0, 1]).sample(np.array(logits, np.float32)) == 0


def drawn_logprobs(sampler: Sampler, logits: np.ndarray) -> TokenLogprobs:
    [(token, found)] = draw_tokens([sampler.job(logits)], None)
    assert found is not None
    return token_logprobs(logits, token, found)


def test_logprobs_are_of_the_model_and_not_of_the_sampler():
    logits = some_logits(2)
    params = SamplingParams(seed=0, logprobs=3, temperature=0.1, logit_bias={5: 100}, repetition_penalty=2)
    sampler = Sampler(params, N_VOCAB, [5, 6])
    expected = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
    result = drawn_logprobs(sampler, logits)
    best = np.argsort(-logits)[:3]
    assert result.token == 5
    assert result.logprob == pytest.approx(expected[5], abs=1e-6)
    assert [token for token, _ in result.top] == best.tolist()
    assert [logprob for _, logprob in result.top] == pytest.approx(expected[best], abs=1e-6)
    assert drawn_logprobs(Sampler(SamplingParams(seed=0, logprobs=0), N_VOCAB), logits).top == ()


def test_log_sum_exp_of_extreme_logits():
    found = row_logprobs(np.array([[1000, 1000], [-1000, -np.inf]], np.float32), 2)
    assert found == [(pytest.approx(1000 + math.log(2)), [0, 1]), (-1000, [0, 1])]


def test_minus_one_lifts_a_restriction() -> None:
    assert SamplingParams(seed=-1, top_k=-1, max_tokens=-1.0) == SamplingParams(top_k=0)


def test_logits_that_are_not_numbers_are_an_error():
    for options in ({}, {"temperature": 0}, {"top_k": 0}, {"logit_bias": {1: 1}}):
        with pytest.raises(HotsetError, match="not numbers"):
            Sampler(SamplingParams(seed=0, **options), N_VOCAB).sample(np.full(N_VOCAB, np.nan, np.float32))


def test_a_bias_that_forbids_everything_is_an_error():
    for options in ({}, {"temperature": 0}, {"top_k": 0}):
        sampler = Sampler(SamplingParams(seed=0, **options), 4, forbidden=range(4))
        with pytest.raises(InvalidRequestError, match="forbids every token"):
            sampler.sample(np.zeros(4, np.float32))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature must be at least 0"),
        ({"temperature": math.nan}, "temperature must be a finite number"),
        ({"temperature": "hot"}, "temperature must be a finite number"),
        ({"temperature": True}, "temperature must be a finite number"),
        ({"top_k": -2}, "top_k must be at least 0"),
        ({"top_k": 1.5}, "top_k must be a whole number"),
        ({"top_p": 1.1}, "top_p must be between 0 and 1"),
        ({"min_p": -0.1}, "min_p must be between 0 and 1"),
        ({"repetition_penalty": 0}, "repetition_penalty must be above 0"),
        ({"frequency_penalty": math.inf}, "frequency_penalty must be a finite number"),
        ({"penalty_last_n": -2}, "penalty_last_n must be at least -1"),
        ({"seed": -2}, "seed must be between 0"),
        ({"logprobs": -1}, "logprobs must be at least 0"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"stop": ["a", ""]}, "none of them empty"),
        ({"stop": [3]}, "stop must be a string"),
        ({"logit_bias": {-1: 2}}, "token id in logit_bias must be at least 0"),
        ({"logit_bias": {"x": 2}}, "token id in logit_bias must be a whole number"),
        ({"logit_bias": {1: math.inf}}, "below infinity"),
        ({"logit_bias": {1: "a"}}, "below infinity"),
        ({"logit_bias": {1: math.nan}}, "below infinity"),
        ({"logit_bias": {1: True}}, "below infinity"),
        ({"logit_bias": {1: 10**400}}, "below infinity"),
        ({"logit_bias": {True: 1}}, "token id in logit_bias must be a whole number"),
        ({"logit_bias": {"9" * 5000: 1}}, "token id in logit_bias must be a whole number"),
        ({"logit_bias": [1, 2]}, "logit_bias must give numbers by token id"),
        ({"logit_bias": "12"}, "logit_bias must give numbers by token id"),
        ({"logit_bias": 3}, "logit_bias must give numbers by token id"),
        ({"stop": 3}, "stop must be a string"),
        ({"stop": True}, "stop must be a string"),
        ({"stop": b"ab"}, "stop must be a string"),
        ({"stop": ""}, "stop must be a string"),
        ({"ignore_eos": "no"}, "ignore_eos must be True or False"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False"),
        ({"temperature": 10**400}, "temperature must be a finite number"),
        ({"temperature": np.longdouble("inf")}, "temperature must be a finite number"),
        ({"temperature": -(10**5000)}, "temperature must be a finite number, not a int that cannot be shown"),
        ({"temperature": np.array([1.0, 2.0])}, "temperature must be a finite number"),
        ({"temperature": None}, "temperature must be a finite number"),
        ({"temperature": 1 + 0j}, "temperature must be a finite number"),
        ({"top_k": np.bool_(True)}, "top_k must be a whole number"),
        ({"top_k": "x" * 9999}, r"top_k must be a whole number, not 'x{79}…$"),
        ({"max_tokens": -(10**5000)}, "max_tokens must be at least 1, not a int that cannot be shown"),
        ({"seed": 2**64}, "seed must be between 0"),
        ({"penalty_last_n": math.inf}, "penalty_last_n must be a whole number"),
        ({"top_n_sigma": math.nan}, "top_n_sigma must be a finite number"),
        ({"typical_p": 1.5}, "typical_p must be between 0 and 1"),
        ({"xtc_probability": -1}, "xtc_probability must be between 0 and 1"),
        ({"xtc_threshold": 2}, "xtc_threshold must be between 0 and 1"),
        ({"dynatemp_range": -1}, "dynatemp_range must be at least 0"),
        ({"dynatemp_exponent": -1}, "dynatemp_exponent must be at least 0"),
        ({"mirostat": 3}, "mirostat must be between 0 and 2"),
        ({"mirostat_tau": 101}, "mirostat_tau must be between 0 and 100"),
        ({"mirostat_eta": 1.1}, "mirostat_eta must be between 0 and 1"),
        ({"dry_multiplier": -1}, "dry_multiplier must be at least 0"),
        ({"dry_base": 0.9}, "dry_base must be at least 1"),
        ({"dry_allowed_length": -1}, "dry_allowed_length must be at least 0"),
        ({"dry_penalty_last_n": -2}, "dry_penalty_last_n must be at least -1"),
        ({"dry_sequence_breakers": "ab"}, "dry_sequence_breakers must be a list of strings"),
        ({"dry_sequence_breakers": ["a", ""]}, "none of them empty"),
        ({"dry_sequence_breakers": ["é" * 21]}, "the longest of 42 bytes"),
        ({"dry_sequence_breakers": ["a"] * 65}, "has 65 strings"),
    ],
)
def test_a_parameter_out_of_range_is_one_sentence(options: dict[str, Any], message: str):
    with pytest.raises(InvalidRequestError, match=message):
        SamplingParams(**options)


HUGE = (1e-300, 5e-324, 1e-38, 1e38, 1e300, 1.7e308)
EXTREMES: list[dict[str, Any]] = [
    *({"repetition_penalty": value} for value in HUGE),
    *(
        {name: s * value}
        for name in ("frequency_penalty", "presence_penalty")
        for value in HUGE
        for s in (1, -1)
    ),
    *({"logit_bias": {5: s * value, 6: value}} for value in HUGE for s in (1, -1)),
    {"logit_bias": {5: -math.inf, 6: 1e300}, "repetition_penalty": 1e-300, "presence_penalty": -1e300},
    {"frequency_penalty": 1.7e308, "presence_penalty": -1.7e308, "repetition_penalty": 5e-324},
    {"frequency_penalty": -1.7e308, "presence_penalty": 1.7e308, "repetition_penalty": 1.7e308},
    *({"temperature": value} for value in HUGE),
    *({"min_p": value} for value in HUGE[:3]),
    *({"top_p": value} for value in (*HUGE[:3], math.nextafter(1, 0))),
    {"top_k": 10**30},
    {"penalty_last_n": 10**30, "presence_penalty": 1},
    {"logprobs": 10**30, "max_tokens": 10**30},
    *({"dry_multiplier": value, "dry_base": max(value, 1), "dry_allowed_length": 0} for value in HUGE),
    *({"top_n_sigma": value} for value in HUGE),
    *({"dynatemp_range": value, "dynatemp_exponent": value} for value in HUGE),
    *({"mirostat": 1 + (value < 1), "temperature": value} for value in HUGE),
    *({"typical_p": value, "xtc_probability": 1, "xtc_threshold": value} for value in HUGE[:3]),
]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "more", [{}, {"temperature": 0.0}, {"top_k": 0, "min_p": 0.0, "top_p": 1.0}], ids=str
)
@pytest.mark.parametrize("options", EXTREMES, ids=str)
def test_extreme_parameters_have_finite_arithmetic(options: dict[str, Any], more: dict[str, Any]):
    logits = some_logits(4, 400)
    history = [5, 6, 6, *range(20), 5]
    sampler = Sampler(SamplingParams(seed=1, **{**more, "logprobs": 1, **options}), 400, history)
    drawn = [sampler.sample(logits) for _ in range(5)]
    assert all(0 <= token < 400 for token in drawn)
    with np.errstate(over="ignore"):
        adjusted = sampler.adjusted(logits)
    assert not np.isnan(adjusted).any()
    forbidden = [token for token, bias in sampler.params.logit_bias.items() if bias == -math.inf]
    assert np.flatnonzero(np.isinf(adjusted)).tolist() == forbidden
    assert not set(drawn) & set(forbidden)
    wanted = [i for i, bias in sampler.params.logit_bias.items() if bias > 1e38]
    assert not wanted or set(drawn) <= set(wanted) | set(history)
    for token in drawn:
        assert math.isfinite(drawn_logprobs(sampler, logits).logprob)
        sampler.accept(token)


@pytest.mark.filterwarnings("error")
def test_huge_penalty_and_bias_take_effect():
    logits = np.array([3.0, 1.0, -1.0, 0.5], np.float32)

    def best(history: list[int], **options: Any) -> int:
        return Sampler(SamplingParams(temperature=0, **options), 4, history).sample(logits)

    assert best([0], presence_penalty=1e300) == 1
    assert best([2], presence_penalty=-1e300) == 2
    assert best([0, 1], repetition_penalty=1e300) == 3
    assert best([1], repetition_penalty=1e-300) == 1
    assert best([], logit_bias={2: 1e300}) == 2
    assert best([], logit_bias={0: -1e300, 1: -math.inf}) == 3
    assert best([0, 1, 3], logit_bias={2: -math.inf}, presence_penalty=1e300) in (0, 1, 3)


def test_numbers_of_numpy_become_plain_ones():
    params = SamplingParams(
        temperature=np.float32(0.5), top_k=np.int64(3), seed=np.uint64(2**64 - 1),
        max_tokens=np.int64(2**63 - 1), logit_bias={np.int32(3): np.float16(2)}, ignore_eos=np.bool_(True),
    )  # fmt: skip
    values = (params.temperature, params.top_k, params.seed, params.max_tokens, params.ignore_eos)
    assert values == (0.5, 3, 2**64 - 1, 2**63 - 1, True)
    assert [type(value) for value in values] == [float, int, int, int, bool]
    assert params.logit_bias == {3: 2.0}
    assert Sampler(params, 400).sample(some_logits(0, 400)) >= 0


@pytest.mark.parametrize("options", [{}, {"temperature": 0}, {"top_k": 0}, {"presence_penalty": 1}], ids=str)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_logits_without_a_finite_largest_are_an_error(options: dict[str, Any], value: float):
    logits = np.full(100, -math.inf if value == -math.inf else 0, np.float32)
    logits[3] = value
    sampler = Sampler(SamplingParams(seed=1, **options), 100, [1])
    with pytest.raises(HotsetError, match="not numbers; the file may be damaged"):
        sampler.sample(logits)


def test_a_bias_outside_the_vocabulary_is_an_error():
    with pytest.raises(InvalidRequestError, match="token 50 in logit_bias"):
        Sampler(SamplingParams(seed=0, logit_bias={50: 1}), 50)


def test_parameters_as_json_writes_them():
    params = SamplingParams(stop="end", logit_bias={"12": -1})
    assert params.stop == ("end",)
    assert params.logit_bias == {12: -1.0}


# ---- stop strings ----


def cut(text: str, seed: int) -> list[str]:
    source = random.Random(seed)
    pieces = []
    while text:
        n = source.randrange(0, 4)
        pieces.append(text[:n])
        text = text[n:]
    return pieces


def run(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    shown = "".join(matcher.push(piece) for piece in pieces)
    return shown + matcher.flush(), matcher.stopped


def plain_stop(stops: list[str], text: str) -> tuple[str, bool]:
    """Return, character by character, the text before the first stop string that is complete."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


def test_stop_strings_do_not_depend_on_how_the_text_is_cut():
    source = random.Random(1)
    for seed in range(500):
        text = "".join(source.choice("abc") for _ in range(source.randrange(30)))
        stops = ["".join(source.choice("abc") for _ in range(source.randrange(1, 6))) for _ in range(2)]
        expected = plain_stop(stops, text)
        assert run(stops, [text]) == expected
        assert run(stops, list(text)) == expected
        assert run(stops, cut(text, seed)) == expected


def test_text_is_held_back_only_while_it_could_become_a_stop_string():
    matcher = StopMatcher(["\n\nUser:"])
    assert matcher.push("Hello\n") == "Hello"
    assert matcher.push("\nUs") == ""
    assert matcher.push("age") == "\n\nUsage"
    assert matcher.push("\n\nUser") == ""
    assert matcher.push(": no") == ""
    assert matcher.stopped
    assert matcher.push("more") == ""
    assert matcher.flush() == ""


def test_held_text_is_returned_at_the_end():
    matcher = StopMatcher(["STOP"])
    assert matcher.push("a STO") == "a "
    assert matcher.flush() == "STO"
    assert not matcher.stopped
