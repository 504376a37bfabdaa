"""Tiny models with activation thresholds, and their logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from backend_runs import batch, cpu_backend, tokens
from tiny_gguf import write_llama, write_relu

from hotset.backends.cpu.backend import CpuBackend
from hotset.backends.reference import ReferenceBackend
from hotset.engine.engine import Engine
from hotset.formats.gguf import GGUFFile, open_gguf
from hotset.formats.quants import GGMLType
from hotset.formats.quants import GGMLType as T
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe
from hotset.model.graph import Graph
from hotset.model.operations import Threshold
from hotset.model.thresholds import LayerThresholds
from hotset.sparsity.modes import choose
from hotset.sparsity.preparing import prepare
from hotset.sparsity.thresholds import BaseMode, Calibrated, Thresholds

SILU = {"llama.hidden_activation": "silu"}
EVERY = LayerThresholds(gate=0.1, attn_in=0.6, attn_out=0.1, ffn_in=0.6, down_in=0.05)
CASES = {
    "nothing": LayerThresholds(), "gate": LayerThresholds(gate=0.1), "attn_in": LayerThresholds(attn_in=0.6),
    "attn_out": LayerThresholds(attn_out=0.1), "ffn_in": LayerThresholds(ffn_in=0.6),
    "down_in": LayerThresholds(down_in=0.05), "every": EVERY,
}  # fmt: skip


def write(folder: Path, architecture: str = "llama", type: GGMLType = T.F32, **options: Any) -> GGUFFile:
    keys = SILU if architecture == "llama" else {}
    given = {"dialect": "gguf", "n_embd": 64, "n_ff": 288, "keys": keys, "type_of": lambda name: type}
    return open_gguf(write_relu(folder / "model.gguf", architecture=architecture, **{**given, **options}))


def graph_of(
    gguf: GGUFFile, layer_thresholds: LayerThresholds, mode: BaseMode | None = None
) -> tuple[Any, Graph]:
    config = config_from_gguf(gguf)
    if mode is None:
        mode = choose(config, gguf.tensors).mode  # type: ignore[assignment]
        assert mode != "threshold"
    choice = choose(config, gguf.tensors, thresholds=thresholds_of(gguf, mode, layer_thresholds))  # type: ignore[arg-type]
    ready = prepare(gguf, config, choice)
    return ready.weights, describe(config, ready.weights.tensors, ready.predictor, choice.layer_thresholds)


def cpu(
    gguf: GGUFFile, layer_thresholds: LayerThresholds, mode: BaseMode | None = None, **options: Any
) -> CpuBackend:
    weights, graph = graph_of(gguf, layer_thresholds, mode)
    return cpu_backend(
        weights, graph, **{"n_blocks": 8, "max_batch": 128, "n_threads": 2, "sparse": True, **options}
    )


def run(
    backend: Any,
    ids: Sequence[int],
    thresholded: np.ndarray,
    splits: Sequence[int] = (),
    taps: tuple[str, ...] = (),
) -> np.ndarray:
    """Return logits [n_tokens, n_vocab] of one sequence, computed in chunks that begin at 0 and at `cuts`."""
    rows = []
    for first, last in zip([0, *splits], [*splits, len(ids)], strict=True):
        part = batch([(ids[first:last], first, [0])], taps)
        rows.append(np.array(backend.step(replace(part, thresholded=thresholded[first:last].copy())).logits))
    return np.concatenate(rows)


OF_EXPERTS = LayerThresholds(gate=0.1, attn_in=0.6, attn_out=0.1)
EXPERTS: dict[str, dict[str, Any]] = {
    "plain": {}, "one by one": {"one_by_one": True}, "neuron-major": {"down_neuron_major": True},
    "relu": {"keys": {"llama.hidden_activation": "relu"}},
}  # fmt: skip


def write_experts(folder: Path, kind: str, type_: GGMLType = T.F32) -> GGUFFile:
    given = {"experts": (4, 2), "type_of": lambda name: type_}
    return open_gguf(write_llama(folder / "model.gguf", **given, **EXPERTS[kind]))  # type: ignore[arg-type]


def scores(engine: Engine, ids: Sequence[int], *, as_answer: bool) -> np.ndarray:
    rows: list[np.ndarray] = []
    sequence = engine.enqueue(
        engine.prepare_score(ids, lambda _, new: rows.append(new.copy()), as_answer=as_answer)
    )
    while sequence.finish_reason is None:
        engine.step()
    return np.concatenate(rows)


def thresholds_of(
    gguf: GGUFFile, mode: BaseMode = "dense", layer_thresholds: LayerThresholds = EVERY
) -> Thresholds:
    return Thresholds(Calibrated.of(gguf), (layer_thresholds,) * config_from_gguf(gguf).n_layer, mode)


def with_kept(gguf: GGUFFile, kept: Any, layer_thresholds: LayerThresholds = EVERY) -> Thresholds:
    return replace(thresholds_of(gguf, layer_thresholds=layer_thresholds), measured={"kept": kept})


IDS = tokens(12)
THRESHOLDED = np.arange(12) % 4 > 0
MARGIN = 1e-5  # of a threshold: rounding a sum may put a nearer value on either side


def clearly(
    folder: Path,
    layer_thresholds: LayerThresholds,
    architecture: str,
    type_: T = T.F32,
    thresholded: np.ndarray = THRESHOLDED,
    **options: Any,
) -> tuple[GGUFFile, np.ndarray]:
    """Return a model and its logits such that no value of IDS is too near to its threshold.

    A sum's rounding could otherwise decide. The seed is searched for, because it depends on the machine's
    matrix products.
    """
    for seed in range(1, 60):
        (own := folder / str(seed)).mkdir()
        gguf = write(own, architecture, type_, seed=seed, **options)
        weights, graph = graph_of(gguf, layer_thresholds)
        found = [op for op in graph.primitives if isinstance(op, Threshold)]
        backend = ReferenceBackend(weights, graph, n_blocks=8, kv_type="f32")
        step = replace(batch([(IDS, 0, [0])], tuple(op.x.name for op in found)), thresholded=thresholded)
        taken = backend.step(step)
        near = [np.abs(np.abs(taken.taps[op.x.name]) / op.threshold - 1).min() for op in found]
        if min(near, default=1.0) > MARGIN:
            return gguf, run(ReferenceBackend(weights, graph, n_blocks=8, kv_type="f32"), IDS, thresholded)
    raise AssertionError("every seed has a value at its threshold")
