"""Workgroup shapes for attention, and for products with quantised weights: the candidates and the defaults.

The bits of a product do not depend on its shape; csrc/vulkan/shaders/rounded.glsl defines the order of sums.
A device begins with the defaults for its vendor and subgroup size; autotune.py measures the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hotset.backends.vulkan.devices import VulkanInfo
from hotset.formats.quants import GGMLType
from hotset.model.operations import Attention

LARGE = 16384  # rows of a matrix that keeps a whole device busy with any number of rows per workgroup
TOKENS_OF_FEW = 4  # tokens of a workgroup, for steps of more than one token


class WorkgroupShape(NamedTuple):
    """The shape of a workgroup of rounded_few.comp: its rows, which divide 32, and lanes per row, 8 or 16."""

    rows: int
    lanes: int


SHAPES = tuple(WorkgroupShape(*shape) for shape in ((16, 16), (32, 8), (8, 16), (16, 8), (4, 16), (8, 8)))
_16x16, _32x8, _8x16, _16x8, _4x16, _8x8 = SHAPES

# For gate and up, of which a workgroup computes 32 rows each. With more lanes, AMD's compiler would take more
# registers, and fewer workgroups would run at a time.
GATED = _16x16


class AttentionShape(NamedTuple):
    """The shape of a workgroup of attention.comp.

    heads: the heads that share keys and values, with 64 lanes each. vectors: the size of their shared memory,
    in units of 16 bytes, a multiple of 512; at least two per lane.
    """

    heads: int
    vectors: int


_LANES_OF_HEAD = 64
_VECTORS = 512
_MOST_VECTORS = 1024  # a KV block's keys of 128 channels in F16; more would stay empty
_SHARED_BYTES = (
    17 * _LANES_OF_HEAD
)  # of a head: numbers of its lanes, weights, and the rounding of its result


def attention_shape(op: Attention, max_lanes: int, shared_bytes: int) -> AttentionShape:
    """Return the shape with the most heads that a device's lanes and bytes of shared memory allow.

    Each lane has room for two vectors, so that its loads overlap. A workgroup therefore has at most 8 heads.
    """
    per_head = _SHARED_BYTES + 4 * (max(op.head_dim, op.head_dim_v) + 16)
    of_group = op.n_head // op.n_head_kv

    def vectors_of(heads: int) -> int:
        return _VECTORS * -(-2 * _LANES_OF_HEAD * heads // _VECTORS)

    def fits(heads: int) -> bool:
        lanes, vectors = _LANES_OF_HEAD * heads, vectors_of(heads)
        needed = heads * per_head + 16 * lanes * -(-vectors // lanes) + 64
        return (
            of_group % heads == 0
            and vectors <= _MOST_VECTORS
            and lanes <= max_lanes
            and needed <= shared_bytes
        )

    heads = max((n for n in range(2, of_group + 1) if fits(n)), default=1)
    return AttentionShape(heads, vectors_of(heads))


@dataclass(frozen=True)
class ProductShapes:
    """The workgroup shapes of products with weights of one type.

    one: for a single token. few: for up to TOKENS_OF_FEW tokens at a time. one_large, few_large: the same for
    matrices with at least 16,384 rows. most_few: steps with at most this many tokens use rounded_few.comp;
    longer ones use rounded_many.comp, with 32 tokens at a time. ahead, few_ahead: blocks that a lane loads
    at a time, for a single token and for several.
    """

    one: WorkgroupShape = _16x16
    one_large: WorkgroupShape = _32x8
    few: WorkgroupShape = _16x16
    few_large: WorkgroupShape = _32x8
    most_few: int = 8
    ahead: int = 4
    few_ahead: int = 2

    def of(self, tokens: int, n_rows: int) -> WorkgroupShape:
        """Return the shape for `tokens` tokens at a time and a matrix with n_rows."""
        if n_rows < LARGE:
            return self.one if tokens == 1 else self.few
        return self.one_large if tokens == 1 else self.few_large

    def ahead_of(self, tokens: int) -> int:
        """Return the blocks that a lane reads at a time, for `tokens` tokens."""
        return self.ahead if tokens == 1 else self.few_ahead


# The candidates of each field; the fields that matter most come first.
CANDIDATES: Mapping[str, tuple[Any, ...]] = {
    "one": SHAPES, "ahead": (4, 2, 8), "one_large": SHAPES, "few": SHAPES, "few_ahead": (2, 4),
    "most_few": (4, 8, 16, 24), "few_large": SHAPES,
}  # fmt: skip

_AMD, _INTEL = 0x1002, 0x8086
# By vendor and lanes of a subgroup. On AMD with 64 lanes (GCN, and RDNA with some drivers) a workgroup is one
# subgroup, which waits for no other. An Intel core has tens of threads, each with a subgroup: 256 lanes in
# subgroups of eight occupy 32 threads. These defaults were not measured on a GPU.
_DEFAULTS = {
    (_AMD, 64): ProductShapes(_4x16, _8x8, _4x16, _8x8),
    **{(_INTEL, lanes): ProductShapes(_8x16, _16x8, _8x16, _16x8) for lanes in (8, 16, 32)},
}


@dataclass(frozen=True)
class DeviceShapes:
    """The shapes of a device. tuned: the shapes of the measured types."""

    default: ProductShapes = ProductShapes()
    tuned: Mapping[GGMLType, ProductShapes] = field(default_factory=dict)

    def of(self, type_: int) -> ProductShapes:
        """Return the shapes of products with weights of a type."""
        return self.tuned.get(GGMLType(type_), self.default)


def default_shapes(info: VulkanInfo) -> ProductShapes:
    """Return the shapes that a device uses until they are measured."""
    return _DEFAULTS.get((info.vendor, info.subgroup), ProductShapes())
