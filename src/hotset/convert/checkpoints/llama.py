"""Dense decoders in the line of Llama, of several makers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hotset.convert.checkpoints.classes import HFClass
from hotset.convert.checkpoints.names import LLAMA_DEFAULTS, LLAMA_NAMES, SPARSE_LM

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

_BAICHUAN = HFClass(
    "baichuan",
    layer_tensors=LLAMA_NAMES | {"self_attn.W_pack": "attn_q attn_k attn_v"},
    kv_heads="every",
    defaults=LLAMA_DEFAULTS | {"max_position_embeddings": 4096},
    unit_output_at=125696,  # Baichuan 2
)
BAICHUAN_13B = replace(
    _BAICHUAN,
    defaults=_BAICHUAN.defaults | {"alibi_bias_max": 8.0},
    numbers={"attention.max_alibi_bias": "alibi_bias_max"},
)
"""Of the same name, and known by the entry that says its context: model_max_length alone."""

CLASSES: dict[str, HFClass] = {
    "BaichuanForCausalLM": _BAICHUAN,
    "BaiChuanForCausalLM": _BAICHUAN,
    "LlamaForCausalLM": HFClass("llama", defaults=LLAMA_DEFAULTS),
    "SparseLlamaForCausalLM": HFClass("llama", **SPARSE_LM, defaults=LLAMA_DEFAULTS),
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
        layer_tensors=LLAMA_NAMES
        | {
            "self_attn.q_layernorm.norms.*": "attn_q_norm",
            "self_attn.k_layernorm.norms.*": "attn_k_norm",
        },
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
    "SeedOssForCausalLM": HFClass(
        "seed_oss",
        layer_tensors=LLAMA_NAMES | {"post_attention_layernorm": "post_attention_norm"},
        defaults=LLAMA_DEFAULTS
        | {"max_position_embeddings": 524288, "num_key_value_heads": 8, "head_dim": 128},
    ),
    "BambooForCausalLM": HFClass(  # TurboSparse's Mistral has predictors
        "bamboo", layer_tensors=LLAMA_NAMES | {"mlp.predictor.fc1": "fc1", "mlp.predictor.fc2": "fc2"}
    ),
    "ApertusForCausalLM": HFClass(
        "apertus",
        layer_tensors=LLAMA_NAMES | {"attention_layernorm": "attn_norm", "feedforward_layernorm": "ffn_norm"},
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
    "BitNetForCausalLM": HFClass(
        "bitnet",
        layer_tensors=LLAMA_NAMES
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
    "ArceeForCausalLM": HFClass(
        "arcee", defaults={"hidden_act": "relu2", "rms_norm_eps": 1e-5, "max_position_embeddings": 4096}
    ),
    "SmolLM3ForCausalLM": HFClass(
        "smollm3",
        tied=True,
        defaults=LLAMA_DEFAULTS
        | {"max_position_embeddings": 32768, "num_key_value_heads": 4, "rope_theta": 2e6},
        required={"use_sliding_window": False},
    ),
    "MuseGlimmerForConditionalGeneration": HFClass(
        "muse-glimmer",
        layer_tensors={
            **LLAMA_NAMES,
            "self_attn.gate_proj": "attn_gate",
            "post_attention_layernorm": "post_attention_norm",
            "pre_feedforward_layernorm": "ffn_norm",
            "post_feedforward_layernorm": "post_ffw_norm",
        },
        activation="hidden_activation",
        defaults={
            "hidden_activation": "silu",
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "sliding_window": 2048,
            "final_logit_softcapping": 20.0,
            "qk_scale_factor": 3.87,
            "output_multiplier": 0.19611613513818404,
        },
        required={"post_norm_eps": 1e-8},
        numbers={"final_logit_softcapping": "final_logit_softcapping", "logit_scale": "output_multiplier"},
        windows=("sliding_window", "layer_types"),
        norms_less_one=True,
        whole_norms=("output_norm", "attn_q_norm", "attn_k_norm"),
        query_factor="qk_scale_factor",
        from_last=True,
        sees=True,
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
    "MiniCPMForCausalLM": HFClass("minicpm", tied=True, required={"sparse_config": None}, depth_scales=True),
    "MaincoderForCausalLM": HFClass(
        "maincoder",
        layer_tensors=LLAMA_NAMES
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
        layer_tensors=LLAMA_NAMES | {"norm": "attn_norm"},
        activation=None,
        defaults={"max_position_embeddings": 4096},
        scattered_groups=True,
    ),
}
