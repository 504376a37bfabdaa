"""Workgroup shapes of products with quantised weights: which there are, and which one a device takes.

The bits of a product do not depend on its shape (csrc/vulkan/shaders/rounded.glsl has the order of sums). A
device begins with the defaults of its vendor and its subgroups; autotune.py measures the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hotset.backends.vulkan.devices import VulkanInfo
from hotset.formats.quants import GGMLType

_LARGE = 16384  # rows of a matrix that gives every part of a device work, whatever the rows of a workgroup
TOKENS_OF_FEW = 4  # of a workgroup, with more than one


class WorkgroupShape(NamedTuple):
    """Rows of a workgroup of rounded_few.comp, of which 32 are a multiple, and lanes of each: 8 or 16."""

    rows: int
    lanes: int


SHAPES = tuple(WorkgroupShape(*shape) for shape in ((16, 16), (32, 8), (8, 16), (16, 8), (4, 16), (8, 8)))
_16x16, _32x8, _8x16, _16x8, _4x16, _8x8 = SHAPES


@dataclass(frozen=True)
class ProductShapes:
    """How products with weights of a type are computed: the shapes for one token and for each few of several;
    those for matrices with 16,384 rows or more; and up to how many tokens a step is cut into a few at a time
    (rounded_few.comp), rather than into 32 (rounded_many.comp)."""

    one: WorkgroupShape = _16x16
    one_large: WorkgroupShape = _32x8
    few: WorkgroupShape = _16x16
    few_large: WorkgroupShape = _32x8
    most_few: int = 8

    def of(self, tokens: int, n_rows: int) -> WorkgroupShape:
        """That of a workgroup with so many tokens, of a matrix with n_rows."""
        if n_rows < _LARGE:
            return self.one if tokens == 1 else self.few
        return self.one_large if tokens == 1 else self.few_large


# What each field may be, the fields that matter most first.
CANDIDATES: Mapping[str, tuple[Any, ...]] = {
    "one": SHAPES, "one_large": SHAPES, "few": SHAPES, "most_few": (4, 8, 16, 24), "few_large": SHAPES,
}  # fmt: skip

_AMD, _INTEL = 0x1002, 0x8086
# By vendor and lanes of a subgroup. On AMD in 64 lanes (GCN, and RDNA by some drivers) a workgroup is one
# subgroup, which waits for no other. A core of Intel's has tens of threads, each with a subgroup: 256 lanes
# in subgroups of eight take 32 of them. None was measured on a GPU.
_DEFAULTS = {
    (_AMD, 64): ProductShapes(_4x16, _8x8, _4x16, _8x8),
    **{(_INTEL, lanes): ProductShapes(_8x16, _16x8, _8x16, _16x8) for lanes in (8, 16, 32)},
}


@dataclass(frozen=True)
class DeviceShapes:
    """Those of a device. tuned: of types for which they were measured."""

    default: ProductShapes = ProductShapes()
    tuned: Mapping[GGMLType, ProductShapes] = field(default_factory=dict)

    def of(self, type_: int) -> ProductShapes:
        """Of products with weights of a type."""
        return self.tuned.get(GGMLType(type_), self.default)


def default_shapes(info: VulkanInfo) -> ProductShapes:
    """What a device takes where nothing was measured."""
    return _DEFAULTS.get((info.vendor, info.subgroup), ProductShapes())
