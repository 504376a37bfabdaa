"""Recording of a graph's operations as dispatches of kernels. A step submits the recordings.

A residual is fused into the product before it, and an activation into the product of gate and up. An
operation, a tensor type or a setting without a kernel raises an error: nothing is computed elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from hotset import _core
from hotset.backends.base import BLOCK_SIZE, N_CANDIDATES
from hotset.backends.vulkan import candidates
from hotset.backends.vulkan.adapters import DeviceAdapters
from hotset.backends.vulkan.inputs import OUTPUT_ROWS, SPLIT, VulkanInputs
from hotset.backends.vulkan.kernels import Record, Recorder, VulkanKernels, by_values, stride_of
from hotset.backends.vulkan.memory import BufferRange, aligned
from hotset.backends.vulkan.plugin import CAPABILITIES, refused
from hotset.backends.vulkan.recurrent import scan, scratch_bytes, short_conv
from hotset.backends.vulkan.shapes import TOKENS_OF_FEW
from hotset.backends.vulkan.split import (
    Gather,
    SharedLayers,
    SplitOperation,
    Submit,
    hot_part,
    of_slots,
    operations_before,
)
from hotset.backends.vulkan.weights import FLOATS, MatrixPart, VulkanMatrix, VulkanWeights
from hotset.formats.gguf import TensorInfo
from hotset.load_parameters import KVType
from hotset.model.graph import Graph
from hotset.model.operations import (
    Activate,
    Add,
    AddStreams,
    Attention,
    ChannelScan,
    DeltaNet,
    Embed,
    ExpertLinear,
    ExpertSum,
    Ffn,
    GaussianTopK,
    HeadDot,
    Heads,
    LayerNorm,
    Linear,
    LowRank,
    Mask,
    MatchMagnitude,
    Multiply,
    NgramEmbed,
    Op,
    PositionGain,
    Primitive,
    RMSNorm,
    Rotate,
    Route,
    Scale,
    Scoring,
    SelectiveScan,
    SelectOutputs,
    ShortConv,
    SimilarityGate,
    SoftCap,
    Threshold,
    TransposedHeads,
    TransposedLinear,
    UnitNorm,
    Value,
    Wkv,
)

ON_HOST = (Embed, NgramEmbed, PositionGain)  # the host computes their results
FEW = 8  # up to this many tokens attention is split, and float products use linear_few.comp
_TILE = 32  # rows of a workgroup, and its tokens in kernels for many tokens
BLOCK = 32  # columns of a matrix that share a scale, and their inputs
ROUNDED_BYTES = 48  # of a rounded block of inputs (csrc/vulkan/shaders/rounded.glsl)
_BLOCKS_OF_GROUP = 8  # csrc/vulkan/shaders/quantize.comp
KV_CODES: Mapping[KVType, int] = {"f32": 0, "f16": 1, "q8_0": 2}
KV_CHANNELS: Mapping[KVType, int] = {"f32": 4, "f16": 8, "q8_0": 16}  # in 16 bytes
ACTIVATIONS = {
    "silu": 0, "gelu_tanh": 1, "relu": 2, "relu2": 3, "fatrelu": 4, "sigmoid": 5, "clamped_silu": 6,
    "clamped_plus_one": 7, "exp": 8, "gelu": 9, "xielu": 10,
    "softplus": 11,
}  # fmt: skip
_ADD, _MULTIPLY, _SCALE, _SOFT_CAP, _ACTIVATE, _GATED, _WEIGHTED, _MASK, _THRESHOLD = range(9)
_ADAPTED = 10
_RMS, _LAYER, _TOP_K, _MATCH = range(4)  # csrc/vulkan/shaders/norm.comp
_ALL = 0xFFFFFFFF  # a token sees all positions
_BIAS, _RESIDUAL, _FIRING, _CHOSEN = 1, 2, 4, 8
_SCORINGS: Mapping[Scoring, int] = {"softmax": 0, "sigmoid": 1, "softmax_chosen": 2}
_MOST_EXPERTS, _LANES_OF_ROUTE = 512, 64  # csrc/vulkan/shaders/route.comp
_CUT_FROM = 64  # from this many tokens on, each layer has its own submission


@dataclass(frozen=True)
class CacheOfLayer:
    """The keys and values of a layer, and their scales for q8_0 (csrc/vulkan/shaders/cache.glsl)."""

    keys: BufferRange
    values: BufferRange
    key_scales: BufferRange
    value_scales: BufferRange


@dataclass(frozen=True)
class VulkanParts:
    """The resources that the programs of a stage use.

    cache: by layer, of each layer that has its own. states: state slots, by the id of the recurrent
    operation's value. shared: the layers that are split between the device and the CPU, if any.
    """

    weights: VulkanWeights
    kernels: VulkanKernels
    inputs: VulkanInputs
    cache: Mapping[int, CacheOfLayer]
    states: Mapping[int, BufferRange]
    kv_type: KVType
    max_batch: int
    n_kv_blocks: int
    shared: SharedLayers | None = None


_Wanted = Value | Mask | None
_Opened = tuple[Primitive | SplitOperation, _Wanted, bool]  # the last: a product of hot neurons


@dataclass(frozen=True)
class FusedStep:
    """An operation, or two that one kernel computes.

    other: the value that is added to, or multiplied with, the first operation's result. wanted: the rows of a
    product that are computed: those with a nonzero value of an activation, or those that a mask selects.
    is_hot: a product of the hot neurons of a split layer.
    """

    op: Primitive | SplitOperation
    out: Value
    other: Value | None = None
    wanted: _Wanted = None
    is_hot: bool = False


class RecordedGraph:
    """The dispatches of a graph with a set of taps.

    body: for every token. tail: for the rows with logits, OUTPUT_ROWS at a time; the host reads all logits
    of a row or its candidates. adapters: for a graph with adapter operations. The constructor raises
    UnsupportedModelError if an operation has no kernel.
    """

    def __init__(
        self, graph: Graph, taps: frozenset[str], parts: VulkanParts, adapters: DeviceAdapters | None = None
    ) -> None:
        self.graph, self.weights, self._kernels, self.inputs = (
            graph,
            parts.weights,
            parts.kernels,
            parts.inputs,
        )
        self._adapters = adapters
        self._cache, self.states, self._kv_type = parts.cache, parts.states, parts.kv_type
        self.max_batch, self._n_kv_blocks, self._shared = parts.max_batch, parts.n_kv_blocks, parts.shared
        if parts.shared is not None:
            parts.shared.check_taps(graph.ffns, taps)
        steps, first_of_tail = steps_of(graph, taps, parts.shared)
        self._of_tail = {step.out.id for step in steps[first_of_tail:]}
        self.tapped = [value for value in graph.values if value.name in taps]
        self._pieces: dict[int, BufferRange] = {}
        self._allocate(steps, first_of_tail, {value.id for value in self.tapped})
        self.body, self.tail = (
            [(step, self._lower(step)) for step in part if not isinstance(step.op, ON_HOST)]
            for part in (steps[:first_of_tail], steps[first_of_tail:])
        )
        self._recorded: dict[tuple[str, int], Recorder] = {}

    def free(self) -> None:
        """Release the memory at once. The recording functions refer to this object, so it is in a cycle."""
        self.__dict__.clear()

    # ---- recordings ----

    def recorded(self, part: str, n: int) -> Recorder:
        """Return the recording of a part, made at the first request.

        part: "body" for n tokens; "logits" or "candidates" for a tail of n rows that ends with these.
        """
        key = part, n
        if key not in self._recorded:
            while len(self._recorded) >= _KEPT:
                self._recorded.pop(next(iter(self._recorded)))
            recorder, before = Recorder(self._kernels), None
            for step, record in self.body if part == "body" else self.tail:
                if n >= _CUT_FROM and before not in (None, step.op.layer):
                    recorder.program.cut()
                before, recorder.operation = step.op.layer, step.out.name
                record(recorder, n)
            recorder.operation = part
            if part != "body" and self.graph.result.id in self._of_tail:
                self._hand_over(recorder, part, n)
            recorder.program.finish()
            self._recorded[key] = recorder
        return self._recorded[key]

    def record_anew(self) -> None:
        """Discard all recordings, so that they are recorded again when needed."""
        self._recorded.clear()

    def _hand_over(self, to: Recorder, part: str, n: int) -> None:
        """Record the copy of n result rows of a tail to the memory that the host reads."""
        result = self.graph.result
        x, width, stride = self.read(result, n), result.width, stride_of(result)
        if part == "candidates":
            candidates.record(to, x, (width, stride), n, self.scratch, self._on_host)
            return
        bindings = [x, x, self._on_host.bound(4 * n * stride, written=True)]
        push = width, stride, 0, stride, width, 0, 1.0, 0.0, 0.0, 0.0
        to.add("elementwise", [_SCALE, 0], bindings, push, by_values(width, n))

    def rows(self, value: Value, n: int) -> np.ndarray:
        """Copy n rows of a kept value: float32 [n, width]. Logits are valid after their tail has run."""
        stride = stride_of(value)
        piece = self._on_host if value == self.graph.result else self._piece(value)
        data = np.frombuffer(piece.read(4 * n * stride), np.float32)
        return data.reshape(n, stride)[:, : value.width].copy()

    @property
    def has_candidates(self) -> bool:
        """Return whether the largest logits may be returned without the others."""
        result = self.graph.result
        return result.id in self._of_tail and result.width > N_CANDIDATES and result not in self.tapped

    def candidate_rows(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the candidates of n rows after their tail has run: tokens and logits, as candidates_of."""
        data = np.frombuffer(self._on_host.read(n * candidates.CANDIDATE_BYTES), np.uint32)
        return candidates.candidates_of(data.reshape(n, N_CANDIDATES, 2))

    @property
    def has_adapters(self) -> bool:
        """Return whether the graph has adapters."""
        return self._adapters is not None

    def is_of_tail(self, value: Value) -> bool:
        """Return whether a value has rows only for outputs."""
        return value.id in self._of_tail

    # ---- memory of values ----

    def _allocate(self, steps: list[FusedStep], first_of_tail: int, kept: set[int]) -> None:
        """Allocate one buffer for all values, in which values alive together do not overlap, and scratch."""
        places, size = places_of(steps, first_of_tail, kept, self.graph.result, self.max_batch)
        result = self.graph.result
        workspace = self._kernels.device.allocate(max(size, aligned(1)), "device")
        self._pieces = {id: BufferRange(workspace, *place) for id, place in places.items()}
        n_rows = OUTPUT_ROWS if result.id in self._of_tail else self.max_batch
        n_logits = 4 * n_rows * stride_of(result)
        logits = self._kernels.device.allocate(n_logits, "from_device")
        self._on_host = BufferRange(logits, 0, n_logits)
        self._pieces.setdefault(result.id, self._on_host)  # rows of a tail are copied there later
        of_splits, of_operations = part_bytes(steps, self.max_batch, self._n_kv_blocks)
        of_candidates = candidates.scratch_bytes(result.width, n_rows) if result.id in self._of_tail else 0
        n_bytes = max(of_operations, of_candidates, *(self._bytes_of_low_rank(step.op) for step in steps))
        device = self._kernels.device
        self._parts = BufferRange(device.allocate(of_splits, "device"), 0, of_splits) if of_splits else None
        self.scratch = BufferRange(device.allocate(n_bytes, "device"), 0, n_bytes)
        of_rounded = rounded_bytes(steps, first_of_tail, self.max_batch, self.weights.tensors)
        self._rounded = (
            BufferRange(device.allocate(of_rounded, "device"), 0, of_rounded) if of_rounded else None
        )
        parts = [one.buffer for one in (self._parts, self.scratch, self._rounded) if one is not None]
        self.nbytes = sum(buffer.reserved for buffer in (workspace, logits, *parts))

    @property
    def _n_splits(self) -> int:
        """Return the splits of the longest context."""
        return n_splits(self._n_kv_blocks)

    def _piece(self, value: Value) -> BufferRange:
        return self._pieces[value.id] if value.id in self._pieces else self.inputs[value]

    def read(self, value: Value, n: int) -> _core.VulkanBinding:
        """Return a binding of n rows of a value for a dispatch that reads them."""
        return self._piece(value).bound(4 * n * stride_of(value))

    def written(self, value: Value, n: int) -> _core.VulkanBinding:
        """Return a binding of n rows of a value for a dispatch that writes them."""
        return self._piece(value).bound(4 * n * stride_of(value), written=True)

    # ---- operations ----

    def _lower(self, step: FusedStep) -> Record:  # noqa: C901 - a case for each operation
        if isinstance(step.op, SplitOperation):
            assert self._shared is not None
            return self._shared.lower(step.op, self)
        if (what := missing_kernel(step.op)) is not None:
            raise refused(step.op.out.name, what)
        match step.op:
            case RMSNorm() | UnitNorm() | LayerNorm():
                return self._norm(step.op)
            case GaussianTopK():
                return self._moments(step.op.x, step.out, None, _TOP_K, step.op.multiplier)
            case MatchMagnitude():
                return self._moments(step.op.x, step.out, step.op.like, _MATCH, step.op.least)
            case Linear():
                return self._linear(step)
            case TransposedLinear():
                return self._transposed(step)
            case TransposedHeads():
                return self._transposed(step)
            case Heads():
                return self._heads(step.op)
            case HeadDot():
                return self._head_dot(step.op)
            case SimilarityGate():
                return self._similarity_gate(step.op)
            case AddStreams():
                return self._add_streams(step.op)
            case ShortConv():
                return short_conv(self, step.op)
            case DeltaNet() | SelectiveScan() | ChannelScan() | Wkv():
                return scan(self, step.op)
            case ExpertLinear():
                return self._expert_linear(step.op)
            case ExpertSum():
                return self._expert_sum(step.op)
            case Route():
                return self._route(step.op)
            case Rotate():
                return self._rotate(step.op)
            case Attention():
                return self._attention(step.op)
            case LowRank():
                return self._low_rank(step.op)
            case SelectOutputs():
                return self._select(step.op)
            case Activate():
                return self._activate(step)
            case Multiply():
                return self._elementwise(step.out, step.op.a, step.op.b, _MULTIPLY)
            case Add():
                return self._elementwise(step.out, step.op.a, step.op.b, _ADD)
            case SoftCap():
                return self._elementwise(step.out, step.op.x, step.op.x, _SOFT_CAP, numbers=(step.op.cap,))
            case Mask():
                op = step.op
                return self._elementwise(
                    op.out, op.x, op.scores, _MASK, numbers=(op.threshold,), first_neuron=op.first
                )
            case Threshold():
                flags = self.inputs["thresholded"].bound()
                return self._elementwise(step.out, step.op.x, flags, _THRESHOLD, numbers=(step.op.threshold,))
            case Scale():
                return self._scale(step.op)
            case _:
                raise refused(step.op.out.name, type(step.op).__name__)

    def _norm(self, op: RMSNorm | UnitNorm | LayerNorm) -> Record:
        weight = None if isinstance(op, UnitNorm) or op.weight is None else self.weights.vector(op.weight)
        bias = self.weights.vector(op.bias) if isinstance(op, LayerNorm) and op.bias is not None else None
        width = op.x.width // op.n_head
        kind = _LAYER if isinstance(op, LayerNorm) else _RMS
        constants = [kind, weight is not None, bias is not None]
        stride = width if weight is not None and weight.size == 4 * op.x.width else 0
        push = (width, stride_of(op.x), stride_of(op.out), stride, op.eps)

        def record(to: Recorder, n: int) -> None:
            x = self.read(op.x, n)
            vectors = [vector.bound() if vector else x for vector in (weight, bias)]
            bindings = [x, *vectors, self.written(op.out, n)]
            to.add("norm", constants, bindings, push, (op.n_head, n, 1))

        return record

    def _moments(self, x: Value, out: Value, like: Value | None, kind: int, number: float) -> Record:
        """Return the record of a norm over parts of a row.

        like: a value as wide as a part, whose magnitude the parts get; None: the row is one part.
        """
        width = x.width if like is None else like.width
        push = width, stride_of(x), stride_of(out), 0 if like is None else stride_of(like), number

        def record(to: Recorder, n: int) -> None:
            read = self.read(x, n)
            bindings = [read, read if like is None else self.read(like, n), read, self.written(out, n)]
            to.add("norm", [kind, 0, 0], bindings, push, (x.width // width, n, 1))

        return record

    def _heads(self, op: Heads) -> Record:
        common = op.x if op.shared is None else op.shared
        push = (
            op.out.width, stride_of(op.x), stride_of(common), stride_of(op.out), op.x.width // op.n_head,
            op.first, op.count, op.out.width // op.n_head,
        )  # fmt: skip

        def record(to: Recorder, n: int) -> None:
            bindings = [self.read(op.x, n), self.read(common, n), self.written(op.out, n)]
            to.add("heads", [], bindings, push, by_values(op.out.width, n))

        return record

    def _head_dot(self, op: HeadDot) -> Record:
        weight = self.weights.vector(op.weight)
        dims = op.a.width // op.n_head, op.x.width // op.n_head
        push = *dims, *(stride_of(value) for value in (op.x, op.a, op.b, op.out))

        def record(to: Recorder, n: int) -> None:
            read = [self.read(value, n) for value in (op.x, op.a, op.b)]
            to.add("head_dot", [0], [*read, weight.bound(), self.written(op.out, n)], push, (op.n_head, n, 1))

        return record

    def _similarity_gate(self, op: SimilarityGate) -> Record:
        push = op.x.width, op.x.width, *(stride_of(value) for value in (op.x, op.a, op.b, op.out))

        def record(to: Recorder, n: int) -> None:
            x, a, b = (self.read(value, n) for value in (op.x, op.a, op.b))
            to.add("head_dot", [1], [x, a, b, x, self.written(op.out, n)], push, (op.n_streams, n, 1))

        return record

    def _add_streams(self, op: AddStreams) -> Record:
        x, weights, width = op.x or op.y, op.weights or op.y, op.out.width // op.n_streams
        push = (
            op.out.width, *(stride_of(value) for value in (x, op.y, weights, op.out)), width,
            op.y.width // width, op.first, op.weights is not None, op.x is not None, op.plus,
        )  # fmt: skip

        def record(to: Recorder, n: int) -> None:
            read = [self.read(value, n) for value in (x, op.y, weights)]
            to.add("streams", [], [*read, self.written(op.out, n)], push, by_values(op.out.width, n))

        return record

    def _linear(self, step: FusedStep) -> Record:
        op, out, residual, wanted = step.op, step.out, step.other, step.wanted
        assert isinstance(op, Linear)
        first_row, bias = op.first_row, self.weights.bias(op.bias)
        if step.is_hot:
            rows = first_row + self._hot(op)
            matrix = self.weights.chosen(op.weight, op.x.width, rows)
            bias = bias and self.weights.numbers_of(bias, (op.bias, first_row), rows)
            first_row = 0
        else:
            matrix = self.weights.rows(op.weight, op.x.width, first_row, op.out.width)
        mask = wanted if isinstance(wanted, Mask) else None
        firing = _value_of(wanted)
        strides = [stride_of(value) if value else 0 for value in (out, residual, firing)]

        def record(to: Recorder, n: int) -> None:
            x, x_stride = self._input(to, n, op.x, matrix)
            rows = [self.read(value, n) if value else None for value in (residual, firing)]
            ends = [x, self.written(out, n), bias.bound() if bias else None, *rows]
            self._product(to, n, matrix, ends, (x_stride, *strides), first_row, mask)

        return record

    def _hot(self, op: Primitive) -> np.ndarray:
        """Return the numbers of the hot neurons in an operation's layer."""
        assert self._shared is not None
        return self._shared.neurons[op.layer]

    def _input(self, to: Recorder, n: int, x: Value, matrix: VulkanMatrix) -> tuple[_core.VulkanBinding, int]:
        """Return n input rows of a product with a matrix, and their stride.

        For quantised weights the first product that reads the rows rounds them to eight bits; the stride then
        counts blocks.
        """
        if matrix.type in FLOATS:
            return self.read(x, n), stride_of(x)
        assert self._rounded is not None
        n_blocks = x.width // BLOCK
        size = n * n_blocks * ROUNDED_BYTES
        if to.rounded != x:
            to.rounded = x
            bindings = [self.read(x, n), self._rounded.bound(size, written=True)]
            groups = -(-n_blocks // _BLOCKS_OF_GROUP), n, 1
            to.add("quantize", [0], bindings, (n_blocks, stride_of(x)), groups)
        return self._rounded.bound(size), n_blocks

    def _product(
        self,
        to: Recorder,
        n: int,
        matrix: VulkanMatrix,
        ends: Sequence[_core.VulkanBinding | None],
        strides: Sequence[int],
        first_row: int = 0,
        mask: Mask | None = None,
    ) -> None:
        """Record the product of n rows and a matrix.

        ends: x, out, and bias, residual and the selection of rows, each of which may be None. The selection
        holds scores if `mask` is given. strides: of all ends except the bias.
        """
        x, out, *others = ends
        of_wanted = _FIRING if mask is None else _CHOSEN
        flags = sum(flag for flag, end in zip((_BIAS, _RESIDUAL, of_wanted), others, strict=True) if end)
        scores = (0, 0.0) if mask is None else (mask.first, mask.threshold)
        few = FEW if matrix.type in FLOATS else self._kernels.shapes.of(matrix.type).most_few
        for part in matrix.parts:
            codes = part.codes.bound()
            assert x is not None
            assert out is not None
            bindings = [codes, part.more.bound() if part.more else codes, x, out]
            bindings += [codes if end is None else end for end in others]
            firsts = first_row + part.first, part.first
            push = n, part.n_rows, matrix.n_cols, flags, *strides, 1, 0, *firsts, *scores
            what = bindings, push, part.nbytes
            if n <= few:
                tokens = 1 if n == 1 else TOKENS_OF_FEW
                self._few(to, matrix, part, tokens, -(-n // tokens), what)
            else:
                groups = -(-part.n_rows // _TILE), -(-n // _TILE), 1
                if matrix.type in FLOATS:
                    constants = [matrix.type, 1, 0, _is_whole(matrix)]
                    to.add("linear_many", constants, bindings, push, groups, part.nbytes)
                else:
                    to.add("rounded_many", [matrix.type, 1, 0], bindings, push, groups, part.nbytes)

    def _few(
        self, to: Recorder, matrix: VulkanMatrix, part: MatrixPart, tokens: int, n: int,
        what: tuple[list[_core.VulkanBinding], Sequence[float], int], experts: int = 0,
    ) -> None:  # fmt: skip
        """Record a product for n groups of `tokens` rows.

        what: its bindings, its push constants, and the bytes of its matrix.
        """
        bindings, push, n_bytes = what
        constants = [matrix.type, tokens, experts]
        if matrix.type in FLOATS:
            constants.append(_is_whole(matrix))
            to.add("linear_few", constants, bindings, push, (-(-part.n_rows // _TILE), n, 1), n_bytes)
            return
        shape = self._kernels.shapes.of(matrix.type).of(tokens, part.n_rows)
        groups = -(-part.n_rows // shape.rows), n, 1
        to.add("rounded_few", [*constants, *shape], bindings, push, groups, n_bytes)

    def _low_rank(self, op: LowRank) -> Record:
        """Return the record of all adapters at `op`: for each, add (x · a) · scale of the token · b to y."""
        adapters = self._adapters
        assert adapters is not None
        pairs, of_tail = adapters.pairs_of(op), self.is_of_tail(op.out)
        size = self._bytes_of_low_rank(op) // 2
        reduced, scaled = self.scratch.part(0, size), self.scratch.part(size, size)
        in_stride, y_stride, out_stride = (stride_of(value) for value in (op.x, op.y, op.out))

        def record(to: Recorder, n: int) -> None:
            before, before_stride = self.read(op.y, n), y_stride
            for column, factor, a, b in pairs:
                rank, stride = a.n_rows, -(-a.n_rows // 4) * 4
                n_bytes = 4 * n * stride
                ends = [self.read(op.x, n), reduced.bound(n_bytes, written=True), None, None, None]
                self._product(to, n, a, ends, (in_stride, stride, 0, 0))
                scales = adapters.scales(column, of_tail=of_tail).bound(4 * n)
                push = rank, stride, 1, stride, 1, 0, factor, 0.0, 0.0, 0.0
                bindings = [reduced.bound(n_bytes), scales, scaled.bound(n_bytes, written=True)]
                to.add("elementwise", [_ADAPTED, 0], bindings, push, by_values(rank, n))
                ends = [scaled.bound(n_bytes), self.written(op.out, n), None, before, None]
                self._product(to, n, b, ends, (stride, out_stride, before_stride, 0))
                before, before_stride = self.read(op.out, n), out_stride

        return record

    def _bytes_of_low_rank(self, op: Primitive | SplitOperation) -> int:
        """Return the bytes for x · a, and for its product with the scales."""
        if not isinstance(op, LowRank) or self._adapters is None:
            return 0
        n_rows = OUTPUT_ROWS if self.is_of_tail(op.out) else self.max_batch
        return 2 * aligned(4 * n_rows * (self._adapters.rank(op) + 3))

    def _transposed(self, step: FusedStep) -> Record:
        op, out, residual = step.op, step.out, step.other
        assert isinstance(op, TransposedLinear | TransposedHeads)
        n_head, bias_name = (op.n_head, None) if isinstance(op, TransposedHeads) else (1, op.bias)
        width = out.width // n_head
        chosen = self._hot(op) if step.is_hot else None
        tiles = None
        if isinstance(op, TransposedLinear) and op.scales is not None:
            matrix = self.weights.planes(op.weight, op.scales, width, chosen)
            if chosen is not None:
                tiles = self.weights.made((op.weight, "tiles"), lambda: chosen // _TILE)
        elif chosen is not None:
            matrix = self.weights.chosen(op.weight, width, chosen)
        else:
            matrix = self.weights.rows(op.weight, width, 0, op.x.width * n_head)
        part, bias = _only(op, matrix), self.weights.bias(bias_name)
        flags = (_BIAS if bias else 0) | (_RESIDUAL if residual else 0)
        strides = [stride_of(value) if value else 0 for value in (op.x, out, residual)]
        push = op.x.width, width, flags, *strides, op.x.width, 0, 0

        def record(to: Recorder, n: int) -> None:
            codes = part.codes.bound()
            bindings = [
                codes, part.more.bound() if part.more else codes, self.read(op.x, n), self.written(out, n),
                bias.bound() if bias else codes, self.read(residual, n) if residual else codes,
                tiles.bound() if tiles else codes,
            ]  # fmt: skip
            to.add(
                "transposed",
                [matrix.type, 0, tiles is not None],
                bindings,
                push,
                (-(-width // _TILE), n, n_head),
                part.nbytes,
            )

        return record

    def _transposed_experts(self, op: ExpertSum, to_parts: BufferRange) -> Record:
        """Return the record of products of each token's neurons with its experts' rows, one per expert."""
        n_rows, width = op.x.width // op.n_used, op.out.width
        matrix = self.weights.experts(op.weights, op.n_expert, width, 0, n_rows)
        part, bias = _only(op, matrix), self.weights.bias(op.bias)
        push = (
            n_rows, width, _BIAS if bias else 0, stride_of(op.x), op.n_used * width, 0,
            -(-n_rows // _TILE) * _TILE, n_rows, stride_of(op.route),
        )  # fmt: skip

        def record(to: Recorder, n: int) -> None:
            codes = part.codes.bound()
            bindings = [
                codes, part.more.bound() if part.more else codes, self.read(op.x, n),
                to_parts.bound(4 * n * op.n_used * width, written=True), bias.bound() if bias else codes,
                codes, self.read(op.route, n),
            ]  # fmt: skip
            to.add("transposed", [matrix.type, 1, 0], bindings, push, (-(-width // _TILE), n, op.n_used))

        return record

    def _expert_linear(self, op: ExpertLinear) -> Record:
        return self._of_experts(op, op.of_parts, op.first_row, op.n_rows, None)

    def _expert_sum(self, op: ExpertSum) -> Record:
        parts, width = self.scratch, op.n_used * op.out.width
        if op.neuron_major:
            multiplied = self._transposed_experts(op, parts)
        else:
            multiplied = self._of_experts(op, True, 0, op.out.width, parts)
        push = op.out.width, op.n_used, width, stride_of(op.route), stride_of(op.out)

        def record(to: Recorder, n: int) -> None:
            multiplied(to, n)
            own = parts.bound(4 * n * width)
            of_cpu = None if self._shared is None else self._shared.gather_experts(to, op.layer, n)
            bindings = [own, self.read(op.route, n), self.written(op.out, n), of_cpu or own]
            to.add("expert_sum", [of_cpu is not None], bindings, push, by_values(op.out.width, n))

        return record

    def _of_experts(
        self,
        op: ExpertLinear | ExpertSum,
        of_parts: bool,
        first_row: int,
        n_rows: int,
        to_parts: BufferRange | None,
    ) -> Record:
        """Return the record of products of each token with the matrices of its experts.

        to_parts: the memory for the results; None: op.out.
        """
        n_cols = op.x.width // op.n_used if of_parts else op.x.width
        cache = None if self._shared is None else self._shared.experts
        if cache is not None and op.layer in cache:
            (matrix, bias), bias_rows, first_bias = cache.slots_of(op.layer, op.out), n_rows, 0
        else:
            matrix = self.weights.experts(op.weights, op.n_expert, n_cols, first_row, n_rows)
            bias = self.weights.bias(op.bias)
            bias_rows, first_bias = 0 if bias is None else bias.size // 4 // op.n_expert, first_row
        width = op.n_used * n_rows
        stride = stride_of(op.out) if to_parts is None else width
        strides = stride, n_rows, stride_of(op.route)

        def record(to: Recorder, n: int) -> None:
            x, x_stride = self._input(to, n, op.x, matrix)
            out = self.written(op.out, n) if to_parts is None else to_parts.bound(4 * n * width, written=True)
            for part in matrix.parts:
                codes = part.codes.bound()
                bindings = [
                    codes, part.more.bound() if part.more else codes, x, out,
                    bias.bound() if bias else codes, codes, self.read(op.route, n),
                ]  # fmt: skip
                push = (
                    n, part.n_rows, n_cols, _BIAS if bias else 0, x_stride, *strides, op.n_used, bias_rows,
                    first_bias + part.first, part.first, 0, 0.0,
                )  # fmt: skip
                self._few(to, matrix, part, 1, n * op.n_used, (bindings, push, 0), 2 if of_parts else 1)

        return record

    def _route(self, op: Route) -> Record:
        n_expert = op.x.width
        bias = self.weights.bias(op.bias)
        scales = self.weights.bias(op.scales)
        flags = _SCORINGS[op.scoring] | 4 * op.normalised | (8 if bias else 0) | (16 if scales else 0)
        push = (
            n_expert, stride_of(op.x), stride_of(op.out), op.n_used, flags, op.n_groups, op.n_groups_used,
            op.group_best, op.scale,
        )  # fmt: skip

        def record(to: Recorder, n: int) -> None:
            x = self.read(op.x, n)
            vectors = [vector.bound() if vector else x for vector in (bias, scales)]
            to.add("route", [], [x, *vectors, self.written(op.out, n)], push, (n, 1, 1))

        return record

    def _rotate(self, op: Rotate) -> Record:
        rope = op.rope
        push = (
            op.x.width, stride_of(op.x), stride_of(op.out), op.head_dim, op.first, rope.n_rot,
            int(rope.kind == "neox"),
        )  # fmt: skip

        def record(to: Recorder, n: int) -> None:
            angles = self.inputs[rope].bound(4 * n * rope.n_rot)
            bindings = [self.read(op.x, n), angles, self.written(op.out, n)]
            to.add("rotate", [], bindings, push, by_values(op.x.width, n))

        return record

    def _attention(self, op: Attention) -> Record:
        cache, code = self._cache[op.cache_layer], KV_CODES[self._kv_type]
        sinks = self.weights.bias(op.sinks)
        slopes = None if op.slopes is None else self.weights.made(op.slopes, lambda: np.array(op.slopes))
        names = "positions", "tables"
        positions, tables = (self.inputs[name].bound() for name in names)
        if op.causal:
            visible = op.window - 1 if op.window else _ALL, 0, op.first_seen
        else:
            visible = *((op.window // 2,) * 2 if op.window else (_ALL, _ALL)), op.first_seen
        constants = [code, op.head_dim, op.head_dim_v, sinks is not None]
        others = slopes is not None, op.softcap > 0
        push = (
            op.n_head, op.n_head_kv, stride_of(op.q), stride_of(op.out), self._n_kv_blocks, self.max_batch,
            *visible, self._n_splits, op.scale, op.softcap,
        )  # fmt: skip
        stored = (
            (op.k, op.head_dim, cache.keys, cache.key_scales),
            (op.v, op.head_dim_v, cache.values, cache.value_scales),
        )

        def record(to: Recorder, n: int) -> None:
            for i, (value, dim, rows, scales) in enumerate(stored if op.source is None else ()):
                bindings = [
                    self.read(value, n), self.inputs["slots"].bound(4 * n), rows.bound(written=True),
                    scales.bound(written=True),
                ]  # fmt: skip
                groups = by_values(n * op.n_head_kv * -(-dim // 32), 1)
                to.add("store", [code], bindings, (n, stride_of(value), op.n_head_kv, dim, i), groups)
            read = [
                self.read(op.q, n), cache.keys.bound(), cache.values.bound(), cache.key_scales.bound(),
                cache.value_scales.bound(), positions, tables, sinks.bound() if sinks else positions,
            ]  # fmt: skip
            if self._parts is None or n > FEW:
                bindings = [*read, self.written(op.out, n), slopes.bound() if slopes else positions]
                groups = op.n_head, n, 1
                to.add("attention", [*constants, 0, *others], bindings, push, groups)
                return
            size = 4 * n * op.n_head * self._n_splits * (op.head_dim_v + 2)
            parts = self._parts.bound(size, written=True)
            bindings = [*read, parts, slopes.bound() if slopes else positions]
            groups_of_step = self.inputs.groups_of("heads", op.n_head)
            to.add_indirect("attention", [*constants, 1, *others], bindings, push, groups_of_step)
            bindings = [
                self._parts.bound(size), positions, sinks.bound() if sinks else positions,
                self.written(op.out, n),
            ]  # fmt: skip
            joined = op.n_head, stride_of(op.out), self.max_batch, *visible, self._n_splits
            to.add("combine", [op.head_dim_v, sinks is not None], bindings, joined, (op.n_head, n, 1))

        return record

    def _select(self, op: SelectOutputs) -> Record:
        push = op.x.width, stride_of(op.x), stride_of(op.out)

        def record(to: Recorder, n: int) -> None:
            bindings = [
                self.read(op.x, self.max_batch), self.inputs["outputs"].bound(4 * n), self.written(op.out, n),
            ]  # fmt: skip
            to.add("select", [], bindings, push, by_values(op.x.width, n))

        return record

    def _activate(self, step: FusedStep) -> Record:
        op = step.op
        assert isinstance(op, Activate)
        kind, other = (_ACTIVATE, op.x) if step.other is None else (_GATED, step.other)
        f = op.xielu
        numbers = (op.threshold, 0.0, 0.0, 0.0) if f is None else (f.eps, f.positive, f.negative, f.linear)
        return self._elementwise(step.out, op.x, other, kind, ACTIVATIONS[op.kind], numbers=numbers)

    def _scale(self, op: Scale) -> Record:
        if op.weight is None:
            return self._elementwise(op.out, op.x, op.x, _SCALE, numbers=(op.factor,))
        # Numbers after the first are copied, since a binding begins at a multiple of ALIGNMENT.
        own = (op.first_weight, op.x.width) if op.first_weight else ()
        weight = self.weights.vector(op.weight, *own)
        return self._elementwise(op.out, op.x, weight.bound(), _WEIGHTED, numbers=(op.factor,))

    def _elementwise(
        self,
        out: Value,
        a: Value,
        b: Value | _core.VulkanBinding,
        kind: int,
        activation: int = 0,
        *,
        numbers: tuple[float, ...] = (),
        first_neuron: int = 0,
    ) -> Record:
        of_values = isinstance(b, Value)
        stride, width = (stride_of(b), b.width) if isinstance(b, Value) else (0, out.width)
        push = (
            out.width,
            stride_of(a),
            stride,
            stride_of(out),
            width,
            first_neuron,
            *numbers,
            *(0.0,) * (4 - len(numbers)),
        )

        def record(to: Recorder, n: int) -> None:
            second = self.read(b, n) if isinstance(b, Value) else b
            bindings = [self.read(a, n), second, self.written(out, n)]
            to.add("elementwise", [kind, activation], bindings, push, by_values(out.width, n))

        assert of_values or kind in (_WEIGHTED, _THRESHOLD)
        return record


_KEPT = 64  # most recordings to keep


def missing_kernel(op: Primitive) -> str | None:
    """Describe the part of an operation that no kernel computes; None if kernels compute all of it."""
    match op:
        case Activate() if op.kind not in ACTIVATIONS:
            return f"the activation {op.kind}"
        case Attention() if op.blocks is not None:
            return "attention to blocks"
        case Attention() if op.groups == "only":
            return "attention within windows"
        case SelectOutputs() if op.n > 1:
            return "joined tokens"
        case Attention() if op.chosen is not None:
            return "attention to the keys that an indexer chose"
        case Rotate() if op.rope.every > 1:
            return "the rotation of blocks"
        case Route() if op.table is not None or op.scoring not in _SCORINGS:
            return "routes by a table, and scores that are roots"
        case ExpertSum(neuron_major=False) | ExpertLinear(of_parts=True) if op.x.width // op.n_used % 4:
            return f"experts of {op.x.width // op.n_used} neurons (no multiple of 4)"
        case Route() if op.x.width > _MOST_EXPERTS or max(op.n_used, op.n_groups) > _LANES_OF_ROUTE:
            return f"routes of more than {_MOST_EXPERTS} experts, {_LANES_OF_ROUTE} of a token"
    return None if isinstance(op, CAPABILITIES.operations) else type(op).__name__


def steps_of(
    graph: Graph, taps: frozenset[str] = frozenset(), shared: SharedLayers | None = None
) -> tuple[list[FusedStep], int]:
    """Return the steps in order, and the index of the first step of the tail, for the rows with logits."""
    steps = list(_fused(graph, taps, shared))
    tail = (i for i, step in enumerate(steps) if isinstance(step.op, SelectOutputs))
    return steps, next(tail, len(steps))


def n_splits(n_kv_blocks: int) -> int:
    """Return the number of running softmaxes for the longest context."""
    return -(-n_kv_blocks * BLOCK_SIZE // SPLIT)


def places_of(
    steps: list[FusedStep], first_of_tail: int, kept: set[int], result: Value, max_batch: int
) -> tuple[dict[int, tuple[int, int]], int]:
    """Return a place (offset, bytes) in one buffer for each value's id, and the bytes of that buffer.

    Values that are alive at the same time do not overlap. kept: ids of values that stay alive. A result
    outside a tail has no place here: it is written to memory that the host reads.
    """
    of_tail = {step.out.id for step in steps[first_of_tail:]}
    last: dict[int, int] = {}
    for i, step in enumerate(steps):
        for value in (*_read(step), step.out):
            last[value.id] = i
    for id in last:
        if id in kept or id == result.id or (id not in of_tail and last[id] >= first_of_tail):
            last[id] = len(steps)  # the tail may run several times, once per OUTPUT_ROWS rows
    alive: list[tuple[int, int, int]] = []  # begin, end, id
    places: dict[int, tuple[int, int]] = {}
    size = 0
    for i, step in enumerate(steps):
        alive = [one for one in alive if last[one[2]] >= i]
        is_on_host = step.out == result and result.id not in of_tail
        if is_on_host or isinstance(step.op, (*ON_HOST, Submit)):
            continue
        n_rows = OUTPUT_ROWS if step.out.id in of_tail else max_batch
        n_bytes = aligned(4 * n_rows * stride_of(step.out))
        at = 0
        for begin, end, _ in sorted(alive):
            if at + n_bytes <= begin:
                break
            at = max(at, end)
        alive.append((at, at + n_bytes, step.out.id))
        places[step.out.id] = at, n_bytes
        size = max(size, at + n_bytes)
    return places, size


def part_bytes(steps: list[FusedStep], max_batch: int, n_kv_blocks: int) -> tuple[int, int]:
    """Return two byte counts of scratch memory.

    The first is for the partial results of the largest split attention; 0 if a context is one split. The
    second is for one operation's intermediates: expert results before their sum, or the inputs of a scan.
    """
    attention = [step.op for step in steps if isinstance(step.op, Attention)]
    largest = max((op.n_head * (op.head_dim_v + 2) for op in attention), default=0)
    splits = n_splits(n_kv_blocks)
    of_splits = 4 * min(FEW, max_batch) * largest * splits if splits > 1 else 0
    experts = (step.op.n_used * step.out.width for step in steps if isinstance(step.op, ExpertSum))
    of_scans = (scratch_bytes(step.op, max_batch) for step in steps)
    return of_splits, max(4 * max_batch * max(experts, default=0), *of_scans, 4)


def rounded_input(op: Primitive | SplitOperation, tensors: Mapping[str, TensorInfo]) -> Value | None:
    """Return the input of a product with quantised rows, which reads it rounded to eight bits.

    Return None for other operations.
    """
    match op:
        case Linear() | ExpertLinear() | ExpertSum(neuron_major=False):
            return None if tensors[op.matrices[0]].type in FLOATS else op.x
    return None


def rounded_bytes(
    steps: list[FusedStep], first_of_tail: int, max_batch: int, tensors: Mapping[str, TensorInfo]
) -> int:
    """Return the bytes of the largest rounded input; 0 without rounded inputs."""
    sizes = [
        (OUTPUT_ROWS if i >= first_of_tail else max_batch) * x.width
        for i, step in enumerate(steps) if (x := rounded_input(step.op, tensors)) is not None
    ]  # fmt: skip
    return max(sizes, default=0) // BLOCK * ROUNDED_BYTES


def _is_whole(matrix: VulkanMatrix) -> bool:
    """Return whether each row is a whole number of blocks."""
    return matrix.n_cols % BLOCK == 0


def _only(op: Primitive, matrix: VulkanMatrix) -> MatrixPart:
    """Return the only part of an input-major matrix, whose sums run over all rows.

    Raises UnsupportedModelError if the device cannot bind the matrix as a whole.
    """
    if len(matrix.parts) > 1:
        raise refused(op.out.name, "a matrix by inputs that is more than the device binds at a time")
    return matrix.parts[0]


def _read(step: FusedStep) -> Iterator[Value]:
    yield from step.op.inputs
    yield from (value for value in (step.other, _value_of(step.wanted)) if value is not None)


def _value_of(wanted: _Wanted) -> Value | None:
    return wanted.scores if isinstance(wanted, Mask) else wanted


def _with_hot(
    op: Op, taps: frozenset[str], shared: SharedLayers | None, ids: Iterator[int]
) -> Iterator[_Opened]:
    """Yield the parts of an operation as _opened does, and whether each is a product of hot neurons.

    A split FFN yields only its device part. ids: numbers for new values.
    """
    if shared is None or not isinstance(op, Ffn) or op not in shared:
        yield from ((part, wanted, False) for part, wanted in _opened(op, taps))
        return
    if op.route is not None:
        yield from ((part, None, False) for part in of_slots(op, ids))
        return
    hot = hot_part(op, len(shared.neurons[op.layer]), ids)
    for part, wanted in _opened(hot, taps):
        if part is hot.decides:
            yield from ((added, None, False) for added in operations_before(op, hot))
        yield part, wanted, isinstance(part, Linear | TransposedLinear)
    yield Gather(op.down.out, hot.down.out, layer=op.layer, part=op.part), None, False


def _opened(op: Op, taps: frozenset[str]) -> Iterator[tuple[Primitive, _Wanted]]:
    """Yield an operation, or the operations of an FFN, each with its selection of rows.

    `up` follows the activated gate, which selects its rows. A predictor selects rows of the first product.
    """
    if not isinstance(op, Ffn):
        yield op, None
        return
    parts, wanted = list(op.primitives), dict[int, _Wanted]()
    is_whole = op.top_k is not None or bool(op.low_ranks) or any(part.out.name in taps for part in parts)
    if not is_whole and op.route is None and op.mask is not None:
        wanted[op.decides.out.id] = op.mask
    fires = op.fires_exactly and op.up_act is None and op.product is not None
    if fires and not is_whole and isinstance(op.up, Linear) and op.gate_threshold is None:
        parts.remove(op.up)
        parts.insert(parts.index(op.gate_act) + 1, op.up)
        wanted[op.up.out.id] = op.fires
    yield from ((part, wanted.get(part.out.id)) for part in parts)


def _gathered_late(ops: list[_Opened], layers: Collection[int]) -> list[_Opened]:
    """Move sums that wait for the CPU's experts behind independent operations, such as the shared expert."""
    for one in [one for one in ops if isinstance(one[0], ExpertSum) and one[0].layer in layers]:
        at, op = ops.index(one), one[0]
        later = (
            i for i in range(at + 1, len(ops)) if op.out in ops[i][0].inputs or ops[i][0].layer != op.layer
        )
        to = next(later, at + 1)
        ops = [*ops[:at], *ops[at + 1 : to], one, *ops[to:]]
    return ops


def _fused(graph: Graph, taps: frozenset[str], shared: SharedLayers | None) -> Iterator[FusedStep]:
    """Yield the operations in order, with fused pairs.

    A pair is a matrix product and a sum, or an activation and a multiplication. It is fused only if nothing
    else reads the value between them.
    """
    ids = count(len(graph.values))
    ops = [one for op in graph.ops for one in _with_hot(op, taps, shared, ids)]
    if shared is not None and shared.experts is not None:
        ops = _gathered_late(ops, shared.experts.layers)
    readers = Counter(value.id for op, wanted, _ in ops for value in (*op.inputs, _value_of(wanted)) if value)
    at = 0
    while at < len(ops):
        op, wanted, is_hot = ops[at]
        behind = ops[at + 1][0] if at + 1 < len(ops) else None
        at += 1
        is_private = readers[op.out.id] == 1 and op.out.name not in taps and op.out != graph.result
        fits = (isinstance(op, Linear | TransposedLinear) and isinstance(behind, Add)) or (
            isinstance(op, Activate) and isinstance(behind, Multiply)
        )
        step = FusedStep(op, op.out, None, wanted, is_hot)
        if is_private and fits and isinstance(behind, Add | Multiply) and op.out in (behind.a, behind.b):
            other = behind.b if behind.a == op.out else behind.a
            if behind.a != behind.b and other.width == op.out.width:
                step = FusedStep(op, behind.out, other, wanted, is_hot)
                at += 1
        yield step
