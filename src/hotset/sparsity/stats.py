"""Savings by sparsity: counts of steps (backends.base.StepStats) as shares, bytes and times per token.

    costs = StepCosts(graph, weights.tensors)
    ... after each step: steps.append(backend.stats())
    costs.summary(steps).active_share

Bytes are of weights only, without keys, values and the biases of neurons. The tokens of a step share its
reads, so bytes per token fall with the size of the steps: use decode steps to measure decoding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hotset.backends.base import StepStats
from hotset.backends.reference import selected
from hotset.formats.channels import copy_bytes
from hotset.formats.planes import PLANE_GROUP
from hotset.model.graph import Graph
from hotset.model.operations import (
    Embed,
    ExpertSum,
    Ffn,
    NgramEmbed,
    Op,
    TransposedLinear,
)
from hotset.parameters import data_frame
from hotset.sparsity import taps
from hotset.units import human_size

if TYPE_CHECKING:
    from hotset.formats.gguf import TensorInfo
    from hotset.sparsity.taps import TapSteps


@dataclass(frozen=True)
class LayerStats:
    """The statistics of one layer, mean per token.

    selected_share: of neurons that a predictor selects; active_share: of nonzero neurons. recall: the share
    of firing neurons that were selected; precision: the share of selected neurons that fire; None if not
    measured. expert_share: mean share of experts whose weights a step read; None without
    experts. bytes: of the FFN and its predictor. Times are in seconds.
    """

    layer: int
    active_share: float
    selected_share: float
    recall: float | None
    precision: float | None
    expert_share: float | None
    bytes: float
    predictor_s: float
    ffn_s: float
    attention_s: float


@dataclass(frozen=True, repr=False)
class StatsSummary:
    """All layers and steps, mean per token. A notebook shows a bar for each layer.

    bytes_touched_per_token: weights that were read. bytes_total_per_token: weights that the same steps would
    have read with every neuron and without a predictor. left_out_per_token: the part of the unread bytes that
    belongs to input channels at zero. active_parameters: weights that a token was multiplied with; flops: two
    for each. seconds: by kind, "predictor", "ffn", "attention", "other".
    """

    layers: tuple[LayerStats, ...]
    n_tokens: int
    n_steps: int
    active_share: float
    selected_share: float
    bytes_touched_per_token: float
    bytes_total_per_token: float
    active_parameters: float
    flops: float
    seconds: dict[str, float]
    left_out_per_token: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return a dict for JSON."""
        return asdict(self)

    def to_pandas(self) -> Any:
        """Return a DataFrame with a row per layer and the fields of LayerStats as columns.

        Raises HotsetError if pandas is not installed.
        """
        rows = [asdict(layer) for layer in self.layers]
        names = [field.name for field in fields(LayerStats)]
        return data_frame({name: [row[name] for row in rows] for name in names})

    def __repr__(self) -> str:
        return f"StatsSummary({self._line()})"

    def _line(self) -> str:
        read, total = human_size(self.bytes_touched_per_token), human_size(self.bytes_total_per_token)
        return (
            f"{self.active_share:.1%} of the neurons active, {read} of {total} read per token, "
            f"{len(self.layers)} layers, {self.n_tokens} tokens"
        )

    def _repr_html_(self) -> str:
        """Return a bar for each layer: the share of its neurons that fired."""
        bars = "".join(
            f"<tr><td>layer {layer.layer}</td><td><div style='width: 12em'><div style='width: "
            f"{100 * layer.active_share:.1f}%; height: 0.8em; background: currentColor'></div></div></td>"
            f"<td>{layer.active_share:.1%}</td></tr>"
            for layer in self.layers
        )
        return f"<p>{self._line()}</p><table>{bars}</table>"

    def with_quality(self, quality: Sequence[PredictorQuality]) -> StatsSummary:
        """Return a copy with each layer's recall and precision filled in."""
        layers = tuple(
            replace(layer, recall=one.recall, precision=one.precision)
            for layer, one in zip(self.layers, quality, strict=True)
        )
        return replace(self, layers=layers)


_TIMES = ("predictor", "ffn", "attention")
_NEURONS, _ROWS = ("selected", "active"), ("gate_rows", "up_rows", "down_rows")


class StepCosts:
    """The costs that weight a model's step counts. tensors: the weights that the graph runs on."""

    def __init__(self, graph: Graph, tensors: Mapping[str, TensorInfo]) -> None:
        self._layers = [_FFNCost(graph, tensors, ffn) for ffn in graph.ffns]
        self._at = [ffn.layer for ffn in graph.ffns]  # some layers may have no FFN
        counted = {op.out for layer in self._layers for op in layer.ops}
        self._rest_bytes = self._embed_bytes = self._rest_parameters = 0
        for op in graph.primitives:
            if op.out in counted:
                continue
            n_bytes = sum(n for _, n in op.bytes_read(tensors))
            if isinstance(op, Embed | NgramEmbed):
                self._embed_bytes += n_bytes
            else:
                self._rest_bytes += n_bytes
                self._rest_parameters += op.multiplications
        self._n_ff = np.array([layer.n_ff for layer in self._layers])
        self._is_whole = np.array([layer.is_whole for layer in self._layers], bool)
        self._dense_bytes = sum(layer.dense_bytes for layer in self._layers)

    def _of_ffns(self, step: StepStats) -> StepStats:
        """Return the counts of layers with an FFN; layers without zeros count fully."""
        if len(self._at) < len(step.active):
            names = (*_ROWS, *_NEURONS, *_TIMES)
            step = replace(step, **{name: getattr(step, name)[self._at] for name in names})
        if not self._is_whole.any():
            return step
        neurons: dict[str, Any] = {
            name: np.where(self._is_whole, step.n_tokens * self._n_ff, getattr(step, name))
            for name in _NEURONS
        }
        read: dict[str, Any] = {
            name: np.where(self._is_whole, self._n_ff, getattr(step, name)) for name in _ROWS
        }
        return replace(step, **neurons, **read)

    def summary(self, steps: Sequence[StepStats]) -> StatsSummary:
        """Return the means over some steps, in about 0.3 ms for one of 32 layers; all zero without steps."""
        in_all = [sum(float(getattr(step, name).sum()) for step in steps) for name in _TIMES]
        steps = [self._of_ffns(step) for step in steps]
        n_steps, n_tokens = len(steps), sum(step.n_tokens for step in steps)
        n = max(n_tokens, 1)
        zeros = [0.0] * len(self._layers)
        n_bytes, experts, parameters = zeros.copy(), zeros.copy(), 0.0
        for step in steps:
            counted = zip(*(getattr(step, name).tolist() for name in (*_ROWS, *_NEURONS)), strict=True)
            for i, (layer, (gate, up, down, *own)) in enumerate(zip(self._layers, counted, strict=True)):
                n_bytes[i] += layer.bytes(gate, up, down, step.n_tokens)
                experts[i] += layer.experts(gate, up, step.n_tokens)
                parameters += layer.parameters(step.n_tokens, gate, up, down, *own)
        selected, active, *times = (
            sum((getattr(step, name) for step in steps), np.zeros(len(zeros)))
            for name in (*_NEURONS, *_TIMES)
        )
        each = zip(
            self._layers, active.tolist(), selected.tolist(), experts, n_bytes,
            *((time / n).tolist() for time in times), strict=True,
        )  # fmt: skip
        left_out = sum(0.0 if step.left_out is None else float(step.left_out.sum()) for step in steps)
        layers = tuple(
            LayerStats(
                self._at[i],
                fired / (n * layer.n_ff),
                chosen / (n * layer.n_ff),
                None,
                None,
                used / (max(n_steps, 1) * layer.n_expert) if layer.n_expert else None,
                read / n,
                *seconds,
            )
            for i, (layer, fired, chosen, used, read, *seconds) in enumerate(each)
        )
        rest = self._rest_bytes * n_steps / n + self._embed_bytes
        parameters = self._rest_parameters + parameters / n
        kinds = {kind: time / n for kind, time in zip(_TIMES, in_all, strict=True)}
        return StatsSummary(
            layers=layers,
            n_tokens=n_tokens,
            n_steps=n_steps,
            active_share=float(active.sum() / (n * max(self._n_ff.sum(), 1))),
            selected_share=float(selected.sum() / (n * max(self._n_ff.sum(), 1))),
            bytes_touched_per_token=float((sum(n_bytes) - left_out) / n + rest),
            bytes_total_per_token=float(self._dense_bytes * n_steps / n + rest),
            active_parameters=float(parameters),
            flops=float(2 * parameters),
            seconds=kinds | {"other": sum(step.other for step in steps) / n},
            left_out_per_token=left_out / n,
        )


class _FFNCost:
    """The bytes and parameters of one layer's FFN by the number of rows read."""

    def __init__(self, graph: Graph, tensors: Mapping[str, TensorInfo], ffn: Ffn) -> None:
        predictor = [op for op in graph.ops if op.layer == ffn.layer and op.part == "predictor"]
        products = [op for op in (ffn.gate, ffn.up, ffn.down) if op is not None]
        self.ops: list[Op] = [*products, *predictor]
        self._has_gate, self.is_whole = ffn.gate is not None, not ffn.leaves_out
        self.n_ff, self._n_embd = ffn.n_ff, ffn.up.x.width
        self.n_expert = 0 if ffn.route is None else ffn.route.x.width
        self._n_used = 1 if ffn.route is None else ffn.route.n_used
        self._gate_row = 0 if ffn.gate is None else tensors[ffn.gate.matrices[0]].row_bytes
        self._up_row = tensors[ffn.up_tensor].row_bytes
        down = tensors[ffn.down.matrices[0]]
        self._neuron_major = ffn.neuron_major or (isinstance(ffn.down, ExpertSum) and ffn.down.neuron_major)
        self._down_row = down.row_bytes  # with a row per output: of one output
        has_scales = isinstance(ffn.down, TransposedLinear) and ffn.down.scales is not None
        self._scales = 2 * self._n_embd if has_scales else 0
        if isinstance(ffn.down, ExpertSum) and ffn.down.input_major is not None:
            codes, scales = copy_bytes(down)
            self._neuron_major = True
            self._down_row, self._scales = codes // down.shape[0], scales * PLANE_GROUP // down.shape[0]
        self._predictor_bytes = self._predictor_parameters = 0
        self._masked = ffn.mask is not None
        for op in predictor:
            self._predictor_bytes += sum(n for _, n in op.bytes_read(tensors))
            self._predictor_parameters += op.multiplications
        self.dense_bytes = self.bytes(self.n_ff, self.n_ff, self.n_ff, self.n_expert) - self._predictor_bytes

    def experts(self, gate: int, up: int, n_tokens: int) -> float:
        """Return the number of experts whose weights a step read, from its rows.

        Without scores, all deciding rows of such an expert are read. With scores, it is at most the number of
        experts of the step's tokens.
        """
        if self._masked:
            return min(n_tokens * self._n_used, self.n_expert)
        return (gate if self._has_gate else up) * self.n_expert / self.n_ff

    def bytes(self, gate: int, up: int, down: int, n_tokens: int) -> float:
        """Return the bytes of a step that read these numbers of rows.

        A group's scales are read if one of its neurons is; the number of such groups is estimated for neurons
        at random positions.
        """
        if not self._neuron_major:
            n_matrices = self.experts(gate, up, n_tokens) if self.n_expert else 1
            down_bytes: float = self._down_row * self._n_embd * n_matrices
        else:
            n_groups = -(-self.n_ff // PLANE_GROUP)
            touched = n_groups * (1 - (1 - down / self.n_ff) ** PLANE_GROUP)
            down_bytes = down * self._down_row + touched * self._scales
        return gate * self._gate_row + up * self._up_row + down_bytes + self._predictor_bytes

    def parameters(self, n: int, gate: int, up: int, down: int, selected: int, active: int) -> float:
        """Return the parameters that n tokens were multiplied with, summed over them.

        Rows of a step are the union over its tokens. So with several tokens, each token's own rows are its
        selected neurons (gate, or up without a gate) and its nonzero ones (up, down).
        """
        if n == 1 or up == self.n_ff:  # second case: every neuron was computed for every token
            gate, up, down = n * gate, n * up, n * down
        else:
            down = active
            gate, up = (selected, active) if self._has_gate else (0, selected)
        if not self._neuron_major:
            down = n * (self.n_ff * self._n_used // self.n_expert if self.n_expert else self.n_ff)
        return self._n_embd * (gate + up + down) + n * self._predictor_parameters


@dataclass(frozen=True)
class PredictorQuality:
    """The quality of one layer's predictor on real inputs.

    recall: the share of firing neurons that are selected; of_magnitude: the same weighted by magnitude.
    precision: the share of selected neurons that fire. NaN if undefined.
    """

    layer: int
    recall: float
    of_magnitude: float
    precision: float
    selected_share: float
    active_share: float


def measure_predictor(
    tap_steps: TapSteps, graph: Graph, tokens: np.ndarray, longest: int = taps.MAX_SEQUENCE
) -> list[PredictorQuality]:
    """Compare, layer by layer, the predictor's selection with the neurons that fire on the same FFN input.

    graph: with a predictor. tap_steps: must run it and compute every neuron (sparse=False), so that the taps
    `ffn_act` include the neurons that the mask drops. tokens: int32 [n] or [n_sequences, n], run in sequences
    of `longest`.
    """
    masks = [ffn.mask for ffn in graph.ffns if ffn.mask is not None]
    names = tuple(name for op in masks for name in (op.x.name, op.scores.name))
    sums = np.zeros((len(masks), 5))  # neurons that fire, are selected, both; magnitudes: firing, both
    for _, values in taps.over(tap_steps, tokens, names, longest=longest):
        for i, op in enumerate(masks):
            neurons = values[op.x.name]
            chosen, fires = selected(op, values[op.scores.name]), neurons != 0
            magnitude = np.abs(neurons, dtype=np.float64)
            both = (chosen & fires).sum()
            sums[i] += fires.sum(), chosen.sum(), both, magnitude.sum(), magnitude[chosen].sum()
    result = []
    for op, (n_fire, n_chosen, n_both, total, kept) in zip(masks, sums, strict=True):
        n = tokens.size * op.x.width
        with np.errstate(invalid="ignore"):
            recall, of_magnitude, precision = n_both / n_fire, kept / total, n_both / n_chosen
        numbers = (recall, of_magnitude, precision, n_chosen / n, n_fire / n)
        result.append(PredictorQuality(op.layer, *map(float, numbers)))
    return result
