"""Architectures on a Vulkan device compared with transformers, and single operations with the reference."""

from __future__ import annotations

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
from vulkan_runs import assert_operations_of_sequences_are_right, validated, vulkan

from hotset.backends.vulkan.budget import missing_kernel
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
