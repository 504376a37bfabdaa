"""Architectures on a Vulkan device compared with transformers, and single operations with the reference."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from cases import quick_are
from transformers_oracle import (
    BLOCKS_EACH,
    LENGTHS,
    N_CTX,
    PLANS,
    RECIPES,
    TOLERANCE,
    recipe,
    relative_error,
    run,
    tiny_models,
)
from vulkan_runs import assert_operations_of_sequences_are_right, stage_of, validated, vulkan

from hotset.backends.vulkan.budget import cache_pieces, missing_kernel, weight_pieces
from hotset.backends.vulkan.memory import BufferArena, BufferRange
from hotset.errors import UnsupportedModelError
from hotset.formats.gguf import open_gguf
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe

__all__ = ["recipe", "validated"]  # fixtures

QUICK = ("gemma2-caps", "gpt-oss")  # soft caps; sinks, experts with biases, windows
REFUSED = tuple(name for name in RECIPES if name.startswith("deepseek4"))
ALL = quick_are(QUICK, [name for name in RECIPES if name not in REFUSED])
# Operations missing from test_vulkan_operations.py: keys of latent vectors and delta nets, state
# spaces, two-sided windows, streams, scales of experts, channels, attention of RWKV 6 and 7.
NEW = (
    "kimi-linear", "falcon-h1", "gemma-embedding-pattern", "gemma3n-widths", "gemma4-one-expert", "mamba",
    "rwkv6", "rwkv7", "qwen4exp",
)  # fmt: skip
OF_THEIR_OWN = quick_are(NEW, (*NEW, "bert", "deepseek2-v3", "jina-bert-v2", "qwen3next"))


@pytest.mark.parametrize("recipe", ALL, indirect=True)
def test_logits_match_transformers(recipe: Any) -> None:
    gguf, sequences, expected = recipe
    graph = describe(config_from_gguf(gguf).for_context(N_CTX), gguf.tensors)
    n = len(LENGTHS)
    assert not any(missing_kernel(op, gguf.tensors, "f16") for op in graph.primitives)
    backend = vulkan(gguf, graph, n_blocks=BLOCKS_EACH * n, n_states=2 * n, max_batch=256)
    found = run(backend, sequences, PLANS["mixed"])
    for i in range(len(sequences)):
        assert relative_error(found[i], expected[i]) < TOLERANCE, f"sequence {i}"
    backend.close()


@pytest.mark.parametrize(
    "name", quick_are((*QUICK, "rwkv6", "starcoder"), [name for name in RECIPES if name not in REFUSED])
)
def test_planned_pieces_are_the_allocated_ones(
    name: str, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare the bytes that a plan counts with the bytes that loading asks of the device's memory."""
    asked: Counter[BufferArena] = Counter()
    real = BufferArena.piece

    def piece(arena: BufferArena, size: int) -> BufferRange:
        asked[arena] += size
        return real(arena, size)

    monkeypatch.setattr(BufferArena, "piece", piece)
    with open_gguf(tiny_models.shared_gguf(name, run_folder)) as gguf:
        graph = describe(config_from_gguf(gguf).for_context(N_CTX), gguf.tensors)
        backend = vulkan(gguf, graph, n_blocks=4, n_states=4, max_batch=64)
        of_weights = stage_of(backend).matrices.arena
        assert asked[of_weights] == sum(weight_pieces(graph.primitives, gguf.tensors).values())
        of_caches = (cache_pieces(op, stage_of(backend).kv_type, 4, 4) for op in graph.primitives)
        shared = max(map(sum, of_caches)) if graph.is_encoder else sum(map(sum, of_caches))
        assert asked.total() - asked[of_weights] == shared
        backend.close()


@pytest.mark.parametrize("name", quick_are((), REFUSED))
def test_operation_without_a_kernel_is_refused(name: str, run_folder: Path) -> None:
    with (
        open_gguf(tiny_models.shared_gguf(name, run_folder)) as gguf,
        pytest.raises(UnsupportedModelError, match="no Vulkan kernel computes"),
    ):
        vulkan(gguf, describe(config_from_gguf(gguf).for_context(N_CTX), gguf.tensors))


@pytest.mark.parametrize("name", OF_THEIR_OWN)
def test_every_operation_is_right(name: str, run_folder: Path) -> None:
    with open_gguf(tiny_models.shared_gguf(name, run_folder)) as gguf:
        backend = vulkan(gguf, n_states=4, max_batch=136)
        assert_operations_of_sequences_are_right(gguf, backend)
        backend.close()
