"""Hunyuan, dense and MoE, and the text part of its vision model."""

from __future__ import annotations

from hotset.convert.checkpoints.classes import HFClass, HFExperts
from hotset.convert.checkpoints.names import EXPERT_NAMES, LLAMA_NAMES, OLMO_DEFAULTS, SHARED_EXPERTS

_HUNYUAN_NAMES = {
    **LLAMA_NAMES,
    "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm",
}

CLASSES: dict[str, HFClass] = {
    "HunYuanDenseV1ForCausalLM": HFClass(
        "hunyuan-dense", dynamic="base", layer_tensors=_HUNYUAN_NAMES, defaults=OLMO_DEFAULTS
    ),
    "HunYuanMoEV1ForCausalLM": HFClass(
        "hunyuan-moe",
        dynamic="base",
        layer_tensors=_HUNYUAN_NAMES
        | EXPERT_NAMES
        | {
            "mlp.gate.wg": "ffn_gate_inp",
            "mlp.shared_mlp.gate_proj": "ffn_gate_shexp",
            "mlp.shared_mlp.up_proj": "ffn_up_shexp",
            "mlp.shared_mlp.down_proj": "ffn_down_shexp",
        },
        defaults=OLMO_DEFAULTS | {"num_experts": 1, "moe_topk": 1},
        experts=HFExperts(
            "intermediate_size", n_used="moe_topk", normalised=None, ff_shared="intermediate_size"
        ),
    ),
    "HunYuanVLForConditionalGeneration": HFClass(
        "hunyuan_vl",
        dynamic="key",
        layer_tensors=_HUNYUAN_NAMES,
        tied=True,
        defaults=OLMO_DEFAULTS,
        sections=True,
        sees=True,
    ),
    "HYV3ForCausalLM": HFClass(
        "hy_v3",
        layer_tensors=LLAMA_NAMES
        | EXPERT_NAMES
        | SHARED_EXPERTS
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
}
