"""A placement from facts: the device of each layer and neuron. It does no I/O: gather.py measures and reads.

    placement = place(facts)

The backend of the devices gathers the facts of a model on them (`Planner`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from hotset.backends.registry import plugin_of
from hotset.placement.budget import FFNMode, ModelFacts
from hotset.placement.solver import place_index, rebuild, solve
from hotset.placement.table import Device, DeviceRates, Placement, Rates

if TYPE_CHECKING:
    from hotset.formats.gguf import GGUFFile
    from hotset.formats.overlay import Overlay
    from hotset.model.config import ModelConfig
    from hotset.model.graph import Graph
    from hotset.placement.cards import Card
    from hotset.settings import LoadSettings
    from hotset.sparsity.profile import Profile


@dataclass(frozen=True)
class ModelToPlace:
    """A model to place.

    weights: the file and its sidecars. graph: of a step. mode: of its FFNs. n_blocks, n_states: KV blocks and
    state slots of the cache. profile: of this model's neurons. limited: host memory has a budget.
    """

    gguf: GGUFFile
    config: ModelConfig
    weights: Overlay
    graph: Graph
    mode: FFNMode
    settings: LoadSettings
    n_blocks: int
    n_states: int = 0
    profile: Profile | None = None
    limited: bool = False


@dataclass(frozen=True)
class PlacementFacts:
    """All facts on which a placement depends.

    devices: the bytes that may be used of each. rates: measured, one per device. cards: devices whose rates
    follow from a data sheet. frequencies: per layer float64 [n_ff], how often its neurons fire. hotness: the
    source of the frequencies. If no layer is split, they are zeros and None. on_gpu: per layer bool [n_ff],
    from a GPU index; None: solve. split_neurons, n_gpu_layers: as in LoadSettings. pinnable: bytes of host
    memory for experts that devices fetch; None: no limit. limited: host memory has a budget; experts then
    stay in files and devices do not fetch them. This does not change the placement, and so no bit.
    with_cache: the model with its experts in an expert cache, if `model` has them as parts of their layers;
    None: nothing to compare. notes: messages about the facts, in addition to those derived from them.
    """

    model: ModelFacts
    devices: tuple[Device, ...]
    rates: tuple[DeviceRates, ...]
    frequencies: tuple[np.ndarray, ...]
    hotness: str | None = None
    on_gpu: tuple[np.ndarray, ...] | None = None
    split_neurons: bool = True
    n_gpu_layers: int | None = None
    cards: tuple[str, ...] = ()
    pinnable: int | None = None
    limited: bool = False
    with_cache: ModelFacts | None = None
    notes: tuple[str, ...] = ()


class Planner(Protocol):
    """The part of a device backend that gathers facts for placement: its module `planning`."""

    def placement_facts(self, model: ModelToPlace, devices: Sequence[str | Card]) -> PlacementFacts:
        """Return the facts of a model on devices, without the frequencies of its neurons.

        Raises OutOfMemoryError for a budget above the free memory, and UnsupportedModelError for a model
        without kernels.
        """
        ...

    def free_for_model(self, devices: Sequence[str | Card], vram_budget: float | None, n_bytes: int) -> float:
        """Return the bytes of memory for a model whose file has n_bytes, on devices and on this machine."""
        ...

    def cache_facts(self, device: str) -> tuple[str, ...]:
        """Return the facts that decide the bits of a device's KV cache, such as its driver."""
        ...


def planner_of(device: object) -> Planner:
    """Return the planner of the backend of a device."""
    planner: Planner = plugin_of(device, "planning")
    return planner


@dataclass(frozen=True)
class Solution:
    """A solver's result.

    owners: per layer the device, an index or table.CPU. hot: per layer the hot neurons, bool [n_ff] or None.
    how: a message on how good it is.
    """

    owners: tuple[int, ...]
    hot: tuple[np.ndarray | None, ...]
    how: str


def place(facts: PlacementFacts, known: Solution | None = None) -> Placement:
    """Return the placement for these facts. known: an earlier solution of the same facts.

    Raises OutOfMemoryError with the smallest budget that works, and InvalidRequestError for a solution or a
    GPU index that does not fit the model.
    """
    problem = facts.model, rates_of(facts), facts.devices, facts.frequencies
    if facts.on_gpu is not None:
        placement = place_index(*problem, facts.on_gpu)
    elif known is not None:
        placement = rebuild(*problem, known.owners, known.hot, known.how)
    else:
        placement = solve(*problem, n_gpu_layers=facts.n_gpu_layers, split_neurons=facts.split_neurons)
    return replace(placement, notes=(*_notes(facts), *placement.notes))


def _notes(facts: PlacementFacts) -> list[str]:
    """Return the messages about the facts. The messages about the solution follow them."""
    notes = [*facts.notes, *(note for note in (_experts_in_files(facts), facts.hotness) if note is not None)]
    return notes + [f"for {card}: its rates follow from its data sheet" for card in facts.cards]


def rates_of(facts: PlacementFacts) -> Rates:
    """Return the measured rates. Devices that cannot fetch experts get the link rate 0."""
    if _experts_in_files(facts) is None:
        return Rates(facts.rates)
    return Rates(tuple(replace(device, link=0.0) for device in facts.rates))


def solution_of(facts: PlacementFacts, placement: Placement) -> Solution:
    """Return the solution with which `place` makes the same placement again."""
    numbers, used = [device.name for device in facts.devices], [-1]
    for name in placement.devices:  # a subset of the facts' devices, in order
        used.append(numbers.index(name, used[-1] + 1))
    owners = tuple(used[layer.device + 1] for layer in placement.layers)
    how = placement.notes[len(_notes(facts))]
    return Solution(owners, tuple(layer.hot for layer in placement.layers), how)


def _experts_in_files(facts: PlacementFacts) -> str | None:
    """Return why devices do not fetch experts from host memory; None if they may."""
    n_bytes = sum(layer.n_experts * layer.expert_bytes for layer in facts.model.layers)
    if n_bytes and facts.limited:
        return "experts are not fetched from this machine: a budget of memory leaves them in the file"
    if n_bytes and facts.pinnable is not None and n_bytes > facts.pinnable:
        return "experts are not fetched from this machine: its memory is too small to pin them"
    return None
