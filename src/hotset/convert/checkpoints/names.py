"""Names of tensors in checkpoints → GGUF's, and defaults that several families share.

A name has the same meaning in nearly all families: a class lists exceptions in HFClass.layer_tensors.
"""

from __future__ import annotations

import re
from typing import Any

# The text before the names of the text model's tensors in models that see.
TEXT_MODEL = re.compile(
    r"^(language_model\.model\.|model\.(language|text)_model\.|language_model\.(?=lm_head|output))"
)


def _by_name(table: dict[str, str]) -> dict[str, str]:
    """Return name in a checkpoint → target, for a table of target → names."""
    return {name: target for target, names in table.items() for name in names.split()}


TENSORS = _by_name({
    "altup_proj": "model.altup_projections.*",
    "altup_unembd_proj": "model.altup_unembed_projections.*",
    "output": "lm_head model.head gpt_neox.embed_out model.output rwkv.head",
    "output_hc_base.weight": "model.hc_head_base model.hc_head.hc_base",
    "output_hc_down": "model.hyper_connection_mixer.input_mix_weight_down",
    "output_hc_fn.weight": "model.hc_head_fn model.hc_head.hc_fn",
    "output_hc_norm": "model.hyper_connection_mixer.hc_norm",
    "output_hc_scale.weight": "model.hc_head_scale model.hc_head.hc_scale",
    "output_hc_up": "model.hyper_connection_mixer.input_mix_weight_up",
    "output_norm": "model.norm model.final_norm transformer.ln_f gpt_neox.final_layer_norm "
        "model.final_layernorm model.decoder.final_layer_norm transformer.norm_f backbone.norm_f "
        "rwkv.ln_out",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "position_embd": "bert.embeddings.position_embeddings roberta.embeddings.position_embeddings "
        "transformer.wpe model.decoder.embed_positions",
    "token_embd": "model.embed_tokens model.embed bert.embeddings.word_embeddings "
        "roberta.embeddings.word_embeddings model.embeddings.tok_embeddings "
        "encoder.embeddings.word_embeddings transformer.wte gpt_neox.embed_in transformer.word_embeddings "
        "model.decoder.embed_tokens model.tok_embeddings model.word_embeddings backbone.embeddings "
        "rwkv.embeddings model.embeddings",
    "token_embd_norm": "bert.embeddings.LayerNorm roberta.embeddings.LayerNorm model.embeddings.norm "
        "encoder.emb_ln transformer.word_embeddings_layernorm rwkv.blocks.0.pre_ln model.layers.0.pre_norm "
        "model.embedding_norm",
    "token_types": "bert.embeddings.token_type_embeddings roberta.embeddings.token_type_embeddings "
        "encoder.embeddings.token_type_embeddings",
})  # fmt: skip
"""Tensors outside the layers."""
_OF_LAYERS = {
    "altup_correct_coef": "altup.correction_coefs",
    "altup_correct_scale": "altup.correct_output_scale",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "attn_compressor_ape": "attn.compressor.ape",
    "attn_compressor_gate": "attn.compressor.wgate",
    "attn_compressor_kv": "attn.compressor.wkv",
    "attn_compressor_norm": "attn.compressor.norm",
    "attn_gate": "self_attn.gate_proj linear_attn.in_proj_z",
    "attn_k": "self_attn.k_proj attention.self.key attn.attention.k_proj mixer.k_proj",
    "attn_k attn_v": "attn.kv",
    "attn_k_b attn_v_b": "self_attn.kv_b_proj",
    "attn_k_norm": "self_attn.k_norm self_attn.key_layernorm self_attn.k_layernorm.norms.* "
        "attention.key_layernorm self_attn.k_layernorm",
    "attn_kv": "attn.wkv",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm attn.kv_norm attn.norm",
    "attn_norm": "input_layernorm attn_norm ln_1 ln_mlp self_attn_layer_norm norm_1 "
        "attention_layernorm attention_norm norm ln1 operator_norm",
    "attn_norm_2": "ln_attn ln2",
    "attn_output": "self_attn.o_proj attention.output.dense attn.Wo attn.out_proj "
        "attn.attention.out_proj attn.c_proj attention.dense self_attn.dense self_attention.dense "
        "self_attn.out_proj attention.wo mixer.o_proj",
    "attn_output_a": "attn.wo_a",
    "attn_output_b": "attn.wo_b",
    "attn_output_norm": "attention.output.LayerNorm norm1",
    "attn_q": "self_attn.q_proj attention.self.query attn.attention.q_proj attn.q mixer.q_proj",
    "attn_q attn_k attn_v": "self_attn.W_pack attention.wqkv",
    "attn_q_a": "self_attn.q_a_proj attn.wq_a",
    "attn_q_a_norm": "self_attn.q_a_layernorm attn.q_norm",
    "attn_q_b": "self_attn.q_b_proj attn.wq_b",
    "attn_q_norm": "self_attn.q_norm self_attn.query_layernorm self_attn.q_layernorm.norms.* "
        "attention.query_layernorm self_attn.q_layernorm",
    "attn_qkv": "attn.Wqkv mixer.Wqkv attn.c_attn attention.query_key_value "
        "self_attention.query_key_value self_attn.qkv_proj linear_attn.in_proj_qkv",
    "attn_qkv attn_gate": "linear_attn.in_proj_qkvz",
    "attn_sinks": "attn.attn_sink self_attn.sinks",
    "attn_sub_norm": "self_attn.attn_sub_norm",
    "attn_v": "self_attn.v_proj attention.self.value attn.attention.v_proj mixer.v_proj",
    "channel_mix_key": "feed_forward.key ffn.key",
    "channel_mix_lerp_k": "feed_forward.time_maa_k ffn.x_k",
    "channel_mix_lerp_r": "feed_forward.time_maa_r",
    "channel_mix_receptance": "feed_forward.receptance",
    "channel_mix_value": "feed_forward.value ffn.value",
    "exp_probs_b.": "mlp.expert_bias",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias ffn.gate.bias "
        "mlp.gate.moe_statics.e_score_correction_bias mlp.moe_statics.e_score_correction_bias "
        "mlp.e_score_correction_bias block_sparse_moe.e_score_correction_bias mlp.gate.expert_bias "
        "block_sparse_moe.gate.e_score_correction_bias mixer.gate.e_score_correction_bias "
        "feed_forward.expert_bias",
    "ffn_down": "mlp.down_proj output.dense mlp.Wo mlp.fc2 mlp.wo mlp.c_proj mlp.dense_4h_to_h fc2 "
        "ffn.down_proj mlp.down_weight feed_forward.w2 feed_forward.down_proj block_sparse_moe.down_proj "
        "mixer.down_proj",
    "ffn_down_exps": "mlp.experts.*.down_proj mlp.experts.down_proj ffn.experts.*.w2 "
        "experts.down_proj block_sparse_moe.output_linear block_sparse_moe.experts.down_proj "
        "block_sparse_moe.experts.*.w2 block_sparse_moe.experts.*.down mixer.experts.*.down_proj "
        "mixer.experts.down_proj feed_forward.experts.*.down_proj feed_forward.experts.down_proj "
        "feed_forward.experts.*.w2 mlp.experts.mlp.w2",
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
    "ffn_down_exps.blocks": "mlp.experts.down_proj_blocks",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "ffn_down_exps.scales": "mlp.experts.down_proj_scales",
    "ffn_down_shexp": "mlp.shared_experts.down_proj ffn.shared_experts.w2 shared_mlp.output_linear "
        "mlp.shared_mlp.down_proj mlp.shared_expert.down_proj block_sparse_moe.shared_experts.down_proj "
        "mixer.shared_experts.down_proj",
    "ffn_gate": "mlp.gate_proj mlp.fc12 mlp.c_fc_0 mlp.gate_weight feed_forward.w1 "
        "feed_forward.gate_proj mlp.w2 block_sparse_moe.gate_proj",
    "ffn_gate_exps": "mlp.experts.*.gate_proj ffn.experts.*.w1 block_sparse_moe.experts.*.w1 "
        "block_sparse_moe.experts.*.gate feed_forward.experts.*.gate_proj feed_forward.experts.*.w1",
    "ffn_gate_exps ffn_up_exps": "mlp.experts.gate_up_proj block_sparse_moe.input_linear "
        "block_sparse_moe.experts.gate_up_proj feed_forward.experts.gate_up_proj",
    "ffn_gate_exps.bias ffn_up_exps.bias": "mlp.experts.gate_up_proj_bias",
    "ffn_gate_exps.blocks ffn_up_exps.blocks": "mlp.experts.gate_up_proj_blocks",
    "ffn_gate_exps.scales ffn_up_exps.scales": "mlp.experts.gate_up_proj_scales",
    "ffn_gate_inp": "mlp.gate ffn.gate router.proj block_sparse_moe.router.layer "
        "block_sparse_moe.router mlp.gate.wg mlp.router.gate block_sparse_moe.gate "
        "block_sparse_moe.primary_router mlp.router mixer.gate feed_forward.router feed_forward.gate "
        "mlp.router.layer",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj ffn.shared_experts.w1 mlp.shared_mlp.gate_proj "
        "mlp.shared_expert.gate_proj block_sparse_moe.shared_experts.gate_proj",
    "ffn_gate_shexp ffn_up_shexp": "shared_mlp.input_linear",
    "ffn_gate_tid2eid": "ffn.gate.tid2eid",
    "ffn_gate_up_exps": "experts.gate_up_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
    "ffn_norm": "post_attention_layernorm ffn_norm mlp_norm ln_2 pre_feedforward_layernorm "
        "final_layer_norm norm_2 feedforward_layernorm pre_mlp_layernorm",
    "ffn_norm.": "pre_ff_layernorm",
    "ffn_sub_norm": "mlp.ffn_sub_norm",
    "ffn_up": "mlp.up_proj intermediate.dense mlp.Wi mlp.fc11 mlp.gated_layers mlp.fc1 mlp.c_fc_1 "
        "mlp.gate_up_proj mlp.c_fc mlp.dense_h_to_4h fc1 ffn.up_proj mlp.up_weight feed_forward.w3 "
        "feed_forward.up_proj mlp.w1 block_sparse_moe.up_proj mixer.up_proj",
    "ffn_up_exps": "mlp.experts.*.up_proj ffn.experts.*.w3 block_sparse_moe.experts.*.w3 "
        "block_sparse_moe.experts.*.up mixer.experts.*.up_proj mixer.experts.up_proj "
        "feed_forward.experts.*.up_proj feed_forward.experts.*.w3 mlp.experts.mlp.w1",
    "ffn_up_shexp": "mlp.shared_experts.up_proj ffn.shared_experts.w3 mlp.shared_mlp.up_proj "
        "mlp.shared_expert.up_proj block_sparse_moe.shared_experts.up_proj mixer.shared_experts.up_proj",
    "inp_gate": "per_layer_input_gate",
    "laurel_l": "laurel.linear_left",
    "laurel_post_norm": "laurel.post_laurel_norm",
    "laurel_r": "laurel.linear_right",
    "layer_output_norm": "output.LayerNorm norm2 mlp.layernorm",
    "layer_output_scale": "layer_scalar",
    "per_layer_token_embd": "ple.ple_embedding.ngram_embedding.shard_*",
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm post_mlp_layernorm",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "post_norm": "post_per_layer_input_norm",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "proj": "per_layer_projection",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ssm_a.": "mamba.A_log linear_attn.A_log self_attn.A_log self_attn.forget_gate.A_log mixer.A_log",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_b_norm": "mamba.b_layernorm",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b self_attn.b_proj",
    "ssm_c_norm": "mamba.c_layernorm",
    "ssm_conv1d": "mamba.conv1d linear_attn.conv1d mixer.conv1d",
    "ssm_conv1d_q ssm_conv1d_k ssm_conv1d_v": "self_attn.conv1d",
    "ssm_d.": "mamba.D mixer.D",
    "ssm_dt": "mixer.dt_proj mamba.dt_proj",
    "ssm_dt.bias": "mamba.dt_bias linear_attn.dt_bias self_attn.dt_bias self_attn.forget_gate.dt_bias "
        "mixer.dt_bias",
    "ssm_dt_norm": "mamba.dt_layernorm",
    "ssm_f_a": "self_attn.f_a_proj self_attn.forget_gate.f_a_proj",
    "ssm_f_b": "self_attn.f_b_proj self_attn.forget_gate.f_b_proj",
    "ssm_g_a": "self_attn.g_a_proj",
    "ssm_g_b": "self_attn.g_b_proj",
    "ssm_in": "mamba.in_proj mixer.in_proj",
    "ssm_norm": "mamba.norm linear_attn.norm self_attn.o_norm mixer.norm",
    "ssm_out": "mixer.out_proj mamba.out_proj linear_attn.out_proj",
    "ssm_x": "mixer.x_proj mamba.x_proj",
    "time_mix_decay": "attention.time_decay",
    "time_mix_decay_w1": "attention.time_decay_w1",
    "time_mix_decay_w2": "attention.time_decay_w2",
    "time_mix_first": "attention.time_faaaa",
    "time_mix_k_a": "attn.k_a",
    "time_mix_k_k": "attn.k_k",
    "time_mix_key": "attn.k_proj",
    "time_mix_lerp_x": "attention.time_maa_x",
    "time_mix_ln": "attention.ln_x attn.g_norm",
    "time_mix_output": "attn.o_proj",
    "time_mix_r_k": "attn.r_k",
    "time_mix_receptance": "attn.r_proj",
    "time_mix_value": "attn.v_proj",
    "time_mix_w1": "attention.time_maa_w1",
    "time_mix_w2": "attention.time_maa_w2",
}  # fmt: skip
LAYER_TENSORS = _by_name(_OF_LAYERS) | {
    **{f"self_attn.{part}_conv1d": f"ssm_conv1d_{part}" for part in "qkv"},
    **{f"hc_{of}_{part}": f"hc_{of}_{part}" for of in ("attn", "ffn") for part in ("fn", "base", "scale")},
    **{
        f"{part}_hyper_connection.{name}": f"hc_{short}_{target}"
        for part, short in (("attn", "attn"), ("mlp", "ffn"))
        for name, target in (
            ("hc_norm", "norm"),
            ("input_mix_weight_down", "down"),
            ("input_mix_weight_up", "up"),
            ("block_inject_weight", "inject"),
        )
    },
    **{f"ple.{name}_proj": f"ple_{name}" for name in ("key", "value")},
    **{f"ple.{name}": f"ple_{name}" for name in ("norm_key", "norm_query", "norm_conv", "conv1d")},
    **{f"attention.{name}": f"time_mix_{name}" for name in ("receptance", "key", "value", "gate", "output")},
    # A number after # is a row of the tensor: a weight of the previous token.
    **{f"attention.time_maa_{x}": f"time_mix_lerp_fused#{i}" for i, x in enumerate("wkvrg")},
    **{f"attn.x_{x}": f"time_mix_lerp_fused#{i}" for i, x in enumerate("rwkvag")},
    **{f"attn.{x}_lora.lora.0": f"time_mix_{x}1" for x in "wavg"},
    **{f"attn.{x}_lora.lora.2": f"time_mix_{x}2" for x in "wavg"},
    **{f"attn.{x}_lora.lora.2.bias": f"time_mix_{x}0.weight" for x in "wav"},
}
"""Tensors of a layer, with * for the number of an expert."""
POST_NORM = {"post_attention_layernorm": "post_attention_norm"}

SPARSE_LM: dict[str, Any] = {  # Sakana's: whatever config.json says the activation is ReLU
    "means": "relu",
    "required": {"sparsity_gated_mlp": True},
    "stored_by_input": (".gate_weight", ".down_weight"),
}
LLAMA_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
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
OLMO_DEFAULTS: dict[str, Any] = LLAMA_DEFAULTS | {"rms_norm_eps": 1e-5}
GROUPS = ("n_group", "topk_group")
GROUPED_EXPERTS: dict[str, Any] = DEEPSEEK_EXPERTS | {"groups": GROUPS}


def four_times(n_embd: int) -> int:
    return 4 * n_embd


def two_thirds_of_four_times(n_embd: int) -> int:
    """Return two thirds of four times the width, in whole multiples of 256."""
    return -(-(8 * n_embd // 3) // 256) * 256
