"""A stream of a CUDA device, without the device: work is queued and done by a thread, in order.

It writes and waits for values in memory as the driver's calls do, can capture what is put on it and replay
it, and keeps a log. A wait that is never satisfied hangs its stream, as on the device.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections.abc import Callable

import numpy as np
from torch import Tensor

Work = tuple[str, Callable[[], None]]


class FakeCuda:
    """The Driver of backends/gpu/handshake.py. log: what was put on the stream, as the driver was called."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.registered: list[int] = []
        self.captured: list[Work] | None = None
        self.fails_at: str | None = None  # a call that raises
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
        """What `work` puts on the stream, without doing it."""
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
