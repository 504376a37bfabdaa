"""Options of a stage on a torch device. This module does not import torch."""

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
    """The options of a stage on a torch device.

    kernels: None chooses Triton or plain torch (kernels.Kernels). stream_from: from this number of tokens on,
    a step streams cold rows to the device and does not use the CPU worker; None: never. stream_bytes: bytes
    of these rows at a time. capture: records steps; None uses CUDA graphs if the device has them.
    weight_bytes: the planned bytes of its weights, if there is a plan. input_major: names of the matrices
    with thresholded inputs that are stored input-major, so that no step reads the channels of zero inputs.
    """

    kernels: Kernels | None = None
    stream_from: int | None = STREAM_FROM
    stream_bytes: int = STREAM_BYTES
    capture: Capture | None = None
    weight_bytes: int = 0
    input_major: Collection[str] = ()


DEFAULT_OPTIONS = GpuOptions()
