"""Other users of a model's cache on a Vulkan device: drafting layers and modes, and blocks on disk.

They change no bit of a text.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend_runs import logits_of, tokens
from byte_models import N_VOCAB, vocabulary, write_model
from cases import quick_are
from drafters import dense, experts, sparse, steady, write_thresholds
from tiny_gguf import write_llama
from vulkan_runs import stage_of, validated, vulkan

import hotset
from hotset.backends.base import BLOCK_SIZE
from hotset.backends.vulkan.backend import WholeVulkan
from hotset.backends.vulkan.memory import BufferRange
from hotset.backends.vulkan.pipelines import open_device
from hotset.errors import InvalidRequestError, OutOfMemoryError, UnsupportedModelError
from hotset.formats.gguf import open_gguf
from hotset.loader.prompt_cache import identity_of, session_files
from hotset.settings import LoadSettings

__all__ = ["steady", "validated"]  # the fixtures
SMALL: dict[str, Any] = {"device": "vulkan", "n_ctx": 256, "n_threads": 1, "n_seqs": 2, "max_batch": 64}
PROMPTS = ["one two one two " * 5, "three, four, three, four", "A text of its own"]
KINDS: list[dict[str, Any]] = [
    {"temperature": 0, "logprobs": 1},
    {"seed": 4, "temperature": 0.6, "repetition_penalty": 1.1},
]


def answers(model: hotset.Model) -> list[Any]:
    found = [one for kind in KINDS for one in model.generate_many(PROMPTS, max_tokens=24, **kind)]
    return [(one.tokens, one.logprobs) for one in found]


def nextn_path(name: str, run_folder: Path) -> Path:
    pytest.importorskip("transformers")
    return pytest.importorskip("nextn_models").kept_agreeing(run_folder, name)  # type: ignore[no-any-return]


def assert_drafts_change_nothing(path: Path, how: dict[str, Any], plain: dict[str, Any]) -> None:
    """Check that drafts change no text. The drafter's memory is counted, and freed with the drafter."""
    with hotset.load(path, **SMALL, **plain) as model:
        expected, held = answers(model), sum(model.backend.device_bytes()[0].values())
    with hotset.load(path, **SMALL, **how) as model:
        assert answers(model) == expected
        counted = model.thread.counters()
        assert counted.drafted_tokens >= counted.accepted_tokens > 0
        assert isinstance(model.backend, WholeVulkan)
        device, with_drafter = (
            model.backend.stage.opened.device,
            sum(model.backend.device_bytes()[0].values()),
        )
        assert device.allocated == with_drafter > held
    gc.collect()
    assert device.allocated == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    quick_are(
        ("qwen35",), ("glm4moe", "deepseek2-v3", "qwen3next", "qwen35", "qwen35moe", "nemotron-h-moe-latent")
    ),
)
def test_a_models_own_layer_drafts(name: str, run_folder: Path) -> None:
    assert_drafts_change_nothing(nextn_path(name, run_folder), {"speculate": "mtp"}, {})


@pytest.mark.parametrize("make", [dense, sparse, experts])
def test_a_model_drafts_for_itself(tmp_path: Path, make: Any) -> None:
    """Draft with thresholds next to the file, with predictors, or with fewer experts, by the same weights."""
    path = make(tmp_path)
    if make is dense:
        write_thresholds(path)
    mode = {"sparsity": "exact" if make is sparse else "dense"}
    assert_drafts_change_nothing(path, {"speculate": "self"}, mode)


@pytest.mark.slow
def test_weights_are_loaded_once(tmp_path: Path) -> None:
    """Check that the drafting mode loads only the weights that the model does not have."""
    path = sparse(tmp_path)
    with hotset.load(path, sparsity="exact", **SMALL) as model:
        expected = answers(model)
    with hotset.load(path, speculate="self", predictor="svd:16:f16", **SMALL) as model:
        assert answers(model) == expected
        assert model.thread.counters().accepted_tokens > 0
        assert isinstance(model.backend, WholeVulkan)
        theirs, ours = (stage.matrices.kept for stage in model.backend.stage.opened.stages)
        assert {key for key in theirs if ours.get(key) is theirs[key]} == set(theirs)
        assert {"svd_a", "svd_b"} == {str(key[0]).split(".")[2] for key in ours.keys() - theirs.keys()}


@pytest.mark.slow
def test_budget_includes_the_drafter(run_folder: Path) -> None:
    path = nextn_path("qwen35", run_folder)
    with pytest.raises(OutOfMemoryError, match="smallest budget") as raised:
        hotset.load(path, speculate="mtp", vram_budget=0.005, **SMALL)
    smallest = float(str(raised.value).split("smallest budget that works is ")[1].split()[0])
    with hotset.load(path, speculate="mtp", vram_budget=smallest, **SMALL) as model:
        answers(model)
        assert isinstance(model.backend, WholeVulkan)
        assert model.backend.stage.opened.device.allocated <= smallest * 2**30


@pytest.mark.parametrize("how", [{"n_gpu_layers": 1}, {"split": "neurons"}])
@pytest.mark.parametrize("what", [{"speculate": "self"}, {"speculate": "mtp"}, {"cache_dir": "folder"}])
def test_a_model_that_is_divided_has_none_of_it(how: dict[str, Any], what: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=r"a Vulkan device that has the whole model"):
        LoadSettings(device="vulkan", **how, **what)


@pytest.mark.parametrize(
    ("make", "staged", "kv_type"),
    [("dense", False, "q8_0"), ("dense", True, "f16"), ("lfm2", False, "f16"), ("lfm2", True, "f16")],
)
def test_blocks_on_disk(
    tmp_path: Path, run_folder: Path, make: str, staged: bool, kv_type: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a prompt and its states are restored after a restart, but not from blocks of the CPU."""
    tiny_models = pytest.importorskip("tiny_models")
    if make == "dense":
        path = write_llama(tmp_path / "model.gguf", head_dim=32, keys=vocabulary(), n_vocab=N_VOCAB)
    else:
        path = tiny_models.shared_gguf(make, run_folder)
    if staged:
        monkeypatch.setattr("hotset.backends.vulkan.opening.open_device", opened_staged())
    prompt, kind = tokens(150).tolist(), {"temperature": 0, "max_tokens": 20}
    how = SMALL | {"kv_type": kv_type, "cache_dir": tmp_path / "cache"}
    with hotset.load(path, **SMALL, kv_type=kv_type) as model:
        expected = model.generate(prompt, **kind).tokens
    restored = []
    for _ in range(2):
        with hotset.load(path, **how) as model:
            assert model.generate(prompt, **kind).tokens == expected
            restored.append(model.thread.counters().restored_tokens)
    assert restored == [0, 2 * BLOCK_SIZE]
    on_cpu = {key: value for key, value in how.items() if key != "device"} | {"device": "cpu"}
    with hotset.load(path, **on_cpu) as model:
        model.generate(prompt, **kind)
        assert model.thread.counters().restored_tokens == 0


def opened_staged() -> Any:
    return lambda info, **given: open_device(info, **given | {"staged": True})


@pytest.mark.slow
def test_blocks_have_the_part_of_the_layer_that_drafts(tmp_path: Path, run_folder: Path) -> None:
    how = SMALL | {"speculate": "mtp", "cache_dir": tmp_path / "cache"}
    found, restored = [], []
    for _ in range(2):
        with hotset.load(nextn_path("qwen35", run_folder), **how) as model:
            found.append(model.generate(tokens(150).tolist(), temperature=0, max_tokens=24).tokens)
            counted = model.thread.counters()
            restored.append((counted.restored_tokens > 0, counted.accepted_tokens > 0))
    assert found[0] == found[1]
    assert restored == [(False, True), (True, True)]


def test_another_driver_has_other_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hotset.load(write_model(tmp_path / "model.gguf"), **SMALL) as model:
        own = identity_of(model.decided).digest
        monkeypatch.setattr("hotset.backends.vulkan.planning.shaders_digest", lambda: "others")
        assert identity_of(model.decided).digest != own


def test_session_needs_the_whole_model(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", n_layer=3)
    divided = hotset.load(path, n_gpu_layers=1, **SMALL)
    with divided as model, pytest.raises(UnsupportedModelError, match="or a Vulkan device"):
        session_files(model, "--session")
    with hotset.load(path, **SMALL) as model:
        session_files(model, "--session")


def test_a_thread_copies_blocks_between_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that only one thread at a time uses the device, for steps and for copies."""
    path, ids = write_llama(tmp_path / "model.gguf"), tokens(70)
    with open_gguf(path) as gguf:
        backend = vulkan(gguf, staged=True)
        stage = stage_of(backend)
        submit, read, n_alone = stage._submit, BufferRange.read, 0

        def alone(use: Callable[..., Any]) -> Callable[..., Any]:
            def used(*given: Any) -> Any:
                nonlocal n_alone
                n_alone += stage.opened.in_use._is_owned()  # type: ignore[attr-defined]
                return use(*given)

            return used

        expected = logits_of(backend, ids, [], [3, 1])
        block = stage.read_block(3)
        stage.write_block(5, block)
        monkeypatch.setattr(stage, "_submit", alone(submit))
        monkeypatch.setattr(BufferRange, "read", alone(read))
        with ThreadPoolExecutor(1) as pool:
            copied = [pool.submit(stage.read_block, 5) for _ in range(20)]
            assert np.array_equal(logits_of(backend, ids, list(range(60, 70)), [3, 1]), expected)
            assert {one.result() for one in copied} == {block}
        assert n_alone == 11 * 2 + 20 * len(stage._block_parts())  # per step a submission, a read of logits
        assert stage.read_block(3) == block
