"""The choice of matrices to read input-major: those whose kept channels take less time than all rows.

The file of thresholds has the kept share of a matrix's input (Thresholds.kept). placement/channel_rates.py
has this machine's rates for sequential rows and for scattered channels, for matrices of each type and shape.
A matrix without a gain is read whole, and a threshold without a gain in any matrix is not applied
(`applied`). On the CPU a matrix with an unknown share gets an input-major copy, and each step reads it
by channel only if few enough channels are left (csrc/ops/channel_input.h).

A device has a matrix once, by row or input-major, and reads it that way in every step. So a matrix with an
unknown share stays by row there. Gate and up change together: if only the gate were input-major, the needed
rows of up would not be known in time. Rows of up that a thresholded gate does not need are skipped without a
layout of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from hotset.formats.channels import TYPES_BY_CHANNEL, can_be_input_major, copy_bytes
from hotset.formats.channels import can_be_input_major_on_device as on_device
from hotset.formats.planes import PLANE_GROUP
from hotset.formats.quants import GGMLType
from hotset.model.graph import Graph, thresholded_products
from hotset.model.operations import ExpertSum, Ffn, Linear, Threshold, TransposedLinear, Value, one_matrix
from hotset.model.thresholds import ThresholdName
from hotset.placement.table import CPU
from hotset.units import human_size

if TYPE_CHECKING:
    from hotset.formats.gguf import TensorInfo
    from hotset.placement.table import Placement
    from hotset.sparsity.thresholds import Thresholds

_NARROWEST, _WIDEST = 256, 4096
_LEAST_BYTES, _MOST_BYTES = 1 << 20, 1 << 27  # more than most caches hold
OTHERS = GGMLType.Q4_0  # its rates are used for types without an input-major layout
_BITS = {GGMLType.Q8_0: 8, GGMLType.Q4_0: 4, GGMLType.Q4_1: 4, GGMLType.Q4_K: 4}  # of a code on a device
_SPLIT = 0.2  # of the time of gate and up: the cost of computing gates first, then scattered rows of up
_LIST_S = 1e-9  # seconds per input to list the nonzero inputs
_LEAST_GAIN = 0.05  # of a matrix's time: a copy with a smaller gain is not worth its memory


class MatrixKind(NamedTuple):
    """The type, inputs and outputs of a matrix, which decide how fast its channels are read.

    Channels of a matrix with more outputs are longer, so skipping them saves more time.
    """

    type: GGMLType
    n_in: int
    n_out: int

    @classmethod
    def of(cls, info: TensorInfo) -> Self:
        """Return the kind of a matrix or of each expert's, in whole groups of inputs and outputs.

        A type without a layout is measured as OTHERS.
        """
        type = info.type if info.type in TYPES_BY_CHANNEL else OTHERS
        n_in, n_out = (-(-n // PLANE_GROUP) * PLANE_GROUP for n in info.shape[:2])
        return cls(type, n_in, n_out)


@dataclass(frozen=True)
class Workload:
    """The matrices for measuring rates: some of one kind, with about n_bytes bytes in total."""

    kind: MatrixKind
    n_bytes: int

    @property
    def type(self) -> GGMLType:
        return self.kind.type

    @property
    def width(self) -> int:
        """Return the width of the square matrices that a device is measured with: a power of two."""
        return min(max(_power_of_two(self.kind.n_out), _NARROWEST), _WIDEST)

    @classmethod
    def of(cls, graph: Graph, tensors: Mapping[str, TensorInfo]) -> tuple[Workload, ...]:
        """Return a workload for each kind of the matrices whose zero inputs can be skipped, largest first.

        All have these matrices' total bytes, rounded down to a power of two, so that models share
        measurements.
        """
        thresholded = {op.weight for op in thresholded_products(graph)}
        ups = {ffn.up_tensor for ffn in graph.ffns if ffn.gate_threshold is not None}
        infos = [tensors[name] for name in sorted(thresholded | ups)]
        n_bytes = sum(info.nbytes for info in infos if info.name in thresholded)
        n_bytes = min(max(_power_of_two(n_bytes), _LEAST_BYTES), _MOST_BYTES)
        kinds = dict.fromkeys(map(MatrixKind.of, infos))
        return tuple(cls(kind, n_bytes) for kind in sorted(kinds, key=lambda kind: -kind.n_in * kind.n_out))


def device_type(type: GGMLType) -> GGMLType:
    """Return the type whose measured rates a device uses; it reads floats and some types only by row."""
    return type if type in _BITS else OTHERS


def _power_of_two(n: int) -> int:
    return 1 << max(n, 1).bit_length() - 1


@dataclass(frozen=True)
class ChannelRates:
    """Bytes per second of decoding: of matrices read by row, and of matrices read input-major."""

    rows: float
    channels: float


TypeRates = Mapping[GGMLType, ChannelRates]
KindRates = Mapping[MatrixKind, ChannelRates]


@dataclass(frozen=True)
class ChannelGain:
    """The gain of skipping zeros in one matrix, for one token.

    kept: share of its channels that are read (of its rows if `neuron_major`); None if unknown. n_bytes: of
    all rows. read_bytes: of the kept part. rows_s, kept_s: seconds to read all rows, and the kept part.
    """

    tensor: str
    kept: float | None
    neuron_major: bool
    n_bytes: int
    read_bytes: float
    rows_s: float
    kept_s: float

    @property
    def pays(self) -> bool:
        """Return whether skipping pays off; True if the share is unknown, since each step then decides."""
        return self.kept is None or self.kept_s < (1 - _LEAST_GAIN) * self.rows_s


@dataclass(frozen=True)
class ChannelPlan:
    """The plan for matrices whose zero inputs can be skipped.

    rates: by matrix, the rate of channels divided by the rate of rows. whole: up matrices whose rows are all
    read although gates have thresholds, because skipping does not pay off. on_device: matrices that devices
    hold input-major (with_devices).
    """

    gains: tuple[ChannelGain, ...]
    rates: Mapping[str, float]
    whole: frozenset[str] = frozenset()
    on_device: frozenset[str] = frozenset()

    @property
    def chosen(self) -> tuple[str, ...]:
        """Return the CPU's matrices that are worth an input-major copy."""
        input_major = [gain.tensor for gain in self.gains if gain.pays and not gain.neuron_major]
        return tuple(tensor for tensor in input_major if tensor not in self.on_device)

    @property
    def left_out(self) -> float | None:
        """Return the bytes that a token is expected to skip; None if no matrix has a known share."""
        measured = [gain for gain in self.gains if gain.kept is not None]
        return sum(gain.n_bytes - gain.read_bytes for gain in measured if gain.pays) if measured else None

    @property
    def saved(self) -> float | None:
        """Return the seconds that a token is expected to save; None as left_out."""
        measured = [gain for gain in self.gains if gain.kept is not None]
        return sum(gain.rows_s - gain.kept_s for gain in measured if gain.pays) if measured else None

    @property
    def n_skipping(self) -> int:
        """Return the number of matrices in which zeros are skipped."""
        return sum(gain.pays for gain in self.gains)

    def as_dict(self) -> dict[str, Any]:
        """Return a dict for JSON. left_out: bytes per token."""
        return {
            "matrices": len(self.gains), "skipping": self.n_skipping, "left_out": self.left_out,
            "saved_s": self.saved, "told": self.summary(),
        }  # fmt: skip

    def summary(self) -> str:
        """Return a message for display."""
        message = f"thresholds: zeros of {self.n_skipping} of {len(self.gains)} matrices are skipped"
        if self.left_out is None or self.saved is None:
            return message
        total_s = sum(gain.rows_s for gain in self.gains)
        return (
            f"{message}; a token is expected to read {human_size(self.left_out)} less, and to take "
            f"{1e3 * self.saved:.3g} of the {1e3 * total_s:.3g} ms less that these take"
        )


def thresholds_by_value(graph: Graph) -> dict[Value, ThresholdName]:
    """Return the threshold whose shares (Thresholds.kept) apply to each value that has zeros."""
    found: dict[Value, ThresholdName] = {
        op.out: op.site for op in graph.primitives if isinstance(op, Threshold)
    }
    return found | {ffn.selected: "down_in" for ffn in graph.ffns if ffn.gate_threshold is not None}


def plan_channels(
    graph: Graph,
    tensors: Mapping[str, TensorInfo],
    thresholds: Thresholds,
    rates: KindRates,
    layers: Collection[int] | None = None,
    *,
    copies: bool = True,
) -> ChannelPlan:
    """Plan the CPU's gains of skipping zeros, matrix by matrix. For `up`, skip rows if that takes less time.

    rates: of the kinds of Workload.of. layers: layers that the CPU computes; None: all. In other layers the
    CPU computes the experts. copies: whether there is room for input-major copies.
    """
    threshold_of = thresholds_by_value(graph)
    gains: dict[str, ChannelGain] = {}

    def is_own(layer: int) -> bool:
        return layers is None or layer in layers

    for op in thresholded_products(graph):
        info = tensors[op.weight]
        if not (copies and can_be_input_major(info) and is_own(op.layer)):
            continue
        codes, scales = copy_bytes(info)
        kept = thresholds.kept(op.layer, threshold_of[op.x])
        read = scales + codes * (1.0 if kept is None else kept)
        gain = _gain(op.weight, kept, False, info.nbytes, read, rates[MatrixKind.of(info)])
        gains[op.weight] = replace(gain, kept_s=gain.kept_s + _LIST_S * op.x.width)
    whole = set()
    for ffn in graph.ffns:
        kept = thresholds.kept(ffn.layer, "gate")
        is_computed = is_own(ffn.layer) or ffn.route is not None
        if ffn.gate_threshold is None or ffn.gate is None or kept is None or not is_computed:
            continue
        name = ffn.up_tensor
        own = rates[MatrixKind.of(tensors[name])]
        n_bytes = ffn.up.matrix_bytes(tensors)  # for MoE layers, of one token's experts
        neuron_major = _gain(name, kept, True, n_bytes, kept * n_bytes, own)
        split_s = _SPLIT * 2 * n_bytes / own.rows
        neuron_major = replace(neuron_major, kept_s=neuron_major.kept_s + split_s)
        other = gains.get(name)
        if other is None or other.kept is None or neuron_major.kept_s <= other.kept_s:
            gains[name] = neuron_major
        if not (gains[name].neuron_major and gains[name].pays):
            whole.add(name)
    kinds = {name: rates[MatrixKind.of(tensors[name])] for name in gains}
    ratios = {name: own.channels / own.rows for name, own in kinds.items()}
    return ChannelPlan(tuple(gains.values()), ratios, frozenset(whole))


def _gain(
    tensor: str, kept: float | None, neuron_major: bool, n_bytes: int, read: float, rates: ChannelRates
) -> ChannelGain:
    return ChannelGain(tensor, kept, neuron_major, n_bytes, read, n_bytes / rates.rows, read / rates.channels)


def applied(
    plan: ChannelPlan,
    graph: Graph,
    thresholds: Thresholds,
    *,
    stored: bool = False,
    split: Collection[int] = (),
) -> Thresholds:
    """Return the thresholds without those that skip no byte, which would only change the answer.

    A threshold with an unknown share stays, because each step decides. stored: rows come from a store, where
    skipping rows of up always pays. split: layers whose neurons are shared with a device, which stay as they
    are.
    """
    threshold_of, pays = thresholds_by_value(graph), {gain.tensor: gain for gain in plan.gains if gain.pays}
    used: set[tuple[int, ThresholdName]] = set()
    for op in thresholded_products(graph):
        if op.weight in pays and not pays[op.weight].neuron_major:
            used.add((op.layer, threshold_of[op.x]))
    # Both thresholds of neurons save channels of down.
    used |= {(layer, "gate") for layer, name in used if name == "down_in"}
    for ffn in graph.ffns:
        gain = pays.get(ffn.up_tensor)
        if stored or (gain is not None and gain.neuron_major):
            used.add((ffn.layer, "gate"))
        by_neuron = isinstance(ffn.down, ExpertSum) and (ffn.down.neuron_major or ffn.down.input_major)
        if by_neuron or isinstance(ffn.down, TransposedLinear):
            used |= {(ffn.layer, "gate"), (ffn.layer, "down_in")}
    layers = []
    for i, layer in enumerate(thresholds.layers):
        idle = [
            name
            for name, value in layer.items()
            if value and (i, name) not in used and i not in split and thresholds.kept(i, name) is not None
        ]
        layers.append(replace(layer, **dict.fromkeys(idle, 0.0)))
    return replace(thresholds, layers=tuple(layers))


# -- on devices ----------------------------------------------------------------------------------


def with_devices(
    plan: ChannelPlan,
    graph: Graph,
    tensors: Mapping[str, TensorInfo],
    thresholds: Thresholds,
    placement: Placement,
    rates: Sequence[TypeRates],
) -> ChannelPlan:
    """Add the devices' matrices to a plan of the CPU's matrices. rates: of each device."""
    of_layer = {i: rates[place.device] for i, place in enumerate(placement.layers) if place.device != CPU}
    split = frozenset(i for i, place in enumerate(placement.layers) if place.is_split)
    gains = plan_device_channels(graph, tensors, thresholds, of_layer, split)
    on_device = frozenset(gain.tensor for gain in gains if gain.pays and not gain.neuron_major)
    return replace(plan, gains=(*plan.gains, *gains), on_device=on_device)


def plan_device_channels(
    graph: Graph,
    tensors: Mapping[str, TensorInfo],
    thresholds: Thresholds,
    rates: Mapping[int, TypeRates],
    split: frozenset[int] = frozenset(),
) -> list[ChannelGain]:
    """Return the gains of skipping zeros in the devices' layers, matrix by matrix.

    rates: by layer, the rates of its device. split: layers whose neurons are shared with the CPU.
    """
    threshold_of = thresholds_by_value(graph)
    gains: dict[str, ChannelGain] = {}
    for op in thresholded_products(graph):
        kept = thresholds.kept(op.layer, threshold_of[op.x])
        if op.layer in rates and kept is not None and on_device(tensors[op.weight].type, op.out.width):
            gains[op.weight] = _gain_on_device(op, tensors, kept, rates[op.layer])
    for ffn in graph.ffns:
        if ffn.layer in rates and ffn.route is None:
            _decide_ffn(ffn, tensors, thresholds, rates[ffn.layer], gains, is_split=ffn.layer in split)
    return list(gains.values())


def _decide_ffn(
    ffn: Ffn,
    tensors: Mapping[str, TensorInfo],
    thresholds: Thresholds,
    rates: TypeRates,
    gains: dict[str, ChannelGain],
    *,
    is_split: bool,
) -> None:
    """Choose the gains of gate and up: both input-major, or only the rows of up that the gate keeps.

    Updates `gains` with the choice.
    """
    ops = [one_matrix(op) for op in (ffn.gate, ffn.up) if op is not None]
    both = [gains.pop(op.weight) for op in ops if op.weight in gains]
    one_by_one = ffn.fires_exactly or ffn.mask is not None or is_split
    kept = (
        thresholds.kept(ffn.layer, "gate")
        if ffn.gate_threshold is not None and ffn.gate is not None
        else None
    )
    by_row: list[ChannelGain] = []
    if kept is not None:
        up = ops[-1]
        n_bytes, own = up.matrix_bytes(tensors), rates[device_type(tensors[up.weight].type)].rows
        by_row.append(_gain(up.weight, kept, True, n_bytes, kept * n_bytes, ChannelRates(own, own)))
    input_major = 0.0
    if len(both) == len(ops) and not one_by_one and all(gain.pays for gain in both):
        input_major = sum(gain.rows_s - gain.kept_s for gain in both)
    chosen = both if input_major > sum(gain.rows_s - gain.kept_s for gain in by_row) else by_row
    gains.update({gain.tensor: gain for gain in chosen})


def _gain_on_device(
    op: Linear, tensors: Mapping[str, TensorInfo], kept: float, rates: TypeRates
) -> ChannelGain:
    n_bytes, type = op.matrix_bytes(tensors), tensors[op.weight].type
    read = read_on_device(type, op.x.width * op.out.width, n_bytes, kept)
    return _gain(op.weight, kept, False, n_bytes, read, rates[device_type(type)])


def read_on_device(type: GGMLType, n_weights: int, n_bytes: int, kept: float) -> float:
    """Return the bytes read of n_bytes bytes of weights: the codes of kept channels, and all scales."""
    codes = n_weights * _BITS[type] // 8 if type in _BITS else n_bytes
    return n_bytes - codes * (1 - kept)
