"""Tensors that live as long as a stage, packed into large pieces of device memory.

torch's allocator rounds sizes above 10 MiB up to 2 MiB. Smaller tensors share pieces of 20 MiB, of which a
quarter may stay empty. For some hundred matrices that exceeds the spare memory of a budget. So an arena packs
them into pieces whose size torch does not round.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

PIECE = 32 << 20  # least bytes of a piece; the first piece has the expected size instead, if it is known
ROUNDING = 2 << 20  # bytes; sizes of pieces are rounded up to a multiple
ALIGNMENT = 512  # bytes; alignment of tensors, which placement/budget.py assumes too


class Arena:
    """Memory of one device for tensors, which only `clear` releases.

    expected: known bytes of all tensors, or 0. reserved: bytes of all pieces.
    """

    def __init__(self, device: torch.device | str, expected: int = 0) -> None:
        self._device, self._expected = torch.device(device), expected
        self._open: list[tuple[Tensor, int]] = []  # pieces with room, and how much of each is used
        self.reserved = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor with undefined values."""
        n_bytes = math.prod(shape) * dtype.itemsize
        taken = _rounded(n_bytes, ALIGNMENT)
        at = next((i for i, (piece, used) in enumerate(self._open) if used + taken <= len(piece)), None)
        if at is None:
            at = len(self._open)
            self._open.append((self._piece(taken), 0))
        piece, used = self._open[at]
        self._open[at] = piece, used + taken
        if used + taken == len(piece):
            del self._open[at]  # its tensors keep it alive
        return piece[used : used + n_bytes].view(dtype).view(shape)

    def _piece(self, taken: int) -> Tensor:
        size = _rounded(max(PIECE if self.reserved else self._expected or PIECE, taken), ROUNDING)
        self.reserved += size
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def copy_of(self, values: Tensor) -> Tensor:
        """Copy a tensor to the device."""
        return self.empty(tuple(values.shape), values.dtype).copy_(values)

    def clear(self) -> None:
        """Release all pieces. A piece whose tensors are in use stays until they are not."""
        self._open.clear()
        self.reserved = 0


def _rounded(n: int, to: int) -> int:
    return -(-n // to) * to
