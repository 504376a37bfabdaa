"""The frozen vocabulary in which a decoder describes one forward step.

The decoder (`model/decoder.py`) builds a `Graph` once, at load; a backend executes it: `reference`
interprets it with NumPy, `cpu` lowers it to a native plan. Every value is a float32 matrix
[n_tokens, width]; weights are named as in the GGUF file. Each value carries a name such as
"blk.3.ffn_norm": any of them can be asked for as a *tap* of a step.

Fusion belongs to the backends, never to the description.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

ActivationKind = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "fatrelu"]
RopeKind = Literal["norm", "neox"]  # norm: pairs (2i, 2i+1); neox: pairs (i, i + n_rot/2)


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
    `freq` holds n_rot/2 float64 frequencies with every scaling already applied.
    """

    kind: RopeKind
    n_rot: int
    freq: tuple[float, ...]
    magnitude: float = 1.0


@dataclass(frozen=True)
class Embed:
    """out[t] = row tokens[t] of `weight`, or, of learned positions, row positions[t] + first_row."""

    out: Value
    weight: str
    of: Literal["token", "position"] = "token"
    first_row: int = 0


@dataclass(frozen=True)
class RMSNorm:
    """out = x / sqrt(mean(x^2) + eps) * weight, over each of `n_head` equal parts of the width."""

    out: Value
    x: Value
    weight: str
    eps: float
    n_head: int = 1


@dataclass(frozen=True)
class LayerNorm:
    """out = (x - mean) / sqrt(var + eps) * weight + bias."""

    out: Value
    x: Value
    weight: str
    bias: str | None
    eps: float


@dataclass(frozen=True)
class Linear:
    """out = x @ weight.T + bias; weight is [out.width, x.width] (GGUF: ne0 = x.width, ne1 = out.width).

    A fused tensor serves several products, each with the rows [first_row, first_row + out.width) of weight
    and bias.
    """

    out: Value
    x: Value
    weight: str
    bias: str | None = None
    first_row: int = 0


@dataclass(frozen=True)
class TransposedLinear:
    """out = x @ weight + bias; weight is [x.width, out.width]: row i is what input i adds to the output.

    The down projection of a sparse FFN, a row per neuron. An input of zero adds nothing, whether its row is
    read or not: sums of float32 inputs times decoded weights have one order (csrc/ops/axpy.cpp).
    With `scales` the weight is in planes (formats/planes.py): codes by neuron, scales by 32 neurons.
    """

    out: Value
    x: Value
    weight: str
    bias: str | None = None
    scales: str | None = None


@dataclass(frozen=True)
class Rotate:
    """Rotary embedding of x = [n_head, head_dim] at each token's position."""

    out: Value
    x: Value
    n_head: int
    head_dim: int
    rope: Rope


@dataclass(frozen=True)
class Attention:
    """Causal attention over the paged cache of `layer`; stores k and v of the batch first.

    q: [n_head, head_dim]; k: [n_head_kv, head_dim]; v: [n_head_kv, head_dim_v]; out: [n_head, head_dim_v].
    `window` > 0: a token sees itself and the window - 1 tokens before it.
    """

    out: Value
    q: Value
    k: Value
    v: Value
    layer: int
    n_head: int
    n_head_kv: int
    head_dim: int
    head_dim_v: int
    scale: float
    window: int = 0


@dataclass(frozen=True)
class Activate:
    """out = f(x), elementwise. `threshold` is FATReLU's: x if x >= threshold else 0."""

    out: Value
    x: Value
    kind: ActivationKind
    threshold: float = 0.0


@dataclass(frozen=True)
class Multiply:
    """out = a * b, elementwise."""

    out: Value
    a: Value
    b: Value


@dataclass(frozen=True)
class Add:
    """out = a + b, elementwise."""

    out: Value
    a: Value
    b: Value


@dataclass(frozen=True)
class SignScores:
    """out[i] = channels of x whose sign is that of row i of a matrix, less those where it differs, + bias[i].

    weight: int8 [out.width, ceil(x.width / 8)], bit k % 8 of byte k // 8 set where channel k of the row is
    negative; so is a channel of x below zero (zero counts as positive). Spare bits are zero.
    """

    out: Value
    x: Value
    weight: str
    bias: str | None = None


@dataclass(frozen=True)
class Mask:
    """out = x where the neuron was selected, else 0: neuron i is selected unless its score < threshold.

    Neurons below `first` are always selected and have no score: scores.width = x.width - first.
    """

    out: Value
    x: Value
    scores: Value
    threshold: float
    first: int = 0


@dataclass(frozen=True)
class SelectOutputs:
    """Keeps the rows of the tokens whose logits are wanted: out is [n_outputs, width]."""

    out: Value
    x: Value


Op = (
    Embed
    | RMSNorm
    | LayerNorm
    | Linear
    | TransposedLinear
    | Rotate
    | Attention
    | Activate
    | Multiply
    | Add
    | SignScores
    | Mask
    | SelectOutputs
)


@dataclass
class Graph:
    """The operations of one step in order; the last value is the logits [n_outputs, n_vocab]."""

    ops: list[Op] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)

    def value(self, name: str, width: int) -> Value:
        """A new value; names are unique, so that taps are unambiguous."""
        value = Value(len(self.values), width, name)
        self.values.append(value)
        return value

    def add(self, op: Op) -> Value:
        """Appends `op`; returns the value it computes."""
        self.ops.append(op)
        return op.out

    @property
    def logits(self) -> Value:
        return self.ops[-1].out
