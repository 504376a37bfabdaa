"""A Hugging Face config.json as the keys of a GGUF file: one row of facts per class, and what they share.

config.json is a stranger's file: every number has a type and a range, and what is not known is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal, assert_never

import numpy as np

from hotset.convert.fp8 import block_of, is_fp8
from hotset.convert.hf_rwkv import NAMES_6, NAMES_7, HFRwkv, ffn_width_6
from hotset.convert.hf_values import integer, number
from hotset.errors import FormatError, ModelNotFoundError, UnsupportedModelError, did_you_mean
from hotset.files import read_small_text
from hotset.model.config import (
    ARCHITECTURES,
    DRELU,
    EPSILON_KEYS,
    FATRELU_THRESHOLD_KEY,
    LLAMA3_FACTORS,
    LONG_FACTORS,
    MAX_CONV_KERNEL,
    MAX_HEAD_DIM,
    MAX_STATE_HEADS,
    REFUSED,
    SCORINGS,
    SHORT_FACTORS,
    UP_ACTIVATION_KEY,
    YARN_LOG_MULTIPLIER,
    ChannelMixer,
    DeltaMixer,
    FFNActivation,
    StateSpaceMixer,
    parse_activation,
)
from hotset.model.operations import RopeKind, Scoring
from hotset.parameters import shown

_LLAMA_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_EXPERT_NAMES = {  # and as transformers holds them in memory
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.*.gate_proj": "ffn_gate_exps",
    "mlp.experts.*.up_proj": "ffn_up_exps",
    "mlp.experts.*.down_proj": "ffn_down_exps",
    "mlp.experts.gate_up_proj": "ffn_gate_exps ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
_CONV_TYPES = ("full_attention", "conv")
_DELTA_TYPES = ("full_attention", "linear_attention")
_PARTS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}  # of a pattern
_NO_LIMITS = ([0.0, math.inf], [0.0, {"__float__": "Infinity"}])
_LEGACY_PARTS = {"mamba": "linear_attention", "attention": "full_attention"}
_LLAMA_TENSORS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


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
}


def _four_times(n_embd: int) -> int:
    return 4 * n_embd


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
    first_dense: mlp_layer_types names the layers without experts; without it that is the first.
    says_ff, says_shared_ff: the file has a key for the width, and for that of what all tokens share.
    transposed: matrices of all experts in one tensor are stored by input, and gate and up column by column.
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
    named_windows: none has one where config.json has no layer_types, whatever the row says of files.
    sections: config.json may have mrope_section.
    sees: the checkpoint has a part that sees, which is left out, and its text model in text_config.
    indexed: see Architecture.
    kv_heads: num_key_value_heads says how many there are (grouped), or each head has its own whatever it says
    (every), or multi_query whether there is one, or Falcon's entries do. ff_of_width: the width of the FFN,
    of the model's, where config.json does not say it.
    dynamic: what the RoPE scaling of this name does: its alpha is in the base (base) or a key of the file
    (key), or it begins where the context ends (beyond). None: it is refused.
    log_multiplier: YaRN's mscale_all_dim is a key of the file. means: activation → the one that is meant.
    own_names: entry → what the class calls it; that of the plain name does not count.
    numbers, integers, flags: keys of the GGUF file that are an entry of config.json as it stands, a positive
    number (null leaves the key out), an integer from 1 on or a truth value.
    query_scalar: the entry whose inverse root scales the scores; None: the width of a head is.
    norms_less_one: norms are stored less one. rotates: the pairs of channels that the checkpoint's rows of q
    and k are meant for. partial: whether partial_rotary_factor is heeded.
    grouped_qkv: the rows of the fused q, k and v lie by KV head. fused_gate: ffn_up has the rows of the gate
    and then those of up. depth_scales: config.json has MiniCPM's scales. scattered_groups: a key is of
    each so-many-th query head, and not of as many side by side. latent: keys and values are made of
    one vector (model/config.py, Latent).
    activates_up: the activation stands before up as well.
    stores_by_input: matrices of layers are stored a row per input.
    experts: None: there are none. layouts: sliding_window_layout and rope_layout say which layers have a
    window and a rotation. short_conv: layer_types (or full_attn_idxs) says which layers have a short
    convolution in place of attention. adjusted_ff: block_auto_adjust_ff_dim may say that the width of the FFN
    is to be computed. altup: see HFAltUp; layers may have widths of the FFN of their own. window_heads: see
    HFWindowHeads.
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
    """

    architecture: str
    tensors: dict[str, str] = field(default_factory=lambda: _LLAMA_TENSORS)
    layers: str = "model.layers"
    layer_tensors: dict[str, str] = field(default_factory=lambda: _LLAMA_NAMES)
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
    named_windows: bool = False
    sections: bool = False
    sees: bool = False
    indexed: bool = False
    kv_heads: KVHeads = "grouped"
    ff_of_width: Callable[[int], int] | None = None
    dynamic: DynamicRope | None = None
    log_multiplier: bool = False
    means: dict[str, str] = field(default_factory=dict)
    own_names: dict[str, str] = field(default_factory=dict)
    query_scalar: str | None = None
    norms_less_one: bool = False
    rotates: RopeKind = "neox"
    partial: bool = False
    grouped_qkv: bool = False
    depth_scales: bool = False
    scattered_groups: bool = False
    fused_gate: bool = False
    latent: bool = False
    activates_up: bool = False
    stores_by_input: bool = False
    experts: HFExperts | None = None
    layouts: bool = False
    short_conv: bool = False
    adjusted_ff: bool = False
    altup: bool = False
    window_heads: bool = False
    layer_keys: dict[str, str] = field(default_factory=dict)
    ternary: bool = False
    parts: bool = False
    state_space: tuple[str, str, str, str, str] | None = None
    channel_space: tuple[str, str, str, str] | None = None
    bare: tuple[str, ...] = ()
    multiplied: bool = False
    padded_positions: bool = False

    @property
    def is_encoder(self) -> bool:
        """Whether it has hidden states in place of logits."""
        return not ARCHITECTURES[self.architecture].causal

    @property
    def packed(self) -> bool:
        """Whether experts may be in MXFP4: targets of their codes (.blocks) and exponents (.scales)."""
        return any(target.endswith(".blocks") for target in self.layer_tensors.values())


_LLAMA_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
}
_QWEN_DEFAULTS: dict[str, Any] = _LLAMA_DEFAULTS | {
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
}
_MIXTRAL: dict[str, Any] = {
    "defaults": {
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "rope_theta": 1e6,
    },
    "windows": ("sliding_window",),
}
_FALCON = HFClass(
    "falcon",
    kv_heads="falcon",
    ff_of_width=_four_times,
    tensors={
        "transformer.word_embeddings": "token_embd",
        "transformer.ln_f": "output_norm",
        "lm_head": "output",
    },
    layers="transformer.h",
    layer_tensors={
        "input_layernorm": "attn_norm",
        "ln_mlp": "attn_norm",
        "ln_attn": "attn_norm_2",
        "self_attention.query_key_value": "attn_qkv",
        "self_attention.dense": "attn_output",
        "mlp.dense_h_to_4h": "ffn_up",
        "mlp.dense_4h_to_h": "ffn_down",
    },
    ff="ffn_hidden_size",
    activation="activation",
    epsilon="layer_norm_epsilon",
    tied=True,
    # Falcon's own code never reads max_position_embeddings: its checkpoints were trained with 2048.
    defaults={"activation": "gelu", "layer_norm_epsilon": 1e-5, "max_position_embeddings": 2048},
    required={"alibi": False, "parallel_attn": True},
    grouped_qkv=True,
)
_GEMMA: dict[str, Any] = {
    "layer_tensors": {
        **_LLAMA_NAMES,
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
    "activation": "hidden_activation",
    "tied": True,
    "query_scalar": "query_pre_attn_scalar",
    "required": {"use_bidirectional_attention": False},
    "norms_less_one": True,
}
_GEMMA_DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_ALTUP_TENSORS = {
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    "model.altup_projections.*": "altup_proj",
    "model.altup_unembed_projections.*": "altup_unembd_proj",
}
_ALTUP_NAMES = {
    "altup.correct_output_scale": "altup_correct_scale",
    "altup.correction_coefs": "altup_correct_coef",
    "altup.prediction_coefs": "altup_predict_coef",
    "altup.modality_router": "altup_router",
    "altup.router_norm": "altup_router_norm",
    "laurel.linear_left": "laurel_l",
    "laurel.linear_right": "laurel_r",
    "laurel.post_laurel_norm": "laurel_post_norm",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
}
_GEMMA3N_DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "num_key_value_heads": 2,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "sliding_window": 512,
    "final_logit_softcapping": 30.0,
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
    "altup_num_inputs": 4,
    "num_kv_shared_layers": 15,
    "laurel_rank": 64,
}
_LFM2_NAMES = {
    "operator_norm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
    "ffn_norm": "ffn_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
}
_LFM2: dict[str, Any] = {
    "tensors": {
        "model.embed_tokens": "token_embd",
        "model.embedding_norm": "token_embd_norm",
        "lm_head": "output",
    },
    "activation": None,
    "epsilon": "norm_eps",
    "tied": True,
    "required": {"conv_bias": False},
    "short_conv": True,
}
_LFM2_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 128000,
    "norm_eps": 1e-5,
    "rope_theta": 1e6,
    "conv_L_cache": 3,
}
_SSM_NAMES = {
    "mixer.in_proj": "ssm_in",
    "mixer.conv1d": "ssm_conv1d",
    "mixer.dt_bias": "ssm_dt.bias",
    "mixer.A_log": "ssm_a",
    "mixer.D": "ssm_d",
    "mixer.norm": "ssm_norm",
    "mixer.out_proj": "ssm_out",
}
_MAMBA_NAMES = {
    "mixer.in_proj": "ssm_in",
    "mixer.conv1d": "ssm_conv1d",
    "mixer.x_proj": "ssm_x",
    "mixer.dt_proj": "ssm_dt",
    "mixer.A_log": "ssm_a",
    "mixer.D": "ssm_d",
    "mixer.out_proj": "ssm_out",
}
_MAMBA: dict[str, Any] = {
    "tensors": {
        "backbone.embeddings": "token_embd",
        "backbone.norm_f": "output_norm",
        "lm_head": "output",
    },
    "layers": "backbone.layers",
    "layer_tensors": _MAMBA_NAMES | {"norm": "attn_norm"},
    "ff": None,
    "activation": None,
    "epsilon": "layer_norm_epsilon",
    "tied": True,
    "defaults": {
        "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": 1 << 20,  # there is no limit
        "expand": 2,
        "state_size": 16,
        "conv_kernel": 4,
        "time_step_rank": "auto",
    },
    "required": {"hidden_act": "silu", "use_conv_bias": True, "use_bias": False},
    "channel_space": ("expand", "state_size", "conv_kernel", "time_step_rank"),
}
_NEMOTRON_H_NAMES = {
    **_SSM_NAMES,
    "norm": "attn_norm",
    "mixer.q_proj": "attn_q",
    "mixer.k_proj": "attn_k",
    "mixer.v_proj": "attn_v",
    "mixer.o_proj": "attn_output",
    "mixer.up_proj": "ffn_up",
    "mixer.down_proj": "ffn_down",
    "mixer.gate": "ffn_gate_inp",
    "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mixer.experts.*.up_proj": "ffn_up_exps",
    "mixer.experts.*.down_proj": "ffn_down_exps",
    "mixer.experts.up_proj": "ffn_up_exps",
    "mixer.experts.down_proj": "ffn_down_exps",
    "mixer.shared_experts.up_proj": "ffn_up_shexp",
    "mixer.shared_experts.down_proj": "ffn_down_shexp",
    "mixer.fc1_latent_proj": "ffn_latent_down",
    "mixer.fc2_latent_proj": "ffn_latent_up",
}
_NEMOTRON_H_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "mlp_hidden_act": "relu2",
    "layer_norm_epsilon": 1e-5,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
}
_DELTA_NAMES = {
    **_LLAMA_NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "linear_attn.in_proj_qkvz": "attn_qkv attn_gate",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
}
_GATED_SHARE = {
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
_DELTA: dict[str, Any] = {"norms_less_one": True, "partial": True}
_DELTA_DEFAULTS: dict[str, Any] = {
    **_LLAMA_DEFAULTS,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_DELTA_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 512,
}
_ALL_EXPERTS: dict[str, Any] = {"decoder_sparse_step": 1, "mlp_only_layers": []}  # in every layer
_GRANITE_DEFAULTS: dict[str, Any] = {
    **_LLAMA_DEFAULTS,
    "attention_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
_GRANITE_MOE_DEFAULTS: dict[str, Any] = _GRANITE_DEFAULTS | {"num_experts": 8, "num_experts_per_tok": 2}
_GRANITE: dict[str, Any] = {
    "numbers": {
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    },
}
_GRANITE_EXPERTS = {
    **_LLAMA_NAMES,
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "block_sparse_moe.router": "ffn_gate_inp",
    "block_sparse_moe.input_linear": "ffn_gate_exps ffn_up_exps",
    "block_sparse_moe.experts.gate_up_proj": "ffn_gate_exps ffn_up_exps",
    "block_sparse_moe.output_linear": "ffn_down_exps",
    "block_sparse_moe.experts.down_proj": "ffn_down_exps",
}
_MIXTRAL_NAMES = {
    **_LLAMA_NAMES,
    **_EXPERT_NAMES,
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.*.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.*.w3": "ffn_up_exps",
    "block_sparse_moe.experts.*.w2": "ffn_down_exps",
}
_SHARED_EXPERTS = {
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}
_LATENT_DEFAULTS: dict[str, Any] = {
    **_LLAMA_DEFAULTS,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_DEEPSEEK_EXPERTS: dict[str, Any] = {"n_shared": "n_shared_experts", "n_dense": "first_k_dense_replace"}
_LATENT_NAMES = {
    **_LLAMA_NAMES,
    **_EXPERT_NAMES,
    **_SHARED_EXPERTS,
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_k_b attn_v_b",  # of each head the rows of its key, then of its value
}
_POST_NORMS = {
    **_LLAMA_NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_GPT2_TENSORS = {
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "lm_head": "output",
}
_GPT2_NAMES = {
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
_BAILING_TENSORS = _LLAMA_TENSORS | {"model.word_embeddings": "token_embd"}
_BAILING_NAMES = _LLAMA_NAMES | _EXPERT_NAMES | _SHARED_EXPERTS | {"attention.dense": "attn_output"}
_BIASED_CHOICE = {
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.e_score_correction_bias": "exp_probs_b.bias",
}
_COHERE: dict[str, Any] = {
    "epsilon": "layer_norm_eps",
    "tied": True,
    "numbers": {"logit_scale": "logit_scale"},
    "rotates": "norm",
}
_COHERE_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "max_position_embeddings": 8192,
}
_OLMO_DEFAULTS: dict[str, Any] = _LLAMA_DEFAULTS | {"rms_norm_eps": 1e-5}
_EXAONE_DEFAULTS: dict[str, Any] = _OLMO_DEFAULTS | {"sliding_window": 4096, "num_key_value_heads": 32}
_EXAONE_WINDOWS = ("sliding_window", "layer_types", "sliding_window_pattern")
_HUNYUAN_NAMES = {
    **_LLAMA_NAMES,
    "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm",
}
_ERNIE_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "rope_theta": 5e5,
}
_MINISTRAL_ROPE: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
_MINISTRAL = HFClass(
    "mistral3",
    log_multiplier=True,
    defaults=_LLAMA_DEFAULTS
    | {
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_parameters": _MINISTRAL_ROPE,
    },
    windows=("sliding_window",),
)
_QWEN2VL = HFClass(
    "qwen2vl",
    defaults=_QWEN_DEFAULTS
    | {
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 8,
        "max_window_layers": 80,
        "rope_theta": 1e6,
    },
    windows=("sliding_window", "use_sliding_window", "layer_types", "max_window_layers"),
    sections=True,
    sees=True,
)
_INDEXED: dict[str, Any] = {
    "layer_tensors": _LATENT_NAMES
    | {
        "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
        "self_attn.indexer.wq_b": "indexer.attn_q_b",
        "self_attn.indexer.wk": "indexer.attn_k",
        "self_attn.indexer.k_norm": "indexer.k_norm",
        "self_attn.indexer.weights_proj": "indexer.proj",
    },
    "numbers": {"expert_weights_scale": "routed_scaling_factor"},
    "rotates": "norm",
    "latent": True,
    "indexed": True,
    "experts": HFExperts(
        **_DEEPSEEK_EXPERTS,
        groups=("n_group", "topk_group"),
        scoring="sigmoid",
        methods={"noaux_tc": True},
    ),
}
_INDEXED_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 163840, "num_experts": 256, "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048, "n_shared_experts": 1, "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5, "norm_topk_prob": True, "n_group": 1, "topk_group": 1,
    "index_topk": 2048, "index_head_dim": 128,
}  # fmt: skip
_DEEPSEEK_OCR = HFClass(
    "deepseek2-ocr",
    layer_tensors=_LLAMA_NAMES | _EXPERT_NAMES | _SHARED_EXPERTS,
    required={
        "use_mla": False,
        "moe_layer_freq": 1,
        "scoring_func": "softmax",
        "topk_method": "greedy",
        "sliding_window": None,
    },
    numbers={"expert_weights_scale": "routed_scaling_factor"},
    sees=True,
    experts=HFExperts(**_DEEPSEEK_EXPERTS),
)
_GPT2: dict[str, Any] = {
    "tensors": _GPT2_TENSORS,
    "layers": "transformer.h",
    "layer_tensors": _GPT2_NAMES,
    "ff": "n_inner",
    "ff_of_width": _four_times,
    "activation": "activation_function",
    "epsilon": "layer_norm_epsilon",
    "tied": True,
}
_GPT2_DEFAULTS: dict[str, Any] = {"layer_norm_epsilon": 1e-5, "max_position_embeddings": 1024}
_BERT_ATTENTION = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
}
_BERT = HFClass(
    "bert",
    tensors={
        "bert.embeddings.word_embeddings": "token_embd",
        "bert.embeddings.position_embeddings": "position_embd",
        "bert.embeddings.token_type_embeddings": "token_types",
        "bert.embeddings.LayerNorm": "token_embd_norm",
    },
    layers="bert.encoder.layer",
    layer_tensors=_BERT_ATTENTION
    | {
        "intermediate.dense": "ffn_up",
        "output.dense": "ffn_down",
        "output.LayerNorm": "layer_output_norm",
    },
    kv_heads="every",
    epsilon="layer_norm_eps",
    tied=True,
    defaults={
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
    },
    required={"is_decoder": False, "position_embedding_type": "absolute"},
)
_ROBERTA = replace(
    _BERT,
    tensors={name.replace("bert.", "roberta."): target for name, target in _BERT.tensors.items()},
    layers="roberta.encoder.layer",
    defaults=_BERT.defaults | {"pad_token_id": 1},
    padded_positions=True,
)
_ROBERTA_SCORES = replace(
    _ROBERTA,
    tensors=_ROBERTA.tensors
    | {"roberta.classifier.dense": "cls", "roberta.classifier.out_proj": "cls.output"},
)
_NOMIC = HFClass(
    "nomic-bert",
    tensors={
        "encoder.embeddings.word_embeddings": "token_embd",
        "encoder.embeddings.token_type_embeddings": "token_types",
        "encoder.emb_ln": "token_embd_norm",
    },
    layers="encoder.layers",
    layer_tensors={
        "attn.Wqkv": "attn_qkv",
        "attn.out_proj": "attn_output",
        "norm1": "attn_output_norm",
        "mlp.fc11": "ffn_up",
        "mlp.fc12": "ffn_gate",
        "mlp.fc2": "ffn_down",
        "norm2": "layer_output_norm",
    },
    kv_heads="every",
    epsilon="layer_norm_eps",
    tied=True,
    defaults={
        "hidden_act": "silu",
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": 2048,
        "rope_theta": 1000.0,
        "type_vocab_size": 2,
    },
)
_PUBLISHED_NOMIC = replace(  # the configuration of the authors' own code
    _NOMIC,
    own_names={
        "intermediate_size": "n_inner",
        "layer_norm_eps": "layer_norm_epsilon",
        "hidden_act": "activation_function",
        "rope_theta": "rotary_emb_base",
    },
    means={"swiglu": "silu"},
    required={
        "prenorm": False,
        "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None,
        "causal": False,
    },
)
_NOMIC_MOE = replace(
    _PUBLISHED_NOMIC,
    architecture="nomic-bert-moe",
    layer_tensors={
        "attn.Wqkv": "attn_qkv",
        "attn.out_proj": "attn_output",
        "norm1": "attn_output_norm",
        "mlp.fc1": "ffn_up",
        "mlp.fc2": "ffn_down",
        "mlp.router.layer": "ffn_gate_inp",
        "mlp.experts.mlp.w1": "ffn_up_exps",
        "mlp.experts.mlp.w2": "ffn_down_exps",
        "norm2": "layer_output_norm",
    },
    required=_PUBLISHED_NOMIC.required
    | {"moe_every_n_layers": 2, "moe_normalize_expert_weights": False, "expert_choice_router": False},
    integers={"moe_every_n_layers": "moe_every_n_layers"},
    experts=HFExperts(ff="intermediate_size", n_used="moe_top_k", normalised=None, says_ff=False),
)
_JINA_BERT = replace(
    _BERT,
    architecture="jina-bert-v2",
    tensors={name: target for name, target in _BERT.tensors.items() if target != "position_embd"},
    layer_tensors=_BERT_ATTENTION
    | {
        "mlp.gated_layers": "ffn_up",
        "mlp.wo": "ffn_down",
        "mlp.layernorm": "layer_output_norm",
    },
    required={"is_decoder": False, "position_embedding_type": "alibi", "feed_forward_type": "geglu"},
    fused_gate=True,
)
_MODERN_BERT = HFClass(
    "modern-bert",
    tensors={
        "model.embeddings.tok_embeddings": "token_embd",
        "model.embeddings.norm": "token_embd_norm",
        "model.final_norm": "output_norm",
    },
    layer_tensors={
        "attn_norm": "attn_norm",
        "attn.Wqkv": "attn_qkv",
        "attn.Wo": "attn_output",
        "mlp_norm": "ffn_norm",
        "mlp.Wi": "ffn_up",
        "mlp.Wo": "ffn_down",
    },
    activation="hidden_activation",
    kv_heads="every",
    epsilon="norm_eps",
    tied=True,
    defaults={
        "hidden_activation": "gelu",
        "norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "rope_theta": 160000.0,
        "sliding_window": 128,
        "rope_local_base_freq": 10000.0,
        "sliding_window_pattern": 3,
    },
    own_names={
        "sliding_window": "local_attention",
        "sliding_window_pattern": "global_attn_every_n_layers",
        "rope_theta": "global_rope_theta",
        "rope_local_base_freq": "local_rope_theta",
    },
    windows=("sliding_window", "layer_types", "sliding_window_pattern"),
    fused_gate=True,
)
_GEMMA4 = HFClass(  # those with experts are refused
    "gemma4",
    tensors=_LLAMA_TENSORS
    | {name: stem for name, stem in _ALTUP_TENSORS.items() if stem.startswith("per_layer_")},
    layer_tensors=_GEMMA["layer_tensors"]
    | {name: stem for name, stem in _ALTUP_NAMES.items() if stem in ("inp_gate", "proj", "post_norm")}
    | {"layer_scalar": "layer_output_scale"},
    activation="hidden_activation",
    tied=True,
    defaults={
        "head_dim": 256,
        "num_key_value_heads": 4,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "sliding_window": 512,
        "vocab_size_per_layer_input": 262144,
        "hidden_size_per_layer_input": 256,
        "num_kv_shared_layers": 0,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1000000.0,
            },
        },
    },
    required={"attention_bias": False, "enable_moe_block": False},
    numbers={"final_logit_softcapping": "final_logit_softcapping"},
    windows=("sliding_window", "layer_types"),
    window_heads=True,
)
_GEMMA3N = HFClass(
    "gemma3n",
    tensors=_LLAMA_TENSORS | _ALTUP_TENSORS,
    layer_tensors=_GEMMA["layer_tensors"] | _ALTUP_NAMES,
    activation="hidden_activation",
    tied=True,
    defaults=_GEMMA3N_DEFAULTS,
    required={"use_bidirectional_attention": False, "altup_active_idx": 0, "altup_correct_scale": True},
    numbers={"final_logit_softcapping": "final_logit_softcapping"},
    windows=("sliding_window", "layer_types"),
    altup=True,
)

CLASSES: dict[str, HFClass] = {
    "LlamaForCausalLM": HFClass("llama", defaults=_LLAMA_DEFAULTS),
    "GPT2LMHeadModel": HFClass(
        "gpt2",
        **_GPT2,
        kv_heads="every",
        defaults=_GPT2_DEFAULTS | {"activation_function": "gelu_new"},
        required={
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
        stores_by_input=True,
    ),
    "GPTNeoXForCausalLM": HFClass(
        "gptneox",
        kv_heads="every",
        tensors={
            "gpt_neox.embed_in": "token_embd",
            "gpt_neox.final_layer_norm": "output_norm",
            "gpt_neox.embed_out": "output",
            "lm_head": "output",
        },
        layers="gpt_neox.layers",
        layer_tensors={
            "input_layernorm": "attn_norm",
            "post_attention_layernorm": "ffn_norm",
            "attention.query_key_value": "attn_qkv",
            "attention.dense": "attn_output",
            "mlp.dense_h_to_4h": "ffn_up",
            "mlp.dense_4h_to_h": "ffn_down",
        },
        epsilon="layer_norm_eps",
        defaults={
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-5,
            "max_position_embeddings": 2048,
            "partial_rotary_factor": 0.25,
            "use_parallel_residual": True,
        },
        flags={"use_parallel_residual": "use_parallel_residual"},
        own_names={"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"},
        partial=True,
        grouped_qkv=True,
    ),
    "PhiForCausalLM": HFClass(
        "phi2",
        tensors=_LLAMA_TENSORS | {"model.final_layernorm": "output_norm"},
        layer_tensors=_LLAMA_NAMES
        | {"self_attn.dense": "attn_output", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down"},
        epsilon="layer_norm_eps",
        defaults={
            "hidden_act": "gelu_new",
            "layer_norm_eps": 1e-5,
            "max_position_embeddings": 2048,
            "partial_rotary_factor": 0.5,
        },
        required={"qk_layernorm": False},
        partial=True,
    ),
    "Starcoder2ForCausalLM": HFClass(
        "starcoder2",
        layer_tensors=_LLAMA_NAMES | {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"},
        epsilon="norm_epsilon",
        tied=True,
        defaults={
            "hidden_act": "gelu_pytorch_tanh",
            "norm_epsilon": 1e-5,
            "max_position_embeddings": 4096,
            "num_key_value_heads": 2,
        },
        windows=("sliding_window",),
    ),
    "StableLmForCausalLM": HFClass(
        "stablelm",
        epsilon="layer_norm_eps",
        defaults={
            "hidden_act": "silu",
            "layer_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "num_key_value_heads": 32,
            "partial_rotary_factor": 0.25,
            "use_parallel_residual": False,
        },
        required={"qk_layernorm": False},
        flags={"use_parallel_residual": "use_parallel_residual"},
        partial=True,
    ),
    "CohereForCausalLM": HFClass(
        "command-r",
        **_COHERE,
        defaults=_COHERE_DEFAULTS | {"rope_theta": 5e5},
    ),
    "Cohere2ForCausalLM": HFClass(
        "cohere2",
        **_COHERE,
        defaults=_COHERE_DEFAULTS | {"sliding_window": 4096},
        windows=("sliding_window", "layer_types", "sliding_window_pattern"),
    ),
    "Jais2ForCausalLM": HFClass(
        "jais2",
        epsilon="layer_norm_eps",
        defaults={"hidden_act": "relu2", "layer_norm_eps": 1e-5, "max_position_embeddings": 8192},
    ),
    "GemmaForCausalLM": HFClass(
        "gemma",
        means={"gelu": "gelu_pytorch_tanh"},
        tied=True,
        norms_less_one=True,
        defaults={
            "hidden_act": "gelu_pytorch_tanh",
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 8192,
            "head_dim": 256,
            "num_key_value_heads": 16,
        },
        required={"use_bidirectional_attention": False},
    ),
    "SeedOssForCausalLM": HFClass(
        "seed_oss",
        layer_tensors=_LLAMA_NAMES | {"post_attention_layernorm": "post_attention_norm"},
        defaults=_LLAMA_DEFAULTS
        | {"max_position_embeddings": 524288, "num_key_value_heads": 8, "head_dim": 128},
    ),
    "Ernie4_5ForCausalLM": HFClass(
        "ernie4_5",
        tied=True,
        defaults=_ERNIE_DEFAULTS | {"num_key_value_heads": 2, "head_dim": 128},
        rotates="norm",
    ),
    "Ernie4_5_MoeForCausalLM": HFClass(
        "ernie4_5-moe",
        layer_tensors=_LLAMA_NAMES
        | _EXPERT_NAMES
        | _SHARED_EXPERTS
        | {
            "mlp.gate.moe_statics.e_score_correction_bias": "exp_probs_b.bias",
            "mlp.moe_statics.e_score_correction_bias": "exp_probs_b.bias",
        },
        tied=True,
        defaults=_ERNIE_DEFAULTS
        | {
            "num_key_value_heads": 4,
            "moe_num_experts": 64,
            "moe_k": 6,
            "moe_intermediate_size": 1536,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_interval": 1,
        },
        integers={"interleave_moe_layer_step": "moe_layer_interval"},
        required={"moe_layer_interval": 1},
        rotates="norm",
        experts=HFExperts(
            n="moe_num_experts",
            n_used="moe_k",
            normalised=None,
            says_shared_ff=True,
            n_shared="moe_num_shared_experts",
            n_dense="moe_layer_start_index",
        ),
    ),
    "GlmForCausalLM": HFClass(
        "chatglm",
        layer_tensors=_LLAMA_NAMES | {"mlp.gate_up_proj": "ffn_up"},
        defaults={"hidden_act": "silu", "rms_norm_eps": 1.5625e-07, "max_position_embeddings": 131072}
        | {"num_key_value_heads": 2, "head_dim": 128, "partial_rotary_factor": 0.5},
        rotates="norm",
        partial=True,
        fused_gate=True,
    ),
    "Olmo2ForCausalLM": HFClass("olmo2", layer_tensors=_POST_NORMS, defaults=_OLMO_DEFAULTS),
    "Olmo3ForCausalLM": HFClass(
        "olmo2",
        layer_tensors=_POST_NORMS,
        defaults=_OLMO_DEFAULTS | {"sliding_window": 4096, "rope_theta": 5e5},
        windows=("sliding_window", "layer_types"),
    ),
    "Exaone4ForCausalLM": HFClass(
        "exaone4", layer_tensors=_POST_NORMS, defaults=_EXAONE_DEFAULTS, windows=_EXAONE_WINDOWS
    ),
    "ExaoneMoeForCausalLM": HFClass(
        "exaone-moe",
        layer_tensors=_LLAMA_NAMES | _EXPERT_NAMES | _SHARED_EXPERTS | _BIASED_CHOICE,
        defaults=_EXAONE_DEFAULTS
        | {
            "moe_intermediate_size": 1024,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "n_group": 1,
            "topk_group": 1,
        },
        windows=_EXAONE_WINDOWS,
        numbers={"expert_weights_scale": "routed_scaling_factor"},
        experts=HFExperts(
            n_shared="num_shared_experts", n_dense="first_k_dense_replace", groups=("n_group", "topk_group")
        ),
    ),
    "HunYuanDenseV1ForCausalLM": HFClass(
        "hunyuan-dense", dynamic="base", layer_tensors=_HUNYUAN_NAMES, defaults=_OLMO_DEFAULTS
    ),
    "HunYuanMoEV1ForCausalLM": HFClass(
        "hunyuan-moe",
        dynamic="base",
        layer_tensors=_HUNYUAN_NAMES
        | _EXPERT_NAMES
        | {
            "mlp.gate.wg": "ffn_gate_inp",
            "mlp.shared_mlp.gate_proj": "ffn_gate_shexp",
            "mlp.shared_mlp.up_proj": "ffn_up_shexp",
            "mlp.shared_mlp.down_proj": "ffn_down_shexp",
        },
        defaults=_OLMO_DEFAULTS | {"num_experts": 1, "moe_topk": 1},
        experts=HFExperts(
            "intermediate_size", n_used="moe_topk", normalised=None, ff_shared="intermediate_size"
        ),
    ),
    "MiniMaxM2ForCausalLM": HFClass(
        "minimax-m2",
        layer_tensors=_MIXTRAL_NAMES
        | {
            "block_sparse_moe.e_score_correction_bias": "exp_probs_b.bias",
            "mlp.e_score_correction_bias": "exp_probs_b.bias",
        },
        defaults={
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 196608,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "rope_theta": 5e6,
        },
        required={"scoring_func": "sigmoid", "use_qk_norm": True, "shared_intermediate_size": 0},
        partial=True,
        experts=HFExperts("intermediate_size", normalised=None),
    ),
    "Dots1ForCausalLM": HFClass(
        "dots1",
        layer_tensors=_LLAMA_NAMES | _EXPERT_NAMES | _SHARED_EXPERTS | _BIASED_CHOICE,
        defaults=_LLAMA_DEFAULTS
        | {
            "num_key_value_heads": 32,
            "moe_intermediate_size": 1408,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "sliding_window": 4096,
            "max_window_layers": 62,
        },
        windows=("sliding_window", "layer_types", "max_window_layers"),
        numbers={"expert_weights_scale": "routed_scaling_factor"},
        experts=HFExperts(
            n_shared="n_shared_experts", n_dense="first_k_dense_replace", groups=("n_group", "topk_group")
        ),
    ),
    "AfmoeForCausalLM": HFClass(
        "afmoe",
        layer_tensors=_LLAMA_NAMES
        | _EXPERT_NAMES
        | _SHARED_EXPERTS
        | {
            "post_attention_layernorm": "post_attention_norm",
            "pre_mlp_layernorm": "ffn_norm",
            "post_mlp_layernorm": "post_ffw_norm",
            "self_attn.gate_proj": "attn_gate",
            "mlp.router.gate": "ffn_gate_inp",
            "mlp.expert_bias": "exp_probs_b.bias",
        },
        defaults={
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 16384,
            "head_dim": 128,
            "moe_intermediate_size": 1408,
            "num_dense_layers": 1,
            "num_experts": 64,
            "num_experts_per_tok": 6,
            "num_shared_experts": 2,
            "route_scale": 1.0,
            "sliding_window": 1024,
            "mup_enabled": False,
        },
        windows=("sliding_window", "layer_types"),
        numbers={"expert_weights_scale": "route_scale"},
        required={"mup_enabled": True, "global_attn_every_n_layers": 4},
        experts=HFExperts(normalised=None, n_shared="num_shared_experts", n_dense="num_dense_layers"),
    ),
    "MistralForCausalLM": HFClass(
        "llama",
        defaults=_LLAMA_DEFAULTS
        | {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
        windows=("sliding_window",),
    ),
    "MixtralForCausalLM": HFClass(
        "llama",
        **_MIXTRAL,
        layer_tensors=_MIXTRAL_NAMES,
        experts=HFExperts("intermediate_size", normalised=None, says_ff=False),
    ),
    "TurboSparseMixtralForCausalLM": HFClass(  # its act stands before gate and up
        "llama",
        **_MIXTRAL,
        layer_tensors=_MIXTRAL_NAMES
        | {
            "block_sparse_moe.experts.*.predictor.fc1": "fc1_exps",
            "block_sparse_moe.experts.*.predictor.fc2": "fc2_exps",
        },
        required={"hidden_act": "relu"},
        activates_up=True,
        experts=HFExperts("intermediate_size", normalised=None, says_ff=False),
    ),
    "Qwen2ForCausalLM": HFClass(
        "qwen2",
        defaults=_QWEN_DEFAULTS | {"num_key_value_heads": 32, "max_window_layers": 28},
        windows=("sliding_window", "use_sliding_window", "layer_types", "max_window_layers"),
    ),
    "Qwen2MoeForCausalLM": HFClass(
        "qwen2moe",
        defaults=_QWEN_DEFAULTS
        | {"num_key_value_heads": 16, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632}
        | {"num_experts": 60, "num_experts_per_tok": 4},
        windows=("sliding_window", "use_sliding_window", "layer_types"),
        layer_tensors=_LLAMA_NAMES | _EXPERT_NAMES | _GATED_SHARE,
        required=_ALL_EXPERTS | {"qkv_bias": True},
        experts=HFExperts(ff_shared="shared_expert_intermediate_size"),
    ),
    "Qwen3ForCausalLM": HFClass(
        "qwen3",
        defaults=_QWEN_DEFAULTS | {"num_key_value_heads": 32, "head_dim": 128, "max_window_layers": 28},
        windows=("sliding_window", "use_sliding_window", "layer_types", "max_window_layers"),
    ),
    "Qwen3MoeForCausalLM": HFClass(
        "qwen3moe",
        defaults=_QWEN_DEFAULTS
        | {"num_key_value_heads": 4, "moe_intermediate_size": 768, "num_experts": 128}
        | {"num_experts_per_tok": 8},
        windows=("sliding_window", "use_sliding_window"),
        layer_tensors=_LLAMA_NAMES | _EXPERT_NAMES,
        required=_ALL_EXPERTS,
        experts=HFExperts(),
    ),
    "OlmoeForCausalLM": HFClass(
        "olmoe",
        defaults=_LLAMA_DEFAULTS
        | {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "num_experts": 64}
        | {"num_experts_per_tok": 8},
        layer_tensors=_LLAMA_NAMES | _EXPERT_NAMES,
        required={"clip_qkv": None},
        experts=HFExperts("intermediate_size", says_ff=False),
    ),
    "BambooForCausalLM": HFClass(  # TurboSparse's Mistral has predictors
        "bamboo", layer_tensors=_LLAMA_NAMES | {"mlp.predictor.fc1": "fc1", "mlp.predictor.fc2": "fc2"}
    ),
    "FalconForCausalLM": _FALCON,
    "RWForCausalLM": _FALCON,
    "OPTForCausalLM": HFClass(
        "opt",
        kv_heads="every",
        tensors={
            "model.decoder.embed_tokens": "token_embd",
            "model.decoder.embed_positions": "position_embd",
            "model.decoder.final_layer_norm": "output_norm",
            "lm_head": "output",
        },
        layers="model.decoder.layers",
        layer_tensors={
            "self_attn_layer_norm": "attn_norm",
            "self_attn.q_proj": "attn_q",
            "self_attn.k_proj": "attn_k",
            "self_attn.v_proj": "attn_v",
            "self_attn.out_proj": "attn_output",
            "final_layer_norm": "ffn_norm",
            "fc1": "ffn_up",
            "fc2": "ffn_down",
        },
        ff="ffn_dim",
        activation="activation_function",
        epsilon=None,
        tied=True,
        defaults={"activation_function": "relu", "max_position_embeddings": 2048},
        required={
            "do_layer_norm_before": True,
            "_remove_final_layer_norm": False,
            "layer_norm_elementwise_affine": True,
        },
    ),
    "OlmoForCausalLM": HFClass(
        "olmo",
        defaults={"hidden_act": "silu", "max_position_embeddings": 2048},
        required={"clip_qkv": None},
        epsilon=None,
    ),
    "ApertusForCausalLM": HFClass(
        "apertus",
        layer_tensors=_LLAMA_NAMES
        | {"attention_layernorm": "attn_norm", "feedforward_layernorm": "ffn_norm"},
        activation=None,
        defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 65536, "rope_theta": 12e6}
        | {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 12e6,
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            }
        },
        required={"hidden_act": "xielu"},
        layer_keys={f"mlp.act_fn.{name}": f"xielu.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps")},
    ),
    "MptForCausalLM": HFClass(
        "mpt",
        kv_heads="every",
        ff_of_width=_four_times,
        tensors={"transformer.wte": "token_embd", "transformer.norm_f": "output_norm", "lm_head": "output"},
        layers="transformer.blocks",
        layer_tensors={
            "norm_1": "attn_norm",
            "attn.Wqkv": "attn_qkv",
            "attn.out_proj": "attn_output",
            "norm_2": "ffn_norm",
            "ffn.up_proj": "ffn_up",
            "ffn.down_proj": "ffn_down",
        },
        activation=None,
        epsilon="layer_norm_epsilon",
        tied=True,
        defaults={"layer_norm_epsilon": 1e-5, "max_position_embeddings": 2048, "alibi_bias_max": 8},
        required={
            "attn_type": "multihead_attention",
            "clip_qkv": None,
            "softmax_scale": None,
            "prefix_lm": False,
            "qk_ln": False,
            "attn_uses_sequence_id": False,
            "alibi": True,
            "logit_scale": None,
            "no_bias": True,
            "expansion_ratio": 4,
        },
        ff="n_inner",
        numbers={"attention.max_alibi_bias": "alibi_bias_max"},
    ),
    "BloomForCausalLM": HFClass(
        "bloom",
        kv_heads="every",
        ff_of_width=_four_times,
        tensors={
            "transformer.word_embeddings": "token_embd",
            "transformer.word_embeddings_layernorm": "token_embd_norm",
            "transformer.ln_f": "output_norm",
            "lm_head": "output",
        },
        layers="transformer.h",
        layer_tensors={
            "input_layernorm": "attn_norm",
            "self_attention.query_key_value": "attn_qkv",
            "self_attention.dense": "attn_output",
            "post_attention_layernorm": "ffn_norm",
            "mlp.dense_h_to_4h": "ffn_up",
            "mlp.dense_4h_to_h": "ffn_down",
        },
        ff="n_inner",
        activation=None,
        epsilon="layer_norm_epsilon",
        tied=True,
        defaults={"layer_norm_epsilon": 1e-5, "max_position_embeddings": 2048},
        required={"apply_residual_connection_post_layernorm": False},
        own_names={"max_position_embeddings": "seq_length"},
        grouped_qkv=True,
    ),
    "BitNetForCausalLM": HFClass(
        "bitnet",
        layer_tensors=_LLAMA_NAMES
        | {"self_attn.attn_sub_norm": "attn_sub_norm", "mlp.ffn_sub_norm": "ffn_sub_norm"},
        defaults={"hidden_act": "relu2", "rms_norm_eps": 1e-5, "max_position_embeddings": 2048}
        | {"num_key_value_heads": 5, "rope_theta": 500000.0},
        ternary=True,
    ),
    "NemotronForCausalLM": HFClass(
        "nemotron",
        epsilon="norm_eps",
        defaults={"hidden_act": "relu2", "norm_eps": 1e-5, "max_position_embeddings": 4096}
        | {"partial_rotary_factor": 0.5},
        norms_less_one=True,
        partial=True,
    ),
    "NemotronHForCausalLM": HFClass(
        "nemotron_h_moe",
        tensors={
            "backbone.embeddings": "token_embd",
            "backbone.norm_f": "output_norm",
            "lm_head": "output",
        },
        layers="backbone.layers",
        layer_tensors=_NEMOTRON_H_NAMES,
        activation="mlp_hidden_act",
        epsilon="layer_norm_epsilon",
        defaults=_NEMOTRON_H_DEFAULTS,
        required={
            "mamba_hidden_act": "silu",
            "use_conv_bias": True,
            "use_bias": False,
            "mlp_bias": False,
            "attention_bias": False,
            "sliding_window": None,
        },
        numbers={"expert_weights_scale": "routed_scaling_factor"},
        parts=True,
        state_space=("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"),
        experts=HFExperts(ff_shared="moe_shared_expert_intermediate_size", groups=("n_group", "topk_group")),
    ),
    "ArceeForCausalLM": HFClass(
        "arcee", defaults={"hidden_act": "relu2", "rms_norm_eps": 1e-5, "max_position_embeddings": 4096}
    ),
    "Gemma2ForCausalLM": HFClass(
        "gemma2",
        **_GEMMA,
        defaults=_GEMMA_DEFAULTS
        | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "max_position_embeddings": 8192},
        numbers={
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        windows=("sliding_window", "layer_types"),
    ),
    "Phi3ForCausalLM": HFClass(
        "phi3",
        layer_tensors={
            **_LLAMA_NAMES,
            "self_attn.qkv_proj": "attn_qkv",
            "mlp.gate_up_proj": "ffn_up",
        },
        defaults=_LLAMA_DEFAULTS
        | {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096},
        windows=("sliding_window",),
        partial=True,
        fused_gate=True,
    ),
    "GraniteForCausalLM": HFClass("granite", **_GRANITE, defaults=_GRANITE_DEFAULTS),
    "GraniteMoeForCausalLM": HFClass(
        "granitemoe",
        **_GRANITE,
        defaults=_GRANITE_MOE_DEFAULTS,
        layer_tensors=_GRANITE_EXPERTS,
        experts=HFExperts("intermediate_size", normalised=None, says_ff=False),
    ),
    "GraniteMoeSharedForCausalLM": HFClass(
        "granitemoe",
        **_GRANITE,
        defaults=_GRANITE_MOE_DEFAULTS | {"shared_intermediate_size": 0},
        layer_tensors=_GRANITE_EXPERTS
        | {
            "shared_mlp.input_linear": "ffn_gate_shexp ffn_up_shexp",
            "shared_mlp.output_linear": "ffn_down_shexp",
        },
        experts=HFExperts(
            "intermediate_size", normalised=None, ff_shared="shared_intermediate_size", says_ff=False
        ),
    ),
    "GraniteMoeHybridForCausalLM": HFClass(
        "granitehybrid",
        **_GRANITE,
        defaults=_GRANITE_MOE_DEFAULTS
        | {
            "shared_intermediate_size": 1024,
            "mamba_n_heads": 128,
            "mamba_d_head": "auto",
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
        },
        layer_tensors=_GRANITE_EXPERTS
        | {
            "shared_mlp.input_linear": "ffn_gate_shexp ffn_up_shexp",
            "shared_mlp.output_linear": "ffn_down_shexp",
        }
        | {name.replace("mixer.", "mamba."): target for name, target in _SSM_NAMES.items()},
        required={
            "hidden_act": "silu",
            "attention_bias": False,
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
        },
        state_space=("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"),
        experts=HFExperts(
            "intermediate_size", normalised=None, ff_shared="shared_intermediate_size", says_ff=False
        ),
    ),
    "FalconH1ForCausalLM": HFClass(
        "falcon-h1",
        tensors=_LLAMA_TENSORS | {"model.final_layernorm": "output_norm"},
        layer_tensors={name.replace("mlp.", "feed_forward."): to for name, to in _LLAMA_NAMES.items()}
        | {name.replace("mixer.", "mamba."): target for name, target in _SSM_NAMES.items()}
        | {"pre_ff_layernorm": "ffn_norm"},
        defaults={
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 8192,
            "num_key_value_heads": 8,
            "mamba_d_ssm": 1024,
            "mamba_n_heads": 128,
            "mamba_d_head": "auto",
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "mamba_d_conv": 4,
            "mamba_norm_before_gate": True,
        },
        required={
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "projectors_bias": False,
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
        },
        state_space=("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"),
        bare=("ffn_norm",),
        multiplied=True,
    ),
    "Mamba2ForCausalLM": HFClass(
        "mamba2",
        tensors={
            "backbone.embeddings": "token_embd",
            "backbone.norm_f": "output_norm",
            "lm_head": "output",
        },
        layers="backbone.layers",
        layer_tensors=_SSM_NAMES | {"norm": "attn_norm"},
        ff=None,
        activation=None,
        epsilon="layer_norm_epsilon",
        defaults={
            "layer_norm_epsilon": 1e-5,
            "max_position_embeddings": 1 << 20,  # there is no limit
            "num_heads": 128,
            "head_dim": 64,
            "n_groups": 8,
            "state_size": 128,
            "conv_kernel": 4,
        },
        required={"hidden_act": "silu", "use_conv_bias": True, "use_bias": False},
        state_space=("num_heads", "head_dim", "n_groups", "state_size", "conv_kernel"),
    ),
    "MambaForCausalLM": HFClass("mamba", **_MAMBA),
    "FalconMambaForCausalLM": HFClass("mamba", **_MAMBA),
    "JambaForCausalLM": HFClass(
        "jamba",
        tensors=_LLAMA_TENSORS | {"model.final_layernorm": "output_norm"},
        layer_tensors={
            **{name.replace("mlp.", "feed_forward."): to for name, to in _LLAMA_NAMES.items()},
            "pre_ff_layernorm": "ffn_norm",
            **{name.replace("mixer.", "mamba."): target for name, target in _MAMBA_NAMES.items()},
            "mamba.dt_layernorm": "ssm_dt_norm",
            "mamba.b_layernorm": "ssm_b_norm",
            "mamba.c_layernorm": "ssm_c_norm",
            "feed_forward.router": "ffn_gate_inp",
            "feed_forward.experts.*.gate_proj": "ffn_gate_exps",
            "feed_forward.experts.*.up_proj": "ffn_up_exps",
            "feed_forward.experts.*.down_proj": "ffn_down_exps",
            "feed_forward.experts.gate_up_proj": "ffn_gate_exps ffn_up_exps",
            "feed_forward.experts.down_proj": "ffn_down_exps",
        },
        defaults={
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 262144,
            "num_key_value_heads": 8,
            "num_experts": 16,
            "num_experts_per_tok": 2,
            "attn_layer_period": 8,
            "attn_layer_offset": 4,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_dt_rank": "auto",
        },
        required={"hidden_act": "silu", "mamba_conv_bias": True, "mamba_proj_bias": False},
        channel_space=("mamba_expand", "mamba_d_state", "mamba_d_conv", "mamba_dt_rank"),
        experts=HFExperts("intermediate_size", normalised=None, says_ff=False),
    ),
    "Rwkv6ForCausalLM": HFClass(
        "rwkv6",
        tensors={
            "rwkv.embeddings": "token_embd",
            "rwkv.blocks.0.pre_ln": "token_embd_norm",
            "rwkv.ln_out": "output_norm",
            "rwkv.head": "output",
        },
        layers="rwkv.blocks",
        layer_tensors=NAMES_6,
        activation=None,
        epsilon="layer_norm_epsilon",
        ff_of_width=ffn_width_6,
        defaults={"layer_norm_epsilon": 1e-5, "max_position_embeddings": 1 << 20},
    ),
    "RWKV7ForCausalLM": HFClass(
        "rwkv7",
        tensors={
            "model.embeddings": "token_embd",
            "model.layers.0.pre_norm": "token_embd_norm",
            "model.norm": "output_norm",
            "lm_head": "output",
        },
        layer_tensors=NAMES_7,
        activation=None,
        epsilon="norm_eps",
        ff_of_width=_four_times,
        defaults={"norm_eps": 1e-5, "max_position_embeddings": 1 << 20},
        required={"hidden_act": "sqrelu", "norm_first": True, "norm_bias": True, "attn": None},
    ),
    "SmolLM3ForCausalLM": HFClass(
        "smollm3",
        tied=True,
        defaults=_LLAMA_DEFAULTS
        | {"max_position_embeddings": 32768, "num_key_value_heads": 4, "rope_theta": 2e6},
        required={"use_sliding_window": False},
    ),
    "Glm4ForCausalLM": HFClass(
        "glm4",
        layer_tensors={
            **_LLAMA_NAMES,
            "post_self_attn_layernorm": "post_attention_norm",
            "post_mlp_layernorm": "post_ffw_norm",
            "mlp.gate_up_proj": "ffn_up",
        },
        defaults={"hidden_act": "silu", "rms_norm_eps": 1.5625e-07, "max_position_embeddings": 131072}
        | {"num_key_value_heads": 2, "head_dim": 128, "partial_rotary_factor": 0.5},
        rotates="norm",
        partial=True,
        fused_gate=True,
    ),
    "Gemma3ForCausalLM": HFClass(  # the text models; those that see are another class, and refused
        "gemma3",
        **_GEMMA,
        defaults=_GEMMA_DEFAULTS | {"max_position_embeddings": 131072, "rope_theta": 1e6},
        numbers={"final_logit_softcapping": "final_logit_softcapping"},
        windows=("sliding_window", "layer_types", "sliding_window_pattern"),
    ),
    "Gemma3nForCausalLM": _GEMMA3N,
    "Gemma3nForConditionalGeneration": replace(_GEMMA3N, sees=True),
    "Gemma4ForCausalLM": _GEMMA4,
    "Gemma4ForConditionalGeneration": replace(_GEMMA4, sees=True),
    "SmallThinkerForCausalLM": HFClass(
        "smallthinker",
        layer_tensors={
            **_LLAMA_NAMES,
            "block_sparse_moe.primary_router": "ffn_gate_inp",
            "block_sparse_moe.experts.*.gate": "ffn_gate_exps",
            "block_sparse_moe.experts.*.up": "ffn_up_exps",
            "block_sparse_moe.experts.*.down": "ffn_down_exps",
        },
        ff="moe_ffn_hidden_size",
        tied=True,
        defaults={"hidden_act": "relu", "head_dim": 128, "sliding_window_size": 4096},
        required={
            "moe_enable_early_router": True,
            "moe_enable_secondary_experts": False,
            "moe_shared_primary_experts": 0,
            "use_qk_norm": False,
        },
        experts=HFExperts(
            "moe_ffn_hidden_size",
            "moe_num_primary_experts",
            "moe_num_active_primary_experts",
            normalised=None,
            softmax="moe_primary_router_apply_softmax",
        ),
        layouts=True,
    ),
    "GptOssForCausalLM": HFClass(
        "gpt-oss",
        layer_tensors={
            **_LLAMA_NAMES,
            "self_attn.sinks": "attn_sinks",
            "post_attention_layernorm": "post_attention_norm",
            "mlp.router": "ffn_gate_inp",
            "mlp.experts.gate_up_proj": "ffn_gate_exps ffn_up_exps",
            "mlp.experts.gate_up_proj_bias": "ffn_gate_exps.bias ffn_up_exps.bias",
            "mlp.experts.gate_up_proj_blocks": "ffn_gate_exps.blocks ffn_up_exps.blocks",
            "mlp.experts.gate_up_proj_scales": "ffn_gate_exps.scales ffn_up_exps.scales",
            "mlp.experts.down_proj_blocks": "ffn_down_exps.blocks",
            "mlp.experts.down_proj_scales": "ffn_down_exps.scales",
            "mlp.experts.down_proj": "ffn_down_exps",
            "mlp.experts.down_proj_bias": "ffn_down_exps.bias",
        },
        activation=None,
        defaults={
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "sliding_window": 128,
            "num_experts": 128,
            "num_experts_per_tok": 4,
            "rope_theta": 150000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        windows=("sliding_window", "layer_types"),
        required={"swiglu_alpha": 1.702, "swiglu_limit": 7.0, "attention_bias": True},
        experts=HFExperts("intermediate_size", normalised=None, transposed=True),
    ),
    "Glm4MoeForCausalLM": HFClass(
        "glm4moe",
        layer_tensors={
            **_LLAMA_NAMES,
            **_EXPERT_NAMES,
            "post_attention_layernorm": "post_attention_norm",
            **_SHARED_EXPERTS,
            "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
        },
        defaults={
            **{"hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 131072},
            **{"num_key_value_heads": 8, "partial_rotary_factor": 0.5},
            **{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408},
            **{"n_shared_experts": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1},
            **{"routed_scaling_factor": 1.0, "norm_topk_prob": True, "n_group": 1, "topk_group": 1},
        },
        numbers={"expert_weights_scale": "routed_scaling_factor"},
        partial=True,
        experts=HFExperts(
            n_shared="n_shared_experts", n_dense="first_k_dense_replace", groups=("n_group", "topk_group")
        ),
    ),
    "DeepseekForCausalLM": HFClass(
        "deepseek",
        layer_tensors=_LLAMA_NAMES | _EXPERT_NAMES | _SHARED_EXPERTS,
        required={"moe_layer_freq": 1, "scoring_func": "softmax"},
        experts=HFExperts(**_DEEPSEEK_EXPERTS),
    ),
    "DeepseekV2ForCausalLM": HFClass(
        "deepseek2",
        layer_tensors=_LATENT_NAMES,
        defaults=_LATENT_DEFAULTS
        | {"num_experts": 64, "moe_intermediate_size": 1407, "n_shared_experts": 2}
        | {"routed_scaling_factor": 1.0},
        required={"moe_layer_freq": 1, "scoring_func": "softmax", "norm_topk_prob": False},
        numbers={"expert_weights_scale": "routed_scaling_factor"},
        rotates="norm",
        latent=True,
        experts=HFExperts(
            **_DEEPSEEK_EXPERTS,
            groups=("n_group", "topk_group"),
            scoring="softmax",
            methods={"greedy": False, "group_limited_greedy": True},
        ),
    ),
    "PLMForCausalLM": HFClass(
        "plm",
        layer_tensors=_LATENT_NAMES | {"self_attn.kv_b_proj": "attn_kv_b"},
        tied=True,
        defaults=_LATENT_DEFAULTS | {"q_lora_rank": None, "hidden_act": "relu2"},
        required={"attention_bias": False},
        rotates="norm",
        latent=True,
    ),
    "DeepseekV3ForCausalLM": HFClass(  # R1, Moonlight, Kimi K2
        "deepseek2",
        layer_tensors=_LATENT_NAMES | {"mlp.gate.e_score_correction_bias": "exp_probs_b.bias"},
        defaults={
            **_LATENT_DEFAULTS,
            "max_position_embeddings": 4096,
            **{"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048},
            **{"n_shared_experts": 1, "first_k_dense_replace": 3, "num_nextn_predict_layers": 1},
            **{"routed_scaling_factor": 2.5, "norm_topk_prob": True, "n_group": 8, "topk_group": 4},
        },
        required={"moe_layer_freq": 1, "scoring_func": "sigmoid", "rope_interleave": True},
        numbers={"expert_weights_scale": "routed_scaling_factor"},
        rotates="norm",
        latent=True,
        experts=HFExperts(
            **_DEEPSEEK_EXPERTS,
            groups=("n_group", "topk_group"),
            scoring="sigmoid",
            methods={"noaux_tc": True},
        ),
    ),
    "Lfm2ForCausalLM": HFClass(
        "lfm2", **_LFM2, layer_tensors=_LFM2_NAMES, defaults=_LFM2_DEFAULTS, adjusted_ff=True
    ),
    "Lfm2MoeForCausalLM": HFClass(
        "lfm2moe",
        **_LFM2,
        layer_tensors={
            **_LFM2_NAMES,
            "feed_forward.gate": "ffn_gate_inp",
            "feed_forward.expert_bias": "exp_probs_b.bias",
            "feed_forward.experts.*.w1": "ffn_gate_exps",
            "feed_forward.experts.*.w3": "ffn_up_exps",
            "feed_forward.experts.*.w2": "ffn_down_exps",
            "feed_forward.experts.gate_up_proj": "ffn_gate_exps ffn_up_exps",
            "feed_forward.experts.down_proj": "ffn_down_exps",
        },
        defaults={
            **_LFM2_DEFAULTS,
            **{"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 1792},
            **{"num_dense_layers": 2, "routed_scaling_factor": 1.0, "norm_topk_prob": True},
        },
        numbers={"expert_weights_scale": "routed_scaling_factor"},
        experts=HFExperts(n_dense="num_dense_layers"),
    ),
    "Ministral3ForCausalLM": _MINISTRAL,
    "Mistral3ForConditionalGeneration": replace(_MINISTRAL, sees=True),
    "Mistral4ForCausalLM": HFClass(
        "mistral4",
        layer_tensors=_LATENT_NAMES,
        defaults=_LATENT_DEFAULTS
        | {
            "max_position_embeddings": 1048576,
            "kv_lora_rank": 256,
            "q_lora_rank": 1024,
            "qk_nope_head_dim": 64,
            "num_experts": 128,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 2048,
            "n_shared_experts": 1,
            "first_k_dense_replace": 0,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": True,
            "n_group": 1,
            "topk_group": 1,
            "rope_parameters": _MINISTRAL_ROPE
            | {"rope_theta": 10000.0, "factor": 128.0, "original_max_position_embeddings": 8192},
        },
        required={"rope_interleave": True},
        numbers={"expert_weights_scale": "routed_scaling_factor"},
        rotates="norm",
        latent=True,
        experts=HFExperts(**_DEEPSEEK_EXPERTS, groups=("n_group", "topk_group"), scoring="softmax"),
    ),
    "DeepseekV32ForCausalLM": HFClass(
        "deepseek32",
        **_INDEXED,
        defaults=_LATENT_DEFAULTS | _INDEXED_DEFAULTS | {"index_n_heads": 64, "n_group": 8, "topk_group": 4},
    ),
    "GlmMoeDsaForCausalLM": HFClass(
        "glm-dsa",
        **_INDEXED,
        defaults=_LATENT_DEFAULTS
        | _INDEXED_DEFAULTS
        | {
            "max_position_embeddings": 202752,
            "q_lora_rank": 2048,
            "v_head_dim": 256,
            "qk_nope_head_dim": 192,
            "index_n_heads": 32,
            "rms_norm_eps": 1e-5,
        },
    ),
    "Qwen2VLForConditionalGeneration": _QWEN2VL,
    "Qwen2_5_VLForConditionalGeneration": _QWEN2VL,
    "Qwen3VLForConditionalGeneration": HFClass(
        "qwen3vl",
        defaults=_LLAMA_DEFAULTS
        | {"max_position_embeddings": 128000, "num_key_value_heads": 32, "head_dim": 128, "rope_theta": 5e5},
        sections=True,
        sees=True,
    ),
    "Qwen3VLMoeForConditionalGeneration": HFClass(
        "qwen3vlmoe",
        layer_tensors=_LLAMA_NAMES | _EXPERT_NAMES,
        defaults=_LLAMA_DEFAULTS
        | {
            "max_position_embeddings": 128000,
            "num_key_value_heads": 16,
            "rope_theta": 5e5,
            "moe_intermediate_size": 1408,
            "num_experts": 60,
            "num_experts_per_tok": 4,
        },
        required=_ALL_EXPERTS,
        sections=True,
        sees=True,
        experts=HFExperts(normalised=None),
    ),
    "Qwen3NextForCausalLM": HFClass(
        "qwen3next",
        **_DELTA,
        layer_tensors=_DELTA_NAMES | _EXPERT_NAMES | _GATED_SHARE,
        ff="moe_intermediate_size",
        defaults=_DELTA_DEFAULTS | _DELTA_EXPERTS | {"num_experts_per_tok": 10, "norm_topk_prob": True},
        required=_ALL_EXPERTS,
        experts=HFExperts(ff_shared="shared_expert_intermediate_size"),
    ),
    "Qwen3_5ForCausalLM": HFClass(
        "qwen35",
        **_DELTA,
        layer_tensors=_DELTA_NAMES,
        defaults=_DELTA_DEFAULTS | {"num_key_value_heads": 4},
        sections=True,
    ),
    "Qwen3_5MoeForCausalLM": HFClass(
        "qwen35moe",
        **_DELTA,
        layer_tensors=_DELTA_NAMES | _EXPERT_NAMES | _GATED_SHARE,
        ff="moe_intermediate_size",
        defaults=_DELTA_DEFAULTS | _DELTA_EXPERTS | {"num_experts": 256, "num_experts_per_tok": 8},
        sections=True,
        experts=HFExperts(normalised=None, ff_shared="shared_expert_intermediate_size"),
    ),
    "MellumForCausalLM": HFClass(
        "mellum",
        layer_tensors=_LLAMA_NAMES | _EXPERT_NAMES,
        defaults=_LLAMA_DEFAULTS
        | {
            "max_position_embeddings": 131072,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "moe_intermediate_size": 896,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "sliding_window": 1024,
            "rope_theta": 10000.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        windows=("sliding_window", "layer_types"),
        named_windows=True,
        experts=HFExperts(),
    ),
    "XverseForCausalLM": HFClass("xverse"),
    "InternLM2ForCausalLM": HFClass(
        "internlm2",
        dynamic="beyond",
        tensors={
            "model.tok_embeddings": "token_embd",
            "model.norm": "output_norm",
            "model.output": "output",
        },
        layer_tensors={
            "attention_norm": "attn_norm",
            "attention.wqkv": "attn_q attn_k attn_v",
            "attention.wo": "attn_output",
            "ffn_norm": "ffn_norm",
            "feed_forward.w1": "ffn_gate",
            "feed_forward.w3": "ffn_up",
            "feed_forward.w2": "ffn_down",
        },
        grouped_qkv=True,
    ),
    "OrionForCausalLM": HFClass("orion"),  # its norms have a mean and a bias, whatever the entry is called
    "PanguEmbeddedForCausalLM": HFClass("pangu-embedded"),
    "ExaoneForCausalLM": HFClass(
        "exaone",
        tensors=_GPT2_TENSORS,
        layers="transformer.h",
        layer_tensors={
            "ln_1": "attn_norm",
            "attn.attention.q_proj": "attn_q",
            "attn.attention.k_proj": "attn_k",
            "attn.attention.v_proj": "attn_v",
            "attn.attention.out_proj": "attn_output",
            "ln_2": "ffn_norm",
            "mlp.c_fc_0": "ffn_gate",
            "mlp.c_fc_1": "ffn_up",
            "mlp.c_proj": "ffn_down",
        },
        activation="activation_function",
        epsilon="layer_norm_epsilon",
        own_names={"num_hidden_layers": "num_layers"},
    ),
    "MiniCPMForCausalLM": HFClass("minicpm", tied=True, required={"sparse_config": None}, depth_scales=True),
    "GPTBigCodeForCausalLM": HFClass(
        "starcoder",
        **_GPT2,
        kv_heads="multi_query",
        defaults=_GPT2_DEFAULTS | {"activation_function": "gelu_pytorch_tanh"},
        required={"scale_attn_weights": True, "add_cross_attention": False},
        grouped_qkv=True,
    ),
    "CodeShellForCausalLM": HFClass(
        "codeshell",
        tensors=_GPT2_TENSORS,
        layers="transformer.h",
        layer_tensors=_GPT2_NAMES,
        ff="n_inner",
        activation="activation_function",
        epsilon="layer_norm_epsilon",
        own_names={"num_key_value_heads": "num_query_groups"},
        required={"group_query_attention": True, "position_embedding_type": "rope"},
    ),
    "QWenLMHeadModel": HFClass(  # beyond seq_length it is another function
        "qwen",
        tensors=_GPT2_TENSORS,
        layers="transformer.h",
        layer_tensors={
            "ln_1": "attn_norm",
            "attn.c_attn": "attn_qkv",
            "attn.c_proj": "attn_output",
            "ln_2": "ffn_norm",
            "mlp.w2": "ffn_gate",
            "mlp.w1": "ffn_up",
            "mlp.c_proj": "ffn_down",
        },
        activation=None,
        epsilon="layer_norm_epsilon",
        own_names={
            "max_position_embeddings": "seq_length",
            "head_dim": "kv_channels",
            "rope_theta": "rotary_emb_base",
            "partial_rotary_factor": "rotary_pct",
        },
        required={"no_bias": True, "scale_attn_weights": True},
    ),
    "PaddleOCRVLForConditionalGeneration": HFClass(
        "paddleocr",
        tied=True,
        defaults=_ERNIE_DEFAULTS | {"num_key_value_heads": 2, "head_dim": 128},
        sections=True,
        sees=True,
    ),
    "HunYuanVLForConditionalGeneration": HFClass(
        "hunyuan_vl",
        dynamic="key",
        layer_tensors=_HUNYUAN_NAMES,
        tied=True,
        defaults=_OLMO_DEFAULTS,
        sections=True,
        sees=True,
    ),
    "MaincoderForCausalLM": HFClass(
        "maincoder",
        layer_tensors=_LLAMA_NAMES
        | {
            "feed_forward.gate_proj": "ffn_gate",
            "feed_forward.up_proj": "ffn_up",
            "feed_forward.down_proj": "ffn_down",
        },
        ff="intermediate_size_mlp",
        tied=True,
        required={"use_qk_norm": True},
        rotates="norm",
    ),
    "PlamoForCausalLM": HFClass(
        "plamo",
        layers="model.layers.layers",
        layer_tensors=_LLAMA_NAMES | {"norm": "attn_norm"},
        activation=None,
        defaults={"max_position_embeddings": 4096},
        scattered_groups=True,
    ),
    "DeepseekOCRForCausalLM": _DEEPSEEK_OCR,
    "DeepseekOCR2ForCausalLM": _DEEPSEEK_OCR,
    "BailingMoeForCausalLM": HFClass(
        "bailingmoe",
        tensors=_BAILING_TENSORS,
        layer_tensors=_BAILING_NAMES | {"attention.query_key_value": "attn_q attn_k attn_v"},
        required={"norm_head": False, "multi_gate": False, "routed_scaling_factor": 1.0},
        experts=HFExperts(n_shared="num_shared_experts", n_dense="first_k_dense_replace"),
    ),
    "BailingMoeV2ForCausalLM": HFClass(
        "bailingmoe2",
        tensors=_BAILING_TENSORS,
        layer_tensors=_BAILING_NAMES
        | {
            "attention.query_key_value": "attn_qkv",
            "attention.query_layernorm": "attn_q_norm",
            "attention.key_layernorm": "attn_k_norm",
            "mlp.gate.expert_bias": "exp_probs_b.bias",
        },
        defaults={"partial_rotary_factor": 0.5},
        required={"score_function": "sigmoid", "use_qk_norm": True, "norm_head": False},
        numbers={"expert_weights_scale": "routed_scaling_factor"},
        partial=True,
        experts=HFExperts(
            n_shared="num_shared_experts", n_dense="first_k_dense_replace", groups=("n_group", "topk_group")
        ),
    ),
    "HYV3ForCausalLM": HFClass(
        "hy_v3",
        layer_tensors=_LLAMA_NAMES
        | _EXPERT_NAMES
        | _SHARED_EXPERTS
        | {
            "mlp.router.gate": "ffn_gate_inp",
            "mlp.expert_bias": "exp_probs_b",
            "mlp.e_score_correction_bias": "exp_probs_b",
            "mlp.shared_mlp.gate_proj": "ffn_gate_shexp",
            "mlp.shared_mlp.up_proj": "ffn_up_shexp",
            "mlp.shared_mlp.down_proj": "ffn_down_shexp",
        },
        defaults={
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_theta": 11_158_840.0,
            "num_experts": 192,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
            "moe_intermediate_size": 1536,
            "router_scaling_factor": 2.826,
        },
        required={"route_norm": True, "first_k_dense_replace": 1},
        numbers={"expert_weights_scale": "router_scaling_factor"},
        experts=HFExperts(
            normalised=None, says_shared_ff=True, n_shared="num_shared_experts", first_dense=True
        ),
    ),
    "Gemma3TextModel": HFClass(  # EmbeddingGemma
        "gemma-embedding",
        **_GEMMA | {"required": {"use_bidirectional_attention": True}},
        defaults=_GEMMA_DEFAULTS
        | {"max_position_embeddings": 131072, "rope_theta": 1e6, "use_bidirectional_attention": False},
        windows=("sliding_window", "layer_types", "sliding_window_pattern"),
    ),
    "BertModel": _BERT,
    "BertForMaskedLM": _BERT,
    "BertForSequenceClassification": replace(
        _BERT,
        tensors=_BERT.tensors | {"bert.pooler.dense": "cls", "bert.classifier": "cls.output"},
    ),
    "XLMRobertaModel": _ROBERTA,
    "XLMRobertaForMaskedLM": _ROBERTA,
    "XLMRobertaForSequenceClassification": _ROBERTA_SCORES,
    "RobertaModel": _ROBERTA,
    "RobertaForMaskedLM": _ROBERTA,
    "RobertaForSequenceClassification": _ROBERTA_SCORES,
    "CamembertModel": _ROBERTA,
    "ModernBertModel": _MODERN_BERT,
    "ModernBertForMaskedLM": _MODERN_BERT,
    "ModernBertForSequenceClassification": replace(
        _MODERN_BERT,
        tensors=_MODERN_BERT.tensors
        | {"model.head.dense": "cls", "model.head.norm": "cls.norm", "model.classifier": "cls.output"},
    ),
    "NomicBertModel": _NOMIC,
    "JinaBertModel": _JINA_BERT,
    "JinaBertForMaskedLM": _JINA_BERT,
    "JinaEmbeddingsV3Model": replace(
        _NOMIC,
        architecture="jina-bert-v3",
        layer_tensors={
            "mixer.Wqkv": "attn_qkv",
            "mixer.out_proj": "attn_output",
            "norm1": "attn_output_norm",
            "mlp.fc1": "ffn_up",
            "mlp.fc2": "ffn_down",
            "norm2": "layer_output_norm",
        },
        defaults={
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-5,
            "max_position_embeddings": 8194,
            "rope_theta": 20000.0,
            "type_vocab_size": 1,
        },
    ),
}
"""What config.json calls a class."""


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ModelNotFoundError or FormatError where there is none."""
    try:
        value = json.loads(read_small_text(path))
    except FileNotFoundError:
        raise ModelNotFoundError(f"{path} does not exist: name the folder of a checkpoint") from None
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path} is not readable JSON: {error}") from None
    if not isinstance(value, dict):
        raise FormatError(f"{path} is not a JSON object")
    return value


class HFLatent:
    """Sizes of latent attention (model/config.py, Latent): ranks, the channels of a head of q and k that are
    rotated and those that are not, the channels of v."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.rank = integer(config, "kv_lora_rank", high=1 << 20)
        self.rank_q = 0  # null: queries come from the input
        if config.get("q_lora_rank") is not None:
            self.rank_q = integer(config, "q_lora_rank", high=1 << 20)
        self.n_own = integer(config, "qk_nope_head_dim", high=1 << 12)
        self.n_rot = integer(config, "qk_rope_head_dim", high=1 << 12)
        self.n_value = integer(config, "v_head_dim", high=1 << 12)
        self.plain = config.get("architectures") == ["PLMForCausalLM"]  # keys as of the first deepseek2 files

    def keys(self) -> dict[str, Any]:
        """Keys of the file, as llama.cpp's converter writes them: heads are those of the latent vector, or
        what is made of it."""
        if self.plain:
            return {
                "attention.key_length": self.n_own + self.n_rot,
                "attention.value_length": self.n_value,
                "attention.kv_lora_rank": self.rank,
            }
        return {
            "attention.head_count_kv": 1,
            "attention.key_length": self.rank + self.n_rot,
            "attention.value_length": self.rank,
            "attention.key_length_mla": self.n_own + self.n_rot,
            "attention.value_length_mla": self.n_value,
            "attention.kv_lora_rank": self.rank,
        } | ({"attention.q_lora_rank": self.rank_q} if self.rank_q else {})


def _renamed(config: dict[str, Any]) -> dict[str, Any]:
    """config.json without synonyms; of several names of one entry, the first of `SYNONYMS` wins."""
    renamed = {entry: value for entry, value in config.items() if entry not in SYNONYMS}
    for other, entry in SYNONYMS.items():
        if renamed.get(entry) is None and config.get(other) is not None:
            renamed[entry] = config[other]
    return renamed


class HFAltUp:
    """Sizes of Gemma 3n (model/config.py, AltUp): streams, the width of a layer's embedding of a token and
    its tokens, the rank of the branch beside attention, layers without keys and values of their own."""

    def __init__(self, config: dict[str, Any], n_layer: int) -> None:
        self.n_streams = integer(config, "altup_num_inputs", high=1 << 10)
        self.width = integer(config, "hidden_size_per_layer_input", high=1 << 16)
        self.n_vocab = integer(config, "vocab_size_per_layer_input", high=1 << 24)
        self.rank = integer(config, "laurel_rank", high=1 << 16)
        self.n_shared = number(config, "num_kv_shared_layers")
        pattern = config.get("activation_sparsity_pattern")
        if pattern is None:  # transformers' class has it so
            n_sparse = 10 if n_layer > 10 else 0
            pattern = [0.95] * n_sparse + [0.0] * (n_layer - n_sparse)
        if not isinstance(pattern, list) or not all(type(v) is float and 0 <= v < 1 for v in pattern):
            raise FormatError("activation_sparsity_pattern in config.json must hold numbers from 0 to 1")
        self.multipliers = [NormalDist().inv_cdf(v) if v else -math.inf for v in pattern]

    def keys(self) -> dict[str, Any]:
        """Keys of the GGUF file."""
        return {
            "altup.num_inputs": self.n_streams,
            "altup.active_idx": 0,
            "embedding_length_per_layer_input": self.width,
            "attention.shared_kv_layers": self.n_shared,
            "activation_sparsity_scale": self.multipliers,
        }


class HFWindowHeads:
    """Gemma 4's layers: heads of keys and values and the channels of one, of layers with a window and of the
    others; which take keys for values; the width of the embedding that each layer adds and its tokens; how
    many layers at the end attend the keys and values of others, whose FFNs may be twice as wide."""

    def __init__(self, config: dict[str, Any], n_layer: int, n_head: int) -> None:
        if config.get("use_bidirectional_attention") not in (None, "vision", False):
            raise UnsupportedModelError("use_bidirectional_attention in config.json is not supported")
        types = config.get("layer_types")
        if types is None:
            types = ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(n_layer)]
            types[-1] = "full_attention"
        types = _checked_types(types, n_layer, ("full_attention", "sliding_attention"))
        self.windowed = [kind == "sliding_attention" for kind in types]
        of_layers = config.get("per_layer_config")
        of_layers = of_layers if isinstance(of_layers, dict) else {}
        self.key_is_value = config.get("attention_k_eq_v") is True
        self.dim = integer(config, "head_dim", high=MAX_HEAD_DIM)
        first_full = next((i for i, windowed in enumerate(self.windowed) if not windowed), 0)
        own = of_layers.get(str(first_full))
        own = own if isinstance(own, dict) else {}
        # transformers writes what differs layer by layer; checkpoints have two entries for it.
        self.dim_full = integer(
            config | own if own else config, "head_dim" if own else "global_head_dim", 512
        )
        self.n_kv = integer(config, "num_key_value_heads", high=n_head)
        self.n_kv_full = integer(own, "num_key_value_heads", self.n_kv)
        if not own and self.key_is_value:
            self.n_kv_full = integer(config, "num_global_key_value_heads", self.n_kv)
        self.width = int(number(config, "hidden_size_per_layer_input"))
        self.n_vocab = integer(config, "vocab_size_per_layer_input", high=1 << 24)
        self.n_shared = int(number(config, "num_kv_shared_layers"))
        self.doubles_ff = config.get("use_double_wide_mlp") is True

    def heads_of(self, layer: int) -> tuple[int, int]:
        """Heads of keys and values, and the channels of one."""
        return (self.n_kv, self.dim) if self.windowed[layer] else (self.n_kv_full, self.dim_full)

    def keys(self) -> dict[str, Any]:
        """Keys of the GGUF file."""
        n_kv = [self.heads_of(i)[0] for i in range(len(self.windowed))]
        return {
            "attention.head_count_kv": n_kv if len(set(n_kv)) > 1 else n_kv[0],
            "attention.key_length": self.dim_full,
            "attention.value_length": self.dim_full,
            "attention.key_length_swa": self.dim,
            "attention.value_length_swa": self.dim,
            "rope.dimension_count": self.dim_full,
            "rope.dimension_count_swa": self.dim,
            "attention.sliding_window_pattern": self.windowed,
            "attention.shared_kv_layers": self.n_shared,
            "embedding_length_per_layer_input": self.width,
        }


def _with_defaults(config: dict[str, Any], hf_class: HFClass) -> dict[str, Any]:
    """The entries of the model that generates, under one name each, with the class's defaults."""
    if hf_class.sees and isinstance(text := config.get("text_config", config.get("language_config")), dict):
        whole = {k: config[k] for k in ("tie_word_embeddings", "architectures") if k in config}
        config = config | text | whole  # the output is the whole model's
    if hf_class.architecture == "mpt" and isinstance(of_attention := config.get("attn_config"), dict):
        config = config | of_attention
    config = _renamed(config)
    for plain, own in hf_class.own_names.items():
        config.pop(plain, None)
        if (value := config.pop(own, None)) is not None:
            config[plain] = value
    return hf_class.defaults | config


def _check_required(config: dict[str, Any], hf_class: HFClass) -> None:
    for key, value in hf_class.required.items():
        found = config.get(key, value)
        same = type(found) is type(value) and found == value
        if not same and not (found is None and not value):
            raise UnsupportedModelError(f"{key} set to {str(found)[:60]!r} in config.json is not supported")


def _is_online_bitnet(quantised: Any) -> bool:
    """Whether matrices are as they were trained, and become ternary when they are loaded."""
    known = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}
    if not isinstance(quantised, dict) or quantised.get("use_rms_norm"):
        return False
    return all(quantised.get(entry) == value for entry, value in known.items())


def _class_of(config: dict[str, Any]) -> HFClass:
    classes = config.get("architectures")
    name = classes[0] if isinstance(classes, list) and classes else None
    if isinstance(name, str) and (refused := REFUSED.get(name.removesuffix("ForCausalLM").lower())):
        raise UnsupportedModelError(f"the architecture {name!r} in config.json is not supported: {refused}")
    if isinstance(name, str) and name not in CLASSES and name.endswith("Model"):
        name = f"{name.removesuffix('Model')}ForCausalLM"  # which has an output beside it
    if not isinstance(name, str):
        raise UnsupportedModelError(
            "config.json has no list 'architectures' that names the model's class: the folder must hold a "
            "Hugging Face checkpoint of a language model"
        )
    if name not in CLASSES:
        meant = did_you_mean(name.lower(), {known.lower(): known for known in CLASSES}, 0.7)
        hint = f" ({meant})" if meant else ""
        raise UnsupportedModelError(
            f"the architecture {shown(name)} in config.json is not supported{hint}; "
            "'hotset list --architectures' names what hotset runs"
        )
    if name == "NomicBertModel" and "activation_function" in config:
        return _NOMIC_MOE if config.get("moe_every_n_layers") else _PUBLISHED_NOMIC
    return CLASSES[name]


class HFConfig:
    """A checked config.json.

    activation: overrides what it says (see parse_activation). Raises UnsupportedModelError for what cannot be
    converted, FormatError for what makes no sense.
    """

    def __init__(self, config: dict[str, Any], activation: str | None = None) -> None:
        self.hf_class = _class_of(config)
        self.class_name: str = config["architectures"][0]
        quantised = config.get("quantization_config")
        method = quantised.get("quant_method") if isinstance(quantised, dict) else None
        self.fp8_block = block_of(quantised)
        self.is_ternary = self.hf_class.ternary and _is_online_bitnet(quantised)
        is_packed = self.hf_class.packed and method == "mxfp4"
        if quantised is not None and not (is_packed or self.is_ternary or is_fp8(quantised)):
            raise UnsupportedModelError(
                "the checkpoint is quantised (quantization_config); convert the original"
            )
        self.raw = config = _with_defaults(config, self.hf_class)
        self.parts = _parts(config) if self.hf_class.parts else None  # what each layer is
        self.hf_class = _without_experts(self.hf_class, self.parts, config)
        self.architecture = self.hf_class.architecture
        _check_required(config, self.hf_class)
        self.n_layer = integer(config, "num_hidden_layers", high=1 << 12)
        # Behind the model's own some have layers that predict more than one token: they are left out.
        self.n_extra_layers = 0
        if config.get("num_nextn_predict_layers"):
            self.n_extra_layers = integer(config, "num_nextn_predict_layers", high=1 << 10)
        self.n_embd = integer(config, "hidden_size", high=1 << 20)
        if self.architecture == "opt" and config.get("word_embed_proj_dim") not in (None, self.n_embd):
            raise UnsupportedModelError("word_embed_proj_dim other than hidden_size is not supported")
        self.n_head, self.n_head_kv, self.head_dim = self._heads()
        self.latent = HFLatent(config) if self.hf_class.latent else None
        if self.latent is not None:
            self.head_dim = self.latent.n_own + self.latent.n_rot
        self.altup = HFAltUp(config, self.n_layer) if self.hf_class.altup else None
        self.window_heads = None
        if self.hf_class.window_heads:
            self.window_heads = HFWindowHeads(config, self.n_layer, self.n_head)
            self.head_dim = self.window_heads.dim_full
        self.n_ff, self.n_ff_of_layers = self._neurons()
        self.delta = self._delta() if ARCHITECTURES[self.architecture].delta_net is not None else None
        self.space = self._state_space()
        self.channels = self._channel_space()
        version = ARCHITECTURES[self.architecture].rwkv
        self.rwkv = None if version is None else HFRwkv(config, version, self.n_embd)
        self.conv_kernel = (
            integer(config, "conv_L_cache", 3, MAX_CONV_KERNEL) if self.hf_class.short_conv else 0
        )
        self.n_expert = self.n_expert_used = self.n_ff_expert = self.n_ff_shared = 0
        if (experts := self.hf_class.experts) is not None:
            self.n_expert = integer(config, experts.n)
            self.n_expert_used = integer(config, experts.n_used, high=self.n_expert)
            self.n_ff_expert = integer(config, experts.ff, high=1 << 22)
            if experts.ff_shared is not None and config.get(experts.ff_shared) != 0:
                self.n_ff_shared = integer(config, experts.ff_shared, high=1 << 22)
            elif experts.n_shared is not None and config.get(experts.n_shared):
                self.n_ff_shared = integer(config, experts.n_shared, high=1 << 10) * self.n_ff_expert
        self.n_vocab = integer(config, "vocab_size", high=1 << 24)
        self.n_ctx = integer(config, "max_position_embeddings")
        if config.get("max_trained_positions") is not None:  # beyond them the rotation is another
            self.n_ctx = min(self.n_ctx, integer(config, "max_trained_positions"))
        self.n_unused_positions = 0
        if self.hf_class.padded_positions:
            self.n_unused_positions = 1 + int(number(config, "pad_token_id"))
            self.n_ctx = integer(
                {"max_position_embeddings": self.n_ctx - self.n_unused_positions}, "max_position_embeddings"
            )
        self.activation = self._activation(activation)

    @property
    def tied(self) -> bool:
        """Whether the embedding is the output matrix as well."""
        tied = self.raw.get("tie_word_embeddings", self.hf_class.tied)
        if self.hf_class.short_conv:  # as LFM2's first checkpoints call it
            tied = self.raw.get("tie_embedding", tied)
        return tied is True

    @property
    def n_latent(self) -> int:
        """Width of what experts read and yield, where it is not the model's."""
        has = self.parts is not None and self.n_expert and self.raw.get("moe_latent_size") is not None
        return integer(self.raw, "moe_latent_size", high=1 << 20) if has else 0

    def heads_of(self, layer: int) -> tuple[int, int]:
        """Heads of keys and values of a layer, and the channels of one."""
        own = self.window_heads
        return (self.n_head_kv, self.head_dim) if own is None else own.heads_of(layer)

    @property
    def transposes_experts(self) -> bool:
        """See HFExperts.transposed."""
        return self.hf_class.experts is not None and self.hf_class.experts.transposed

    def _neurons(self) -> tuple[int, list[int] | None]:
        """Of an FFN, and of each layer's where they differ."""
        config = self.raw
        of_width = self.hf_class.ff_of_width
        n_ff = None if of_width is None else of_width(self.n_embd)
        each: list[int] = []
        if (ff := self.hf_class.ff) is not None:
            widths = config.get(ff)
            if self.altup is None or not isinstance(widths, list):
                widths = [integer(config, ff, n_ff, 1 << 22)]
            if (own := self.window_heads) is not None and own.doubles_ff:
                widths = widths * (self.n_layer - own.n_shared) + [2 * widths[0]] * own.n_shared
            each = [integer({ff: width}, ff, high=1 << 22) for width in widths]
        first = each[0] if each else 0
        if ARCHITECTURES[self.architecture].halved_ff:
            first //= 2
        if self.hf_class.adjusted_ff:
            first = self._adjusted_ff(first)
        return first, each if len(set(each)) > 1 else None

    def _heads(self) -> tuple[int, int, int]:
        """Heads, those of keys and values, and the channels of one; without attention zeros."""
        if not ARCHITECTURES[self.architecture].attends:
            return 0, 0, 0
        self.n_head = n_head = integer(self.raw, "num_attention_heads", high=1 << 14)
        n_head_kv = self._n_head_kv()
        if n_head % n_head_kv:
            raise FormatError(f"config.json has {n_head} heads, not a multiple of {n_head_kv} KV heads")
        return n_head, n_head_kv, integer(self.raw, "head_dim", max(self.n_embd // n_head, 1), 1 << 14)

    def _n_head_kv(self) -> int:
        if self.hf_class.latent:
            return self.n_head
        if self.hf_class.scattered_groups:
            return max(self.n_head // integer(self.raw, "n_shared_head", high=self.n_head), 1)
        of_all = 1 if self.raw.get("multi_query", True) is True else self.n_head
        match self.hf_class.kv_heads:
            case "grouped":
                return integer(self.raw, "num_key_value_heads", self.n_head)
            case "every":
                return self.n_head
            case "multi_query":
                return of_all
            case "falcon":
                if self.raw.get("new_decoder_architecture") is True or "n_head_kv" in self.raw:
                    return integer(self.raw, "num_kv_heads", self.raw.get("n_head_kv", self.n_head))
                return of_all
        assert_never(self.hf_class.kv_heads)

    def _adjusted_ff(self, n_ff: int) -> int:
        """LFM2's neurons: two thirds of what config.json says, times a factor, in whole multiples."""
        config = self.raw
        n_ff = integer(config, "block_ff_dim", n_ff, 1 << 22)
        if config.get("block_auto_adjust_ff_dim", True) is False:
            return n_ff
        n_ff = 2 * n_ff // 3
        if config.get("block_ffn_dim_multiplier", 1.0) is not None:
            multiple = integer(config, "block_multiple_of", 256, 1 << 22)
            n_ff = int(number(config, "block_ffn_dim_multiplier", 1.0) * n_ff)
            n_ff = -(-n_ff // multiple) * multiple
        return integer({"block_ff_dim": n_ff}, "block_ff_dim", high=1 << 22)

    def _delta(self) -> DeltaMixer:
        """The sizes of the gated delta nets."""
        heads = integer(self.raw, "linear_num_value_heads", high=MAX_STATE_HEADS)
        mixer = DeltaMixer(
            integer(self.raw, "linear_conv_kernel_dim", high=MAX_CONV_KERNEL),
            heads,
            integer(self.raw, "linear_num_key_heads", high=heads),
            integer(self.raw, "linear_key_head_dim", high=MAX_HEAD_DIM),
            integer(self.raw, "linear_value_head_dim", high=MAX_HEAD_DIM),
            ARCHITECTURES[self.architecture].delta_net == "tiled",
        )
        if mixer.n_head % mixer.n_head_k:
            raise FormatError(
                f"config.json has {mixer.n_head} linear_num_value_heads, not a multiple of "
                f"{mixer.n_head_k} linear_num_key_heads"
            )
        return mixer

    def _state_space(self) -> StateSpaceMixer | None:
        """The sizes of the state spaces."""
        if self.hf_class.state_space is None:
            return None
        heads, dim_v, groups, dim_k, kernel = self.hf_class.state_space
        n_head = integer(self.raw, heads, high=MAX_STATE_HEADS)
        if self.raw.get(dim_v) == "auto":
            self.raw[dim_v] = self._inner_size() // n_head
        limit = self.raw.get("time_step_limit")
        if self.parts is None and limit is not None and list(limit) not in _NO_LIMITS:
            raise UnsupportedModelError("a time_step_limit in config.json is not supported")
        mixer = StateSpaceMixer(
            integer(self.raw, kernel, high=MAX_CONV_KERNEL),
            n_head,
            integer(self.raw, groups, high=n_head),
            integer(self.raw, dim_k, high=MAX_HEAD_DIM),
            integer(self.raw, dim_v, high=MAX_HEAD_DIM),
        )
        if ARCHITECTURES[self.architecture].beside:
            normed = self.raw.get("mamba_rms_norm") is True
            if normed and self.raw.get("mamba_norm_before_gate") is not False:
                raise UnsupportedModelError("mamba_norm_before_gate in config.json is not supported")
            mixer = replace(mixer, normed=normed, beside=True)
        if n_head % mixer.n_group:
            raise FormatError(f"config.json has {n_head} {heads}, not a multiple of {mixer.n_group} {groups}")
        return mixer

    def _inner_size(self) -> int:
        """Channels of all heads of a state space, where config.json does not say those of one."""
        if self.raw.get("mamba_d_ssm") is not None:
            return integer(self.raw, "mamba_d_ssm", high=1 << 22)
        return integer(self.raw, "mamba_expand", 2, 1 << 10) * self.n_embd

    def _channel_space(self) -> ChannelMixer | None:
        """The sizes of Mamba's state spaces."""
        if self.hf_class.channel_space is None:
            return None
        expand, dim_k, kernel, rank = self.hf_class.channel_space
        if self.raw.get(rank) == "auto":
            self.raw[rank] = -(-self.n_embd // 16)
        return ChannelMixer(
            integer(self.raw, kernel, high=MAX_CONV_KERNEL),
            integer(self.raw, expand, high=1 << 10) * self.n_embd,
            integer(self.raw, dim_k, high=MAX_HEAD_DIM),
            integer(self.raw, rank, high=1 << 16),
            None,
        )

    def _channel_space_keys(self, channels: ChannelMixer) -> dict[str, Any]:
        keys: dict[str, Any] = {
            "ssm.conv_kernel": channels.kernel,
            "ssm.inner_size": channels.inner,
            "ssm.state_size": channels.dim_k,
            "ssm.time_step_rank": channels.rank,
        }
        if self.n_head == 0:
            falcon = self.raw["architectures"] == ["FalconMambaForCausalLM"]
            return keys | {"ssm.dt_b_c_rms": falcon}
        period = integer(self.raw, "attn_layer_period", high=1 << 12)
        offset = number(self.raw, "attn_layer_offset")
        kv = [self.n_head_kv if i % period == offset else 0 for i in range(self.n_layer)]
        return keys | {"attention.head_count_kv": kv}

    def _state_space_keys(self) -> dict[str, Any]:
        """The sizes of the state spaces, and what each layer is; or what RWKV has in their place."""
        if self.rwkv is not None:
            return self.rwkv.keys()
        if self.channels is not None:
            return self._channel_space_keys(self.channels)
        space = self.space
        if space is None:
            return {}
        row, keys = ARCHITECTURES[self.architecture], {}
        if row.attends and not row.beside:
            keys = self._hybrid_keys() if self.parts is None else self._part_keys(self.parts)
        return keys | {
            "ssm.conv_kernel": space.kernel,
            "ssm.inner_size": space.of_values,
            "ssm.state_size": space.dim_k,
            "ssm.time_step_rank": space.n_head,
            "ssm.group_count": space.n_group,
        }

    def factors(self, stem: str) -> np.ndarray | None:
        """Falcon-H1's multipliers of a tensor: float32, one or one for each row; None: there are none."""
        space = self.space
        if not self.hf_class.multiplied or space is None:
            return None
        plain = {
            "token_embd": ("embedding_multiplier",),
            "output": ("lm_head_multiplier",),
            "attn_q": ("attention_in_multiplier",),
            "attn_k": ("attention_in_multiplier", "key_multiplier"),
            "attn_v": ("attention_in_multiplier",),
            "attn_output": ("attention_out_multiplier",),
            "ssm_in": ("ssm_in_multiplier",),
            "ssm_out": ("ssm_out_multiplier",),
        }
        factor = math.prod(number(self.raw, entry, 1.0) for entry in plain.get(stem, ()))
        if stem in ("ffn_gate", "ffn_down"):
            factor = self._multipliers("mlp_multipliers", 2)[int(stem == "ffn_down")]
        if stem != "ssm_in":
            return None if factor == 1.0 else np.array([factor], np.float32)
        of_group = space.n_group * space.dim_k
        widths = (space.of_values, space.of_values, of_group, of_group, space.n_head)
        return np.repeat(np.float32(factor) * self._multipliers("ssm_multipliers", 5), widths)

    def _multipliers(self, entry: str, n: int) -> np.ndarray:
        found = self.raw.get(entry)
        found = [1.0] * n if found is None else found
        if not isinstance(found, list) or len(found) != n:
            raise FormatError(f"{entry} in config.json must be a list of {n} numbers")
        return np.array([number({entry: value}, entry) for value in found], np.float32)

    def _hybrid_keys(self) -> dict[str, Any]:
        """Which layers have attention, and whether it has a rotation."""
        types = self.raw.get("layer_types") or self.raw.get("layers_block_type")
        types = ["linear_attention"] * self.n_layer if types is None else types
        if isinstance(types, list):
            types = [_LEGACY_PARTS.get(kind, kind) if isinstance(kind, str) else kind for kind in types]
        types = _checked_types(types, self.n_layer, _DELTA_TYPES)
        kv = [self.n_head_kv if kind == "full_attention" else 0 for kind in types]
        rotates = self.raw.get("position_embedding_type") == "rope"
        return {"attention.head_count_kv": kv, "rope.scaling.finetuned": rotates}

    def _part_keys(self, parts: list[str]) -> dict[str, Any]:
        """What each layer is, and what only such models have."""
        kv = [self.n_head_kv if part == "full_attention" else 0 for part in parts]
        widths = {"mlp": self.n_ff, "moe": self.n_ff_expert}
        n_ff = [widths.get(part, 0) for part in parts]
        keys: dict[str, Any] = {"attention.head_count_kv": kv, "feed_forward_length": n_ff}
        keys[EPSILON_KEYS["layer"]] = float(number(self.raw, "layer_norm_epsilon"))  # engines read either
        return keys | ({"moe_latent_size": self.n_latent} if self.n_latent else {})

    def _delta_keys(self, delta: DeltaMixer) -> dict[str, Any]:
        """Which layers have a gated delta net, and its sizes."""
        n, types = self.n_layer, self.raw.get("layer_types")
        if types is None:
            interval = integer(self.raw, "full_attention_interval", 4)
            types = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(n)]
        types = _checked_types(types, n, _DELTA_TYPES)
        recurrent = [kind == "linear_attention" for kind in types]
        keys: dict[str, Any] = {
            "attention.recurrent_layers": recurrent,
            "ssm.conv_kernel": delta.kernel,
            "ssm.inner_size": delta.of_values,
            "ssm.state_size": delta.dim_k,
            "ssm.time_step_rank": delta.n_head,
            "ssm.group_count": delta.n_head_k,
        }
        interval = recurrent.index(False) + 1 if False in recurrent else 0
        if interval and recurrent == [(i + 1) % interval != 0 for i in range(n)]:
            keys["full_attention_interval"] = interval
        return keys

    def _conv_keys(self) -> dict[str, Any]:
        """Which layers have a short convolution, and how many tokens it sees."""
        n, types = self.n_layer, self.raw.get("layer_types")
        if types is None:
            if self.hf_class.experts is not None:
                raise FormatError("config.json has no layer_types")
            attends = self.raw.get("full_attn_idxs")
            attends = list(range(n)) if attends is None else attends
            if not isinstance(attends, list):
                raise FormatError("full_attn_idxs in config.json must be a list of layers")
            types = ["full_attention" if i in attends else "conv" for i in range(n)]
        types = _checked_types(types, n, _CONV_TYPES)
        heads = [0 if kind == "conv" else self.n_head_kv for kind in types]
        return {"attention.head_count_kv": heads, "shortconv.l_cache": self.conv_kernel}

    def _activation(self, override: str | None) -> FFNActivation:
        row = ARCHITECTURES[self.architecture]
        if override is not None:
            activation = parse_activation(override)
        else:
            key = self.hf_class.activation
            if key is None:
                return row.activation
            name = self.raw.get(key)
            if not isinstance(name, str):
                raise FormatError(f"{key} in config.json must be a name, not {name!r}")
            threshold = number(self.raw, "hidden_act_param") if name == "fatrelu" else None
            activation = parse_activation(self.hf_class.means.get(name, name), threshold)
            # Bamboo's checkpoints say "relu" and mean both relus of dReLU: the second is in the class.
            if activation == FFNActivation(row.activation.gate):
                activation = row.activation
            if self.hf_class.activates_up:
                activation = DRELU  # `required` sees to it that it is relu
        if activation == DRELU and not row.gated:
            raise UnsupportedModelError(
                f"the {self.architecture} model's feed-forward network has no gate, so its activation cannot "
                "be dReLU"
            )
        return activation

    def keys(self, name: str, n_positions: int) -> dict[str, Any]:
        """Keys of the GGUF file, for the architecture `name`, with a context of n_positions."""
        row = ARCHITECTURES[self.architecture]
        keys: dict[str, Any] = {
            "block_count": self.n_layer,
            "context_length": n_positions,
            "embedding_length": self.n_embd,
            "feed_forward_length": self.n_ff_of_layers or self.n_ff * (2 if row.halved_ff else 1),
            "vocab_size": self.n_vocab,
            "attention.head_count": self.n_head,
        }
        if row.attends:
            keys |= {
                "attention.head_count_kv": self.n_head_kv,
                "attention.key_length": self.head_dim,
                "attention.value_length": self.head_dim,
            }
        for part in (self.latent, self.altup, self.window_heads):
            keys |= {} if part is None else part.keys()
        if not row.norm_weights:  # OLMo's class has it in its code, and llama.cpp needs the key
            keys[EPSILON_KEYS[row.norm]] = 1e-5
        if self.hf_class.epsilon is not None:
            keys[EPSILON_KEYS[row.norm]] = float(number(self.raw, self.hf_class.epsilon))
        keys |= {"attention.causal": False} if self.hf_class.is_encoder else {}
        keys |= self._scale_keys() | self._expert_keys()
        if self.hf_class.short_conv:
            keys |= self._conv_keys()
        if self.delta is not None:
            keys |= self._delta_keys(self.delta)
        keys |= self._state_space_keys()
        if self.hf_class.indexed:
            keys |= self._indexer_keys()
        if row.rope is not None:
            self._check_unrotated(row.unrotated_period)
            windows = self._layout_keys() if self.hf_class.layouts else self._window_keys(row.window_period)
            keys |= windows | self._rope_keys()
            if self.hf_class.sections:
                keys["rope.dimension_sections"] = self._sections()
            if row.unscaled_windows and windows:
                self._check_one_base(keys["rope.freq_base"])
            if row.windowed_rope_base is not None:
                keys["rope.freq_base_swa"] = self._windowed_rope_base(row.windowed_rope_base)
        if self.hf_class.activation is not None:
            keys["hidden_activation"] = self.activation.gate
        keys = {f"{name}.{key}": value for key, value in keys.items()}
        if self.activation.gate == "fatrelu":
            keys[FATRELU_THRESHOLD_KEY] = float(self.activation.threshold)
        if self.activation.up is not None and self.hf_class.activation is not None:
            keys[UP_ACTIVATION_KEY] = self.activation.up
        return keys | self._text_keys()

    def _text_keys(self) -> dict[str, Any]:
        """Of encoders: how many types of tokens there are."""
        if "type_vocab_size" not in self.raw or not self.hf_class.is_encoder:
            return {}
        return {"tokenizer.ggml.token_type_count": integer(self.raw, "type_vocab_size", high=1 << 16)}

    def _indexer_keys(self) -> dict[str, Any]:
        """Of what chooses the keys that a token sees (model/config.py, Architecture.indexed)."""
        types = self.raw.get("indexer_types")
        if types is not None and types != ["full"] * self.n_layer:
            raise UnsupportedModelError("layers without an indexer of their own are not supported")
        return {
            "attention.indexer.head_count": integer(self.raw, "index_n_heads", high=1 << 14),
            "attention.indexer.key_length": integer(self.raw, "index_head_dim", high=1 << 14),
            "attention.indexer.top_k": integer(self.raw, "index_topk"),
        }

    def _expert_keys(self) -> dict[str, Any]:
        experts = self.hf_class.experts
        if experts is None:
            return {}
        keys: dict[str, Any] = {"expert_count": self.n_expert, "expert_used_count": self.n_expert_used}
        if experts.says_ff:
            keys["expert_feed_forward_length"] = self.n_ff_expert
        if experts.ff_shared is not None:
            keys["expert_shared_feed_forward_length"] = self.n_ff_shared
        if experts.n_shared is not None:
            keys["expert_shared_count"] = self.n_ff_shared // self.n_ff_expert
            if experts.says_shared_ff:
                keys["expert_shared_feed_forward_length"] = self.n_ff_shared
        if experts.n_dense is not None and self.raw.get(experts.n_dense):
            keys["leading_dense_block_count"] = integer(self.raw, experts.n_dense, high=self.n_layer)
        if experts.groups is not None and self._heeds_groups(experts):
            for key, entry in zip(
                ("expert_group_count", "expert_group_used_count"), experts.groups, strict=True
            ):
                keys[key] = integer(self.raw, entry, 1, self.n_expert)
        kinds = self.raw.get("mlp_layer_types")
        if experts.first_dense:
            keys["leading_dense_block_count"] = 1 if not isinstance(kinds, list) else kinds.count("dense")
        n_dense = keys.get("leading_dense_block_count", 0)
        if kinds not in (
            None, ["dense"] * n_dense + ["sparse"] * (self.n_layer - n_dense)
        ):  # fmt: skip
            raise UnsupportedModelError(
                f"mlp_layer_types in config.json must be dense in the first {n_dense} layers and sparse in "
                f"the others, not {str(kinds)[:60]}"
            )
        return keys | self._routing_keys(experts)

    def _routing_keys(self, experts: HFExperts) -> dict[str, Any]:
        keys: dict[str, Any] = {}
        scoring = ARCHITECTURES[self.architecture].experts
        if experts.normalised is not None:
            keys["expert_weights_norm"] = self._flag(experts.normalised)
        elif scoring is not None and scoring.scoring == "sigmoid":  # llama.cpp takes False without the key
            keys["expert_weights_norm"] = scoring.normalised
        if experts.softmax is not None:
            keys["expert_gating_func"] = 1 if self._flag(experts.softmax) else 2
        elif experts.scoring is not None:
            keys["expert_gating_func"] = next(n for n, name in SCORINGS.items() if name == experts.scoring)
        elif scoring is not None and scoring.scoring == "sigmoid":
            keys["expert_gating_func"] = 2
        return keys

    def _heeds_groups(self, experts: HFExperts) -> bool:
        if experts.methods is None:
            return True
        method = self.raw.get("topk_method") or next(iter(experts.methods))
        if method not in experts.methods:
            raise UnsupportedModelError(
                f"topk_method set to {str(method)[:60]!r} in config.json is not supported"
            )
        return experts.methods[method]

    def _flag(self, entry: str) -> bool:
        value = self.raw.get(entry)
        value = False if value is None else value
        if not isinstance(value, bool):
            raise FormatError(f"{entry} in config.json must be true or false")
        return value

    def _layout_keys(self) -> dict[str, Any]:
        """Windows of the layers that sliding_window_layout names, which rope_layout must name as well."""
        found = {}
        for entry, default in (("sliding_window_layout", 0), ("rope_layout", 1)):
            layout = self.raw.get(entry, [default] * self.n_layer)
            if (
                not isinstance(layout, list)
                or len(layout) != self.n_layer
                or any(v not in (0, 1) for v in layout)
            ):
                raise FormatError(f"{entry} in config.json must hold 0 or 1 for {self.n_layer} layers")
            found[entry] = [value == 1 for value in layout]
        windowed, rotated = found.values()
        if rotated != (windowed if any(windowed) else [True] * self.n_layer):
            raise UnsupportedModelError(
                "rope_layout in config.json must name the layers with a window, or all where there are none"
            )
        if not any(windowed):
            return {}
        window = integer(self.raw, "sliding_window_size")
        return {"attention.sliding_window": window, "attention.sliding_window_pattern": windowed}

    def _scale_keys(self) -> dict[str, Any]:
        """Scales and caps: those that stand in config.json, and that of the scores where it is another."""

        def positive(entry: str) -> float:
            value = float(number(self.raw, entry))
            if not value > 0:
                raise FormatError(f"{entry} in config.json must be above 0, not {value:g}")
            return value

        numbers = self.hf_class.numbers.items()
        keys: dict[str, Any] = {
            key: positive(entry) for key, entry in numbers if self.raw.get(entry) is not None
        }
        keys |= {key: integer(self.raw, entry) for key, entry in self.hf_class.integers.items()}
        keys |= {key: self._flag(entry) for key, entry in self.hf_class.flags.items()}
        if self.hf_class.depth_scales:
            keys["embedding_scale"] = positive("scale_emb")
            keys["residual_scale"] = positive("scale_depth") / math.sqrt(self.n_layer)
            keys["logit_scale"] = self.n_embd / positive("dim_model_base")
        if self.hf_class.query_scalar is not None:
            scalar = positive(self.hf_class.query_scalar)
            narrow = self.n_layer == ARCHITECTURES[self.architecture].narrow_scale_at
            if scalar != (self.n_embd // self.n_head if narrow else self.head_dim):
                keys["attention.scale"] = scalar**-0.5
        return keys

    def _check_unrotated(self, period: int) -> None:
        """Raises UnsupportedModelError unless each so-many-th layer, and no other, has no rotation."""
        if not period:
            return
        rotated = self.raw.get("no_rope_layers")
        if rotated is None:
            interval = integer(self.raw, "no_rope_layer_interval", period)
            rotated = [(i + 1) % interval != 0 for i in range(self.n_layer)]
        wanted = [(i + 1) % period != 0 for i in range(self.n_layer)]
        if not isinstance(rotated, list) or [value == 1 for value in rotated[: self.n_layer]] != wanted:
            raise UnsupportedModelError(
                f"no_rope_layers in config.json must leave out each {period}th layer, and no other"
            )

    def _window_keys(self, period: int) -> dict[str, Any]:
        """Which layers slide: those of layer_types, else all but each sliding_window_pattern-th, else those
        from max_window_layers on, else all; of these the entries that the class reads (HFClass.windows).

        period: of the architecture, where there is no sliding_window_pattern; what it says needs no key.
        """
        n, read = self.n_layer, self.hf_class.windows
        behind = 0 if ARCHITECTURES[self.architecture].window_last else 1
        config = {entry: self.raw.get(entry) for entry in read}
        if config.get("sliding_window") is None or config.get("use_sliding_window", True) is not True:
            return {}
        keys: dict[str, Any] = {"attention.sliding_window": integer(config, "sliding_window")}
        types = config.get("layer_types")
        if types is None and self.hf_class.named_windows:
            return {}
        if types is not None:
            known = ("full_attention", "sliding_attention")
            types = _checked_types(types, n, known)
            windowed = [kind == "sliding_attention" for kind in types]
        elif period or config.get("sliding_window_pattern") is not None:
            pattern = integer(config, "sliding_window_pattern", period)
            windowed = [(i + behind) % pattern != 0 for i in range(n)]
        elif "max_window_layers" in read:
            first = number(config, "max_window_layers")
            windowed = [i >= first for i in range(n)]
        elif "layer_types" in read:  # transformers' versions disagree
            raise UnsupportedModelError("config.json has a window but no layer_types, which says where")
        else:
            windowed = [True] * n
        if not any(windowed):
            return {}
        if windowed != [not period or (i + behind) % period != 0 for i in range(n)]:
            keys["attention.sliding_window_pattern"] = windowed
        return keys

    def _ropes(self, layers: str) -> dict[str, Any]:
        """What config.json says about the rotation in `layers` ("full_attention", "sliding_attention"),
        where it distinguishes them, or in all."""
        rope = self.raw.get("rope_scaling") or self.raw.get("rope_parameters")
        if rope is None:
            rope = self.hf_class.defaults.get("rope_parameters", {})
        if isinstance(rope, dict) and rope.keys() & {"full_attention", "sliding_attention"}:
            rope = rope.get(layers) or {}
        elif layers == "sliding_attention":
            rope = {}
        if not isinstance(rope, dict):
            raise FormatError("rope_parameters in config.json must be an object")
        return dict(rope)

    def _rope(self) -> dict[str, Any]:
        """RoPE's parameters in today's spelling (older files: rope_theta beside rope_scaling, "type")."""
        config, rope = self.raw, self._ropes("full_attention")
        kind = rope.get("rope_type", rope.get("type", "default"))
        match self.hf_class.dynamic:
            case "base" if kind == "dynamic" and rope.get("alpha"):
                # Scaled for the longest context, whatever the context is.
                rope["rope_theta"] = number(rope, "rope_theta", number(config, "rope_theta", 10000.0))
                rope["rope_theta"] *= number(rope, "alpha") ** (self.head_dim / (self.head_dim - 2))
                kind = "default"
            case "key":
                scaled = kind in ("dynamic", "xdrope") and rope.get("alpha")
                rope["alpha"], kind = (number(rope, "alpha"), "default") if scaled else (None, kind)
            case "beyond" if kind == "dynamic":
                kind = "default"
        if kind == "mrope":  # of a text all dimensions of a position are the same
            kind = "default"
        if kind == "su" or (kind == "yarn" and "long_factor" in rope):  # what Phi 3 called it first
            kind = "longrope"
        rope["rope_type"] = kind
        rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
        original = "original_max_position_embeddings"
        if config.get(original) is not None:  # it wins over that of the scaling
            rope[original] = config[original]
        rope.setdefault(original, self.n_ctx)
        return rope

    def _windowed_rope_base(self, default: float) -> float:
        """The base of the rotation in layers with a window, which is never scaled."""
        rope = self._ropes("sliding_attention")
        if rope.get("rope_type", "default") != "default":
            raise UnsupportedModelError(
                "a RoPE scaling of layers with a window in config.json is not supported"
            )
        return float(number(rope, "rope_theta", number(self.raw, "rope_local_base_freq", default)))

    def _check_one_base(self, base: float) -> None:
        """Raises UnsupportedModelError where layers with a window have another base than the others."""
        rope = self._ropes("sliding_attention")
        default = number(self.hf_class.defaults, "rope_theta")
        if rope.get("rope_type", "default") != "default" or number(rope, "rope_theta", default) != base:
            raise UnsupportedModelError(
                "the rotation of sliding_attention in config.json must have the rope_theta of "
                "full_attention, and no scaling"
            )

    def _n_rot(self, rope: dict[str, Any]) -> int:
        """Channels of a head that are rotated."""
        if self.latent is not None:
            return self.latent.n_rot
        if self.window_heads is not None:  # those that are not rotated have no frequency
            return self.head_dim
        factor = number(rope, "partial_rotary_factor", number(self.raw, "partial_rotary_factor", 1.0))
        if self.hf_class.partial and self.raw.get("rotary_dim") is not None:
            factor = integer(self.raw, "rotary_dim", high=self.head_dim) / self.head_dim
        if factor != 1.0 and not self.hf_class.partial:
            raise UnsupportedModelError(
                "a partial_rotary_factor other than 1 in config.json is not supported"
            )
        n_rot = int(self.head_dim * factor)
        if n_rot < 2 or n_rot % 2 or n_rot > self.head_dim:
            raise FormatError(f"config.json asks for a rotation of {n_rot} of {self.head_dim} channels")
        return n_rot

    def _rope_keys(self) -> dict[str, Any]:
        rope = self._rope()
        kind = rope["rope_type"]
        keys: dict[str, Any] = {
            "rope.dimension_count": self._n_rot(rope),
            "rope.freq_base": float(number(rope, "rope_theta")),
        }
        if self.hf_class.dynamic == "key" and rope["alpha"] is not None:
            keys["rope.scaling.alpha"] = float(rope["alpha"])
        if self.latent is not None and kind not in ("default", "yarn") and rope.get("mscale_all_dim"):
            raise UnsupportedModelError("mscale_all_dim in config.json is supported with yarn alone")
        if kind in ("default", "llama3") or (kind == "proportional" and self.window_heads is not None):
            # The scaling is the tensor rope_freqs.weight.
            return keys
        if kind not in ("linear", "yarn", "longrope"):
            raise UnsupportedModelError(
                f"the RoPE scaling {str(kind)[:60]!r} in config.json is not supported; supported are linear, "
                "yarn, longrope, llama3"
            )
        original = integer(rope, "original_max_position_embeddings")
        if kind == "longrope":  # its factors are tensors
            keys["rope.scaling.original_context_length"] = original
            keys["rope.scaling.attn_factor"] = self._longrope_magnitude(rope, original)
            return keys
        keys["rope.scaling.type"] = kind
        keys["rope.scaling.factor"] = float(number(rope, "factor", self.n_ctx / original))
        if (tempered := ARCHITECTURES[self.architecture].tempered) and rope.get("llama_4_scaling_beta"):
            keys["attention.temperature_scale"] = float(number(rope, "llama_4_scaling_beta"))
            keys[tempered] = original
        if kind == "yarn":
            rounded = ARCHITECTURES[self.architecture].rounded_yarn
            if (rope.get("truncate", True) is not False) != rounded:
                raise UnsupportedModelError(
                    f"YaRN with truncate set to {str(not rounded).lower()} in config.json is not supported"
                )
            keys["rope.scaling.original_context_length"] = original
            keys["rope.scaling.yarn_beta_fast"] = float(number(rope, "beta_fast", 32.0))
            keys["rope.scaling.yarn_beta_slow"] = float(number(rope, "beta_slow", 1.0))
            of_all = rope.get("mscale_all_dim")
            if self.latent is not None and of_all:  # scales the scores as well, and the key makes that known
                keys[YARN_LOG_MULTIPLIER] = 0.1 * number(rope, "mscale_all_dim")
                keys["rope.scaling.yarn_attn_factor"] = (
                    0.1 * math.log(max(keys["rope.scaling.factor"], 1)) + 1
                )
            if rope.get("attention_factor") is not None:
                keys["rope.scaling.yarn_attn_factor"] = float(number(rope, "attention_factor"))
            elif self.hf_class.log_multiplier and of_all and number(rope, "mscale", 0.0) == 1:
                keys[YARN_LOG_MULTIPLIER] = float(number(rope, "mscale_all_dim"))  # as llama.cpp reads it
            elif rope.get("mscale") and of_all:
                scale = 0.1 * math.log(max(keys["rope.scaling.factor"], 1.0))
                above, below = (scale * number(rope, k) + 1 for k in ("mscale", "mscale_all_dim"))
                if not below > 0:
                    raise FormatError(
                        "mscale_all_dim in config.json makes a RoPE scaling that divides by zero"
                    )
                keys["rope.scaling.yarn_attn_factor"] = above / below
        return keys

    def _sections(self) -> list[int]:
        """Pairs of channels for time, height, width and another dimension of a position.

        A text has no part in it, but llama.cpp loads no file without the key and ends where the sections are
        more than a head has. Without mrope_section: a third each, which is 11, 11, 10 in published models.
        """
        rope = self._rope()
        found = rope.get("mrope_section", rope.get("xdrope_section"))
        if found is None:
            found = [(self._n_rot(rope) // 2 + 2 - i) // 3 for i in range(3)]
        if (
            not isinstance(found, list)
            or not 1 <= len(found) <= 4
            or any(type(n) is not int or not 0 <= n <= MAX_HEAD_DIM for n in found)
        ):
            raise FormatError(
                f"mrope_section in config.json must hold up to 4 integers from 0 to {MAX_HEAD_DIM}"
            )
        return found + [0] * (4 - len(found))

    def _longrope_magnitude(self, rope: dict[str, Any], original: int) -> float:
        """What sines and cosines are multiplied by: more, the longer the context is than the original."""
        if rope.get("attention_factor") is not None:
            return float(number(rope, "attention_factor"))
        factor = number(rope, "factor", self.n_ctx / original)
        if factor <= 1 or original < 2:
            return 1.0
        return math.sqrt(1 + math.log(factor) / math.log(original))

    def rope_divisors(self) -> dict[str, np.ndarray]:
        """Scalings that GGUF stores as tensors: what each frequency is divided by, float32 [n_rot / 2]."""
        rope = self._rope()
        if ARCHITECTURES[self.architecture].rope is None:
            return {}
        if rope["rope_type"] == "llama3":
            return {LLAMA3_FACTORS: self._llama3_divisors(rope)}
        if rope["rope_type"] == "proportional":  # the first pairs turn, the others stay
            pairs, n = np.arange(self.head_dim // 2), self.head_dim
            turn = pairs < int(number(rope, "partial_rotary_factor", 1.0) * n // 2)
            return {LLAMA3_FACTORS: np.where(turn, np.float32(1), np.float32(1e30))}
        if rope["rope_type"] == "longrope":
            names = {SHORT_FACTORS: "short_factor", LONG_FACTORS: "long_factor"}
            return {name: self._factors(rope, entry) for name, entry in names.items()}
        return {}

    def _factors(self, rope: dict[str, Any], entry: str) -> np.ndarray:
        n, values = self._n_rot(rope) // 2, rope.get(entry)
        if not isinstance(values, list) or len(values) != n:
            raise FormatError(f"{entry} in config.json must be a list of {n} numbers")
        numbers = [number({entry: value}, entry) for value in values]
        if not min(numbers) > 0:
            raise FormatError(f"{entry} in config.json holds a number that is not above 0")
        return np.array(numbers, np.float32)

    def _llama3_divisors(self, rope: dict[str, Any]) -> np.ndarray:
        """Llama 3.1's.

        Channels that turn less than low_freq_factor times in the original context are slowed by `factor`,
        those that turn more than high_freq_factor times stay, and between them 1 / divisor is interpolated.
        """
        factor, low, high = (number(rope, k) for k in ("factor", "low_freq_factor", "high_freq_factor"))
        base = float(number(rope, "rope_theta"))
        if not (factor > 0 and base > 0 and low < high):
            raise FormatError(
                f"the RoPE scaling in config.json divides by zero: factor {factor:g}, rope_theta {base:g}, "
                f"low_freq_factor {low:g}, high_freq_factor {high:g}"
            )
        n_rot = self._n_rot(rope)
        freq = base ** (-np.arange(0, n_rot, 2, dtype=np.float64) / n_rot)
        turns = integer(rope, "original_max_position_embeddings") * freq / (2 * math.pi)
        smooth = np.clip((turns - low) / (high - low), 0, 1)
        return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


def _without_experts(hf_class: HFClass, parts: list[str] | None, config: dict[str, Any]) -> HFClass:
    """The class, or that of models without experts where a model of it has none. parts: see _parts."""
    if hf_class.architecture == "granitehybrid" and config.get("num_experts") == 0:
        names = {
            "shared_mlp.input_linear": "ffn_gate ffn_up",
            "shared_mlp.output_linear": "ffn_down",
        }
        return replace(
            hf_class,
            ff="shared_intermediate_size",
            layer_tensors=hf_class.layer_tensors | names,
            experts=None,
        )
    if parts is None:
        return hf_class
    if "moe" not in parts:
        return replace(hf_class, architecture="nemotron_h", numbers={}, experts=None)
    return hf_class if "mlp" in parts else replace(hf_class, ff="moe_intermediate_size")


def _parts(config: dict[str, Any]) -> list[str]:
    """What each layer is, of a model whose layers are one thing each; num_hidden_layers is as many."""
    parts, pattern = config.get("layers_block_type") or config.get("layer_types"), None
    if parts is None:
        pattern = config.get("hybrid_override_pattern")
        if pattern is None:
            raise FormatError("config.json has no layers_block_type")
        parts = [_PARTS.get(c) for c in pattern] if isinstance(pattern, str) else pattern
    if not isinstance(parts, list) or not parts:
        raise FormatError("layers_block_type in config.json must be a list of layers")
    config["num_hidden_layers"] = len(parts)
    return _checked_types(
        [_LEGACY_PARTS.get(part, part) if isinstance(part, str) else part for part in parts],
        len(parts),
        tuple(_PARTS.values()),
    )


def _checked_types(types: Any, n: int, known: tuple[str, ...]) -> list[str]:
    """layer_types of n layers. Raises UnsupportedModelError for anything else than known kinds."""
    if not isinstance(types, list) or len(types) != n or any(kind not in known for kind in types):
        raise UnsupportedModelError("layer_types in config.json holds a kind of layer that is not supported")
    return types
