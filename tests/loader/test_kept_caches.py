"""The prompt cache on disk of real models: after a restart or a kill, answers have the same bits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from byte_models import write_model, write_sparse
from waiting import WATCHDOG

import hotset
from hotset.backends.base import BLOCK_SIZE
from hotset.errors import InvalidRequestError
from hotset.generation import Completion
from hotset.loader import prompt_cache
from hotset.loader.build import build, open_model, plan_model
from hotset.placement import ram
from hotset.settings import LoadSettings

pytest.importorskip("hotset._core", reason="the native module is not built")

SMALL: dict[str, Any] = {"device": "cpu", "n_threads": 1, "n_ctx": 512, "n_seqs": 2, "max_sequences": 4}
PROMPT = [int(token) for token in np.random.default_rng(3).integers(32, 96, 200)]
TURN = [int(token) for token in np.random.default_rng(4).integers(32, 96, 40)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


def answer(model: hotset.Model, tokens: list[int], **how: Any) -> Completion:
    params = {"max_tokens": 40, "seed": 5, "logprobs": 2, "ignore_eos": True} | how
    return model.generate(tokens, **params)


def bits(completion: Completion) -> tuple[list[int], list[Any]]:
    return completion.tokens, list(completion.logprobs or ())


def conversation(path: Path, folder: Path | None, **how: Any) -> tuple[list[Any], list[int]]:
    """Run two turns, each with a newly loaded model. Return their bits and the numbers of reused tokens."""
    found, reused, tokens = [], [], PROMPT
    for _ in range(2):
        with hotset.load(path, **SMALL | how, cache_dir=folder) as model:
            completion = answer(model, tokens)
            logits = model.logits([*tokens, *completion.tokens][-200:])
        found += [bits(completion), logits.tobytes()]
        reused.append(completion.timings.reused_tokens)
        tokens = [*tokens, *completion.tokens, *TURN]
    return found, reused


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"kv_type": "q8_0"},
        {"kv_type": "q4_0", "speculate": "ngram"},
        {"speculate": "ngram"},
        {"ram_budget": 0.5},
    ],
)
def test_a_conversation_over_restarts_is_the_same_bits(
    tmp_path: Path, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ram, "own_memory", lambda: 0)  # leave out the test process
    if "kv_type" in how:
        path = write_sparse(tmp_path / "wide.gguf", n_head=2, n_head_kv=1)
    else:
        path = write_model(tmp_path / "tiny.gguf")
    expected, none = conversation(path, None, **how)
    for restart in range(2):
        found, reused = conversation(path, tmp_path / "cache", **how)
        assert found == expected
        assert none == [0, 0]
        assert reused == [3 * BLOCK_SIZE if restart else 0, 4 * BLOCK_SIZE if restart else 3 * BLOCK_SIZE]


@pytest.mark.parametrize("recipe", ["lfm2", "qwen3next", "rwkv7"])
def test_a_model_with_states_over_restarts_is_the_same_bits(
    recipe: str, tmp_path: Path, run_folder: Path
) -> None:
    tiny_models = pytest.importorskip("tiny_models")
    path = tiny_models.shared_gguf(recipe, run_folder)
    expected, _ = conversation(path, None)
    for restart in range(2):
        found, reused = conversation(path, tmp_path, n_threads=1 + restart)
        assert found == expected
        assert reused == ([3 * BLOCK_SIZE, 4 * BLOCK_SIZE] if restart else [0, 3 * BLOCK_SIZE])


def test_a_killed_process_leaves_a_cache_that_serves(path: Path, tmp_path: Path) -> None:
    code = """
import os, signal, sys
import hotset, hotset.files
replace, left = os.replace, 2
def kill(source, target):
    global left
    replace(source, target)
    left -= target.suffix == ".kv"
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
hotset.files.os.replace = kill
tokens = [int(token) for token in sys.argv[3].split()]
with hotset.load(sys.argv[1], device="cpu", n_threads=1, n_ctx=512, cache_dir=sys.argv[2]) as model:
    model.generate(tokens, temperature=0, max_tokens=3)
"""
    arguments = [str(path), str(tmp_path), " ".join(map(str, PROMPT))]
    done = subprocess.run([sys.executable, "-c", code, *arguments], timeout=WATCHDOG, check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(list(tmp_path.glob("*/*.kv"))) == 2
    with hotset.load(path, **SMALL) as plain, hotset.load(path, **SMALL, cache_dir=tmp_path) as model:
        found = answer(model, PROMPT)
        assert bits(found) == bits(answer(plain, PROMPT))
        assert found.timings.reused_tokens == 2 * BLOCK_SIZE


def digest(path: Path, **how: Any) -> bytes:
    settings = LoadSettings(**SMALL | how)
    with open_model(path, settings) as opened:
        decided, backend = build(plan_model(opened))
        backend.close()
        found = prompt_cache.identity_of(decided).digest
        decided.weights.close()
    return found


def test_identity_depends_on_the_computation(path: Path, tmp_path: Path) -> None:
    own = digest(path)
    assert own == digest(path, n_threads=2, n_ctx=256, max_batch=64)  # the bits do not depend on these
    copied = tmp_path / "elsewhere.gguf"
    copied.write_bytes(path.read_bytes())
    assert own == digest(copied)
    others = [
        digest(path, kv_type="f32"),
        digest(path, activation="relu"),
        digest(write_model(tmp_path / "3.gguf", n_layer=3)),
    ]
    assert len({own, *others}) == 4


def test_an_identity_is_the_same_in_another_process(path: Path) -> None:
    code = """
import sys
from hotset.loader.build import build, open_model, plan_model
from hotset.placement import ram
from hotset.loader.prompt_cache import identity_of
from hotset.settings import LoadSettings
settings = LoadSettings(device="cpu", n_threads=1, n_ctx=512, max_sequences=4)
with open_model(sys.argv[1], settings) as opened:
    print(identity_of(plan_model(opened)).digest.hex())
"""
    environment = os.environ | {"PYTHONHASHSEED": "1"}
    command = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, timeout=WATCHDOG, env=environment, check=True
    )
    assert done.stdout.strip() == digest(path).hex()


def test_another_version_of_the_code_has_other_blocks(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = digest(path)
    monkeypatch.setattr(prompt_cache, "version", lambda _: "0.0.1")
    assert digest(path) != own


def test_exact_and_predicted_are_not_mixed_up(tmp_path: Path) -> None:
    path = write_sparse(tmp_path / "sparse.gguf", ranks=(8, 8))
    assert digest(path, sparsity="predicted") != digest(path, sparsity="exact")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"device": "reference"}, "cache_dir cannot be combined with device='reference'"),
        pytest.param(
            {"device": "vulkan", "n_gpu_layers": 1},
            "cache_dir needs a model that only the CPU",
            marks=pytest.mark.backend("vulkan"),
        ),
        pytest.param(
            {"device": "simulated"},
            "cache_dir needs a model that only the CPU computes",
            marks=pytest.mark.backend("triton"),
        ),
    ],
    ids=str,
)
def test_model_on_several_processors_is_refused(
    path: Path, tmp_path: Path, how: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        hotset.load(path, **SMALL | how, cache_dir=tmp_path)


@pytest.mark.parametrize(
    ("given", "gib"),
    [
        (2, 2.0),
        ("20G", 20.0),
        ("512M", 0.5),
        ("1.5 GiB", 1.5),
        ("2T", 2048.0),
        ("3", 3.0),
        ("1024kb", 2**-10),
    ],
)
def test_sizes_of_the_directory(given: Any, gib: float) -> None:
    assert LoadSettings(cache_disk=given).cache_disk == gib


@pytest.mark.parametrize("given", [0, -1, "", "G", "20X", "1e9", None, True, "0G", float("nan")])
def test_invalid_sizes(given: Any) -> None:
    with pytest.raises(InvalidRequestError, match="cache_disk must be a number of GiB above 0"):
        LoadSettings(cache_disk=given)


def test_the_limit_is_in_bytes(path: Path, tmp_path: Path) -> None:
    with hotset.load(path, **SMALL, cache_dir=tmp_path, cache_disk="64M") as model:
        cache = model.engine.scheduler.prompt_cache
        assert cache is not None
        assert cache.limit == 64 << 20
    with pytest.raises(InvalidRequestError, match="raise cache_disk"):
        hotset.load(path, **SMALL, cache_dir=tmp_path, cache_disk="1k")
