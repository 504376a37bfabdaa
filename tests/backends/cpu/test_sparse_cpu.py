"""The sparse native engine: `exact` is bitwise `dense`, and `predicted` follows its own mask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend_runs import batch, logits_of, tokens
from cases import quick_are
from derived_bounds import Oracle
from sparse_runs import ACTIVATIONS, MODELS, N_FF, ONE_BY_ONE, Replayed, T, cpu, prepared, step, write

from hotset import _core
from hotset.backends.reference import ReferenceBackend
from hotset.formats.gguf import GGUFFile
from hotset.formats.quants import GGMLType, dequantize
from hotset.model.config import config_from_gguf


def assert_exact_is_dense(gguf: GGUFFile) -> None:
    ids, blocks = tokens(40), [2, 0]
    expected = logits_of(cpu(gguf, "dense", n_threads=1), ids, [], blocks)
    for n_threads in (1, 2):
        exact = cpu(gguf, "exact", n_threads=n_threads)
        for splits in ([], ONE_BY_ONE, [3, 8, 25, 39]):
            np.testing.assert_array_equal(logits_of(exact, ids, splits, blocks), expected)
    stats = exact.stats()
    assert stats is not None
    rows = stats.up_rows if stats.gate_rows.any() else stats.down_rows
    assert rows.max() < N_FF  # otherwise the test shows nothing: no rows were left out


@pytest.mark.parametrize(
    "type_", [T.F32, T.F16, T.BF16, T.Q8_0, T.Q4_0, T.Q4_1, T.Q5_0], ids=lambda t: t.name
)
@pytest.mark.parametrize("model", MODELS)
def test_exact_is_dense(tmp_path: Path, model: str, type_: GGMLType) -> None:
    assert_exact_is_dense(write(tmp_path, model, type_))


@pytest.mark.parametrize("type_", [T.F32, T.Q4_0], ids=lambda t: t.name)
@pytest.mark.parametrize("model", ["llama", "bamboo"])
def test_exact_is_dense_where_most_neurons_fire(tmp_path: Path, model: str, type_: GGMLType) -> None:
    """Check that all rows of a chunk are read then, even for one token, because that is quicker."""
    rng = np.random.default_rng(0)
    gate = np.outer(rng.uniform(0.5, 1.5, N_FF), rng.standard_normal(64))  # equal signs for one token
    gate[::9] = rng.standard_normal(gate[::9].shape)
    gguf = write(tmp_path, model, type_, replaced={f"blk.{i}.ffn_gate": gate for i in range(2)})
    ids, blocks = tokens(12), [2]
    exact = cpu(gguf, "exact")
    found = logits_of(exact, ids, ONE_BY_ONE, blocks)
    np.testing.assert_array_equal(found, logits_of(cpu(gguf, "dense"), ids, [], blocks))
    read = []
    for i in range(len(ids)):
        exact.step(batch([(ids[i : i + 1], i, blocks)]))
        stats = exact.stats()
        assert stats is not None
        read.append(stats.up_rows / N_FF)
    assert np.max(read) == 1
    assert np.min(read) < 0.5


PLAIN = [(model, type) for model in ("llama", "opt", "falcon-40b") for type in (T.F32, T.F16, T.Q8_0, T.Q4_0)]
# With Q5_0 the down projection stays dense; without a gate, no rows could be left out.
PLAIN.append(("llama", T.Q5_0))


@pytest.mark.parametrize(("model", "type_"), PLAIN, ids=lambda x: x if isinstance(x, str) else x.name)
def test_exact_is_dense_for_plain_files(tmp_path: Path, model: str, type_: GGMLType) -> None:
    assert_exact_is_dense(write(tmp_path, model, type_, dialect="gguf"))


@pytest.mark.parametrize("type_", [T.Q8_0, T.Q4_0], ids=lambda t: t.name)
def test_widths_that_planes_do_not_fit(tmp_path: Path, type_: GGMLType) -> None:
    """Check that the down projection then stays input-major."""
    of_down = lambda name: type_ if "ffn_down" in name else T.F32  # noqa: E731
    gguf = write(tmp_path, "llama", dialect="gguf", n_embd=80, type_of=of_down)
    assert_exact_is_dense(gguf)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_exact_is_dense_for_every_activation(tmp_path: Path, activation: str) -> None:
    keys = {"llama.hidden_activation": activation, **ACTIVATIONS[activation]}
    assert_exact_is_dense(write(tmp_path, "llama", T.Q4_0, dialect="gguf", keys=keys))


@pytest.mark.parametrize("dialect", ["powerinfer", "gguf"])
@pytest.mark.parametrize("mode", ["dense", "exact"])
@pytest.mark.parametrize("model", MODELS)
def test_the_reference_agrees(tmp_path: Path, model: str, mode: str, dialect: Any) -> None:
    gguf, ids = write(tmp_path, model, dialect=dialect), tokens(40)
    ready, graph = prepared(gguf, mode)
    backend = cpu(gguf, mode, kv_type="f32")
    found = logits_of(backend, ids, [7, 8, 9], [0])
    every = batch([(ids, 0, [0])], tuple(value.name for value in graph.values))
    tapped = backend.step(every)
    Oracle(ready.weights, graph, n_blocks=8, kv_type="f32").check(every, tapped)
    np.testing.assert_array_equal(tapped.logits, found)


@pytest.mark.parametrize("type_", quick_are((T.Q4_0,), [T.F32, T.Q8_0, T.Q4_0]), ids=lambda t: t.name)
@pytest.mark.parametrize("predictor", [None, "mlp:q8_0", "svd:32"])
@pytest.mark.parametrize("model", MODELS)
def test_predicted_is_the_masked_reference(
    tmp_path: Path, model: str, predictor: str | None, type_: GGMLType
) -> None:
    gguf, ids = write(tmp_path, model, type_), tokens(30)
    ready, graph = prepared(gguf, "predicted", predictor)
    engine = cpu(gguf, "predicted", predictor, kv_type="f32")
    names = [value.name for value in graph.values if value.name.endswith(".ffn_pred")]
    assert len(names) == 2
    found = step(engine, ids, names)
    scores = dict(found.taps)
    reference = Replayed(ready.weights, graph, n_blocks=1, scores=scores)
    step(reference, ids, ())
    # Check every operation. With all of them tapped nothing is fused, and the logits are the same.
    every = batch([(ids, 0, [0])], tuple(value.name for value in graph.values))
    tapped = cpu(gguf, "predicted", predictor, kv_type="f32").step(every)
    Oracle(ready.weights, graph, n_blocks=1, kv_type="f32").check(every, tapped)
    np.testing.assert_array_equal(tapped.logits, found.logits)
    stats, expected = engine.stats(), reference.stats()
    assert stats is not None
    assert expected is not None
    np.testing.assert_array_equal(stats.selected, expected.selected)
    assert stats.selected.min() > 0
    assert stats.selected.max() < N_FF * len(ids)
    np.testing.assert_array_equal(logits_of(engine, ids, ONE_BY_ONE, [1]), found.logits)


def bound_of_product(weight: np.ndarray, x: np.ndarray, error: np.ndarray, *, quantized: bool) -> np.ndarray:
    """Return a bound on the error of x @ weight.T: from `error` of x, int8 activations and rounding."""
    if quantized:  # half a step of 1/127 of the largest of 32 values, and the float32 scale
        blocks = np.abs(x).reshape(len(x), -1, 32)
        step = np.repeat(blocks.max(axis=2) / 127, 32, axis=1)
        error = error + 0.5001 * step
    rounding = x.shape[1] * 2.0**-23
    return error @ np.abs(weight).T + rounding * (np.abs(x) @ np.abs(weight).T)


@pytest.mark.parametrize("type_", [T.F32, T.Q4_0], ids=lambda t: t.name)
@pytest.mark.parametrize("model", MODELS)
def test_masks_differ_only_near_the_threshold(tmp_path: Path, model: str, type_: GGMLType) -> None:
    gguf, ids = write(tmp_path, model, type_), tokens(60)
    reads = {"ffn_inp": "blk.{}.ffn_inp", "layer_input": "blk.{}.out"}[config_from_gguf(gguf).predictor_input]
    layer = 1
    input_name = reads.format(layer if "ffn_inp" in reads else layer - 1)
    taps = step(cpu(gguf, "predicted"), ids, (input_name, f"blk.{layer}.ffn_pred")).taps
    p, scores = taps[input_name].astype(np.float64), taps[f"blk.{layer}.ffn_pred"]
    fc1, fc2 = (
        dequantize(gguf.data(name), gguf.tensors[name].type, gguf.tensors[name].shape)
        .reshape(gguf.tensors[name].shape[::-1])
        .astype(np.float64)
        for name in (f"blk.{layer}.fc1.weight", f"blk.{layer}.fc2.weight")
    )
    hidden = np.maximum(p @ fc1.T, 0)
    quantized = type_ == T.Q4_0
    error = bound_of_product(fc1, p, np.zeros_like(p), quantized=quantized)
    # The second product rounds the first one's result: its step depends on hidden and error together.
    bound = bound_of_product(fc2, hidden + error, error, quantized=quantized)
    expected = hidden @ fc2.T
    assert (np.abs(scores - expected) <= bound).all()
    threshold = gguf.metadata["powerinfer.sparse_threshold"]
    differs = (scores < threshold) != (expected < threshold)
    assert (np.abs(expected - threshold)[differs] <= bound[differs]).all()


@pytest.mark.parametrize("type_", [T.F32, T.Q4_0], ids=lambda t: t.name)
@pytest.mark.parametrize("model", MODELS)
def test_predictors_that_say_all_or_none(tmp_path: Path, model: str, type_: GGMLType) -> None:
    ids = tokens(40)
    everything = write(tmp_path / "all", model, type_, threshold=-1e30)
    dense = logits_of(cpu(everything, "dense"), ids, [], [0])
    for splits in ([], ONE_BY_ONE):
        np.testing.assert_array_equal(logits_of(cpu(everything, "predicted"), ids, splits, [0]), dense)
    nothing = write(tmp_path / "none", model, type_, threshold=1e30)
    found = logits_of(cpu(nothing, "predicted"), ids, ONE_BY_ONE, [0])
    width = 64
    replaced = {f"blk.{i}.ffn_down_t": np.zeros((N_FF, width), np.float32) for i in range(2)}
    without = write(tmp_path / "without", model, type_, replaced=replaced)
    np.testing.assert_array_equal(found, logits_of(cpu(without, "dense"), ids, [], [0]))


@pytest.mark.parametrize("mode", ["exact", "predicted"])
@pytest.mark.parametrize("type_", [T.F16, T.Q4_0], ids=lambda t: t.name)
@pytest.mark.parametrize("model", ["bamboo", "opt"])
def test_a_token_does_not_depend_on_its_neighbours(
    tmp_path: Path, model: str, type_: GGMLType, mode: str
) -> None:
    gguf = write(tmp_path, model, type_)
    parts = [(tokens(n, seed=n), [n % 8]) for n in (1, 2, 3, 5)]
    alone = [logits_of(cpu(gguf, mode, n_threads=1), ids, [], blocks) for ids, blocks in parts]
    together = cpu(gguf, mode).step(batch([(ids, 0, blocks) for ids, blocks in parts])).logits
    np.testing.assert_array_equal(together, np.concatenate(alone))


@pytest.mark.parametrize("type_", [T.F16, T.Q4_0, T.Q8_0], ids=lambda t: t.name)
@pytest.mark.parametrize("dialect", ["powerinfer", "gguf"])
@pytest.mark.parametrize("predictor", [None, "svd"])
def test_the_same_bits_on_every_instruction_set(
    tmp_path: Path, type_: GGMLType, dialect: Any, predictor: str | None
) -> None:
    gguf, ids = write(tmp_path, "llama", type_, dialect=dialect), tokens(30)
    mode = "predicted" if predictor or dialect == "powerinfer" else "exact"
    expected = logits_of(cpu(gguf, mode, predictor, isa="scalar"), ids, [9, 10, 11], [0])
    for isa in _core.available_isas():
        found = logits_of(cpu(gguf, mode, predictor, isa=isa), ids, ONE_BY_ONE, [0])
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("predictor", [None, "svd"])
def test_taps_inside_the_ffn_change_nothing(tmp_path: Path, predictor: str | None) -> None:
    gguf, ids = write(tmp_path, "bamboo", T.Q4_0), tokens(25)
    engine = cpu(gguf, "predicted", predictor)
    plain = step(engine, ids, ()).logits.copy()
    _, graph = prepared(gguf, "predicted", predictor)
    for value in graph.values:
        tapped = step(engine, ids, (value.name,))
        np.testing.assert_array_equal(tapped.logits, plain)
        assert tapped.taps[value.name].shape[1] == value.width


def test_statistics_equal_the_reference(tmp_path: Path) -> None:
    gguf, ids = write(tmp_path, "llama"), tokens(30)
    for mode in ("dense", "exact", "predicted"):
        ready, graph = prepared(gguf, mode)
        reference = ReferenceBackend(ready.weights, graph, n_blocks=1, kv_type="f32")
        engine = cpu(gguf, mode, kv_type="f32")
        at = 0
        for n in (10, 1, 1, 18):
            found = []
            for backend in (reference, engine):
                backend.step(batch([(ids[at : at + n], at, [0])]))
                found.append(backend.stats())
            at += n
            expected, counted = found
            assert counted is not None
            assert expected is not None
            np.testing.assert_array_equal(counted.selected, expected.selected)
            np.testing.assert_array_equal(counted.active, expected.active)
            if n == 1:
                assert (counted.down_rows == N_FF).all() == (mode == "dense")
            assert counted.ffn.min() > 0
            assert counted.attention.min() > 0
            assert (counted.predictor > 0).all() == (mode == "predicted")


def test_positions_end_where_they_were_learned(tmp_path: Path) -> None:
    gguf = write(tmp_path, "opt", n_ctx=50)
    engine = cpu(gguf, "exact")
    step(engine, tokens(50), ())
    with pytest.raises(Exception, match="context of 50"):
        step(engine, tokens(51), ())
