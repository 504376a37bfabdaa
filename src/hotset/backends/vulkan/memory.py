"""Allocation of a Vulkan device's memory in pieces."""

from __future__ import annotations

from dataclasses import dataclass

from hotset import _core

ALIGNMENT = 256  # of pieces: the largest alignment a Vulkan device may require of a storage buffer's offset
BLOCK = 2 << 20  # bytes of a buffer that pieces share
OWN_FROM = 512 << 10  # a piece of at least this many bytes has its own buffer
PAGE = 64 << 10  # the largest multiple, in bytes, to which a driver rounds up a buffer


def aligned(n: int) -> int:
    """Round up to a multiple of ALIGNMENT."""
    return -(-n // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class BufferRange:
    """Bytes [offset, offset + size) of a buffer."""

    buffer: _core.VulkanBuffer
    offset: int
    size: int

    def bound(self, size: int | None = None, *, written: bool = False) -> _core.VulkanBinding:
        """Return a binding of the first `size` bytes, or all, for a dispatch."""
        return self.buffer, self.offset, self.size if size is None else size, written

    def part(self, offset: int, size: int) -> BufferRange:
        """Return the range of `size` bytes that begins at `offset` within this range."""
        return BufferRange(self.buffer, self.offset + offset, size)

    def read(self, size: int | None = None) -> bytes:
        """Copy the first `size` bytes, or all, to the host. No program may be running."""
        return self.buffer.read(self.offset, self.size if size is None else size).tobytes()


class BufferArena:
    """Pieces of device memory that live as long as the arena. nbytes: bytes of all its buffers."""

    def __init__(self, device: _core.VulkanDevice) -> None:
        self._device = device
        self._open: tuple[_core.VulkanBuffer, int] | None = None  # a block with room, and its used bytes
        self.nbytes = 0

    def piece(self, size: int) -> BufferRange:
        """Allocate a piece of uninitialised memory. Raises OutOfMemoryError."""
        taken = aligned(size)
        if taken >= OWN_FROM:
            return BufferRange(self._new(taken), 0, size)
        buffer, used = self._open or (None, 0)
        if buffer is None or used + taken > buffer.size:
            buffer, used = self._new(BLOCK), 0
        self._open = buffer, used + taken
        return BufferRange(buffer, used, size)

    def _new(self, size: int) -> _core.VulkanBuffer:
        buffer = self._device.allocate(size, "device")
        self.nbytes += buffer.reserved
        return buffer


def planned_bytes(size: int) -> int:
    """Return the most device bytes that a piece takes, in addition to SPARE of each arena.

    The bound holds since a closed block has less free room than OWN_FROM, the limit for pieces that share.
    """
    if size >= OWN_FROM:
        return -(-aligned(size) // PAGE) * PAGE
    return aligned(size) * BLOCK // (BLOCK - OWN_FROM)


def planned_spare(largest: int) -> int:
    """Return by how many bytes at most planned_bytes exceeds a size of up to `largest` bytes."""
    of_shared = aligned(min(largest, OWN_FROM)) * BLOCK // (BLOCK - OWN_FROM) - min(largest, OWN_FROM)
    return max(of_shared, PAGE + ALIGNMENT if largest >= OWN_FROM else 0) + ALIGNMENT * 2


SPARE = BLOCK + PAGE  # of an arena: the unused room of its last block
