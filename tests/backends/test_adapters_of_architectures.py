"""Adapters (LoRA) on every matrix that they can change, in a model of each architecture."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from backend_runs import batch, cpu_backend
from derived_bounds import Oracle
from tiny_adapters import give, random_adapter, scales_of

from hotset.backends.base import Batch
from hotset.formats.gguf import open_gguf
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe

pytest.importorskip("torch")
tiny_models = pytest.importorskip("tiny_models")

# Recurrent layers, several streams, latent attention, experts with a shared expert, xIELU.
QUICK = ("lfm2", "gemma3n", "deepseek2-lite", "mamba", "qwen2moe", "apertus")
N = 20  # tokens of the first sequence; the second has its first 7 and no adapter


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in sorted(tiny_models.first_of_each_architecture())
    ],
)
def test_every_operation_is_right_and_neighbours_are_as_ever(run_folder: Path, name: str) -> None:
    with open_gguf(tiny_models.shared_gguf(name, run_folder)) as gguf:
        graph = describe(config_from_gguf(gguf).for_context(256), gguf.tensors)
        given = {"n_blocks": 8, "n_states": 8, "kv_type": "f32", "max_batch": 64}
        backend = cpu_backend(gguf, graph, n_threads=2, sparse=True, **given)  # type: ignore[arg-type]
        adapter = random_adapter(graph, gguf.tensors, factor=0.1)
        give(backend, [adapter])

        def step(*scales: tuple[tuple[str, float], ...], taps: tuple[str, ...] = ()) -> Batch:
            ids = np.random.default_rng(0).integers(0, min(backend.n_vocab, 300), N).astype(np.int32)
            made = replace(batch([(ids, 0, [0]), (ids[:7], 0, [1])], taps), adapter_scales=scales)
            return made.with_states_of_rows(0) if graph.recurrent else made

        without = backend.step(step((), ())).logits.copy()
        logits = backend.step(step(scales_of(adapter), ())).logits.copy()
        np.testing.assert_array_equal(logits[N:], without[N:])
        assert (logits[:N] != without[:N]).any()
        oracle = Oracle(gguf, backend.adapters.graph, **given)
        oracle.adapters = backend.adapters
        made = {op.out.name for op in oracle.graph.primitives}
        oracle.graph.values = [value for value in oracle.graph.values if value.name in made]
        tapped = step(scales_of(adapter), (), taps=tuple(sorted(made)))
        found = backend.step(tapped)
        np.testing.assert_array_equal(found.logits, logits)
        oracle.check(tapped, found)
        backend.close()
