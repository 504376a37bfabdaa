"""Gemma 1 to 4, and EmbeddingGemma."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hotset.convert.checkpoints.classes import HFClass, HFExperts
from hotset.convert.checkpoints.names import POST_NORM
from hotset.convert.hf_part import FamilyPart
from hotset.convert.hf_parts import AltUpPart, ProportionalRope, WindowHeads
from hotset.convert.hf_values import positive


class QueryScale(FamilyPart):
    """The entry whose inverse root scales the scores, if it is not the width of a head."""

    def keys(self) -> dict[str, Any]:
        facts, scalar = self.facts, positive(self.facts.raw, "query_pre_attn_scalar")
        narrow = facts.n_layer == facts.row.narrow_scale_at
        plain = facts.n_embd // facts.n_head if narrow else facts.head_dim
        return {} if scalar == plain else {"attention.scale": scalar**-0.5}


def _experts_if_enabled(hf_class: HFClass, raw: dict[str, Any]) -> HFClass:
    """Return the class of Gemma 4, whose layers have no experts unless enable_moe_block is true."""
    return hf_class if raw.get("enable_moe_block") is True else replace(hf_class, experts=None)


_GEMMA: dict[str, Any] = {
    "layer_tensors": POST_NORM,
    "activation": "hidden_activation",
    "tied": True,
    "required": {"use_bidirectional_attention": False},
    "norms_less_one": True,
    "parts": (QueryScale,),
}
_GEMMA_DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
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
_GEMMA4 = HFClass(
    "gemma4",
    layer_tensors=POST_NORM,
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
    rope=ProportionalRope,
    parts=(WindowHeads,),
    variant=_experts_if_enabled,
    experts=HFExperts(n_used="top_k_experts", normalised=None),
)
_GEMMA3N = HFClass(
    "gemma3n",
    layer_tensors=POST_NORM,
    activation="hidden_activation",
    tied=True,
    defaults=_GEMMA3N_DEFAULTS,
    required={"use_bidirectional_attention": False, "altup_active_idx": 0, "altup_correct_scale": True},
    numbers={"final_logit_softcapping": "final_logit_softcapping"},
    windows=("sliding_window", "layer_types"),
    parts=(AltUpPart,),
)

_GEMMA3 = HFClass(
    "gemma3",
    **_GEMMA,
    defaults=_GEMMA_DEFAULTS | {"max_position_embeddings": 131072, "rope_theta": 1e6},
    numbers={"final_logit_softcapping": "final_logit_softcapping"},
    windows=("sliding_window", "layer_types", "sliding_window_pattern"),
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
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": replace(  # its text_config leaves out the class's values
        _GEMMA3,
        sees=True,
        defaults=_GEMMA3.defaults | {"num_attention_heads": 8, "vocab_size": 262208},
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
