"""Which matrices are worth reading by channel: where the channels that are left take less time than all rows.

What is left of a matrix's input is said by the file of thresholds (Thresholds.kept); how fast this machine
reads rows, one after the other, and channels, here and there, is measured once and kept in machine.json. A
matrix that would not gain stays as it is. One of which nothing is known is laid out, and each step reads it
by channel only where few enough are left (csrc/ops/channel_input.h).
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import mmap
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hotset import _core
from hotset.backends.base import Batch
from hotset.backends.cpu.backend import CpuBackend, new_runtime
from hotset.cores import usable_cores
from hotset.formats.channels import LAYOUT, TYPES_BY_CHANNEL, can_be_by_channel, copy_bytes, copy_shape
from hotset.formats.gguf import TensorInfo
from hotset.formats.quants import GGMLType, row_bytes
from hotset.model.cutoffs import CutoffName
from hotset.model.graph import Graph, cut_products
from hotset.model.operations import Cutoff, Embed, Linear, SelectOutputs, Value
from hotset.parameters import real_number
from hotset.placement.machine import (
    keep,
    known,
    machine_file,
    processor_name,
)
from hotset.units import human_size

if TYPE_CHECKING:
    from hotset.reporter import Reporter
    from hotset.sparsity.thresholds import Thresholds

_KEPT = 0.5
_SECONDS = 0.4  # of the measurement
_NARROWEST, _WIDEST = 256, 4096
_LEAST_BYTES, _MOST_BYTES = 1 << 20, 1 << 27  # more than most caches hold
_OTHERS = GGMLType.Q4_0  # the type whose rates are taken for those of types without a layout by channel
_SPLIT = 0.2  # of the time of gate and up: what it costs to compute gates first, and then ups here and there
_LIST_S = 1e-9  # for each input: to find which of them are not zero
_LEAST_GAIN = 0.05  # of a matrix's time: for less a copy is not worth its room


@dataclass(frozen=True)
class Workload:
    """What rates are measured on: so many square matrices of a type and width that they have so many bytes
    in all.

    A model that fits in a cache, or has short rows, is read at another rate than one that does not; and what
    is computed with a code differs between types.
    """

    type: GGMLType
    width: int
    n_bytes: int

    @classmethod
    def of(cls, graph: Graph, tensors: Mapping[str, TensorInfo]) -> tuple[Workload, ...]:
        """Like the matrices whose zeros need not be read, for each of their types: their width, and their
        bytes beside the others'; powers of two, lest every model be measured by itself."""
        cut = {op.weight for op in cut_products(graph)}
        ups = {ffn.up_tensor for ffn in graph.ffns if ffn.gate_cut is not None}
        infos = [tensors[name] for name in sorted(cut | ups)]
        widths = sorted(info.shape[-1] for info in infos if info.name in cut) or [_WIDEST]
        n_bytes = sum(info.nbytes for info in infos if info.name in cut)
        width = min(max(_power_of_two(widths[len(widths) // 2]), _NARROWEST), _WIDEST)
        n_bytes = min(max(_power_of_two(n_bytes), _LEAST_BYTES), _MOST_BYTES)
        types = dict.fromkeys(_measured_as(info.type) for info in infos)
        return tuple(cls(type, width, n_bytes) for type in types)

    def told(self) -> str:
        """For a key of machine.json."""
        return f"channels {LAYOUT} {self.type.name}, {self.width} wide, {self.n_bytes >> 20} MB"


def _measured_as(type: GGMLType) -> GGMLType:
    """The type whose rates are taken for those of another."""
    return type if type in TYPES_BY_CHANNEL else _OTHERS


def _power_of_two(n: int) -> int:
    return 1 << max(n, 1).bit_length() - 1


@dataclass(frozen=True)
class ChannelRates:
    """Bytes per second of decoding: of rows that are all read, and of what is read by channel."""

    rows: float
    channels: float


@dataclass(frozen=True)
class ChannelGain:
    """One matrix for one token.

    kept: share of its channels that are read (of its rows, where `by_neuron`), None where it is not known.
    n_bytes: of all rows. read_bytes: of what is kept. rows_s, kept_s: the seconds of the two.
    """

    tensor: str
    kept: float | None
    by_neuron: bool
    n_bytes: int
    read_bytes: float
    rows_s: float
    kept_s: float

    @property
    def pays(self) -> bool:
        """Whether less than all of it should be read; so too where nothing is known: each step decides."""
        return self.kept is None or self.kept_s < (1 - _LEAST_GAIN) * self.rows_s


@dataclass(frozen=True)
class ChannelPlan:
    """Of the matrices of which zeros need not be read. rates: of each type, that of channels over that of
    rows.

    whole: up matrices of which every row is read, though gates are cut: leaving some out does not pay.
    on_device: those that devices hold by channel (placement/device_channels.py).
    """

    gains: tuple[ChannelGain, ...]
    rates: Mapping[GGMLType, float]
    whole: frozenset[str] = frozenset()
    on_device: frozenset[str] = frozenset()

    @property
    def chosen(self) -> tuple[str, ...]:
        """Those that are worth a copy by channel, of what the CPU computes with."""
        by_channel = [gain.tensor for gain in self.gains if gain.pays and not gain.by_neuron]
        return tuple(tensor for tensor in by_channel if tensor not in self.on_device)

    @property
    def left_out(self) -> float | None:
        """Bytes that a token is expected not to read; None where nothing is known of any matrix."""
        measured = [gain for gain in self.gains if gain.kept is not None]
        return sum(gain.n_bytes - gain.read_bytes for gain in measured if gain.pays) if measured else None

    @property
    def saved(self) -> float | None:
        """Seconds that a token is expected to take less; None as left_out."""
        measured = [gain for gain in self.gains if gain.kept is not None]
        return sum(gain.rows_s - gain.kept_s for gain in measured if gain.pays) if measured else None

    def told(self) -> str:
        """A sentence for a person."""
        n, of = sum(gain.pays for gain in self.gains), len(self.gains)
        sentence = f"cutoffs: zeros of {n} of {of} matrices are left out"
        if self.left_out is None or self.saved is None:
            return sentence
        total_s = sum(gain.rows_s for gain in self.gains)
        return (
            f"{sentence}; a token is expected to read {human_size(self.left_out)} less, and to take "
            f"{1e3 * self.saved:.3g} of the {1e3 * total_s:.3g} ms less that these take"
        )


def cutoffs_by_value(graph: Graph) -> dict[Value, CutoffName]:
    """By whose shares (Thresholds.kept) zeros of a product's input are known."""
    found: dict[Value, CutoffName] = {op.out: op.site for op in graph.primitives if isinstance(op, Cutoff)}
    return found | {ffn.selected: "down_in" for ffn in graph.ffns if ffn.gate_cut is not None}


def plan_channels(
    graph: Graph,
    tensors: Mapping[str, TensorInfo],
    thresholds: Thresholds,
    rates: Mapping[GGMLType, ChannelRates],
    layers: Collection[int] | None = None,
) -> ChannelPlan:
    """What leaving out zeros gains, matrix by matrix; of up rows are left out, where those are less.

    rates: of the types of Workload.of. layers: that the CPU computes; None: all. Of the others it computes
    the experts.
    """
    cutoff_of = cutoffs_by_value(graph)
    cut_ffns = [ffn for ffn in graph.ffns if ffn.gate_cut is not None]
    gains: dict[str, ChannelGain] = {}
    for op in cut_products(graph):
        info = tensors[op.weight]
        if not can_be_by_channel(info) or (layers is not None and op.layer not in layers):
            continue
        codes, scales = copy_bytes(info)
        kept = thresholds.kept(op.layer, cutoff_of[op.x])
        read = scales + codes * (1.0 if kept is None else kept)
        gain = _gain(op.weight, kept, False, info.nbytes, read, rates[info.type])
        gains[op.weight] = replace(gain, kept_s=gain.kept_s + _LIST_S * op.x.width)
    whole = set()
    for ffn in cut_ffns:
        up, kept = ffn.up, thresholds.kept(ffn.layer, "gate")
        is_another_s = layers is not None and ffn.layer not in layers and ffn.route is None
        if kept is None or ffn.gate is None or is_another_s:
            continue
        name = ffn.up_tensor
        own = rates[_measured_as(tensors[name].type)]
        n_bytes = up.matrix_bytes(tensors)  # of a token's experts
        by_neuron = _gain(name, kept, True, n_bytes, kept * n_bytes, own)
        split_s = _SPLIT * 2 * n_bytes / own.rows
        by_neuron = replace(by_neuron, kept_s=by_neuron.kept_s + split_s)
        other = gains.get(name)
        if other is None or other.kept is None or by_neuron.kept_s <= other.kept_s:
            gains[name] = by_neuron
        if not (gains[name].by_neuron and gains[name].pays):
            whole.add(name)
    ratios = {type: own.channels / own.rows for type, own in rates.items()}
    return ChannelPlan(tuple(gains.values()), ratios, frozenset(whole))


def _gain(
    tensor: str, kept: float | None, by_neuron: bool, n_bytes: int, read: float, rates: ChannelRates
) -> ChannelGain:
    return ChannelGain(tensor, kept, by_neuron, n_bytes, read, n_bytes / rates.rows, read / rates.channels)


# -- how fast this machine reads rows and channels ------------------------------------------------


def channel_rates(
    works: Iterable[Workload],
    n_threads: int | None = None,
    *,
    progress: Reporter | None = None,
    path: Path | None = None,
) -> dict[GGMLType, ChannelRates]:
    """What is known of this CPU, measured where it is not. path: the file to keep it in."""
    return {work.type: _rates(work, n_threads, progress, path) for work in works}


def _rates(
    work: Workload, n_threads: int | None, progress: Reporter | None, path: Path | None
) -> ChannelRates:
    n_threads = n_threads or usable_cores()
    path = path or machine_file()
    version = ""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version("hotset")
    key = " | ".join([processor_name(), f"{n_threads} threads", _core.isa(), work.told(), version])
    return measured_once(path, key, lambda: _measure(n_threads, work), "this machine", work, progress)


def measured_once(
    path: Path,
    key: str,
    measure: Callable[[], ChannelRates],
    who: str,
    work: Workload,
    progress: Reporter | None,
) -> ChannelRates:
    """What machine.json, at path, has under a key, or what `measure` finds, which is kept. who: reads."""
    with contextlib.suppress(KeyError, TypeError, ValueError):  # none yet, or of another version
        before = ChannelRates(**known(path)[key])
        if min(real_number("a rate", rate, 1) for rate in (before.rows, before.channels)):
            return before
    if progress is not None:
        progress.say(f"Measuring how fast {who} reads rows and channels of {work.type.name}, once.")
    measured = measure()
    keep(path, key, asdict(measured))
    return measured


class _Weights:
    """Matrices of one type and width with their copies by channel, and an input half of which is zero: a
    WeightSource."""

    def __init__(self, type: GGMLType, width: int, n_matrices: int) -> None:
        self.tensors: dict[str, TensorInfo] = {}
        self._data: dict[str, np.ndarray] = {}
        zero = np.random.default_rng(0).random(width) >= _KEPT
        self._add("x", (width, 1), GGMLType.F32, np.where(zero, 0, 1).astype(np.float32))
        info = TensorInfo("", (width, width), type, row_bytes(type, width) * width, 0)
        # Whatever such bytes stand for, as a float16 scale they are small and finite.
        rows, copy = (np.full(n, 0x11, np.uint8) for n in (info.nbytes, sum(copy_bytes(info))))
        for i in range(n_matrices):
            self._add(f"{i}.weight", info.shape, type, rows)
            self._add(f"{i}_c.blocks", copy_shape(info), GGMLType.I8, copy)

    def _add(self, name: str, shape: tuple[int, ...], type: GGMLType, values: np.ndarray) -> None:
        flat = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
        pages = mmap.mmap(-1, flat.nbytes)
        if hasattr(
            mmap, "MADV_NOHUGEPAGE"
        ):  # NumPy's own memory is in huge pages, which a mapped file is not
            with contextlib.suppress(OSError):
                pages.madvise(mmap.MADV_NOHUGEPAGE)
        self._data[name] = np.frombuffer(pages, np.uint8)
        self._data[name][:] = flat
        self.tensors[name] = TensorInfo(name, shape, type, self._data[name].nbytes, 0)

    def data(self, name: str) -> np.ndarray:
        return self._data[name]

    def check(self) -> None:
        pass  # memory stays as it is


def _measure(n_threads: int, work: Workload) -> ChannelRates:
    width = work.width
    n_matrices = max(2, work.n_bytes // (row_bytes(work.type, width) * width))
    weights, graph = _Weights(work.type, width, n_matrices), Graph()
    x = graph.add(Embed(graph.value("embedding", width), "x"))
    outs = []
    for i in range(n_matrices):
        out = graph.value(f"out {i}", width)
        linear = Linear(out, x, f"{i}.weight", by_channel=f"{i}_c.blocks")
        outs.append(graph.add(linear))
    graph.add(SelectOutputs(graph.value("logits", width), outs[-1]))
    codes, scales = copy_bytes(weights.tensors["0.weight"])
    n_bytes = {False: codes + scales, True: codes * _KEPT + scales}
    zero = np.zeros(1, np.int32)
    batch = Batch(zero, zero, zero, zero[None], zero)
    runtime = new_runtime(n_threads)
    opened: dict[bool, CpuBackend] = {}
    try:
        for sparse in (False, True):
            opened[sparse] = CpuBackend(
                weights, graph, n_pages=1, max_batch=1, sparse=sparse, runtime=runtime,
                channel_rates={work.type: 1 / _KEPT},
            )  # fmt: skip
            opened[sparse].step(batch)
        # The least of each, in turn: whoever else is at work makes it no slower than it is.
        least, until = {False: math.inf, True: math.inf}, time.perf_counter() + _SECONDS
        while least[True] == math.inf or time.perf_counter() < until:
            for sparse, backend in opened.items():
                begun = time.perf_counter()
                backend.step(batch)
                least[sparse] = min(least[sparse], time.perf_counter() - begun)
    finally:
        for backend in opened.values():
            backend.close()
        runtime.close()
    rates = {sparse: n_matrices * n_bytes[sparse] / least[sparse] for sparse in opened}
    return ChannelRates(rates[False], rates[True])
