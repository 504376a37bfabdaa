"""Memory of a Vulkan device, handed out in pieces."""

from __future__ import annotations

from dataclasses import dataclass

from hotset import _core

ALIGNMENT = 256  # of pieces: the most that Vulkan lets a device ask of a storage buffer's offset
BLOCK = 2 << 20  # bytes of a buffer that pieces share
OWN_FROM = 512 << 10  # bytes of a piece from which on it has a buffer of its own
PAGE = 64 << 10  # bytes that a driver rounds a buffer up to, at most


def aligned(n: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-n // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class BufferRange:
    """Bytes [offset, offset + size) of a buffer."""

    buffer: _core.VulkanBuffer
    offset: int
    size: int

    def bound(self, size: int | None = None, *, written: bool = False) -> _core.VulkanBinding:
        """The first bytes of it, or all, as a dispatch takes them."""
        return self.buffer, self.offset, self.size if size is None else size, written

    def part(self, offset: int, size: int) -> BufferRange:
        """Some of its bytes."""
        return BufferRange(self.buffer, self.offset + offset, size)

    def read(self, size: int | None = None) -> bytes:
        """Its first bytes, or all, copied to the host; no program may be running."""
        return self.buffer.read(self.offset, self.size if size is None else size).tobytes()


class BufferArena:
    """Pieces of the device's own memory that stay as long as it does. nbytes: of all its buffers."""

    def __init__(self, device: _core.VulkanDevice) -> None:
        self._device = device
        self._open: tuple[_core.VulkanBuffer, int] | None = None  # with room, and how much is used
        self.nbytes = 0

    def piece(self, size: int) -> BufferRange:
        """Whatever was there is in it. Raises OutOfMemoryError."""
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
    """What a piece takes of the device at most, beside SPARE of each arena: no block is left with more room
    than a piece that shares one."""
    if size >= OWN_FROM:
        return -(-aligned(size) // PAGE) * PAGE
    return aligned(size) * BLOCK // (BLOCK - OWN_FROM)


def planned_spare(largest: int) -> int:
    """What planned_bytes says of up to `largest` bytes more than they are."""
    of_shared = aligned(min(largest, OWN_FROM)) * BLOCK // (BLOCK - OWN_FROM) - min(largest, OWN_FROM)
    return max(of_shared, PAGE + ALIGNMENT if largest >= OWN_FROM else 0) + ALIGNMENT * 2


SPARE = BLOCK + PAGE  # of an arena: the room of its last block
