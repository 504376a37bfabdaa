"""The inputs of a step, in memory that the host writes and the device reads. Recordings bind it once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from hotset import _core
from hotset.backends.base import BLOCK_SIZE, Batch, check_states
from hotset.backends.vulkan.kernels import stride_of
from hotset.backends.vulkan.memory import BufferRange, aligned
from hotset.model import operations as ops
from hotset.model.graph import Graph
from hotset.model.operations import Value
from hotset.model.rope import cos_sin

OUTPUT_ROWS = 64  # rows of logits computed at a time
_COLUMNS = 16  # columns of a state that one workgroup computes
SPLIT = 512  # positions of one running softmax (csrc/vulkan/shaders/attention.comp)


@dataclass(frozen=True)
class InputShape:
    """The sizes of a part's inputs.

    n_states: state slots; 0 if the part has no recurrent state. entering: floats of a row of each value that
    the host writes. ropes, heads, tiles: the distinct rotations, counts of groups of heads, and
    counts of state tiles.
    """

    max_batch: int
    n_blocks: int
    n_states: int
    ropes: tuple[ops.Rope, ...]
    entering: Mapping[Value, int]
    heads: tuple[int, ...]
    tiles: tuple[int, ...]

    @classmethod
    def of(
        cls,
        graph: Graph,
        entering: Value | None,
        *,
        heads_of: Callable[[ops.Attention], int],
        max_batch: int,
        n_blocks: int,
        n_states: int,
    ) -> InputShape:
        """Return the shape for a part of a graph.

        entering: its input value; None if it reads the tokens. heads_of: the heads of attention's workgroups.
        """
        values = [op.out for op in graph.ops if isinstance(op, ops.Embed | ops.NgramEmbed | ops.PositionGain)]
        values += [entering] if entering else []
        attention = (op for op in graph.ops if isinstance(op, ops.Attention))
        scans = (op for op in graph.recurrent if not isinstance(op, ops.ShortConv | ops.NgramEmbed))
        return cls(
            max_batch,
            n_blocks,
            n_states if graph.recurrent else 0,
            tuple(dict.fromkeys(op.rope for op in graph.ops if isinstance(op, ops.Rotate))),
            {value: stride_of(value) for value in values},
            tuple(dict.fromkeys(op.n_head // heads_of(op) for op in attention)),
            tuple(dict.fromkeys(tiles_of(op) for op in scans)),
        )

    @property
    def words(self) -> dict[object, int]:
        """Return the 32-bit words of each input of a batch, by its key in VulkanInputs."""
        most = self.max_batch
        words: dict[object, int] = {
            "positions": 3 * most, "slots": most, "tables": most * self.n_blocks, "outputs": OUTPUT_ROWS,
            "thresholded": most, "states": 4 * most if self.n_states else 1,
        }  # fmt: skip
        words |= {rope: most * rope.n_rot for rope in self.ropes}
        words |= {value: most * stride for value, stride in self.entering.items()}
        words |= {("heads", n_groups): 3 for n_groups in self.heads}
        return words | {("tiles", n_tiles): 3 for n_tiles in self.tiles}

    @property
    def nbytes(self) -> int:
        return sum(aligned(4 * size) for size in self.words.values())


class _Rotation:
    """The angles of a rotation by position, computed once for each block of positions."""

    def __init__(self, rope: ops.Rope) -> None:
        self._rope, self._n = rope, 0
        self._angles = np.empty((0, rope.n_rot), np.float32)  # the first _n rows are computed

    def write(self, positions: np.ndarray, last: int, out: np.ndarray) -> None:
        """Write the angles of `positions` [n] to out, float32 [n, n_rot]. last: the largest position."""
        first = self._n
        if last >= first:
            self._n = (last // BLOCK_SIZE + 1) * BLOCK_SIZE
            if self._n > len(self._angles):
                grown = np.empty((max(self._n, 2 * first), self._rope.n_rot), np.float32)
                grown[:first] = self._angles[:first]
                self._angles = grown
            both = np.stack(cos_sin(self._rope, np.arange(first, self._n)), axis=2)
            self._angles[first : self._n] = both.reshape(len(both), -1)
        np.take(self._angles, positions, axis=0, out=out, mode="clip")


class VulkanInputs:
    """The inputs of a batch, by key.

    "positions": uint32 [3, max_batch]: each token's position, its sequence's row in "tables", and the last
    position of its sequence. "slots": uint32 [max_batch], cache slots of the tokens. "tables": uint32
    [max_batch, n_blocks]. "outputs": uint32 [OUTPUT_ROWS]. "thresholded": float32 [max_batch]. "states":
    uint32 [4, max_batch] (csrc/vulkan/shaders/states.glsl). A Rope: angles, float32 [max_batch, n_rot / 2,
    2]. An entering Value: its rows, float32 [max_batch, stride]. ("heads", n) and ("tiles", n): uint32 [3],
    the workgroups of a split attention with n groups of heads, and of a scan with n tiles (tiles_of).
    """

    def __init__(self, device: _core.VulkanDevice, shape: InputShape) -> None:
        most, self._n_states = shape.max_batch, shape.n_states
        sizes = shape.words
        self.buffer = device.allocate(shape.nbytes, "to_device")
        self.nbytes = self.buffer.reserved
        view, at = self.buffer.view(), 0
        self._pieces: dict[object, BufferRange] = {}
        words: dict[object, np.ndarray] = {}
        for key, size in sizes.items():
            self._pieces[key] = BufferRange(self.buffer, at, 4 * size)
            words[key] = view[at : at + 4 * size].view(np.uint32)
            at += aligned(4 * size)
        self._words = words
        self._places, self._tables = words["positions"].reshape(3, -1), words["tables"].reshape(most, -1)
        self._thresholded = words["thresholded"].view(np.float32)
        self._rows = {
            value: words[value].view(np.float32).reshape(most, stride)[:, : value.width]
            for value, stride in shape.entering.items()
        }
        self._rotations = [
            (_Rotation(rope), words[rope].view(np.float32).reshape(most, -1)) for rope in shape.ropes
        ]
        self._heads, self._tiles = shape.heads, shape.tiles

    def __getitem__(self, key: object) -> BufferRange:
        """Return the buffer range of a name, a rotation or a value."""
        return self._pieces[key]

    def groups_of(self, kind: str, number: int) -> tuple[_core.VulkanBuffer, int]:
        """Return the buffer and the offset of a number of workgroups.

        kind: "heads" for an attention with `number` groups of heads, "tiles" for a scan with `number` tiles.
        """
        return self.buffer, self._pieces[kind, number].offset

    def fill(self, batch: Batch, slots: np.ndarray, rows: Mapping[Value, np.ndarray]) -> None:
        """Write the inputs of a checked batch. slots: from base.cache_slots. No program may be running.

        Raises InvalidRequestError for states that break the contract of Batch.
        """
        n = len(batch.tokens)
        last = _core.vulkan_place_tokens(
            self._places, self._tables, batch.positions, batch.sequences, batch.block_tables
        )
        self._words["slots"][:n] = slots
        self._thresholded[:n] = 0 if batch.thresholded is None else batch.thresholded
        for rotation, angles in self._rotations:
            rotation.write(batch.positions, last, angles[:n])
        for value, values in rows.items():
            self._rows[value][:n] = values
        for n_groups in self._heads:
            self._words["heads", n_groups][:] = n_groups, n, last // SPLIT + 1
        if self._n_states:
            self._fill_states(batch)

    def _fill_states(self, batch: Batch) -> None:
        """Write the state slots. Raises as `fill`."""
        first, lengths = batch.runs()
        states, saves = check_states(batch, self._n_states)
        n = len(batch.tokens)
        words = self._words["states"].reshape(4, -1)
        words[0, :n], words[3, : len(first)] = np.repeat(first, lengths), first
        words[1, :n], words[2, :n] = states[batch.sequences].view(np.uint32), saves.view(np.uint32)
        for n_tiles in self._tiles:
            self._words["tiles", n_tiles][:3] = n_tiles, len(first), 1

    def choose(self, outputs: np.ndarray) -> None:
        """Write the indices of the rows whose logits are computed next."""
        self._words["outputs"][: len(outputs)] = outputs


def tiles_of(op: ops.Recurrent) -> int:
    """Return the workgroups of a scan for one sequence (csrc/vulkan/shaders/scan.comp)."""
    n_head, *_, width = (1, *op.state_shape)[-3:]
    return n_head * -(-width // _COLUMNS)
