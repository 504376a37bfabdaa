"""The contents of a row for a class of Hugging Face checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hotset.convert.checkpoints.names import LAYER_TENSORS, TENSORS, TEXT_MODEL
from hotset.convert.hf_part import FamilyPart
from hotset.convert.hf_rope import HFRope
from hotset.convert.hf_values import integer
from hotset.model.architectures import ARCHITECTURES
from hotset.model.operations import RopeKind, Scoring

# Some classes' name of an entry of config.json → its name here.
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
    """Entries of config.json about experts.

    ff: the width of one. n, n_used: their number, and the number per token. normalised: whether weights are
    normalised; None: the row of ARCHITECTURES decides. ff_shared, n_shared: the width of the shared expert,
    or its width in experts. n_dense: the number of first layers without experts. groups: the number of groups
    of experts, and the number per token. softmax: whether the scoring is softmax; None: the row decides.

    scoring: of the class; None: the row decides. methods: values of topk_method → whether they use groups;
    the first is the default. None: the entry is not read.
    first_dense: mlp_layer_types names the layers without experts. Without it n_dense gives their number, or
    the first layer has none.
    says_ff, says_shared_ff: whether the file has a key for the width, and one for the shared expert's width.
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
    """The meaning of an `architectures` entry of config.json, in addition to the row of ARCHITECTURES.

    architecture: that row. layers: the text before the number of a layer. tensors, layer_tensors: names
    outside and inside the layers that differ from the tables of names.py. A target of several names has equal
    parts; one that ends with a period is the whole name; a number after # is the part of it.
    ff, activation, epsilon: names of entries of config.json. Without ff a model has no FFNs, without
    activation it has the row's. ff_of_width: gives the FFN's width from the model's, if config.json lacks it.
    tied: whether the output is the embedding, if config.json does not state it.
    defaults: entries that config.json may omit, with the values of transformers' configuration class.
    The sizes that every model has (layers, heads, vocabulary, width of the model and of the FFN) have no
    default here: transformers' values belong to one published model.
    required: entries that change the computation in a way that no key describes, and their only supported
    value. own_names: entry → its name in the class; the plain name does not count.
    numbers, integers, flags: keys of the file → entries: a positive number (null leaves the key out), an
    integer from 1 on, or a truth value. means: activation → the actual one, or a single one for all.
    windows: entries that name the layers with a sliding window; the class ignores the others.
    writes_pattern: write the layers with a window even if the row implies them: llama.cpp needs the key.
    named_windows: without layer_types in config.json no layer has a window, whatever the row says of files.
    sections: config.json may have mrope_section. sees: the model has a vision part, which is left out; the
    text model is in text_config. kv_heads: returns the number of heads of keys and values.
    norms_less_one: norms are stored minus one, all except whole_norms. rotates: the pairs of channels that
    the checkpoint's rows of q and k are for. partial: partial_rotary_factor is read.
    grouped_qkv: rows of the fused q, k and v are grouped by KV head. fused_gate: ffn_up, and ffn_up_shexp,
    has the rows of the gate, then the rows of up. stored_by_input: ends of the names of matrices that are
    stored a row per input. experts: None for a dense model.
    rope: reads the rotation. parts: the rest of the family. variant: returns the class for a config.json
    whose class name several models share.
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
        """Return whether the model has hidden states in place of logits."""
        return not ARCHITECTURES[self.architecture].causal

    def outer_target(self, stem: str) -> str | None:
        """Return GGUF's name of a tensor outside the layers."""
        return self.tensors.get(stem, TENSORS.get(stem))

    def target(self, stem: str) -> str | None:
        """Return GGUF's names of a tensor of a layer, with * for the number of an expert."""
        return self.layer_tensors.get(stem, LAYER_TENSORS.get(stem))

    def text_name(self, name: str) -> str:
        """Return a tensor's name in the text model of a checkpoint with other parts."""
        return TEXT_MODEL.sub("", name) if self.sees else name

    def turns_rows(self, architecture: str) -> bool:
        """Return whether a file of `architecture` has rows of queries and keys in pairs that RoPE rotates."""
        return ARCHITECTURES[architecture].rope == "norm" and self.rotates == "neox"

    def full_name(self, name: str) -> str:
        """Return a name with its first part, which OPT's .bin files and some adapters leave out."""
        prefix = self.layers.partition(".")[0] + "."
        return name if name.startswith((prefix, "lm_head.")) else prefix + name


def text_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the part of config.json about the text model of a model that sees; None if it has none."""
    names = "text_config", "language_config", "llm_config"
    return next((config[name] for name in names if isinstance(config.get(name), dict)), None)
