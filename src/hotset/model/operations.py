"""The operations that describe a forward step. Each record describes itself.

Every value is a float32 matrix [n_tokens, width]; weights have the names of the GGUF file. Each value has a
name such as "blk.3.ffn_norm" and can be requested as a *tap* of a step. Names are only for people and taps:
an operation's fields define it.

A field's type gives its role: a `Value` is an input (`out` is the result), a `Matrix`, `Vector` or `Rows` is
a tensor of the file. So a record knows its inputs, how many bytes it reads, and how much it computes
(`inputs`, `weights_read`, `bytes_read`, `multiplications`). Cost, budgets, streaming and fusion need no list
of operations.

The feed-forward network of a layer is one operation, `Ffn`: all code that decides about neurons (reads,
skips, counts or places them) uses this record. Its `primitives` define it in terms of the other operations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, assert_never, get_args, get_type_hints

from hotset.model.thresholds import ThresholdName

if TYPE_CHECKING:
    from hotset.formats.gguf import TensorInfo

ActivationKind = Literal[
    "silu", "gelu", "gelu_tanh", "relu", "relu2", "fatrelu", "sigmoid", "clamped_silu", "clamped_plus_one",
    "xielu", "exp", "softplus", "capped_silu", "clamp",
]  # fmt: skip
RopeKind = Literal["norm", "neox"]  # norm: pairs (2i, 2i+1); neox: pairs (i, i + n_rot/2)
Scoring = Literal["softmax", "sigmoid", "softmax_chosen", "sqrt_softplus"]  # of experts; see Route
Part = Literal["predictor", "ffn", "attention", "other"]
Groups = Literal["none", "only", "also", "ahead"]  # the tokens that a group adds; see Attention

PARTS: tuple[Part, ...] = ("predictor", "ffn", "attention", "other")  # for statistics
SHIFT = 1.0, -1.0  # weights of a token shift, for every channel (see ShortConv)
NO_LAYER = -1  # layer of operations before the first layer and after the last one


@dataclass(frozen=True)
class Value:
    """An intermediate value of the step, float32 [n_tokens, width]."""

    id: int
    width: int
    name: str


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding of the first `n_rot` channels of each head.

    angle(pos, i) = pos * freq[i]; cos and sin are multiplied by `magnitude` (YaRN's attention factor). `freq`
    holds n_rot/2 float64 frequencies, already scaled. every: positions are rounded down to a multiple of it,
    so that a block of tokens is rotated like its first token. axes: for each frequency, the column of
    Batch.rotary with its position (M-RoPE, rows and columns of an image); None, or a batch without `rotary`:
    the token's position.
    """

    kind: RopeKind
    n_rot: int
    freq: tuple[float, ...]
    magnitude: float = 1.0
    every: int = 1
    axes: tuple[int, ...] | None = None


def has_zeros(kind: ActivationKind) -> bool:
    """Return whether an activation yields exact zeros, so that such neurons can be skipped."""
    return kind in ("relu", "relu2", "fatrelu")


@dataclass(frozen=True)
class XIELU:
    """Parameters of xIELU (arXiv 2411.13010).

    f(x) is positive * x^2 + linear * x for x > 0, and negative * (e^min(x, eps) - 1 - x) + linear * x
    otherwise.
    """

    positive: float
    negative: float
    linear: float
    eps: float


WeightKind = Literal["matrix", "vector", "rows"]

# Names of tensors. A matrix is read in its stored form when the operation runs; a vector is decoded to
# float32 when a plan is made; each token reads one of the rows.
Matrix = Annotated[str, "matrix"]
Vector = Annotated[str, "vector"]
Rows = Annotated[str, "rows"]


@dataclass(frozen=True)
class Weight:
    """A tensor that an operation reads."""

    name: str
    kind: WeightKind


def _fields(operation: type) -> tuple[tuple[str, ...], tuple[tuple[str, WeightKind], ...]]:
    """Return the names of an operation's input fields, and of the fields that name tensors."""
    inputs, weights = [], []
    for name, hint in get_type_hints(operation, include_extras=True).items():
        inner = [hint, *get_args(hint)]
        kind = next((part.__metadata__[0] for part in inner if hasattr(part, "__metadata__")), None)
        if kind is not None:
            weights.append((name, kind))
        elif name != "out" and Value in inner:
            inputs.append(name)
    return tuple(inputs), tuple(weights)


@dataclass(frozen=True, kw_only=True)
class Operation:
    """The common part of operations. layer: of the model, or NO_LAYER. part: of the layer it belongs to."""

    layer: int = NO_LAYER
    part: Part = "other"

    mixes_tokens: ClassVar[bool] = False  # whether a token's result depends on other tokens
    _inputs: ClassVar[tuple[str, ...]]  # names of fields, from `_fields`
    _weights: ClassVar[tuple[tuple[str, WeightKind], ...]]

    def __init_subclass__(cls) -> None:
        cls._inputs, cls._weights = _fields(cls)

    @property
    def inputs(self) -> tuple[Value, ...]:
        """Return the values that it reads."""
        found = (getattr(self, name) for name in self._inputs)
        return tuple(value for value in found if value is not None)

    @property
    def weights_read(self) -> tuple[Weight, ...]:
        """Return the tensors that it reads, one entry each."""
        found = []
        for field, kind in self._weights:
            names = getattr(self, field)
            found += [Weight(name, kind) for name in ((names,) if isinstance(names, str) else names or ())]
        return tuple(found)

    @property
    def matrices(self) -> tuple[str, ...]:
        """Return the tensors that it reads in their stored form, each time it runs."""
        return tuple(weight.name for weight in self.weights_read if weight.kind == "matrix")

    def bytes_read(self, tensors: Mapping[str, TensorInfo]) -> Iterator[tuple[str, int]]:
        """Yield the tensors that it reads for one token, and how many bytes of each."""
        for weight in self.weights_read:
            yield weight.name, self.bytes_of(weight, tensors[weight.name])

    def bytes_of(self, weight: Weight, info: TensorInfo) -> int:
        """Return the bytes of a tensor that one token reads."""
        if weight.kind == "rows":
            return info.row_bytes
        return info.nbytes

    def matrix_bytes(self, tensors: Mapping[str, TensorInfo]) -> int:
        """Return the bytes of its matrices that one token reads."""
        read = (weight for weight in self.weights_read if weight.kind == "matrix")
        return sum(self.bytes_of(weight, tensors[weight.name]) for weight in read)

    @property
    def multiplications(self) -> int:
        """Return the multiplications by weights for one token."""
        return 0


@dataclass(frozen=True)
class Embed(Operation):
    """out[t] = row tokens[t] of `weight`.

    For learned positions it is row positions[t] + first_row, for token types row 0: the type of a text's
    first part. image_parts: rows of images (Batch.image_rows) are this many times as wide, and the first
    of these parts replaces their tokens' rows (see AddImage); 0: they replace no rows.
    """

    out: Value
    weight: Rows
    of: Literal["token", "position", "type"] = "token"
    first_row: int = 0
    image_parts: int = 0


@dataclass(frozen=True)
class MixRows(Operation):
    """out[t] = the sum of n rows of `weight`, each times its share, added in order from 0.

    at: [n_tokens, 2 * n], the numbers of the rows, then their shares. A number outside the table means row 0.
    """

    out: Value
    at: Value
    weight: Rows

    def bytes_of(self, weight: Weight, info: TensorInfo) -> int:
        return self.at.width // 2 * super().bytes_of(weight, info)

    @property
    def multiplications(self) -> int:
        return self.at.width // 2 * self.out.width


@dataclass(frozen=True)
class Clip(Operation):
    """out = x, at least `low` and at most `high`, which hold one number each."""

    out: Value
    x: Value
    low: Vector
    high: Vector


@dataclass(frozen=True)
class AddImage(Operation):
    """out = x + a part of the token's image row (Batch.image_rows), or x for tokens outside images.

    Image rows are n_parts times as wide as x; index: of the part that is added, from 0 (DeepStack, arXiv
    2406.04334).
    """

    out: Value
    x: Value
    index: int
    n_parts: int


@dataclass(frozen=True)
class NgramEmbed(Operation):
    """Rows of `weight` for the n-grams that end with a token, side by side.

    There are n_heads rows for the token and the one before it, n_heads for three tokens, and so on, up to n =
    len(multipliers) tokens. With t_0 the token, t_1 the one before it, ..., the mix of n tokens is t_0 *
    multipliers[0] xor t_1 * multipliers[1] xor ..., and the row of head h = (n - 2) * n_heads + i is mix %
    sizes[h] + offsets[h]. Tokens before the sequence's first count as `eos`, and so do tokens before an
    earlier eos. State: the last n - 1 tokens plus 1, oldest first; 0: no token.
    """

    out: Value
    weight: Rows
    multipliers: tuple[int, ...]
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    eos: int

    mixes_tokens: ClassVar[bool] = True

    @property
    def n_heads(self) -> int:
        """Return the heads of the n-grams of one length."""
        return len(self.sizes) // (len(self.multipliers) - 1)

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Return the shape of the state that a sequence keeps, in float32: token ids are below 2^24."""
        return (len(self.multipliers) - 1,)

    def bytes_of(self, _: Weight, info: TensorInfo) -> int:
        return info.row_bytes * len(self.sizes)


@dataclass(frozen=True)
class RMSNorm(Operation):
    """out = x / sqrt(mean(x^2) + eps) * weight, over each of `n_head` equal parts of the width."""

    out: Value
    x: Value
    weight: Vector
    eps: float
    n_head: int = 1


@dataclass(frozen=True)
class UnitNorm(Operation):
    """out = x / sqrt(mean(x^2) + eps), over each of `n_head` equal parts of the width: RMSNorm of ones."""

    out: Value
    x: Value
    eps: float
    n_head: int


@dataclass(frozen=True)
class LayerNorm(Operation):
    """out = (x - mean) / sqrt(var + eps) * weight + bias; weight None: ones.

    Mean and variance are computed per part, of `n_head` equal parts; weight and bias have the full width.
    """

    out: Value
    x: Value
    weight: Vector | None
    bias: Vector | None
    eps: float
    n_head: int = 1


@dataclass(frozen=True)
class Linear(Operation):
    """out = x @ weight.T + bias; weight is [out.width, x.width] (GGUF: ne0 = x.width, ne1 = out.width).

    Several products may share a tensor; each has the rows [first_row, first_row + out.width) of weight and
    bias. input_major: a copy of the whole weight in this layout (formats/channels.py), with which channels
    whose input is zero need not be read.
    """

    out: Value
    x: Value
    weight: Matrix
    bias: Vector | None = None
    first_row: int = 0
    input_major: str | None = None

    @property
    def multiplications(self) -> int:
        return self.x.width * self.out.width

    def bytes_of(self, weight: Weight, info: TensorInfo) -> int:
        n_rows = math.prod(info.shape) // (self.x.width if weight.name == self.weight else 1)
        return info.nbytes // n_rows * self.out.width


@dataclass(frozen=True)
class TransposedLinear(Operation):
    """out = x @ weight + bias; weight is [x.width, out.width]: row i is the contribution of input i.

    It is the neuron-major down projection of a sparse FFN. An input of zero contributes nothing, whether or
    not its row is read: the sums of float32 inputs times decoded weights have one fixed order
    (csrc/ops/axpy.cpp). With `scales` the weight is stored as planes (formats/planes.py): codes per neuron,
    scales per 32 neurons.
    """

    out: Value
    x: Value
    weight: Matrix
    bias: Vector | None = None
    scales: Matrix | None = None

    @property
    def multiplications(self) -> int:
        return self.x.width * self.out.width


@dataclass(frozen=True)
class LowRank(Operation):
    """The contribution of adapters (LoRA, arXiv 2106.09685) to the product y of x with a matrix.

        out = y + (x @ a.T * scale) @ b.T

    with a [rank, x.width] and b [out.width, rank] of each adapter of the token's sequence
    (Batch.adapter_scales), in the order of AdapterSet. scale: float32, the sequence's scale times the
    adapter's own for this matrix. Everything is float32, and the sum is rounded after each adapter; a token
    without adapters keeps y.

    matrix: the adapted tensor (low_rank.adapted_name). first_row: first row of b, as in Linear.
    """

    out: Value
    x: Value
    y: Value
    matrix: str
    first_row: int = 0


@dataclass(frozen=True)
class Rotate(Operation):
    """Rotary embedding of x = [n_head, head_dim] at each token's position, of channels from `first` on."""

    out: Value
    x: Value
    n_head: int
    head_dim: int
    rope: Rope
    first: int = 0


@dataclass(frozen=True)
class PositionGain(Operation):
    """out = 1 + beta * ln(1 + floor(position / length)), one number for each token (model/rope.py)."""

    out: Value
    beta: float
    length: int


@dataclass(frozen=True)
class Heads(Operation):
    """Some channels of each head of x, followed by `shared`, the same for all heads, if given.

    x: [n_head, x.width / n_head]; out: [n_head, count + shared.width], with the channels [first, first +
    count) of x.
    """

    out: Value
    x: Value
    n_head: int
    first: int = 0
    shared: Value | None = None

    @property
    def count(self) -> int:
        """Return how many channels of x each head of out has."""
        return self.out.width // self.n_head - (0 if self.shared is None else self.shared.width)


@dataclass(frozen=True)
class TransposedHeads(Operation):
    """The product of x with each head's matrix, side by side; weight: [n_head, x.width, out.width / n_head].

    For keys from one latent vector, in the layout of llama.cpp's converter: a row per input, because
    llama.cpp multiplies queries with it. The sum runs over the inputs in order (csrc/ops/heads.cpp).
    """

    out: Value
    x: Value
    weight: Matrix
    n_head: int

    @property
    def multiplications(self) -> int:
        return self.x.width * self.out.width


@dataclass(frozen=True)
class KeyBias:
    """The bias that all keys of a layer contain, each rotated to its position.

    tensor: its name. first: its first number there. rope: of the keys; None: they are not rotated.
    """

    tensor: str
    first: int
    rope: Rope | None


@dataclass(frozen=True)
class Attention(Operation):
    """Attention over the KV cache of its layer; stores k and v of the batch first.

    q: [n_head, head_dim]; k: [n_head_kv, head_dim]; v: [n_head_kv, head_dim_v]; out: [n_head, head_dim_v].
    Scores are `scale` times q · k; `softcap` > 0 makes them softcap * tanh(score / softcap).
    causal: a token attends to itself and all tokens before it, or with `window` > 0 to the window - 1 before
    it. Otherwise it attends to all tokens of its sequence, which are in one batch, or those at most window /
    2 away. first_seen: the first position with keys and values; no batch has a causal token before it.
    sinks: a score per head that takes part in its softmax, with a value of zero. source: the layer that
    stored the keys and values; None: this one. slopes: per head, the reduction of a score per token of
    distance (ALiBi, arXiv 2108.12409); None: none.
    blocks: as wide as k. A token also attends, regardless of the window, to the row of `blocks` at the last
    token of each complete block of block_size tokens from position 0 on. It is both key and value, and also
    stored.
    groups: "only": a token sees its group (Batch.groups) instead of the tokens that `causal` and `window`
    name; "also": in addition to them; "ahead": in addition, but only the tokens after it; "none": groups do
    not count.
    chosen: numbers of the blocks of chosen_size tokens that an Indexer chose. A token attends to the tokens
    of these blocks, and to those after the last complete block. With `blocks` it attends to its window, and
    of the compressed blocks only to the chosen ones. None: no block is left out.
    key_bias: what all keys contain, or None. A q4_0 cache leaves most of it out (rope.bias_of_keys), and
    attention adds the product of the query with that part to each score.
    """

    out: Value
    q: Value
    k: Value
    v: Value
    n_head: int
    n_head_kv: int
    head_dim: int
    head_dim_v: int
    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: Vector | None = None
    source: int | None = None
    slopes: tuple[float, ...] | None = None
    causal: bool = True
    first_seen: int = 0
    blocks: Value | None = None
    block_size: int = 0
    key_bias: KeyBias | None = None
    groups: Groups = "none"
    chosen: Value | None = None
    chosen_size: int = 1

    mixes_tokens: ClassVar[bool] = True

    @property
    def cache_layer(self) -> int:
        """Return the layer whose cache it reads."""
        return self.layer if self.source is None else self.source

    def n_visible(self, depth: float) -> float:
        """Return how many tokens a token attends to, itself included, with `depth` tokens before it."""
        if not self.causal:
            return min(depth + 1, self.window // 2 * 2 + 1) if self.window else depth + 1
        n_blocks = (depth + 1) // self.block_size if self.block_size else 0
        n_tokens = min(depth + 1, self.window) if self.window else depth + 1
        if self.chosen is None:
            return n_blocks + n_tokens
        if self.blocks is not None:
            return min(n_blocks, self.chosen.width) + n_tokens
        most = self.chosen.width * self.chosen_size
        return min(n_tokens, most + (depth + 1) % self.chosen_size)


@dataclass(frozen=True)
class Indexer(Operation):
    """The blocks of tokens that a token attends to (DeepSeek Sparse Attention, arXiv 2512.02556).

    Blocks have `size` tokens from position 0 on. q: [n_head, head_dim]; k: [head_dim], the key of a block at
    its last token, which is stored first; weights: [n_head], None: ones. The score of a block is the sum over
    the heads of weight * max(0, q · key), in order. A token chooses among the complete blocks up to itself.
    out: the numbers of the out.width blocks with the highest scores, rising, and then -1 if there are fewer
    blocks. The earlier of equal scores wins. A score that is NaN is lower than all others.
    """

    out: Value
    q: Value
    k: Value
    weights: Value | None
    n_head: int
    head_dim: int
    size: int = 1

    mixes_tokens: ClassVar[bool] = True

    @property
    def n_ctx(self) -> int:
        """Return the longest context in which every block is chosen."""
        return whole_context(self.out.width, self.size)


def whole_context(top_k: int, size: int) -> int:
    """Return the longest context with at most top_k complete blocks of `size` tokens."""
    return (top_k + 1) * size - 1


@dataclass(frozen=True)
class ShortConv(Operation):
    """A causal convolution over the tokens of a sequence, per channel.

    out[t] = sum of weight[:, j] * x[t - (kernel - 1 - j) * dilation] for j = 0, 1, ..., each product rounded
    before it is added, and then bias; x is 0 before a sequence's first token. weight: [width, kernel] (GGUF:
    ne0 = kernel); None: 1 and -1, so that out is the previous x minus this one (RWKV's token shift). State:
    the last (kernel - 1) * dilation inputs, oldest first.
    """

    out: Value
    x: Value
    weight: Vector | None
    kernel: int
    bias: Vector | None = None
    dilation: int = 1

    mixes_tokens: ClassVar[bool] = True

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Return the shape of the state that a sequence keeps, in float32."""
        return (self.kernel - 1) * self.dilation, self.x.width


@dataclass(frozen=True)
class DeltaNet(Operation):
    """The gated delta rule (arXiv 2412.06464): linear attention through a matrix S per head, token by token.

    x: queries and keys, [n_head_k, dim_k] each, then values [n_head, dim_v]; alpha, beta: [n_head]; out:
    [n_head, dim_v]. Queries q and keys k are normalised as x / sqrt(sum(x^2) + 1e-6), and q is also divided
    by the root of dim_k. With the vectors `rate` and `step`, per head:
    S *= exp(rate * softplus(alpha + step)); S += k * (sigmoid(beta) * (v - S^T k))^T; out = S^T q.
    Value head h uses the query and key of head h // (n_head / n_head_k), or (tiled) h % n_head_k. If alpha
    and step are [n_head, dim_k], each row of S has its own decay (Kimi Delta Attention, arXiv 2510.26692).
    State: S of each head.
    """

    out: Value
    x: Value
    alpha: Value
    beta: Value
    rate: Vector
    step: Vector
    n_head: int
    n_head_k: int
    dim_k: int
    dim_v: int
    tiled: bool

    mixes_tokens: ClassVar[bool] = True

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Return the shape of the state that a sequence keeps, in float32."""
        return self.n_head, self.dim_k, self.dim_v


@dataclass(frozen=True)
class SelectiveScan(Operation):
    """The state space of Mamba-2 (arXiv 2405.21060): a matrix S per head, token by token.

    x: values [n_head, dim_v], then B and C, [n_group, dim_k] each; dt: [n_head]; out: [n_head, dim_v]. Head h
    uses B and C of group h // (n_head / n_group). With the vectors `rate`, `step` and `skip`, one number per
    head, and dt = softplus(dt + step):
    S *= exp(rate * dt); S += B * (dt * x)^T; out = S^T C + skip * x.
    State: S of each head, [dim_k, dim_v].
    """

    out: Value
    x: Value
    dt: Value
    rate: Vector
    step: Vector
    skip: Vector
    n_head: int
    n_group: int
    dim_k: int
    dim_v: int

    mixes_tokens: ClassVar[bool] = True

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Return the shape of the state that a sequence keeps, in float32."""
        return self.n_head, self.dim_k, self.dim_v


@dataclass(frozen=True)
class ChannelScan(Operation):
    """The state space of Mamba (arXiv 2312.00752): a vector S per channel, token by token.

    x, dt, out: [width]; b, c: [dim_k], for all channels. With the vectors rate [width, dim_k] and skip
    [width], per channel: S = exp(rate * dt) * S + b * (dt * x); out = S · c + skip * x. State: S of each
    channel, [dim_k, width].
    """

    out: Value
    x: Value
    dt: Value
    b: Value
    c: Value
    rate: Vector
    skip: Vector

    mixes_tokens: ClassVar[bool] = True

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Return the shape of the state that a sequence keeps, in float32."""
        return self.b.width, self.x.width


@dataclass(frozen=True)
class Wkv(Operation):
    """RWKV's linear attention: a matrix S per head, token by token, each row with its own decay.

    r, w, k, a, b: [n_head, dim_k]; v, out: [n_head, dim_v]. With a and b (RWKV 7, arXiv 2503.14456):
    S = w * S + b * (S^T a)^T + k * v^T, and then out = S^T r. Without (RWKV 6, arXiv 2404.05892):
    out = S^T r, and then S = w * S + k * v^T. State: S of each head, [dim_k, dim_v].
    """

    out: Value
    r: Value
    w: Value
    k: Value
    v: Value
    a: Value | None
    b: Value | None
    n_head: int

    mixes_tokens: ClassVar[bool] = True

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Return the shape of the state that a sequence keeps, in float32."""
        return self.n_head, self.k.width // self.n_head, self.v.width // self.n_head


@dataclass(frozen=True)
class PoolBlocks(Operation):
    """Keys of compressed blocks (DeepSeek V4): softmax-weighted means over a block's tokens, per channel.

    Blocks have `size` tokens from position 0 on. x, scores: [out.width]. If they are [2, out.width], blocks
    overlap: the second half counts for the token's own block, the first for the next one. bias: added to the
    scores, a row per token of a block. Without scores and bias all tokens have equal weights. out: the mean
    of the token's block so far: of the previous block's tokens, if blocks overlap, and those up to this one.
    State, per channel: the highest score, the sum of
    weights relative to it, and the sum of weighted values; for the token's block and, if blocks overlap, the
    next one.
    """

    out: Value
    x: Value
    scores: Value | None
    bias: Vector | None
    size: int

    mixes_tokens: ClassVar[bool] = True

    @property
    def overlaps(self) -> bool:
        """Return whether a block includes tokens of the previous one."""
        return self.x.width != self.out.width

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Return the shape of the state that a sequence keeps, in float32."""
        return 6 if self.overlaps else 3, self.out.width


@dataclass(frozen=True)
class HeadDot(Operation):
    """out = x times, per head, the sum of a * b * weight, in order; x may have heads of another width."""

    out: Value
    x: Value
    a: Value
    b: Value
    weight: Vector
    n_head: int


@dataclass(frozen=True)
class SimilarityGate(Operation):
    """out_i = sigmoid(root(a_i · b_i / sqrt(width))) * x, of n_streams streams i side by side.

    root(s) = sign(s) * sqrt(max(|s|, 1e-6)); width: of x and of each stream of a and b. The products are
    added in order.
    """

    out: Value
    x: Value
    a: Value
    b: Value
    n_streams: int


@dataclass(frozen=True)
class Activate(Operation):
    """out = f(x), elementwise.

    threshold t: fatrelu is x if x >= t else 0; clamped_silu is m * sigmoid(1.702 m) with m = min(x, t);
    clamped_plus_one is 1 + x with x clamped to [-t, t]; capped_silu is silu(min(x, t)); clamp is x clamped to
    [-t, t]. xielu: see XIELU. softplus is ln(1 + e^x).
    """

    out: Value
    x: Value
    kind: ActivationKind
    threshold: float = 0.0
    xielu: XIELU | None = None


@dataclass(frozen=True)
class GaussianTopK(Operation):
    """out = max(0, x - (mean + multiplier * deviation)), both over the values of a token.

    If the values were normally distributed, a share of 1 - Phi(multiplier) would remain above 0: the
    statistical top-k of Spark Transformer (arXiv 2506.06644). The deviation is the root of the mean square of
    x - mean (llama.cpp divides the sum by one less). Sums have LayerNorm's order: lane l of sixteen adds the
    values l, l + 16, ..., then a tree adds the lanes.
    """

    out: Value
    x: Value
    multiplier: float


@dataclass(frozen=True)
class Multiply(Operation):
    """out = a * b, elementwise; b may be one number per token, of width 1."""

    out: Value
    a: Value
    b: Value


@dataclass(frozen=True)
class GateHeads(Operation):
    """out = x * sigmoid(gate), where every channel of a head has the head's gate: gates.width heads."""

    out: Value
    x: Value
    gates: Value


@dataclass(frozen=True)
class Add(Operation):
    """out = a + b, elementwise."""

    out: Value
    a: Value
    b: Value


@dataclass(frozen=True)
class Scale(Operation):
    """out = x * factor, elementwise, then times a number per channel: `weight` from first_weight on."""

    out: Value
    x: Value
    factor: float
    weight: Vector | None = None
    first_weight: int = 0

    def bytes_of(self, _: Weight, info: TensorInfo) -> int:
        return info.nbytes * self.x.width // math.prod(info.shape)


@dataclass(frozen=True)
class AddStreams(Operation):
    """The streams of x, plus the streams y with weights: out_i = x_i + sum of (plus + w[i, j]) * y_j.

    x: n_streams side by side, None: zeros; y: streams of the same width. weights: w, [n_streams, streams of
    y]; None: zeros. Streams before `first` are unchanged. The sum begins with 0 and each product is rounded
    before it is added, in the order of y; then x_i is added. AltUp (arXiv 2301.13310).
    """

    out: Value
    x: Value | None
    y: Value
    weights: Value | None
    n_streams: int
    plus: float = 0.0
    first: int = 0


@dataclass(frozen=True)
class HyperConnection(Operation):
    """Weights of n residual streams around a part of a layer (mHC, arXiv 2512.24880).

    x: m, n * (n + 2) numbers. With the vectors scale [3] and base, as wide as x:
    a = sigmoid(scale[0] * m + base) + eps of the first n: weights of the streams in the part's input;
    b = 2 * sigmoid(scale[1] * m + base) of the next n: weights of the part's result in each stream;
    C [from, to], of the others: a matrix that mixes the streams. It is the softmax of the rows of scale[2] *
    m + base, plus eps; then the columns are divided by their sums + eps, and n_iterations - 1 times the rows
    and then the columns (Sinkhorn and Knopp).
    out: a, and then for each stream b and its column of C, as weights of AddStreams of the result and the
    streams. If x is n wide, out is only a (and scale is one number).
    """

    out: Value
    x: Value
    scale: Vector
    base: Vector
    n_streams: int
    eps: float
    n_iterations: int = 1


@dataclass(frozen=True)
class MatchMagnitude(Operation):
    """Each part of x, as wide as `like`, scaled to the magnitude of `like`: out = x * rms(like) / rms(x).

    rms is the root of the mean of squares; in rms(x), `least` is a lower limit of the mean.
    """

    out: Value
    x: Value
    like: Value
    least: float


@dataclass(frozen=True)
class SoftCap(Operation):
    """out = cap * tanh(x / cap), elementwise."""

    out: Value
    x: Value
    cap: float


@dataclass(frozen=True)
class Mask(Operation):
    """out = x for selected neurons, otherwise 0: neuron i is selected unless its score < threshold.

    Neurons below `first` are always selected and have no score: scores.width = x.width - first.
    """

    out: Value
    x: Value
    scores: Value
    threshold: float
    first: int = 0


@dataclass(frozen=True)
class Threshold(Operation):
    """out = x, except that it is 0 for thresholded tokens (Batch.thresholded) if |x| < threshold.

    In a matrix's input it removes negligible channels (TEAL, arXiv 2408.14690), in an activated gate neurons
    (CATS, arXiv 2404.08763). The operations after it need not read the rows and columns of zeros. site: which
    of the layer's thresholds (model/thresholds.py) it is.
    """

    out: Value
    x: Value
    threshold: float
    site: ThresholdName


@dataclass(frozen=True)
class Route(Operation):
    """The experts of a token and their weights, best first: out is n_used ids, then n_used weights.

    x: the router's scores, one per expert. An expert's probability p is softmax(x) over all experts,
    sigmoid(x), the root of softplus(x), or x itself (softmax_chosen). The n_used experts with the highest x
    are chosen, of equal ones the lower id; with a `bias` or groups, those with the highest p + bias. With
    n_groups > 1 equal groups of adjacent experts, only n_groups_used groups can be chosen from: those with
    the highest sum of their group_best best p + bias.
    A weight is p without the bias, or with softmax_chosen the softmax of the chosen p. If `normalised`, it is
    divided by the sum over the chosen experts (at least 2^-14). Then it is multiplied by `scale`, and by the
    expert's entry of `scales`. table: integers [n_vocab, n_used], the experts of each token id, which replace
    the choice and its order.
    NaN sorts after every number, and then all weights are NaN. Ids are whole numbers.
    """

    out: Value
    x: Value
    n_used: int
    scoring: Scoring
    bias: Vector | None = None
    normalised: bool = False
    scale: float = 1.0
    n_groups: int = 1
    n_groups_used: int = 1
    group_best: int = 2
    scales: Vector | None = None
    table: Vector | None = None

    def bytes_of(self, weight: Weight, info: TensorInfo) -> int:
        return info.row_bytes if weight.name == self.table else info.nbytes


@dataclass(frozen=True)
class _OfExperts(Operation):
    """Products with the matrices of the experts that `route` (a Route's out) lists, in its order.

    weights: one tensor [n_expert, rows, width], or (old files) one [rows, width] per expert. bias: [n_expert,
    rows].
    """

    out: Value
    x: Value
    route: Value
    weights: tuple[Matrix, ...]
    n_expert: int
    bias: Vector | None = None

    @property
    def n_used(self) -> int:
        """Return the experts per token."""
        return self.route.width // 2

    @property
    def multiplications(self) -> int:
        return self.x.width * self.out.width

    def bytes_of(self, weight: Weight, info: TensorInfo) -> int:
        """Return the bytes of a token's experts; which experts they are depends on the token."""
        return self._of_all(weight, info) * self.n_used // self.n_expert

    def expert_bytes(self, tensors: Mapping[str, TensorInfo]) -> int:
        """Return the bytes of one expert's rows and biases, rounded up."""
        of_all = sum(self._of_all(weight, tensors[weight.name]) for weight in self.weights_read)
        return -(-of_all // self.n_expert)

    def _of_all(self, weight: Weight, info: TensorInfo) -> int:
        """Return the bytes of all experts' rows in a tensor."""
        stored = info.shape[0 if weight.name == self.bias else 1]
        return info.nbytes * self._n_rows_of(stored) // stored

    def _n_rows_of(self, stored: int) -> int:
        """Return how many of an expert's `stored` rows it reads."""
        return stored


@dataclass(frozen=True)
class ExpertLinear(_OfExperts):
    """x times the matrices of the token's experts, side by side; n_rows of each, from first_row on.

    of_parts: x has n_used parts side by side, one for each expert's matrix.
    """

    first_row: int = 0
    of_parts: bool = False

    @property
    def n_rows(self) -> int:
        """Return the rows of an expert's matrix that it reads."""
        return self.out.width // self.n_used

    @property
    def multiplications(self) -> int:
        return super().multiplications // (self.n_used if self.of_parts else 1)

    def _n_rows_of(self, _: int) -> int:
        return self.n_rows


@dataclass(frozen=True)
class ExpertSum(_OfExperts):
    """The down projection of experts: out = sum of weight * (x @ matrix.T + bias), in the order of `route`.

    x: n_used parts side by side, one per expert. neuron_major: matrices with a row per neuron instead,
    [x.width / n_used, out.width]; rows of zero neurons can be skipped. input_major: a copy of the matrices in
    this layout, as in Linear. The sum begins with 0, and each product is rounded before it is added.
    """

    neuron_major: bool = False
    input_major: str | None = None


@dataclass(frozen=True)
class SelectOutputs(Operation):
    """The rows of the tokens whose logits are needed: out is [n_outputs, width].

    n: the tokens of a row of out, the n - 1 before the output's and then its own, side by side. by_channel:
    instead, the n numbers of a channel are adjacent.
    """

    out: Value
    x: Value
    n: int = 1
    by_channel: bool = False


@dataclass(frozen=True)
class All:
    """A selection of every neuron."""


@dataclass(frozen=True)
class MaskedRoute:
    """A selection by a route and, within its experts, by their predictors' scores.

    The route is an operation before the FFN, because the experts' predictors need it. mask: of the neurons of
    the chosen experts, side by side; None: all of them.
    """

    route: Route
    mask: Mask | None


# Which neurons of an FFN are computed: all, those that a predictor selects, all in the routed experts, or
# those in the routed experts that predictors select.
Select = All | Mask | Route | MaskedRoute


@dataclass(frozen=True)
class Ffn(Operation):
    """The feed-forward network of a layer: out = down(select(f(gate(h)) * g(up(h)))), h = norm(x).

    Neuron i is row i of gate and up and input i of down. norm: None if x is already normalised (because a
    predictor or router also reads the normalised value). gate: None if f applies to up. gate_act: f; up_act:
    g, or None. product: of gate and up. select: which neurons are computed; the others contribute nothing.
    down: with a row per output (Linear), or neuron-major, with rows that can be skipped (TransposedLinear).

    With a Route, or a MaskedRoute (whose route is not a part of the FFN), the neurons are split into experts,
    and each token uses some of them: gate and up are ExpertLinear, down is an ExpertSum, and values hold the
    neurons of the chosen experts side by side.
    shared: a shared expert, in addition to the routed ones of its layer.
    in_threshold, gate_threshold, down_threshold: thresholds of h, of f's result, and of the neurons that down
    reads; None: no threshold.
    top_k: the input of f, computed from all gates; None: f reads the gates.
    sub_norm: a norm of all neurons before down, which keeps zeros; None: no norm.
    low_ranks: adapters of gate, up and down, computed for all neurons regardless of the selection.
    """

    out: Value
    x: Value
    norm: RMSNorm | LayerNorm | None
    gate: Linear | ExpertLinear | None
    up: Linear | ExpertLinear
    gate_act: Activate
    up_act: Activate | None
    product: Multiply | None
    select: Select
    down: Linear | TransposedLinear | ExpertSum
    shared: bool = False
    in_threshold: Threshold | None = None
    gate_threshold: Threshold | None = None
    down_threshold: Threshold | None = None
    top_k: GaussianTopK | None = None
    sub_norm: RMSNorm | None = None
    low_ranks: tuple[LowRank, ...] = ()

    @property
    def primitives(self) -> tuple[Primitive, ...]:
        """Return the equivalent operations in order, each with the value that it computes."""
        route = self.select if isinstance(self.select, Route) else None
        gate, up, down = (self.low_rank(op) for op in (self.gate, self.up, self.down))
        found = (
            self.norm, self.in_threshold, route, self.gate, gate, self.up, up, self.top_k, self.gate_act,
            self.gate_threshold,
            self.up_act, self.product, self.mask, self.down_threshold, self.sub_norm, self.down, down,
        )  # fmt: skip
        return tuple(op for op in found if op is not None)

    @property
    def inputs(self) -> tuple[Value, ...]:
        match self.select:
            case Mask():
                return self.x, self.select.scores
            case Route():
                return self.x, self.select.x
            case MaskedRoute():
                mask = self.select.mask
                return self.x, self.select.route.out, *(() if mask is None else (mask.scores,))
            case All():
                return (self.x,)
            case _:
                assert_never(self.select)

    @property
    def weights_read(self) -> tuple[Weight, ...]:
        return tuple(weight for op in self.primitives for weight in op.weights_read)

    def bytes_read(self, tensors: Mapping[str, TensorInfo]) -> Iterator[tuple[str, int]]:
        for op in self.primitives:
            yield from op.bytes_read(tensors)

    def low_rank(self, op: Operation | None) -> LowRank | None:
        """Return the adapters' contribution to gate, up or down; None without adapters."""
        if not isinstance(op, Linear | TransposedLinear):
            return None
        return next((added for added in self.low_ranks if added.y == op.out), None)

    @property
    def n_ff(self) -> int:
        """Return the number of neurons, of all experts together."""
        return self.up.n_rows * self.up.n_expert if isinstance(self.up, ExpertLinear) else self.up.out.width

    @property
    def up_tensor(self) -> str:
        """Return the tensor of up's rows; with one tensor per expert, the first."""
        return self.up.weight if isinstance(self.up, Linear) else self.up.weights[0]

    @property
    def neurons(self) -> Value:
        """Return one value per neuron, [n_tokens, n_ff], before selection; nonzero values fire.

        With a route: of the chosen experts, [n_tokens, n_used * n_ff / n_expert].
        """
        return self.fires if self.product is None else self.product.out

    @property
    def fires(self) -> Value:
        """Return f of the gate, or of up without a gate; a neuron is zero if it is zero."""
        return self.gate_act.out if self.gate_threshold is None else self.gate_threshold.out

    @property
    def selected(self) -> Value:
        """Return the neurons, unselected ones set to zero: the input of down, or of the norm before it."""
        return self.down.x if self.sub_norm is None else self.sub_norm.x

    @property
    def mask(self) -> Mask | None:
        """Return the predictor's selection of neurons; None without a predictor."""
        select = self.select.mask if isinstance(self.select, MaskedRoute) else self.select
        return select if isinstance(select, Mask) else None

    @property
    def route(self) -> Route | None:
        """Return the router's selection of experts; None without experts."""
        select = self.select.route if isinstance(self.select, MaskedRoute) else self.select
        return select if isinstance(select, Route) else None

    @property
    def decides(self) -> Linear:
        """Return the product that decides which neurons fire: gate or, without a gate, up."""
        return one_matrix(self.up if self.gate is None else self.gate)

    @property
    def has_zeros(self) -> bool:
        """Return whether neurons can be exactly zero, so that rows of up and down can be skipped."""
        return self.fires_exactly or self.gate_threshold is not None or self.down_threshold is not None

    @property
    def fires_exactly(self) -> bool:
        """Return whether f itself sets neurons to zero, without a threshold."""
        return has_zeros(self.gate_act.kind) or self.top_k is not None

    @property
    def can_be_split(self) -> bool:
        """Return whether some neurons can be computed separately, on another device."""
        return self.has_zeros and self.neuron_major and self.top_k is None and self.sub_norm is None

    @property
    def leaves_out(self) -> bool:
        """Return whether a token needs only some rows: of nonzero neurons, or of its experts."""
        return self.has_zeros or self.route is not None

    @property
    def neuron_major(self) -> bool:
        """Return whether down has a row per neuron, so that neurons can be skipped or split up."""
        return isinstance(self.down, TransposedLinear)


def one_matrix(op: Linear | ExpertLinear) -> Linear:
    """Return the product of an FFN without experts. Callers never pass one of experts."""
    assert isinstance(op, Linear), f"{op.out.name} is a product of experts"
    return op


Primitive = (
    Embed
    | MixRows
    | Clip
    | AddImage
    | NgramEmbed
    | RMSNorm
    | UnitNorm
    | LayerNorm
    | Linear
    | TransposedLinear
    | LowRank
    | Rotate
    | PositionGain
    | Heads
    | TransposedHeads
    | Attention
    | Indexer
    | ShortConv
    | DeltaNet
    | SelectiveScan
    | ChannelScan
    | Wkv
    | PoolBlocks
    | HeadDot
    | SimilarityGate
    | Activate
    | GaussianTopK
    | Multiply
    | GateHeads
    | Add
    | Scale
    | AddStreams
    | HyperConnection
    | MatchMagnitude
    | SoftCap
    | Mask
    | Threshold
    | Route
    | ExpertLinear
    | ExpertSum
    | SelectOutputs
)
Op = Primitive | Ffn
# Operations with a state: a token's result depends on all tokens before it, through a few numbers that the
# cache holds per sequence (docs/contributing/internals/engine.md).
Recurrent = NgramEmbed | ShortConv | DeltaNet | SelectiveScan | ChannelScan | Wkv | PoolBlocks
