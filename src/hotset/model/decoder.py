"""The one decoder: describes a forward step of any supported architecture as a Graph.

It computes nothing and names no architecture: the facts come from ModelConfig. Values are named as the GGUF
tensors are ("blk.3.attn_q" is what blk.3.attn_q.weight yields), and every name can be asked for as a tap:

    embedding
    blk.N.attn_norm  attn_q  attn_k  attn_v  [attn_q_norm  attn_k_norm]  attn_q_rope  attn_k_rope
    blk.N.attn       what the heads yield, side by side       blk.N.attn_out  after attn_output
    blk.N.ffn_inp    the residual stream after attention      blk.N.ffn_norm  what the FFN reads
    blk.N.ffn_gate  ffn_up  ffn_gate_act  [ffn_up_act]        blk.N.ffn_act   one value per neuron
    blk.N.ffn_down  blk.N.out
    output_inp  output_norm  logits                           only the rows whose logits are wanted
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from hotset.errors import UnsupportedModelError
from hotset.model.config import ModelConfig
from hotset.model.graph import (
    Activate,
    ActivationKind,
    Add,
    Attention,
    Embed,
    Graph,
    Linear,
    Multiply,
    RMSNorm,
    Rotate,
    SelectOutputs,
    Value,
)

if TYPE_CHECKING:
    from hotset.formats.gguf import TensorInfo

# Facts that some converters leave in a file as tensors; the configuration has read them from the keys.
REDUNDANT_TENSORS = re.compile(r"rope_freqs\.weight|blk\.\d+\.(attn_rot_embd|attn\.rotary_emb)\..*")


def describe(config: ModelConfig, tensors: Mapping[str, TensorInfo]) -> Graph:
    """The step of `config` over the weights in `tensors` (name → TensorInfo, shapes innermost first).

    Raises UnsupportedModelError where a tensor is missing, has another shape than the configuration says,
    or is not one that the architecture uses.
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

    def linear(x: Value, tensor: str, width: int, *, biased: bool = False, name: str | None = None) -> Value:
        weight, bias = weights.matrix(tensor, x.width, width), weights.bias(tensor, width, required=biased)
        return add(Linear(value(name or tensor, width), x, weight, bias))

    def norm(x: Value, tensor: str, n_head: int = 1) -> Value:
        return add(RMSNorm(value(tensor, x.width), x, weights.vector(tensor, x.width // n_head), eps, n_head))

    def rotated(x: Value, n_head: int) -> Value:
        """The heads of q or k at their positions, normalised before where the architecture does so."""
        name = x.name
        if config.qk_norm:
            x = norm(x, f"{name}_norm", n_head)
        return add(Rotate(value(f"{name}_rope", x.width), x, n_head, head_dim, rope))

    def activated(x: Value, kind: ActivationKind | None) -> Value:
        if kind is None:
            return x
        threshold = config.activation.threshold if kind == "fatrelu" else 0.0
        return add(Activate(value(f"{x.name}_act", x.width), x, kind, threshold))

    x = add(Embed(value("embedding", d), weights.matrix("token_embd", d, config.n_vocab)))
    for i in range(config.n_layer):
        blk, n_ff, biased = f"blk.{i}", config.n_ff[i], config.qkv_bias

        h = norm(x, f"{blk}.attn_norm")
        q = linear(h, f"{blk}.attn_q", n_head * head_dim, biased=biased)
        k = linear(h, f"{blk}.attn_k", n_head_kv * head_dim, biased=biased)
        v = linear(h, f"{blk}.attn_v", n_head_kv * head_dim_v, biased=biased)
        q, k = rotated(q, n_head), rotated(k, n_head_kv)
        attn = value(f"{blk}.attn", n_head * head_dim_v)
        add(
            Attention(
                attn, q, k, v, i, n_head, n_head_kv, head_dim, head_dim_v,
                scale=1 / math.sqrt(head_dim), window=config.windows[i],
            )
        )  # fmt: skip
        x = add(
            Add(value(f"{blk}.ffn_inp", d), x, linear(attn, f"{blk}.attn_output", d, name=f"{blk}.attn_out"))
        )

        h = norm(x, f"{blk}.ffn_norm")
        gate, up = linear(h, f"{blk}.ffn_gate", n_ff), linear(h, f"{blk}.ffn_up", n_ff)
        gate, up = activated(gate, config.activation.gate), activated(up, config.activation.up)
        neurons = add(Multiply(value(f"{blk}.ffn_act", n_ff), gate, up))
        x = add(Add(value(f"{blk}.out", d), x, linear(neurons, f"{blk}.ffn_down", d)))

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

    def matrix(self, name: str, n_in: int, n_out: int) -> str:
        return self._ask(f"{name}.weight", (n_in, n_out))

    def vector(self, name: str, n: int) -> str:
        return self._ask(f"{name}.weight", (n,))

    def bias(self, name: str, n: int, *, required: bool = False) -> str | None:
        return self._ask(f"{name}.bias", (n,)) if required or f"{name}.bias" in self.tensors else None

    def _ask(self, name: str, shape: tuple[int, ...]) -> str:
        info = self.tensors.get(name)
        if info is None:
            raise UnsupportedModelError(f"the file lacks the tensor {name} {list(shape)}")
        if tuple(info.shape) != shape:
            raise UnsupportedModelError(
                f"the tensor {name} is {list(info.shape)}, but the file's keys say {list(shape)}"
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
