"""Facts about torch devices for the planner: the bytes of a model on them, and memory limits.

measuring.py measures their speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hotset.backends.device.planning import within_budget
from hotset.backends.triton.devices import SIMULATED, find_device, free_bytes
from hotset.backends.triton.measuring import device_key, force_misses, measure
from hotset.backends.triton.plugin import check_cache
from hotset.errors import UnsupportedModelError
from hotset.memory import free_memory
from hotset.offload.expert_cache import layout_numbers
from hotset.placement.budget import LayerFacts, ModelFacts, model_facts
from hotset.placement.cards import Card
from hotset.placement.planner import ModelToPlace, PlacementFacts
from hotset.placement.table import Device

if TYPE_CHECKING:
    from hotset.formats.overlay import Overlay
    from hotset.model.graph import Graph

# Bytes of a CUDA device that torch's allocator needs in addition to tensors: the ends of pieces (arena.py),
# the pool of captured steps, and values and streamed rows in segments of 20 MiB.
ALLOCATOR_BYTES = 96 << 20
_OF_SIMULATED = (
    "the simulated GPU makes nothing faster: PyTorch computes its part on the CPU; the plan is that of a "
    "desktop with a GPU of 500 GB/s"
)


def cache_facts(device: str) -> tuple[str, ...]:
    """Return the facts that decide the bits of a device's KV cache, as Planner.cache_facts does."""
    return (device_key(find_device(device)),)


def free_for_model(devices: Sequence[str | Card], vram_budget: float | None, n_bytes: int) -> float:  # noqa: ARG001
    """Return the machine's free memory in bytes, because the file is mapped there."""
    return free_memory()


def placement_facts(model: ModelToPlace, devices: Sequence[str | Card]) -> PlacementFacts:
    """Gather the facts of a placement, as Planner.placement_facts does."""
    settings, config = model.settings, model.config
    check_placeable(model)
    facts = model_facts(
        model.graph, model.weights.tensors, mode=model.mode, kv_type=settings.kv_type,
        n_blocks=model.n_blocks, max_batch=settings.max_batch,
    )  # fmt: skip
    facts = replace(facts, layers=_with_caches(facts, model.graph, model.weights, devices))
    of_cpu: dict[str, Any] = {"n_threads": settings.n_threads, "progress": settings.progress}
    rates = tuple(force_misses(measure(device, **of_cpu)) for device in devices)
    limits = [
        limit_of(device, one.context, settings.vram_gib) for device, one in zip(devices, rates, strict=True)
    ]
    return PlacementFacts(
        facts,
        tuple(limits),
        rates,
        tuple(np.zeros(n_ff) for n_ff in config.n_ff),
        # If every neuron is computed, no neuron is cold.
        split_neurons=settings.split != "layers" and model.mode != "dense",
        n_gpu_layers=settings.layers_on_devices(config.n_layer),
        cards=tuple(str(one) for one in devices if isinstance(one, Card)),
        pinnable=free_memory() if any(map(_is_cuda, devices)) else None,
        limited=model.limited,
        notes=(_OF_SIMULATED,) if SIMULATED in devices else (),
    )


def check_placeable(model: ModelToPlace) -> None:
    """Raise UnsupportedModelError for a model that no torch device can compute."""
    config = model.config
    check_cache(model.settings.kv_type)
    if config.masked and config.has_experts:
        raise UnsupportedModelError(
            "experts with predictors of their own are computed only on the CPU; use device='cpu'"
        )
    if config.latent is not None:
        raise UnsupportedModelError("latent attention is computed only on the CPU; use device='cpu'")
    if config.altup is not None:
        raise UnsupportedModelError("AltUp's streams are computed only on the CPU; use device='cpu'")
    if model.graph.recurrent:
        raise UnsupportedModelError(
            "models with recurrent layers are computed only on the CPU; use device='cpu'"
        )


def _is_cuda(device: str | Card) -> bool:
    return isinstance(device, Card) or device.startswith("cuda")


def _with_caches(
    facts: ModelFacts, graph: Graph, weights: Overlay, devices: Sequence[str | Card]
) -> tuple[LayerFacts, ...]:
    """Return the layers, with marks on those whose experts every device can compute."""
    if all(ffn.route is None for ffn in graph.ffns):
        return facts.layers
    from hotset.backends.triton.experts import can_hold

    find_device(SIMULATED)  # raises an error with the install command if torch is missing
    import torch

    found = [torch.device("cuda") if isinstance(one, Card) else find_device(one) for one in devices]
    held = [
        ffn
        for ffn in graph.ffns
        if ffn.route is not None and all(can_hold(ffn, weights.tensors, device) for device in found)
    ]
    layouts = layout_numbers(held, weights.tensors)
    return tuple(
        replace(layer, is_cached=True, layout=layouts[i]) if i in layouts else layer
        for i, layer in enumerate(facts.layers)
    )


def limit_of(device: str | Card, context: int, budget: float | None) -> Device:
    """Return the bytes that may be used on a device.

    Raises OutOfMemoryError if `budget`, in GiB, exceeds its free memory.
    """
    if isinstance(device, Card):
        name, kind, free = device.name, "cuda", int(device.memory * 2**30)
    else:
        found = find_device(device)
        name, kind, free = device, found.type, free_bytes(found) + context  # the context already exists
    whole = Device(
        name, free, context, ALLOCATOR_BYTES if kind == "cuda" else 0, pins=name.startswith("cuda")
    )  # fmt: skip
    if kind == "cpu" and budget in (None, -1):  # a simulated device
        return whole
    if isinstance(device, Card):
        return within_budget(whole, budget, f"of the {name}", "name another card with `gpu`")
    return within_budget(whole, budget, f"that are free on {name}")
