"""The sampler in NumPy: defines the tokens of a seed.

csrc/draw.h does the same natively, with partial selection; tests compare the two token by token. The order of
filters is llama.cpp's. Everything is computed in float64.
"""

from __future__ import annotations

import math
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from hotset.engine.sampler import Constraint, SamplingParams, TokenLogprobs
from hotset.errors import HotsetError, InvalidRequestError
from hotset.text.mask import TokenMask

_LARGEST = float(np.finfo(np.float32).max)  # larger logits are clamped to it
_SMALLEST = float(np.finfo(np.float32).tiny)
# The values that a byte of a constraint's mask adds to eight logits: 0, or -inf for forbidden tokens. Looking
# up and adding rows takes a fraction of the time of one choice per token.
_ALLOWING = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") == 1,
    np.float32(0),
    np.float32(-math.inf),
)


# Values of parameters that tests combine at random.
CHOICES: dict[str, list[Any]] = {
    "temperature": [0.0, 0.3, 0.8, 1.0, 1.7, 30.0, 1e-3, 1e300, 1e-310],
    "top_k": [0, 1, 2, 40, 100, 600, 2000, 10**6],
    "top_p": [0.0, 0.1, 0.5, 0.9, 0.95, 0.999, 0.9999999, 1.0],
    "min_p": [0.0, 0.05, 0.3, 1e-4, 1e-300, 1.0],
    "typical_p": [1.0, 0.9, 0.5, 0.2, 0.999, 0.0],
    "top_n_sigma": [-1.0, 0.5, 1.0, 2.5, 30.0, 1e308],
    "xtc_probability": [0.0, 0.5, 1.0],
    "xtc_threshold": [0.1, 0.01, 1e-4, 0.0, 0.6],
    "dynatemp_range": [0.0, 0.3, 0.8, 5.0],
    "dynatemp_exponent": [1.0, 0.5, 2.0, 0.0, 1e4],
    "repetition_penalty": [1.0, 1.3, 0.7, 1e300],
    "frequency_penalty": [0.0, 0.6, -0.5, 1e300],
    "presence_penalty": [0.0, 0.4, -2.0],
    "penalty_last_n": [64, -1, 0, 3],
    "adaptive_target": [-1.0, 0.0, 0.3, 0.55, 1.0],
    "adaptive_decay": [0.9, 0.0, 0.5, 1.0],
    "dry_multiplier": [0.0, 0.8, 5.0],
    "dry_base": [1.75, 1.0, 1e300],
    "dry_allowed_length": [2, 0, 1, 2**40],
    "dry_penalty_last_n": [-1, 0, 9, 200],
}
MIROSTAT: dict[str, list[Any]] = {
    "mirostat": [1, 2],
    "mirostat_tau": [5.0, 2.0, 0.0, 12.0, 100.0],
    "mirostat_eta": [0.1, 1.0, 0.0],
}

_GROUP = 64
_MOST_LIKELY = 100  # tokens from which mirostat 1 estimates how fast the probabilities fall


def top_k(logits: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the k largest logits: indices by falling logit, ties by rising index, and their values."""
    n = logits.size
    if k <= n // _GROUP:
        # The maxima of disjoint groups are distinct logits: their k-th largest is at most the k-th largest of
        # all. Groups are columns, so that the maximum is taken over whole rows at once.
        maxima = logits[: n - n % _GROUP].reshape(_GROUP, -1).max(axis=0)
        bound = np.partition(maxima, len(maxima) - k)[len(maxima) - k]
        candidates = np.flatnonzero(logits >= bound)
        if bound == -math.inf:  # few are allowed: otherwise all others would have to be sorted
            is_out = logits[candidates] == bound
            candidates = np.concatenate([candidates[~is_out], candidates[is_out][:k]])
    else:
        candidates = np.arange(n)
    order = np.argsort(-logits[candidates], kind="stable")[:k]
    indices = candidates[order]
    return indices, logits[indices]


def top_n_sigma(logits: np.ndarray, n: float) -> np.ndarray:
    """Return indices of the logits at most n standard deviations below the largest (arXiv 2411.07641).

    Mean and deviation are over the finite logits, of which there must be one.
    """
    finite = logits[np.isfinite(logits)].astype(np.float64)
    return np.flatnonzero(logits >= finite.max() - n * finite.std())


def typical(relative: np.ndarray, p: float) -> np.ndarray:
    """Return rising indices of the typical tokens (arXiv 2202.00666).

    These are the fewest tokens, nearest to the expected surprise, that together are more likely than p.
    """
    weights = np.exp(relative)
    total = weights.sum()
    probabilities = weights / total
    surprise = math.log(total) - relative
    away = np.abs(surprise - (probabilities * surprise).sum())
    order = np.argsort(away, kind="stable")
    n = int(probabilities[order].cumsum().searchsorted(p, side="right")) + 1
    kept: np.ndarray = np.sort(order[:n])
    return kept


def xtc(relative: np.ndarray, threshold: float) -> int:
    """Return how many of the first tokens XTC (exclude top choices) removes.

    It removes all with a probability of at least `threshold`, except the least likely of those.
    """
    weights = np.exp(relative)
    n = int((-weights).searchsorted(-threshold * weights.sum(), side="right"))
    return max(n - 1, 0)


def dynamic_temperature(relative: np.ndarray, low: float, high: float, exponent: float) -> float:
    """Return a temperature between low and high, by the remaining tokens' entropy over its maximum."""
    if len(relative) < 2:
        return high
    weights = np.exp(relative)
    total = weights.sum()
    entropy = (weights / total * (math.log(total) - relative)).sum() / math.log(len(relative))
    return float(low + (high - low) * min(max(entropy, 0.0), 1.0) ** exponent)


def drawn(relative: np.ndarray, temperature: float, u: float) -> int:
    """Return the index of the token drawn by u in [0, 1), in the tokens' given order."""
    if temperature == 0:
        return int(np.argmax(relative))
    cumulative = np.exp(relative / temperature).cumsum()
    # A float below 1 times the total can round up to the total, past the last token with a probability.
    index = int(cumulative.searchsorted(u * cumulative[-1], side="right"))
    return min(index, int(cumulative.searchsorted(cumulative[-1])))


class Mirostat:
    """Draws tokens so that their surprise stays near tau bits (arXiv 2007.14966).

    version: 1 estimates with Zipf's law how many tokens to keep, 2 keeps those whose surprise is at most
    `mu`. eta: how fast `mu` follows the drawn tokens. n_vocab: of the whole vocabulary.
    """

    def __init__(self, version: int, tau: float, eta: float, n_vocab: int) -> None:
        self.mu = 2 * tau
        self._version, self._tau, self._eta, self._n_vocab = version, tau, eta, n_vocab

    def draw(self, logits: np.ndarray, temperature: float, u: float) -> int:
        """Return the index of the next token, for logits with at least one finite value."""
        finite = np.flatnonzero(logits > -math.inf)
        relative = logits[finite].astype(np.float64)
        relative = (relative - relative.max()) / temperature
        if self._version == 1:
            kept, relative = top_k(relative, self._n_kept(relative))
        else:
            surprise = (math.log(np.exp(relative).sum()) - relative) / math.log(2)
            kept = np.flatnonzero(surprise <= self.mu)
            if not len(kept):
                kept = np.array([np.argmax(relative)])
            kept = kept[np.argsort(-relative[kept], kind="stable")]
            relative = relative[kept]
        index = drawn(relative, 1.0, u)
        observed = (math.log(np.exp(relative).sum()) - relative[index]) / math.log(2)
        self.mu -= self._eta * (float(observed) - self._tau)
        return int(finite[kept[index]])

    def _n_kept(self, relative: np.ndarray) -> int:
        _, likely = top_k(relative, min(_MOST_LIKELY, len(relative)))
        if len(likely) < 2:
            return 1
        ranks = np.arange(1, len(likely), dtype=np.float64)
        steps = np.log((ranks + 1) / ranks)
        s = np.float64((steps * (likely[:-1] - likely[1:])).sum() / (steps * steps).sum())
        with np.errstate(all="ignore"):
            rest = 1 - np.float64(self._n_vocab) ** (1 - s)
            if rest == 0:  # s = 1: the limit of (s - 1) / rest
                k = np.float64(2) ** self.mu / math.log(max(self._n_vocab, 2))
            else:
                k = ((s - 1) * np.float64(2) ** self.mu / rest) ** (1 / s)
        return int(min(max(k, 1), len(relative))) if np.isfinite(k) else len(relative)


class AdaptiveP:
    """Draws tokens whose probability is near a target (llama.cpp's adaptive-p).

    mean: of the tokens' probabilities, of which a step further back counts `decay` times as much.
    """

    def __init__(self, target: float, decay: float) -> None:
        self.mean = self._target = target
        self._decay = decay

    def draw(self, relative: np.ndarray, temperature: float, u: float) -> int:
        """Return the index of the next token."""
        weights = np.exp(relative / temperature)
        probabilities = weights / weights.sum()
        target = min(max(2 * self._target - self.mean, 0.0), 1.0)
        distance = np.abs(probabilities - target) / 0.3
        index = drawn(-10 * distance * distance / (1 + distance), 1.0, u)
        self.mean = self._decay * self.mean + (1 - self._decay) * float(probabilities[index])
        return index


class Repetitions:
    """The tokens of one sequence, and earlier occurrences of its end.

    last_n: number of tokens to examine; -1: all. breakers: token sequences that no repetition crosses.
    """

    def __init__(self, tokens: Sequence[int], last_n: int, breakers: Iterable[Sequence[int]] = ()) -> None:
        self._last_n = last_n
        self._breakers: dict[int, list[tuple[int, ...]]] = defaultdict(list)  # by their last token
        for breaker in breakers:
            self._breakers[breaker[-1]].append(tuple(breaker))
        # First and last position of the breaker that begins last; the longest one if several begin there.
        self._broken = (-1, -1)
        self._n = len(tokens)
        self._tokens = np.zeros(max(2 * self._n, 64), np.int64)
        self._tokens[: self._n] = tokens
        # By position: how many tokens ending there equal the latest tokens.
        self._lengths = np.zeros(len(self._tokens), np.int64)
        self._lengths[: self._n] = _lengths(tokens)
        for position in range(self._n):
            self._look_for_breaker(position)

    def push(self, token: int) -> None:
        n = self._n
        if n == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
            self._lengths = np.concatenate([self._lengths, np.zeros_like(self._lengths)])
        first = self._first(n)
        is_same = self._tokens[first:n] == token
        longer = np.concatenate(
            [[0 if first == 0 else self._lengths[first - 1]], self._lengths[first : n - 1]]
        )
        self._lengths[first:n] = (longer[: n - first] + 1) * is_same
        self._lengths[n] = n + 1
        self._tokens[n] = token
        self._n += 1
        self._look_for_breaker(n)

    def _first(self, n: int) -> int:
        """Return the first position of the window in a sequence of n tokens."""
        return 0 if self._last_n < 0 else max(n - self._last_n, 0)

    def _look_for_breaker(self, last: int) -> None:
        for breaker in self._breakers.get(int(self._tokens[last]), ()):
            first = last + 1 - len(breaker)
            if first >= 0 and tuple(self._tokens[first : last + 1].tolist()) == breaker:
                self._broken = max(self._broken, (first, last))

    def continued(self, at_least: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens that would continue a repetition of `at_least` tokens, and the longest length."""
        n, first = self._n, self._first(self._n)
        nothing = np.zeros(0, np.int64), np.zeros(0, np.int64)
        broken_first, broken_last = self._broken
        limit = n - 1 - broken_last if broken_first >= first else n - first
        if n - first <= at_least or limit < at_least:
            return nothing
        inside = np.arange(1, n - first)  # no repetition begins before the window
        lengths = np.minimum(np.minimum(self._lengths[first : n - 1], inside), limit)
        found = np.flatnonzero(lengths >= at_least)
        ids, which = np.unique(self._tokens[first + 1 + found], return_inverse=True)
        longest = np.zeros(len(ids), np.int64)
        np.maximum.at(longest, which, lengths[found])
        return ids, longest


def _lengths(tokens: Sequence[int]) -> list[int]:
    """Return, by position, how many tokens ending there equal the latest ones (backward Z algorithm)."""
    backwards = tokens[::-1]
    n = len(backwards)
    found = [n] * n
    left = right = 0  # of the match that reaches furthest
    for i in range(1, n):
        length = min(right - i, found[i - left]) if i < right else 0
        while i + length < n and backwards[length] == backwards[i + length]:
            length += 1
        found[i] = length
        if i + length > right:
            left, right = i, i + length
    return found[::-1]


class ReferenceSampler:
    """A sampler with the arguments of engine.sampler.Sampler."""

    def __init__(
        self,
        params: SamplingParams,
        n_vocab: int,
        tokens: Iterable[int] = (),
        forbidden: Iterable[int] = (),
        constraint: Constraint | None = None,
        breakers: Iterable[Sequence[int]] = (),
    ) -> None:
        tokens = list(tokens)
        self.params = params
        self.constraint = constraint
        self._n_vocab = n_vocab
        assert params.seed is not None
        bias = dict(params.logit_bias) | dict.fromkeys(forbidden, -math.inf)
        self.generator = np.random.Generator(np.random.Philox(params.seed))
        # For XTC's random decisions: other draws are the same with and without it.
        self.xtc_generator = np.random.Generator(np.random.Philox([params.seed, 1]))
        self._bias_ids = np.fromiter(bias.keys(), np.int64, len(bias))
        # Only biases that forbid are infinite: huge values must not become infinite.
        self._bias = np.fromiter(
            (
                value if value == -math.inf else max(-_LARGEST, min(value, _LARGEST))
                for value in bias.values()
            ),
            np.float32,
            len(bias),
        )
        self._forbids = -math.inf in bias.values()
        last_n = min(params.penalty_last_n, sys.maxsize)  # a deque cannot be longer
        self._recent: deque[int] = deque(maxlen=last_n if last_n >= 0 else None)
        self._counts: Counter[int] = Counter()
        self._repetitions = (
            Repetitions(tokens, params.dry_penalty_last_n, breakers) if params.is_dry else None
        )
        self._adjusts = bool(bias) or params.penalizes or params.is_dry
        has_copy = self._adjusts or constraint is not None
        self._scratch = np.empty(n_vocab if has_copy else 0, np.float32)
        self._mirostat: Mirostat | None = None
        if params.mirostat:
            self._mirostat = Mirostat(params.mirostat, params.mirostat_tau, params.mirostat_eta, n_vocab)
        self._adaptive = AdaptiveP(params.adaptive_target, params.adaptive_decay)
        for token in tokens:
            self._count(token)

    def accept(self, token: int) -> None:
        """Accept the next token of the answer: advance the constraint, and count it for penalties."""
        if self.constraint is not None:
            self.constraint.accept(token)
        self._count(token)
        if self._repetitions is not None:
            self._repetitions.push(token)

    def _count(self, token: int) -> None:
        if not self.params.penalizes:
            return
        if len(self._recent) == self._recent.maxlen:
            oldest = self._recent[0]
            self._counts[oldest] -= 1
            if not self._counts[oldest]:
                del self._counts[oldest]
        self._recent.append(token)
        self._counts[token] += 1

    def sample(self, logits: np.ndarray) -> int:
        """Return the next token for float32 logits [n_vocab]."""
        params = self.params
        u = self.generator.random() if params.temperature else 0.0
        chance = self.xtc_generator.random() if params.temperature and params.xtc_probability else 1.0
        allowed = None  # ids of the remaining logits; None: all of them
        # A huge penalty or a tiny temperature overflows, which means certainty. NaN is reported.
        with np.errstate(over="ignore", invalid="ignore"):
            logits = self.adjusted(logits)
            if self.constraint is not None:
                logits, allowed = self._constrained(logits, self.constraint.mask())
            if params.temperature == 0:
                chosen = int(np.argmax(logits))
                self._check_largest(float(logits[chosen]))
            elif self._mirostat is not None:
                self._check_largest(float(logits.max()))
                chosen = self._mirostat.draw(logits, params.temperature, u)
            else:
                ids, relative = self._candidates(logits, is_xtc=chance < params.xtc_probability)
                temperature = self._temperature(relative)
                if temperature and params.adaptive_target >= 0:
                    chosen = int(ids[self._adaptive.draw(relative, temperature, u)])
                else:
                    chosen = int(ids[drawn(relative, temperature, u)])
        return chosen if allowed is None else int(allowed[chosen])

    def _constrained(self, logits: np.ndarray, mask: TokenMask) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the logits that a constraint allows.

        The others are -inf or, if few are allowed, removed; then the ids are returned as well.
        """
        if mask.ids is not None:
            if not len(mask.ids):
                self._check_largest(-math.inf)
            return logits[mask.ids], mask.ids
        n = min(logits.size, 8 * len(mask.bits))
        # `take` copies rows ten times as fast as array indexing.
        np.add(logits[:n], _ALLOWING.take(mask.bits, axis=0).reshape(-1)[:n], out=self._scratch[:n])
        self._scratch[n:] = -math.inf
        return self._scratch, None

    def logprobs(self, logits: np.ndarray, token: int) -> TokenLogprobs:
        """Return the model's logprobs of `token` and of the most likely tokens, from unmodified logits."""
        return token_logprobs(logits, token, self.params.logprobs or 0)

    def adjusted(self, logits: np.ndarray) -> np.ndarray:
        """Return the logits with bias and penalties, float32 [n_vocab]."""
        if not self._adjusts:
            return logits
        params = self.params
        adjusted = self._scratch
        np.copyto(adjusted, logits)
        if len(self._bias):
            ids = self._bias_ids
            is_out = np.isneginf(adjusted[ids]) | np.isneginf(self._bias)
            biased = _bounded(adjusted[ids] + self._bias)
            biased[is_out] = -math.inf
            adjusted[ids] = biased
        if self._counts:
            ids = np.fromiter(self._counts.keys(), np.int64, len(self._counts))
            counts = np.fromiter(self._counts.values(), np.float32, len(self._counts))
            values = adjusted[ids]
            is_out = np.isneginf(values)
            penalty = np.float32(max(_SMALLEST, min(params.repetition_penalty, _LARGEST)))
            values = _bounded(np.where(values > 0, values / penalty, values * penalty))
            values = _bounded(values - _bounded(counts * _float32(params.frequency_penalty)))
            values = _bounded(values - _float32(params.presence_penalty))
            values[is_out] = -math.inf
            adjusted[ids] = values
        if self._repetitions is not None:
            ids, lengths = self._repetitions.continued(params.dry_allowed_length)
            values = adjusted[ids]
            is_out = np.isneginf(values)
            values = _bounded(values - self._repetition_penalties(lengths))
            values[is_out] = -math.inf
            adjusted[ids] = values
        return adjusted

    def _repetition_penalties(self, lengths: np.ndarray) -> np.ndarray:
        """Return DRY's penalties, float32, for tokens that continue repetitions of these lengths."""
        params = self.params
        powers = np.float64(params.dry_base) ** (lengths - params.dry_allowed_length).astype(np.float64)
        penalties: np.ndarray = np.minimum(params.dry_multiplier * powers, _LARGEST).astype(np.float32)
        return penalties

    def _temperature(self, relative: np.ndarray) -> float:
        params = self.params
        if not params.dynatemp_range:
            return params.temperature
        low = max(params.temperature - params.dynatemp_range, 0.0)
        high = params.temperature + params.dynatemp_range
        return dynamic_temperature(relative, low, high, params.dynatemp_exponent)

    def _check_largest(self, largest: float) -> None:
        """Raise if the most likely token does not exist."""
        if math.isfinite(largest):
            return
        if largest == -math.inf and self.constraint is not None:
            raise InvalidRequestError(
                "the answer cannot continue: its required form allows no token"
                + (" that logit_bias and ignore_eos allow" if self._forbids else " of the vocabulary")
            )
        if largest == -math.inf and self._forbids:
            raise InvalidRequestError("logit_bias forbids every token of the vocabulary")
        raise HotsetError("the model computed logits that are not numbers; the file may be damaged")

    def _candidates(self, logits: np.ndarray, is_xtc: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return the token ids that survive the filters, and their logits minus the largest, float64."""
        params = self.params
        near: np.ndarray | None = None
        if params.top_n_sigma > 0:
            self._check_largest(float(logits.max()))
            near = top_n_sigma(logits, params.top_n_sigma)
            logits = logits[near]
        ids, relative, total = self._likely(logits)
        if near is not None:
            ids = near[ids]
        if params.typical_p < 1:
            kept = typical(relative, params.typical_p)
            ids, relative, total = ids[kept], relative[kept] - relative[kept[0]], None
        n = len(ids)
        if params.top_p < 1:
            cumulative = np.exp(relative).cumsum()
            n = int(cumulative.searchsorted(params.top_p * (total or cumulative[-1]))) + 1
        if params.min_p > 0:
            n = min(n, int((-relative).searchsorted(-math.log(params.min_p), side="right")))
        ids, relative = ids[:n], relative[:n]
        if is_xtc and (n_out := xtc(relative, params.xtc_threshold)):
            ids, relative = ids[n_out:], relative[n_out:] - relative[n_out]
        return ids, relative

    def _likely(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray, float | None]:
        """Return the logits that top-k keeps, or that later filters may keep.

        Returns indices, logits minus the largest in float64 (by falling value if a filter follows) and, if
        top-p counts tokens that were left out, the sum of all exponentials.
        """
        params = self.params
        if 0 < params.top_k < self._n_vocab:  # with few allowed tokens it may be all
            self._check_largest(float(logits.max()))  # NaN if a logit is NaN
            ids, values = top_k(logits, params.top_k)
            relative = values.astype(np.float64)
            relative -= relative[0]
            if _orders(params) and relative[-1] == -math.inf:
                n = int((-relative).searchsorted(math.inf))
                ids, relative = ids[:n], relative[:n]
            return ids, relative, None
        largest = logits.max()
        self._check_largest(float(largest))
        relative = logits - largest
        cut, total = -math.inf, None
        if params.typical_p == 1:
            cut = math.log(params.min_p) if params.min_p > 0 else cut
            if params.top_p < 1:
                # All tokens less likely than (1 - top_p) / n together have less than 1 - top_p: never needed.
                total = float(np.exp(relative).sum())
                cut = max(cut, math.log((1 - params.top_p) * total / logits.size))
        if cut == -math.inf and not _orders(params):
            return np.arange(logits.size), relative.astype(np.float64), None
        # A margin for float32; the exact filter follows.
        ids = np.flatnonzero(relative >= cut - 1e-3 if cut > -math.inf else relative > cut)
        relative = relative[ids].astype(np.float64)
        order = np.argsort(-relative, kind="stable")
        return ids[order], relative[order], total


def token_logprobs(logits: np.ndarray, token: int, n_top: int) -> TokenLogprobs:
    """Return the logprobs of `token` and of the n_top most likely tokens in a row of logits."""
    log_total = log_sum_exp(logits)
    top: tuple[tuple[int, float], ...] = ()
    if n_top:
        ids, values = top_k(logits, min(n_top, logits.size))
        top = tuple(zip(ids.tolist(), (values.astype(np.float64) - log_total).tolist(), strict=True))
    return TokenLogprobs(token, float(logits[token]) - log_total, top)


def log_sum_exp(logits: np.ndarray) -> float:
    """Return log(sum(exp(logits))) of one row, accumulated in float64."""
    largest = float(logits.max())
    with np.errstate(over="ignore"):  # the difference of two finite floats may be infinite
        relative = logits - np.float32(largest)
    return largest + math.log(float(np.exp(relative).sum(dtype=np.float64)))


def _orders(params: SamplingParams) -> bool:
    """Return whether a filter other than top-k, top-p and min-p, or the dynamic temperature, is on."""
    return (
        params.top_n_sigma > 0
        or params.typical_p < 1
        or params.xtc_probability > 0
        or params.dynatemp_range > 0
        or params.adaptive_target >= 0
    )


def _float32(value: float) -> np.float32:
    return np.float32(max(-_LARGEST, min(value, _LARGEST)))


def _bounded(values: np.ndarray) -> np.ndarray:
    bounded: np.ndarray = np.clip(values, np.float32(-_LARGEST), np.float32(_LARGEST))
    return bounded
