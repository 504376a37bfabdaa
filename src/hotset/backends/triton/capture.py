"""Calls that are recorded once in a CUDA graph and replayed without Python and without launches.

This module does not use torch's own context manager, torch.cuda.graph. That empties the allocator's cache, so
the memory of the largest step returns to the device. After a failed capture it also leaves its own stream as
the current one.

A capture may contain only kernels that are already loaded, because loading one is forbidden in a capture. The
memory that they use must not move. So the same calls with the same shapes must have run before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

MAX_CAPTURED = 8  # most tokens of a captured step: the limit of the matrix-vector kernel
T = TypeVar("T")


class Captured(Protocol):
    """A recorded step, such as torch.cuda.CUDAGraph."""

    def replay(self) -> None: ...


class Graphs:
    """A recorder of calls on a CUDA device.

    Its graphs share a stream and a memory pool, and no two run at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], T]) -> tuple[Captured, T]:
        """Record the work that `function` puts on the current stream.

        Return the graph and the function's result, whose tensors get new values in each replay.

        Raises the errors of `function` and of torch. After an error the current stream is unchanged.
        """
        torch.cuda.synchronize(self._device)  # an error of earlier work shows here, not in the capture
        graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: calls of other threads, for example for another model, do not break the capture.
            with torch.cuda.stream(self._stream):
                graph.capture_begin(self._pool, capture_error_mode="thread_local")
                try:
                    result = function()
                except BaseException:
                    with contextlib.suppress(RuntimeError):  # this fails too; the first error has the cause
                        graph.capture_end()
                    raise
                graph.capture_end()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # torch reports the rest of the error here and clears it
                torch.cuda.synchronize(self._device)
            raise
        return graph, result
