"""How a stage computes on a device of torch; nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hotset.backends.stage import STREAM_BYTES, STREAM_FROM

if TYPE_CHECKING:
    from torch import Tensor

    from hotset.backends.triton.capture import Captured
    from hotset.backends.triton.kernels import Kernels

    Capture = Callable[[Callable[[], Tensor]], tuple[Captured, Tensor]]


@dataclass(frozen=True, kw_only=True)
class GpuOptions:
    """How a stage computes on a device of torch.

    kernels: None chooses Triton or plain torch (kernels.Kernels). stream_from: number of tokens from which on
    cold rows come to the device and the CPU worker is not used; None: never. stream_bytes: bytes of these
    rows at a time. capture: records steps; None for CUDA graphs, if the device has them. weight_bytes: the
    planned bytes of its weights, if there is a plan. input_major: matrices with thresholded inputs, in the
    layout that leaves channels of zeros unread; they are there once, and every step reads them so.
    """

    kernels: Kernels | None = None
    stream_from: int | None = STREAM_FROM
    stream_bytes: int = STREAM_BYTES
    capture: Capture | None = None
    weight_bytes: int = 0
    input_major: Collection[str] = ()


DEFAULT_OPTIONS = GpuOptions()
