"""Groups operations of a graph that a backend runs as one.

A norm and a threshold join the matrix products that read them; q, k and v become one operation; an activation
joins the product before it, a residual the product or FFN before it; head norms and rotation join attention.
An FFN is a group. A value requested as a tap is kept, and nothing is fused that would remove it: an FFN with
such a value inside is split as far as needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from hotset.model.graph import Graph
from hotset.model.operations import (
    Activate,
    Add,
    Attention,
    Ffn,
    LayerNorm,
    Linear,
    Op,
    Part,
    RMSNorm,
    Rotate,
    Route,
    SelectOutputs,
    Threshold,
    TransposedLinear,
    Value,
)


@dataclass
class Fused:
    """Operations that become one native operation, or an FFN (`ffn`) and the sum that reads its result.

    reads, out: values that it needs and yields. inner: values that exist only while it runs.
    """

    ops: list[Op]
    reads: list[Value]
    out: list[Value]
    inner: list[Value] = field(default_factory=list)

    @property
    def layer(self) -> int:
        return self.ops[-1].layer

    @property
    def part(self) -> Part:
        return self.ops[-1].part

    @property
    def ffn(self) -> Ffn | None:
        return self.ops[0] if isinstance(self.ops[0], Ffn) else None

    @property
    def linears(self) -> list[Linear]:
        return [op for op in self.ops if isinstance(op, Linear)]

    def first(self, *kinds: type) -> Any:
        """Return the first operation of one of the kinds, or None."""
        return next((op for op in self.ops if isinstance(op, kinds)), None)

    def residual(self, product: Value) -> Value | None:
        """Return the value that the final sum adds to `product`; None without such a sum."""
        add = self.ops[-1]
        return (add.a if add.b == product else add.b) if isinstance(add, Add) and len(self.ops) > 1 else None


def fuse(graph: Graph, taps: Iterable[str]) -> list[Fused]:
    """Group the operations of a graph; a value named in `taps` is never fused away."""
    kept = frozenset(taps)
    ops = [part for op in graph.ops for part in (_opened(op, kept) if isinstance(op, Ffn) else [op])]
    return _Fusion(ops, graph, kept).groups()


def _opened(ffn: Ffn, kept: frozenset[str]) -> Iterator[Op]:
    """Yield an FFN as operations that compute the kept values: whole, without its norm, or one by one.

    Keeping the input of down or the route splits nothing, because these values exist anyway.
    """
    norm = ffn.norm
    made = {ffn.selected.name, ffn.out.name}
    if isinstance(ffn.select, Route):
        made.add(ffn.select.out.name)
    inner = {op.out.name for op in ffn.primitives if op is not norm} - made
    if inner & kept:
        yield from ffn.primitives
    elif norm is not None and norm.out.name in kept:
        yield norm
        yield replace(ffn, norm=None, x=norm.out)
    else:
        yield ffn


class _Fusion:
    """A pass over the operations in order: each starts a group, and the following ones join if they fit."""

    def __init__(self, ops: list[Op], graph: Graph, kept: frozenset[str]) -> None:
        self._ops = ops
        self._kept = kept | {graph.result.name}
        self._readers: dict[Value, list[Op]] = {value: [] for value in graph.values}
        for op in ops:
            for value in op.inputs:
                self._readers[value].append(op)
        self._producer = {op.out: op for op in ops}
        self._at = 0

    def groups(self) -> list[Fused]:
        groups = []
        while self._at < len(self._ops):
            groups.append(self._next_group())
        groups = self._take_heads(groups)
        for group in groups:
            made = {op.out for op in group.ops}
            group.reads = [value for op in group.ops for value in op.inputs if value not in made]
            if group.ffn is not None:
                group.inner.append(group.ffn.selected)
                if isinstance(group.ffn.select, Route):
                    group.inner.append(group.ffn.select.out)
        return groups

    def _private(self, value: Value, n_readers: int = 1) -> bool:
        """Return whether only the value's n readers, all in the group, need it."""
        return len(self._readers[value]) == n_readers and value.name not in self._kept

    def _peek(self, ahead: int = 0) -> Op | None:
        at = self._at + ahead
        return self._ops[at] if at < len(self._ops) else None

    def _next_group(self) -> Fused:
        first = self._ops[self._at]
        head = self._head_of_linears(first)
        self._at += max(len(head), 1)
        if isinstance(first, Ffn | TransposedLinear):
            tail = self._residual_tail(first.out)
            return Fused([first, *tail], [], [tail[-1].out if tail else first.out])
        if not head and not isinstance(first, Linear):
            return Fused([first], [], [first.out])
        ops: list[Op] = [*head] or [first]
        x = first.x if isinstance(first, Linear) else head[-1].out
        while isinstance(op := self._peek(), Linear) and op.x == x:
            ops.append(op)
            self._at += 1
        linears = [op for op in ops if isinstance(op, Linear)]
        tail = []
        if len(linears) == 1:
            tail = self._activation_tail(linears[0]) or self._residual_tail(linears[0].out)
        return Fused(ops + tail, [], [tail[-1].out] if tail else [op.out for op in linears])

    def _head_of_linears(self, op: Op) -> list[Op]:
        """Return a norm, a threshold or both, if only the following matrix products read them."""
        is_norm = isinstance(op, LayerNorm | RMSNorm) and op.n_head == 1
        if not is_norm and not isinstance(op, Threshold):
            return []
        head, behind = [op], self._peek(1)
        if is_norm and isinstance(behind, Threshold) and behind.x == op.out and self._private(op.out):
            head.append(behind)
        out = head[-1].out
        readers = self._readers[out]
        following = [self._peek(len(head) + i) for i in range(len(readers))]
        fits = all(a is b and isinstance(a, Linear) for a, b in zip(readers, following, strict=True))
        return head if fits and readers and self._private(out, len(readers)) else []

    def _activation_tail(self, linear: Linear) -> list[Op]:
        activate = self._peek()
        if not isinstance(activate, Activate) or activate.xielu is not None:  # no product computes xIELU
            return []
        return self._taken([activate] if activate.x == linear.out and self._private(linear.out) else [])

    def _residual_tail(self, out: Value) -> list[Op]:
        """Return the sum that reads the product `out`, if it comes next."""
        add = self._peek()
        if not isinstance(add, Add):
            return []
        return self._taken([add] if out in (add.a, add.b) and add.a != add.b and self._private(out) else [])

    def _taken(self, tail: list[Op]) -> list[Op]:
        self._at += len(tail)
        return tail

    def _take_heads(self, groups: list[Fused]) -> list[Fused]:
        """Move rotations, and head norms before them, into the attention that reads them."""
        moved: set[Value] = set()
        for group in groups:
            attention = group.ops[-1]
            if not isinstance(attention, Attention):
                continue
            chains = [self._head_chain(attention.q), self._head_chain(attention.k)]
            ropes = [chain[-1].rope for chain in chains if chain]
            # The native operation rotates both by the same angles.
            if len(ropes) == 2 and ropes[0] == ropes[1]:
                group.ops = [op for chain in chains for op in chain] + [attention]
                moved.update(op.out for op in group.ops[:-1])
        return [group for group in groups if group.out[0] not in moved]

    def _head_chain(self, value: Value) -> list[Any]:
        """Return the head norm and rotation that yield q or k; empty if other operations read them too."""
        rotate = self._producer[value]
        if not isinstance(rotate, Rotate) or rotate.first or not self._private(value):
            return []
        norm = self._producer[rotate.x]
        if isinstance(norm, RMSNorm) and norm.n_head == rotate.n_head and self._private(rotate.x):
            return [norm, rotate]
        return [rotate]


class Buffers:
    """An assignment of buffers to values; a buffer is free again after its value's last reader.

    new: makes a buffer of a width, with a row per token or (True) per output, and returns its number.
    """

    def __init__(
        self, new: Callable[[int, bool], int], graph: Graph, fused: list[Fused], taps: frozenset[str]
    ) -> None:
        self._new = new
        self._ids: dict[Value, int] = {}
        self._free: dict[tuple[int, bool], list[int]] = {}
        self._last_use = {v: i for i, op in enumerate(fused) for v in [*op.out, *op.inner, *op.reads]}
        for value in graph.values:
            if value.name in taps or value == graph.result:
                self._last_use[value] = len(fused)
        self._outputs: set[Value] = set()  # values with a row per output token
        for op in graph.primitives:
            if isinstance(op, SelectOutputs) or any(x in self._outputs for x in op.inputs):
                self._outputs.add(op.out)
        self._index = 0
        self._borrowed: list[tuple[tuple[int, bool], int]] = []

    def __getitem__(self, value: Value) -> int:
        return self._ids[value]

    def begin(self, value: Value) -> int:
        """Return the buffer of a value that no operation computes: the input of a part of a graph."""
        self._free.setdefault((value.width, False), [])
        self._ids[value] = self._new(value.width, False)
        return self._ids[value]

    def enter(self, op: Fused) -> None:
        for value in [*op.inner, *op.out]:
            shape = (value.width, value in self._outputs)
            free = self._free.setdefault(shape, [])
            self._ids[value] = free.pop() if free else self._new(*shape)

    def borrow(self, value: Value) -> int:
        """Return one more buffer of the shape of a value, until the current group ends."""
        shape = (value.width, value in self._outputs)
        free = self._free.setdefault(shape, [])
        self._borrowed.append((shape, free.pop() if free else self._new(*shape)))
        return self._borrowed[-1][1]

    def leave(self, op: Fused) -> None:
        for shape, number in self._borrowed:
            self._free[shape].append(number)
        self._borrowed = []
        for value in {*op.reads, *op.inner, *op.out}:
            if self._last_use[value] == self._index:
                self._free[value.width, value in self._outputs].append(self._ids[value])
        self._index += 1
