"""Synthetic routes: a router's choices of experts, with Zipf popularity and temporal locality.

An expert's score is the sum of its popularity, its topic's part and the token's part:

    score = -zipf * log(rank) + slow * a(t) + fast * b(t) + Gumbel noise

rank is a random order of the layer's experts; a and b are first-order autoregressive processes of variance 1
whose half-lives are `slow_half` and `fast_half` tokens. A token uses the experts with the k highest scores.
With only zipf, tokens are independent draws of a Zipf distribution without replacement; the processes make
tokens use experts of the previous ones. ROUTERS has parameters that were fitted to published replays of real
routers (decision 003), and is valid only for them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.signal import lfilter


@dataclass(frozen=True)
class Locality:
    """The spread of each part of the scores, in units of the noise; half-lives in tokens."""

    zipf: float
    slow: float
    slow_half: float
    fast: float
    fast_half: float


@dataclass(frozen=True)
class Router:
    """The shape of an MoE model, and the locality of its routes."""

    n_layers: int
    n_experts: int
    n_used: int
    locality: Locality


def synthetic_routes(router: Router, n_tokens: int, seed: int) -> np.ndarray:
    """Return int32 [n_tokens, n_layers, n_used], best first."""
    rng = np.random.default_rng(seed)
    locality = router.locality
    routes = np.empty((n_tokens, router.n_layers, router.n_used), np.int32)
    for layer in range(router.n_layers):
        ranks = 1 + rng.permutation(router.n_experts)
        scores = rng.gumbel(size=(n_tokens, router.n_experts)) - locality.zipf * np.log(ranks)
        for spread, half in ((locality.slow, locality.slow_half), (locality.fast, locality.fast_half)):
            keeps = 0.5 ** (1 / half)
            steps = rng.standard_normal((n_tokens, router.n_experts)) * np.sqrt(1 - keeps**2)
            steps[0] /= np.sqrt(1 - keeps**2)
            scores += spread * lfilter([1], [1, -keeps], steps, axis=0)
        routes[:, layer] = np.argsort(-scores, axis=1, kind="stable")[:, : router.n_used]
    return routes


# Fitted to the hit rates in PUBLISHED, by policies that no longer exist.
ROUTERS = {
    "gemma-4-26B-A4B": Router(30, 128, 8, Locality(0.35, 2.04, 130, 1.18, 14.7)),
    "Qwen3.5-35B-A3B": Router(40, 256, 8, Locality(0.34, 2.10, 71, 1.09, 14.8)),
    "LFM2.5-8B-A1B": Router(22, 32, 4, Locality(0.45, 1.66, 202, 1.20, 8.7)),
}

# Replays of real traces (FeSens/openTPU, 4 of 2048 tokens): share of experts in the cache → hit rate by
# policy.
# "forever" is the most frequent so far, with counts that never decay.
PUBLISHED: dict[str, dict[float, dict[str, float]]] = {
    "gemma-4-26B-A4B": {
        0.05: {"static": 0.084, "lru": 0.000, "per_layer": 0.459, "forever": 0.144, "optimum": 0.576},
        0.10: {"static": 0.168, "lru": 0.536, "per_layer": 0.573, "forever": 0.261, "optimum": 0.756},
        0.20: {"static": 0.302, "lru": 0.765, "per_layer": 0.770, "forever": 0.448, "optimum": 0.890},
        0.50: {"static": 0.670, "lru": 0.971, "per_layer": 0.963, "forever": 0.827, "optimum": 0.988},
    },
    "Qwen3.5-35B-A3B": {
        0.05: {"static": 0.072, "lru": 0.433, "per_layer": 0.471, "forever": 0.164, "optimum": 0.659},
        0.10: {"static": 0.138, "lru": 0.598, "per_layer": 0.608, "forever": 0.278, "optimum": 0.776},
        0.20: {"static": 0.264, "lru": 0.748, "per_layer": 0.748, "forever": 0.451, "optimum": 0.882},
        0.50: {"static": 0.610, "lru": 0.943, "per_layer": 0.929, "forever": 0.801, "optimum": 0.977},
    },
    "LFM2.5-8B-A1B": {
        0.10: {"static": 0.174, "lru": 0.000, "per_layer": 0.475, "forever": 0.223, "optimum": 0.578},
        0.20: {"static": 0.321, "lru": 0.554, "per_layer": 0.586},
        0.50: {"static": 0.642, "lru": 0.874, "per_layer": 0.862, "forever": 0.722, "optimum": 0.954},
    },
}
