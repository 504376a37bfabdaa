"""Training predictors: the collected pairs, the learned scores, growing and stopping, the written files."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from synthetic import Kind, Shape, write_sparse_model
from tiny_gguf import write_relu
from told import Told
from typer.testing import CliRunner
from waiting import WATCHDOG, until

import hotset
from hotset.backends.reference import ReferenceBackend
from hotset.errors import HotsetError, InvalidRequestError
from hotset.formats.gguf import GGUFWriter, ValueType, copy_metadata, open_gguf
from hotset.formats.quants import GGMLType, dequantize
from hotset.formats.torch_file import read_torch, write_torch
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe
from hotset.model.predictor import Predictor
from hotset.training import pairs as pair_files
from hotset.training import predictor as training
from hotset.training.pairs import LayerTaps, PairShards, collect, encode
from hotset.training.predictor import PredictorSettings, Schedule, predictor_inputs, train_predictors
from hotset.training.predictor_layer import PredictorWeights, calibrate, start

pytest.importorskip("hotset._core", reason="the native module is not built")

SHAPE = Shape(d=64, ff=128, layers=2, heads=4, kv_heads=2)
N_CTX = 64
TEXT = "".join(chr(c) for c in np.random.default_rng(0).integers(97, 123, 24 * N_CTX))
QUICK = PredictorSettings(
    n_ctx=N_CTX, jobs=1, max_share=0.9, precision=0.5, schedule=Schedule(epochs=8, batch=64), n_measured=256
)


def planted(path: Path, kind: Kind = "llama", type: GGMLType = GGMLType.F16, **how: Any) -> Path:
    """Write a model with planted activity: sums of 16 directions, which 33 hidden units predict exactly."""
    how = {"plain": True, "rank": 16, "n_vocab": 400, "n_ctx": 256, **how}
    write_sparse_model(path, SHAPE, type, kind=kind, **how)
    return path


def matrix(path: Path, name: str) -> np.ndarray:
    with open_gguf(path) as file:
        info = file.tensors[name]
        return dequantize(file.data(name), info.type, info.shape)


# ---- the beginning ----


def test_entropy_of_a_layer_equals_its_coins() -> None:
    assert training.entropy(np.array([0.5, 0.5])) == pytest.approx(1)
    assert training.entropy(np.array([0.25])) == pytest.approx(2 - 0.75 * np.log2(3))
    assert training.entropy(np.array([0.0, 1.0, 0.5])) == pytest.approx(1 / 3)


class GivenPairs:
    """The part of LayerPairs that `start` uses: inputs, float32 [n, n_embd], and frequencies of neurons."""

    def __init__(self, inputs: np.ndarray, frequencies: np.ndarray) -> None:
        self.inputs, self._frequencies = inputs, frequencies

    def __len__(self) -> int:
        return len(self.inputs)

    def batch(self, rows: np.ndarray) -> tuple[np.ndarray, None]:
        return self.inputs[rows], None

    def frequencies(self) -> np.ndarray:
        return self._frequencies


def test_a_predictor_begins_as_a_linear_one_and_with_units_that_weigh_nothing() -> None:
    rng = np.random.default_rng(0)
    inputs = (rng.standard_normal((4000, 4)) + 1).astype(np.float32)
    frequencies = np.array([0.5, 0.2, 0.7, 0.1, 0.9, 0.4], np.float32)
    decides = rng.standard_normal((6, 4)).astype(np.float32)
    weights = start(GivenPairs(inputs, frequencies), decides, 16, "cpu", 0)  # type: ignore[arg-type]
    n_linear = 1 + 2 * 4  # a constant, and each direction with both signs
    assert weights.fc2[:, :n_linear].all()
    assert not weights.fc2[:, n_linear:].any()
    assert weights.fc1[n_linear:].all()

    def score(x: np.ndarray) -> np.ndarray:
        return np.maximum(x @ weights.fc1.T, 0) @ weights.fc2.T

    # For the mean input, each neuron's score gives its average frequency, ...
    found = 1 / (1 + np.exp(-score(inputs.mean(axis=0))))
    np.testing.assert_allclose(found, frequencies, atol=0.02)
    # ... and for other inputs, the score varies with its row. (Four channels make no good constant.)
    weights.fc1[0] = 0
    scores, products = score(inputs), inputs @ decides.T
    for i in range(6):
        assert np.corrcoef(scores[:, i], products[:, i])[0, 1] > 0.999


# ---- pairs ----


def fake_steps(tokens: np.ndarray, names: Any) -> Any:
    """Yield two steps whose values depend only on the tokens."""
    for part in np.array_split(tokens, 2):
        rng = np.random.default_rng(int(part[0]))
        inputs = rng.standard_normal((len(part), 8)).astype(np.float32) * 1e6
        yield {"p": inputs, "n": np.maximum(rng.standard_normal((len(part), 20)), 0).astype(np.float32)}


SOURCES = [LayerTaps("p", "n", 8, 20)]
SEQUENCES = [np.arange(10, dtype=np.int32) + 100 * i for i in range(40)]


def test_pairs_come_back_as_they_were(tmp_path: Path) -> None:
    collected = collect(
        tmp_path, fake_steps, SOURCES, SEQUENCES[4:], SEQUENCES[:4], max_bytes=1 << 20, settings={}
    )
    assert (collected.n_train, collected.n_held_out, collected.limited) == (360, 40, False)
    seen = [part for tokens in SEQUENCES[4:] for part in fake_steps(tokens, ())]
    inputs, neurons = (np.concatenate([part[name] for part in seen]) for name in ("p", "n"))
    with PairShards(tmp_path, [20]) as pairs:
        layer = pairs.layer(0, "train")
        rows = np.array([5, 350, 17, 0, 359])
        found, magnitudes = layer.batch(rows)
        rows.sort()
        size = np.sqrt(np.square(inputs[rows]).mean(axis=1, keepdims=True))
        np.testing.assert_allclose(found, inputs[rows] / size, atol=2e-3)
        assert np.array_equal(magnitudes > 0, neurons[rows] > 0)
        relative = neurons[rows] / neurons[rows].max(axis=1, keepdims=True)
        np.testing.assert_allclose(magnitudes / 255, relative, atol=1 / 255)
        np.testing.assert_allclose(layer.frequencies(), (neurons > 0).mean(axis=0))
        assert len(pairs.layer(0, "held_out")) == 40


def test_inputs_that_are_zero_and_tokens_at_which_nothing_fires() -> None:
    inputs, bits, magnitudes = encode(np.zeros((2, 4), np.float32), np.zeros((2, 9), np.float32))
    assert not inputs.any()
    assert not bits.any()
    assert magnitudes.size == 0


@pytest.mark.parametrize("max_bytes", [120_000, 200_000])
def test_pairs_stay_within_their_bytes(tmp_path: Path, max_bytes: int) -> None:
    sequences = [np.arange(100, dtype=np.int32) + 1000 * i for i in range(100)]
    collected = collect(
        tmp_path, fake_steps, SOURCES, sequences[9:], sequences[:9], max_bytes=max_bytes, settings={}
    )
    on_disk = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert collected.limited
    assert 0.7 * max_bytes < on_disk <= max_bytes
    held_out = sum(path.stat().st_size for path in tmp_path.glob("held_out-*"))
    assert held_out <= max_bytes * pair_files.HELD_OUT_SHARE


def test_limit_below_one_sequence_gives_one_message(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="not one sequence of 10 tokens fits in the 3,000 bytes"):
        collect(tmp_path, fake_steps, SOURCES, SEQUENCES[4:], SEQUENCES[:4], max_bytes=30_000, settings={})


def test_killed_collection_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_files, "SHARD_BYTES", 2000)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    settings = {"max_bytes": 1 << 20, "settings": {"a": 1}}
    expected = collect(whole, fake_steps, SOURCES, SEQUENCES[4:], SEQUENCES[:4], **settings)
    asked: list[int] = []

    def counted(tokens: np.ndarray, names: Any) -> Any:
        asked.append(int(tokens[0]))
        return fake_steps(tokens, names)

    with pytest.raises(KeyboardInterrupt):
        collect(
            killed, counted, SOURCES, SEQUENCES[4:], SEQUENCES[:4], **settings,
            progress=Told(("pairs (train", 20)),
        )  # fmt: skip
    (killed / ".train-00099.gguf.1-a.tmp").write_bytes(b"half")
    n_before = len(asked)
    asked.clear()
    assert collect(killed, counted, SOURCES, SEQUENCES[4:], SEQUENCES[:4], **settings) == expected
    assert 0 < len(asked) < len(SEQUENCES) - n_before + 10
    assert {p.name: p.read_bytes() for p in whole.iterdir()} == {
        p.name: p.read_bytes() for p in killed.iterdir()
    }
    asked.clear()
    assert collect(killed, counted, SOURCES, SEQUENCES[4:], SEQUENCES[:4], **settings) == expected
    assert not asked  # complete
    settings["settings"] = {"a": 2}
    collect(killed, counted, SOURCES, SEQUENCES[4:], SEQUENCES[:4], **settings)
    assert len(asked) == len(SEQUENCES)  # other settings, other pairs


@pytest.mark.parametrize(("key", "value"), [("settings", [1, 2]), ("settings", None), ("sequences", [1, 2])])
def test_a_shard_with_odd_keys_is_made_again(tmp_path: Path, key: str, value: Any) -> None:
    """Treat a shard with odd or missing keys as damaged; arrays do not compare."""
    settings = {"max_bytes": 1 << 20, "settings": {"a": 1}}
    expected = collect(tmp_path, fake_steps, SOURCES, SEQUENCES[4:], SEQUENCES[:4], **settings)
    (tmp_path / "complete.json").unlink()
    shard = tmp_path / "train-00000.gguf"
    sound = shard.read_bytes()
    with open_gguf(shard) as file:
        writer = GGUFWriter(tmp_path / "odd", "hotset")
        if value is not None:
            writer.add(f"hotset.pairs.{key}", value)
        copy_metadata(file, writer, ("general.architecture", "general.alignment", f"hotset.pairs.{key}"))
        for name, info in file.tensors.items():
            writer.add_tensor(name, file.data(name), info.type, info.shape)
        writer.write()
    (tmp_path / "odd").replace(shard)
    assert collect(tmp_path, fake_steps, SOURCES, SEQUENCES[4:], SEQUENCES[:4], **settings) == expected
    assert shard.read_bytes() == sound


# ---- learning ----


@pytest.mark.parametrize("kind", ["llama", "bamboo", "opt", "falcon", "falcon40"])
def test_a_planted_model_is_learned(tmp_path: Path, kind: Kind) -> None:
    path, out = planted(tmp_path / "model.gguf", kind), tmp_path / "out.gguf"
    trained = train_predictors(path, [TEXT], tmp_path / "p", out, QUICK)
    assert trained.dialect == "powerinfer"
    for layer in trained.layers:
        assert layer.quality.of_magnitude > 0.95
        assert layer.quality.selected_share < 0.5
    for measured in trained.measured:  # in the engine, on held-out text
        assert measured.of_magnitude > 0.93
        assert measured.recall > 0.75
    assert trained.increase < QUICK.max_increase
    check_merged(path, out, tmp_path / "p", trained)


def check_merged(path: Path, out: Path, folder: Path, trained: training.Trained) -> None:
    """Check that the merged file has the folder's predictors, and that its mask follows their scores."""
    with open_gguf(out) as file:
        assert file.dialect == trained.dialect
        config = config_from_gguf(file)
        assert config.sparse_threshold == json.loads((folder / "config.json").read_text())["sparse_threshold"]
        masked = describe(config, file.tensors, Predictor("mlp", (0.0,) * config.n_layer))
        backend = ReferenceBackend(file, masked, n_blocks=4)
        model = hotset.load(out, n_ctx=N_CTX, device="reference")
        tokens = model.tokenizer.encode(TEXT[:40], add_special=True)
        names = [name for i in range(2) for name in (f"blk.{i}.ffn_act", f"blk.{i}.ffn_masked")]
        names += predictor_inputs(config, masked)
        seen = model.taps(tokens, names)
        for i, p in enumerate(predictor_inputs(config, masked)):
            stored = read_torch(folder / f"model_{i}.pt")
            assert isinstance(stored, dict)
            assert stored["fc1.weight"].shape == (trained.layers[i].rank, SHAPE.d)
            fc1, fc2 = matrix(out, f"blk.{i}.fc1.weight"), matrix(out, f"blk.{i}.fc2.weight")
            np.testing.assert_allclose(fc1, stored["fc1.weight"], atol=np.abs(stored["fc1.weight"]).max() / 7)
            scores = np.maximum(seen[p] @ fc1.T, 0) @ fc2.T
            sure = np.abs(scores) > 1e-4 * np.abs(scores).max()
            expected = np.where(scores >= 0, seen[f"blk.{i}.ffn_act"], 0)
            assert np.array_equal(seen[f"blk.{i}.ffn_masked"][sure], expected[sure])
        assert model.sparsity.mode == "predicted"
        model.close()
        backend.close()
        with (
            hotset.load(path, n_ctx=N_CTX, sparsity="dense") as before,
            hotset.load(out, n_ctx=N_CTX, sparsity="dense") as after,
        ):  # every weight of the model is unchanged
            assert np.array_equal(before.logits(tokens), after.logits(tokens))
    torch_file = torch.load(folder / "model_0.pt", weights_only=True)
    assert list(torch_file) == ["fc1.weight", "fc2.weight"]


def test_quantised_and_published_files(tmp_path: Path) -> None:
    """Use the plain format for Q8_0, which shares scales across neurons, and replace existing predictors."""
    path = planted(tmp_path / "plain.gguf", type=GGMLType.Q8_0)
    trained = train_predictors(path, [TEXT], tmp_path / "p", tmp_path / "out.gguf", QUICK)
    assert trained.dialect == "gguf"
    check_merged(path, tmp_path / "out.gguf", tmp_path / "p", trained)
    with pytest.raises(InvalidRequestError, match=r"neurons share their scales; write the plain format"):
        train_predictors(path, [TEXT], tmp_path / "q", tmp_path / "no.gguf", QUICK, dialect="powerinfer")
    assert not (tmp_path / "no.gguf").exists()

    published = planted(tmp_path / "published.gguf", type=GGMLType.Q4_0, plain=False)
    settings = replace(QUICK, type=GGMLType.Q4_0)
    trained = train_predictors(published, [TEXT], tmp_path / "r", tmp_path / "new.gguf", settings)
    check_merged(published, tmp_path / "new.gguf", tmp_path / "r", trained)
    with open_gguf(tmp_path / "new.gguf") as file:
        assert file.tensors["blk.0.fc1.weight"].type == GGMLType.Q4_0


def as_arcee(source: Path, path: Path) -> Path:
    """Write a planted llama without its gate: the planted gate becomes up, with a squared ReLU."""
    with open_gguf(source) as file:
        writer = GGUFWriter(path, "arcee")
        for key, value in file.metadata.items():
            if key.startswith(("llama.", "tokenizer.")):
                name = key.replace("llama.", "arcee.", 1) if key.startswith("llama.") else key
                if not key.endswith("hidden_activation"):
                    writer.add(name, value, ValueType(file.metadata_types[key][-1]))
        for name, info in file.tensors.items():
            if ".ffn_up." not in name:
                writer.add_tensor(name.replace("gate", "up"), file.data(name), info.type, info.shape)
        writer.write()
    return path


def test_an_architecture_that_powerinfer_has_not(tmp_path: Path) -> None:
    path = as_arcee(planted(tmp_path / "llama.gguf"), tmp_path / "model.gguf")
    trained = train_predictors(path, [TEXT], tmp_path / "p", tmp_path / "out.gguf", QUICK)
    assert trained.dialect == "gguf"
    assert min(layer.of_magnitude for layer in trained.measured) > 0.9
    check_merged(path, tmp_path / "out.gguf", tmp_path / "p", trained)


def test_a_fatrelu_model_stays_plain(tmp_path: Path) -> None:
    path = write_relu(tmp_path / "m.gguf", dialect="gguf")
    with open_gguf(path) as file:
        config = config_from_gguf(file, activation="fatrelu:0.125")
        with pytest.raises(
            InvalidRequestError, match="does not support llama models with the activation fatrelu"
        ):
            training.predictor_files.powerinfer_architecture(file, config)
        rank = np.ones((32, 64), np.float32), np.ones((96, 32), np.float32)
        training.predictor_files.write_merged(
            tmp_path / "out.gguf", file, config, [PredictorWeights(*rank)] * 2, GGMLType.F16, "gguf"
        )
    with open_gguf(tmp_path / "out.gguf") as file:  # the file contains the option's value
        assert config_from_gguf(file) == replace(config, sparse_threshold=0.0)


def test_a_calibrated_predictor_keeps_the_recall(tmp_path: Path) -> None:
    """Calibrate a random network: more recall must select more neurons, with a threshold of zero."""
    rng = np.random.default_rng(0)
    steps = [np.arange(64, dtype=np.int32) + 1000 * i for i in range(20)]
    collect(tmp_path, fake_steps, SOURCES, steps[:2], steps[2:], max_bytes=10 << 20, settings={})
    fc1 = rng.standard_normal((32, 8)).astype(np.float32)
    weights = PredictorWeights(fc1, rng.standard_normal((20, 32)).astype(np.float32))
    with PairShards(tmp_path, [20]) as pairs:
        held_out = pairs.layer(0, "held_out")
        found = [calibrate(held_out, weights, GGMLType.F16, recall, "cpu") for recall in (0.5, 0.8, 0.95)]
    for quality, recall in zip(found, (0.5, 0.8, 0.95), strict=True):
        assert quality.of_magnitude == pytest.approx(recall, abs=0.06)  # on other tokens
    selected = [quality.selected_share for quality in found]
    assert selected == sorted(selected)


# ---- growth ----


def test_growth_stops_at_the_target(tmp_path: Path) -> None:
    path = planted(tmp_path / "model.gguf", rank=32)  # rank 32 is not enough, rank 64 is
    easy = train_predictors(path, [TEXT], tmp_path / "a", None, replace(QUICK, precision=0.01))
    assert [(layer.rank, layer.stopped) for layer in easy.layers] == [(32, "target")] * 2
    assert not list((tmp_path / "a").glob("training"))
    hard = train_predictors(path, [TEXT], tmp_path / "b", None, replace(QUICK, precision=0.99999))
    for before, after in zip(easy.layers, hard.layers, strict=True):
        assert before.quality.precision < 0.99999
        assert after.stopped in ("pays", "room")
        assert after.rank > 32 or after.stopped == "pays"


def test_predictors_stay_within_their_share(tmp_path: Path) -> None:
    path = planted(tmp_path / "model.gguf", rank=32)
    with pytest.raises(InvalidRequestError, match=r"even predictors of rank 32 take \d+.\d% of the model"):
        train_predictors(path, [TEXT], tmp_path / "a", None, replace(QUICK, max_share=0.01))
    probe = train_predictors(path, [TEXT], tmp_path / "b", None, replace(QUICK, precision=0.01))
    settings = replace(QUICK, precision=0.9999, max_share=probe.share * 1.2)
    trained = train_predictors(path, [TEXT], tmp_path / "c", None, settings)
    assert trained.share <= settings.max_share
    assert {layer.stopped for layer in trained.layers} == {"room"}
    assert any("of the model is not enough" in problem for problem in trained.problems)


def test_recall_rises_until_the_perplexity_is_met(tmp_path: Path) -> None:
    path, told = planted(tmp_path / "model.gguf"), Told()
    settings = replace(QUICK, recall=0.3, max_increase=1e-3, precision=0.01)
    trained = train_predictors(path, [TEXT], tmp_path / "a", None, settings, progress=told)
    assert trained.recall > 0.3
    assert trained.increase <= 1e-3 or trained.problems
    assert sum(line.startswith("recall ") for line in told.said) > 1


# ---- resuming ----


def test_stopped_training_resumes_to_the_same_result(tmp_path: Path) -> None:
    path = planted(tmp_path / "model.gguf")
    settings = replace(QUICK, precision=0.9)
    expected = train_predictors(path, [TEXT], tmp_path / "whole", tmp_path / "whole.gguf", settings)
    for label, n in (("pairs (train", 3), ("training", 1), ("perplexity", 1)):
        with pytest.raises(KeyboardInterrupt):
            train_predictors(
                path, [TEXT], tmp_path / "cut", tmp_path / "cut.gguf", settings, progress=Told((label, n))
            )
        assert not (tmp_path / "cut.gguf").exists()
    trained = train_predictors(path, [TEXT], tmp_path / "cut", tmp_path / "cut.gguf", settings)
    assert trained.layers == expected.layers
    assert (tmp_path / "cut.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()


def test_pairs_of_another_activation_are_not_learned_from(tmp_path: Path) -> None:
    path = planted(tmp_path / "model.gguf")
    folder = tmp_path / "predictors"
    told = [Told() for _ in range(3)]
    firing = []
    for activation, one in zip(("relu", "fatrelu:0.5", "fatrelu:0.5"), told, strict=True):
        kept = replace(QUICK, keep=True)
        train_predictors(path, [TEXT], folder, None, kept, activation=activation, progress=one)
        with PairShards(folder / "training" / "pairs", [SHAPE.ff] * SHAPE.layers) as pairs:
            part = pairs.layer(0, "held_out")
            firing.append(float((part.batch(np.arange(len(part)))[1] > 0).mean()))
    labels = [{label for label, _, _ in one.steps} for one in told]
    assert [any(label.startswith("pairs") for label in found) for found in labels] == [True, True, False]
    assert firing[1] == firing[2] < firing[0]


def run_it(path: Path, folder: Path, settings: PredictorSettings) -> None:
    train_predictors(path, [TEXT], folder, None, replace(settings, keep=True))


@pytest.mark.slow
def test_a_killed_process_leaves_whole_files_and_its_workers_follow(tmp_path: Path) -> None:
    path, folder = planted(tmp_path / "model.gguf"), tmp_path / "p"
    settings = replace(QUICK, jobs=2, schedule=Schedule(epochs=10, batch=64))
    process = multiprocessing.get_context("spawn").Process(target=run_it, args=(path, folder, settings))
    process.start()

    def has_trained() -> bool:
        assert process.is_alive()
        return any(folder.glob("training/layers-*/blk.*.pt"))

    until(has_trained)
    assert process.pid is not None
    workers = psutil.Process(process.pid).children(recursive=True)
    assert len(workers) >= 2
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert not psutil.wait_procs(workers, timeout=WATCHDOG)[1]
    done = {p: p.stat().st_mtime_ns for p in folder.glob("training/layers-*/blk.*.pt")}
    run_it(path, folder, replace(settings, jobs=1))
    assert (
        done.items() <= {p: p.stat().st_mtime_ns for p in folder.glob("training/layers-*/blk.*.pt")}.items()
    )
    assert (folder / "config.json").is_file()


# ---- messages ----


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"recall": 1.5}, "recall must be between 0 and 1"),
        ({"precision": 0.0}, "precision must be between 0 and 1"),
        ({"max_share": 2.0}, "max_share must be between 0 and 1"),
        ({"max_increase": 0.0}, "max_increase must be above 0"),
        ({"schedule": Schedule(epochs=0)}, "epochs, batch and learning rate must be above 0"),
    ],
)
def test_odd_settings_give_one_message(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        replace(QUICK, **change)


def test_mistakes_give_one_message(tmp_path: Path) -> None:
    path = planted(tmp_path / "model.gguf")
    with pytest.raises(InvalidRequestError, match="the text is too short"):
        train_predictors(path, ["abc"], tmp_path / "p", None, QUICK)
    with pytest.raises(InvalidRequestError, match="is one of the files that are read"):
        train_predictors(path, [TEXT], tmp_path / "p", path, QUICK)
    with pytest.raises(InvalidRequestError, match="which has no zeros"):
        train_predictors(path, [TEXT], tmp_path / "p", None, QUICK, activation="silu")
    with pytest.raises(InvalidRequestError, match="the device 'cuda:99' cannot train"):
        train_predictors(path, [TEXT], tmp_path / "p", None, replace(QUICK, device="cuda:99"))
    (tmp_path / "file").write_text("")
    with pytest.raises(HotsetError, match="cannot be"):
        train_predictors(path, [TEXT], tmp_path / "file" / "p", None, QUICK)


def test_state_dicts_are_torchs(tmp_path: Path) -> None:
    tensors = {"fc1.weight": np.ones((3, 2), np.float32), "b": np.arange(4, dtype=np.int64)}
    write_torch(tmp_path / "x.pt", tensors)
    for read in (read_torch(tmp_path / "x.pt"), torch.load(tmp_path / "x.pt", weights_only=True)):
        assert isinstance(read, dict)
        assert list(read) == list(tensors)
        for name, tensor in tensors.items():
            assert np.array_equal(np.asarray(read[name]), tensor)


# ---- the command ----


def test_the_subcommand(tmp_path: Path) -> None:
    from hotset.cli.main import app

    path, text = planted(tmp_path / "model.gguf"), tmp_path / "text.txt"
    text.write_text(TEXT)
    arguments = [
        "train-predictor",
        str(path),
        "-f",
        str(text),
        "-o",
        str(tmp_path / "out.gguf"),
        "--jobs",
        "1",
    ]
    arguments += [
        "-c", str(N_CTX), "--max-share", "90", "--type", "f16", "--precision", "0.3", "--epochs", "6",
    ]  # fmt: skip
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert any("rank" in line and "precise" in line for line in lines)
    assert any("likeliest token the same" in line for line in lines)
    assert (tmp_path / "model.predictors" / "model_1.pt").is_file()
    result = CliRunner().invoke(app, [*arguments, "--json"])
    found = json.loads(result.stdout)
    assert [layer["rank"] for layer in found["layers"]] == [
        read_torch(tmp_path / "model.predictors" / f"model_{i}.pt")["fc1.weight"].shape[0] for i in range(2)
    ]
    for wrong in (["--type", "q3"], ["--format", "onnx"], ["--max-bytes", "lots"]):
        assert CliRunner().invoke(app, [*arguments, *wrong]).exit_code == 2
