"""The cost of a token: bytes read and floating-point operations, counted from the graph and the file.

Decoding reads every weight once per step, and every visible key and value once per token. So the measured
read bandwidth divided by the bytes per token is the ceiling that `bench` prints. sparsity/stats.py counts the
bytes that a sparse step skips.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from hotset.errors import UnsupportedModelError
from hotset.formats.quants import GGMLType
from hotset.load_parameters import KVType
from hotset.model.graph import Graph
from hotset.model.operations import (
    Attention,
    ExpertLinear,
    ExpertSum,
    Indexer,
)

if TYPE_CHECKING:
    from hotset.formats.gguf import TensorInfo


KV_BLOCK_SIZE = 64  # tokens per KV block
_KEYS_AT_ONCE = 16  # index keys of a KV block are padded to a multiple of this


class KVFormat(NamedTuple):
    """The storage of keys, or of values: each block of n_channels channels of a token takes n_bytes.

    bits: per channel, without the block's float16 scale. rotated: the Hadamard transform of the head
    (`hadamard`), which spreads outliers, is stored.
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
    """Return the names of the formats of keys and of values."""
    keys, _, values = kv_type.partition("/")
    return keys, values or keys


def kv_formats(kv_type: KVType) -> tuple[KVFormat, KVFormat]:
    """Return the formats of keys and of values."""
    keys, values = kv_names(kv_type)
    return KV_FORMATS[keys], KV_FORMATS[values]


def check_cache(op: Attention | Indexer, kv_type: KVType) -> None:
    """Raise UnsupportedModelError if the heads are not a multiple of the format's block size."""
    of_keys, of_values = kv_names(kv_type)
    if isinstance(op, Indexer):
        sides = [("index keys", of_keys, op.head_dim)]
    else:
        sides = [("keys", of_keys, op.head_dim), ("values", of_values, op.head_dim_v)]
    for side, name, dim in sides:
        if dim % (n_channels := KV_FORMATS[name].n_channels):
            raise UnsupportedModelError(
                f"a {name} cache needs heads of a multiple of {n_channels} channels, but the {side} of this "
                f"model have {dim}; store them as f16"
            )


class Cost:
    """The costs of one model.

    Depth is the number of tokens in the cache before a token, which attends to them and itself, within its
    layer's window. expert_bytes: layer → bytes of one of its experts. token_cycle: bytes of the experts of
    one token, in all layers. state_bytes: of the recurrent states of one sequence, in all layers, which each
    token reads.
    """

    def __init__(self, graph: Graph, tensors: Mapping[str, TensorInfo]) -> None:
        self._attentions = [op for op in graph.ops if isinstance(op, Attention)]
        self._indexers = [op for op in graph.ops if isinstance(op, Indexer)]
        self._linear_flops = 2 * sum(op.multiplications for op in graph.primitives)
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
        """Return the bytes of weights that decoding one token reads, by tensor type, largest first."""
        return dict(self._weight_bytes.most_common())

    @property
    def active_parameters(self) -> int:
        """Return the number of matrix elements that one token is multiplied with."""
        return self._linear_flops // 2

    def kv_bytes_per_token(self, kv_type: KVType) -> int:
        """Return the bytes of a token in the cache of all layers. An encoder's layers share one cache."""
        own = [op for op in self._attentions if op.source is None]
        of_keys = sum(kv_bytes(op, kv_type) for op in own if op.causal or op is own[0])
        return of_keys + sum(index_bytes(op, kv_type) for op in self._indexers)

    def kv_bytes_read(self, depth: float, kv_type: KVType) -> float:
        """Return the bytes of keys, values and index keys that a token at `depth` (a mean, perhaps) reads."""
        return sum(_key_bytes(op, kv_type) * op.n_visible(depth) for op in self._attentions) + sum(
            index_bytes(op, kv_type) * (depth + 1) for op in self._indexers if depth >= op.n_ctx
        )

    def bytes_per_token(self, depth: float, kv_type: KVType, batch: int = 1) -> float:
        """Return the bytes that a token at `depth` reads if `batch` sequences share the weights."""
        of_weights = self._weight_bytes.total() / batch
        return of_weights + self.kv_bytes_read(depth, kv_type) + self.state_bytes

    def flops_per_token(self, depth: float) -> float:
        """Return the multiplications and additions of matrices and attention, without norms etc."""
        attention = sum(
            2 * op.n_head * (op.head_dim + op.head_dim_v) * op.n_visible(depth) for op in self._attentions
        )
        scores = sum(
            2 * op.n_head * op.head_dim * ((depth + 1) // op.size)
            for op in self._indexers
            if depth >= op.n_ctx
        )
        return self._linear_flops + attention + scores


def kv_bytes(op: Attention, kv_type: KVType) -> int:
    """Return the bytes of a token in the cache of one layer. Blocks of keys get as much room as tokens."""
    return _key_bytes(op, kv_type) * (1 if op.blocks is None else 2)


def index_slots(size: int) -> int:
    """Return how many index keys a KV block has room for, one for each block of `size` tokens."""
    n_keys = -(-KV_BLOCK_SIZE // size)
    return -(-n_keys // _KEYS_AT_ONCE) * _KEYS_AT_ONCE


def index_bytes(op: Indexer, kv_type: KVType) -> int:
    """Return the bytes of a token in the cache of one layer's index keys."""
    format, _ = kv_formats(kv_type)
    n_bytes = op.head_dim * format.n_bytes // format.n_channels
    return -(-n_bytes * index_slots(op.size) // KV_BLOCK_SIZE)


def _key_bytes(op: Attention, kv_type: KVType) -> int:
    """Return the bytes of one token's keys and values in one layer."""
    widths = op.n_head_kv * op.head_dim, op.n_head_kv * op.head_dim_v
    return sum(
        width * format.n_bytes // format.n_channels
        for format, width in zip(kv_formats(kv_type), widths, strict=True)
    )
