"""Adapters (LoRA) on a Vulkan device: their matrices, and how much of each the tokens of a step have."""

from __future__ import annotations

import numpy as np

from hotset import _core
from hotset.backends.adapters import AdapterSet
from hotset.backends.vulkan.inputs import OUTPUT_ROWS
from hotset.backends.vulkan.memory import BufferRange, aligned
from hotset.backends.vulkan.weights import VulkanMatrix, VulkanWeights
from hotset.formats.lora import FloatMatrix
from hotset.formats.source import WeightSource
from hotset.model.operations import LowRank


class DeviceAdapters:
    """Those of an AdapterSet; a part of a model has the pairs of its own matrices alone.

    nbytes: of the device's memory. Raises OutOfMemoryError.
    """

    def __init__(
        self, device: _core.VulkanDevice, source: WeightSource, adapters: AdapterSet, max_batch: int
    ) -> None:
        self._adapters, self._weights = adapters, VulkanWeights(source, device)
        n = len(adapters.adapters)
        self._sizes = [aligned(4 * n_rows) for n_rows in (max_batch, OUTPUT_ROWS)]
        self._buffer = device.allocate(max(n, 1) * sum(self._sizes), "to_device")
        self._of_tokens = np.zeros((0, n), np.float32)

    @property
    def nbytes(self) -> int:
        return self._weights.arena.nbytes + int(self._buffer.reserved)

    def pairs_of(self, op: LowRank) -> list[tuple[int, float, VulkanMatrix, VulkanMatrix]]:
        """What adapters add at an operation: their columns of scales, their factors, a, and b's rows."""
        found = []
        for column, pair in self._adapters.pairs_of(op):
            b = self._matrix(pair.b, op.first_row, op.out.width)
            found.append((column, pair.factor, self._matrix(pair.a, 0, pair.rank), b))
        return found

    def _matrix(self, matrix: FloatMatrix, first: int, n_rows: int) -> VulkanMatrix:
        return self._weights.given((id(matrix), first, n_rows), matrix, first, n_rows)

    def rank(self, op: LowRank) -> int:
        """The largest of an operation."""
        return max((pair.rank for _, pair in self._adapters.pairs_of(op)), default=0)

    def scales(self, column: int, *, of_tail: bool) -> BufferRange:
        """Of an adapter float32 [rows], of each token, or of each row with logits."""
        own = self._sizes[of_tail]
        first = len(self._adapters.adapters) * self._sizes[0] if of_tail else 0
        return BufferRange(self._buffer, first + column * own, own)

    def fill(self, scales: np.ndarray) -> None:
        """Takes over those of a step, float32 [n_tokens, n_adapters]. No program may be running."""
        self._of_tokens = scales
        self._write(scales, of_tail=False)

    def choose(self, outputs: np.ndarray) -> None:
        """Takes over some of the rows whose logits are wanted."""
        self._write(self._of_tokens[outputs], of_tail=True)

    def _write(self, scales: np.ndarray, *, of_tail: bool) -> None:
        view = self._buffer.view()
        for column in range(scales.shape[1]):
            at = self.scales(column, of_tail=of_tail).offset
            view[at : at + 4 * len(scales)].view(np.float32)[:] = scales[:, column]
