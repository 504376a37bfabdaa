"""The bytes that a model needs on a device, counted before anything is loaded there.

A budget is a promise: weights, keys and values, workspace and the device's own context together never exceed
it. This module counts everything that a backend will hold, from the graph and the tensor table. It reads no
weights and does not import torch. Python's integers do not overflow at 175 billion parameters.

    facts = model_facts(graph, tensors, mode="exact", kv_type="f16", n_blocks=64, max_batch=512)
    facts.layers[0].neuron_bytes      bytes of one hot neuron of the first layer
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from hotset.backends.base import BLOCK_SIZE
from hotset.backends.stage import OUTPUT_ROWS, STREAM_BYTES
from hotset.formats.quants import GGMLType
from hotset.load_parameters import KVType
from hotset.model import operations as ops
from hotset.model.cost import Cost, kv_bytes
from hotset.model.graph import Graph, thresholded_products
from hotset.model.operations import NO_LAYER, Op, one_matrix

if TYPE_CHECKING:
    from hotset.formats.gguf import TensorInfo

FFNMode = Literal["dense", "exact", "predicted"]

INDEX_BYTES = 8  # per hot neuron: its number, and the number of its scales
WORD_BYTES = 8  # per 32 neurons of a split layer: a bit per hot neuron, and the count of hot ones before
FLOAT_BYTES = 4  # norms, biases and intermediates are float32 on a device
ALIGNMENT = 512  # an allocator rounds a tensor up to a multiple of this many bytes


@dataclass(frozen=True)
class MemoryBudget:
    """The planned bytes of one device, or of host memory, by kind, and their limit.

    weights: permanent weights: attention, norms, predictors, FFNs that are not split, output. neurons: rows
    of hot neurons, or room for rows that are read when needed. experts: slots of an expert cache, and slots
    for experts fetched in a step. kv: keys and values of its layers, and recurrent states. workspace:
    intermediates, logits, room for streamed rows. context: bytes that the device's runtime takes before the
    first tensor, or the program without the model. ring: room for weights that are read in every step.
    """

    device: str
    limit: int
    weights: int = 0
    neurons: int = 0
    kv: int = 0
    workspace: int = 0
    context: int = 0
    experts: int = 0
    ring: int = 0

    @property
    def total(self) -> int:
        held = self.weights + self.neurons + self.experts + self.kv + self.ring
        return held + self.workspace + self.context


@dataclass(frozen=True)
class Budget:
    """The planned bytes of each device, and of the mapped weights that the CPU reads (host).

    stream: of cold rows that are copied to a device for a prompt; part of its workspace if it needs them.
    pinned: the part of `host` that must stay in memory, since devices read it there.
    """

    devices: tuple[MemoryBudget, ...]
    host: int = 0
    stream: int = 0
    pinned: int = 0


@dataclass(frozen=True)
class LayerFacts:
    """The bytes of one layer.

    A device holds fixed_bytes (attention, norms, predictor; the FFN too if it cannot be split), neuron_bytes
    for each hot neuron, and kv_bytes of cache. If any neuron is hot it also holds shared_bytes: the index of
    hot neurons, and the scales that 32 neurons of a neuron-major matrix share.
    A token reads fixed_bytes, kv_read_bytes, and for each neuron always_bytes, plus fired_bytes if it fires.
    Mode exact always reads gate rows; mode predicted reads only named neurons. n_split: its neurons if they
    can be split, otherwise 0. expert_bytes: of one expert of an MoE layer. The n_experts experts are on the
    host and not counted above; a token reads n_used. is_cached: a device may have slots for some of them,
    which the layers with the same layout number share.

    If a device holds experts with their layers, they are part of fixed_bytes; idle_bytes: the bytes of
    experts that a token does not use. n_kernels: dispatches of the layer; None: table.LAYER_KERNELS. missing:
    the part that no kernel computes, so that the layer stays on the CPU.
    """

    n_ff: int
    n_split: int
    fixed_bytes: int
    neuron_bytes: int
    shared_bytes: int
    kv_bytes: int
    kv_read_bytes: int
    always_bytes: int
    fired_bytes: int
    expert_bytes: int = 0
    n_experts: int = 0
    n_used: int = 0
    is_cached: bool = False
    layout: int = 0
    idle_bytes: int = 0
    n_kernels: int | None = None
    missing: str | None = None

    def with_fixed(self, n_bytes: int) -> LayerFacts:
        """Return the layer with `n_bytes` more fixed bytes, which a token reads too."""
        return replace(self, fixed_bytes=self.fixed_bytes + n_bytes)

    @property
    def whole_bytes(self) -> int:
        """Return the bytes of the layer on a device with all neurons and the cache, without experts."""
        return self.fixed_bytes + self.n_split * self.neuron_bytes + self.shared_bytes + self.kv_bytes


@dataclass(frozen=True)
class ModelFacts:
    """The bytes of a model, whose embeddings are looked up on the host.

    output_bytes: final norm and output matrix (a tied one too). workspace_bytes: of every device that runs a
    part of the model. stream_bytes: additional workspace of a device if the CPU has some of its neurons.
    least_slots: the minimum slots of an expert cache, which workspace_bytes includes. expert_share: the share
    of experts that may be on devices; the CPU computes the others.
    """

    layers: tuple[LayerFacts, ...]
    output_bytes: int
    workspace_bytes: int
    stream_bytes: int
    least_slots: int = 0
    expert_share: float = 1.0

    @property
    def whole_bytes(self) -> int:
        """Return the bytes of the whole model on one device, without the context."""
        return sum(layer.whole_bytes for layer in self.layers) + self.output_bytes + self.workspace_bytes

    def smallest_bytes(self, n_layers: int = 1) -> int:
        """Return the least bytes to have the last n_layers layers on a device, without the context.

        They are the fixed parts of these layers, or, if less, the whole layers (then nothing streams).
        """
        last = self.layers[len(self.layers) - n_layers :]
        split = sum(layer.fixed_bytes + layer.kv_bytes for layer in last)
        if any(layer.n_split for layer in last):
            split += self.stream_bytes
        whole = sum(layer.whole_bytes for layer in last)
        return min(split, whole) + self.output_bytes + self.workspace_bytes


def model_facts(
    graph: Graph,
    tensors: Mapping[str, TensorInfo],
    *,
    mode: FFNMode,
    kv_type: KVType,
    n_blocks: int,
    max_batch: int,
) -> ModelFacts:
    """Count the bytes of a model. n_blocks: KV blocks of the cache. max_batch: most tokens of a step."""
    parts: dict[int, list[Op]] = {}
    for op in graph.ops:
        parts.setdefault(op.layer, []).append(op)
    input_major = [0] * graph.n_layer  # an upper bound: the choice of matrices follows the placement
    for op in thresholded_products(graph):
        input_major[op.layer] += channel_bytes(op, tensors)
    experts = Cost(graph, tensors).expert_bytes
    layers = tuple(
        _layer_facts(parts[i], tensors, mode, kv_type, n_blocks, experts[i]).with_fixed(input_major[i])
        for i in range(graph.n_layer)
    )
    return ModelFacts(
        layers,
        sum(op_bytes(op, tensors) for op in parts[NO_LAYER]),
        workspace_bytes(graph, n_blocks, max_batch),
        # A device holds two parts at a time (backends/triton/stream.py).
        2
        * min(STREAM_BYTES, max(layer.n_split * layer.neuron_bytes + layer.shared_bytes for layer in layers)),
    )


def op_bytes(op: Op, tensors: Mapping[str, TensorInfo]) -> int:
    """Return the bytes on a device of one operation's weights, each tensor rounded up as allocators do.

    For a fused tensor, only the operation's own rows count. Embeddings are looked up on the host.
    """
    if isinstance(op, ops.Ffn):
        return sum(op_bytes(part, tensors) for part in op.primitives)
    n_bytes = 0
    for weight in op.weights_read:
        info = tensors[weight.name]
        own = op.bytes_of(weight, info)
        if weight.kind == "matrix":
            n_bytes += _rounded(own)
        elif weight.kind == "vector":
            n_bytes += _rounded(info.n_elements * own // info.nbytes * FLOAT_BYTES)
    if isinstance(op, ops.TransposedLinear) and op.scales is not None:
        n_bytes += op.x.width * INDEX_BYTES
    return n_bytes


def channel_bytes(op: ops.Linear, tensors: Mapping[str, TensorInfo]) -> int:
    """Return the additional bytes of a matrix that a device holds input-major (backends/triton/matrix.py).

    They are an int32 per input. For Q4_K, scale and minimum of 32 weights take two bytes, and one and a half
    in a file.
    """
    is_k = tensors[op.weight].type == GGMLType.Q4_K
    return _rounded(4 * op.x.width) + _rounded(op.x.width * op.out.width // 64 if is_k else 0)


def workspace_bytes(graph: Graph, n_blocks: int, max_batch: int) -> int:
    """Return the bytes of a step's intermediates, the inputs of its batch, and some of its logits.

    At most the values of one attention or one FFN are alive together, plus a few of the residual's width.
    """
    d = graph.ops[0].out.width
    parts: dict[tuple[int, ops.Part], int] = {}
    for op in graph.primitives:
        if op.layer != NO_LAYER:
            key: tuple[int, ops.Part] = op.layer, "ffn" if op.part == "predictor" else op.part
            parts[key] = parts.get(key, 0) + op.out.width
    answered = max((ffn.route.n_used * d for ffn in graph.ffns if ffn.route is not None), default=0)
    values = max_batch * (max(parts.values()) + answered + 6 * d + n_blocks + 4)
    values += min(max_batch, OUTPUT_ROWS) * graph.result.width
    n_ropes = len({op.rope for op in graph.primitives if isinstance(op, ops.Rotate)})
    tables = n_ropes * 2 * n_blocks * BLOCK_SIZE  # tables of rotation angles
    return FLOAT_BYTES * (values + tables) + (1 << 20)


def _layer_facts(
    operations: list[Op],
    tensors: Mapping[str, TensorInfo],
    mode: FFNMode,
    kv_type: KVType,
    n_blocks: int,
    expert_bytes: int,
) -> LayerFacts:
    attention = next(op for op in operations if isinstance(op, ops.Attention))
    ffn = next(op for op in operations if isinstance(op, ops.Ffn))
    per_token, n_tokens = kv_bytes(attention, kv_type), n_blocks * BLOCK_SIZE
    kv, kv_read = n_tokens * per_token, int(attention.n_visible(n_tokens // 2 - 1)) * per_token
    if ffn.route is not None and isinstance(ffn.up, ops.ExpertLinear):  # its experts stay on the host
        parts = [op for op in (*operations, *ffn.primitives) if op is not ffn]
        others = [op for op in parts if not isinstance(op, ops.ExpertLinear | ops.ExpertSum)]
        return LayerFacts(
            ffn.n_ff, 0, sum(op_bytes(op, tensors) for op in others), 0, 0, kv, kv_read, 0, 0,
            expert_bytes=expert_bytes, n_experts=ffn.up.n_expert, n_used=ffn.up.n_used,
        )  # fmt: skip
    down = ffn.down
    if not isinstance(down, ops.TransposedLinear) or not ffn.can_be_split:
        fixed = sum(op_bytes(op, tensors) for op in operations)
        return LayerFacts(ffn.n_ff, 0, fixed, 0, 0, kv, kv_read, 0, 0)
    fixed = sum(op_bytes(op, tensors) for op in operations if op is not ffn)
    fixed += 0 if ffn.norm is None else op_bytes(ffn.norm, tensors)
    shared = -(-ffn.n_ff // 32) * WORD_BYTES + (tensors[down.scales].nbytes if down.scales else 0)
    fixed += _vector(down.bias, down.out.width)
    always, fired = neuron_reads(ffn, tensors, mode)
    neuron = always + fired + INDEX_BYTES
    return LayerFacts(ffn.n_ff, ffn.n_ff, fixed, neuron, shared, kv, kv_read, always, fired)


def neuron_reads(ffn: ops.Ffn, tensors: Mapping[str, TensorInfo], mode: FFNMode) -> tuple[int, int]:
    """Return a neuron's bytes in an FFN that can be split: those always read, and those read if it fires."""
    assert isinstance(ffn.down, ops.TransposedLinear)
    first_row = _row(ffn.decides, tensors)
    second_row = 0 if ffn.gate is None else _row(one_matrix(ffn.up), tensors)
    rows = first_row + second_row + tensors[ffn.down.weight].row_bytes
    if mode == "predicted" and ffn.mask is None:
        mode = "dense"  # a layer without a mask computes all its neurons
    always = {"dense": rows, "exact": first_row, "predicted": 0}[mode]
    return always, rows - always


def _row(op: ops.Linear, tensors: Mapping[str, TensorInfo]) -> int:
    """Return the bytes of a neuron's row and its bias."""
    return tensors[op.weight].row_bytes + (FLOAT_BYTES if op.bias else 0)


def _vector(name: str | None, n: int) -> int:
    return 0 if name is None else _rounded(int(n) * FLOAT_BYTES)


def _rounded(n_bytes: int) -> int:
    return -(-int(n_bytes) // ALIGNMENT) * ALIGNMENT
