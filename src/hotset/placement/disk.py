"""The rates of file reads that bypass the page cache, measured once for each disk, and the best reader.

    ring     whether reads use io_uring; otherwise threads
    depth    reads in flight
    rates    bytes per second of random reads, by the size of a read

They are kept in machine.json, like the rates of placement/machine.py.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotset import _core
from hotset.errors import ReadError
from hotset.placement.machine import once, processor_name
from hotset.reporter import Reporter

_SIZES = (4096, 16384, 65536, 524288)
_CANDIDATES = ((False, 16), (True, 32), (True, 64))
SECONDS = 0.1  # of each measurement
SMALLEST_FILE = 64 << 20  # smaller files are too small to measure


@dataclass(frozen=True)
class DiskRates:
    """The best reader of a disk, and its rates; the fields are described above. rates: sorted by size."""

    ring: bool
    depth: int
    rates: tuple[tuple[int, float], ...]

    @property
    def gap(self) -> int:
        """Return the unneeded bytes that take as long to read as starting another read: whole pages."""
        (small, slow), (large, fast) = self.rates[0], self.rates[-1]
        per_byte = (large / fast - small / slow) / (large - small)
        per_read = small / slow - small * per_byte
        if per_byte <= 0:
            return large // 2
        return min(max(int(per_read / per_byte), 0), large // 2) // 4096 * 4096

    def rate(self, size: float) -> float:
        """Return the bytes per second of reads of this size, interpolated between measured sizes."""
        sizes = self.rates
        if size <= sizes[0][0]:
            return sizes[0][1]
        for (small, slow), (large, fast) in itertools.pairwise(sizes):
            if size <= large:
                return slow + (fast - slow) * (size - small) / (large - small)
        return sizes[-1][1]

    def reader(self) -> _core.Reader:
        """Open a reader of this kind, or a reader with threads if the kernel refuses a ring now.

        The limit of locked memory or of descriptors may be reached.
        """
        with contextlib.suppress(ReadError):
            return _core.Reader(self.ring, self.depth)
        return _core.Reader(False, self.depth)


USUAL = DiskRates(False, 16, ((4096, 3e8), (16384, 7e8), (65536, 1e9), (524288, 1e9)))
"""The assumed rates of a disk that is not measured, because the file is too small."""


def measure_disk(file: Path, *, progress: Reporter | None = None, path: Path | None = None) -> DiskRates:
    """Return the stored rates of a file's disk, or measure and store them. path: the file that keeps them.

    A file below 64 MiB gets the USUAL rates.
    """
    if file.stat().st_size < SMALLEST_FILE:
        return USUAL
    key = f"{processor_name()} | disk {os.stat(file).st_dev} | {os.cpu_count()} threads"

    def kept(found: dict[str, Any]) -> DiskRates:
        rates = tuple((int(size), float(rate)) for size, rate in found["rates"])
        return DiskRates(found["ring"], found["depth"], rates)

    said = "Measuring how this disk is read best, once."
    return once(key, kept, lambda: _measure(file), said, progress, path)


def _measure(file: Path) -> DiskRates:
    best: DiskRates | None = None
    for ring, depth in _CANDIDATES:
        try:
            reader = _core.Reader(ring, depth)
        except ReadError:  # as in DiskRates.reader
            continue
        passes = [[reader.rate(str(file), size, SECONDS) for size in _SIZES] for _ in range(2)]
        rates = tuple(zip(_SIZES, map(max, *passes), strict=True))  # other programs may have used the disk
        if best is None or rates[1][1] > best.rates[1][1]:
            best = DiskRates(ring, depth, rates)
    assert best is not None
    return best
