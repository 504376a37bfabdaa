"""DeepSeek and other models with MLA."""

from __future__ import annotations

from typing import Any

from hotset.convert.checkpoints.classes import HFClass, HFExperts
from hotset.convert.checkpoints.names import (
    DEEPSEEK_EXPERTS,
    EXPERT_NAMES,
    GROUPED_EXPERTS,
    LATENT_DEFAULTS,
    LATENT_NAMES,
    LLAMA_NAMES,
    SHARED_EXPERTS,
)

_INDEXED: dict[str, Any] = {
    "layer_tensors": LATENT_NAMES
    | {
        "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
        "self_attn.indexer.wq_b": "indexer.attn_q_b",
        "self_attn.indexer.wk": "indexer.attn_k",
        "self_attn.indexer.k_norm": "indexer.k_norm",
        "self_attn.indexer.weights_proj": "indexer.proj",
    },
    "numbers": {"expert_weights_scale": "routed_scaling_factor"},
    "rotates": "norm",
    "latent": True,
    "indexed": True,
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
    layer_tensors=LLAMA_NAMES | EXPERT_NAMES | SHARED_EXPERTS,
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
        layer_tensors=LLAMA_NAMES | EXPERT_NAMES | SHARED_EXPERTS,
        required={"moe_layer_freq": 1, "scoring_func": "softmax"},
        experts=HFExperts(**DEEPSEEK_EXPERTS),
    ),
    "DeepseekV2ForCausalLM": HFClass(
        "deepseek2",
        layer_tensors=LATENT_NAMES,
        defaults=LATENT_DEFAULTS
        | {"num_experts": 64, "moe_intermediate_size": 1407, "n_shared_experts": 2}
        | {"routed_scaling_factor": 1.0},
        required={"moe_layer_freq": 1, "scoring_func": "softmax", "norm_topk_prob": False},
        numbers={"expert_weights_scale": "routed_scaling_factor"},
        rotates="norm",
        latent=True,
        experts=HFExperts(
            **GROUPED_EXPERTS,
            scoring="softmax",
            methods={"greedy": False, "group_limited_greedy": True},
        ),
    ),
    "PLMForCausalLM": HFClass(
        "plm",
        layer_tensors=LATENT_NAMES | {"self_attn.kv_b_proj": "attn_kv_b"},
        tied=True,
        defaults=LATENT_DEFAULTS | {"q_lora_rank": None, "hidden_act": "relu2"},
        required={"attention_bias": False},
        rotates="norm",
        latent=True,
    ),
    "DeepseekV3ForCausalLM": HFClass(  # R1, Moonlight, Kimi K2
        "deepseek2",
        layer_tensors=LATENT_NAMES | {"mlp.gate.e_score_correction_bias": "exp_probs_b.bias"},
        defaults={
            **LATENT_DEFAULTS,
            "max_position_embeddings": 4096,
            **{"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048},
            **{"n_shared_experts": 1, "first_k_dense_replace": 3, "num_nextn_predict_layers": 1},
            **{"routed_scaling_factor": 2.5, "norm_topk_prob": True, "n_group": 8, "topk_group": 4},
        },
        required={"moe_layer_freq": 1, "scoring_func": "sigmoid", "rope_interleave": True},
        numbers={"expert_weights_scale": "routed_scaling_factor"},
        rotates="norm",
        latent=True,
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
