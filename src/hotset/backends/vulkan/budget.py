"""The bytes and dispatches that a model needs on a Vulkan device, and the operations that no kernel computes.

Everything is counted from the graph and the tensor table, before anything is loaded.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from hotset.backends.base import BLOCK_SIZE
from hotset.backends.vulkan import candidates
from hotset.backends.vulkan.inputs import OUTPUT_ROWS, InputShape
from hotset.backends.vulkan.kernels import stride_of
from hotset.backends.vulkan.memory import (
    ALIGNMENT,
    OWN_FROM,
    PAGE,
    SPARE,
    aligned,
    planned_bytes,
    planned_spare,
)
from hotset.backends.vulkan.program import KV_CHANNELS
from hotset.backends.vulkan.program import missing_kernel as missing_operation
from hotset.backends.vulkan.recurrent import derived_pieces
from hotset.backends.vulkan.split import exchange_bytes
from hotset.backends.vulkan.steps import forms_of, part_bytes, places_of, steps_of
from hotset.backends.vulkan.weights import COMPUTED as COMPUTED_TYPES
from hotset.backends.vulkan.weights import TILE, tile_bytes
from hotset.formats.quants import GGMLType
from hotset.load_parameters import KVType
from hotset.model import operations as ops
from hotset.model.graph import Graph
from hotset.model.operations import NO_LAYER, Primitive, Value
from hotset.offload.expert_cache import layout_of

if TYPE_CHECKING:
    from hotset.formats.gguf import TensorInfo

_NUMBER = 4  # bytes


def missing_kernel(op: Primitive, tensors: Mapping[str, TensorInfo], kv_type: KVType) -> str | None:
    """Describe the part of an operation, its tensors or its cache that no kernel supports; None if all do."""
    in_planes = isinstance(op, ops.TransposedLinear) and op.scales is not None
    for name in () if isinstance(op, ops.Embed) or in_planes else op.matrices:
        if tensors[name].type not in COMPUTED_TYPES:
            return f"the type {tensors[name].type.name}"
    if (
        isinstance(op, ops.ExpertLinear | ops.ExpertSum)
        and len({tensors[name].type for name in op.weights}) > 1
    ):
        return "experts of several types"
    if isinstance(op, ops.Attention) and kv_type not in KV_CHANNELS:
        return f"a {kv_type} cache"
    return missing_operation(op)


def matrix_pieces(op: Primitive, tensors: Mapping[str, TensorInfo]) -> dict[object, int]:
    """Return the sizes of the pieces of memory for an operation's matrices, with all experts, by key."""
    pieces: dict[object, int] = {}
    for name in () if isinstance(op, ops.Embed) else op.matrices:
        info = tensors[name]
        if isinstance(op, ops.TransposedLinear) and op.scales is not None:  # planes are stored unchanged
            pieces[name] = info.nbytes
            continue
        n_cols, n_rows, n_matrices, first = *(*info.shape, 1, 1)[:3], 0
        if isinstance(op, ops.Linear):
            first, n_rows, n_matrices = op.first_row, op.out.width, 1
        elif isinstance(op, ops.ExpertLinear):
            first, n_rows = op.first_row, op.n_rows
        elif isinstance(op, ops.TransposedHeads):
            n_rows, n_matrices = n_rows * n_matrices, 1
        tiles = -(-n_rows // TILE) * n_matrices
        for i, size in enumerate(tile_bytes(info.type, n_cols)):
            pieces[name, first, n_rows, i] = size * tiles
    return pieces


def vector_pieces(op: Primitive, tensors: Mapping[str, TensorInfo]) -> dict[object, int]:
    """Return the sizes of the pieces of memory for an operation's vectors, by key."""
    names = [weight.name for weight in op.weights_read if weight.kind == "vector"]
    pieces: dict[object, int] = {name: _NUMBER * tensors[name].n_elements for name in names}
    match op:
        case ops.Linear() if op.bias is not None:
            del pieces[op.bias]
            pieces[op.bias, op.first_row, op.out.width] = _NUMBER * op.out.width
        case ops.Scale() if op.weight is not None and op.first_weight:
            del pieces[op.weight]
            pieces[op.weight, op.first_weight, op.x.width] = _NUMBER * op.x.width
        case ops.Attention() if op.slopes is not None:
            pieces[op.slopes] = _NUMBER * len(op.slopes)
    return pieces | (derived_pieces(op) if isinstance(op, ops.Recurrent) else {})


def weight_bytes(operations: Iterable[Primitive], tensors: Mapping[str, TensorInfo]) -> int:
    """Return the bytes that operations' weights take on a device. The host looks up embeddings."""
    return sum(map(planned_bytes, weight_pieces(operations, tensors).values()))


def weight_pieces(operations: Iterable[Primitive], tensors: Mapping[str, TensorInfo]) -> dict[object, int]:
    """Return the sizes of the pieces of memory for operations' weights, each piece once, by key."""
    pieces: dict[object, int] = {}
    for op in operations:
        pieces |= matrix_pieces(op, tensors) | vector_pieces(op, tensors)
    return pieces


def matrix_bytes(op: Primitive, tensors: Mapping[str, TensorInfo]) -> int:
    """Return the bytes that an operation's matrices take on a device, with all experts."""
    return sum(map(planned_bytes, matrix_pieces(op, tensors).values()))


def neuron_bytes(ffn: ops.Ffn, tensors: Mapping[str, TensorInfo]) -> tuple[int, int, int]:
    """Return three byte counts of an FFN that can be split.

    They are the bytes of each hot neuron, the most that rounding up and one permanent neuron add, and the
    bytes of the scales that all neurons share.
    """
    each = spare = scales = 0
    for op in (ffn.gate, ffn.up, ffn.down):
        for name in () if op is None else op.matrices:
            info = tensors[name]
            if isinstance(op, ops.TransposedLinear) and name == op.scales:
                scales += planned_bytes(info.nbytes)
                continue
            if isinstance(op, ops.TransposedLinear) and op.scales is not None:
                tiles = [TILE * info.row_bytes, TILE * _NUMBER]  # codes, and scale numbers
            else:
                tiles = list(tile_bytes(info.type, info.shape[0]))
            if isinstance(op, ops.Linear) and op.bias is not None:
                tiles.append(TILE * _NUMBER)
            for tile in filter(None, tiles):
                each += -(-tile // TILE)
                spare += tile + planned_spare(tile * -(-ffn.n_ff // TILE))
    if ffn.mask is not None:  # the numbers of the hot neurons
        each, spare = each + _NUMBER, spare + planned_spare(_NUMBER * ffn.n_ff)
    return each, spare, scales


def split_bytes(ffns: Sequence[ops.Ffn], max_batch: int) -> int:
    """Return the additional bytes of a stage that splits some of these FFNs: exchange buffers and values."""
    if not ffns:
        return 0
    width, n_ff = ffns[0].out.width, max(ffn.n_ff for ffn in ffns)
    values = aligned(_NUMBER * max_batch * (width + n_ff))
    return sum(exchange_bytes(ffns, max_batch)) + 2 * PAGE + values


def expert_bytes(ffn: ops.Ffn, tensors: Mapping[str, TensorInfo]) -> int:
    """Return the bytes of one expert's slot in an MoE layer.

    A 512th is added for the ends of buffers that are bound in parts.
    """
    layout = layout_of(ffn, tensors)
    n_bytes = _NUMBER * sum(layout.biases.values())
    for number, n_rows, n_cols in layout.matrices.values():
        type_ = GGMLType(number)
        n_bytes += -(-n_rows // TILE) * sum(tile_bytes(type_, n_cols))
    return n_bytes + n_bytes // 512


def expert_cache_bytes(ffns: Sequence[ops.Ffn], tensors: Mapping[str, TensorInfo], max_batch: int) -> int:
    """Return the fixed bytes of a stage with an expert cache for some of these layers.

    They are one slot of each layout (the minimum), unused room in blocks, tables, routes, and buffers for the
    exchange with the CPU.
    """
    n_bytes = SPARE
    for layout, ffn in {layout_of(ffn, tensors): ffn for ffn in ffns}.items():
        n_pieces = 2 * len(layout.matrices) + len(layout.biases)
        n_bytes += expert_bytes(ffn, tensors) + n_pieces * planned_spare(OWN_FROM)
    tables = ALIGNMENT * len(ffns) + PAGE
    tables += 2 * aligned(
        _NUMBER * sum(op.route.x.width for op in ffns if op.route is not None)
    )  # group.comp
    routes = max(aligned(_NUMBER * max_batch * ffn.route.out.width) for ffn in ffns if ffn.route is not None)
    return n_bytes + tables + routes + sum(exchange_bytes(ffns, max_batch)) + 2 * PAGE


def cache_sizes(op: ops.Attention, kv_type: KVType, n_blocks: int) -> list[int]:
    """Return the bytes of a layer's keys and of its values, and for q8_0 of their float32 scales."""
    per, places = KV_CHANNELS[kv_type], n_blocks * op.n_head_kv * BLOCK_SIZE
    sizes = [16 * -(-dim // per) * places for dim in (op.head_dim, op.head_dim_v)]
    if kv_type == "q8_0":
        sizes += [4 * -(-dim // 32) * places for dim in (op.head_dim, op.head_dim_v)]
    return sizes


def state_bytes(op: ops.Recurrent) -> int:
    """Return the bytes of one state slot."""
    return 4 * math.prod(op.state_shape)


def cache_bytes(op: Primitive, kv_type: KVType, n_blocks: int, n_states: int) -> int:
    """Return the device bytes of an operation's keys and values, or of its states."""
    return sum(map(planned_bytes, cache_pieces(op, kv_type, n_blocks, n_states)))


def cache_pieces(op: Primitive, kv_type: KVType, n_blocks: int, n_states: int) -> list[int]:
    """Return the sizes of the pieces of memory for an operation's keys and values, or for its states."""
    if isinstance(op, ops.NgramEmbed):  # the host computes it
        return []
    if isinstance(op, ops.Recurrent):
        return [n_states * state_bytes(op)]
    if not isinstance(op, ops.Attention) or op.source is not None or kv_type not in KV_CHANNELS:
        return []
    return cache_sizes(op, kv_type, n_blocks)


def workspace_bytes(
    graph: Graph,
    tensors: Mapping[str, TensorInfo],
    max_batch: int,
    n_blocks: int,
    n_states: int,
) -> int:
    """Return an upper bound on the workspace bytes of a stage with some layers of a graph.

    It counts values, the inputs of a step, logits if they are in device memory, and unused room in blocks.
    """
    steps, first_of_tail = steps_of(graph, tensors)
    forms = forms_of(steps, {graph.result.id}, tensors)
    _, values = places_of(steps, first_of_tail, graph.result, max_batch, forms, tensors)
    residual = Value(-1, graph.ops[0].out.width, "residual")
    sizes = [
        values,
        InputShape.of(
            graph, residual, heads_of=lambda _: 1, max_batch=max_batch, n_blocks=n_blocks, n_states=n_states
        ).nbytes,
        4 * OUTPUT_ROWS * stride_of(graph.result),
        4 * max_batch * stride_of(residual),  # the result of a part without the output
        candidates.scratch_bytes(graph.result.width, OUTPUT_ROWS),
        *part_bytes(steps, max_batch, n_blocks),
    ]
    return sum(size + PAGE for size in sizes) + 2 * SPARE


def dispatches(graph: Graph, tensors: Mapping[str, TensorInfo]) -> Counter[int]:
    """Count the dispatches for one token in each layer; NO_LAYER counts the others, with candidates."""
    counts: Counter[int] = Counter({NO_LAYER: len(candidates.n_chunks(graph.result.width))})
    steps, _ = steps_of(graph, tensors)
    forms, rounded = forms_of(steps, {graph.result.id}, tensors), set[Value]()
    for step in steps:
        match step.op:
            case ops.Embed() | ops.NgramEmbed() | ops.PositionGain():
                n = 0
            case ops.Attention(source=None):  # keys and values are stored first
                n = 2
            case ops.ExpertSum():
                n = 2
            case ops.ShortConv():
                n = 1
            case _ if isinstance(step.op, ops.Recurrent):  # a norm of queries and keys, a decay, the scan
                n = 3
            case _:
                n = 1
        read = {value for value, is_rounded in step.reads(tensors) if is_rounded}
        by_others = {value for value in read if not forms[value.id].by_maker} - rounded
        rounded |= by_others
        counts[step.op.layer] += n + len(by_others)
    return counts
