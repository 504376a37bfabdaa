"""Which matrices a device holds by channel: those of which what is left of the inputs is read in less time
than all rows.

A device has a matrix once, by row or by channel (backends/gpu/matrix.py), and every step reads it so. So one
of which the file of thresholds does not say what is left stays as it is. Gate and up go together, for of
gates alone by channel nothing would say which rows of up are needed before they are read; rows of up that a
cut gate does not need are left out in passing, without a layout of their own.

How fast a device reads rows, and half of the channels, is measured with the kernels that run later, once, and
kept in machine.json. Of the device cpu, which stands in for a GPU, it is so by decree.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hotset.backends.gpu.devices import find_device, synchronize
from hotset.formats.quants import GGMLType, row_bytes
from hotset.model.graph import Graph, cut_products
from hotset.model.operations import Ffn, Linear, has_zeros, one_matrix
from hotset.placement.channels import (
    ChannelGain,
    ChannelPlan,
    ChannelRates,
    Workload,
    cutoffs_by_value,
    measured_once,
)
from hotset.placement.machine import STAND_IN, device_key, machine_file

if TYPE_CHECKING:
    import torch

    from hotset.formats.gguf import TensorInfo
    from hotset.placement.table import Placement
    from hotset.reporter import Reporter
    from hotset.sparsity.thresholds import Thresholds

_BITS = {GGMLType.Q8_0: 8, GGMLType.Q4_0: 4, GGMLType.Q4_1: 4, GGMLType.Q4_K: 4}  # of a code
_OTHERS = GGMLType.Q4_0  # whose rates are taken for those of floats, and of types that are read by row alone
_DECREED = 0.8  # of the rate of rows: that of channels, of the device cpu
_KEPT = 0.5
_SECONDS = 0.2  # of the measurement
_PASSES = 4  # over all matrices between two waits for the device

Rates = Mapping[GGMLType, ChannelRates]


def with_devices(
    plan: ChannelPlan,
    graph: Graph,
    tensors: Mapping[str, TensorInfo],
    thresholds: Thresholds,
    placement: Placement,
    *,
    progress: Reporter | None = None,
) -> ChannelPlan:
    """A plan of the CPU's matrices with those of the devices. Raises DeviceError for one that fails."""
    if not (works := Workload.of(graph, tensors)):
        return plan
    rates = [device_rates(name, works, progress=progress) for name in placement.devices]
    of_layer = {i: rates[place.device] for i, place in enumerate(placement.layers) if place.device >= 0}
    split = frozenset(i for i, place in enumerate(placement.layers) if place.is_split)
    gains = plan_device_channels(graph, tensors, thresholds, of_layer, split)
    on_device = frozenset(gain.tensor for gain in gains if gain.pays and not gain.by_neuron)
    return replace(plan, gains=(*plan.gains, *gains), on_device=on_device)


def plan_device_channels(
    graph: Graph,
    tensors: Mapping[str, TensorInfo],
    thresholds: Thresholds,
    rates: Mapping[int, Rates],
    split: frozenset[int] = frozenset(),
) -> list[ChannelGain]:
    """What leaving out zeros gains in the layers of devices, matrix by matrix.

    rates: of each of these layers those of its device. split: layers whose neurons are shared with the CPU.
    """
    cutoff_of = cutoffs_by_value(graph)
    gains: dict[str, ChannelGain] = {}
    for op in cut_products(graph):
        kept = thresholds.kept(op.layer, cutoff_of[op.x])
        if op.layer in rates and kept is not None and _can_be_by_channel(tensors[op.weight], op):
            gains[op.weight] = _gain(op, tensors, kept, rates[op.layer])
    for ffn in graph.ffns:
        if ffn.layer in rates and ffn.route is None:
            _decide_ffn(ffn, tensors, thresholds, rates[ffn.layer], gains, is_split=ffn.layer in split)
    return list(gains.values())


def _decide_ffn(
    ffn: Ffn,
    tensors: Mapping[str, TensorInfo],
    thresholds: Thresholds,
    rates: Rates,
    gains: dict[str, ChannelGain],
    *,
    is_split: bool,
) -> None:
    """Of gate and up: both by channel, or the rows of up that the gate leaves."""
    ops = [one_matrix(op) for op in (ffn.gate, ffn.up) if op is not None]
    both = [gains.pop(op.weight) for op in ops if op.weight in gains]
    one_by_one = has_zeros(ffn.gate_act.kind) or ffn.mask is not None or is_split
    kept = thresholds.kept(ffn.layer, "gate") if ffn.gate_cut is not None and ffn.gate is not None else None
    by_row: list[ChannelGain] = []
    if kept is not None:
        up = ops[-1]
        own, n_bytes = rates[_measured_as(tensors[up.weight].type)], up.matrix_bytes(tensors)
        rows_s, read = n_bytes / own.rows, kept * n_bytes
        by_row.append(ChannelGain(up.weight, kept, True, n_bytes, read, rows_s, read / own.rows))
    by_channel = 0.0
    if len(both) == len(ops) and not one_by_one and all(gain.pays for gain in both):
        by_channel = sum(gain.rows_s - gain.kept_s for gain in both)
    chosen = both if by_channel > sum(gain.rows_s - gain.kept_s for gain in by_row) else by_row
    gains.update({gain.tensor: gain for gain in chosen})


def _can_be_by_channel(info: TensorInfo, op: Linear) -> bool:
    from hotset.backends.gpu.matrix import can_be_by_channel

    return can_be_by_channel(info.type, op.out.width)


def _gain(op: Linear, tensors: Mapping[str, TensorInfo], kept: float, rates: Rates) -> ChannelGain:
    n_bytes, type = op.matrix_bytes(tensors), tensors[op.weight].type
    own = rates[_measured_as(type)]
    read = _read(type, op.x.width * op.out.width, n_bytes, kept)
    return ChannelGain(op.weight, kept, False, n_bytes, read, n_bytes / own.rows, read / own.channels)


def _read(type: GGMLType, n_weights: int, n_bytes: int, kept: float) -> float:
    """Of so many bytes of weights those of the channels that are kept, and all scales."""
    codes = n_weights * _BITS[type] // 8 if type in _BITS else n_bytes
    return n_bytes - codes * (1 - kept)


def _measured_as(type: GGMLType) -> GGMLType:
    return type if type in _BITS else _OTHERS


# ---- how fast a device reads rows and channels ----


def device_rates(
    device: str, works: tuple[Workload, ...], *, progress: Reporter | None = None, path: Path | None = None
) -> dict[GGMLType, ChannelRates]:
    """What is known of a device, measured where it is not; of the types of the matrices of `works`, and of
    that which stands for others. path: the file to keep it in."""
    found = find_device(device)
    kinds = dict.fromkeys((_OTHERS, *(_measured_as(work.type) for work in works)))
    if found.type == "cpu":
        return dict.fromkeys(kinds, ChannelRates(STAND_IN.read, _DECREED * STAND_IN.read))
    return {type: _rates(found, replace(works[0], type=type), progress, path) for type in kinds}


def _rates(
    device: torch.device, work: Workload, progress: Reporter | None, path: Path | None
) -> ChannelRates:
    key = " | ".join([device_key(device), work.told()])
    return measured_once(
        path or machine_file(), key, lambda: measure(device, work), str(device), work, progress
    )


def measure(device: torch.device, work: Workload) -> ChannelRates:
    """Bytes per second of a device's kernels: of all rows, and of half of the channels with all scales."""
    import torch

    from hotset.backends.gpu.capture import Graphs
    from hotset.backends.gpu.kernels import Kernels
    from hotset.backends.gpu.matrix import DeviceMatrix

    kernels, n = Kernels(device), work.width
    n_bytes = row_bytes(work.type, n) * n
    # Whatever such bytes stand for, as a float16 scale they are small and finite.
    data = np.full(n_bytes, 0x11, np.uint8)
    by_row = [
        DeviceMatrix.from_bytes(data, work.type, n, n, device) for _ in range(max(2, work.n_bytes // n_bytes))
    ]
    by_channel = [DeviceMatrix.by_channel(n, [n], [m].__getitem__) for m in by_row]
    zero = np.random.default_rng(0).random((1, n)) >= _KEPT
    x = torch.from_numpy(np.where(zero, 0, 1).astype(np.float32)).to(device)

    def rows() -> None:
        for _ in range(_PASSES):
            for matrix in by_row:
                kernels.linear(x, matrix)

    def channels() -> None:
        for _ in range(_PASSES):
            for matrix in by_channel:
                kernels.linear_t(x, matrix)

    read = {rows: n_bytes, channels: _read(work.type, n * n, n_bytes, _KEPT)}
    runs: dict[Callable[[], None], Callable[[], object]] = {}
    for calls in read:
        calls()
        # As a step runs, without launches of the host between the products.
        runs[calls] = Graphs(device)(calls)[0].replay if kernels.capturable else calls
    times: dict[Callable[[], None], list[float]] = {calls: [] for calls in read}
    until = time.perf_counter() + _SECONDS
    while len(times[rows]) < 3 or time.perf_counter() < until:
        for calls, run in runs.items():
            begun = time.perf_counter()
            run()
            synchronize(device)
            times[calls].append(time.perf_counter() - begun)
    passed = _PASSES * len(by_row)
    found = [passed * read[calls] / statistics.median(times[calls]) for calls in (rows, channels)]
    return ChannelRates(*found)
