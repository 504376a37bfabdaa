"""The numbers of a report, from a profile and from a text that runs through the model.

A profile says how often each neuron fires. From it follow the share of neurons that fire for a token, and the
power law: the share of all activations that come from the hottest neurons. It does not say which neurons fire
*together*, or whether the next token needs the same ones. For that, `Observer` watches a run step by step
through the taps `blk.N.ffn_act`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hotset.sparsity.profile import LayerProfile, Profile

GRID = np.linspace(0, 1, 101)  # the points of curves: shares of a layer's neurons, hottest first
# Share of a layer's neurons that make 80% of its activations (profile.HOT_MASS), published by PowerInfer in
# arXiv 2312.12456.
PUBLISHED = {"OPT-30B (ReLU)": 0.26, "Llama-70B (ReGLU)": 0.43, "Llama-70B (SwiGLU)": 0.69}
LAGS = (1, 2, 4, 8, 16, 32, 64, 128)  # tokens apart at which active sets are compared
N_SAMPLED = 64  # neurons of a layer whose co-activation is counted
_PERCENTILES = (10, 50, 90)


@dataclass(frozen=True)
class LayerCurves:
    """One layer of a profile. summary: its numbers (sparsity/profile.py).

    cumulative: float64 [101], the share of all activations that come from the hottest GRID of the neurons;
    NaN if none fired. frequency: float64 [101], the share of tokens for which the neuron at GRID fires.
    """

    summary: LayerProfile
    cumulative: np.ndarray
    frequency: np.ndarray

    def as_dict(self) -> dict[str, Any]:
        curves = {"cumulative": self.cumulative.tolist(), "frequency": self.frequency.tolist()}
        return self.summary.as_dict() | curves


def curves_of(profile: Profile) -> list[LayerCurves]:
    """Return the curves of every layer with an FFN, interpolated linearly between neurons."""
    layers = []
    for summary in profile.summary():
        counts = profile.counts[summary.layer]
        hottest = np.sort(counts.astype(np.float64))[::-1]
        total = hottest.sum()
        sums = np.concatenate([[0.0], np.cumsum(hottest)]) / (total or np.nan)
        n = len(counts)
        cumulative = np.interp(GRID, np.arange(n + 1) / n, sums)
        frequency = np.interp(GRID * (n - 1), np.arange(n), hottest) / max(profile.n_tokens, 1)
        layers.append(LayerCurves(summary, cumulative, frequency))
    return layers


@dataclass(frozen=True)
class LayerActivity:
    """One layer over a text.

    active: share of its neurons that fire for a token, at the 10th, 50th and 90th percentile of tokens.
    overlap: for each of LAGS, the share of a token's firing neurons that also fired that many tokens before,
    over all tokens; NaN if the text is too short. overlap_independent: the same if each neuron fired as
    often, but independently for each token. sampled: neurons (their index in the file) whose co-activation
    was counted, sorted so that neighbours fire together. correlation: float64 [n, n], the phi coefficient of
    each pair: 0 for independent neurons, 1 for two that fire for the same tokens. coactivation: the mean of
    |phi| over pairs.
    """

    layer: int
    active: tuple[float, ...]
    overlap: tuple[float, ...]
    overlap_independent: float
    sampled: np.ndarray
    correlation: np.ndarray
    coactivation: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {
            "sampled": self.sampled.tolist(),
            "correlation": self.correlation.round(4).tolist(),
        }


@dataclass(frozen=True)
class TextActivity:
    """The measurements over a text.

    coactivation_independent: the expected mean of |phi| for independent neurons over this many tokens,
    sqrt(2 / (π n_tokens)).
    """

    n_tokens: int
    n_sequences: int
    layers: tuple[LayerActivity, ...]
    coactivation_independent: float

    def as_dict(self) -> dict[str, Any]:
        return {
            "n_tokens": self.n_tokens,
            "n_sequences": self.n_sequences,
            "lags": list(LAGS),
            "active_percentiles": list(_PERCENTILES),
            "coactivation_independent": self.coactivation_independent,
            "layers": [layer.as_dict() for layer in self.layers],
        }


class Observer:
    """A counter of the neurons that fire in every layer: `start` each sequence, `add` each of its steps.

    n_ff: neurons per layer; 0: no FFN. pilot: per layer, how often each neuron fires, to choose the neurons
    whose co-activation is counted; None: from the first step. Memory per layer: a byte per neuron for each of
    the last 128 tokens, and a byte per sampled neuron for every token.
    """

    def __init__(
        self, n_ff: Sequence[int], *, pilot: Sequence[np.ndarray] | None = None, seed: int = 0
    ) -> None:
        self._n_layer = len(n_ff)
        self._layers = {i: _LayerObserver(n) for i, n in enumerate(n_ff) if n}
        self._rng = np.random.default_rng(seed)
        self.n_tokens = self.n_sequences = 0
        if pilot is not None:
            for i, layer in self._layers.items():
                layer.sampled = self._sample(pilot[i])

    @property
    def names(self) -> tuple[str, ...]:
        """Return the taps that `add` reads."""
        return tuple(f"blk.{i}.ffn_act" for i in self._layers)

    @property
    def counts(self) -> tuple[np.ndarray, ...]:
        """Return per layer uint64 [n_ff]: for how many tokens each neuron fired, as in a profile."""
        none = np.zeros(0, np.uint64)
        return tuple(self._layers[i].counts if i in self._layers else none for i in range(self._n_layer))

    def _sample(self, frequencies: np.ndarray) -> np.ndarray:
        """Return random neurons, preferring those that fire for some tokens and not for others."""
        weights = frequencies * (1 - frequencies)
        n = min(N_SAMPLED, int(np.count_nonzero(weights > 0)))
        if n == 0:
            return np.zeros(0, np.int64)
        return np.sort(self._rng.choice(len(weights), n, replace=False, p=weights / weights.sum()))

    def start(self) -> None:
        """Start a new sequence, whose first token follows no other."""
        self.n_sequences += 1
        for layer in self._layers.values():
            layer.tail = layer.tail[:0]

    def add(self, values: Mapping[str, np.ndarray]) -> None:
        """Add the next tokens of the sequence: each tap float32 [n_tokens, n_ff]."""
        for i, layer in self._layers.items():
            fires = values[f"blk.{i}.ffn_act"] != 0
            if layer.sampled is None:
                layer.sampled = self._sample(fires.mean(axis=0))
            layer.add(fires)
        self.n_tokens += len(values[self.names[0]])

    def result(self) -> TextActivity:
        """Return the measurements; at least one token is needed."""
        layers = tuple(layer.result(i, self.n_tokens) for i, layer in self._layers.items())
        return TextActivity(
            self.n_tokens, self.n_sequences, layers, float(np.sqrt(2 / (np.pi * max(self.n_tokens, 1))))
        )


class _LayerObserver:
    def __init__(self, n_ff: int) -> None:
        self.counts = np.zeros(n_ff, np.uint64)
        self.tail = np.zeros((0, n_ff), bool)  # the previous tokens, as many as the longest lag
        self.sampled: np.ndarray | None = None
        self._n_active: list[np.ndarray] = []
        self._bits: list[np.ndarray] = []
        self._both = np.zeros(len(LAGS), np.int64)
        self._either = np.zeros(len(LAGS), np.int64)  # firing neurons of the later token

    def add(self, fires: np.ndarray) -> None:
        self.counts += np.count_nonzero(fires, axis=0).astype(np.uint64)
        n_active = np.count_nonzero(fires, axis=1)
        self._n_active.append(n_active)
        assert self.sampled is not None
        self._bits.append(fires[:, self.sampled])
        n_before = len(self.tail)
        joined = np.concatenate([self.tail, fires])
        for i, lag in enumerate(LAGS):
            first = max(n_before, lag)
            if first < len(joined):
                later = joined[first:]
                self._both[i] += np.count_nonzero(later & joined[first - lag : len(joined) - lag])
                self._either[i] += n_active[first - n_before :].sum()
        self.tail = joined[-LAGS[-1] :]

    def result(self, layer: int, n_tokens: int) -> LayerActivity:
        assert self.sampled is not None
        n_active = np.concatenate(self._n_active) / len(self.counts)
        frequencies = self.counts / n_tokens
        sampled, correlation = _correlation(self.sampled, np.concatenate(self._bits))
        pairs = np.abs(correlation[np.triu_indices(len(sampled), 1)])
        with np.errstate(invalid="ignore"):
            overlap = self._both / self._either
            independent = (frequencies**2).sum() / frequencies.sum()
        return LayerActivity(
            layer,
            tuple(np.percentile(n_active, _PERCENTILES).tolist()),
            tuple(overlap.tolist()),
            float(independent),
            sampled,
            correlation,
            float(pairs.mean()) if len(pairs) else float("nan"),
        )


def median(values: Sequence[float] | np.ndarray) -> float:
    """Return the median over the layers that have a value; NaN if none has."""
    known = np.asarray(values, np.float64)
    known = known[~np.isnan(known)]
    return float(np.median(known)) if len(known) else float("nan")


def _correlation(sampled: np.ndarray, bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the sampled neurons that fire for some tokens but not all, and the phi of each pair.

    They are sorted by the first principal component, so that neurons that fire together are neighbours.
    bits: bool [n_tokens, n_sampled].
    """
    fires = bits.mean(axis=0)
    varies = (fires > 0) & (fires < 1)
    sampled, values = sampled[varies], bits[:, varies].astype(np.float64)
    if not len(sampled):
        return sampled, np.zeros((0, 0))
    values -= values.mean(axis=0)
    values /= np.sqrt((values**2).mean(axis=0))
    phi = values.T @ values / len(values)
    order = np.argsort(np.linalg.eigh(phi)[1][:, -1], kind="stable")
    return sampled[order], phi[np.ix_(order, order)]
