"""MoE layers: the native engine equal to the reference, and to itself however a step is split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend_runs import (
    ISAS,
    N_VOCAB,
    assert_every_operation_is_right,
    batch,
    counted_twice,
    cpu,
    logits_of,
    tokens,
)
from cases import quick_are
from expert_models import FORMS, T, model

import hotset
from hotset import _core
from hotset.backends.reference import ReferenceBackend
from hotset.formats.gguf import GGUFWriter, copy_metadata, open_gguf
from hotset.formats.quants import DECODABLE, GGMLType
from hotset.formats.requantize import quantize
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe
from hotset.sparsity.stats import StepCosts

SPLITS = ([], [1], [7], [8, 9], [64, 100], [*range(1, 30), 90, 91, 99])


@pytest.mark.parametrize("form", FORMS)
def test_every_operation_is_the_references(tmp_path: Path, form: str) -> None:
    gguf = model(tmp_path, **FORMS[form])
    graph, ids = describe(config_from_gguf(gguf), gguf.tensors), tokens(40)
    assert_every_operation_is_right(gguf, graph, cpu(gguf, kv_type="f32"), ids, [20, 21, 27], [3])
    # Without taps operations are fused, with the same bits; the same holds if only the route is tapped.
    names = tuple(value.name for value in graph.values)
    tapped = cpu(gguf).step(batch([(ids, 0, [1])], names)).logits.copy()
    plain = logits_of(cpu(gguf), ids, [20, 21, 27], [1])
    np.testing.assert_array_equal(plain, tapped)
    few = cpu(gguf).step(batch([(ids, 0, [1])], ("blk.1.ffn_route", "blk.0.ffn_act")))
    np.testing.assert_array_equal(few.logits, plain)
    assert few.taps["blk.1.ffn_route"].shape[1] == 2 * config_from_gguf(gguf).layers[1].experts.n_used


@pytest.mark.parametrize("type_", sorted(DECODABLE), ids=lambda t: t.name)
def test_every_tensor_type_of_experts_runs(tmp_path: Path, type_: GGMLType) -> None:
    gguf = model(tmp_path, type_of=lambda name: type_ if "_exps" in name else T.F32, experts=(4, 2))
    graph = describe(config_from_gguf(gguf), gguf.tensors)
    assert_every_operation_is_right(gguf, graph, cpu(gguf), tokens(20), [13, 14], [0])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("form", ["mixed", "floats", "biased relu", "neuron-major"])
def test_the_same_bits_however_a_step_is_cut(tmp_path: Path, isa: str, form: str) -> None:
    gguf = model(tmp_path, **FORMS[form])
    ids, blocks = tokens(120), [4, 2]
    expected = logits_of(cpu(gguf, n_threads=1), ids, [], blocks)
    for n_threads in (1, 2, 3):
        backend = cpu(gguf, isa=isa, n_threads=n_threads, sparse=n_threads > 1)
        for splits in SPLITS:
            np.testing.assert_array_equal(logits_of(backend, ids, splits, blocks), expected)


def test_same_bits_next_to_neighbours(tmp_path: Path) -> None:
    gguf = model(tmp_path)
    backend, alone = cpu(gguf), cpu(gguf)
    parts = [(tokens(n, seed), 0, [seed]) for seed, n in enumerate((1, 5, 30, 1))]
    found = backend.step(batch(parts)).logits.copy()
    at = 0
    for ids, _, blocks in parts:
        np.testing.assert_array_equal(found[at : at + len(ids)], logits_of(alone, ids, [], blocks))
        at += len(ids)
    four = [(tokens(1, seed), 0, [seed]) for seed in range(4)]  # few enough for every thread to prepare all
    found = backend.step(batch(four)).logits.copy()
    for i, (ids, _, blocks) in enumerate(four):
        np.testing.assert_array_equal(found[i], logits_of(alone, ids, [], blocks)[0])


def test_files_with_a_tensor_for_each_expert_are_the_same_model(tmp_path: Path) -> None:
    ids = tokens(30)
    found = [
        logits_of(cpu(model(tmp_path / str(each), one_by_one=each)), ids, [11], [0]) for each in (False, True)
    ]
    np.testing.assert_array_equal(*found)


def test_down_matrices_by_neuron_are_the_same_model(tmp_path: Path) -> None:
    """Check the file layout of SmallThinker's own engine, with an output predictor that is not used."""
    options: dict[str, Any] = {"type_of": lambda _: T.F32, "n_embd": 64, "n_ff": 96}
    options["keys"] = {"llama.hidden_activation": "relu"}
    plain = model(tmp_path / "plain", **options)
    moved = tmp_path / "moved.gguf"
    writer = GGUFWriter(moved, "llama")
    copy_metadata(plain, writer)
    for name, info in plain.tensors.items():
        data = plain.data(name).view(np.float32).reshape(info.shape[::-1])
        writer.add_tensor(name, np.ascontiguousarray(data.swapaxes(1, 2)) if "down" in name else data, T.F32)
    writer.add_tensor("lm_head_profiler.weight", np.zeros(32 * (64 + 96), np.float32), T.F32)
    writer.write()
    ids, blocks = tokens(30), [0]
    found = logits_of(cpu(open_gguf(moved), sparse=True), ids, [11], blocks)
    expected = logits_of(cpu(plain), ids, [11], blocks)
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())


def test_experts_are_quantised_and_their_router_is_not(tmp_path: Path) -> None:
    path = model(tmp_path, type_of=lambda _: T.F32, biased=True, n_ff_shared=256).path
    quantize(path, tmp_path / "small.gguf", "q4_k_m")
    gguf = open_gguf(tmp_path / "small.gguf")
    types = {name.partition(".")[2].partition(".")[2]: info.type for name, info in gguf.tensors.items()}
    assert types["ffn_gate_exps.weight"] == T.Q4_K
    assert types["ffn_up_shexp.weight"] == T.Q4_K
    assert T.Q6_K in {gguf.tensors[f"blk.{i}.ffn_down_exps.weight"].type for i in range(2)}
    assert types["ffn_gate_inp.weight"] == types["ffn_gate_exps.bias"] == T.F32
    quantize(path, tmp_path / "close.gguf", "q8_0")
    close = open_gguf(tmp_path / "close.gguf")
    found, expected = (logits_of(cpu(g), tokens(20), [], [0]) for g in (close, open_gguf(path)))
    assert np.corrcoef(found.reshape(-1), expected.reshape(-1))[0, 1] > 0.99


def test_score_of_nan_is_chosen_last(tmp_path: Path) -> None:
    path = model(tmp_path, type_of=lambda _: T.F32, n_embd=64, n_ff=32).path
    data = bytearray(path.read_bytes())
    with open_gguf(path) as gguf:
        info = gguf.tensors["blk.0.ffn_gate_inp.weight"]
        row = info.nbytes // info.shape[1]
    data[info.offset + 2 * row : info.offset + 3 * row] = np.full(64, np.nan, np.float32).tobytes()
    path.write_bytes(data)
    gguf = open_gguf(path)
    graph = describe(config_from_gguf(gguf), gguf.tensors)
    step = batch([(tokens(12), 0, [0])], ("blk.0.ffn_route", "blk.0.ffn_router"))
    ours = cpu(gguf, kv_type="f32").step(step).taps["blk.0.ffn_route"]
    theirs = ReferenceBackend(gguf, graph, n_blocks=1).step(step).taps["blk.0.ffn_route"]
    np.testing.assert_array_equal(ours[:, :3], theirs[:, :3])
    assert np.isnan(ours[:, 3:]).all()
    assert np.isnan(theirs[:, 3:]).all()
    assert not (ours[:, :3] == 2).any()


@pytest.mark.parametrize("form", ["relu", "biased relu", "neuron-major", "mixed"])
def test_counts_equal_the_reference(tmp_path: Path, form: str) -> None:
    floats = {"type_of": lambda _: T.F32, "n_embd": 64, "n_ff": 160}
    gguf = model(tmp_path, **FORMS[form] | floats)
    for sparse in (False, True):
        for _, ours, theirs in counted_twice(gguf, sparse=sparse):
            for name in ("selected", "gate_rows"):
                np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
            # A gate near zero may fire in only one of the two, and several tokens read whole chunks.
            np.testing.assert_allclose(ours.active, theirs.active, rtol=0.02)
            assert (ours.up_rows >= theirs.up_rows * 0.98).all()
            if form == "neuron-major":
                np.testing.assert_allclose(ours.down_rows, theirs.down_rows, rtol=0.02)
    if form in ("relu", "neuron-major"):
        assert (ours.active < 0.7 * ours.selected).all()
        assert (ours.up_rows < ours.gate_rows).all()


def test_statistics_know_the_share_of_experts(tmp_path: Path) -> None:
    gguf = model(tmp_path)
    graph = describe(config_from_gguf(gguf), gguf.tensors)
    backend, costs, steps = cpu(gguf), StepCosts(graph, gguf.tensors), []
    for at in range(3):
        backend.step(batch([(tokens(1, at), at, [0])]))
        steps.append(backend.stats())
    summary = costs.summary(steps)
    assert [layer.expert_share for layer in summary.layers] == pytest.approx([3 / 9] * 2)
    assert summary.active_share == pytest.approx(3 / 9, abs=0.01)
    of_experts = sum(gguf.tensors[f"blk.0.ffn_{n}_exps.weight"].nbytes for n in ("gate", "up", "down"))
    assert summary.layers[0].bytes == pytest.approx(of_experts * 3 / 9)
    backend.step(batch([(tokens(100), 0, [1, 2])]))  # all of them
    assert [layer.expert_share for layer in costs.summary([backend.stats()]).layers] == [1.0, 1.0]


@pytest.mark.parametrize("form", ["relu", "neuron-major"])
def test_exact_is_dense_inside_experts(tmp_path: Path, form: str) -> None:
    path = model(tmp_path, **FORMS[form]).path
    ids = tokens(50).tolist()
    found = {}
    for mode in ("dense", "exact"):
        with hotset.load(path, device="cpu", n_threads=2, n_ctx=128, sparsity=mode) as loaded:
            found[mode] = loaded.logits(ids)
    np.testing.assert_array_equal(found["dense"], found["exact"])
    assert found["dense"].shape[-1] == N_VOCAB


ARCHITECTURES = "gpt-oss", "smallthinker-windows", "glm4moe-groups", "turbosparse-mixtral"


@pytest.mark.parametrize("name", quick_are(("smallthinker-windows",), ARCHITECTURES))
def test_the_same_bits_of_architectures_with_experts(run_folder: Path, name: str) -> None:
    """Check sinks, windows, routers before attention and shared experts, for any split of a step."""
    tiny_models = pytest.importorskip("tiny_models")
    gguf = open_gguf(tiny_models.shared_gguf(name, run_folder))
    ids, blocks = tokens(100), [4, 2]
    expected = logits_of(cpu(gguf, n_threads=1, isa="scalar"), ids, [], blocks)
    for isa in _core.available_isas():
        backend = cpu(gguf, isa=isa, sparse=True)
        for splits in ([], [1, 2, 70], [9, 20, 99]):
            np.testing.assert_array_equal(logits_of(backend, ids, splits, blocks), expected)
    graph = describe(config_from_gguf(gguf), gguf.tensors)
    assert_every_operation_is_right(gguf, graph, cpu(gguf, kv_type="f32"), ids[:50], [40, 41], [3])


def test_sinks_hold_over_many_splits_of_the_cache(tmp_path: Path) -> None:
    tiny_models = pytest.importorskip("tiny_models")
    recipe = tiny_models.EXPERTS["gpt-oss"]
    model = tiny_models.build(recipe, max_position_embeddings=2048, sliding_window=2000)
    gguf = open_gguf(tiny_models.to_gguf(recipe, model, tmp_path))
    ids, blocks = tokens(1100), list(range(18))
    backend = cpu(gguf, max_batch=1100)
    whole = logits_of(backend, ids, [], blocks)
    np.testing.assert_array_equal(logits_of(backend, ids, [500, 1098, 1099], blocks), whole)
