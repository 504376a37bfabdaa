"""--device vulkan in the API and on the command line: the engine, prefix caching, settings, doctor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import published
import pytest
from backend_runs import tokens
from byte_models import write_model
from cli_runs import hotset as hotset_command
from cli_runs import inside
from drafters import steady
from paths import DOCS
from tiny_adapters import random_pairs, write_adapter
from vulkan_runs import validated

import hotset
from hotset.backends.base import N_CANDIDATES
from hotset.engine.sampler import Sampler
from hotset.errors import InvalidRequestError, OutOfMemoryError
from hotset.settings import LoadSettings

__all__ = ["steady", "validated"]  # the fixtures
SMALL: dict[str, Any] = {"n_ctx": 128, "max_batch": 32, "n_threads": 1}


def test_greedy_text_is_the_cpus(tmp_path: Path) -> None:
    """Compare texts of parallel prompts, and of a prompt whose beginning is in the cache."""
    path, prompts = write_model(tmp_path / "model.gguf"), ["Hello there", "A longer prompt, " * 5]
    params: dict[str, Any] = {"max_tokens": 12, "temperature": 0}
    with hotset.load(path, device="cpu", **SMALL) as model:
        expected = [one.text for one in model.generate_many(prompts, **params)]
    with hotset.load(path, device="vulkan", n_seqs=2, **SMALL) as model:
        assert model.backend.name == "vulkan"
        assert model.decided.choice.reason.endswith("the default of a Vulkan device")
        assert [one.text for one in model.generate_many(prompts, **params)] == expected
        assert model.generate(prompts[1], **params).text == expected[1]
        assert any("Vulkan" in note for note in model.backend.notes)


def test_texts_are_the_same_with_and_without_candidates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check them also in parallel with a request that needs all logits."""
    path, prompts = write_model(tmp_path / "model.gguf"), ["Hello there", "A longer prompt"]
    ways: list[dict[str, Any]] = [
        {"temperature": 0}, {"seed": 1}, {"seed": 2, "repetition_penalty": 1.3, "top_p": 1.0},
        {"seed": 3, "typical_p": 0.7, "xtc_probability": 0.5, "ignore_eos": True},
    ]  # fmt: skip
    found = []
    with hotset.load(path, device="vulkan", n_seqs=2, **SMALL) as model:
        stage = model.backend.stages[0]
        assert model.backend.n_vocab > 2 * N_CANDIDATES
        for allowed in (True, False):
            if not allowed:
                monkeypatch.setattr(Sampler, "takes_candidates", lambda *_: False)
            for way in ways:
                found.append([one.tokens for one in model.generate_many(prompts, max_tokens=12, **way)])
                assert (stage.candidates is not None) == allowed
            one, other = (model.generate(prompts[0], max_tokens=5, seed=1, logprobs=n) for n in (None, 3))
            assert one.tokens == other.tokens
            assert stage.candidates is None
    assert found[: len(ways)] == found[len(ways) :]


def test_drafts_and_adapters_change_nothing_that_they_should_not(tmp_path: Path) -> None:
    """Check that drafted tokens change no bit, and that the text with an adapter is the CPU's."""
    path, params = write_model(tmp_path / "model.gguf"), {"max_tokens": 20, "temperature": 0, "logprobs": 1}
    with hotset.load(path, device="vulkan", **SMALL) as model:
        expected = model.generate("one two one two one", **params)
        pairs = random_pairs(model.graph, model.gguf.tensors)
    with hotset.load(path, device="vulkan", draft=path, **SMALL) as model:
        found = model.generate("one two one two one", **params)
        assert (found.tokens, found.logprobs) == (expected.tokens, expected.logprobs)
        assert model.engine.counters().accepted_tokens > 0
    lora, texts = write_adapter(tmp_path / "lora.gguf", pairs), []
    for how in ({"device": "cpu"}, {"device": "vulkan"}):
        with hotset.load(path, lora=lora, **SMALL, **how) as model:
            texts.append(model.generate("one two one two one", **params).tokens)
    assert texts[0] == texts[1] != expected.tokens


def test_vectors_and_scores_are_the_cpus(run_folder: Path) -> None:
    """Check encoders, which process a whole text at once: neighbours do not change the bits of a vector."""
    tiny_models = pytest.importorskip("tiny_models")
    texts = [tokens(n, seed=n) + 4 for n in (90, 37, 1)]
    found = []
    for how in ({"device": "cpu"}, {"device": "vulkan"}):
        with hotset.load(tiny_models.shared_gguf("bert-scores", run_folder), n_threads=1, **how) as model:
            vectors = model.embed(texts, pooling="mean")
            assert np.array_equal(model.embed(texts[1:2], pooling="mean")[0], vectors[1])
            found.append(np.concatenate([vectors.ravel(), np.ravel(model.embed(texts, pooling="rank"))]))
    assert np.abs(found[0] - found[1]).max() < 1e-3


def test_a_recurrent_models_text_is_the_cpus(run_folder: Path) -> None:
    """Check parallel requests, a prefix with states in the cache, and layers on the CPU."""
    tiny_models = pytest.importorskip("tiny_models")
    path, prompt = tiny_models.shared_gguf("lfm2", run_folder), tokens(70).tolist()
    params: dict[str, Any] = {"max_tokens": 8, "temperature": 0}
    found = []
    for how in ({"device": "cpu"}, {"device": "vulkan"}, {"device": "vulkan", "n_gpu_layers": 2}):
        with hotset.load(path, n_seqs=2, **SMALL, **how) as model:
            assert model.backend.n_states > 4
            texts = [model.generate(one, **params).tokens for one in (prompt, [*prompt, 5], prompt[:20])]
            found.append(texts)
    assert found[0] == found[1] == found[2]


@pytest.mark.slow
def test_demo_model_equals_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare greedy text, and the bits of the perplexity.

    A software driver takes minutes: each token uses 135 million weights.
    """
    monkeypatch.delenv("HOTSET_VULKAN_VALIDATION")
    prompts = ["The capital of France is", "Once upon a time", "def fibonacci(n):"]
    text = (DOCS / "reference/glossary.md").read_text("utf-8")
    found = []
    for how in ({"device": "cpu"}, {"device": "vulkan"}):
        with hotset.load(published.model(), n_ctx=128, n_seqs=len(prompts), **how) as model:
            scored = model.perplexity(text, n_ctx=128, chunks=1)
            texts = model.generate_many(prompts, max_tokens=64, temperature=0)
            found.append((scored.ppl, [one.tokens for one in texts]))
    assert found[0] == found[1]


def test_the_command_line(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf")
    given = ["-n", "4", "--temp", "0", "--device", "vulkan", "-c", "64", "--stats"]
    done = inside("run", "-m", str(path), "Hello", *given)
    assert "No statistics: a Vulkan device counts no neurons." in done.stderr
    plan = inside("plan", str(path), "--device", "vulkan")
    assert "0 to 1, output" in plan.stdout
    assert "is a software driver" in plan.stderr
    shown = json.loads(inside("doctor", "--json").stdout)["vulkan"]
    assert shown["why"] == ""
    assert shown["devices"][0]["memory"] > 0
    assert "vulkan:0" in inside("doctor").stdout


def test_a_budget_and_settings_that_do_not_fit(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf")
    with pytest.raises(OutOfMemoryError, match=r"the smallest budget that works is .* \(vram_budget\)"):
        hotset.load(path, device="vulkan", vram_budget=0.001, **SMALL)
    with hotset.load(path, device="vulkan", n_gpu_layers=0, **SMALL) as model:
        assert model.backend.name == "cpu"
    for changes, sentence in (
        ({"device": ("vulkan:0", "cuda:0")}, "leave out the others"),
        ({"device": ("auto", "vulkan")}, "the device auto cannot be combined"),
        ({"device": "vulkan", "ram_budget": 1.0}, "ram_budget cannot be combined with a Vulkan device"),
    ):
        with pytest.raises(InvalidRequestError, match=sentence):
            LoadSettings(**changes)


def test_without_a_driver(tmp_path: Path) -> None:
    """Check the message if the loader finds no driver; doctor reports it, too."""
    path = write_model(tmp_path / "model.gguf")
    environment = {
        "VK_ICD_FILENAMES": str(tmp_path / "none.json"),
        "VK_DRIVER_FILES": str(tmp_path / "none.json"),
    }
    done = hotset_command("run", "-m", str(path), "Hello", "--device", "vulkan", env=environment, returns=1)
    assert "Vulkan" in done.stderr
    assert "Traceback" not in done.stderr
    found = json.loads(hotset_command("doctor", "--json", env=environment).stdout)["vulkan"]
    assert found["devices"] == []
