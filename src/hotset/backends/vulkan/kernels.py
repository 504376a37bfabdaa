"""The kernels of a Vulkan device: SPIR-V that csrc/vulkan/shaders/compile.py made, compiled by the driver."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files

import numpy as np

from hotset import _core
from hotset.model.operations import Value

_LANES = 64  # of a workgroup that takes values one by one


@dataclass(frozen=True)
class _Shape:
    """What a kernel takes: how many buffers, and its push constants as `struct` has them."""

    n_buffers: int
    push: str


KERNELS = {
    "attention": _Shape(10, "9I2f"),
    "combine": _Shape(4, "6I"),
    "conv": _Shape(6, "6I"),
    "elementwise": _Shape(3, "6I4f"),
    "expert_sum": _Shape(3, "5I"),
    "head_dot": _Shape(5, "6I"),
    "heads": _Shape(3, "8I"),
    "linear_few": _Shape(7, "13If"),
    "linear_many": _Shape(7, "13If"),
    "norm": _Shape(4, "4If"),
    "rotate": _Shape(3, "7I"),
    "route": _Shape(4, "8If"),
    "scan": _Shape(9, "16I"),
    "select": _Shape(3, "3I"),
    "store": _Shape(4, "5I"),
    "streams": _Shape(4, "10If"),
    "transposed": _Shape(7, "9I"),
}


class Kernels:
    """Compiles kernels when they are first asked for, one for each set of constants."""

    def __init__(self, device: _core.VulkanDevice) -> None:
        self.device = device
        self._compiled: dict[tuple[object, ...], _core.VulkanKernel] = {}

    def get(self, name: str, constants: Sequence[int]) -> _core.VulkanKernel:
        """A kernel with these specialisation constants, from the first on."""
        key = name, *constants
        if key not in self._compiled:
            shape = KERNELS[name]
            code = files("hotset.backends.vulkan").joinpath("spirv", f"{name}.spv").read_bytes()
            self._compiled[key] = self.device.kernel(
                np.frombuffer(code, np.uint8),
                shape.n_buffers,
                struct.calcsize(f"<{shape.push}"),
                list(constants),
            )
        return self._compiled[key]


class Recorder:
    """Records the dispatches of a program."""

    def __init__(self, kernels: Kernels) -> None:
        self.program = _core.VulkanProgram(kernels.device)
        self.n_dispatches = 0
        self._kernels = kernels

    def add(
        self,
        name: str,
        constants: Sequence[int],
        bindings: Sequence[_core.VulkanBinding],
        push: Sequence[float],
        groups: tuple[int, int, int],
    ) -> None:
        """One dispatch of so many workgroups."""
        kernel, packed = self._kernels.get(name, constants), struct.pack(f"<{KERNELS[name].push}", *push)
        self.program.dispatch(kernel, list(bindings), packed, groups)
        self.n_dispatches += 1

    def add_indirect(
        self,
        name: str,
        constants: Sequence[int],
        bindings: Sequence[_core.VulkanBinding],
        push: Sequence[float],
        groups: tuple[_core.VulkanBuffer, int],
    ) -> None:
        """The same; the host writes how many workgroups into a buffer, at an offset, before each run."""
        kernel, packed = self._kernels.get(name, constants), struct.pack(f"<{KERNELS[name].push}", *push)
        self.program.dispatch_indirect(kernel, list(bindings), packed, *groups)
        self.n_dispatches += 1


Record = Callable[[Recorder, int], None]  # the dispatches of an operation, for so many rows


def by_values(width: int, n: int) -> tuple[int, int, int]:
    """Workgroups of kernels that take values one by one, of n rows."""
    return -(-width // _LANES), n, 1


def stride_of(value: Value) -> int:
    """Floats from one row of a value to the next: products read four at a time."""
    return -(-value.width // 4) * 4
