"""The GPU backend compared with transformers, as in test_architectures; prompts run together with decode."""

from __future__ import annotations

from typing import Any

import pytest
from cases import quick_are
from gpu_runs import gpu
from hybrid_runs import chain
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

from hotset.backends.base import Backend
from hotset.errors import UnsupportedModelError
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe
from hotset.model.operations import Activate, Attention, Heads, LayerNorm, MaskedRoute, UnitNorm
from hotset.placement.table import LayerPlacement, Placement

torch = pytest.importorskip("torch")

__all__ = ["recipe"]  # the fixture


@pytest.mark.parametrize("recipe", quick_are(tiny_models.ONE_OF_EACH_KIND, RECIPES), indirect=True)
@pytest.mark.parametrize("plan", quick_are(("mixed",), ["chunks", "mixed"]))
def test_logits_match_transformers(recipe: Any, plan: str) -> None:
    gguf, sequences, expected = recipe
    graph = describe(config_from_gguf(gguf).for_context(N_CTX), gguf.tensors)

    def opened() -> Backend:
        given: Any = {"n_blocks": BLOCKS_EACH * len(LENGTHS), "max_batch": 256}
        if any(ffn.route is not None for ffn in graph.ffns):
            placement = Placement(("simulated",), (LayerPlacement(0),) * graph.n_layer, 0)
            return chain(placement, gguf, graph, n_threads=1, expert_slots=7, **given)
        return gpu(gguf, graph, **given)

    is_masked = any(isinstance(ffn.select, MaskedRoute) for ffn in graph.ffns)
    is_refused = any(
        isinstance(op, Heads | UnitNorm)
        or (isinstance(op, Activate) and op.xielu is not None)
        or (isinstance(op, Attention) and op.slopes is not None)
        or (isinstance(op, LayerNorm) and op.n_head > 1)
        for op in graph.primitives
    )
    if graph.recurrent or is_masked or is_refused:
        with pytest.raises(UnsupportedModelError, match="computed on the CPU"):
            opened()
        return
    backend = opened()
    found = run(backend, sequences, PLANS[plan])
    for i in range(len(sequences)):
        assert relative_error(found[i], expected[i]) < TOLERANCE, f"sequence {i}"
    backend.close()
