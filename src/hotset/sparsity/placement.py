"""Which layers, and which neurons of a layer, live on which device.

A layer on a device has everything there but its cold neurons: attention, norms, predictor and the rows of hot
neurons. The CPU computes the cold ones that fire at the same time. Layers that do not fit at all stay on the
CPU; they come first, as with llama.cpp's -ngl, and devices follow one another down the layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hotset.sparsity.budget import Budget

CPU = -1  # in place of the index of a device


@dataclass(frozen=True)
class LayerPlacement:
    """device: index into Placement.devices, CPU (-1): all of the layer on the CPU.

    hot: bool [n_ff], the neurons whose rows are on the device; None: all of them, and no round trip.
    """

    device: int
    hot: np.ndarray | None = None

    @property
    def is_split(self) -> bool:
        """Whether the CPU computes neurons of a layer that is on a device."""
        return self.device != CPU and self.hot is not None and not bool(self.hot.all())


@dataclass(frozen=True)
class LayerTime:
    """Predicted seconds of one layer for one token.

    attention: what precedes the FFN, with norms and predictor. hot: neurons on the device; cold: those of the
    CPU, computed meanwhile; sync: the round trip. A layer on the CPU has all its time in `attention` and `cold`.
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
    """Seconds per token: of each layer, and of embedding, final norm and output together."""

    layers: tuple[LayerTime, ...]
    output: float

    @property
    def total(self) -> float:
        return sum(layer.total for layer in self.layers) + self.output


@dataclass(frozen=True)
class Placement:
    """What goes where.

    devices: torch names, such as ("cuda:0", "cuda:1"); layers on them are contiguous, in this order, after
    those on the CPU. output_device: of the final norm and the output matrix; CPU (-1) only where all layers
    are on the CPU. hot_share, served_share: of all neurons the share on devices, and the share of activations
    that these make. notes: a sentence each.
    """

    devices: tuple[str, ...]
    layers: tuple[LayerPlacement, ...]
    output_device: int
    budget: Budget | None = None
    predicted: Predicted | None = None
    hot_share: float | None = None
    served_share: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def n_cpu_layers(self) -> int:
        """Layers that are on the CPU as a whole; they come first."""
        return sum(layer.device == CPU for layer in self.layers)

    @property
    def is_whole(self) -> bool:
        """Whether one device has all of the model, so that the CPU computes nothing."""
        return len({layer.device for layer in self.layers}) == 1 and not any(
            layer.device == CPU or layer.is_split for layer in self.layers
        )

    def layers_of(self, device: int) -> range:
        """The layers of a device (or of the CPU): contiguous."""
        mine = [i for i, layer in enumerate(self.layers) if layer.device == device]
        return range(mine[0], mine[-1] + 1) if mine else range(0)
