"""What a token costs: bytes read and floating-point operations, counted from the graph and the file.

Decoding reads every weight once per step and every visible key and value once per token, so bytes per token
over the measured read bandwidth is the ceiling that `bench` prints. What a sparse step leaves unread is
counted in sparsity/stats.py.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

from hotset.errors import UnsupportedModelError
from hotset.formats.quants import GGMLType
from hotset.model.graph import Graph
from hotset.model.operations import (
    Attention,
    ExpertLinear,
    ExpertSum,
)

if TYPE_CHECKING:
    from hotset.formats.gguf import TensorInfo

# How keys and values are stored: both alike, or keys/values. f32: for comparisons; it has no mixes.
KVType = Literal[
    "f16", "q8_0", "q4_0", "f16/q8_0", "f16/q4_0", "q8_0/f16", "q8_0/q4_0", "q4_0/f16", "q4_0/q8_0", "f32"
]


class KVFormat(NamedTuple):
    """How keys, or values, are stored: blocks of n_channels channels of a token in n_bytes.

    bits: of a channel, without the float16 scale that a block of several has. rotated: what is stored is the
    Hadamard transform of the head (`hadamard`), which spreads outliers.
    """

    n_bytes: int
    n_channels: int
    bits: int
    rotated: bool = False


KV_FORMATS: dict[str, KVFormat] = {
    "f32": KVFormat(4, 1, 32),
    "f16": KVFormat(2, 1, 16),
    "q8_0": KVFormat(34, 32, 8),
    "q4_0": KVFormat(18, 32, 4, rotated=True),
}


def kv_names(kv_type: KVType) -> tuple[str, str]:
    """The formats of keys and of values."""
    keys, _, values = kv_type.partition("/")
    return keys, values or keys


def kv_formats(kv_type: KVType) -> tuple[KVFormat, KVFormat]:
    """Of keys and of values."""
    keys, values = kv_names(kv_type)
    return KV_FORMATS[keys], KV_FORMATS[values]


def check_cache(op: Attention, kv_type: KVType) -> None:
    """Refuses (UnsupportedModelError) heads that blocks of the cache do not divide."""
    sides = zip(("keys", "values"), kv_names(kv_type), (op.head_dim, op.head_dim_v), strict=True)
    for side, name, dim in sides:
        if dim % (n_channels := KV_FORMATS[name].n_channels):
            raise UnsupportedModelError(
                f"a {name} cache needs heads of a multiple of {n_channels} channels, and the {side} of this "
                f"model have {dim}; store them as f16"
            )


class Cost:
    """The costs of one model.

    Depth is the number of tokens in the cache before the token in question, which sees them and itself, or
    as many as a layer's window lets it. expert_bytes: layer → bytes of one of its experts.
    token_cycle: bytes of the experts that a token has, in all layers. state_bytes: of the recurrent state of
    one sequence, which each of its tokens reads.
    """

    def __init__(self, graph: Graph, tensors: Mapping[str, TensorInfo]) -> None:
        self._attentions = [op for op in graph.ops if isinstance(op, Attention)]
        self._linear_flops = 2 * sum(op.multiplications for op in graph.primitives)
        # Of one sequence, in all layers: what operations with a state leave to the next token.
        self.state_bytes = sum(4 * math.prod(op.state_shape) for op in graph.recurrent)
        self._weight_bytes: Counter[GGMLType] = Counter()
        self.token_cycle = 0
        self.expert_bytes: Counter[int] = Counter()
        for op in graph.primitives:
            for name, n_bytes in op.bytes_read(tensors):
                self._weight_bytes[tensors[name].type] += n_bytes
            if isinstance(op, ExpertLinear | ExpertSum) and op.part == "ffn":
                self.expert_bytes[op.layer] += (n_bytes := op.expert_bytes(tensors))
                self.token_cycle += op.n_used * n_bytes

    @property
    def weight_bytes(self) -> dict[GGMLType, int]:
        """Bytes of weights that decoding one token reads, by tensor type; the most first."""
        return dict(self._weight_bytes.most_common())

    @property
    def active_parameters(self) -> int:
        """Weights of matrices that a token is multiplied with."""
        return self._linear_flops // 2

    def kv_bytes_per_token(self, kv_type: KVType) -> int:
        """Bytes that one token occupies in the cache, over all layers, which in an encoder share theirs."""
        own = [op for op in self._attentions if op.source is None]
        return sum(kv_bytes(op, kv_type) for op in own if op.causal or op is own[0])

    def kv_bytes_read(self, depth: float, kv_type: KVType) -> float:
        """Bytes of keys and values that a token at `depth` reads (a mean depth need not be whole)."""
        return sum(_key_bytes(op, kv_type) * op.n_visible(depth) for op in self._attentions)

    def bytes_per_token(self, depth: float, kv_type: KVType, batch: int = 1) -> float:
        """Bytes that a token at `depth` reads where `batch` tokens of other sequences share the weights."""
        of_weights = self._weight_bytes.total() / batch
        return of_weights + self.kv_bytes_read(depth, kv_type) + self.state_bytes

    def flops_per_token(self, depth: float) -> float:
        """Multiplications and additions of the matrices and of attention; norms, signs and the like are left
        out.
        """
        attention = sum(
            2 * op.n_head * (op.head_dim + op.head_dim_v) * op.n_visible(depth) for op in self._attentions
        )
        return self._linear_flops + attention


def kv_bytes(op: Attention, kv_type: KVType) -> int:
    """Bytes that one token occupies in the cache of one layer. Blocks have as much room as tokens."""
    return _key_bytes(op, kv_type) * (1 if op.blocks is None else 2)


def _key_bytes(op: Attention, kv_type: KVType) -> int:
    """Of one key and value of each head."""
    widths = op.n_head_kv * op.head_dim, op.n_head_kv * op.head_dim_v
    return sum(
        width * format.n_bytes // format.n_channels
        for format, width in zip(kv_formats(kv_type), widths, strict=True)
    )
