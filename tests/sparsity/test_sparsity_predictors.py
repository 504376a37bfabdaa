"""Predictors that hotset builds or requantises: their scores, their recall, and their binding to a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_gguf import write_relu

from hotset.backends.base import Backend
from hotset.backends.reference import ReferenceBackend
from hotset.errors import FormatError, InvalidRequestError
from hotset.formats.gguf import GGUFFile, open_gguf
from hotset.formats.quants import GGMLType, dequantize
from hotset.formats.source import WeightSource
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe
from hotset.model.graph import Graph
from hotset.sparsity import sidecar, taps
from hotset.sparsity.builders import decompose
from hotset.sparsity.calibration import Calibration, samples, threshold
from hotset.sparsity.modes import choose
from hotset.sparsity.predictor_spec import PredictorSpec, parse_predictor
from hotset.sparsity.preparing import Prepared, prepare
from hotset.sparsity.profile import Profile, collect
from hotset.sparsity.stats import PredictorQuality, measure_predictor

ARCHITECTURES = ["llama", "bamboo", "falcon", "opt"]
N_FF, N_EMBD, N_VOCAB = 96, 64, 96
TOKENS = np.random.default_rng(7).integers(0, N_VOCAB, (4, 60)).astype(np.int32)


def tapped(backend: Backend, tokens: np.ndarray, names: Sequence[str]) -> dict[str, np.ndarray]:
    return taps.whole(taps.of_backend(backend), tokens, names)


def reference(weights: WeightSource, graph: Graph) -> ReferenceBackend:
    return ReferenceBackend(weights, graph, n_blocks=8)


GIVEN = Calibration(TOKENS, recall=0.99, open_backend=reference)
WRITTEN = Calibration(n_tokens=256, recall=0.99, open_backend=reference)
DRAWN = Calibration(recall=0.99, open_backend=None)


def model(path: Path, architecture: str = "llama", **how: Any) -> GGUFFile:
    how.setdefault("dialect", "gguf")
    return open_gguf(write_relu(path, architecture, **how))


def prepared(gguf: GGUFFile, predictor: str, calibration: Calibration = GIVEN, **how: Any) -> Prepared:
    config = config_from_gguf(gguf)
    return prepare(
        gguf, config, choose(config, gguf.tensors, None, predictor), calibration=calibration, **how
    )


def opened(gguf: GGUFFile, ready: Prepared) -> tuple[ReferenceBackend, Graph]:
    graph = describe(config_from_gguf(gguf), ready.weights.tensors, ready.predictor)
    return reference(ready.weights, graph), graph


def quality(gguf: GGUFFile, ready: Prepared) -> list[PredictorQuality]:
    backend, graph = opened(gguf, ready)
    return measure_predictor(taps.of_backend(backend), graph, TOKENS)


def matrix(weights: WeightSource, name: str) -> np.ndarray:
    info = weights.tensors[name]
    return dequantize(weights.data(name), info.type, info.shape)


def test_what_the_option_says() -> None:
    assert parse_predictor("mlp") == PredictorSpec("mlp")
    assert parse_predictor("mlp:q4_0") == PredictorSpec("mlp", type=GGMLType.Q4_0)
    assert parse_predictor("svd") == PredictorSpec("svd")
    assert parse_predictor("svd:64") == PredictorSpec("svd", rank=64)
    assert parse_predictor("svd:64:f16") == PredictorSpec("svd", rank=64, type=GGMLType.F16)
    assert str(parse_predictor("svd:64:f16")) == "svd:64:f16"
    assert parse_predictor("mlp:q3_k") == PredictorSpec("mlp", type=GGMLType.Q3_K)
    for text in ("", "mlp:f16", "mlp:q8_0:1", "svd:0", "svd:x", "svd:8:q5_0", "svd:"):
        with pytest.raises(InvalidRequestError, match=r"must be mlp, mlp:TYPE \(q8_0, q4_0, q3_k\), svd"):
            parse_predictor(text)
    for text in ("sign", "SIGN:-0.25", "sign:x"):
        with pytest.raises(InvalidRequestError, match=r"^the predictor sign was removed; use svd$"):
            parse_predictor(text)


def test_the_threshold_is_the_highest_that_keeps_the_recall() -> None:
    scores = np.array([[4.0, 3.0, 2.0, 1.0, 9.0]])
    neurons = np.array([[10.0, 80.0, -5.0, 5.0, 0.0]])  # in order of score: 5, 5, 80, 10
    assert threshold(scores, neurons, 1.0) == 1.0
    assert threshold(scores, neurons, 0.96) == 1.0
    assert threshold(scores, neurons, 0.94) == 2.0
    assert threshold(scores, neurons, 0.89) == 3.0
    assert threshold(scores, neurons, 0.1) == 4.0
    assert threshold(scores, np.zeros((1, 5)), 0.9) == -np.inf
    rng = np.random.default_rng(1)
    scores, neurons = rng.standard_normal((40, 70)), np.maximum(rng.standard_normal((40, 70)), 0)
    for recall in (0.5, 0.9, 0.99):
        at = threshold(scores, neurons, recall)
        kept, above = neurons[scores >= at].sum(), neurons[scores > at].sum()
        assert kept >= recall * neurons.sum() > above


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("calibration", [GIVEN, WRITTEN, DRAWN], ids=["given", "written", "drawn"])
def test_predictors_keep_the_calibrated_recall(
    architecture: str, calibration: Calibration, tmp_path: Path
) -> None:
    gguf = model(tmp_path / "model.gguf", architecture)
    ready = prepared(gguf, "svd:16", calibration)
    layers = quality(gguf, ready)
    # The first layer reads the same inputs as in calibration; the inputs of other layers have passed through
    # a predicted layer. Tokens outside the calibration are similar to those in it, but not equal.
    tolerance = 1e-3 if calibration is GIVEN else 0.02
    assert layers[0].of_magnitude >= 0.99 - tolerance
    assert all(layer.of_magnitude > 0.95 for layer in layers)
    assert all(layer.selected_share < 1 for layer in layers)
    assert all(layer.precision > layer.active_share for layer in layers)


def test_a_gate_of_low_rank_is_predicted_all_but_exactly(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    low = {
        f"blk.{i}.ffn_gate": rng.standard_normal((N_FF, 8)) @ rng.standard_normal((8, N_EMBD))
        for i in range(2)
    }
    gguf = model(tmp_path / "model.gguf", replaced=low)
    ready = prepared(gguf, "svd:8:f16")
    for i in range(2):
        a, b = (matrix(ready.weights, f"blk.{i}.svd_{part}.weight") for part in "ab")
        assert (a.shape, b.shape) == ((8, N_EMBD), (N_FF, 8))
        error = np.linalg.norm(b @ a - low[f"blk.{i}.ffn_gate"]) / np.linalg.norm(low[f"blk.{i}.ffn_gate"])
        assert error < 2e-3  # of float16
    for layer in quality(gguf, ready):
        assert layer.recall > 0.85  # of neurons; the target was 0.99 of their magnitude
        assert layer.precision > 0.99


@pytest.mark.parametrize("spectrum", ["falling", "outlier", "low"])
def test_a_decomposition_is_nearly_the_best_of_its_rank(spectrum: str) -> None:
    """Check an outlier of a hundred times the rest, as in the norm weights of trained models."""
    rng = np.random.default_rng(0)
    n, d, rank = 700, 300, 40
    values = (1 + np.arange(d)) ** -0.5
    if spectrum == "outlier":
        values[0] = 100
    if spectrum == "low":
        values[24:] = 0
    u, v = (np.linalg.qr(rng.standard_normal((rows, d)))[0] for rows in (n, d))
    w = ((u * values) @ v.T).astype(np.float32)

    class Rows:
        n_embd = d

        def blocks(self) -> Any:
            yield slice(0, 300), w[:300]
            yield slice(300, n), w[300:]

    rows: Any = Rows()
    rows.n = n
    weight = rng.uniform(0.1, 3, d).astype(np.float32)
    a, b = decompose(rows, weight, rank, rng)
    assert (a.shape, b.shape) == ((rank, d), (n, rank))
    best = np.linalg.svd(w * weight, compute_uv=False)
    error = np.linalg.norm((w - b @ a) * weight)
    assert error < 1.12 * np.sqrt((best[rank:] ** 2).sum()) + 1e-5 * best[0]
    lengths = np.linalg.norm(b, axis=0)
    used = 24 if spectrum == "low" else rank
    np.testing.assert_allclose(lengths[:used], 1, rtol=1e-4)


def test_more_rank_selects_fewer_neurons(tmp_path: Path) -> None:
    gguf = model(tmp_path / "model.gguf")
    shares = [
        np.mean([layer.selected_share for layer in quality(gguf, prepared(gguf, f"svd:{rank}"))])
        for rank in (8, 32, 64)
    ]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] - shares[-1] > 0.1


def test_a_bias_counts_in_a_score(tmp_path: Path) -> None:
    """Check a large bias in opt's up projection: with it, a neuron fires whatever its row is."""
    gguf = model(tmp_path / "model.gguf", "opt")
    bias = np.asarray(gguf.data("blk.0.ffn_up.bias")).view(np.float32)
    ready = prepared(gguf, "svd:64:f16")
    assert np.array_equal(matrix(ready.weights, "blk.0.always.bias"), bias)
    backend, _ = opened(gguf, ready)
    seen = tapped(backend, TOKENS[0], ("blk.0.ffn_up", "blk.0.ffn_pred"))
    np.testing.assert_allclose(seen["blk.0.ffn_pred"], seen["blk.0.ffn_up"], atol=0.02)


def test_a_predictor_is_built_again_for_other_settings(tmp_path: Path) -> None:
    gguf = model(tmp_path / "model.gguf")

    def was_built(predictor: str, calibration: Calibration) -> bool:
        note = prepared(gguf, predictor, calibration).notes[-1]
        assert note.startswith(f"predictor {predictor}")
        return "built in" in note

    assert was_built("svd:16", GIVEN)
    assert not was_built("svd:16", GIVEN)
    assert was_built("svd:16", Calibration(TOKENS[:2], open_backend=reference))
    assert was_built("svd:16", Calibration(TOKENS[:2], recall=0.9, open_backend=reference))
    assert was_built("svd:8", DRAWN)
    assert not was_built("svd:8", DRAWN)
    other = prepare(
        gguf, config := config_from_gguf(gguf, activation="relu2"),
        choose(config, gguf.tensors, None, "svd:8"), calibration=DRAWN,
    )  # fmt: skip
    assert "built in" in other.notes[-1]


def test_odd_calibration_gives_one_message() -> None:
    with pytest.raises(InvalidRequestError, match=r"recall .* not 0"):
        Calibration(recall=0)
    with pytest.raises(InvalidRequestError, match="empty"):
        Calibration(np.zeros(0, np.int32))
    with pytest.raises(InvalidRequestError, match="at least 16 tokens"):
        Calibration(n_tokens=3)


@pytest.mark.parametrize(
    ("type_", "width", "most"), [("q8_0", 64, 0.02), ("q4_0", 64, 0.3), ("q3_k", 256, 0.4)]
)
def test_a_published_predictor_in_fewer_bits(type_: str, width: int, most: float, tmp_path: Path) -> None:
    gguf = model(tmp_path / "model.gguf", dialect="powerinfer", ranks=(33, width), n_embd=width)
    ready = prepared(gguf, f"mlp:{type_}")
    asked = parse_predictor(f"mlp:{type_}").type
    types = {
        name: ready.weights.tensors[f"blk.{name}.weight"].type
        for name in ("0.fc1", "0.fc2", "1.fc1", "1.fc2")
    }
    assert types.pop("0.fc2") == GGMLType.F32  # blocks do not divide rows of 33
    assert set(types.values()) == {asked}
    assert ready.predictor is not None
    assert ready.predictor.thresholds == (pytest.approx(0.1),) * 2
    plain, few = (
        tapped(opened(gguf, r)[0], TOKENS[0], ("blk.0.ffn_pred",))["blk.0.ffn_pred"]
        for r in (prepared(gguf, "mlp"), ready)
    )
    error = np.abs(few - plain).max() / np.abs(plain).max()
    assert 0 < error < most


def test_blocks_that_do_not_divide_rows_give_way_to_smaller_ones(tmp_path: Path) -> None:
    gguf = model(tmp_path / "model.gguf")
    tensors = prepared(gguf, "svd:16:q3_k").weights.tensors
    assert tensors["blk.0.svd_a.weight"].type == GGMLType.Q4_0  # rows of 64 values
    assert tensors["blk.0.svd_b.weight"].type == GGMLType.F16  # of 16


def test_rows_that_no_blocks_divide_give_one_message(tmp_path: Path) -> None:
    gguf = model(tmp_path / "model.gguf", dialect="powerinfer", ranks=(33, 17), n_embd=48)
    with pytest.raises(InvalidRequestError, match="rows of 48 values cannot be stored as Q8_0; use mlp"):
        prepared(gguf, "mlp:q8_0")


@pytest.mark.parametrize("predictor", ["mlp", "mlp:q8_0", "svd:32"])
def test_leading_neurons_that_a_file_names_need_no_score(predictor: str, tmp_path: Path) -> None:
    keys = {"hotset.n_always": np.array([5, 0], np.int32)}
    whole = model(tmp_path / "whole.gguf", dialect="powerinfer", ranks=(32, 32))
    gguf = model(tmp_path / "model.gguf", dialect="powerinfer", ranks=(32, 32), keys=keys)
    ready = prepared(gguf, predictor)
    assert ready.predictor is not None
    assert ready.predictor.first == (5, 0)
    backend, graph = opened(gguf, ready)
    assert [ffn.mask.first for ffn in graph.ffns if ffn.mask] == [5, 0]
    names = ("blk.0.ffn_pred", "blk.0.ffn_act", "blk.0.ffn_masked")
    scores, neurons, masked = (tapped(backend, TOKENS[0], names)[name] for name in names)
    assert scores.shape == (60, N_FF - 5)
    assert np.array_equal(masked[:, :5], neurons[:, :5])
    assert (masked[:, 5:] != neurons[:, 5:]).any()
    of_all = tapped(opened(whole, prepared(whole, predictor))[0], TOKENS[0], names[:1])["blk.0.ffn_pred"]
    if predictor != "svd:32":  # its decomposition is of the other rows
        np.testing.assert_allclose(scores, of_all[:, 5:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "value", [np.array([5], np.int32), np.array([96, 0], np.int32), [-1, 0], "5", [0.5, 1.0]]
)
def test_damaged_count_gives_one_message(value: Any, tmp_path: Path) -> None:
    gguf = model(tmp_path / "model.gguf", keys={"hotset.n_always": value})
    with pytest.raises(
        FormatError, match=r"hotset\.n_always must hold a number of neurons for each of 2 layers"
    ):
        prepared(gguf, "svd:8", DRAWN)


@pytest.mark.parametrize("predictor", ["mlp", "svd:8"])
@pytest.mark.parametrize("architecture", ["llama", "opt"])
def test_neurons_that_a_profile_saw_always_fire_are_selected(
    predictor: str, architecture: str, tmp_path: Path
) -> None:
    gguf = model(tmp_path / "model.gguf", architecture, dialect="powerinfer")
    counts = np.full((2, N_FF), 94, np.uint64)
    counts[0, [3, 50, 95]] = 95  # of 100
    profile = Profile(tuple(counts), 100, sidecar.fingerprint(gguf), ("hash",))
    ready = prepared(gguf, predictor, profile=profile)
    assert ready.notes[-1].startswith("3 of 192 neurons fire for at least 95% of the profile's tokens")
    backend, _ = opened(gguf, ready)
    scores = tapped(backend, TOKENS[0], ("blk.0.ffn_pred",))["blk.0.ffn_pred"]
    assert np.flatnonzero((scores == np.inf).all(axis=0)).tolist() == [3, 50, 95]
    assert np.isfinite(np.delete(scores, [3, 50, 95], axis=1)).all()
    with pytest.raises(InvalidRequestError, match="another model file"):
        prepared(gguf, predictor, profile=Profile(tuple(counts), 100, "other", ("hash",)))


@pytest.mark.parametrize("architecture", ["llama", "opt", "falcon"])
def test_drawn_inputs_are_spread_as_the_norm_makes_them(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that inputs have a layer norm's bias as mean and its weights as width (to 5 standard errors)."""
    monkeypatch.setattr(
        "hotset.sparsity.calibration.N_DRAWN", 20_000
    )  # so that the error is small compared with a bias
    gguf = model(tmp_path / "model.gguf", architecture, dialect="powerinfer")
    config = config_from_gguf(gguf)
    for i, sample in enumerate(samples(gguf, config, gguf, DRAWN)):
        names = (f"blk.{i}.ffn_norm", f"blk.{i}.attn_norm")
        norm = next(name for name in names if f"{name}.weight" in gguf.tensors)
        weight = np.abs(matrix(gguf, f"{norm}.weight"))
        biased = f"{norm}.bias" in gguf.tensors
        assert biased == (architecture != "llama")
        bias = matrix(gguf, f"{norm}.bias") if biased else np.zeros_like(weight)
        error = weight / np.sqrt(len(sample.inputs))
        assert (np.abs(bias) > 10 * error).any() == biased
        mean, spread = sample.inputs.mean(axis=0), sample.inputs.std(axis=0)
        assert (np.abs(mean - bias) < 5 * error).all()
        assert (np.abs(spread - weight) < 5 * error).all()


def test_a_profile_adds_to_the_bias_that_a_predictor_has(tmp_path: Path) -> None:
    """Check that a built predictor adds the biases of OPT's neurons to its scores."""
    gguf = model(tmp_path / "model.gguf", "opt", dialect="powerinfer")
    counts = np.zeros((2, N_FF), np.uint64)
    counts[:, 7] = 100
    profile = Profile(tuple(counts), 100, sidecar.fingerprint(gguf), ("hash",))
    names = ("blk.0.ffn_pred", "blk.1.ffn_pred")
    ready = prepared(gguf, "svd:8")
    biases = matrix(ready.weights, "blk.0.always.bias")
    assert np.abs(biases).max() > 0
    alone = tapped(opened(gguf, ready)[0], TOKENS[0], names)
    found = tapped(opened(gguf, prepared(gguf, "svd:8", profile=profile))[0], TOKENS[0], names[:1])
    others = np.arange(N_FF) != 7
    np.testing.assert_array_equal(found[names[0]][:, others], alone[names[0]][:, others])
    assert np.isposinf(found[names[0]][:, 7]).all()


def test_texts_that_a_model_writes(tmp_path: Path) -> None:
    gguf = model(tmp_path / "model.gguf")
    graph = describe(config_from_gguf(gguf), gguf.tensors)
    one, same = (taps.generate(reference(gguf, graph), 3, 70, first=5, seed=1) for _ in range(2))
    assert np.array_equal(one, same)
    assert one.shape == (3, 70)
    assert (one[:, 0] == 5).all()
    assert len({tuple(row) for row in one.tolist()}) == 3
    # For samples at temperature 1, the mean log-probability is minus the entropy: compute both.
    from hotset.backends.base import Batch

    blocks, steps = np.arange(2, dtype=np.int32)[None], np.arange(70, dtype=np.int32)
    logits = (
        reference(gguf, graph).step(Batch(one[0], steps, steps * 0, blocks, steps)).logits.astype(np.float64)
    )
    logp = (
        logits
        - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
        - logits.max(1, keepdims=True)
    )
    entropy = -(np.exp(logp) * logp).sum(1)[:-1]
    surprise = -logp[np.arange(69), one[0, 1:]]
    assert abs(surprise.mean() - entropy.mean()) < 0.5


def test_the_native_backend_calibrates_and_profiles(tmp_path: Path) -> None:
    """Check the default of prepare: the CPU backend writes a text and records its inputs."""
    pytest.importorskip("hotset._core")
    gguf = model(tmp_path / "model.gguf", "bamboo", n_head=2, n_head_kv=1)
    config = config_from_gguf(gguf)
    ready = prepare(gguf, config, choose(config, gguf.tensors, None, "svd:32"))
    for layer in quality(gguf, ready):
        assert layer.of_magnitude > 0.93
        assert layer.selected_share < 1
    graph = describe(config, ready.weights.tensors)
    profiles = [
        collect(taps.of_backend(open_backend(ready.weights, graph)), config, TOKENS, model="m")
        for open_backend in (taps.open_cpu, reference)
    ]
    for one, other in zip(*(profile.counts for profile in profiles), strict=True):
        assert np.abs(one.astype(int) - other.astype(int)).max() <= 0.05 * TOKENS.size


def test_predictor_of_the_requested_type_is_used_unchanged(tmp_path: Path) -> None:
    gguf = model(tmp_path / "m.gguf", dialect="powerinfer", type_of=lambda name: GGMLType.Q8_0)
    ready = prepared(gguf, "mlp:q8_0")
    assert not any("predictor" in note for note in ready.notes)
    name = "blk.0.fc1.weight"
    np.testing.assert_array_equal(ready.weights.data(name), gguf.data(name))
