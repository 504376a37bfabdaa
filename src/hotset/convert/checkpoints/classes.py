"""What a row says of a class of Hugging Face checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from hotset.convert.checkpoints.names import LLAMA_NAMES, LLAMA_TENSORS, TEXT_MODEL
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


KVHeads = Literal["grouped", "every", "multi_query", "falcon"]
DynamicRope = Literal["base", "key", "beyond"]


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
    transposed: matrices of all experts in one tensor are stored by input, and gate and up column by column.
    by_input: they may be stored by input, the columns of the gate first.
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
    transposed: bool = False
    by_input: bool = False


@dataclass(frozen=True)
class HFClass:
    """What config.json's `architectures` entry means, beyond what the row of ARCHITECTURES says.

    architecture: that row. tensors: stems of tensors outside the layers → GGUF's. layers: what stands before
    the number of a layer. layer_tensors: stems within it, with * where the number of an expert stands; two
    names of GGUF's: the rows of the first, and then those of the second. ff, activation, epsilon: names of
    entries of config.json; ff None: there are no FFNs; without an activation it is that of the row.
    tied: whether the output is the embedding, where config.json does not say.
    defaults: entries that config.json may leave out, with the values of transformers' configuration class.
    The sizes that every model has (layers, heads, vocabulary, width of the model and of the FFN) have none
    here: transformers' are those of one published model.
    required: entries that change what a model computes in a way that no key describes, and the only value
    that is supported.
    windows: entries that say which layers have a sliding window; the class ignores the others.
    writes_pattern: the file says which layers have one even where the row does: llama.cpp needs the key.
    named_windows: none has one where config.json has no layer_types, whatever the row says of files.
    sections: config.json may have mrope_section.
    sees: the checkpoint has a part that sees, which is left out, and its text model in text_config.
    indexed, compressed: see Architecture.
    kv_heads: num_key_value_heads says how many there are (grouped), or each head has its own whatever it says
    (every), or multi_query whether there is one, or Falcon's entries do. ff_of_width: the width of the FFN,
    of the model's, where config.json does not say it.
    dynamic: what the RoPE scaling of this name does: its alpha is in the base (base) or a key of the file
    (key), or it begins where the context ends (beyond). None: it is refused.
    log_multiplier: YaRN's mscale_all_dim is a key of the file. means: activation → the one that is meant, or
    the one that is meant whatever config.json says.
    own_names: entry → what the class calls it; that of the plain name does not count.
    numbers, integers, flags: keys of the GGUF file that are an entry of config.json as it stands, a positive
    number (null leaves the key out), an integer from 1 on or a truth value.
    query_scalar: the entry whose inverse root scales the scores; None: the width of a head is.
    query_factor: queries and keys pass norms without weights, and queries are multiplied by this entry.
    layer_bases: layer_rope_theta may hold the base of each layer's rotation, the same for all, or 0: none.
    from_last: layers without a window or a rotation are counted from the last one.
    norms_less_one: norms are stored less one, all but whole_norms. rotates: the pairs of channels that the
    checkpoint's rows of q and k are meant for. partial: whether partial_rotary_factor is heeded.
    grouped_qkv: the rows of the fused q, k and v lie by KV head. fused_gate: ffn_up, and ffn_up_shexp, has
    the rows of the gate and then those of up. depth_scales: config.json has MiniCPM's scales.
    scattered_groups: a key is of each so-many-th query head, and not of as many side by side. latent: keys
    and values are made of one vector (model/config.py, Latent).
    activates_up: the activation stands before up as well.
    stored_by_input: how the names of matrices end that are stored a row per input.
    experts: None: there are none. layouts: sliding_window_layout and rope_layout say which layers have a
    window and a rotation. short_conv: layer_types (or full_attn_idxs) says which layers have a short
    convolution in place of attention. adjusted_ff: block_auto_adjust_ff_dim may say that the width of the FFN
    is to be computed. altup: see HFAltUp; layers may have widths of the FFN of their own. window_heads: see
    HFWindowHeads.
    gated_streams: see HFGatedStreams.
    layer_keys: tensors of a layer of one number each, which are a key of the file, without an architecture.
    ternary: quantization_config may say that matrices of layers count as -s, 0 and s, s being their mean
    magnitude.
    parts: layers_block_type (or hybrid_override_pattern) says what a layer is: a state space, attention, an
    FFN or experts; without experts the class is another row. state_space: entries of the number of its heads,
    their channels, groups, numbers of B and C, and the kernel of the convolution.
    channel_space: of Mamba, entries of its channels over the model's, its numbers of B and C, the kernel of
    the convolution, and the rank of dt.
    bare: targets whose names in the file say all. multiplied: config.json has Falcon-H1's multipliers, which
    become part of matrices.
    padded_positions: the first rows of the learned positions, up to pad_token_id, are of no token.
    unit_output_at: in models of so many tokens each row of the output counts as a vector of length 1.
    """

    architecture: str
    tensors: dict[str, str] = field(default_factory=lambda: LLAMA_TENSORS)
    layers: str = "model.layers"
    layer_tensors: dict[str, str] = field(default_factory=lambda: LLAMA_NAMES)
    ff: str | None = "intermediate_size"
    activation: str | None = "hidden_act"
    epsilon: str | None = "rms_norm_eps"
    tied: bool = False
    defaults: dict[str, Any] = field(default_factory=dict)
    required: dict[str, Any] = field(default_factory=dict)
    numbers: dict[str, str] = field(default_factory=dict)
    integers: dict[str, str] = field(default_factory=dict)
    flags: dict[str, str] = field(default_factory=dict)
    windows: tuple[str, ...] = ()
    writes_pattern: bool = False
    named_windows: bool = False
    sections: bool = False
    sees: bool = False
    indexed: bool = False
    compressed: bool = False
    kv_heads: KVHeads = "grouped"
    ff_of_width: Callable[[int], int] | None = None
    dynamic: DynamicRope | None = None
    log_multiplier: bool = False
    means: dict[str, str] | str = field(default_factory=dict)
    own_names: dict[str, str] = field(default_factory=dict)
    query_scalar: str | None = None
    query_factor: str | None = None
    layer_bases: bool = False
    from_last: bool = False
    norms_less_one: bool = False
    whole_norms: tuple[str, ...] = ("ssm_norm",)
    rotates: RopeKind = "neox"
    partial: bool = False
    grouped_qkv: bool = False
    depth_scales: bool = False
    scattered_groups: bool = False
    fused_gate: bool = False
    latent: bool = False
    activates_up: bool = False
    stored_by_input: tuple[str, ...] = ()
    experts: HFExperts | None = None
    layouts: bool = False
    short_conv: bool = False
    adjusted_ff: bool = False
    altup: bool = False
    window_heads: bool = False
    gated_streams: bool = False
    layer_keys: dict[str, str] = field(default_factory=dict)
    ternary: bool = False
    parts: bool = False
    state_space: tuple[str, str, str, str, str] | None = None
    channel_space: tuple[str, str, str, str] | None = None
    bare: tuple[str, ...] = ()
    multiplied: bool = False
    padded_positions: bool = False
    unit_output_at: int | None = None

    @property
    def is_encoder(self) -> bool:
        """Whether it has hidden states in place of logits."""
        return not ARCHITECTURES[self.architecture].causal

    @property
    def packed(self) -> bool:
        """Whether experts may be in MXFP4: targets of their codes (.blocks) and exponents (.scales)."""
        return any(target.endswith(".blocks") for target in self.layer_tensors.values())

    def text_name(self, name: str) -> str:
        """The name of a tensor in the text model of a checkpoint that has other parts too."""
        return TEXT_MODEL.sub("", name) if self.sees else name

    def full_name(self, name: str) -> str:
        """With the first part of each name, which OPT's .bin files, and some adapters, leave out."""
        prefix = self.layers.partition(".")[0] + "."
        return name if name.startswith((prefix, "lm_head.")) else prefix + name

    def turns_rows(self, architecture: str) -> bool:
        """Whether rows of queries and keys lie otherwise in files of an architecture: in pairs that RoPE
        rotates."""
        return ARCHITECTURES[architecture].rope == "norm" and self.rotates == "neox"
