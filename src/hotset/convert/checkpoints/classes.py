"""What a row says of a class of Hugging Face checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hotset.convert.checkpoints.names import LAYER_TENSORS, TENSORS, TEXT_MODEL
from hotset.convert.hf_part import FamilyPart
from hotset.convert.hf_rope import HFRope
from hotset.convert.hf_values import integer
from hotset.model.architectures import ARCHITECTURES
from hotset.model.operations import RopeKind, Scoring

# What some classes call an entry of config.json → what it is called here.
SYNONYMS = {
    "num_local_experts": "num_experts",
    "n_routed_experts": "num_experts",
    "num_mtp_layers": "num_nextn_predict_layers",
    "n_embed": "hidden_size",  # of Falcon's first checkpoints, as the next two
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_embd": "hidden_size",  # of GPT-2, as the next
    "n_positions": "max_position_embeddings",
    "d_model": "hidden_size",  # of MPT, as the next three
    "n_heads": "num_attention_heads",
    "n_layers": "num_hidden_layers",
    "max_seq_len": "max_position_embeddings",
    "model_max_length": "max_position_embeddings",  # of Baichuan 13B and Kimi Linear
}


def grouped_heads(raw: dict[str, Any], n_head: int) -> int:
    """Return the heads of keys and values: num_key_value_heads, or as many as of queries."""
    return integer(raw, "num_key_value_heads", n_head)


def every_head(raw: dict[str, Any], n_head: int) -> int:
    """Return the heads of keys and values, if each head of queries has one."""
    return n_head


def multi_query_heads(raw: dict[str, Any], n_head: int) -> int:
    """Return the heads of keys and values: one, unless multi_query is false."""
    return 1 if raw.get("multi_query", True) is True else n_head


@dataclass(frozen=True)
class HFExperts:
    """Entries of config.json about experts: the width of one, how many there are and how many a token has,
    whether weights are normalised (None: the row of ARCHITECTURES says it), the
    width of what all tokens share or of how many experts it is, how many layers at the beginning have none,
    of how many groups experts are and how many a token has, and whether the scoring is softmax (None: that of
    the row).

    scoring: of the class; None: that of the row. methods: values of topk_method, the first where config.json
    has none, and whether they heed groups; None: it is not looked at.
    first_dense: mlp_layer_types names the layers without experts; without it n_dense says how many, or it is
    the first.
    says_ff, says_shared_ff: the file has a key for the width, and for that of what all tokens share.
    """

    ff: str = "moe_intermediate_size"
    n: str = "num_experts"
    n_used: str = "num_experts_per_tok"
    normalised: str | None = "norm_topk_prob"
    ff_shared: str | None = None
    n_shared: str | None = None
    n_dense: str | None = None
    groups: tuple[str, str] | None = None
    softmax: str | None = None
    scoring: Scoring | None = None
    methods: dict[str, bool] | None = None
    first_dense: bool = False
    says_ff: bool = True
    says_shared_ff: bool = False


@dataclass(frozen=True)
class HFClass:
    """What config.json's `architectures` entry means, beyond what the row of ARCHITECTURES says.

    architecture: that row. layers: what precedes the number of a layer. tensors, layer_tensors: names outside
    and inside the layers that differ from the tables of names.py. A target of several names has equal parts;
    one that ends with a period is the whole name; a number behind # is the part of it.
    ff, activation, epsilon: names of entries of config.json; without ff a model has no FFNs, without
    activation it has the row's. ff_of_width: the width of the FFN, from the model's, if config.json does not
    say it. tied: whether the output is the embedding, if config.json does not say it.
    defaults: entries that config.json may leave out, with the values of transformers' configuration class.
    The sizes that every model has (layers, heads, vocabulary, width of the model and of the FFN) have none
    here: transformers' are those of one published model.
    required: entries that change what a model computes in a way that no key describes, and the only value
    that is supported. own_names: entry → its name in the class; the plain name does not count.
    numbers, integers, flags: keys of the file → entries: a positive number (null leaves the key out), an
    integer from 1 on, or a truth value. means: activation → the one that is meant, or the one for all.
    windows: entries that say which layers have a sliding window; the class ignores the others.
    writes_pattern: the file says which layers have one even if the row does: llama.cpp needs the key.
    named_windows: no layer has one if config.json has no layer_types, whatever the row says of files.
    sections: config.json may have mrope_section. sees: a part of the checkpoint sees, and is left out; the
    text model is in text_config. kv_heads: gives the number of heads of keys and values.
    norms_less_one: norms are stored less one, all but whole_norms. rotates: the pairs of channels that the
    checkpoint's rows of q and k are meant for. partial: partial_rotary_factor is read.
    grouped_qkv: the rows of the fused q, k and v lie by KV head. fused_gate: ffn_up, and ffn_up_shexp, has
    the rows of the gate, then the rows of up. stored_by_input: ends of the names of matrices that are stored
    a row per input. experts: None for a dense model.
    rope: reads the rotation. parts: the rest of the family. variant: the class of a
    config.json that shares its name with other models.
    """

    architecture: str
    tensors: dict[str, str] = field(default_factory=dict)
    layers: str = "model.layers"
    layer_tensors: dict[str, str] = field(default_factory=dict)
    ff: str | None = "intermediate_size"
    ff_of_width: Callable[[int], int] | None = None
    activation: str | None = "hidden_act"
    epsilon: str | None = "rms_norm_eps"
    tied: bool = False
    defaults: dict[str, Any] = field(default_factory=dict)
    required: dict[str, Any] = field(default_factory=dict)
    own_names: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, str] = field(default_factory=dict)
    integers: dict[str, str] = field(default_factory=dict)
    flags: dict[str, str] = field(default_factory=dict)
    means: dict[str, str] | str = field(default_factory=dict)
    windows: tuple[str, ...] = ()
    writes_pattern: bool = False
    named_windows: bool = False
    sections: bool = False
    sees: bool = False
    kv_heads: Callable[[dict[str, Any], int], int] = grouped_heads
    norms_less_one: bool = False
    whole_norms: tuple[str, ...] = ("ssm_norm",)
    rotates: RopeKind = "neox"
    partial: bool = False
    grouped_qkv: bool = False
    fused_gate: bool = False
    stored_by_input: tuple[str, ...] = ()
    experts: HFExperts | None = None
    rope: type[HFRope] = HFRope
    parts: tuple[type[FamilyPart], ...] = ()
    variant: Callable[[HFClass, dict[str, Any]], HFClass] | None = None

    @property
    def is_encoder(self) -> bool:
        """Whether it has hidden states in place of logits."""
        return not ARCHITECTURES[self.architecture].causal

    def outer_target(self, stem: str) -> str | None:
        """Return GGUF's name of a tensor outside the layers."""
        return self.tensors.get(stem, TENSORS.get(stem))

    def target(self, stem: str) -> str | None:
        """Return GGUF's names of a tensor of a layer, with * for the number of an expert."""
        return self.layer_tensors.get(stem, LAYER_TENSORS.get(stem))

    def text_name(self, name: str) -> str:
        """The name of a tensor in the text model of a checkpoint that has other parts too."""
        return TEXT_MODEL.sub("", name) if self.sees else name

    def turns_rows(self, architecture: str) -> bool:
        """Return whether a file of `architecture` has rows of queries and keys in pairs that RoPE rotates."""
        return ARCHITECTURES[architecture].rope == "norm" and self.rotates == "neox"

    def full_name(self, name: str) -> str:
        """With the first part of each name, which OPT's .bin files, and some adapters, leave out."""
        prefix = self.layers.partition(".")[0] + "."
        return name if name.startswith((prefix, "lm_head.")) else prefix + name
