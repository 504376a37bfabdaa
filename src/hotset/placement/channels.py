"""Which matrices are worth reading input-major: where the channels that are left take less time than all
rows.

What is left of a matrix's input is said by the file of thresholds (Thresholds.kept); how fast this machine
reads rows, one after the other, and channels, here and there, by placement/channel_rates.py. A matrix that
would not gain stays as it is. On the CPU one of which nothing is known is laid out, and each step reads it by
channel only where few enough are left (csrc/ops/channel_input.h).

A device has a matrix once, by row or input-major, and every step reads it so. So one
of which the file of thresholds does not say what is left stays as it is. Gate and up go together, for of
gates alone input-major nothing would say which rows of up are needed before they are read; rows of up that a
thresholded gate does not need are left out in passing, without a layout of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hotset.formats.channels import TYPES_BY_CHANNEL, can_be_input_major, copy_bytes
from hotset.formats.channels import can_be_input_major_on_device as on_device
from hotset.formats.quants import GGMLType
from hotset.model.graph import Graph, thresholded_products
from hotset.model.operations import Ffn, Linear, Threshold, Value, one_matrix
from hotset.model.thresholds import ThresholdName
from hotset.placement.table import CPU
from hotset.units import human_size

if TYPE_CHECKING:
    from hotset.formats.gguf import TensorInfo
    from hotset.placement.table import Placement
    from hotset.sparsity.thresholds import Thresholds

_NARROWEST, _WIDEST = 256, 4096
_LEAST_BYTES, _MOST_BYTES = 1 << 20, 1 << 27  # more than most caches hold
OTHERS = GGMLType.Q4_0  # the type whose rates are taken for those of types without an input-major layout
_BITS = {GGMLType.Q8_0: 8, GGMLType.Q4_0: 4, GGMLType.Q4_1: 4, GGMLType.Q4_K: 4}  # of a code on a device
_SPLIT = 0.2  # of the time of gate and up: what it costs to compute gates first, and then ups here and there
_LIST_S = 1e-9  # for each input: to find which of them are not zero
_LEAST_GAIN = 0.05  # of a matrix's time: for less a copy is not worth its room


@dataclass(frozen=True)
class Workload:
    """What rates are measured on: so many square matrices of a type and width that they have so many bytes
    in all.

    A model that fits in a cache, or has short rows, is read at another rate than one that does not; and what
    is computed with a code differs between types.
    """

    type: GGMLType
    width: int
    n_bytes: int

    @classmethod
    def of(cls, graph: Graph, tensors: Mapping[str, TensorInfo]) -> tuple[Workload, ...]:
        """Like the matrices whose zeros need not be read, for each of their types: their width, and their
        bytes beside the others'; powers of two, lest every model be measured by itself."""
        thresholded = {op.weight for op in thresholded_products(graph)}
        ups = {ffn.up_tensor for ffn in graph.ffns if ffn.gate_threshold is not None}
        infos = [tensors[name] for name in sorted(thresholded | ups)]
        widths = sorted(info.shape[-1] for info in infos if info.name in thresholded) or [_WIDEST]
        n_bytes = sum(info.nbytes for info in infos if info.name in thresholded)
        width = min(max(_power_of_two(widths[len(widths) // 2]), _NARROWEST), _WIDEST)
        n_bytes = min(max(_power_of_two(n_bytes), _LEAST_BYTES), _MOST_BYTES)
        types = dict.fromkeys(_measured_as(info.type) for info in infos)
        return tuple(cls(type, width, n_bytes) for type in types)


def _measured_as(type: GGMLType) -> GGMLType:
    """The type whose rates are taken for those of another on the CPU."""
    return type if type in TYPES_BY_CHANNEL else OTHERS


def device_type(type: GGMLType) -> GGMLType:
    """The same on a device, which has floats, and other types, by row alone."""
    return type if type in _BITS else OTHERS


def _power_of_two(n: int) -> int:
    return 1 << max(n, 1).bit_length() - 1


@dataclass(frozen=True)
class ChannelRates:
    """Bytes per second of decoding: of rows that are all read, and of what is read input-major."""

    rows: float
    channels: float


TypeRates = Mapping[GGMLType, ChannelRates]


@dataclass(frozen=True)
class ChannelGain:
    """One matrix for one token.

    kept: share of its channels that are read (of its rows, where `neuron_major`), None where it is not known.
    n_bytes: of all rows. read_bytes: of what is kept. rows_s, kept_s: the seconds of the two.
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
        """Whether less than all of it should be read; so too where nothing is known: each step decides."""
        return self.kept is None or self.kept_s < (1 - _LEAST_GAIN) * self.rows_s


@dataclass(frozen=True)
class ChannelPlan:
    """Of the matrices of which zeros need not be read. rates: of each type, that of channels over that of
    rows.

    whole: up matrices of which every row is read, though gates have thresholds: leaving some out does not
    pay.
    on_device: those that devices hold input-major (with_devices).
    """

    gains: tuple[ChannelGain, ...]
    rates: Mapping[GGMLType, float]
    whole: frozenset[str] = frozenset()
    on_device: frozenset[str] = frozenset()

    @property
    def chosen(self) -> tuple[str, ...]:
        """Those that are worth an input-major copy, of what the CPU computes with."""
        input_major = [gain.tensor for gain in self.gains if gain.pays and not gain.neuron_major]
        return tuple(tensor for tensor in input_major if tensor not in self.on_device)

    @property
    def left_out(self) -> float | None:
        """Bytes that a token is expected not to read; None where nothing is known of any matrix."""
        measured = [gain for gain in self.gains if gain.kept is not None]
        return sum(gain.n_bytes - gain.read_bytes for gain in measured if gain.pays) if measured else None

    @property
    def saved(self) -> float | None:
        """Seconds that a token is expected to take less; None as left_out."""
        measured = [gain for gain in self.gains if gain.kept is not None]
        return sum(gain.rows_s - gain.kept_s for gain in measured if gain.pays) if measured else None

    def summary(self) -> str:
        """A message for a person."""
        n, of = sum(gain.pays for gain in self.gains), len(self.gains)
        message = f"cutoffs: zeros of {n} of {of} matrices are left out"
        if self.left_out is None or self.saved is None:
            return message
        total_s = sum(gain.rows_s for gain in self.gains)
        return (
            f"{message}; a token is expected to read {human_size(self.left_out)} less, and to take "
            f"{1e3 * self.saved:.3g} of the {1e3 * total_s:.3g} ms less that these take"
        )


def thresholds_by_value(graph: Graph) -> dict[Value, ThresholdName]:
    """By whose shares (Thresholds.kept) zeros of a product's input are known."""
    found: dict[Value, ThresholdName] = {
        op.out: op.site for op in graph.primitives if isinstance(op, Threshold)
    }
    return found | {ffn.selected: "down_in" for ffn in graph.ffns if ffn.gate_threshold is not None}


def plan_channels(
    graph: Graph,
    tensors: Mapping[str, TensorInfo],
    thresholds: Thresholds,
    rates: TypeRates,
    layers: Collection[int] | None = None,
) -> ChannelPlan:
    """What leaving out zeros gains, matrix by matrix; of up rows are left out, where those are less.

    rates: of the types of Workload.of. layers: that the CPU computes; None: all. Of the others it computes
    the experts.
    """
    threshold_of = thresholds_by_value(graph)
    thresholded_ffns = [ffn for ffn in graph.ffns if ffn.gate_threshold is not None]
    gains: dict[str, ChannelGain] = {}
    for op in thresholded_products(graph):
        info = tensors[op.weight]
        if not can_be_input_major(info) or (layers is not None and op.layer not in layers):
            continue
        codes, scales = copy_bytes(info)
        kept = thresholds.kept(op.layer, threshold_of[op.x])
        read = scales + codes * (1.0 if kept is None else kept)
        gain = _gain(op.weight, kept, False, info.nbytes, read, rates[info.type])
        gains[op.weight] = replace(gain, kept_s=gain.kept_s + _LIST_S * op.x.width)
    whole = set()
    for ffn in thresholded_ffns:
        up, kept = ffn.up, thresholds.kept(ffn.layer, "gate")
        is_another_s = layers is not None and ffn.layer not in layers and ffn.route is None
        if kept is None or ffn.gate is None or is_another_s:
            continue
        name = ffn.up_tensor
        own = rates[_measured_as(tensors[name].type)]
        n_bytes = up.matrix_bytes(tensors)  # of a token's experts
        neuron_major = _gain(name, kept, True, n_bytes, kept * n_bytes, own)
        split_s = _SPLIT * 2 * n_bytes / own.rows
        neuron_major = replace(neuron_major, kept_s=neuron_major.kept_s + split_s)
        other = gains.get(name)
        if other is None or other.kept is None or neuron_major.kept_s <= other.kept_s:
            gains[name] = neuron_major
        if not (gains[name].neuron_major and gains[name].pays):
            whole.add(name)
    ratios = {type: own.channels / own.rows for type, own in rates.items()}
    return ChannelPlan(tuple(gains.values()), ratios, frozenset(whole))


def _gain(
    tensor: str, kept: float | None, neuron_major: bool, n_bytes: int, read: float, rates: ChannelRates
) -> ChannelGain:
    return ChannelGain(tensor, kept, neuron_major, n_bytes, read, n_bytes / rates.rows, read / rates.channels)


# -- on devices ----------------------------------------------------------------------------------


def with_devices(
    plan: ChannelPlan,
    graph: Graph,
    tensors: Mapping[str, TensorInfo],
    thresholds: Thresholds,
    placement: Placement,
    rates: Sequence[TypeRates],
) -> ChannelPlan:
    """A plan of the CPU's matrices with those of the devices, whose rates these are."""
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
    """What leaving out zeros gains in the layers of devices, matrix by matrix.

    rates: of each of these layers those of its device. split: layers whose neurons are shared with the CPU.
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
    """Of gate and up: both input-major, or the rows of up that the gate leaves."""
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
    """Of so many bytes of weights those of the channels that are kept, and all scales."""
    codes = n_weights * _BITS[type] // 8 if type in _BITS else n_bytes
    return n_bytes - codes * (1 - kept)
