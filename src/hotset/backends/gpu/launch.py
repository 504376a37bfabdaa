"""The only place where a kernel of Triton is launched: tests see there all that a step launches."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

NUMBERS = (int, float, bool)
MOST_PROGRAMS = 65_535  # of the second and third side of a grid ("Technical Specifications", CUDA C++ Guide)


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    warps: int,
    fused: bool = True,
    stages: int | None = None,
    **constants: Any,
) -> None:
    """Launches on the device of the first argument that is a tensor.

    stages: how many turns of a loop have their loads on the way at once; None: as many as Triton has.
    fused: products and sums are (Triton's default until 3.9, not after): half the instructions, better sums.
    False: each is rounded, but where a kernel fuses them itself. What `check` asserts holds.
    """
    check(kernel, grid, args, constants)
    device = next(arg for arg in args if isinstance(arg, Tensor)).device
    if stages is not None:
        constants["num_stages"] = stages
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[grid](*args, num_warps=warps, enable_fp_fusion=fused, **constants)


def check(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> None:
    """Asserts what is refused on a device, but by nothing that runs without one.

    Numbers are Python's own: Triton's just-in-time compiler refuses NumPy's. The grid's second and third side
    are not larger than a device allows: tokens, of which there may be any number, are counted by the first.
    """
    given = dict(zip(kernel.arg_names, args, strict=False)) | constants
    for name, value in [*given.items(), *((f"grid[{i}]", n) for i, n in enumerate(grid))]:
        is_plain = value is None or isinstance(value, Tensor | str) or type(value) in NUMBERS
        assert is_plain, f"{name} of {kernel.__name__} is a {type(value).__module__}.{type(value).__name__}"
    assert max(grid[1:], default=0) <= MOST_PROGRAMS, f"the grid of {kernel.__name__} is {grid}"
