"""Mamba, RWKV and hybrids of attention and recurrent layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hotset.convert.checkpoints.classes import HFClass, HFExperts, every_head
from hotset.convert.checkpoints.names import (
    GROUPS,
    LATENT_DEFAULTS,
    POST_NORM,
    four_times,
)
from hotset.convert.hf_mixers import (
    ChannelSpace,
    FalconMamba,
    Jamba,
    KimiDelta,
    ParallelSpace,
    StateSpace,
)
from hotset.convert.hf_part import Facts, FamilyPart
from hotset.convert.hf_parts import LatentRope
from hotset.convert.hf_rwkv import Rwkv6, Rwkv7, ffn_width_6
from hotset.convert.hf_values import LEGACY_PARTS, checked_types, integer, number
from hotset.errors import FormatError
from hotset.model.keys import EPSILON_KEYS, MAX_CONV_KERNEL

_PARTS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}  # of a pattern


class ShortConvPart(FamilyPart):
    """LFM2's short convolutions, which replace attention in the layers that layer_types names."""

    adapts = False

    @staticmethod
    def prepared(config: dict[str, Any]) -> dict[str, Any]:
        """Read tie_embedding, the name of the entry in early checkpoints."""
        tied = {"tie_word_embeddings": config["tie_embedding"]} if "tie_embedding" in config else {}
        return config | tied

    def types(self) -> Any:
        """Return the kind of each layer."""
        if (types := self.facts.raw.get("layer_types")) is None:
            raise FormatError("config.json has no layer_types")
        return types

    def keys(self) -> dict[str, Any]:
        facts = self.facts
        types = checked_types(self.types(), facts.n_layer, ("full_attention", "conv"))
        return {
            "attention.head_count_kv": [0 if kind == "conv" else facts.n_head_kv for kind in types],
            "shortconv.l_cache": integer(facts.raw, "conv_L_cache", 3, MAX_CONV_KERNEL),
        }


class DenseShortConv(ShortConvPart):
    """LFM2 without experts, whose FFNs may have two thirds of the neurons that config.json states."""

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        config = facts.raw
        n_ff = integer(config, "block_ff_dim", facts.n_ff, 1 << 22)
        if config.get("block_auto_adjust_ff_dim", True) is not False:
            n_ff = 2 * n_ff // 3
            if config.get("block_ffn_dim_multiplier", 1.0) is not None:
                multiple = integer(config, "block_multiple_of", 256, 1 << 22)
                n_ff = int(number(config, "block_ffn_dim_multiplier", 1.0) * n_ff)
                n_ff = -(-n_ff // multiple) * multiple
        facts.n_ff = integer({"block_ff_dim": n_ff}, "block_ff_dim", high=1 << 22)

    def types(self) -> Any:
        """Return the kind of each layer; older checkpoints have full_attn_idxs, or attention everywhere."""
        if (types := self.facts.raw.get("layer_types")) is not None:
            return types
        layers = range(self.facts.n_layer)
        attends = self.facts.raw.get("full_attn_idxs")
        attends = list(layers) if attends is None else attends
        if not isinstance(attends, list):
            raise FormatError("full_attn_idxs in config.json must be a list of layers")
        return ["full_attention" if i in attends else "conv" for i in layers]


class OnePartLayers(StateSpace):
    """Nemotron-H, each of whose layers is a state space, attention, an FFN or experts.

    n_latent: the width of the experts' inputs and outputs; 0 if it equals the model's.
    """

    entries = ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel")
    limits = None
    in_parts = True

    @staticmethod
    def prepared(config: dict[str, Any]) -> dict[str, Any]:
        """Set num_hidden_layers, and layers_block_type in the form that `keys` reads."""
        parts = _parts_of(config)
        return config | {"layers_block_type": parts, "num_hidden_layers": len(parts)}

    def keys(self) -> dict[str, Any]:
        facts = self.facts
        parts, behind, n_ff_expert = facts.raw["layers_block_type"], facts.n_nextn, facts.n_ff_expert
        kv = [facts.n_head_kv if part == "full_attention" else 0 for part in parts]
        widths = {"mlp": facts.n_ff, "moe": n_ff_expert}
        n_ff = [widths.get(part, 0) for part in parts]
        keys: dict[str, Any] = {
            "attention.head_count_kv": kv + [facts.n_head_kv] * behind,
            "feed_forward_length": n_ff + [n_ff_expert] * behind,
            EPSILON_KEYS["layer"]: float(number(facts.raw, "layer_norm_epsilon")),  # engines read either
        }
        if facts.n_expert and facts.raw.get("moe_latent_size") is not None:
            keys["moe_latent_size"] = integer(facts.raw, "moe_latent_size", high=1 << 20)
        return keys | super().keys()


def _parts_of(config: dict[str, Any]) -> list[str]:
    """Return the kind of each layer of a Nemotron-H."""
    parts = config.get("layers_block_type") or config.get("layer_types")
    if parts is None:
        pattern = config.get("hybrid_override_pattern")
        if pattern is None:
            raise FormatError("config.json has no layers_block_type")
        parts = [_PARTS.get(c) for c in pattern] if isinstance(pattern, str) else pattern
    if not isinstance(parts, list) or not parts:
        raise FormatError("layers_block_type in config.json must be a list of layers")
    parts = [LEGACY_PARTS.get(part, part) if isinstance(part, str) else part for part in parts]
    return checked_types(parts, len(parts), tuple(_PARTS.values()))


def _nemotron_h(hf_class: HFClass, raw: dict[str, Any]) -> HFClass:
    """Return the class of Nemotron-H; models without experts have another architecture."""
    parts = _parts_of(raw)
    if "moe" not in parts:
        return replace(hf_class, architecture="nemotron_h", numbers={}, experts=None)
    return hf_class if "mlp" in parts else replace(hf_class, ff="moe_intermediate_size")


_LFM2: dict[str, Any] = {
    "activation": None,
    "epsilon": "norm_eps",
    "tied": True,
    "required": {"conv_bias": False},
}
_LFM2_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 128000,
    "norm_eps": 1e-5,
    "rope_theta": 1e6,
    "conv_L_cache": 3,
}
_MAMBA: dict[str, Any] = {
    "layers": "backbone.layers",
    "ff": None,
    "activation": None,
    "epsilon": "layer_norm_epsilon",
    "tied": True,
    "defaults": {
        "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": 1 << 20,  # the model has no limit
        "expand": 2,
        "state_size": 16,
        "conv_kernel": 4,
        "time_step_rank": "auto",
    },
    "required": {"hidden_act": "silu", "use_conv_bias": True, "use_bias": False},
}
_NEMOTRON_H_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "mlp_hidden_act": "relu2",
    "layer_norm_epsilon": 1e-5,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
}


CLASSES: dict[str, HFClass] = {
    "KimiLinearForCausalLM": HFClass(
        "kimi-linear",
        defaults=LATENT_DEFAULTS
        | {
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 1048576,
            "q_lora_rank": None,
            "linear_head_dim": 128,
            "linear_num_heads": 32,
            "linear_conv_kernel_dim": 4,
            "num_experts": 256,
            "num_experts_per_token": 8,
            "num_shared_experts": 1,
            "moe_intermediate_size": 1024,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.446,
            "moe_renormalize": True,
            "num_expert_group": 1,
            "topk_group": 1,
        },
        required={"mla_use_nope": True, "moe_router_activation_func": "sigmoid", "moe_layer_freq": 1}
        | {"hidden_act": "silu", "attention_bias": False},
        numbers={"expert_weights_scale": "routed_scaling_factor"},
        kv_heads=every_head,
        rope=LatentRope,
        parts=(KimiDelta,),
        experts=HFExperts(
            n_used="num_experts_per_token",
            normalised="moe_renormalize",
            n_shared="num_shared_experts",
            n_dense="first_k_dense_replace",
            groups=("num_expert_group", "topk_group"),
            first_dense=True,
        ),
    ),
    "NemotronHForCausalLM": HFClass(
        "nemotron_h_moe",
        layer_tensors=POST_NORM,
        layers="backbone.layers",
        activation="mlp_hidden_act",
        epsilon="layer_norm_epsilon",
        defaults=_NEMOTRON_H_DEFAULTS,
        required={
            "mamba_hidden_act": "silu",
            "use_conv_bias": True,
            "use_bias": False,
            "mlp_bias": False,
            "attention_bias": False,
            "sliding_window": None,
        },
        numbers={"expert_weights_scale": "routed_scaling_factor"},
        parts=(OnePartLayers,),
        variant=_nemotron_h,
        experts=HFExperts(ff_shared="moe_shared_expert_intermediate_size", groups=GROUPS),
    ),
    "FalconH1ForCausalLM": HFClass(
        "falcon-h1",
        defaults={
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 8192,
            "num_key_value_heads": 8,
            "mamba_d_ssm": 1024,
            "mamba_n_heads": 128,
            "mamba_d_head": "auto",
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "mamba_d_conv": 4,
            "mamba_norm_before_gate": True,
        },
        required={
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "projectors_bias": False,
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
        },
        parts=(ParallelSpace,),
    ),
    "Mamba2ForCausalLM": HFClass(
        "mamba2",
        layers="backbone.layers",
        ff=None,
        activation=None,
        epsilon="layer_norm_epsilon",
        defaults={
            "layer_norm_epsilon": 1e-5,
            "max_position_embeddings": 1 << 20,  # the model has no limit
            "num_heads": 128,
            "head_dim": 64,
            "n_groups": 8,
            "state_size": 128,
            "conv_kernel": 4,
        },
        required={"hidden_act": "silu", "use_conv_bias": True, "use_bias": False},
        parts=(StateSpace,),
    ),
    "MambaForCausalLM": HFClass("mamba", **_MAMBA, parts=(ChannelSpace,)),
    "FalconMambaForCausalLM": HFClass(
        "mamba",
        **_MAMBA | {"defaults": _MAMBA["defaults"] | {"mixer_rms_eps": 1e-6}},
        parts=(FalconMamba,),
    ),
    "JambaForCausalLM": HFClass(
        "jamba",
        layer_tensors={"pre_ff_layernorm": "ffn_norm"},
        defaults={
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 262144,
            "num_key_value_heads": 8,
            "num_experts": 16,
            "num_experts_per_tok": 2,
            "attn_layer_period": 8,
            "attn_layer_offset": 4,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_dt_rank": "auto",
        },
        required={"hidden_act": "silu", "mamba_conv_bias": True, "mamba_proj_bias": False},
        parts=(Jamba,),
        experts=HFExperts("intermediate_size", normalised=None, says_ff=False),
    ),
    "Rwkv6ForCausalLM": HFClass(
        "rwkv6",
        layers="rwkv.blocks",
        parts=(Rwkv6,),
        activation=None,
        epsilon="layer_norm_epsilon",
        ff_of_width=ffn_width_6,
        defaults={"layer_norm_epsilon": 1e-5, "max_position_embeddings": 1 << 20},
    ),
    "RWKV7ForCausalLM": HFClass(
        "rwkv7",
        layer_tensors={"ffn_norm": "attn_norm_2"},
        parts=(Rwkv7,),
        activation=None,
        epsilon="norm_eps",
        ff_of_width=four_times,
        defaults={"norm_eps": 1e-5, "max_position_embeddings": 1 << 20},
        required={"hidden_act": "sqrelu", "norm_first": True, "norm_bias": True, "attn": None},
    ),
    "Lfm2ForCausalLM": HFClass("lfm2", **_LFM2, defaults=_LFM2_DEFAULTS, parts=(DenseShortConv,)),
    "Lfm2MoeForCausalLM": HFClass(
        "lfm2moe",
        **_LFM2,
        defaults={
            **_LFM2_DEFAULTS,
            **{"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 1792},
            **{"num_dense_layers": 2, "routed_scaling_factor": 1.0, "norm_topk_prob": True},
        },
        numbers={"expert_weights_scale": "routed_scaling_factor"},
        experts=HFExperts(n_dense="num_dense_layers"),
        parts=(ShortConvPart,),
    ),
}
