"""The adapters of the repository, applied to their published file (docs/guides/make-sparse.md)."""

from __future__ import annotations

import json
from pathlib import Path

import published
import pytest
from paths import ROOT

import hotset
from hotset.formats.gguf import open_gguf
from hotset.formats.quants import GGMLType
from hotset.training.adapters import TrainedAdapters, digest, merge

pytest.importorskip("safetensors")

FOLDER = ROOT / "adapters"
ADAPTERS = FOLDER / "smollm2-135m-relu.safetensors"
TEXT = """
The lighthouse stands at the mouth of the river, on a low rock that the sea covers in winter storms. It was
built between 1871 and 1874, after three ships were lost on the same night, and was one of the first in the
country to burn paraffin instead of oil. A keeper and his family lived in the small house beside the tower
until 1962, when the lamp was made automatic. Since then the house has been empty, except for a few weeks in
spring, when people who count birds stay in it. From the gallery one can see the whole of the bay, the two
islands to the north, and, when the air is clear, the mountains behind the town. The town council has bought
the tower and opened it to visitors. They climb one hundred and forty-two steps of stone and a ladder of
iron to reach the lamp. In the first year about nine thousand people came, which was more than anyone had
expected, and the money was used to repair the harbour wall. Scientists have used the rock as well. Because
the tides there are among the highest in the region, a gauge was fixed to it in 1903, and its records are
among the longest in the world. They show that the level of the sea has risen by about a quarter of a metre
since then, and that half of this has happened in the last forty years. The same records have been used to
test computer models of the tides, and to decide how high the new wall of the harbour should be.
"""


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("relu") / "smollm2-135m-relu.gguf"
    with open_gguf(published.model()) as gguf:
        merge(gguf, TrainedAdapters.open(ADAPTERS), path, GGMLType.Q8_0)
    return path


def test_files_are_small_and_describe_themselves() -> None:
    assert ADAPTERS.stat().st_size < 20_000_000
    adapters = TrainedAdapters.open(ADAPTERS)
    told = json.loads((FOLDER / "smollm2-135m-relu.json").read_text())
    assert adapters.activation == "relu"
    assert (adapters.rank, adapters.model) == (told["rank"], told["model"])
    assert {name.split(".")[1] for name in adapters.values if name.startswith("blk.")} == set(
        map(str, range(30))
    )


def test_they_belong_to_the_published_file() -> None:
    with open_gguf(published.model()) as gguf:
        assert digest(gguf) == TrainedAdapters.open(ADAPTERS).model


@pytest.mark.slow
def test_the_merged_model_is_sparse_and_still_a_language_model(merged: Path) -> None:
    with hotset.load(published.model(), n_ctx=128) as model:
        original = model.perplexity(TEXT, n_ctx=128)
    with hotset.load(merged, n_ctx=128) as model:
        assert model.sparsity.mode == "exact"
        relu = model.perplexity(TEXT, n_ctx=128)
    assert relu.active_share is not None
    assert relu.active_share < 0.32
    assert relu.ppl < 1.7 * original.ppl


def test_it_answers(merged: Path) -> None:
    with hotset.load(merged, n_ctx=256) as model:
        message = model.chat(
            [{"role": "user", "content": "What is a volcano?"}], temperature=0, max_tokens=60
        )
    assert "volcano" in message.content.lower()
