"""Turns a graph into a native plan: each group of fused operations (backends/fusion.py) into native
operations.

Values that are not alive together share memory. An FFN whose activation leaves neurons at zero becomes the
two operations that can skip them, `neurons` and `axpy` (docs/DESIGN.md, "The sparse FFN"); any other becomes
its matrix products. One whose neurons are cut is of the first kind where that pays, else of the second: the
cutoffs go into the pass of its products.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any, assert_never

import numpy as np

from hotset import _core
from hotset.backends.ahead import look_ahead
from hotset.backends.base import COUNTS, LOGIT_GROUP, WeightSource
from hotset.backends.fusion import Buffers, Fused, fuse
from hotset.backends.stored import StoredWeights
from hotset.backends.streaming import Streamed
from hotset.errors import InvalidRequestError
from hotset.formats.channels import break_even, tile_of
from hotset.formats.planes import PLANE_GROUP
from hotset.formats.quants import GGMLType, dequantize, row_bytes
from hotset.model.graph import Graph
from hotset.model.operations import (
    NO_LAYER,
    PARTS,
    Activate,
    Add,
    Attention,
    Cutoff,
    DeltaNet,
    Embed,
    ExpertLinear,
    ExpertSum,
    Ffn,
    Heads,
    LayerNorm,
    Linear,
    Mask,
    Multiply,
    Op,
    Part,
    Recurrent,
    RMSNorm,
    Rotate,
    Route,
    Scale,
    SelectOutputs,
    ShortConv,
    SignScores,
    SoftCap,
    TransposedHeads,
    TransposedLinear,
    Value,
    has_zeros,
    one_matrix,
)

# Numbers of csrc/kernels/kernels.h.
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4, "fatrelu": 5, "sigmoid": 8}
ACTIVATIONS |= {"clamped_silu": 9, "clamped_plus_one": 10}
SCORINGS = {"softmax": 1, "sigmoid": 2, "softmax_chosen": 3}
SOFT_CAP, SCALE = 6, 7  # as activations: cap * tanh(x / cap), factor * x
PLANES = {2: 31, 1: 32}  # columns per byte of the codes → type
FETCH_ALL, FETCH_SELECTED, FETCH_NONZERO, FETCH_ROUTED, FETCH_TOKENS = range(5)
LEAST = float(np.finfo(np.float32).smallest_subnormal)  # what is not below it fires


def decoded_vector(weights: WeightSource, name: str) -> np.ndarray:
    """A vector of the file, float32 [n]."""
    info = weights.tensors[name]
    return np.ascontiguousarray(dequantize(weights.data(name), info.type, info.shape).reshape(-1))


def linear_matrix(weights: WeightSource, op: Linear) -> tuple[int, _core.Rows, np.ndarray | None]:
    """What the native core takes of a matrix product: type, bytes of its rows, bias."""
    info = weights.tensors[op.weight]
    first, last = op.first_row, op.first_row + op.out.width
    row = row_bytes(info.type, info.shape[0])
    bias = None if op.bias is None else decoded_vector(weights, op.bias)[first:last]
    data = weights.data(op.weight)
    if isinstance(data, _core.StoredRows):
        return int(info.type), data, bias
    return int(info.type), data[first * row : last * row], bias


def transposed_matrix(
    weights: WeightSource, op: TransposedLinear
) -> tuple[int, _core.Rows, np.ndarray | None]:
    """What the native core takes of a down projection by neurons: type, bytes or codes, scales of planes."""
    info = weights.tensors[op.weight]
    if op.scales is None:
        return int(info.type), weights.data(op.weight), None
    return PLANES[op.out.width // info.shape[0]], weights.data(op.weight), weights.data(op.scales)


def expert_part(weights: WeightSource, op: ExpertLinear | ExpertSum) -> Any:
    """What the native core takes of the experts' matrices: tensors, rows of each expert in them, the first
    that counts, bias."""
    first = op.first_row if isinstance(op, ExpertLinear) else 0
    n_rows = op.n_rows if isinstance(op, ExpertLinear) else op.out.width  # of the bias
    tensors = [(int(weights.tensors[name].type), weights.data(name)) for name in op.weights]
    bias = None
    if op.bias is not None:
        of_all = decoded_vector(weights, op.bias).reshape(op.n_expert, -1)
        bias = np.ascontiguousarray(of_all[:, first : first + n_rows]).reshape(-1)
    return tensors, weights.tensors[op.weights[0]].shape[1], first, bias


def activation(op: Activate) -> tuple[int, float]:
    """An activation as the native core takes it: its number and threshold."""
    return ACTIVATIONS[op.kind], op.threshold


def cutoffs_of(ffn: Ffn) -> tuple[float, float, float]:
    """Of an FFN's input, of the activation that decides, of its neurons' values; 0: none."""
    of = [0.0 if cut is None else cut.threshold for cut in (ffn.in_cut, ffn.gate_cut, ffn.down_cut)]
    return of[0], of[1], of[2]


@dataclass
class Lowered:
    """A plan with what its owner needs to know. result: buffer of the last value, logits or the residual
    stream. buffers: of the taps, by name. largest: as StepResult.largest, a buffer; -1: none.

    cell: of each native operation layer * len(PARTS) + part, of those outside of the layers the first layer.
    counted: of each of its COUNTS 1 + layer * len(COUNTS) + count, where it is added up; 0: nowhere.
    """

    plan: Any
    result: int
    buffers: dict[str, int]
    has_neurons: bool
    cell: np.ndarray  # int32
    counted: np.ndarray  # int32
    largest: int

    def largest_logits(self) -> np.ndarray | None:
        """Of the latest step, as StepResult.largest."""
        return None if self.largest < 0 else self.plan.rows(self.largest)


def lower(
    graph: Graph,
    taps: frozenset[str],
    weights: WeightSource,
    plan: Any,
    *,
    entering: Value | None,
    cache: Callable[[Attention], tuple[Any, ...]],
    states: Callable[[Recurrent], np.ndarray],
    sparse: bool,
    channel_rates: Mapping[GGMLType, float],
    streamed: Streamed | None = None,
    whole: Collection[str] = (),
) -> Lowered:
    """Fills an empty native plan. entering: the rows that a part of a graph begins with. cache: what
    `Plan.attention` takes of an operation's keys and values. states: of an operation, float32
    [n_states, size].

    sparse: leaves out what an FFN with zeros does not need. channel_rates, whole: see CpuBackend. streamed:
    weights that each step waits for. Raises InvalidRequestError for an unknown tap.
    """
    unknown = taps - {op.out.name for op in graph.primitives}
    if unknown:
        raise InvalidRequestError(f"the model has no value named {min(unknown)!r} to tap")
    ahead = look_ahead(fuse(graph, taps), partial(_is_stored, weights))
    fused = ahead.groups
    buffers = Buffers(plan.buffer, graph, fused, taps)
    if entering is not None:
        plan.input(buffers.begin(entering))
    emit = _Emission(plan, buffers, weights, cache, states, sparse, channel_rates, streamed, whole)
    if isinstance(graph.ops[-1], Linear):
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
        _cells_of_counts(layers, part == PARTS.index("ffn"), emit.gates, emit.ups),
        emit.largest,
    )


def _cells_of_counts(layers: np.ndarray, of_ffn: np.ndarray, gates: list[int], ups: list[int]) -> np.ndarray:
    """Lowered.counted. gates, ups: operations that compute an FFN's gates alone, and the rest."""
    selected, active, gate_rows, up_rows, down_rows, left_out = range(len(COUNTS))
    cells = 1 + layers[:, None] * len(COUNTS) + np.arange(len(COUNTS))
    # Neurons are counted by the operation that computes the gates: its rows are those of an up.
    cells[gates, up_rows] = cells[gates, gate_rows]
    cells[gates, active] = cells[gates, gate_rows] = cells[gates, down_rows] = 0
    cells[ups, selected] = 0
    cells[~of_ffn, :left_out] = 0  # rows of predictors are no neurons
    return cells.ravel().astype(np.int32)


def _is_stored(weights: WeightSource, name: str) -> bool:
    """Whether rows of a tensor come from a store that does not hold all of them."""
    rows = weights.data(name)
    return isinstance(rows, _core.StoredRows) and not rows.store.is_whole


class _Emission:
    """Writes native operations. at: layer and part of each so far. gates, ups, largest: as Lowered. logits:
    the last value, of which the largest are found where its groups are whole."""

    def __init__(
        self,
        plan: Any,
        buffers: Buffers,
        weights: WeightSource,
        cache: Callable[[Attention], tuple[Any, ...]],
        states: Callable[[Recurrent], np.ndarray],
        sparse: bool,
        channel_rates: Mapping[GGMLType, float],
        streamed: Streamed | None,
        whole: Collection[str],
    ) -> None:
        self._channel_rates, self._whole = channel_rates, whole
        self._streamed, self._piece = streamed, -1  # which was waited for last
        self._behind: Sequence[Fused] = ()  # groups
        self._begun: set[Value] = set()  # results of FFNs whose rows are on their way
        self._plan, self._buffers, self._weights = plan, buffers, weights
        self._cache, self._states, self._sparse = cache, states, sparse
        self.at: list[tuple[int, Part]] = []
        self.gates: list[int] = []
        self.ups: list[int] = []
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

    def begin(self, ffn: Ffn) -> None:
        """Has the rows of an FFN be read from here on."""
        if ffn.route is not None:
            assert isinstance(ffn.up, ExpertLinear)
            self._fetch(
                ffn, ffn.up.weights[0], set(), FETCH_ROUTED, self._buffers[ffn.route.out], waits=False
            )
        else:
            self._fetch_selected(ffn, set(), waits=False)
        self._begun.add(ffn.out)

    def end(self) -> None:
        """What a stream brings next may be read when all is done: for the stage behind, or the next step."""
        if self._streamed is not None:
            following = (self._piece + 1) % self._streamed.n_pieces
            self._plan.await_piece(self._streamed.stream, following, False)
            self.at.append((NO_LAYER, "other"))

    def _await(self, *ops: Op | None) -> None:
        """Has the step wait for the piece of a stream that operations read, one piece at most."""
        if self._streamed is None:
            return
        places, known = (
            self._streamed.places,
            [op for op in ops if op is not None and not isinstance(op, Ffn)],
        )
        pieces = {places[name][0] for op in known for name in op.matrices if name in places}
        for piece in pieces - {self._piece}:
            assert len(pieces) == 1, "what is read together is one piece"
            self._plan.await_piece(self._streamed.stream, piece, True)
            self.at.append((known[0].layer, known[0].part))
            self._piece = piece

    def _operation(self, group: Fused) -> None:
        """A group that becomes one native operation: told by the operation that the others were fused
        into."""
        plan, buffers = self._plan, self._buffers
        if group.linears:
            self._linears(group)
            return
        if isinstance(first := group.ops[0], TransposedLinear):
            self._fetch(first, first.weight, set(), FETCH_NONZERO, buffers[first.x])
            self._axpy(first, group.residual(first.out), group.out[0])
            return
        main = group.ops[-1]
        out = buffers[main.out]
        match main:
            case Embed():
                info = self._weights.tensors[main.weight]
                self._fetch(main, main.weight, set(), FETCH_TOKENS, out)
                plan.embed(
                    int(info.type), self._weights.data(main.weight), int(info.shape[1]),
                    main.of == "position", main.first_row, out,
                )  # fmt: skip
            case Mask():
                plan.mask(buffers[main.x], buffers[main.scores], main.threshold, main.first, out)
            case Cutoff():
                plan.cutoff(buffers[main.x], main.threshold, out)
            case SignScores():
                plan.sign_scores(buffers[main.x], self._weights.data(main.weight), self._bias(main.bias), out)
            case SelectOutputs():
                plan.select(buffers[main.x], out)
            case RMSNorm() | LayerNorm():
                layer, weight, bias, eps = self._norm(main)
                n_head = main.n_head if isinstance(main, RMSNorm) else 1
                plan.norm(layer, weight, bias, eps, n_head, buffers[main.x], out)
            case Rotate():
                plan.rotate(buffers[main.x], out, main.n_head, main.head_dim, self._rope(main), main.first)
            case Heads() | TransposedHeads():
                self._heads(main, out)
            case Attention():
                self._attention(main, group.ops[:-1])
            case ShortConv() | DeltaNet():
                self._recurrent(main, out)
            case Activate():
                plan.activate(*activation(main), buffers[main.x], out)
            case SoftCap():
                plan.activate(SOFT_CAP, main.cap, buffers[main.x], out)
            case Scale():
                plan.activate(SCALE, main.factor, buffers[main.x], out)
            case Add():
                plan.add(buffers[main.a], buffers[main.b], out)
            case Multiply():
                plan.multiply(buffers[main.a], buffers[main.b], out)
            case Route():
                self._route(main, main.out)
            case ExpertLinear() if main.of_parts:
                self._expert_sum(main, None, main.out)
            case ExpertLinear():
                self._expert_products(main)
            case ExpertSum():
                self._fetch(main, main.weights[0], set(), FETCH_ROUTED, buffers[main.route])
                self._expert_sum(main, None, main.out)
            case Linear() | TransposedLinear() | Ffn():
                raise AssertionError(f"{main.out.name} is no group's last operation")
            case _:
                assert_never(main)

    # ---- matrix products

    def _linears(self, group: Fused) -> None:
        """Products of one input, with the norm before them and what follows them."""
        linears, activate = group.linears, group.first(Activate)
        outs = group.out if len(group.out) == len(linears) else [group.out[0]]
        self._products(
            group.first(RMSNorm, LayerNorm), linears, outs, group.residual(linears[0].out), activate,
            cut=group.first(Cutoff),
        )  # fmt: skip

    def _products(
        self,
        norm: RMSNorm | LayerNorm | None,
        linears: Sequence[Linear],
        outs: Sequence[Value],
        residual: Value | None = None,
        activate: Activate | None = None,
        *,
        multiplied: bool = False,
        cut: Cutoff | None = None,
        neuron_cuts: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        """multiplied: the first product, activated, times the second is the result. norm, cut: in front.
        neuron_cuts: cutoffs of the activation, and of the result."""
        for linear in linears:
            if isinstance(self._weights.data(linear.weight), _core.StoredRows):
                raise InvalidRequestError(
                    f"{linear.out.name} lies inside an FFN, which cannot be tapped under a memory budget"
                )
        channels, largest = self._channels(linears), -1
        if outs[0] == self.logits and not channels and outs[0].width % LOGIT_GROUP == 0:
            self.largest = largest = self._plan.buffer(outs[0].width // LOGIT_GROUP, True)
        self._plan.linear(
            self._buffers[norm.x if norm else cut.x if cut else linears[0].x],
            self._norm(norm) if norm else None,
            [self._part(linear, out) for linear, out in zip(linears, outs, strict=True)],
            self._residual(residual),
            multiplied,
            activation(activate) if activate else None,
            (0.0 if cut is None else cut.threshold, *neuron_cuts),
            channels,
            largest,
        )

    def _axpy(self, op: TransposedLinear, residual: Value | None, out: Value) -> None:
        self._plan.axpy(
            self._buffers[op.x], *transposed_matrix(self._weights, op), self._bias(op.bias),
            self._residual(residual), self._sparse, self._buffers[out],
        )  # fmt: skip

    # ---- the FFN

    def _ffn(self, ffn: Ffn, group: Fused) -> None:
        """Two native operations: up to the values of the neurons, and down."""
        self._await(ffn.gate, ffn.up)
        if ffn.route is not None:
            self._experts(ffn, ffn.route, group)
            return
        fetched: set[int] = set()
        if self._leaves_out_rows(ffn):
            fetched = self._neurons(ffn)
        else:
            assert ffn.up_act is None, "an activation of up stands beside one with zeros alone"
            # Of gate and up only the product exists: its buffer stands for both.
            products = [one_matrix(op) for op in (ffn.gate, ffn.up) if op is not None]
            self._products(
                ffn.norm, products, [ffn.selected] * len(products), activate=ffn.gate_act,
                multiplied=ffn.gate is not None, cut=ffn.in_cut, neuron_cuts=cutoffs_of(ffn)[1:],
            )  # fmt: skip
            self.at.append((ffn.layer, ffn.part))

        residual, down = group.residual(ffn.out), ffn.down
        self._await(down)
        if isinstance(down, TransposedLinear):
            if ffn.has_zeros:
                self._fetch(ffn, down.weight, fetched, FETCH_NONZERO, self._buffers[ffn.selected])
            self._axpy(down, residual, group.out[0])
        else:
            assert isinstance(down, Linear)
            self._products(None, [down], [group.out[0]], residual)
        self.at.append((ffn.layer, ffn.part))

    def _leaves_out_rows(self, ffn: Ffn) -> bool:
        """Whether rows of gate and up are left out one by one: those of neurons that an activation leaves at
        zero, or a cutoff of the gate where that pays. Rows of a store lie where only this can read them, but
        for those of experts, which are whole there."""
        matrices = [op for op in (ffn.gate, ffn.up) if isinstance(op, Linear)]
        stored = any(isinstance(self._weights.data(op.weight), _core.StoredRows) for op in matrices)
        by_cutoff = ffn.gate is not None and ffn.gate_cut is not None
        pays = by_cutoff and self._sparse and ffn.up_tensor not in self._whole
        return has_zeros(ffn.gate_act.kind) or ffn.mask is not None or stored or pays

    def _experts(self, ffn: Ffn, route: Route, group: Fused) -> None:
        """Three native operations: who computes (unless that was found before), the neurons of these, and
        their sum."""
        gate, up, down, mask = ffn.gate, ffn.up, ffn.down, ffn.mask
        is_begun = ffn.out in self._begun
        if mask is None and not is_begun:
            self._route(route, route.out)
            self.at.append((ffn.layer, ffn.part))
        assert isinstance(up, ExpertLinear)
        assert isinstance(down, ExpertSum)
        if not is_begun:
            overlaps = _is_stored(self._weights, up.weights[0])
            self._fetch(ffn, up.weights[0], set(), FETCH_ROUTED, self._buffers[route.out], waits=not overlaps)
        for missed in self._as_they_come(ffn, up.weights[0]):
            self._plan.expert_neurons(
                self._buffers[ffn.x],
                self._buffers[route.out],
                up.n_expert,
                expert_part(self._weights, gate) if isinstance(gate, ExpertLinear) else None,
                expert_part(self._weights, up),
                activation(ffn.gate_act),
                activation(ffn.up_act) if ffn.up_act else None,
                (self._buffers[mask.scores], mask.threshold) if mask else None,
                cutoffs_of(ffn)[1],
                self._sparse and self._leaves_out_rows(ffn),
                self._buffers[ffn.selected],
                missed,
            )
            self.at.append((ffn.layer, ffn.part))
        self._await(down)
        self._expert_sum(down, group.residual(ffn.out), group.out[0])
        self.at.append((ffn.layer, ffn.part))

    def _route(self, op: Route, out: Value) -> None:
        self._plan.route(
            self._buffers[op.x], op.n_used, SCORINGS[op.scoring], self._bias(op.bias), op.normalised,
            op.scale, op.n_groups, op.n_groups_used, op.group_best, self._buffers[out],
        )  # fmt: skip

    def _expert_products(self, op: ExpertLinear) -> None:
        """Of an FFN that was taken apart: products with one matrix of its experts."""
        buffers = self._buffers
        self._fetch(op, op.weights[0], set(), FETCH_ROUTED, buffers[op.route])
        self._plan.expert_neurons(
            buffers[op.x], buffers[op.route], op.n_expert, None, expert_part(self._weights, op), None, None,
            None, 0.0, False, buffers[op.out], None,
        )  # fmt: skip

    def _expert_sum(self, op: ExpertSum | ExpertLinear, residual: Value | None, out: Value) -> None:
        """Or, of an ExpertLinear, what it sums side by side."""
        apart, by_neuron = isinstance(op, ExpertLinear), isinstance(op, ExpertSum) and op.by_neuron
        self._plan.expert_sum(
            self._buffers[op.x], self._buffers[op.route], op.n_expert, expert_part(self._weights, op),
            self._residual(residual), by_neuron, apart, self._sparse, self._buffers[out],
        )  # fmt: skip

    def _fetch(
        self,
        op: Op,
        name: str,
        fetched: set[int],
        which: int,
        by: int,
        threshold: float = 0.0,
        first: int = 0,
        *,
        waits: bool = True,
    ) -> None:
        """Has a store fetch rows of a tensor, and those of its group, for an operation: where they come from
        one and are not among the groups that have been `fetched`, to which this one is added. waits: until
        they are there, else `finish_fetch` does."""
        rows = self._weights.data(name)
        if not isinstance(rows, _core.StoredRows) or rows.group in fetched:
            return
        if not self._sparse and which not in (FETCH_ROUTED, FETCH_TOKENS):
            which = FETCH_ALL
        self._plan.fetch(rows.store, rows.group, which, by, threshold, first, waits)
        self.at.append((op.layer, op.part))
        fetched.add(rows.group)

    def _fetch_selected(self, ffn: Ffn, fetched: set[int], *, waits: bool = True) -> None:
        """As `_fetch`: what a predictor names."""
        mask = ffn.mask
        assert mask is not None
        self._fetch(
            ffn, ffn.decides.weight, fetched, FETCH_SELECTED, self._buffers[mask.scores], mask.threshold,
            mask.first, waits=waits,
        )  # fmt: skip

    def _neurons(self, ffn: Ffn) -> set[int]:
        """Up to the neurons. Returns the groups of rows that were fetched for it."""
        mask, out = ffn.mask, self._buffers[ffn.selected]
        fetched: set[int] = set()
        decides, up = ffn.decides.weight, self._weights.data(one_matrix(ffn.up).weight)
        overlaps = _is_stored(self._weights, decides)
        if ffn.out in self._begun:
            rows = self._weights.data(decides)
            assert isinstance(rows, _core.StoredRows)
            fetched.add(rows.group)
        elif mask is None:
            self._fetch(ffn, decides, fetched, FETCH_ALL, out, waits=not overlaps)
        else:
            self._fetch_selected(ffn, fetched, waits=not overlaps)
        if isinstance(up, _core.StoredRows) and up.group not in fetched:
            self._neurons_by_gate(ffn, fetched)
            return fetched
        for missed in self._as_they_come(ffn, decides):
            self._plan.neurons(
                self._buffers[ffn.x],
                self._norm(ffn.norm) if ffn.norm else None,
                self._part(one_matrix(ffn.gate), ffn.selected) if ffn.gate else None,
                self._part(one_matrix(ffn.up), ffn.selected),
                activation(ffn.gate_act),
                ACTIVATIONS[ffn.up_act.kind] if ffn.up_act else None,
                (self._buffers[mask.scores], mask.threshold, mask.first) if mask else None,
                self._sparse,
                out,
                cutoffs_of(ffn),
                self._channels([one_matrix(op) for op in (ffn.gate, ffn.up) if op is not None]),
                missed,
            )
            self.at.append((ffn.layer, ffn.part))
        return fetched

    def _as_they_come(self, op: Op, name: str) -> Iterator[bool | None]:
        """Twice, for what was there and for what had to be read, where rows of a tensor are on their way;
        else once, for all. Between the two the step waits."""
        if not _is_stored(self._weights, name):
            yield None
            return
        rows = self._weights.data(name)
        assert isinstance(rows, _core.StoredRows)
        yield False
        self._plan.finish_fetch(rows.store, self._read_next())
        self.at.append((op.layer, op.part))
        yield True

    def _read_next(self) -> list[np.ndarray]:
        """Matrices in memory that operations behind this FFN read, up to the next one."""
        groups = takewhile(lambda group: group.ffn is None, self._behind)
        ops = (op for group in groups for op in group.ops if not isinstance(op, Ffn))
        names = [name for op in ops for name in op.matrices]
        return [
            data
            for name in names
            if isinstance(data := self._weights.data(name), np.ndarray)
            and not (self._streamed is not None and name in self._streamed.places)
        ]

    def _neurons_by_gate(self, ffn: Ffn, fetched: set[int]) -> None:
        """Gates first, so that of up only the rows of those that fire are fetched: the same products."""
        assert ffn.gate is not None
        plan, out, norm = self._plan, self._buffers[ffn.selected], self._norm(ffn.norm) if ffn.norm else None
        x, fired = self._buffers[ffn.x], self._buffers.borrow(ffn.selected)
        names = [one_matrix(op).weight for op in (ffn.gate, ffn.up)]
        gate, up = (linear_matrix(self._weights, one_matrix(op)) for op in (ffn.gate, ffn.up))
        of_input, of_gate, of_value = cutoffs_of(ffn)
        kind = activation(ffn.gate_act)
        cutoffs = of_input, of_gate, 0.0
        for missed in self._as_they_come(ffn, names[0]):
            plan.neurons(
                x, norm, None, (*gate, fired), kind, None, None, self._sparse, fired, cutoffs, [], missed
            )  # fmt: skip
            self.gates.append(len(self.at))
            self.at.append((ffn.layer, ffn.part))
        overlaps = _is_stored(self._weights, names[1])
        self._fetch(ffn, names[1], fetched, FETCH_NONZERO, fired, waits=not overlaps)
        kind = activation(ffn.up_act) if ffn.up_act else (SCALE, 1.0)
        cutoffs, scores = (of_input, 0.0, 0.0), (fired, LEAST, 0)
        for missed in self._as_they_come(ffn, names[1]):
            plan.neurons(
                x, norm, None, (*up, out), kind, None, scores, self._sparse, out, cutoffs, [], missed
            )  # fmt: skip
            self.ups.append(len(self.at))
            self.at.append((ffn.layer, ffn.part))
        plan.multiply(fired, out, out)
        self.at.append((ffn.layer, ffn.part))
        if of_value:
            plan.cutoff(out, of_value, out)
            self.at.append((ffn.layer, ffn.part))

    # ---- attention, and what may stand in its place

    def _recurrent(self, main: Recurrent, out: int) -> None:
        plan, buffers, states = self._plan, self._buffers, self._states(main)
        if isinstance(main, ShortConv):
            weight = decoded_vector(self._weights, main.weight).reshape(-1, main.kernel)
            plan.short_conv(buffers[main.x], np.ascontiguousarray(weight.T), states, out)
            return
        rate, step = (decoded_vector(self._weights, name) for name in (main.rate, main.step))
        plan.delta_net(
            buffers[main.x], buffers[main.alpha], buffers[main.beta], rate, step, main.n_head,
            main.n_head_k, main.dim_k, main.dim_v, main.tiled, states, out,
        )  # fmt: skip

    def _heads(self, op: Heads | TransposedHeads, out: int) -> None:
        """What heads make of a latent vector, and what they are put together of."""
        x = self._buffers[op.x]
        if isinstance(op, TransposedHeads):
            info = self._weights.tensors[op.weight]
            self._plan.transposed_heads(x, int(info.type), self._weights.data(op.weight), op.n_head, out)
            return
        shared = -1 if op.shared is None else self._buffers[op.shared]
        self._plan.heads(x, shared, op.n_head, op.first, out)

    def _attention(self, main: Attention, heads: Sequence[Any]) -> None:
        """heads: the head norms and rotations of q and k that were fused into it."""
        q, k = main.q, main.k
        rope, q_norm, k_norm = -1, None, None
        for op in reversed(heads):
            if isinstance(op, Rotate):
                rope = self._rope(op)
            norm = (decoded_vector(self._weights, op.weight), op.eps) if isinstance(op, RMSNorm) else None
            if op.out == q:
                q, q_norm = op.x, norm or q_norm
            else:
                k, k_norm = op.x, norm or k_norm
        buffers = self._buffers
        self._plan.attention(
            buffers[q], buffers[k], buffers[main.v], buffers[main.out], main.n_head, main.n_head_kv,
            main.head_dim, main.head_dim_v, main.scale, main.softcap, main.window, rope, q_norm, k_norm,
            self._bias(main.sinks), *self._cache(main),
        )  # fmt: skip

    # ---- small things

    def _part(self, op: Linear, out: Value) -> tuple[int, _core.Rows, np.ndarray | None, int]:
        """A matrix product as the plan takes it: type, bytes of its rows, bias, buffer of the result."""
        return *linear_matrix(self._weights, op), self._buffers[out]

    def _channels(self, ops: Sequence[Linear]) -> list[Any]:
        """Copies by channel as the plan takes them: bytes, outputs in all, those of a tile, its first, below
        which share of channels it pays.

        Empty where there is none, or every channel is to be read, and under a budget of memory, which has
        room for the rows alone: the bits are the same.
        """
        if isinstance(self._weights, StoredWeights):
            return []
        found: list[Any] = []
        for op in ops:
            copy, info = op.by_channel, self._weights.tensors[op.weight]
            if copy is None or not self._sparse or op.first_row % PLANE_GROUP or op.out.width % PLANE_GROUP:
                found.append(None)
                continue
            n_rows = info.shape[-1]
            below = break_even(info, self._channel_rates.get(info.type, 1.0))
            found.append((self._weights.data(copy), n_rows, tile_of(n_rows), op.first_row, below))
        return found if any(one is not None for one in found) else []

    def _residual(self, value: Value | None) -> int:
        """The buffer that a product is added to, -1: none."""
        return -1 if value is None else self._buffers[value]

    def _bias(self, name: str | None) -> np.ndarray | None:
        return None if name is None else decoded_vector(self._weights, name)

    def _norm(self, op: RMSNorm | LayerNorm) -> tuple[bool, np.ndarray, np.ndarray | None, float]:
        bias = self._bias(op.bias) if isinstance(op, LayerNorm) else None
        return isinstance(op, LayerNorm), decoded_vector(self._weights, op.weight), bias, op.eps

    def _rope(self, op: Rotate) -> int:
        rope = op.rope
        return self._plan.rope(rope.kind == "neox", rope.n_rot, list(rope.freq), rope.magnitude)
