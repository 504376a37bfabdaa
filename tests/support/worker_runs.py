"""A CPU worker of a hybrid model, and the requests that a device would submit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from backend_runs import taken
from sparse_runs import N_FF, hot_neurons, prepared

from hotset.backends.stage import BackendOptions
from hotset.backends.triton.cpu_offload import CpuOffload
from hotset.formats.gguf import GGUFFile

torch = pytest.importorskip("torch")


N_EMBD = 64
LAYERS = (0, 1)


def cpu_worker(gguf: GGUFFile, mode: str, share: float = 0.3, **options: Any) -> CpuOffload:
    ready, graph = prepared(gguf, mode)
    hot = options.pop("hot", None)
    layers = {i: hot_neurons(share, seed=i) for i in LAYERS} if hot is None else dict.fromkeys(LAYERS, hot)
    return offload(ready.weights, graph, layers, **{"n_threads": 2, **options})


def offload(weights: Any, graph: Any, layers: Any, **options: Any) -> CpuOffload:
    given = {"n_blocks": 1, "max_batch": 16, "sparse": True, **options}
    return CpuOffload(weights, graph, layers, "cpu", taken(BackendOptions, given), **given)


def packed(selected: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.packbits(selected, axis=1, bitorder="little"))


def inputs(n: int, seed: int = 3) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((n, N_EMBD)).astype(np.float32))


def random_bits(n: int, share: float = 0.4, seed: int = 5) -> torch.Tensor:
    return packed(np.random.default_rng(seed).random((n, N_FF)) < share)


def ask(cold: CpuOffload, layer: int, h: torch.Tensor, bits: torch.Tensor | None = None) -> np.ndarray:
    with cold.step(len(h)):
        cold.submit(layer, h, bits)
        return cold.collect(layer).numpy()
