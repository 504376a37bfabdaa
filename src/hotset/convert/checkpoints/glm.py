"""GLM 4, dense and MoE."""

from __future__ import annotations

from hotset.convert.checkpoints.classes import HFClass, HFExperts
from hotset.convert.checkpoints.names import (
    GROUPED_EXPERTS,
    POST_NORM,
)

CLASSES: dict[str, HFClass] = {
    "GlmForCausalLM": HFClass(
        "chatglm",
        defaults={"hidden_act": "silu", "rms_norm_eps": 1.5625e-07, "max_position_embeddings": 131072}
        | {"num_key_value_heads": 2, "head_dim": 128, "partial_rotary_factor": 0.5},
        rotates="norm",
        partial=True,
        fused_gate=True,
    ),
    "Glm4ForCausalLM": HFClass(
        "glm4",
        defaults={"hidden_act": "silu", "rms_norm_eps": 1.5625e-07, "max_position_embeddings": 131072}
        | {"num_key_value_heads": 2, "head_dim": 128, "partial_rotary_factor": 0.5},
        rotates="norm",
        partial=True,
        fused_gate=True,
    ),
    "Glm4MoeForCausalLM": HFClass(
        "glm4moe",
        layer_tensors=POST_NORM,
        defaults={
            **{"hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 131072},
            **{"num_key_value_heads": 8, "partial_rotary_factor": 0.5},
            **{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408},
            **{"n_shared_experts": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1},
            **{"routed_scaling_factor": 1.0, "norm_topk_prob": True, "n_group": 1, "topk_group": 1},
        },
        numbers={"expert_weights_scale": "routed_scaling_factor"},
        partial=True,
        experts=HFExperts(**GROUPED_EXPERTS),
    ),
}
