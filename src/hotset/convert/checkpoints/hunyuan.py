"""Hunyuan, dense and MoE, and the text part of its vision model."""

from __future__ import annotations

from typing import Any

from hotset.convert.checkpoints.classes import HFClass, HFExperts
from hotset.convert.checkpoints.names import OLMO_DEFAULTS
from hotset.convert.hf_rope import HFRope
from hotset.convert.hf_values import number, positive
from hotset.errors import FormatError


class ScaledBase(HFRope):
    """A scaling whose alpha is included in the base, for the longest context, whatever the context is."""

    def resolved(self, rope: dict[str, Any], kind: Any) -> Any:
        if kind != "dynamic" or not rope.get("alpha"):
            return kind
        base, dim = number(rope, "rope_theta", number(self.raw, "rope_theta", 10000.0)), self.head_dim
        if dim <= 2:
            raise FormatError(f"the RoPE scaling in config.json divides by zero: heads of {dim} channels")
        rope["rope_theta"] = base * positive(rope, "alpha") ** (dim / (dim - 2))
        return "default"


class AlphaKey(HFRope):
    """A scaling whose alpha is a key of the file."""

    def resolved(self, rope: dict[str, Any], kind: Any) -> Any:
        scaled = kind in ("dynamic", "xdrope") and rope.get("alpha")
        rope["alpha"] = float(number(rope, "alpha")) if scaled else None
        return "default" if scaled else kind

    def own_keys(self, rope: dict[str, Any]) -> dict[str, Any]:
        return {} if rope["alpha"] is None else {"rope.scaling.alpha": rope["alpha"]}


CLASSES: dict[str, HFClass] = {
    "HunYuanDenseV1ForCausalLM": HFClass("hunyuan-dense", rope=ScaledBase, defaults=OLMO_DEFAULTS),
    "HunYuanMoEV1ForCausalLM": HFClass(
        "hunyuan-moe",
        rope=ScaledBase,
        defaults=OLMO_DEFAULTS | {"num_experts": 1, "moe_topk": 1},
        experts=HFExperts(
            "intermediate_size", n_used="moe_topk", normalised=None, ff_shared="intermediate_size"
        ),
    ),
    "HunYuanVLForConditionalGeneration": HFClass(
        "hunyuan_vl",
        rope=AlphaKey,
        tied=True,
        defaults=OLMO_DEFAULTS,
        sections=True,
        sees=True,
    ),
    "HYV3ForCausalLM": HFClass(
        "hy_v3",
        layer_tensors={"mlp.e_score_correction_bias": "exp_probs_b."},
        defaults={
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_theta": 11_158_840.0,
            "num_experts": 192,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
            "moe_intermediate_size": 1536,
            "router_scaling_factor": 2.826,
        },
        required={"route_norm": True, "first_k_dense_replace": 1},
        numbers={"expert_weights_scale": "router_scaling_factor"},
        experts=HFExperts(
            normalised=None, says_shared_ff=True, n_shared="num_shared_experts", first_dense=True
        ),
    ),
}
