"""`profile`, `report` and `show` of models that are sparse by themselves, some with layers without an FFN."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from cli_runs import inside
from html_page import check_self_contained

import hotset
from hotset.convert.reorder import reorder
from hotset.errors import FormatError, UnsupportedModelError
from hotset.formats.gguf import GGUFWriter, copy_metadata, open_gguf
from hotset.sparsity.profile import Profile, export_activations, profile_path

pytest.importorskip("torch")
pytest.importorskip("transformers")
tiny_models = pytest.importorskip("tiny_models")

TEXT = "the quick brown fox jumps over the lazy dog; " * 3
OWN_LAYERS = {"nemotron-h": [1, 3], "nemotron-h-moe": [1, 3]}  # those with an FFN
RECIPES = [
    "nemotron-h-moe",  # layers without an FFN, and experts
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("nemotron-h", "gemma3n", "bitnet", "rwkv6", "rwkv7", "plm", "jais2")
    ),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


def copied(name: str, folder: Path, run_folder: Path) -> Path:
    return Path(shutil.copy(tiny_models.shared_gguf(name, run_folder), folder / "m.gguf"))


@pytest.mark.parametrize("name", RECIPES)
def test_firing_neurons_are_counted_and_drawn(folder: Path, run_folder: Path, name: str) -> None:
    model = copied(name, folder, run_folder)
    done = inside("show", model, "--json")
    facts = json.loads(done.stdout)
    assert facts["runs"]
    done = inside("profile", model, "-f", "text.txt", "-c", 64, "--json")
    found = json.loads(done.stdout)
    own = OWN_LAYERS.get(name, list(range(facts["layers"])))
    assert [layer["layer"] for layer in found["layers"]] == own
    assert 0 < found["active_share"] < 1
    counted = Profile.open(profile_path(model))
    assert [i for i, counts in enumerate(counted.counts) if len(counts)] == own
    with hotset.load(model, sparsity="exact", device="reference") as loaded:
        ids = loaded.tokenizer.rows(loaded.tokenizer.encode(TEXT, add_special=True), 64)
        names = [f"blk.{i}.ffn_act" for i in own]
        taps = [loaded.taps(row.tolist(), names) for row in ids]
    for i, tap in zip(own, names, strict=True):
        fires = sum(int(np.count_nonzero(part[tap])) for part in taps)
        assert int(counted.counts[i].sum()) == pytest.approx(fires, rel=1e-3)  # underflow may differ
    done = inside("report", model, "-f", "text.txt", "-c", 64, "--json", "-o", "r.html", "--images", "svg")
    report = json.loads(done.stdout)
    assert [layer["layer"] for layer in report["layers"]] == own
    assert report["active_share"] == pytest.approx(found["active_share"])
    assert (report["run"] is None) == (report["experts"] is not None)
    check_self_contained(Path("r.html").read_text("utf-8"))
    assert Path("r-sparsity.svg").is_file()


def test_a_profile_knows_layers_without_an_ffn(folder: Path, run_folder: Path) -> None:
    model = copied("nemotron-h", folder, run_folder)
    inside("profile", model, "-f", "text.txt", "-c", 64)
    found = Profile.open(profile_path(model))
    assert [len(counts) for counts in found.counts] == [0, 160, 0, 160, 0]
    with pytest.raises(UnsupportedModelError, match="an FFN in every layer"):
        export_activations(found, folder)
    moved = reorder(model, folder / "moved.gguf", found)
    assert moved.n_always[0] == moved.n_always[2] == 0
    with hotset.load(model, device="cpu") as one, hotset.load(folder / "moved.gguf", device="cpu") as other:
        expected = one.logits(list(range(40)))
        np.testing.assert_allclose(
            other.logits(list(range(40))), expected, atol=1e-4 * np.abs(expected).max()
        )
    with open_gguf(profile_path(model)) as file:
        for value in (0, 4, 1 << 13, "5"):
            writer = GGUFWriter(folder / "odd.gguf", "hotset")
            copy_metadata(file, writer, ("hotset.profile.n_layers",))
            writer.add("hotset.profile.n_layers", value)
            for info in file.tensors.values():
                writer.add_tensor(info.name, file.data(info.name), info.type, info.shape)
            writer.write()
            if value == 4:  # only the last layer's FFN shows how many layers have one
                assert len(Profile.open(folder / "odd.gguf").counts) == 4
                continue
            with pytest.raises(FormatError, match="is not an activation profile"):
                Profile.open(folder / "odd.gguf")
