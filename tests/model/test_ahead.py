"""Operations that start early so that reading and computing overlap: their order, and the same bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from backend_runs import batch, cpu_backend, logits_of, tokens
from sparse_runs import cpu, prepared, write
from stored_weights import BLOCKS, graph_of, stored, streaming

from hotset.formats.gguf import GGUFFile, open_gguf
from hotset.formats.quants import GGMLType
from hotset.model.fusion import fuse
from hotset.model.graph import Graph
from hotset.model.operations import Attention, Ffn, Route
from hotset.model.read_order import chosen_rows, look_ahead


def tiny(name: str, folder: Path) -> GGUFFile:
    tiny_models = pytest.importorskip("tiny_models")
    recipe = tiny_models.EXPERTS[name]
    return open_gguf(tiny_models.to_gguf(recipe, tiny_models.build(recipe), folder))


def places(graph: Graph) -> tuple[list[int], list[int], list[int]]:
    """Return the positions of attention, of the first reads, and of experts or neurons in the new order.

    Check that the order has every operation once, and each after its inputs.
    """
    groups = fuse(graph, ())
    ahead = look_ahead(groups, lambda _: True)
    made = {graph.ops[0].out}
    for group in ahead.groups:
        assert set(group.reads) <= made, group.ops[-1].out.name
        made |= set(group.out)
    routes = [group for group in ahead.groups if isinstance(group.ops[0], Route) and len(group.ops) == 1]
    assert sorted(id(op) for group in ahead.groups if group not in routes for op in group.ops) == sorted(
        id(op) for group in groups for op in group.ops
    )
    at = list(enumerate(ahead.groups))
    return (
        [i for i, group in at if isinstance(group.ops[-1], Attention)],
        [i for i, group in at if group.out[0] in ahead.begins],
        [i for i, group in at if isinstance(group.ops[0], Ffn) and chosen_rows(group.ops[0]) is not None],
    )


def test_a_router_before_attention_begins_the_reads(tmp_path: Path) -> None:
    gguf = tiny("smallthinker-windows", tmp_path)
    graph, ids = graph_of(gguf), tokens(40)
    attention, begin, experts = places(graph)
    assert all(a < b < c for a, b, c in zip(begin, attention, experts, strict=True))
    whole = cpu_backend(gguf, graph, n_blocks=8, max_batch=128, n_threads=2)
    expected = logits_of(whole, ids, [], BLOCKS)
    for share in (0.0, 0.3, 0.7):
        backend, weights = streaming(gguf, share)
        for splits in ([], list(range(1, 40))):
            np.testing.assert_array_equal(logits_of(backend, ids, splits, BLOCKS), expected)
        assert weights.counts().misses > 0
        names = ("blk.1.ffn_route", "blk.0.attn_out", "blk.1.ffn_act")
        step = batch([(ids, 0, BLOCKS)], tuple(n for n in names if n in {v.name for v in graph.values}))
        mine, others = backend.step(step), whole.step(step)
        for name in step.taps:
            np.testing.assert_array_equal(mine.taps[name], others.taps[name])
        backend.close()


def test_shared_work_runs_while_experts_are_read(tmp_path: Path) -> None:
    gguf = tiny("qwen2moe", tmp_path)
    graph, ids = graph_of(gguf), tokens(20)
    attention, begin, experts = places(graph)
    assert all(a < b < c - 1 for a, b, c in zip(attention, begin, experts, strict=True))
    whole = cpu_backend(gguf, graph, n_blocks=8, max_batch=128, n_threads=2)
    backend, _ = streaming(gguf, 0.4)
    for splits in ([], list(range(1, 20))):
        np.testing.assert_array_equal(
            logits_of(backend, ids, splits, BLOCKS), logits_of(whole, ids, [], BLOCKS)
        )


@pytest.mark.parametrize("predictor", ["svd", None])
@pytest.mark.parametrize("model", ["falcon-7b", "falcon-40b"])
def test_a_predictor_before_attention_begins_the_reads(
    tmp_path: Path, model: str, predictor: str | None
) -> None:
    gguf, ids = write(tmp_path, model, GGMLType.Q4_0), tokens(24)
    _, graph = prepared(gguf, "predicted", predictor)
    attention, begin, neurons = places(graph)
    assert all(a < b < c for a, b, c in zip(begin, attention, neurons, strict=True))
    expected = logits_of(cpu(gguf, "predicted", predictor), ids, [], BLOCKS)
    for share in (0.0, 0.3):
        backend, weights = stored(gguf, "predicted", share, predictor=predictor)
        for splits in ([], list(range(1, 24))):
            np.testing.assert_array_equal(logits_of(backend, ids, splits, BLOCKS), expected)
        assert weights.counts().misses > 0
        backend.close()


def test_work_that_needs_attention_stays_after_it(tmp_path: Path) -> None:
    """Check that predictors that depend on attention start their reads in place: nothing is gained."""
    _, graph = prepared(write(tmp_path, "llama", GGMLType.Q4_0), "predicted", "svd")
    _, begin, neurons = places(graph)
    assert not begin
    assert neurons
