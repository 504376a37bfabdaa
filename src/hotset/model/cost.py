"""What a token costs: bytes read and floating-point operations, counted from the graph and the file.

Decoding reads every weight once per step and every visible key and value once per token, so bytes per token
over the measured read bandwidth is the ceiling that `bench` prints. What a sparse step leaves unread is
counted in sparsity/stats.py.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

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

KVType = Literal[
    "f16", "q8_0", "f32"
]  # how keys and values are stored; f32: reference backend and tests only

# Bytes and channels of one block of the cache: q8_0 shares a 2-byte scale among 32 channels.
KV_BLOCKS: dict[KVType, tuple[int, int]] = {"f32": (4, 1), "f16": (2, 1), "q8_0": (34, 32)}


def check_cache(op: Attention, kv_type: KVType) -> None:
    """Refuses (UnsupportedModelError) heads that blocks of the cache do not divide."""
    block = KV_BLOCKS[kv_type][1]
    if op.head_dim % block or op.head_dim_v % block:
        have = f"{op.head_dim}" if op.head_dim_v == op.head_dim else f"{op.head_dim} and {op.head_dim_v}"
        raise UnsupportedModelError(
            f"a {kv_type} cache needs heads of a multiple of {block} channels, and this model's have {have}; "
            "use an f16 cache"
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
        return sum(kv_bytes(op, kv_type) * op.n_visible(depth) for op in self._attentions)

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
    """Bytes that one token occupies in the cache of one layer."""
    n_bytes, n_channels = KV_BLOCKS[kv_type]
    return op.n_head_kv * (op.head_dim + op.head_dim_v) * n_bytes // n_channels
