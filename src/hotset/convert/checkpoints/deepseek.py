"""DeepSeek and other models with MLA."""

from __future__ import annotations

from typing import Any

from hotset.convert.checkpoints.classes import HFClass, HFExperts, every_head
from hotset.convert.checkpoints.names import (
    DEEPSEEK_EXPERTS,
    GROUPED_EXPERTS,
    LATENT_DEFAULTS,
)
from hotset.convert.hf_parts import CompressedPart, IndexedLatent, LatentPart, LatentRope, PlainLatent

_LATENT: dict[str, Any] = {
    "kv_heads": every_head,
    "rotates": "norm",
    "rope": LatentRope,
    "parts": (LatentPart,),
}

_INDEXED: dict[str, Any] = {
    **_LATENT,
    "parts": (IndexedLatent,),
    "layer_tensors": {
        "self_attn.indexer.wq_b": "indexer.attn_q_b",
        "self_attn.indexer.wk": "indexer.attn_k",
        "self_attn.indexer.k_norm": "indexer.k_norm",
        "self_attn.indexer.weights_proj": "indexer.proj",
    },
    "numbers": {"expert_weights_scale": "routed_scaling_factor"},
    "experts": HFExperts(
        **GROUPED_EXPERTS,
        scoring="sigmoid",
        methods={"noaux_tc": True},
    ),
}
_INDEXED_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 163840, "num_experts": 256, "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048, "n_shared_experts": 1, "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5, "norm_topk_prob": True, "n_group": 1, "topk_group": 1,
    "index_topk": 2048, "index_head_dim": 128,
}  # fmt: skip
_DEEPSEEK_OCR = HFClass(
    "deepseek2-ocr",
    required={
        "use_mla": False,
        "moe_layer_freq": 1,
        "scoring_func": "softmax",
        "topk_method": "greedy",
        "sliding_window": None,
    },
    numbers={"expert_weights_scale": "routed_scaling_factor"},
    sees=True,
    experts=HFExperts(**DEEPSEEK_EXPERTS),
)

CLASSES: dict[str, HFClass] = {
    "DeepseekForCausalLM": HFClass(
        "deepseek",
        required={"moe_layer_freq": 1, "scoring_func": "softmax"},
        experts=HFExperts(**DEEPSEEK_EXPERTS),
    ),
    "DeepseekV2ForCausalLM": HFClass(
        "deepseek2",
        defaults=LATENT_DEFAULTS
        | {"num_experts": 64, "moe_intermediate_size": 1407, "n_shared_experts": 2}
        | {"routed_scaling_factor": 1.0},
        required={"moe_layer_freq": 1, "scoring_func": "softmax", "norm_topk_prob": False},
        numbers={"expert_weights_scale": "routed_scaling_factor"},
        **_LATENT,
        experts=HFExperts(
            **GROUPED_EXPERTS,
            scoring="softmax",
            methods={"greedy": False, "group_limited_greedy": True},
        ),
    ),
    "PLMForCausalLM": HFClass(
        "plm",
        layer_tensors={"self_attn.kv_b_proj": "attn_kv_b"},
        tied=True,
        defaults=LATENT_DEFAULTS | {"q_lora_rank": None, "hidden_act": "relu2"},
        required={"attention_bias": False},
        **_LATENT | {"parts": (PlainLatent,)},
    ),
    "DeepseekV3ForCausalLM": HFClass(  # R1, Moonlight, Kimi K2
        "deepseek2",
        defaults={
            **LATENT_DEFAULTS,
            "max_position_embeddings": 4096,
            **{"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048},
            **{"n_shared_experts": 1, "first_k_dense_replace": 3, "num_nextn_predict_layers": 1},
            **{"routed_scaling_factor": 2.5, "norm_topk_prob": True, "n_group": 8, "topk_group": 4},
        },
        required={"moe_layer_freq": 1, "scoring_func": "sigmoid", "rope_interleave": True},
        numbers={"expert_weights_scale": "routed_scaling_factor"},
        **_LATENT,
        experts=HFExperts(
            **GROUPED_EXPERTS,
            scoring="sigmoid",
            methods={"noaux_tc": True},
        ),
    ),
    "DeepseekV32ForCausalLM": HFClass(
        "deepseek32",
        **_INDEXED,
        defaults=LATENT_DEFAULTS | _INDEXED_DEFAULTS | {"index_n_heads": 64, "n_group": 8, "topk_group": 4},
    ),
    "DeepseekV4ForCausalLM": HFClass(
        "deepseek4",
        layer_tensors={
            "attn.indexer.wq_b": "indexer.attn_q_b",
            "attn.indexer.weights_proj": "indexer.proj",
            "attn.indexer.compressor.ape": "indexer_compressor_ape",
            "attn.indexer.compressor.wkv": "indexer_compressor_kv",
            "attn.indexer.compressor.wgate": "indexer_compressor_gate",
            "attn.indexer.compressor.norm": "indexer_compressor_norm",
        },
        ff="moe_intermediate_size",
        defaults={
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 1048576,
            "num_key_value_heads": 1,
            "head_dim": 512,
            "q_lora_rank": 1024,
            "moe_intermediate_size": 2048,
            "num_experts": 256,
            "num_experts_per_tok": 6,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.5,
            "rope_theta": 10000.0,
            "compress_rope_theta": 160000.0,
            "hc_mult": 4,
            "hc_sinkhorn_iters": 20,
            "hc_eps": 1e-6,
            "swiglu_limit": 10.0,
            "sliding_window": 128,
            "o_groups": 8,
            "o_lora_rank": 1024,
            "index_n_heads": 64,
            "index_head_dim": 128,
            "index_topk": 512,
            "num_nextn_predict_layers": 1,
        },
        required={"scoring_func": "sqrtsoftplus", "norm_topk_prob": True, "num_key_value_heads": 1},
        numbers={"expert_weights_scale": "routed_scaling_factor"},
        windows=("sliding_window",),
        rotates="norm",
        parts=(CompressedPart,),
        experts=HFExperts(n_shared="n_shared_experts", scoring="sqrt_softplus"),
    ),
    "GlmMoeDsaForCausalLM": HFClass(
        "glm-dsa",
        **_INDEXED,
        defaults=LATENT_DEFAULTS
        | _INDEXED_DEFAULTS
        | {
            "max_position_embeddings": 202752,
            "q_lora_rank": 2048,
            "v_head_dim": 256,
            "qk_nope_head_dim": 192,
            "index_n_heads": 32,
            "rms_norm_eps": 1e-5,
        },
    ),
    "DeepseekOCRForCausalLM": _DEEPSEEK_OCR,
    "DeepseekOCR2ForCausalLM": _DEEPSEEK_OCR,
}
