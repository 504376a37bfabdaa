"""Attention with keys and values from one latent vector: the native engine and both forms of files."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from backend_runs import assert_every_operation_is_right, cpu, logits_of, tokens
from cli_runs import inside

from hotset import _core
from hotset.convert.hf import convert_hf
from hotset.convert.hf_config import HFConfig
from hotset.errors import FormatError, UnsupportedModelError
from hotset.formats.gguf import GGUFFile, GGUFWriter, copy_metadata, open_gguf
from hotset.formats.quants import GGMLType, dequantize
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe
from hotset.model.fusion import fuse
from hotset.model.operations import Rotate, TransposedHeads

tiny_models = pytest.importorskip("tiny_models")

NAMES = ("deepseek2-lite", "deepseek2-groups", "deepseek2-v3", "deepseek2-kimi")


def converted(name: str, folder: Path, type_: str = "f32", **settings: Any) -> GGUFFile:
    recipe = tiny_models.EXPERTS[name]
    tiny_models.save(recipe, tiny_models.build(recipe, **settings), folder)
    convert_hf(folder, folder / "model.gguf", type_)
    return open_gguf(folder / "model.gguf")


def old_form(gguf: GGUFFile, path: Path) -> GGUFFile:
    """Return the model in the first form of files: keys of the heads, one matrix for keys and values."""
    config = config_from_gguf(gguf)
    keys = {
        "attention.head_count_kv": config.n_head,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim_v,
    }
    writer = GGUFWriter(path, "deepseek2")
    for key, value in keys.items():
        writer.add(f"deepseek2.{key}", value)
    copy_metadata(gguf, writer, [f"deepseek2.attention.{key}_length_mla" for key in ("key", "value")])
    for name, info in gguf.tensors.items():
        values = dequantize(gguf.data(name), info.type, info.shape).reshape(info.shape[::-1])
        if name.endswith(".attn_k_b.weight"):
            of_values = name.replace("_k_b", "_v_b")
            shape = gguf.tensors[of_values].shape
            other = dequantize(gguf.data(of_values), gguf.tensors[of_values].type, shape)
            both = np.concatenate([values.swapaxes(1, 2), other.reshape(shape[::-1])], axis=1)
            name, values = name.replace("_k_b", "_kv_b"), both.reshape(-1, both.shape[-1])
        elif name.endswith(".attn_v_b.weight"):
            continue
        writer.add_tensor(name, np.ascontiguousarray(values), GGMLType.F32)
    writer.write()
    return open_gguf(path)


@pytest.mark.parametrize("type_", ["f32", "q8_0", "q4_0"])
@pytest.mark.parametrize("name", NAMES)
def test_every_operation_is_the_references(tmp_path: Path, name: str, type_: str) -> None:
    gguf = converted(name, tmp_path, type_)
    graph, ids = describe(config_from_gguf(gguf), gguf.tensors), tokens(70)
    assert_every_operation_is_right(gguf, graph, cpu(gguf, kv_type="f32"), ids, [40, 41, 44], [3, 1])
    if name == "deepseek2-kimi" and type_ != "f32":
        assert gguf.tensors["blk.0.attn_k_b.weight"].type == GGMLType[type_.upper()]
    # Without taps operations are fused, with the same bits.
    tapped = logits_of(cpu(gguf), ids, [40, 41, 44], [3, 1])
    np.testing.assert_array_equal(tapped, logits_of(cpu(gguf, sparse=True), ids, [], [3, 1]))


@pytest.mark.parametrize("name", ["deepseek2-groups", "deepseek2-kimi"])
def test_the_same_bits_however_a_step_is_cut(tmp_path: Path, name: str) -> None:
    gguf = converted(name, tmp_path, "q8_0")
    ids, blocks = tokens(100), [4, 2]
    expected = logits_of(cpu(gguf, n_threads=1, isa="scalar"), ids, [], blocks)
    for isa in _core.available_isas():
        for n_threads in (1, 3):
            backend = cpu(gguf, isa=isa, n_threads=n_threads)
            for splits in ([], [1, 2, 70], [9, 20, 99], [*range(1, 30)]):
                np.testing.assert_array_equal(logits_of(backend, ids, splits, blocks), expected)


@pytest.mark.parametrize("name", NAMES)
def test_files_with_one_matrix_for_keys_and_values_are_the_same_model(tmp_path: Path, name: str) -> None:
    new = converted(name, tmp_path)
    old = old_form(new, tmp_path / "old.gguf")
    assert "blk.0.attn_kv_b.weight" in old.tensors
    assert old.metadata["deepseek2.attention.head_count_kv"] > 1
    assert config_from_gguf(old) == config_from_gguf(new)
    ids, blocks = tokens(90), [4, 2]
    found, expected = (logits_of(cpu(g, kv_type="f32"), ids, [11, 60], blocks) for g in (old, new))
    np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max())
    graph = describe(config_from_gguf(old), old.tensors)
    assert not any(isinstance(op, TransposedHeads) for op in graph.ops)
    assert_every_operation_is_right(old, graph, cpu(old, kv_type="f32"), ids[:50], [40, 41], [3])


def test_rotation_after_other_channels_is_not_fused(tmp_path: Path) -> None:
    """Check that such a rotation is not fused: native attention rotates the first channels of a head."""
    gguf = converted("deepseek2-lite", tmp_path)
    graph = describe(config_from_gguf(gguf), gguf.tensors)
    alone = [group for group in fuse(graph, ()) if isinstance(group.ops[-1], Rotate)]
    assert len(alone) == 2 * graph.n_layer


def config_of(gguf: GGUFFile, **changes: Any) -> Any:
    """Return the configuration with other keys; None removes a key."""
    metadata = gguf.metadata | {f"deepseek2.{k.replace('__', '.')}": v for k, v in changes.items()}
    file = SimpleNamespace(
        metadata={k: v for k, v in metadata.items() if v is not None}, tensors=gguf.tensors, dialect="gguf",
        data=gguf.data,
    )  # fmt: skip
    return config_from_gguf(file)  # type: ignore[arg-type]


def test_keys_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    gguf = converted("deepseek2-lite", tmp_path)
    for changes, message in (
        ({"attention__kv_lora_rank": None}, "kv_lora_rank is missing"),
        ({"rope__dimension_count": None}, "rope.dimension_count is missing"),
        ({"rope__dimension_count": 24}, "leaves a head no channel"),
        ({"attention__kv_lora_rank": 0}, "kv_lora_rank is 0"),
        ({"attention__q_lora_rank": "many"}, "q_lora_rank must be an integer"),
    ):
        with pytest.raises(FormatError, match=message):
            config_of(gguf, **changes)
    for changes in ({"attention__q_lora_rank": 12}, {"attention__kv_lora_rank": 39}):
        with pytest.raises(UnsupportedModelError, match="attn_"):
            describe(config_of(gguf, **changes), gguf.tensors)
    with pytest.raises(UnsupportedModelError, match="1025 heads of a latent vector"):
        config_of(gguf, attention__head_count=1025, attention__head_count_kv=1)
    with pytest.raises(UnsupportedModelError, match="heads of 600 channels"):
        config_of(gguf, attention__key_length_mla=600)


def test_yarn_scales_the_scores_as_files_of_llama_cpp_say_it(tmp_path: Path) -> None:
    """Check llama.cpp's files: a tenth of mscale_all_dim, and no change of sines and cosines."""
    gguf = converted("deepseek2-lite", tmp_path)
    layer = config_of(gguf, rope__scaling__yarn_attn_factor=None).layers[0]
    assert layer.rope.magnitude == 1.0
    assert layer.attention_scale == pytest.approx(24**-0.5 * (1 + 0.0707 * np.log(4.0)) ** 2)
    without = config_of(
        gguf, rope__scaling__yarn_attn_factor=None, rope__scaling__yarn_log_multiplier=None
    ).layers[0]
    assert without.attention_scale == pytest.approx(24**-0.5)
    assert without.rope.magnitude == pytest.approx(1 + 0.1 * np.log(4.0))
    plain = config_of(gguf, rope__scaling__type="linear").layers[0]
    assert plain.attention_scale == pytest.approx(24**-0.5)


def test_show_tells_of_the_vectors(tmp_path: Path) -> None:
    for name, queries in (("deepseek2-lite", None), ("deepseek2-v3", 28)):
        path = converted(name, tmp_path / name).path
        facts = json.loads(inside("show", path, "--json").stdout)
        assert facts["latent"] == {"channels": 40, "query_channels": queries}
        assert (facts["heads"], facts["kv_heads"], facts["head_size"]) == (6, 6, 24)
        shown = " ".join(inside("show", path).stdout.split())
        assert "made of a vector of 40 channels" in shown
        assert ("queries of one of 28" in shown) == (queries is not None)


def test_groups_are_ranked_by_their_best_experts(tmp_path: Path) -> None:
    for name, scoring, n in (("deepseek2-groups", "softmax", 1), ("deepseek2-v3", "sigmoid", 2)):
        experts = config_from_gguf(converted(name, tmp_path / name)).layers[-1].experts
        assert (experts.scoring, experts.group_best, experts.n_groups) == (scoring, n, 3)


def test_entries_of_a_checkpoint_that_are_not_computed_are_refused(tmp_path: Path) -> None:
    recipe = tiny_models.EXPERTS["deepseek2-lite"]
    tiny_models.save(recipe, tiny_models.build(recipe), tmp_path)
    entries = json.loads((tmp_path / "config.json").read_text())
    keys = HFConfig(entries).keys("deepseek2", 256)
    assert keys["deepseek2.attention.key_length"] == 48
    assert "deepseek2.expert_group_count" not in keys
    assert "deepseek2.attention.q_lora_rank" not in keys
    linear = {"rope_type": "linear", "factor": 2.0, "mscale_all_dim": 1.0, "rope_theta": 1e4}
    for change, message in (
        ({"topk_method": "noaux_tc"}, "topk_method set to 'noaux_tc'"),
        ({"norm_topk_prob": True}, "norm_topk_prob"),
        ({"scoring_func": "sigmoid"}, "scoring_func"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
        ({"rope_parameters": linear}, "mscale_all_dim"),
    ):
        with pytest.raises(UnsupportedModelError, match=message):
            HFConfig(entries | change).keys("deepseek2", 256)
    (tmp_path / "config.json").write_text(json.dumps(entries | {"v_head_dim": 11}))
    with pytest.raises(FormatError, match=r"kv_b_proj\.weight of the checkpoint"):
        convert_hf(tmp_path, tmp_path / "m.gguf", "f32")
