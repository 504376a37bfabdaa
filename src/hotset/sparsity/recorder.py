"""Records which experts or neurons each token of a text needs: a trace (sparsity/trace.py).

record(model.tap_steps, model.graph, model.weights, rows, model=..., name=...)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hotset.backends.reference import selected
from hotset.errors import InvalidRequestError
from hotset.model.cost import Cost
from hotset.model.graph import Graph
from hotset.model.operations import ExpertLinear, ExpertSum, Ffn, Linear, TransposedLinear
from hotset.offload.weight_store import groups_of, rows_of
from hotset.sparsity import taps
from hotset.sparsity.trace import EVERY, MOST_BITS, OTHER, NeuronTrace, RouteTrace, StoredGroup
from hotset.units import human_size

if TYPE_CHECKING:
    from hotset.formats.gguf import TensorInfo
    from hotset.formats.overlay import Overlay
    from hotset.sparsity.taps import TapSteps

_PAGE = 4096


def record(
    tap_steps: TapSteps,
    graph: Graph,
    weights: Overlay,
    tokens: np.ndarray,
    *,
    model: str,
    name: str,
    progress: Callable[[int, int], None] | None = None,
) -> RouteTrace | NeuronTrace:
    """Return the trace of a text: of experts, or, in a model without experts, of neurons.

    Needed neurons are the ones that the graph's predictor selects or, without a predictor, the ones that
    fire. tap_steps: Model.tap_steps. tokens: int32 [n] or [n_sequences, n], each of which fits the context.
    progress: called with (tokens done, total tokens). Raises InvalidRequestError if every token needs the
    whole model, or for no tokens or too many.
    """
    if tokens.size == 0:
        raise InvalidRequestError("the text is empty; give some text to trace the model on")
    routed = [ffn for ffn in graph.ffns if ffn.route is not None]
    tensors = weights.tensors
    traced = routed or [ffn for ffn in graph.ffns if ffn.has_zeros and _own(graph, tensors, ffn)]
    if not traced:
        raise InvalidRequestError(
            "every token needs all neurons of this model, and it has no experts: there is nothing to trace"
        )
    n_neurons = tuple(ffn.n_ff for ffn in traced)
    if not routed and 8 * sum(-(-n // 8) for n in n_neurons) * tokens.size > MOST_BITS:
        most = MOST_BITS // sum(8 * -(-n // 8) for n in n_neurons)
        raise InvalidRequestError(
            f"a trace of {tokens.size} tokens would take more than {human_size(MOST_BITS // 8)}; "
            f"trace at most {most} of them (n_tokens={most})"
        )
    names = [_seen_of(ffn) for ffn in traced]
    parts: list[list[np.ndarray]] = [[] for _ in traced]
    starts, done = [], 0
    for begins, values in taps.over(tap_steps, tokens, names, progress=progress):
        if begins:
            starts.append(done)
        for part, ffn, name_ in zip(parts, traced, names, strict=True):
            part.append(_seen(ffn, values[name_]))
        done += len(parts[0][-1])
    seen = [np.concatenate(part) for part in parts]
    facts: dict[str, Any] = {
        "layers": tuple(ffn.layer for ffn in traced),
        "starts": tuple(starts),
        "model": model,
        "name": name,
        "data": hashlib.sha256(np.ascontiguousarray(tokens, "<i4").tobytes()).hexdigest()[:32],
        "stored": _groups(graph, weights, traced),
    }
    if routed:
        return _of_experts(graph, tensors, routed, np.stack(seen, axis=1), facts)
    return NeuronTrace(
        bits=tuple(seen),
        n_neurons=n_neurons,
        neuron_bytes=tuple(
            sum(rows_of(tensors[name])[1] for name in _own(graph, tensors, ffn)) for ffn in traced
        ),
        sparsity="exact" if all(ffn.mask is None for ffn in traced) else "predicted",
        **facts,
    )


def _seen_of(ffn: Ffn) -> str:
    """Return the value that shows which neurons or experts of a layer are needed."""
    if ffn.route is not None:
        return ffn.route.out.name
    return ffn.fires.name if ffn.mask is None else ffn.mask.scores.name


def _seen(ffn: Ffn, values: np.ndarray) -> np.ndarray:
    """Return the needs of a step's tokens: experts as int32 [n_tokens, n_used], or neurons as bits."""
    if ffn.route is not None:
        return values[:, : ffn.route.n_used].astype(np.int32)
    needed = values != 0 if ffn.mask is None else selected(ffn.mask, values)
    return np.packbits(needed, axis=1, bitorder="little")


def _of_experts(
    graph: Graph,
    tensors: Mapping[str, TensorInfo],
    routed: Sequence[Ffn],
    routes: np.ndarray,
    facts: dict[str, Any],
) -> RouteTrace:
    n_experts = {ffn.route.x.width for ffn in routed if ffn.route is not None}
    assert len(n_experts) == 1, "all layers have the same number of experts"
    sizes = Cost(graph, tensors).expert_bytes
    return RouteTrace(
        routes=routes,
        n_experts=n_experts.pop(),
        expert_bytes=tuple(sizes[ffn.layer] for ffn in routed),
        **facts,
    )


# ---- rows that a store would keep


def _own(graph: Graph, tensors: Mapping[str, TensorInfo], ffn: Ffn) -> list[str]:
    """Return the tensors of an FFN whose rows only some tokens need."""
    mine = {op.weight for op in (ffn.gate, ffn.up, ffn.down) if isinstance(op, Linear | TransposedLinear)}
    for op in (ffn.gate, ffn.up, ffn.down):
        if isinstance(op, ExpertLinear | ExpertSum):
            mine |= set(op.weights)
    groups = [group.names for group in groups_of(graph, tensors, sparse=True) if mine & set(group.names)]
    if ffn.route is None and ffn.mask is None:  # the deciding matrix is read whole
        groups = [group for group in groups if ffn.decides.weight not in group]
    return [name for group in groups for name in group]


def _groups(graph: Graph, weights: Overlay, traced: Sequence[Ffn]) -> tuple[StoredGroup, ...]:
    """Return the groups that a store would keep, in its order; empty if it would not cover all layers."""
    tensors = weights.tensors
    own = {name: i for i, ffn in enumerate(traced) for name in _own(graph, tensors, ffn)}
    whole = {ffn.decides.weight for ffn in traced if ffn.route is None and ffn.mask is None}
    found = []
    for group in groups_of(graph, tensors, sparse=True):
        layer = own.get(group.names[0], EVERY if group.names[0] in whole else OTHER)
        read = _read_bytes(weights, group.names)
        found.append(StoredGroup(layer, group.n_rows, group.slot_bytes, *read, group.usual))
    return tuple(found) if set(own.values()) == set(range(len(traced))) else ()


def _read_bytes(weights: Overlay, group: Sequence[str]) -> tuple[int, int]:
    """Return the mean bytes read for a single row of a group, and the bytes of all rows."""
    pieces: list[tuple[Path, int, int, int]] = []  # file, first row's offset, stride, length
    for name in group:
        path, offset = weights.place(name)
        n_rows, size = rows_of(weights.tensors[name])
        stride = weights.tensors[name].stride or size
        if pieces and pieces[-1][0] == path and pieces[-1][2] == stride > size:  # adjacent, in a bundle
            first = pieces[-1][1]
            pieces[-1] = (path, first, stride, offset + size - first)
        else:
            pieces.append((path, offset, stride, size))
    n_pages = 0
    for _, offset, stride, length in pieces:
        first_bytes = offset + np.arange(n_rows, dtype=np.int64) * stride
        n_pages += int(((first_bytes + length - 1) // _PAGE - first_bytes // _PAGE + 1).sum())
    return round(n_pages * _PAGE / n_rows), sum(stride for _, _, stride, _ in pieces) * n_rows
