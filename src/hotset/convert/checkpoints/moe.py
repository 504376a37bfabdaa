"""MoE models of makers without a family of their own here."""

from __future__ import annotations

from hotset.convert.checkpoints.classes import HFClass, HFExperts
from hotset.convert.checkpoints.names import (
    BIASED_CHOICE,
    EXPERT_NAMES,
    GROUPED_EXPERTS,
    GROUPS,
    LLAMA_DEFAULTS,
    LLAMA_NAMES,
    LLAMA_TENSORS,
    MIXTRAL_NAMES,
    SHARED_EXPERTS,
)

_BAILING_TENSORS = LLAMA_TENSORS | {"model.word_embeddings": "token_embd"}
_BAILING_NAMES = LLAMA_NAMES | EXPERT_NAMES | SHARED_EXPERTS | {"attention.dense": "attn_output"}

CLASSES: dict[str, HFClass] = {
    "MiniMaxM2ForCausalLM": HFClass(
        "minimax-m2",
        layer_tensors=MIXTRAL_NAMES
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
        layer_tensors=LLAMA_NAMES | EXPERT_NAMES | SHARED_EXPERTS | BIASED_CHOICE,
        defaults=LLAMA_DEFAULTS
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
        experts=HFExperts(**GROUPED_EXPERTS),
    ),
    "AfmoeForCausalLM": HFClass(
        "afmoe",
        layer_tensors=LLAMA_NAMES
        | EXPERT_NAMES
        | SHARED_EXPERTS
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
    "SmallThinkerForCausalLM": HFClass(
        "smallthinker",
        layer_tensors={
            **LLAMA_NAMES,
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
            **LLAMA_NAMES,
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
    "MellumForCausalLM": HFClass(
        "mellum",
        layer_tensors=LLAMA_NAMES | EXPERT_NAMES,
        defaults=LLAMA_DEFAULTS
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
        experts=HFExperts(n_shared="num_shared_experts", n_dense="first_k_dense_replace", groups=GROUPS),
    ),
}
