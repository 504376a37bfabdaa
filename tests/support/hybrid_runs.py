"""Models split between a device and the CPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from sparse_runs import N_FF, hot_neurons

from hotset.backends.pipeline import ChainBackend
from hotset.backends.triton.opening import open_chain
from hotset.formats.gguf import GGUFFile
from hotset.formats.quants import GGMLType as T
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe
from hotset.offload.misses import MissRates
from hotset.placement.table import CPU, LayerPlacement, Placement


def hybrid(gguf: GGUFFile, owners: tuple[int, ...] = (0, 0), **options: Any) -> ChainBackend:
    graph = describe(config_from_gguf(gguf), gguf.tensors)
    given: dict[str, Any] = {"n_pages": 8, "max_batch": 128, "kv_type": "f32", "n_threads": 2, "timeout": 30}
    return open_chain(whole(owners), gguf, graph, **given | options)


LINK_ONLY = MissRates(cpu=1.0, cpu_beside=1.0, many=1.0, link=1e12, link_beside=1e12)
EVEN = MissRates(cpu=1e9, cpu_beside=1e9, many=1e10, link=1e9, link_beside=1e9)
SMALL: dict[str, Any] = {"n_embd": 64, "n_ff": 64, "head_dim": 32, "type_of": lambda _: T.Q8_0}
# Of F32 weights both sides round sums of at most N_FF terms, in different orders: sqrt(N_FF) / 2^24 each,
# over the eight products of each of two layers. Norms and softmax pass an error on about as large as it was;
# four times as much is left for those that do not.
TOLERANCE = 4 * 16 * math.sqrt(N_FF) * 2.0**-24


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """Root mean square of the difference over that of what is expected.

    (The largest error says little: a random model's softmax can turn on the rounding of a single score.)
    """
    return float(np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2)))


def split(
    share: float, n_layer: int = 2, devices: Sequence[int] | None = None, n_ff: int = N_FF
) -> Placement:
    """Each layer on a device of its list, CPU among them, with this share of its neurons."""
    owners = list(devices or [0] * n_layer)
    layers = [
        LayerPlacement(owner, None if owner == CPU else hot_neurons(share, n_ff, i))
        for i, owner in enumerate(owners)
    ]
    return Placement(("simulated",) * (max(owners) + 1), tuple(layers), owners[-1])


def whole(owners: Sequence[int], output: int | None = None) -> Placement:
    output = owners[-1] if output is None else output
    return Placement(("simulated",) * (output + 1), tuple(LayerPlacement(i) for i in owners), output)


ORDERS = [
    [CPU, 0, 0],
    [0, 0, 1],
    [CPU, 0, 1],
    [0, CPU, 0],
    [0, 1, CPU],
    [CPU, 0, CPU],
    [1, 0, CPU],
    [0, 1, 0],
]
