"""Cold neurons of a long prompt: their rows stream through the device in parts.

The tokens of a long prompt together need nearly all neurons. The CPU would read the same rows and compute
more slowly. Copies run on a stream of their own, while the device computes with the rows before. The device
holds two parts at a time, and `part_bytes` bounds each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotset.backends.decoded import decoded_vector
from hotset.backends.triton.fallback import Held
from hotset.backends.triton.matrix import DeviceMatrix
from hotset.backends.triton.weights import DeviceWeights
from hotset.model.operations import Linear, TransposedLinear


class CopyStream:
    """A stream for copies next to the stream that computes.

    A stage has only one, since each stream has memory of its own.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._done: list[torch.cuda.Event] = []  # ends of the computations with the latest parts

    def take(self, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Copy a part to the device by `make`, once the part before the last is no longer needed.

        Later work of the compute stream waits for it. Call `used` when all work that needs the part is on the
        stream.
        """
        if self._stream is None:
            return make()
        compute = torch.cuda.current_stream(self.device)
        if len(self._done) > 1:  # the part before the last is computed: its memory is free for this one
            self._done.pop(0).synchronize()
        with torch.cuda.stream(self._stream):
            part = make()
            for tensor in _tensors(part):
                tensor.record_stream(compute)
        compute.wait_stream(self._stream)
        return part

    def used(self) -> None:
        if self._stream is not None:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self.device))
            self._done.append(event)


class CpuWorkerRows:
    """The rows of one layer's cold neurons, in parts.

    matrices: argument of sparse_ffn → operation with the matrix (None: the layer lacks it). cold: bool
    [n_ff]. copies: the copy stream of the stage.
    """

    def __init__(
        self,
        weights: DeviceWeights,
        matrices: dict[str, Linear | TransposedLinear | None],
        cold: np.ndarray,
        part_bytes: int,
        copies: CopyStream,
    ) -> None:
        self._weights, self._matrices = weights, matrices
        tensors = weights.source.tensors
        self._neurons, self._n_ff = np.flatnonzero(cold), len(cold)
        n_bytes = sum(tensors[op.weight].row_bytes for op in matrices.values() if op is not None)
        self._step = max(part_bytes // n_bytes, 1)
        self._copies = copies

    def parts(self) -> Iterator[dict[str, Any]]:
        """Yield the arguments of sparse_ffn for some neurons: held, gate, up, down_t, gate_bias, up_bias.

        The caller must release a part before it takes the next.
        """
        for first in range(0, len(self._neurons), self._step):
            try:
                yield self._copies.take(lambda first=first: self._part(first))  # type: ignore[misc]
            finally:
                self._copies.used()

    def _part(self, first: int) -> dict[str, Any]:
        neurons = self._neurons[first : first + self._step]
        device = self._weights.device
        held = Held.of(neurons, self._n_ff, lambda _, values: torch.from_numpy(values).to(device))
        part: dict[str, Any] = {"held": held}
        given = {name: op for name, op in self._matrices.items() if op is not None}
        found = iter(self._weights.neurons(list(given.values()), neurons))
        for name, op in self._matrices.items():
            part[name] = None if op is None else next(found)
            if isinstance(op, Linear) and op.bias is not None:
                bias = decoded_vector(self._weights.source, op.bias)[op.first_row + neurons]
                part[f"{name}_bias"] = torch.from_numpy(bias).to(device)
        return part


def _tensors(part: dict[str, Any]) -> Iterator[Tensor]:
    """Yield every tensor of a part, including the tensors of its matrices and lists."""
    for value in part.values():
        if isinstance(value, DeviceMatrix | Held):
            yield from (item for item in vars(value).values() if isinstance(item, Tensor))
        elif value is not None:
            yield value
