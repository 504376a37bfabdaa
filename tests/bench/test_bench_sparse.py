"""The arithmetic of the sparse benchmarks, and that each runs on a model of a few megabytes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import demo_sparse
import numpy as np
import peers
import predictors
import pytest
import sparse_ffn
from anatomy import anatomy
from peers import Job
from synthetic import Shape, write_sparse_model

import hotset
from hotset.formats.gguf import open_gguf
from hotset.formats.quants import GGMLType
from hotset.text.tokenizer import load_tokenizer

SHAPE = Shape(d=256, ff=1024, layers=2, heads=4, kv_heads=2)
FFN_BYTES = SHAPE.layers * SHAPE.ff * SHAPE.d * 18 // 32  # bytes of each matrix, Q4_0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "model.powerinfer.gguf"
    write_sparse_model(path, SHAPE, GGMLType.Q4_0, rank=32, n_vocab=800, n_ctx=512)
    return path


def test_anatomy_separates_streamed_and_gathered_bytes(model: Path) -> None:
    made_of = {}
    for mode in ("dense", "exact", "predicted"):
        with hotset.load(model, n_ctx=64, sparsity=mode, n_threads=1) as loaded:
            made_of[mode] = anatomy(loaded, n_tokens=16)
    dense, exact, predicted = made_of.values()
    assert dense.gathered == 0
    assert dense.active == exact.active == pytest.approx(0.1, abs=0.025)
    assert dense.selected == 1
    # exact: the gate streams, the rows of up and down that fire are gathered
    assert dense.streamed - exact.streamed == pytest.approx(2 * FFN_BYTES)
    assert exact.gathered == pytest.approx(2 * FFN_BYTES * exact.active, rel=0.01)
    # predicted: three matrices are gathered, and the predictor streams
    assert predicted.gathered == pytest.approx(3 * FFN_BYTES * predicted.selected, rel=0.03)
    hidden = 2 * 32 + 32
    fc = SHAPE.layers * hidden * (SHAPE.d + SHAPE.ff) * 18 // 32
    assert dense.streamed - predicted.streamed == pytest.approx(3 * FFN_BYTES - fc)


def test_prompt_has_the_requested_length(model: Path) -> None:
    text = peers.text_of(model, 100)
    with open_gguf(model) as file:
        assert 100 <= len(load_tokenizer(file.metadata).encode(text, add_special=True)) < 108


@pytest.mark.skipif(sys.platform == "win32", reason="the program is a shell script")
def test_powerinfer_timings_are_read(tmp_path: Path, model: Path) -> None:
    program = tmp_path / "main"
    program.write_text(
        "#!/bin/sh\n"
        'echo "main: build = 1 (d3ebd7c)" >&2\n'
        'echo "llama_print_timings: prompt eval time =    2000.00 ms /    64 tokens (x)" >&2\n'
        'echo "llama_print_timings:        eval time =     500.00 ms /    20 runs   (x)" >&2\n'
    )
    program.chmod(0o755)
    peer = peers.PowerInfer(program)
    entries = peer.bench(Job(model, 64, 20, repetitions=2))
    assert {kind: entry["samples_ts"] for kind, entry in entries.items()} == {"pp": [32, 32], "tg": [40, 40]}
    assert {entry["build_commit"] for entry in entries.values()} == {"d3ebd7c"}
    program.write_text("#!/bin/sh\necho no model >&2; exit 1\n")
    with pytest.raises(SystemExit, match="no model"):
        peer.bench(Job(model, 64, 20))


def test_divergence_equals_the_distributions() -> None:
    logits = np.log(np.array([[0.5, 0.25, 0.25]]))
    other = np.log(np.array([[0.25, 0.25, 0.5]])) + 3.0  # a constant makes no difference
    assert predictors.divergence(logits, logits + 1) == pytest.approx(0, abs=1e-12)
    assert predictors.divergence(logits, other) == pytest.approx(0.25 * np.log(2))


@pytest.mark.parametrize("kind", ["mlp", "svd"])
def test_a_predictor_is_measured(model: Path, kind: str) -> None:
    with predictors.bare(model) as path:
        settings: dict[str, Any] = {"n_ctx": 64, "n_threads": 1}
        with hotset.load(path, sparsity="dense", **settings) as loaded:
            dense = loaded.logits(list(range(3, 35)))
        row = predictors.measure(path, kind, list(range(3, 35)), dense, settings)
    assert row.of_values > 0.95
    assert row.precision > 0.9 or kind == "svd"
    assert 0 <= row.kl < 0.2
    assert (row.build_seconds is None) == (kind == "mlp")
    per_layer = {"mlp": 96 * (SHAPE.d + SHAPE.ff) * 18 // 32, "svd": 32 * (SHAPE.d + SHAPE.ff) * 18 // 32}
    assert row.n_bytes >= SHAPE.layers * per_layer[kind]


def test_masks_have_the_density_and_the_order() -> None:
    rng = np.random.default_rng(0)
    for order in sparse_ffn.ORDERS:
        assert sparse_ffn.masks(8192, 0.1, order, rng).mean() == pytest.approx(0.1, rel=0.05)
    hot = sparse_ffn.masks(8192, 0.1, "hot", rng).mean(axis=0)
    assert hot[:100].mean() > 0.9 > 0.1 > hot[-4096:].mean()


def test_hot_first_gains_nothing_where_gathering_is_as_quick_as_streaming() -> None:
    def cells(rate: float) -> list[sparse_ffn.Cell]:
        return [
            sparse_ffn.Cell(density, "uniform", [1.0], [rate], [40e9], [1.0], [])
            for density in sparse_ffn.DENSITIES
        ]

    level = sparse_ffn.predicted_gain(0.1, 8192, cells(40e9), 40e9)
    assert 0.97 < level <= 1  # streamed chunks contain some unneeded rows
    assert 1.05 < sparse_ffn.predicted_gain(0.1, 8192, cells(20e9), 40e9) < 2


def test_the_demo_compares_the_real_model_and_labels_the_synthetic_one(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a b c " * 200)
    monkeypatch.setattr(demo_sparse, "TEXT", text)
    monkeypatch.setattr(demo_sparse, "FOLDER", tmp_path)
    files = ["--original", str(model), "--sparse", str(model), "--synthetic", str(model)]
    monkeypatch.setattr(sys, "argv", ["demo_sparse.py", *files, "--tokens", "12", "--rounds", "1"])
    demo_sparse.main()
    real, _, synthetic = capsys.readouterr().out.partition("A synthetic sparse model")
    rows = [line.split() for line in real.splitlines() if line.startswith(("original", "sparse"))]
    assert [row[0] for row in rows] == ["original", "sparse"]
    assert rows[0][2] == "1.00×"
    assert "short text" in real
    assert "Larger gains" in real
    assert "weights are random" in synthetic
    assert "exact drew the same 12 tokens as dense" in synthetic
