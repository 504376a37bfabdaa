"""Recording of a graph's operations (steps.py) as dispatches of kernels. A step submits the recordings.

An operation, a tensor type or a setting without a kernel raises an error: nothing is computed elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hotset import _core
from hotset.backends.base import N_CANDIDATES
from hotset.backends.vulkan import candidates
from hotset.backends.vulkan.adapters import DeviceAdapters
from hotset.backends.vulkan.inputs import OUTPUT_ROWS, VulkanInputs
from hotset.backends.vulkan.kernels import Record, Recorder, VulkanKernels, by_values, stride_of
from hotset.backends.vulkan.memory import BufferRange, aligned
from hotset.backends.vulkan.plugin import CAPABILITIES, refused
from hotset.backends.vulkan.recurrent import scan, short_conv
from hotset.backends.vulkan.shapes import GATED, TOKENS_OF_FEW
from hotset.backends.vulkan.split import SharedLayers, SplitOperation
from hotset.backends.vulkan.steps import (
    BLOCK,
    FEW,
    ON_HOST,
    TILE,
    FusedStep,
    forms_of,
    n_splits,
    n_tiles,
    part_bytes,
    places_of,
    rounded_bytes,
    steps_of,
)
from hotset.backends.vulkan.weights import FLOATS, JoinedProducts, MatrixPart, VulkanMatrix, VulkanWeights
from hotset.load_parameters import KVType
from hotset.model import operations as ops
from hotset.model.graph import Graph
from hotset.model.operations import Primitive, Value

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
_NARROW, _LANES, _WIDE_LANES = 512, 64, 256  # a norm of more than 512 values has the wide workgroup
_AS_FLOATS, _ROUNDED = 1, 2  # forms of a kernel's result
_ONE, _JOINED, _NEURONS, _ROUNDED_NEURONS = range(4)  # results of csrc/vulkan/shaders/product.glsl
_ALONE = 0, 0, 0, 0, 0, 0  # push constants of a product without joined ones
_ALL = 0xFFFFFFFF  # a token sees all positions
_BIAS, _RESIDUAL, _FIRING, _CHOSEN = 1, 2, 4, 8
_SCORINGS: Mapping[ops.Scoring, int] = {"softmax": 0, "sigmoid": 1, "softmax_chosen": 2}
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
        tensors = self.weights.tensors
        steps, first_of_tail = steps_of(graph, tensors, taps, parts.shared)
        self._of_tail = {value.id for step in steps[first_of_tail:] for value in step.outs}
        self.tapped = [value for value in graph.values if value.name in taps]
        kept = {value.id for value in self.tapped}
        self._forms = forms_of(steps, {*kept, graph.result.id}, tensors)
        self._pieces: dict[tuple[int, bool], BufferRange] = {}  # as places_of
        self._allocate(steps, first_of_tail, kept)
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
                self._copy_results(recorder, part, n)
            recorder.program.finish()
            self._recorded[key] = recorder
        return self._recorded[key]

    def record_anew(self) -> None:
        """Discard all recordings, so that they are recorded again when needed."""
        self._recorded.clear()

    def _copy_results(self, to: Recorder, part: str, n: int) -> None:
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
        data = self._on_host.buffer.read(self._on_host.offset, n * candidates.CANDIDATE_BYTES)
        return candidates.candidates_of(data.view(np.uint32).reshape(n, N_CANDIDATES, 2))

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
        result, device = self.graph.result, self._kernels.device
        places, size = places_of(
            steps, first_of_tail, result, self.max_batch, self._forms, self.weights.tensors, kept
        )
        workspace = device.allocate(max(size, aligned(1)), "device")
        self._pieces = {key: BufferRange(workspace, *place) for key, place in places.items()}
        n_rows = OUTPUT_ROWS if result.id in self._of_tail else self.max_batch
        n_logits = 4 * n_rows * stride_of(result)
        logits = device.allocate(n_logits, "from_device")
        self._on_host = BufferRange(logits, 0, n_logits)
        # Rows of a tail are copied there later.
        self._pieces.setdefault((result.id, False), self._on_host)
        of_splits, of_counts, of_operations, of_groups = part_bytes(steps, self.max_batch, self._n_kv_blocks)
        if self._shared is not None and self._shared.experts is not None:
            of_groups += 2 * aligned(4 * max(group.n_slots for group in self._shared.experts.groups))
        of_candidates = candidates.scratch_bytes(result.width, n_rows) if result.id in self._of_tail else 0
        n_bytes = max(of_operations, of_candidates, *(self._bytes_of_low_rank(step.op) for step in steps))
        self._parts = BufferRange(device.allocate(of_splits, "device"), 0, of_splits) if of_splits else None
        self.scratch = BufferRange(device.allocate(n_bytes, "device"), 0, n_bytes)
        self._counts = BufferRange(device.allocate(max(of_counts, 4), "device"), 0, max(of_counts, 4))
        self._counts.buffer.clear()
        self._groups = BufferRange(device.allocate(of_groups, "device"), 0, of_groups) if of_groups else None
        scratch = self._parts, self.scratch, self._counts, self._groups
        parts = [one.buffer for one in scratch if one is not None]
        self.nbytes = sum(buffer.reserved for buffer in (workspace, logits, *parts))

    @property
    def _n_splits(self) -> int:
        """Return the splits of the longest context."""
        return n_splits(self._n_kv_blocks)

    def _piece(self, value: Value) -> BufferRange:
        key = value.id, False
        return self._pieces[key] if key in self._pieces else self.inputs[value]

    def read(self, value: Value, n: int) -> _core.VulkanBinding:
        """Return a binding of n rows of a value for a dispatch that reads them."""
        return self._piece(value).bound(4 * n * stride_of(value))

    def written(self, value: Value, n: int) -> _core.VulkanBinding:
        """Return a binding of n rows of a value for a dispatch that writes them."""
        return self._piece(value).bound(4 * n * stride_of(value), written=True)

    def _rounded(self, value: Value, n: int, *, written: bool = False) -> _core.VulkanBinding:
        """Return a binding of n rounded rows of a value."""
        return self._pieces[value.id, True].bound(rounded_bytes(value, n), written=written)

    def _results(self, value: Value, n: int) -> tuple[int, _core.VulkanBinding, _core.VulkanBinding]:
        """Return the forms in which a kernel writes a value, and bindings of its floats and rounded rows.

        A form that is not written is bound to the memory of the other.
        """
        form = self._forms[value.id]
        forms = _AS_FLOATS * form.floats + _ROUNDED * form.by_maker
        rounded = self._rounded(value, n, written=True) if form.by_maker else self.written(value, n)
        return forms, self.written(value, n) if form.floats else rounded, rounded

    # ---- operations ----

    def _lower(self, step: FusedStep) -> Record:  # noqa: C901 - a case for each operation
        if isinstance(step.op, SplitOperation):
            assert self._shared is not None
            return self._shared.lower(step.op, self, step.out, step.other)
        for op in (step.op, *(one.op for one in step.more)):
            if not isinstance(op, SplitOperation) and (what := missing_kernel(op)) is not None:
                raise refused(op.out.name, what)
        match step.op:
            case ops.Linear() if step.products:
                return self._products(step)
            case ops.RMSNorm() | ops.UnitNorm() | ops.LayerNorm():
                return self._norm(step.op)
            case ops.GaussianTopK():
                return self._moments(step.op.x, step.out, None, _TOP_K, step.op.multiplier)
            case ops.MatchMagnitude():
                return self._moments(step.op.x, step.out, step.op.like, _MATCH, step.op.least)
            case ops.Linear():
                return self._linear(step)
            case ops.TransposedLinear():
                return self._transposed(step)
            case ops.TransposedHeads():
                return self._transposed(step)
            case ops.Heads():
                return self._heads(step.op)
            case ops.HeadDot():
                return self._head_dot(step.op)
            case ops.SimilarityGate():
                return self._similarity_gate(step.op)
            case ops.AddStreams():
                return self._add_streams(step.op)
            case ops.ShortConv():
                return short_conv(self, step.op)
            case ops.DeltaNet() | ops.SelectiveScan() | ops.ChannelScan() | ops.Wkv():
                return scan(self, step.op)
            case ops.ExpertLinear():
                return self._expert_linear(step.op)
            case ops.ExpertSum():
                return self._expert_sum(step.op)
            case ops.Route():
                return self._route(step.op)
            case ops.Rotate():
                return self._rotate(step.op)
            case ops.Attention():
                return self._attention(step)
            case ops.LowRank():
                return self._low_rank(step.op)
            case ops.SelectOutputs():
                return self._select(step.op)
            case ops.Activate():
                return self._activate(step)
            case ops.Multiply():
                return self._elementwise(step.out, step.op.a, step.op.b, _MULTIPLY)
            case ops.Add():
                return self._elementwise(step.out, step.op.a, step.op.b, _ADD)
            case ops.SoftCap():
                return self._elementwise(step.out, step.op.x, step.op.x, _SOFT_CAP, numbers=(step.op.cap,))
            case ops.Mask():
                op = step.op
                return self._elementwise(
                    op.out, op.x, op.scores, _MASK, numbers=(op.threshold,), first_neuron=op.first
                )
            case ops.Threshold():
                flags = self.inputs["thresholded"].bound()
                return self._elementwise(step.out, step.op.x, flags, _THRESHOLD, numbers=(step.op.threshold,))
            case ops.Scale():
                return self._scale(step.op)
            case _:
                raise refused(step.op.out.name, type(step.op).__name__)

    def _norm(self, op: ops.RMSNorm | ops.UnitNorm | ops.LayerNorm) -> Record:
        weight = None if isinstance(op, ops.UnitNorm) or op.weight is None else self.weights.vector(op.weight)
        bias = self.weights.vector(op.bias) if isinstance(op, ops.LayerNorm) and op.bias is not None else None
        width = op.x.width // op.n_head
        kind = _LAYER if isinstance(op, ops.LayerNorm) else _RMS
        stride = width if weight is not None and weight.size == 4 * op.x.width else 0
        push = (width, stride_of(op.x), stride_of(op.out), stride, op.eps)

        def record(to: Recorder, n: int) -> None:
            x = self.read(op.x, n)
            vectors = [vector.bound() if vector else x for vector in (weight, bias)]
            forms, *results = self._results(op.out, n)
            constants = [kind, weight is not None, bias is not None, _lanes_of(width), forms]
            to.add("norm", constants, [x, *vectors, *results], push, (op.n_head, n, 1))

        return record

    def _moments(self, x: Value, out: Value, like: Value | None, kind: int, number: float) -> Record:
        """Return the record of a norm over parts of a row.

        like: a value as wide as a part, whose magnitude the parts get; None: the row is one part.
        """
        width = x.width if like is None else like.width
        push = width, stride_of(x), stride_of(out), 0 if like is None else stride_of(like), number

        def record(to: Recorder, n: int) -> None:
            read = self.read(x, n)
            others, to_out = read if like is None else self.read(like, n), self.written(out, n)
            bindings = [read, others, read, to_out, to_out]
            to.add("norm", [kind, 0, 0, _lanes_of(width)], bindings, push, (x.width // width, n, 1))

        return record

    def _heads(self, op: ops.Heads) -> Record:
        common = op.x if op.shared is None else op.shared
        push = (
            op.out.width, stride_of(op.x), stride_of(common), stride_of(op.out), op.x.width // op.n_head,
            op.first, op.count, op.out.width // op.n_head,
        )  # fmt: skip

        def record(to: Recorder, n: int) -> None:
            bindings = [self.read(op.x, n), self.read(common, n), self.written(op.out, n)]
            to.add("heads", [], bindings, push, by_values(op.out.width, n))

        return record

    def _head_dot(self, op: ops.HeadDot) -> Record:
        weight = self.weights.vector(op.weight)
        dims = op.a.width // op.n_head, op.x.width // op.n_head
        push = *dims, *(stride_of(value) for value in (op.x, op.a, op.b, op.out))

        def record(to: Recorder, n: int) -> None:
            read = [self.read(value, n) for value in (op.x, op.a, op.b)]
            to.add("head_dot", [0], [*read, weight.bound(), self.written(op.out, n)], push, (op.n_head, n, 1))

        return record

    def _similarity_gate(self, op: ops.SimilarityGate) -> Record:
        push = op.x.width, op.x.width, *(stride_of(value) for value in (op.x, op.a, op.b, op.out))

        def record(to: Recorder, n: int) -> None:
            x, a, b = (self.read(value, n) for value in (op.x, op.a, op.b))
            to.add("head_dot", [1], [x, a, b, x, self.written(op.out, n)], push, (op.n_streams, n, 1))

        return record

    def _add_streams(self, op: ops.AddStreams) -> Record:
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
        assert isinstance(op, ops.Linear)
        if step.is_hot:
            rows = op.first_row + self._hot(op)
            matrix, first_bias = self.weights.chosen(op.weight, op.x.width, rows), 0
            bias = self.weights.bias(op.bias)
            bias = bias and self.weights.numbers_of(bias, (op.bias, op.first_row), rows)
        else:
            matrix, bias, first_bias = self.weights.of_product(op)
        mask = wanted if isinstance(wanted, ops.Mask) else None
        firing = wanted.scores if isinstance(wanted, ops.Mask) else wanted
        strides = [stride_of(value) if value else 0 for value in (out, residual, firing)]

        def record(to: Recorder, n: int) -> None:
            x, x_stride = self._input(to, n, op.x, matrix)
            rows = [self.read(value, n) if value else None for value in (residual, firing)]
            ends = [x, self.written(out, n), bias.bound() if bias else None, *rows]
            self._product(to, n, matrix, ends, (x_stride, *strides), first_bias, mask)

        return record

    def _products(self, step: FusedStep) -> Record:
        """Return the record of several products of one input, which share a dispatch for few tokens."""
        joined = JoinedProducts(step.products, step.is_gated)
        apart = [self._neurons_of(step)] if step.is_gated else []
        apart = [*(self._linear(FusedStep(op, op.out)) for op in step.products), *apart]
        if not self.weights.has(joined):
            return _in_order(apart)
        together = self._gated(step, joined) if step.is_gated else self._joined(joined)

        def record(to: Recorder, n: int) -> None:
            matrix, _ = self.weights.of_products(joined)
            if n <= self._most_few(matrix):
                together(to, n)
                return
            for one in apart:
                one(to, n)

        return record

    def _joined(self, joined: JoinedProducts) -> Record:
        """Return the record of products whose results are adjacent."""
        (matrix, biases), operations = self.weights.of_products(joined), joined.ops
        places = [self._pieces[op.out.id, False] for op in operations]
        rows = np.cumsum([op.out.width for op in operations])[:-1].tolist()
        outs = [(place.offset - places[0].offset) // 4 for place in places[1:]]
        strides = [stride_of(op.out) for op in operations]
        spare = [0] * (3 - len(operations))
        others = *rows, *(_ALL for _ in spare), *outs, *spare, *strides[1:], *spare

        def record(to: Recorder, n: int) -> None:
            x, x_stride = self._input(to, n, operations[0].x, matrix)
            size = places[-1].offset - places[0].offset + 4 * n * strides[-1]
            ends = [x, places[0].bound(size, written=True), biases.bound() if biases else None, None, None]
            self._product(to, n, matrix, ends, (x_stride, strides[0], 0, 0), joined=others)

        return record

    def _gated(self, step: FusedStep, joined: JoinedProducts) -> Record:
        """Return the record of the neurons of few tokens: activated gates times up, in one dispatch."""
        (matrix, biases), operations = self.weights.of_products(joined), joined.ops
        last, n_ff = step.more[-1], operations[0].out.width
        assert isinstance(last.op, ops.Activate)
        act, form = last.op, self._forms[last.out.id]
        result, stride = _NEURONS, stride_of(last.out)
        if form.by_maker:
            result, stride = _ROUNDED_NEURONS, n_ff // BLOCK

        def record(to: Recorder, n: int) -> None:
            x, x_stride = self._input(to, n, operations[0].x, matrix)
            _, *results = self._results(last.out, n)
            tokens = 1 if n == 1 else TOKENS_OF_FEW
            for part in matrix.parts:
                codes = part.codes.bound()
                bindings = [
                    codes, part.more.bound() if part.more else codes, x, results[0],
                    biases.bound() if biases else codes, codes, codes, results[1],
                ]  # fmt: skip
                push = (
                    n, part.n_rows, matrix.n_cols, _BIAS if biases else 0, x_stride, stride, 0, 0, 1, n_ff,
                    part.first, part.first, 0, act.threshold, part.tile, *_ALONE,
                )  # fmt: skip
                neurons = BLOCK if form.by_maker else GATED.rows
                groups = -(-part.n_rows // neurons), -(-n // tokens), 1
                ahead = self._kernels.shapes.of(matrix.type).ahead_of(tokens)
                constants = [matrix.type, tokens, 0, *GATED, result, ACTIVATIONS[act.kind], ahead]
                to.add("rounded_few", constants, bindings, push, groups, part.nbytes)

        return record

    def _neurons_of(self, step: FusedStep) -> Record:
        """Return the record of the neurons from gate and up, which were computed separately."""
        last, gate = step.more[-1], step.out
        form = self._forms[last.out.id]
        out = last.out if form.floats else gate  # rounded neurons replace the gates
        activate = self._activate(replace(last, out=out))

        def record(to: Recorder, n: int) -> None:
            activate(to, n)
            if form.by_maker:
                self._round(to, n, self.read(out, n), last.out)

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
        if not self._forms[x.id].by_maker and x not in to.rounded:
            to.rounded.add(x)
            self._round(to, n, self.read(x, n), x)
        return self._rounded(x, n), x.width // BLOCK

    def _round(self, to: Recorder, n: int, floats: _core.VulkanBinding, value: Value) -> None:
        """Record the rounding of n rows of a value."""
        n_blocks = value.width // BLOCK
        groups = -(-n_blocks // _BLOCKS_OF_GROUP), n, 1
        bindings = [floats, self._rounded(value, n, written=True)]
        to.add("quantize", [0], bindings, (n_blocks, stride_of(value)), groups)

    def _most_few(self, matrix: VulkanMatrix) -> int:
        """Return the most tokens of a step for which the kernels of few tokens compute a product."""
        return FEW if matrix.type in FLOATS else self._kernels.shapes.of(matrix.type).most_few

    def _tokens_of(self, matrix: VulkanMatrix, n: int) -> int:
        """Return the most tokens of a workgroup, for a matrix that is multiplied with n tokens."""
        if n == 1:
            return 1
        return TOKENS_OF_FEW if n <= self._most_few(matrix) else TILE

    def _product(
        self,
        to: Recorder,
        n: int,
        matrix: VulkanMatrix,
        ends: Sequence[_core.VulkanBinding | None],
        strides: Sequence[int],
        first_bias: int = 0,
        mask: ops.Mask | None = None,
        joined: Sequence[int] = (),
    ) -> None:
        """Record the product of n rows and a matrix.

        ends: x, out, and bias, residual and the selection of rows, each of which may be None. The selection
        holds scores if `mask` is given. strides: of all ends except the bias. joined: the push constants of
        the second and third result, for few tokens.
        """
        x, out, *others = ends
        of_wanted = _FIRING if mask is None else _CHOSEN
        flags = sum(flag for flag, end in zip((_BIAS, _RESIDUAL, of_wanted), others, strict=True) if end)
        scores = (0, 0.0) if mask is None else (mask.first, mask.threshold)
        tokens = self._tokens_of(matrix, n)
        for part in matrix.parts:
            codes = part.codes.bound()
            assert x is not None
            assert out is not None
            bindings = [codes, part.more.bound() if part.more else codes, x, out]
            bindings += [codes if end is None else end for end in others]
            firsts = first_bias + part.first, part.first
            push = (
                n, part.n_rows, matrix.n_cols, flags, *strides, 1, 0, *firsts, *scores, part.tile,
                *(joined or _ALONE),
            )  # fmt: skip
            what, result = (bindings, push, part.nbytes), _JOINED if joined else _ONE
            self._rows_of(to, matrix, part, tokens, -(-n // tokens), what, result=result)

    def _rows_of(
        self, to: Recorder, matrix: VulkanMatrix, part: MatrixPart, tokens: int, n: int,
        what: tuple[list[_core.VulkanBinding], Sequence[float], int], experts: int = 0,
        result: int = _ONE,
    ) -> None:  # fmt: skip
        """Record a product with a part of a matrix for n groups of up to `tokens` tokens.

        what: its bindings, its push constants, and the bytes of its matrix.
        """
        bindings, push, n_bytes = what
        constants, groups = [matrix.type, tokens, experts], (-(-part.n_rows // TILE), n, 1)
        match matrix.type in FLOATS, tokens == TILE:
            case True, True:
                to.add("linear_many", [*constants, _is_whole(matrix)], bindings, push, groups, n_bytes)
            case True, False:
                constants += [_is_whole(matrix), 0, result]
                to.add("linear_few", constants, bindings, push, groups, n_bytes)
            case False, True:
                to.add("rounded_many", constants, bindings, push, groups, n_bytes)
            case _:
                shapes = self._kernels.shapes.of(matrix.type)
                shape = shapes.of(tokens, part.n_rows)
                constants += [*shape, result, 0, shapes.ahead_of(tokens)]
                groups = -(-part.n_rows // shape.rows), n, 1
                bindings = [*bindings, bindings[3]]  # rounded neurons, which only gates have
                to.add("rounded_few", constants, bindings, push, groups, n_bytes)

    def _low_rank(self, op: ops.LowRank) -> Record:
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
        if not isinstance(op, ops.LowRank) or self._adapters is None:
            return 0
        n_rows = OUTPUT_ROWS if self.is_of_tail(op.out) else self.max_batch
        return 2 * aligned(4 * n_rows * (self._adapters.rank(op) + 3))

    def _transposed(self, step: FusedStep) -> Record:
        op, out, residual = step.op, step.out, step.other
        assert isinstance(op, ops.TransposedLinear | ops.TransposedHeads)
        n_head, bias_name = (op.n_head, None) if isinstance(op, ops.TransposedHeads) else (1, op.bias)
        width = out.width // n_head
        chosen = self._hot(op) if step.is_hot else None
        tiles = None
        if isinstance(op, ops.TransposedLinear) and op.scales is not None:
            matrix = self.weights.planes(op.weight, op.scales, width, chosen)
            if chosen is not None:
                tiles = self.weights.made((op.weight, "tiles"), lambda: chosen // TILE)
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
                (-(-width // TILE), n, n_head),
                part.nbytes,
            )

        return record

    def _transposed_experts(self, op: ops.ExpertSum, to_parts: BufferRange) -> Record:
        """Return the record of products of each token's neurons with its experts' rows, one per expert."""
        n_rows, width = op.x.width // op.n_used, op.out.width
        matrix = self.weights.experts(op.weights, op.n_expert, width, 0, n_rows)
        part, bias = _only(op, matrix), self.weights.bias(op.bias)
        push = (
            n_rows, width, _BIAS if bias else 0, stride_of(op.x), op.n_used * width, 0,
            -(-n_rows // TILE) * TILE, n_rows, stride_of(op.route),
        )  # fmt: skip

        def record(to: Recorder, n: int) -> None:
            codes = part.codes.bound()
            bindings = [
                codes, part.more.bound() if part.more else codes, self.read(op.x, n),
                to_parts.bound(4 * n * op.n_used * width, written=True), bias.bound() if bias else codes,
                codes, self.read(op.route, n),
            ]  # fmt: skip
            to.add("transposed", [matrix.type, 1, 0], bindings, push, (-(-width // TILE), n, op.n_used))

        return record

    def _expert_linear(self, op: ops.ExpertLinear) -> Record:
        return self._of_experts(op, op.of_parts, op.first_row, op.n_rows, None)

    def _expert_sum(self, op: ops.ExpertSum) -> Record:
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
        op: ops.ExpertLinear | ops.ExpertSum,
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
            n_matrices = cache.group_of(op.layer).n_slots
        else:
            matrix, n_matrices = (
                self.weights.experts(op.weights, op.n_expert, n_cols, first_row, n_rows),
                op.n_expert,
            )
            bias = self.weights.bias(op.bias)
            bias_rows, first_bias = 0 if bias is None else bias.size // 4 // op.n_expert, first_row
        width = op.n_used * n_rows
        stride = stride_of(op.out) if to_parts is None else width
        strides = stride, n_rows, stride_of(op.route)

        def record(to: Recorder, n: int) -> None:
            x, x_stride = self._input(to, n, op.x, matrix)
            out = self.written(op.out, n) if to_parts is None else to_parts.bound(4 * n * width, written=True)
            tokens, n_workgroups, chosen = self._grouped(to, op, n, matrix, n_matrices)
            for part in matrix.parts:
                codes = part.codes.bound()
                bindings = [
                    codes, part.more.bound() if part.more else codes, x, out,
                    bias.bound() if bias else codes, codes, chosen,
                ]  # fmt: skip
                push = (
                    n, part.n_rows, n_cols, _BIAS if bias else 0, x_stride, *strides, op.n_used, bias_rows,
                    first_bias + part.first, part.first, 0, 0.0, part.tile, *_ALONE,
                )  # fmt: skip
                what, experts = (bindings, push, 0), 2 if of_parts else 1
                self._rows_of(to, matrix, part, tokens, n_workgroups, what, experts)

        return record

    def _grouped(
        self,
        to: Recorder,
        op: ops.ExpertLinear | ops.ExpertSum,
        n: int,
        matrix: VulkanMatrix,
        n_matrices: int,
    ) -> tuple[int, int, _core.VulkanBinding]:
        """Return the pairs per workgroup, the number of workgroups, and a binding of the route or its groups.

        Pairs are grouped if they outnumber the matrices, so that some must share one. The first product of a
        route records the grouping.
        """
        n_pairs, n_expert = n * op.n_used, min(op.n_expert, n_matrices)
        tokens = self._tokens_of(matrix, min(n, -(-n_pairs // n_expert)))
        if tokens == 1:
            return tokens, n_pairs, self.read(op.route, n)
        assert self._groups is not None
        tiles, half = n_tiles(n_pairs, n_expert, tokens), self._groups.size // 2
        size = 4 * (tiles * (tokens + 1) + n_matrices)
        piece = self._groups.part(half * (tokens == TILE), half)
        if to.grouped.get(tokens) != op.route:
            to.grouped[tokens] = op.route
            push = n, op.n_used, stride_of(op.route), n_matrices, tiles
            bindings = [self.read(op.route, n), piece.bound(size, written=True)]
            to.add("group", [tokens], bindings, push, (1, 1, 1))
        return tokens, tiles, piece.bound(size)

    def _route(self, op: ops.Route) -> Record:
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

    def _rotate(self, op: ops.Rotate) -> Record:
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

    def _attention(self, step: FusedStep) -> Record:
        op = step.op
        assert isinstance(op, ops.Attention)
        cache, code = self._cache[op.cache_layer], KV_CODES[self._kv_type]
        sinks = self.weights.bias(op.sinks)
        slopes = None if op.slopes is None else self.weights.made(op.slopes, lambda: np.array(op.slopes))
        positions, tables = (self.inputs[name].bound() for name in ("positions", "tables"))
        if op.causal:
            visible = op.window - 1 if op.window else _ALL, 0, op.first_seen
        else:
            visible = *((op.window // 2,) * 2 if op.window else (_ALL, _ALL)), op.first_seen
        others = slopes is not None, op.softcap > 0
        push = (
            op.n_head, op.n_head_kv, stride_of(op.q), stride_of(op.out), self._n_kv_blocks, self.max_batch,
            *visible, self._n_splits, op.scale, op.softcap,
        )  # fmt: skip
        stored = self._stored(step) if op.source is None else _nothing
        shape = self._kernels.attention(op)
        n_workgroups = op.n_head // shape.heads
        groups_of_step = self.inputs.groups_of("heads", n_workgroups)

        def record(to: Recorder, n: int) -> None:
            stored(to, n)
            is_apart = self._parts is not None and n <= FEW
            forms, floats, rounded = self._results(op.out, n)
            parts = floats
            if self._parts is not None and is_apart:
                size = 4 * n * op.n_head * self._n_splits * (op.head_dim_v + 2)
                parts = self._parts.bound(size, written=True)
            bindings = [
                self.read(op.q, n), cache.keys.bound(), cache.values.bound(), cache.key_scales.bound(),
                cache.value_scales.bound(), positions, tables, sinks.bound() if sinks else positions,
                floats, slopes.bound() if slopes else positions, rounded, parts,
                self._counts.bound(written=True) if is_apart else floats,
            ]  # fmt: skip
            constants = [
                code,
                op.head_dim,
                op.head_dim_v,
                sinks is not None,
                is_apart,
                *others,
                forms,
                *shape,
            ]
            if is_apart:
                to.add_indirect("attention", constants, bindings, push, groups_of_step)
            else:
                to.add("attention", constants, bindings, push, (n_workgroups, n, 1))

        return record

    def _stored(self, step: FusedStep) -> Record:
        """Return the record of the rotation of queries and keys, and of keys and values to the cache."""
        op = step.op
        assert isinstance(op, ops.Attention)
        cache, code = self._cache[op.cache_layer], KV_CODES[self._kv_type]
        rotations = [one.op for one in step.more if isinstance(one.op, ops.Rotate)]
        of_k, of_q = [*rotations, None, None][:2]
        k, q = op.k if of_k is None else of_k.x, None if of_q is None else of_q.x
        of_rope = (0, 0, 0) if of_k is None else (of_k.first, of_k.rope.n_rot, int(of_k.rope.kind == "neox"))
        n_head = 0 if q is None else op.n_head
        push = (
            n_head, op.n_head_kv, op.head_dim, op.head_dim_v, stride_of(k), stride_of(op.v),
            0 if q is None else stride_of(q), stride_of(op.q), *of_rope,
        )  # fmt: skip
        channels = BLOCK if self._kv_type == "q8_0" else KV_CHANNELS[self._kv_type]
        of_keys, of_values = (-(-dim // channels) for dim in (op.head_dim, op.head_dim_v))
        n_units = (n_head + op.n_head_kv) * of_keys + op.n_head_kv * of_values

        def record(to: Recorder, n: int) -> None:
            slots = self.inputs["slots"].bound(4 * n)
            angles = slots if of_k is None else self.inputs[of_k.rope].bound(4 * n * of_k.rope.n_rot)
            scales = [one.bound(written=True) for one in (cache.key_scales, cache.value_scales)]
            keys = cache.keys.bound(written=True)
            bindings = [
                self.read(k, n), slots, self.read(op.v, n), slots if q is None else self.read(q, n), angles,
                keys, cache.values.bound(written=True), *scales, keys if q is None else self.written(op.q, n),
            ]  # fmt: skip
            to.add("store", [code], bindings, push, by_values(n_units, n))

        return record

    def _select(self, op: ops.SelectOutputs) -> Record:
        push = op.x.width, stride_of(op.x), stride_of(op.out)

        def record(to: Recorder, n: int) -> None:
            bindings = [
                self.read(op.x, self.max_batch), self.inputs["outputs"].bound(4 * n), self.written(op.out, n),
            ]  # fmt: skip
            to.add("select", [], bindings, push, by_values(op.x.width, n))

        return record

    def _activate(self, step: FusedStep) -> Record:
        op = step.op
        assert isinstance(op, ops.Activate)
        kind, other = (_ACTIVATE, op.x) if step.other is None else (_GATED, step.other)
        f = op.xielu
        numbers = (op.threshold, 0.0, 0.0, 0.0) if f is None else (f.eps, f.positive, f.negative, f.linear)
        return self._elementwise(step.out, op.x, other, kind, ACTIVATIONS[op.kind], numbers=numbers)

    def _scale(self, op: ops.Scale) -> Record:
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
        case ops.Activate() if op.kind not in ACTIVATIONS:
            return f"the activation {op.kind}"
        case ops.Attention() if op.blocks is not None:
            return "attention to blocks"
        case ops.Attention() if op.groups == "only":
            return "attention within windows"
        case ops.SelectOutputs() if op.n > 1:
            return "joined tokens"
        case ops.Attention() if op.chosen is not None:
            return "attention to the keys that an indexer chose"
        case ops.Rotate() if op.rope.every > 1:
            return "the rotation of blocks"
        case ops.Route() if op.table is not None or op.scoring not in _SCORINGS:
            return "routes by a table, and scores that are roots"
        case ops.ExpertSum(neuron_major=False) | ops.ExpertLinear(of_parts=True) if (
            op.x.width // op.n_used % 4
        ):
            return f"experts of {op.x.width // op.n_used} neurons (no multiple of 4)"
        case ops.Route() if op.x.width > _MOST_EXPERTS or max(op.n_used, op.n_groups) > _LANES_OF_ROUTE:
            return f"routes of more than {_MOST_EXPERTS} experts, {_LANES_OF_ROUTE} of a token"
    return None if isinstance(op, CAPABILITIES.operations) else type(op).__name__


def _lanes_of(width: int) -> int:
    """Return the lanes of a norm's workgroup."""
    return _LANES if width <= _NARROW else _WIDE_LANES


def _in_order(records: Sequence[Record]) -> Record:
    def record(to: Recorder, n: int) -> None:
        for one in records:
            one(to, n)

    return record


def _nothing(_: Recorder, __: int) -> None:
    """Record nothing."""


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
