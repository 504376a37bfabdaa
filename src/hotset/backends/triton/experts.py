"""The expert cache in the memory of a torch device (offload/expert_cache.py), and its use in a step.

The device looks up its tokens' experts in the table. It computes the experts that have a slot, bitwise like
the CPU (exact.py), and requests the others from the CPU (cpu_offload.py). A thread copies experts on a stream
of its own. The table is a tensor that a captured graph reads, so the graph depends on no particular expert.

After the slots of the replacement policy come *spare* slots, which the policy does not manage. A step fetches
missing experts to them (experts_fetch.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotset.backends.device.experts import why_not_cached
from hotset.backends.triton.fallback import fetch_experts
from hotset.backends.triton.host_experts import HostExperts, Registrar
from hotset.backends.triton.matrix import EXPERT_TYPES, DeviceMatrix
from hotset.backends.triton.weights import DeviceWeights
from hotset.formats.gguf import TensorInfo
from hotset.model.operations import ExpertLinear, ExpertSum, Ffn
from hotset.offload.expert_cache import ExpertCache, ExpertLayout, Group, parts_of


@dataclass
class Slots:
    """The stacked matrices and biases of n_slots experts and of n_spare more.

    Biases are float32 [n_slots + n_spare, width].
    """

    n_slots: int
    n_spare: int
    matrices: dict[str, DeviceMatrix]
    biases: dict[str, Tensor]

    def field(self, name: str) -> DeviceMatrix | Tensor:
        """Return the matrix or the biases of all slots for the name of a part (host_experts.py)."""
        is_bias = name.endswith("_bias")
        return self.biases[name.removesuffix("_bias")] if is_bias else self.matrices[name]

    @property
    def nbytes(self) -> int:
        parts: list[Any] = [*self.matrices.values(), *self.biases.values()]
        return sum(part.nbytes for part in parts)


class GpuExpertCache(ExpertCache):
    """The expert cache of a GpuStage.

    ffns: MoE layers of one stage. Layers that share slots have the same n_used. sparse: as in the stage.
    n_spare: slots for the experts that a step fetches, for each layout; n_fetched counts these copies too.
    host: the experts in host memory. nbytes: device bytes of slots and tables, allocated at the start.
    """

    def __init__(
        self,
        weights: DeviceWeights,
        ffns: Sequence[Ffn],
        n_slots: int,
        *,
        sparse: bool,
        n_spare: int = 0,
        registrar: Registrar | None = None,
    ) -> None:
        self._weights, self._sparse, self.device = weights, sparse, weights.device
        self.host = HostExperts(weights, {ffn.layer: parts_of(ffn) for ffn in ffns}, registrar)
        # A thread unpacks and copies bytes during the steps; a simulated GPU uses the CPU during a step.
        super().__init__(
            ffns, weights.source.tensors, n_slots, in_thread=self.device.type != "cpu", empty=n_spare > 0
        )
        self._slots = [
            _empty_slots(group.layout, group.n_slots, n_spare, self.device) for group in self.groups
        ]
        self._tables = [torch.from_numpy(group.table).to(self.device, copy=True) for group in self.groups]
        self.nbytes = sum(own.nbytes for own in self._slots) + sum(table.nbytes for table in self._tables)
        # On the stream of the steps, copies and steps would wait for each other.
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._used: torch.cuda.Event | None = None  # after it the latest step no longer reads its slots

    def table(self, layer: int) -> Tensor:
        """Return the slot of each expert of a layer, int32 [n_expert], -1 without a slot.

        It is always the same tensor.
        """
        group = self.group_of(layer)
        return self._tables[group.number][group.layers.index(layer)]

    def slots(self, layer: int) -> Slots:
        """Return the slots that a layer shares with others, the spare ones included."""
        return self._slots[self.group_of(layer).number]

    def arguments(self, layer: int) -> dict[str, Any]:
        """Return the arguments of fallback.experts for a layer, except inputs and slot numbers."""
        slots, ffn = self.slots(layer), self.group_of(layer).ffns[layer]
        assert isinstance(ffn.up, ExpertLinear)
        assert isinstance(ffn.down, ExpertSum)
        biases = {f"{name}_bias": bias for name, bias in slots.biases.items()}
        return {
            "gate": None, **slots.matrices, **biases, "n_neurons": ffn.up.n_rows,
            "activation": ffn.gate_act, "up_activation": ffn.up_act, "neuron_major": ffn.down.neuron_major,
            "sparse": self._sparse and ffn.has_zeros,
        }  # fmt: skip

    def learn(self, routes: Mapping[int, np.ndarray]) -> None:
        """Learn as ExpertCache does. Also count the experts without a slot that the device fetched."""
        if self._stream is not None:  # the device may still compute the last layers
            self._used = torch.cuda.current_stream(self.device).record_event()
        for layer in self.layers:  # before super().learn changes the tables that the step used
            own = -1 - routes[layer]
            streamed = own[(own >= 0) & (self.on_host(layer)[np.maximum(own, 0)] < 0)]
            self.n_streamed += streamed.size
            self.n_fetched += len(np.unique(streamed))
        super().learn(routes)

    def _publish(self, group: Group) -> None:
        self._tables[group.number].copy_(torch.from_numpy(group.table))

    def _fetch(self, group: Group, layer: int, id: int, slot: int) -> None:
        if self._stream is not None and self._used is not None:
            self._stream.wait_event(self._used)
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            one = torch.tensor([id])
            for name, part in self.host.parts[layer].items():
                fetch_experts(part, one, self._slots[group.number].field(name), slot)
        if self._stream is not None:
            self._stream.synchronize()

    def close(self) -> None:
        """Wait for the current copy and release the host memory. It is safe to call this twice."""
        super().close()
        self.host.close()


def _empty_slots(layout: ExpertLayout, n_slots: int, n_spare: int, device: torch.device) -> Slots:
    n_all = n_slots + n_spare
    matrices = {
        name: DeviceMatrix.empty(type, n_all * n_rows, n_cols, device)
        for name, (type, n_rows, n_cols) in layout.matrices.items()
    }
    biases = {name: torch.zeros((n_all, width), device=device) for name, width in layout.biases.items()}
    return Slots(n_slots, n_spare, matrices, biases)


def can_hold(ffn: Ffn, tensors: Mapping[str, TensorInfo], device: torch.device) -> bool:
    """Return whether a device can compute the experts of an MoE layer, bitwise identical to the CPU."""
    on_host = device.type == "cpu"
    computes = on_host or device.type == "cuda"
    return computes and not why_not_cached(ffn, tensors, EXPERT_TYPES, neuron_major=on_host)
