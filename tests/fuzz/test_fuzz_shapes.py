"""Some models of random shapes; `tests/fuzz/fuzz_shapes.py` runs as many as time allows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from backend_runs import batch, cpu, tokens
from derived_bounds import Oracle
from fuzz.fuzz_shapes import run_case
from tiny_gguf import write_llama

from hotset.formats.gguf import open_gguf
from hotset.formats.quants import GGMLType
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe


@pytest.mark.parametrize(  # small ones
    ("seed", "number"),
    [(0, 1), (0, 4), (2, 16), *(pytest.param(0, number, marks=pytest.mark.slow) for number in (0, 2, 6))],
)
def test_models_of_random_shapes(tmp_path: Path, seed: int, number: int) -> None:
    run_case(seed, number, tmp_path)


@pytest.mark.parametrize("type_", [GGMLType.F32, GGMLType.Q4_K], ids=lambda t: t.name)
def test_a_wrong_result_of_any_operation_is_found(tmp_path: Path, type_: GGMLType) -> None:
    """Check that the oracle notices an error of one part in ten thousand in any value."""
    path = write_llama(
        tmp_path / "m.gguf", n_layer=1, n_embd=256, n_ff=256, head_dim=64, type_of=lambda name: type_
    )
    gguf = open_gguf(path)
    graph = describe(config_from_gguf(gguf), gguf.tensors)
    step = batch([(tokens(6), 0, [0])], tuple(value.name for value in graph.values))
    found = cpu(gguf).step(step)
    Oracle(gguf, graph, n_blocks=1, kv_type="f16").check(step, found)
    for name, values in found.taps.items():
        wrong = values.copy()
        # Relative to the largest number: errors of small numbers may be within the bounds of their sums.
        at = np.unravel_index(np.argmax(np.abs(wrong)), wrong.shape)
        wrong[at] *= np.float32(1.0001)
        spoilt = replace(found, taps={**found.taps, name: wrong})
        with pytest.raises(AssertionError, match="off by"):
            Oracle(gguf, graph, n_blocks=1, kv_type="f16").check(step, spoilt)
