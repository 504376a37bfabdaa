"""The choice of a mode, and the sidecars that a model needs to run in it."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend_runs import cpu_backend, logits_of, tokens
from tiny_gguf import write_llama, write_relu

from hotset.backends.reference import ReferenceBackend
from hotset.errors import HotsetError, InvalidRequestError
from hotset.formats.gguf import GGUFFile, GGUFWriter, copy_metadata, open_gguf
from hotset.formats.quants import GGMLType, row_bytes
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe
from hotset.model.operations import Linear, TransposedLinear
from hotset.sparsity import preparing, sidecar, taps
from hotset.sparsity.calibration import Calibration
from hotset.sparsity.modes import Choice, choose
from hotset.sparsity.preparing import Prepared, prepare

FFN_TYPES = [GGMLType.F32, GGMLType.F16, GGMLType.BF16, GGMLType.Q8_0, GGMLType.Q4_0]


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOTSET_HOME", str(tmp_path / "store"))
    return tmp_path / "store"


def relu(path: Path, type_: GGMLType = GGMLType.Q4_0, **how: Any) -> GGUFFile:
    how.setdefault("dialect", "gguf")
    return open_gguf(write_relu(path, type_of=lambda n: type_ if "ffn" in n else GGMLType.F32, **how))


def choice(gguf: GGUFFile, *asked: str | None, activation: str | None = None) -> Choice:
    return choose(config_from_gguf(gguf, activation=activation), gguf.tensors, *asked)


def prepared(gguf: GGUFFile, *asked: str | None) -> Prepared:
    return prepare(gguf, config_from_gguf(gguf), choice(gguf, *asked))


def logits(weights: Any, gguf: GGUFFile, **how: Any) -> np.ndarray:
    graph = describe(config_from_gguf(gguf), weights.tensors, **how)
    backend = ReferenceBackend(weights, graph, n_blocks=2)
    return taps.whole(taps.of_backend(backend), np.arange(12, dtype=np.int32) * 7, ("blk.1.out",))[
        "blk.1.out"
    ]


def test_the_default_is_the_fastest_that_keeps_the_meaning(tmp_path: Path) -> None:
    published = choice(relu(tmp_path / "p.gguf", dialect="powerinfer"))
    assert (published.mode, published.predictor) == ("predicted", "mlp")
    assert published.reason == "predicted: the file carries predictors (fc1, fc2)"
    plain = relu(tmp_path / "plain.gguf")
    assert choice(plain).mode == "exact"
    assert choice(plain).reason.startswith("exact: its activation is ReLU")
    silu = open_gguf(write_llama(tmp_path / "silu.gguf"))
    assert (choice(silu).mode, choice(silu).reason) == ("dense", "dense: silu has no zeros")
    assert choice(silu, activation="relu2").mode == "exact"
    assert choice(silu, None, None, activation="fatrelu:0.01").reason.startswith(
        "exact: its activation is FATReLU"
    )


def test_a_user_can_ask_for_any_mode_that_the_model_has(tmp_path: Path) -> None:
    published = relu(tmp_path / "p.gguf", dialect="powerinfer")
    plain = relu(tmp_path / "plain.gguf")
    for gguf in (published, plain):
        for mode in ("dense", "exact"):
            assert choice(gguf, mode).mode == mode
            assert choice(gguf, mode).predictor is None
        for text in ("svd", "svd:16"):
            assert choice(gguf, None, text) == choice(gguf, "predicted", text)
            assert choice(gguf, None, text).predictor == "svd"
    assert choice(published, "predicted").predictor == "mlp"
    assert choice(plain, "predicted").predictor == "svd"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (("sparse",), "must be one of dense, exact, predicted, threshold, not 'sparse'"),
        (("exact",), "silu, which has no zeros"),
        (("predicted",), "silu, which has no zeros"),
        ((None, "svd"), "silu, which has no zeros"),
        (("dense", "svd"), "`predictor` requires sparsity='predicted'"),
        (("predicted", "tree"), "'tree' is unknown"),
    ],
)
def test_impossible_input_gives_one_message(
    asked: tuple[str | None, ...], message: str, tmp_path: Path
) -> None:
    silu = open_gguf(write_llama(tmp_path / "silu.gguf"))
    with pytest.raises(InvalidRequestError, match=message):
        choice(silu, *asked)


def test_mlp_needs_a_file_with_predictors(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="this file has none; choose svd, or train it"):
        choice(relu(tmp_path / "plain.gguf"), None, "mlp")


@pytest.mark.parametrize("type_", FFN_TYPES)
@pytest.mark.parametrize("mode", ["dense", "exact"])
def test_a_down_matrix_by_neuron_computes_the_same(type_: GGMLType, mode: str, tmp_path: Path) -> None:
    gguf = relu(tmp_path / "model.gguf", type_)
    ready = prepared(gguf, mode)
    graph = describe(config_from_gguf(gguf), ready.weights.tensors)
    assert [type(op) for op in graph.primitives if op.out.name.endswith("ffn_down")] == [TransposedLinear] * 2
    assert ready.predictor is None
    # One adds over neurons, the other over outputs.
    np.testing.assert_allclose(logits(ready.weights, gguf), logits(gguf, gguf), rtol=1e-4, atol=1e-5)
    assert "built in" in ready.notes[0]
    assert str(tmp_path / "model.down.hotset.gguf") in ready.notes[0]
    ready.weights.close()


def test_matrices_without_a_neuron_major_layout_stay_dense(tmp_path: Path) -> None:
    gguf = relu(tmp_path / "model.gguf", GGMLType.Q5_0)
    ready = prepared(gguf)
    assert len(ready.notes) == 1
    assert ready.notes[0].startswith("2 down projections stay dense: Q5_0 cannot be stored neuron-major")
    graph = describe(config_from_gguf(gguf), ready.weights.tensors)
    assert [type(op) for op in graph.primitives if op.out.name.endswith("ffn_down")] == [Linear] * 2
    assert list(tmp_path.glob("*hotset*")) == []


def test_a_type_without_planes_is_copied_by_input(tmp_path: Path) -> None:
    """Check that every mode gives the same bits with the sidecar as with only the file."""
    gguf = relu(tmp_path / "model.gguf", GGMLType.Q4_1)
    ready = prepared(gguf)
    assert "blk.0.ffn_down_c.blocks" in ready.weights.tensors
    graph = describe(config_from_gguf(gguf), ready.weights.tensors)
    downs = [op for op in graph.primitives if op.out.name.endswith("ffn_down")]
    assert [isinstance(op, Linear) and op.input_major is not None for op in downs] == [True] * 2
    plain = describe(config_from_gguf(gguf), gguf.tensors)
    ids = tokens(30)
    expected = logits_of(cpu_backend(gguf, plain, n_blocks=1, max_batch=64, n_threads=1), ids, [], [0])
    backend = cpu_backend(ready.weights, graph, n_blocks=1, max_batch=64, n_threads=2)
    np.testing.assert_array_equal(logits_of(backend, ids, list(range(1, 30)), [0]), expected)
    assert prepared(gguf, "dense").notes == []


def test_a_model_without_zeros_and_a_published_one_need_no_sidecar(tmp_path: Path) -> None:
    for gguf in (
        open_gguf(write_llama(tmp_path / "silu.gguf")),
        relu(tmp_path / "p.gguf", dialect="powerinfer"),
    ):
        ready = prepared(gguf)
        assert ready.notes == []
        assert dict(ready.weights.tensors) == gguf.tensors
    assert list(tmp_path.glob("*hotset*")) == []


def test_a_sidecar_is_built_once_and_bound_to_its_model(tmp_path: Path) -> None:
    built = tmp_path / "model.down.hotset.gguf"
    prepared(relu(tmp_path / "model.gguf")).weights.close()
    first = built.stat().st_mtime_ns
    again = prepared(relu(tmp_path / "model.gguf"))
    assert "opened" in again.notes[0]
    assert built.stat().st_mtime_ns == first

    other = relu(tmp_path / "model.gguf", seed=2)  # another model under the same name
    ready = prepared(other)
    assert "built in" in ready.notes[0]
    np.testing.assert_allclose(logits(ready.weights, other), logits(other, other), rtol=1e-4, atol=1e-5)


def test_a_damaged_sidecar_is_built_again(tmp_path: Path) -> None:
    gguf = relu(tmp_path / "model.gguf")
    prepared(gguf).weights.close()
    built = tmp_path / "model.down.hotset.gguf"
    whole = built.read_bytes()
    built.write_bytes(whole[: len(whole) // 2])
    assert "built in" in prepared(gguf).notes[0]
    assert built.read_bytes() == whole


def test_a_sidecar_of_another_version_is_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = relu(tmp_path / "model.gguf")
    prepared(gguf).weights.close()
    monkeypatch.setattr(sidecar, "VERSION", sidecar.VERSION + 1)
    assert "built in" in prepared(gguf).notes[0]
    assert "opened" in prepared(gguf).notes[0]


def resaved(
    path: Path, keys: dict[str, Any], tensors: dict[str, tuple[GGMLType, tuple[int, ...]] | None]
) -> None:
    """Write the sidecar with other keys, and with some tensors removed or replaced by zeros."""
    with open_gguf(path) as gguf:
        writer = GGUFWriter(path, "hotset")
        for key, value in keys.items():
            writer.add(key, value)
        copy_metadata(gguf, writer)
        kept = {n: gguf.data(n).copy() for n in gguf.tensors}
        for name, info in gguf.tensors.items():
            new = tensors.get(name, (info.type, info.shape))
            if new is not None:
                type_, shape = new
                n_bytes = row_bytes(type_, shape[0]) * math.prod(shape[1:])
                data = np.zeros(n_bytes, np.uint8) if name in tensors else kept[name]
                writer.add_tensor(name, data, type_, shape)
        writer.write()


ODD_SIDECARS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"hotset.sidecar.model": ["a", "b"]}, {}),
    ({"hotset.sidecar.model": np.arange(3)}, {}),
    ({"hotset.sidecar.settings": 3}, {}),
    ({"hotset.sidecar.version": [1]}, {}),
    ({"hotset.sidecar.version": True}, {}),
    ({}, {"blk.0.ffn_down_t.codes": (GGMLType.Q8_0, (64, 96))}),
    ({}, {"blk.0.ffn_down_t.codes": (GGMLType.I8, (96, 64))}),
    ({}, {"blk.1.ffn_down_t.scales": (GGMLType.F32, (64, 3))}),
    ({}, {"blk.1.ffn_down_t.scales": None}),
    ({}, {"blk.1.ffn_down_t.scales": None, "blk.1.ffn_down_t.codes": None}),
]


@pytest.mark.parametrize(("keys", "tensors"), ODD_SIDECARS)
def test_a_sidecar_of_wrong_types_is_built_again(
    keys: dict[str, Any], tensors: dict[str, Any], tmp_path: Path
) -> None:
    """Check a sidecar of the right model and settings, but with wrong tensors."""
    gguf = relu(tmp_path / "model.gguf", GGMLType.Q8_0)
    prepared(gguf).weights.close()
    built = tmp_path / "model.down.hotset.gguf"
    whole = built.read_bytes()
    resaved(built, keys, tensors)
    assert built.read_bytes() != whole
    ready = prepared(gguf)
    assert "built in" in ready.notes[0]
    assert built.read_bytes() == whole


@pytest.mark.parametrize(
    ("keys", "tensors"),
    [
        ({"hotset.predictor.thresholds": "low"}, {}),
        ({"hotset.predictor.thresholds": [1.0]}, {}),
        ({"hotset.predictor.thresholds": [1, 2]}, {}),
        ({}, {"blk.0.svd_a.weight": (GGMLType.I32, (64, 8))}),
        ({}, {"blk.0.svd_a.weight": (GGMLType.F16, (8, 64))}),
        ({}, {"blk.1.svd_b.weight": (GGMLType.F16, (8, 95))}),
        ({}, {"blk.1.svd_b.weight": None}),
    ],
)
def test_a_predictor_of_wrong_types_is_built_again(
    keys: dict[str, Any], tensors: dict[str, Any], tmp_path: Path
) -> None:
    gguf = relu(tmp_path / "model.gguf")
    config = config_from_gguf(gguf)
    drawn = Calibration(open_backend=None)

    def predicted() -> list[str]:
        ready = prepare(gguf, config, choose(config, gguf.tensors, None, "svd:8:f16"), calibration=drawn)
        ready.weights.close()
        return ready.notes

    predicted()
    built = tmp_path / "model.svd-8-f16.hotset.gguf"
    whole = built.read_bytes()
    resaved(built, keys, tensors)
    assert "built in" in predicted()[-1]
    assert built.read_bytes() == whole
    assert "opened" in predicted()[-1]


def test_a_requantised_predictor_of_wrong_types_is_built_again(tmp_path: Path) -> None:
    gguf = relu(tmp_path / "model.gguf", dialect="powerinfer")
    config = config_from_gguf(gguf)
    for attempt in range(2):
        ready = prepare(gguf, config, choose(config, gguf.tensors, None, "mlp:q8_0"))
        ready.weights.close()
        assert "built in" in ready.notes[-1]
        if attempt == 0:
            path = tmp_path / "model.mlp-q8_0.hotset.gguf"
            resaved(path, {}, {"blk.0.fc1.weight": (GGMLType.Q8_0, (64, 64))})


def test_a_changed_weight_changes_the_fingerprint(tmp_path: Path) -> None:
    path = write_relu(tmp_path / "model.gguf")
    with open_gguf(path) as gguf:
        before = sidecar.fingerprint(gguf)
        assert sidecar.fingerprint(gguf) == before
        info = gguf.tensors["blk.1.ffn_up.weight"]
        offset = info.offset + info.nbytes // 2
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
    with open_gguf(path) as gguf:
        assert sidecar.fingerprint(gguf) != before


def test_a_folder_that_cannot_be_written_sends_sidecars_to_the_cache(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = relu(tmp_path / "locked" / "model.gguf")
    real = os.access  # not chmod: root may write anywhere
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "locked" and real(path, mode))
    first = prepared(gguf)
    cached = store / "cache" / sidecar.fingerprint(gguf) / "down.hotset.gguf"
    assert str(cached) in first.notes[0]
    assert "opened" in prepared(gguf).notes[0]
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    cached.unlink()
    with pytest.raises(
        HotsetError, match=r"locked cannot be written and .* cannot be written; free some space"
    ):
        prepared(gguf)


def test_a_disk_without_room_sends_sidecars_to_the_cache(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = relu(tmp_path / "full" / "model.gguf")
    real = sidecar.shutil.disk_usage
    usage = real(tmp_path)._replace(free=0)
    monkeypatch.setattr(
        sidecar.shutil, "disk_usage", lambda path: usage if Path(path).name == "full" else real(path)
    )
    assert str(store) in prepared(gguf).notes[0]


def test_a_failed_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = relu(tmp_path / "model.gguf")

    def fail(writer: GGUFWriter, model: GGUFFile, name: str) -> None:
        writer.add_tensor(f"{name}_t.codes", lambda: 1 // 0, GGMLType.I8, (32, 96))  # type: ignore[arg-type]

    monkeypatch.setattr(preparing.planes, "add_down", fail)
    with pytest.raises(ZeroDivisionError):
        prepared(gguf)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["model.gguf"]
