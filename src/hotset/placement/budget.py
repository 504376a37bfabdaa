"""What a model needs on a device, in bytes, before anything is loaded there.

A budget is a promise: weights, keys and values, workspace and the device's own context together never exceed
it. So everything that a backend will hold is counted here, from the graph and the tensor table alone: no
weight is read, nothing of torch is imported, and Python's integers do not overflow at 175 billion parameters.

    facts = model_facts(graph, weights.tensors, kv_type="f16", n_pages=64, max_batch=512)
    facts.layers[0].neuron_bytes      what one hot neuron of the first layer costs
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from hotset.backends.base import PAGE_SIZE
from hotset.backends.stage import OUTPUT_ROWS, STREAM_BYTES
from hotset.formats.quants import GGMLType
from hotset.model.cost import Cost, KVType, kv_bytes
from hotset.model.graph import Graph, thresholded_products
from hotset.model.operations import (
    NO_LAYER,
    Attention,
    ExpertLinear,
    ExpertSum,
    Ffn,
    Linear,
    Op,
    Part,
    Rotate,
    TransposedLinear,
    one_matrix,
)

if TYPE_CHECKING:
    from hotset.formats.gguf import TensorInfo

FFNMode = Literal["dense", "exact", "predicted"]

INDEX_BYTES = 8  # of a hot neuron: its number, and that of its scales
WORD_BYTES = 8  # of 32 neurons of a split layer: which of them are hot, and how many before them
FLOAT_BYTES = 4  # norms, biases and intermediates are float32 on a device
ALIGNMENT = 512  # bytes that an allocator rounds a tensor up to


@dataclass(frozen=True)
class MemoryBudget:
    """Planned bytes of one device, or of this machine's memory, by kind, and the limit that they stay within.

    weights: that always stay: attention, norms, predictors, FFNs that are not split, output. neurons: the
    rows of hot neurons, or room for those that are read as they are needed. experts: slots of an expert
    cache, and those into which a step fetches. kv: keys and values of its layers, and recurrent states.
    workspace: intermediates, logits, what streams through. context: what the device's runtime takes before
    the first tensor, or the program without the model. ring: room for weights that are read in every step.
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
    """Planned bytes: of each device, and of weights that the CPU reads where they are mapped.

    stream: of cold rows that come to a device for a prompt, counted in its workspace where it needs them.
    pinned: of the host's those that must stay in memory, since devices read them there.
    """

    devices: tuple[MemoryBudget, ...]
    host: int = 0
    stream: int = 0
    pinned: int = 0


@dataclass(frozen=True)
class LayerFacts:
    """One layer in bytes.

    On a device: fixed_bytes whatever its neurons (attention, norms, predictor; the FFN too where it cannot be
    split), neuron_bytes for each hot neuron, shared_bytes once where any neuron is hot (which these are;
    scales, which 32 neurons of a neuron-major matrix share), kv_bytes of cache. A token reads: fixed_bytes;
    of a neuron always_bytes, and fired_bytes more when it fires (mode exact: gate rows always, up and down
    when it fires; predicted: nothing but when it is named); kv_read_bytes. n_split: its neurons if they can
    be split, else 0. expert_bytes: of an expert of an MoE model, whose experts are no part of what stands
    above: they are on the host, n_experts of them, and a token reads n_used. is_cached: a device may have
    slots for some of them, which layers of one layout (a number) share.

    On a device that has experts with their layers, these are part of fixed_bytes; idle_bytes: the experts of
    these bytes that a token does not use. n_kernels: dispatches of the layer; None: those of
    table.LAYER_KERNELS. missing: what of it no kernel computes, so that it stays on the CPU.
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
        """With so many more bytes of it on a device, and read."""
        return replace(self, fixed_bytes=self.fixed_bytes + n_bytes)

    @property
    def whole_bytes(self) -> int:
        """On a device with all neurons and the cache, without experts."""
        return self.fixed_bytes + self.n_split * self.neuron_bytes + self.shared_bytes + self.kv_bytes


@dataclass(frozen=True)
class ModelFacts:
    """A model in bytes; its embeddings are looked up on the host.

    output_bytes: final norm and output matrix (a tied one too). workspace_bytes: of every device that runs a
    part of the model. stream_bytes: of workspace too, where some of its neurons are on the CPU. least_slots:
    of an expert cache, which are counted in workspace_bytes. expert_share: of the experts that may be on
    devices; the CPU computes the others.
    """

    layers: tuple[LayerFacts, ...]
    output_bytes: int
    workspace_bytes: int
    stream_bytes: int
    least_slots: int = 0
    expert_share: float = 1.0

    @property
    def whole_bytes(self) -> int:
        """All of it on one device, without the context."""
        return sum(layer.whole_bytes for layer in self.layers) + self.output_bytes + self.workspace_bytes

    def smallest_bytes(self, n_layers: int = 1) -> int:
        """The least with which the last layers are on a device at all, without the context: their fixed
        parts, or, where that is less, these layers whole (then nothing streams).
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
    n_pages: int,
    max_batch: int,
) -> ModelFacts:
    """Counts a model. n_pages: of the cache; max_batch: tokens of a step at most."""
    parts: dict[int, list[Op]] = {}
    for op in graph.ops:
        parts.setdefault(op.layer, []).append(op)
    input_major = [0] * graph.n_layer  # at most: which of them are is decided when they have their places
    for op in thresholded_products(graph):
        input_major[op.layer] += channel_bytes(op, tensors)
    experts = Cost(graph, tensors).expert_bytes
    layers = tuple(
        _layer_facts(parts[i], tensors, mode, kv_type, n_pages, experts[i]).with_fixed(input_major[i])
        for i in range(graph.n_layer)
    )
    return ModelFacts(
        layers,
        sum(op_bytes(op, tensors) for op in parts[NO_LAYER]),
        workspace_bytes(graph, n_pages, max_batch),
        # Two parts are there at a time (backends/triton/stream.py).
        2
        * min(STREAM_BYTES, max(layer.n_split * layer.neuron_bytes + layer.shared_bytes for layer in layers)),
    )


def op_bytes(op: Op, tensors: Mapping[str, TensorInfo]) -> int:
    """Bytes on a device of the weights of one operation, each tensor rounded up as allocators do.

    Of a fused tensor they are the operation's own rows. Embeddings are looked up on the host.
    """
    if isinstance(op, Ffn):
        return sum(op_bytes(part, tensors) for part in op.primitives)
    n_bytes = 0
    for weight in op.weights_read:
        info = tensors[weight.name]
        own = op.bytes_of(weight, info)
        if weight.kind == "matrix":
            n_bytes += _rounded(own)
        elif weight.kind == "vector":
            n_bytes += _rounded(info.n_elements * own // info.nbytes * FLOAT_BYTES)
    if isinstance(op, TransposedLinear) and op.scales is not None:
        n_bytes += op.x.width * INDEX_BYTES
    return n_bytes


def channel_bytes(op: Linear, tensors: Mapping[str, TensorInfo]) -> int:
    """What a matrix takes more that a device holds input-major (backends/triton/matrix.py): an int32 for each
    input; of Q4_K two bytes for scale and minimum of 32 weights, which are one and a half in a file."""
    is_k = tensors[op.weight].type == GGMLType.Q4_K
    return _rounded(4 * op.x.width) + _rounded(op.x.width * op.out.width // 64 if is_k else 0)


def workspace_bytes(graph: Graph, n_pages: int, max_batch: int) -> int:
    """Intermediates of a step of max_batch tokens, the numbers of its batch, and some of its logits.

    At most the values of one attention or one FFN are alive together, beside a few of the residual's width.
    """
    d = graph.ops[0].out.width
    parts: dict[tuple[int, Part], int] = {}
    for op in graph.primitives:
        if op.layer != NO_LAYER:
            key: tuple[int, Part] = op.layer, "ffn" if op.part == "predictor" else op.part
            parts[key] = parts.get(key, 0) + op.out.width
    answered = max((ffn.route.n_used * d for ffn in graph.ffns if ffn.route is not None), default=0)
    values = max_batch * (max(parts.values()) + answered + 6 * d + n_pages + 4)
    values += min(max_batch, OUTPUT_ROWS) * graph.result.width
    n_ropes = len({op.rope for op in graph.primitives if isinstance(op, Rotate)})
    tables = n_ropes * 2 * n_pages * PAGE_SIZE  # of rotations: angles of some positions stand for all
    return FLOAT_BYTES * (values + tables) + (1 << 20)


def _layer_facts(
    ops: list[Op],
    tensors: Mapping[str, TensorInfo],
    mode: FFNMode,
    kv_type: KVType,
    n_pages: int,
    expert_bytes: int,
) -> LayerFacts:
    attention = next(op for op in ops if isinstance(op, Attention))
    ffn = next(op for op in ops if isinstance(op, Ffn))
    per_token, n_tokens = kv_bytes(attention, kv_type), n_pages * PAGE_SIZE
    kv, kv_read = n_tokens * per_token, int(attention.n_visible(n_tokens // 2 - 1)) * per_token
    if ffn.route is not None and isinstance(ffn.up, ExpertLinear):  # whose experts stay on the host
        parts = [op for op in (*ops, *ffn.primitives) if op is not ffn]
        others = [op for op in parts if not isinstance(op, ExpertLinear | ExpertSum)]
        return LayerFacts(
            ffn.n_ff, 0, sum(op_bytes(op, tensors) for op in others), 0, 0, kv, kv_read, 0, 0,
            expert_bytes=expert_bytes, n_experts=ffn.up.n_expert, n_used=ffn.up.n_used,
        )  # fmt: skip
    down = ffn.down
    if not isinstance(down, TransposedLinear) or not ffn.can_be_split:
        fixed = sum(op_bytes(op, tensors) for op in ops)
        return LayerFacts(ffn.n_ff, 0, fixed, 0, 0, kv, kv_read, 0, 0)
    fixed = sum(op_bytes(op, tensors) for op in ops if op is not ffn)
    fixed += 0 if ffn.norm is None else op_bytes(ffn.norm, tensors)
    shared = -(-ffn.n_ff // 32) * WORD_BYTES + (tensors[down.scales].nbytes if down.scales else 0)
    fixed += _vector(down.bias, down.out.width)
    always, fired = neuron_reads(ffn, tensors, mode)
    neuron = always + fired + INDEX_BYTES
    return LayerFacts(ffn.n_ff, ffn.n_ff, fixed, neuron, shared, kv, kv_read, always, fired)


def neuron_reads(ffn: Ffn, tensors: Mapping[str, TensorInfo], mode: FFNMode) -> tuple[int, int]:
    """Bytes of a neuron of an FFN that can be split: what a token reads always, and more where it fires."""
    assert isinstance(ffn.down, TransposedLinear)
    first_row = _row(ffn.decides, tensors)
    second_row = 0 if ffn.gate is None else _row(one_matrix(ffn.up), tensors)
    rows = first_row + second_row + tensors[ffn.down.weight].row_bytes
    if mode == "predicted" and ffn.mask is None:
        mode = "dense"  # a layer whose neurons are all computed always has no mask
    always = {"dense": rows, "exact": first_row, "predicted": 0}[mode]
    return always, rows - always


def _row(op: Linear, tensors: Mapping[str, TensorInfo]) -> int:
    """Bytes of a neuron's row and its bias."""
    return tensors[op.weight].row_bytes + (FLOAT_BYTES if op.bias else 0)


def _vector(name: str | None, n: int) -> int:
    return 0 if name is None else _rounded(int(n) * FLOAT_BYTES)


def _rounded(n_bytes: int) -> int:
    return -(-int(n_bytes) // ALIGNMENT) * ALIGNMENT
