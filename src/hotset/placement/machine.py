"""The measured rates of this machine, from which placement predicts times (table.DeviceRates).

The real operations are measured, on weights of Q4_0, within some seconds. machine.json in the folder of the
store keeps the results, under a key that names the processor, its threads and kernels, the device and the
versions of hotset and torch.
"""

from __future__ import annotations

import contextlib
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from hotset.backends.base import Batch
from hotset.backends.cpu.backend import CpuBackend, new_runtime
from hotset.backends.cpu.processor import isa
from hotset.backends.stage import BackendOptions
from hotset.cores import usable_cores
from hotset.errors import FormatError, HotsetError
from hotset.files import read_small_text, write_whole
from hotset.formats.gguf import TensorInfo
from hotset.formats.quants import TYPES, GGMLType, row_bytes
from hotset.model import operations as ops
from hotset.model.graph import Graph
from hotset.placement.table import DeviceRates
from hotset.storage.store import home

if TYPE_CHECKING:
    from hotset.reporter import Reporter

WIDTH, N_FF, N_LAYER = 4096, 8192, 6  # of the measured FFNs: 340 MB, more than caches hold
_ACTIVE = 0.1  # share of active neurons
_MANY = 64  # tokens of a prompt that need the same expert
SECONDS = 0.3  # of each measurement
TYPE = GGMLType.Q4_0
T = TypeVar("T")


STAND_IN = DeviceRates(
    cpu_read=50e9,
    cpu_gather=30e9,
    cpu_read_busy=45e9,
    cpu_gather_busy=27e9,
    read=500e9,
    read_busy=480e9,
    launch=4e-6,
    sync=15e-6,
    context=0,
    cpu_many=250e9,
    link=25e9,
    link_busy=22e9,
    cpu_read_link=28e9,
)
"""The assumed rates of a simulated GPU: a desktop with a mid-range GPU."""


def cpu_rates(n_threads: int | None, progress: Reporter | None) -> dict[str, float]:
    """Return the rates of this CPU without a device, stored or measured.

    They are bytes per second of sequential rows ("read") and of scattered rows ("gather"), and bytes times
    tokens per second of products for many tokens ("many").
    """
    n_threads = n_threads or usable_cores()
    key = f"{processor_name()} | {n_threads} threads | {isa()} | without a device"

    def kept(found: dict[str, float]) -> dict[str, float]:
        return {name: found[name] for name in ("read", "gather", "many")}

    def measure() -> dict[str, float]:
        with CpuLoop(n_threads) as cpu:
            read, gather = cpu.rate(SECONDS, sparse=False), cpu.rate(SECONDS, sparse=True)
            return {"read": read, "gather": gather, "many": cpu.many(SECONDS)}

    return once(key, kept, measure, "Measuring this processor, once.", progress)


# -- the CPU -------------------------------------------------------------------------------------


class HeldWeights:
    """Tensors in memory, as a WeightSource."""

    def __init__(self) -> None:
        self.tensors: dict[str, TensorInfo] = {}
        self._data: dict[str, np.ndarray] = {}

    def add(self, name: str, shape: tuple[int, ...], type: GGMLType, values: np.ndarray) -> None:
        self.tensors[name] = TensorInfo(name, shape, type, values.nbytes, 0)
        self._data[name] = values.view(np.uint8).reshape(-1)

    def data(self, name: str) -> np.ndarray:
        return self._data[name]

    def check(self) -> None:
        pass  # memory does not change


def _ffn_weights() -> HeldWeights:
    """Build the weights of FFNs whose neurons all fire, so that only the mask decides."""
    weights, rng = HeldWeights(), np.random.default_rng(0)
    weights.add("x", (WIDTH, 2), GGMLType.F32, np.full((2, WIDTH), 1e-3, np.float32))
    for i in range(N_LAYER):
        scores = np.where(rng.random((2, N_FF)) < _ACTIVE, 1.0, -1.0).astype(np.float32)
        weights.add(f"blk.{i}.scores", (N_FF, 2), GGMLType.F32, scores)
        for part in ("gate", "up", "down"):
            weights.add(f"blk.{i}.{part}", (WIDTH, N_FF), TYPE, matrix_bytes(N_FF))
    return weights


def matrix_bytes(n_rows: int) -> np.ndarray:
    """Return the bytes of n_rows rows of WIDTH values, each 2^-12."""
    layout = TYPES[TYPE].block
    assert layout is not None
    blocks = np.empty(n_rows * WIDTH // 32, layout)
    blocks["d"], blocks["qs"] = 2.0**-12, 0x99
    return blocks.view(np.uint8).reshape(-1)


def _ffn_graph() -> Graph:
    """Build a graph of consecutive FFNs whose neurons a table of scores selects."""
    graph = Graph()
    value, add = graph.value, graph.add
    x = add(ops.Embed(value("embedding", WIDTH), "x"))
    for i in range(N_LAYER):
        blk = f"blk.{i}"
        scores = add(ops.Embed(value(f"{blk}.ffn_pred", N_FF), f"{blk}.scores"))
        gate = ops.Linear(value(f"{blk}.ffn_gate", N_FF), x, f"{blk}.gate")
        up = ops.Linear(value(f"{blk}.ffn_up", N_FF), x, f"{blk}.up")
        fired = ops.Activate(value(f"{blk}.ffn_gate_act", N_FF), gate.out, "relu")
        neurons = ops.Multiply(value(f"{blk}.ffn_act", N_FF), fired.out, up.out)
        mask = ops.Mask(value(f"{blk}.ffn_masked", N_FF), neurons.out, scores, 0.0)
        down = ops.TransposedLinear(value(f"{blk}.ffn_down", WIDTH), mask.out, f"{blk}.down")
        ffn = ops.Ffn(
            down.out, x, None, gate, up, fired, None, neurons, mask, down, layer=i, part="ffn"
        )  # fmt: skip
        x = add(ops.Add(value(f"{blk}.out", WIDTH), x, add(ffn)))
    add(ops.SelectOutputs(value("logits", WIDTH), x))
    return graph


def _products_graph() -> Graph:
    """Build a graph of the products with gates and ups, which read matrices as experts do."""
    graph = Graph()
    x = graph.add(ops.Embed(graph.value("embedding", WIDTH), "x"))
    for i in range(N_LAYER):
        for part in ("gate", "up"):
            graph.add(ops.Linear(graph.value(f"blk.{i}.{part}", N_FF), x, f"blk.{i}.{part}"))
    graph.add(ops.SelectOutputs(graph.value("logits", WIDTH), x))
    return graph


class CpuLoop:
    """The CPU backend on synthetic FFNs."""

    def __init__(self, n_threads: int) -> None:
        weights, graph = _ffn_weights(), _ffn_graph()
        self._runtime = new_runtime(n_threads)
        self._backends = {
            sparse: CpuBackend(
                weights, graph, BackendOptions(n_blocks=1, max_batch=1, sparse=sparse), runtime=self._runtime
            )
            for sparse in (False, True)
        }
        zero = np.zeros(1, np.int32)
        self._batch = Batch(zero, zero, zero, zero[None], zero)
        self._many = CpuBackend(
            weights, _products_graph(), BackendOptions(n_blocks=1, max_batch=_MANY), runtime=self._runtime
        )
        rows = N_LAYER * N_FF * 3 * row_bytes(TYPE, WIDTH)
        self._bytes = {False: rows, True: _ACTIVE * rows}

    def rate(self, seconds: float, *, sparse: bool) -> float:
        """Measure the bytes of rows per second: the median of steps over `seconds` seconds."""
        backend = self._backends[sparse]
        backend.step(self._batch)
        return self._bytes[sparse] / median_seconds(lambda: backend.step(self._batch), seconds)

    def many(self, seconds: float) -> float:
        """Measure the bytes of rows times tokens per second, for _MANY tokens."""
        zeros = np.zeros(_MANY, np.int32)
        batch = Batch(zeros, np.arange(_MANY, dtype=np.int32), zeros, zeros[:1, None], zeros[:1])
        self._many.step(batch)
        n_bytes = 2 * N_LAYER * N_FF * row_bytes(TYPE, WIDTH)
        return _MANY * n_bytes / median_seconds(lambda: self._many.step(batch), seconds)

    def __enter__(self) -> CpuLoop:
        return self

    def __exit__(self, *_: object) -> None:
        for backend in (*self._backends.values(), self._many):
            backend.close()
        self._runtime.close()


def cpu_rate(n_threads: int, seconds: float = 0.3) -> float:
    """Measure for `seconds` seconds the bytes of weights per second that the CPU reads in a dense FFN."""
    with CpuLoop(n_threads) as cpu:
        return cpu.rate(seconds, sparse=False)


def median_seconds(work: Callable[[], object], seconds: float) -> float:
    """Return the median seconds of a call, over calls for `seconds` seconds in total."""
    return statistics.median(*times_in_turn([work], seconds))


def times_in_turn(works: Sequence[Callable[[], object]], seconds: float) -> list[list[float]]:
    """Call the works in turn for `seconds` seconds, at least three times; return the seconds of each call."""
    times: list[list[float]] = [[] for _ in works]
    until = time.perf_counter() + seconds
    while len(times[-1]) < 3 or time.perf_counter() < until:
        for work, own in zip(works, times, strict=True):
            begun = time.perf_counter()
            work()
            own.append(time.perf_counter() - begun)
    return times


# -- machine.json --------------------------------------------------------------------------------


def processor_name() -> str:
    """Return the processor's name as the system reports it."""
    if sys.platform == "darwin":
        import subprocess

        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        name = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    else:
        name = ""
        with contextlib.suppress(OSError):
            lines = (
                line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line
            )
            info = {key.strip(): value.strip() for key, value in reversed(list(lines))}
            name = info.get("model name") or info.get("Model") or ""
    return name or platform.processor() or platform.machine()


def machine_file() -> Path:
    """Return the path of the file with measured rates."""
    return home() / "machine.json"


def known(path: Path) -> Mapping[str, Any]:
    """Return the stored measurements, by key; empty if the file is missing or damaged."""
    try:
        found = json.loads(read_small_text(path))
    except (OSError, ValueError, RecursionError, FormatError):  # missing or damaged: measure again
        return {}
    return found if isinstance(found, dict) else {}


def once(
    key: str,
    kept: Callable[[Any], T],
    measure: Callable[[], T],
    said: str,
    progress: Reporter | None = None,
    path: Path | None = None,
    *,
    again: bool = False,
) -> T:
    """Return the stored measurement under a key, or measure and store it.

    kept: converts the stored entry; it raises if the entry is damaged or from another version. said: the
    message before measuring. path: the file; None: machine_file(). again: ignore the stored entry.
    """
    path = path or machine_file()
    if not again:
        with contextlib.suppress(KeyError, TypeError, ValueError, IndexError):
            return kept(known(path)[key])
    if progress is not None:
        progress.say(said)
    measured = measure()
    keep(path, key, measured if isinstance(measured, dict) else asdict(cast(Any, measured)))
    return measured


def keep(path: Path, key: str, measured: Mapping[str, Any]) -> None:
    """Store a measurement in the file. If that fails, the next start measures again."""
    with contextlib.suppress(OSError, HotsetError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole({path: json.dumps({**known(path), key: measured}, indent=1)}, sync=False)
