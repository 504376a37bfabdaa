"""Tokens with places: rotary positions by axis, groups of tokens in attention, and outputs that join tokens.

A plain formula over all pairs of tokens is the oracle of the reference and of the CPU backend.
"""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
import pytest
from backend_runs import cpu_backend

from hotset.backends.base import Batch
from hotset.backends.reference import ReferenceBackend
from hotset.errors import InvalidRequestError
from hotset.formats.gguf import TensorInfo
from hotset.formats.quants import GGMLType
from hotset.model import operations as ops
from hotset.model.graph import Graph

D, HEADS, DIM = 24, 2, 16
FREQ, AXES = (1.0, 0.3, 0.1, 0.7, 0.2, 0.05, 0.9, 0.4), (0, 0, 1, 1, 2, 2, 0, 1)
# A sequence of text, an image of nine tokens, text and an image of two tokens; then another sequence.
GROUPS = (4, 9, 3, 2), (1, 6, 2)
KINDS = [ReferenceBackend, cpu_backend]


class Tensors:
    """Matrices in memory, as a WeightSource."""

    def __init__(self) -> None:
        rng = np.random.default_rng(4)
        self.arrays = {n: rng.standard_normal((HEADS * DIM, D)).astype(np.float32) / 3 for n in "qkv"}
        self.tensors = {
            n: TensorInfo(n, array.shape[::-1], GGMLType.F32, array.nbytes, 0)
            for n, array in self.arrays.items()
        }

    def data(self, name: str) -> np.ndarray:
        return self.arrays[name].reshape(-1).view(np.uint8)

    def check(self) -> None:
        pass


def graph_of(kind: str = "neox", *, n: int = 1, by_channel: bool = False, **how: Any) -> Graph:
    graph = Graph()
    x = graph.value("x", D)
    rope = ops.Rope(kind, DIM, FREQ, axes=AXES)
    q, k, v = (graph.add(ops.Linear(graph.value(name, HEADS * DIM), x, name, layer=0)) for name in "qkv")
    q, k = (
        graph.add(
            ops.Rotate(graph.value(f"{value.name}_rope", value.width), value, HEADS, DIM, rope, layer=0)
        )
        for value in (q, k)
    )
    out = graph.value("attn", HEADS * DIM)
    attn = graph.add(ops.Attention(out, q, k, v, HEADS, HEADS, DIM, DIM, DIM**-0.5, layer=0, **how))
    graph.add(ops.SelectOutputs(graph.value("out", n * attn.width), attn, n, by_channel))
    return graph


def inputs() -> tuple[Batch, np.ndarray]:
    """Return both sequences as one batch, and its rows."""
    lengths = [sum(groups) for groups in GROUPS]
    positions = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])
    ends = [np.cumsum(groups) for groups in GROUPS]
    bounds = [
        (end - size, end) if size > 1 and i % 2 else None
        for groups, ends_of in zip(GROUPS, ends, strict=True)
        for i, (size, end) in enumerate(zip(groups, ends_of, strict=True))
        for _ in range(size)
    ]
    own = [(p, p + 1) for p in positions]
    groups = np.array(
        [one if group is None else group for one, group in zip(own, bounds, strict=True)], np.int32
    )
    rng = np.random.default_rng(5)
    batch = Batch(
        np.zeros(len(positions), np.int32),
        positions,
        np.repeat(np.arange(2, dtype=np.int32), lengths),
        np.arange(2, dtype=np.int32)[:, None],
        np.arange(len(positions), dtype=np.int32),
        rotary=rng.integers(0, 40, (len(positions), 3), np.int32),
        groups=groups,
    )
    return batch, rng.standard_normal((len(positions), D)).astype(np.float32)


def formula(batch: Batch, x: np.ndarray, kind: str, seen: np.ndarray) -> np.ndarray:
    """Return attention to the tokens `seen` [n_tokens, n_tokens], in float64."""
    arrays = Tensors().arrays
    q, k, v = (x.astype(np.float64) @ arrays[n].T.astype(np.float64) for n in "qkv")
    angles = batch.rotary[:, list(AXES)] * np.array(FREQ)
    first = np.arange(0, DIM, 2) if kind == "norm" else np.arange(DIM // 2)
    second = first + (1 if kind == "norm" else DIM // 2)
    heads = []
    for values in (q, k):
        turned = values.reshape(-1, HEADS, DIM).copy()
        a, b = turned[..., first].copy(), turned[..., second].copy()
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        turned[..., first], turned[..., second] = a * cos - b * sin, a * sin + b * cos
        heads.append(turned)
    scores = np.einsum("thd,shd->hts", *heads) * DIM**-0.5
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hts,shd->thd", weights, v.reshape(-1, HEADS, DIM)).reshape(len(x), -1)


def seen_in(batch: Batch, groups: str, *, causal: bool, window: int) -> np.ndarray:
    """Return which tokens each token sees."""
    p, s = batch.positions, batch.sequences
    same = s[:, None] == s
    ago = p[:, None] - p
    seen = np.ones_like(same) if not causal else (ago >= 0) & (ago < (window or 1 << 20))
    member = (p >= batch.groups[:, :1]) & (p < batch.groups[:, 1:])
    found = {"none": seen, "only": member, "also": seen | member, "ahead": seen | (member & (ago < 0))}
    return same & found[groups]


def run(kind: Any, graph: Graph, batch: Batch, x: np.ndarray, **how: Any) -> np.ndarray:
    options = {"n_blocks": 2, "max_batch": 64, "kv_type": "f32", **how}
    with closing(kind(Tensors(), graph, **options)) as backend:
        if isinstance(backend, ReferenceBackend):
            return backend.step(batch, x).logits
        return np.array(backend.run(batch, x))


@pytest.mark.parametrize("rope", ["neox", "norm"])
@pytest.mark.parametrize(
    ("groups", "causal", "window"),
    [
        ("none", True, 0),
        ("none", False, 0),
        ("only", False, 0),
        ("also", True, 0),
        ("also", True, 3),
        ("ahead", True, 3),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_groups_and_axes_follow_the_formula(
    kind: Any, groups: Any, causal: bool, window: int, rope: str
) -> None:
    batch, x = inputs()
    found = run(kind, graph_of(rope, groups=groups, causal=causal, window=window), batch, x)
    expected = formula(batch, x, rope, seen_in(batch, groups, causal=causal, window=window))
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("kind", KINDS)
def test_without_places_positions_count(kind: Any) -> None:
    batch, x = inputs()
    plain = Batch(
        *(getattr(batch, n) for n in ("tokens", "positions", "sequences", "block_tables", "outputs"))
    )
    found = run(kind, graph_of(groups="also"), plain, x)
    rotary = np.repeat(batch.positions[:, None], 3, axis=1)
    expected = run(kind, graph_of(), Batch(**{**vars(plain), "rotary": rotary}), x)
    assert np.array_equal(found, expected)


def test_places_keep_the_bits_in_any_batch_and_chunks() -> None:
    batch, x = inputs()
    graph = graph_of(groups="also", window=5)
    whole = run(cpu_backend, graph, batch, x, n_threads=3)
    assert np.array_equal(run(cpu_backend, graph, batch, x, n_threads=1, isa="scalar"), whole)
    options = {"n_blocks": 2, "max_batch": 64, "kv_type": "f32"}
    with closing(cpu_backend(Tensors(), graph, **options)) as backend:
        # Each chunk has whole groups, and the second sequence is between two chunks of the first.
        chunks = [(0, 2), (2, 13), (18, 27), (13, 15), (15, 18)]
        parts = {}
        for start, end in chunks:
            at = slice(start, end)
            names = ("tokens", "positions", "sequences", "rotary", "groups")
            part = {name: np.ascontiguousarray(getattr(batch, name)[at]) for name in names}
            step = Batch(
                **part, block_tables=batch.block_tables, outputs=np.arange(end - start, dtype=np.int32)
            )
            parts[start] = np.array(backend.run(step, x[at]))
    assert np.array_equal(np.concatenate([parts[start] for start in sorted(parts)]), whole)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("by_channel", [False, True])
def test_outputs_join_tokens(kind: Any, by_channel: bool) -> None:
    batch, x = inputs()
    rows = run(kind, graph_of(), batch, x)
    outputs = np.array([2, 3, 17, 26], np.int32)
    found = run(kind, graph_of(n=3, by_channel=by_channel), Batch(**{**vars(batch), "outputs": outputs}), x)
    for output, row in zip(outputs, found, strict=True):
        joined = rows[output - 2 : output + 1]
        assert np.array_equal(row, (joined.T if by_channel else joined).ravel()), output
    none = Batch(**{**vars(batch), "outputs": outputs[:0]})
    assert run(kind, graph_of(n=3), none, x).shape == (0, 3 * HEADS * DIM)


@pytest.mark.parametrize("kind", KINDS)
def test_too_few_tokens_to_join_are_refused(kind: Any) -> None:
    batch, x = inputs()
    first = Batch(**{**vars(batch), "outputs": np.array([1, 5], np.int32)})
    with pytest.raises(InvalidRequestError, match="an output joins 3 tokens, and the first has fewer"):
        run(kind, graph_of(n=3), first, x)


@pytest.mark.parametrize(
    ("field", "change", "message"),
    [
        ("rotary", lambda rows: rows[:-1], r"rotary positions are \[27, 3\]"),
        ("rotary", lambda rows: np.ascontiguousarray(rows[:, :2]), r"rotary positions are \[27, 3\]"),
        ("rotary", lambda rows: rows - 100, "a rotary position is negative"),
        ("groups", lambda rows: rows[:-1], "a group is two positions per token"),
        ("groups", lambda rows: rows + 1, "the group of a token must be around its position"),
        ("groups", lambda rows: rows + np.array([0, 30], np.int32), "and end within the step"),
        ("groups", lambda rows: rows - np.array([90, 0], np.int32), "the group of a token must be around"),
        ("groups", lambda rows: None, "whose tokens see only their groups needs groups"),
    ],
)
def test_odd_places_are_refused(field: str, change: Any, message: str) -> None:
    batch, x = inputs()
    graph = graph_of(groups="only", causal=False)
    with pytest.raises(InvalidRequestError, match=message):
        run(cpu_backend, graph, Batch(**{**vars(batch), field: change(getattr(batch, field))}), x)
