"""The memories of a device, and faults of accesses: their place, alignment and order.

Whether two accesses are ordered does not depend on which happened first: another warp may not touch a byte
that a warp wrote before a barrier. For global memory, which no barrier orders between blocks, another block
of the launch may not touch it at all.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

WINDOW = 1 << 40  # distance between arguments' addresses, so that no overrun reaches another argument
FIRST = 1 << 50  # above all host addresses
MANY = 255  # several warps


class Fault(AssertionError):  # noqa: N818
    """A fault on a device, or a result that depends on timing."""


def bytes_at(address: int, n_bytes: int) -> np.ndarray:
    """Return memory of this process, uint8 [n_bytes]."""
    return np.frombuffer((ctypes.c_uint8 * n_bytes).from_address(address), np.uint8)


@dataclass
class Allocation:
    """`n_bytes` of host memory at `first`.

    owners: for each byte the block that wrote it, counted from 1; None until one did.
    """

    first: int
    n_bytes: int
    owners: np.ndarray | None = None

    def places(self, addresses: np.ndarray, n_bytes: int) -> np.ndarray:
        """Return the indices into `owners` [k, n_bytes] of accesses to host addresses [k]."""
        return (addresses - self.first)[:, None] + np.arange(n_bytes)


class Region:
    """Memory that a kernel may access: a part of an allocation, which the device addresses as `start`."""

    def __init__(self, start: int, address: int, n_bytes: int, allocation: Allocation) -> None:
        self.start, self.address, self.n_bytes, self.allocation = start, address, n_bytes, allocation
        self.loads: list[tuple[np.ndarray, int, np.ndarray]] = []  # addresses, bytes of each, blocks
        self._views: dict[np.dtype, np.ndarray] = {}

    def elements(self, dtype: np.dtype) -> np.ndarray:
        """Return the region and any bytes before it, from a multiple of 16 bytes on."""
        if dtype not in self._views:
            skipped = self.address % 16
            n = (skipped + self.n_bytes) // dtype.itemsize
            self._views[dtype] = bytes_at(self.address - skipped, n * dtype.itemsize).view(dtype)
        return self._views[dtype]

    def places(self, addresses: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """Return the indices into `elements` of device addresses."""
        start = np.uint64(self.start - self.address % 16)
        return ((addresses - start) // np.uint64(dtype.itemsize)).astype(np.int64)

    def of_host(self, addresses: np.ndarray) -> np.ndarray:
        return (addresses - np.uint64(self.start)).astype(np.int64) + self.address


class Memory:
    """The global memory of one launch."""

    def __init__(self) -> None:
        self._regions: list[Region] = []
        self._allocations: dict[int, Allocation] = {}

    def add(self, address: int, n_bytes: int, whole: tuple[int, int] | None = None) -> int:
        """Return the device's address of host memory.

        whole: address and bytes of its allocation, which may have several views; None: the whole allocation,
        at the same address.
        """
        start = address if whole is None else FIRST + len(self._regions) * WINDOW + address % 256
        first, n_all = whole or (address, n_bytes)
        allocation = self._allocations.setdefault(first, Allocation(first, n_all))
        self._regions.append(Region(start, address, n_bytes, allocation))
        return start

    def load(self, addresses: np.ndarray, dtype: np.dtype, n: int, blocks: np.ndarray) -> np.ndarray:
        """Load n adjacent numbers at each address, [k, n]. blocks: int [k], the readers."""
        found = np.empty((len(addresses), n), dtype)
        for region, which in self._found(addresses, dtype.itemsize * n, "load"):
            given = addresses[which]
            found[which] = region.elements(dtype)[region.places(given, dtype)[:, None] + np.arange(n)]
            region.loads.append((given, dtype.itemsize * n, blocks[which]))
        return found

    def store(self, addresses: np.ndarray, values: np.ndarray, blocks: np.ndarray) -> None:
        """Store values, unsigned [k, n]."""
        n = values.shape[1]
        for region, which in self._found(addresses, values.itemsize * n, "store"):
            given, into = addresses[which], region.elements(values.dtype)
            at = region.places(given, values.dtype)[:, None] + np.arange(n)
            into[at] = values[which]
            if (into[at] != values[which]).any():
                raise Fault("two threads store different values at one address")
            allocation, mine = region.allocation, blocks[which][:, None] + 1
            if allocation.owners is None:
                allocation.owners = np.zeros(allocation.n_bytes, np.int32)
            places = allocation.places(region.of_host(given), values.itemsize * n)
            before = allocation.owners[places]
            if ((before != 0) & (before != mine)).any():
                raise Fault("two blocks store at one address")
            allocation.owners[places] = mine

    def exchange(self, addresses: np.ndarray, values: np.ndarray, *, is_sum: bool) -> np.ndarray:
        """Add or exchange atomically, one access after another. Returns the old values, [k]."""
        before = np.empty_like(values)
        for i in range(len(addresses)):
            given = addresses[i : i + 1]
            ((region, _),) = self._found(given, values.itemsize, "atomic operation")
            into, at = region.elements(values.dtype), region.places(given, values.dtype)[0]
            before[i] = into[at]
            into[at] = into[at] + values[i] if is_sum else values[i]
        return before

    def check_order(self) -> None:
        """Check, after a launch, that no block loaded what another one stored before or after."""
        for region in self._regions:
            owners = region.allocation.owners
            for addresses, n, blocks in region.loads if owners is not None else ():
                owner = owners[region.allocation.places(region.of_host(addresses), n)]  # type: ignore[index]
                if ((owner != 0) & (owner != blocks[:, None] + 1)).any():
                    raise Fault("a block loads what another block of the launch stores")

    def _found(self, addresses: np.ndarray, n: int, what: str) -> list[tuple[Region, np.ndarray]]:
        """Return the regions of accesses to n bytes each, and the accesses of each region."""
        if (odd := addresses % np.uint64(n)).any():
            raise Fault(f"misaligned {what} of {n} bytes at {int(addresses[odd != 0][0]):#x}")
        found, left = [], np.ones(len(addresses), bool)
        for region in self._regions:
            inside = (addresses >= np.uint64(region.start)) & left
            inside &= addresses + np.uint64(n) <= np.uint64(region.start + region.n_bytes)
            if inside.any():
                found.append((region, np.flatnonzero(inside)))
                left &= ~inside
                if not left.any():
                    return found
        if not left.any():
            return found
        near = ", ".join(f"{one.start:#x} + {one.n_bytes}" for one in self._regions)
        raise Fault(f"{what} of {n} bytes out of bounds at {int(addresses[left][0]):#x}; there are {near}")


class Shared:
    """The shared memory of several blocks, `size` bytes each, with undefined initial contents.

    For each byte it records the warp that wrote it since the block's latest barrier, counted from 1, and the
    warp that read it, or MANY.
    """

    def __init__(self, n_blocks: int, size: int) -> None:
        self.size, self._stride = size, -(-size // 16) * 16
        shape = (n_blocks, self._stride)
        self._data = np.random.default_rng(0).integers(0, 256, shape, np.uint8).reshape(-1)
        self._writers, self._readers = np.zeros(shape, np.uint8), np.zeros(shape, np.uint8)

    def load(
        self, addresses: np.ndarray, dtype: np.dtype, n: int, blocks: np.ndarray, warps: np.ndarray
    ) -> np.ndarray:
        """Load n adjacent numbers at each address, [k, n]. blocks, warps: int [k], the readers."""
        at = self._places(addresses, dtype.itemsize * n, blocks, "load")
        self._note_load(at, dtype.itemsize * n, warps)
        return self._data.view(dtype)[at[:, None] // dtype.itemsize + np.arange(n)]

    def store(self, addresses: np.ndarray, values: np.ndarray, blocks: np.ndarray, warps: np.ndarray) -> None:
        """Store values [k, n]."""
        n_bytes = values.itemsize * values.shape[1]
        at = self._places(addresses, n_bytes, blocks, "store")
        self.check_store(at, n_bytes, warps)
        raw = np.ascontiguousarray(values).view(np.uint8).reshape(len(at), n_bytes)
        cells = at[:, None] + np.arange(n_bytes)
        before, mine = self._writers.reshape(-1)[cells], warps[:, None] + 1
        if ((before != 0) & (before != mine) & (self._data[cells] != raw)).any():
            raise Fault("race: two warps store different values at one shared address")
        self._data[cells] = raw
        if (self._data[cells] != raw).any():
            raise Fault("two threads store different values at one shared address")
        self._writers.reshape(-1)[cells] = mine

    def places(self, addresses: np.ndarray, n_bytes: int, blocks: np.ndarray) -> np.ndarray:
        """Return the places of an asynchronous copy's stores, which may happen at any time from now on."""
        return self._places(addresses, n_bytes, blocks, "copy")

    def check_store(self, at: np.ndarray, n_bytes: int, warps: np.ndarray) -> None:
        readers = self._readers.reshape(-1)[at[:, None] + np.arange(n_bytes)]
        if ((readers != 0) & (readers != warps[:, None] + 1)).any():
            raise Fault("race: a warp stores where another has loaded, without a barrier between")

    def barrier(self, blocks: np.ndarray) -> None:
        """Record that all warps of these blocks have met."""
        self._writers[blocks] = 0
        self._readers[blocks] = 0

    def _note_load(self, at: np.ndarray, n_bytes: int, warps: np.ndarray) -> None:
        cells, mine = at[:, None] + np.arange(n_bytes), (warps[:, None] + 1).astype(np.uint8)
        writers, readers = self._writers.reshape(-1), self._readers.reshape(-1)
        of = writers[cells]
        if ((of != 0) & (of != mine)).any():
            raise Fault("race: a warp loads what another has stored, without a barrier between")
        before = readers[cells]
        now = np.where((before == 0) | (before == mine), mine, np.uint8(MANY))
        readers[cells] = now
        if (several := readers[cells] != now).any():  # within this instruction
            readers[cells[several]] = MANY

    def _places(self, addresses: np.ndarray, n_bytes: int, blocks: np.ndarray, what: str) -> np.ndarray:
        at = addresses.astype(np.int64)
        if (at % n_bytes).any():
            raise Fault(f"misaligned shared {what} of {n_bytes} bytes at {at[at % n_bytes != 0][0]}")
        if (at + n_bytes > self.size).any() or (at < 0).any():
            raise Fault(f"shared {what} out of bounds: {at.max()} + {n_bytes} > {self.size}")
        return at + blocks * self._stride
