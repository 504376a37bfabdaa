"""DRY, top-n-sigma, typical, XTC, dynamic temperature, mirostat and adaptive-p by their definitions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from cases import quick_are
from tiny_server import write_model

import hotset
from hotset.engine.sampler import Sampler, SamplingParams
from hotset.text.tokenizer import load_tokenizer

N_VOCAB = 300


def some_logits(seed: int, scale: float = 2.5) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(N_VOCAB) * scale).astype(np.float32)


# ---- the definitions, computed directly from lists of (token, logit) in llama.cpp's order ----

Candidates = list[tuple[int, float]]


def softmax(candidates: Candidates) -> list[float]:
    largest = max(value for _, value in candidates)
    weights = [math.exp(value - largest) for _, value in candidates]
    return [weight / math.fsum(weights) for weight in weights]


def plain_dry(tokens: list[int], params: SamplingParams, breakers: list[tuple[int, ...]]) -> dict[int, float]:
    """Return each token's penalty, from the longest end of the window that occurred before it in the window.

    A breaker ends the search.
    """
    window = tokens if params.dry_penalty_last_n < 0 else tokens[-params.dry_penalty_last_n :]
    limit = len(window)
    for start in reversed(range(len(window))):  # the last breaker
        fitting = [len(one) for one in breakers if tuple(window[start : start + len(one)]) == one]
        if fitting:
            limit = len(window) - start - max(fitting)
            break
    if len(window) <= params.dry_allowed_length or limit < params.dry_allowed_length:
        return {}
    lost: dict[int, float] = {}
    for at in range(1, len(window)):
        n = 0
        while n < min(at, limit) and window[at - 1 - n] == window[-1 - n]:
            n += 1
        if n >= params.dry_allowed_length:
            penalty = params.dry_multiplier * params.dry_base ** (n - params.dry_allowed_length)
            lost[window[at]] = max(lost.get(window[at], 0.0), penalty)
    return lost


def plain_filters(candidates: Candidates, params: SamplingParams, applies_xtc: bool) -> Candidates:
    """Apply the filters from top-n-sigma to XTC, in the order of the list."""
    if params.top_n_sigma > 0:
        values = np.array([value for _, value in candidates])
        least = values.max() - params.top_n_sigma * math.sqrt(((values - values.mean()) ** 2).mean())
        candidates = [one for one in candidates if one[1] >= least]
    if params.top_k:
        candidates = candidates[: params.top_k]
    if params.typical_p < 1:
        p = softmax(candidates)
        entropy = -math.fsum(x * math.log(x) for x in p)
        order = sorted(range(len(p)), key=lambda i: (abs(-math.log(p[i]) - entropy), i))
        kept, mass = [], 0.0
        for i in order:
            kept.append(i)
            mass += p[i]
            if mass > params.typical_p:
                break
        candidates = [candidates[i] for i in sorted(kept)]
    if params.top_p < 1:
        kept, mass = [], 0.0
        for one, x in zip(candidates, softmax(candidates), strict=True):
            kept.append(one)
            mass += x
            if mass >= params.top_p:
                break
        candidates = kept
    p = softmax(candidates)
    candidates = [one for one, x in zip(candidates, p, strict=True) if x >= params.min_p * p[0]]
    above = [i for i, x in enumerate(softmax(candidates)) if x >= params.xtc_threshold]
    return candidates[above[-1] :] if applies_xtc and len(above) > 1 else candidates


def plain_temperature(candidates: Candidates, params: SamplingParams) -> float:
    if not params.dynatemp_range or len(candidates) < 2:
        return params.temperature
    low = max(0.0, params.temperature - params.dynatemp_range)
    high = params.temperature + params.dynatemp_range
    entropy = -math.fsum(x * math.log(x) for x in softmax(candidates))
    return low + (high - low) * (entropy / math.log(len(candidates))) ** params.dynatemp_exponent


def plain_mirostat(candidates: Candidates, params: SamplingParams, mu: float) -> Candidates:
    """Filter candidates after the temperature."""
    p = softmax(candidates)
    if params.mirostat == 2:
        return [one for one, x in zip(candidates, p, strict=True) if -math.log2(x) <= mu] or candidates[:1]
    t = [math.log((i + 2) / (i + 1)) for i in range(99)]
    b = [math.log(p[i] / p[i + 1]) for i in range(99)]
    s = sum(x * y for x, y in zip(t, b, strict=True)) / sum(x * x for x in t)
    epsilon = s - 1
    k = ((epsilon * 2**mu) / (1 - N_VOCAB**-epsilon)) ** (1 / s)
    return candidates[: max(int(k), 1)]


def plain_draw(candidates: Candidates, u: float) -> tuple[int, float]:
    """Return a token and its probability."""
    cumulative = 0.0
    p = softmax(candidates)
    for (token, _), x in zip(candidates, p, strict=True):
        cumulative += x
        if u < cumulative:
            return token, x
    raise AssertionError("u is below 1")


def plain_tokens(
    params: SamplingParams,
    prompt: list[int],
    breakers: list[tuple[int, ...]],
    rows: list[np.ndarray],
    draws: tuple[list[float], list[float]],
) -> list[int]:
    """Draw tokens from rows of logits. draws: a number for each token, and one for XTC's chance."""
    tokens, mu = list(prompt), 2 * params.mirostat_tau
    target, decay = params.adaptive_target, params.adaptive_decay
    weight = 1 / (1 - decay)  # of all earlier tokens, as if there were infinitely many at the target
    mass = target * weight
    for row, u, chance in zip(rows, *draws, strict=True):
        values = row.astype(np.float64)
        for token, lost in plain_dry(tokens, params, breakers).items() if params.is_dry else ():
            values[token] -= lost
        order = sorted(range(N_VOCAB), key=lambda i: (-values[i], i))
        candidates = [(i, float(values[i])) for i in order]
        if params.temperature == 0:
            tokens.append(candidates[0][0])
            continue
        if params.mirostat:
            candidates = [(i, value / params.temperature) for i, value in candidates]
            candidates = plain_mirostat(candidates, params, mu)
        else:
            candidates = plain_filters(candidates, params, chance < params.xtc_probability)
            temperature = plain_temperature(candidates, params)
            candidates = [(i, value / temperature) for i, value in candidates]
            if target >= 0:
                p = dict(zip((i for i, _ in candidates), softmax(candidates), strict=True))
                wanted = min(max(2 * target - mass / weight, 0), 1)
                away = {i: abs(x - wanted) / 0.3 for i, x in p.items()}
                token, _ = plain_draw([(i, 5 - 10 * d * d / (1 + d)) for i, d in away.items()], u)
                mass, weight = p[token] + decay * mass, 1 + decay * weight
                tokens.append(token)
                continue
        token, probability = plain_draw(candidates, u)
        mu -= params.mirostat_eta * (-math.log2(probability) - params.mirostat_tau)
        tokens.append(token)
    return tokens[len(prompt) :]


OPEN = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
CASES: list[dict[str, Any]] = [
    {"top_n_sigma": 1.0},
    {"top_n_sigma": 0.4, **OPEN},
    {"top_n_sigma": 30.0},
    {"top_n_sigma": 1e300, **OPEN},
    {"typical_p": 0.3},
    {"typical_p": 0.9, **OPEN},
    {"typical_p": 0.0},
    {"typical_p": 0.6, "top_k": 0, "top_p": 0.8},
    {"typical_p": 0.6, "top_k": 12, "min_p": 0.2},
    {"xtc_probability": 1.0},
    {"xtc_probability": 0.5, "xtc_threshold": 0.03, **OPEN},
    {"xtc_probability": 0.5, "xtc_threshold": 0.0},
    {"xtc_probability": 1.0, "xtc_threshold": 0.6},
    {"dynatemp_range": 0.5},
    {"dynatemp_range": 5.0, "dynatemp_exponent": 0.5, **OPEN},
    {"dynatemp_range": 0.79, "top_k": 3},
    {"mirostat": 1},
    {"mirostat": 1, "mirostat_tau": 2.0, "mirostat_eta": 0.4, "temperature": 1.4},
    {"mirostat": 2},
    {"mirostat": 2, "mirostat_tau": 0.0, "mirostat_eta": 1.0},
    {"mirostat": 2, "mirostat_tau": 3.0, "temperature": 0.6, "dry_multiplier": 3.0},
    {"adaptive_target": 0.3},
    {"adaptive_target": 0.0, "adaptive_decay": 0.5, **OPEN},
    {"adaptive_target": 0.5, "adaptive_decay": 0.0, "temperature": 1.4, "xtc_probability": 0.5},
    {"adaptive_target": 1.0, "adaptive_decay": 0.99, "dynatemp_range": 0.5, "top_n_sigma": 2.0},
    {"dry_multiplier": 0.8},
    {"dry_multiplier": 2.0, "dry_allowed_length": 1, "dry_base": 1.2},
    {"dry_multiplier": 2.0, "dry_allowed_length": 0, "dry_penalty_last_n": 9},
    {"dry_multiplier": 9.0, "dry_allowed_length": 1, "temperature": 0},
    {"dry_multiplier": 4.0, "dry_base": 1.0, "dry_penalty_last_n": 3, "dry_allowed_length": 1},
    {"dry_multiplier": 1e300, "dry_base": 1e300, "temperature": 0},
    {
        "dry_multiplier": 0.5, "top_n_sigma": 1.5, "top_k": 30, "typical_p": 0.8, "top_p": 0.9,
        "min_p": 0.02, "xtc_probability": 0.5, "xtc_threshold": 0.05, "dynatemp_range": 0.4,
    },
]  # fmt: skip


@pytest.mark.parametrize("options", CASES, ids=str)
@pytest.mark.parametrize("seed", quick_are((0,), range(2)))
def test_tokens_equal_the_definitions(options: dict[str, Any], seed: int):
    """Compare token by token, with the state of mirostat and DRY. Recurring logits make texts repeat."""
    params = SamplingParams(seed=seed, **options)
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, 6, 40).tolist()
    breakers = [(5,), (3, 4), (3, 4, 2), (7, 7)]
    rows = [some_logits(int(i)) for i in rng.integers(0, 7, 60)]
    for row in rows:
        row[:8] += 7  # the tokens of the prompt
    sampler, plain = (Sampler(params, N_VOCAB, prompt, breakers=breakers) for _ in range(2))
    draws = [plain.generator.random() for _ in rows], [plain.xtc_generator.random() for _ in rows]
    found = []
    for row in rows:
        found.append(sampler.sample(row))
        sampler.accept(found[-1])
    assert found == plain_tokens(params, prompt, breakers, rows, draws)


def test_each_parameter_changes_the_tokens():
    """Check that every case draws other tokens, so that the comparison above is meaningful."""
    drawn = set()
    for options in ({}, *CASES):
        sampler = Sampler(SamplingParams(seed=1, **options), N_VOCAB, [1, 2, 3, 1, 2, 3] * 4)
        row = some_logits(2, 1.2)
        row[1:4] += 3
        tokens = []
        for _ in range(80):
            tokens.append(sampler.sample(row))
            sampler.accept(tokens[-1])
        drawn.add(tuple(tokens))
    without_effect = 3  # sigmas of 30 and 1e300 keep all tokens; no token has a probability of 0.6
    assert len(drawn) >= len(CASES) + 1 - without_effect


@pytest.mark.parametrize("last_n", [-1, 1, 2, 7, 50])
@pytest.mark.parametrize("n_prompt", [0, 1, 30])
def test_repetitions_found_one_by_one_equal_the_whole(last_n: int, n_prompt: int):
    """Check DRY for any number of prompt tokens, and with a moving window."""
    params = SamplingParams(
        seed=1, dry_multiplier=1, dry_base=2, dry_allowed_length=0, dry_penalty_last_n=last_n
    )
    for seed in range(8):
        tokens = np.random.default_rng(seed).integers(0, 2 + seed % 3, 150).tolist()
        breakers = [(0, 1, 1, 0), (1, 0)] if seed % 2 else []
        sampler = Sampler(params, N_VOCAB, tokens[:n_prompt], breakers=breakers)
        for n in range(n_prompt, len(tokens)):
            lost = -sampler.adjusted(np.zeros(N_VOCAB, np.float32))
            expected = {id: min(each, 3.4e38) for id, each in plain_dry(tokens[:n], params, breakers).items()}
            assert {int(id): lost[id] for id in np.flatnonzero(lost)} == pytest.approx(expected, rel=1e-6)
            sampler.accept(tokens[n])


def test_a_prompt_of_one_token_over_and_over_costs_no_square_of_its_length():
    params = SamplingParams(seed=1, dry_multiplier=1, dry_base=1 + 1e-5)
    sampler = Sampler(params, N_VOCAB, [7] * 300_000, breakers=[(8,)])  # otherwise it would take minutes
    lost = -sampler.adjusted(np.zeros(N_VOCAB, np.float32))
    assert {int(id): lost[id] for id in np.flatnonzero(lost)} == {7: pytest.approx(params.dry_base**299_997)}


def test_xtc_leaves_the_other_draws_as_they_are():
    never = Sampler(SamplingParams(seed=5, xtc_probability=1e-300), N_VOCAB)
    off = Sampler(SamplingParams(seed=5), N_VOCAB)
    rows = [some_logits(i) for i in range(20)]
    assert [never.sample(row) for row in rows] == [off.sample(row) for row in rows]


def test_mirostat_of_equal_and_single_logits():
    """Check logits with which Zipf's law cannot be estimated."""
    for version in (1, 2):
        sampler = Sampler(SamplingParams(seed=5, mirostat=version), N_VOCAB)
        for row in (np.zeros(N_VOCAB, np.float32), np.full(N_VOCAB, -math.inf, np.float32)):
            row[9] = 0
            tokens = {sampler.sample(row) for _ in range(20)}
            assert tokens <= {*range(N_VOCAB)} if row[0] == 0 else tokens == {9}


# ---- breakers as tokens of a vocabulary ----


def test_every_way_that_tokens_spell_a_text_is_found(tmp_path: Any):
    """Compare with a search of all pairs and triples of tokens."""
    pieces = ["a", "b", "c", "ab", "xab", "abx", "xa", "bc", "bcx", "x", "aa", "é", "xé"]
    tokenizer = load_tokenizer(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": ["<unk>", *pieces],
            "tokenizer.ggml.scores": [0.0, *[-float(i) for i in range(len(pieces))]],
            "tokenizer.ggml.token_type": [2, *[1] * len(pieces)],
            "tokenizer.ggml.add_bos_token": False,
            "tokenizer.ggml.unknown_token_id": 0,
        }
    )
    by_text = {tokenizer.token_bytes(id).decode(): id for id in range(1, len(pieces) + 1)}

    def ids(*texts: str) -> tuple[int, ...]:
        return tuple(by_text[text] for text in texts)

    assert tokenizer.sequences_with(["ab"]) == {
        ids("ab"), ids("xab"), ids("abx"), ids("a", "b"), ids("xa", "b"), ids("aa", "b"),
    }  # fmt: skip
    assert tokenizer.sequences_with(["é"]) == {ids("é"), ids("xé")}
    tail = tuple(tokenizer.encode_inside("bc"))
    assert {(*ids("a"), *tail), (*ids("xa"), *tail)} <= tokenizer.sequences_with(["abc"])
    both = tokenizer.sequences_with(["ab", "é"])
    assert both == tokenizer.sequences_with(["ab"]) | tokenizer.sequences_with(["é"])
    assert tokenizer.sequences_with([]) == set()


def test_a_breaker_of_the_vocabulary_changes_the_text(tmp_path: Any):
    """Check a text with only three letters, which repeats itself."""
    path = write_model(tmp_path / "tiny.gguf")
    options: dict[str, Any] = {"seed": 1, "max_tokens": 60, "dry_multiplier": 5.0, "dry_allowed_length": 1}
    with hotset.load(path, device="cpu", n_threads=1) as model:
        few = {model.tokenizer.encode_inside(letter)[0]: 100.0 for letter in "abc"}
        texts = [
            model.generate("abcab", **options, logit_bias=few, dry_sequence_breakers=breakers).text
            for breakers in ([], ["a"])
        ]
    assert {*texts[0], *texts[1]} <= {*"abc"}
    assert texts[0] != texts[1]
