"""The rates at which the CPU and a device read matrices by row and input-major.

They are measured once, with the real kernels, and kept in machine.json. A simulated GPU has fixed rates.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import mmap
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hotset.backends.base import Batch
from hotset.backends.cpu.backend import CpuBackend, new_runtime
from hotset.backends.cpu.processor import isa
from hotset.backends.stage import BackendOptions
from hotset.cores import usable_cores
from hotset.formats.channels import LAYOUT, copy_bytes, copy_name, copy_shape
from hotset.formats.gguf import TensorInfo
from hotset.formats.quants import GGMLType, row_bytes
from hotset.model.graph import Graph
from hotset.model.operations import Embed, Linear, SelectOutputs
from hotset.parameters import real_number
from hotset.placement.channels import ChannelRates, TypeRates, Workload
from hotset.placement.machine import (
    HeldWeights,
    once,
    processor_name,
    times_in_turn,
)

if TYPE_CHECKING:
    from hotset.reporter import Reporter

KEPT = 0.5  # share of the channels that are kept
_SECONDS = 0.4  # of the measurement
_DECREED = 0.8  # fixed rate of channels relative to rows, for a simulated GPU
_PASSES = 4  # over all matrices between two waits for the device


def of_cpu(
    works: Iterable[Workload],
    n_threads: int | None = None,
    *,
    progress: Reporter | None = None,
    path: Path | None = None,
) -> TypeRates:
    """Return the stored rates of this CPU, or measure and store them. path: the file that keeps them."""
    n_threads, version = n_threads or usable_cores(), ""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version("hotset")
    machine = [processor_name(), f"{n_threads} threads", isa()]
    return {
        work.type: kept_once([*machine, key_of(work), version], partial(measure_rates, n_threads, work),
        "this machine",
                         work, progress, path)
        for work in works
    }  # fmt: skip


def key_of(work: Workload) -> str:
    """Return the part of a key in machine.json that describes the workload."""
    return f"channels {LAYOUT} {work.type.name}, {work.width} wide, {work.n_bytes >> 20} MB"


def kept_once(
    key: list[str],
    measure: Callable[[], ChannelRates],
    who: str,
    work: Workload,
    progress: Reporter | None,
    path: Path | None,
) -> ChannelRates:
    """Return stored rates, or measure and store them. who: the name of the reader in the message."""

    def kept(found: dict[str, Any]) -> ChannelRates:
        return ChannelRates(*(real_number("a rate", found[name], 1) for name in ("rows", "channels")))

    said = f"Measuring how fast {who} reads rows and channels of {work.type.name}, once."
    return once(" | ".join(key), kept, measure, said, progress, path)


def _weights(type: GGMLType, width: int, n_matrices: int) -> HeldWeights:
    """Build matrices of one type and width with their input-major copies, and an input that is half zeros."""
    weights, zero = HeldWeights(), np.random.default_rng(0).random(width) >= KEPT
    weights.add("x", (width, 1), GGMLType.F32, np.where(zero, 0, 1).astype(np.float32))
    info = TensorInfo("", (width, width), type, row_bytes(type, width) * width, 0)
    for i in range(n_matrices):
        weights.add(f"{i}.weight", info.shape, type, filled(info.nbytes))
        weights.add(copy_name(f"{i}.weight"), copy_shape(info), GGMLType.I8, filled(sum(copy_bytes(info))))
    return weights


def filled(n_bytes: int) -> np.ndarray:
    """Return n_bytes bytes 0x11, which are small and finite as float16 scales, in normal pages.

    NumPy's own memory is in huge pages, unlike a mapped file.
    """
    pages = mmap.mmap(-1, n_bytes)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):
            pages.madvise(mmap.MADV_NOHUGEPAGE)
    found = np.frombuffer(pages, np.uint8)
    found[:] = 0x11
    return found


def measure_rates(n_threads: int, work: Workload) -> ChannelRates:
    width = work.width
    n_matrices = max(2, work.n_bytes // (row_bytes(work.type, width) * width))
    weights, graph = _weights(work.type, width, n_matrices), Graph()
    x = graph.add(Embed(graph.value("embedding", width), "x"))
    outs = []
    for i in range(n_matrices):
        out = graph.value(f"out {i}", width)
        outs.append(graph.add(Linear(out, x, f"{i}.weight", input_major=copy_name(f"{i}.weight"))))
    graph.add(SelectOutputs(graph.value("logits", width), outs[-1]))
    codes, scales = copy_bytes(weights.tensors["0.weight"])
    zero = np.zeros(1, np.int32)
    batch = Batch(zero, zero, zero, zero[None], zero)
    runtime = new_runtime(n_threads)
    opened: list[CpuBackend] = []
    try:
        for sparse in (False, True):
            backend = CpuBackend(
                weights, graph,
                BackendOptions(
                    n_blocks=1, max_batch=1, sparse=sparse, channel_rates={work.type: 1 / KEPT}
                ),
                runtime=runtime,
            )  # fmt: skip
            opened.append(backend)
            backend.step(batch)
        # Take the minimum of each: other work on the machine only slows a run down.
        rows, channels = map(min, times_in_turn([partial(one.step, batch) for one in opened], _SECONDS))
    finally:
        for backend in opened:
            backend.close()
        runtime.close()
    n_read = n_matrices * (codes + scales), n_matrices * (codes * KEPT + scales)
    return ChannelRates(n_read[0] / rows, n_read[1] / channels)
