"""Speculative decoding through the API, on tiny models: text, tokens and logprobs are bitwise the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from byte_models import vocabulary, write_model
from drafters import (
    KINDS,
    PROMPTS,
    SMALL,
    SOURCE,
    Guesser,
    answers,
    assert_drafts_change_nothing,
    dense,
    essence,
    experts,
    sparse,
    steady,
    write_thresholds,
)
from tiny_gguf import write_llama

import hotset
from hotset.engine.draft_model import ModelDrafter
from hotset.engine.speculation import Speculator
from hotset.errors import FormatError, InvalidRequestError, OutOfMemoryError
from hotset.load_parameters import MOST_DRAFTED
from hotset.loader.build import open_model
from hotset.loader.decide import ram_limit
from hotset.loader.speculate import drafting_bytes
from hotset.settings import LoadSettings

pytest.importorskip("hotset._core", reason="the native module is not built")

__all__ = ["steady"]  # the fixture, for pytest


@pytest.mark.parametrize("make", [dense, sparse, experts])
@pytest.mark.parametrize("settings", [{}, {"draft_max": 3}])
def test_ngram_drafts_change_nothing(tmp_path: Path, make: Any, settings: dict[str, Any]) -> None:
    """Put parts of the answers into the lookup text, since random models repeat little."""
    path = make(tmp_path)
    with hotset.load(path, **SMALL, **settings) as plain:
        expected = [answers(plain, kind) for kind in KINDS]
        said = [plain.tokenizer.decode(one.tokens) for found in expected for one in found[::2]]
    (tmp_path / "text").write_text("".join(text for text in said if text.isprintable()) + SOURCE, "utf-8")
    with hotset.load(path, speculate="ngram", lookup=tmp_path / "text", **SMALL, **settings) as drafting:
        for kind, found in zip(KINDS, expected, strict=True):
            assert essence(answers(drafting, kind)) == essence(found)
        counted = drafting.thread.counters()
        assert counted.drafted_tokens > counted.accepted_tokens > 0


@pytest.mark.parametrize("n_layer", [1, 2])
def test_a_draft_model_changes_nothing(tmp_path: Path, n_layer: int) -> None:
    """Draft with the model itself, whose tokens are right even when drawn, and with a model seldom right."""
    draft = write_model(tmp_path / "draft.gguf", n_layer=n_layer)
    model = assert_drafts_change_nothing(write_model(tmp_path / "model.gguf"), {"draft": draft})
    counted, speculator = model.thread.counters(), model.engine.speculator
    assert n_layer == 1 or counted.accepted_tokens > 0.95 * counted.drafted_tokens
    assert speculator is not None
    assert isinstance(speculator.drafter, ModelDrafter)
    assert speculator.drafter.n_blocks_free == speculator.drafter.n_blocks


def test_a_draft_model_need_not_fit_the_type_of_the_cache(tmp_path: Path) -> None:
    keys = vocabulary()
    path, draft = (
        write_llama(
            tmp_path / f"{dim}.gguf", head_dim=dim, keys=keys, n_vocab=len(keys["tokenizer.ggml.tokens"])
        )
        for dim in (32, 24)
    )
    with hotset.load(path, draft=draft, kv_type="q8_0", **SMALL) as drafting:
        assert len(drafting.generate(PROMPTS[0], seed=1, max_tokens=8).tokens) > 0
        assert drafting.thread.counters().drafted_tokens > 0


@pytest.mark.parametrize("make", [dense, sparse, experts])
def test_a_model_that_drafts_for_itself_changes_nothing(tmp_path: Path, make: Any) -> None:
    """Draft with stored thresholds, with the file's predictors or with fewer experts: texts stay exact."""
    path = make(tmp_path)
    mode = "exact" if make is sparse else "dense"
    if make is dense:
        write_thresholds(path)
    drafting = assert_drafts_change_nothing(path, {"speculate": "self"}, {"sparsity": mode})
    assert drafting.sparsity.mode == mode
    assert any(note.startswith("drafts: ") for note in drafting.notes)


def test_drafts_have_the_type_of_the_models_cache(tmp_path: Path) -> None:
    keys = vocabulary()
    n_vocab = len(keys["tokenizer.ggml.tokens"])
    path = write_llama(tmp_path / "m.gguf", head_dim=32, keys=keys, n_vocab=n_vocab)
    write_thresholds(path)
    assert_drafts_change_nothing(path, {"speculate": "self"}, kinds=KINDS[:1], kv_type="q8_0")


def test_a_model_drafts_for_itself_in_the_mode_that_is_named(tmp_path: Path) -> None:
    """Check that only drafts use the predictor: the text is exact."""
    drafts = {"speculate": "self", "predictor": "svd:16:f16"}
    assert_drafts_change_nothing(sparse(tmp_path), drafts, {"sparsity": "exact"}, kinds=KINDS[:2])


def test_a_model_that_cannot_draft_for_itself_says_so(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf")
    for settings, said in (
        ({}, "no sparser mode to draft in"),
        ({"sparsity": "exact"}, "cannot be combined with sparsity='exact'"),
        ({"ram_budget": 1.0}, "cannot be combined with ram_budget"),
        ({"device": "reference"}, "cannot be combined with `speculate`"),
    ):
        with pytest.raises(InvalidRequestError, match=said):
            hotset.load(path, speculate="self", **(SMALL | settings))


def test_a_draft_model_has_the_same_vocabulary(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf")
    longer = write_model(tmp_path / "longer.gguf", more_tokens=["<pad1>", "<pad2>"])
    for one, other in ((path, longer), (longer, path)):  # padding of a vocabulary is never drafted
        with hotset.load(one, **SMALL) as plain, hotset.load(one, draft=other, **SMALL) as drafting:
            for kind in KINDS[:2]:
                assert essence(answers(drafting, kind)) == essence(answers(plain, kind))
            assert drafting.thread.counters().drafted_tokens > 0
    with pytest.raises(InvalidRequestError, match="their vocabularies differ from token"):
        hotset.load(path, draft=sparse(tmp_path), **SMALL)


def test_a_budget_of_memory_is_shared_with_the_draft_model(tmp_path: Path) -> None:
    draft = write_model(tmp_path / "draft.gguf")
    with open_model(draft, LoadSettings(draft=draft, n_ctx=256)) as opened:
        reserved = drafting_bytes(opened)
        assert drafting_bytes(opened.with_settings(draft=None)) == 0
    assert draft.stat().st_size < reserved < draft.stat().st_size + (64 << 20)
    settings = LoadSettings(ram_budget=1.0)
    assert ram_limit(settings, 1 << 40, 2**40, reserved) == 2**30 - reserved
    with pytest.raises(OutOfMemoryError, match="the draft model, adapters and images need"):
        ram_limit(settings, 1 << 40, 2**40, 2**30)


@pytest.mark.parametrize("make", [dense, sparse, experts])
def test_drafts_that_are_partly_right_change_nothing(tmp_path: Path, make: Any) -> None:
    with hotset.load(make(tmp_path), **SMALL) as model:
        for kind in KINDS:
            expected = answers(model, kind)
            known = {i: one.tokens for i, one in enumerate(expected)}
            asked = iter(range(len(known)))
            order: dict[Any, int] = {}

            def answer(
                sequence: Any, known: Any = known, asked: Any = asked, order: Any = order
            ) -> list[int]:
                if sequence not in order:
                    order[sequence] = next(asked)
                tokens: list[int] = known[order[sequence]]
                return tokens

            with model.thread.exclusive() as engine:
                engine.speculator = Speculator(Guesser(answer, model.backend.n_vocab, 0.8), MOST_DRAFTED)
                engine.scheduler.speculator = engine.speculator
            before = model.thread.counters().accepted_tokens
            assert essence(answers(model, kind)) == essence(expected)
            assert model.thread.counters().accepted_tokens > before
            with model.thread.exclusive() as engine:
                engine.speculator = engine.scheduler.speculator = None


def test_a_stop_string_inside_a_draft_ends_the_text_there(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf")
    prompt = SOURCE[:150]
    with hotset.load(path, **SMALL) as plain, hotset.load(path, speculate="ngram", **SMALL) as drafting:
        text = plain.generate(prompt, temperature=0, max_tokens=60).text
        for i in range(0, len(text) - 4, 3):
            stop = (text[i : i + 3],)
            expected = plain.generate(prompt, temperature=0, max_tokens=60, stop=stop)
            found = drafting.generate(prompt, temperature=0, max_tokens=60, stop=stop)
            assert essence([found]) == essence([expected])
            streamed = "".join(
                chunk.text for chunk in drafting.stream(prompt, temperature=0, max_tokens=60, stop=stop)
            )
            assert streamed == expected.text


def test_forms_of_answers_are_kept(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    path = write_model(tmp_path / "model.gguf")
    schema = {"type": "array", "items": {"enum": ["ab", "abc"]}, "minItems": 3, "maxItems": 6}
    with hotset.load(path, **SMALL) as plain, hotset.load(path, speculate="ngram", **SMALL) as drafting:
        for seed in range(4):
            asked: dict[str, Any] = {"seed": seed, "max_tokens": 60, "json_schema": schema, "logprobs": 1}
            expected = plain.generate('["ab","abc","ab","abc"]', **asked)
            assert essence([drafting.generate('["ab","abc","ab","abc"]', **asked)]) == essence([expected])
        assert drafting.thread.counters().accepted_tokens > 0


def test_timings_say_how_many_tokens_a_step_gave(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf")
    with hotset.load(path, speculate="ngram", **SMALL) as model:
        repeats = {ord("a"): 50.0, ord("b"): 50.0}
        timings = model.generate("abababab", temperature=0, max_tokens=100, logit_bias=repeats).timings
        assert timings.tokens_per_step == 99 / (99 - timings.accepted_tokens)
        assert timings.drafted_tokens >= timings.accepted_tokens > 0
        assert model.engine.speculator is not None
        assert 1 in model.engine.speculator.step_times.measured
    with hotset.load(path, **SMALL) as model:
        assert model.generate("abc", temperature=0, max_tokens=5).timings.tokens_per_step == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"speculate": "often"}, "must be one of off, ngram"),
        ({"speculate": "draft"}, "requires `draft`"),
        ({"speculate": "ngram", "draft": "a.gguf"}, "`draft` requires speculate='draft', not 'ngram'"),
        ({"draft": "a.gguf", "lookup": "a.txt"}, "`lookup` requires speculate='ngram', not 'draft'"),
        ({"speculate": "off", "lookup": "a.txt"}, "`lookup` requires speculate='ngram', not 'off'"),
        ({"speculate": "ngram", "draft_max": 17}, "draft_max"),
        ({"speculate": "ngram", "device": "reference"}, "cannot be combined with `speculate`"),
    ],
)
def test_settings_that_mean_nothing_are_errors(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        LoadSettings(**settings)


@pytest.mark.backend("triton")
def test_a_model_on_a_device_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("HOTSET_HOME", str(tmp_path / "home"))
    path = write_model(tmp_path / "model.gguf")
    with pytest.raises(InvalidRequestError, match="exact only on the CPU"):
        hotset.load(path, device="simulated", n_gpu_layers=1, n_ctx=64, n_threads=1, speculate="ngram")


def test_implied_settings() -> None:
    assert LoadSettings().drafter == "off"
    assert LoadSettings(lookup="a.txt").drafter == "ngram"
    assert LoadSettings(draft="a.gguf").drafter == "draft"


def test_a_text_to_look_up_must_be_there_and_be_text(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf")
    with pytest.raises(InvalidRequestError, match="there is no text"):
        hotset.load(path, lookup=tmp_path / "none", **SMALL)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FormatError, match="not UTF-8"):
        hotset.load(path, lookup=tmp_path / "bytes", **SMALL)
