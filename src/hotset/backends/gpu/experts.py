"""Experts in a device's memory: slots that the replacement policy fills, and what is computed with them.

A step uses the experts that the table named when it began. The device looks its tokens' experts up in it,
computes those that have a slot (exact.py: with the CPU's bits), and asks the CPU for the others
(cpu_offload.py). After the step the policy (replacement.py) hears which experts were used, says which are to
come and what goes for them, and their bytes are copied while the next steps run. The table is a tensor that
is written between steps: a captured graph reads it and knows nothing of an expert, and no slot is written
while a table names it.

Layers whose matrices have other types or shapes have slots of their own, and a policy.

Behind them lie *spare* slots, of which no policy knows: a step fetches what it lacks to them
(experts_fetch.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotset.backends.gpu import exact
from hotset.backends.gpu.fallback import fetch_experts
from hotset.backends.gpu.host_experts import HostExperts, Registrar
from hotset.backends.gpu.matrix import EXPERT_TYPES, DeviceMatrix
from hotset.backends.gpu.weights import DeviceWeights
from hotset.formats.gguf import TensorInfo
from hotset.model.operations import ExpertLinear, ExpertSum, Ffn
from hotset.offload.replacement import Replacement, arrange

LEARN_TOKENS = 8  # a step of more is a prompt's: it does not say what is needed often
MOST_COMING = 64  # experts whose copies may be under way


@dataclass(frozen=True)
class ExpertLayout:
    """What experts must have in common to share slots: of gate (None: there is none), up and down the type,
    rows and columns of an expert's matrix, and whether there are biases."""

    gate: tuple[int, int, int] | None
    up: tuple[int, int, int]
    down: tuple[int, int, int]
    biased: tuple[bool, bool, bool]
    neuron_major: bool


@dataclass
class Slots:
    """The matrices of n_slots experts and of n_spare more, one under the other, and their biases, float32
    [n_slots + n_spare, width]."""

    n_slots: int
    n_spare: int
    matrices: dict[str, DeviceMatrix]
    biases: dict[str, Tensor]

    def field(self, name: str) -> DeviceMatrix | Tensor:
        """Of all slots what has a part's name (host_experts.py)."""
        is_bias = name.endswith("_bias")
        return self.biases[name.removesuffix("_bias")] if is_bias else self.matrices[name]

    @property
    def nbytes(self) -> int:
        parts: list[Any] = [*self.matrices.values(), *self.biases.values()]
        return sum(part.nbytes for part in parts)


@dataclass
class _Group:
    """Layers that share slots. index: of a layer among them. table: int32 [layers, n_expert], -1: no slot."""

    layers: list[int]
    ffns: dict[int, Ffn]
    slots: Slots
    policy: Replacement
    table: Tensor
    on_host: np.ndarray
    changed: bool = False  # on_host is newer than table
    coming: dict[tuple[int, int], Future[None]] = field(default_factory=dict)  # layer, expert


def parts_of(ffn: Ffn) -> dict[str, ExpertLinear | ExpertSum]:
    """The products of an MoE model, as the kernels' arguments are named."""
    found = {"gate": ffn.gate, "up": ffn.up, "down": ffn.down}
    return {name: op for name, op in found.items() if isinstance(op, ExpertLinear | ExpertSum)}


class ExpertCache:
    """The experts of some MoE models in `n_slots` slots of a device's memory.

    ffns: MoE layers of one stage; n_used is alike in those that share slots. sparse: as of the stage.
    n_spare: slots for what a step fetches, of each layout.
    host: where the experts lie. nbytes: what the slots take there, all of it from the beginning. n_fetched:
    experts that were copied there, since then, into spare slots too; n_streamed: of experts of tokens those
    that were computed there.
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
        self._groups: list[_Group] = []
        self._of_layer: dict[int, _Group] = {}
        by_layout: dict[ExpertLayout, list[Ffn]] = {}
        for ffn in ffns:
            by_layout.setdefault(layout_of(ffn, weights.source.tensors), []).append(ffn)
        for (layout, own), n in zip(by_layout.items(), _shares(by_layout.values(), n_slots), strict=True):
            if n or n_spare:
                self._add(layout, own, n, n_spare)
        self.nbytes = sum(group.slots.nbytes + group.table.nbytes for group in self._groups)
        self.n_fetched = self.n_streamed = 0
        # Bytes are taken apart and copied beside the steps; a CPU that stands in has no time beside them.
        self._copies = None if self.device.type == "cpu" else ThreadPoolExecutor(1, "hotset-experts")
        # On the stream of the steps a copy would wait for them, and they for it.
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._used: torch.cuda.Event | None = None  # the latest step no longer reads its slots

    def _add(self, layout: ExpertLayout, ffns: list[Ffn], n_slots: int, n_spare: int) -> None:
        up = ffns[0].up
        assert isinstance(up, ExpertLinear)
        arranged = arrange(n_slots, len(ffns), up.n_used)
        on_host = np.full((len(ffns), up.n_expert), -1, np.int32)
        group = _Group(
            [ffn.layer for ffn in ffns],
            {ffn.layer: ffn for ffn in ffns},
            _empty_slots(layout, n_slots, n_spare, self.device),
            Replacement(arranged, len(ffns), up.n_expert),
            torch.from_numpy(on_host).to(self.device, copy=True),
            on_host,
        )
        self._groups.append(group)
        self._of_layer |= dict.fromkeys(group.layers, group)

    def __contains__(self, layer: int) -> bool:
        return layer in self._of_layer

    def table(self, layer: int) -> Tensor:
        """The slot of each expert of a layer, int32 [n_expert], -1: it has none; the same tensor always."""
        group = self._of_layer[layer]
        return group.table[group.layers.index(layer)]

    def on_host(self, layer: int) -> np.ndarray:
        """The same table as the step in flight has it, int32 [n_expert]; as it changes."""
        group = self._of_layer[layer]
        table: np.ndarray = group.on_host[group.layers.index(layer)]
        return table

    def slots(self, layer: int) -> Slots:
        """Those that a layer uses, spare ones among them; it shares them."""
        return self._of_layer[layer].slots

    def arguments(self, layer: int) -> dict[str, Any]:
        """Of a layer's experts what fallback.experts takes beside inputs and slots."""
        group = self._of_layer[layer]
        ffn = group.ffns[layer]
        assert isinstance(ffn.up, ExpertLinear)
        assert isinstance(ffn.down, ExpertSum)
        biases = {f"{name}_bias": bias for name, bias in group.slots.biases.items()}
        return {
            "gate": None, **group.slots.matrices, **biases, "n_neurons": ffn.up.n_rows,
            "activation": ffn.gate_act, "up_activation": ffn.up_act, "neuron_major": ffn.down.neuron_major,
            "sparse": self._sparse and ffn.has_zeros,
        }  # fmt: skip

    # ---- between steps

    def begin_step(self) -> None:
        """Enters what has come into the tables, and takes out what goes. Raises what one copy raised."""
        for group in self._groups:
            for (layer, id), copy in list(group.coming.items()):
                if copy.done():
                    del group.coming[layer, id]
                    if copy.exception() is not None:
                        group.policy.drop(layer, id)
                        copy.result()
                    group.on_host[layer, id] = group.policy.find(layer, id)
                    group.changed = True
            if group.changed:
                group.table.copy_(torch.from_numpy(group.on_host))
                group.changed = False

    def learn(self, routes: Mapping[int, np.ndarray]) -> None:
        """Hears what a step asked for: of each layer int32 [n_tokens, n_used], -1 - id for what the
        device computed."""
        if self._stream is not None:  # the host may be here while the device computes the last layers
            self._used = torch.cuda.current_stream(self.device).record_event()
        for layer in self._of_layer:  # as long as the tables are those of the step
            own = -1 - routes[layer]
            streamed = own[(own >= 0) & (self.on_host(layer)[np.maximum(own, 0)] < 0)]
            self.n_streamed += streamed.size
            self.n_fetched += len(np.unique(streamed))
        for group in self._groups:
            group.policy.begin_step()
            for i, layer in enumerate(group.layers):
                asked = routes[layer]
                if not len(asked):
                    continue
                ids = np.unique(np.where(asked < 0, -1 - asked, asked)).astype(np.int32)
                self._look_up(group, i, ids, credit=len(asked) <= LEARN_TOKENS)

    def _look_up(self, group: _Group, layer: int, ids: np.ndarray, *, credit: bool) -> None:
        places = group.policy.lookup(layer, ids, credit=credit)
        n_expert = group.on_host.shape[1]
        for gone in places.evicted[places.evicted >= 0].tolist():
            group.on_host[divmod(gone, n_expert)] = -1
            group.changed = True
            group.coming.pop(divmod(gone, n_expert), None)  # its copy is over before the next one's begins
        to_fill = list(places.to_fill(ids))
        for n, (id, slot) in enumerate(to_fill):
            if len(group.coming) >= MOST_COMING:
                group.policy.drop(layer, id)
                continue
            self.n_fetched += 1
            if self._copies is None:
                try:
                    self._fill(group, group.layers[layer], id, slot)
                except BaseException:  # of a disk
                    for other, _ in to_fill[n:]:
                        group.policy.drop(layer, other)
                    raise
                group.on_host[layer, id] = slot
                group.changed = True
            else:
                group.coming[layer, id] = self._copies.submit(
                    self._fill, group, group.layers[layer], id, slot
                )

    def _fill(self, group: _Group, layer: int, id: int, slot: int) -> None:
        """Copies an expert into a slot that no table names."""
        if self._stream is not None and self._used is not None:
            self._stream.wait_event(self._used)
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            one = torch.tensor([id])
            for name, part in self.host.parts[layer].items():
                fetch_experts(part, one, group.slots.field(name), slot)
        if self._stream is not None:
            self._stream.synchronize()

    def settle(self) -> None:
        """Waits for the copies that are under way: while a step is captured no thread may ask anything of the
        device."""
        wait(copy for group in self._groups for copy in group.coming.values())

    def close(self) -> None:
        """Waits for the copy that is under way, and lets the host's memory go; safe to call twice."""
        if self._copies is not None:
            self._copies.shutdown(wait=True, cancel_futures=True)
        self.host.close()


def _shares(groups: Any, n_slots: int) -> list[int]:
    """Slots of each group of layers, in proportion to their experts, and no more than those."""
    sizes = [sum(ffn.up.n_expert for ffn in group if isinstance(ffn.up, ExpertLinear)) for group in groups]
    ends = np.floor(np.cumsum(sizes) * (n_slots / sum(sizes)) + 1e-9).astype(int)
    slots: list[int] = np.minimum(np.diff(ends, prepend=0), sizes).tolist()
    return slots


def layout_of(ffn: Ffn, tensors: Mapping[str, TensorInfo]) -> ExpertLayout:
    """Of one expert of an MoE model."""
    parts = parts_of(ffn)
    shapes: dict[str, tuple[int, int, int]] = {}
    for name, op in parts.items():
        info = tensors[op.weights[0]]
        n_rows = op.n_rows if isinstance(op, ExpertLinear) else info.shape[1]
        shapes[name] = int(info.type), n_rows, info.shape[0]
    gate, up, down = (parts.get(name) for name in ("gate", "up", "down"))
    biased = tuple(op is not None and op.bias is not None for op in (gate, up, down))
    neuron_major = isinstance(down, ExpertSum) and down.neuron_major
    return ExpertLayout(shapes.get("gate"), shapes["up"], shapes["down"], biased, neuron_major)  # type: ignore[arg-type]


def _empty_slots(layout: ExpertLayout, n_slots: int, n_spare: int, device: torch.device) -> Slots:
    shapes, n_all = {"gate": layout.gate, "up": layout.up, "down": layout.down}, n_slots + n_spare
    matrices = {
        name: DeviceMatrix.empty(shape[0], n_all * shape[1], shape[2], device)
        for name, shape in shapes.items()
        if shape is not None
    }
    width = {"gate": layout.up[1], "up": layout.up[1], "down": layout.up[2]}
    biases = {
        name: torch.zeros((n_all, width[name]), device=device)
        for name, is_biased in zip(("gate", "up", "down"), layout.biased, strict=True)
        if is_biased
    }
    return Slots(n_slots, n_spare, matrices, biases)


def can_hold(ffn: Ffn, tensors: Mapping[str, TensorInfo], device: torch.device) -> bool:
    """Whether a device computes the experts of an MoE model, with the CPU's bits."""
    types = {tensors[name].type for op in parts_of(ffn).values() for name in op.weights}
    kinds = [op.kind for op in (ffn.gate_act, ffn.up_act) if op is not None]
    neuron_major = isinstance(ffn.down, ExpertSum) and ffn.down.neuron_major
    return (
        (device.type == "cpu" or (device.type == "cuda" and not neuron_major))
        and ffn.mask is None
        and all(kind in exact.ACTIVATIONS for kind in kinds)
        and types <= set(EXPERT_TYPES)
    )
