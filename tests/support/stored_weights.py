"""Backends whose weights come from a store under a memory budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from backend_runs import batch, cpu_backend
from sparse_runs import prepared

from hotset import _core
from hotset.backends.cpu.backend import CpuBackend
from hotset.errors import ReadError
from hotset.formats.gguf import GGUFFile
from hotset.formats.overlay import Overlay
from hotset.loader.build import open_model, plan_model
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe
from hotset.model.graph import Graph
from hotset.offload import weight_store as stored_module
from hotset.offload.weight_store import StoredWeights, Use, sizes_of
from hotset.settings import LoadSettings


def stored(
    gguf: GGUFFile, mode: str, share: float, *, ring: bool = False, **options: object
) -> tuple[CpuBackend, StoredWeights]:
    """Return a backend whose store has the least memory that works, and a share of the rest."""
    ready, graph = prepared(gguf, mode, options.pop("predictor", None))  # type: ignore[arg-type]
    reader, gap = _core.Reader(ring, 4), options.pop("gap", 4096)
    step = options.pop("step", stored_module.STEP)

    def weights(n_bytes: int) -> StoredWeights:
        return StoredWeights(
            ready.weights, graph, n_bytes, Use(sparse=mode != "dense", step=step),  # type: ignore[arg-type]
            reader=reader, gap=gap,  # type: ignore[arg-type]
        )  # fmt: skip

    all_of_it = weights(1 << 30)
    assert all_of_it.store is not None
    least, most = all_of_it.store.least_bytes, all_of_it.store.most_bytes
    sizes = all_of_it.sizes
    made = weights(sizes.all if share == 1 else sizes.resident + least + int(share * (most - least)))
    given = {"n_blocks": 8, "max_batch": 128, "n_threads": 2, "sparse": mode != "dense", **options}
    return cpu_backend(made, graph, **given), made  # type: ignore[arg-type]


BLOCKS = [2, 0]


def failures_of(
    backend: CpuBackend, weights: StoredWeights, share: float, ids: np.ndarray, expected: np.ndarray
) -> int:
    """Count the steps that end because a share of the reads fails; the others must give the expected bits."""
    weights.reader.inject_faults(share, 5)
    n_failed = 0
    for i in range(len(ids)):
        for _ in range(50):
            try:
                logits = backend.step(batch([(ids[i : i + 1], i, BLOCKS)])).logits.copy()
                break
            except ReadError:
                n_failed += 1
        np.testing.assert_array_equal(logits[0], expected[i])
    return n_failed


def graph_of(gguf: GGUFFile) -> Graph:
    return describe(config_from_gguf(gguf), gguf.tensors)


def streaming(gguf: GGUFFile, share: float, **options: Any) -> tuple[CpuBackend, StoredWeights]:
    """Return a backend with the least memory that works, and a share of the rest."""
    graph, use = graph_of(gguf), Use(sparse=False)
    sizes = sizes_of(graph, gguf.tensors, use)
    n_bytes = sizes.least_of_all + int(share * (sizes.resident + sizes.most - sizes.least_of_all))
    reader = _core.Reader(options.pop("ring", False), 4)
    weights = StoredWeights(Overlay(gguf), graph, n_bytes, use, reader=reader, gap=0)
    given = {"n_blocks": 8, "max_batch": 128, "n_threads": 2, **options}
    return cpu_backend(weights, graph, **given), weights


def least_of(model: Path, **settings: Any) -> int:
    with open_model(model, LoadSettings(ram_budget=1, **settings)) as opened:
        decided = plan_model(opened)
        decided.weights.close()
    assert decided.ram is not None
    return decided.ram.least
