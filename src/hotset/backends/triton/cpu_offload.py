"""Host-device synchronisation within a layer whose neurons a device and the CPU share.

`CpuOffload` is the device's view of the CPU worker (cpu/worker.py). Each step does this per layer:

    worker.submit(layer, h, bits)    copy the FFN's input and the predicted neurons to host memory
    y = hot neurons on the device    meanwhile a native thread computes the cold neurons that fire
    y += worker.collect(layer)       add the cold neurons' sum: a vector a token, without the down bias

In an MoE model the device submits the ids of each token's experts; -1 - id marks the experts that it computes
itself. It collects a vector for each of the others, at its place in the route, neither weighted nor summed.

Each layer is one round trip. Both calls only put work on the device's current stream. That work has constant
arguments and leaves the flags unchanged, so a CUDA graph can capture it once and replay it for every token.
The *kind* says how the stream waits:

    memops    the stream itself writes a flag and waits for one (cuStreamWriteValue32, cuStreamWaitValue32)
    spin      two kernels of one block, of which the second spins on the flag (spin_kernel.py)
    hostfunc  native functions that the driver calls from the stream (cuLaunchHostFunc)
    direct    the host waits: for a simulated GPU, whose memory it shares, and devices without the above

`choose_kind` tries the kinds that a device offers and takes the fastest. Each trial has its own process,
because a failed capture or a hanging stream makes its process unusable. HOTSET_HANDSHAKE forces a kind.

After any failure no thread waits forever: the stream runs to its end, and `end_step` raises one error
message (cpu/worker.py).
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, Protocol, cast, get_args

import numpy as np
import torch
from torch import Tensor

from hotset import _core
from hotset.backends.cpu.worker import CpuWorker, sentence_of
from hotset.backends.stage import BackendOptions
from hotset.backends.triton.capture import Graphs
from hotset.backends.triton.devices import current
from hotset.errors import DeviceError, InvalidRequestError, install_command
from hotset.formats.source import WeightSource
from hotset.model.graph import Graph

Kind = Literal["memops", "spin", "hostfunc", "direct"]
KINDS: tuple[Kind, ...] = get_args(Kind)
PROBE_TIMEOUT = 2.0
PROBE_REPLAYS = 50
PROBE_PROCESS_TIMEOUT = 60.0  # the process imports torch and compiles kernels


class CpuOffload(CpuWorker):
    """A CPU worker whose requests a torch device submits, and whose answers it collects, on its stream.

    Pass bits to `submit` if, and only if, the graph has a predictor for the layer. device: the device of the
    tensors of `submit` and `collect`. kind: None chooses. driver: a test's driver. given: keyword arguments
    of CpuWorker. Raises the errors of CpuWorker, and DeviceError for a kind that the device does not offer.
    """

    def __init__(
        self,
        weights: WeightSource,
        graph: Graph,
        layers: Mapping[int, np.ndarray],
        device: torch.device | str,
        options: BackendOptions,
        *,
        kind: Kind | None = None,
        driver: Driver | None = None,
        **given: Any,
    ) -> None:
        self.device, self._named = torch.device(device), str(device)
        super().__init__(weights, graph, layers, options, **given)
        try:
            chosen = (
                ChosenKind(kind, None, f"host-device synchronisation {kind}")
                if kind
                else choose_kind(self.device)
            )
            self.kind, self.reason = chosen.kind, chosen.reason
            shared = _Shared(
                self._native, self.max_batch, self._width, self._asked_bytes,
                [max(n, 1) for n in self._n_used],
            )  # fmt: skip
            self._exchange = _exchange(self.kind, shared, self.device, driver)
        except BaseException:
            self.close()
            raise
        # This order ends the threads first, then drops the tensors, then frees the memory. At the end of the
        # interpreter PyTorch no longer releases memory that it borrowed.
        self._closing += [self._exchange.close, shared.drop_tensors]

    @property
    def capturable(self) -> bool:
        """Return whether a graph can capture `submit` and `collect`.

        It cannot with `direct`, where the host waits.
        """
        return self.kind != "direct"

    def submit(self, layer: int, h: Tensor, bits: Tensor | None = None) -> None:
        """Submit a request for the cold neurons of a layer, or for its experts.

        h: float32 [T, n_embd], the input of gate and up. bits: uint8 [T, ceil(n_ff / 8)], bit i % 8 of byte
        i // 8 set if the predictor names neuron i. In an MoE model bits is int32 [T, n_used], the experts in
        the order of the route, -1 - id for experts of the device. T may exceed the step's tokens.
        """
        index = self._index[layer]
        if not self._finalizer.alive:
            raise DeviceError("the CPU worker was closed")
        if self._asks[index] != (bits is not None):
            raise InvalidRequestError(
                f"layer {layer} has {'a' if self._asks[index] else 'no'} predictor: bits "
                f"{'must' if self._asks[index] else 'cannot'} be submitted"
            )
        if self._n_used[index] and bits is not None:
            bits = bits.view(torch.uint8)
        self._exchange.submit(index, h, bits)

    def collect(self, layer: int) -> Tensor:
        """Return the sum of the cold neurons, float32 [T, n_embd] on the device, T as submitted.

        Rows past the step's tokens are finite but undefined. In an MoE model return [T, n_used * n_embd]: a
        row for each requested expert, undefined for the device's experts. Raises DeviceError if the host
        waits and the step was aborted.
        """
        return self._exchange.collect(self._index[layer])

    def synchronize(self) -> None:
        """Wait for the device."""
        self._exchange.synchronize()


# ---- the kinds


class _Shared:
    """The block of host memory that both sides see, as tensors. Its offsets are in bytes.

    asked: for each layer, the bytes submitted per token in addition to h. answers: for each layer, the rows
    that come back per token.
    """

    def __init__(
        self, native: Any, max_batch: int, width: int, asked: Sequence[int], answers: Sequence[int]
    ) -> None:
        self.native, self.memory = native, cast(np.ndarray, native.memory())
        self.request, self.done, h, bits, out = native.offsets()

        def rows(first: int, n_bytes: int) -> Tensor:
            return torch.from_numpy(self.memory[first : first + max_batch * n_bytes]).view(max_batch, n_bytes)

        self.h = rows(h, 4 * width).view(torch.float32)
        self.bits = [rows(bits, n) for n in asked]
        self.out = [rows(out, 4 * width * n).view(torch.float32) for n in answers]
        self.submitted = [0] * len(asked)  # rows of the latest request of each layer

    def flags(self, offset: int) -> list[Tensor]:
        """Return the flags of all layers from `offset` on, int32 [1] each."""
        ends = [offset + 4 * i for i in range(len(self.submitted) + 1)]
        return [torch.from_numpy(self.memory[a:b].view(np.int32)) for a, b in pairwise(ends)]

    def drop_tensors(self) -> None:
        self.h = torch.empty(0)
        self.bits.clear()
        self.out.clear()


class Driver(Protocol):
    """The calls to a device's runtime that the kinds need.

    Work goes to the current stream. Tests implement their own driver.
    """

    def register(self, memory: np.ndarray) -> int:
        """Map host memory for the device, and return the device's address of it."""
        ...

    def unregister(self, memory: np.ndarray) -> None: ...
    def copy(self, to: Tensor, source: Tensor) -> None: ...
    def write(self, address: int, value: int) -> None: ...
    def wait(self, address: int, value: int) -> None: ...
    def call(self, function: int, argument: int) -> None:
        """Queue a call of the native function at an address, void(void*), on the stream."""
        ...

    def synchronize(self) -> None: ...


class _Direct:
    """The kind in which the host copies the tensors and waits."""

    def __init__(self, shared: _Shared, device: torch.device) -> None:
        self.shared, self.device = shared, device

    def submit(self, index: int, h: Tensor, bits: Tensor | None) -> None:
        shared, n = self.shared, len(h)
        shared.submitted[index] = n
        shared.h[:n].copy_(h)  # waits for the device, if h is not on the CPU
        if bits is not None:
            shared.bits[index][:n].copy_(bits)
        shared.native.submit(index)

    def collect(self, index: int) -> Tensor:
        if not self.shared.native.collect(index):
            raise DeviceError(f"the hybrid step was given up: {self.shared.native.poisoned()}")
        return self.shared.out[index][: self.shared.submitted[index]].to(self.device, copy=True)

    def synchronize(self) -> None:
        pass  # `collect` has waited

    def close(self) -> None:
        pass


class _OnStream:
    """A kind that copies on the stream. Its subclasses implement `signal` and `wait`."""

    def __init__(self, shared: _Shared, device: torch.device, driver: Driver) -> None:
        self.shared, self.device, self.driver = shared, device, driver
        self.address = driver.register(shared.memory)

    def submit(self, index: int, h: Tensor, bits: Tensor | None) -> None:
        n = self.shared.submitted[index] = len(h)
        self.driver.copy(self.shared.h[:n], h)
        if bits is not None:
            self.driver.copy(self.shared.bits[index][:n], bits)
        self.signal(index)

    def collect(self, index: int) -> Tensor:
        self.wait(index)
        rows = self.shared.out[index][: self.shared.submitted[index]]
        out = torch.empty_like(rows, device=self.device)
        self.driver.copy(out, rows)
        return out

    def signal(self, index: int) -> None:
        raise NotImplementedError

    def wait(self, index: int) -> None:
        raise NotImplementedError

    def synchronize(self) -> None:
        self.driver.synchronize()

    def close(self) -> None:
        self.driver.unregister(self.shared.memory)


class _MemOps(_OnStream):
    def signal(self, index: int) -> None:
        self.driver.write(self.address + self.shared.request + 4 * index, 1)

    def wait(self, index: int) -> None:
        done = self.address + self.shared.done + 4 * index
        self.driver.wait(done, 1)
        self.driver.write(done, 0)


class _HostFunctions(_OnStream):
    def signal(self, index: int) -> None:
        self.driver.call(_core.CpuWorker.host_functions()[0], self.shared.native.host_argument(index))

    def wait(self, index: int) -> None:
        self.driver.call(_core.CpuWorker.host_functions()[1], self.shared.native.host_argument(index))


class _Spin(_OnStream):
    """The kind with two kernels, which also copy the tensors."""

    def __init__(self, shared: _Shared, device: torch.device, driver: Driver) -> None:
        if importlib.util.find_spec("triton") is None:
            raise DeviceError(
                f"a spinning kernel needs Triton, which is not installed: {install_command('gpu')}"
            )
        super().__init__(shared, device, driver)
        self._requests, self._dones = shared.flags(shared.request), shared.flags(shared.done)

    def submit(self, index: int, h: Tensor, bits: Tensor | None) -> None:
        from hotset.backends.triton import spin_kernel

        shared = self.shared
        shared.submitted[index] = len(h)
        spin_kernel.submit(h, bits, shared.h, shared.bits[index], self._requests[index])

    def collect(self, index: int) -> Tensor:
        from hotset.backends.triton import spin_kernel

        rows = self.shared.out[index][: self.shared.submitted[index]]
        out = torch.empty_like(rows, device=self.device)
        spin_kernel.collect(self._dones[index], self.shared.out[index], out)
        return out

    def close(self) -> None:
        super().close()
        self._requests, self._dones = [], []


class CudaDriver:
    """The current stream of a CUDA device, through PyTorch or, if PyTorch lacks a call, the driver's library.

    Raises DeviceError for calls that fail or that the driver does not have.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._library: Any = None

    def register(self, memory: np.ndarray) -> int:
        flags = 1 | 2  # CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTREGISTER_DEVICEMAP
        if not memory.flags.writeable:
            flags |= 8  # CU_MEMHOSTREGISTER_READ_ONLY: the memory of a mapped file
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()  # makes the device's context this thread's
            try:
                return self._register(memory.ctypes.data, memory.nbytes, flags)
            except DeviceError as error:
                raise DeviceError(
                    f"{self.device} cannot map {memory.nbytes} bytes of host memory: {error}"
                ) from None

    def _register(self, first: int, n_bytes: int, flags: int) -> int:
        """Register memory by a call of the driver, and return the device's address of it.

        A failed call of the runtime (cudaHostRegister) would leave an error that torch raises at the next,
        unrelated launch.
        """
        if torch.version.hip is not None:
            self._call_hip("HostRegister", first, n_bytes, flags)
            return first
        self._call(
            "cuMemHostRegister_v2", ctypes.c_void_p(first), ctypes.c_size_t(n_bytes), ctypes.c_uint(flags)
        )
        address = ctypes.c_uint64()
        try:
            self._call(
                "cuMemHostGetDevicePointer_v2",
                ctypes.byref(address),
                ctypes.c_void_p(first),
                ctypes.c_uint(0),
            )
        except DeviceError:
            self._call("cuMemHostUnregister", ctypes.c_void_p(first))
            raise
        return int(address.value)

    def unregister(self, memory: np.ndarray) -> None:
        with torch.cuda.device(self.device):
            with suppress(RuntimeError):  # an earlier failure, which does not end the registration
                torch.cuda.current_stream().query()  # makes the context this thread's, without waiting
            with suppress(DeviceError):
                if torch.version.hip is not None:
                    self._call_hip("HostUnregister", memory.ctypes.data)
                else:
                    self._call("cuMemHostUnregister", ctypes.c_void_p(memory.ctypes.data))

    def copy(self, to: Tensor, source: Tensor) -> None:
        to.copy_(source, non_blocking=True)

    def write(self, address: int, value: int) -> None:
        # Flags 0: earlier writes of the stream become visible before the value.
        self._on_stream(
            "cuStreamWriteValue32_v2", ctypes.c_uint64(address), ctypes.c_uint32(value), ctypes.c_uint(0)
        )

    def wait(self, address: int, value: int) -> None:
        equal = 1  # CU_STREAM_WAIT_VALUE_EQ
        self._on_stream(
            "cuStreamWaitValue32_v2", ctypes.c_uint64(address), ctypes.c_uint32(value), ctypes.c_uint(equal)
        )

    def call(self, function: int, argument: int) -> None:
        self._on_stream("cuLaunchHostFunc", ctypes.c_void_p(function), ctypes.c_void_p(argument))

    def synchronize(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()

    def _call_hip(self, name: str, *arguments: int) -> None:
        """Call HIP's runtime. If the call fails, clear the error that it leaves and raise DeviceError."""
        if code := int(getattr(torch.cuda.cudart(), f"cuda{name}")(*arguments)):
            with suppress(RuntimeError):  # a launch raises the remaining error and clears it
                torch.ones(1, device=self.device)
            raise DeviceError(f"hip{name} ends with error {code}")

    def _on_stream(self, name: str, *arguments: Any) -> None:
        self._call(name, ctypes.c_void_p(torch.cuda.current_stream(self.device).cuda_stream), *arguments)

    def _call(self, name: str, *arguments: Any) -> None:
        if self._library is None:
            file = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
            try:
                self._library = ctypes.CDLL(file)
            except OSError:
                raise DeviceError(f"the driver of {self.device} has no {file}") from None
        function = getattr(self._library, name, None)
        if function is None:
            raise DeviceError(f"the driver of {self.device} is too old: it has no {name}")
        if code := function(*arguments):
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            raise DeviceError(f"{name} failed on {self.device}: {(text.value or b'?').decode()}")


def _exchange(
    kind: Kind, shared: _Shared, device: torch.device, driver: Driver | None
) -> _Direct | _OnStream:
    if kind == "direct":
        return _Direct(shared, device)
    if driver is None:
        if device.type != "cuda":
            raise DeviceError(
                f"{device} has no streams that wait, so that the host-device synchronisation cannot be {kind}"
            )
        driver = CudaDriver(device)
    kinds: dict[Kind, type[_OnStream]] = {"memops": _MemOps, "spin": _Spin, "hostfunc": _HostFunctions}
    return kinds[kind](shared, device, driver)


# ---- which kind


@dataclass(frozen=True)
class ChosenKind:
    """A kind, the seconds of its round trip (None: not measured), and the reason of its choice."""

    kind: Kind
    seconds: float | None
    reason: str


_chosen: dict[torch.device, ChosenKind] = {}


def choose_kind(device: torch.device | str) -> ChosenKind:
    """Return the kind that HOTSET_HANDSHAKE names, or the fastest that works on a device.

    Each process tries the kinds of a device only once.
    """
    device = torch.device(device)
    if forced := os.environ.get("HOTSET_HANDSHAKE"):
        if forced not in KINDS:
            raise InvalidRequestError(f"HOTSET_HANDSHAKE must be one of {', '.join(KINDS)}, not {forced!r}")
        return ChosenKind(forced, None, f"host-device synchronisation {forced}, as HOTSET_HANDSHAKE says")
    if device.type != "cuda":
        return ChosenKind(
            "direct", None, f"host-device synchronisation direct: {device} has no streams that wait"
        )
    if device not in _chosen:
        _chosen[device] = _probe(device)
    return _chosen[device]


def _probe(device: torch.device) -> ChosenKind:
    """Try the kinds in order, and return the fastest that works.

    Host functions are slowest, so they are tried only if the kinds before fail. `direct`, which needs no
    driver, is chosen if all others fail.
    """
    works: dict[Kind, float] = {}
    tried: list[str] = []
    kinds: tuple[Kind, ...] = ("memops", "spin", "hostfunc")
    for kind in kinds:
        if works and kind == "hostfunc":
            break
        try:
            works[kind] = measured_by([sys.executable, "-P", "-c", _PROBE, str(device), kind])
            tried.append(f"{kind} {works[kind] * 1e6:.0f} µs")
        except DeviceError as error:
            tried.append(f"{kind} does not work ({sentence_of(error)})")
    if not works:
        return ChosenKind(
            "direct", None, f"host-device synchronisation direct, for no other can be had: {'; '.join(tried)}"
        )
    best = min(works, key=lambda kind: works[kind])
    return ChosenKind(
        best, works[best], f"host-device synchronisation {best}; a round trip takes: {', '.join(tried)}"
    )


_PROBE = """
import sys
from hotset.backends.triton.cpu_offload import round_trip_seconds
from hotset.errors import HotsetError
try:
    print(round_trip_seconds(*sys.argv[1:3]))
except HotsetError as error:
    sys.exit(str(error))
"""


def measured_by(command: list[str], timeout: float = PROBE_PROCESS_TIMEOUT) -> float:
    """Run a process and return the number that it prints.

    Raises DeviceError with its last line of errors if it fails.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        raise DeviceError(f"nothing after {timeout:.0f} s") from None
    if done.returncode == 0:
        return float(done.stdout.split()[-1])
    said = done.stderr.strip().splitlines()
    raise DeviceError(said[-1] if said else f"its process ended with {done.returncode}")


def round_trip_seconds(
    device: torch.device | str, kind: Kind | None = None, width: int = 4096, driver: Driver | None = None
) -> float:
    """Measure the seconds of a round trip without computation: `width` floats each way, and flags.

    On a CUDA device the round trip is in a captured graph, as in decode. Raises DeviceError if the kind does
    not work.
    """
    device = torch.device(device)
    kind = kind or choose_kind(device).kind
    n_ff = 2 * width
    plan = _core.Plan(1, 1, 1, _core.Runtime(1))
    x, scores, values, out = (plan.buffer(n, False) for n in (width, n_ff, n_ff, width))
    rows = 0, np.zeros(n_ff * width * 4, np.uint8)  # F32; never read, so the OS never allocates its pages
    relu = {"activation": "relu", "activation_threshold": 0.0}
    wanted = {"scores": scores, "threshold": 0.0, "first": 0}
    plan.add("neurons", x=x, up={"weight": rows}, **relu, **wanted, sparse=True, out=values)
    plan.add("transposed_linear", x=values, weight=rows, sparse=True, out=out)
    native = _core.CpuWorker(plan, width, 1, PROBE_TIMEOUT)
    everything = np.full(n_ff // 8, 255, np.uint8)
    native.layer(0, 0, plan.n_ops, [], [], x, out, n_ff, 2 * 4 * width, everything, True, scores)
    native.start()
    exchange = _exchange(kind, _Shared(native, 1, width, [n_ff // 8], [1]), device, driver)
    h = torch.ones(1, width, device=device)
    bits = torch.zeros(1, n_ff // 8, dtype=torch.uint8, device=device)

    def trip() -> Tensor:
        exchange.submit(0, h, bits)
        return exchange.collect(0)

    def run(work: Callable[[], object], times: int) -> float:
        if reason := native.begin(1):
            raise DeviceError(reason)
        start = time.perf_counter()
        for _ in range(times):
            work()
        _wait_for_device(device, native)
        seconds = time.perf_counter() - start
        if reason := native.end():
            raise DeviceError(reason)
        return seconds / times

    try:
        with current(device):
            run(trip, 2)  # compiles, and checks that a trip resets the flags
            if device.type != "cuda" or kind == "direct":
                return run(trip, PROBE_REPLAYS)
            graph, _ = Graphs(device)(trip)
            run(graph.replay, 2)
            return run(graph.replay, PROBE_REPLAYS)
    finally:
        native.close()
        exchange.close()


def _wait_for_device(device: torch.device, native: Any) -> None:
    """Wait until the stream is idle. Release it after a timeout; raise DeviceError if it still hangs."""
    if device.type != "cuda":
        return
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    start = time.monotonic()
    while not event.query():
        waited = time.monotonic() - start
        if waited > PROBE_TIMEOUT:
            native.poison("the stream did not go on")
        if waited > 2 * PROBE_TIMEOUT:
            raise DeviceError(f"the stream of {device} hangs")
        time.sleep(0)
