"""What leaves tokens out before one is drawn, as llama.cpp defines it. Everything is computed in float64.

`relative` is always the finite logits of the tokens that are left, less the largest, by falling value.
"""

from __future__ import annotations

import math

import numpy as np

_GROUP = 64
_MOST_LIKELY = 100  # tokens by which mirostat 1 estimates how the probabilities fall


def top_k(logits: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k largest logits: indices by falling logit, ties by rising index, and their values."""
    n = logits.size
    if k <= n // _GROUP:
        # The maxima of disjoint groups are distinct logits: their k-th largest is at most the k-th largest of
        # all. Groups are columns, so that the maximum is taken over whole rows at once.
        maxima = logits[: n - n % _GROUP].reshape(_GROUP, -1).max(axis=0)
        bound = np.partition(maxima, len(maxima) - k)[len(maxima) - k]
        candidates = np.flatnonzero(logits >= bound)
        if bound == -math.inf:  # few are allowed: all others would have to be sorted
            is_out = logits[candidates] == bound
            candidates = np.concatenate([candidates[~is_out], candidates[is_out][:k]])
    else:
        candidates = np.arange(n)
    order = np.argsort(-logits[candidates], kind="stable")[:k]
    indices = candidates[order]
    return indices, logits[indices]


def top_n_sigma(logits: np.ndarray, n: float) -> np.ndarray:
    """Indices of the logits that are at most n standard deviations below the largest (arXiv 2411.07641).

    Mean and deviation are those of the finite logits, of which there is one at least.
    """
    finite = logits[np.isfinite(logits)].astype(np.float64)
    return np.flatnonzero(logits >= finite.max() - n * finite.std())


def typical(relative: np.ndarray, p: float) -> np.ndarray:
    """Rising indices of the tokens whose surprise is nearest to the expected one, the fewest that together
    are more likely than p (arXiv 2202.00666)."""
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
    """How many of the first tokens are left out (exclude top choices): all that have a probability of
    `threshold` or more, but the least likely of those."""
    weights = np.exp(relative)
    n = int((-weights).searchsorted(-threshold * weights.sum(), side="right"))
    return max(n - 1, 0)


def dynamic_temperature(relative: np.ndarray, low: float, high: float, exponent: float) -> float:
    """Between low and high, by the entropy of the tokens that are left over the largest possible."""
    if len(relative) < 2:
        return high
    weights = np.exp(relative)
    total = weights.sum()
    entropy = (weights / total * (math.log(total) - relative)).sum() / math.log(len(relative))
    return float(low + (high - low) * min(max(entropy, 0.0), 1.0) ** exponent)


def drawn(relative: np.ndarray, temperature: float, u: float) -> int:
    """The index of the token that u, in [0, 1), draws of any order of them."""
    if temperature == 0:
        return int(np.argmax(relative))
    cumulative = np.exp(relative / temperature).cumsum()
    # A float below 1 times the total can round up to it, past the last that has a probability.
    index = int(cumulative.searchsorted(u * cumulative[-1], side="right"))
    return min(index, int(cumulative.searchsorted(cumulative[-1])))


class Mirostat:
    """Draws tokens so that their surprise stays near tau bits (arXiv 2007.14966).

    version: 1 estimates by Zipf's law how many tokens to keep, 2 keeps those whose surprise is at most `mu`.
    eta: how fast `mu` follows what was drawn. n_vocab: of the whole vocabulary.
    """

    def __init__(self, version: int, tau: float, eta: float, n_vocab: int) -> None:
        self.mu = 2 * tau
        self._version, self._tau, self._eta, self._n_vocab = version, tau, eta, n_vocab

    def draw(self, logits: np.ndarray, temperature: float, u: float) -> int:
        """The index of the next token in logits of which one at least is finite."""
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
            if rest == 0:  # s = 1: what (s - 1) / rest tends to
                k = np.float64(2) ** self.mu / math.log(max(self._n_vocab, 2))
            else:
                k = ((s - 1) * np.float64(2) ** self.mu / rest) ** (1 / s)
        return int(min(max(k, 1), len(relative))) if np.isfinite(k) else len(relative)
