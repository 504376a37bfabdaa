"""The display of results in a console, a notebook and as tables; the keywords of sampling."""

from __future__ import annotations

import sys
import typing
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_server import write_model

import hotset
from hotset.sampling_parameters import Sampling

SAMPLED: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}


@pytest.fixture
def frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace pandas by a module whose DataFrame keeps only the columns."""
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=dict))


@pytest.fixture(scope="module")
def completion(tmp_path_factory: pytest.TempPathFactory) -> hotset.Completion:
    path: Path = write_model(tmp_path_factory.mktemp("model") / "tiny.gguf")
    with hotset.load(path, device="cpu", n_threads=1) as model:
        return model.generate("hello", logprobs=2, **SAMPLED)


def test_the_keywords_are_the_fields_of_sampling_params():
    """Check names and types: no type checker derives the keywords from the table of parameters."""
    wider = {
        "dry_sequence_breakers": Sequence[str], "stop": str | Sequence[str], "stop_token_ids": Sequence[int],
    }  # fmt: skip
    assert typing.get_type_hints(Sampling) == typing.get_type_hints(hotset.SamplingParams) | wider


def test_an_answer_shows_its_text_and_not_a_thousand_tokens(completion: hotset.Completion):
    shown = repr(completion)
    assert shown.startswith(f"Completion({completion.text[:5]!r}"[:-1])
    assert "6 tokens, finish_reason='length'" in shown
    assert "logprob" not in shown
    message = hotset.ChatMessage("hi", completion)
    assert repr(message) == "ChatMessage('assistant', 'hi')"
    assert message._repr_html_() == completion._repr_html_()


def test_the_text_of_an_answer_is_text_in_a_notebook(completion: hotset.Completion):
    hostile = replace(completion, text="<script>alert(1)</script> & more")
    html = hostile._repr_html_()
    assert "<script" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; more" in html


@pytest.mark.usefixtures("frames")
def test_the_tokens_of_an_answer_as_a_table(completion: hotset.Completion):
    table = completion.to_pandas()
    assert table["token"] == completion.tokens
    assert table["logprob"] == [one.logprob for one in completion.logprobs]
    assert [len(top) for top in table["top"]] == [2] * 6
    assert replace(completion, logprobs=[]).to_pandas() == {"token": completion.tokens}


@pytest.mark.usefixtures("frames")
def test_statistics_as_a_table_and_as_bars():
    layers = tuple(
        hotset.LayerStats(i, share, 0.5, None, None, None, 1e6, 0.0, 0.1, 0.1)
        for i, share in enumerate((0.25, 0.5))
    )
    stats = hotset.StatsSummary(layers, 7, 7, 0.375, 0.5, 2e6, 4e6, 1e6, 2e6, {})
    table = stats.to_pandas()
    assert table["layer"] == [0, 1]
    assert table["active_share"] == [0.25, 0.5]
    assert "of the neurons active" in repr(stats)
    html = stats._repr_html_()
    assert html.count("<tr>") == 2
    assert "width: 25.0%" in html


def test_missing_pandas_names_the_package(completion: hotset.Completion, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(hotset.HotsetError, match="pip install pandas"):
        completion.to_pandas()
