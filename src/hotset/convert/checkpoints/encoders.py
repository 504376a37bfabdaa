"""Encoders in the line of BERT: embedding and reranking models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from hotset.convert.checkpoints.classes import HFClass, HFExperts, every_head
from hotset.convert.hf_part import Facts, FamilyPart
from hotset.convert.hf_values import integer, number


class PaddedPositions(FamilyPart):
    """RoBERTa, whose first learned positions, up to pad_token_id, belong to no token."""

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        facts.n_unused_positions = 1 + int(number(facts.raw, "pad_token_id"))
        entry = "max_position_embeddings"
        facts.n_ctx = integer({entry: facts.n_ctx - facts.n_unused_positions}, entry)


class NomicExperts(FamilyPart):
    """The matrices of all experts, one below the other and stored by input."""

    def learn(self, tensors: Mapping[str, np.ndarray]) -> None:
        self.tensors = tensors

    def reads(self, name: str) -> bool:
        """Return False for a bias of zeros that all experts share."""
        values = self.tensors.get(name) if name.endswith(".mlp.experts.bias") else None
        return values is None or bool(values.any())

    def split(self, values: np.ndarray, i: int, stems: list[str]) -> np.ndarray | None:
        if not stems[0].endswith("_exps") or values.ndim != 2:
            return None
        parts = values.reshape(-1, self.facts.n_ff_expert, self.facts.n_embd)
        return parts.swapaxes(1, 2) if stems[0] == "ffn_down_exps" else parts


def _nomic(hf_class: HFClass, raw: dict[str, Any]) -> HFClass:
    """Return the class of transformers, or the class of the authors' own code."""
    if "activation_function" not in raw:
        return hf_class
    return _NOMIC_MOE if raw.get("moe_every_n_layers") else _PUBLISHED_NOMIC


_BERT = HFClass(
    "bert",
    layers="bert.encoder.layer",
    kv_heads=every_head,
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
    layers="roberta.encoder.layer",
    defaults=_BERT.defaults | {"pad_token_id": 1},
    parts=(PaddedPositions,),
)
_ROBERTA_SCORES = replace(
    _ROBERTA,
    tensors={"roberta.classifier.dense": "cls", "roberta.classifier.out_proj": "cls.output"},
)
_NOMIC = HFClass(
    "nomic-bert",
    layers="encoder.layers",
    kv_heads=every_head,
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
_PUBLISHED_NOMIC = replace(  # the configuration of the authors' own code
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
_NOMIC_MOE = replace(
    _PUBLISHED_NOMIC,
    architecture="nomic-bert-moe",
    required=_PUBLISHED_NOMIC.required
    | {"moe_every_n_layers": 2, "moe_normalize_expert_weights": False, "expert_choice_router": False},
    integers={"moe_every_n_layers": "moe_every_n_layers"},
    parts=(NomicExperts,),
    experts=HFExperts(ff="intermediate_size", n_used="moe_top_k", normalised=None, says_ff=False),
)
_JINA_BERT = replace(
    _BERT,
    architecture="jina-bert-v2",
    required={"is_decoder": False, "position_embedding_type": "alibi", "feed_forward_type": "geglu"},
    fused_gate=True,
)
_MODERN_BERT = HFClass(
    "modern-bert",
    activation="hidden_activation",
    kv_heads=every_head,
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
_EUROBERT = HFClass(
    "eurobert",
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "rope_theta": 10000.0,
    },
)

CLASSES: dict[str, HFClass] = {
    "BertModel": _BERT,
    "BertForMaskedLM": _BERT,
    "BertForSequenceClassification": replace(
        _BERT,
        tensors={"bert.pooler.dense": "cls", "bert.classifier": "cls.output"},
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
        tensors={"model.head.dense": "cls", "model.head.norm": "cls.norm", "model.classifier": "cls.output"},
    ),
    "EuroBertModel": _EUROBERT,
    "EuroBertForMaskedLM": _EUROBERT,
    "NomicBertModel": replace(_NOMIC, variant=_nomic),
    "JinaBertModel": _JINA_BERT,
    "JinaBertForMaskedLM": _JINA_BERT,
    "JinaEmbeddingsV3Model": replace(
        _NOMIC,
        architecture="jina-bert-v3",
        layer_tensors={"mixer.out_proj": "attn_output"},
        defaults={
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-5,
            "max_position_embeddings": 8194,
            "rope_theta": 20000.0,
            "type_vocab_size": 1,
        },
    ),
}
