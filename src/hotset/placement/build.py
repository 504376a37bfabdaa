"""From a Placement to the backend that computes it: a stage for each run of layers in one place.

    backend = open_placed(placement, weights, graph, BackendOptions(n_pages=64, ...))

Layers may be placed in any order; the solver has reasons of its own to put the CPU's first (solver.py).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from hotset.backends.base import Backend
from hotset.backends.registry import plugin_of
from hotset.backends.stage import BackendOptions, Span
from hotset.errors import InvalidRequestError, OutOfMemoryError
from hotset.formats.source import WeightSource
from hotset.model.graph import Graph
from hotset.model.operations import Embed, Ffn, NgramEmbed
from hotset.offload.weight_store import Helped
from hotset.placement.budget import MemoryBudget
from hotset.placement.table import CPU, Placement

if TYPE_CHECKING:
    from hotset.placement.channels import ChannelPlan


class Opener(Protocol):
    """The part of a device backend that builds backends: its module `opening`."""

    def open_placed(
        self,
        placement: Placement,
        weights: WeightSource,
        graph: Graph,
        options: BackendOptions,
        channels: ChannelPlan | None,
    ) -> Backend:
        """Build the backend of a placement, as `open_placed` below."""
        ...

    def reserved_bytes(self, device: str) -> int:
        """Return the most bytes that the device's allocator has had; 0 if it has no reserve."""
        ...


def open_placed(
    placement: Placement,
    weights: WeightSource,
    graph: Graph,
    options: BackendOptions,
    channels: ChannelPlan | None = None,
) -> Backend:
    """Build the backend of a placement.

    A device gets no more memory than was planned. weights: StoredWeights of the placement's host_part keep
    this machine's memory within a budget; devices then read their weights past it. channels: the inputs of
    matrices that a graph with thresholds leaves out.

    Raises OutOfMemoryError, which names a smaller budget, if a device has less memory than was planned;
    DeviceError, UnsupportedModelError.
    """
    opener: Opener = plugin_of(placement.devices[0], "opening")
    try:
        return opener.open_placed(placement, weights, graph, options, channels)
    except OutOfMemoryError as error:
        raise OutOfMemoryError(f"{error}; {smaller_plan(placement)}") from None


@dataclass(frozen=True)
class HostPart:
    """What of a model this machine's memory is needed for, where devices compute too.

    graph: the CPU's layers, embeddings, and the FFNs in which it helps a device; helped: those, as
    StoredWeights takes them. It describes and is never run. n_layers: of the CPU's own.
    """

    graph: Graph
    helped: Helped
    n_layers: int


def host_part(placement: Placement, graph: Graph) -> HostPart:
    """Raises InvalidRequestError for a placement that is not of this model."""
    own = [
        op
        for piece in pieces_of(graph, placement)
        if piece.device == CPU
        for op in graph.ops[piece.first_op : piece.last_op]
    ]
    helped: dict[int, np.ndarray | None] = {
        i: None if i in mixed_layers(graph) or place.hot is None else ~place.hot
        for i, place in enumerate(placement.layers)
        if place.is_split or (place.device != CPU and i in mixed_layers(graph))
    }
    kept = {id(op) for op in own}
    ops = [
        op
        for op in graph.ops
        if id(op) in kept
        or isinstance(op, Embed | NgramEmbed)
        or (isinstance(op, Ffn) and not op.shared and op.layer in helped)
    ]
    return HostPart(Graph(ops, graph.values), helped, placement.n_cpu_layers)


def mixed_layers(graph: Graph) -> set[int]:
    """The MoE layers, whose experts a device requests of the CPU."""
    return {ffn.layer for ffn in graph.ffns if ffn.route is not None}


def share_of(n: int, layers: Collection[int], piece: PlacedPiece, placement: Placement) -> int:
    """Of n slots for a device's experts, of these layers, those of a piece."""
    on_device = set(layers).intersection(placement.layers_of(piece.device))
    return n * len(on_device.intersection(piece.layers)) // max(len(on_device), 1)


@dataclass
class PlacedPiece:
    """Operations [first_op, last_op) on one device."""

    device: int
    first_op: int
    last_op: int
    layers: range

    @property
    def span(self) -> Span:
        """Return the same operations as a Span."""
        return Span(self.first_op, self.last_op)


def pieces_of(graph: Graph, placement: Placement) -> list[PlacedPiece]:
    """The graph in pieces, in order: each as long as it stays on one device."""
    *starts, after = graph.layer_starts
    devices = [layer.device for layer in placement.layers]
    if len(devices) != len(starts):
        raise InvalidRequestError(
            f"the placement has {len(devices)} layers and the model {len(starts)}; plan it for this model"
        )
    if not all(CPU <= device < len(placement.devices) for device in [*devices, placement.output_device]):
        raise InvalidRequestError(
            f"the placement names a device that is not among its {len(placement.devices)}"
        )
    pieces: list[PlacedPiece] = []
    # The embedding goes with the first layer; the output may be anywhere.
    ends = [*starts[1:], after, len(graph.ops)]
    for layer, (device, end) in enumerate(zip([*devices, placement.output_device], ends, strict=True)):
        own = range(layer, min(layer + 1, len(devices)))
        if pieces and pieces[-1].device == device:
            pieces[-1].last_op, pieces[-1].layers = end, range(pieces[-1].layers.start, own.stop)
        else:
            pieces.append(PlacedPiece(device, pieces[-1].last_op if pieces else 0, end, own))
    return pieces


def hot_of(placement: Placement, piece: PlacedPiece) -> dict[int, np.ndarray]:
    """The hot neurons of the layers of a device's piece that are split."""
    split = {i: placement.layers[i] for i in piece.layers if placement.layers[i].is_split}
    return {i: layer.hot for i, layer in split.items() if layer.hot is not None}


def smaller_plan(placement: Placement) -> str:
    """What to try where a plan did not hold, as the end of a message."""
    planned = max((d.total for d in placement.budget.devices), default=0) if placement.budget else 0
    return f"try vram_budget={max(0.9 * planned / 2**30, 0.01):.2g}, nine tenths of what was planned"


@dataclass(frozen=True)
class DeviceMemory:
    """One device after loading. planned: bytes; measured: bytes by kind as the backend holds them, and
    `reserved`, if the device's allocator takes more: all that it took at most.
    """

    planned: MemoryBudget
    measured: dict[str, int]

    @property
    def used(self) -> int:
        """Bytes that are really used, the runtime's own context as it was planned."""
        held = self.measured.get("reserved") or sum(self.measured.values())
        return held + self.planned.context


def device_memory(placement: Placement, backend: Backend) -> list[DeviceMemory]:
    """Planned and measured bytes of each device of a placement."""
    planned = placement.budget.devices if placement.budget else ()
    found = []
    for device, measured in zip(planned, backend.device_bytes(), strict=True):
        opener: Opener = plugin_of(device.device, "opening")
        if reserved := opener.reserved_bytes(device.device):
            measured = measured | {"reserved": reserved}
        found.append(DeviceMemory(device, measured))
    return found
