"""TurboSparse: predictors whose mask is part of the model, in every mode."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend_runs import assert_every_operation_is_right, counted_twice, cpu, logits_of, tokens
from cli_runs import inside
from transformers_oracle import relative_error

import hotset
from hotset.convert.hf import convert_hf
from hotset.errors import FormatError, InvalidRequestError
from hotset.formats.gguf import GGUFFile, open_gguf
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe
from hotset.model.keys import PREDICTOR_MASKS_KEY
from hotset.sparsity.stats import StepCosts
from hotset.training.predictor import train_predictors

torch = pytest.importorskip("torch")
tiny_models = pytest.importorskip("tiny_models")

RECIPES = {n: r for n, r in (tiny_models.RECIPES | tiny_models.EXPERTS).items() if "turbosparse" in n}


@pytest.fixture(scope="module", params=RECIPES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Return a checkpoint with a file in F32, and the model that both contain."""
    recipe, folder = RECIPES[request.param], tmp_path_factory.mktemp("turbosparse")
    theirs = tiny_models.build(recipe)
    tiny_models.to_gguf(recipe, theirs, folder)
    return folder, theirs


def converted(folder: Path, out: Path, type_: str) -> GGUFFile:
    convert_hf(folder, out, type_)
    return open_gguf(out)


def test_every_mode_has_the_mask(model: tuple[Path, Any]) -> None:
    folder, theirs = model
    ids = tokens(60).tolist()
    with torch.no_grad():
        expected = theirs(torch.tensor(ids)[None]).logits[0].numpy()
    found = {}
    for mode in (None, "dense", "exact", "predicted"):
        with hotset.load(
            folder / "model.gguf", device="cpu", n_threads=2, n_ctx=128, sparsity=mode
        ) as loaded:
            found[mode] = loaded.logits(ids)
            stats = loaded.backend.stats()
            assert stats is not None
            n = 60 * sum(config_from_gguf(loaded.gguf).n_ff)
            assert 0.02 < stats.active.sum() / n < stats.selected.sum() / n < 0.7
    for mode in found:
        np.testing.assert_array_equal(found[mode], found["dense"])
    assert relative_error(found[None], expected[-len(found[None]) :]) < 0.01  # keys and values in f16


def test_a_model_without_its_mask_would_be_another(model: tuple[Path, Any], tmp_path: Path) -> None:
    """Check that the mask matters, so that the comparison with the published model is meaningful."""
    path = tmp_path / "unmasked.gguf"
    data = (model[0] / "model.gguf").read_bytes()
    key = PREDICTOR_MASKS_KEY.encode()
    at = data.index(key) + len(key) + 4  # the type of the value is between them
    assert data[at] == 1
    path.write_bytes(data[:at] + b"\0" + data[at + 1 :])
    ids, blocks = tokens(40), [0]
    with open_gguf(path) as plain, open_gguf(model[0] / "model.gguf") as masked:
        assert not config_from_gguf(plain).masked
        other = logits_of(cpu(plain), ids, [], blocks)
        assert relative_error(logits_of(cpu(masked), ids, [], blocks), other) > 0.05


@pytest.mark.parametrize("type_", ["f32", "q8_0", "q4_0"])
def test_every_operation_is_the_references(model: tuple[Path, Any], tmp_path: Path, type_: str) -> None:
    gguf = converted(model[0], tmp_path / "m.gguf", type_)
    graph, ids = describe(config_from_gguf(gguf), gguf.tensors), tokens(40)
    assert_every_operation_is_right(gguf, graph, cpu(gguf, kv_type="f32"), ids, [20, 21, 27], [3])
    tapped = logits_of(cpu(gguf), ids, [20, 21, 27], [1])
    for sparse in (False, True):
        for splits in ([], [1, 30], [*range(1, 40)]):
            np.testing.assert_array_equal(logits_of(cpu(gguf, sparse=sparse), ids, splits, [1]), tapped)


def test_counts_equal_the_reference(model: tuple[Path, Any]) -> None:
    gguf = open_gguf(model[0] / "model.gguf")
    graph = describe(config_from_gguf(gguf), gguf.tensors)
    for sparse in (False, True):
        steps = []
        for step, ours, theirs in counted_twice(gguf, sparse=sparse):
            np.testing.assert_allclose(ours.selected, theirs.selected, rtol=0.02)
            np.testing.assert_allclose(ours.active, theirs.active, rtol=0.03)
            assert (ours.gate_rows >= theirs.gate_rows * 0.98).all()
            if sparse and len(step.tokens) == 1:  # a chunk needs many rows, and reads the whole matrix
                assert (ours.gate_rows < sum(config_from_gguf(gguf).n_ff)).all()
            steps.append(ours)
        summary = StepCosts(graph, gguf.tensors).summary(steps)
        assert summary.bytes_touched_per_token > 0
        for layer in summary.layers:
            assert layer.expert_share is None or 0.4 < layer.expert_share <= 1.0
            assert 0 < layer.active_share < layer.selected_share


def test_show_tells_of_the_predictors(model: tuple[Path, Any]) -> None:
    predictor = json.loads(inside("show", model[0] / "model.gguf", "--json").stdout)["sparsity"]["predictor"]
    assert predictor["ranks"] == [32, 48, 32]
    assert 0.05 < predictor["share"] < 0.5


def test_no_other_predictor_takes_its_place(model: tuple[Path, Any]) -> None:
    for how in ({"predictor": "svd"}, {"predictor": "svd:32"}, {"predictor": "mlp:q4_0"}):
        with pytest.raises(InvalidRequestError, match="is part of the model"):
            hotset.load(model[0] / "model.gguf", device="cpu", **how)
    with pytest.raises(InvalidRequestError, match="it cannot have others"):
        train_predictors(model[0] / "model.gguf", ["a text"], model[0] / "predictors")
    with hotset.load(model[0] / "model.gguf", device="cpu", n_ctx=64, predictor="mlp") as loaded:
        assert loaded.sparsity.mode == "predicted"


def test_score_of_zero_selects_no_neuron(model: tuple[Path, Any]) -> None:
    """Check that a score of 0 selects nothing: round(sigmoid(0)) is round(0.5), which is 0."""
    with open_gguf(model[0] / "model.gguf") as gguf:
        threshold = np.float32(config_from_gguf(gguf).sparse_threshold)
    assert 0 < threshold < 1e-37


def test_nonsensical_settings_are_refused(model: tuple[Path, Any], tmp_path: Path) -> None:
    folder = model[0]
    with pytest.raises(hotset.HotsetError, match=r"predictors of its own|no experts"):
        convert_hf(folder, tmp_path / "m.gguf", "f32", predictors=folder)
    from safetensors.torch import load_file, save_file

    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((folder / name).read_text())
    tensors = load_file(folder / "model.safetensors")
    names = [n for n in tensors if re.search(r"layers\.1\..*predictor", n)]
    for change, message in (
        ({names[0]: tensors[names[0]][:, :-1].clone()}, "fc1|fc2|predictor"),
        ({n: None for n in names if "fc2" in n}, "fc2"),
    ):
        changed = {k: v for k, v in (tensors | change).items() if v is not None}
        save_file(changed, tmp_path / "model.safetensors")
        with pytest.raises((FormatError, hotset.HotsetError), match=message):
            convert_hf(tmp_path, tmp_path / "m.gguf", "f32")
