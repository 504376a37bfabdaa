"""MoE models whose makers have no module of their own in this package."""

from __future__ import annotations

from typing import Any

import numpy as np

from hotset.convert.checkpoints.classes import HFClass, HFExperts
from hotset.convert.checkpoints.names import (
    GROUPED_EXPERTS,
    GROUPS,
    LLAMA_DEFAULTS,
    POST_NORM,
)
from hotset.convert.hf_part import FamilyPart
from hotset.convert.hf_values import integer
from hotset.errors import FormatError, UnsupportedModelError


class Layouts(FamilyPart):
    """SmallThinker: sliding_window_layout and rope_layout name the layers with a window or a rotation."""

    def keys(self) -> dict[str, Any]:
        """Return the windows; exactly the layers with a rotation must have one, or all layers rotate."""
        raw, n_layer, found = self.facts.raw, self.facts.n_layer, {}
        for entry, default in (("sliding_window_layout", 0), ("rope_layout", 1)):
            layout = raw.get(entry, [default] * n_layer)
            if not isinstance(layout, list) or len(layout) != n_layer or any(v not in (0, 1) for v in layout):
                raise FormatError(f"{entry} in config.json must hold 0 or 1 for {n_layer} layers")
            found[entry] = [value == 1 for value in layout]
        windowed, rotated = found.values()
        if rotated != (windowed if any(windowed) else [True] * n_layer):
            raise UnsupportedModelError(
                "rope_layout in config.json must name the layers with a window, or all layers if none has one"
            )
        if not any(windowed):
            return {}
        window = integer(raw, "sliding_window_size")
        return {"attention.sliding_window": window, "attention.sliding_window_pattern": windowed}


class TransposedExperts(FamilyPart):
    """gpt-oss: all experts in one tensor, MXFP4 or input-major with alternate columns of gate and up."""

    @staticmethod
    def dequantises(quantised: Any) -> bool:
        return isinstance(quantised, dict) and quantised.get("quant_method") == "mxfp4"

    def split(self, values: np.ndarray, i: int, stems: list[str]) -> np.ndarray | None:
        if not stems[0].endswith("_exps"):
            return None
        part = values[..., i :: len(stems)]
        return part.swapaxes(1, 2) if part.ndim == 3 else part


CLASSES: dict[str, HFClass] = {
    "MiniMaxM2ForCausalLM": HFClass(
        "minimax-m2",
        defaults={
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 196608,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "rope_theta": 5e6,
        },
        required={"scoring_func": "sigmoid", "use_qk_norm": True, "shared_intermediate_size": 0},
        partial=True,
        experts=HFExperts("intermediate_size", normalised=None),
    ),
    "Dots1ForCausalLM": HFClass(
        "dots1",
        defaults=LLAMA_DEFAULTS
        | {
            "num_key_value_heads": 32,
            "moe_intermediate_size": 1408,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "sliding_window": 4096,
            "max_window_layers": 62,
        },
        windows=("sliding_window", "layer_types", "max_window_layers"),
        numbers={"expert_weights_scale": "routed_scaling_factor"},
        experts=HFExperts(**GROUPED_EXPERTS),
    ),
    "AfmoeForCausalLM": HFClass(
        "afmoe",
        layer_tensors=POST_NORM | {"mlp.expert_bias": "exp_probs_b.bias"},
        defaults={
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 16384,
            "head_dim": 128,
            "moe_intermediate_size": 1408,
            "num_dense_layers": 1,
            "num_experts": 64,
            "num_experts_per_tok": 6,
            "num_shared_experts": 2,
            "route_scale": 1.0,
            "sliding_window": 1024,
            "mup_enabled": False,
        },
        windows=("sliding_window", "layer_types"),
        numbers={"expert_weights_scale": "route_scale"},
        required={"mup_enabled": True, "global_attn_every_n_layers": 4},
        experts=HFExperts(normalised=None, n_shared="num_shared_experts", n_dense="num_dense_layers"),
    ),
    "SmallThinkerForCausalLM": HFClass(
        "smallthinker",
        ff="moe_ffn_hidden_size",
        tied=True,
        defaults={"hidden_act": "relu", "head_dim": 128, "sliding_window_size": 4096},
        required={
            "moe_enable_early_router": True,
            "moe_enable_secondary_experts": False,
            "moe_shared_primary_experts": 0,
            "use_qk_norm": False,
        },
        experts=HFExperts(
            "moe_ffn_hidden_size",
            "moe_num_primary_experts",
            "moe_num_active_primary_experts",
            normalised=None,
            softmax="moe_primary_router_apply_softmax",
        ),
        parts=(Layouts,),
    ),
    "GptOssForCausalLM": HFClass(
        "gpt-oss",
        layer_tensors=POST_NORM,
        activation=None,
        defaults={
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "sliding_window": 128,
            "num_experts": 128,
            "num_experts_per_tok": 4,
            "rope_theta": 150000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        windows=("sliding_window", "layer_types"),
        required={"swiglu_alpha": 1.702, "swiglu_limit": 7.0, "attention_bias": True},
        experts=HFExperts("intermediate_size", normalised=None),
        parts=(TransposedExperts,),
    ),
    "MellumForCausalLM": HFClass(
        "mellum",
        defaults=LLAMA_DEFAULTS
        | {
            "max_position_embeddings": 131072,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "moe_intermediate_size": 896,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "sliding_window": 1024,
            "rope_theta": 10000.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        windows=("sliding_window", "layer_types"),
        named_windows=True,
        experts=HFExperts(),
    ),
    "BailingMoeForCausalLM": HFClass(
        "bailingmoe",
        layer_tensors={"attention.query_key_value": "attn_q attn_k attn_v"},
        required={"norm_head": False, "multi_gate": False, "routed_scaling_factor": 1.0},
        experts=HFExperts(n_shared="num_shared_experts", n_dense="first_k_dense_replace"),
    ),
    "BailingMoeV2ForCausalLM": HFClass(
        "bailingmoe2",
        defaults={"partial_rotary_factor": 0.5},
        required={"score_function": "sigmoid", "use_qk_norm": True, "norm_head": False},
        numbers={"expert_weights_scale": "routed_scaling_factor"},
        partial=True,
        experts=HFExperts(n_shared="num_shared_experts", n_dense="first_k_dense_replace", groups=GROUPS),
    ),
}
