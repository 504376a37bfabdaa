"""Lowering of a graph to a native plan: each group of fused operations (model/fusion.py) to native ones.

Values that are not alive together share memory. An FFN whose activation leaves neurons at zero becomes the
two operations that can skip them, `neurons` and `axpy` (docs/contributing/internals/sparse-ffn.md). Any
other FFN becomes its matrix products. An FFN with thresholds becomes the first form if that pays off.
Otherwise it becomes the second form, whose products apply the thresholds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import takewhile
from typing import Any, Literal, NoReturn

import numpy as np

from hotset import _core
from hotset.backends.adapters import AdapterSet
from hotset.backends.base import COUNTS, LOGIT_GROUP
from hotset.backends.decoded import decoded_vector, expert_biases
from hotset.errors import InvalidRequestError
from hotset.formats.channels import break_even, tile_of
from hotset.formats.planes import PLANE_GROUP
from hotset.formats.source import WeightSource
from hotset.model import operations as ops
from hotset.model.cost import kv_formats
from hotset.model.fusion import Buffers, Fused, fuse
from hotset.model.graph import Graph
from hotset.model.operations import NO_LAYER, PARTS, SHIFT, Op, Primitive, Value, one_matrix
from hotset.model.read_order import look_ahead
from hotset.model.rope import bias_of_keys
from hotset.offload.streaming import Streamed
from hotset.offload.weight_store import StoredWeights

PLANES = {2: 31, 1: 32}  # columns per byte of the codes → type in csrc/types.h
_NOT_NATIVE = (
    *("layer", "part", "site", "input_major", "source", "key_bias", "xielu", "first_weight"),
)  # fields of records
Facts = dict[str, Any]  # arguments of a native operation, by name; None values are left out
FetchKind = Literal["all", "selected", "nonzero", "routed", "tokens"]  # rows that later operations read
LEAST = float(np.finfo(np.float32).smallest_subnormal)  # neurons with at least this value fire


def linear_facts(weights: WeightSource, op: ops.Linear) -> Facts:
    """Return the facts of a matrix product: the rows of its weight, and of its bias."""
    info = weights.tensors[op.weight]
    first, last = op.first_row, op.first_row + op.out.width
    row = info.row_bytes
    bias = None if op.bias is None else decoded_vector(weights, op.bias)[first:last]
    data = weights.data(op.weight)
    if not isinstance(data, _core.StoredRows):
        data = data[first * row : last * row]
    return {"weight": (int(info.type), data), "bias": bias}


def expert_facts(weights: WeightSource, op: ops.ExpertLinear | ops.ExpertSum) -> Facts:
    """Return the facts of experts' matrices: tensors, rows per expert, the first row used, and bias."""
    return {
        "tensors": [(int(weights.tensors[name].type), weights.data(name)) for name in op.weights],
        "n_rows": weights.tensors[op.weights[0]].shape[1],
        "first_row": op.first_row if isinstance(op, ops.ExpertLinear) else 0,
        "bias": None if op.bias is None else expert_biases(weights, op).reshape(-1),
    }


def activation_facts(op: ops.Activate | None) -> Facts:
    """Return the facts of the activation of a product or a gate."""
    return {} if op is None else {"activation": op.kind, "activation_threshold": op.threshold}


def threshold_facts(ffn: ops.Ffn) -> Facts:
    """Return the thresholds of an FFN's input, of its gate activation, and of its neurons' values."""
    sites = {
        "input_threshold": ffn.in_threshold,
        "gate_threshold": ffn.gate_threshold,
        "value_threshold": ffn.down_threshold,
    }
    return {name: op.threshold for name, op in sites.items() if op is not None}


@dataclass
class Lowered:
    """A plan and the facts that its owner needs.

    result: buffer of the last value, logits or the residual stream. buffers: of the taps, by name. largest:
    buffer of StepResult.largest, or -1.

    cell: for each native operation, layer * len(PARTS) + part; operations outside the layers have layer 0.
    counted: for each operation and each of its COUNTS, the cell 1 + layer * len(COUNTS) + count to add it
    to; 0 for a count that is ignored.
    """

    plan: Any
    result: int
    buffers: dict[str, int]
    has_neurons: bool
    cell: np.ndarray  # int32
    counted: np.ndarray  # int32
    largest: int

    def largest_logits(self) -> np.ndarray | None:
        """Return the largest logits of the latest step, as StepResult.largest."""
        return None if self.largest < 0 else self.plan.rows(self.largest)


def _in_no_ffn(op: ops.Attention | ops.Indexer | ops.Recurrent) -> NoReturn:
    raise AssertionError(f"{op.out.name} is in no FFN")


@dataclass(frozen=True)
class LoweringOptions:
    """The options of lowering.

    sparse: skip the unneeded rows of an FFN with zeros. adapters: the adapters of a graph with LowRank.
    channel_rates, whole: see BackendOptions. streamed: weights that each step waits for. cache: returns the
    facts of an operation's keys and values. states: returns an operation's states, float32 [n_states, size].
    """

    sparse: bool
    channel_rates: Mapping[str, float]
    whole: Collection[str]
    streamed: Streamed | None = None
    cache: Callable[[ops.Attention | ops.Indexer], Facts] = _in_no_ffn
    states: Callable[[ops.Recurrent], np.ndarray] = _in_no_ffn
    adapters: AdapterSet | None = None


def lower(
    graph: Graph,
    taps: frozenset[str],
    weights: WeightSource,
    plan: Any,
    entering: Value | None,
    options: LoweringOptions,
) -> Lowered:
    """Fill an empty native plan. entering: the input rows of a part of a graph; None if it has none.

    Raises InvalidRequestError for an unknown tap.
    """
    unknown = taps - {op.out.name for op in graph.primitives}
    if unknown:
        raise InvalidRequestError(f"the model has no value named {min(unknown)!r} to tap")
    ahead = look_ahead(fuse(graph, taps), partial(_is_stored, weights))
    fused = ahead.groups
    buffers = Buffers(plan.buffer, graph, fused, taps)
    if entering is not None:
        plan.input(buffers.begin(entering))
    emit = _Emission(plan, buffers, weights, options)
    if isinstance(graph.ops[-1], ops.Linear):
        emit.logits = graph.result
    for i, group in enumerate(fused):
        buffers.enter(group)
        emit.group(group, fused[i + 1 :])
        if (ffn := ahead.begins.get(group.out[0])) is not None:
            emit.begin(ffn)
        buffers.leave(group)
    emit.end()
    plan.finish()
    kept = {op.out.name: buffers[op.out] for op in graph.primitives if op.out.name in taps}
    places = [(max(layer, 0), PARTS.index("other" if layer == NO_LAYER else part)) for layer, part in emit.at]
    layers, part = np.array(places).T
    return Lowered(
        plan,
        buffers[graph.result],
        kept,
        any(ffn is not None and ffn.leaves_out for ffn in (group.ffn for group in fused)),
        (layers * len(PARTS) + part).astype(np.int32),
        _cells_of_counts(layers, part == PARTS.index("ffn"), emit),
        emit.largest,
    )


@dataclass(frozen=True)
class LoweredFfn:
    """The native operations [first_op, end_op) of one FFN in a plan that has only FFNs.

    x, given, out: buffers of the input, of scores or routes, and of the result. gates, ups: as in _Emission.
    """

    ffn: ops.Ffn
    first_op: int
    end_op: int
    x: int
    given: int
    out: int
    gates: list[int]
    ups: list[int]


def lower_ffns(
    ffns: Sequence[ops.Ffn], weights: WeightSource, plan: Any, *, sparse: bool, whole: Collection[str]
) -> list[LoweredFfn]:
    """Lower FFNs without the rest of their layers, which the CPU computes for a device on given rows.

    Inputs are already normalised and thresholded. Split neurons are computed if their score is at least 0.
    For experts, a row is one expert of a token; its route names the expert with weight 1. sparse, whole: as
    in BackendOptions, for experts; unneeded split neurons are always skipped.
    """
    graph = Graph()
    h = graph.value("worker.input", ffns[0].x.width)
    given: dict[int, Value] = {}  # by width: scores of split neurons, or routes, which have width 2
    widths = [ffn.n_ff if ffn.route is None else 2 for ffn in ffns]
    for ffn, width in zip(ffns, widths, strict=True):
        if width not in given:
            given[width] = graph.value(f"worker.given.{width}", width)
        graph.add(_on_rows(ffn, h, given[width]))
    fused = fuse(graph, ())
    buffers = Buffers(plan.buffer, graph, fused, frozenset())
    for value in (h, *given.values()):
        buffers.begin(value)
    emit = _Emission(plan, buffers, weights, LoweringOptions(sparse, {}, whole))
    found = []
    for ffn, width, group in zip(ffns, widths, fused, strict=True):
        first, n_gates, n_ups = len(emit.at), len(emit.gates), len(emit.ups)
        buffers.enter(group)
        emit.rows(group, 1 if ffn.route is None else ffn.route.n_used)
        at = buffers[h], buffers[given[width]], buffers[group.out[0]]
        buffers.leave(group)
        found.append(LoweredFfn(ffn, first, len(emit.at), *at, emit.gates[n_gates:], emit.ups[n_ups:]))
    return found


def _on_rows(ffn: ops.Ffn, h: Value, given: Value) -> ops.Ffn:
    """Return an FFN that reads h, and the given scores or route instead of the graph's selection."""
    if ffn.route is None:
        gate = None if ffn.gate is None else replace(one_matrix(ffn.gate), input_major=None)
        up = replace(one_matrix(ffn.up), input_major=None)
        assert isinstance(ffn.down, ops.TransposedLinear)
        scored = ops.Mask(ffn.selected, ffn.selected, given, 0.0)
        down = replace(ffn.down, bias=None)
        return replace(ffn, x=h, norm=None, in_threshold=None, gate=gate, up=up, select=scored, down=down)
    assert isinstance(ffn.up, ops.ExpertLinear)
    assert isinstance(ffn.down, ops.ExpertSum)
    neurons = replace(ffn.selected, width=ffn.up.n_rows)
    experts_gate = ffn.gate
    return replace(
        ffn,
        x=h,
        norm=None,
        in_threshold=None,
        gate=replace(experts_gate, route=given, out=neurons)
        if isinstance(experts_gate, ops.ExpertLinear)
        else None,
        up=replace(ffn.up, route=given, out=neurons),
        select=ops.MaskedRoute(replace(ffn.route, out=given, n_used=1), None),
        down=replace(ffn.down, x=neurons, route=given),
    )


def _cells_of_counts(layers: np.ndarray, of_ffn: np.ndarray, emit: _Emission) -> np.ndarray:
    """Return Lowered.counted, int32 [n_ops * len(COUNTS)]."""
    gates, ups, products = emit.gates, emit.ups, emit.products
    selected, active, gate_rows, up_rows, down_rows, left_out = range(len(COUNTS))
    cells = 1 + layers[:, None] * len(COUNTS) + np.arange(len(COUNTS))
    # The operation that computes the gates counts the neurons: the rows of its `up` are gate rows.
    cells[gates, up_rows] = cells[gates, gate_rows]
    cells[gates, active] = cells[gates, gate_rows] = cells[gates, down_rows] = 0
    cells[ups, selected] = 0
    cells[products, active] = 0
    cells[~of_ffn, :left_out] = 0  # rows of predictors do not count as neurons
    cells[emit.shared, :left_out] = 0
    return cells.ravel().astype(np.int32)


def _is_stored(weights: WeightSource, name: str) -> bool:
    """Return whether a tensor's rows come from a store that does not hold all of them."""
    rows = weights.data(name)
    return isinstance(rows, _core.StoredRows) and not rows.store.is_whole


class _Emission:
    """A writer of native operations.

    at: layer and part of each operation so far. gates, ups: indices of operations that compute only an FFN's
    gates, and only its `up`. products: operations whose values are not yet neuron values. shared: indices of
    shared experts' operations. largest: as in Lowered. logits: the last value; its largest logits are found
    if its width is a multiple of LOGIT_GROUP.
    """

    def __init__(self, plan: Any, buffers: Buffers, weights: WeightSource, options: LoweringOptions) -> None:
        self._channel_rates, self._whole = options.channel_rates, options.whole
        self._rows_per_token = 1
        self._streamed, self._piece = options.streamed, -1  # the piece of the latest wait
        self._behind: Sequence[Fused] = ()  # the groups after the current one
        self._begun: set[Value] = set()  # results of FFNs whose rows are already being fetched
        self._plan, self._buffers, self._weights = plan, buffers, weights
        self._cache, self._states, self._sparse = options.cache, options.states, options.sparse
        self._adapters = options.adapters
        self.at: list[tuple[int, ops.Part]] = []
        self.gates: list[int] = []
        self.ups: list[int] = []
        self.products: list[int] = []
        self.shared: list[int] = []
        self.logits: Value | None = None
        self.largest = -1

    def group(self, group: Fused, behind: Sequence[Fused]) -> None:
        self._behind = behind
        if group.ffn is not None:
            self._ffn(group.ffn, group)
        else:
            self._await(*group.ops)
            self._operation(group)
            self.at.append((group.layer, group.part))

    def rows(self, group: Fused, rows_per_token: int) -> None:
        """Write an FFN on rows, of which each token has `rows_per_token`."""
        assert group.ffn is not None
        self._rows_per_token, sparse = rows_per_token, self._sparse
        self._sparse = sparse or group.ffn.route is None
        self._ffn(group.ffn, group)
        self._sparse = sparse

    def begin(self, ffn: ops.Ffn) -> None:
        """Start to fetch the rows of an FFN, without waiting for them."""
        if ffn.route is not None:
            assert isinstance(ffn.up, ops.ExpertLinear)
            self._fetch(ffn, ffn.up.weights[0], set(), "routed", self._buffers[ffn.route.out], waits=False)
        else:
            self._fetch_selected(ffn, set(), waits=False)
        self._begun.add(ffn.out)

    def end(self) -> None:
        """Let the stream read its next piece after all operations, for the next stage or the next step."""
        if self._streamed is not None:
            following = (self._piece + 1) % self._streamed.n_pieces
            self._add("await_piece", stream=self._streamed.stream, piece=following, waits=False)
            self.at.append((NO_LAYER, "other"))

    def _await(self, *operations: Op | None) -> None:
        """Make the step wait for the stream's piece that these operations read, one piece at most."""
        if self._streamed is None:
            return
        places, known = (
            self._streamed.places,
            [op for op in operations if op is not None and not isinstance(op, ops.Ffn)],
        )
        pieces = {places[name][0] for op in known for name in op.matrices if name in places}
        for piece in pieces - {self._piece}:
            assert len(pieces) == 1, "what is read together is one piece"
            self._add("await_piece", stream=self._streamed.stream, piece=piece, waits=True)
            self.at.append((known[0].layer, known[0].part))
            self._piece = piece

    def _operation(self, group: Fused) -> None:
        """Write a group as one native operation, named by the operation into which the others were fused."""
        buffers = self._buffers
        if group.linears:
            self._linears(group)
            return
        if isinstance(first := group.ops[0], ops.TransposedLinear):
            self._fetch(first, first.weight, set(), "nonzero", buffers[first.x])
            self._axpy(first, group.residual(first.out), group.out[0], buffers[first.x])
            return
        match main := group.ops[-1]:
            case ops.Embed():
                self._fetch(main, main.weight, set(), "tokens", buffers[main.out])
                self._plain(main)
            case ops.Activate() if main.xielu is not None:
                self._add("xielu", x=buffers[main.x], **asdict(main.xielu), out=buffers[main.out])
            case ops.Attention() | ops.Indexer():
                self._attention(main, group.ops[:-1])
            case ops.LowRank():
                self._low_rank(main, buffers[main.x], buffers[main.y], buffers[main.out])
            case ops.ShortConv() if main.weight is None:
                self._plain(
                    main, states=self._states(main), weight=np.tile(np.array(SHIFT, np.float32), main.x.width)
                )
            case ops.NgramEmbed():
                numbers = {
                    name: np.array(getattr(main, name), np.uint64).view(np.uint8)
                    for name in ("multipliers", "sizes", "offsets")
                }
                self._plain(main, states=self._states(main), **numbers)
            case (
                ops.ShortConv()
                | ops.DeltaNet()
                | ops.SelectiveScan()
                | ops.ChannelScan()
                | ops.Wkv()
                | ops.PoolBlocks()
            ):
                self._plain(main, states=self._states(main))
            case ops.Scale() if main.weight is not None:
                start, weight = main.first_weight, decoded_vector(self._weights, main.weight)
                self._plain(main, weight=weight[start : start + main.x.width])
            case ops.ExpertLinear() if main.of_parts:
                self._expert_sum(main, None, main.out)
            case ops.ExpertLinear():
                self._expert_products(main)
            case ops.ExpertSum():
                self._fetch(main, main.weights[0], set(), "routed", buffers[main.route])
                self._expert_sum(main, None, main.out)
            case ops.Ffn():
                raise AssertionError(f"{main.out.name} is not the last operation of a group")
            case _:
                self._plain(main)

    def _plain(self, op: Primitive, **more: Any) -> None:
        """Write an operation whose native facts are the fields of its record.

        Values become buffers, vectors are decoded, matrices and tables of rows become tensors.
        """
        kinds = {weight.name: weight.kind for weight in op.weights_read}
        facts: Facts = {}
        for field in fields(op):
            match value := getattr(op, field.name):
                case Value():
                    facts[field.name] = self._buffers[value]
                case ops.Rope():
                    facts[field.name] = rope_facts(value)
                case str() if value in kinds:
                    facts[field.name] = self._weight(value, kinds[value])
                case _ if field.name not in _NOT_NATIVE:
                    facts[field.name] = value
        self._add(native_name(type(op)), **{**facts, **more})

    def _weight(self, name: str, kind: ops.WeightKind) -> Any:
        """Return a vector as float32 [n], any other weight as a tensor: its type and bytes."""
        if kind == "vector":
            return decoded_vector(self._weights, name)
        return int(self._weights.tensors[name].type), self._weights.data(name)

    def _add(self, operation: str, **facts: Any) -> None:
        self._plan.add(operation, **{name: fact for name, fact in facts.items() if fact is not None})

    def _low_rank(self, op: ops.LowRank, x: int, y: int, out: int) -> None:
        """Write the sum of y and the adapters' products with x. x, y, out: buffers."""
        assert self._adapters is not None
        first, last = op.first_row, op.first_row + op.out.width
        adapters = [
            {
                "index": column,
                "rank": pair.rank,
                "factor": pair.factor,
                "a": (int(pair.a.type), pair.a.data),
                "b": (int(pair.b.type), pair.b.rows(first, last)),
            }
            for column, pair in self._adapters.pairs_of(op)
        ]
        self._add("low_rank", x=x, y=y, out=out, adapters=adapters, n_adapters=len(self._adapters.adapters))

    # ---- matrix products

    def _linears(self, group: Fused) -> None:
        """Write the products of one input, with the norm before and the fused operations after them."""
        linears, activate = group.linears, group.first(ops.Activate)
        outs = group.out if len(group.out) == len(linears) else [group.out[0]]
        self._products(
            group.first(ops.RMSNorm, ops.LayerNorm), linears, outs, group.residual(linears[0].out), activate,
            input_threshold=group.first(ops.Threshold),
        )  # fmt: skip

    def _products(
        self,
        norm: ops.RMSNorm | ops.LayerNorm | None,
        linears: Sequence[ops.Linear],
        outs: Sequence[Value],
        residual: Value | None = None,
        activate: ops.Activate | None = None,
        *,
        multiplied: bool = False,
        input_threshold: ops.Threshold | None = None,
        neuron_thresholds: Facts | None = None,
    ) -> None:
        """Write products of one input as one native operation.

        multiplied: the result is the first product, activated, times the second. norm, input_threshold: apply
        to the input. neuron_thresholds: thresholds of the activation, and of the result. Raises
        InvalidRequestError if a weight is in a store.
        """
        thresholds = {"input_threshold": None if input_threshold is None else input_threshold.threshold} | (
            neuron_thresholds or {}
        )
        for linear in linears:
            if isinstance(self._weights.data(linear.weight), _core.StoredRows):
                raise InvalidRequestError(
                    f"{linear.out.name} lies inside an FFN, which cannot be tapped under a memory budget"
                )
        channels, largest = self._channels(linears), None
        if outs[0] == self.logits and not any(channels) and outs[0].width % LOGIT_GROUP == 0:
            self.largest = largest = self._plan.buffer(outs[0].width // LOGIT_GROUP, True)
        self._add(
            "linear",
            x=self._buffers[norm.x if norm else input_threshold.x if input_threshold else linears[0].x],
            norm=self._norm(norm),
            parts=[
                {**linear_facts(self._weights, linear), "out": self._buffers[out], "channels": copy}
                for linear, out, copy in zip(linears, outs, channels, strict=True)
            ],
            residual=self._buffer(residual),
            gated=multiplied,
            **activation_facts(activate),
            **thresholds,
            largest=largest,
        )

    def _axpy(self, op: ops.TransposedLinear, residual: Value | None, out: Value, x: int) -> None:
        info, data = self._weights.tensors[op.weight], self._weights.data(op.weight)
        weight: tuple[Any, ...] = int(info.type), data
        if op.scales is not None:
            weight = PLANES[op.out.width // info.shape[0]], data, self._weights.data(op.scales)
        self._add(
            "transposed_linear", x=x, weight=weight, bias=self._bias(op.bias),
            residual=self._buffer(residual), sparse=self._sparse, out=self._buffers[out],
        )  # fmt: skip

    # ---- the FFN

    def _ffn(self, ffn: ops.Ffn, group: Fused) -> None:
        """Write an FFN: first its neurons' values, then the down projection."""
        first = len(self.at)
        self._ffn_alone(ffn, group)
        if ffn.shared:
            self.shared.extend(range(first, len(self.at)))

    def _ffn_alone(self, ffn: ops.Ffn, group: Fused) -> None:
        self._await(ffn.gate, ffn.up)
        if ffn.route is not None:
            self._experts(ffn, ffn.route, group)
            return
        fetched: set[int] = set()
        clamped = ffn.up_act is not None and ffn.up_act.kind == "clamp"  # no product computes it
        if ffn.low_rank(ffn.gate) or ffn.low_rank(ffn.up) or clamped:
            fetched = self._adapted_neurons(ffn)
        elif self._leaves_out_rows(ffn):
            fetched = self._neurons(ffn)
        else:
            assert ffn.up_act is None, "an activation of up needs one with zeros"
            # Only the product of gate and up exists: both use its buffer.
            products = [one_matrix(op) for op in (ffn.gate, ffn.up) if op is not None]
            xielu = ffn.gate_act.xielu
            self._products(
                ffn.norm, products, [ffn.selected] * len(products),
                activate=ffn.gate_act if xielu is None else None,
                multiplied=ffn.gate is not None, input_threshold=ffn.in_threshold,
                neuron_thresholds=threshold_facts(ffn) if xielu is None else None,
            )  # fmt: skip
            self.at.append((ffn.layer, ffn.part))
            if xielu is not None:
                self._bend_neurons(ffn)

        self._await(ffn.down)
        self._down(ffn, group, fetched)

    def _down(self, ffn: ops.Ffn, group: Fused, fetched: set[int]) -> None:
        """Write the down projection with its adapters and the residual."""
        residual, down, out = group.residual(ffn.out), ffn.down, group.out[0]
        added = ffn.low_rank(down)
        taken = residual if added is None else None  # the product adds it
        norms_inside = added is None and isinstance(down, ops.Linear)
        x = None if norms_inside else self._normed_neurons(ffn)
        if isinstance(down, ops.TransposedLinear):
            assert x is not None
            if ffn.has_zeros:
                self._fetch(ffn, down.weight, fetched, "nonzero", self._buffers[ffn.selected])
            self._axpy(down, taken, out, x)
        else:
            assert isinstance(down, ops.Linear)
            if x is not None:
                self._product(down, x, self._buffers[out])
            else:
                self._products(ffn.sub_norm, [down], [out], taken)
        self.at.append((ffn.layer, ffn.part))
        if added is not None:
            assert x is not None
            self._of_ffn(ffn, added, x, self._buffers[out])
            if residual is not None:
                at = self._buffers[out]
                self._in_place(ffn, "add", at, a=at, b=self._buffers[residual])

    def _bend_neurons(self, ffn: ops.Ffn) -> None:
        """Write xIELU of the result of `up`, in place, and the thresholds after it."""
        assert ffn.gate is None, "xIELU is of FFNs without a gate"
        neurons, f = self._buffers[ffn.selected], ffn.gate_act.xielu
        assert f is not None
        self._add("xielu", x=neurons, **asdict(f), out=neurons)
        self.at.append((ffn.layer, ffn.part))
        for op in (ffn.gate_threshold, ffn.down_threshold):
            if op is not None:
                self._add("threshold", x=neurons, threshold=op.threshold, out=neurons)
                self.at.append((ffn.layer, ffn.part))

    def _normed_neurons(self, ffn: ops.Ffn) -> int:
        """Return the buffer that the down projection reads. Write the norm of the neurons if there is one."""
        neurons, norm = self._buffers[ffn.selected], ffn.sub_norm
        if norm is None:
            return neurons
        out = self._buffers.borrow(ffn.selected)
        weight = decoded_vector(self._weights, norm.weight)
        self._add("rms_norm", x=neurons, weight=weight, eps=norm.eps, n_head=norm.n_head, out=out)
        self.at.append((ffn.layer, ffn.part))
        return out

    def _leaves_out_rows(self, ffn: ops.Ffn) -> bool:
        """Return whether rows of gate and up are skipped one by one.

        They are if an activation or a predictor leaves neurons out, or a threshold of the gate if that pays
        off. Rows in a store can only be read this way, except experts, which a store holds whole.
        """
        matrices = [op for op in (ffn.gate, ffn.up) if isinstance(op, ops.Linear)]
        stored = any(isinstance(self._weights.data(op.weight), _core.StoredRows) for op in matrices)
        by_threshold = ffn.gate is not None and ffn.gate_threshold is not None
        pays = by_threshold and self._sparse and ffn.up_tensor not in self._whole
        return ffn.fires_exactly or ffn.mask is not None or stored or pays

    def _experts(self, ffn: ops.Ffn, route: ops.Route, group: Fused) -> None:
        """Write an MoE FFN: its route, unless already computed, the experts' neurons, and their sum."""
        gate, up, down, mask = ffn.gate, ffn.up, ffn.down, ffn.mask
        is_begun = ffn.out in self._begun
        if isinstance(ffn.select, ops.Route) and not is_begun:
            self._plain(route)
            self.at.append((ffn.layer, ffn.part))
        assert isinstance(up, ops.ExpertLinear)
        assert isinstance(down, ops.ExpertSum)
        if not is_begun:
            overlaps = _is_stored(self._weights, up.weights[0])
            self._fetch(ffn, up.weights[0], set(), "routed", self._buffers[route.out], waits=not overlaps)
        up_act = ffn.up_act
        for missed in self._as_they_come(ffn, up.weights[0]):
            self._add(
                "expert_neurons",
                x=self._buffers[ffn.x],
                route=self._buffers[route.out],
                n_expert=up.n_expert,
                gate=expert_facts(self._weights, gate) if isinstance(gate, ops.ExpertLinear) else None,
                up=expert_facts(self._weights, up),
                **activation_facts(ffn.gate_act),
                up_activation=None if up_act is None else up_act.kind,
                up_threshold=None if up_act is None else up_act.threshold,
                scores=None if mask is None else self._buffers[mask.scores],
                threshold=None if mask is None else mask.threshold,
                gate_threshold=None if ffn.gate_threshold is None else ffn.gate_threshold.threshold,
                sparse=self._sparse and self._leaves_out_rows(ffn),
                out=self._buffers[ffn.selected],
                missed=missed,
            )
            self.at.append((ffn.layer, ffn.part))
        self._await(down)
        self._expert_sum(down, group.residual(ffn.out), group.out[0])
        self.at.append((ffn.layer, ffn.part))

    def _expert_products(self, op: ops.ExpertLinear) -> None:
        """Write the products with one matrix of the experts, for an FFN lowered as separate operations."""
        buffers = self._buffers
        self._fetch(op, op.weights[0], set(), "routed", buffers[op.route])
        self._add(
            "expert_neurons", x=buffers[op.x], route=buffers[op.route], n_expert=op.n_expert,
            up=expert_facts(self._weights, op), sparse=False, out=buffers[op.out],
        )  # fmt: skip

    def _expert_sum(self, op: ops.ExpertSum | ops.ExpertLinear, residual: Value | None, out: Value) -> None:
        """Write the sum of the experts' down projections; an ExpertLinear keeps its experts' rows apart."""
        self._add(
            "expert_sum", x=self._buffers[op.x], route=self._buffers[op.route], n_expert=op.n_expert,
            down=expert_facts(self._weights, op), residual=self._buffer(residual),
            neuron_major=isinstance(op, ops.ExpertSum) and op.neuron_major,
            apart=isinstance(op, ops.ExpertLinear), sparse=self._sparse, out=self._buffers[out],
            channels=self._copy(op, op.weights[0], op.out.width) if isinstance(op, ops.ExpertSum) else None,
        )  # fmt: skip

    def _fetch(
        self,
        op: Op,
        name: str,
        fetched: set[int],
        which: FetchKind,
        by: int,
        threshold: float = 0.0,
        first: int = 0,
        *,
        waits: bool = True,
    ) -> None:
        """Write the fetch of a tensor's rows, and of its group, from a store.

        Nothing is written if the tensor is in no store, or if its group is in `fetched`; otherwise the group
        is added to it. waits: wait for the rows here; False: `finish_fetch` waits later.
        """
        rows = self._weights.data(name)
        if not isinstance(rows, _core.StoredRows) or rows.group in fetched:
            return
        if not self._sparse and which not in ("routed", "tokens"):
            which = "all"
        by_rows: Facts = {}
        if which == "selected":
            by_rows = {"threshold": threshold, "first": first}
        elif which == "routed":
            by_rows = {"rows_per_token": self._rows_per_token}
        self._add("fetch", store=rows.store, group=rows.group, which=which, by=by, waits=waits, **by_rows)
        self.at.append((op.layer, op.part))
        fetched.add(rows.group)

    def _fetch_selected(self, ffn: ops.Ffn, fetched: set[int], *, waits: bool = True) -> None:
        """Write the fetch of the rows that a predictor names, as `_fetch`."""
        mask = ffn.mask
        assert mask is not None
        self._fetch(
            ffn, ffn.decides.weight, fetched, "selected", self._buffers[mask.scores], mask.threshold,
            mask.first, waits=waits,
        )  # fmt: skip

    def _neurons(self, ffn: ops.Ffn) -> set[int]:
        """Write the neurons' values. Return the groups of rows fetched for them."""
        mask, out = ffn.mask, self._buffers[ffn.selected]
        decides, up = ffn.decides.weight, self._weights.data(one_matrix(ffn.up).weight)
        fetched = self._fetch_deciding(ffn)
        if ffn.top_k is not None or (isinstance(up, _core.StoredRows) and up.group not in fetched):
            self._neurons_by_gate(ffn, fetched)
            return fetched
        gated = None if ffn.gate is None else one_matrix(ffn.gate)
        gate_copy, up_copy = self._channels([gated, one_matrix(ffn.up)])
        gate = None if gated is None else linear_facts(self._weights, gated)
        for missed in self._as_they_come(ffn, decides):
            self._add(
                "neurons",
                x=self._buffers[ffn.x],
                norm=self._norm(ffn.norm),
                gate=None if gate is None else {**gate, "channels": gate_copy},
                up={**linear_facts(self._weights, one_matrix(ffn.up)), "channels": up_copy},
                **activation_facts(ffn.gate_act),
                up_activation=None if ffn.up_act is None else ffn.up_act.kind,
                scores=None if mask is None else self._buffers[mask.scores],
                threshold=None if mask is None else mask.threshold,
                first=None if mask is None else mask.first,
                sparse=self._sparse,
                **threshold_facts(ffn),
                out=out,
                missed=missed,
            )
            self.at.append((ffn.layer, ffn.part))
        return fetched

    def _fetch_deciding(self, ffn: ops.Ffn) -> set[int]:
        """Write the fetch of the matrix that decides which neurons fire. Return its group, if in a store."""
        fetched: set[int] = set()
        decides = ffn.decides.weight
        overlaps = _is_stored(self._weights, decides)
        if ffn.out in self._begun:
            rows = self._weights.data(decides)
            assert isinstance(rows, _core.StoredRows)
            fetched.add(rows.group)
        elif ffn.mask is None:
            self._fetch(ffn, decides, fetched, "all", self._buffers[ffn.selected], waits=not overlaps)
        else:
            self._fetch_selected(ffn, fetched, waits=not overlaps)
        return fetched

    def _as_they_come(self, op: Op, name: str) -> Iterator[bool | None]:
        """Yield False for the rows in memory, then write a wait, then yield True for the rows that were read.

        Yield None once, for all rows, if the tensor's rows are not being fetched from a store.
        """
        if not _is_stored(self._weights, name):
            yield None
            return
        rows = self._weights.data(name)
        assert isinstance(rows, _core.StoredRows)
        yield False
        self._add("finish_fetch", store=rows.store, next=self._read_next())
        self.at.append((op.layer, op.part))
        yield True

    def _read_next(self) -> list[np.ndarray]:
        """Return the matrices in memory that operations between this FFN and the next one read."""
        groups = takewhile(lambda group: group.ffn is None, self._behind)
        operations = (op for group in groups for op in group.ops if not isinstance(op, ops.Ffn))
        names = [name for op in operations for name in op.matrices]
        return [
            data
            for name in names
            if isinstance(data := self._weights.data(name), np.ndarray)
            and not (self._streamed is not None and name in self._streamed.places)
        ]

    def _neurons_by_gate(self, ffn: ops.Ffn, fetched: set[int]) -> None:
        """Write the gates first, then `up`. The products are the same.

        This order is needed if all gates together decide which neurons fire, or to fetch only the rows of
        `up` for neurons that fire.
        """
        assert ffn.gate is not None
        out, fired = self._buffers[ffn.selected], self._buffers.borrow(ffn.selected)
        gate, up = one_matrix(ffn.gate), one_matrix(ffn.up)
        mask = ffn.mask
        thresholds = threshold_facts(ffn)
        of_input, of_value = thresholds.get("input_threshold"), thresholds.pop("value_threshold", None)
        shared = {"x": self._buffers[ffn.x], "norm": self._norm(ffn.norm), "sparse": self._sparse}
        unchanged = {"activation": "scale", "activation_threshold": 1.0}
        top_k, of_gate = ffn.top_k, None if ffn.top_k is None else thresholds.pop("gate_threshold", None)
        for missed in self._as_they_come(ffn, gate.weight):
            self._add(
                "neurons", **shared, up=linear_facts(self._weights, gate),
                **(activation_facts(ffn.gate_act) if top_k is None else unchanged),
                scores=None if mask is None else self._buffers[mask.scores],
                threshold=None if mask is None else mask.threshold,
                first=None if mask is None else mask.first,
                **thresholds, out=fired, missed=missed,
            )  # fmt: skip
            self.gates.append(len(self.at))
            self.at.append((ffn.layer, ffn.part))
        if top_k is not None:
            act = ffn.gate_act
            self._add("gaussian_top_k", x=fired, multiplier=top_k.multiplier, out=fired)
            self._add("activate", x=fired, kind=act.kind, threshold=act.threshold, out=fired)
            self.at += [(ffn.layer, ffn.part)] * 2
            if of_gate is not None:
                self._add("threshold", x=fired, threshold=of_gate, out=fired)
                self.at.append((ffn.layer, ffn.part))
        overlaps = _is_stored(self._weights, up.weight)
        self._fetch(ffn, up.weight, fetched, "nonzero", fired, waits=not overlaps)
        for missed in self._as_they_come(ffn, up.weight):
            self._add(
                "neurons", **shared, up=linear_facts(self._weights, up),
                **(unchanged if ffn.up_act is None else activation_facts(ffn.up_act)),
                scores=fired, threshold=LEAST, first=0, input_threshold=of_input, out=out, missed=missed,
            )  # fmt: skip
            self.ups.append(len(self.at))
            self.at.append((ffn.layer, ffn.part))
        self._add("multiply", a=fired, b=out, out=out)
        self.at.append((ffn.layer, ffn.part))
        if of_value is not None:
            self._add("threshold", x=out, threshold=of_value, out=out)
            self.at.append((ffn.layer, ffn.part))

    # ---- an FFN with adapters

    def _adapted_neurons(self, ffn: ops.Ffn) -> set[int]:
        """Write the neurons' values if gate or up has adapters, or up is clamped. Return as `_neurons`.

        Products, adapters and activations are separate operations. Rows are skipped as without adapters:
        rows of neurons that a predictor does not name, and rows of `up` if the gate is zero.
        """
        out, mask = self._buffers[ffn.selected], ffn.mask
        fetched = self._fetch_deciding(ffn)
        x = self._input(ffn)
        scores: Facts = {}
        if mask is not None:
            scores = {"scores": self._buffers[mask.scores], "threshold": mask.threshold, "first": mask.first}
        if ffn.gate is None:
            self._adapted_product(ffn, one_matrix(ffn.up), x, out, scores)
            self._decide(ffn, out)
        else:
            fired, up = self._buffers.borrow(ffn.selected), one_matrix(ffn.up)
            self._adapted_product(ffn, one_matrix(ffn.gate), x, fired, scores)
            self._decide(ffn, fired)
            which: FetchKind = "all" if mask is None else "selected"
            if ffn.fires_exactly:  # otherwise firing neurons may be negative
                which, scores = "nonzero", {"scores": fired, "threshold": LEAST, "first": 0}
            bounds = () if which != "selected" or mask is None else (mask.threshold, mask.first)
            overlaps = _is_stored(self._weights, up.weight)
            self._fetch(
                ffn, up.weight, fetched, which, scores.get("scores", fired), *bounds, waits=not overlaps
            )
            self._adapted_product(ffn, up, x, out, scores)
            if ffn.up_act is not None:
                self._activate(ffn, ffn.up_act, out)
            self._in_place(ffn, "multiply", out, a=fired, b=out)
        if ffn.down_threshold is not None:
            self._in_place(ffn, "threshold", out, x=out, threshold=ffn.down_threshold.threshold)
        return fetched

    def _input(self, ffn: ops.Ffn) -> int:
        """Return the buffer of the input of gate and up, normalised and thresholded."""
        x, norm = self._buffers[ffn.x], ffn.norm
        if norm is None and ffn.in_threshold is None:
            return x
        h = self._buffers.borrow(ffn.x)
        if norm is not None:
            facts = self._norm(norm)
            assert facts is not None
            name = "layer_norm" if facts.pop("layer") else "rms_norm"
            self._in_place(ffn, name, h, x=x, **facts, n_head=1)
            x = h
        if ffn.in_threshold is not None:
            self._in_place(ffn, "threshold", h, x=x, threshold=ffn.in_threshold.threshold)
        return h

    def _adapted_product(self, ffn: ops.Ffn, op: ops.Linear, x: int, out: int, scores: Facts) -> None:
        """Write a product of an FFN and its adapters. scores: facts of the scores that select rows."""
        if not self._leaves_out_rows(ffn):
            self._product(op, x, out)
            self.at.append((ffn.layer, ffn.part))
        else:
            for missed in self._as_they_come(ffn, op.weight):
                self._add(
                    "neurons", x=x, up=linear_facts(self._weights, op), activation="scale",
                    activation_threshold=1.0, **scores, sparse=self._sparse, out=out, missed=missed,
                )  # fmt: skip
                kind = self.products if ffn.gate is None else self.gates if op == ffn.gate else self.ups
                kind.append(len(self.at))
                self.at.append((ffn.layer, ffn.part))
        if (added := ffn.low_rank(op)) is not None:
            self._of_ffn(ffn, added, x, out)

    def _decide(self, ffn: ops.Ffn, at: int) -> None:
        """Write the activation, thresholds and mask of the sums that decide which neurons fire, in place."""
        if ffn.top_k is not None:
            self._in_place(ffn, "gaussian_top_k", at, x=at, multiplier=ffn.top_k.multiplier)
        self._activate(ffn, ffn.gate_act, at)
        if ffn.gate_threshold is not None:
            self._in_place(ffn, "threshold", at, x=at, threshold=ffn.gate_threshold.threshold)
        if (mask := ffn.mask) is not None:
            scores = {"scores": self._buffers[mask.scores], "threshold": mask.threshold, "first": mask.first}
            self._in_place(ffn, "mask", at, x=at, **scores)

    def _activate(self, ffn: ops.Ffn, op: ops.Activate, at: int) -> None:
        if op.xielu is not None:
            self._in_place(ffn, "xielu", at, x=at, **asdict(op.xielu))
        else:
            counts = ffn.gate is None and self._leaves_out_rows(ffn)
            self._in_place(ffn, "activate", at, x=at, kind=op.kind, threshold=op.threshold, counts=counts)

    def _of_ffn(self, ffn: ops.Ffn, added: ops.LowRank, x: int, at: int) -> None:
        self._low_rank(added, x, at, at)
        self.at.append((ffn.layer, ffn.part))

    def _in_place(self, ffn: ops.Ffn, operation: str, out: int, **facts: Any) -> None:
        """Write an operation inside an FFN, whose result may overwrite its input."""
        self._add(operation, **facts, out=out)
        self.at.append((ffn.layer, ffn.part))

    def _product(self, op: ops.Linear, x: int, out: int) -> None:
        """Write the product of x and a matrix. x, out: buffers."""
        self._add("linear", x=x, parts=[{**linear_facts(self._weights, op), "out": out}], gated=False)

    # ---- attention

    def _attention(self, main: ops.Attention | ops.Indexer, heads: Sequence[Any]) -> None:
        """Write an attention or its indexer. heads: the norms and rotations of q and k that were fused."""
        if isinstance(main, ops.Indexer):
            self._plain(main, **self._cache(main))
            return
        q, k = main.q, main.k
        rope, q_norm, k_norm = None, None, None
        for op in reversed(heads):
            if isinstance(op, ops.Rotate):
                rope = rope_facts(op.rope)
            norm = self._norm(op) if isinstance(op, ops.RMSNorm) else None
            if op.out == q:
                q, q_norm = op.x, norm or q_norm
            else:
                k, k_norm = op.x, norm or k_norm
        more = {"rope": rope, "q_norm": q_norm, "k_norm": k_norm, **self._cache(main)}
        if main.source is not None:  # another layer has stored them
            more |= {"k": None, "v": None}
        if main.key_bias is not None and kv_formats(more["kv_type"])[0].rotated:
            parts = bias_of_keys(main, decoded_vector(self._weights, main.key_bias.tensor))
            more |= {"rotated_bias": parts[0].ravel(), "same_bias": parts[1].ravel()}
            more["bias_rope"] = main.key_bias.rope and rope_facts(main.key_bias.rope)
        slopes = None if main.slopes is None else np.array(main.slopes, np.float32)
        self._plain(replace(main, q=q, k=k), **more, slopes=slopes)

    # ---- small things

    def _channels(self, operations: Sequence[ops.Linear | None]) -> list[Facts | None]:
        """Return the input-major copies of some products, as `_copy`."""
        return [
            None if op is None else self._copy(op, op.weight, op.out.width, op.first_row) for op in operations
        ]

    def _copy(self, op: ops.Linear | ops.ExpertSum, weight: str, width: int, first: int = 0) -> Facts | None:
        """Return the facts of an input-major copy; None if the product reads its rows instead.

        They are its data, all its outputs, the outputs of a tile, its first output, and the share of channels
        below which it pays off. Return None without a copy, if every channel is read, or under a memory
        budget, which has room only for the rows. The result is bitwise identical.
        """
        copy = None if isinstance(self._weights, StoredWeights) else op.input_major
        if copy is None or not self._sparse or first % PLANE_GROUP or width % PLANE_GROUP:
            return None
        info = self._weights.tensors[weight]
        n_rows = info.shape[1]
        return {
            "data": self._weights.data(copy),
            "cols": n_rows,
            "tile": tile_of(n_rows),
            "first": first,
            "below": break_even(info, self._channel_rates.get(weight, 1.0)),
        }

    def _buffer(self, value: Value | None) -> int | None:
        return None if value is None else self._buffers[value]

    def _bias(self, name: str | None) -> np.ndarray | None:
        return None if name is None else decoded_vector(self._weights, name)

    def _norm(self, op: ops.RMSNorm | ops.LayerNorm | None) -> Facts | None:
        if op is None:
            return None
        bias = self._bias(op.bias) if isinstance(op, ops.LayerNorm) else None
        ones = np.ones(op.x.width, np.float32)
        weight = ones if op.weight is None else decoded_vector(self._weights, op.weight)
        return {"layer": isinstance(op, ops.LayerNorm), "weight": weight, "bias": bias, "eps": op.eps}


def rope_facts(rope: ops.Rope) -> Facts:
    """Return a rotation as facts of a native operation."""
    return {
        "kind": rope.kind, "n_rot": rope.n_rot, "freq": list(rope.freq), "magnitude": rope.magnitude,
        "every": rope.every, "axes": None if rope.axes is None else list(rope.axes),
    }  # fmt: skip


def native_name(operation: type) -> str:
    """Return the name of an operation in csrc/ops: its class name in snake case."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", operation.__name__).lower()
