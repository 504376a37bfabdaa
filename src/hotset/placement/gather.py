"""The facts of a placement, measured and read, and the placement that follows from them.

    settings = LoadSettings(device="cuda:0", vram_budget=8.0)
    devices, note = wanted_devices(settings)
    placement = planned(decided, devices)

Frequencies come from the profile that is named, else from the one next to the model (`hotset sparse
profile`), else from the counts that were published with it (activation/), else from a short run of a text
that comes with hotset, whose counts are kept in the store's cache. So are solutions.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hotset.backends.base import PAGE_SIZE
from hotset.backends.cpu.backend import CpuBackend
from hotset.backends.gpu.devices import find_device, free_bytes
from hotset.backends.vulkan.devices import is_vulkan
from hotset.errors import DeviceError, HotsetError, OutOfMemoryError, UnsupportedModelError
from hotset.files import replacing
from hotset.formats.powerinfer import activation_files, read_gpu_index
from hotset.memory import free_memory
from hotset.model.decoder import describe, describe_nextn
from hotset.offload.expert_cache import layout_numbers
from hotset.placement.budget import FFNMode, LayerFacts, ModelFacts, model_facts
from hotset.placement.cards import Card
from hotset.placement.machine import force_misses, measure
from hotset.placement.planner import (
    PlacementFacts,
    Solution,
    check_placeable,
    place,
    rates_of,
    solution_of,
)
from hotset.placement.table import Device, Placement
from hotset.reporter import Reporter
from hotset.sparsity import sidecar
from hotset.sparsity.profile import Profile, collect, import_activations, profile_path
from hotset.sparsity.taps import of_backend
from hotset.storage.store import home
from hotset.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from hotset.formats.gguf import GGUFFile
    from hotset.formats.overlay import Overlay
    from hotset.model.config import ModelConfig
    from hotset.model.graph import Graph
    from hotset.settings import LoadSettings

KEPT_FREE = 256 << 20  # bytes of a GPU that are left alone where no budget is given
# Of a CUDA device, for what torch's allocator takes beyond tensors: the ends of pieces (gpu/arena.py), the
# pool of captured steps, and values and streamed rows in segments of 20 MiB.
ALLOCATOR_BYTES = 96 << 20
_N_TOKENS = 512  # of the built-in text, at most
_STEP = 128


def planned(  # noqa: PLR0913
    gguf: GGUFFile,
    config: ModelConfig,
    weights: Overlay,
    graph: Graph,
    mode: FFNMode,
    settings: LoadSettings,
    devices: Sequence[str | Card],
    *,
    n_pages: int,
    n_states: int = 0,
    profile: Profile | None = None,
    limited: bool = False,
) -> Placement:
    """The placement of a model on the devices that wanted_devices found, or on cards that are not here.

    profile: of this model's neurons. limited: this machine's memory has a budget. The solution is that of
    the store's cache where the same was asked before.

    Raises OutOfMemoryError with the smallest budget that works, FormatError for an index of another model,
    InvalidRequestError for a profile of another model, UnsupportedModelError for what no device computes.
    """
    on_vulkan = any(map(is_vulkan, devices))
    if on_vulkan:
        from hotset.placement import vulkan

        facts = vulkan.placement_facts(
            graph, weights.tensors, settings, list(map(str, devices)), mode=mode, n_pages=n_pages,
            n_states=n_states,
            nextn=describe_nextn(config, weights.tensors) if settings.drafter == "mtp" else None,
        )  # fmt: skip
    else:
        check_placeable(config, graph)
        facts = _facts_on_gpus(config, weights, graph, mode, settings, devices, n_pages)
        facts = replace(facts, limited=limited)
    if settings.cpu_experts:
        facts = _with_experts_on_cpu(facts, settings.cpu_experts)
    facts = _with_hotness(facts, gguf, config, weights, profile, settings)
    if settings.gpu_index is not None:
        index = read_gpu_index(Path(settings.gpu_index), config.n_ff)
        return place(replace(facts, on_gpu=tuple(index.on_gpu)))
    if settings.vram_budget in (None, -1):
        limits = (replace(one, limit=_coarse(one.limit)) for one in facts.devices)
        facts = replace(facts, devices=tuple(limits))
    placement = _fastest(facts, anew=settings.reset_gpu_index)
    return _if_faster(placement, facts, settings) if on_vulkan and settings.is_auto else placement


def _with_experts_on_cpu(facts: PlacementFacts, layers: Sequence[int]) -> PlacementFacts:
    """Return the facts with as many experts for devices as the other layers have.

    Devices keep the most used experts of all layers, which are used more than all experts of a few layers.
    """
    model = facts.with_cache or facts.model
    mixed = [i for i, layer in enumerate(model.layers) if layer.n_experts]
    if not mixed:
        return facts
    share = sum(i not in layers for i in mixed) / len(mixed)
    return replace(facts, model=replace(model, expert_share=share), with_cache=None)


def _facts_on_gpus(
    config: ModelConfig,
    weights: Overlay,
    graph: Graph,
    mode: FFNMode,
    settings: LoadSettings,
    devices: Sequence[str | Card],
    n_pages: int,
) -> PlacementFacts:
    """What is known of a model and of the GPUs to place it on, but how often its neurons fire."""
    model = model_facts(
        graph, weights.tensors, mode=mode, kv_type=settings.kv_type, n_pages=n_pages,
        max_batch=settings.max_batch,
    )  # fmt: skip
    model = replace(model, layers=_with_caches(model, graph, weights, devices))
    of_cpu: dict[str, Any] = {"n_threads": settings.n_threads, "progress": settings.progress}
    rates = tuple(force_misses(measure(device, **of_cpu)) for device in devices)
    limits = [
        limit_of(device, one.context, settings.vram_budget)
        for device, one in zip(devices, rates, strict=True)
    ]
    return PlacementFacts(
        model,
        tuple(limits),
        rates,
        tuple(np.zeros(n_ff) for n_ff in config.n_ff),
        # Where every neuron is computed none is cold.
        split_neurons=settings.split != "layers" and mode != "dense",
        n_gpu_layers=settings.layers_on_devices(config.n_layer),
        cards=tuple(str(one) for one in devices if isinstance(one, Card)),
        pinnable=free_memory() if any(map(_is_cuda, devices)) else None,
    )


def _if_faster(placement: Placement, facts: PlacementFacts, settings: LoadSettings) -> Placement:
    """Of --device auto a Vulkan device only where it is faster than the CPU alone; else DeviceError."""
    from hotset.placement import vulkan

    is_faster, said = vulkan.compared(placement, facts)
    if not is_faster and not settings.asks_for_a_device:
        raise DeviceError(f"{said}: it is no faster")
    return replace(placement, notes=(said, *placement.notes))


def _is_cuda(device: str | Card) -> bool:
    return isinstance(device, Card) or device.startswith("cuda")


def _with_caches(
    facts: ModelFacts, graph: Graph, weights: Overlay, devices: Sequence[str | Card]
) -> tuple[LayerFacts, ...]:
    """The layers, those marked whose experts every device can compute."""
    if all(ffn.route is None for ffn in graph.ffns):
        return facts.layers
    from hotset.backends.gpu.experts import can_hold

    find_device("cpu")  # which says what to install
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
    """Bytes that may be used of a device."""
    if isinstance(device, Card):
        name, kind, free = device.name, "cuda", int(device.memory * 2**30)
    else:
        found = find_device(device)
        name, kind, free = device, found.type, free_bytes(found) + context  # the context is there already
    spare = ALLOCATOR_BYTES if kind == "cuda" else 0
    if budget is None or budget == -1:
        return Device(name, max(free - (KEPT_FREE if kind != "cpu" else 0), 0), context, spare)
    limit = int(budget * 2**30)
    if limit > free and isinstance(device, Card):
        raise OutOfMemoryError(
            f"a budget of {budget:g} GiB is more than the {device.memory:g} GiB of the {name}; lower "
            "--vram-budget, or name another card with --gpu"
        )
    if limit > free:
        raise OutOfMemoryError(
            f"a budget of {budget:g} GiB is more than the {free / 2**30:.1f} GiB that are free on {name}; "
            "lower --vram-budget, or free some of its memory"
        )
    return Device(name, limit, context, spare)


# -- frequencies ---------------------------------------------------------------------------------


def _with_hotness(
    facts: PlacementFacts,
    gguf: GGUFFile,
    config: ModelConfig,
    weights: Overlay,
    profile: Profile | None,
    settings: LoadSettings,
) -> PlacementFacts:
    """With how often neurons fire, where they can be split. Raises UnsupportedModelError where that is asked
    for and there are none."""
    layers = facts.model.layers
    if not facts.split_neurons or not any(layer.n_split for layer in layers):
        if settings.split == "neurons" and not any(layer.is_cached for layer in layers):
            raise UnsupportedModelError(
                "no layer has neurons that a device could share with the CPU: they leave none at zero, or no "
                "down projection has a row per neuron; leave --split out, or take --sparsity exact"
            )
        return facts
    counted, hotness = _profile_of(gguf, config, weights, profile, settings)
    frequencies = tuple(counted.frequencies(i) for i in range(config.n_layer))
    return replace(facts, frequencies=frequencies, hotness=hotness)


def _profile_of(
    gguf: GGUFFile,
    config: ModelConfig,
    weights: Overlay,
    given: Profile | None,
    settings: LoadSettings,
) -> tuple[Profile, str]:
    """How often each neuron fires, and a message on where that comes from."""
    model = sidecar.fingerprint(gguf)
    if given is not None:
        given.check_model(model, config.n_ff)
        return given, f"hotness from the profile that was given, {given.n_tokens} tokens"
    beside, unfit = profile_path(gguf.path), ""
    if beside.is_file():
        found = Profile.open(beside)
        if found.is_of(model, config.n_ff):
            return found, f"hotness from {beside}, {found.n_tokens} tokens"
        unfit = f"; the profile {beside} was taken of another model file and is left out"
    folder = activation_files(gguf.path)
    if folder is not None:
        return import_activations(folder, config, model), f"hotness from {folder}, as published{unfit}"
    kept = home() / "cache" / model / f"builtin.profile{sidecar.SUFFIX}"
    better = "'hotset sparse profile' on your own is better"
    how = f"hotness from a short text that comes with hotset ({better}){unfit}"
    with contextlib.suppress(HotsetError):
        found = Profile.open(kept)
        if found.is_of(model, config.n_ff):
            return found, how
    found = _run_builtin(gguf, config, weights, model, settings)
    with contextlib.suppress(OSError, HotsetError):  # counted again next time
        kept.parent.mkdir(parents=True, exist_ok=True)
        found.save(kept)
    return found, how


def _run_builtin(
    gguf: GGUFFile,
    config: ModelConfig,
    weights: Overlay,
    model: str,
    settings: LoadSettings,
) -> Profile:
    """Counts over the built-in text, computed on the CPU with every neuron that fires."""
    text = files("hotset.placement").joinpath("builtin.txt").read_text("utf-8")
    tokens = np.array(load_tokenizer(gguf.metadata).encode(text, add_special=True), np.int32)
    n_tokens = min(_N_TOKENS, config.n_ctx_max or _N_TOKENS, len(tokens))
    progress = settings.progress or Reporter()
    progress.say(f"Counting which neurons fire, over {n_tokens} tokens, once.")
    backend = CpuBackend(
        weights,
        describe(config, weights.tensors),
        n_pages=-(-n_tokens // PAGE_SIZE),
        max_batch=_STEP,
        n_threads=settings.n_threads,
        sparse=True,
    )
    try:
        return collect(
            of_backend(backend), config, tokens[:n_tokens], model=model,
            progress=lambda done, total: progress.advance("neurons that fire", done, total, "tokens"),
        )  # fmt: skip
    finally:
        backend.close()


# -- the solver's answer, kept -------------------------------------------------------------------


def _fastest(facts: PlacementFacts, *, anew: bool) -> Placement:
    """The placement of the model as it is, or with its experts in an expert cache, where that is faster."""
    if facts.with_cache is None:
        return _solved(facts, anew=anew)
    with_cache = replace(facts, model=facts.with_cache, with_cache=None)
    try:
        placement = _solved(facts, anew=anew)
    except OutOfMemoryError:
        return _solved(with_cache, anew=anew)
    if placement.is_whole:
        return placement
    with contextlib.suppress(OutOfMemoryError):
        other = _solved(with_cache, anew=anew)
        assert placement.predicted is not None
        assert other.predicted is not None
        if other.predicted.total < placement.predicted.total:
            return other
    return placement


def _solved(facts: PlacementFacts, *, anew: bool) -> Placement:
    """The placement of these facts, from the store's cache where the same was asked before."""
    asked = (facts.model, rates_of(facts), list(facts.devices), facts.n_gpu_layers, facts.split_neurons)
    digest = hashlib.sha256(repr(asked).encode())
    for frequency in facts.frequencies:
        digest.update(np.ascontiguousarray(frequency, np.float64).tobytes())
    path = home() / "cache" / "placements" / f"{digest.hexdigest()[:32]}.npz"
    if not anew:
        with contextlib.suppress(OSError, ValueError, KeyError, HotsetError):
            return place(facts, _kept(path, facts))
    placement = place(facts)
    with contextlib.suppress(OSError, HotsetError):  # solved again next time
        _keep(path, solution_of(facts, placement))
    return placement


def _kept(path: Path, facts: PlacementFacts) -> Solution:
    with np.load(path, allow_pickle=False) as kept:
        hot = tuple(
            np.unpackbits(kept[f"hot.{i}"])[: len(frequency)] > 0 if f"hot.{i}" in kept else None
            for i, frequency in enumerate(facts.frequencies)
        )
        return Solution(tuple(kept["devices"].tolist()), hot, str(kept["how"]))


def _keep(path: Path, found: Solution) -> None:
    hot: dict[str, Any] = {
        f"hot.{i}": np.packbits(mask) for i, mask in enumerate(found.hot) if mask is not None
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        np.savez(file, how=np.array(found.how), devices=np.array(found.owners), **hot)


def _coarse(limit: int) -> int:
    """What is free moves by some bytes from start to start: rounded down, so that a plan is found again."""
    return limit >> 26 << 26
