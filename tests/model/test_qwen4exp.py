"""Qwen4-Exp, in addition to the tests of every architecture.

Texts that end inside a sequence, refused keys and checkpoints, and tables of n-grams under a memory budget.
"""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_gguf import with_other_keys
from transformers_oracle import BACKENDS, PLANS, TOLERANCE, open_backend, relative_error, run, tiny_models

import hotset
from hotset.backends.torch.graph import TorchGraph
from hotset.convert.hf import convert_hf
from hotset.errors import FormatError, HotsetError, UnsupportedModelError
from hotset.formats.gguf import GGUFFile, ValueType, open_gguf
from hotset.formats.quants import GGMLType
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe
from hotset.model.operations import NgramEmbed
from hotset.offload.weight_store import Use, sizes_of

torch = pytest.importorskip("torch")

NAMES = {"qwen4exp": 301, "qwen4exp-pairs": 7, "qwen4exp-sees": 301}  # with the token that ends a text
RECIPES = tiny_models.EXPERTS


def texts(eos: int) -> list[np.ndarray]:
    """Return few different tokens, so that n-grams recur, and many ends: some in a row, one ends a block."""
    rng = np.random.default_rng(1)
    found = [rng.choice([eos, 1, 2, 3, 4], n) for n in (150, 90, 37)]
    found[0][[0, 62, 63, 64]] = eos
    return found


@pytest.mark.parametrize("name", NAMES)
def test_ngrams_restart_after_the_end_of_a_text(name: str, run_folder: Path) -> None:
    sequences, model = texts(NAMES[name]), tiny_models.build(RECIPES[name])
    with torch.no_grad():
        expected = [model(torch.tensor(s)[None]).logits[0].numpy() for s in sequences]
    with open_gguf(tiny_models.shared_gguf(name, run_folder)) as gguf:
        for backend_name in BACKENDS:
            with closing(open_backend(backend_name, gguf)) as backend:
                for plan in ("mixed", "decode"):
                    found = run(backend, sequences, PLANS[plan])
                    for ours, theirs in zip(found, expected, strict=True):
                        assert relative_error(ours, theirs) < TOLERANCE
        graph = describe(config_from_gguf(gguf), gguf.tensors)
        ids = np.stack([sequences[0][:80], sequences[1][:80]])
        ours = TorchGraph(gguf, graph).logits(torch.tensor(ids)).detach().numpy()
        assert relative_error(ours, np.concatenate([expected[0][:80], expected[1][:80]])) < TOLERANCE


def test_rows_equal_transformers(run_folder: Path) -> None:
    """Check also n-grams with more tokens than a text."""
    model = tiny_models.build(RECIPES["qwen4exp"])
    theirs, sequence = model.model.layers[1].ple.ple_embedding, texts(301)[0]
    with torch.no_grad():
        expected = theirs(torch.tensor(sequence)[None], None)[0].numpy()
    with open_gguf(tiny_models.shared_gguf("qwen4exp", run_folder)) as gguf:
        graph = describe(config_from_gguf(gguf), gguf.tensors)
        (op,) = (op for op in graph.ops if isinstance(op, NgramEmbed))
        assert op.bytes_of(op.weights_read[0], gguf.tensors[op.weight]) == 4 * op.out.width
    with hotset.load(gguf.path, device="cpu", n_threads=2, n_ctx=256) as model:
        found = model.taps(sequence.tolist(), [op.out.name])[op.out.name]
    np.testing.assert_array_equal(found, expected)


def test_a_memory_budget_leaves_the_table_of_ngrams_in_the_file(run_folder: Path) -> None:
    """Check the largest tensor, of which a token reads only a few rows."""
    path = tiny_models.shared_gguf("qwen4exp", run_folder, ngram_vocab_size_base=200_000)
    ids = texts(301)[0].tolist()
    with open_gguf(path) as gguf:
        graph = describe(config_from_gguf(gguf), gguf.tensors)
        table = gguf.tensors["per_layer_token_embd.weight"].nbytes
        assert sizes_of(graph, gguf.tensors, Use(sparse=False)).all < 0.1 * table
    found = {}
    for budget in (None, 2.0):
        with hotset.load(path, device="cpu", n_threads=2, n_ctx=256, ram_budget=budget) as model:
            found[budget] = model.logits(ids)
    np.testing.assert_array_equal(found[None], found[2.0])


def changed(path: Path, out: Path, keys: dict[str, Any]) -> GGUFFile:
    """Return the file with other keys, integers of 64 bits in arrays; None removes a key."""
    return with_other_keys(path, out, keys, ValueType.UINT64)


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        ({"hyper_connection.count": 1}, FormatError, "count is 1, outside 2 to 16"),
        ({"hyper_connection.count": 5}, UnsupportedModelError, "hc_attn_norm"),
        ({"hyper_connection.low_rank": None}, FormatError, "low_rank is missing"),
        ({"attention.indexer.top_k": None}, FormatError, "top_k is missing"),
        ({"ple.layers": [0, 1]}, UnsupportedModelError, "2 layers add embeddings of n-grams"),
        ({"ple.layers": [4]}, FormatError, "ple.layers is 4, outside 0 to 3"),
        ({"ple.layers": 1}, FormatError, "must be an array of integers"),
        ({"ple.ngram_size": 1}, FormatError, "outside 2 to 16"),
        ({"ple.ngram_size": 4}, FormatError, "layer_multipliers has 3 entries, but should have 4"),
        ({"ple.heads_per_ngram": 3}, FormatError, "head_vocab_sizes has 4 entries, but should have 6"),
        ({"ple.layer_multipliers": [1, 2, 1 << 60]}, FormatError, "layer_multipliers is 1152921504606846976"),
        ({"ple.head_vocab_sizes": [53, 0, 61, 67]}, FormatError, "head_vocab_sizes is 0"),
        ({"ple.head_offsets": [0, 53, 112, 1000]}, UnsupportedModelError, "per_layer_token_embd"),
        ({"ple.head_offsets": [0, 53, 112, 1 << 40]}, FormatError, "head_offsets is 1099511627776"),
        ({"ple.eos_token_id": 320}, FormatError, "eos_token_id is 320"),
        ({"ple.conv_kernel": 65}, FormatError, "conv_kernel is 65"),
        ({"ple.conv_kernel": 3}, UnsupportedModelError, "ple_conv1d"),
        ({"ple.layers": None}, UnsupportedModelError, "tensors that no qwen4exp model uses"),
    ],
)
def test_keys_that_are_refused(
    run_folder: Path, tmp_path: Path, keys: dict[str, Any], error: type[HotsetError], message: str
) -> None:
    path = tiny_models.shared_gguf("qwen4exp", run_folder)
    with changed(path, tmp_path / "m.gguf", keys) as gguf, pytest.raises(error, match=message):
        describe(config_from_gguf(gguf), gguf.tensors)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"output_gate_type": None}, "output_gate_type set to 'None'"),
        ({"output_gate_type": "silu"}, "output_gate_type set to 'silu'"),
        ({"norm_topk_prob": False}, "norm_topk_prob set to"),
        ({"indexer_kv_heads": 2}, "indexer_kv_heads set to '2'"),
        ({"ple_layer_ids": [1, 2]}, "ple_layer_ids in config.json must name one layer"),
        ({"ple_layer_ids": [9]}, "ple_layer_ids in config.json must be an integer from 1 to 4"),
        ({"ple_embed_dim": 50}, "ple_embed_dim in config.json is 50, not a multiple of 4 heads"),
        ({"split_ngram_parts": 4}, "per_layer_token_embd.weight of 3 parts, not of 4"),
        (
            {"ple_layer_ids": [3]},
            "whole numbers in the tensor ple.ple_embedding.layer_multipliers of layer 2",
        ),
        ({"indexer_n_heads": 3}, "48 rows of the indexer, not 64"),
        ({"indexer_head_dim": 24}, r"k_layernorm.weight of the checkpoint is \[16\]"),
        ({"hc_count": 1}, "hc_count in config.json must be an integer from 2"),
    ],
)
def test_checkpoints_that_are_refused(
    checkpoint: Path, tmp_path: Path, entries: dict[str, Any], message: str
) -> None:
    config = json.loads((checkpoint / "config.json").read_text()) | entries
    folder = tmp_path / "changed"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").symlink_to(checkpoint / "model.safetensors")
    with pytest.raises(HotsetError, match=message):
        convert_hf(folder, tmp_path / "m.gguf", GGMLType.F32)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen4exp")
    tiny_models.save(RECIPES["qwen4exp"], tiny_models.build(RECIPES["qwen4exp"]), folder)
    return folder


def test_constants_of_hashes_are_as_they_were(checkpoint: Path, tmp_path: Path) -> None:
    """Check integers that no float can hold, from tensors to keys of llama.cpp's types."""
    from safetensors.torch import load_file

    path = tmp_path / "m.gguf"
    convert_hf(checkpoint, path, "q8_0")
    tensors = load_file(checkpoint / "model.safetensors")
    stem = "model.layers.1.ple.ple_embedding"
    with open_gguf(path) as gguf:
        for key, name in (
            ("layer_multipliers", "layer_multipliers"),
            ("head_offsets", "ngram_heads_offsets"),
            ("head_vocab_sizes", "ngram_heads_vocab_sizes"),
        ):
            found = gguf.metadata[f"qwen4exp.ple.{key}"]
            assert gguf.metadata_types[f"qwen4exp.ple.{key}"][-1] == ValueType.UINT64
            np.testing.assert_array_equal(found, tensors[f"{stem}.{name}"].numpy())
        assert max(gguf.metadata["qwen4exp.ple.layer_multipliers"]) > 1 << 53
        table = [tensors[f"{stem}.ngram_embedding.shard_{i}.weight"].numpy() for i in range(3)]
        info = gguf.tensors["per_layer_token_embd.weight"]
        assert info.shape == (12, sum(map(len, table)))
        assert gguf.tensors["blk.1.ple_conv1d.weight"].type == GGMLType.F32
        assert gguf.tensors["blk.1.ple_key.weight"].type == GGMLType.F16  # blocks do not divide rows of 48
        assert gguf.tensors["blk.0.hc_attn_down.weight"].type == GGMLType.Q8_0
        np.testing.assert_array_equal(gguf.metadata["qwen4exp.attention.compress_ratios"], [0, 0, 4, 0])


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        *(
            ("1.ple.ple_embedding.layer_multipliers", v, "layer_multipliers")
            for v in ([[1, 2, 3]], [-1, 2, 3], [1])
        ),
        (
            "2.self_attn.indexer.index_qk_proj.weight",
            1.0,
            r"indexer.index_qk_proj.weight of the checkpoint is \[\], which its config.json excludes",
        ),
    ],
)
def test_checkpoints_with_other_tensors_are_refused(
    checkpoint: Path, tmp_path: Path, name: str, values: Any, message: str
) -> None:
    from safetensors.torch import load_file, save_file

    tensors, folder = load_file(checkpoint / "model.safetensors"), tmp_path / "changed"
    assert f"model.layers.{name}" in tensors
    tensors[f"model.layers.{name}"] = torch.tensor(values)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text((checkpoint / "config.json").read_text())
    with pytest.raises(FormatError, match=message):
        convert_hf(folder, tmp_path / "m.gguf", GGMLType.F32)


def test_parts_of_the_table_may_differ_in_length(checkpoint: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(checkpoint / "model.safetensors")
    stem = "model.layers.1.ple.ple_embedding.ngram_embedding.shard_"
    whole = torch.cat([tensors[f"{stem}{i}.weight"] for i in range(3)])
    for i, part in enumerate(torch.split(whole, [10, 200, len(whole) - 210])):
        tensors[f"{stem}{i}.weight"] = part.clone()
    folder = tmp_path / "parts"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text((checkpoint / "config.json").read_text())
    convert_hf(folder, tmp_path / "m.gguf", GGMLType.F32)
    with open_gguf(tmp_path / "m.gguf") as gguf:
        name = "per_layer_token_embd.weight"
        found = np.array(gguf.data(name)).view(np.float32).reshape(gguf.tensors[name].shape[::-1])
        np.testing.assert_array_equal(found, whole.numpy())
