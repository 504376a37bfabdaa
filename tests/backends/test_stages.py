"""Chained stages: logits are bitwise equal to the whole model's, however it is split over stages.

Stages on a device are tested in test_hybrid.py; nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend_runs import batch, cpu_backend, logits_of, tokens
from sparse_runs import MODELS, prepared, write
from tiny_gguf import write_llama

pytest.importorskip("hotset._core", reason="the native module is not built")

from hotset import _core
from hotset.backends.cpu.backend import CpuBackend
from hotset.backends.pipeline import HOST, ChainBackend
from hotset.backends.reference import ReferenceBackend
from hotset.backends.stage import Span
from hotset.errors import InvalidRequestError
from hotset.formats.gguf import open_gguf
from hotset.formats.quants import GGMLType as T
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe
from hotset.model.graph import Graph

OPTIONS: dict[str, Any] = {"n_blocks": 8, "max_batch": 48, "kv_type": "f16", "n_threads": 2}
N_LAYER = 3
# Splits before these layers: 0 is after the embedding, 3 is before the output.
SPLITS = [[1], [2], [1, 2], [0, 3], [0, 1, 2, 3]]


def chain(weights: Any, graph: Graph, splits: Sequence[int], **options: Any) -> ChainBackend:
    """Return the model on the CPU in stages, which begin with the tokens and with each layer of `splits`."""
    given = OPTIONS | options
    ends = [0, *(graph.layer_starts[layer] for layer in splits), len(graph.ops)]
    stages = [cpu_backend(weights, graph, span=Span(first, last), **given) for first, last in pairwise(ends)]
    return ChainBackend(
        "parts", stages, [HOST] * len(stages), n_blocks=given["n_blocks"], max_batch=given["max_batch"]
    )


@pytest.mark.parametrize("splits", SPLITS, ids=str)
@pytest.mark.parametrize("mode", ["dense", "predicted"])
@pytest.mark.parametrize("model", MODELS)
def test_parts_have_the_bits_of_the_whole(tmp_path: Path, model: str, mode: str, splits: list[int]) -> None:
    ready, graph = prepared(write(tmp_path, model, ranks=(32, 64, 32)), mode)
    sparse = mode != "dense"
    whole = cpu_backend(ready.weights, graph, sparse=sparse, **OPTIONS)
    parts = chain(ready.weights, graph, splits, sparse=sparse)
    ids = tokens(30)
    ends = [7, *range(26, 30)]  # prompt parts, then token by token
    np.testing.assert_array_equal(logits_of(parts, ids, ends, [2]), logits_of(whole, ids, ends, [2]))
    # One sequence continues, one begins, and a third is a prompt.
    mixed = batch([(tokens(1, 7), 30, [2]), (tokens(3, 8), 0, [5]), (tokens(20, 9), 0, [6])])
    np.testing.assert_array_equal(parts.step(mixed).logits, whole.step(mixed).logits)
    expected, found = whole.stats(), parts.stats()
    assert expected is not None
    assert found is not None
    for kind in ("selected", "active", "gate_rows", "up_rows", "down_rows"):
        np.testing.assert_array_equal(getattr(found, kind), getattr(expected, kind))
    assert found.ffn.min() > 0
    assert found.attention.min() > 0
    parts._latest = parts._latest[0], 10.0  # seconds of the step; those outside of layers are `other`
    found = parts.stats()
    assert found is not None
    assert found.other == pytest.approx(10 - (found.predictor + found.ffn + found.attention).sum(), abs=1e-9)
    for backend in (whole, parts, ReferenceBackend(ready.weights, graph, n_blocks=1)):
        backend.cancel()  # has no effect without a running step
    np.testing.assert_array_equal(parts.step(mixed).logits, whole.step(mixed).logits)
    parts.close()
    parts.close()


@pytest.mark.parametrize("type_", [T.F32, T.Q4_0, T.Q8_0], ids=lambda t: t.name)
@pytest.mark.parametrize("kv_type", ["f16", "q8_0", "q4_0/q8_0"])
def test_parts_of_quantised_models(tmp_path: Path, type_: T, kv_type: str) -> None:
    path = write_llama(tmp_path / "m.gguf", n_layer=N_LAYER, n_embd=128, type_of=lambda name: type_)
    gguf = open_gguf(path)
    graph = describe(config_from_gguf(gguf), gguf.tensors)
    whole = cpu_backend(gguf, graph, **OPTIONS | {"kv_type": kv_type})
    parts = chain(gguf, graph, [1, 2], kv_type=kv_type)
    ids = tokens(40)
    np.testing.assert_array_equal(logits_of(parts, ids, [33], [1]), logits_of(whole, ids, [33], [1]))


def test_many_random_steps(tmp_path: Path) -> None:
    """Check that late threads of one step, which may find the next step's rows, change no bit."""
    ready, graph = prepared(write(tmp_path, "bamboo", ranks=(32, 64, 32)), "predicted")
    whole = cpu_backend(ready.weights, graph, sparse=True, **OPTIONS)
    parts = chain(ready.weights, graph, [1, 3], sparse=True, n_threads=3)
    rng = np.random.default_rng(3)
    for _ in range(200):
        sizes = rng.integers(1, 6, rng.integers(1, 4)).tolist()
        step = batch([(tokens(n, int(rng.integers(99))), 0, [i]) for i, n in enumerate(sizes)])
        np.testing.assert_array_equal(parts.step(step).logits, whole.step(step).logits)


def test_a_chain_goes_from_tokens_to_logits(tmp_path: Path) -> None:
    ready, graph = prepared(write(tmp_path, "llama", ranks=(32, 64, 32)), "exact")
    first, second, third = chain(ready.weights, graph, [1, 2]).stages
    for stages in ([first, third], [first, second], [second, third], [], [first, second, third, third]):
        with pytest.raises(InvalidRequestError, match=r"does not continue where|a chain needs stages"):
            ChainBackend("parts", stages, [HOST] * len(stages), n_blocks=8, max_batch=48)


def test_rows_that_do_not_enter(tmp_path: Path) -> None:
    ready, graph = prepared(write(tmp_path, "llama", ranks=(32, 64, 32)), "exact")
    first, second = chain(ready.weights, graph, [1]).stages
    step = batch([(tokens(4), 0, [0])])
    x = np.zeros((4, 64), np.float32)
    with pytest.raises(InvalidRequestError, match="takes no rows; one that begins with rows needs them"):
        second.run(step)
    with pytest.raises(InvalidRequestError, match="takes no rows"):
        first.run(step, x)
    for wrong in (x[:3], x[:, :32].copy(), np.zeros((5, 64), np.float32)):
        with pytest.raises(InvalidRequestError, match=r"the input rows must be \[4, 64\]"):
            second.run(step, wrong)
    for part in (first, second):
        assert isinstance(part, CpuBackend)
        with pytest.raises(InvalidRequestError, match="a stage of a chain"):
            part.step(step)
    # Strided rows are accepted, and refused steps have not changed the stage.
    wide = np.random.default_rng(0).standard_normal((4, 128)).astype(np.float32)
    expected = np.array(second.run(step, wide[:, ::2].copy()))
    np.testing.assert_array_equal(second.run(step, wide[:, ::2]), expected)


def test_a_plan_has_one_input() -> None:
    plan = _core.Plan(4, 1, 1, _core.Runtime(1))
    with pytest.raises(ValueError, match="no buffer"):
        plan.input(0)
    with pytest.raises(ValueError, match="one input"):
        plan.input(plan.buffer(8, True))  # rows of outputs
    plan.input(plan.buffer(8, False))
    with pytest.raises(ValueError, match="one input"):
        plan.input(plan.buffer(8, False))
