"""Measured workgroup shapes of a Vulkan device for products with quantised weights.

    shapes = tuned(info, device, product_types(graph, tensors))

The first load of a weight type on a device measures the candidates (shapes.py) with the real kernels and the
device's own timestamps. A step reads at least 384 MiB of different weights, so that they come from memory:
three times a last-level cache of 128 MiB. A cache of 256 MiB may still serve part of them. A file per device
keeps the fastest shapes, by driver and version. All types of a load share two seconds; unmeasured types keep
their defaults. HOTSET_AUTOTUNE=0 disables tuning. Software drivers, which compute on the CPU, and devices
without timestamps are never tuned.

Copied to the folder `tuned` of this package, such a file is a device's table for every driver. Its types are
not measured. Own measurements win over it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hotset.backends.stage import BackendOptions
from hotset.backends.vulkan.devices import NAME, VulkanInfo, validates
from hotset.backends.vulkan.shapes import CANDIDATES, DeviceShapes, ProductShapes, default_shapes
from hotset.backends.vulkan.stage import Loaded, OpenDevice, VulkanStage
from hotset.backends.vulkan.steps import rounded_input
from hotset.backends.vulkan.weights import COMPUTED, TILE, VulkanWeights, tile_bytes
from hotset.errors import HotsetError
from hotset.formats.gguf import TensorInfo
from hotset.formats.quants import GGMLType, row_bytes
from hotset.model.graph import Graph
from hotset.model.operations import Embed, Linear, SelectOutputs
from hotset.placement.machine import HeldWeights, keep, known, machine_file

if TYPE_CHECKING:
    from hotset import _core
    from hotset.reporter import Reporter

TABLES = Path(__file__).parent / "tuned"  # files of devices, which the package contains
WIDTH = 4096  # inputs of the measured matrices
SECONDS = 2.0  # for all types of a load
_RUNS = 5  # of a step, whose median counts
CACHE_BYTES = 128 << 20  # of a last-level cache; some GPUs have 256 MiB
CACHES = 3
_FASTER = 0.97  # a candidate must take less than this share of the default's seconds; the rest is noise
# For each field: whether its matrices are large, and the token counts whose step times are added up.
MEASURED: Mapping[str, tuple[bool, tuple[int, ...]]] = {
    "one": (False, (1,)), "ahead": (False, (1,)), "one_large": (True, (1,)), "few": (False, (4,)),
    "few_ahead": (False, (4,)), "most_few": (False, (8, 16, 24)), "few_large": (True, (4,)),
}  # fmt: skip
_PARTS = 4  # square matrices in a large one

Measure = Callable[[ProductShapes, str], float]  # seconds with these shapes, for choosing the named field


def tuned(
    info: VulkanInfo,
    device: _core.VulkanDevice,
    types: Iterable[GGMLType],
    *,
    progress: Reporter | None = None,
    path: Path | None = None,
    measuring: Callable[[GGMLType], contextlib.AbstractContextManager[Measure]] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> DeviceShapes:
    """Return the shapes of an open device for products with weights of these types, measured in their order.

    path: the file that keeps the shapes. measuring, clock: replacements for tests.
    """
    path, measuring = path or file_of(info), measuring or partial(_steps, info, device)
    default, found = default_shapes(info), dict(known_shapes(info, path).tuned)
    missing = [] if why_untuned(info) else [type_ for type_ in types if type_ not in found]
    if missing and progress is not None:
        progress.say(f"Measuring workgroups of {info.name} (Vulkan), once.")
    until = clock() + SECONDS
    for type_ in missing:
        if clock() >= until:
            break
        # If memory is short, the defaults stay, and the next load tries again.
        with contextlib.suppress(HotsetError), measuring(type_) as seconds_of:
            found[type_] = fastest(default, seconds_of, lambda: clock() < until)
            keep(path, _key(info, type_), asdict(found[type_]))
    return DeviceShapes(default, found)


def fastest(default: ProductShapes, seconds_of: Measure, has_time: Callable[[], bool]) -> ProductShapes:
    """Return the fastest shapes, measured one field after the other.

    A field keeps its default unless a candidate is clearly faster. When time runs out, the remaining fields
    keep theirs.
    """
    best = default
    for name, candidates in CANDIDATES.items():
        own, least = getattr(default, name), 0.0
        for candidate in (own, *(one for one in candidates if one != own)):
            if not has_time():
                return best
            chosen = replace(best, **{name: candidate})
            seconds = seconds_of(chosen, name)
            if candidate == own:
                least = _FASTER * seconds
            elif seconds < least:
                best, least = chosen, seconds
    return best


def why_untuned(info: VulkanInfo) -> str:
    """Return why a device keeps the defaults; empty if it can be tuned."""
    if os.environ.get("HOTSET_AUTOTUNE") == "0":
        return "HOTSET_AUTOTUNE=0"
    if info.is_software:
        return "a software driver"
    return "" if info.has_timestamps else "no timestamps"


def known_shapes(info: VulkanInfo, path: Path | None = None) -> DeviceShapes:
    """Return the shapes of earlier loads and of the device's table, without measuring."""
    kept, found = known(path or file_of(info)), dict[GGMLType, ProductShapes]()
    table = {key.rpartition(" | ")[2]: one for key, one in known(file_of(info, TABLES)).items()}
    for type_ in () if why_untuned(info) else COMPUTED:
        key = _key(info, type_)
        for entry in (table.get(key.rpartition(" | ")[2]), kept.get(key)):
            with contextlib.suppress(KeyError, TypeError, ValueError):
                found[type_] = _kept(entry)
    return DeviceShapes(default_shapes(info), found)


def file_of(info: VulkanInfo, folder: Path | None = None) -> Path:
    """Return the path of a device's file in a folder; None: the folder with measurements of this machine."""
    name = re.sub(r"[^a-z0-9]+", "-", info.name.lower()).strip("-")
    return (folder or machine_file().parent / "tuned") / f"{name}.json"


def product_types(graph: Graph, tensors: Mapping[str, TensorInfo]) -> list[GGMLType]:
    """Return the types of quantised weights in products, the type with the most bytes first."""
    n_bytes = Counter[GGMLType]()
    for op in graph.primitives:
        if rounded_input(op, tensors) is not None:
            n_bytes[tensors[op.matrices[0]].type] += sum(tensors[name].nbytes for name in op.matrices)
    return [type_ for type_, _ in n_bytes.most_common()]


def device_key(info: VulkanInfo) -> str:
    """Return the key of a device's measurements: the device, its driver and the version of hotset."""
    version = ""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version("hotset")
    how = ["with validation layers"] if validates() else []
    key = [NAME, info.name, info.kind, f"driver {info.driver}", f"Vulkan {info.api}", version, *how]
    return " | ".join(key)


def _key(info: VulkanInfo, type_: GGMLType) -> str:
    return f"{device_key(info)} | products of {type_.name}"


def _kept(found: Any) -> ProductShapes:
    """Rebuild shapes from the dictionary that asdict made.

    Raises ValueError if a value is not a candidate, KeyError or TypeError if a field is missing or malformed.
    """
    values = {}
    for name, candidates in CANDIDATES.items():
        value = tuple(found[name]) if isinstance(found[name], list) else found[name]
        values[name] = candidates[candidates.index(value)]
    return ProductShapes(**values)


def n_large(type_: GGMLType) -> int:
    """Return the large matrices of a measured step, which together exceed a cache CACHES times."""
    each = sum(tile_bytes(type_, WIDTH)) * (_PARTS * WIDTH // TILE)
    return -(-CACHES * CACHE_BYTES // each)


@contextlib.contextmanager
def _steps(info: VulkanInfo, device: _core.VulkanDevice, type_: GGMLType) -> Iterator[Measure]:
    """Yield a function that measures steps of products on an open device.

    The matrices are uninitialised memory, since times do not depend on weights. Square ones are parts of the
    large ones.
    """
    n, opened = n_large(type_), OpenDevice.of(info, device)
    with contextlib.ExitStack() as closing:
        models = {
            is_large: products(n if is_large else _PARTS * n, type_, (_PARTS if is_large else 1) * WIDTH)
            for is_large in (False, True)
        }
        weights = VulkanWeights(models[True][0], device)
        for i in range(n):
            matrix = weights.once(
                ("w", i, _PARTS * WIDTH), lambda: weights.empty(type_, 1, _PARTS * WIDTH, WIDTH)
            )
            for part in range(_PARTS):
                weights.kept["w", _PARTS * i + part, WIDTH] = matrix.rows(part * WIDTH, WIDTH)
        stages = {}
        for is_large, model in models.items():
            options, loaded = BackendOptions(n_blocks=1, max_batch=32), Loaded(weights)
            stages[is_large] = VulkanStage(*model, opened, options, loaded=loaded)
            closing.callback(stages[is_large].close)
        stages[True].start_timing()

        def seconds_of(shapes: ProductShapes, name: str) -> float:
            is_large, counts = MEASURED[name]
            stage, seconds = stages[is_large], 0.0
            stage.take_shapes(DeviceShapes(shapes))
            for n in counts:
                stage.rerun(n)  # records the step and compiles its kernels
                seconds += statistics.median(stage.device_seconds(n) for _ in range(_RUNS))
            return seconds

        yield seconds_of


def products(n: int, type_: GGMLType, n_rows: int) -> tuple[HeldWeights, Graph]:
    """Build a graph of `n` products, and its weights.

    The matrices are overlapping rows of one tensor; each has its own copy on the device. A product with a
    square matrix takes the result of the product before it, and so waits for it.
    """
    weights, graph = HeldWeights(), Graph()
    weights.add("x", (WIDTH, 1), GGMLType.F32, np.ones((1, WIDTH), np.float32))
    rows = np.full((n_rows + n) * row_bytes(type_, WIDTH), 0x11, np.uint8)
    weights.add("w", (WIDTH, n_rows + n), type_, rows)
    x = graph.add(Embed(graph.value("embedding", WIDTH), "x"))
    for i in range(n):
        # Products of one input share a dispatch, except in an FFN.
        out = graph.add(Linear(graph.value(f"{i}", n_rows), x, "w", first_row=i, part="ffn"))
        x = out if n_rows == WIDTH else x
    graph.add(SelectOutputs(graph.value("logits", WIDTH), x))
    return weights, graph
