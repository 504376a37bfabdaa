"""Dispatches of recurrent operations: short convolutions, and state matrices that each token updates.

States are stored in slots (engine/states.py); VulkanInputs names the slots that a step reads and writes. One
workgroup computes the tokens of a sequence in order, so the order of sums depends on nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hotset import _core
from hotset.backends.vulkan.inputs import VulkanInputs, tiles_of
from hotset.backends.vulkan.kernels import Record, Recorder, by_values, stride_of
from hotset.backends.vulkan.memory import BufferRange, aligned
from hotset.backends.vulkan.weights import VulkanWeights
from hotset.model import operations as ops
from hotset.model.operations import SHIFT, Value

_SELECTIVE, _DELTA, _WKV6, _WKV7, _CHANNELS = range(5)  # csrc/vulkan/shaders/scan.comp
_UNIT_NORM, _DECAY = 0, 9  # norm.comp, elementwise.comp
_LENGTH_EPS = 1e-6  # added to the squared length of a query or key


class Values(Protocol):
    """The parts of a program (program.RecordedGraph) that its operations use.

    states: state slots, by the id of an operation's value. scratch: memory for intermediate results.
    """

    weights: VulkanWeights
    inputs: VulkanInputs
    states: Mapping[int, BufferRange]
    scratch: BufferRange
    max_batch: int

    def read(self, value: Value, n: int) -> _core.VulkanBinding:
        """Return a binding of n rows of a value for a dispatch that reads them."""
        ...

    def written(self, value: Value, n: int) -> _core.VulkanBinding:
        """Return a binding of n rows of a value for a dispatch that writes them."""
        ...


@dataclass(frozen=True)
class _Operand:
    """An operand of a scan, with a row per token. first: the operand's offset in a row, in floats."""

    bound: Callable[[int], _core.VulkanBinding]
    stride: int
    first: int = 0


@dataclass(frozen=True)
class _ScanOperands:
    """A scan's operands, as the shader reads them.

    share: how many adjacent heads share a key. tiled: 0, or the number n of keys if every n-th head shares
    one instead.
    """

    kind: int
    by_row: bool
    reader: _Operand
    key: _Operand
    value: _Operand
    decay: _Operand
    first: _Operand
    second: _Operand
    share: int = 1
    tiled: int = 0


def scratch_bytes(op: object, n: int) -> int:
    """Return the bytes for an operation's intermediate results with n tokens."""
    if isinstance(op, ops.DeltaNet):
        return aligned(4 * n * _width_of_keys(op)) + 8 * n * op.alpha.width
    return 8 * n * op.n_head if isinstance(op, ops.SelectiveScan) else 0


def derived_pieces(op: ops.Recurrent) -> dict[object, int]:
    """Return the sizes of the vectors that an operation derives from others, by key."""
    match op:
        case ops.ShortConv(weight=None):
            return {("shift", op.x.width): 4 * len(SHIFT) * op.x.width}
        case ops.DeltaNet():
            width = _width_of_keys(op)
            decay = {("decay", op.step, op.rate): 8 * op.alpha.width}
            return decay | {("lengths", op.dim_k, width): 4 * width}
        case ops.SelectiveScan():
            return {("decay", op.step, op.rate): 8 * op.dt.width}
    return {}


def short_conv(lowered: Values, op: ops.ShortConv) -> Record:
    """Return the record of a convolution, which also stores its last inputs for the next step."""
    width, weights, inputs = op.x.width, lowered.weights, lowered.inputs
    if op.weight is None:
        weight = weights.made(("shift", width), lambda: np.tile(SHIFT, width))
    else:
        weight = weights.vector(op.weight)
    bias = weights.bias(op.bias)
    state = lowered.states[op.out.id]
    push = width, stride_of(op.x), stride_of(op.out), op.kernel, lowered.max_batch, op.dilation

    def record(to: Recorder, n: int) -> None:
        bindings = [
            lowered.read(op.x, n), weight.bound(), (bias or weight).bound(), state.bound(written=True),
            inputs["states"].bound(), lowered.written(op.out, n),
        ]  # fmt: skip
        to.add("conv", [bias is not None], bindings, push, by_values(width, n))

    return record


def scan(lowered: Values, op: ops.DeltaNet | ops.SelectiveScan | ops.ChannelScan | ops.Wkv) -> Record:
    """Return the record of a scan over tokens, whose state is a matrix per head or numbers per channel."""
    prepared, operands = _operands(lowered, op)
    n_head, dim_k, dim_v = (1, *op.state_shape)[-3:]
    state, steps = lowered.states[op.out.id], lowered.inputs["states"]
    groups = lowered.inputs.groups_of("tiles", tiles_of(op))
    o = operands
    strides = [one.stride for one in (o.reader, o.key, o.value, o.decay, o.first, o.second)]
    firsts = [one.first for one in (o.reader, o.key, o.value)]

    def record(to: Recorder, n: int) -> None:
        prepared(to, n)
        read = [one.bound(n) for one in (o.reader, o.key, o.value, o.decay, o.first, o.second)]
        bindings = [*read, state.bound(written=True), steps.bound(), lowered.written(op.out, n)]
        push = [
            n_head, dim_v, n, lowered.max_batch, *strides, stride_of(op.out), *firsts, o.share,
            o.tiled,
        ]  # fmt: skip
        to.add_indirect("scan", [o.kind, dim_k, o.by_row], bindings, push, groups)

    return record


def _operands(lowered: Values, op: ops.Recurrent) -> tuple[Record, _ScanOperands]:
    """Return the record of the operands' preparation for all tokens at once, and the scan's operands."""

    def rows(value: Value, first: int = 0) -> _Operand:
        return _Operand(lambda n: lowered.read(value, n), stride_of(value), first)

    def vector(name: str) -> _Operand:
        piece = lowered.weights.vector(name)
        return _Operand(lambda _: piece.bound(), 0)

    match op:
        case ops.Wkv() if op.a is not None and op.b is not None:
            r, k, v, w, a, b = map(rows, (op.r, op.k, op.v, op.w, op.a, op.b))
            return _nothing, _ScanOperands(_WKV7, True, r, k, v, w, a, b)
        case ops.Wkv():
            r, k, v, w = map(rows, (op.r, op.k, op.v, op.w))
            return _nothing, _ScanOperands(_WKV6, True, r, k, v, w, w, w)  # the last two are not read
        case ops.ChannelScan():
            return _nothing, _ScanOperands(
                _CHANNELS, False, rows(op.c), rows(op.b), rows(op.x), vector(op.rate), rows(op.dt),
                vector(op.skip),
            )  # fmt: skip
        case ops.SelectiveScan():
            record, decay = _decay(lowered, op, lowered.scratch.part(0, scratch_bytes(op, lowered.max_batch)))
            key = op.out.width
            return record, _ScanOperands(
                _SELECTIVE, False, rows(op.x, key + op.n_group * op.dim_k), rows(op.x, key), rows(op.x),
                decay, rows(op.x), vector(op.skip), op.n_head // op.n_group,
            )  # fmt: skip
        case ops.DeltaNet():
            return _delta_net(lowered, op, rows)
    raise AssertionError(f"{op.out.name} is not a scan")


def _delta_net(
    lowered: Values, op: ops.DeltaNet, rows: Callable[..., _Operand]
) -> tuple[Record, _ScanOperands]:
    """Return the preparation and the operands of a delta net.

    Queries and keys pass a norm: x / sqrt(sum(x^2) + e) is 1 / sqrt(dim) times a unit norm.
    """
    width, dim = _width_of_keys(op), op.dim_k
    scale = np.repeat([1 / dim, dim**-0.5], width // 2)
    weight = lowered.weights.made(("lengths", dim, width), lambda: scale)
    at = aligned(4 * lowered.max_batch * width)
    keys = lowered.scratch.part(0, 4 * lowered.max_batch * width)
    gates, decay = _decay(lowered, op, lowered.scratch.part(at, 8 * lowered.max_batch * op.alpha.width))
    push = dim, stride_of(op.x), width, dim, _LENGTH_EPS / dim

    def record(to: Recorder, n: int) -> None:
        gates(to, n)
        x, out = lowered.read(op.x, n), keys.bound(4 * n * width, written=True)
        bindings = [x, weight.bound(), x, out, out]
        to.add("norm", [_UNIT_NORM, 1, 0], bindings, push, (2 * op.n_head_k, n, 1))

    reader = _Operand(lambda n: keys.bound(4 * n * width), width)
    key = _Operand(reader.bound, width, width // 2)
    beta = rows(op.beta)
    by_row = op.alpha.width != op.n_head
    return record, _ScanOperands(
        _DELTA, by_row, reader, key, rows(op.x, width), decay, beta, beta, op.n_head // op.n_head_k,
        op.n_head_k if op.tiled else 0,
    )  # fmt: skip


def _decay(
    lowered: Values, op: ops.DeltaNet | ops.SelectiveScan, to_piece: BufferRange
) -> tuple[Record, _Operand]:
    """Return the record of the decay of each row of a state and of softplus(x + step), and its result.

    Each row of the result has both, one after the other.
    """
    x = op.alpha if isinstance(op, ops.DeltaNet) else op.dt
    weights, n_rows = lowered.weights, x.width

    def both() -> np.ndarray:
        step, rate = (np.frombuffer(weights.vector(name).read(), np.float32) for name in (op.step, op.rate))
        return np.concatenate([step, np.repeat(rate, n_rows // op.n_head)])

    numbers = weights.made(("decay", op.step, op.rate), both)
    push = n_rows, stride_of(x), 0, 2 * n_rows, n_rows, 0, 0.0, 0.0, 0.0, 0.0

    def record(to: Recorder, n: int) -> None:
        out = to_piece.bound(8 * n * n_rows, written=True)
        bindings = [lowered.read(x, n), numbers.bound(), out]
        to.add("elementwise", [_DECAY, 0], bindings, push, by_values(n_rows, n))

    return record, _Operand(lambda n: to_piece.bound(8 * n * n_rows), 2 * n_rows)


def _width_of_keys(op: ops.DeltaNet) -> int:
    """Return the width of queries and keys together."""
    return 2 * op.n_head_k * op.dim_k


def _nothing(_: Recorder, __: int) -> None:
    """Record nothing, since the operands need no preparation."""
