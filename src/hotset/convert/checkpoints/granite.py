"""Granite, dense, MoE and hybrid."""

from __future__ import annotations

from typing import Any

from hotset.convert.checkpoints.classes import HFClass, HFExperts
from hotset.convert.checkpoints.names import LLAMA_DEFAULTS, LLAMA_NAMES, SSM_NAMES, below

_GRANITE_DEFAULTS: dict[str, Any] = {
    **LLAMA_DEFAULTS,
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
    **LLAMA_NAMES,
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "block_sparse_moe.router": "ffn_gate_inp",
    "block_sparse_moe.input_linear": "ffn_gate_exps ffn_up_exps",
    "block_sparse_moe.experts.gate_up_proj": "ffn_gate_exps ffn_up_exps",
    "block_sparse_moe.output_linear": "ffn_down_exps",
    "block_sparse_moe.experts.down_proj": "ffn_down_exps",
}
_GRANITE_WINDOWS: dict[str, Any] = {
    **_GRANITE,
    # transformers ignores no_rope_layers, from which llama.cpp's converter takes the layers that rotate.
    "required": {"no_rope_layers": None},
    "windows": ("sliding_window", "layer_types"),
    "writes_pattern": True,
    "layer_bases": True,
}

CLASSES: dict[str, HFClass] = {
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
    "GraniteSWAForCausalLM": HFClass(
        "granite_swa",
        **_GRANITE_WINDOWS,
        tied=True,
        layer_tensors=LLAMA_NAMES | {"self_attn.sinks": "attn_sinks"},
        defaults=_GRANITE_DEFAULTS
        | {"sliding_window": 128}
        | {"rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "num_key_value_heads": 4},
    ),
    "GraniteMoeSWAForCausalLM": HFClass(
        "granite_swa",
        **_GRANITE_WINDOWS,
        layer_tensors=_GRANITE_EXPERTS
        | {
            "self_attn.sinks": "attn_sinks",
            "block_sparse_moe.input_linear": "ffn_gate_up_exps",
            "block_sparse_moe.experts.gate_up_proj": "ffn_gate_up_exps",
            "shared_mlp.input_linear": "ffn_up_shexp",
            "shared_mlp.output_linear": "ffn_down_shexp",
        },
        defaults=_GRANITE_MOE_DEFAULTS | {"sliding_window": 128} | {"shared_intermediate_size": 0},
        fused_gate=True,
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
        | below(SSM_NAMES, "mixer", "mamba"),
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
}
