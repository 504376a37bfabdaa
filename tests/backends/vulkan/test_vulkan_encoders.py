"""Encoders on a Vulkan device compared with transformers: one text, and several texts in one step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import quick_are
from vulkan_runs import validated, vulkan

pytest.importorskip("torch")
pytest.importorskip("transformers")
from encoders_oracle import BLOCKS_EACH, ENCODERS, LENGTHS, TOLERANCE, recipe, run

__all__ = ["recipe", "validated"]  # fixtures


@pytest.mark.parametrize("recipe", quick_are(("modern-bert",), ENCODERS), indirect=True)
def test_hidden_states_match_transformers_alone_and_together(recipe: Any) -> None:
    gguf, graph, expected = recipe
    backend = vulkan(gguf, graph, n_blocks=BLOCKS_EACH * len(LENGTHS), max_batch=512)
    alone = [run(backend, [i])[0] for i in range(len(LENGTHS))]
    for i, states in enumerate(alone):
        assert np.abs(states - expected[i]).max() < TOLERANCE * np.abs(expected[i]).max(), i
    for order in ([0, 1, 2, 3], [3, 2, 0]):
        for i, states in zip(order, run(backend, order), strict=True):
            assert np.array_equal(states, alone[i]), (order, i)
    backend.close()
