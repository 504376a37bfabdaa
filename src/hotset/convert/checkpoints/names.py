"""Names of tensors and defaults that checkpoints of several families share."""

from __future__ import annotations

import re
from typing import Any

# What stands before the names of the text model's tensors, of models that see.
TEXT_MODEL = re.compile(r"^(language_model\.model\.|model\.language_model\.|language_model\.(?=lm_head))")
LLAMA_NAMES = {
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
EXPERT_NAMES = {  # and as transformers holds them in memory
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.*.gate_proj": "ffn_gate_exps",
    "mlp.experts.*.up_proj": "ffn_up_exps",
    "mlp.experts.*.down_proj": "ffn_down_exps",
    "mlp.experts.gate_up_proj": "ffn_gate_exps ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
SPARSE_LM: dict[str, Any] = {  # Sakana's: whatever config.json says the activation is ReLU
    "means": "relu",
    "required": {"sparsity_gated_mlp": True},
    "layer_tensors": {
        **LLAMA_NAMES,
        "mlp.gate_weight": "ffn_gate",  # as their training wrote them first
        "mlp.up_weight": "ffn_up",
        "mlp.down_weight": "ffn_down",
    },
    "stored_by_input": (".gate_weight", ".down_weight"),
}
LLAMA_TENSORS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
LLAMA_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
}
SSM_NAMES = {
    "mixer.in_proj": "ssm_in",
    "mixer.conv1d": "ssm_conv1d",
    "mixer.dt_bias": "ssm_dt.bias",
    "mixer.A_log": "ssm_a",
    "mixer.D": "ssm_d",
    "mixer.norm": "ssm_norm",
    "mixer.out_proj": "ssm_out",
}
MIXTRAL_NAMES = {
    **LLAMA_NAMES,
    **EXPERT_NAMES,
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.*.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.*.w3": "ffn_up_exps",
    "block_sparse_moe.experts.*.w2": "ffn_down_exps",
}
SHARED_EXPERTS = {
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}
LATENT_DEFAULTS: dict[str, Any] = {
    **LLAMA_DEFAULTS,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
DEEPSEEK_EXPERTS: dict[str, Any] = {"n_shared": "n_shared_experts", "n_dense": "first_k_dense_replace"}
LATENT_NAMES = {
    **LLAMA_NAMES,
    **EXPERT_NAMES,
    **SHARED_EXPERTS,
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_k_b attn_v_b",  # of each head the rows of its key, then of its value
}
POST_NORMS = {
    **LLAMA_NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
GPT2_TENSORS = {
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "lm_head": "output",
}
BIASED_CHOICE = {
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.e_score_correction_bias": "exp_probs_b.bias",
}
OLMO_DEFAULTS: dict[str, Any] = LLAMA_DEFAULTS | {"rms_norm_eps": 1e-5}
GROUPS = ("n_group", "topk_group")
GROUPED_EXPERTS: dict[str, Any] = DEEPSEEK_EXPERTS | {"groups": GROUPS}


def four_times(n_embd: int) -> int:
    return 4 * n_embd


def two_thirds_of_four_times(n_embd: int) -> int:
    """In whole multiples of 256."""
    return -(-(8 * n_embd // 3) // 256) * 256


def below(names: dict[str, str], old: str, new: str) -> dict[str, str]:
    """Names of tensors with `new` in place of the module `old`."""
    return {name.replace(f"{old}.", f"{new}."): target for name, target in names.items()}
