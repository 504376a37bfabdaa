"""A placement from facts: which layers and neurons are on which device. Pure: gather.py measures and reads.

placement = place(facts)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hotset.errors import UnsupportedModelError
from hotset.model.config import ModelConfig
from hotset.model.graph import Graph
from hotset.placement.budget import ModelFacts
from hotset.placement.solver import place_index, rebuild, solve
from hotset.placement.table import Device, DeviceRates, Placement, Rates


@dataclass(frozen=True)
class PlacementFacts:
    """All that a placement depends on.

    devices: bytes that may be used of each; rates: measured of each; cards: those whose rates follow from a
    data sheet. frequencies: of each layer float64 [n_ff], how often its neurons fire, and
    hotness: where that is from; zeros and None where no layer is split. on_gpu: of each layer bool [n_ff],
    as a GPU index says; None: it is solved. split_neurons, n_gpu_layers: as in LoadSettings. pinnable: bytes
    of this machine's memory for experts that devices fetch; None: of no account. limited: that memory has a
    budget. It changes nothing of what is where, and so no bit, but that experts are not fetched, which are
    in files then. with_cache: the model with its experts in an expert cache, where `model` has them as parts
    of their layers; None: there is nothing to compare. notes: what a person should know of the facts, beside
    what follows from them.
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


@dataclass(frozen=True)
class Solution:
    """What a solver found: of each layer the device, an index or table.CPU, and its hot neurons, bool [n_ff]
    or None; how good it is, for a person."""

    owners: tuple[int, ...]
    hot: tuple[np.ndarray | None, ...]
    how: str


def check_placeable(config: ModelConfig, graph: Graph) -> None:
    """Raises UnsupportedModelError for what no device computes."""
    if config.masked and config.has_experts:
        raise UnsupportedModelError(
            "experts with predictors of their own are computed on the CPU alone; use --no-gpu"
        )
    if config.latent is not None:
        raise UnsupportedModelError("latent attention is computed on the CPU alone; use --no-gpu")
    if config.altup is not None:
        raise UnsupportedModelError("AltUp's streams are computed on the CPU alone; use --no-gpu")
    if graph.recurrent:
        raise UnsupportedModelError(
            "models with recurrent layers are computed on the CPU alone; use --no-gpu"
        )


def place(facts: PlacementFacts, known: Solution | None = None) -> Placement:
    """The placement for these facts. known: the solution of the same facts, found before.

    Raises OutOfMemoryError with the smallest budget that works, InvalidRequestError for a solution or a GPU
    index that does not fit the model.
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
    """What a person should know of the facts; those of the solution come after them."""
    notes = [note for note in (_experts_in_files(facts), facts.hotness) if note is not None]
    if any(device.name == "cpu" for device in facts.devices):
        notes.insert(
            0,
            "the device cpu stands in for a GPU: torch computes its part on the CPU, slowly; the plan is "
            "that of a desktop with a GPU of 500 GB/s",
        )
    notes += facts.notes
    return notes + [f"for {card}: its rates follow from its data sheet" for card in facts.cards]


def rates_of(facts: PlacementFacts) -> Rates:
    """As measured; devices that fetch no experts have no link to fetch them by."""
    if _experts_in_files(facts) is None:
        return Rates(facts.rates)
    return Rates(tuple(replace(device, link=0.0) for device in facts.rates))


def solution_of(facts: PlacementFacts, placement: Placement) -> Solution:
    """What `place` needs to make the same placement again."""
    numbers, used = [device.name for device in facts.devices], [-1]
    for name in placement.devices:  # some of those of the facts, in order
        used.append(numbers.index(name, used[-1] + 1))
    owners = tuple(used[layer.device + 1] for layer in placement.layers)
    how = placement.notes[len(_notes(facts))]
    return Solution(owners, tuple(layer.hot for layer in placement.layers), how)


def _experts_in_files(facts: PlacementFacts) -> str | None:
    """Why devices do not fetch experts from this machine's memory; None where they may."""
    n_bytes = sum(layer.n_experts * layer.expert_bytes for layer in facts.model.layers)
    if n_bytes and facts.limited:
        return "experts are not fetched from this machine: a budget of memory leaves them in the file"
    if n_bytes and facts.pinnable is not None and n_bytes > facts.pinnable:
        return "experts are not fetched from this machine: its memory is too small to pin them"
    return None
