"""Files of thresholds: round trips, and the refusal of other files and of other models' thresholds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_gguf import write_relu

from hotset.errors import FormatError, HotsetError, InvalidRequestError, ModelNotFoundError
from hotset.formats.gguf import GGUFFile, open_gguf
from hotset.model.thresholds import LayerThresholds
from hotset.sparsity.thresholds import Calibrated, Thresholds, thresholds_path

LAYERS = (LayerThresholds(gate=0.5, attn_in=0.25), LayerThresholds(down_in=1e-3, ffn_in=2.0, attn_out=1.0))


def model(folder: Path, **options: Any) -> GGUFFile:
    return open_gguf(write_relu(folder / "model.gguf", **options))


def written(folder: Path, **changes: Any) -> Path:
    """Return a valid file with some entries changed; ... omits one."""
    path = folder / "some.json"
    Thresholds(Calibrated("model.gguf", 1, "0" * 32), LAYERS, text={"hash": "1"}).save(path)
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not ...}))
    return path


def test_file_round_trip(tmp_path: Path) -> None:
    gguf = model(tmp_path)
    made = Thresholds(
        Calibrated.of(gguf), LAYERS, "exact", True, {"hash": "1"}, {"perplexity": {"before": 12.5}}
    )
    path = thresholds_path(gguf.path)
    assert path == tmp_path / "model.thresholds.json"
    made.save(path)
    read = Thresholds.open(path)
    assert read == made
    read.check_model(gguf, 2)


def test_absent_values_are_zero(tmp_path: Path) -> None:
    path = written(tmp_path, layers=[{}, {"gate": 1}], mode=..., prompts=..., text=..., measured=...)
    read = Thresholds.open(path)
    assert read.layers == (LayerThresholds(), LayerThresholds(gate=1.0))
    assert (read.mode, read.prompts, read.text, read.measured) == ("dense", False, {}, {})


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "another format": ({"format": "x"}, "format must be"),
    "no format": ({"format": ...}, "format must be"),
    "a later version": ({"version": 2}, "version 2 is unknown"),
    "a version that is none": ({"version": "1"}, "version must be a whole number"),
    "a model that is a text": ({"model": "m"}, "model must be an object"),
    "a size below zero": ({"model": {"name": "m", "size": -1, "hash": ""}}, "size must be at least 0"),
    "a hash that is a number": ({"model": {"name": "m", "size": 1, "hash": 1}}, "hash must be a text"),
    "an unknown mode": ({"mode": "threshold"}, "mode must be one of"),
    "a mode that is a list": ({"mode": []}, "mode must be one of"),
    "a switch that is a number": ({"prompts": 1}, "prompts must be True or False"),
    "no layers": ({"layers": []}, "layers must be a list"),
    "layers in an object": ({"layers": {"0": {}}}, "layers must be a list"),
    "a layer that is a number": ({"layers": [1]}, "layer 0 must be an object"),
    "an unknown threshold": ({"layers": [{}, {"up": 1}]}, "layer 1 has 'up'"),
    "a threshold below zero": ({"layers": [{"gate": -1}]}, "gate of layer 0 must be between"),
    "one without end": ({"layers": [{"gate": 10**400}]}, "gate of layer 0 must be a finite number"),
    "one above float32": ({"layers": [{"gate": 1e300}]}, "gate of layer 0 must be between"),
    "one that is a text": ({"layers": [{"gate": "1"}]}, "gate of layer 0 must be a finite number"),
    "one that is a truth": ({"layers": [{"gate": True}]}, "gate of layer 0 must be a finite number"),
    "measurements in a list": ({"measured": []}, "measured must be an object"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_faults_are_named(tmp_path: Path, case: str) -> None:
    changes, expected = HOSTILE[case]
    with pytest.raises(FormatError, match=expected):
        Thresholds.open(written(tmp_path, **changes))


@pytest.mark.parametrize(
    "content", ["", "[" * 100_000, '{"layers": [NaN]}', "[]", "1", '"\\ud800"'], ids=lambda text: text[:10]
)
def test_other_files_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "some.json"
    path.write_text(content)
    with pytest.raises(FormatError, match="is not a file of thresholds"):
        Thresholds.open(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="hotset sparse calibrate"):
        Thresholds.open(tmp_path / "none.json")


def test_thresholds_of_another_model_are_refused(tmp_path: Path) -> None:
    gguf = model(tmp_path)
    with pytest.raises(InvalidRequestError, match="another model file"):
        Thresholds.open(written(tmp_path)).check_model(gguf, 2)
    with pytest.raises(InvalidRequestError, match="of 2 layers, but the model has 3"):
        Thresholds(Calibrated.of(gguf), LAYERS).check_model(gguf, 3)


def test_nan_is_not_written(tmp_path: Path) -> None:
    made = Thresholds(Calibrated("m", 1, ""), (LayerThresholds(gate=float("nan")),))
    with pytest.raises((HotsetError, ValueError)):
        made.save(tmp_path / "some.json")
    assert not (tmp_path / "some.json").exists()
