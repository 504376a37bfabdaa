"""Layers whose neurons a Vulkan device shares with the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend_runs import logits_of, tokens
from cases import quick_if
from hybrid_runs import TOLERANCE, relative_error
from sparse_runs import MODELS, N_FF, cpu, hot_neurons, prepared, write
from vulkan_runs import validated, vulkan

from hotset.backends.pipeline import ChainBackend
from hotset.formats.gguf import GGUFFile

__all__ = ["validated"]  # the fixture
STEPS = [11, 12, 13, 30]  # a prompt, tokens one by one, more of a prompt


def shared(gguf: GGUFFile, mode: str, share: float, n_ff: int = N_FF, **options: Any) -> ChainBackend:
    """A model of two layers of which a device has a share of the neurons."""
    ready, graph = prepared(gguf, mode)
    hot = {i: hot_neurons(share, n_ff, i) for i in range(graph.n_layer)}
    return vulkan(ready.weights, graph, hot=hot, **{"n_threads": 2, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "mode", "share"),
    quick_if(
        lambda model, mode, share: share == 0.5 and model == "bamboo",
        MODELS, ["exact", "predicted"], [0.0, 0.25, 0.5, 0.75],
    ),
)  # fmt: skip
def test_any_share_of_neurons_on_the_device(tmp_path: Path, model: str, mode: str, share: float) -> None:
    """The CPU's logits, and the same bits with any number of threads, in any steps."""
    gguf, ids = write(tmp_path, model), tokens(40)
    expected = logits_of(cpu(gguf, mode, kv_type="f32"), ids, STEPS, [2])
    found = logits_of(shared(gguf, mode, share), ids, STEPS, [2])
    assert relative_error(found, expected) < TOLERANCE
    one = shared(gguf, mode, share, n_threads=1)
    np.testing.assert_array_equal(logits_of(one, ids, [*range(1, 9), 25], [1]), found)
