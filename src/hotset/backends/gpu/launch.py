"""The only place where a kernel of Triton is launched: tests see there all that a step launches."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor


def launch(
    kernel: Any, grid: tuple[int, ...], *args: Any, warps: int, fused: bool = True, **constants: Any
) -> None:
    """Launches on the device of the first argument that is a tensor.

    fused: products and sums are (Triton's default until 3.9, not after): half the instructions, better sums.
    False: each is rounded, but where a kernel fuses them itself.
    """
    device = next(arg for arg in args if isinstance(arg, Tensor)).device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[grid](*args, num_warps=warps, enable_fp_fusion=fused, **constants)
