"""Sampling parameters that a file recommends: written, read, and used if a request has no value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from byte_models import write_model
from tiny_gguf import write_llama

import hotset
from hotset.errors import InvalidRequestError
from hotset.formats.gguf import GGUFWriter, open_gguf
from hotset.formats.quants import GGMLType
from hotset.formats.recommended import KEYS, recommend, recommended


def test_written_parameters_are_read(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    params = {"temperature": 0.7, "top_k": -1, "penalty_last_n": -1, "repetition_penalty": 1.1}
    recommend(writer, params)
    writer.add_tensor("t", np.zeros(4, np.float32), GGMLType.F32)
    writer.write()
    with open_gguf(tmp_path / "m.gguf") as file:
        assert recommended(file) == (params | {"top_k": 0}, [])
    names = {f"general.sampling.{end}" for end in KEYS}
    assert names <= {value for key, value in vars(gguf.Keys.General).items() if key.startswith("SAMPLING")}


def test_values_that_are_not_valid_are_refused_or_ignored(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="top_p must be between 0 and 1"):
        recommend(GGUFWriter(tmp_path / "m.gguf", "llama"), {"top_p": 2.0})
    path = write_llama(
        tmp_path / "m.gguf", keys={"general.sampling.temp": "hot", "general.sampling.top_k": 7}
    )
    with pytest.warns(UserWarning, match="temperature must be a finite number, not 'hot'"):
        model = hotset.load(path)
    with model:
        assert model.decided.sampling == {"top_k": 7}


@pytest.mark.parametrize(("given", "same"), [({}, True), ({"temperature": 0.9}, False)])
def test_requests_without_a_value_use_the_recommended_one(
    tmp_path: Path, given: dict[str, Any], same: bool
) -> None:
    path = write_model(tmp_path / "m.gguf", **{"general.sampling.temp": 0.0})
    with hotset.load(path) as model:
        greedy = model.generate([1, 2, 3], max_tokens=8, temperature=0, seed=1).tokens
        found = model.generate([1, 2, 3], max_tokens=8, seed=1, **given).tokens
        assert (found == greedy) is same
