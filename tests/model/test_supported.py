"""The table of supported architectures, and the error for any other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_runs import inside

from hotset.errors import UnsupportedModelError
from hotset.formats.gguf import GGUFFile, GGUFWriter, open_gguf
from hotset.formats.quants import GGMLType
from hotset.model.architectures import ARCHITECTURES
from hotset.model.supported import read_config, supported

tiny_models = pytest.importorskip("tiny_models")


def copied(source: GGUFFile, path: Path, name: str, tensors: dict[str, str], **keys: Any) -> Path:
    """Return the file with another architecture, some renamed tensors, and additional keys."""
    own = f"{source.metadata['general.architecture']}."
    writer = GGUFWriter(path, name)
    for key, value in source.metadata.items():
        if key.startswith(own):
            writer.add(f"{name}.{key.removeprefix(own)}", value)
    for key, value in keys.items():
        writer.add(f"{name}.{key}", value)
    for tensor, info in source.tensors.items():
        values = np.frombuffer(source.data(tensor), np.float32).reshape(info.shape[::-1])
        writer.add_tensor(tensors.get(tensor, tensor), values, GGMLType.F32)
    writer.write()
    return path


def test_every_architecture_is_listed_with_its_reference() -> None:
    rows = json.loads(inside("list", "--architectures", "--json").stdout)
    assert [row["name"] for row in rows] == sorted(ARCHITECTURES)
    assert all(row.keys() == {"name", "kind", "sparsity", "compared_with"} for row in rows)
    by_name = {row.name: row for row in supported()}
    assert by_name["arcee"].sparsity == "exact zeros (relu2)"
    assert (by_name["bert"].kind, by_name["bert"].sparsity) == ("encoder, dense", "none")
    assert by_name["qwen3next"].kind == "MoE, gated delta nets"
    assert "transformers" in inside("list", "--architectures").stdout


def test_every_architecture_has_a_recipe(run_folder: Path) -> None:
    found = set()
    for name in (*tiny_models.first_of_each_architecture(), *tiny_models.ENCODERS):
        with open_gguf(tiny_models.shared_gguf(name, run_folder)) as gguf:
            found.add(gguf.metadata["general.architecture"])
    other_names = {"bitnet-25", "bitnet-b1.58"}  # tests/model/test_bitnet.py
    assert found | other_names == ARCHITECTURES.keys()


def test_unknown_architecture_names_new_tensors_and_keys(run_folder: Path, tmp_path: Path) -> None:
    renamed = {"blk.1.post_ffw_norm.weight": "blk.1.other_norm.weight"}
    with open_gguf(tiny_models.shared_gguf("olmo2", run_folder)) as source:
        path = copied(source, tmp_path / "m.gguf", "olmo9", renamed, new_thing=3)
    with open_gguf(path) as gguf, pytest.raises(UnsupportedModelError) as caught:
        read_config(gguf)
    message = str(caught.value)
    assert message.startswith("the architecture 'olmo9' is not supported; ")
    assert "most like those of olmo2, " in message
    assert "tensors that olmo2 does not have: blk.N.other_norm.weight;" in message
    assert "missing or have another shape: blk.N.post_ffw_norm.weight;" in message
    assert message.endswith("keys that hotset does not read: new_thing")


def test_an_unknown_architecture_with_keys_that_fit_none_has_names(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "qwen33")
    writer.add("qwen33.block_count", 0)
    writer.add_tensor("token_embd.weight", np.ones((4, 4), np.float32), GGMLType.F32)
    writer.write()
    with open_gguf(tmp_path / "m.gguf") as gguf, pytest.raises(UnsupportedModelError) as caught:
        read_config(gguf)
    assert "The nearest names are qwen3, qwen35, " in str(caught.value)
