"""Selection of each row's largest logits on the device, so that not all logits cross to the host.

Each dispatch keeps N_CANDIDATES of every chunk of a row (csrc/vulkan/shaders/candidates.comp), until one
chunk is left.
"""

from __future__ import annotations

import numpy as np

from hotset import _core
from hotset.backends.base import N_CANDIDATES
from hotset.backends.vulkan.kernels import Recorder
from hotset.backends.vulkan.memory import BufferRange, aligned

_CHUNK = 1024
_PAIR = 8  # bytes: key and index
CANDIDATE_BYTES = _PAIR * N_CANDIDATES  # of a row


def n_chunks(width: int) -> list[int]:
    """Return the number of chunks in each dispatch for a row of `width` logits; the last is 1."""
    found = [-(-width // _CHUNK)]
    while found[-1] > 1:
        found.append(-(-found[-1] * N_CANDIDATES // _CHUNK))
    return found


def scratch_bytes(width: int, n_rows: int) -> int:
    """Return the bytes of the two buffers in which dispatches leave results for the next one, in turn."""
    return sum(aligned(n * n_rows * CANDIDATE_BYTES) for n in n_chunks(width)[:-1][:2])


def record(
    to: Recorder,
    logits: _core.VulkanBinding,
    row: tuple[int, int],
    n: int,
    scratch: BufferRange,
    out: BufferRange,
) -> None:
    """Record the dispatches for n rows. row: their width and stride. out: CANDIDATE_BYTES for each row."""
    (width, stride), chunks = row, n_chunks(row[0])
    halves = [scratch, scratch.part(aligned(chunks[0] * n * CANDIDATE_BYTES), 0)]
    read = logits
    for i, count in enumerate(chunks):
        to_piece, size = out if count == 1 else halves[i % 2], count * n * CANDIDATE_BYTES
        out_stride = count * CANDIDATE_BYTES // 4
        bindings = [read, to_piece.bound(size, written=True)]
        to.add("candidates", [int(i == 0)], bindings, (width, stride, out_stride), (count, n, 1))
        width, stride, read = count * N_CANDIDATES, out_stride, to_piece.bound(size)


def candidates_of(pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the token ids, ascending in each row, and their logits: int32 and float32 [n, N_CANDIDATES].

    pairs: the result of the last dispatch, uint32 [n, N_CANDIDATES, 2].
    """
    return _core.vulkan_candidates(pairs)
