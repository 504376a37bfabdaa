"""OLMo, dense and MoE."""

from __future__ import annotations

from hotset.convert.checkpoints.classes import HFClass, HFExperts
from hotset.convert.checkpoints.names import (
    LLAMA_DEFAULTS,
    OLMO_DEFAULTS,
    POST_NORM,
)

CLASSES: dict[str, HFClass] = {
    "Olmo2ForCausalLM": HFClass("olmo2", layer_tensors=POST_NORM, defaults=OLMO_DEFAULTS),
    "Olmo3ForCausalLM": HFClass(
        "olmo2",
        layer_tensors=POST_NORM,
        defaults=OLMO_DEFAULTS | {"sliding_window": 4096, "rope_theta": 5e5},
        windows=("sliding_window", "layer_types"),
    ),
    "OlmoeForCausalLM": HFClass(
        "olmoe",
        defaults=LLAMA_DEFAULTS
        | {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "num_experts": 64}
        | {"num_experts_per_tok": 8},
        required={"clip_qkv": None},
        experts=HFExperts("intermediate_size", says_ff=False),
    ),
    "OlmoForCausalLM": HFClass(
        "olmo",
        defaults={"hidden_act": "silu", "max_position_embeddings": 2048},
        required={"clip_qkv": None},
        epsilon=None,
    ),
}
