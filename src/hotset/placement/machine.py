"""How fast this machine is, measured once: what placement reckons with (table.DeviceRates).

All are measured with the operations that run later, on weights of Q4_0. The results are kept in machine.json
in the folder of the store, under a key that names the processor, its threads and kernels, the device and the
versions of hotset and torch; measuring takes some seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from hotset.backends.base import Batch
from hotset.backends.cpu.backend import CpuBackend, new_runtime
from hotset.backends.cpu.processor import isa
from hotset.backends.gpu.devices import find_device, free_bytes, synchronize
from hotset.cores import usable_cores
from hotset.errors import DeviceError, FormatError, HotsetError, InvalidRequestError
from hotset.files import read_small_text, write_whole
from hotset.formats.gguf import TensorInfo
from hotset.formats.quants import TYPES, GGMLType, row_bytes
from hotset.model.graph import Graph
from hotset.model.operations import (
    Activate,
    Add,
    Embed,
    Ffn,
    Linear,
    Mask,
    Multiply,
    SelectOutputs,
    TransposedLinear,
)
from hotset.placement.cards import Card
from hotset.placement.table import DeviceRates
from hotset.storage.store import home

if TYPE_CHECKING:
    import torch

    from hotset.backends.gpu.cpu_offload import ChosenKind
    from hotset.backends.gpu.host_experts import Registrar
    from hotset.reporter import Reporter

USUAL_CONTEXT = 600 << 20  # bytes that a CUDA context with its kernels takes, where it cannot be measured
_WIDTH, _N_FF, _N_LAYER = 4096, 8192, 6  # of the FFNs that are measured: 340 MB, more than caches hold
_ACTIVE = 0.1
_MANY = 64  # tokens: of a prompt that want one expert
_SECONDS = 0.3  # of each measurement
_TURNS = 4  # over the matrices of a device, between two waits for it
_TYPE = GGMLType.Q4_0
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
"""Of the device cpu: a desktop with a middling GPU; not measured."""


# Shares of a data sheet's figures that kernels reach.
_OF_BANDWIDTH, _OF_LINK = 0.85, 0.8


def estimate(card: Card, *, n_threads: int | None = None, progress: Reporter | None = None) -> DeviceRates:
    """A card that is not in this machine, beside this CPU: the CPU's rates are measured once, the card's
    follow from its data sheet, and how both disturb each other is that of STAND_IN."""
    cpu = cpu_rates(n_threads, progress)
    read, link = _OF_BANDWIDTH * card.bandwidth * 1e9, _OF_LINK * card.link * 1e9
    return DeviceRates(
        cpu_read=cpu["read"],
        cpu_gather=cpu["gather"],
        cpu_read_busy=cpu["read"] * STAND_IN.cpu_read_busy / STAND_IN.cpu_read,
        cpu_gather_busy=cpu["gather"] * STAND_IN.cpu_gather_busy / STAND_IN.cpu_gather,
        read=read,
        read_busy=read * STAND_IN.read_busy / STAND_IN.read,
        launch=STAND_IN.launch,
        sync=STAND_IN.sync,
        context=USUAL_CONTEXT,
        cpu_many=cpu["many"],
        link=link,
        link_busy=link * STAND_IN.link_busy / STAND_IN.link,
        cpu_read_link=cpu["read"] * STAND_IN.cpu_read_link / STAND_IN.cpu_read,
    )


def cpu_rates(n_threads: int | None, progress: Reporter | None) -> dict[str, float]:
    """Of this CPU by itself: bytes per second of rows ("read") and of rows here and there ("gather"), and
    bytes times tokens per second of products for many tokens ("many")."""
    n_threads = n_threads or usable_cores()
    key = f"{processor_name()} | {n_threads} threads | {isa()} | without a device"

    def kept(found: dict[str, float]) -> dict[str, float]:
        return {name: found[name] for name in ("read", "gather", "many")}

    def measure() -> dict[str, float]:
        with _Cpu(n_threads) as cpu:
            read, gather = cpu.rate(_SECONDS, sparse=False), cpu.rate(_SECONDS, sparse=True)
            return {"read": read, "gather": gather, "many": cpu.many(_SECONDS)}

    return once(key, kept, measure, "Measuring this processor, once.", progress)


def force_misses(rates: DeviceRates) -> DeviceRates:
    """HOTSET_EXPERT_MISSES forces who computes experts that a device lacks: cpu, or fetch, as far as spare
    slots reach. Raises InvalidRequestError for anything else."""
    forced = os.environ.get("HOTSET_EXPERT_MISSES") or ""
    changed = {
        "": rates, "cpu": replace(rates, link=0.0),
        "fetch": replace(rates, cpu_many=1.0),  # which makes each expert dear
    }  # fmt: skip
    if forced not in changed:
        raise InvalidRequestError(f"HOTSET_EXPERT_MISSES must be cpu or fetch, not {forced!r}")
    return changed[forced]


def measure(
    device: str | Card,
    *,
    n_threads: int | None = None,
    progress: Reporter | None = None,
    anew: bool = False,
    path: Path | None = None,
) -> DeviceRates:
    """What is known of a device beside this CPU, measured where it is not (or `anew`); of a card that is not
    here, estimated.

    Of "cpu", which stands in for a GPU, the rates of one, so that a plan is what a GPU's would be.
    path: the file to keep it in. Raises DeviceError for a device that is not there.
    """
    if isinstance(device, Card):
        return estimate(device, n_threads=n_threads, progress=progress)
    found = find_device(device)
    if found.type == "cpu":
        return STAND_IN
    n_threads = n_threads or usable_cores()
    return once(
        device_key(found, n_threads), lambda kept: DeviceRates(**kept), lambda: measure_now(found, n_threads),
        f"Measuring this machine with {device}, once.", progress, path, anew=anew,
    )  # fmt: skip


def measure_now(device: torch.device, n_threads: int) -> DeviceRates:
    """The rates of a device beside this CPU, measured in some seconds and not kept."""
    with _Context(device) as context, _Cpu(n_threads) as cpu:
        loop = DeviceLoop(device)
        cpu_read, cpu_gather = cpu.rate(_SECONDS, sparse=False), cpu.rate(_SECONDS, sparse=True)
        read = loop.rate(_SECONDS)
        with loop.running() as busy:
            cpu_read_busy = cpu.rate(_SECONDS, sparse=False)
            cpu_gather_busy = cpu.rate(_SECONDS, sparse=True)
        launch, sync = loop.launch_seconds(), _round_trip(device)
        loop.close()
        cpu_many, link_rate, link_busy, cpu_read_link = cpu.many(_SECONDS), 0.0, 0.0, cpu_read
        with contextlib.suppress(DeviceError), TransferLoop(device) as link:
            link_rate = link.rate(_SECONDS)
            with link.running() as linked:
                cpu_read_link = cpu.rate(_SECONDS, sparse=False)
            link_busy = linked.rate
    # Noise must not make anything faster for being disturbed.
    return DeviceRates(
        cpu_read, cpu_gather, min(cpu_read, cpu_read_busy), min(cpu_gather, cpu_gather_busy),
        read, min(read, busy.rate), launch, sync, context.n_bytes,
        cpu_many, link_rate, min(link_rate, link_busy), min(cpu_read, cpu_read_link),
    )  # fmt: skip


def _round_trip(device: torch.device) -> float:
    from hotset.backends.gpu.cpu_offload import round_trip_seconds

    chosen = synchronisation(str(device))
    return chosen.seconds or round_trip_seconds(device, chosen.kind, width=_WIDTH)


def synchronisation(device: str, path: Path | None = None) -> ChosenKind:
    """How a device takes turns with the CPU (gpu/cpu_offload.py): as it was found out once, on a CUDA
    device by
    processes that take some seconds, and kept in machine.json; or as HOTSET_HANDSHAKE says."""
    import torch

    from hotset.backends.gpu.cpu_offload import ChosenKind, choose_kind

    found = find_device(device)
    if found.type != "cuda" or os.environ.get("HOTSET_HANDSHAKE"):
        return choose_kind(found)
    path = path or machine_file()
    driver = getattr(torch._C, "_cuda_getDriverVersion", int)()  # noqa: SLF001 - not in builds without CUDA
    key = " | ".join(["synchronisation", device_key(found), f"driver {driver}"])
    with contextlib.suppress(KeyError, TypeError):
        return ChosenKind(**known(path)[key])
    chosen = choose_kind(found)
    if chosen.seconds is not None:  # else it may do better after a change of the driver
        keep(path, key, asdict(chosen))
    return chosen


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
        pass  # memory stays as it is


def _ffn_weights() -> HeldWeights:
    """Of FFNs whose every neuron fires, so that a mask alone decides."""
    weights, rng = HeldWeights(), np.random.default_rng(0)
    weights.add("x", (_WIDTH, 2), GGMLType.F32, np.full((2, _WIDTH), 1e-3, np.float32))
    for i in range(_N_LAYER):
        scores = np.where(rng.random((2, _N_FF)) < _ACTIVE, 1.0, -1.0).astype(np.float32)
        weights.add(f"blk.{i}.scores", (_N_FF, 2), GGMLType.F32, scores)
        for part in ("gate", "up", "down"):
            weights.add(f"blk.{i}.{part}", (_WIDTH, _N_FF), _TYPE, _matrix(_N_FF))
    return weights


def _matrix(n_rows: int) -> np.ndarray:
    """The bytes of rows of _WIDTH values, each 2^-12."""
    layout = TYPES[_TYPE].block
    assert layout is not None
    blocks = np.empty(n_rows * _WIDTH // 32, layout)
    blocks["d"], blocks["qs"] = 2.0**-12, 0x99
    return blocks.view(np.uint8).reshape(-1)


def _ffn_graph() -> Graph:
    """Some FFNs, one after the other, whose neurons a table of scores selects."""
    graph = Graph()
    value, add = graph.value, graph.add
    x = add(Embed(value("embedding", _WIDTH), "x"))
    for i in range(_N_LAYER):
        blk = f"blk.{i}"
        scores = add(Embed(value(f"{blk}.ffn_pred", _N_FF), f"{blk}.scores"))
        gate = Linear(value(f"{blk}.ffn_gate", _N_FF), x, f"{blk}.gate")
        up = Linear(value(f"{blk}.ffn_up", _N_FF), x, f"{blk}.up")
        fired = Activate(value(f"{blk}.ffn_gate_act", _N_FF), gate.out, "relu")
        neurons = Multiply(value(f"{blk}.ffn_act", _N_FF), fired.out, up.out)
        mask = Mask(value(f"{blk}.ffn_masked", _N_FF), neurons.out, scores, 0.0)
        down = TransposedLinear(value(f"{blk}.ffn_down", _WIDTH), mask.out, f"{blk}.down")
        ffn = Ffn(
            down.out, x, None, gate, up, fired, None, neurons, mask, down, layer=i, part="ffn"
        )  # fmt: skip
        x = add(Add(value(f"{blk}.out", _WIDTH), x, add(ffn)))
    add(SelectOutputs(value("logits", _WIDTH), x))
    return graph


def _products_graph() -> Graph:
    """The matrices of gates and ups alone, as products of experts read them."""
    graph = Graph()
    x = graph.add(Embed(graph.value("embedding", _WIDTH), "x"))
    for i in range(_N_LAYER):
        for part in ("gate", "up"):
            graph.add(Linear(graph.value(f"blk.{i}.{part}", _N_FF), x, f"blk.{i}.{part}"))
    graph.add(SelectOutputs(graph.value("logits", _WIDTH), x))
    return graph


class _Cpu:
    """The CPU backend on synthetic FFNs."""

    def __init__(self, n_threads: int) -> None:
        weights, graph = _ffn_weights(), _ffn_graph()
        self._runtime = new_runtime(n_threads)
        self._backends = {
            sparse: CpuBackend(weights, graph, n_pages=1, max_batch=1, sparse=sparse, runtime=self._runtime)
            for sparse in (False, True)
        }
        zero = np.zeros(1, np.int32)
        self._batch = Batch(zero, zero, zero, zero[None], zero)
        self._many = CpuBackend(
            weights, _products_graph(), n_pages=1, max_batch=_MANY, sparse=False, runtime=self._runtime
        )
        rows = _N_LAYER * _N_FF * 3 * row_bytes(_TYPE, _WIDTH)
        self._bytes = {False: rows, True: _ACTIVE * rows}

    def rate(self, seconds: float, *, sparse: bool) -> float:
        """Bytes of rows per second: the median over steps for so long."""
        backend = self._backends[sparse]
        backend.step(self._batch)
        return self._bytes[sparse] / median_seconds(lambda: backend.step(self._batch), seconds)

    def many(self, seconds: float) -> float:
        """Bytes of rows times tokens per second, for _MANY tokens."""
        zeros = np.zeros(_MANY, np.int32)
        batch = Batch(zeros, np.arange(_MANY, dtype=np.int32), zeros, zeros[:1, None], zeros[:1])
        self._many.step(batch)
        n_bytes = 2 * _N_LAYER * _N_FF * row_bytes(_TYPE, _WIDTH)
        return _MANY * n_bytes / median_seconds(lambda: self._many.step(batch), seconds)

    def __enter__(self) -> _Cpu:
        return self

    def __exit__(self, *_: object) -> None:
        for backend in (*self._backends.values(), self._many):
            backend.close()
        self._runtime.close()


def cpu_rate(n_threads: int, seconds: float = 0.3) -> float:
    """Bytes of weights per second that the CPU reads in a dense FFN, measured for so many seconds."""
    with _Cpu(n_threads) as cpu:
        return cpu.rate(seconds, sparse=False)


def median_seconds(work: Callable[[], object], seconds: float) -> float:
    """Of calls one after the other, for so many seconds in all."""
    return statistics.median(*times_in_turn([work], seconds))


def times_in_turn(works: Sequence[Callable[[], object]], seconds: float) -> list[list[float]]:
    """Seconds of each call of each work, in turn, for so many seconds in all, and three times at least."""
    times: list[list[float]] = [[] for _ in works]
    until = time.perf_counter() + seconds
    while len(times[-1]) < 3 or time.perf_counter() < until:
        for work, own in zip(works, times, strict=True):
            begun = time.perf_counter()
            work()
            own.append(time.perf_counter() - begun)
    return times


# -- a device ------------------------------------------------------------------------------------


@dataclass
class _Busy:
    rate: float = 0.0


class Loop:
    """Something that a device does again and again: `_pass`, which reads `n_bytes` and waits for its end."""

    n_bytes: int

    def _pass(self) -> None:
        raise NotImplementedError

    def rate(self, seconds: float) -> float:
        """Bytes per second."""
        return self.n_bytes / median_seconds(self._pass, seconds)

    @contextlib.contextmanager
    def running(self) -> Iterator[_Busy]:
        """Keeps the device at work in another thread; its rate stands in what is yielded, at the end."""
        busy, ending, passes, failed = _Busy(), threading.Event(), [0], list[BaseException]()

        def work() -> None:
            try:
                while not ending.is_set():
                    self._pass()
                    passes[0] += 1
            except BaseException as error:  # raised where the rate is wanted
                failed.append(error)

        thread = threading.Thread(target=work, daemon=True)
        begun = time.perf_counter()
        thread.start()
        try:
            yield busy
        finally:
            ending.set()
            thread.join()
        if failed:
            raise failed[0]
        busy.rate = max(passes[0], 1) * self.n_bytes / (time.perf_counter() - begun)


class DeviceLoop(Loop):
    """Matrices in a device's memory, and products with them."""

    def __init__(self, device: torch.device) -> None:
        import torch

        from hotset.backends.gpu.kernels import Kernels
        from hotset.backends.gpu.matrix import DeviceMatrix

        self._kernels, self._device = Kernels(device), device
        self._synchronize: Callable[[], None] = lambda: synchronize(device)
        n_rows = 65536 if device.type in ("cuda", "xpu") else 2048  # large, where a launch costs
        n_bytes = n_rows * row_bytes(_TYPE, _WIDTH)
        n_matrices = max(1, min(4, free_bytes(device) // (4 * n_bytes)))
        data = _matrix(n_rows)
        self._matrices = [
            DeviceMatrix.from_bytes(data, _TYPE, n_rows, _WIDTH, device) for _ in range(n_matrices)
        ]
        self._small = DeviceMatrix.from_bytes(data[: row_bytes(_TYPE, _WIDTH)], _TYPE, 1, _WIDTH, device)
        self._x = torch.full((1, _WIDTH), 1e-3, device=device)
        self._turns = _TURNS if device.type == "cuda" else 1
        self.n_bytes = self._turns * n_bytes * n_matrices
        self._run: Callable[[], object] = self._products
        self._pass()
        if device.type == "cuda":  # as a step runs, without launches of the host between the products
            from hotset.backends.gpu.capture import Graphs

            self._run = Graphs(device)(self._products)[0].replay

    def _products(self) -> None:
        for _ in range(self._turns):
            for matrix in self._matrices:
                self._kernels.linear(self._x, matrix)

    def _pass(self) -> None:
        self._run()
        self._synchronize()

    def launch_seconds(self) -> float:
        """Seconds of a kernel with nothing to do, in a captured graph where the device has them."""
        from hotset.backends.gpu.capture import Graphs

        n = 100

        def launch() -> None:
            for _ in range(n):
                self._kernels.linear(self._x, self._small)

        if self._device.type != "cuda":
            launch()

            def run() -> None:
                launch()
                self._synchronize()

            return median_seconds(run, _SECONDS / 3) / n
        launch()
        graph, _ = Graphs(self._device)(launch)

        def replay() -> None:
            graph.replay()
            self._synchronize()

        replay()
        return median_seconds(replay, _SECONDS / 3) / n

    def close(self) -> None:
        """Gives the memory back."""
        import torch

        self._run = self._products  # a graph holds memory
        self._matrices.clear()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


class TransferLoop(Loop):
    """Experts of `n_rows` rows in pinned memory of the host, and their copies by the kernel that fetches.

    registrar: of tests. Raises DeviceError where the device does not read the host's memory by itself.
    """

    def __init__(
        self, device: torch.device, registrar: Registrar | None = None, *, n_rows: int = 2048
    ) -> None:
        import torch

        from hotset.backends.gpu.cpu_offload import CudaDriver
        from hotset.backends.gpu.kernels import Kernels
        from hotset.backends.gpu.matrix import DeviceMatrix, HostRows

        self._kernels, self._device = Kernels(device), device
        if registrar is None and (device.type != "cuda" or not self._kernels.triton):
            raise DeviceError(f"{device} does not read the host's memory by itself")
        self._synchronize: Callable[[], None] = lambda: synchronize(device)
        n, row = 8, row_bytes(_TYPE, _WIDTH)
        self._memory = torch.zeros(n * n_rows * row, dtype=torch.uint8).numpy()
        self._registrar = registrar or CudaDriver(device)
        first = self._registrar.register(self._memory)
        rows = list(self._memory.reshape(n, n_rows, row))
        there = [first + i * rows[0].nbytes for i in range(n)]
        self._part = HostRows(_TYPE, rows, torch.tensor(there, device=device))
        self._ids = torch.arange(n, dtype=torch.int32, device=device)
        self._to = DeviceMatrix.empty(_TYPE, n * n_rows, _WIDTH, device)
        self.n_bytes = self._memory.nbytes

    def _pass(self) -> None:
        self._kernels.fetch_experts(self._part, self._ids, self._to, 0)
        self._synchronize()

    def __enter__(self) -> TransferLoop:
        self._pass()  # compiles
        return self

    def __exit__(self, *_: object) -> None:
        import torch

        self._synchronize()
        self._registrar.unregister(self._memory)
        del self._to
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


class _Context:
    """Finds out what a device's runtime and kernels take beside tensors: `n_bytes`, when it ends."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.n_bytes = USUAL_CONTEXT if device.type == "cuda" else 0

    def __enter__(self) -> _Context:
        self._before = self._used()
        return self

    def __exit__(self, *_: object) -> None:
        import torch

        after = self._used()
        if self._before is not None and after is not None:
            grown = after - self._before - torch.cuda.memory_reserved(self._device)
            if grown > 64 << 20:  # less: the context was there before
                self.n_bytes = grown

    def _used(self) -> int | None:
        """Bytes in use on the device by everybody, from the driver's own library, which makes no context."""
        if self._device.type != "cuda":
            return None
        import ctypes

        import torch

        class Memory(ctypes.Structure):
            _fields_ = (("total", ctypes.c_uint64), ("free", ctypes.c_uint64), ("used", ctypes.c_uint64))

        try:
            nvml = ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
            uuid = f"GPU-{torch.cuda.get_device_properties(self._device).uuid}".encode()
        except (OSError, AttributeError):
            return None
        handle, memory = ctypes.c_void_p(), Memory()
        if (
            nvml.nvmlInit_v2() == 0
            and nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle)) == 0
            and nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0
        ):
            return int(memory.used)
        return None


# -- machine.json --------------------------------------------------------------------------------


def processor_name() -> str:
    """As the system names it."""
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
    """Where what was measured is kept."""
    return home() / "machine.json"


def device_key(device: torch.device, n_threads: int = 0) -> str:
    """Names a device, this processor and their software in machine.json."""
    import importlib.metadata

    import torch

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    versions = [str(torch.__version__)]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions.append(importlib.metadata.version("hotset"))
    threads = f"{n_threads} threads"
    return " | ".join([processor_name(), threads, isa(), f"{device} {name}", *versions])


def known(path: Path) -> Mapping[str, Any]:
    """What was measured, by key."""
    try:
        found = json.loads(read_small_text(path))
    except (OSError, ValueError, RecursionError, FormatError):  # none yet, or damaged: measured again
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
    anew: bool = False,
) -> T:
    """What machine.json, at path, has under a key, as `kept` makes it of what is there, or what is measured
    now and kept. kept: raises where that is damaged, or of another version. said: before it is measured."""
    path = path or machine_file()
    if not anew:
        with contextlib.suppress(KeyError, TypeError, ValueError, IndexError):
            return kept(known(path)[key])
    if progress is not None:
        progress.say(said)
    measured = measure()
    keep(path, key, measured if isinstance(measured, dict) else asdict(cast(Any, measured)))
    return measured


def keep(path: Path, key: str, measured: Mapping[str, Any]) -> None:
    """Adds to the file; where it cannot be written the machine is measured again next time."""
    with contextlib.suppress(OSError, HotsetError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole({path: json.dumps({**known(path), key: measured}, indent=1)}, sync=False)
