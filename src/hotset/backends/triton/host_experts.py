"""The experts of an MoE model in host memory, as a device reads them over its link.

A CUDA device can read mapped host memory once it is registered. The pages then stay in memory (they are
pinned) and have a device address. So the device can decide which expert to fetch, inside a captured step.
Nothing is copied on the host: the mapped memory of the file is registered, in the file's layout.

Under a RAM budget nothing is registered: an expert is read when it is copied, unless the CPU's weight store
has it.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from hotset.backends.decoded import expert_biases
from hotset.backends.device.experts import expert_rows
from hotset.backends.triton.matrix import HostRows
from hotset.backends.triton.weights import DeviceWeights
from hotset.errors import DeviceError
from hotset.formats.quants import GGMLType
from hotset.formats.source import WeightSource
from hotset.model.operations import ExpertLinear, ExpertSum
from hotset.offload.uploads import Uploads

PAGE = 4096  # bytes; memory is registered in whole pages


class Registrar(Protocol):
    """An object that pins host memory for a device: cpu_offload.CudaDriver, or a test's registrar."""

    def register(self, memory: np.ndarray) -> int:
        """Map host memory for the device, and return the device's address of it. Raises DeviceError."""
        ...

    def unregister(self, memory: np.ndarray) -> None: ...


class HostExperts:
    """The experts' parts of some layers: `parts[layer]`, by the name of the product, biases as gate_bias.

    given: layer → products by name (offload.expert_cache.parts_of). registrar: None for a device that shares
    the host's memory, or cannot read it directly. n_pinned: registered bytes. Raises DeviceError if memory
    cannot be registered.
    """

    def __init__(
        self,
        weights: DeviceWeights,
        given: dict[int, dict[str, ExpertLinear | ExpertSum]],
        registrar: Registrar | None,
    ) -> None:
        found = {
            (layer, name): (type, rows)
            for layer, products in given.items()
            for product, op in products.items()
            for name, type, rows in _parts(product, op, weights.source)
        }
        self.n_pinned = 0
        moved: list[tuple[int, int, int]] = []  # first and end address here, offset to the device's address
        registered: list[np.ndarray] = []
        self._finalizer = weakref.finalize(self, _unregister, registrar, registered)
        if registrar is not None:
            try:
                if not all(isinstance(rows, list) for _, rows in found.values()):
                    raise DeviceError("under a budget of memory experts are read from their file")
                for memory in _spans([own for _, rows in found.values() for own in rows]):
                    first = memory.ctypes.data
                    moved.append((first, first + memory.nbytes, registrar.register(memory) - first))
                    registered.append(memory)
            except DeviceError:
                self._finalizer()
                raise
            self.n_pinned = sum(memory.nbytes for memory in registered)
        self.parts: dict[int, dict[str, HostRows]] = {layer: {} for layer in given}
        for (layer, name), (type, rows) in found.items():
            here = [own.ctypes.data for own in rows] if isinstance(rows, list) else [0] * len(rows)
            there = [at + next((add for a, b, add in moved if a <= at < b), 0) for at in here]
            addresses = torch.tensor(there, dtype=torch.int64, device=weights.device)
            self.parts[layer][name] = HostRows(type, rows, addresses)

    def close(self) -> None:
        """Unregister the memory. It is safe to call this twice. The device must no longer read the memory."""
        self._finalizer()


def _unregister(registrar: Registrar | None, registered: list[np.ndarray]) -> None:
    while registrar is not None and registered:
        with contextlib.suppress(Exception):  # at the end of the interpreter torch may be unloaded
            registrar.unregister(registered.pop())


@dataclass(frozen=True)
class FileExperts(Sequence[np.ndarray]):
    """A sequence of `expert_rows` that reads each item on access, unless the CPU has it in memory."""

    op: ExpertLinear | ExpertSum
    source: Uploads

    def __len__(self) -> int:
        return self.op.n_expert

    def __getitem__(self, id: Any) -> Any:
        there = self.source.there(self.op.weights[0], id) if len(self.op.weights) == 1 else None
        return expert_rows(self.source, self.op, id, there)


def _parts(
    name: str, op: ExpertLinear | ExpertSum, source: WeightSource
) -> Iterator[tuple[str, GGMLType, Sequence[np.ndarray]]]:
    type = GGMLType(source.tensors[op.weights[0]].type)
    if isinstance(source, Uploads):
        yield name, type, FileExperts(op, source)
    else:
        yield name, type, [expert_rows(source, op, id) for id in range(op.n_expert)]
    if op.bias is not None:
        biases = expert_biases(source, op)
        yield f"{name}_bias", GGMLType.F32, [own.reshape(1, -1).view(np.uint8) for own in biases]


def _spans(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the memory of arrays as whole pages, one array for each contiguous range.

    No page may be registered twice. Writeable arrays (decoded biases) are not merged with arrays of a mapped
    file.
    """
    ends = sorted(
        (a.ctypes.data // PAGE * PAGE, -(-(a.ctypes.data + a.nbytes) // PAGE) * PAGE, a.flags.writeable)
        for a in arrays
    )
    merged: list[tuple[int, int, bool]] = []
    for first, last, is_writeable in ends:
        if merged and first <= merged[-1][1] and is_writeable == merged[-1][2]:
            before = merged.pop()
            merged.append((before[0], max(before[1], last), is_writeable))
        else:
            merged.append((first, last, is_writeable))
    spans = []
    for first, last, is_writeable in merged:
        spans.append(np.ctypeslib.as_array((ctypes.c_uint8 * (last - first)).from_address(first)))
        spans[-1].flags.writeable = is_writeable
    return spans
