"""Collects an importance matrix: sums of squares of each weight matrix's inputs over a text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from hotset.formats.imatrix import ImportanceMatrix, Inputs
from hotset.model.graph import Graph
from hotset.model.low_rank import by_output
from hotset.model.operations import ExpertLinear, ExpertSum, Linear, TransposedLinear
from hotset.sparsity import taps

if TYPE_CHECKING:
    from hotset.sparsity.taps import TapSteps


@dataclass(frozen=True)
class _MatrixInput:
    """A value of the graph that is the input of matrices.

    route: the value that holds a token's expert ids; None: the matrices apply to every token. n_parts: parts
    of the value, one for each expert of the token; 1: every expert reads the whole value.
    """

    name: str
    route: str | None = None
    n_experts: int = 1
    n_used: int = 1
    n_parts: int = 1


@dataclass
class _Sums:
    """The sums of squares of a source, and the tensors that they are for; old files have one per expert."""

    squares: np.ndarray
    counts: np.ndarray
    tensors: set[tuple[str, ...]] = field(default_factory=set)


def collect(
    tap_steps: TapSteps,
    graph: Graph,
    tokens: np.ndarray,
    *,
    dataset: str = "",
    output: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> ImportanceMatrix:
    """Return the importance matrix of all layers' matrices; with `output`, also of the output matrix.

    A neuron-major copy of a matrix (ffn_down_t) is listed under the original's name. tap_steps:
    Model.tap_steps. tokens: int32 [n_chunks, n_tokens], each row a separate text. progress: called with
    (tokens done, total tokens).
    """
    sums = _sources(graph, output)
    names = sorted({source.name for source in sums} | {s.route for s in sums if s.route is not None})
    for _, values in taps.over(tap_steps, tokens, names, progress=progress):
        for source, so_far in sums.items():
            _add(so_far, source, values)
    inputs = {}
    for so_far in sums.values():
        squares, counts = so_far.squares.astype(np.float32), so_far.counts.astype(np.float32)
        for tensors in so_far.tensors:
            if len(tensors) == 1:
                inputs[tensors[0]] = Inputs(squares, counts)
            else:
                for i, name in enumerate(tensors):
                    inputs[name] = Inputs(squares[i : i + 1], counts[i : i + 1])
    return ImportanceMatrix(inputs, (dataset,) if dataset else (), len(tokens), tokens.shape[1])


def _sources(graph: Graph, output: bool) -> dict[_MatrixInput, _Sums]:
    found: dict[_MatrixInput, _Sums] = {}
    for op in graph.primitives:
        tensors: tuple[str, ...]
        if isinstance(op, Linear | TransposedLinear):
            source, tensors = _MatrixInput(op.x.name), (by_output(op.weight),)
        elif isinstance(op, ExpertLinear | ExpertSum):
            of_parts = isinstance(op, ExpertSum) or op.of_parts
            n_parts = op.n_used if of_parts else 1
            source = _MatrixInput(op.x.name, op.route.name, op.n_expert, op.n_used, n_parts)
            tensors = tuple(map(by_output, op.weights))
        else:
            continue
        if not (output or tensors[0].startswith("blk.")):
            continue
        shape = (source.n_experts, op.x.width // source.n_parts)
        so_far = found.setdefault(source, _Sums(np.zeros(shape), np.zeros(shape[0])))
        so_far.tensors.add(tensors)
    return found


def _add(so_far: _Sums, source: _MatrixInput, values: Mapping[str, np.ndarray]) -> None:
    x = values[source.name]
    squares = np.square(x, dtype=np.float64)
    if source.route is None:
        so_far.squares[0] += squares.sum(axis=0)
        so_far.counts[0] += len(x)
        return
    experts = values[source.route][:, : source.n_used].astype(np.int64).reshape(-1)
    order = np.argsort(experts, kind="stable")
    rows = order if source.n_parts > 1 else order // source.n_used
    chosen, first, counts = np.unique(experts[order], return_index=True, return_counts=True)
    so_far.squares[chosen] += np.add.reduceat(squares.reshape(-1, so_far.squares.shape[1])[rows], first)
    so_far.counts[chosen] += counts
