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
_COMPRESSED_TENSORS = {  # as published, and as transformers writes them
    **dict.fromkeys(("model.embed", "model.embed_tokens"), "token_embd"),
    "model.norm": "output_norm",
    "model.head": "output",
    **{
        f"model.{stem}_{part}": f"output_hc_{part}.weight"
        for stem in ("hc_head", "hc_head.hc")
        for part in ("fn", "base", "scale")
    },
}
_COMPRESSED_NAMES = {
    **{f"hc_{of}_{part}": f"hc_{of}_{part}" for of in ("attn", "ffn") for part in ("fn", "base", "scale")},
    "attn_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "attn.attn_sink": "attn_sinks",
    "attn.wq_a": "attn_q_a",
    "attn.q_norm": "attn_q_a_norm",
    "attn.wq_b": "attn_q_b",
    "attn.wkv": "attn_kv",
    **dict.fromkeys(("attn.kv_norm", "attn.norm"), "attn_kv_a_norm"),
    "attn.wo_a": "attn_output_a",
    "attn.wo_b": "attn_output_b",
    "attn.compressor.ape": "attn_compressor_ape",
    "attn.compressor.wkv": "attn_compressor_kv",
    "attn.compressor.wgate": "attn_compressor_gate",
    "attn.compressor.norm": "attn_compressor_norm",
    "attn.indexer.wq_b": "indexer.attn_q_b",
    "attn.indexer.weights_proj": "indexer.proj",
    "attn.indexer.compressor.ape": "indexer_compressor_ape",
    "attn.indexer.compressor.wkv": "indexer_compressor_kv",
    "attn.indexer.compressor.wgate": "indexer_compressor_gate",
    "attn.indexer.compressor.norm": "indexer_compressor_norm",
    "ffn.gate": "ffn_gate_inp",
    "ffn.gate.bias": "exp_probs_b.bias",
    "ffn.gate.tid2eid": "ffn_gate_tid2eid",
    "ffn.experts.*.w1": "ffn_gate_exps",
    "ffn.experts.*.w2": "ffn_down_exps",
    "ffn.experts.*.w3": "ffn_up_exps",
    "ffn.shared_experts.w1": "ffn_gate_shexp",
    "ffn.shared_experts.w2": "ffn_down_shexp",
    "ffn.shared_experts.w3": "ffn_up_shexp",
}
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
    "DeepseekV4ForCausalLM": HFClass(
        "deepseek4",
        tensors=_COMPRESSED_TENSORS,
        layer_tensors=_COMPRESSED_NAMES,
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
        compressed=True,
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
