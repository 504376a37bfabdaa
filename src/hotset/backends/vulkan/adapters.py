"""Adapters (LoRA) on a Vulkan device: their matrices, and the scale of each adapter for each token."""

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
    """The adapters of an AdapterSet on a device. A part of a model has only the pairs of its own matrices.

    nbytes: bytes of device memory. The constructor raises OutOfMemoryError if they do not fit.
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
        """Return the matrices of each adapter at `op`: its column of scales, its factor, `a`, rows of `b`."""
        found = []
        for column, pair in self._adapters.pairs_of(op):
            b = self._matrix(pair.b, op.first_row, op.out.width)
            found.append((column, pair.factor, self._matrix(pair.a, 0, pair.rank), b))
        return found

    def _matrix(self, matrix: FloatMatrix, first: int, n_rows: int) -> VulkanMatrix:
        return self._weights.given((id(matrix), first, n_rows), matrix, first, n_rows)

    def rank(self, op: LowRank) -> int:
        """Return the largest rank of the adapters at `op`; 0 if no adapter changes it."""
        return max((pair.rank for _, pair in self._adapters.pairs_of(op)), default=0)

    def scales(self, column: int, *, of_tail: bool) -> BufferRange:
        """Return an adapter's scales, float32 [rows]: one per token, or with `of_tail` one per output row."""
        own = self._sizes[of_tail]
        first = len(self._adapters.adapters) * self._sizes[0] if of_tail else 0
        return BufferRange(self._buffer, first + column * own, own)

    def fill(self, scales: np.ndarray) -> None:
        """Write the scales of a step, float32 [n_tokens, n_adapters]. No program may be running."""
        self._of_tokens = scales
        self._write(scales, of_tail=False)

    def choose(self, outputs: np.ndarray) -> None:
        """Write the scales of the rows in `outputs`, whose logits are computed next."""
        self._write(self._of_tokens[outputs], of_tail=True)

    def _write(self, scales: np.ndarray, *, of_tail: bool) -> None:
        view = self._buffer.view()
        for column in range(scales.shape[1]):
            at = self.scales(column, of_tail=of_tail).offset
            view[at : at + 4 * len(scales)].view(np.float32)[:] = scales[:, column]
