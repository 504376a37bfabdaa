"""Groups the operations of a graph that a backend runs as one.

A norm goes into the matrix products that read it; q, k and v, or gate and up, become one operation;
activation, product and a predictor's mask go into gate and up; a residual into the product before it; head
norms and rotation into attention. A value that is asked for as a tap is kept, and what would fuse it away is
not fused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from hotset.errors import InvalidRequestError
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
    Op,
    RMSNorm,
    Rotate,
    SelectOutputs,
    TransposedLinear,
    Value,
)

PARTS = ("predictor", "ffn", "attention", "other")  # of a model, for statistics
WITH_ZEROS = ("relu", "relu2", "fatrelu")  # activations that leave neurons at zero


@dataclass
class Fused:
    """Operations that become one native operation, in order; `out` are the values that it yields."""

    ops: list[Op]
    reads: list[Value]
    out: list[Value]

    is_neurons: bool = False  # an FFN up to the values of its neurons

    @property
    def linears(self) -> list[Linear]:
        return [op for op in self.ops if isinstance(op, Linear)]

    def first(self, *kinds: type) -> Any:
        """The first operation of one of the kinds, or None."""
        return next((op for op in self.ops if isinstance(op, kinds)), None)


def part_of(op: Fused) -> tuple[int, int]:
    """Layer and part of the model (an index of PARTS) that an operation belongs to, for statistics."""
    match = re.match(r"blk\.(\d+)\.(ffn_pred|ffn_inp|ffn|attn)", op.ops[0].out.name)
    if match is None:
        return 0, PARTS.index("other")
    parts = {"ffn_pred": "predictor", "ffn_inp": "attention", "attn": "attention", "ffn": "ffn"}
    return int(match[1]), PARTS.index(parts[match[2]])


def inputs_of(op: Op) -> list[Value]:
    """The values that an operation reads."""
    match op:
        case Embed():
            return []
        case Attention():
            return [op.q, op.k, op.v]
        case Add() | Multiply():
            return [op.a, op.b]
        case Mask():
            return [op.x, op.scores]
        case _:
            return [op.x]


def fuse(graph: Graph, taps: Iterable[str]) -> list[Fused]:
    """Groups the operations of a graph; a value named in `taps` is never fused away."""
    return _Fusion(graph, frozenset(taps)).groups()


def layer_starts(graph: Graph) -> list[int]:
    """The index of the first operation of each layer, and of the first after the last layer."""
    starts: dict[int, int] = {}
    after = 0
    for index, op in enumerate(graph.ops):
        if match := re.match(r"blk\.(\d+)\.", op.out.name):
            starts.setdefault(int(match[1]), index)
            after = index + 1
    return [*(starts[layer] for layer in sorted(starts)), after]


def cut(graph: Graph, first_op: int, last_op: int) -> tuple[Graph, Value | None]:
    """The operations [first_op, last_op) as a graph of their own, and the value that enters it.

    A graph is cut between layers: the residual stream alone crosses. Raises InvalidRequestError elsewhere.
    """
    if not 0 <= first_op < last_op <= len(graph.ops):
        raise InvalidRequestError(f"a graph of {len(graph.ops)} operations has no part {first_op}:{last_op}")
    part = Graph(graph.ops[first_op:last_op], graph.values)
    inner = {op.out for op in part.ops}
    entering = {value for op in part.ops for value in inputs_of(op)} - inner
    leaving = {value for op in graph.ops[last_op:] for value in inputs_of(op)} & inner
    if len(entering) > 1 or leaving - {part.logits}:
        raise InvalidRequestError(
            f"a graph is cut between layers, where one value crosses, not at operations {first_op}:{last_op}"
        )
    return part, next(iter(entering), None)


class _Fusion:
    """Walks the operations in order: each starts a group, which takes what follows as far as it fits."""

    def __init__(self, graph: Graph, kept: frozenset[str]) -> None:
        self._ops = graph.ops
        self._kept = kept | {graph.logits.name}
        self._readers: dict[Value, list[Op]] = {value: [] for value in graph.values}
        for op in graph.ops:
            for value in inputs_of(op):
                self._readers[value].append(op)
        self._producer = {op.out: op for op in graph.ops}
        self._at = 0

    def groups(self) -> list[Fused]:
        groups = []
        while self._at < len(self._ops):
            groups.append(self._next_group())
        groups = self._take_heads(groups)
        for group in groups:
            inner = {op.out for op in group.ops}
            group.reads = [value for op in group.ops for value in inputs_of(op) if value not in inner]
        return groups

    def _private(self, value: Value, n_readers: int = 1) -> bool:
        """Nobody but its n readers, all of them in the group, needs the value."""
        return len(self._readers[value]) == n_readers and value.name not in self._kept

    def _peek(self, ahead: int = 0) -> Op | None:
        at = self._at + ahead
        return self._ops[at] if at < len(self._ops) else None

    def _next_group(self) -> Fused:
        first = self._ops[self._at]
        n = self._n_linears_of_norm(first)
        if isinstance(first, TransposedLinear):
            self._at += 1
            tail = self._residual_tail(first.out)
            self._at += len(tail)
            return Fused([first, *tail], [], [tail[-1].out if tail else first.out])
        if n == 0 and not isinstance(first, Linear):
            self._at += 1
            return Fused([first], [], [first.out])
        ops: list[Op] = [first]
        self._at += 1
        x = first.x if isinstance(first, Linear) else first.out
        while isinstance(op := self._peek(), Linear) and op.x == x:
            ops.append(op)
            self._at += 1
        linears = [op for op in ops if isinstance(op, Linear)]
        if tail := self._neurons_tail(linears):
            self._at += len(tail)
            return Fused(ops + tail, [], [tail[-1].out], is_neurons=True)
        tail = self._gate_tail(linears)
        if not tail and len(linears) == 1:
            tail = self._activation_tail(linears[0]) or self._residual_tail(linears[0].out)
        ops += tail
        self._at += len(tail)
        return Fused(ops, [], [tail[-1].out] if tail else [op.out for op in linears])

    def _n_linears_of_norm(self, op: Op) -> int:
        """How many matrix products read a norm, if they follow it and nothing else does; else 0."""
        if not isinstance(op, RMSNorm | LayerNorm) or (isinstance(op, RMSNorm) and op.n_head > 1):
            return 0
        readers = self._readers[op.out]
        following = [self._peek(1 + i) for i in range(len(readers))]
        fits = all(a is b and isinstance(a, Linear) for a, b in zip(readers, following, strict=True))
        return len(readers) if fits and self._private(op.out, len(readers)) else 0

    def _neurons_tail(self, linears: list[Linear]) -> list[Op]:
        """What follows gate and up, or up alone, of an FFN whose neurons are often zero.

        The activations, the product of gate and up, and the mask of a predictor. Where a value on the way is
        kept, nothing (the mask alone may be left to itself).
        """
        tail: list[Op] = []

        def take(kind: type, *inputs: Value) -> Value | None:
            op = self._peek(len(tail))
            if op is None or not isinstance(op, kind) or set(inputs_of(op)[: len(inputs)]) != set(inputs):
                return None
            if not all(map(self._private, inputs)):
                return None
            tail.append(op)
            return op.out

        first = self._peek()
        if not 1 <= len(linears) <= 2 or not isinstance(first, Activate) or first.kind not in WITH_ZEROS:
            return []
        neurons: Value | None
        if len(linears) == 2:
            gate = take(Activate, linears[0].out)
            up = take(Activate, linears[1].out) or linears[1].out
            neurons = take(Multiply, gate, up) if gate else None
        else:
            neurons = take(Activate, linears[0].out)
        if neurons is None:
            return []
        masked = take(Mask, neurons)
        down = self._readers[masked or neurons]
        # Without a gate the same stands before a predictor's second matrix, which reads all of it.
        if (
            len(linears) == 1
            and not masked
            and not all(isinstance(op, TransposedLinear | Mask) for op in down)
        ):
            return []
        return tail

    def _activation_tail(self, linear: Linear) -> list[Op]:
        activate = self._peek()
        fits = isinstance(activate, Activate) and activate.x == linear.out and self._private(linear.out)
        return [activate] if activate and fits else []

    def _gate_tail(self, linears: list[Linear]) -> list[Op]:
        """The activation of a gate and its product with an up projection, where they follow."""
        activate, multiply = self._peek(), self._peek(1)
        if len(linears) != 2 or not isinstance(activate, Activate) or not isinstance(multiply, Multiply):
            return []
        gate, up = (op.out for op in linears)
        fits = activate.x == gate and {multiply.a, multiply.b} == {activate.out, up}
        return [activate, multiply] if fits and all(map(self._private, (gate, up, activate.out))) else []

    def _residual_tail(self, out: Value) -> list[Op]:
        """The sum that a matrix product flows into, where it follows."""
        add = self._peek()
        if not isinstance(add, Add):
            return []
        return [add] if out in (add.a, add.b) and add.a != add.b and self._private(out) else []

    def _take_heads(self, groups: list[Fused]) -> list[Fused]:
        """Moves rotations, and head norms before them, into the attention that reads them."""
        moved: set[Value] = set()
        for group in groups:
            attention = group.ops[-1]
            if not isinstance(attention, Attention):
                continue
            chains = [self._head_chain(attention.q), self._head_chain(attention.k)]
            ropes = [chain[-1].rope for chain in chains if chain]
            if (
                len(ropes) == 2 and ropes[0] == ropes[1]
            ):  # the native operation rotates both by the same angles
                group.ops = [op for chain in chains for op in chain] + [attention]
                moved.update(op.out for op in group.ops[:-1])
        return [group for group in groups if group.out[0] not in moved]

    def _head_chain(self, value: Value) -> list[Any]:
        """The rotation that yields q or k, its head norm before it; empty where others read them too."""
        rotate = self._producer[value]
        if not isinstance(rotate, Rotate) or not self._private(value):
            return []
        norm = self._producer[rotate.x]
        if isinstance(norm, RMSNorm) and norm.n_head == rotate.n_head and self._private(rotate.x):
            return [norm, rotate]
        return [rotate]


class Buffers:
    """Gives each value that exists a buffer, and takes it back after the value's last reader.

    new: makes a buffer of a width, with a row per token or (True) per output, and returns its number.
    """

    def __init__(
        self, new: Callable[[int, bool], int], graph: Graph, fused: list[Fused], taps: frozenset[str]
    ) -> None:
        self._new = new
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

    def begin(self, value: Value) -> int:
        """The buffer of a value that no operation makes: the rows that a part of a graph begins with."""
        self._free.setdefault((value.width, False), [])
        self._ids[value] = self._new(value.width, False)
        return self._ids[value]

    def enter(self, op: Fused) -> None:
        for value in op.out:
            shape = (value.width, value in self._outputs)
            free = self._free.setdefault(shape, [])
            self._ids[value] = free.pop() if free else self._new(*shape)

    def leave(self, op: Fused) -> None:
        for value in {*op.reads, *op.out}:
            if self._last_use[value] == self._index:
                self._free[value.width, value in self._outputs].append(self._ids[value])
        self._index += 1
