"""EXAONE, dense and MoE."""

from __future__ import annotations

from typing import Any

from hotset.convert.checkpoints.classes import HFClass, HFExperts
from hotset.convert.checkpoints.names import (
    GROUPS,
    OLMO_DEFAULTS,
    POST_NORM,
)

_EXAONE_DEFAULTS: dict[str, Any] = OLMO_DEFAULTS | {"sliding_window": 4096, "num_key_value_heads": 32}
_EXAONE_WINDOWS = ("sliding_window", "layer_types", "sliding_window_pattern")

CLASSES: dict[str, HFClass] = {
    "Exaone4ForCausalLM": HFClass(
        "exaone4", layer_tensors=POST_NORM, defaults=_EXAONE_DEFAULTS, windows=_EXAONE_WINDOWS
    ),
    "ExaoneMoeForCausalLM": HFClass(
        "exaone-moe",
        defaults=_EXAONE_DEFAULTS
        | {
            "moe_intermediate_size": 1024,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "n_group": 1,
            "topk_group": 1,
        },
        windows=_EXAONE_WINDOWS,
        numbers={"expert_weights_scale": "routed_scaling_factor"},
        experts=HFExperts(n_shared="num_shared_experts", n_dense="first_k_dense_replace", groups=GROUPS),
    ),
    "ExaoneForCausalLM": HFClass(
        "exaone",
        layers="transformer.h",
        activation="activation_function",
        epsilon="layer_norm_epsilon",
        own_names={"num_hidden_layers": "num_layers"},
    ),
}
