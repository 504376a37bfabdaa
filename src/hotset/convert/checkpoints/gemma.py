"""Gemma 1 to 4, and EmbeddingGemma."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hotset.convert.checkpoints.classes import HFClass, HFExperts
from hotset.convert.checkpoints.names import LLAMA_NAMES, LLAMA_TENSORS

_GEMMA: dict[str, Any] = {
    "layer_tensors": {
        **LLAMA_NAMES,
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
_GEMMA4 = HFClass(  # without enable_moe_block its layers have no experts (hf_config)
    "gemma4",
    tensors=LLAMA_TENSORS
    | {name: stem for name, stem in _ALTUP_TENSORS.items() if stem.startswith("per_layer_")},
    layer_tensors=_GEMMA["layer_tensors"]
    | {name: stem for name, stem in _ALTUP_NAMES.items() if stem in ("inp_gate", "proj", "post_norm")}
    | {
        "layer_scalar": "layer_output_scale",
        "router.proj": "ffn_gate_inp",
        "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale",
        "experts.gate_up_proj": "ffn_gate_up_exps",
        "experts.down_proj": "ffn_down_exps",
        "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
        "post_feedforward_layernorm_1": "post_ffw_norm_1",
        "post_feedforward_layernorm_2": "post_ffw_norm_2",
    },
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
    required={"attention_bias": False},
    numbers={"final_logit_softcapping": "final_logit_softcapping"},
    windows=("sliding_window", "layer_types"),
    window_heads=True,
    experts=HFExperts(n_used="top_k_experts", normalised=None),
)
_GEMMA3N = HFClass(
    "gemma3n",
    tensors=LLAMA_TENSORS | _ALTUP_TENSORS,
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
    "Gemma3TextModel": HFClass(  # EmbeddingGemma
        "gemma-embedding",
        **_GEMMA | {"required": {"use_bidirectional_attention": True}},
        defaults=_GEMMA_DEFAULTS
        | {"max_position_embeddings": 131072, "rope_theta": 1e6, "use_bidirectional_attention": False},
        windows=("sliding_window", "layer_types", "sliding_window_pattern"),
    ),
}
