"""Decoders in the line of GPT-2, most of them without a gate, and Phi."""

from __future__ import annotations

from typing import Any

from hotset.convert.checkpoints.classes import HFClass, every_head, multi_query_heads
from hotset.convert.checkpoints.names import (
    LLAMA_DEFAULTS,
    four_times,
    two_thirds_of_four_times,
)
from hotset.convert.hf_part import Facts, FamilyPart
from hotset.convert.hf_values import integer
from hotset.errors import UnsupportedModelError


class Mpt(FamilyPart):
    """MPT, whose attn_config has entries of attention."""

    @staticmethod
    def prepared(config: dict[str, Any]) -> dict[str, Any]:
        own = config.get("attn_config")
        return config | own if isinstance(own, dict) else config


class Opt(FamilyPart):
    """OPT, of one width."""

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        if facts.raw.get("word_embed_proj_dim") not in (None, facts.n_embd):
            raise UnsupportedModelError("word_embed_proj_dim other than hidden_size is not supported")


def _falcon_heads(raw: dict[str, Any], n_head: int) -> int:
    """Return Falcon's heads of keys and values."""
    if raw.get("new_decoder_architecture") is True or "n_head_kv" in raw:
        return integer(raw, "num_kv_heads", raw.get("n_head_kv", n_head))
    return multi_query_heads(raw, n_head)


_FALCON = HFClass(
    "falcon",
    kv_heads=_falcon_heads,
    ff_of_width=four_times,
    layers="transformer.h",
    ff="ffn_hidden_size",
    activation="activation",
    epsilon="layer_norm_epsilon",
    tied=True,
    # Falcon's own code never reads max_position_embeddings: its checkpoints were trained with 2048.
    defaults={"activation": "gelu", "layer_norm_epsilon": 1e-5, "max_position_embeddings": 2048},
    required={"alibi": False, "parallel_attn": True},
    grouped_qkv=True,
)
_GPT2: dict[str, Any] = {
    "layers": "transformer.h",
    "ff": "n_inner",
    "ff_of_width": four_times,
    "activation": "activation_function",
    "epsilon": "layer_norm_epsilon",
    "tied": True,
}
_GPT2_DEFAULTS: dict[str, Any] = {"layer_norm_epsilon": 1e-5, "max_position_embeddings": 1024}

CLASSES: dict[str, HFClass] = {
    "GPT2LMHeadModel": HFClass(
        "gpt2",
        **_GPT2,
        kv_heads=every_head,
        defaults=_GPT2_DEFAULTS | {"activation_function": "gelu_new"},
        required={
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
        stored_by_input=(".c_attn.weight", ".c_proj.weight", ".c_fc.weight"),
    ),
    "GPTNeoXForCausalLM": HFClass(
        "gptneox",
        kv_heads=every_head,
        layers="gpt_neox.layers",
        epsilon="layer_norm_eps",
        defaults={
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-5,
            "max_position_embeddings": 2048,
            "partial_rotary_factor": 0.25,
            "use_parallel_residual": True,
        },
        flags={"use_parallel_residual": "use_parallel_residual"},
        own_names={"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"},
        partial=True,
        grouped_qkv=True,
    ),
    "PhiForCausalLM": HFClass(
        "phi2",
        epsilon="layer_norm_eps",
        defaults={
            "hidden_act": "gelu_new",
            "layer_norm_eps": 1e-5,
            "max_position_embeddings": 2048,
            "partial_rotary_factor": 0.5,
        },
        required={"qk_layernorm": False},
        partial=True,
    ),
    "Starcoder2ForCausalLM": HFClass(
        "starcoder2",
        epsilon="norm_epsilon",
        tied=True,
        defaults={
            "hidden_act": "gelu_pytorch_tanh",
            "norm_epsilon": 1e-5,
            "max_position_embeddings": 4096,
            "num_key_value_heads": 2,
        },
        windows=("sliding_window",),
    ),
    "FalconForCausalLM": _FALCON,
    "RWForCausalLM": _FALCON,
    "OPTForCausalLM": HFClass(
        "opt",
        kv_heads=every_head,
        layers="model.decoder.layers",
        ff="ffn_dim",
        activation="activation_function",
        epsilon=None,
        tied=True,
        defaults={"activation_function": "relu", "max_position_embeddings": 2048},
        required={
            "do_layer_norm_before": True,
            "_remove_final_layer_norm": False,
            "layer_norm_elementwise_affine": True,
        },
        parts=(Opt,),
    ),
    "MptForCausalLM": HFClass(
        "mpt",
        kv_heads=every_head,
        ff_of_width=four_times,
        layers="transformer.blocks",
        activation=None,
        epsilon="layer_norm_epsilon",
        tied=True,
        defaults={"layer_norm_epsilon": 1e-5, "max_position_embeddings": 2048, "alibi_bias_max": 8},
        required={
            "attn_type": "multihead_attention",
            "clip_qkv": None,
            "softmax_scale": None,
            "prefix_lm": False,
            "qk_ln": False,
            "attn_uses_sequence_id": False,
            "alibi": True,
            "logit_scale": None,
            "no_bias": True,
            "expansion_ratio": 4,
        },
        ff="n_inner",
        numbers={"attention.max_alibi_bias": "alibi_bias_max"},
        parts=(Mpt,),
    ),
    "BloomForCausalLM": HFClass(
        "bloom",
        kv_heads=every_head,
        ff_of_width=four_times,
        layers="transformer.h",
        ff="n_inner",
        activation=None,
        epsilon="layer_norm_epsilon",
        tied=True,
        defaults={"layer_norm_epsilon": 1e-5, "max_position_embeddings": 2048},
        required={"apply_residual_connection_post_layernorm": False},
        own_names={"max_position_embeddings": "seq_length"},
        grouped_qkv=True,
    ),
    "Phi3ForCausalLM": HFClass(
        "phi3",
        defaults=LLAMA_DEFAULTS
        | {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096},
        windows=("sliding_window",),
        partial=True,
        fused_gate=True,
    ),
    "GPTBigCodeForCausalLM": HFClass(
        "starcoder",
        **_GPT2,
        kv_heads=multi_query_heads,
        defaults=_GPT2_DEFAULTS | {"activation_function": "gelu_pytorch_tanh"},
        required={"scale_attn_weights": True, "add_cross_attention": False},
        grouped_qkv=True,
    ),
    "GPTRefactForCausalLM": HFClass(
        "refact",
        layer_tensors={"mlp.gate_up_proj": "ffn_gate ffn_up"},
        layers="transformer.h",
        ff="n_inner",
        ff_of_width=two_thirds_of_four_times,
        activation=None,
        epsilon="layer_norm_epsilon",
        kv_heads=multi_query_heads,
        defaults=_GPT2_DEFAULTS,
        required={"n_inner": None, "multi_query": True},
        numbers={"attention.layer_norm_rms_epsilon": "layer_norm_epsilon"},  # as llama.cpp needs it
    ),
    "CodeShellForCausalLM": HFClass(
        "codeshell",
        layers="transformer.h",
        ff="n_inner",
        activation="activation_function",
        epsilon="layer_norm_epsilon",
        own_names={"num_key_value_heads": "num_query_groups"},
        required={"group_query_attention": True, "position_embedding_type": "rope"},
    ),
}
