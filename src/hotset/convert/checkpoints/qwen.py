"""Qwen from the first to 3.5, and the text part of its vision models."""

from __future__ import annotations

from typing import Any

from hotset.convert.checkpoints.classes import HFClass, HFExperts
from hotset.convert.checkpoints.names import (
    EXPERT_NAMES,
    GPT2_TENSORS,
    LLAMA_DEFAULTS,
    LLAMA_NAMES,
    SPARSE_LM,
)

_QWEN_DEFAULTS: dict[str, Any] = LLAMA_DEFAULTS | {
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
}
_DELTA_NAMES = {
    **LLAMA_NAMES,
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
    **LLAMA_DEFAULTS,
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
_STREAM_NAMES = {
    f"{part}_hyper_connection.{name}": f"hc_{short}_{target}"
    for part, short in (("attn", "attn"), ("mlp", "ffn"))
    for name, target in (
        ("hc_norm", "norm"),
        ("input_mix_weight_down", "down"),
        ("input_mix_weight_up", "up"),
        ("block_inject_weight", "inject"),
    )
}
_QWEN4 = HFClass(
    "qwen4exp",
    **_DELTA,
    tensors={
        "model.embed_tokens": "token_embd",
        "lm_head": "output",
        "model.hyper_connection_mixer.hc_norm": "output_hc_norm",
        "model.hyper_connection_mixer.input_mix_weight_down": "output_hc_down",
        "model.hyper_connection_mixer.input_mix_weight_up": "output_hc_up",
    },
    layer_tensors={
        **_DELTA_NAMES,
        **EXPERT_NAMES,
        **_GATED_SHARE,
        **_STREAM_NAMES,
        "self_attn.indexer.index_qk_proj": "indexer.q_proj indexer.k_proj",
        "self_attn.indexer.q_layernorm": "indexer.q_norm",
        "self_attn.indexer.k_layernorm": "indexer.k_norm",
        "ple.ple_embedding.ngram_embedding.shard_*": "per_layer_token_embd",
        "ple.key_proj": "ple_key",
        "ple.value_proj": "ple_value",
        "ple.norm_key": "ple_norm_key",
        "ple.norm_query": "ple_norm_query",
        "ple.norm_conv": "ple_norm_conv",
        "ple.conv1d": "ple_conv1d",
    },
    ff="moe_intermediate_size",
    defaults=_DELTA_DEFAULTS
    | _DELTA_EXPERTS
    | {"num_experts_per_tok": 10, "hc_count": 4, "hc_lowrank": 320, "ngram_size": 3, "heads_per_ngram": 8}
    | {"ple_conv_kernel_size": 4, "split_ngram_parts": 512, "output_gate_type": "silu"},
    # llama.cpp computes these, whatever a file says.
    required={"output_gate_type": "sigmoid", "norm_topk_prob": True, "indexer_kv_heads": 1},
    sections=True,
    sees=True,
    gated_streams=True,
    experts=HFExperts(normalised=None, ff_shared="shared_expert_intermediate_size"),
)
_ALL_EXPERTS: dict[str, Any] = {"decoder_sparse_step": 1, "mlp_only_layers": []}  # in every layer
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

_QWEN2: dict[str, Any] = {
    "defaults": _QWEN_DEFAULTS | {"num_key_value_heads": 32, "max_window_layers": 28},
    "windows": ("sliding_window", "use_sliding_window", "layer_types", "max_window_layers"),
}

CLASSES: dict[str, HFClass] = {
    "Qwen2ForCausalLM": HFClass("qwen2", **_QWEN2),
    "SparseQwen2ForCausalLM": HFClass("qwen2", **_QWEN2, **SPARSE_LM),
    "Qwen2MoeForCausalLM": HFClass(
        "qwen2moe",
        defaults=_QWEN_DEFAULTS
        | {"num_key_value_heads": 16, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632}
        | {"num_experts": 60, "num_experts_per_tok": 4},
        windows=("sliding_window", "use_sliding_window", "layer_types"),
        layer_tensors=LLAMA_NAMES | EXPERT_NAMES | _GATED_SHARE,
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
        layer_tensors=LLAMA_NAMES | EXPERT_NAMES,
        required=_ALL_EXPERTS,
        experts=HFExperts(),
    ),
    "Qwen2VLForConditionalGeneration": _QWEN2VL,
    "Qwen2_5_VLForConditionalGeneration": _QWEN2VL,
    "Qwen3VLForConditionalGeneration": HFClass(
        "qwen3vl",
        defaults=LLAMA_DEFAULTS
        | {"max_position_embeddings": 128000, "num_key_value_heads": 32, "head_dim": 128, "rope_theta": 5e5},
        sections=True,
        sees=True,
    ),
    "Qwen3VLMoeForConditionalGeneration": HFClass(
        "qwen3vlmoe",
        layer_tensors=LLAMA_NAMES | EXPERT_NAMES,
        defaults=LLAMA_DEFAULTS
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
        experts=HFExperts(normalised=None, by_input=True),
    ),
    "Qwen3NextForCausalLM": HFClass(
        "qwen3next",
        **_DELTA,
        layer_tensors=_DELTA_NAMES | EXPERT_NAMES | _GATED_SHARE,
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
        layer_tensors=_DELTA_NAMES | EXPERT_NAMES | _GATED_SHARE,
        ff="moe_intermediate_size",
        defaults=_DELTA_DEFAULTS | _DELTA_EXPERTS | {"num_experts": 256, "num_experts_per_tok": 8},
        sections=True,
        experts=HFExperts(normalised=None, ff_shared="shared_expert_intermediate_size"),
    ),
    "Qwen4ExpForCausalLM": _QWEN4,
    "Qwen4ExpForConditionalGeneration": _QWEN4,
    "QWenLMHeadModel": HFClass(  # beyond seq_length it is another function
        "qwen",
        tensors=GPT2_TENSORS,
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
}
