"""Every kernel of the Vulkan backend against the reference, each by itself, within a derived bound; matrix
products bitwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sparse_runs
from backend_runs import logits_of, tokens
from cases import quick_are, quick_if
from tiny_gguf import write_llama, write_relu
from vulkan_runs import assert_every_operation_is_right, validated, vulkan

from hotset.backends.vulkan.weights import COMPUTED
from hotset.formats.gguf import open_gguf
from hotset.formats.quants import GGMLType
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe

__all__ = ["validated"]  # the fixture

T = GGMLType
SPLITS = [1, 4]  # steps of one token, of few, and of many


def check(path: Path, n_tokens: int = 18, kv_type: Any = "f32", **options: Any) -> None:
    with open_gguf(write_llama(path / "m.gguf", **{"n_layer": 1, **options})) as gguf:
        backend = vulkan(gguf, kv_type=kv_type, max_batch=n_tokens)
        assert_every_operation_is_right(gguf, backend, tokens(n_tokens), SPLITS, [3, 1])
        backend.close()


@pytest.mark.parametrize(
    "type_", quick_are((GGMLType.Q4_0, GGMLType.Q4_K, GGMLType.Q6_K), COMPUTED), ids=lambda t: t.name
)
def test_every_tensor_type(tmp_path: Path, type_: GGMLType) -> None:
    check(tmp_path, n_embd=256, n_ff=512, head_dim=64, type_of=lambda _: type_)


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_every_cache_type(tmp_path: Path, kv_type: Any) -> None:
    check(tmp_path, kv_type=kv_type)


@pytest.mark.parametrize("n_embd", [36, 100])
def test_widths_that_no_block_divides(tmp_path: Path, n_embd: int) -> None:
    check(tmp_path, n_embd=n_embd, n_ff=n_embd + 2, head_dim=10, type_of=lambda _: T.F16)


@pytest.mark.parametrize(
    "options",
    [
        {"architecture": "qwen2"},
        {"architecture": "qwen3", "keys": {"qwen3.attention.sliding_window": 7}},
        {"architecture": "bamboo"},
        {"keys": {"llama.hidden_activation": "gelu"}},
        {"keys": {"llama.rope.dimension_count": 16}, "tied": True},
        {"experts": (6, 3), "n_ff": 32, "type_of": lambda name: T.Q8_0 if "exps" in name else T.F32},
        {"experts": (5, 2), "n_ff": 32, "one_by_one": True, "n_ff_shared": 32},
        {"experts": (4, 2), "n_ff": 40, "down_neuron_major": True},
    ],
    ids=[
        "biases",
        "head norms, window",
        "relu",
        "gelu",
        "half of the channels",
        "experts",
        "shared experts",
        "experts by neuron",
    ],
)
def test_other_operations(tmp_path: Path, options: dict[str, Any]) -> None:
    check(tmp_path, **options)


@pytest.mark.parametrize("type_", [T.F16, T.Q8_0, T.Q4_0], ids=lambda t: t.name)
def test_a_row_per_neuron(tmp_path: Path, type_: GGMLType) -> None:
    """PowerInfer's files; that leaving rows of neurons at zero out changes no bit."""
    path = write_relu(tmp_path / "m.gguf", ranks=(32,), n_ff=160, type_of=lambda _: type_)
    with open_gguf(path) as gguf:
        graph = describe(config_from_gguf(gguf), gguf.tensors)
        backend = vulkan(gguf, graph, max_batch=18)
        ids = tokens(18)
        assert_every_operation_is_right(gguf, backend, ids, SPLITS, [3, 1])
        expected = logits_of(backend, ids, [], [3, 1])
        assert np.array_equal(logits_of(backend, ids, [1, 2, 5, 6], [0, 2]), expected)
        backend.close()


@pytest.mark.parametrize(
    ("kind", "mode", "type_"),
    quick_if(
        lambda *case: case in (("llama", "exact", T.Q4_0), ("bamboo", "predicted", T.Q8_0)),
        ("llama", "bamboo", "opt"), ("exact", "predicted"), (T.Q4_0, T.Q8_0, T.F16),
    ),
)  # fmt: skip
def test_neurons_that_are_left_out(tmp_path: Path, kind: str, mode: str, type_: GGMLType) -> None:
    """In planes beside a plain file, and those that a predictor does not name: no bit changes."""
    gguf = sparse_runs.write(tmp_path, kind, type_, **{} if mode == "predicted" else {"dialect": "gguf"})
    ready, graph = sparse_runs.prepared(gguf, mode)
    backend, ids = vulkan(ready.weights, graph, max_batch=18), tokens(18)
    assert_every_operation_is_right(ready.weights, backend, ids, SPLITS, [3, 1])
    expected = logits_of(backend, ids, [], [3, 1])  # by products that leave no row out
    assert np.array_equal(logits_of(backend, ids, [1, 2, 5, 6], [0, 2]), expected)
    backend.close()
    gguf.close()


def test_positions_of_several_splits(tmp_path: Path) -> None:
    """Attention over more positions than a running softmax takes at a time."""
    path = write_llama(
        tmp_path / "m.gguf", n_layer=1, n_embd=32, n_ff=32, n_head=2, n_head_kv=1, head_dim=16, n_ctx=1024
    )
    with open_gguf(path) as gguf:
        backend = vulkan(gguf, kv_type="f16", max_batch=530, n_pages=10)
        ids, pages = tokens(535), [9, 3, 4, 5, 0, 1, 2, 8, 7]
        assert_every_operation_is_right(gguf, backend, ids, [530, 531], pages)
        backend.close()
