"""Triton's kernels, compiled for an absent device and interpreted on CPU tensors.

compiled(kernel, args, ...) returns PTX and shared memory. `launch` replaces
hotset.backends.triton.launch.launch.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton_sources import source_of

from hotset.backends.triton import launch as launcher
from hotset.backends.triton import triton_kernels
from ptx.machine import run
from ptx.memory import Memory
from ptx.program import Program, read

ARCH = int(os.environ.get("HOTSET_PTX_ARCH", "80"))
STATISTICS: Counter[str] = Counter()
HOST_MEMORY: list[np.ndarray] = []  # host memory that kernels address, for `launch`


def _without_assembler(
    backend: Any = None, stages: Any = None, options: Any = None, language: Any = None, capability: Any = None
) -> tuple[str, str]:
    """Triton's hook: interpreted code is not assembled, and is cached under another name."""
    if stages is not None:
        stages["cubin"] = lambda source, metadata: b""
    return "ptx alone", "ptx alone"


def compile_to_ptx(source: Any, options: dict[str, Any]) -> Any:
    before, knobs.runtime.add_stages_inspection_hook = (
        knobs.runtime.add_stages_inspection_hook, _without_assembler,
    )  # fmt: skip
    try:
        return triton.compile(source, GPUTarget("cuda", ARCH, 32), options=options)
    finally:
        knobs.runtime.add_stages_inspection_hook = before


@cache
def _program(ptx: str) -> Program:
    return read(ptx)


def pretend_a_device(patch: pytest.MonkeyPatch) -> None:
    """Make kernels on CPU tensors launch as on a device, but interpreted."""
    patch.setattr(launcher, "launch", launch)
    patch.setattr(triton_kernels, "_precision", lambda x: "tf32x3")
    patch.setattr(triton_kernels, "is_hopper", lambda x: ARCH == 90)


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    warps: int,
    fused: bool = True,
    stages: int | None = None,
    at_once: bool = False,
    **constants: Any,
) -> None:
    """Launch like hotset.backends.triton.launch.launch. Raises Fault for a device's faults and races."""
    launcher.check(kernel, grid, args, constants)
    source = source_of(kernel, args, constants)
    options: dict[str, Any] = {"num_warps": warps, "enable_fp_fusion": fused}
    made = compile_to_ptx(source, options if stages is None else options | {"num_stages": stages})
    memory, given = Memory(), []
    for name, arg in zip(kernel.arg_names, args, strict=False):
        if source.signature[name] != "constexpr":
            given.append(_argument(memory, arg, source.signature[name]))
    for array in HOST_MEMORY:
        memory.add(array.ctypes.data, array.nbytes)
    program = _program(made.asm["ptx"])
    given += [0] * (program.n_parameters - len(given))  # scratch memory, which these kernels do not use
    STATISTICS["launches"] += 1
    STATISTICS["instructions"] += run(
        program, memory, made.metadata.shared, grid, given, dependent=launcher.DEPENDENT
    )


def _argument(memory: Memory, arg: Any, type_: str) -> int:
    """Return the bits of an argument."""
    if isinstance(arg, torch.Tensor):
        return _address(memory, arg)
    if type_ == "fp32":
        return int(np.float32(arg).view(np.uint32))
    return int(arg)


def _address(memory: Memory, tensor: torch.Tensor) -> int:
    """Return a tensor's address; memory beyond it does not belong to the kernel."""
    if not tensor.numel():
        return memory.add(tensor.data_ptr(), 0, (tensor.data_ptr(), 0))
    strides: Sequence[int] = tensor.stride()
    n = sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True)) + 1
    whole = tensor.untyped_storage()
    return memory.add(tensor.data_ptr(), n * tensor.element_size(), (whole.data_ptr(), whole.nbytes()))
