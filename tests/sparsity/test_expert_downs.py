"""Copies of experts' down projections with a row per neuron, of which those of zeros are left out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tiny_models
from backend_runs import assert_every_operation_is_right, tokens
from stored_weights import least_of
from transformers_oracle import relative_error

import hotset
from hotset.backends.cpu.backend import CpuBackend
from hotset.convert.hf import convert_hf
from hotset.formats import planes
from hotset.formats.gguf import open_gguf
from hotset.formats.quants import GGMLType, dequantize
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe
from hotset.model.operations import ExpertSum, Ffn
from hotset.placement import ram
from hotset.sparsity.modes import choose, prepare

SETTINGS = {
    "nemotron-h-moe": {"moe_intermediate_size": 64},
    "nemotron-h-moe-latent": {"moe_intermediate_size": 160, "intermediate_size": 96},
    "smallthinker": {"moe_ffn_hidden_size": 64},
}
TYPES = (GGMLType.F32, GGMLType.F16, GGMLType.Q8_0, GGMLType.Q4_0)
IDS = tokens(60)


@pytest.fixture(params=SETTINGS)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    recipe, folder = tiny_models.EXPERTS[request.param], tmp_path / "checkpoint"
    tiny_models.save(recipe, tiny_models.build(recipe, **SETTINGS[request.param]), folder)
    return folder


@pytest.fixture(params=TYPES, ids=lambda type: type.name)
def model_path(request: pytest.FixtureRequest, checkpoint: Path, tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "model.gguf"
    convert_hf(checkpoint, path, request.param)
    return path


def test_copies_have_the_values_of_the_file(model_path: Path) -> None:
    with open_gguf(model_path) as gguf:
        config = config_from_gguf(gguf)
        ready = prepare(gguf, config, choose(config, gguf.tensors))
        found = [name for name in ready.weights.tensors if "ffn_down_exps_t." in name]
        assert found
        for name in found:
            plain = gguf.tensors[name.rpartition("_t.")[0] + ".weight"]
            n_ff, n_embd, n_expert = plain.shape
            expected = dequantize(gguf.data(plain.name), plain.type, plain.shape).reshape(plain.shape[::-1])
            data = ready.weights.data(name).reshape(n_expert, -1)
            for expert in range(n_expert):
                if name.endswith(".planes"):
                    values = planes.decode(*planes.split_planes(data[expert], n_ff, n_embd))
                else:
                    values = dequantize(data[expert], plain.type, (n_embd, n_ff)).reshape(n_ff, n_embd)
                np.testing.assert_array_equal(values, expected[expert].T)
        ready.weights.close()


@pytest.mark.parametrize("checkpoint", ["smallthinker"], indirect=True)
def test_every_operation_is_the_references(model_path: Path) -> None:
    with open_gguf(model_path) as gguf:
        config = config_from_gguf(gguf)
        ready = prepare(gguf, config, choose(config, gguf.tensors))
        graph = describe(config, ready.weights.tensors)
        downs = [ffn.down for ffn in graph.ffns if ffn.route is not None]
        assert downs
        assert all(isinstance(down, ExpertSum) and down.neuron_major for down in downs)
        backend = CpuBackend(ready.weights, graph, n_pages=2, max_batch=80, n_threads=2, kv_type="f32")
        assert_every_operation_is_right(ready.weights, graph, backend, IDS, [50, 51], [1, 0])
        backend.close()
        ready.weights.close()


def test_bits_do_not_depend_on_mode_threads_or_budget(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ram, "own_memory", lambda: 0)  # what the program takes is no part of the budget
    monkeypatch.setattr(ram, "_PROGRAM", 0)
    common = {"backend": "cpu", "n_ctx": 128}
    least = least_of(model_path, **common, sparsity="exact") / 2**30
    ways = (
        {"sparsity": "exact"},
        {"sparsity": "dense"},
        {"sparsity": "exact", "n_threads": 1},
        {"sparsity": "exact", "ram_budget": least},
        {"sparsity": "dense", "ram_budget": 1.2 * least},
    )
    found = []
    for way in ways:
        with hotset.load(model_path, **common, **way) as model:
            found.append(model.logits(IDS.tolist()))
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


def test_rows_of_zeros_are_left_out(model_path: Path) -> None:
    with hotset.load(model_path, backend="cpu", n_ctx=128) as model:
        logits = model.logits(IDS[:1].tolist())
        stats = model.backend.stats()
        assert stats is not None
        layers = [ffn.layer for ffn in model.graph.ffns if ffn.route is not None]
        active = stats.active[layers]
        assert 0 < active.sum() < stats.selected[layers].sum()
        np.testing.assert_array_equal(stats.down_rows[layers], active)  # not those of shared experts
        shared = [ffn for ffn in model.graph.ops if isinstance(ffn, Ffn) and ffn.shared]
        assert all(ffn.neuron_major for ffn in shared)
        is_float = model.weights.tensors[model.graph.ffns[layers[0]].up_tensor].type in TYPES[:2]
    with hotset.load(model_path, backend="reference", n_ctx=128) as model:
        assert relative_error(logits, model.logits(IDS[:1].tolist())) < (1e-2 if is_float else 0.1)


def test_devices_take_the_file_as_it_is(model_path: Path) -> None:
    with open_gguf(model_path) as gguf:
        config = config_from_gguf(gguf)
        ready = prepare(gguf, config, choose(config, gguf.tensors), on_cpu=False)
        assert not [name for name in ready.weights.tensors if "ffn_down_exps_t" in name]
        ready.weights.close()
