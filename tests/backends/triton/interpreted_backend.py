"""Whole steps by Triton's kernels on a CPU. test_gpu_backend_interpreted runs it with TRITON_INTERPRET=1.

The arguments are a folder and names of CASES, THRESHOLDS or FUSED. It prints one line per model: the name and
the largest error, relative to the largest logit.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import threshold_models
from backend_runs import batch, logits_of, tokens
from fake_cold import FakeCpuWorker
from gpu_runs import gpu, gpu_stage
from interpreted_triton import patch_once
from sparse_runs import MODELS, prepared
from threshold_models import EVERY, graph_of
from tiny_gguf import write_relu

from hotset.backends.reference import ReferenceBackend
from hotset.backends.triton import launch, triton_kernels
from hotset.backends.triton.backend import GpuBackend
from hotset.backends.triton.stage import GpuStage
from hotset.formats.gguf import open_gguf
from hotset.formats.quants import GGMLType
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe
from hotset.model.graph import thresholded_products

N_FF = 64  # one layer of small sizes: the interpreter takes a second for a microsecond of a GPU
CASES: dict[str, tuple[str, str | None, GGMLType]] = {
    "bamboo": ("exact", None, GGMLType.F32),
    "opt": ("predicted", "svd:32", GGMLType.F16),
    "falcon-40b": ("predicted", None, GGMLType.Q4_0),
}
THRESHOLDS = "thresholds"
FUSED = "fused"  # a dense SiLU model with enough rows to fuse products with norms, heads and activations
SPLIT = "-split"  # a suffix: two thirds of the neurons are on the CPU


def run(backend: Any, splits: list[int], ids: np.ndarray) -> np.ndarray:
    """Return logits of one sequence: a prompt too long for a matrix-vector kernel, then single tokens."""
    rows, at = [], 0
    for end in [*splits, len(ids)]:
        step = batch([(ids[at:end], at, [1, 0])])
        found = backend.run(step).numpy() if isinstance(backend, GpuStage) else backend.step(step).logits
        rows.append(found.copy())
        at = end
    return np.concatenate(rows)


def main(folder: Path, *names: str) -> None:
    patch_once()
    ids, splits = tokens(12), [9, 10]
    for name in names:
        if name == THRESHOLDS:
            print(THRESHOLDS, thresholded_by_the_kernels(folder), flush=True)
            continue
        if name == FUSED:
            print(FUSED, fused_by_the_kernels(folder), flush=True)
            continue
        model = name.removesuffix(SPLIT)
        mode, predictor, type = CASES[model]
        options = {
            "n_embd": 32, "n_ff": N_FF, "ranks": (32,), "type_of": lambda name, type=type: type,
            **MODELS[model],
        }  # fmt: skip
        gguf = open_gguf(write_relu(folder / f"{name}.gguf", **options))
        ready, graph = prepared(gguf, mode, predictor)
        expected = logits_of(ReferenceBackend(ready.weights, graph, n_blocks=2), ids, [], [1, 0])
        given: Any = {"n_blocks": 2, "max_batch": 16}
        backend: GpuBackend | GpuStage
        if name.endswith(SPLIT):
            hot = {0: np.arange(N_FF) % 3 == 0}
            cold = FakeCpuWorker(ready.weights, graph, hot, 16)
            backend = stage = gpu_stage(ready.weights, graph, hot=hot, worker=cold, **given)
        else:
            backend = gpu(ready.weights, graph, **given)
            stage = backend.stage
        assert stage.kernels.name == "triton"
        assert stage.kernels.linear.__module__.endswith("triton_kernels")
        error = np.abs(run(backend, splits, ids) - expected).max() / np.abs(expected).max()
        print(name, float(error), flush=True)


def thresholded_by_the_kernels(folder: Path) -> float:
    """Return the error of a model with all thresholds, whose matrices are input-major."""
    gguf, expected = threshold_models.clearly(folder, EVERY, "llama", n_embd=32, n_ff=64, ranks=(32,))
    weights, graph = graph_of(gguf, EVERY)
    names = [op.weight for op in thresholded_products(graph)]
    backend = gpu(weights, graph, max_batch=16, input_major=names)
    assert backend.stage.kernels.name == "triton"
    found = threshold_models.run(backend, threshold_models.IDS, threshold_models.THRESHOLDED, [9, 10])
    stats = backend.stats()
    assert stats is not None
    assert stats.left_out is not None
    assert stats.left_out.any()
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def fused_by_the_kernels(folder: Path) -> float:
    """Return the error of two layers, each of six launches, for single tokens and for two at a time."""
    keys = {"llama.hidden_activation": "silu"}
    gguf = open_gguf(
        write_relu(folder / "fused.gguf", dialect="gguf", n_embd=32, ranks=(32, 32), n_ff=64, keys=keys)
    )
    graph = describe(config_from_gguf(gguf), gguf.tensors)
    ids = tokens(13)
    expected = logits_of(ReferenceBackend(gguf, graph, n_blocks=2), ids, [], [1, 0])
    launched: list[str] = []
    before = launch.launch

    def note(kernel: Any, *args: Any, **options: Any) -> None:
        launched.append(kernel.__name__)
        before(kernel, *args, **options)

    with patch.object(triton_kernels, "MATVEC_PROGRAMS", 1), patch.object(launch, "launch", note):
        backend = gpu(gguf, graph, n_blocks=2, max_batch=16)
        found = run(backend, [9, 11, 12], ids)
    layer = ["_project_heads_kernel", "_attention_kernel", *["_matvec_kernel"] * 3]
    once = ["_norm_kernel", "_angles_kernel"], ["_norm_kernel", "_matvec_kernel"]
    for _ in range(3):  # the latest steps
        step = [*once[0], *layer, *layer, *once[1]]
        assert launched[-len(step) :] == step, launched
        del launched[-len(step) :]
    return float(np.abs(found - expected).max() / np.abs(expected).max())


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
