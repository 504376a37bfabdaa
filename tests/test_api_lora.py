"""Adapters (LoRA) through the Python API: loading, choosing and unloading them; caches keep them apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from byte_models import PRINTABLE, write_model
from tiny_adapters import random_pairs, write_adapter, write_merged

import hotset
from hotset.backends.base import BLOCK_SIZE, NO_ADAPTERS, AdapterScales
from hotset.engine.driver import EngineThread
from hotset.engine.sampler import SamplingParams
from hotset.errors import HotsetError, InvalidRequestError, ModelNotFoundError, OutOfMemoryError
from hotset.formats.gguf import open_gguf
from hotset.formats.lora import AdapterFile, LoraAdapter
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe
from hotset.settings import LoadSettings

PROMPT = "x" * (2 * BLOCK_SIZE) + "why?"
SAMPLING: dict[str, Any] = {"seed": 1, "max_tokens": 12, "logit_bias": PRINTABLE}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model, two adapters, and the model merged with the first."""
    folder = tmp_path_factory.mktemp("lora")
    with open_gguf(write_model(folder / "tiny.gguf")) as gguf:
        graph = describe(config_from_gguf(gguf), gguf.tensors)
        for seed, name in enumerate(("one", "two")):
            pairs = random_pairs(graph, gguf.tensors, seed=seed)
            write_adapter(folder / f"{name}.gguf", pairs, alpha=2.0)
            if name == "one":
                write_merged(folder / "merged.gguf", gguf, [(pairs, 1.0)])
    return folder


@pytest.fixture
def model(folder: Path) -> Iterator[hotset.Model]:
    with hotset.load(folder / "tiny.gguf", device="cpu") as model:
        yield model


def answers(
    model: hotset.Model, choices: Mapping[str, AdapterScales | None], prompt: str = PROMPT
) -> dict[str, list[int]]:
    """Return the tokens of concurrent answers, one for each choice of adapters."""
    params = SamplingParams(**SAMPLING)
    made = {
        name: model.prepare(model.encode(prompt), params, adapters=scales) for name, scales in choices.items()
    }
    with ExitStack() as running:
        for generation in made.values():
            running.enter_context(generation)
        return {name: generation.finish().tokens for name, generation in made.items()}


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_model_with_an_adapter_is_the_merged_one(folder: Path, backend: str) -> None:
    """Compare greedy answers of random models, whose logits differ by more than rounding errors."""
    given = {"device": backend, "max_batch": 256}
    with hotset.load(folder / "merged.gguf", **given) as merged:
        expected = merged.generate(PROMPT, temperature=0, max_tokens=12).tokens
    with hotset.load(folder / "tiny.gguf", lora=folder / "one.gguf", **given) as model:
        assert model.generate(PROMPT, temperature=0, max_tokens=12).tokens == expected
        assert [(each.id, each.name, each.scale) for each in model.adapters.loaded] == [(0, "one", 1.0)]
        assert model.adapters.nbytes > 0
        model.adapters.unload("one")
        assert model.generate(PROMPT, temperature=0, max_tokens=12).tokens != expected


def test_answers_with_different_adapters_side_by_side(folder: Path) -> None:
    """Check that each answer equals the answer to a single request, whatever the prefix cache holds."""
    alone = {}
    for name, lora in {
        "none": None, "one": ["one.gguf"], "half": ["one.gguf:0.5"], "both": ["one.gguf", "two.gguf:-0.25"],
    }.items():  # fmt: skip
        paths = None if lora is None else [str(folder / one) for one in lora]
        with hotset.load(folder / "tiny.gguf", lora=paths, device="cpu") as model:
            alone[name] = answers(model, {name: None})[name]
    assert len({tuple(tokens) for tokens in alone.values()}) == 4
    given = {"lora": [folder / "two.gguf", (folder / "one.gguf", 1)], "n_seqs": 4, "max_batch": 100}
    with hotset.load(folder / "tiny.gguf", device="cpu", **given) as model:
        choices = {
            "none": NO_ADAPTERS, "one": model.adapters.resolve({"one": 1.0}),
            "half": model.adapters.resolve({1: 0.5}),
            "both": model.adapters.resolve({"two": -0.25, "one": 1}),
        }  # fmt: skip
        assert answers(model, choices) == alone
        reused = model.engine.counters().reused_tokens
        assert answers(model, dict(reversed(choices.items()))) == alone
        assert model.engine.counters().reused_tokens == reused + 4 * 2 * BLOCK_SIZE
        # By default an answer uses the scales set for the adapters.
        model.adapters.set_scales({"one": 0.5})
        assert answers(model, {"half": None})["half"] == alone["half"]
        model.adapters.set_scales({})
        assert answers(model, {"none": None})["none"] == alone["none"]


def test_memory_is_reserved_before_an_adapter_is_read(
    folder: Path, model: hotset.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[int | str] = []
    read = AdapterFile.read

    def noted(file: AdapterFile, check: Callable[[], object]) -> LoraAdapter:
        done.append("read")
        return read(file, check)

    def reserve(n_bytes: int) -> None:
        done.append(n_bytes)
        if len(done) == 1:
            raise OutOfMemoryError("full")

    monkeypatch.setattr(AdapterFile, "read", noted)
    model.adapters.change_memory = reserve
    with pytest.raises(OutOfMemoryError):
        model.adapters.load(str(folder / "one.gguf"))
    one = model.adapters.load(str(folder / "one.gguf"))
    n = one.adapter.nbytes
    assert done == [n, n, "read", 0]
    with pytest.raises(InvalidRequestError, match="is called 'one' already"):
        model.adapters.load(str(folder / "two.gguf"), name="one")
    assert len(done) == 4  # a refused adapter reserves no memory


def test_an_adapter_may_be_unloaded_while_answers_have_it(folder: Path, model: hotset.Model) -> None:
    changes: list[int] = []  # of memory
    model.adapters.change_memory = changes.append
    one = model.adapters.load(str(folder / "one.gguf"), 0.0)
    assert sum(changes) == one.adapter.nbytes
    expected = answers(model, {"a": model.adapters.resolve({one.id: 1})})["a"]
    scales = model.adapters.resolve({"one": 1.0})
    generation = model.prepare(model.encode(PROMPT), SamplingParams(**SAMPLING), adapters=scales)
    with generation:
        model.adapters.unload(0)
        assert generation.finish().tokens == expected
    again = model.adapters.load(str(folder / "one.gguf"))
    assert again.id == 1  # numbers are not used twice
    assert sum(changes) == again.adapter.nbytes
    assert answers(model, {"a": None})["a"] == expected
    # An answer that begins after the unload fails, but another running answer does not.
    late = model.prepare(model.encode(PROMPT), SamplingParams(**SAMPLING), adapters=scales)
    beside = model.prepare(model.encode("other"), SamplingParams(**SAMPLING), adapters=NO_ADAPTERS)
    model.adapters.unload("one")
    assert not model.backend.adapters.adapters
    assert sum(changes) == 0
    with beside, late:
        with pytest.raises(InvalidRequestError, match="not loaded any more"):
            late.finish()
        assert len(beside.finish().tokens) == 12


def test_wrong_use_is_one_message(folder: Path, model: hotset.Model, tmp_path: Path) -> None:
    model.adapters.load(str(folder / "one.gguf"))
    for wrong, error, message in (
        (lambda: model.adapters.load(str(folder / "one.gguf")), InvalidRequestError, "loaded already"),
        (lambda: model.adapters.load(str(folder / "none.gguf")), ModelNotFoundError, "there is no adapter"),
        (lambda: model.adapters.load(str(folder / "tiny.gguf")), HotsetError, "is not an adapter"),
        (lambda: model.adapters.load(str(tmp_path)), ModelNotFoundError, "adapter_config.json"),
        (lambda: model.adapters.load(str(folder / "two.gguf"), 1e9), InvalidRequestError, "scale"),
        (lambda: model.adapters.unload("two"), InvalidRequestError, "'two'; the loaded ones are 0"),
        (lambda: model.adapters.unload(7), InvalidRequestError, "no adapter 7"),
        (lambda: model.adapters.resolve({"one": float("nan")}), InvalidRequestError, "scale"),
        (lambda: model.adapters.set_scales({3: 1.0}), InvalidRequestError, "no adapter 3"),
    ):
        with pytest.raises(error, match=message):
            wrong()
    assert len(model.adapters.loaded) == 1


def test_a_load_that_fails_leaves_nothing_open(folder: Path) -> None:
    with pytest.raises(HotsetError, match="is not an adapter"):
        hotset.load(folder / "tiny.gguf", lora=folder / "tiny.gguf", device="cpu")
    assert not [thread for thread in _threads() if not thread.closed and thread.engine.has_work]


def _threads() -> list[EngineThread]:
    from hotset.engine import driver

    return list(driver._living)


def test_a_cache_on_disk_knows_adapters(folder: Path, tmp_path: Path) -> None:
    given = {"device": "cpu", "cache_dir": tmp_path, "lora": folder / "one.gguf", "n_seqs": 4}
    found = []
    for _ in range(2):
        with hotset.load(folder / "tiny.gguf", **given) as model:
            choices = {"one": None, "none": NO_ADAPTERS, "half": model.adapters.resolve({"one": 0.5})}
            found.append({name: answers(model, {name: scales})[name] for name, scales in choices.items()})
            assert model.engine.counters().restored_tokens == (len(found) - 1) * 3 * 2 * BLOCK_SIZE
    assert found[0] == found[1]
    assert len({tuple(tokens) for tokens in found[0].values()}) == 3


def test_drafts_leave_answers_with_adapters_as_they_are(folder: Path) -> None:
    with hotset.load(folder / "tiny.gguf", lora=folder / "one.gguf", device="cpu") as model:
        expected = answers(model, {"a": None, "b": NO_ADAPTERS})
    for speculate in ({"speculate": "ngram"}, {"draft": folder / "tiny.gguf"}):
        given = {"lora": folder / "one.gguf", "device": "cpu", **speculate}
        with hotset.load(folder / "tiny.gguf", **given) as model:
            assert answers(model, {"a": None, "b": NO_ADAPTERS}) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, None), ([], None), ("a.gguf", (("a.gguf", 1.0),)), ("a.gguf:0.5", (("a.gguf", 0.5),)),
        (["a:-1e-1", Path("b")], (("a", -0.1), ("b", 1.0))), (("a", 2), (("a", 2.0),)),
        ([("a:b", 2), ["c", 0]], (("a:b", 2.0), ("c", 0.0))), ("C:/a.gguf", (("C:/a.gguf", 1.0),)),
        (("a", "b"), (("a", 1.0), ("b", 1.0))),
    ],
)  # fmt: skip
def test_settings_name_adapters(given: Any, expected: Any) -> None:
    settings = LoadSettings(lora=given)
    assert settings.lora == (expected and tuple((Path(path), scale) for path, scale in expected))
    assert LoadSettings(lora=settings.lora) == settings


@pytest.mark.parametrize("given", [3, [3], "", ["a:nan"], [("a", "b", "c")], [("a", True)], ["a:1e9"]])
def test_settings_that_name_none(given: Any) -> None:
    with pytest.raises(InvalidRequestError):
        LoadSettings(lora=given)


@pytest.mark.parametrize(
    "device",
    [
        {"n_gpu_layers": 3},
        pytest.param({"device": "cuda:0"}, marks=pytest.mark.backend("triton")),
        pytest.param({"device": "vulkan", "n_gpu_layers": 2}, marks=pytest.mark.backend("vulkan")),
    ],
)
def test_devices_do_not_compute_adapters(device: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="only the CPU computes"):
        LoadSettings(lora="a", **device)


def test_adapters_with_a_ram_budget(folder: Path) -> None:
    """Combine adapters with rows that are read when needed: the answers stay the same."""
    given = {"lora": folder / "one.gguf", "device": "cpu", "n_ctx": 256}
    with hotset.load(folder / "tiny.gguf", **given) as model:
        expected = answers(model, {"a": None})
    with hotset.load(folder / "tiny.gguf", ram_budget=4.0, **given) as model:
        assert model.ram is not None
        assert answers(model, {"a": None}) == expected
