"""What changes from step to step, in memory that the host writes and the device reads: recordings name it
once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hotset import _core
from hotset.backends.base import PAGE_SIZE, Batch
from hotset.backends.vulkan.memory import Piece, aligned
from hotset.model.operations import Rope, Value
from hotset.model.rope import cos_sin

OUTPUT_ROWS = 64  # of logits that are computed at a time
SPLIT = 512  # positions of one running softmax (csrc/vulkan/shaders/attention.comp)


class StepInputs:
    """The numbers of a batch.

    positions: uint32 [2, max_batch], of each token, and the row of the page tables that is its sequence's.
    slots: uint32 [max_batch], where the cache holds it. tables: uint32 [max_batch, n_pages]. outputs: uint32
    [OUTPUT_ROWS]. thresholded: float32 [max_batch]. angles: by rotation float32 [max_batch, n_rot / 2, 2].
    rows: by the id of a value that enters float32 [max_batch, stride]. groups: by number of heads uint32 [3],
    of the attention with splits apart.
    """

    def __init__(
        self,
        device: _core.VulkanDevice,
        *,
        max_batch: int,
        n_pages: int,
        ropes: Sequence[Rope],
        entering: Mapping[Value, int],
        heads: Sequence[int],
    ) -> None:
        self._max_batch, self._n_pages = max_batch, n_pages
        sizes: dict[object, int] = {
            "positions": 2 * max_batch, "slots": max_batch, "tables": max_batch * n_pages, "outputs":
            OUTPUT_ROWS, "thresholded": max_batch,
        }  # fmt: skip
        sizes |= {rope: max_batch * rope.n_rot for rope in ropes}
        sizes |= {value: max_batch * stride for value, stride in entering.items()}
        sizes |= {("groups", n_head): 3 for n_head in heads}
        self.buffer = device.allocate(sum(aligned(4 * size) for size in sizes.values()), "to_device")
        self.nbytes = self.buffer.reserved
        view, at = self.buffer.view(), 0
        self._pieces: dict[object, Piece] = {}
        self._words: dict[object, np.ndarray] = {}
        for key, size in sizes.items():
            self._pieces[key] = Piece(self.buffer, at, 4 * size)
            self._words[key] = view[at : at + 4 * size].view(np.uint32)
            at += aligned(4 * size)
        self._ropes, self._strides, self._heads = tuple(ropes), dict(entering), tuple(heads)

    def __getitem__(self, key: object) -> Piece:
        """The piece of a name, a rotation or a value."""
        return self._pieces[key]

    def groups_of(self, n_head: int) -> tuple[_core.VulkanBuffer, int]:
        """Where the workgroups of an attention with so many heads are."""
        return self.buffer, self._pieces["groups", n_head].offset

    def fill(self, batch: Batch, slots: np.ndarray, rows: Mapping[Value, np.ndarray]) -> None:
        """Takes over a batch that was checked; slots: base.cache_slots. No program may be running."""
        n = len(batch.tokens)
        # Rows of the tables are those of the step: the caller may have more sequences than a step has tokens.
        used, own = np.unique(batch.sequences, return_inverse=True)
        width = min(int(batch.positions.max()) // PAGE_SIZE + 1, self._n_pages)
        positions = self._words["positions"].reshape(2, -1)
        positions[0, :n], positions[1, :n] = batch.positions, own.reshape(-1)
        self._words["slots"][:n] = slots
        self._words["tables"].reshape(-1, self._n_pages)[: len(used), :width] = batch.page_tables[
            used, :width
        ]
        flags = np.zeros(n, np.float32) if batch.thresholded is None else batch.thresholded
        self._words["thresholded"].view(np.float32)[:n] = flags
        for rope in self._ropes:
            both = np.stack(cos_sin(rope, batch.positions), axis=2)
            self._words[rope].view(np.float32)[: n * rope.n_rot] = both.reshape(-1)
        for value, values in rows.items():
            stride = self._strides[value]
            self._words[value].view(np.float32).reshape(-1, stride)[:n, : value.width] = values
        n_splits = int(batch.positions.max()) // SPLIT + 1
        for n_head in self._heads:
            self._words["groups", n_head][:3] = n_head, n, n_splits

    def choose(self, outputs: np.ndarray) -> None:
        """Takes over some of the rows whose logits are wanted."""
        self._words["outputs"][: len(outputs)] = outputs
