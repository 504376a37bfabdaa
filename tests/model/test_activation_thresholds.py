"""Activation thresholds, which set small values to zero: the graph, and equal results everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend_runs import batch, cpu_backend, tokens
from derived_bounds import Oracle
from threshold_models import (
    CASES,
    EVERY,
    EXPERTS,
    OF_EXPERTS,
    T,
    cpu,
    graph_of,
    run,
    scores,
    thresholds_of,
    write,
    write_experts,
)
from tiny_gguf import write_llama, write_relu

import hotset
from hotset import _core
from hotset.backends.base import Batch
from hotset.backends.cpu.backend import CpuBackend
from hotset.backends.reference import ReferenceBackend
from hotset.backends.stage import BackendOptions
from hotset.engine.engine import Engine, ModelTraits, ThresholdedTokens
from hotset.engine.sampler import SamplingParams
from hotset.errors import InvalidRequestError, UnsupportedModelError
from hotset.formats.gguf import GGUFFile, open_gguf
from hotset.formats.quants import GGMLType
from hotset.model.operations import Threshold
from hotset.model.thresholds import LayerThresholds
from hotset.offload.weight_store import StoredWeights, Use, sizes_of
from hotset.placement import channel_rates
from hotset.placement.channels import ChannelRates
from hotset.sparsity.thresholds import BaseMode, thresholds_path

# ---- the graph


def test_graph_without_thresholds_equals_dense(tmp_path: Path) -> None:
    gguf = write(tmp_path)
    assert graph_of(gguf, LayerThresholds())[1] == graph_of(gguf, LayerThresholds(), "dense")[1]
    assert not graph_of(gguf, LayerThresholds())[1].has_thresholds


@pytest.mark.parametrize("architecture", ["llama", "opt", "falcon"])
@pytest.mark.parametrize("case", [name for name in CASES if name != "nothing"])
def test_thresholded_values(tmp_path: Path, architecture: str, case: str) -> None:
    """Check that a value's entries below the threshold become zero, and the others are unchanged."""
    options = {"n_head_kv": 1} if architecture == "falcon" else {}
    gguf = write(tmp_path, architecture, **options)
    weights, graph = graph_of(gguf, CASES[case])
    found = [op for op in graph.primitives if isinstance(op, Threshold)]
    assert len(found) == 2 * (5 if case == "every" else 1)
    backend = ReferenceBackend(weights, graph, n_blocks=8)
    ids, thresholded = tokens(24), np.arange(24) % 3 > 0
    names = tuple(name for op in found for name in (op.x.name, op.out.name))
    taps = backend.step(replace(batch([(ids, 0, [0])], names), thresholded=thresholded)).taps
    for op in found:
        x, out = taps[op.x.name], taps[op.out.name]
        small = np.abs(x) < np.float32(op.threshold)
        assert 0.02 < small.mean() < 1
        np.testing.assert_array_equal(out, np.where(thresholded[:, None] & small, 0, x))


def test_only_gates_of_experts_have_thresholds(tmp_path: Path) -> None:
    gguf = open_gguf(write_llama(tmp_path / "model.gguf", experts=(4, 2)))
    for layer_thresholds in (LayerThresholds(ffn_in=1), LayerThresholds(down_in=1)):
        with pytest.raises(UnsupportedModelError, match="experts support thresholds of activated gates only"):
            graph_of(gguf, layer_thresholds)
    weights, graph = graph_of(gguf, LayerThresholds(gate=0.1))
    op = next(op for op in graph.primitives if isinstance(op, Threshold))
    backend = ReferenceBackend(weights, graph, n_blocks=8)
    ids, thresholded = tokens(24), np.arange(24) % 3 > 0
    taps = backend.step(
        replace(batch([(ids, 0, [0])], (op.x.name, op.out.name)), thresholded=thresholded)
    ).taps
    x, out = taps[op.x.name], taps[op.out.name]
    assert x.shape == (24, 2 * 96)  # the neurons of a token's experts
    small = np.abs(x) < np.float32(op.threshold)
    assert 0.02 < small.mean() < 1
    np.testing.assert_array_equal(out, np.where(thresholded[:, None] & small, 0, x))


UPS_OF_EXPERTS = [f"blk.{i}.ffn_up_exps.weight" for i in range(2)]


@pytest.mark.parametrize("kind", EXPERTS)
def test_the_reference_agrees_on_cut_experts(tmp_path: Path, kind: str) -> None:
    weights, graph = graph_of(gguf := write_experts(tmp_path, kind), OF_EXPERTS)
    ids, thresholded = tokens(24), np.arange(24) % 3 > 0
    every = replace(batch([(ids, 0, [0])], tuple(v.name for v in graph.values)), thresholded=thresholded)
    found = cpu(gguf, OF_EXPERTS, kv_type="f32").step(every)
    Oracle(weights, graph, n_blocks=8, kv_type="f32").check(every, found)
    plain = run(cpu(gguf, OF_EXPERTS, kv_type="f32"), ids, thresholded)
    np.testing.assert_array_equal(found.logits, plain)


@pytest.mark.parametrize("type_", [T.F32, T.Q8_0, T.Q4_0], ids=lambda t: t.name)
@pytest.mark.parametrize("kind", EXPERTS)
def test_a_token_of_cut_experts_is_the_same_in_every_step(tmp_path: Path, kind: str, type_: GGMLType) -> None:
    gguf = write_experts(tmp_path, kind, type_)
    ids, thresholded = tokens(40), np.arange(40) % 5 > 1
    expected = run(cpu(gguf, OF_EXPERTS, n_threads=1, sparse=False), ids, thresholded)
    ups = [name.replace("_exps", ".0") for name in UPS_OF_EXPERTS]
    for whole in ((), ups if kind == "one by one" else UPS_OF_EXPERTS):
        for n_threads, splits in ((1, []), (2, [*range(1, 12)]), (2, [3, 8, 25, 39]), (1, [*range(1, 40)])):
            found = cpu(gguf, OF_EXPERTS, n_threads=n_threads, whole=whole)
            np.testing.assert_array_equal(run(found, ids, thresholded, splits), expected)
    assert (expected != run(cpu(gguf, OF_EXPERTS), ids, ~thresholded)).any()


def test_rows_of_cut_experts_are_not_read(tmp_path: Path) -> None:
    gguf = write_experts(tmp_path, "plain")
    backends = [cpu(gguf, LayerThresholds(gate=0.5), whole=whole) for whole in ((), UPS_OF_EXPERTS)]
    for backend, most in zip(backends, (0.5, 1.0), strict=True):
        ids = tokens(9)
        run(backend, ids[:8], np.ones(8, np.bool_))
        backend.step(replace(batch([(ids[8:], 8, [0])]), thresholded=np.ones(1, np.bool_)))
        stats = backend.stats()
        assert stats is not None
        assert (stats.up_rows <= most * 2 * 96).all()
        assert (stats.gate_rows == 2 * 96).all()
    assert (stats.up_rows == 2 * 96).all()


# ---- the native engine


@pytest.mark.parametrize("architecture", ["llama", "opt", "bamboo"])
@pytest.mark.parametrize("case", CASES)
def test_the_reference_agrees(tmp_path: Path, architecture: str, case: str) -> None:
    dialect = "powerinfer" if architecture == "bamboo" else "gguf"
    weights, graph = graph_of(gguf := write(tmp_path, architecture, dialect=dialect), CASES[case])
    ids, thresholded = tokens(24), np.arange(24) % 3 > 0
    every = replace(batch([(ids, 0, [0])], tuple(v.name for v in graph.values)), thresholded=thresholded)
    found = cpu(gguf, CASES[case], kv_type="f32").step(every)
    Oracle(weights, graph, n_blocks=8, kv_type="f32").check(every, found)
    plain = run(cpu(gguf, CASES[case], kv_type="f32"), ids, thresholded)
    np.testing.assert_array_equal(found.logits, plain)


@pytest.mark.parametrize("type_", [T.F32, T.F16, T.Q8_0, T.Q4_0, T.Q4_1], ids=lambda t: t.name)
@pytest.mark.parametrize("architecture", ["llama", "opt", "bamboo"])
def test_a_token_is_the_same_in_every_step(tmp_path: Path, architecture: str, type_: GGMLType) -> None:
    dialect = "powerinfer" if architecture == "bamboo" else "gguf"
    gguf = write(tmp_path, architecture, type_, dialect=dialect)
    ids, thresholded = tokens(40), np.arange(40) % 5 > 1
    expected = run(cpu(gguf, EVERY, n_threads=1, sparse=False), ids, thresholded)
    for n_threads in (1, 2):
        for splits in ([], [*range(1, 12)], [3, 8, 25, 39], [*range(1, 40)]):
            np.testing.assert_array_equal(
                run(cpu(gguf, EVERY, n_threads=n_threads), ids, thresholded, splits), expected
            )
    assert (expected != run(cpu(gguf, EVERY), ids, ~thresholded)).any()


@pytest.mark.parametrize("isa", _core.available_isas())
@pytest.mark.parametrize("type_", [T.Q8_0, T.Q4_0, T.Q4_1, T.Q4_K, T.Q5_K, T.Q6_K], ids=lambda t: t.name)
def test_channels_give_the_bits_of_rows_on_every_instruction_set(
    tmp_path: Path, type_: GGMLType, isa: str
) -> None:
    """Check several tiles of outputs, with a rate at which channels are read whatever their number."""
    sizes = {"n_ff": 544, "n_embd": 288, "n_head": 9, "n_head_kv": 3}
    if type_.name.endswith("_K"):
        sizes = {"n_ff": 768, "n_embd": 256, "n_head": 8, "n_head_kv": 2}
    gguf = write(tmp_path, type=type_, **sizes)
    ids, thresholded = tokens(24), np.arange(24) % 5 > 1
    expected = run(cpu(gguf, EVERY, n_threads=1, sparse=False, isa="scalar"), ids, thresholded)
    for n_threads in (1, 2):
        found = cpu(
            gguf, EVERY, n_threads=n_threads, isa=isa, channel_rates=dict.fromkeys(gguf.tensors, 100.0)
        )
        np.testing.assert_array_equal(run(found, ids, thresholded, [*range(1, 24)]), expected)


@pytest.mark.parametrize("type_", [T.Q8_0, T.Q4_1], ids=lambda t: t.name)
def test_a_budget_of_memory_gives_the_same_bits(tmp_path: Path, type_: GGMLType) -> None:
    """Check a budget that has room for rows, but not for their input-major copies."""
    gguf = write(tmp_path, type=type_)
    weights, graph = graph_of(gguf, EVERY)
    ids, thresholded = tokens(24), np.arange(24) % 5 > 1
    expected = run(cpu(gguf, EVERY), ids, thresholded)
    least = sizes_of(graph, weights.tensors, Use(sparse=True)).least_of_all
    stored = StoredWeights(weights, graph, least, Use(sparse=True), reader=_core.Reader(False, 2), gap=0)
    found = cpu_backend(
        stored,
        graph,
        n_blocks=8,
        max_batch=128,
        n_threads=2,
        sparse=True,
        channel_rates=dict.fromkeys(gguf.tensors, 100.0),
    )
    np.testing.assert_array_equal(run(found, ids, thresholded, [*range(1, 24)]), expected)


@pytest.mark.parametrize("type_", [T.F32, T.Q4_0], ids=lambda t: t.name)
def test_tokens_that_are_not_cut_are_dense(tmp_path: Path, type_: GGMLType) -> None:
    """Check a SiLU model whose down projection has the layout of `dense`."""
    gguf, ids = write(tmp_path, type=type_), tokens(24)
    expected = run(cpu(gguf, LayerThresholds(), "dense", sparse=False), ids, np.zeros(24, np.bool_))
    found = cpu(gguf, EVERY)
    np.testing.assert_array_equal(run(found, ids, np.zeros(24, np.bool_), [9, 10, 11]), expected)
    np.testing.assert_array_equal(
        found.step(batch([(ids, 0, [0])])).logits, expected
    )  # without per-token flags


def test_rows_of_zeroed_values_are_not_read(tmp_path: Path) -> None:
    gguf = write(tmp_path)
    found, ids = cpu(gguf, LayerThresholds(gate=0.3)), tokens(9)
    run(found, ids[:8], np.ones(8, np.bool_))
    found.step(replace(batch([(ids[8:], 8, [0])]), thresholded=np.ones(1, np.bool_)))
    stats = found.stats()
    assert stats is not None
    assert (stats.up_rows < 0.5 * 288).all()
    assert (stats.gate_rows == 288).all()


@pytest.mark.parametrize("case", ["gate", "down_in", "every"])
def test_all_rows_are_read_if_skipping_does_not_pay(tmp_path: Path, case: str) -> None:
    """Check that thresholds in the pass of gate and up change neither bits nor counts of neurons."""
    gguf = write(tmp_path, type=T.Q4_0)
    layer_thresholds, ids, thresholded = CASES[case], tokens(24), np.arange(24) % 5 > 1
    ups = [f"blk.{i}.ffn_up.weight" for i in range(2)]
    backends = cpu(gguf, layer_thresholds, n_threads=1), cpu(gguf, layer_thresholds, n_threads=2, whole=ups)
    for steps in ([], [7, 8, 9], [*range(1, 24)]):
        found = [run(backend, ids, thresholded, steps) for backend in backends]
        np.testing.assert_array_equal(*found)
        by_row, whole = [backend.stats() for backend in backends]
        assert by_row is not None
        assert whole is not None
        np.testing.assert_array_equal(by_row.active, whole.active)
        assert (whole.up_rows == 288).all()
        assert (whole.gate_rows == 288).all()


@pytest.mark.parametrize("type_", [T.Q4_0, T.Q8_0, T.Q6_K], ids=lambda t: t.name)
def test_large_matrices_are_added_up_from_lanes(tmp_path: Path, type_: GGMLType) -> None:
    """Check matrices that two phases compute: one multiplies lanes of each tile, the other adds them up.

    Gate and up are included. Rows with too many remaining channels are computed directly.
    """
    n_ff = 4352 if type_ == T.Q6_K else 4224
    gguf = write(tmp_path, type=type_, n_embd=512, n_ff=n_ff, ranks=(32,))
    ids, thresholded = tokens(4), np.ones(4, np.bool_)
    for layer_thresholds in (
        LayerThresholds(ffn_in=1.0, down_in=0.1),
        LayerThresholds(ffn_in=0.1, down_in=0.1),
    ):
        expected = run(cpu(gguf, layer_thresholds, sparse=False), ids, thresholded)
        for n_threads in (1, 2, 9):
            found = cpu(
                gguf, layer_thresholds, n_threads=n_threads, channel_rates=dict.fromkeys(gguf.tensors, 0.8)
            )
            np.testing.assert_array_equal(run(found, ids, thresholded, [1, 2, 3]), expected)


@pytest.mark.parametrize("type_", [T.Q8_0, T.Q4_0, T.Q4_1, T.Q6_K], ids=lambda t: t.name)
def test_channels_of_zeroed_inputs_are_not_read(tmp_path: Path, type_: GGMLType) -> None:
    gguf = write(tmp_path, type=type_, **({"n_embd": 256, "n_ff": 512} if type_ == T.Q6_K else {}))
    for case, layer_thresholds in CASES.items():
        layer_thresholds = LayerThresholds(
            **{name: 5 * value for name, value in layer_thresholds.items()}
        )  # enough for channels to be faster
        found, ids = cpu(gguf, layer_thresholds), tokens(9)
        found.step(replace(batch([(ids[:8], 0, [0])]), thresholded=np.ones(8, np.bool_)))
        found.step(replace(batch([(ids[8:], 8, [0])]), thresholded=np.ones(1, np.bool_)))
        if case == "nothing":
            assert found.stats() is None
            continue
        stats = found.stats()
        assert stats is not None
        assert stats.left_out is not None
        assert (stats.left_out > 0).all(), case
        found.step(batch([(ids[8:], 8, [0])]))  # the same token without thresholds
        rest = found.stats()
        assert rest is not None
        assert rest.left_out is not None
        assert (rest.left_out < 0.5 * stats.left_out).all()  # except codes that are rounded to zero


def test_which_tokens_are_cut_is_checked(tmp_path: Path) -> None:
    gguf, ids = write(tmp_path), tokens(4)
    weights, graph = graph_of(gguf, EVERY)
    for backend in (cpu(gguf, EVERY), ReferenceBackend(weights, graph, n_blocks=8)):
        for thresholded in (np.ones(3, np.bool_), np.ones(4, np.int32)):
            with pytest.raises(InvalidRequestError, match="thresholded"):
                backend.step(replace(batch([(ids, 0, [0])]), thresholded=thresholded))


# ---- the engine: which tokens have thresholds


class Watched(CpuBackend):
    """A backend that records for every computed token: (sequence's row, position, thresholded)."""

    seen: list[tuple[int, bool]]

    def step(self, batch: Batch) -> Any:
        if not hasattr(self, "seen"):
            self.seen = []
        thresholded = (
            np.zeros(len(batch.tokens), np.bool_) if batch.thresholded is None else batch.thresholded
        )
        self.seen += zip(batch.positions.tolist(), thresholded.tolist(), strict=True)
        return super().step(batch)


def watched(gguf: GGUFFile, layer_thresholds: LayerThresholds = EVERY, **options: Any) -> Watched:
    weights, graph = graph_of(gguf, layer_thresholds)
    given = {"n_blocks": 16, "max_batch": 64, "n_threads": 1, "sparse": True, **options}
    return Watched(weights, graph, BackendOptions(**given))


def answer(engine: Engine, prompt: Sequence[int], n: int = 12) -> list[int]:
    sequence = engine.enqueue(engine.prepare(prompt, SamplingParams(temperature=0, max_tokens=n)))
    while sequence.finish_reason is None:
        engine.step()
    return sequence.generated


ANSWERS = ModelTraits(thresholded="answers")


@pytest.mark.parametrize(("thresholded", "first"), [("none", 99), ("answers", 20), ("all", 0)])
def test_which_tokens_the_engine_cuts(tmp_path: Path, thresholded: ThresholdedTokens, first: int) -> None:
    backend = watched(write(tmp_path))
    answer(Engine(backend, 256, traits=ModelTraits(thresholded=thresholded)), tokens(20))
    assert sorted(backend.seen) == [(i, i >= first) for i in range(31)]


@pytest.mark.parametrize("thresholded", ["answers", "all"])
def test_prefix_is_reused_only_with_the_same_settings(tmp_path: Path, thresholded: ThresholdedTokens) -> None:
    """Check that an answer in the next prompt is computed again, unless prompts have thresholds too."""
    backend, prompt = watched(write(tmp_path)), tokens(50)
    traits = ModelTraits(thresholded=thresholded)
    engine = Engine(backend, 256, traits=traits)
    longer = [*prompt, *answer(engine, prompt, 100)]
    n_reused = []
    for next_prompt in (longer, longer):
        sequence = engine.enqueue(engine.prepare(next_prompt, SamplingParams(temperature=0, max_tokens=9)))
        while sequence.finish_reason is None:
            engine.step()
        n_reused.append(sequence.n_reused)
        alone = Engine(watched(open_gguf(tmp_path / "model.gguf")), 256, traits=traits)
        assert sequence.generated == answer(alone, next_prompt, 9)
    assert n_reused == ([0, 128] if thresholded == "answers" else [128, 128])


def test_without_cuts_an_answer_is_reused(tmp_path: Path) -> None:
    engine, prompt = Engine(watched(write(tmp_path), LayerThresholds()), 256), tokens(50)
    longer = [*prompt, *answer(engine, prompt, 100)]
    sequence = engine.enqueue(engine.prepare(longer, SamplingParams(temperature=0, max_tokens=2)))
    while sequence.finish_reason is None:
        engine.step()
    assert sequence.n_reused == 128


def test_preempted_sequence_gives_the_same_tokens(tmp_path: Path) -> None:
    gguf, prompts = write(tmp_path), [tokens(60), tokens(61)[::-1], tokens(70)]
    alone = [answer(Engine(watched(gguf), 256, traits=ANSWERS), prompt, 80) for prompt in prompts]
    engine = Engine(watched(gguf, n_blocks=6), 256, traits=ANSWERS)
    running = [
        engine.enqueue(engine.prepare(prompt, SamplingParams(temperature=0, max_tokens=80)))
        for prompt in prompts
    ]
    while any(sequence.finish_reason is None for sequence in running):
        engine.step()
    assert engine.counters().preemptions > 0
    assert [sequence.generated for sequence in running] == alone


def test_scored_text_is_a_prompt_unless_it_counts_as_an_answer(tmp_path: Path) -> None:
    gguf, ids = write(tmp_path), tokens(30)
    engine = Engine(watched(gguf), 256, traits=ANSWERS)
    for as_answer in (False, True):
        expected = run(cpu(gguf, EVERY), ids, np.full(30, as_answer))
        np.testing.assert_array_equal(scores(engine, ids, as_answer=as_answer), expected)


# ---- a model with its file of thresholds


@pytest.fixture(autouse=True)
def _measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Simulate a machine that reads channels as fast as rows, without storing the measurement."""
    monkeypatch.setattr(channel_rates, "measure_rates", lambda n_threads, work: ChannelRates(1e9, 1e9))
    monkeypatch.setenv("HOTSET_HOME", str(tmp_path / "home"))


def load(path: Path, **options: Any) -> hotset.Model:
    return hotset.load(path, device="cpu", n_threads=1, n_ctx=256, **options)


def test_file_next_to_a_model_is_named_and_used_on_request(tmp_path: Path) -> None:
    gguf = write(tmp_path)
    with pytest.raises(hotset.HotsetError, match="hotset sparse calibrate"):
        load(gguf.path, sparsity="threshold")
    thresholds_of(gguf).save(thresholds_path(gguf.path))
    with load(gguf.path) as model:
        assert model.sparsity.mode == "dense"
        assert any("thresholds that are not used" in note for note in model.notes)
        assert model.engine.thresholded == "none"
    with load(gguf.path, sparsity="threshold") as model:
        assert model.sparsity.mode == "threshold"
        assert not any("not used" in note for note in model.notes)
        assert model.engine.thresholded == "answers"
    with load(gguf.path, sparsity="threshold", sparse_prompts=True) as model:
        assert model.engine.thresholded == "all"


def test_built_files_are_noted_and_found_again(tmp_path: Path) -> None:
    gguf = write(tmp_path, type=T.Q4_0)
    thresholds_of(gguf).save(thresholds_path(gguf.path))
    for how in ("built in", "opened"):
        with load(gguf.path, sparsity="threshold") as model:
            assert any(note.startswith(f"input-major matrices: {how}") for note in model.notes)
            codes = model.weights.data("blk.0.attn_q_c.blocks")
            assert codes.ctypes.data % 128 == 0


def test_a_file_can_be_named(tmp_path: Path) -> None:
    gguf = write(tmp_path)
    replace(thresholds_of(gguf), prompts=True).save(tmp_path / "other.json")
    with load(gguf.path, thresholds=tmp_path / "other.json") as model:
        assert (model.sparsity.mode, model.engine.thresholded) == ("threshold", "all")


@pytest.mark.parametrize("mode", ["dense", "exact", "predicted"])
def test_it_combines_with_the_modes_of_relu_models(tmp_path: Path, mode: BaseMode) -> None:
    gguf = open_gguf(write_relu(tmp_path / "model.gguf", architecture="bamboo", n_embd=64, n_ff=288))
    thresholds_of(gguf, mode, LayerThresholds(attn_in=0.6, attn_out=0.1)).save(thresholds_path(gguf.path))
    with load(gguf.path, sparsity="threshold") as model, load(gguf.path, sparsity=mode) as plain:
        assert (model.sparsity.predictor, model.graph.has_thresholds) == (plain.sparsity.predictor, True)
        ids = tokens(20)
        np.testing.assert_array_equal(model.logits(ids), plain.logits(ids))  # a prompt has no thresholds
        with model.thread.exclusive() as engine:
            assert (scores(engine, ids, as_answer=True) != plain.logits(ids)).any()


def test_thresholds_of_zero_are_dense(tmp_path: Path) -> None:
    gguf = write(tmp_path, type=T.Q4_0)
    thresholds_of(gguf, layer_thresholds=LayerThresholds()).save(thresholds_path(gguf.path))
    with load(gguf.path, sparsity="threshold", sparse_prompts=True) as model, load(gguf.path) as plain:
        np.testing.assert_array_equal(model.logits(tokens(20)), plain.logits(tokens(20)))


def test_settings_that_contradict_each_other(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="`thresholds` requires sparsity='threshold'"):
        hotset.LoadSettings(sparsity="dense", thresholds="x.json")
    with pytest.raises(InvalidRequestError, match="sparse_prompts requires sparsity='threshold'"):
        hotset.LoadSettings(sparse_prompts=True)
