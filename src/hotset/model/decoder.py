"""The one decoder: describes a forward step of any supported architecture as a Graph.

It computes nothing and names no architecture: the facts come from ModelConfig. Values are named as the GGUF
tensors are ("blk.3.attn_q" is what blk.3.attn_q.weight yields), and every name can be asked for as a tap:

    embedding        [position_embd  inp: their sum]
    blk.N.attn_norm  attn_q  attn_k  attn_v  [attn_q_norm  attn_k_norm]  [attn_q_rope  attn_k_rope]
    blk.N.attn       what the heads yield, side by side       blk.N.attn_out  after attn_output
    blk.N.ffn_inp    the residual stream after attention      blk.N.ffn_norm  what the FFN reads
    [blk.N.ffn_pred_h  ffn_pred_h_act]  [blk.N.ffn_pred: a predictor's scores]
    blk.N.ffn_up  [ffn_gate  ffn_gate_act  ffn_up_act]        blk.N.ffn_act   one value per neuron: it fires
    [blk.N.ffn_masked: 0 where it was not predicted]          unless it is 0
    blk.N.ffn_down  blk.N.out
    output_inp  output_norm  logits                           only the rows whose logits are wanted
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from hotset.errors import UnsupportedModelError
from hotset.formats.planes import PLANE_GROUP
from hotset.formats.quants import DECODABLE, GGMLType
from hotset.model.config import ModelConfig
from hotset.model.graph import (
    Activate,
    ActivationKind,
    Add,
    Attention,
    Embed,
    Graph,
    LayerNorm,
    Linear,
    Mask,
    Multiply,
    RMSNorm,
    Rotate,
    SelectOutputs,
    SignScores,
    TransposedLinear,
    Value,
)

if TYPE_CHECKING:
    from hotset.formats.gguf import TensorInfo
    from hotset.model.predictor import Predictor

# Tensors that a file may have without being read: facts that some converters leave in it as tensors (the
# configuration has read them from the keys), predictors that are not in use, and, where one form of the down
# projection is read, the others.
REDUNDANT_TENSORS = re.compile(
    r"rope_freqs\.weight|blk\.\d+\.("
    r"(attn_rot_embd|attn\.rotary_emb)\..*|(fc1|fc2|svd_a|svd_b|sign)\.weight|always\.bias|"
    r"ffn_down\.weight|ffn_down_t\.(codes|scales))"
)


# Types of what hotset builds itself: signs and codes of planes, and the scales of planes.
_BYTES, _SCALES = frozenset({GGMLType.I8}), frozenset({GGMLType.F16})


def describe(
    config: ModelConfig, tensors: Mapping[str, TensorInfo], predictor: Predictor | None = None
) -> Graph:
    """The step of `config` over the weights in `tensors` (name → TensorInfo, shapes innermost first).

    With a predictor, each layer computes only the neurons that it selects. Raises UnsupportedModelError where
    a tensor is missing, has another shape than the configuration says, is of a type that nothing computes
    with, or is not one that the architecture uses.
    """
    graph = Graph()
    value, add = graph.value, graph.add
    weights = _Weights(config, tensors)
    d, eps, rope = config.n_embd, config.norm_eps, config.rope
    n_head, n_head_kv, head_dim, head_dim_v = (
        config.n_head,
        config.n_head_kv,
        config.head_dim,
        config.head_dim_v,
    )

    def linear(x: Value, tensor: str, width: int, name: str | None = None) -> Value:
        weight, bias = weights.matrix(tensor, x.width, width), weights.bias(tensor, width)
        return add(Linear(value(name or tensor, width), x, weight, bias))

    def norm(x: Value, tensor: str, name: str | None = None) -> Value:
        out, weight = value(name or tensor, x.width), weights.vector(tensor, x.width)
        if config.norm == "layer":
            return add(LayerNorm(out, x, weight, weights.bias(tensor, x.width, required=True), eps))
        return add(RMSNorm(out, x, weight, eps))

    def heads(x: Value, blk: str) -> tuple[Value, Value, Value]:
        """q, k and v: from three matrices, or from one whose rows are those of q, then k, then v."""
        widths = {
            "attn_q": n_head * head_dim,
            "attn_k": n_head_kv * head_dim,
            "attn_v": n_head_kv * head_dim_v,
        }
        if f"{blk}.attn_qkv.weight" not in tensors:
            q, k, v = (linear(x, f"{blk}.{name}", width) for name, width in widths.items())
            return q, k, v
        n_rows, first, parts = sum(widths.values()), 0, []
        weight, bias = weights.matrix(f"{blk}.attn_qkv", d, n_rows), weights.bias(f"{blk}.attn_qkv", n_rows)
        for name, width in widths.items():
            parts.append(add(Linear(value(f"{blk}.{name}", width), x, weight, bias, first)))
            first += width
        return parts[0], parts[1], parts[2]

    def rotated(x: Value, n_head: int) -> Value:
        """The heads of q or k at their positions, normalised before where the architecture does so."""
        name = x.name
        if config.qk_norm:
            weight = weights.vector(f"{name}_norm", head_dim)
            x = add(RMSNorm(value(f"{name}_norm", x.width), x, weight, eps, n_head))
        return x if rope is None else add(Rotate(value(f"{name}_rope", x.width), x, n_head, head_dim, rope))

    def activated(x: Value, kind: ActivationKind | None, name: str | None = None) -> Value:
        if kind is None:
            return x
        threshold = config.activation.threshold if kind == "fatrelu" else 0.0
        return add(Activate(value(name or f"{x.name}_act", x.width), x, kind, threshold))

    def low_rank_scores(
        blk: str, x: Value, first: str, second: str, kind: ActivationKind | None, n: int
    ) -> Value:
        rank = weights.n_rows(f"{blk}.{first}")
        hidden = activated(linear(x, f"{blk}.{first}", rank, name=f"{blk}.ffn_pred_h"), kind)
        out, bias = value(f"{blk}.ffn_pred", n), weights.bias(f"{blk}.always", n)
        return add(Linear(out, hidden, weights.matrix(f"{blk}.{second}", rank, n), bias))

    def sign_scores(blk: str, x: Value, n: int) -> Value:
        out, bias = value(f"{blk}.ffn_pred", n), weights.bias(f"{blk}.always", n)
        return add(SignScores(out, x, weights.matrix(f"{blk}.sign", -(-d // 8), n, _BYTES), bias))

    def down(blk: str, neurons: Value) -> Value:
        """The down projection as the file has it: a row per neuron, if possible, or a row per output."""
        out, transposed = value(f"{blk}.ffn_down", d), f"{blk}.ffn_down_t"
        has_own_bias = f"{transposed}.bias" in tensors
        bias = weights.bias(transposed if has_own_bias else f"{blk}.ffn_down", d)
        if f"{transposed}.weight" in tensors:
            return add(TransposedLinear(out, neurons, weights.matrix(transposed, d, neurons.width), bias))
        if f"{transposed}.codes" in tensors:
            codes, scales = weights.planes(transposed, d, neurons.width)
            return add(TransposedLinear(out, neurons, codes, bias, scales))
        return add(Linear(out, neurons, weights.matrix(f"{blk}.ffn_down", neurons.width, d), bias))

    x = add(Embed(value("embedding", d), weights.matrix("token_embd", d, config.n_vocab)))
    if (first := config.first_position) is not None:
        weight = weights.matrix("position_embd", d, config.n_ctx_train + first)
        positions = add(Embed(value("position_embd", d), weight, "position", first))
        x = add(Add(value("inp", d), x, positions))

    for i in range(config.n_layer):
        blk, n_ff, layer_input = f"blk.{i}", config.n_ff[i], x

        # A parallel FFN has no norm of its own: what it reads is called attn_norm, and attention reads
        # attn_norm_2, or the same again.
        ffn_norm = f"{blk}.attn_norm" if config.parallel else f"{blk}.ffn_norm"
        has_second = config.parallel and f"{blk}.attn_norm_2.weight" in tensors
        h = norm(x, f"{blk}.attn_norm_2" if has_second else f"{blk}.attn_norm", name=f"{blk}.attn_norm")
        q, k, v = heads(h, blk)
        q, k = rotated(q, n_head), rotated(k, n_head_kv)
        attn = value(f"{blk}.attn", n_head * head_dim_v)
        add(
            Attention(
                attn, q, k, v, i, n_head, n_head_kv, head_dim, head_dim_v,
                scale=1 / math.sqrt(head_dim), window=config.windows[i],
            )
        )  # fmt: skip
        attn_out = linear(attn, f"{blk}.attn_output", d, name=f"{blk}.attn_out")
        x = add(Add(value(f"{blk}.ffn_inp", d), x, attn_out))

        kind, always = None, 0  # neurons below `always` have no score
        if predictor is not None:
            always = predictor.first[i] if predictor.first else 0
            kind = predictor.kind if always < n_ff else None
        scores: Value | None = None
        if kind == "mlp":
            p = layer_input if config.predictor_input == "layer_input" else x
            scores = low_rank_scores(blk, p, "fc1", "fc2", "relu", n_ff - always)
        h = norm(layer_input if config.parallel else x, ffn_norm, name=f"{blk}.ffn_norm")
        if kind == "svd":
            scores = low_rank_scores(blk, h, "svd_a", "svd_b", None, n_ff - always)
        if kind == "sign":
            scores = sign_scores(blk, h, n_ff - always)

        if config.gated:
            gate, up = linear(h, f"{blk}.ffn_gate", n_ff), linear(h, f"{blk}.ffn_up", n_ff)
            gate, up = activated(gate, config.activation.gate), activated(up, config.activation.up)
            neurons = add(Multiply(value(f"{blk}.ffn_act", n_ff), gate, up))
        else:
            up = linear(h, f"{blk}.ffn_up", n_ff)
            neurons = activated(up, config.activation.gate, name=f"{blk}.ffn_act")
        if scores is not None and predictor is not None:
            masked = value(f"{blk}.ffn_masked", n_ff)
            neurons = add(Mask(masked, neurons, scores, predictor.thresholds[i], always))
        x = add(Add(value(f"{blk}.out", d), x, down(blk, neurons)))

    x = norm(add(SelectOutputs(value("output_inp", d), x)), "output_norm")
    output = "output" if "output.weight" in tensors else "token_embd"  # tied: the embedding serves twice
    linear(x, output, config.n_vocab, name="logits")
    weights.refuse_unused()
    return graph


class _Weights:
    """Asks for each tensor with its shape, and remembers what was asked for."""

    def __init__(self, config: ModelConfig, tensors: Mapping[str, TensorInfo]) -> None:
        self.config, self.tensors = config, tensors
        self.used: set[str] = set()

    def matrix(self, name: str, n_in: int, n_out: int, types: Collection[GGMLType] = DECODABLE) -> str:
        return self._ask(f"{name}.weight", (n_in, n_out), types)

    def vector(self, name: str, n: int) -> str:
        return self._ask(f"{name}.weight", (n,))

    def bias(self, name: str, n: int, *, required: bool = False) -> str | None:
        """The bias of a tensor, where it has one or must have one."""
        required = required or name.rpartition(".")[2] in self.config.biased
        return self._ask(f"{name}.bias", (n,)) if required or f"{name}.bias" in self.tensors else None

    def n_rows(self, name: str) -> int:
        """Rows of a matrix whose size no key says: the rank of a predictor."""
        info = self.tensors.get(f"{name}.weight")
        if info is None:
            raise UnsupportedModelError(f"the file lacks the tensor {name}.weight of its predictor")
        return int(info.shape[-1])

    def planes(self, name: str, n_out: int, n_neurons: int) -> tuple[str, str]:
        """Codes and scales of a matrix in planes; the width of the codes says which type they are."""
        if n_out % PLANE_GROUP:  # their kernels take as many outputs at a time
            raise UnsupportedModelError(
                f"the tensor {name}.codes is of {n_out} outputs, which planes cannot hold"
            )
        wide = n_out if tuple(self.tensors[f"{name}.codes"].shape) == (n_out, n_neurons) else n_out // 2
        codes = self._ask(f"{name}.codes", (wide, n_neurons), _BYTES)
        return codes, self._ask(f"{name}.scales", (n_out, -(-n_neurons // PLANE_GROUP)), _SCALES)

    def _ask(self, name: str, shape: tuple[int, ...], types: Collection[GGMLType] = DECODABLE) -> str:
        info = self.tensors.get(name)
        if info is None:
            raise UnsupportedModelError(f"the file lacks the tensor {name} {list(shape)}")
        if tuple(info.shape) != shape:
            raise UnsupportedModelError(
                f"the tensor {name} is {list(info.shape)}, but the file's keys say {list(shape)}"
            )
        if info.type not in types:
            raise UnsupportedModelError(
                f"the tensor {name} has the type {info.type.name}, which hotset does not compute with; "
                "use a file of another type"
            )
        self.used.add(name)
        return name

    def refuse_unused(self) -> None:
        """A tensor that nothing reads belongs to a model that is not the one described."""
        unused = [n for n in self.tensors if n not in self.used and not REDUNDANT_TENSORS.fullmatch(n)]
        if unused:
            raise UnsupportedModelError(
                f"the file has {len(unused)} tensors that no {self.config.architecture} model uses, "
                f"such as {unused[0]}"
            )
