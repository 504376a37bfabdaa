"""Cold neurons of a long prompt: their rows pass through the device, some at a time.

Every token of a prompt wants other neurons and together they want nearly all, so the CPU would read the same
rows and compute on them more slowly. Copies are made on a stream of their own, while the device computes with
the rows that came before: two parts are there at a time, and `part_bytes` bounds each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotset.backends.gpu.matrix import DeviceMatrix
from hotset.backends.gpu.weights import DeviceWeights
from hotset.formats.quants import row_bytes
from hotset.model.graph import Linear, TransposedLinear


class ColdRows:
    """The rows of one layer's cold neurons, in parts.

    matrices: argument of sparse_ffn → operation that has the matrix (None: the layer has none of it).
    cold: bool [n_ff].
    """

    def __init__(
        self,
        weights: DeviceWeights,
        matrices: dict[str, Linear | TransposedLinear | None],
        cold: np.ndarray,
        part_bytes: int,
    ) -> None:
        self._weights, self._matrices = weights, matrices
        self._neurons = np.flatnonzero(cold)
        n_bytes = sum(self._row_bytes(op) for op in matrices.values() if op is not None)
        self._step = max(part_bytes // n_bytes, 1)

    def _row_bytes(self, op: Linear | TransposedLinear) -> int:
        info = self._weights.source.tensors[op.weight]
        return row_bytes(info.type, info.shape[0])

    def parts(self) -> Iterator[dict[str, Any]]:
        """Arguments of sparse_ffn for some of the neurons: rows, gate, up, down_t, gate_bias, up_bias."""
        if self._weights.device.type != "cuda":
            for first in range(0, len(self._neurons), self._step):
                yield self._part(first)
            return
        compute = torch.cuda.current_stream(self._weights.device)
        copies = torch.cuda.Stream(self._weights.device)
        done: list[torch.cuda.Event] = []
        for first in range(0, len(self._neurons), self._step):
            if len(done) > 1:  # the part before the last is computed: its memory is free for this one
                done.pop(0).synchronize()
            with torch.cuda.stream(copies):
                part = self._part(first)
                for tensor in _tensors(part):
                    tensor.record_stream(compute)
            compute.wait_stream(copies)
            yield part
            del part  # else three parts would be there while the next is made
            event = torch.cuda.Event()
            event.record(compute)
            done.append(event)

    def _part(self, first: int) -> dict[str, Any]:
        neurons = self._neurons[first : first + self._step]
        device = self._weights.device
        part: dict[str, Any] = {"rows": torch.from_numpy(neurons.astype(np.int32)).to(device)}
        for name, op in self._matrices.items():
            part[name] = None if op is None else self._weights.some_rows(op, neurons)
            if isinstance(op, Linear) and op.bias is not None:
                bias = self._weights.host_vector(op.bias)[op.first_row + neurons]
                part[f"{name}_bias"] = torch.from_numpy(bias).to(device)
        return part


def _tensors(part: dict[str, Any]) -> Iterator[Tensor]:
    """Every tensor of a part, those of its matrices too."""
    for value in part.values():
        if isinstance(value, DeviceMatrix):
            yield from (item for item in vars(value).values() if isinstance(item, Tensor))
        elif value is not None:
            yield value
