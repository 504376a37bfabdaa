"""Calls recorded once in a CUDA graph and replayed: no launch, and nothing of Python, stands between them.

torch's own context manager, torch.cuda.graph, is not used. It empties the allocator's cache, so that memory
that was taken for the largest step goes back to the device; and where a capture fails it leaves its stream
the current one.

What may be recorded: kernels that are loaded already (loading one is forbidden in a capture), on memory that
stays where it is. So the same calls with the same shapes must have run before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

MAX_CAPTURED = 8  # tokens of a step that is captured: as many as the matrix-vector kernel takes
T = TypeVar("T")


class Captured(Protocol):
    """A recorded step, such as torch.cuda.CUDAGraph."""

    def replay(self) -> None: ...


class Graphs:
    """Records calls on a CUDA device: one stream and one pool of memory for all, which never run at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], T]) -> tuple[Captured, T]:
        """The graph of what `function` puts on the current stream, and what it returned: tensors whose values
        each replay renews.

        Raises what `function` raises, and torch's errors; the current stream is then what it was.
        """
        torch.cuda.synchronize(self._device)  # an error of earlier work shows here, not in the capture
        graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: what another thread does meanwhile, such as another model's, does not spoil it.
            with torch.cuda.stream(self._stream):
                graph.capture_begin(self._pool, capture_error_mode="thread_local")
                try:
                    result = function()
                except BaseException:
                    with contextlib.suppress(RuntimeError):  # fails too; the first error says why
                        graph.capture_end()
                    raise
                graph.capture_end()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # what is left of the error is reported, and over
                torch.cuda.synchronize(self._device)
            raise
        return graph, result
