"""Models and machines for the planner."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hotset.placement.budget import LayerFacts, ModelFacts
from hotset.placement.table import DeviceRates, Rates

GPU = DeviceRates(
    cpu_read=50e9, cpu_gather=30e9, cpu_read_busy=45e9, cpu_gather_busy=27e9, cpu_many=0, cpu_read_link=0,
    read=800e9, read_busy=780e9, launch=4e-6, sync=12e-6, context=0, link=0, link_busy=0,
)  # fmt: skip


def rates(n_devices: int = 1, gpu: DeviceRates = GPU) -> Rates:
    return Rates((gpu,) * n_devices)


def layer(n_ff: int, *, n_split: int | None = None, shared: int = 0, scale: int = 1) -> LayerFacts:
    """Return a layer whose attention has the size of eight of its neurons."""
    n_split = n_ff if n_split is None else n_split
    row = 100_000 * scale
    fixed = 8 * row + (0 if n_split else n_ff * row)
    neuron, shared = (row, shared) if n_split else (0, 0)
    return LayerFacts(n_ff, n_split, fixed, neuron, shared, row, row // 2, 0, row)


def model(layers: Sequence[LayerFacts], output: int = 500_000) -> ModelFacts:
    streamed = 2 * max(one.n_split * one.neuron_bytes + one.shared_bytes for one in layers)
    return ModelFacts(tuple(layers), output, 50_000, streamed)


def power_law(n: int, rng: np.random.Generator, density: float = 0.1) -> np.ndarray:
    """Return shuffled frequencies with mean `density` that fall as a power of the rank."""
    p = (1 + np.arange(n)) ** -1.2
    p = np.minimum(p * density * n / p.sum(), 0.98)
    return rng.permutation(p)


def place_budget(facts: ModelFacts, fraction: float, context: int = 10_000) -> int:
    """Return bytes between the least that works and the whole model."""
    low = facts.smallest_bytes() + context
    high = facts.whole_bytes + context
    return int(low + fraction * (high - low))
