"""What a token costs: bytes read and floating-point operations, counted from the graph and the file.

Decoding reads every weight once per step and every visible key and value once per token, so bytes per token
over the measured read bandwidth is the ceiling that `bench` prints. What a sparse step leaves unread is
counted in sparsity/stats.py.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Literal, assert_never

from hotset.errors import UnsupportedModelError
from hotset.formats.quants import GGMLType, row_bytes
from hotset.model.graph import (
    Activate,
    Add,
    Attention,
    Cutoff,
    DeltaNet,
    Embed,
    ExpertLinear,
    ExpertSum,
    Graph,
    Heads,
    LayerNorm,
    Linear,
    Mask,
    Multiply,
    Primitive,
    RMSNorm,
    Rotate,
    Route,
    Scale,
    SelectOutputs,
    ShortConv,
    SignScores,
    SoftCap,
    TransposedHeads,
    TransposedLinear,
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
        self._linear_flops = sum(
            2 * _inputs(op) * op.out.width
            for op in graph.primitives
            if isinstance(op, Linear | TransposedLinear | TransposedHeads | ExpertLinear | ExpertSum)
        )
        # Of one sequence, in all layers: what operations with a state leave to the next token.
        self.state_bytes = sum(4 * math.prod(op.state_shape) for op in graph.recurrent)
        self._weight_bytes: Counter[GGMLType] = Counter()
        self.token_cycle = 0
        self.expert_bytes: Counter[int] = Counter()
        for op in graph.primitives:
            for name, n_bytes in weights_read(op, tensors):
                self._weight_bytes[tensors[name].type] += n_bytes
                if isinstance(op, ExpertLinear | ExpertSum) and op.part == "ffn":
                    self.token_cycle += n_bytes
                    self.expert_bytes[op.layer] += n_bytes // op.n_used

    @property
    def weight_bytes(self) -> dict[GGMLType, int]:
        """Bytes of weights that decoding one token reads, by tensor type; the most first."""
        return dict(self._weight_bytes.most_common())

    @property
    def active_parameters(self) -> int:
        """Weights of matrices that a token is multiplied with."""
        return self._linear_flops // 2

    def kv_bytes_per_token(self, kv_type: KVType) -> int:
        """Bytes that one token occupies in the cache, over all layers."""
        return sum(_kv_bytes(op, kv_type) for op in self._attentions)

    def kv_bytes_read(self, depth: float, kv_type: KVType) -> float:
        """Bytes of keys and values that a token at `depth` reads (a mean depth need not be whole)."""
        return sum(_kv_bytes(op, kv_type) * _seen(op, depth) for op in self._attentions)

    def bytes_per_token(self, depth: float, kv_type: KVType, batch: int = 1) -> float:
        """Bytes that a token at `depth` reads where `batch` tokens of other sequences share the weights."""
        of_weights = self._weight_bytes.total() / batch
        return of_weights + self.kv_bytes_read(depth, kv_type) + self.state_bytes

    def flops_per_token(self, depth: float) -> float:
        """Multiplications and additions of the matrices and of attention; norms, signs and the like are left
        out.
        """
        attention = sum(
            2 * op.n_head * (op.head_dim + op.head_dim_v) * _seen(op, depth) for op in self._attentions
        )
        return self._linear_flops + attention


def weights_read(op: Primitive, tensors: Mapping[str, TensorInfo]) -> Iterator[tuple[str, int]]:
    """The tensors that an operation reads for one token, with the bytes of them that it reads."""
    match op:
        case Embed():  # a token's row, not the matrix
            info = tensors[op.weight]
            yield op.weight, row_bytes(info.type, info.shape[0])
        case Linear():  # its rows, of a fused tensor
            for name in (op.weight, op.bias):
                if name is not None:
                    info = tensors[name]
                    n_rows = math.prod(info.shape) // (op.x.width if name == op.weight else 1)
                    yield name, info.nbytes // n_rows * op.out.width
        case ExpertLinear() | ExpertSum():  # its experts' rows; which they are depends on the token
            for name in (*op.weights, *([op.bias] if op.bias else [])):
                info = tensors[name]
                stored = info.shape[0 if name == op.bias else 1]
                n_rows = op.n_rows if isinstance(op, ExpertLinear) else stored
                yield name, info.nbytes * n_rows // stored * op.n_used // op.n_expert
        case TransposedLinear():
            for name in (op.weight, op.scales, op.bias):
                if name is not None:
                    yield name, tensors[name].nbytes
        case LayerNorm() | SignScores():
            for name in (op.weight, op.bias):
                if name is not None:
                    yield name, tensors[name].nbytes
        case DeltaNet():
            for name in (op.rate, op.step):
                yield name, tensors[name].nbytes
        case Route():
            if op.bias is not None:
                yield op.bias, tensors[op.bias].nbytes
        case Attention():
            if op.sinks is not None:
                yield op.sinks, tensors[op.sinks].nbytes
        case RMSNorm() | TransposedHeads() | ShortConv():
            yield op.weight, tensors[op.weight].nbytes
        case (
            Rotate() | Heads() | Activate() | Multiply() | Add() | Scale() | SoftCap() | Mask() | Cutoff()
            | SelectOutputs()
        ):  # fmt: skip
            return
        case _:
            assert_never(op)


def _inputs(op: Linear | TransposedLinear | TransposedHeads | ExpertLinear | ExpertSum) -> int:
    """Weights that make one output."""
    return op.x.width // op.n_used if isinstance(op, ExpertLinear) and op.of_parts else op.x.width


def _kv_bytes(op: Attention, kv_type: KVType) -> int:
    n_bytes, n_channels = KV_BLOCKS[kv_type]
    return op.n_head_kv * (op.head_dim + op.head_dim_v) * n_bytes // n_channels


def _seen(op: Attention, depth: float) -> float:
    return min(depth + 1, op.window) if op.window else depth + 1
