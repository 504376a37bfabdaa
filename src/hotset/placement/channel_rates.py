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
from hotset.model.decoder import describe
from hotset.model.graph import Graph
from hotset.model.operations import Embed, Linear, SelectOutputs
from hotset.parameters import real_number
from hotset.placement.channels import (
    ChannelPlan,
    ChannelRates,
    KindRates,
    MatrixKind,
    Workload,
    plan_channels,
)
from hotset.placement.machine import (
    HeldWeights,
    once,
    processor_name,
    times_in_turn,
)

if TYPE_CHECKING:
    from hotset.formats.gguf import GGUFFile
    from hotset.model.config import ModelConfig
    from hotset.reporter import Reporter
    from hotset.sparsity.thresholds import Thresholds

KEPT = 0.5  # share of the channels that are kept
_SECONDS = 0.4  # of the measurement
_MOST_MATRICES = 256
_DECREED = 0.8  # fixed rate of channels relative to rows, for a simulated GPU
_PASSES = 4  # over all matrices between two waits for the device


def of_cpu(
    works: Iterable[Workload],
    n_threads: int | None = None,
    *,
    progress: Reporter | None = None,
    path: Path | None = None,
) -> KindRates:
    """Return the stored rates of this CPU, or measure and store them. path: the file that keeps them."""
    n_threads, version = n_threads or usable_cores(), ""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version("hotset")
    machine = [processor_name(), f"{n_threads} threads", isa()]
    return {
        work.kind: kept_once([*machine, key_of(work), version], partial(measure_rates, n_threads, work),
        "this machine",
                         work, progress, path)
        for work in works
    }  # fmt: skip


def plan_here(
    gguf: GGUFFile,
    config: ModelConfig,
    thresholds: Thresholds,
    n_threads: int | None = None,
    *,
    progress: Reporter | None = None,
) -> ChannelPlan:
    """Return what this machine's CPU skips with a file of thresholds, if the copies have room."""
    graph = describe(config, gguf.tensors, layer_thresholds=thresholds.layers)
    rates = of_cpu(Workload.of(graph, gguf.tensors), n_threads, progress=progress)
    return plan_channels(graph, gguf.tensors, thresholds, rates)


def key_of(work: Workload) -> str:
    """Return the part of a key in machine.json that describes the workload."""
    kind = work.kind
    return f"channels {LAYOUT} {kind.type.name}, {kind.n_in} x {kind.n_out}, {work.n_bytes >> 20} MB"


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

    kind = work.kind
    shape = f"{kind.type.name}, {kind.n_in} × {kind.n_out}"
    said = f"Measuring how fast {who} reads rows and channels of {shape}, once."
    return once(" | ".join(key), kept, measure, said, progress, path)


def _weights(kind: MatrixKind, n_matrices: int) -> HeldWeights:
    """Build matrices of one kind with their input-major copies, and an input for each with some zeros."""
    weights, zero = HeldWeights(), np.random.default_rng(0).random(kind.n_in) >= KEPT
    weights.add("x", (kind.n_in, 1), GGMLType.F32, np.where(zero, 0, 1).astype(np.float32))
    info = TensorInfo("", (kind.n_in, kind.n_out), kind.type, row_bytes(kind.type, kind.n_in) * kind.n_out, 0)
    for i in range(n_matrices):
        weights.add(f"{i}.weight", info.shape, kind.type, filled(info.nbytes))
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
    """Measure the rates of the matrices of a workload: rows, and channels of which the share KEPT is read."""
    kind = work.kind
    n_matrices = min(max(2, work.n_bytes // (row_bytes(kind.type, kind.n_in) * kind.n_out)), _MOST_MATRICES)
    weights, graph = _weights(kind, n_matrices), Graph()
    outs = []
    for i in range(n_matrices):  # an input for each, because products with the same input are one operation
        x = graph.add(Embed(graph.value(f"in {i}", kind.n_in), "x"))
        out = graph.value(f"out {i}", kind.n_out)
        outs.append(graph.add(Linear(out, x, f"{i}.weight", input_major=copy_name(f"{i}.weight"))))
    graph.add(SelectOutputs(graph.value("logits", kind.n_out), outs[-1]))
    codes, scales = copy_bytes(weights.tensors["0.weight"])
    always = dict.fromkeys(weights.tensors, 2 / KEPT)
    zero = np.zeros(1, np.int32)
    batch = Batch(zero, zero, zero, zero[None], zero)
    runtime = new_runtime(n_threads)
    opened: list[CpuBackend] = []
    try:
        for sparse in (False, True):
            backend = CpuBackend(
                weights, graph,
                BackendOptions(
                    n_blocks=1, max_batch=1, sparse=sparse, channel_rates=always
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
