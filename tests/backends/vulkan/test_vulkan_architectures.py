"""Architectures on a Vulkan device against transformers: prompts among decoding. Or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from cases import quick_are
from transformers_oracle import (
    LENGTHS,
    N_CTX,
    PAGES_EACH,
    PLANS,
    RECIPES,
    TOLERANCE,
    recipe,
    relative_error,
    run,
)
from vulkan_runs import validated, vulkan

from hotset.backends.vulkan.program import COMPUTED
from hotset.errors import UnsupportedModelError
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe
from hotset.model.operations import Activate, Attention, ExpertSum

__all__ = ["recipe", "validated"]  # fixtures

QUICK = ("gemma2-caps", "gpt-oss")  # soft caps; sinks, experts with biases, windows
ALL = quick_are(QUICK, RECIPES)


@pytest.mark.parametrize("recipe", ALL, indirect=True)
def test_logits_match_transformers(recipe: Any) -> None:
    gguf, sequences, expected = recipe
    graph = describe(config_from_gguf(gguf).for_context(N_CTX), gguf.tensors)
    given: Any = {"n_pages": PAGES_EACH * len(LENGTHS), "max_batch": 256}
    is_refused = any(
        not isinstance(op, COMPUTED)
        or (isinstance(op, Activate) and op.kind == "softplus")
        or (isinstance(op, Attention) and not op.causal)
        or (isinstance(op, ExpertSum) and op.neuron_major)
        for op in graph.primitives
    )
    if is_refused:
        with pytest.raises(UnsupportedModelError, match="no Vulkan kernel"):
            vulkan(gguf, graph, **given)
        return
    backend = vulkan(gguf, graph, **given)
    found = run(backend, sequences, PLANS["mixed"])
    for i in range(len(sequences)):
        assert relative_error(found[i], expected[i]) < TOLERANCE, f"sequence {i}"
    backend.close()
