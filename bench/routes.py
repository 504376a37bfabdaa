"""Synthetic routes: which experts a router would choose, with Zipf popularity and temporal locality.

An expert's score is the sum of what it always has, what its topic adds and what the token adds:

    score = -zipf * log(rank) + slow * a(t) + fast * b(t) + Gumbel noise

rank is a random order of the layer's experts; a and b are first-order autoregressive processes of variance 1
that forget half of themselves in `slow_half` and `fast_half` tokens. A token has the experts with the k
highest scores. With zipf alone tokens are independent draws of a Zipf distribution without replacement; the
processes bring it about that a token has the experts of those before it. ROUTERS holds what
`bench/expert_cache.py --fit` found for published replays of real routers; that is what they are fitted to,
and all that they are good for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.signal import lfilter


@dataclass(frozen=True)
class Locality:
    """The spread of each part of the scores, in units of the noise; halves in tokens."""

    zipf: float
    slow: float
    slow_half: float
    fast: float
    fast_half: float


@dataclass(frozen=True)
class Router:
    """A mixture's shape, and how its routes hang together."""

    n_layers: int
    n_experts: int
    n_used: int
    locality: Locality


def synthetic_routes(router: Router, n_tokens: int, seed: int) -> np.ndarray:
    """int32 [n_tokens, n_layers, n_used], best first."""
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


# Found with `bench/expert_cache.py --fit NAME` for the hit rates that stand there.
ROUTERS = {
    "gemma-4-26B-A4B": Router(30, 128, 8, Locality(0.3, 1.5, 300, 1.7, 8)),
}
