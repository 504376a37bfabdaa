"""ERNIE 4.5, dense and MoE, and PaddleOCR, which is made of it."""

from __future__ import annotations

from typing import Any

from hotset.convert.checkpoints.classes import HFClass, HFExperts

_ERNIE_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "rope_theta": 5e5,
}

CLASSES: dict[str, HFClass] = {
    "Ernie4_5ForCausalLM": HFClass(
        "ernie4_5",
        tied=True,
        defaults=_ERNIE_DEFAULTS | {"num_key_value_heads": 2, "head_dim": 128},
        rotates="norm",
    ),
    "Ernie4_5_MoeForCausalLM": HFClass(
        "ernie4_5-moe",
        tied=True,
        defaults=_ERNIE_DEFAULTS
        | {
            "num_key_value_heads": 4,
            "moe_num_experts": 64,
            "moe_k": 6,
            "moe_intermediate_size": 1536,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_interval": 1,
        },
        integers={"interleave_moe_layer_step": "moe_layer_interval"},
        required={"moe_layer_interval": 1},
        rotates="norm",
        experts=HFExperts(
            n="moe_num_experts",
            n_used="moe_k",
            normalised=None,
            says_shared_ff=True,
            n_shared="moe_num_shared_experts",
            n_dense="moe_layer_start_index",
        ),
    ),
    "PaddleOCRVLForConditionalGeneration": HFClass(
        "paddleocr",
        tied=True,
        defaults=_ERNIE_DEFAULTS | {"num_key_value_heads": 2, "head_dim": 128},
        sections=True,
        sees=True,
    ),
}
