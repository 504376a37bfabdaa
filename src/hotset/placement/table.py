"""The placement table: the device of each layer, and of the neurons of a layer.

A layer on a device has everything there except its cold neurons: attention, norms, predictor and the rows of
hot neurons. The CPU computes the cold neurons that fire, at the same time. Layers that do not fit at all stay
on the CPU. build.py accepts layers in any order of devices. The solver puts the CPU's layers first, as
llama.cpp's -ngl does, and then the devices one after the other.

placement/solver.py finds the placement with the least predicted time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hotset.offload.misses import Fetching, MissRates, expected_seconds
from hotset.placement.budget import Budget, LayerFacts, ModelFacts

CPU = -1  # instead of the index of a device
# The share of a token's experts that a cache holds, by the share of all experts with a slot. The values are
# close to the replays of three real routers in decision 013.
EXPERT_HITS = ((0.0, 0.0), (0.05, 0.4), (0.1, 0.58), (0.2, 0.75), (0.5, 0.92), (1.0, 1.0))


@dataclass(frozen=True)
class LayerPlacement:
    """The placement of one layer.

    device: index into Placement.devices; CPU (-1): the whole layer is on the CPU. hot: bool [n_ff], the
    neurons whose rows are on the device; None: all neurons, without a round trip.
    """

    device: int
    hot: np.ndarray | None = None

    @property
    def is_split(self) -> bool:
        """Return whether the layer is on a device and the CPU computes some of its neurons."""
        return self.device != CPU and self.hot is not None and not bool(self.hot.all())


@dataclass(frozen=True)
class LayerTime:
    """The predicted seconds of one layer for one token.

    attention: everything before the FFN, with norms and predictor. hot: neurons on the device. cold: neurons
    on the CPU, computed at the same time. sync: the round trip. A layer on the CPU has only attention and
    cold. In an MoE layer, hot and cold are its experts; cold includes the experts that the device fetches.
    """

    attention: float
    hot: float = 0.0
    cold: float = 0.0
    sync: float = 0.0

    @property
    def total(self) -> float:
        return self.attention + max(self.hot, self.cold + self.sync)


@dataclass(frozen=True)
class Predicted:
    """The predicted seconds per token: of each layer, and of embedding, final norm and output together."""

    layers: tuple[LayerTime, ...]
    output: float

    @property
    def total(self) -> float:
        return sum(layer.total for layer in self.layers) + self.output


@dataclass(frozen=True)
class Placement:
    """The placement of a model.

    devices: names, such as ("cuda:0", "cuda:1") or ("vulkan:0",). output_device: the device of the final norm
    and output matrix; it may be the CPU (-1). hot_share: the share of neurons on devices. served_share: their
    share of all activations. notes: messages for display. n_ff: neurons of each layer. expert_slots: per
    device, the experts for which it has room. fetching: per device, how it fetches missing experts; None: it
    does not.
    """

    devices: tuple[str, ...]
    layers: tuple[LayerPlacement, ...]
    output_device: int
    budget: Budget | None = None
    predicted: Predicted | None = None
    hot_share: float | None = None
    served_share: float | None = None
    notes: tuple[str, ...] = ()
    n_ff: tuple[int, ...] = ()
    expert_slots: tuple[int, ...] = ()
    fetching: tuple[Fetching | None, ...] = ()

    @property
    def n_cpu_layers(self) -> int:
        """Return the number of layers that are wholly on the CPU."""
        return sum(layer.device == CPU for layer in self.layers)

    @property
    def is_whole(self) -> bool:
        """Return whether one device has the whole model, except experts on the host."""
        return {layer.device for layer in self.layers} == {self.output_device} - {CPU} and not any(
            layer.is_split for layer in self.layers
        )

    def layers_of(self, device: int) -> list[int]:
        """Return the layers of a device (or of the CPU)."""
        return [i for i, layer in enumerate(self.layers) if layer.device == device]


@dataclass(frozen=True)
class DeviceRates:
    """The rates of a device and of this CPU next to it, as machine.json keeps them (placement/machine.py).

    cpu_read, cpu_gather: bytes per second of sequential rows, and of scattered rows. *_busy: the same while
    the other side works too. read, read_busy: bytes per second of the device's matrices. launch: seconds of
    one kernel before its first byte, in a captured step. sync: seconds of a round trip to the CPU. context:
    bytes that the device's runtime takes. cpu_many: bytes times tokens per second of products for many
    tokens. link: bytes per second of experts that the device copies from host memory; 0: it does not.
    link_busy: link while the CPU reads. cpu_read_link: cpu_read during these copies.
    """

    cpu_read: float
    cpu_gather: float
    cpu_read_busy: float
    cpu_gather_busy: float
    read: float
    read_busy: float
    launch: float
    sync: float
    context: int
    cpu_many: float
    link: float
    link_busy: float
    cpu_read_link: float

    @property
    def ffn_launch(self) -> float:
        """Return the seconds of the launches of one sparse FFN."""
        return FFN_KERNELS * self.launch

    @cached_property
    def misses(self) -> MissRates | None:
        """Return the rates that divide missing experts between device and CPU; None: the CPU computes all."""
        if self.link <= 0:
            return None
        return MissRates(
            self.cpu_read_busy, min(self.cpu_read_link, self.cpu_read_busy), self.cpu_many,
            self.link, min(self.link_busy, self.link),
        )  # fmt: skip


@dataclass(frozen=True)
class Rates:
    """The rates of all devices, and of the CPU: the highest of its idle and the lowest of its busy rates."""

    devices: tuple[DeviceRates, ...]

    @cached_property
    def cpu_read(self) -> float:
        return max(device.cpu_read for device in self.devices)

    @cached_property
    def cpu_gather(self) -> float:
        return max(device.cpu_gather for device in self.devices)

    @cached_property
    def cpu_read_busy(self) -> float:
        return min(device.cpu_read_busy for device in self.devices)

    @cached_property
    def cpu_gather_busy(self) -> float:
        return min(device.cpu_gather_busy for device in self.devices)


@dataclass(frozen=True)
class Device:
    """A device to place layers on.

    limit: bytes that may be used. context: the part of them that its runtime takes. spare: the part that its
    allocator loses to rounding and reserves. pins: its kernels read experts in pinned host memory.
    """

    name: str
    limit: int
    context: int
    spare: int = 0
    pins: bool = False


# Launches of a predicted layer without its sparse FFN, and launches of that FFN. bench/gpu/launches.py counts
# them in the program, and tests/bench/test_bench_gpu.py checks them.
LAYER_KERNELS = 8
FFN_KERNELS = 3


def crossings(layers: Sequence[LayerPlacement]) -> int:
    """Return how often a token goes from the CPU to a device and back, not counting the first time."""
    on_device = [place.device != CPU for place in layers]
    starts = [here and not before for before, here in zip([False, *on_device], on_device, strict=False)]
    return max(sum(starts) - 1, 0)


def expert_hits(share: float) -> float:
    """Return the share of a token's experts that a cache holds. share: of all experts, those with a slot."""
    shares, hits = np.array(EXPERT_HITS).T
    return float(np.interp(share, shares, hits))


def predict(
    facts: ModelFacts,
    rates: Rates,
    layers: Sequence[LayerPlacement],
    frequencies: Sequence[np.ndarray],
    cached: Sequence[float] = (),
) -> Predicted:
    """Predict the seconds per token of a placement, in generation at half the context's depth.

    cached: per device, the share of its experts that have a slot.
    """
    times = tuple(
        layer_time(layer, rates, place, frequency, cached[place.device] if cached else 0.0)
        for layer, place, frequency in zip(facts.layers, layers, frequencies, strict=True)
    )
    last = layers[-1].device
    speed = rates.cpu_read if last == CPU else rates.devices[last].read
    return Predicted(times, facts.output_bytes / speed)


def layer_time(
    layer: LayerFacts,
    rates: Rates,
    place: LayerPlacement,
    frequency: np.ndarray,
    cached: float = 0.0,
) -> LayerTime:
    """Predict the seconds of one layer. frequency: [n_ff], of its neurons. cached: as in `predict`."""
    read = layer.fixed_bytes - layer.idle_bytes + layer.kv_read_bytes
    fired = float(frequency.sum()) if layer.n_split else 0.0
    if place.device == CPU:
        streamed = layer.n_split * layer.always_bytes + layer.shared_bytes
        streamed += layer.n_used * layer.expert_bytes
        cold = streamed / rates.cpu_read + fired * layer.fired_bytes / rates.cpu_gather
        return LayerTime(read / rates.cpu_read, cold=cold)
    device = rates.devices[place.device]
    attention = read / device.read + (layer.n_kernels or LAYER_KERNELS) * device.launch
    if layer.n_used:
        read, hits = layer.n_used * layer.expert_bytes, expert_hits(cached) if layer.is_cached else 0.0
        hot = device.launch + hits * read / device.read_busy if hits else 0.0
        cold = (1 - hits) * read / rates.cpu_read_busy
        if device.misses is not None and layer.is_cached:
            cold, _ = expected_seconds(device.misses, (1 - hits) * layer.n_used, layer.expert_bytes)
        return LayerTime(attention, hot, cold, device.sync)
    if not layer.n_split:
        return LayerTime(attention)
    n_hot, hot_fired = layer.n_split, fired
    if place.hot is not None:
        n_hot, hot_fired = int(place.hot.sum()), float(frequency[place.hot].sum())
    n_cold, cold_fired = layer.n_split - n_hot, fired - hot_fired
    hot = cold = sync = 0.0
    if n_hot:
        n_bytes = n_hot * layer.always_bytes + hot_fired * layer.fired_bytes + layer.shared_bytes
        hot = device.ffn_launch + n_bytes / device.read_busy
    if n_cold:
        streamed = n_cold * layer.always_bytes + layer.shared_bytes
        cold = streamed / rates.cpu_read_busy + cold_fired * layer.fired_bytes / rates.cpu_gather_busy
        sync = device.sync
    return LayerTime(attention, hot, cold, sync)
