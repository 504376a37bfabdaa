"""The operations in which a decoder describes one forward step; each record describes itself.

Every value is a float32 matrix [n_tokens, width]; weights are named as in the GGUF file. Each value carries a
name such as "blk.3.ffn_norm": any of them can be requested as a *tap* of a step. A name is for people and
taps; what an operation is and where it belongs is in its fields.

A field's type says what it is: a `Value` is an input (`out` is the result), a `Matrix`, `Vector` or `Rows` is
a tensor of the file. So what an operation reads, how many bytes that is and how much it computes is asked of
the record (`inputs`, `weights`, `bytes_read`, `multiplications`), and cost, budgets, streaming and fusion
need no list of operations.

A layer's feed-forward network is one operation, `Ffn`: whatever decides about neurons (what is read, skipped,
counted, placed) asks this record. Its `primitives` say what it computes in terms of the others.
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
Scoring = Literal["softmax", "sigmoid", "softmax_chosen", "sqrt_softplus"]  # of experts, see Route
Part = Literal["predictor", "ffn", "attention", "other"]

PARTS: tuple[Part, ...] = ("predictor", "ffn", "attention", "other")  # of a model, for statistics
SHIFT = 1.0, -1.0  # weights of a token shift, of every channel (see ShortConv)
NO_LAYER = -1  # of operations before the first layer and after the last


@dataclass(frozen=True)
class Value:
    """One intermediate of the step, float32 [n_tokens, width]."""

    id: int
    width: int
    name: str


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding of the first `n_rot` channels of each head.

    angle(pos, i) = pos * freq[i]; cos and sin are multiplied by `magnitude` (YaRN's attention factor).
    `freq` holds n_rot/2 float64 frequencies with every scaling already applied. every: positions are rounded
    down to a multiple of it, so that a block of tokens is rotated as its first.
    """

    kind: RopeKind
    n_rot: int
    freq: tuple[float, ...]
    magnitude: float = 1.0
    every: int = 1


def has_zeros(kind: ActivationKind) -> bool:
    """Whether an activation leaves neurons at exactly zero, so that those can be skipped."""
    return kind in ("relu", "relu2", "fatrelu")


@dataclass(frozen=True)
class XIELU:
    """Numbers of xIELU (arXiv 2411.13010): positive * x^2 + linear * x above 0, elsewhere
    negative * (e^min(x, eps) - 1 - x) + linear * x."""

    positive: float
    negative: float
    linear: float
    eps: float


WeightKind = Literal["matrix", "vector", "rows"]

# Names of tensors. A matrix is read where it is stored when the operation runs; a vector is decoded to
# float32 when a plan is made; of rows each token reads one.
Matrix = Annotated[str, "matrix"]
Vector = Annotated[str, "vector"]
Rows = Annotated[str, "rows"]


@dataclass(frozen=True)
class Weight:
    """A tensor that an operation reads."""

    name: str
    kind: WeightKind


def _fields(operation: type) -> tuple[tuple[str, ...], tuple[tuple[str, WeightKind], ...]]:
    """The names of an operation's fields that are inputs, and of those that name tensors."""
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
    """What every operation has. layer: of the model, or NO_LAYER. part: of the layer that it belongs to."""

    layer: int = NO_LAYER
    part: Part = "other"

    mixes_tokens: ClassVar[bool] = False  # whether a token's result depends on other tokens
    _inputs: ClassVar[tuple[str, ...]]  # names of fields, as `_fields` finds them
    _weights: ClassVar[tuple[tuple[str, WeightKind], ...]]

    def __init_subclass__(cls) -> None:
        cls._inputs, cls._weights = _fields(cls)

    @property
    def inputs(self) -> tuple[Value, ...]:
        """The values that it reads."""
        found = (getattr(self, name) for name in self._inputs)
        return tuple(value for value in found if value is not None)

    @property
    def weights_read(self) -> tuple[Weight, ...]:
        """The tensors that it reads, one entry each."""
        found = []
        for field, kind in self._weights:
            names = getattr(self, field)
            found += [Weight(name, kind) for name in ((names,) if isinstance(names, str) else names or ())]
        return tuple(found)

    @property
    def matrices(self) -> tuple[str, ...]:
        """The tensors that it reads where they are stored, each time it runs."""
        return tuple(weight.name for weight in self.weights_read if weight.kind == "matrix")

    def bytes_read(self, tensors: Mapping[str, TensorInfo]) -> Iterator[tuple[str, int]]:
        """The tensors that it reads for one token, with the bytes of them that it reads."""
        for weight in self.weights_read:
            yield weight.name, self.bytes_of(weight, tensors[weight.name])

    def bytes_of(self, weight: Weight, info: TensorInfo) -> int:
        """Bytes of a tensor that one token reads."""
        if weight.kind == "rows":
            return info.row_bytes
        return info.nbytes

    def matrix_bytes(self, tensors: Mapping[str, TensorInfo]) -> int:
        """Bytes of its matrices that one token reads."""
        read = (weight for weight in self.weights_read if weight.kind == "matrix")
        return sum(self.bytes_of(weight, tensors[weight.name]) for weight in read)

    @property
    def multiplications(self) -> int:
        """Of weights, for one token."""
        return 0


@dataclass(frozen=True)
class Embed(Operation):
    """out[t] = row tokens[t] of `weight`, or, of learned positions, row positions[t] + first_row, or, of
    token types, row 0: that of a text's first part."""

    out: Value
    weight: Rows
    of: Literal["token", "position", "type"] = "token"
    first_row: int = 0


@dataclass(frozen=True)
class NgramEmbed(Operation):
    """Rows of `weight` for the n-grams that end with a token, side by side: n_heads for its pair with the
    token before, as many for the three, ..., up to n = len(multipliers) tokens.

    With t_0 the token, t_1 the one before it, ..., the mix of n tokens is t_0 * multipliers[0] xor t_1 *
    multipliers[1] xor ..., and the row of head h = (n - 2) * n_heads + i is mix % sizes[h] + offsets[h]. A
    token before the sequence's first counts as `eos`, and so does what lies before an eos that is not the
    token itself. State: the last n - 1 tokens plus 1, the oldest first; 0: there was none.
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
        """Of the n-grams of one length."""
        return len(self.sizes) // (len(self.multipliers) - 1)

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Of what a sequence leaves to its next token, in float32: token ids are below 2^24."""
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

    Mean and variance are of each of `n_head` equal parts of the width; weight and bias have it all.
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

    A fused tensor serves several products, each with the rows [first_row, first_row + out.width) of weight
    and bias. input_major: the tensor of the whole weight once more, in this layout
    (formats/channels.py), so that channels whose input is zero need not be read.
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
    """out = x @ weight + bias; weight is [x.width, out.width]: row i is what input i adds to the output.

    The down projection of a sparse FFN, a row per neuron. An input of zero adds nothing, whether its row is
    read or not: sums of float32 inputs times decoded weights have one order (csrc/ops/axpy.cpp).
    With `scales` the weight is stored as planes (formats/planes.py): codes by neuron, scales by 32 neurons.
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
    """What adapters (LoRA, arXiv 2106.09685) add to the product y of x with a matrix:

        out = y + (x @ a.T * scale) @ b.T

    with a [rank, x.width] and b [out.width, rank] of each adapter of a token's sequence
    (Batch.adapter_scales), in the order of AdapterSet. scale: float32, that of the sequence times the
    adapter's own of this matrix. Everything is float32, and the sum is rounded after each adapter; a token
    without adapters keeps y.

    matrix: the adapted tensor (low_rank.adapted_name). The rows of b are those from first_row on, as of the
    Linear.
    """

    out: Value
    x: Value
    y: Value
    matrix: str
    first_row: int = 0


@dataclass(frozen=True)
class Rotate(Operation):
    """Rotary embedding of x = [n_head, head_dim] at each token's position: of each head's channels, those
    from `first` on."""

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
    """Some channels of each head of x, and behind them, where there is one, what all heads share.

    x: [n_head, x.width / n_head]; out: [n_head, count + shared.width], the channels being [first, first +
    count) of x.
    """

    out: Value
    x: Value
    n_head: int
    first: int = 0
    shared: Value | None = None

    @property
    def count(self) -> int:
        """Channels of x that a head of out has."""
        return self.out.width // self.n_head - (0 if self.shared is None else self.shared.width)


@dataclass(frozen=True)
class TransposedHeads(Operation):
    """For each head x @ its matrix, side by side; weight is [n_head, x.width, out.width / n_head].

    Keys of one latent vector, from the matrices that llama.cpp's converter writes: by input, since there the
    query is multiplied with them. The sum runs over the inputs in order (csrc/ops/heads.cpp).
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
    """Attention over the paged cache of its layer; stores k and v of the batch first.

    q: [n_head, head_dim]; k: [n_head_kv, head_dim]; v: [n_head_kv, head_dim_v]; out: [n_head, head_dim_v].
    Scores are `scale` times q · k; `softcap` > 0 makes them softcap * tanh(score / softcap).
    causal: a token sees itself and those before it, `window` > 0: the window - 1 tokens before it; else all
    tokens of its sequence, which are in one batch, or those at most window / 2 away. first_seen: the first
    position that has keys and values: a causal token before it is in no batch.
    sinks: a score for each head that takes part in its softmax, with a value of zero. source: the layer whose
    keys and values these are, which has stored them; None: its own. slopes: of each head, by which a score
    falls with each token between (ALiBi, arXiv 2108.12409); None: it does not.
    blocks: as wide as k; a token also sees what this has at the last token of each block of block_size
    tokens from position 0 on that is complete, whatever the window is: one more key, which is its own value.
    They are stored too.
    key_bias: what all keys contain, or None. If `centred`, a q4_0 cache subtracts its mean from each key
    (rope.key_centre): this changes all scores of a query by one number, and so no weight of the softmax.
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

    mixes_tokens: ClassVar[bool] = True

    @property
    def centred(self) -> bool:
        """Return whether one vector may be subtracted from all keys."""
        return self.key_bias is not None and self.sinks is None and not self.softcap and self.blocks is None

    @property
    def cache_layer(self) -> int:
        """The layer whose cache it reads."""
        return self.layer if self.source is None else self.source

    def n_visible(self, depth: float) -> float:
        """Tokens that a token sees, itself included, with `depth` tokens before it."""
        if not self.causal:
            return min(depth + 1, self.window // 2 * 2 + 1) if self.window else depth + 1
        n_blocks = (depth + 1) // self.block_size if self.block_size else 0
        return n_blocks + (min(depth + 1, self.window) if self.window else depth + 1)


@dataclass(frozen=True)
class ShortConv(Operation):
    """A causal convolution over the tokens of a sequence, each channel by itself.

    out[t] = sum of weight[:, j] * x[t - (kernel - 1 - j) * dilation] for j = 0, 1, ..., each product rounded
    before it is added, and then bias; before a sequence's first token x is 0. weight: [width, kernel] (GGUF:
    ne0 = kernel); None: 1 and -1, so that out is what the token before has more (RWKV's token shift). State:
    the last (kernel - 1) * dilation inputs, the oldest first.
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
        """Of what a sequence leaves to its next token, in float32."""
        return (self.kernel - 1) * self.dilation, self.x.width


@dataclass(frozen=True)
class DeltaNet(Operation):
    """The gated delta rule (arXiv 2412.06464): linear attention through a matrix S per head, token by token.

    x: queries and keys, [n_head_k, dim_k] each, then values [n_head, dim_v]; alpha, beta: [n_head]; out:
    [n_head, dim_v]. A query q and a key k are x / sqrt(sum(x^2) + 1e-6), q also over the root of dim_k. With
    the vectors `rate` and `step`, per head:
    S *= exp(rate * softplus(alpha + step)); S += k * (sigmoid(beta) * (v - S^T k))^T; out = S^T q.
    A head of values has the query and the key of head h // (n_head / n_head_k), or (tiled) h % n_head_k.
    Where alpha and step are [n_head, dim_k], each row of S has a decay of its own (Kimi Delta Attention,
    arXiv 2510.26692). State: S of each head.
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
        """Of what a sequence leaves to its next token, in float32."""
        return self.n_head, self.dim_k, self.dim_v


@dataclass(frozen=True)
class SelectiveScan(Operation):
    """The state space of Mamba-2 (arXiv 2405.21060): a matrix S per head, token by token.

    x: values [n_head, dim_v], then B and C, [n_group, dim_k] each; dt: [n_head]; out: [n_head, dim_v]. A head
    has the B and C of group h // (n_head / n_group). With the vectors `rate`, `step` and `skip`, a number per
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
        """Of what a sequence leaves to its next token, in float32."""
        return self.n_head, self.dim_k, self.dim_v


@dataclass(frozen=True)
class ChannelScan(Operation):
    """The state space of Mamba (arXiv 2312.00752): some numbers S per channel, token by token.

    x, dt, out: [width]; b, c: [dim_k], of all channels. With the vectors rate [width, dim_k] and skip
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
        """Of what a sequence leaves to its next token, in float32."""
        return self.b.width, self.x.width


@dataclass(frozen=True)
class Wkv(Operation):
    """RWKV's linear attention: a matrix S per head, token by token, whose rows decay each by itself.

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
        """Of what a sequence leaves to its next token, in float32."""
        return self.n_head, self.k.width // self.n_head, self.v.width // self.n_head


@dataclass(frozen=True)
class PoolBlocks(Operation):
    """Means of the tokens of a block, each channel by itself, weighted by the softmax of scores: the keys of
    compressed blocks of DeepSeek V4.

    Blocks are of `size` tokens from position 0 on. x, scores: [out.width], or [2, out.width], of which the
    second half counts for the token's own block and the first for the next one, which so overlaps it. bias:
    added to the scores of a block's tokens, a row each. out: the mean of the token's block as far as it is
    there: the tokens of the block before, if they count, and those up to this one. State, per channel: the
    highest score, the sum of weights relative to it, and the sum of weighted values; of the token's block
    and, where blocks overlap, of the next.
    """

    out: Value
    x: Value
    scores: Value
    bias: Vector
    size: int

    mixes_tokens: ClassVar[bool] = True

    @property
    def overlaps(self) -> bool:
        """Whether a block has tokens of the one before."""
        return self.x.width != self.out.width

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Of what a sequence leaves to its next token, in float32."""
        return 6 if self.overlaps else 3, self.out.width


@dataclass(frozen=True)
class HeadDot(Operation):
    """out = x times, head by head, the sum of a * b * weight, in order; x may have other heads' widths."""

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

    threshold t: fatrelu is x if x >= t else 0; clamped_silu m * sigmoid(1.702 m) of m = min(x, t);
    clamped_plus_one is 1 + x, x brought into [-t, t]; capped_silu is silu(min(x, t)); clamp is x brought into
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

    If these were normally distributed, a share of 1 - Phi(multiplier) would stay above 0: the statistical
    top-k of Spark Transformer (arXiv 2506.06644). The deviation is the root of the mean square of x - mean
    (llama.cpp divides the sum by one less). Sums have the order of LayerNorm's: lane l of sixteen adds values
    l, l + 16, ..., then a tree adds the lanes.
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
class Add(Operation):
    """out = a + b, elementwise."""

    out: Value
    a: Value
    b: Value


@dataclass(frozen=True)
class Scale(Operation):
    """out = x * factor, elementwise, and then times `weight`, a number for each channel: those of the tensor
    from first_weight on."""

    out: Value
    x: Value
    factor: float
    weight: Vector | None = None
    first_weight: int = 0

    def bytes_of(self, _: Weight, info: TensorInfo) -> int:
        return info.nbytes * self.x.width // math.prod(info.shape)


@dataclass(frozen=True)
class AddStreams(Operation):
    """Adds streams y to the streams of x, each with a weight: out_i = x_i + sum of (plus + w[i, j]) * y_j.

    x: n_streams side by side, None: zeros; y: some of the same width. weights: w, [n_streams, streams of y];
    None: zeros. Streams before `first` stay as they are. The sum begins with 0 and each product is rounded
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

    x: m, n * (n + 2) numbers. With the vectors scale [3] and base, as wide as x: a = sigmoid(scale[0] * m +
    base) + eps of the first n, with which the streams are summed for the part to read;
    b = 2 * sigmoid(scale[1] * m + base) of the next n, with which its result is added to each; and of the
    others a matrix C [from, to], with which the streams are mixed: the softmax of the rows of scale[2] * m +
    base, + eps; then the columns are divided by their sums + eps, and n_iterations - 1 times the rows and
    then the columns (Sinkhorn and Knopp). out: a, and then for each stream b and its column of C: weights of
    AddStreams of the result and the streams. Where x is n wide, a alone (scale is of one number).
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
    """Makes each part of x, as wide as `like`, as large as that: out = x * rms(like) / rms(x).

    rms is the root of the mean of squares, of x of `least` in place of a smaller mean.
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
    """out = x where the neuron was selected, else 0: neuron i is selected unless its score < threshold.

    Neurons below `first` are always selected and have no score: scores.width = x.width - first.
    """

    out: Value
    x: Value
    scores: Value
    threshold: float
    first: int = 0


@dataclass(frozen=True)
class Threshold(Operation):
    """out = x, but for thresholded tokens (Batch.thresholded) 0 where |x| < threshold.

    Of a matrix's input: channels that are nearly nothing (TEAL, arXiv 2408.14690); of an activated gate:
    neurons (CATS, arXiv 2404.08763). What follows need not read the rows and columns of zeros. site: which of
    a layer's thresholds it is, as model/thresholds.py names them.
    """

    out: Value
    x: Value
    threshold: float
    site: ThresholdName


@dataclass(frozen=True)
class Route(Operation):
    """Which experts compute a token and how much each counts, best first: out is n_used ids, then n_used
    weights.

    x: the router's scores, one per expert. An expert's probability p is softmax(x) over all experts,
    sigmoid(x), the root of softplus(x), or x itself (softmax_chosen). The n_used experts with the highest x
    are chosen, of equal ones that with the lower id; with a `bias` or in groups those with the highest p +
    bias. Of n_groups > 1 equal groups of adjacent experts only n_groups_used can be chosen from, those whose
    group_best best p + bias have the highest sum. A weight is p without the bias; with softmax_chosen the
    softmax of the chosen ones' p; `normalised`: over the sum of the chosen ones', which counts as 2^-14 at
    least; then times `scale`, and times its expert's own of `scales`. table: the experts of each token of the
    vocabulary, whole numbers [n_vocab, n_used], which are chosen in its order in place of the best.
    What is not a number comes after every number, and then no weight is one. Ids are whole numbers.
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
    """Products with the matrices of the experts that `route` (a Route's out) names, in its order.

    weights: one tensor [n_expert, rows, width], or (old files) one [rows, width] per expert.
    bias: [n_expert, rows].
    """

    out: Value
    x: Value
    route: Value
    weights: tuple[Matrix, ...]
    n_expert: int
    bias: Vector | None = None

    @property
    def n_used(self) -> int:
        """Experts of a token."""
        return self.route.width // 2

    @property
    def multiplications(self) -> int:
        return self.x.width * self.out.width

    def bytes_of(self, weight: Weight, info: TensorInfo) -> int:
        """The rows of its experts; which they are depends on the token."""
        return self._of_all(weight, info) * self.n_used // self.n_expert

    def expert_bytes(self, tensors: Mapping[str, TensorInfo]) -> int:
        """Bytes of one expert's rows and biases, rounded up."""
        of_all = sum(self._of_all(weight, tensors[weight.name]) for weight in self.weights_read)
        return -(-of_all // self.n_expert)

    def _of_all(self, weight: Weight, info: TensorInfo) -> int:
        """Bytes of the rows of all experts that a tensor has."""
        stored = info.shape[0 if weight.name == self.bias else 1]
        return info.nbytes * self._n_rows_of(stored) // stored

    def _n_rows_of(self, stored: int) -> int:
        """Of an expert's matrix, of which so many rows are stored."""
        return stored


@dataclass(frozen=True)
class ExpertLinear(_OfExperts):
    """x times the matrices of its experts, side by side: of their rows, n_rows from first_row on.

    of_parts: x is n_used parts side by side, one for each expert, which its matrix is multiplied with.
    """

    first_row: int = 0
    of_parts: bool = False

    @property
    def n_rows(self) -> int:
        """Of an expert's matrix."""
        return self.out.width // self.n_used

    @property
    def multiplications(self) -> int:
        return super().multiplications // (self.n_used if self.of_parts else 1)

    def _n_rows_of(self, _: int) -> int:
        return self.n_rows


@dataclass(frozen=True)
class ExpertSum(_OfExperts):
    """The down projection of experts: out = sum of weight * (x @ matrix.T + bias), in the order of `route`.

    x: n_used parts side by side, one for each expert of the route. neuron_major: matrices with a row per
    neuron instead, [x.width / n_used, out.width], which can be skipped where the neuron is zero. input_major:
    the matrices once more, in this layout, as of a Linear. The sum begins with 0, and each product is rounded
    before it is added.
    """

    neuron_major: bool = False
    input_major: str | None = None


@dataclass(frozen=True)
class SelectOutputs(Operation):
    """Keeps the rows of the tokens whose logits are wanted: out is [n_outputs, width]."""

    out: Value
    x: Value


@dataclass(frozen=True)
class All:
    """Every neuron is wanted."""


@dataclass(frozen=True)
class MaskedRoute:
    """Of the experts that a route names, the neurons that the scores of their predictors name.

    The route is an operation before the FFN, since the experts' predictors are. mask: of the neurons of the
    chosen experts, side by side; None: all of them.
    """

    route: Route
    mask: Mask | None


# Which neurons of an FFN are wanted: all, those that a predictor's scores name, those of some experts, or
# those of some experts that scores name.
Select = All | Mask | Route | MaskedRoute


@dataclass(frozen=True)
class Ffn(Operation):
    """The feed-forward network of a layer: out = down(select(f(gate(h)) * g(up(h)))), h = norm(x).

    Neuron i is row i of gate and up and input i of down. norm: None where x is normalised already (a
    predictor or a router reads the norm's result too). gate: None where f applies to up alone. gate_act: f;
    up_act: g, or None. product: of gate and up. select: what is wanted of the neurons; the others add
    nothing. down: by output (Linear), or with a row per neuron, which can be skipped (TransposedLinear).

    With a Route the neurons are split into experts, and a token has those of its own: gate and up are
    ExpertLinear, down is an ExpertSum, and values hold the neurons of the chosen experts side by side. So it
    is with a MaskedRoute, whose route is no part of the FFN.
    shared: a network that every token passes beside the experts of its layer.
    in_threshold: what is left of h, gate_threshold: of f, down_threshold: of the neurons that down reads;
    None: all of it.
    top_k: what f reads of the gates, all of which must be known first; None: the gates.
    sub_norm: of all neurons, before down, which leaves zeros at zero; None: down reads the neurons.
    low_ranks: what adapters add to gate, up and down; it is computed for all neurons, whatever is selected.
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
        """The same as operations in order, each with the value that it makes."""
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
        """What adapters add to gate, up or down; None: nothing."""
        if not isinstance(op, Linear | TransposedLinear):
            return None
        return next((added for added in self.low_ranks if added.y == op.out), None)

    @property
    def n_ff(self) -> int:
        """Neurons, those of all experts."""
        return self.up.n_rows * self.up.n_expert if isinstance(self.up, ExpertLinear) else self.up.out.width

    @property
    def up_tensor(self) -> str:
        """The tensor of up's rows; where there is one for each expert, the first stands for all."""
        return self.up.weight if isinstance(self.up, Linear) else self.up.weights[0]

    @property
    def neurons(self) -> Value:
        """One value per neuron, [n_tokens, n_ff], before selection: a neuron fires where it is not zero.

        With a route those of the chosen experts, [n_tokens, n_used * n_ff / n_expert].
        """
        return self.fires if self.product is None else self.product.out

    @property
    def fires(self) -> Value:
        """f of the gate, or of up where there is no gate: where it is zero the neuron is."""
        return self.gate_act.out if self.gate_threshold is None else self.gate_threshold.out

    @property
    def selected(self) -> Value:
        """The neurons, zero where they are not wanted: what down, or the norm before it, reads."""
        return self.down.x if self.sub_norm is None else self.sub_norm.x

    @property
    def mask(self) -> Mask | None:
        """The predictor's word on which neurons are computed; None without one."""
        select = self.select.mask if isinstance(self.select, MaskedRoute) else self.select
        return select if isinstance(select, Mask) else None

    @property
    def route(self) -> Route | None:
        """The router's word on which experts are computed; None where there are no experts."""
        select = self.select.route if isinstance(self.select, MaskedRoute) else self.select
        return select if isinstance(select, Route) else None

    @property
    def decides(self) -> Linear:
        """The product whose value says which neurons can fire: gate's, or up's where there is no gate."""
        return one_matrix(self.up if self.gate is None else self.gate)

    @property
    def has_zeros(self) -> bool:
        """Whether neurons can be exactly zero, so that rows of up and down need not be read."""
        return self.fires_exactly or self.gate_threshold is not None or self.down_threshold is not None

    @property
    def fires_exactly(self) -> bool:
        """Whether f itself leaves neurons at zero, without a threshold."""
        return has_zeros(self.gate_act.kind) or self.top_k is not None

    @property
    def can_be_split(self) -> bool:
        """Whether neurons can be computed apart from the others, on another device."""
        return self.has_zeros and self.neuron_major and self.top_k is None and self.sub_norm is None

    @property
    def leaves_out(self) -> bool:
        """Whether a token does not need every row: of neurons at zero, or of experts that are not its own."""
        return self.has_zeros or self.route is not None

    @property
    def neuron_major(self) -> bool:
        """Whether down has a row per neuron: then neurons can be skipped there, and shared by devices."""
        return isinstance(self.down, TransposedLinear)


def one_matrix(op: Linear | ExpertLinear) -> Linear:
    """A product of an FFN without experts: its callers have refused the others, or cannot meet them."""
    assert isinstance(op, Linear), f"{op.out.name} is a product of experts"
    return op


Primitive = (
    Embed
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
# Operations with a state: what they yield for a token depends on all before it, through a few numbers that
# the cache holds for a sequence (docs/contributing/internals/engine.md).
Recurrent = NgramEmbed | ShortConv | DeltaNet | SelectiveScan | ChannelScan | Wkv | PoolBlocks
