"""The adapters of the repository, applied to their published file (docs/guides/make-sparse.md)."""

from __future__ import annotations

import json
from pathlib import Path

import published
import pytest
from paths import ROOT

import hotset
from hotset.formats.gguf import open_gguf
from hotset.formats.imatrix import ImportanceMatrix
from hotset.training.adapters import TrainedAdapters, digest, merge

pytest.importorskip("safetensors")

FOLDER = ROOT / "adapters"
ADAPTERS = FOLDER / "smollm2-135m-relu.safetensors"
TEXT = (ROOT / "bench" / "texts" / "lighthouse.txt").read_text()


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("relu") / "smollm2-135m-relu.gguf"
    with open_gguf(published.model()) as gguf:
        importance = ImportanceMatrix.open(FOLDER / "smollm2-135m-relu.imatrix")
        merge(gguf, TrainedAdapters.open(ADAPTERS), path, importance=importance)
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
