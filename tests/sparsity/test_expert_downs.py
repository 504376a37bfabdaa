"""Input-major copies of experts' down projections, of which a token reads only the neurons that fire."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
from backend_runs import assert_every_operation_is_right, cpu_backend, tokens

import hotset
from hotset.backends.cpu.backend import CpuBackend
from hotset.convert.hf import convert_hf
from hotset.formats.gguf import open_gguf
from hotset.formats.quants import GGMLType
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe
from hotset.model.operations import ExpertSum, Ffn, Linear
from hotset.sparsity.modes import choose
from hotset.sparsity.preparing import prepare

SETTINGS: dict[str, dict[str, Any]] = {
    "nemotron-h-moe": {"moe_intermediate_size": 64},
    "nemotron-h-moe-latent": {
        "moe_intermediate_size": 160,
        "layers_block_type": ["full_attention", "moe", "linear_attention", "moe"],
    },
    "smallthinker": {"moe_ffn_hidden_size": 256, "hidden_size": 256},
}
TYPES = {
    "smallthinker": GGMLType.Q4_K,
    "nemotron-h-moe": GGMLType.Q4_0,
    "nemotron-h-moe-latent": GGMLType.Q8_0,
}
IDS = tokens(60)


@pytest.fixture(params=SETTINGS)
def model_path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    recipe, folder = tiny_models.EXPERTS[request.param], tmp_path / "checkpoint"
    tiny_models.save(recipe, tiny_models.build(recipe, **SETTINGS[request.param]), folder)
    convert_hf(folder, tmp_path / "model.gguf", TYPES[request.param])
    return tmp_path / "model.gguf"


def test_bits_equal_the_plain_file(model_path: Path) -> None:
    """Check single tokens and a batch, with every set of kernels, with and without copies."""
    with open_gguf(model_path) as gguf:
        config = config_from_gguf(gguf)
        ready = prepare(gguf, config, choose(config, gguf.tensors))
        plain, copied = describe(config, gguf.tensors), describe(config, ready.weights.tensors)
        downs = [ffn.down for ffn in copied.ffns if ffn.route is not None]
        assert downs
        assert all(isinstance(down, ExpertSum) and down.input_major for down in downs)
        shared = [op.down for op in copied.ops if isinstance(op, Ffn) and op.shared]
        assert all(isinstance(down, Linear) and down.input_major for down in shared)
        found = []
        for weights, graph, way in (
            (gguf, plain, {"n_threads": 1}),
            (ready.weights, copied, {"n_threads": 1}),
            (ready.weights, copied, {"n_threads": 2}),
            (ready.weights, copied, {"n_threads": 1, "isa": "scalar"}),
            (ready.weights, copied, {"n_threads": 2, "sparse": False}),
        ):
            backend = cpu_backend(weights, graph, n_blocks=2, n_states=4, max_batch=80, **way)
            found.append(decoded(backend))
            backend.close()
        for other in found[1:]:
            np.testing.assert_array_equal(other, found[0])
        ready.weights.close()


def decoded(backend: CpuBackend) -> np.ndarray:
    """Return the logits of a prompt and of the tokens after it, one by one."""
    from hotset.backends.base import Batch

    rows, steps = [], [IDS[:40], *IDS[40:, None]]
    at = 0
    for n_step, ids in enumerate(steps):
        n = len(ids)
        every = np.arange(n, dtype=np.int32)
        batch = Batch(
            ids.astype(np.int32), at + every, np.zeros(n, np.int32), np.array([[1, 0]], np.int32), every
        )
        rows.append(backend.step(batch.with_states_of_rows(n_step)).logits.copy())
        at += n
    return np.concatenate(rows)


@pytest.mark.parametrize("model_path", ["smallthinker"], indirect=True)
def test_every_operation_is_the_references(model_path: Path) -> None:
    with open_gguf(model_path) as gguf:
        config = config_from_gguf(gguf)
        ready = prepare(gguf, config, choose(config, gguf.tensors))
        graph = describe(config, ready.weights.tensors)
        backend = cpu_backend(ready.weights, graph, n_blocks=2, max_batch=80, n_threads=2, kv_type="f32")
        assert_every_operation_is_right(ready.weights, graph, backend, IDS, [50, 51], [1, 0])
        backend.close()
        ready.weights.close()


def test_neurons_at_zero_are_left_out(model_path: Path) -> None:
    with hotset.load(model_path, device="cpu", n_ctx=128) as model:
        found = []
        for ids in (IDS[:1], IDS[:40]):
            model.logits(ids.tolist())
            stats = model.backend.stats()
            assert stats is not None
            found.append(stats)
        one, many = found
        layers = [ffn.layer for ffn in model.graph.ffns if ffn.route is not None]
        active, down = one.active[layers], one.down_rows[layers]
        assert 0 < down.sum() <= active.sum() < one.selected[layers].sum()  # int8 rounds more of them to zero
        assert (many.down_rows[layers] >= many.active[layers] / 40).all()  # whole matrices


@pytest.mark.parametrize("how", [{"computes": "device"}, {"computes": "budget"}, {}])
def test_devices_budgets_and_dense_need_none(model_path: Path, how: dict[str, Any]) -> None:
    with open_gguf(model_path) as gguf:
        config = config_from_gguf(gguf)
        ready = prepare(gguf, config, choose(config, gguf.tensors, None if how else "dense"), **how)
        assert not [name for name in ready.weights.tensors if "_c.blocks" in name]
        ready.weights.close()
