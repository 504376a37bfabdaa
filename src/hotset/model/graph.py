"""The frozen vocabulary in which a decoder describes one forward step.

The decoder (`model/decoder.py`) builds a `Graph` once, at load; a backend executes it: `reference`
interprets it with NumPy, `cpu` lowers it to a native plan. Every value is a float32 matrix
[n_tokens, width]; weights are named as in the GGUF file. Each value carries a name such as
"blk.3.ffn_norm": any of them can be asked for as a *tap* of a step. A name is for people and taps; what an
operation is and where it belongs stands in its fields.

A layer's feed-forward network is one operation, `Ffn`: whatever decides about neurons (what is read, skipped,
counted, placed) asks this record. Its `primitives` say what it computes in terms of the others.

Fusion belongs to the backends, never to the description. Whoever treats operations by their kind ends in
`assert_never`, so that the type checker names every place that a new operation must come to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, assert_never

from hotset.errors import InvalidRequestError
from hotset.model.cutoffs import CutoffName

ActivationKind = Literal[
    "silu", "gelu", "gelu_tanh", "relu", "relu2", "fatrelu", "sigmoid", "clamped_silu", "clamped_plus_one"
]  # fmt: skip
RopeKind = Literal["norm", "neox"]  # norm: pairs (2i, 2i+1); neox: pairs (i, i + n_rot/2)
Scoring = Literal["softmax", "sigmoid", "softmax_chosen"]  # of experts, see Route
Part = Literal["predictor", "ffn", "attention", "other"]

PARTS: tuple[Part, ...] = ("predictor", "ffn", "attention", "other")  # of a model, for statistics
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
    `freq` holds n_rot/2 float64 frequencies with every scaling already applied.
    """

    kind: RopeKind
    n_rot: int
    freq: tuple[float, ...]
    magnitude: float = 1.0


def has_zeros(kind: ActivationKind) -> bool:
    """Whether an activation leaves neurons at exactly zero, so that those can be skipped."""
    return kind in ("relu", "relu2", "fatrelu")


@dataclass(frozen=True, kw_only=True)
class _Operation:
    """What every operation says. layer: of the model, or NO_LAYER. part: of the layer that it belongs to."""

    layer: int = NO_LAYER
    part: Part = "other"


@dataclass(frozen=True)
class Embed(_Operation):
    """out[t] = row tokens[t] of `weight`, or, of learned positions, row positions[t] + first_row."""

    out: Value
    weight: str
    of: Literal["token", "position"] = "token"
    first_row: int = 0


@dataclass(frozen=True)
class RMSNorm(_Operation):
    """out = x / sqrt(mean(x^2) + eps) * weight, over each of `n_head` equal parts of the width."""

    out: Value
    x: Value
    weight: str
    eps: float
    n_head: int = 1


@dataclass(frozen=True)
class LayerNorm(_Operation):
    """out = (x - mean) / sqrt(var + eps) * weight + bias."""

    out: Value
    x: Value
    weight: str
    bias: str | None
    eps: float


@dataclass(frozen=True)
class Linear(_Operation):
    """out = x @ weight.T + bias; weight is [out.width, x.width] (GGUF: ne0 = x.width, ne1 = out.width).

    A fused tensor serves several products, each with the rows [first_row, first_row + out.width) of weight
    and bias. by_channel: the tensor of the whole weight once more, laid out by input
    (formats/channels.py), so that channels whose input is zero need not be read.
    """

    out: Value
    x: Value
    weight: str
    bias: str | None = None
    first_row: int = 0
    by_channel: str | None = None


@dataclass(frozen=True)
class TransposedLinear(_Operation):
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
class Rotate(_Operation):
    """Rotary embedding of x = [n_head, head_dim] at each token's position: of each head's channels, those
    from `first` on."""

    out: Value
    x: Value
    n_head: int
    head_dim: int
    rope: Rope
    first: int = 0


@dataclass(frozen=True)
class Heads(_Operation):
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
class TransposedHeads(_Operation):
    """For each head x @ its matrix, side by side; weight is [n_head, x.width, out.width / n_head].

    Keys of one latent vector, from the matrices that llama.cpp's converter writes: by input, since there the
    query is multiplied with them. The sum runs over the inputs in order (csrc/ops/heads.cpp).
    """

    out: Value
    x: Value
    weight: str
    n_head: int


@dataclass(frozen=True)
class Attention(_Operation):
    """Causal attention over the paged cache of its layer; stores k and v of the batch first.

    q: [n_head, head_dim]; k: [n_head_kv, head_dim]; v: [n_head_kv, head_dim_v]; out: [n_head, head_dim_v].
    Scores are `scale` times q · k; `softcap` > 0 makes them softcap * tanh(score / softcap).
    `window` > 0: a token sees itself and the window - 1 tokens before it. sinks: a score for each head that
    takes part in its softmax, with a value of zero.
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
    sinks: str | None = None


@dataclass(frozen=True)
class ShortConv(_Operation):
    """A causal convolution over the tokens of a sequence, each channel by itself.

    out[t] = sum of weight[:, j] * x[t - (kernel - 1) + j] for j = 0, 1, ..., each product rounded before it
    is added; before a sequence's first token x is 0. weight: [width, kernel] (GGUF: ne0 = kernel).
    State: the last kernel - 1 inputs, the oldest first.
    """

    out: Value
    x: Value
    weight: str
    kernel: int

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Of what a sequence leaves to its next token, in float32."""
        return self.kernel - 1, self.x.width


@dataclass(frozen=True)
class DeltaNet(_Operation):
    """The gated delta rule (arXiv 2412.06464): linear attention through a matrix S per head, token by token.

    x: queries and keys, [n_head_k, dim_k] each, then values [n_head, dim_v]; alpha, beta: [n_head]; out:
    [n_head, dim_v]. A query q and a key k are x / sqrt(sum(x^2) + 1e-6), q also over the root of dim_k. With
    the vectors `rate` and `step`, per head:
    S *= exp(rate * softplus(alpha + step)); S += k * (sigmoid(beta) * (v - S^T k))^T; out = S^T q.
    A head of values has the query and the key of head h // (n_head / n_head_k), or (tiled) h % n_head_k.
    State: S of each head.
    """

    out: Value
    x: Value
    alpha: Value
    beta: Value
    rate: str
    step: str
    n_head: int
    n_head_k: int
    dim_k: int
    dim_v: int
    tiled: bool

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Of what a sequence leaves to its next token, in float32."""
        return self.n_head, self.dim_k, self.dim_v


@dataclass(frozen=True)
class Activate(_Operation):
    """out = f(x), elementwise.

    threshold t: fatrelu is x if x >= t else 0; clamped_silu m * sigmoid(1.702 m) of m = min(x, t);
    clamped_plus_one is 1 + x, x brought into [-t, t].
    """

    out: Value
    x: Value
    kind: ActivationKind
    threshold: float = 0.0


@dataclass(frozen=True)
class Multiply(_Operation):
    """out = a * b, elementwise; b may be one number per token, of width 1."""

    out: Value
    a: Value
    b: Value


@dataclass(frozen=True)
class Add(_Operation):
    """out = a + b, elementwise."""

    out: Value
    a: Value
    b: Value


@dataclass(frozen=True)
class Scale(_Operation):
    """out = x * factor, elementwise."""

    out: Value
    x: Value
    factor: float


@dataclass(frozen=True)
class SoftCap(_Operation):
    """out = cap * tanh(x / cap), elementwise."""

    out: Value
    x: Value
    cap: float


@dataclass(frozen=True)
class SignScores(_Operation):
    """out[i] = channels of x whose sign is that of row i of a matrix, less those where it differs, + bias[i].

    weight: int8 [out.width, ceil(x.width / 8)], bit k % 8 of byte k // 8 set where channel k of the row is
    negative; so is a channel of x below zero (zero counts as positive). Spare bits are zero.
    """

    out: Value
    x: Value
    weight: str
    bias: str | None = None


@dataclass(frozen=True)
class Mask(_Operation):
    """out = x where the neuron was selected, else 0: neuron i is selected unless its score < threshold.

    Neurons below `first` are always selected and have no score: scores.width = x.width - first.
    """

    out: Value
    x: Value
    scores: Value
    threshold: float
    first: int = 0


@dataclass(frozen=True)
class Cutoff(_Operation):
    """out = x, but of tokens that are cut (Batch.cut) 0 where |x| < threshold.

    Of a matrix's input: channels that are nearly nothing (TEAL, arXiv 2408.14690); of an activated gate:
    neurons (CATS, arXiv 2404.08763). What follows need not read the rows and columns of zeros. of: which of a
    layer's cutoffs it is, as model/cutoffs.py names them.
    """

    out: Value
    x: Value
    threshold: float
    of: CutoffName


@dataclass(frozen=True)
class Route(_Operation):
    """Which experts compute a token and how much each counts, best first: out is n_used ids, then n_used
    weights.

    x: the router's scores, one per expert. An expert's probability p is softmax(x) over all experts,
    sigmoid(x), or x itself (softmax_chosen). The n_used experts with the highest x are chosen, of equal ones
    that with the lower id; with a `bias` or in groups those with the highest p + bias. Of n_groups > 1 equal
    groups of adjacent experts only n_groups_used can be chosen from, those whose group_best best p + bias
    have the highest sum. A weight is p without the bias; with softmax_chosen the softmax of the chosen ones'
    p; `normalised`: over the sum of the chosen ones', which counts as 2^-14 at least; then times `scale`.
    What is not a number comes after every number, and then no weight is one. Ids are whole numbers.
    """

    out: Value
    x: Value
    n_used: int
    scoring: Scoring
    bias: str | None = None
    normalised: bool = False
    scale: float = 1.0
    n_groups: int = 1
    n_groups_used: int = 1
    group_best: int = 2


@dataclass(frozen=True)
class _OfExperts(_Operation):
    """Products with the matrices of the experts that `route` (a Route's out) names, in its order.

    weights: one tensor [n_expert, rows, width], or (old files) one [rows, width] per expert.
    bias: [n_expert, rows].
    """

    out: Value
    x: Value
    route: Value
    weights: tuple[str, ...]
    n_expert: int
    bias: str | None = None

    @property
    def n_used(self) -> int:
        """Experts of a token."""
        return self.route.width // 2


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


@dataclass(frozen=True)
class ExpertSum(_OfExperts):
    """The down projection of experts: out = sum of weight * (x @ matrix.T + bias), in the order of `route`.

    x: n_used parts side by side, one for each expert of the route. by_neuron: matrices with a row per neuron
    instead, [x.width / n_used, out.width], which can be skipped where the neuron is zero. The sum begins with
    0, and each product is rounded before it is added.
    """

    by_neuron: bool = False


@dataclass(frozen=True)
class SelectOutputs(_Operation):
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
    chosen experts, side by side.
    """

    route: Route
    mask: Mask


# Which neurons of an FFN are wanted: all, those that a predictor's scores name, those of some experts, or
# those of some experts that scores name.
Select = All | Mask | Route | MaskedRoute


@dataclass(frozen=True)
class Ffn(_Operation):
    """The feed-forward network of a layer: out = down(select(f(gate(h)) * g(up(h)))), h = norm(x).

    Neuron i is row i of gate and up and input i of down. norm: None where x is normalised already (a
    predictor or a router reads the norm's result too). gate: None where f applies to up alone. gate_act: f;
    up_act: g, or None. product: of gate and up. select: what is wanted of the neurons; the others add
    nothing. down: by output (Linear), or with a row per neuron, which can be skipped (TransposedLinear).

    With a Route the neurons are cut into experts, and a token has those of its own: gate and up are
    ExpertLinear, down is an ExpertSum, and values hold the neurons of the chosen experts side by side. So it
    is with a MaskedRoute, whose route is no part of the FFN.
    shared: a network that every token passes beside the experts of its layer.
    in_cut: what is left of h, gate_cut: of f, down_cut: of the neurons that down reads; None: all of it.
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
    in_cut: Cutoff | None = None
    gate_cut: Cutoff | None = None
    down_cut: Cutoff | None = None

    @property
    def primitives(self) -> tuple[Primitive, ...]:
        """The same as operations in order, each with the value that it makes."""
        route = self.select if isinstance(self.select, Route) else None
        found = (
            self.norm, self.in_cut, route, self.gate, self.up, self.gate_act, self.gate_cut,
            self.up_act, self.product, self.mask, self.down_cut, self.down,
        )  # fmt: skip
        return tuple(op for op in found if op is not None)

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
        return self.gate_act.out if self.gate_cut is None else self.gate_cut.out

    @property
    def selected(self) -> Value:
        """What down reads: the neurons, zero where they are not wanted."""
        return self.down.x

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
        is_cut = self.gate_cut is not None or self.down_cut is not None
        return has_zeros(self.gate_act.kind) or is_cut

    @property
    def leaves_out(self) -> bool:
        """Whether a token does not need every row: of neurons at zero, or of experts that are not its own."""
        return self.has_zeros or self.route is not None

    @property
    def by_neuron(self) -> bool:
        """Whether down has a row per neuron: then neurons can be skipped there, and shared by devices."""
        return isinstance(self.down, TransposedLinear)


def one_matrix(op: Linear | ExpertLinear) -> Linear:
    """A product of an FFN without experts: whoever asks has refused the others, or cannot meet them."""
    assert isinstance(op, Linear), f"{op.out.name} is a product of experts"
    return op


Primitive = (
    Embed
    | RMSNorm
    | LayerNorm
    | Linear
    | TransposedLinear
    | Rotate
    | Heads
    | TransposedHeads
    | Attention
    | ShortConv
    | DeltaNet
    | Activate
    | Multiply
    | Add
    | Scale
    | SoftCap
    | SignScores
    | Mask
    | Cutoff
    | Route
    | ExpertLinear
    | ExpertSum
    | SelectOutputs
)
Op = Primitive | Ffn
# Operations with a state: what they yield for a token depends on all before it, through a few numbers that
# the cache holds for a sequence (docs/DESIGN.md, "Recurrent states").
Recurrent = ShortConv | DeltaNet


def cut_products(graph: Graph) -> list[Linear]:
    """The matrix products, by output, whose inputs are cut, or are neurons of which some are."""
    cut = {op.out for op in graph.primitives if isinstance(op, Cutoff)}
    cut |= {ffn.selected for ffn in graph.ffns if ffn.gate_cut is not None}
    return [op for op in graph.primitives if isinstance(op, Linear) and op.x in cut]


def inputs_of(op: Op) -> list[Value]:
    """The values that an operation reads."""
    match op:
        case Embed():
            return []
        case Attention():
            return [op.q, op.k, op.v]
        case Add() | Multiply():
            return [op.a, op.b]
        case DeltaNet():
            return [op.x, op.alpha, op.beta]
        case Mask():
            return [op.x, op.scores]
        case Heads():
            return [op.x] if op.shared is None else [op.x, op.shared]
        case ExpertLinear() | ExpertSum():
            return [op.x, op.route]
        case Ffn():
            match op.select:
                case Mask():
                    return [op.x, op.select.scores]
                case Route():
                    return [op.x, op.select.x]
                case MaskedRoute():
                    return [op.x, op.select.route.out, op.select.mask.scores]
                case All():
                    return [op.x]
                case _:
                    assert_never(op.select)
        case (
            RMSNorm() | LayerNorm() | Linear() | TransposedLinear() | TransposedHeads() | Rotate()
            | ShortConv() | Activate() | Scale() | SoftCap() | SignScores() | Cutoff() | Route()
            | SelectOutputs()
        ):  # fmt: skip
            return [op.x]
        case _:
            assert_never(op)


@dataclass
class Graph:
    """The operations of one step in order. A whole model ends in the logits [n_outputs, n_vocab]."""

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
    def result(self) -> Value:
        """What the last operation leaves: logits, or of a part of a model the residual stream."""
        return self.ops[-1].out

    @property
    def primitives(self) -> Iterator[Primitive]:
        """All operations in order, those of the FFNs one by one."""
        for op in self.ops:
            yield from op.primitives if isinstance(op, Ffn) else (op,)

    @property
    def ffns(self) -> tuple[Ffn, ...]:
        """The FFNs of the layers, in order; not those beside experts."""
        return tuple(op for op in self.ops if isinstance(op, Ffn) and not op.shared)

    @property
    def is_cut(self) -> bool:
        """Whether small values are cut: then it matters which tokens are (Batch.cut)."""
        return any(isinstance(op, Cutoff) for op in self.primitives)

    @property
    def recurrent(self) -> tuple[Recurrent, ...]:
        """The operations with a state, in order."""
        return tuple(op for op in self.ops if isinstance(op, Recurrent))

    @property
    def n_layer(self) -> int:
        return 1 + max((op.layer for op in self.ops), default=NO_LAYER)

    @property
    def layer_starts(self) -> list[int]:
        """The index of the first operation of each layer, and of the first after the last layer."""
        starts: dict[int, int] = {}
        after = 0
        for index, op in enumerate(self.ops):
            if op.layer != NO_LAYER:
                starts.setdefault(op.layer, index)
                after = index + 1
        return [*(starts[layer] for layer in sorted(starts)), after]

    def cut(self, first_op: int, last_op: int) -> tuple[Graph, Value | None]:
        """The operations [first_op, last_op) as a graph of their own, and the value that enters it.

        A graph is cut between layers: the residual stream alone crosses. Raises InvalidRequestError
        elsewhere.
        """
        if not 0 <= first_op < last_op <= len(self.ops):
            raise InvalidRequestError(
                f"a graph of {len(self.ops)} operations has no part {first_op}:{last_op}"
            )
        part = Graph(self.ops[first_op:last_op], self.values)
        inner = {op.out for op in part.ops}
        entering = {value for op in part.ops for value in inputs_of(op)} - inner
        leaving = {value for op in self.ops[last_op:] for value in inputs_of(op)} & inner
        if len(entering) > 1 or leaving - {part.result}:
            raise InvalidRequestError(
                f"a graph is cut between layers, where one value crosses, not at operations "
                f"{first_op}:{last_op}"
            )
        return part, next(iter(entering), None)
