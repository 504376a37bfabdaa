"""BitNet's FFN, whose neurons pass a norm before down: its skipped rows, and its files."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend_runs import assert_close, batch, logits_of, tokens
from sparse_runs import ONE_BY_ONE, assert_every_value_is_right, cpu, prepared

from hotset.backends.cpu.worker import split_ffns
from hotset.backends.reference import ReferenceBackend
from hotset.convert.hf import convert_hf
from hotset.convert.reorder import reorder
from hotset.errors import UnsupportedModelError
from hotset.formats.gguf import GGUFFile, GGUFWriter, copy_metadata, open_gguf
from hotset.formats.quants import GGMLType, dequantize
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe
from hotset.sparsity.profile import Profile
from hotset.sparsity.sidecar import fingerprint

torch = pytest.importorskip("torch")
tiny_models = pytest.importorskip("tiny_models")
# Matrices become ternary on loading.
ONLINE = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}


@pytest.fixture
def bitnet(run_folder: Path, tmp_path: Path) -> GGUFFile:
    return open_gguf(shutil.copy(tiny_models.shared_gguf("bitnet", run_folder), tmp_path / "model.gguf"))


def written(gguf: GGUFFile, path: Path, *without: str, **more: Any) -> GGUFFile:
    """Return the file without some keys, and with more tensors of one number. Dots in names: __."""
    writer = GGUFWriter(path, gguf.architecture)
    copy_metadata(gguf, writer, without)
    for info in gguf.tensors.values():
        writer.add_tensor(info.name, gguf.data(info.name), info.type, info.shape)
    for name, value in more.items():
        writer.add_tensor(name.replace("__", "."), np.float32([value]), GGMLType.F32)
    writer.write()
    return open_gguf(path)


def decoded(gguf: GGUFFile, name: str) -> np.ndarray:
    info = gguf.tensors[name]
    return dequantize(gguf.data(name), info.type, info.shape)


def test_exact_is_dense_and_leaves_out_rows(bitnet: GGUFFile) -> None:
    ids = tokens(40)
    expected = logits_of(cpu(bitnet, "dense", n_threads=1, isa="scalar"), ids, [], [2, 0])
    exact = cpu(bitnet, "exact")
    for splits in ([], ONE_BY_ONE, [3, 8, 25, 39]):
        np.testing.assert_array_equal(logits_of(exact, ids, splits, [2, 0]), expected)
    ready, graph = prepared(bitnet, "exact")
    theirs = ReferenceBackend(ready.weights, graph, n_blocks=2, sparse=True)
    for backend in (exact, theirs):
        backend.step(batch([(ids[:1], 0, [1])]))
    counted, wanted = exact.stats(), theirs.stats()
    assert counted is not None
    assert wanted is not None
    for name in ("active", "up_rows", "down_rows"):
        np.testing.assert_array_equal(getattr(counted, name), getattr(wanted, name))
        assert 0 < getattr(counted, name)[0] < 0.7 * graph.ffns[0].n_ff


def test_every_operation_is_the_references(bitnet: GGUFFile) -> None:
    assert_every_value_is_right(bitnet, "exact")


@pytest.mark.backend("triton")
@pytest.mark.parametrize("sparse", [True, False])
def test_a_device_computes_it(bitnet: GGUFFile, sparse: bool) -> None:
    from gpu_runs import gpu

    ready, graph = prepared(bitnet, "exact")
    ids = tokens(40)
    expected = logits_of(ReferenceBackend(ready.weights, graph, n_blocks=1), ids, [], [0])
    assert_close(logits_of(gpu(ready.weights, graph, sparse=sparse), ids, [7, 8, 9, 30], [0]), expected)
    assert not split_ffns(graph)  # the norm reads all neurons


def test_the_activation_of_a_file_that_names_none(bitnet: GGUFFile, tmp_path: Path) -> None:
    """Check that 30 layers mean 2B-4T and others earlier models, because llama.cpp's files lack names."""
    key = "bitnet.hidden_activation"
    assert config_from_gguf(bitnet).activation.gate == "relu2"
    config = config_from_gguf(written(bitnet, tmp_path / "3.gguf", key))
    assert config.activation.gate == "silu"
    bitnet.metadata.pop(key)
    bitnet.metadata["bitnet.block_count"] = 30
    assert config_from_gguf(bitnet).activation.gate == "relu2"


@pytest.mark.parametrize("name", ["bitnet-25", "bitnet-b1.58"])
def test_files_of_bitnet_cpp(bitnet: GGUFFile, tmp_path: Path, name: str) -> None:
    """Check other names of the model, which imply its activation, and the refusal of bitnet.cpp's type."""
    writer = GGUFWriter(tmp_path / "other.gguf", name)
    for key, value in bitnet.metadata.items():
        if key.startswith("bitnet.") and key != "bitnet.hidden_activation":
            writer.add(f"{name}.{key.removeprefix('bitnet.')}", value)
    for info in bitnet.tensors.values():
        writer.add_tensor(info.name, bitnet.data(info.name), info.type, info.shape)
    writer.write()
    with open_gguf(tmp_path / "other.gguf") as other:
        expected = logits_of(cpu(bitnet, "exact"), tokens(20), [], [0])
        np.testing.assert_array_equal(logits_of(cpu(other, "exact"), tokens(20), [], [0]), expected)
        tensors = dict(other.tensors)
        matrix = "blk.0.ffn_up.weight"
        tensors[matrix] = replace(tensors[matrix], type=GGMLType(36))
        with pytest.raises(
            UnsupportedModelError, match=f"{matrix} has the type I2_S, which only bitnet.cpp uses"
        ):
            describe(config_from_gguf(other), tensors)


def test_scales_of_matrices_are_refused(bitnet: GGUFFile, tmp_path: Path) -> None:
    scaled = written(bitnet, tmp_path / "scaled.gguf", blk__0__attn_q__scale=0.5)
    with pytest.raises(UnsupportedModelError, match=r"such as blk\.0\.attn_q\.scale"):
        describe(config_from_gguf(scaled), scaled.tensors)


def test_neurons_in_another_order_are_the_same_model(bitnet: GGUFFile, tmp_path: Path) -> None:
    counts = tuple(np.random.default_rng(i).permutation(160).astype(np.uint64) for i in range(3))
    profile = Profile(counts, 200, fingerprint(bitnet), ())
    moved = tmp_path / "moved.gguf"
    reorder(bitnet.path, moved, profile)
    with open_gguf(moved) as other:
        ids = tokens(20)
        expected = logits_of(cpu(bitnet, "dense"), ids, [], [0])
        assert_close(logits_of(cpu(other, "dense"), ids, [], [0]), expected)
        norms = [decoded(file, "blk.0.ffn_sub_norm.weight") for file in (other, bitnet)]
        assert not np.array_equal(*norms)
        np.testing.assert_array_equal(*map(np.sort, norms))


@pytest.mark.parametrize("type_", ["f32", "tq2_0"])
def test_a_checkpoint_that_becomes_ternary_when_it_is_loaded(tmp_path: Path, type_: str) -> None:
    recipe = tiny_models.RECIPES["bitnet"]
    model = tiny_models.build(recipe, hidden_size=256, intermediate_size=512, num_attention_heads=4)
    tiny_models.save(recipe, model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": ONLINE}
    (tmp_path / "config.json").write_text(json.dumps(config))
    convert_hf(tmp_path, tmp_path / "model.gguf", type_)
    with open_gguf(tmp_path / "model.gguf") as gguf:
        for name, matrix in (("ffn_down", "mlp.down_proj"), ("attn_q", "self_attn.q_proj")):
            values = model.get_submodule(f"model.layers.1.{matrix}").weight.detach()
            scale = 1.0 / values.abs().mean()
            expected = ((values * scale).round().clamp(-1, 1) / scale).numpy()
            found = decoded(gguf, f"blk.1.{name}.weight")
            np.testing.assert_allclose(found, expected, rtol=1e-3)
            assert len(np.unique(found)) == 3
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"quantization_config": ONLINE | {"quantization_mode": "offline"}})
    )
    with pytest.raises(UnsupportedModelError, match="is quantised"):
        convert_hf(tmp_path, tmp_path / "model.gguf")
