"""Measurement of torch devices: the rates that placement uses (table.DeviceRates).

Each rate is measured once, with the kernels of the model on Q4_0 weights, and kept in machine.json
(placement/machine.py).
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hotset.backends.cpu.processor import isa
from hotset.backends.triton.devices import device_name, find_device, free_bytes, synchronize
from hotset.cores import usable_cores
from hotset.errors import DeviceError, InvalidRequestError
from hotset.formats.quants import row_bytes
from hotset.placement import machine
from hotset.placement.cards import Card
from hotset.placement.channel_rates import KEPT, filled, kept_once, key_of
from hotset.placement.channels import OTHERS, ChannelRates, TypeRates, Workload, device_type, read_on_device
from hotset.placement.machine import (
    keep,
    known,
    machine_file,
    median_seconds,
    once,
    processor_name,
    times_in_turn,
)
from hotset.placement.table import DeviceRates

if TYPE_CHECKING:
    import torch

    from hotset.backends.triton.cpu_offload import ChosenKind
    from hotset.backends.triton.host_experts import Registrar
    from hotset.reporter import Reporter

USUAL_CONTEXT = 600 << 20  # assumed bytes of a CUDA context with its kernels, if it cannot be measured
_TURNS = 4  # passes over the matrices of a device between two waits for it
_DECREED = 0.8  # assumed rate of channels of a simulated GPU, as a share of its rate of rows
_PASSES = 4  # passes over all matrices between two waits for the device
CHANNEL_SECONDS = 0.2  # seconds of the measurement of channels
# Shares of a data sheet's figures that kernels reach.
_OF_BANDWIDTH, _OF_LINK = 0.85, 0.8


def estimate(card: Card, *, n_threads: int | None = None, progress: Reporter | None = None) -> DeviceRates:
    """Return the rates of a card that is not in this machine, next to this CPU.

    The CPU's rates are measured once, and the card's rates follow from its data sheet. Under joint load both
    slow down by the ratios of machine.STAND_IN.
    """
    cpu = machine.cpu_rates(n_threads, progress)
    read, link = _OF_BANDWIDTH * card.bandwidth * 1e9, _OF_LINK * card.link * 1e9
    return DeviceRates(
        cpu_read=cpu["read"],
        cpu_gather=cpu["gather"],
        cpu_read_busy=cpu["read"] * machine.STAND_IN.cpu_read_busy / machine.STAND_IN.cpu_read,
        cpu_gather_busy=cpu["gather"] * machine.STAND_IN.cpu_gather_busy / machine.STAND_IN.cpu_gather,
        read=read,
        read_busy=read * machine.STAND_IN.read_busy / machine.STAND_IN.read,
        launch=machine.STAND_IN.launch,
        sync=machine.STAND_IN.sync,
        context=USUAL_CONTEXT,
        cpu_many=cpu["many"],
        link=link,
        link_busy=link * machine.STAND_IN.link_busy / machine.STAND_IN.link,
        cpu_read_link=cpu["read"] * machine.STAND_IN.cpu_read_link / machine.STAND_IN.cpu_read,
    )


def force_misses(rates: DeviceRates) -> DeviceRates:
    """Change the rates so that HOTSET_EXPERT_MISSES decides how missing experts are computed.

    `cpu`: on the CPU. `fetch`: on the device, as far as spare slots allow. Raises InvalidRequestError for
    other values.
    """
    forced = os.environ.get("HOTSET_EXPERT_MISSES") or ""
    changed = {
        "": rates, "cpu": replace(rates, link=0.0),
        "fetch": replace(rates, cpu_many=1.0),  # makes experts on the CPU expensive
    }  # fmt: skip
    if forced not in changed:
        raise InvalidRequestError(f"HOTSET_EXPERT_MISSES must be cpu or fetch, not {forced!r}")
    return changed[forced]


def measure(
    device: str | Card,
    *,
    n_threads: int | None = None,
    progress: Reporter | None = None,
    again: bool = False,
    path: Path | None = None,
) -> DeviceRates:
    """Return the rates of a device next to this CPU.

    again: measure them again, even if they are stored.

    A Card is estimated. A simulated GPU has the rates of machine.STAND_IN. path: the file that keeps the
    rates. Raises DeviceError for a missing device.
    """
    if isinstance(device, Card):
        return estimate(device, n_threads=n_threads, progress=progress)
    found = find_device(device)
    if found.type == "cpu":
        return machine.STAND_IN
    n_threads = n_threads or usable_cores()
    return once(
        device_key(found, n_threads), lambda kept: DeviceRates(**kept), lambda: measure_now(found, n_threads),
        f"Measuring this machine with {device}, once.", progress, path, again=again,
    )  # fmt: skip


def measure_now(device: torch.device, n_threads: int) -> DeviceRates:
    """Measure the rates of a device next to this CPU, in some seconds, without keeping them."""
    with _Context(device) as context, machine.CpuLoop(n_threads) as cpu:
        loop = DeviceLoop(device)
        cpu_read, cpu_gather = cpu.rate(machine.SECONDS, sparse=False), cpu.rate(machine.SECONDS, sparse=True)
        read = loop.rate(machine.SECONDS)
        with loop.running() as busy:
            cpu_read_busy = cpu.rate(machine.SECONDS, sparse=False)
            cpu_gather_busy = cpu.rate(machine.SECONDS, sparse=True)
        launch, sync = loop.launch_seconds(), _round_trip(device)
        loop.close()
        cpu_many, link_rate, link_busy, cpu_read_link = cpu.many(machine.SECONDS), 0.0, 0.0, cpu_read
        with contextlib.suppress(DeviceError), TransferLoop(device) as link:
            link_rate = link.rate(machine.SECONDS)
            with link.running() as linked:
                cpu_read_link = cpu.rate(machine.SECONDS, sparse=False)
            link_busy = linked.rate
    # Noise must not make a rate under load higher than the rate without load.
    return DeviceRates(
        cpu_read, cpu_gather, min(cpu_read, cpu_read_busy), min(cpu_gather, cpu_gather_busy),
        read, min(read, busy.rate), launch, sync, context.n_bytes,
        cpu_many, link_rate, min(link_rate, link_busy), min(cpu_read, cpu_read_link),
    )  # fmt: skip


def _round_trip(device: torch.device) -> float:
    from hotset.backends.triton.cpu_offload import round_trip_seconds

    chosen = synchronisation(device_name(device))
    return chosen.seconds or round_trip_seconds(device, chosen.kind, width=machine.WIDTH)


def synchronisation(device: str, path: Path | None = None) -> ChosenKind:
    """Return the kind of host-device synchronisation of a device (cpu_offload.py).

    HOTSET_HANDSHAKE forces it. Otherwise, on a CUDA device, processes find it out once, in some seconds, and
    machine.json keeps the result.
    """
    import torch

    from hotset.backends.triton.cpu_offload import ChosenKind, choose_kind

    found = find_device(device)
    if found.type != "cuda" or os.environ.get("HOTSET_HANDSHAKE"):
        return choose_kind(found)
    path = path or machine_file()
    driver = getattr(torch._C, "_cuda_getDriverVersion", int)()  # noqa: SLF001 - not in builds without CUDA
    key = " | ".join(["synchronisation", device_key(found), f"driver {driver}"])
    with contextlib.suppress(KeyError, TypeError):
        return ChosenKind(**known(path)[key])
    chosen = choose_kind(found)
    if chosen.seconds is not None:  # otherwise another kind may work later, so the choice is not kept
        keep(path, key, asdict(chosen))
    return chosen


# -- a device ------------------------------------------------------------------------------------


@dataclass
class _Busy:
    rate: float = 0.0


class Loop:
    """A repeated work of a device: `_pass`, which reads `n_bytes` and waits for its end."""

    n_bytes: int

    def _pass(self) -> None:
        raise NotImplementedError

    def rate(self, seconds: float) -> float:
        """Measure the bytes per second."""
        return self.n_bytes / median_seconds(self._pass, seconds)

    @contextlib.contextmanager
    def running(self) -> Iterator[_Busy]:
        """Keep the device busy in another thread. The yielded object has the rate after the block."""
        busy, ending, passes, failed = _Busy(), threading.Event(), [0], list[BaseException]()

        def work() -> None:
            try:
                while not ending.is_set():
                    self._pass()
                    passes[0] += 1
            except BaseException as error:  # raised again in the caller's thread
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
    """A loop of products with matrices in a device's memory."""

    def __init__(self, device: torch.device) -> None:
        import torch

        from hotset.backends.triton.kernels import Kernels
        from hotset.backends.triton.matrix import DeviceMatrix

        self._kernels, self._device = Kernels(device), device
        self._synchronize: Callable[[], None] = lambda: synchronize(device)
        n_rows = 65536 if device.type in ("cuda", "xpu") else 2048  # large if launches cost time
        n_bytes = n_rows * row_bytes(machine.TYPE, machine.WIDTH)
        n_matrices = max(1, min(4, free_bytes(device) // (4 * n_bytes)))
        data = machine.matrix_bytes(n_rows)
        self._matrices = [
            DeviceMatrix.from_bytes(data, machine.TYPE, n_rows, machine.WIDTH, device)
            for _ in range(n_matrices)
        ]
        self._small = DeviceMatrix.from_bytes(
            data[: row_bytes(machine.TYPE, machine.WIDTH)], machine.TYPE, 1, machine.WIDTH, device
        )
        self._x = torch.full((1, machine.WIDTH), 1e-3, device=device)
        self._turns = _TURNS if device.type == "cuda" else 1
        self.n_bytes = self._turns * n_bytes * n_matrices
        self._run: Callable[[], object] = self._products
        self._pass()
        if device.type == "cuda":  # like a step, without host launches between the products
            from hotset.backends.triton.capture import Graphs

            self._run = Graphs(device)(self._products)[0].replay

    def _products(self) -> None:
        for _ in range(self._turns):
            for matrix in self._matrices:
                self._kernels.linear(self._x, matrix)

    def _pass(self) -> None:
        self._run()
        self._synchronize()

    def launch_seconds(self) -> float:
        """Measure the seconds of a kernel with almost no work, in a captured graph if the device has them."""
        from hotset.backends.triton.capture import Graphs

        n = 100

        def launch() -> None:
            for _ in range(n):
                self._kernels.linear(self._x, self._small)

        if self._device.type != "cuda":
            launch()

            def run() -> None:
                launch()
                self._synchronize()

            return median_seconds(run, machine.SECONDS / 3) / n
        launch()
        graph, _ = Graphs(self._device)(launch)

        def replay() -> None:
            graph.replay()
            self._synchronize()

        replay()
        return median_seconds(replay, machine.SECONDS / 3) / n

    def close(self) -> None:
        """Release the device memory."""
        import torch

        self._run = self._products  # a graph holds memory
        self._matrices.clear()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


class TransferLoop(Loop):
    """A loop of copies of experts of `n_rows` rows from pinned host memory by the fetch kernel.

    registrar: a test's registrar. Raises DeviceError if the device cannot read host memory directly.
    """

    def __init__(
        self, device: torch.device, registrar: Registrar | None = None, *, n_rows: int = 2048
    ) -> None:
        import torch

        from hotset.backends.triton.cpu_offload import CudaDriver
        from hotset.backends.triton.kernels import Kernels
        from hotset.backends.triton.matrix import DeviceMatrix, HostRows

        self._kernels, self._device = Kernels(device), device
        if registrar is None and (device.type != "cuda" or not self._kernels.triton):
            raise DeviceError(f"{device} does not read the host's memory by itself")
        self._synchronize: Callable[[], None] = lambda: synchronize(device)
        n, row = 8, row_bytes(machine.TYPE, machine.WIDTH)
        self._memory = torch.zeros(n * n_rows * row, dtype=torch.uint8).numpy()
        self._registrar = registrar or CudaDriver(device)
        first = self._registrar.register(self._memory)
        rows = list(self._memory.reshape(n, n_rows, row))
        there = [first + i * rows[0].nbytes for i in range(n)]
        self._part = HostRows(machine.TYPE, rows, torch.tensor(there, device=device))
        self._ids = torch.arange(n, dtype=torch.int32, device=device)
        self._to = DeviceMatrix.empty(machine.TYPE, n * n_rows, machine.WIDTH, device)
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
    """A measurement of the bytes of a device's runtime and kernels. `n_bytes` is set at the end."""

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
            if grown > 64 << 20:  # with less, the context already existed
                self.n_bytes = grown

    def _used(self) -> int | None:
        """Return the bytes that all processes use on the device, or None if unknown.

        NVML reports them, and it creates no context.
        """
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


# -- rows and channels ---------------------------------------------------------------------------


def channel_rates(
    device: str, works: tuple[Workload, ...], *, progress: Reporter | None = None, path: Path | None = None
) -> TypeRates:
    """Return a device's channel rates for the matrix types of `works`, and for the type of all others.

    Unknown rates are measured. Raises DeviceError for a device that fails.
    """
    found = find_device(device)
    works = tuple(
        replace(works[0], kind=works[0].kind._replace(type=type))
        for type in {OTHERS: 0} | {device_type(w.type): 0 for w in works}
    )
    if found.type == "cpu":
        return {
            work.type: ChannelRates(machine.STAND_IN.read, _DECREED * machine.STAND_IN.read) for work in works
        }
    return {
        work.type: kept_once([device_key(found), key_of(work)], partial(measure_device, found, work),
        str(found),
                         work, progress, path)
        for work in works
    }  # fmt: skip


def measure_device(device: torch.device, work: Workload) -> ChannelRates:
    """Measure the bytes per second of a device's kernels, for all rows and for the share KEPT of channels."""
    import torch

    from hotset.backends.triton.capture import Graphs
    from hotset.backends.triton.kernels import Kernels
    from hotset.backends.triton.matrix import DeviceMatrix

    kernels, n = Kernels(device), work.width
    n_bytes = row_bytes(work.type, n) * n
    data, n_matrices = filled(n_bytes), max(2, work.n_bytes // n_bytes)
    by_row = [DeviceMatrix.from_bytes(data, work.type, n, n, device) for _ in range(n_matrices)]
    input_major = [DeviceMatrix.input_major(n, [n], [m].__getitem__) for m in by_row]
    zero = np.random.default_rng(0).random((1, n)) >= KEPT
    x = torch.from_numpy(np.where(zero, 0, 1).astype(np.float32)).to(device)

    def timed(product: Callable[..., object], matrices: list[DeviceMatrix]) -> Callable[[], None]:
        def calls() -> None:
            for _ in range(_PASSES):
                for matrix in matrices:
                    product(x, matrix)

        calls()
        # Like a step, without host launches between the products.
        run = Graphs(device)(calls)[0].replay if kernels.capturable else calls

        def run_and_wait() -> None:
            run()
            synchronize(device)

        return run_and_wait

    runs = [timed(kernels.linear, by_row), timed(kernels.linear_t, input_major)]
    rows, channels = map(statistics.median, times_in_turn(runs, machine.SECONDS / 2))
    passed = _PASSES * n_matrices
    read = read_on_device(work.type, n * n, n_bytes, KEPT)
    return ChannelRates(passed * n_bytes / rows, passed * read / channels)


def device_key(device: torch.device, n_threads: int = 0) -> str:
    """Return the key in machine.json of a device, this processor and their software."""
    import importlib.metadata

    import torch

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    versions = [str(torch.__version__)]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions.append(importlib.metadata.version("hotset"))
    threads = f"{n_threads} threads"
    return " | ".join([processor_name(), threads, isa(), f"{device} {name}", *versions])
