"""Lowers a graph to the native plan: one call into C++ per step, nothing of Python inside.

What happens here and nowhere else: fusion (a norm into the matrix products that read it; q, k and v, or gate
and up, into one operation; activation and product into gate and up; a residual into the product before it;
head norms and rotation into attention) and the sharing of memory between values that are not alive together.
A value that is asked for as a tap is kept, and what would fuse it away is not fused: the bits are the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hotset import _core
from hotset.backends.base import PAGE_SIZE, Batch, KVType, StepResult
from hotset.backends.cores import usable_cores
from hotset.errors import InvalidRequestError, UnsupportedModelError
from hotset.formats.quants import dequantize
from hotset.model.graph import (
    Activate,
    Add,
    Attention,
    Embed,
    Graph,
    LayerNorm,
    Linear,
    Multiply,
    Op,
    RMSNorm,
    Rotate,
    SelectOutputs,
    Value,
)

if TYPE_CHECKING:
    from hotset.formats.gguf import GGUFFile

# Numbers of csrc/kernels/kernels.h.
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4, "fatrelu": 5}
KV_TYPES = {"f32": (0, 4), "f16": (1, 2), "q8_0": (2, 1)}  # name → (number, bytes per element)
Q8_0_BLOCK = 32

assert _core.PAGE_SIZE == PAGE_SIZE


class CpuBackend:
    """The Backend protocol over the native core.

    kv_type: how keys and values are stored (f16, q8_0; f32 for tests). n_threads: None takes every core that
    this process may use. isa: forces a set of kernels, as the environment variable HOTSET_ISA does.
    Raises UnsupportedModelError for tensor types without a kernel and heads that q8_0 does not fit.
    """

    name = "cpu"

    def __init__(
        self,
        gguf: GGUFFile,
        graph: Graph,
        *,
        n_pages: int,
        max_batch: int = 512,
        kv_type: KVType = "f16",
        n_threads: int | None = None,
        isa: str | None = None,
    ) -> None:
        if n_threads is not None and not 1 <= n_threads <= 256:
            raise InvalidRequestError(f"the number of threads must be 1 to 256, not {n_threads}")
        self.gguf, self.graph = gguf, graph
        self.n_pages, self.max_batch, self.kv_type = n_pages, max_batch, kv_type
        self.n_threads = n_threads or usable_cores()
        self.n_vocab = graph.logits.width
        self._isa = isa
        self._cache = {op.layer: self._new_cache(op) for op in graph.ops if isinstance(op, Attention)}
        self._lowered: dict[frozenset[str], _Lowered] = {}
        self._plan_for(frozenset())

    @property
    def isa(self) -> str:
        """The instruction set whose kernels run: avx512, avx2, neon or scalar."""
        return self._plan_for(frozenset()).plan.isa

    def step(self, batch: Batch) -> StepResult:
        """Runs one step; the logits are a view that the next step overwrites."""
        lowered = self._plan_for(frozenset(batch.taps))
        plan = lowered.plan
        try:
            plan.run(batch.tokens, batch.positions, batch.sequences, batch.page_tables, batch.outputs)
        except ValueError as error:
            raise InvalidRequestError(str(error)) from None
        taps = {name: plan.rows(lowered.buffers[name]).copy() for name in batch.taps}
        return StepResult(plan.rows(lowered.logits), taps)

    def close(self) -> None:
        """Stops the threads and drops the cache; safe to call twice."""
        self._lowered.clear()
        self._cache.clear()

    def _plan_for(self, taps: frozenset[str]) -> _Lowered:
        if taps not in self._lowered:
            unknown = taps - {value.name for value in self.graph.values}
            if unknown:
                raise InvalidRequestError(f"the model has no value named {min(unknown)!r} to tap")
            while len(self._lowered) > 2:  # the plain plan and one with taps stay
                self._lowered.pop([key for key in self._lowered if key][0])
            self._lowered[taps] = self._lower(taps)
        return self._lowered[taps]

    def _lower(self, taps: frozenset[str]) -> _Lowered:
        plan = _core.Plan(self.max_batch, self.n_pages, self.n_pages, self.n_threads, self._isa)
        fused = fuse(self.graph, taps)
        buffers = _Buffers(plan, self.graph, fused, taps)
        for op in fused:
            buffers.enter(op)
            self._emit(plan, op, buffers)
            buffers.leave(op)
        plan.finish()
        kept = {value.name: buffers[value] for value in self.graph.values if value.name in taps}
        return _Lowered(plan, buffers[self.graph.logits], kept)

    def _emit(self, plan: Any, op: Fused, buffers: _Buffers) -> None:
        main = op.ops[-1]
        out = buffers[op.out[0]]
        match main:
            case Embed():
                info = self.gguf.tensors[main.weight]
                plan.embed(int(info.type), self._bytes(main.weight), int(info.shape[1]), out)
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
            case _ if op.linears:
                self._emit_linear(plan, op, buffers)
            case Add():
                plan.add(buffers[main.a], buffers[main.b], out)
            case Multiply():
                plan.multiply(buffers[main.a], buffers[main.b], out)

    def _emit_linear(self, plan: Any, op: Fused, buffers: _Buffers) -> None:
        norm = next((o for o in op.ops if isinstance(o, RMSNorm | LayerNorm)), None)
        activate = next((o for o in op.ops if isinstance(o, Activate)), None)
        add = next((o for o in op.ops if isinstance(o, Add)), None)
        x = norm.x if norm else op.linears[0].x
        residual = -1
        if add:
            residual = buffers[add.a if add.b == op.linears[0].out else add.b]
        parts = []
        for i, linear in enumerate(op.linears):
            info = self.gguf.tensors[linear.weight]
            bias = None if linear.bias is None else self._vector(linear.bias)
            # Of a gate and up that were fused, only the product exists: its buffer stands for both.
            out = op.out[0] if activate or add else op.out[i]
            parts.append((int(info.type), self._bytes(linear.weight), bias, buffers[out]))
        kind, threshold = (ACTIVATIONS[activate.kind], activate.threshold) if activate else (0, 0.0)
        plan.linear(
            buffers[x], self._norm(norm) if norm else None, parts, residual, activate is not None, kind, threshold
        )

    def _emit_attention(self, plan: Any, op: Fused, main: Attention, buffers: _Buffers) -> None:
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
        return self.gguf.data(weight)

    def _vector(self, name: str) -> np.ndarray:
        info = self.gguf.tensors[name]
        return np.ascontiguousarray(dequantize(self.gguf.data(name), info.type, info.shape).reshape(-1))

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
    logits: int
    buffers: dict[str, int]


@dataclass
class Fused:
    """Operations that become one native operation, in order; `out` are the values that it yields."""

    ops: list[Op]
    reads: list[Value]
    out: list[Value]

    @property
    def linears(self) -> list[Linear]:
        return [op for op in self.ops if isinstance(op, Linear)]


def inputs_of(op: Op) -> list[Value]:
    """The values that an operation reads."""
    match op:
        case Embed():
            return []
        case Attention():
            return [op.q, op.k, op.v]
        case Add() | Multiply():
            return [op.a, op.b]
        case _:
            return [op.x]


def fuse(graph: Graph, taps: Iterable[str]) -> list[Fused]:
    """Groups the operations of a graph; a value named in `taps` is never fused away."""
    kept = set(taps)
    ops = graph.ops
    uses = Counter(value for op in ops for value in inputs_of(op))
    producer = {op.out: op for op in ops}
    taken: set[int] = set()  # ids of operations that an earlier group holds
    groups: list[Fused] = []

    def private(value: Value, n_uses: int = 1) -> bool:
        """Nobody but the group itself needs the value."""
        return uses[value] == n_uses and value.name not in kept and value != graph.logits

    def following(i: int, test: Callable[[Op], bool]) -> Op | None:
        """The next operation that is not in a group, if it passes the test."""
        op = next((op for op in ops[i + 1 :] if id(op) not in taken), None)
        return op if op is not None and test(op) else None

    for i, op in enumerate(ops):
        if id(op) in taken:
            continue
        group = [op]
        taken.add(id(op))

        def take(op: Op | None, group: list[Op] = group) -> Op | None:
            if op is not None:
                group.append(op)
                taken.add(id(op))
            return op

        is_norm = isinstance(op, LayerNorm) or (isinstance(op, RMSNorm) and op.n_head == 1)
        readers = [o for o in ops if op.out in inputs_of(o)] if is_norm else []
        if is_norm and readers and all(isinstance(o, Linear) for o in readers) and private(op.out, len(readers)):
            first = following(i, lambda o: o is readers[0])
            take(first)
            consecutive = first is not None
            while consecutive and len(group) <= len(readers):
                consecutive = take(following(i, lambda o: o is readers[len(group) - 1])) is not None
            if not consecutive:  # its readers lie apart: the norm stands alone
                for o in group[1:]:
                    taken.discard(id(o))
                del group[1:]
        elif isinstance(op, Linear):
            x = op.x
            while take(following(i, lambda o: isinstance(o, Linear) and o.x == x)):
                pass
        linears = [o for o in group if isinstance(o, Linear)]
        outs = [o.out for o in linears] or [op.out]
        if len(linears) == 2:
            gate, up = linears[0].out, linears[1].out
            activate = following(i, lambda o: isinstance(o, Activate) and o.x == gate)
            if activate and private(gate) and private(activate.out) and private(up):
                taken.add(id(activate))
                multiply = following(
                    i, lambda o: isinstance(o, Multiply) and {o.a, o.b} == {activate.out, up}
                )
                taken.discard(id(activate))
                if multiply:
                    take(activate)
                    take(multiply)
                    outs = [multiply.out]
        elif len(linears) == 1 and private(linears[0].out):
            add = take(following(i, lambda o: isinstance(o, Add) and linears[0].out in (o.a, o.b)))
            if add:
                outs = [add.out]
        groups.append(Fused(group, [], outs))

    groups = _fuse_heads(groups, producer, private)
    for g in groups:
        inner = {op.out for op in g.ops}
        g.reads = [value for op in g.ops for value in inputs_of(op) if value not in inner]
    return groups


def _fuse_heads(
    groups: list[Fused], producer: dict[Value, Op], private: Callable[..., bool]
) -> list[Fused]:
    """Takes rotations, and head norms before them, into the attention that reads them."""
    absorbed: set[int] = set()
    for group in groups:
        attention = group.ops[-1]
        if not isinstance(attention, Attention):
            continue
        chains: list[list[Op]] = []
        for value in (attention.q, attention.k):
            chain: list[Op] = []
            rotate = producer[value]
            if isinstance(rotate, Rotate) and private(value):
                chain.insert(0, rotate)
                norm = producer[rotate.x]
                if isinstance(norm, RMSNorm) and norm.n_head > 1 and private(rotate.x):
                    chain.insert(0, norm)
            chains.append(chain)
        ropes = [op.rope for chain in chains for op in chain if isinstance(op, Rotate)]
        if len(ropes) == 2 and ropes[0] == ropes[1]:  # the native operation rotates both, by the same angles
            fused = [op for chain in chains for op in chain]
            absorbed.update(id(op) for op in fused)
            group.ops = [*fused, attention]
    return [group for group in groups if id(group.ops[0]) not in absorbed or len(group.ops) > 1]


class _Buffers:
    """Gives each value that exists a native buffer, and takes it back after the value's last reader."""

    def __init__(self, plan: Any, graph: Graph, fused: list[Fused], taps: frozenset[str]) -> None:
        self._plan = plan
        self._ids: dict[Value, int] = {}
        self._free: dict[tuple[int, bool], list[int]] = {}
        self._last_use = {value: i for i, op in enumerate(fused) for value in [*op.out, *op.reads]}
        for value in graph.values:
            if value.name in taps or value == graph.logits:
                self._last_use[value] = len(fused)
        self._outputs: set[Value] = set()  # values with a row per output token
        for op in graph.ops:
            if isinstance(op, SelectOutputs) or any(x in self._outputs for x in inputs_of(op)):
                self._outputs.add(op.out)
        self._index = 0

    def __getitem__(self, value: Value) -> int:
        return self._ids[value]

    def enter(self, op: Fused) -> None:
        for value in op.out:
            shape = (value.width, value in self._outputs)
            free = self._free.setdefault(shape, [])
            self._ids[value] = free.pop() if free else self._plan.buffer(*shape)

    def leave(self, op: Fused) -> None:
        for value in {*op.reads, *op.out}:
            if self._last_use[value] == self._index:
                self._free[value.width, value in self._outputs].append(self._ids[value])
        self._index += 1
