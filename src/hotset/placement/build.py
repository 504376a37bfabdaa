"""Construction of the backend for a Placement: a stage for each run of layers on one processor.

    backend = open_placed(placement, weights, graph, BackendOptions(n_blocks=64, ...))

Layers may be placed in any order; solver.py explains why the solver puts the CPU's layers first.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
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
    from hotset.offload.weight_store import StoredWeights
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
        """Return the peak bytes of the device's allocator; 0 if it has no reserve."""
        ...

    def software_bytes(self, devices: Sequence[str]) -> int:
        """Return the bytes of host memory for loaded kernels, and for memory that drivers pin.

        A backend with the capability ram_budget has this method and the next one.
        """
        ...

    def host_workspace(
        self, placement: Placement, weights: StoredWeights, graph: Graph, options: BackendOptions
    ) -> int:
        """Return the bytes of host memory that a placement takes in addition to weights and caches.

        weights: an empty store.
        """
        ...


def opener_of(placement: Placement) -> Opener:
    """Return the opener of the backend of a placement."""
    opener: Opener = plugin_of(placement.devices[0], "opening")
    return opener


def open_placed(
    placement: Placement,
    weights: WeightSource,
    graph: Graph,
    options: BackendOptions,
    channels: ChannelPlan | None = None,
) -> Backend:
    """Build the backend of a placement.

    A device gets no more memory than was planned. weights: StoredWeights of the placement's host_part keep
    host memory within a budget; devices then read their weights directly. channels: the plan of matrices
    whose zero inputs are skipped.

    Raises OutOfMemoryError, which names a smaller budget, if a device has less memory than was planned;
    DeviceError, UnsupportedModelError.
    """
    try:
        return opener_of(placement).open_placed(placement, weights, graph, options, channels)
    except OutOfMemoryError as error:
        raise OutOfMemoryError(f"{error}; {smaller_plan(placement)}") from None


@dataclass(frozen=True)
class HostPart:
    """The part of a model that needs host memory if devices compute too.

    graph: the CPU's layers, embeddings, and the FFNs in which it helps a device; it is never run. helped:
    these FFNs, in the form that StoredWeights expects. n_layers: layers that are wholly on the CPU.
    """

    graph: Graph
    helped: Helped
    n_layers: int


def host_part(placement: Placement, graph: Graph) -> HostPart:
    """Return the host's part of a placed model. Raises InvalidRequestError for another model's placement."""
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
    """Return the MoE layers, whose experts the CPU computes for a device."""
    return {ffn.layer for ffn in graph.ffns if ffn.route is not None}


def share_of(n: int, layers: Collection[int], piece: PlacedPiece, placement: Placement) -> int:
    """Return a piece's part of a device's n expert slots. layers: the layers with an expert cache."""
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
    """Split the graph into pieces, in order, each as long as the device stays the same.

    Raises InvalidRequestError if the placement does not fit the model.
    """
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
    """Return the hot neurons of the split layers in a device's piece, bool [n_ff] by layer."""
    split = {i: placement.layers[i] for i in piece.layers if placement.layers[i].is_split}
    return {i: layer.hot for i, layer in split.items() if layer.hot is not None}


def smaller_plan(placement: Placement) -> str:
    """Return the advice for a plan that did not hold, as the end of a message."""
    planned = max((d.total for d in placement.budget.devices), default=0) if placement.budget else 0
    return f"try vram_budget={max(0.9 * planned / 2**30, 0.01):.2g}, nine tenths of what was planned"


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of one device after loading.

    planned: planned bytes. measured: bytes that the backend holds, by kind, and `reserved`, the allocator's
    peak, if the device has one.
    """

    planned: MemoryBudget
    measured: dict[str, int]

    @property
    def used(self) -> int:
        """Return the measured bytes, plus the planned bytes of the runtime's own context."""
        held = self.measured.get("reserved") or sum(self.measured.values())
        return held + self.planned.context


def device_memory(placement: Placement, backend: Backend) -> list[DeviceMemory]:
    """Return the planned and measured bytes of each device of a placement."""
    planned = placement.budget.devices if placement.budget else ()
    found = []
    for device, measured in zip(planned, backend.device_bytes(), strict=True):
        opener: Opener = plugin_of(device.device, "opening")
        if reserved := opener.reserved_bytes(device.device):
            measured = measured | {"reserved": reserved}
        found.append(DeviceMemory(device, measured))
    return found
