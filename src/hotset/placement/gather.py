"""The facts of a placement, measured and read, and the placement that follows from them.

    settings = LoadSettings(device="cuda:0", vram_budget=8.0)
    devices, note = wanted_devices(settings)
    placement = planned(model, devices)

Frequencies come from the first of these sources: the named profile; the profile next to the model (`hotset
sparse profile`); the counts published with the model (activation/); a short run over a text that comes with
hotset. The store's cache keeps the counts of that run, and solutions.
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

from hotset.backends.base import BLOCK_SIZE
from hotset.backends.cpu.backend import CpuBackend
from hotset.backends.stage import BackendOptions
from hotset.errors import DeviceError, HotsetError, OutOfMemoryError, UnsupportedModelError
from hotset.files import replacing
from hotset.formats.powerinfer import activation_files, read_gpu_index
from hotset.model.decoder import describe
from hotset.placement.planner import (
    ModelToPlace,
    PlacementFacts,
    Solution,
    place,
    planner_of,
    rates_of,
    solution_of,
)
from hotset.placement.table import CPU, LayerPlacement, Placement, Rates, predict
from hotset.reporter import Reporter
from hotset.sparsity import sidecar
from hotset.sparsity.profile import Profile, collect, import_activations, profile_path
from hotset.sparsity.taps import of_backend
from hotset.storage.store import home
from hotset.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from hotset.placement.cards import Card
    from hotset.settings import LoadSettings

_N_TOKENS = 512  # most tokens of the built-in text
_STEP = 128  # tokens of a step over it


def planned(model: ModelToPlace, devices: Sequence[str | Card]) -> Placement:
    """Return the placement of a model on the devices that wanted_devices found, or on cards.

    Solutions are kept in the store's cache.

    Raises OutOfMemoryError with the smallest budget that works. Raises FormatError for an index of another
    model, InvalidRequestError for a profile of another model, and UnsupportedModelError for a model without
    kernels. Raises DeviceError if --device auto found no device that is faster than the CPU.
    """
    settings = model.settings
    facts = planner_of(devices[0]).placement_facts(model, devices)
    if settings.cpu_experts:
        facts = _with_experts_on_cpu(facts, settings.cpu_experts)
    facts = _with_hotness(facts, model)
    if settings.gpu_index is not None:
        index = read_gpu_index(Path(settings.gpu_index), model.config.n_ff)
        return place(replace(facts, on_gpu=tuple(index.on_gpu)))
    if settings.vram_budget in (None, -1):
        limits = (replace(one, limit=_coarse(one.limit)) for one in facts.devices)
        facts = replace(facts, devices=tuple(limits))
    placement = _fastest(facts, again=settings.reset_gpu_index)
    return _if_faster(placement, facts, settings) if settings.is_auto else placement


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


def _if_faster(placement: Placement, facts: PlacementFacts, settings: LoadSettings) -> Placement:
    """Return the placement, with a note on the CPU.

    Raises DeviceError if the CPU is predicted to be as fast, unless the settings ask for a device.
    """
    assert placement.predicted is not None
    on_cpu = [LayerPlacement(CPU)] * len(facts.model.layers)
    alone = predict(facts.model, Rates(facts.rates), on_cpu, facts.frequencies).total
    here, devices = placement.predicted.total, " and ".join(placement.devices)
    said = (
        f"chosen by measured rates (device='auto'): {1e3 * here:.3g} ms per token with {devices}, "
        f"{1e3 * alone:.3g} ms with only the CPU"
    )
    if here >= alone and not settings.asks_for_a_device:
        raise DeviceError(f"{said}: it is not faster")
    return replace(placement, notes=(said, *placement.notes))


# -- frequencies ---------------------------------------------------------------------------------


def _with_hotness(facts: PlacementFacts, model: ModelToPlace) -> PlacementFacts:
    """Return the facts with the frequencies of neurons, if neurons can be split.

    Raises UnsupportedModelError if the settings request a split and no layer has neurons or experts to split.
    """
    layers = facts.model.layers
    if not facts.split_neurons or not any(layer.n_split for layer in layers):
        if model.settings.split == "neurons" and not any(layer.is_cached for layer in layers):
            raise UnsupportedModelError(
                "no layer has neurons that a device could share with the CPU: they leave none at zero, or no "
                "down projection has a row per neuron; leave `split` out, or use sparsity='exact'"
            )
        return facts
    counted, hotness = _profile_of(model)
    frequencies = tuple(counted.frequencies(i) for i in range(model.config.n_layer))
    return replace(facts, frequencies=frequencies, hotness=hotness)


def _profile_of(model: ModelToPlace) -> tuple[Profile, str]:
    """Return how often each neuron fires, and a message that names the source."""
    gguf, config = model.gguf, model.config
    mark = sidecar.fingerprint(gguf)
    if model.profile is not None:
        model.profile.check_model(mark, config.n_ff)
        return model.profile, f"hotness from the profile that was given, {model.profile.n_tokens} tokens"
    beside, unfit = profile_path(gguf.path), ""
    if beside.is_file():
        found = Profile.open(beside)
        if found.is_of(mark, config.n_ff):
            return found, f"hotness from {beside}, {found.n_tokens} tokens"
        unfit = f"; the profile {beside} was taken of another model file and is left out"
    folder = activation_files(gguf.path)
    if folder is not None:
        return import_activations(folder, config, mark), f"hotness from {folder}, as published{unfit}"
    kept = home() / "cache" / mark / f"builtin.profile{sidecar.SUFFIX}"
    better = "'hotset sparse profile' on your own is better"
    how = f"hotness from a short text that comes with hotset ({better}){unfit}"
    with contextlib.suppress(HotsetError):
        found = Profile.open(kept)
        if found.is_of(mark, config.n_ff):
            return found, how
    found = run_builtin(model, mark)
    with contextlib.suppress(OSError, HotsetError):  # counted again next time
        kept.parent.mkdir(parents=True, exist_ok=True)
        found.save(kept)
    return found, how


def run_builtin(model: ModelToPlace, mark: str) -> Profile:
    """Count the firing neurons over the built-in text, on the CPU. mark: the fingerprint of the file."""
    config, settings = model.config, model.settings
    text = files("hotset.placement").joinpath("builtin.txt").read_text("utf-8")
    tokens = np.array(load_tokenizer(model.gguf.metadata).encode(text, add_special=True), np.int32)
    n_tokens = min(_N_TOKENS, config.n_ctx_max or _N_TOKENS, len(tokens))
    progress = settings.progress or Reporter()
    progress.say(f"Counting which neurons fire, over {n_tokens} tokens, once.")
    backend = CpuBackend(
        model.weights,
        describe(config, model.weights.tensors),
        BackendOptions(
            n_blocks=-(-n_tokens // BLOCK_SIZE), max_batch=_STEP, n_threads=settings.n_threads, sparse=True
        ),
    )
    try:
        return collect(
            of_backend(backend), config, tokens[:n_tokens], model=mark,
            progress=lambda done, total: progress.advance("neurons that fire", done, total, "tokens"),
        )  # fmt: skip
    finally:
        backend.close()


# -- stored solutions ----------------------------------------------------------------------------


def _fastest(facts: PlacementFacts, *, again: bool) -> Placement:
    """Return the placement with experts as parts of their layers, or in an expert cache if that is faster."""
    if facts.with_cache is None:
        return _solved(facts, again=again)
    with_cache = replace(facts, model=facts.with_cache, with_cache=None)
    try:
        placement = _solved(facts, again=again)
    except OutOfMemoryError:
        return _solved(with_cache, again=again)
    if placement.is_whole:
        return placement
    with contextlib.suppress(OutOfMemoryError):
        other = _solved(with_cache, again=again)
        assert placement.predicted is not None
        assert other.predicted is not None
        if other.predicted.total < placement.predicted.total:
            return other
    return placement


def _solved(facts: PlacementFacts, *, again: bool) -> Placement:
    """Return the placement of these facts, from the store's cache if they were solved before.

    again: ignore the stored solution.
    """
    asked = (facts.model, rates_of(facts), list(facts.devices), facts.n_gpu_layers, facts.split_neurons)
    digest = hashlib.sha256(repr(asked).encode())
    for frequency in facts.frequencies:
        digest.update(np.ascontiguousarray(frequency, np.float64).tobytes())
    path = home() / "cache" / "placements" / f"{digest.hexdigest()[:32]}.npz"
    if not again:
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
    """Round down to 64 MiB. Free memory differs slightly at each start; a stored plan is then found again."""
    return limit >> 26 << 26
