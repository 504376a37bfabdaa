"""Tensors that stay as long as a stage, side by side in large pieces of a device's memory.

torch's allocator rounds what it is asked for: to 2 MiB above 10 MiB, and smaller tensors share pieces of
20 MiB in which a quarter may stay empty. Over some hundred matrices that is more than a budget has to spare,
so they are parts of pieces whose size it does not round.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

PIECE = 32 << 20  # bytes, after the first, which has the size of all that is expected
ROUNDING = 2 << 20  # of pieces
ALIGNMENT = 512  # of tensors, as placement/budget.py counts them


class Arena:
    """Memory of one device, handed out and never given back but by `clear`.

    expected: bytes that will be asked for, as far as that is known. reserved: bytes of all pieces.
    """

    def __init__(self, device: torch.device | str, expected: int = 0) -> None:
        self._device, self._expected = torch.device(device), expected
        self._open: list[tuple[Tensor, int]] = []  # pieces with room, and how much of each is used
        self.reserved = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor whose values are whatever was there."""
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
        """The same on the device."""
        return self.empty(tuple(values.shape), values.dtype).copy_(values)

    def clear(self) -> None:
        """Lets go of all pieces; those whose tensors are in use stay until these are not."""
        self._open.clear()
        self.reserved = 0


def _rounded(n: int, to: int) -> int:
    return -(-n // to) * to
