"""`hotset plan`: the placement of a model, computed without loading it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from hotset.cli import options
from hotset.cli.console import print_json, print_table, say, say_note
from hotset.cli.models import describe
from hotset.cli.progress import ProgressBar
from hotset.errors import DeviceError
from hotset.files import check_output
from hotset.formats.gguf import open_gguf
from hotset.formats.powerinfer import GPUIndex, write_gpu_index
from hotset.loader.build import open_model, plan_model
from hotset.loader.decide import Reserved
from hotset.loader.images import image_bytes, with_images
from hotset.memory import free_memory
from hotset.placement.cards import DEFAULT, DEFAULT_LINK, Card, find_card
from hotset.placement.detect import has_default_device
from hotset.placement.table import CPU
from hotset.report.disk import ram_lines, ram_table
from hotset.report.experts import cache_sizes, size_table
from hotset.report.placement import layer_table, placement_dict, placement_lines, placement_table
from hotset.storage import resolve, store
from hotset.units import human_count, human_size

if TYPE_CHECKING:
    from hotset.placement.cards import Card
    from hotset.placement.ram import RamPlan
    from hotset.placement.table import Placement
    from hotset.settings import LoadSettings


def plan(
    model: options.ModelName,
    layers: Annotated[bool, options.option("--layers", "Also print a row for each layer.")] = False,
    output: Annotated[
        Path | None,
        options.option("--output -o", "Write a GPU index that PowerInfer reads too.", dir_okay=False),
    ] = None,
    gpu: Annotated[
        str | None,
        options.option(
            "--gpu",
            'Plan for this GPU, such as "RTX 4090", which need not be in this machine.',
            metavar="NAME",
        ),
    ] = None,
    gpu_bandwidth: Annotated[
        float | None,
        options.option(
            "--gpu-bandwidth", "Plan for a GPU of this bandwidth, with --vram-budget.", metavar="GB/S"
        ),
    ] = None,
    gpu_link: Annotated[
        float | None,
        options.option(
            "--gpu-link", "Bandwidth of its PCIe link, one way.", usual=f"{DEFAULT_LINK:g}", metavar="GB/S"
        ),
    ] = None,
    json: options.Json = False,
    *,
    loading: options.PlanOptions,
) -> None:
    """Plan the placement of a model within a VRAM or RAM budget, without loading it."""
    with ProgressBar() as bar:
        settings = loading.settings(progress=bar)
        path = resolve(model, progress=bar)
        if output is not None:
            check_output(output, store.shards(path))
        planned, memory = _decide(path, settings, _card(settings, gpu, gpu_bandwidth, gpu_link))
    if planned is None:
        if output is not None:
            raise typer.BadParameter("there is no GPU to write an index for.", param_hint="-o")
        _print_host(memory, _experts(path), json)
        return
    if output is not None:
        _write_index(output, planned)
    if json:
        _print_json(planned, output, memory)
        return
    _print(planned, layers)
    if memory is not None:
        _print_memory(memory)
    if output is not None:
        say(f"Wrote {output}; use it with --gpu-index.")


def _card(
    settings: LoadSettings, gpu: str | None, bandwidth: float | None, link: float | None
) -> Card | None:
    """Return the named GPU, or a default if there is a budget and no GPU; None: plan for real GPUs."""
    for value, option in ((bandwidth, "--gpu-bandwidth"), (link, "--gpu-link")):
        if value is not None and not 0 < value < 1e6:
            raise typer.BadParameter("it must be a number of GB/s above 0.", param_hint=option)
    if gpu is None and bandwidth is None:
        if link is not None:
            raise typer.BadParameter("it requires --gpu or --gpu-bandwidth.", param_hint="--gpu-link")
        if settings.device is not None or not settings.asks_for_a_device or has_default_device():
            return None
        say(f"There is no GPU here: this is a plan for an {DEFAULT}. Name another GPU with --gpu.")
        gpu = DEFAULT
    if settings.device is not None:
        raise typer.BadParameter("it cannot be combined with --device.", param_hint="--gpu")
    if settings.asks_for_thresholds:
        raise typer.BadParameter(
            "how much faster a GPU is with thresholds is measured on itself; leave them out.",
            param_hint="--gpu",
        )
    if gpu is not None:
        card = find_card(gpu)
        return replace(card, bandwidth=bandwidth or card.bandwidth, link=link or card.link)
    memory = settings.vram_gib
    if memory in (None, -1):
        raise typer.BadParameter(
            "it requires --vram-budget, the memory of the GPU.", param_hint="--gpu-bandwidth"
        )
    assert memory is not None
    assert bandwidth is not None
    return Card("GPU", memory, bandwidth, link or DEFAULT_LINK)


def _decide(path: Path, settings: LoadSettings, card: Card | None) -> tuple[Placement | None, _Memory | None]:
    """Return what would be on devices, if any, and what this machine's memory would be for.

    Memory is planned under a budget. Without a budget and devices the budget is the free memory. card: a GPU
    to plan for that need not be here.
    """
    own = settings if card is None else replace(settings, vram_budget=None, n_gpu_layers=0, gpu_index=None)
    with open_model(path, own) as opened:
        if card is not None:
            opened = replace(opened, settings=settings, devices=(card,))
        with with_images(opened) as seeing:
            decided = plan_model(seeing, reserved=Reserved(images=image_bytes(seeing)))
        decided.weights.close()
    free = free_memory() / 2**30
    if decided.placement is None and decided.ram is None and math.isfinite(free):
        budget = replace(settings, ram_budget=free, n_ctx=decided.n_ctx, n_gpu_layers=None)
        return _decide(path, budget, None)
    if decided.ram is None:
        return decided.placement, None
    return decided.placement, _Memory(decided.ram, decided.n_ctx, decided.choice.mode)


@dataclass(frozen=True)
class _Memory:
    """A plan of memory, and the settings that it was made for."""

    ram: RamPlan
    n_ctx: int
    sparsity: str

    def as_dict(self) -> dict[str, Any]:
        return self.ram.as_dict() | {"n_ctx": self.n_ctx, "sparsity": self.sparsity}


def _print_memory(memory: _Memory) -> None:
    ram = memory.ram
    print_table(*ram_table(ram), tight=True)
    for line in ram_lines(ram, memory.n_ctx):
        say_note(line)


def _experts(path: Path) -> dict[str, Any] | None:
    """Return an MoE model's facts about a cache of experts; None for another model."""
    with open_gguf(path) as gguf:
        facts = describe(gguf, path)
    experts = facts["experts"]
    if experts is None:
        return None
    sizes = cache_sizes(experts["layers"], experts["count"], experts["used"], experts["token_cycle"])
    return {key: facts[key] for key in ("parameters", "active_parameters", "experts")} | {"caches": sizes}


def _print_host(memory: _Memory | None, experts: dict[str, Any] | None, json: bool) -> None:
    """Print the plan without a device: memory, and caches of an MoE model's experts."""
    if memory is None:
        raise DeviceError(
            "the free memory of this machine is not known; give a budget (--ram-budget or --vram-budget)"
        )
    if json:
        print_json(memory.as_dict() | (experts or {}))
        return
    _print_memory(memory)
    if experts is not None:
        _print_experts(experts)


def _print_experts(facts: dict[str, Any]) -> None:
    print_table(*size_table(facts["caches"]), tight=True)
    experts = facts["experts"]
    say(
        f"{human_count(facts['parameters'])} parameters, {human_count(facts['active_parameters'])} for a "
        f"token; a token cycle, {experts['used']} experts in each of {experts['layers']} layers, is "
        f"{human_size(experts['token_cycle'])}",
        dim=True,
    )
    say("'hotset sparse trace' reports how often a cache would hit.", dim=True)


def _masks(planned: Placement) -> list[np.ndarray]:
    """Return bool [n_ff] for each layer: True for neurons on a device, all False for a layer of the CPU."""
    return [
        place.hot if place.hot is not None else np.full(n_ff, place.device != CPU)
        for place, n_ff in zip(planned.layers, planned.n_ff, strict=True)
    ]


def _write_index(path: Path, planned: Placement) -> None:
    # PowerInfer compares the capacity with its budget: the bytes of the neurons, without other tensors.
    neurons = sum(device.neurons for device in planned.budget.devices) if planned.budget else 0
    write_gpu_index(path, GPUIndex(neurons, _masks(planned)))


def _print_json(planned: Placement, output: Path | None, memory: _Memory | None) -> None:
    facts: dict[str, Any] = placement_dict(planned)
    if memory is not None:
        facts["ram"] = memory.as_dict()
    print_json(facts | ({"gpu_index": str(output)} if output else {}))


def _print(planned: Placement, layers: bool) -> None:
    if layers:
        print_table(*layer_table(planned), tight=True)
    print_table(*placement_table(planned), tight=True)
    for line in placement_lines(planned):
        say_note(line)
