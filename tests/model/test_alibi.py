"""Scores that decrease with the distance between tokens (ALiBi), without rotations or learned positions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from backend_runs import assert_every_operation_is_right, logits_of, tokens
from sparse_runs import ONE_BY_ONE, cpu, prepared
from torch_graphs import same_as_reference

from hotset import _core
from hotset.convert.hf_config import HFConfig
from hotset.errors import FormatError, UnsupportedModelError
from hotset.formats.gguf import GGUFFile, open_gguf
from hotset.model.config import config_from_gguf

torch = pytest.importorskip("torch")
tiny_models = pytest.importorskip("tiny_models")


@pytest.fixture(params=["bloom", "mpt-heads", "baichuan-alibi"])
def alibi(request: pytest.FixtureRequest, run_folder: Path) -> GGUFFile:
    return open_gguf(tiny_models.shared_gguf(request.param, run_folder))


def test_every_operation_is_the_references(alibi: GGUFFile) -> None:
    ready, graph = prepared(alibi, "dense")
    backend = cpu(alibi, "dense", kv_type="f32")
    assert_every_operation_is_right(ready.weights, graph, backend, tokens(150), [7, 8, 9, 90], [2, 0, 1])


def test_the_same_bits_in_any_steps_and_on_any_instruction_set(alibi: GGUFFile) -> None:
    ids, blocks = tokens(128), [2, 0]
    expected = logits_of(cpu(alibi, "dense", n_threads=1, isa="scalar"), ids, [], blocks)
    for isa in _core.available_isas():
        for splits in ([], ONE_BY_ONE, [3, 8, 70, 119]):
            found = logits_of(cpu(alibi, "dense", isa=isa), ids, splits, blocks)
            np.testing.assert_array_equal(found, expected)


def test_torch_computes_it(alibi: GGUFFile) -> None:
    same_as_reference(alibi)


@pytest.mark.backend("triton")
def test_a_device_refuses_it(alibi: GGUFFile) -> None:
    from gpu_runs import gpu

    ready, graph = prepared(alibi, "dense")
    with pytest.raises(UnsupportedModelError, match="ALiBi is computed on the CPU; use device='cpu'"):
        gpu(ready.weights, graph)


def test_slopes(run_folder: Path) -> None:
    """Check the slopes: for three heads the two for two heads, then the first for four.

    Files of bloom need no key, files of mpt do.
    """
    mpt = open_gguf(tiny_models.shared_gguf("mpt-heads", run_folder))
    assert config_from_gguf(mpt).slopes == (2**-4, 2**-8, 2**-2)
    mpt.metadata["mpt.attention.max_alibi_bias"] = 4.0
    assert config_from_gguf(mpt).slopes == (2**-2, 2**-4, 2**-1)
    for value in (None, 0.0):
        mpt.metadata["mpt.attention.max_alibi_bias"] = value
        with pytest.raises(FormatError, match=r"max_alibi_bias is missing"):
            config_from_gguf(mpt)
    bloom = open_gguf(tiny_models.shared_gguf("bloom", run_folder))
    assert "bloom.attention.max_alibi_bias" not in bloom.metadata
    assert config_from_gguf(bloom).slopes == (2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3)


def test_the_entries_of_mpts_attention_count() -> None:
    sizes = {
        "architectures": ["MptForCausalLM"], "d_model": 96, "n_heads": 3, "n_layers": 2, "vocab_size": 320,
    }  # fmt: skip
    config = HFConfig({**sizes, "attn_config": {"alibi_bias_max": 5}})
    assert config.keys("mpt", 128)["mpt.attention.max_alibi_bias"] == 5.0
    for entry, value in (("clip_qkv", 8.0), ("qk_ln", True), ("alibi", False)):
        with pytest.raises(UnsupportedModelError, match=entry):
            HFConfig({**sizes, "attn_config": {entry: value}})


def test_which_models_of_baichuan_have_a_rotation(run_folder: Path) -> None:
    """Check 13B, which has 40 layers and no key in llama.cpp's files or config.json for its context."""
    rotated = open_gguf(tiny_models.shared_gguf("baichuan", run_folder))
    assert config_from_gguf(rotated).slopes is None
    assert all(layer.rope is not None for layer in config_from_gguf(rotated).layers)
    rotated.metadata["baichuan.block_count"] = 40
    config = config_from_gguf(rotated)
    assert config.slopes == (2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3)
    assert all(layer.rope is None for layer in config.layers)
    alibi = open_gguf(tiny_models.shared_gguf("baichuan-alibi", run_folder))
    assert alibi.metadata["baichuan.attention.max_alibi_bias"] == 8.0


def test_files_of_refact_have_the_epsilon_of_rms_norms(run_folder: Path) -> None:
    """Check a file from llama.cpp, which writes no other key."""
    refact = open_gguf(tiny_models.shared_gguf("refact", run_folder))
    assert config_from_gguf(refact).norm_eps == pytest.approx(1e-2)
    del refact.metadata["refact.attention.layer_norm_epsilon"]
    assert config_from_gguf(refact).norm_eps == pytest.approx(1e-2)
    del refact.metadata["refact.attention.layer_norm_rms_epsilon"]
    with pytest.raises(FormatError, match="layer_norm_epsilon is missing"):
        config_from_gguf(refact)


def test_rows_of_baichuan_2s_output_have_length_1(tmp_path: Path) -> None:
    """Check that the rows are normalised; the size of the vocabulary identifies the model."""
    recipe = tiny_models.RECIPES["baichuan"]
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    for n_vocab in (125696, 320):
        folder = tmp_path / str(n_vocab)
        model = tiny_models.build(recipe, vocab_size=n_vocab, **sizes, num_key_value_heads=2)
        with open_gguf(tiny_models.to_gguf(recipe, model, folder)) as file:
            found = file.data("output.weight").view(np.float32).reshape(n_vocab, 32)
        weight = model.lm_head.weight.detach()
        expected = torch.nn.functional.normalize(weight) if n_vocab == 125696 else weight
        np.testing.assert_allclose(found, expected.numpy(), rtol=1e-6)
