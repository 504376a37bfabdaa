"""The kernels of a Vulkan device: SPIR-V from csrc/vulkan/shaders/compile.py, compiled by the driver."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files

import numpy as np

from hotset import _core
from hotset.backends.vulkan.shapes import AttentionShape, DeviceShapes, attention_shape
from hotset.backends.vulkan.timings import Dispatch, DispatchTimings
from hotset.model.operations import Attention, Value

_LANES = 64  # lanes of a workgroup in elementwise kernels


@dataclass(frozen=True)
class _Shape:
    """The inputs of a kernel: its number of buffers, and its push constants in `struct` format."""

    n_buffers: int
    push: str

    @property
    def push_bytes(self) -> int:
        return struct.calcsize(f"<{self.push}")


KERNELS = {
    "attention": _Shape(13, "10I2f"),
    "candidates": _Shape(2, "3I"),
    "conv": _Shape(6, "6I"),
    "elementwise": _Shape(4, "6I4f"),
    "expert_sum": _Shape(4, "5I"),
    "group": _Shape(2, "5I"),
    "head_dot": _Shape(5, "6I"),
    "heads": _Shape(3, "8I"),
    "linear_few": _Shape(7, "13If7I"),
    "linear_many": _Shape(7, "13If7I"),
    "neurons": _Shape(3, "5If"),
    "norm": _Shape(5, "4If"),
    "probe": _Shape(1, ""),
    "quantize": _Shape(2, "2I"),
    "rotate": _Shape(3, "7I"),
    "rounded_few": _Shape(8, "13If7I"),
    "rounded_many": _Shape(7, "13If7I"),
    "route": _Shape(4, "8If"),
    "scan": _Shape(9, "16I"),
    "select": _Shape(3, "3I"),
    "slots": _Shape(4, "3I"),
    "store": _Shape(10, "11I"),
    "streams": _Shape(4, "10If"),
    "transposed": _Shape(7, "9I"),
}


_FUSED = 99  # the id of a constant: csrc/vulkan/shaders/common.glsl
_SPIRV = files("hotset.backends.vulkan").joinpath("spirv")


class VulkanKernels:
    """The kernels of a device, each compiled at its first use for a set of constants.

    A probe of the device (probe.comp) decides which native instructions they use; the bits are the same.
    is_native: kernels use integer dot products and half floats, which the probe found exact; Vulkan does not
    guarantee that. is_fused: fma() rounds once; otherwise kernels compute products and sums with their errors
    instead. shapes, timings: for programs recorded from now on, workgroup shapes of products, and the times
    of their dispatches; None: programs are not timed.
    """

    allows_native = True  # tests set it to False

    def __init__(self, device: _core.VulkanDevice, shapes: DeviceShapes | None = None) -> None:
        self.device, self.shapes = device, shapes or DeviceShapes()
        self.timings: DispatchTimings | None = None
        self.compiled: dict[tuple[object, ...], _core.VulkanKernel] = {}
        self.is_native, self.is_fused = device.has_integer_dots and self.allows_native, True
        as_native, self.is_fused = self._probed()
        self.is_native = self.is_native and as_native
        self.compiled.clear()

    def _probed(self) -> tuple[bool, bool]:
        """Return whether half floats and byte dot products are exact, and whether fma() rounds once."""
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

    def attention(self, op: Attention) -> AttentionShape:
        """Return the shape of a workgroup of an attention."""
        return attention_shape(op, self.device.max_lanes, self.device.shared_bytes)

    def get(self, name: str, constants: Sequence[int]) -> _core.VulkanKernel:
        """Return a kernel with these specialisation constants, numbered from 0."""
        key = name, *constants
        if key not in self.compiled:
            shape, own = KERNELS[name], _SPIRV.joinpath(f"{name}_native.spv")
            plain = _SPIRV.joinpath(f"{name}.spv")
            code = (own if self.is_native and own.is_file() else plain).read_bytes()
            self.compiled[key] = self.device.kernel(
                np.frombuffer(code, np.uint8),
                shape.n_buffers,
                shape.push_bytes,
                [*enumerate(constants), (_FUSED, int(self.is_fused))],
            )
        return self.compiled[key]


def shaders_digest() -> str:
    """Return the SHA-256 of sources.json, which covers the sources of all kernels."""
    return hashlib.sha256(_SPIRV.joinpath("sources.json").read_bytes()).hexdigest()


class Recorder:
    """A recorder of the dispatches of a program.

    operation: the name of the operation whose dispatches are added next.
    """

    def __init__(self, kernels: VulkanKernels) -> None:
        self.program = _core.VulkanProgram(kernels.device, kernels.timings is not None)
        self.dispatches: list[Dispatch] = []
        self.operation = ""
        self.rounded: set[Value] = set()  # whose rows were rounded by a dispatch of their own
        self.grouped: dict[int, Value] = {}  # the latest route whose pairs were grouped, by pairs per tile
        self._kernels = kernels

    def add(
        self,
        name: str,
        constants: Sequence[int],
        bindings: Sequence[_core.VulkanBinding],
        push: Sequence[float],
        groups: tuple[int, int, int],
        weight_bytes: int = 0,
    ) -> None:
        """Record one dispatch of `groups` workgroups. weight_bytes: of the matrix that it reads.

        Bindings that are missing at the end are not used; the first one replaces them.
        """
        kernel, packed = self._kernels.get(name, constants), struct.pack(f"<{KERNELS[name].push}", *push)
        spare = [bindings[0]] * (KERNELS[name].n_buffers - len(bindings))
        self.program.dispatch(kernel, [*bindings, *spare], packed, groups)
        self.dispatches.append(Dispatch(name, self.operation, groups, weight_bytes))

    def add_indirect(
        self,
        name: str,
        constants: Sequence[int],
        bindings: Sequence[_core.VulkanBinding],
        push: Sequence[float],
        groups: tuple[_core.VulkanBuffer, int],
    ) -> None:
        """Record one dispatch.

        groups: a buffer and an offset, where the host writes the number of workgroups before each run.
        """
        kernel, packed = self._kernels.get(name, constants), struct.pack(f"<{KERNELS[name].push}", *push)
        self.program.dispatch_indirect(kernel, list(bindings), packed, *groups)
        self.dispatches.append(Dispatch(name, self.operation, None, 0))


Record = Callable[[Recorder, int], None]  # records the dispatches of an operation for n rows


def by_values(width: int, n: int) -> tuple[int, int, int]:
    """Return the workgroups of an elementwise kernel for n rows."""
    return -(-width // _LANES), n, 1


def stride_of(value: Value) -> int:
    """Return the floats from one row of a value to the next, a multiple of 4: products read 4 at a time."""
    return -(-value.width // 4) * 4
