"""The kernels of a Vulkan device: SPIR-V that csrc/vulkan/shaders/compile.py made, compiled by the driver."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files

import numpy as np

from hotset import _core
from hotset.backends.vulkan.shapes import DeviceShapes
from hotset.model.operations import Value

_LANES = 64  # of a workgroup that takes values one by one


@dataclass(frozen=True)
class _Shape:
    """What a kernel takes: how many buffers, and its push constants as `struct` has them."""

    n_buffers: int
    push: str

    @property
    def push_bytes(self) -> int:
        return struct.calcsize(f"<{self.push}")


KERNELS = {
    "attention": _Shape(10, "10I2f"),
    "candidates": _Shape(2, "3I"),
    "combine": _Shape(4, "7I"),
    "conv": _Shape(6, "6I"),
    "elementwise": _Shape(3, "6I4f"),
    "expert_sum": _Shape(4, "5I"),
    "head_dot": _Shape(5, "6I"),
    "heads": _Shape(3, "8I"),
    "linear_few": _Shape(7, "13If"),
    "linear_many": _Shape(7, "13If"),
    "neurons": _Shape(3, "5If"),
    "norm": _Shape(4, "4If"),
    "probe": _Shape(1, ""),
    "quantize": _Shape(2, "2I"),
    "rotate": _Shape(3, "7I"),
    "rounded_few": _Shape(7, "13If"),
    "rounded_many": _Shape(7, "13If"),
    "route": _Shape(4, "8If"),
    "scan": _Shape(9, "16I"),
    "select": _Shape(3, "3I"),
    "slots": _Shape(4, "3I"),
    "store": _Shape(4, "5I"),
    "streams": _Shape(4, "10If"),
    "transposed": _Shape(7, "9I"),
}


_FUSED = 99  # the id of a constant: csrc/vulkan/shaders/common.glsl
_SPIRV = files("hotset.backends.vulkan").joinpath("spirv")


class VulkanKernels:
    """Compiles kernels when they are first asked for, one for each set of constants.

    A test of the device says which instructions of its own they may have (probe.comp); the bits are the same.
    is_native: integer dot products, and half floats, which Vulkan does not promise to read exactly.
    is_fused: an fma() that rounds once; without it products and sums with their errors take its place.
    shapes: of workgroups of products that are recorded from now on.
    """

    allows_native = True  # tests take it away

    def __init__(self, device: _core.VulkanDevice, shapes: DeviceShapes | None = None) -> None:
        self.device, self.shapes = device, shapes or DeviceShapes()
        self._compiled: dict[tuple[object, ...], _core.VulkanKernel] = {}
        self.is_native, self.is_fused = device.has_integer_dots and self.allows_native, True
        as_native, self.is_fused = self._probed()
        self.is_native = self.is_native and as_native
        self._compiled.clear()

    def _probed(self) -> tuple[bool, bool]:
        """Whether half floats and products of bytes are exact, and whether fma() rounds once."""
        found = self.device.allocate(3 * 4 << 16, "from_device")
        recorder = Recorder(self)
        recorder.add("probe", [], [(found, 0, found.size, True)], (), (1024, 1, 1))
        recorder.program.finish()
        _core.vulkan_run([recorder.program], _core.VulkanCancel())
        halves, dots, lost = found.read(0, found.size).view(np.uint32).reshape(3, -1)
        i = np.arange(1 << 16, dtype=np.uint32)
        floats = i.astype(np.uint16).view(np.float16).astype(np.float32)
        a, b = ((i * np.uint32(factor)).view(np.int8).reshape(-1, 4) for factor in (0x9E3779B9, 0x85EBCA6B))
        expected = i + (a.astype(np.int32) * b).sum(axis=1).astype(np.uint32)
        exact = np.isnan(floats) | (floats.view(np.uint32) == halves)
        x = 1 + (i & 0xFFF) / 4096
        rounded_away = (x * x - (x * x).astype(np.float32)).astype(np.float32)
        fused = np.array_equal(lost.view(np.float32), rounded_away)
        return bool(exact.all()) and np.array_equal(dots, expected), fused

    def get(self, name: str, constants: Sequence[int]) -> _core.VulkanKernel:
        """A kernel with these specialisation constants, from the first on."""
        key = name, *constants
        if key not in self._compiled:
            shape, own = KERNELS[name], _SPIRV.joinpath(f"{name}_native.spv")
            plain = _SPIRV.joinpath(f"{name}.spv")
            code = (own if self.is_native and own.is_file() else plain).read_bytes()
            self._compiled[key] = self.device.kernel(
                np.frombuffer(code, np.uint8),
                shape.n_buffers,
                shape.push_bytes,
                [*enumerate(constants), (_FUSED, int(self.is_fused))],
            )
        return self._compiled[key]


def shaders_digest() -> str:
    """Of the sources of all kernels."""
    return hashlib.sha256(_SPIRV.joinpath("sources.json").read_bytes()).hexdigest()


class Recorder:
    """Records the dispatches of a program."""

    def __init__(self, kernels: VulkanKernels) -> None:
        self.program = _core.VulkanProgram(kernels.device)
        self.n_dispatches = 0
        self.rounded: Value | None = None  # whose rows were rounded last
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
