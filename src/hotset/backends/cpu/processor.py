"""The processor's instruction sets and read bandwidth, and small products without a plan."""

from __future__ import annotations

import numpy as np

from hotset import _core
from hotset.formats.quants import GGMLType


def isa() -> str:
    """Return the instruction set in use; HOTSET_ISA forces one. Raises ValueError if none can be used."""
    return _core.isa()


def available_isas() -> list[str]:
    """Return the instruction sets of this processor, the best first."""
    return list(_core.available_isas())


def read_bandwidth(data: np.ndarray, n_threads: int) -> float:
    """Measure the bytes per second at which n_threads threads read an array."""
    return _core.read_bandwidth(data, n_threads)


def gather_bandwidth(data: np.ndarray, pieces: np.ndarray, piece_bytes: int, n_threads: int) -> float:
    """Measure the bytes per second at which n_threads threads read pieces of an array.

    pieces: int64 [n], their offsets, multiples of 64 bytes. piece_bytes: of each, a multiple of 256.
    """
    return _core.gather_bandwidth(data, np.ascontiguousarray(pieces, np.int64), piece_bytes, n_threads)


def linear_f32(rows: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Multiply x [n, width] by rows [n_rows, width]: float32 [n, n_rows], in the core's order of sums."""
    data = np.ascontiguousarray(rows, np.float32).view(np.uint8).reshape(-1)
    return _core.linear(int(GGMLType.F32), data, len(rows), np.ascontiguousarray(x))
