"""Encoders in the line of BERT: embedding and reranking models."""

from __future__ import annotations

from dataclasses import replace

from hotset.convert.checkpoints.classes import HFClass, HFExperts

_BERT_ATTENTION = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
}
_BERT = HFClass(
    "bert",
    tensors={
        "bert.embeddings.word_embeddings": "token_embd",
        "bert.embeddings.position_embeddings": "position_embd",
        "bert.embeddings.token_type_embeddings": "token_types",
        "bert.embeddings.LayerNorm": "token_embd_norm",
    },
    layers="bert.encoder.layer",
    layer_tensors=_BERT_ATTENTION
    | {
        "intermediate.dense": "ffn_up",
        "output.dense": "ffn_down",
        "output.LayerNorm": "layer_output_norm",
    },
    kv_heads="every",
    epsilon="layer_norm_eps",
    tied=True,
    defaults={
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
    },
    required={"is_decoder": False, "position_embedding_type": "absolute"},
)
_ROBERTA = replace(
    _BERT,
    tensors={name.replace("bert.", "roberta."): target for name, target in _BERT.tensors.items()},
    layers="roberta.encoder.layer",
    defaults=_BERT.defaults | {"pad_token_id": 1},
    padded_positions=True,
)
_ROBERTA_SCORES = replace(
    _ROBERTA,
    tensors=_ROBERTA.tensors
    | {"roberta.classifier.dense": "cls", "roberta.classifier.out_proj": "cls.output"},
)
_NOMIC = HFClass(
    "nomic-bert",
    tensors={
        "encoder.embeddings.word_embeddings": "token_embd",
        "encoder.embeddings.token_type_embeddings": "token_types",
        "encoder.emb_ln": "token_embd_norm",
    },
    layers="encoder.layers",
    layer_tensors={
        "attn.Wqkv": "attn_qkv",
        "attn.out_proj": "attn_output",
        "norm1": "attn_output_norm",
        "mlp.fc11": "ffn_up",
        "mlp.fc12": "ffn_gate",
        "mlp.fc2": "ffn_down",
        "norm2": "layer_output_norm",
    },
    kv_heads="every",
    epsilon="layer_norm_eps",
    tied=True,
    defaults={
        "hidden_act": "silu",
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": 2048,
        "rope_theta": 1000.0,
        "type_vocab_size": 2,
    },
)
PUBLISHED_NOMIC = replace(  # the configuration of the authors' own code
    _NOMIC,
    own_names={
        "intermediate_size": "n_inner",
        "layer_norm_eps": "layer_norm_epsilon",
        "hidden_act": "activation_function",
        "rope_theta": "rotary_emb_base",
    },
    means={"swiglu": "silu"},
    required={
        "prenorm": False,
        "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None,
        "causal": False,
    },
)
NOMIC_MOE = replace(
    PUBLISHED_NOMIC,
    architecture="nomic-bert-moe",
    layer_tensors={
        "attn.Wqkv": "attn_qkv",
        "attn.out_proj": "attn_output",
        "norm1": "attn_output_norm",
        "mlp.fc1": "ffn_up",
        "mlp.fc2": "ffn_down",
        "mlp.router.layer": "ffn_gate_inp",
        "mlp.experts.mlp.w1": "ffn_up_exps",
        "mlp.experts.mlp.w2": "ffn_down_exps",
        "norm2": "layer_output_norm",
    },
    required=PUBLISHED_NOMIC.required
    | {"moe_every_n_layers": 2, "moe_normalize_expert_weights": False, "expert_choice_router": False},
    integers={"moe_every_n_layers": "moe_every_n_layers"},
    experts=HFExperts(ff="intermediate_size", n_used="moe_top_k", normalised=None, says_ff=False),
)
_JINA_BERT = replace(
    _BERT,
    architecture="jina-bert-v2",
    tensors={name: target for name, target in _BERT.tensors.items() if target != "position_embd"},
    layer_tensors=_BERT_ATTENTION
    | {
        "mlp.gated_layers": "ffn_up",
        "mlp.wo": "ffn_down",
        "mlp.layernorm": "layer_output_norm",
    },
    required={"is_decoder": False, "position_embedding_type": "alibi", "feed_forward_type": "geglu"},
    fused_gate=True,
)
_MODERN_BERT = HFClass(
    "modern-bert",
    tensors={
        "model.embeddings.tok_embeddings": "token_embd",
        "model.embeddings.norm": "token_embd_norm",
        "model.final_norm": "output_norm",
    },
    layer_tensors={
        "attn_norm": "attn_norm",
        "attn.Wqkv": "attn_qkv",
        "attn.Wo": "attn_output",
        "mlp_norm": "ffn_norm",
        "mlp.Wi": "ffn_up",
        "mlp.Wo": "ffn_down",
    },
    activation="hidden_activation",
    kv_heads="every",
    epsilon="norm_eps",
    tied=True,
    defaults={
        "hidden_activation": "gelu",
        "norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "rope_theta": 160000.0,
        "sliding_window": 128,
        "rope_local_base_freq": 10000.0,
        "sliding_window_pattern": 3,
    },
    own_names={
        "sliding_window": "local_attention",
        "sliding_window_pattern": "global_attn_every_n_layers",
        "rope_theta": "global_rope_theta",
        "rope_local_base_freq": "local_rope_theta",
    },
    windows=("sliding_window", "layer_types", "sliding_window_pattern"),
    fused_gate=True,
)

CLASSES: dict[str, HFClass] = {
    "BertModel": _BERT,
    "BertForMaskedLM": _BERT,
    "BertForSequenceClassification": replace(
        _BERT,
        tensors=_BERT.tensors | {"bert.pooler.dense": "cls", "bert.classifier": "cls.output"},
    ),
    "XLMRobertaModel": _ROBERTA,
    "XLMRobertaForMaskedLM": _ROBERTA,
    "XLMRobertaForSequenceClassification": _ROBERTA_SCORES,
    "RobertaModel": _ROBERTA,
    "RobertaForMaskedLM": _ROBERTA,
    "RobertaForSequenceClassification": _ROBERTA_SCORES,
    "CamembertModel": _ROBERTA,
    "ModernBertModel": _MODERN_BERT,
    "ModernBertForMaskedLM": _MODERN_BERT,
    "ModernBertForSequenceClassification": replace(
        _MODERN_BERT,
        tensors=_MODERN_BERT.tensors
        | {"model.head.dense": "cls", "model.head.norm": "cls.norm", "model.classifier": "cls.output"},
    ),
    "NomicBertModel": _NOMIC,
    "JinaBertModel": _JINA_BERT,
    "JinaBertForMaskedLM": _JINA_BERT,
    "JinaEmbeddingsV3Model": replace(
        _NOMIC,
        architecture="jina-bert-v3",
        layer_tensors={
            "mixer.Wqkv": "attn_qkv",
            "mixer.out_proj": "attn_output",
            "norm1": "attn_output_norm",
            "mlp.fc1": "ffn_up",
            "mlp.fc2": "ffn_down",
            "norm2": "layer_output_norm",
        },
        defaults={
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-5,
            "max_position_embeddings": 8194,
            "rope_theta": 20000.0,
            "type_vocab_size": 1,
        },
    ),
}
