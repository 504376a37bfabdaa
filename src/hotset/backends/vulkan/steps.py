"""The steps of a graph on a Vulkan device: operations that are recorded together, and the memory of values.

A residual is fused into the product before it, an activation into the product of gate and up, and rotations
into the dispatch that stores keys and values. Products of one input share a dispatch.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from hotset.backends.base import BLOCK_SIZE
from hotset.backends.vulkan.inputs import OUTPUT_ROWS, SPLIT
from hotset.backends.vulkan.kernels import stride_of
from hotset.backends.vulkan.memory import aligned
from hotset.backends.vulkan.recurrent import scratch_bytes
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
from hotset.backends.vulkan.weights import FLOATS
from hotset.formats.gguf import TensorInfo
from hotset.model import operations as ops
from hotset.model.graph import Graph
from hotset.model.operations import Op, Primitive, Value

ON_HOST = (ops.Embed, ops.NgramEmbed, ops.PositionGain)  # the host computes their results
FEW = 8  # up to this many tokens attention is split, and float products use linear_few.comp
BLOCK = 32  # columns of a matrix that share a scale, and their inputs
ROUNDED_BYTES = 48  # of a rounded block of inputs (csrc/vulkan/shaders/rounded.glsl)
TILE = 32  # rows of a workgroup, and its tokens in kernels for many tokens
_MOST_JOINED = 3  # products of a dispatch (csrc/vulkan/shaders/product.glsl)

_Wanted = Value | ops.Mask | None
_Opened = tuple[Primitive | SplitOperation, _Wanted, bool]  # the last: a product of hot neurons


@dataclass(frozen=True)
class FusedStep:
    """An operation, or several that are recorded together.

    other: the value that is added to, or multiplied with, the first operation's result. wanted: the rows of a
    product that are computed: those with a nonzero value of an activation, or those that a mask selects.
    is_hot: a product of the hot neurons of a split layer. more: steps that the same dispatches compute: for a
    product others of its input, or up and the activation for a gate; for attention the rotations of k and q.
    """

    op: Primitive | SplitOperation
    out: Value
    other: Value | None = None
    wanted: _Wanted = None
    is_hot: bool = False
    more: tuple[FusedStep, ...] = ()

    @property
    def outs(self) -> tuple[Value, ...]:
        """Return the values that the step writes. A rotated key exists only in the cache."""
        inside = {self.op.k} if isinstance(self.op, ops.Attention) else set[Value]()
        return (self.out, *(one.out for one in self.more if one.out not in inside))

    @property
    def is_gated(self) -> bool:
        """Return whether a gate, up and the activation are computed together."""
        return bool(self.more) and isinstance(self.more[-1].op, ops.Activate)

    @property
    def products(self) -> tuple[ops.Linear, ...]:
        """Return the products of the step, if it computes several of one input."""
        found = [one.op for one in (self, *self.more) if isinstance(one.op, ops.Linear)]
        return tuple(found) if len(found) > 1 else ()

    def reads(self, tensors: Mapping[str, TensorInfo]) -> Iterator[tuple[Value, bool]]:
        """Yield the values that the step reads, and whether it reads them rounded."""
        made = {one.out for one in self.more} | ({self.out} if self.more else set())
        for one in (self, *self.more):
            rounded = rounded_input(one.op, tensors)
            others = (value for value in (one.other, _value_of(one.wanted)) if value is not None)
            for value in (*one.op.inputs, *others):
                if value not in made:
                    yield value, value == rounded


class ValueForm(NamedTuple):
    """How a value is stored: as floats, rounded for products with quantised weights, or both.

    by_maker: the kernel that computes the value rounds it; otherwise its first such reader is preceded by a
    dispatch that rounds it.
    """

    floats: bool
    rounded: bool
    by_maker: bool


def forms_of(
    steps: Sequence[FusedStep], kept: Collection[int], tensors: Mapping[str, TensorInfo]
) -> dict[int, ValueForm]:
    """Return the form of each value that a step reads or writes, by id. kept: ids of values that are read."""
    floats, rounded = set(kept), set[int]()
    for step in steps:
        for value, is_rounded in step.reads(tensors):
            (rounded if is_rounded else floats).add(value.id)
    makers = {value.id: step for step in reversed(steps) for value in step.outs}
    forms = {}
    for id in {*makers, *floats, *rounded}:
        by_maker = id in rounded and id in makers and _can_round(makers[id], id, id in floats)
        forms[id] = ValueForm(id in floats or not by_maker, id in rounded, by_maker)
    return forms


def _can_round(step: FusedStep, id: int, with_floats: bool) -> bool:
    """Return whether a step's kernel can round a result, and store floats too if `with_floats`."""
    if step.is_gated:
        return id == step.more[-1].out.id and not with_floats
    match step.op:
        case ops.RMSNorm() | ops.UnitNorm() | ops.LayerNorm():
            return step.op.n_head == 1
        case ops.Attention():
            return id == step.out.id and step.op.head_dim_v % BLOCK == 0
    return False


def steps_of(
    graph: Graph,
    tensors: Mapping[str, TensorInfo],
    taps: frozenset[str] = frozenset(),
    shared: SharedLayers | None = None,
) -> tuple[list[FusedStep], int]:
    """Return the steps in order, and the index of the first step of the tail, for the rows with logits."""
    steps = list(_Fusing(graph, tensors, taps, shared).steps())
    tail = (i for i, step in enumerate(steps) if isinstance(step.op, ops.SelectOutputs))
    return steps, next(tail, len(steps))


def n_splits(n_kv_blocks: int) -> int:
    """Return the number of running softmaxes for the longest context."""
    return -(-n_kv_blocks * BLOCK_SIZE // SPLIT)


# -- memory ----------------------------------------------------------------------------------------


_Place = tuple[int, bool]  # a value's id, and whether it is stored rounded


def places_of(
    steps: Sequence[FusedStep],
    first_of_tail: int,
    result: Value,
    max_batch: int,
    forms: Mapping[int, ValueForm],
    tensors: Mapping[str, TensorInfo],
    kept: Collection[int] = (),
) -> tuple[dict[_Place, tuple[int, int]], int]:
    """Return a place (offset, bytes) in one buffer for each form of each value, and the bytes of that buffer.

    Values that are alive at the same time do not overlap, and the results of a step are adjacent. kept: ids
    of values that stay alive. A result outside a tail has no place here: it is written to memory that the
    host reads.
    """
    of_tail = {value.id for step in steps[first_of_tail:] for value in step.outs}
    born: dict[_Place, int] = {}
    last: dict[_Place, int] = {}
    values: dict[int, Value] = {}
    for i, step in enumerate(steps):
        is_stored = not isinstance(step.op, (*ON_HOST, Submit))
        for value in step.outs if is_stored else ():
            values[value.id] = value
            for is_rounded in (False, True):
                form = forms[value.id]
                if form.by_maker if is_rounded else form.floats:
                    born[value.id, is_rounded] = last[value.id, is_rounded] = i
        for value, is_rounded in step.reads(tensors):
            values[value.id] = value
            if is_rounded and (value.id, True) not in born:  # a dispatch before the step rounds it
                born[value.id, True] = last[value.id, False] = i
            last[value.id, is_rounded] = i
    for key in last:
        id = key[0]
        if id in kept or id == result.id or (id not in of_tail and last[key] >= first_of_tail):
            last[key] = len(steps)  # the tail may run several times, once per OUTPUT_ROWS rows
    alive: list[tuple[int, int, _Place]] = []  # begin, end, key
    places: dict[_Place, tuple[int, int]] = {}
    size = 0
    own = set() if result.id in of_tail else {result.id}
    new: defaultdict[int, list[_Place]] = defaultdict(list)
    for key, i in born.items():
        if key[0] not in own:
            new[i].append(key)
    for i, keys in sorted(new.items()):
        alive = [one for one in alive if last[one[2]] >= i]
        sizes = {key: _bytes_of(values[key[0]], key, max_batch, key[0] in of_tail) for key in keys}
        at, needed = 0, sum(sizes.values())
        for begin, end, _ in sorted(alive):
            if at + needed <= begin:
                break
            at = max(at, end)
        for key, n_bytes in sizes.items():
            alive.append((at, at + n_bytes, key))
            places[key] = at, n_bytes
            at += n_bytes
        size = max(size, at)
    return places, size


def _bytes_of(value: Value, key: _Place, max_batch: int, is_of_tail: bool) -> int:
    n_rows = OUTPUT_ROWS if is_of_tail else max_batch
    return aligned(rounded_bytes(value, n_rows) if key[1] else 4 * n_rows * stride_of(value))


def rounded_bytes(value: Value, n: int) -> int:
    """Return the bytes of n rounded rows of a value."""
    return n * (value.width // BLOCK) * ROUNDED_BYTES


def part_bytes(steps: Sequence[FusedStep], max_batch: int, n_kv_blocks: int) -> tuple[int, int, int, int]:
    """Return four byte counts of scratch memory.

    The first is for the parts of the largest split attention; 0 if a context is one split. The second is for
    the numbers of its stored parts. The third is for one operation's intermediates: expert results before
    their sum, or the inputs of a scan. The fourth is for the groups of an MoE layer's pairs; 0 without one.
    """
    attention = [step.op for step in steps if isinstance(step.op, ops.Attention)]
    largest = max((op.n_head * (op.head_dim_v + 2) for op in attention), default=0)
    splits, few = n_splits(n_kv_blocks), min(FEW, max_batch)
    of_splits = 4 * few * largest * splits if splits > 1 else 0
    of_counts = 4 * few * max((op.n_head for op in attention), default=0)
    experts = (step.op.n_used * step.out.width for step in steps if isinstance(step.op, ops.ExpertSum))
    of_scans = (scratch_bytes(step.op, max_batch) for step in steps)
    of_groups = (
        2 * group_bytes(max_batch, step.op.n_used, step.op.x.width)
        for step in steps
        if isinstance(step.op, ops.Route)
    )
    of_operations = max(4 * max_batch * max(experts, default=0), *of_scans, 4)
    return of_splits, of_counts, of_operations, max(of_groups, default=0)


def n_tiles(n_pairs: int, n_expert: int, tokens: int) -> int:
    """Return the most tiles that n_pairs pairs of a token and an expert need, up to `tokens` pairs each."""
    return (n_pairs + min(n_expert, n_pairs) * (tokens - 1)) // tokens


def group_bytes(n: int, n_used: int, n_expert: int) -> int:
    """Return the bytes of the tiles of n tokens, of either size (csrc/vulkan/shaders/group.comp)."""
    sizes = (n_tiles(n * n_used, n_expert, tokens) * (tokens + 1) for tokens in (TOKENS_OF_FEW, TILE))
    return aligned(4 * (max(sizes) + n_expert))


def rounded_input(op: Primitive | SplitOperation, tensors: Mapping[str, TensorInfo]) -> Value | None:
    """Return the input of a product with quantised rows, which reads it rounded to eight bits.

    Return None for other operations.
    """
    match op:
        case ops.Linear() | ops.ExpertLinear() | ops.ExpertSum(neuron_major=False):
            return None if tensors[op.matrices[0]].type in FLOATS else op.x
    return None


def _value_of(wanted: _Wanted) -> Value | None:
    return wanted.scores if isinstance(wanted, ops.Mask) else wanted


# -- fusion ----------------------------------------------------------------------------------------


def _with_hot(
    op: Op, taps: frozenset[str], shared: SharedLayers | None, ids: Iterator[int]
) -> Iterator[_Opened]:
    """Yield the parts of an operation as _opened does, and whether each is a product of hot neurons.

    A split FFN yields only its device part. ids: numbers for new values.
    """
    if shared is None or not isinstance(op, ops.Ffn) or op not in shared:
        yield from ((part, wanted, False) for part, wanted in _opened(op, taps))
        return
    if op.route is not None:
        yield from ((part, None, False) for part in of_slots(op, ids))
        return
    hot = hot_part(op, len(shared.neurons[op.layer]), ids)
    for part, wanted in _opened(hot, taps):
        if part is hot.decides:
            yield from ((added, None, False) for added in operations_before(op, hot))
        yield part, wanted, isinstance(part, ops.Linear | ops.TransposedLinear)
    yield Gather(op.down.out, hot.down.out, layer=op.layer, part=op.part), None, False


def _opened(op: Op, taps: frozenset[str]) -> Iterator[tuple[Primitive, _Wanted]]:
    """Yield an operation, or the operations of an FFN, each with its selection of rows.

    `up` follows the activated gate, which selects its rows. A predictor selects rows of the first product.
    """
    if not isinstance(op, ops.Ffn):
        yield op, None
        return
    parts, wanted = list(op.primitives), dict[int, _Wanted]()
    is_whole = op.top_k is not None or bool(op.low_ranks) or any(part.out.name in taps for part in parts)
    if not is_whole and op.route is None and op.mask is not None:
        wanted[op.decides.out.id] = op.mask
    fires = op.fires_exactly and op.up_act is None and op.product is not None
    if fires and not is_whole and isinstance(op.up, ops.Linear) and op.gate_threshold is None:
        parts.remove(op.up)
        parts.insert(parts.index(op.gate_act) + 1, op.up)
        wanted[op.up.out.id] = op.fires
    yield from ((part, wanted.get(part.out.id)) for part in parts)


def _gathered_late(operations: list[_Opened], layers: Collection[int]) -> list[_Opened]:
    """Move sums that wait for the CPU's experts behind independent operations, such as the shared expert."""
    for one in [one for one in operations if isinstance(one[0], ops.ExpertSum) and one[0].layer in layers]:
        at, op = operations.index(one), one[0]
        later = (
            i
            for i in range(at + 1, len(operations))
            if op.out in operations[i][0].inputs or operations[i][0].layer != op.layer
        )
        to = next(later, at + 1)
        operations = [*operations[:at], *operations[at + 1 : to], one, *operations[to:]]
    return operations


class _Fusing:
    """The operations of a graph with their readers, from which steps are made.

    Two operations are fused only if nothing else reads the value between them.
    """

    def __init__(
        self,
        graph: Graph,
        tensors: Mapping[str, TensorInfo],
        taps: frozenset[str],
        shared: SharedLayers | None,
    ) -> None:
        self._tensors, self._taps, self._result = tensors, taps, graph.result
        ids = count(len(graph.values))
        operations = [one for op in graph.ops for one in _with_hot(op, taps, shared, ids)]
        if shared is not None and shared.experts is not None:
            operations = _gathered_late(operations, shared.experts.layers)
        self._readers = Counter(
            value.id for op, wanted, _ in operations for value in (*op.inputs, _value_of(wanted)) if value
        )
        rotations = {
            op.out: op for op, *_ in operations if isinstance(op, ops.Rotate) and self._is_private(op.out)
        }
        self._rotations = {
            op.out: found
            for op, *_ in operations
            if isinstance(op, ops.Attention) and (found := self._rotations_of(op, rotations))
        }
        moved = {one.out for found in self._rotations.values() for one in found}
        self._ops = [one for one in operations if one[0].out not in moved]

    def _is_private(self, value: Value) -> bool:
        """Return whether exactly one operation, and nothing else, reads a value."""
        return self._readers[value.id] == 1 and value.name not in self._taps and value != self._result

    @staticmethod
    def _rotations_of(op: ops.Attention, rotations: Mapping[Value, ops.Rotate]) -> tuple[ops.Rotate, ...]:
        """Return the rotations of k and q that are computed when k is stored; none, or one of k at least."""
        of_k, of_q = rotations.get(op.k), rotations.get(op.q)
        if of_k is None or op.source is not None or of_k.head_dim != op.head_dim:
            return ()
        if of_q is None or (of_q.rope, of_q.head_dim, of_q.first) != (of_k.rope, of_k.head_dim, of_k.first):
            return (of_k,)
        return of_k, of_q

    def steps(self) -> Iterator[FusedStep]:
        at = 0
        while at < len(self._ops):
            n, step = self._step(at)
            yield step
            at += n

    def _step(self, at: int) -> tuple[int, FusedStep]:
        """Return the number of operations, from the one at `at` on, that make a step, and the step."""
        op, wanted, is_hot = self._ops[at]
        if (gated := self._gated(at)) is not None:
            return 4, gated
        if joined := self._joined(at):
            others = tuple(FusedStep(one, one.out) for one in joined[1:])
            return len(joined), FusedStep(op, op.out, more=others)
        rotations = tuple(FusedStep(one, one.out) for one in self._rotations.get(op.out, ()))
        step = FusedStep(op, op.out, None, wanted, is_hot, rotations)
        behind = self._ops[at + 1][0] if at + 1 < len(self._ops) else None
        fits = (
            isinstance(op, ops.Linear | ops.TransposedLinear | Gather) and isinstance(behind, ops.Add)
        ) or (isinstance(op, ops.Activate) and isinstance(behind, ops.Multiply))
        if not (self._is_private(op.out) and fits and isinstance(behind, ops.Add | ops.Multiply)):
            return 1, step
        other = behind.b if behind.a == op.out else behind.a
        if op.out not in (behind.a, behind.b) or behind.a == behind.b or other.width != op.out.width:
            return 1, step
        return 2, FusedStep(op, behind.out, other, wanted, is_hot)

    def _gated(self, at: int) -> FusedStep | None:
        """Return the step of a gate, up, the activation and their product; None if they cannot be fused."""
        opened = self._ops[at : at + 4]
        match [one[0] for one in opened]:
            case [ops.Linear() as gate, ops.Linear() as up, ops.Activate() as act, ops.Multiply() as product]:
                pass
            case _:
                return None
        is_whole = all(wanted is None and not is_hot for _, wanted, is_hot in opened)
        is_private = all(map(self._is_private, (gate.out, up.out, act.out)))
        fits = act.x == gate.out and {product.a, product.b} == {act.out, up.out} and act.xielu is None
        is_rounded = rounded_input(gate, self._tensors) is not None and gate.out.width % BLOCK == 0
        if not (is_whole and is_private and fits and is_rounded and self._are_alike(gate, up)):
            return None
        if gate.out.width != up.out.width or product.out == self._result:
            return None
        last = FusedStep(act, product.out, up.out)
        return FusedStep(gate, gate.out, more=(FusedStep(up, up.out), last))

    def _joined(self, at: int) -> list[ops.Linear]:
        """Return products of one input that share a dispatch, such as q, k and v; none if there is one."""
        found: list[ops.Linear] = []
        for op, wanted, is_hot in self._ops[at : at + _MOST_JOINED]:
            if not isinstance(op, ops.Linear) or wanted is not None or is_hot or op.part == "ffn":
                break
            if found and not (self._are_alike(found[0], op) and found[-1].out.width % BLOCK == 0):
                break
            found.append(op)
        behind = self._ops[at + len(found)][0] if at + len(found) < len(self._ops) else None
        if found and (isinstance(behind, ops.Add) and found[-1].out in (behind.a, behind.b)):
            found.pop()
        return found if len(found) > 1 and self._result not in [op.out for op in found] else []

    def _are_alike(self, a: ops.Linear, b: ops.Linear) -> bool:
        """Return whether two products have the same input and type of weights, and both or no biases."""
        types = {self._tensors[op.weight].type for op in (a, b)}
        return a.x == b.x and len(types) == 1 and (a.bias is None) == (b.bias is None)
