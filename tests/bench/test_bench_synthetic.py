"""The synthetic models of bench/: neurons fire as often as planted, and the planted predictors find them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import planted
import pytest
import synthetic
from synthetic import Shape, write_idle_experts, write_sparse_model

from hotset.backends.base import BLOCK_SIZE, Batch
from hotset.backends.reference import ReferenceBackend
from hotset.formats.gguf import open_gguf
from hotset.formats.quants import GGMLType, dequantize
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe
from hotset.model.predictor import Predictor

SHAPE = Shape(d=256, ff=512, layers=2, heads=4, kv_heads=2)
N_TOKENS = 384


def matrix(path: Path, name: str) -> np.ndarray:
    with open_gguf(path) as file:
        info = file.tensors[name]
        return dequantize(file.data(name), info.type, info.shape)


def taps(path: Path, names: list[str], predicted: bool = False) -> dict[str, np.ndarray]:
    """Return values of the reference engine for random tokens, [N_TOKENS, width] each."""
    with open_gguf(path) as file:
        config = config_from_gguf(file)
        predictor = Predictor("mlp", (config.sparse_threshold,) * config.n_layer) if predicted else None
        graph = describe(config, file.tensors, predictor)
        backend = ReferenceBackend(file, graph, n_blocks=N_TOKENS // BLOCK_SIZE)
        tokens = np.random.default_rng(1).integers(0, config.n_vocab, N_TOKENS, dtype=np.int32)
        positions = np.arange(N_TOKENS, dtype=np.int32)
        blocks = np.arange(N_TOKENS // BLOCK_SIZE, dtype=np.int32)[None]
        batch = Batch(tokens, positions, 0 * positions, blocks, positions[-1:], tuple(names))
        return dict(backend.step(batch).taps)


def make(path: Path, type: GGMLType = GGMLType.F32, **options: object) -> list[np.ndarray]:
    defaults: dict[str, object] = {"rank": 32, "n_vocab": 400, "n_ctx": N_TOKENS}
    return write_sparse_model(path, SHAPE, type, **(defaults | options))  # type: ignore[arg-type]


@pytest.mark.parametrize("density", [0.02, 0.1, 0.4, 0.8])
def test_probabilities_have_the_requested_mean(density: float) -> None:
    for skew in ("power", "uniform"):
        p = planted.firing_probabilities(14336, density, skew)
        assert p.mean() == pytest.approx(density, rel=1e-3)
        assert (np.diff(p) <= 0).all()
        assert p[0] <= planted.HOTTEST
        assert (p[0] == p[-1]) == (skew == "uniform")


def test_a_density_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="between 0 and"):
        planted.firing_probabilities(100, 1.0, "power")


@pytest.mark.parametrize("type", planted.TYPES_OF_PLANTED)
def test_planted_weights_are_the_same_numbers_in_every_type(type: GGMLType) -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(-7, 8, (6, 96)).astype(np.int8)
    scales = planted.few_bits(rng.uniform(1e-3, 1e-2, (6, 3)), 5)
    stored = planted.encode(codes, scales, type)
    expected = codes * np.repeat(scales, 32, axis=1)
    np.testing.assert_array_equal(dequantize(stored, type, (96, 6)), expected.astype(np.float32))


@pytest.mark.parametrize("kind", ["llama", "bamboo"])
def test_both_files_hold_the_same_weights(tmp_path: Path, kind: synthetic.Kind) -> None:
    sparse, plain = tmp_path / "sparse.gguf", tmp_path / "plain.gguf"
    make(sparse, GGMLType.Q4_0, kind=kind)
    make(plain, GGMLType.Q4_0, kind=kind, plain=True)
    np.testing.assert_array_equal(
        matrix(sparse, "blk.1.ffn_down_t.weight").T, matrix(plain, "blk.1.ffn_down.weight")
    )
    with open_gguf(sparse) as a, open_gguf(plain) as b:
        assert (a.dialect, b.dialect) == ("powerinfer", "gguf")
        common = a.tensors.keys() & b.tensors.keys()
        assert {name.split(".", 2)[-1] for name in a.tensors.keys() - common} == {
            "ffn_down_t.weight", "fc1.weight", "fc2.weight",
        }  # fmt: skip
        for name in common:
            np.testing.assert_array_equal(a.data(name), b.data(name))


def test_experts_have_the_requested_share_of_idle_neurons(tmp_path: Path) -> None:
    path, idle = tmp_path / "experts.gguf", 0.6
    shape = Shape(d=256, ff=96, layers=2, heads=4, kv_heads=2, experts=4, used=2)
    write_idle_experts(path, shape, GGMLType.Q8_0, idle=idle, n_vocab=400, n_ctx=N_TOKENS)
    names = [f"blk.{i}.ffn_gate_act" for i in range(shape.layers)]
    for fired in taps(path, names).values():
        assert (fired != 0).mean() == pytest.approx(1 - idle, abs=0.02)


@pytest.mark.parametrize("kind", synthetic.KINDS)
@pytest.mark.parametrize("skew", ["power", "uniform"])
def test_neurons_fire_as_planted(tmp_path: Path, kind: synthetic.Kind, skew: planted.Skew) -> None:
    path = tmp_path / "plain.gguf"
    probabilities = make(path, kind=kind, plain=True, skew=skew)
    names = [f"blk.{i}.ffn_act" for i in range(SHAPE.layers)]
    share = 0.5 if kind == "bamboo" else 1.0  # up fires half of the time
    for name, p in zip(names, probabilities, strict=True):
        frequency = (taps(path, [name])[name] != 0).mean(axis=0) / share
        assert p.mean() == pytest.approx(0.1, rel=0.01)
        assert frequency.mean() == pytest.approx(p.mean(), rel=0.12)
        # Chance and the attention of other tokens move a neuron by at most 5 standard deviations
        spread = np.sqrt(p * (1 - p * share) / (N_TOKENS * share)) + 0.02
        assert (np.abs(frequency - p) < 5 * spread).all()
        if skew == "power":
            assert np.corrcoef(frequency, p)[0, 1] > 0.95


@pytest.mark.parametrize("type", [GGMLType.F16, GGMLType.Q4_0])
@pytest.mark.parametrize("kind", synthetic.KINDS)
def test_the_predictor_selects_the_neurons_that_fire(
    tmp_path: Path, type: GGMLType, kind: synthetic.Kind
) -> None:
    path = tmp_path / "sparse.gguf"
    make(path, type, kind=kind)
    names = ["blk.1.ffn_act", "blk.1.ffn_pred"]
    values = taps(path, names, predicted=True)
    fires, selected = values["blk.1.ffn_act"] != 0, values["blk.1.ffn_pred"] >= 0
    assert 0.09 < selected.mean() < 0.12
    assert selected[fires].mean() > 0.999
    precision = fires[selected].mean()
    assert precision == pytest.approx(0.5 if kind == "bamboo" else 1.0, abs=0.02)


def test_no_layer_touches_the_constant_channels(tmp_path: Path) -> None:
    path = tmp_path / "plain.gguf"
    make(path, GGMLType.Q4_0, plain=True)
    out = taps(path, ["blk.1.out"])["blk.1.out"]
    np.testing.assert_array_equal(out[:, :32], np.tile(planted.CONSTANT, (N_TOKENS, 1)))
    assert 0.9 < out[:, 32:].std() < 1.5  # and the others neither vanish nor grow


@pytest.mark.parametrize("type", [GGMLType.F16, GGMLType.Q4_0])
@pytest.mark.parametrize("kind", ["llama", "opt", "falcon"])
def test_the_predictor_scores_as_the_gate_does(tmp_path: Path, type: GGMLType, kind: synthetic.Kind) -> None:
    path = tmp_path / "sparse.gguf"
    make(path, type, kind=kind)
    names = ["fc1", "fc2", "ffn_gate" if synthetic.KINDS[kind].gated else "ffn_up"]
    fc1, fc2, gate = (matrix(path, f"blk.0.{name}.weight").astype(np.float64) for name in names)
    stream = 1.1 * np.random.default_rng(2).standard_normal((SHAPE.d, 50))
    stream[:32] = planted.CONSTANT[:, None]
    scores = fc2 @ np.maximum(fc1 @ stream, 0)
    np.testing.assert_allclose(scores, gate @ stream, atol=1e-9)
    centred = stream - stream.mean(axis=0)  # like a layer norm, whose mean has no effect
    np.testing.assert_allclose(scores, gate @ centred, atol=1e-9)


def test_a_margin_selects_more(tmp_path: Path) -> None:
    for margin, least, most in ((0.0, 0.09, 0.11), (0.5, 0.16, 0.25)):
        path = tmp_path / "sparse.gguf"
        make(path, margin=margin, skew="uniform")
        fc1, fc2 = (matrix(path, f"blk.0.{name}.weight") for name in ("fc1", "fc2"))
        stream = np.random.default_rng(2).standard_normal((SHAPE.d, 500))
        stream[:32] = planted.CONSTANT[:, None]
        assert least < (fc2 @ np.maximum(fc1 @ stream, 0) >= 0).mean() < most


def test_hot_neurons_come_first_on_request(tmp_path: Path) -> None:
    p = make(tmp_path / "a.gguf", hot_first=True)[0]
    assert (np.diff(p) <= 0).all()
    assert not (np.diff(make(tmp_path / "b.gguf")[0]) <= 0).all()


def test_shapes_and_types_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    for shape, type, message in (
        (replace(SHAPE, ff=500), GGMLType.F32, "multiples of 32"),
        (SHAPE, GGMLType.Q4_1, "cannot be Q4_1"),
    ):
        with pytest.raises(ValueError, match=message):
            write_sparse_model(tmp_path / "a.gguf", shape, type, rank=32, n_vocab=300)
    with pytest.raises(ValueError, match="rank must be a multiple"):
        make(tmp_path / "a.gguf", rank=20)
    assert not list(tmp_path.iterdir())


def test_gates_of_a_gemma3n_lie_above_the_threshold_as_meant(tmp_path: Path) -> None:
    shape = Shape(d=256, ff=512, layers=16, heads=2, kv_heads=1, head=64)
    path = tmp_path / "gemma3n.gguf"
    synthetic.write_gemma3n(path, shape, GGMLType.Q4_0, n_vocab=400, n_ctx=N_TOKENS)
    names = ["blk.0.ffn_act", "blk.9.ffn_act", "blk.10.ffn_act", "logits"]
    first, last, dense, logits = taps(path, names).values()
    for sparse in (first, last):
        assert (sparse != 0).mean() == pytest.approx(0.05, abs=0.01)
    assert (dense != 0).mean() > 0.99
    assert np.isfinite(logits).all()
