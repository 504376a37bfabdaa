"""Facts about Vulkan devices for the planner: their rates, and the bytes of a model on them.

    facts = placement_facts(model, ("vulkan:0",))

The rates of a device are measured once with the real kernels, within some seconds. machine.json keeps them
for each device, driver and version. A software driver computes on the CPU. It is used only if it is named,
for tests, and planned like a desktop GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hotset.backends.base import BLOCK_SIZE
from hotset.backends.cpu.worker import split_ffns
from hotset.backends.device.planning import within_budget
from hotset.backends.stage import BackendOptions
from hotset.backends.vulkan import budget
from hotset.backends.vulkan.autotune import WIDTH, device_key, products
from hotset.backends.vulkan.devices import NAME, VulkanInfo, find_device
from hotset.backends.vulkan.experts import cached_layers
from hotset.backends.vulkan.kernels import shaders_digest
from hotset.backends.vulkan.plugin import refused
from hotset.backends.vulkan.report import VulkanRates
from hotset.backends.vulkan.stage import OpenDevice, VulkanStage
from hotset.errors import UnsupportedModelError
from hotset.formats.gguf import TensorInfo
from hotset.formats.quants import GGMLType, row_bytes
from hotset.load_parameters import KVType
from hotset.memory import free_memory
from hotset.model import operations as ops
from hotset.model.cost import kv_bytes
from hotset.model.decoder import describe_nextn
from hotset.model.graph import Graph
from hotset.model.operations import NO_LAYER, Primitive
from hotset.offload.expert_cache import layout_numbers
from hotset.parameters import real_number
from hotset.placement import machine
from hotset.placement.budget import FFNMode, LayerFacts, ModelFacts, neuron_reads
from hotset.placement.machine import HeldWeights, cpu_rates, median_seconds, once
from hotset.placement.planner import ModelToPlace, PlacementFacts
from hotset.placement.table import (
    FFN_KERNELS,
    Device,
    DeviceRates,
)

if TYPE_CHECKING:
    from hotset.placement.cards import Card
    from hotset.reporter import Reporter

_SHARE_OF_SHARED = 0.75  # of the host's free memory, for a device that shares it
_N_ROWS = 8192  # rows of the measured matrices, 19 MB each
_MOST = 16  # measured matrices, more than caches hold
_PASS = 0.02  # target seconds to read the matrices once
_SECONDS = 0.2  # for each measurement
_N_LAUNCHES = 64
_SUBMIT_KERNELS = 2  # additional kernels of a layer with an expert cache (backends/vulkan/split.py)


# -- how fast ------------------------------------------------------------------------------------


def measured(
    info: VulkanInfo,
    *,
    progress: Reporter | None = None,
    path: Path | None = None,
    measure: Callable[[VulkanInfo], VulkanRates] | None = None,
) -> VulkanRates:
    """Return the stored rates of a device, or measure and store them.

    path: the file that keeps them. measure: a replacement for tests. Raises DeviceError or OutOfMemoryError
    if the device fails.
    """

    def kept(found: Mapping[str, Any]) -> VulkanRates:
        return VulkanRates(
            real_number("a rate", found["read"], 1),
            *(real_number("seconds", found[name], 0) for name in ("launch", "sync")),
        )

    return once(
        device_key(info), kept, lambda: (measure or measure_now)(info),
        f"Measuring {info.name} (Vulkan), once.", progress, path,
    )  # fmt: skip


def measure_now(info: VulkanInfo) -> VulkanRates:
    """Measure the rates of a device within some seconds, without storing them."""
    one, many = (_seconds_of(info, _chain(n)) for n in (1, 1 + _N_LAUNCHES))
    launch = max((many - one) / _N_LAUNCHES, 0.0)
    sync = max(one - launch, 0.0)
    each, n = _N_ROWS * row_bytes(GGMLType.Q4_0, WIDTH), 1
    while True:
        passed = _seconds_of(info, products(n, GGMLType.Q4_0, _N_ROWS))
        seconds = max(passed - sync - n * launch, passed / 4)
        wanted = min(int(n * _PASS / seconds), _MOST, info.free // 4 // each)
        if wanted < 2 * n:
            return VulkanRates(n * each / seconds, launch, sync)
        n = wanted


def _seconds_of(info: VulkanInfo, model: tuple[HeldWeights, Graph]) -> float:
    """Return the median seconds of a recorded step with one token."""
    options = BackendOptions(n_blocks=1, max_batch=1)
    with contextlib.closing(VulkanStage(*model, OpenDevice.of(info), options)) as stage:
        stage.rerun()
        return median_seconds(stage.rerun, _SECONDS)


def _chain(n: int) -> tuple[HeldWeights, Graph]:
    """Build a graph of `n` cheap operations, each on the result of the one before it."""
    weights, graph = HeldWeights(), Graph()
    weights.add("x", (WIDTH, 1), GGMLType.F32, np.ones((1, WIDTH), np.float32))
    x = graph.add(ops.Embed(graph.value("embedding", WIDTH), "x"))
    for i in range(n):
        x = graph.add(ops.Activate(graph.value(f"{i}", WIDTH), x, "relu"))
    graph.add(ops.SelectOutputs(graph.value("logits", WIDTH), x))
    return weights, graph


def rates_beside(
    info: VulkanInfo, n_threads: int | None, progress: Reporter | None = None, path: Path | None = None
) -> DeviceRates:
    """Return the rates of a device and this CPU, which compute one after the other.

    A software driver gets the rates of a typical desktop with a GPU.
    """
    if info.is_software:
        return replace(machine.STAND_IN, link=0.0, link_busy=0.0)
    cpu = cpu_rates(n_threads, progress)
    own = measured(info, progress=progress, path=path)
    return DeviceRates(
        cpu_read=cpu["read"], cpu_gather=cpu["gather"], cpu_read_busy=cpu["read"],
        cpu_gather_busy=cpu["gather"], read=own.read, read_busy=own.read, launch=own.launch, sync=own.sync,
        context=0, cpu_many=cpu["many"], link=0.0, link_busy=0.0, cpu_read_link=cpu["read"],
    )  # fmt: skip


# -- bytes of a model --------------------------------------------------------------------------


def cache_facts(device: str) -> tuple[str, ...]:
    """Return the facts of a cache, as Planner.cache_facts."""
    info = find_device(device)
    return NAME, info.name, info.driver, shaders_digest()


def free_for_model(devices: Sequence[str | Card], vram_budget: float | None, n_bytes: int) -> float:
    """Return the free bytes of devices with own memory, plus the free host memory if the model needs both."""
    infos = [find_device(str(name)) for name in devices]
    own = sum(info.free for info in infos if not info.shares_memory)
    if vram_budget is not None and vram_budget != -1:
        own = min(own, int(len(infos) * vram_budget * 2**30))
    return own if own > 1.1 * n_bytes else own + free_memory()


def placement_facts(to_place: ModelToPlace, devices: Sequence[str | Card]) -> PlacementFacts:
    """Gather facts, as Planner.placement_facts.

    The neurons of a dense model are not split. Neurons and experts are not split on a device that shares the
    CPU's memory, since both would read it, or on one without timeline semaphores, unless the settings ask for
    it. Layers without kernels are allowed only with --device auto.
    """
    graph, tensors, settings = to_place.graph, to_place.weights.tensors, to_place.settings
    names = list(map(str, devices))
    infos = [find_device(name) for name in names]
    sizes = settings.kv_type, to_place.n_blocks, settings.max_batch
    counted = partial(
        model_facts, graph, tensors, *sizes, mode=to_place.mode, n_states=to_place.n_states
    )  # fmt: skip
    model = counted()
    if settings.drafter in ("self", "mtp"):  # values of two programs and of the drafting layer
        beside = 0
        if settings.drafter == "mtp":
            beside = model_facts(describe_nextn(to_place.config, tensors), tensors, *sizes).whole_bytes
        model = replace(model, workspace_bytes=2 * model.workspace_bytes + beside)
    if missing := {i: layer.missing for i, layer in enumerate(model.layers) if layer.missing}:
        is_split = graph.is_layered and len(missing) < len(model.layers) and settings.undivided is None
        if not settings.is_auto or not is_split:
            layer, what = next(iter(missing.items()))
            raise refused(f"blk.{layer}", what, or_auto=is_split)
    limits = [limit_of(name, info, settings.vram_gib) for name, info in zip(names, infos, strict=True)]
    rates = tuple(rates_beside(info, settings.n_threads, settings.progress) for info in infos)
    n_layers = settings.layers_on_devices(len(model.layers))
    is_apart = (
        settings.split == "neurons"
        or settings.gpu_index is not None
        or all(info.kind != "integrated" and info.has_timelines for info in infos)
    )
    if not graph.is_layered or settings.undivided is not None:  # one device has the whole model, or none
        limits, rates, n_layers = limits[:1], rates[:1], len(model.layers)
        if settings.n_gpu_layers is not None and settings.n_gpu_layers < n_layers:
            raise UnsupportedModelError(
                "more than one value crosses from layer to layer in this model: it is not split between the "
                "CPU and a Vulkan device; leave n_gpu_layers out"
            )
    cached, why = cached_layers(graph, tensors)
    with_cache = None
    may_split = settings.split != "layers" and is_apart and settings.undivided is None
    if cached and may_split:
        with_cache = counted(cached=cached)
    if settings.split == "neurons":
        if why and with_cache is None and not any(layer.n_split for layer in model.layers):
            raise UnsupportedModelError(f"{why}; leave `split` out, and layers stay whole")
        model, with_cache = with_cache or model, None
    return PlacementFacts(
        model, tuple(limits), rates, tuple(np.zeros(layer.n_ff) for layer in model.layers),
        split_neurons=may_split and to_place.mode != "dense",
        n_gpu_layers=n_layers, with_cache=with_cache, notes=tuple(_notes(infos, missing)),
    )  # fmt: skip


def _notes(infos: Sequence[VulkanInfo], missing: Mapping[int, str]) -> list[str]:
    notes = [
        f"{info.name} is a software driver: the plan is that of a desktop with a GPU of 500 GB/s"
        for info in infos if info.is_software
    ]  # fmt: skip
    notes += [
        f"{info.name} shares this machine's memory, {100 * _SHARE_OF_SHARED:.0f}% of what is free at most"
        for info in infos if info.kind == "integrated"
    ]  # fmt: skip
    for what in dict.fromkeys(missing.values()):
        layers = [i for i, one in missing.items() if one == what]
        notes.append(f"{len(layers)} layers stay on the CPU: no Vulkan kernel computes {what}")
    return notes


def limit_of(name: str, info: VulkanInfo, gib: float | None, free: float | None = None) -> Device:
    """Return a device with the bytes that may be used on it.

    gib: the budget; None or -1: no budget. free: free bytes of host memory; None: query them. Raises
    OutOfMemoryError if the budget exceeds the free memory.
    """
    there = info.free
    if info.shares_memory:
        there = min(there, int(_SHARE_OF_SHARED * (free_memory() if free is None else free)))
    return within_budget(Device(name, there, 0), gib, f"that are free on {info.name}")


def model_facts(
    graph: Graph,
    tensors: Mapping[str, TensorInfo],
    kv_type: KVType,
    n_blocks: int,
    max_batch: int,
    *,
    mode: FFNMode = "dense",
    n_states: int = 0,
    cached: Mapping[int, ops.Ffn] | None = None,
) -> ModelFacts:
    """Count the bytes of a model on a Vulkan device, by layer.

    A layer includes its experts. In a sparse mode its neurons can be split. cached: MoE layers whose experts
    are in an expert cache. Raises UnsupportedModelError if no kernel computes the output.
    """
    parts: dict[int, list[Primitive]] = {}
    for op in graph.primitives:
        parts.setdefault(op.layer, []).append(op)
    n_kernels = budget.dispatches(graph, tensors)
    n_ff = {op.layer: op.n_ff for op in graph.ops if isinstance(op, ops.Ffn) and not op.shared}
    split = {} if mode == "dense" else split_ffns(graph)
    moe = cached or {}
    layouts = layout_numbers(moe.values(), tensors)
    for i in layouts:
        parts[i] = [op for op in parts[i] if not isinstance(op, ops.ExpertLinear | ops.ExpertSum)]
        n_kernels[i] += _SUBMIT_KERNELS
    layers = []
    for i in range(graph.n_layer):
        layer = _layer(parts.get(i, []), tensors, kv_type, (n_blocks, n_states), n_ff.get(i, 0), n_kernels[i])
        layer = _with_neurons(layer, split.get(i), tensors, mode)
        if i in layouts:
            layer = _with_cache(layer, moe[i], tensors, layouts[i])
        layers.append(layer)
    shared = [split[i] for i, layer in enumerate(layers) if layer.n_split]
    output = [op for op in parts.get(NO_LAYER, []) if not isinstance(op, ops.Embed)]
    for op in output:
        if (what := budget.missing_kernel(op, tensors, kv_type)) is not None:
            raise refused(op.out.name, what)
    weights = budget.weight_bytes(output, tensors)
    workspace = budget.workspace_bytes(graph, tensors, max_batch, n_blocks, n_states)
    if moe:
        workspace += budget.expert_cache_bytes(list(moe.values()), tensors, max_batch)
    return ModelFacts(
        tuple(layers), weights, workspace, budget.split_bytes(shared, max_batch), len(set(layouts.values()))
    )


def _with_neurons(
    layer: LayerFacts, ffn: ops.Ffn | None, tensors: Mapping[str, TensorInfo], mode: FFNMode
) -> LayerFacts:
    """Return a layer with its neurons counted apart from its other weights, if they can be split.

    The fixed bytes include one neuron, the minimum, and the padding; these bytes are not read.
    """
    if ffn is None or layer.missing is not None:
        return layer
    each, spare, scales = budget.neuron_bytes(ffn, tensors)
    always, fired = neuron_reads(ffn, tensors, mode)
    own = sum(budget.matrix_bytes(op, tensors) for op in (ffn.gate, ffn.up, ffn.down) if op is not None)
    n_kernels = None if layer.n_kernels is None else layer.n_kernels - FFN_KERNELS
    return replace(
        layer, n_split=ffn.n_ff, fixed_bytes=layer.fixed_bytes - own + spare, neuron_bytes=each,
        shared_bytes=scales, always_bytes=always, fired_bytes=fired, n_kernels=n_kernels,
        idle_bytes=layer.idle_bytes + spare,
    )  # fmt: skip


def _with_cache(
    layer: LayerFacts, ffn: ops.Ffn, tensors: Mapping[str, TensorInfo], layout: int
) -> LayerFacts:
    """Return a layer whose experts may be in an expert cache, in slots of a layout."""
    assert isinstance(ffn.up, ops.ExpertLinear)
    return replace(
        layer, expert_bytes=budget.expert_bytes(ffn, tensors), n_experts=ffn.up.n_expert,
        n_used=ffn.up.n_used, is_cached=True, layout=layout,
    )  # fmt: skip


def _layer(
    operations: Sequence[Primitive],
    tensors: Mapping[str, TensorInfo],
    kv_type: KVType,
    cache: tuple[int, int],
    n_ff: int,
    n_kernels: int,
) -> LayerFacts:
    n_blocks, n_states = cache
    missing = next(filter(None, (budget.missing_kernel(op, tensors, kv_type) for op in operations)), None)
    fixed = kv = kv_read = idle = 0
    if missing is None:
        fixed = budget.weight_bytes(operations, tensors)
    for op in operations:
        if missing is not None:
            fixed += sum(tensors[name].nbytes for name in op.matrices if not isinstance(op, ops.Embed))
        if isinstance(op, ops.ExpertLinear | ops.ExpertSum):
            all_bytes = sum(tensors[name].nbytes for name in op.matrices)
            counted = all_bytes if missing is not None else budget.matrix_bytes(op, tensors)
            idle += counted - all_bytes * op.n_used // op.n_expert
        kv += budget.cache_bytes(op, kv_type, n_blocks, n_states)
        if isinstance(op, ops.Recurrent):  # a state is read and written once
            kv_read += 2 * budget.state_bytes(op)
        if isinstance(op, ops.Attention):
            n_tokens = n_blocks * BLOCK_SIZE
            kv_read += int(op.n_visible(n_tokens // 2 - 1)) * kv_bytes(op, kv_type)
    return LayerFacts(
        n_ff, 0, fixed, 0, 0, kv, kv_read, 0, 0, idle_bytes=idle, n_kernels=n_kernels, missing=missing
    )
