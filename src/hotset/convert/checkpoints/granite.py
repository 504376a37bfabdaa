"""Granite, dense, MoE and hybrid."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hotset.convert.checkpoints.classes import HFClass, HFExperts
from hotset.convert.checkpoints.names import LLAMA_DEFAULTS
from hotset.convert.hf_mixers import HybridSpace
from hotset.convert.hf_part import Facts
from hotset.convert.hf_rope import HFRope
from hotset.convert.hf_values import number
from hotset.errors import FormatError, UnsupportedModelError


class LayerBases(HFRope):
    """Granite SWA, whose layer_rope_theta may hold the base of each layer's rotation.

    hotset supports one base for all, or 0 for layers without a rotation. layer_bases: the entry, or empty.
    """

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        values, n_layer, entry = self.raw.get("layer_rope_theta"), facts.n_layer, "layer_rope_theta"
        if values is not None and (not isinstance(values, list) or len(values) != n_layer):
            raise FormatError(f"{entry} in config.json must hold a number for each of {n_layer} layers")
        self.layer_bases = [float(number({entry: value}, entry)) for value in values or []]
        if min(self.layer_bases, default=0) < 0:
            raise FormatError(f"{entry} in config.json must hold no number below 0")
        if len(set(self.layer_bases) - {0.0}) > 1:
            raise UnsupportedModelError(
                f"{entry} in config.json must be the same in all layers, or 0: layers with rotations of "
                "different bases are not supported"
            )

    def resolved(self, rope: dict[str, Any], kind: Any) -> Any:
        if any(self.layer_bases):  # they override rope_theta
            rope["rope_theta"] = max(self.layer_bases)
        return kind

    def own_keys(self, rope: dict[str, Any]) -> dict[str, Any]:
        rotates = [base > 0 for base in self.layer_bases]
        return {} if all(rotates) else {"attention.rope_pattern": rotates}


def _hybrid(hf_class: HFClass, raw: dict[str, Any]) -> HFClass:
    """Return the class of Granite 4, or the class of its dense models."""
    if 0 not in (raw.get("num_local_experts"), raw.get("num_experts")):
        return hf_class
    names = {"shared_mlp.input_linear": "ffn_gate ffn_up", "shared_mlp.output_linear": "ffn_down"}
    return replace(
        hf_class,
        ff="shared_intermediate_size",
        layer_tensors=names,
        experts=None,
    )


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
_SHARED = HFExperts("intermediate_size", normalised=None, ff_shared="shared_intermediate_size", says_ff=False)
_GRANITE_WINDOWS: dict[str, Any] = {
    **_GRANITE,
    # transformers ignores no_rope_layers, from which llama.cpp's converter takes the layers that rotate.
    "required": {"no_rope_layers": None},
    "windows": ("sliding_window", "layer_types"),
    "writes_pattern": True,
    "rope": LayerBases,
}

CLASSES: dict[str, HFClass] = {
    "GraniteForCausalLM": HFClass("granite", **_GRANITE, defaults=_GRANITE_DEFAULTS),
    "GraniteMoeForCausalLM": HFClass(
        "granitemoe",
        **_GRANITE,
        defaults=_GRANITE_MOE_DEFAULTS,
        experts=HFExperts("intermediate_size", normalised=None, says_ff=False),
    ),
    "GraniteMoeSharedForCausalLM": HFClass(
        "granitemoe",
        **_GRANITE,
        defaults=_GRANITE_MOE_DEFAULTS | {"shared_intermediate_size": 0},
        experts=_SHARED,
    ),
    "GraniteSWAForCausalLM": HFClass(
        "granite_swa",
        **_GRANITE_WINDOWS,
        tied=True,
        defaults=_GRANITE_DEFAULTS
        | {"sliding_window": 128}
        | {"rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "num_key_value_heads": 4},
    ),
    "GraniteMoeSWAForCausalLM": HFClass(
        "granite_swa",
        layer_tensors={
            "block_sparse_moe.input_linear": "ffn_gate_up_exps",
            "block_sparse_moe.experts.gate_up_proj": "ffn_gate_up_exps",
            "shared_mlp.input_linear": "ffn_up_shexp",
        },
        **_GRANITE_WINDOWS,
        defaults=_GRANITE_MOE_DEFAULTS | {"sliding_window": 128} | {"shared_intermediate_size": 0},
        fused_gate=True,
        experts=_SHARED,
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
        required={
            "hidden_act": "silu",
            "attention_bias": False,
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
        },
        parts=(HybridSpace,),
        variant=_hybrid,
        experts=_SHARED,
    ),
}
