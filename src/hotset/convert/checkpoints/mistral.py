"""Mistral, Ministral, Mixtral and TurboSparse's Mixtral."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hotset.convert.checkpoints.classes import HFClass, HFExperts, every_head
from hotset.convert.checkpoints.names import (
    GROUPED_EXPERTS,
    LATENT_DEFAULTS,
    LLAMA_DEFAULTS,
)
from hotset.convert.hf_parts import LatentPart, LatentRope
from hotset.convert.hf_rope import HFRope
from hotset.convert.hf_values import number
from hotset.model.keys import YARN_LOG_MULTIPLIER


class LoggedRope(HFRope):
    """YaRN whose mscale_all_dim is a key, as llama.cpp reads it."""

    def magnitude_keys(self, rope: dict[str, Any], log_factor: float) -> dict[str, Any]:
        of_all = rope.get("mscale_all_dim")
        if rope.get("attention_factor") is None and of_all and number(rope, "mscale", 0.0) == 1:
            return {YARN_LOG_MULTIPLIER: float(number(rope, "mscale_all_dim"))}
        return super().magnitude_keys(rope, log_factor)


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
_MINISTRAL_ROPE: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
_MINISTRAL = HFClass(
    "mistral3",
    rope=LoggedRope,
    defaults=LLAMA_DEFAULTS
    | {
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_parameters": _MINISTRAL_ROPE,
    },
    windows=("sliding_window",),
)

CLASSES: dict[str, HFClass] = {
    "MistralForCausalLM": HFClass(
        "llama",
        defaults=LLAMA_DEFAULTS
        | {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
        windows=("sliding_window",),
    ),
    "MixtralForCausalLM": HFClass(
        "llama",
        **_MIXTRAL,
        experts=HFExperts("intermediate_size", normalised=None, says_ff=False),
    ),
    "TurboSparseMixtralForCausalLM": HFClass(  # its act stands before gate and up
        "llama",
        layer_tensors={
            "block_sparse_moe.experts.*.predictor.fc1": "fc1_exps",
            "block_sparse_moe.experts.*.predictor.fc2": "fc2_exps",
        },
        **_MIXTRAL,
        required={"hidden_act": "relu"},
        means="drelu",
        experts=HFExperts("intermediate_size", normalised=None, says_ff=False),
    ),
    "Ministral3ForCausalLM": _MINISTRAL,
    "Mistral3ForConditionalGeneration": replace(_MINISTRAL, sees=True),
    "Mistral4ForCausalLM": HFClass(
        "mistral4",
        defaults=LATENT_DEFAULTS
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
        kv_heads=every_head,
        rotates="norm",
        rope=LatentRope,
        parts=(LatentPart,),
        experts=HFExperts(**GROUPED_EXPERTS, scoring="softmax"),
    ),
}
