"""DeepSeek V4: required keys, blocks that its indexer chooses from, caches, and tables of experts.

Its logits are compared with transformers' in tests/backends/test_architectures.py, its states in
test_recurrent.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from backend_runs import batch, cpu_backend, tokens
from derived_bounds import Oracle
from fuzz import fuzz_reads

import hotset
from hotset.convert.hf import convert_hf
from hotset.convert.hf_config import HFConfig
from hotset.errors import FormatError, HotsetError, UnsupportedModelError
from hotset.formats.gguf import GGUFFile, open_gguf
from hotset.formats.quants import GGMLType
from hotset.formats.requantize import quantize
from hotset.load_parameters import KVType
from hotset.model.config import config_from_gguf
from hotset.model.cost import Cost
from hotset.model.decoder import describe
from hotset.model.graph import Graph
from hotset.model.operations import Attention, PoolBlocks
from hotset.placement import ram

tiny_models = pytest.importorskip("tiny_models")

NAME = "deepseek4"


@pytest.fixture
def gguf(run_folder: Path) -> GGUFFile:
    return open_gguf(tiny_models.shared_gguf(NAME, run_folder))


def whole_graph(gguf: GGUFFile) -> Graph:
    """Return the graph of contexts in which a token attends to all blocks."""
    return describe(config_from_gguf(gguf).for_context(259), gguf.tensors)


def changed(gguf: GGUFFile, **keys: Any) -> Any:
    """Return the file with other keys; None removes a key."""
    metadata = gguf.metadata | {f"deepseek4.{key.replace('__', '.')}": v for key, v in keys.items()}
    return SimpleNamespace(
        metadata={k: v for k, v in metadata.items() if v is not None}, tensors=gguf.tensors, dialect="gguf",
        data=gguf.data,
    )  # fmt: skip


def test_which_layers_have_blocks(gguf: GGUFFile) -> None:
    config = config_from_gguf(gguf).for_context(259)  # which needs no indexer
    assert [layer.block_size for layer in config.layers] == [0, 4, 16, 4]
    assert [layer.rope == config.layers[1].rope for layer in config.layers] == [False, True, True, True]
    graph = describe(config, gguf.tensors)
    assert [op.overlaps for op in graph.recurrent if isinstance(op, PoolBlocks)] == [True, False, True]
    assert graph.is_layered
    attention = [op for op in graph.ops if isinstance(op, Attention)]
    assert [op.n_visible(99) for op in attention] == [24, 24 + 25, 24 + 6, 24 + 25]
    of_token = 2 * 32 * 2  # a key and a value in half precision
    assert Cost(graph, gguf.tensors).kv_bytes_per_token("f16") == (1 + 3 * 2) * of_token


def test_only_blocks_that_overlap_are_chosen(gguf: GGUFFile) -> None:
    indexing = config_from_gguf(gguf).indexing
    assert indexing is not None
    assert (indexing.size, indexing.owners, indexing.n_ctx) == (4, (None, 1, None, 3), 4 * (64 + 1) - 1)
    indexing = config_from_gguf(changed(gguf, attention__indexer__top_k=3)).indexing
    assert indexing is not None
    assert indexing.n_ctx == 15


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        ({"attention__compress_ratios": [0, 4, 16]}, FormatError, "3 entries for 4 layers"),
        ({"attention__compress_ratios": None}, FormatError, "compress_ratios"),
        ({"attention__compress_rope_freq_base": 0.0}, FormatError, "compress_rope_freq_base"),
        ({"attention__output_group_count": 3}, FormatError, "is 3, which does not divide 4 heads"),
        ({"attention__head_count_kv": 2}, FormatError, "head_count_kv"),
        ({"attention__head_count_kv": None}, FormatError, "head_count_kv is not 1"),
        ({"attention__value_length": 16}, FormatError, "value_length"),
        ({"attention__q_lora_rank": 0}, FormatError, "q_lora_rank"),
        ({"hyper_connection__count": 17}, FormatError, "outside 1 to 16"),
        ({"hyper_connection__epsilon": None}, FormatError, "is missing"),
        ({"hash_layer_count": 5}, FormatError, "outside 0 to 4"),
        ({"swiglu_clamp_exp": [0.7, -1.0, 0.7, 0.7]}, FormatError, "for each layer"),
        ({"swiglu_clamp_exp": [0.7] * 3}, FormatError, "for each layer"),
        ({"swiglu_clamp_shexp": [0.6] * 4}, UnsupportedModelError, "differ"),
    ],
)
def test_keys_that_make_no_sense(
    gguf: GGUFFile, keys: dict[str, Any], error: type[HotsetError], message: str
) -> None:
    with pytest.raises(error, match=message):
        config_from_gguf(changed(gguf, **keys))


def test_ratios_may_be_of_layers_that_the_file_lacks(gguf: GGUFFile) -> None:
    more = config_from_gguf(changed(gguf, attention__compress_ratios=[0, 4, 16, 4, 0]))
    assert more.layers == config_from_gguf(gguf).layers


@pytest.mark.parametrize("ids", [[0, 1, 8], [0, -1, 2], [3, 1, 3]])
def test_a_table_names_experts_that_there_are_each_once(gguf: GGUFFile, ids: list[int]) -> None:
    name = "blk.0.ffn_gate_tid2eid.weight"
    assert gguf.tensors[name].type == GGMLType.I32
    table = gguf.data(name).view("<i4").reshape(-1, 3).copy()
    table[7] = ids
    file = changed(gguf)
    file.data = lambda asked: table.view(np.uint8).reshape(-1) if asked == name else gguf.data(asked)
    with pytest.raises(FormatError, match="must name 3 of 8 experts for each token"):
        config_from_gguf(file)


@pytest.mark.parametrize("expert", [8, -1, (1 << 32) + 5])
def test_a_checkpoint_with_experts_that_there_are_not_is_refused(tmp_path: Path, expert: int) -> None:
    """Check also numbers whose low 32 bits are a valid id."""
    model, source = tiny_models.build(tiny_models.EXPERTS[NAME]), tmp_path / "hf"
    table = next(values for name, values in model.named_buffers() if name.endswith("tid2eid"))
    table[7, 0] = expert
    source.mkdir()
    tiny_models.save(tiny_models.EXPERTS[NAME], model, source)
    with pytest.raises(
        FormatError, match="tid2eid of layer 0 of the checkpoint must name experts from 0 to 7"
    ):
        convert_hf(source, tmp_path / "m.gguf", GGMLType.F32)


@pytest.mark.parametrize("kv_type", ["f16", "q8_0", "q4_0", "q8_0/q4_0", "q4_0/f16"])
def test_every_cache_holds_blocks(gguf: GGUFFile, kv_type: KVType) -> None:
    """Compare each operation with the reference; taps and chunks of any size do not change results."""
    graph, ids = whole_graph(gguf), tokens(140)
    backend = cpu_backend(gguf, graph, n_blocks=4, n_states=2, max_batch=140, n_threads=2, kv_type=kv_type)
    oracle = Oracle(gguf, graph, n_blocks=4, kv_type=kv_type, n_states=2)
    names, rows = tuple(value.name for value in graph.values), []
    for i, (at, end) in enumerate(((0, 66), (66, 67), (67, 140))):
        step = batch([(ids[at:end], at, [2, 0, 3])], names).with_states_of_rows(i)
        found = backend.step(step)
        oracle.check(step, found)
        rows.append(found.logits.copy())
    whole = backend.step(batch([(ids, 0, [1, 2, 0])]).with_states_of_rows(0)).logits
    np.testing.assert_array_equal(np.concatenate(rows), whole)


def test_blocks_with_blocks_can_be_copied(gguf: GGUFFile) -> None:
    graph, ids = whole_graph(gguf), tokens(100)
    one, other = (cpu_backend(gguf, graph, n_blocks=3, n_states=2, kv_type="q8_0") for _ in range(2))
    step = batch([(ids[:90], 0, [2, 0])]).with_states_of_rows(0)
    one.step(step)
    for block, to in ((2, 1), (0, 2)):
        other.write_block(to, one.read_block(block))
    assert step.saves is not None
    other.write_state(int(step.saves[-1]), one.read_state(int(step.saves[-1])))
    expected = one.step(batch([(ids[90:], 90, [2, 0])]).with_states_of_rows(1)).logits.copy()
    found = other.step(batch([(ids[90:], 90, [1, 2])]).with_states_of_rows(1)).logits
    np.testing.assert_array_equal(found, expected)


def test_quantised_files_keep_small_tensors_and_tables(tmp_path: Path, gguf: GGUFFile) -> None:
    quantize(gguf.paths[0], tmp_path / "q8.gguf", "q8_0")
    with open_gguf(tmp_path / "q8.gguf") as small:
        kept = ("hc_", "compressor_", "ffn_gate_inp.")
        for name, info in small.tensors.items():
            if "tid2eid" in name:
                assert info.type == GGMLType.I32
            elif len(info.shape) > 1 and info.shape[0] % 32 == 0 and not any(part in name for part in kept):
                assert info.type == GGMLType.Q8_0, name
            elif any(part in name for part in kept):
                assert info.type == GGMLType.F32, name
        ids = tokens(50).tolist()
    with hotset.load(gguf.paths[0], device="cpu", n_ctx=64) as model:
        expected = model.logits(ids)
    with hotset.load(tmp_path / "q8.gguf", device="cpu", n_ctx=64) as model:
        found = model.logits(ids)
    assert 0 < np.abs(found - expected).max() < 0.2 * np.abs(expected).max()


@pytest.mark.backend("vulkan")
def test_devices_refuse_it_by_name(gguf: GGUFFile) -> None:
    from hotset.backends.vulkan.program import missing_kernel

    graph = describe(config_from_gguf(gguf), gguf.tensors)
    missing = {what for op in graph.primitives if (what := missing_kernel(op)) is not None}
    assert {"HyperConnection", "PoolBlocks", "attention to blocks", "the rotation of blocks"} <= missing


def test_entries_of_the_published_config() -> None:
    published = {
        "architectures": ["DeepseekV4ForCausalLM"], "num_hidden_layers": 3, "hidden_size": 64, "head_dim": 32,
        "num_attention_heads": 8, "vocab_size": 99, "num_hash_layers": 1, "compress_ratios": [0, 4, 128, 0],
        "qk_rope_head_dim": 8, "num_nextn_predict_layers": 1,
        "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536},
    }  # fmt: skip
    keys = HFConfig(published).keys("deepseek4", 1 << 20)
    assert keys["deepseek4.attention.compress_ratios"] == [0, 4, 128]
    assert keys["deepseek4.rope.dimension_count"] == 8
    assert keys["deepseek4.rope.scaling.factor"] == 16
    assert keys["deepseek4.rope.freq_base"] == 10000
    assert keys["deepseek4.attention.compress_rope_freq_base"] == 160000
    assert keys["deepseek4.expert_gating_func"] == 4
    for changes, message in (
        ({"compress_ratios": [0, 4]}, "0, 4 or 128 for each layer"),
        ({"compress_ratios": [0, 4, 8]}, "0, 4 or 128 for each layer"),
        ({"compress_ratios": [[0], 4, 128]}, "0, 4 or 128 for each layer"),
        ({"compress_ratios": [0, 4.0, 128]}, "0, 4 or 128 for each layer"),
        ({"partial_rotary_factor": 1e29}, "partial_rotary_factor in config.json is 1e.29"),
        ({"partial_rotary_factor": -1}, "partial_rotary_factor in config.json is -1"),
        ({"mlp_layer_types": ["moe", "hash_moe", "moe"]}, "hash_moe in the first layers"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"rope_parameters": {"main": {"rope_type": "yarn"}, "compress": {}}}, "main rotation"),
    ):
        with pytest.raises(HotsetError, match=message):
            HFConfig(published | changes)


def test_a_budget_of_memory_changes_no_bit(gguf: GGUFFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ram, "own_memory", lambda: 0)
    monkeypatch.setattr(ram, "PROGRAM", 0)
    path, ids = gguf.paths[0], tokens(70).tolist()
    settings: dict[str, Any] = {"n_ctx": 128, "device": "cpu", "n_threads": 2}
    with hotset.load(path, **settings) as mapped:
        expected = mapped.logits(ids)
    with hotset.load(path, **settings, ram_budget=fuzz_reads.least_budget(path, **settings)) as under:
        np.testing.assert_array_equal(under.logits(ids), expected)


def test_changing_one_token_changes_only_later_blocks(gguf: GGUFFile) -> None:
    """Check that a block's key exists from its last token on, and that no earlier token attends to it."""
    graph, ids = describe(config_from_gguf(gguf), gguf.tensors), tokens(80)
    other = ids.copy()
    other[50] = (other[50] + 1) % 90
    backend = cpu_backend(gguf, graph, n_blocks=2, n_states=2, kv_type="f32")
    rows = [backend.step(batch([(t, 0, [0, 1])]).with_states_of_rows(0)).logits.copy() for t in (ids, other)]
    np.testing.assert_array_equal(rows[0][:50], rows[1][:50])
    assert (rows[0][50:] != rows[1][50:]).any(axis=1).all()


def test_blocks_are_seen_beyond_the_window(gguf: GGUFFile) -> None:
    """Check that without blocks, tokens beyond every layer's window have no effect."""
    graph = whole_graph(gguf)
    blind = replace(graph, ops=[replace(op, blocks=None, block_size=0) if isinstance(op, Attention) else op
                                for op in graph.ops])  # fmt: skip
    ids, found = tokens(140), []
    other = ids.copy()
    other[:20] = tokens(20, seed=1)
    for each in (graph, blind):
        backend = cpu_backend(gguf, each, n_blocks=3, n_states=2, max_batch=140, kv_type="f32")
        rows = [
            backend.step(batch([(t, 0, [0, 1, 2])]).with_states_of_rows(0)).logits[-1].copy()
            for t in (ids, other)
        ]
        found.append(np.abs(rows[0] - rows[1]).max())
    assert found[0] > 0
    assert found[1] == 0
