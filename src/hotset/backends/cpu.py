"""Lowers a graph to the native plan: one call into C++ per step, nothing of Python inside.

Each group of fused operations (backends/fusion.py) becomes one native operation, and values that are not
alive together share memory.
A value that is asked for as a tap is kept, and what would fuse it away is not fused: the bits are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hotset import _core
from hotset.backends.base import PAGE_SIZE, Batch, StepResult, StepStats, WeightSource
from hotset.backends.fusion import PARTS, Buffers, Fused, cut, fuse, layer_starts, part_of
from hotset.backends.stage import Rows, on_host
from hotset.cores import usable_cores
from hotset.errors import InvalidRequestError, UnsupportedModelError
from hotset.formats.quants import dequantize, row_bytes
from hotset.model.cost import KVType
from hotset.model.graph import (
    Activate,
    Add,
    Attention,
    Embed,
    Graph,
    LayerNorm,
    Linear,
    Mask,
    Multiply,
    RMSNorm,
    Rotate,
    SelectOutputs,
    SignScores,
    TransposedLinear,
    Value,
)

# Numbers of csrc/kernels/kernels.h.
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4, "fatrelu": 5}
PLANES = {2: 31, 1: 32}  # columns per byte of the codes → type
KV_TYPES = {"f32": (0, 4), "f16": (1, 2), "q8_0": (2, 1)}  # name → (number, bytes per element)
Q8_0_BLOCK = 32

assert _core.PAGE_SIZE == PAGE_SIZE


def decoded_vector(weights: WeightSource, name: str) -> np.ndarray:
    """A vector of the file, float32 [n]."""
    info = weights.tensors[name]
    return np.ascontiguousarray(dequantize(weights.data(name), info.type, info.shape).reshape(-1))


def linear_matrix(weights: WeightSource, op: Linear) -> tuple[int, np.ndarray, np.ndarray | None]:
    """What the native core takes of a matrix product: type, bytes of its rows, bias."""
    info = weights.tensors[op.weight]
    first, last = op.first_row, op.first_row + op.out.width
    row = row_bytes(info.type, info.shape[0])
    bias = None if op.bias is None else decoded_vector(weights, op.bias)[first:last]
    return int(info.type), weights.data(op.weight)[first * row : last * row], bias


def transposed_matrix(
    weights: WeightSource, op: TransposedLinear
) -> tuple[int, np.ndarray, np.ndarray | None]:
    """What the native core takes of a down projection by neurons: type, bytes or codes, scales of planes."""
    info = weights.tensors[op.weight]
    if op.scales is None:
        return int(info.type), weights.data(op.weight), None
    return PLANES[op.out.width // info.shape[0]], weights.data(op.weight), weights.data(op.scales)


class CpuBackend:
    """The Backend protocol over the native core, and the Stage protocol over a part of a graph.

    first_op, last_op: the operations that it executes; a part of the model has no `step`, only `run`.

    kv_type: how keys and values are stored (f16, q8_0; f32 for tests). n_threads: None takes every core that
    this process may use. isa: forces a set of kernels, as the environment variable HOTSET_ISA does.
    sparse: leaves out what an FFN with zeros does not need: up rows of neurons whose gate does not fire, down
    rows of those that are zero, and all of those that a predictor does not name. The bits are the same.
    Raises UnsupportedModelError for tensor types without a kernel and heads that q8_0 does not fit.
    """

    name = "cpu"

    def __init__(
        self,
        weights: WeightSource,
        graph: Graph,
        *,
        n_pages: int,
        max_batch: int = 512,
        kv_type: KVType = "f16",
        n_threads: int | None = None,
        isa: str | None = None,
        sparse: bool = False,
        first_op: int = 0,
        last_op: int | None = None,
    ) -> None:
        if n_threads is not None and not 1 <= n_threads <= 256:
            raise InvalidRequestError(f"the number of threads must be 1 to 256, not {n_threads}")
        self.weights, self.sparse = weights, sparse
        self.graph, self.entering = cut(graph, first_op, len(graph.ops) if last_op is None else last_op)
        self.has_output = last_op in (None, len(graph.ops))
        self.n_layer = max(len(layer_starts(graph)) - 1, 1)
        self.n_pages, self.max_batch, self.kv_type = n_pages, max_batch, kv_type
        self.n_threads = n_threads or usable_cores()
        self.n_vocab = graph.logits.width
        self._isa = isa
        self._cache = {op.layer: self._new_cache(op) for op in self.graph.ops if isinstance(op, Attention)}
        self._lowered: dict[frozenset[str], _Lowered] = {}
        self._latest: tuple[_Lowered, int] | None = None  # plan and tokens of the latest step
        self.tapped: dict[str, np.ndarray] = {}
        self.notes: tuple[str, ...] = ()
        self._plan_for(frozenset())

    @property
    def isa(self) -> str:
        """The instruction set whose kernels run: avx512, avx2, neon or scalar."""
        return self._plan_for(frozenset()).plan.isa

    def step(self, batch: Batch) -> StepResult:
        """Runs one step; the logits are a view that the next step overwrites."""
        if self.entering is not None or not self.has_output:
            raise InvalidRequestError("a part of a model has no step of its own; it is a stage of a chain")
        logits = self.run(batch)
        return StepResult(logits, self.tapped)

    def run(self, batch: Batch, x: Rows | None = None) -> np.ndarray:
        """As Stage.run; the rows are a view that the next step overwrites. Checks the batch itself."""
        lowered = self._plan_for(frozenset(batch.taps))
        plan = lowered.plan
        try:
            plan.run(
                batch.tokens, batch.positions, batch.sequences, batch.page_tables, batch.outputs,
                None if x is None else on_host(x),
            )  # fmt: skip
        except ValueError as error:
            raise InvalidRequestError(str(error)) from None
        self._latest = lowered, len(batch.tokens)
        self.tapped = {name: plan.rows(lowered.buffers[name]).copy() for name in batch.taps}
        return plan.rows(lowered.result)

    def stats(self) -> StepStats | None:
        """Counts and times of the latest step; None for a model whose FFNs have no zeros.

        Of a step with taps that lie inside an FFN there are no counts for it.
        """
        if self._latest is None or not self._latest[0].has_neurons:
            return None
        predictor, ffn, attention, other = self.seconds().T
        selected, active, gate_rows, up_rows, down_rows = self.counts().T
        return StepStats(
            self._latest[1], selected, active, gate_rows, up_rows, down_rows,
            predictor, ffn, attention, float(other.sum()),
        )  # fmt: skip

    @property
    def has_neurons(self) -> bool:
        """Whether the FFNs have zeros to count."""
        return self._plan_for(frozenset()).has_neurons

    @property
    def nbytes(self) -> dict[str, int]:
        """Of a device's memory: none."""
        return {}

    def device_bytes(self) -> list[dict[str, int]]:
        """There is no device."""
        return []

    def counts(self) -> np.ndarray:
        """Of the latest step, int64 [n_layer, 5]: selected, active, gate_rows, up_rows, down_rows."""
        counts = np.zeros((self.n_layer, 5), np.int64)
        if self._latest is not None:
            lowered = self._latest[0]
            np.add.at(counts, lowered.layers, lowered.plan.op_counts())
        return counts

    def seconds(self) -> np.ndarray:
        """Of the latest step, float64 [n_layer, len(PARTS)]."""
        shape = self.n_layer, len(PARTS)
        if self._latest is None:
            return np.zeros(shape)
        lowered = self._latest[0]
        return np.bincount(lowered.cell, lowered.plan.op_seconds(), self.n_layer * len(PARTS)).reshape(shape)

    def cold_seconds(self) -> np.ndarray:
        """No neurons of a device's layers are computed here: zeros [n_layer]."""
        return np.zeros(self.n_layer)

    def cancel(self) -> None:
        """A step here waits for nobody: it goes on to its end."""

    def close(self) -> None:
        """Stops the threads and drops the cache; safe to call twice."""
        self._latest = None
        self.tapped = {}
        self._lowered.clear()
        self._cache.clear()

    def _plan_for(self, taps: frozenset[str]) -> _Lowered:
        if taps not in self._lowered:
            unknown = taps - {op.out.name for op in self.graph.ops}
            if unknown:
                raise InvalidRequestError(f"the model has no value named {min(unknown)!r} to tap")
            while len(self._lowered) > 2:  # the plain plan and the latest two with taps stay
                self._lowered.pop(next(key for key in self._lowered if key))
            self._lowered[taps] = self._lower(taps)
        return self._lowered[taps]

    def _lower(self, taps: frozenset[str]) -> _Lowered:
        try:
            plan = _core.Plan(self.max_batch, self.n_pages, self.n_pages, self.n_threads, self._isa)
        except ValueError as error:  # HOTSET_ISA, or a processor without the instructions that are needed
            raise InvalidRequestError(str(error)) from None
        fused = fuse(self.graph, taps)
        buffers = Buffers(plan.buffer, self.graph, fused, taps)
        if self.entering is not None:
            plan.input(buffers.begin(self.entering))
        parts: list[tuple[int, int]] = []
        for op in fused:
            buffers.enter(op)
            self._emit(plan, op, buffers)
            buffers.leave(op)
            parts.append(part_of(op))
        plan.finish()
        kept = {op.out.name: buffers[op.out] for op in self.graph.ops if op.out.name in taps}
        has_neurons = any(op.is_neurons for op in fused)
        layers, part = np.array(parts).T
        cell = layers * len(PARTS) + part
        return _Lowered(plan, buffers[self.graph.logits], kept, has_neurons, layers, cell)

    def _emit(self, plan: Any, op: Fused, buffers: Buffers) -> None:
        main = op.ops[-1]
        out = buffers[op.out[0]]
        match main:
            case Embed():
                info = self.weights.tensors[main.weight]
                plan.embed(
                    int(info.type), self._bytes(main.weight), int(info.shape[1]),
                    main.of == "position", main.first_row, out,
                )  # fmt: skip
            case _ if op.is_neurons:
                self._emit_neurons(plan, op, buffers)
            case _ if op.linears:
                self._emit_linear(plan, op, buffers)
            case Mask():
                plan.mask(buffers[main.x], buffers[main.scores], main.threshold, main.first, out)
            case SignScores():
                plan.sign_scores(buffers[main.x], self._bytes(main.weight), self._bias(main.bias), out)
            case _ if isinstance(op.ops[0], TransposedLinear):
                self._emit_transposed(plan, op, op.ops[0], buffers)
            case SelectOutputs():
                plan.select(buffers[main.x], out)
            case RMSNorm() | LayerNorm():
                layer, weight, bias, eps = self._norm(main)
                n_head = main.n_head if isinstance(main, RMSNorm) else 1
                plan.norm(layer, weight, bias, eps, n_head, buffers[main.x], out)
            case Rotate():
                plan.rotate(buffers[main.x], out, main.n_head, main.head_dim, self._rope(plan, main))
            case Attention():
                self._emit_attention(plan, op, main, buffers)
            case Activate():
                plan.activate(ACTIVATIONS[main.kind], main.threshold, buffers[main.x], out)
            case Add():
                plan.add(buffers[main.a], buffers[main.b], out)
            case Multiply():
                plan.multiply(buffers[main.a], buffers[main.b], out)

    def _emit_linear(self, plan: Any, op: Fused, buffers: Buffers) -> None:
        norm = op.first(RMSNorm, LayerNorm)
        activate = op.first(Activate)
        add = op.first(Add)
        x = norm.x if norm else op.linears[0].x
        # Of a gate and up that were fused, only the product exists: its buffer stands for both.
        outs = op.out if len(op.out) == len(op.linears) else [op.out[0]] * len(op.linears)
        plan.linear(
            buffers[x],
            self._norm(norm) if norm else None,
            [self._part(linear, buffers[out]) for linear, out in zip(op.linears, outs, strict=True)],
            self._residual(add, op.linears[0].out, buffers),
            op.first(Multiply) is not None,
            (ACTIVATIONS[activate.kind], activate.threshold) if activate else None,
        )

    def _emit_neurons(self, plan: Any, op: Fused, buffers: Buffers) -> None:
        norm, mask = op.first(RMSNorm, LayerNorm), op.first(Mask)
        linears, out = op.linears, buffers[op.out[0]]
        activations = [o for o in op.ops if isinstance(o, Activate)]
        plan.neurons(
            buffers[norm.x if norm else linears[0].x],
            self._norm(norm) if norm else None,
            self._part(linears[0], out) if len(linears) == 2 else None,
            self._part(linears[-1], out),
            (ACTIVATIONS[activations[0].kind], activations[0].threshold),
            ACTIVATIONS[activations[1].kind] if len(activations) == 2 else None,
            (buffers[mask.scores], mask.threshold, mask.first) if mask else None,
            self.sparse,
            out,
        )

    def _emit_transposed(self, plan: Any, op: Fused, main: TransposedLinear, buffers: Buffers) -> None:
        plan.axpy(
            buffers[main.x], *transposed_matrix(self.weights, main), self._bias(main.bias),
            self._residual(op.first(Add), main.out, buffers), self.sparse, buffers[op.out[0]],
        )  # fmt: skip

    def _part(self, op: Linear, out: int) -> tuple[int, np.ndarray, np.ndarray | None, int]:
        """A matrix product as the plan takes it: type, bytes of its rows, bias, buffer of the result."""
        return *linear_matrix(self.weights, op), out

    @staticmethod
    def _residual(add: Add | None, product: Value, buffers: Buffers) -> int:
        """The buffer that a product is added to, -1: none."""
        return -1 if add is None else buffers[add.a if add.b == product else add.b]

    def _bias(self, name: str | None) -> np.ndarray | None:
        return None if name is None else self._vector(name)

    def _emit_attention(self, plan: Any, op: Fused, main: Attention, buffers: Buffers) -> None:
        q, k = main.q, main.k
        rope, q_norm, k_norm = -1, None, None
        for fused in reversed(op.ops[:-1]):
            if isinstance(fused, Rotate):
                rope = self._rope(plan, fused)
            norm = (self._vector(fused.weight), fused.eps) if isinstance(fused, RMSNorm) else None
            assert isinstance(fused, Rotate | RMSNorm)
            if fused.out == q:
                q, q_norm = fused.x, norm or q_norm
            else:
                k, k_norm = fused.x, norm or k_norm
        plan.attention(
            buffers[q], buffers[k], buffers[main.v], buffers[main.out], main.n_head, main.n_head_kv,
            main.head_dim, main.head_dim_v, main.scale, main.window, rope, q_norm, k_norm,
            KV_TYPES[self.kv_type][0], *self._cache[main.layer],
        )  # fmt: skip

    def _norm(self, op: RMSNorm | LayerNorm) -> tuple[bool, np.ndarray, np.ndarray | None, float]:
        bias = self._vector(op.bias) if isinstance(op, LayerNorm) and op.bias else None
        return isinstance(op, LayerNorm), self._vector(op.weight), bias, op.eps

    @staticmethod
    def _rope(plan: Any, op: Rotate) -> int:
        rope = op.rope
        return plan.rope(rope.kind == "neox", rope.n_rot, list(rope.freq), rope.magnitude)

    def _bytes(self, weight: str) -> np.ndarray:
        return self.weights.data(weight)

    def _vector(self, name: str) -> np.ndarray:
        return decoded_vector(self.weights, name)

    def _new_cache(self, op: Attention) -> tuple[np.ndarray | None, ...]:
        """Keys, values, and their scales where the type has them. Untouched pages cost no memory."""
        size = KV_TYPES[self.kv_type][1]
        stride_v = -(-op.head_dim_v // 16) * 16
        slots = self.n_pages * op.n_head_kv * PAGE_SIZE
        k, v = np.zeros(slots * op.head_dim * size, np.uint8), np.zeros(slots * stride_v * size, np.uint8)
        if self.kv_type != "q8_0":
            return k, v, None, None
        if op.head_dim % Q8_0_BLOCK or op.head_dim_v % Q8_0_BLOCK:
            raise UnsupportedModelError(
                f"a q8_0 cache needs heads of a multiple of {Q8_0_BLOCK} channels, and this model's "
                f"have {op.head_dim}; use an f16 cache"
            )
        scales = [np.zeros(slots * dim // Q8_0_BLOCK * 2, np.uint8) for dim in (op.head_dim, op.head_dim_v)]
        return k, v, *scales


@dataclass
class _Lowered:
    plan: Any
    result: int  # buffer of the last value: logits, or the residual stream
    buffers: dict[str, int]
    has_neurons: bool
    layers: np.ndarray  # of each operation
    cell: np.ndarray  # of each operation: layer * len(PARTS) + part
