"""Streams of a CUDA device, without the device.

FakeCuda is the computing stream: a thread does queued work in order. It writes values to memory and waits for
them like the driver's calls, can capture and replay work, and keeps a log. A wait that is never satisfied
hangs its stream, as on a device.

LateStream is a second stream. It does its work as late as possible and keeps no tensor alive.

Runtime has the two libraries that register host memory, and the error that one of them keeps.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

Work = tuple[str, Callable[[], None]]


class FakeCuda:
    """The Driver of backends/triton/cpu_offload.py. log: the driver calls that were put on the stream."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.registered: list[int] = []
        self.captured: list[Work] | None = None
        self.fails_at: str | None = None  # a call that must raise
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work()

    def _put(self, name: str, work: Callable[[], None]) -> None:
        if self.fails_at and name.startswith(self.fails_at):
            raise RuntimeError(f"{name} failed")
        self.log.append(name)
        if self.captured is not None:
            self.captured.append((name, work))
        else:
            self._queue.put(work)

    # ---- the Driver

    def register(self, memory: np.ndarray) -> int:
        self.registered.append(memory.ctypes.data)
        self.base = memory.ctypes.data
        return memory.ctypes.data

    def unregister(self, memory: np.ndarray) -> None:
        self.registered.remove(memory.ctypes.data)

    def copy(self, to: Tensor, source: Tensor) -> None:
        def work() -> None:
            to.copy_(source)

        self._put("copy", work)

    def write(self, address: int, value: int) -> None:
        flag = ctypes.c_int32.from_address(address)
        self._put(f"write {address - self.base} {value}", lambda: setattr(flag, "value", value))

    def wait(self, address: int, value: int) -> None:
        flag = ctypes.c_int32.from_address(address)

        def work() -> None:
            while flag.value != value:
                time.sleep(2e-5)

        self._put(f"wait {address - self.base} {value}", work)

    def call(self, function: int, argument: int) -> None:
        native = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)
        self._put("call", lambda: native(argument))

    def synchronize(self) -> None:
        reached = threading.Event()
        self._queue.put(reached.set)
        if not reached.wait(30):
            raise RuntimeError("the stream hangs")

    # ---- graphs

    def capture(self, work: Callable[[], object]) -> list[Work]:
        """Record the work that `work` puts on the stream, without doing it."""
        self.captured = []
        try:
            work()
            return self.captured
        finally:
            self.captured = None

    def replay(self, graph: list[Work]) -> None:
        for _, work in graph:
            self._queue.put(work)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(30)
        assert not self._thread.is_alive()


POISON = 0x7F  # in each byte of memory that was given to another tensor: not a valid id or count, a NaN


class Weak:
    """A tensor as a stream of the device knows it: an address that does not keep its memory alive."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._like = tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()

    def read(self) -> Tensor:
        """Return the tensor; if another tensor now has its memory, a poisoned one."""
        dtype, offset, shape, stride = self._like
        if self._storage.expired():
            return torch.full((*shape, dtype.itemsize), POISON, dtype=torch.uint8).view(dtype)[..., 0]
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        return torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)


class LateStream:
    """The stream of backends/triton/experts_fetch.py: work is done when its end is awaited, not before.

    Like a stream of torch, it holds its work's tensors as weak references. Tensors that the tested code drops
    too early are poisoned when they are read. Work is a `partial`, so that its arguments are visible.
    """

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []
        self.n_done = 0

    def after_all(self) -> None: ...

    def put(self, work: Callable[[], None]) -> int:
        assert isinstance(work, partial)
        function, arguments = work.func, [Weak(a) if isinstance(a, Tensor) else a for a in work.args]
        assert not work.keywords
        del work

        def late() -> None:
            given: list[Any] = [a.read() if isinstance(a, Weak) else a for a in arguments]
            function(*given)

        self.waiting.append(late)
        return self.n_done + len(self.waiting)

    def wait(self, done: int) -> None:
        while self.n_done < done:
            self.waiting.pop(0)()
            self.n_done += 1

    def settle(self) -> None:
        self.wait(self.n_done + len(self.waiting))


class Runtime:
    """A device's runtime and driver, replacing torch's and ctypes'.

    refuses: "register", "address", "release", or "". is_lost: whether every wait for the device raises.

    A failing call of the runtime leaves its error, and the next launch of a kernel through torch raises and
    clears it. The driver's calls leave nothing. They need a context, which a thread gets by calling the
    runtime; torch.cuda.device does not create one if the device is already the first. registered: addresses.
    """

    def __init__(self, patch: pytest.MonkeyPatch, *, hip: bool = False, refuses: str = "") -> None:
        self.refuses, self.last_error, self.registered = refuses, 0, set[int]()
        self.is_lost, self._thread = False, threading.local()
        runtime = type("Cudart", (), {
            "cudaHostRegister": lambda _, first, n, flags: self._register(first),
            "cudaHostUnregister": lambda _, first: self._unregister(first),
        })()  # fmt: skip
        patch.setattr(torch.version, "hip", "6.2" if hip else None)
        patch.setattr(torch.cuda, "device", nullcontext)
        patch.setattr(torch.cuda, "synchronize", self._called)
        patch.setattr(torch.cuda, "current_stream", lambda *_: SimpleNamespace(query=self._called))
        patch.setattr(torch.cuda, "cudart", lambda: runtime)
        patch.setattr(torch, "ones", lambda *_, **__: self.launch())
        patch.setattr(ctypes, "CDLL", lambda name: self)

    def launch(self) -> None:
        """Launch any kernel of torch."""
        error, self.last_error = self.last_error, 0
        if error:
            raise RuntimeError(f"CUDA error {error}")

    def _called(self, *_: object) -> None:
        """Count a call of the runtime."""
        self._thread.has_context = True
        if self.is_lost:
            raise RuntimeError("CUDA error: the device is lost")

    def _register(self, first: int) -> int:
        if self.refuses == "register":
            self.last_error = 801
            return 801
        self.registered.add(first)
        return 0

    def _unregister(self, first: int) -> int:
        if self.refuses == "release":
            self.last_error = 713
            return 713
        self.registered.remove(first)
        return 0

    # ---- libcuda, as called by ctypes

    def _has_context(self) -> bool:
        return getattr(self._thread, "has_context", False)

    def cuMemHostRegister_v2(self, first: Any, n: Any, flags: Any) -> int:  # noqa: N802
        if not self._has_context():
            return 201
        if self.refuses == "register":
            return 801
        self.registered.add(first.value)
        return 0

    def cuMemHostGetDevicePointer_v2(self, address: Any, first: Any, flags: Any) -> int:  # noqa: N802
        if self.refuses == "address":
            return 801
        address._obj.value = first.value + 4096
        return 0

    def cuMemHostUnregister(self, first: Any) -> int:  # noqa: N802
        if not self._has_context():
            return 201
        self.registered.remove(first.value)
        return 0

    def cuGetErrorString(self, code: int, text: Any) -> int:  # noqa: N802
        text._obj.value = b"operation not supported"
        return 0
