"""Qwen from the first to 3.5, and the text part of its vision models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from hotset.convert.checkpoints.classes import HFClass, HFExperts
from hotset.convert.checkpoints.names import (
    LLAMA_DEFAULTS,
    POST_NORM,
    SPARSE_LM,
)
from hotset.convert.hf_mixers import DeltaNetPart, GroupedDeltaNet
from hotset.convert.hf_part import Facts, FamilyPart
from hotset.convert.hf_values import integer
from hotset.errors import FormatError, UnsupportedModelError
from hotset.model.keys import MAX_CONV_KERNEL, MAX_NGRAM, MAX_NGRAM_HEADS, MAX_STREAMS


class ExpertsByInput(FamilyPart):
    """Qwen3-VL: matrices of all experts may be stored by input; the shapes of non-square ones show it."""

    by_input = False

    def learn(self, tensors: Mapping[str, np.ndarray]) -> None:
        n, d = self.facts.n_ff_expert, self.facts.n_embd
        for stem, shape in (("gate_up_proj", (d, 2 * n)), ("down_proj", (n, d))):
            found = (values for name, values in tensors.items() if name.endswith(f".mlp.experts.{stem}"))
            if shape[0] != shape[1] and any(values.shape[1:] == shape for values in found):
                self.by_input = True

    def split(self, values: np.ndarray, i: int, stems: list[str]) -> np.ndarray | None:
        if not self.by_input or not stems[0].endswith("_exps") or values.ndim != 3:
            return None
        return np.split(values.swapaxes(1, 2), len(stems), axis=1)[i]


class DeepStack(FamilyPart):
    """Qwen3-VL: the text model's first layers read features of an image, as many as the encoder has."""

    def keys(self) -> dict[str, Any]:
        vision = self.facts.raw.get("vision_config")
        return {"n_deepstack_layers": len(deep_layers(vision)) if isinstance(vision, dict) else 0}


def deep_layers(vision: Mapping[str, Any], n_layer: int = 1 << 10) -> list[int]:
    """Return the layers of Qwen3-VL's encoder whose features the text model's first layers read.

    vision: vision_config. n_layer: of the encoder. Raises UnsupportedModelError if the layers do not rise.
    """
    found = vision.get("deepstack_visual_indexes")
    if found is None:  # transformers' default
        found = [8, 16, 24]
    if not isinstance(found, list) or sorted({i for i in found if i in range(n_layer)}) != found:
        raise UnsupportedModelError("deepstack_visual_indexes in config.json must be layers in rising order")
    return found


class HFNgrams:
    """Embeddings of n-grams.

    Fields hold the layer that adds them, the longest length, heads of all lengths, and the width of one
    head's embedding. Others hold the number of tensors with its rows, the kernel of the convolution, and the
    token that ends a text.
    """

    def __init__(self, config: dict[str, Any], layers: Any, n_layer: int) -> None:
        if not isinstance(layers, list) or len(layers) != 1:
            raise UnsupportedModelError("ple_layer_ids in config.json must name one layer, or none")
        self.layer = integer({"ple_layer_ids": layers[0]}, "ple_layer_ids", high=n_layer) - 1
        self.n = integer(config, "ngram_size", high=MAX_NGRAM, low=2)
        self.per_length = integer(config, "heads_per_ngram", high=MAX_NGRAM_HEADS // (self.n - 1))
        self.n_heads = self.per_length * (self.n - 1)
        width = integer(config, "ple_embed_dim", config.get("hidden_size"), 1 << 20)
        if width % self.n_heads:
            raise FormatError(
                f"ple_embed_dim in config.json is {width}, not a multiple of {self.n_heads} heads"
            )
        self.width = width // self.n_heads
        self.n_parts = integer(config, "split_ngram_parts", high=1 << 16)
        self.kernel = integer(config, "ple_conv_kernel_size", high=MAX_CONV_KERNEL)
        eos = config.get("eos_token_id")
        # llama.cpp's converter uses the last of several.
        first = eos[0] if isinstance(eos, list) and eos else eos
        self.eos = integer({"eos_token_id": first}, "eos_token_id", high=1 << 24, low=0)
        self.image = None
        if config.get("image_token_id") is not None:
            self.image = integer(config, "image_token_id", high=1 << 24, low=0)

    def keys(self) -> dict[str, Any]:
        """Return the keys of the GGUF file, except the constants."""
        return {
            "ple.layers": [self.layer],
            "ple.ngram_size": self.n,
            "ple.heads_per_ngram": self.per_length,
            "ple.conv_kernel": self.kernel,
            "ple.eos_token_id": self.eos,
            "embedding_length_per_layer_input": self.width,
        } | ({} if self.image is None else {"ple.image_token_id": self.image})


class GatedStreamsPart(DeltaNetPart):
    """Qwen4-Exp (model/config.py, GatedStreams and Ngrams).

    Its facts are the number of streams, the rank of their gates, the indexer's heads and their channels, the
    tokens that the indexer chooses, the tokens of a block, and embeddings of n-grams (None: no layer has
    them).
    """

    hashes: ClassVar = {
        "ple.ple_embedding.layer_multipliers": "ple.layer_multipliers",
        "ple.ple_embedding.ngram_heads_offsets": "ple.head_offsets",
        "ple.ple_embedding.ngram_heads_vocab_sizes": "ple.head_vocab_sizes",
    }
    constants: ClassVar = tuple(hashes)

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        config = facts.raw
        self.n = integer(config, "hc_count", high=MAX_STREAMS, low=2)
        self.rank = integer(config, "hc_lowrank", high=1 << 20)
        self.n_index_heads = integer(config, "indexer_n_heads", high=1 << 14)
        self.index_dim = integer(config, "indexer_head_dim", high=1 << 14)
        self.budget, self.block = integer(config, "indexer_budget"), integer(config, "indexer_compress_ratio")
        layers = config.get("ple_layer_ids")
        self.ngrams = HFNgrams(config, layers, facts.n_layer) if layers else None
        if isinstance(types := config.get("layer_types"), list):  # as transformers writes them
            config["layer_types"] = ["full_attention" if t == "indexed_attention" else t for t in types]

    def sizes(self) -> dict[str, Any]:
        keys = {
            "hyper_connection.count": self.n,
            "hyper_connection.low_rank": self.rank,
            "attention.indexer.head_count": self.n_index_heads,
            "attention.indexer.key_length": self.index_dim,
            "attention.indexer.top_k": self.budget,
        }
        return keys | ({} if self.ngrams is None else self.ngrams.keys())

    def keys(self) -> dict[str, Any]:
        keys = super().keys()
        blocks = [0 if own else self.block for own in keys["attention.recurrent_layers"]]
        return keys | {"attention.compress_ratios": blocks}

    def learn(self, tensors: Mapping[str, np.ndarray]) -> None:
        self.tensors = tensors

    def tensor_keys(self, architecture: str) -> dict[str, Any]:
        """Return the constants of the hashes of n-grams, whole numbers."""
        found: dict[str, Any] = {}
        if self.ngrams is None:
            return found
        layer = self.ngrams.layer
        for stem, key in self.hashes.items():
            values = self.tensors.get(f"{self.facts.layers}.{layer}.{stem}", np.empty(0))
            if values.dtype != np.int64 or values.ndim != 1 or (values < 0).any():
                raise FormatError(
                    f"the checkpoint must have whole numbers in the tensor {stem} of layer {layer}"
                )
            found[f"{architecture}.{key}"] = values.astype("<u8")
        return found

    def shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        d, dim = self.facts.n_embd, self.index_dim
        norms = dict.fromkeys(("indexer.q_norm", "indexer.k_norm"), (dim,))
        return norms | {"indexer.q_proj": (self.n_index_heads * dim, d), "indexer.k_proj": (dim, d)}

    def n_parts(self, stem: str) -> int | None:
        return self.ngrams.n_parts if self.ngrams and stem == "per_layer_token_embd" else None

    def split(self, values: np.ndarray, i: int, stems: list[str]) -> np.ndarray | None:
        """Split the rows of queries and keys of the indexer, which has one key."""
        if stems != ["indexer.q_proj", "indexer.k_proj"]:
            return None
        n_rows = (self.n_index_heads + 1) * self.index_dim
        if values.ndim and len(values) != n_rows:
            raise FormatError(f"the checkpoint has {len(values)} rows of the indexer, not {n_rows}")
        return np.split(values, [self.n_index_heads * self.index_dim])[i]


_QWEN_DEFAULTS: dict[str, Any] = LLAMA_DEFAULTS | {
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
}
_DELTA: dict[str, Any] = {
    "layer_tensors": POST_NORM,
    "norms_less_one": True,
    "partial": True,
    "parts": (DeltaNetPart,),
}
_DELTA_DEFAULTS: dict[str, Any] = {
    **LLAMA_DEFAULTS,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_DELTA_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 512,
}
_QWEN4 = HFClass(
    "qwen4exp",
    **_DELTA
    | {
        "layer_tensors": {
            **POST_NORM,
            "self_attn.indexer.index_qk_proj": "indexer.q_proj indexer.k_proj",
            "self_attn.indexer.q_layernorm": "indexer.q_norm",
            "self_attn.indexer.k_layernorm": "indexer.k_norm",
        },
        "parts": (GatedStreamsPart,),
    },
    ff="moe_intermediate_size",
    defaults=_DELTA_DEFAULTS
    | _DELTA_EXPERTS
    | {"num_experts_per_tok": 10, "hc_count": 4, "hc_lowrank": 320, "ngram_size": 3, "heads_per_ngram": 8}
    | {"ple_conv_kernel_size": 4, "split_ngram_parts": 512, "output_gate_type": "silu"},
    # llama.cpp always computes these values, even if a file has others.
    required={"output_gate_type": "sigmoid", "norm_topk_prob": True, "indexer_kv_heads": 1},
    sections=True,
    sees=True,
    experts=HFExperts(normalised=None, ff_shared="shared_expert_intermediate_size"),
)
_ALL_EXPERTS: dict[str, Any] = {"decoder_sparse_step": 1, "mlp_only_layers": []}  # in every layer
_QWEN2VL = HFClass(
    "qwen2vl",
    defaults=_QWEN_DEFAULTS
    | {
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 8,
        "max_window_layers": 80,
        "rope_theta": 1e6,
    },
    windows=("sliding_window", "use_sliding_window", "layer_types", "max_window_layers"),
    sections=True,
    sees=True,
)

_QWEN2: dict[str, Any] = {
    "defaults": _QWEN_DEFAULTS | {"num_key_value_heads": 32, "max_window_layers": 28},
    "windows": ("sliding_window", "use_sliding_window", "layer_types", "max_window_layers"),
}

CLASSES: dict[str, HFClass] = {
    "Qwen2ForCausalLM": HFClass("qwen2", **_QWEN2),
    "SparseQwen2ForCausalLM": HFClass("qwen2", **_QWEN2, **SPARSE_LM),
    "Qwen2MoeForCausalLM": HFClass(
        "qwen2moe",
        defaults=_QWEN_DEFAULTS
        | {"num_key_value_heads": 16, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632}
        | {"num_experts": 60, "num_experts_per_tok": 4},
        windows=("sliding_window", "use_sliding_window", "layer_types"),
        required=_ALL_EXPERTS | {"qkv_bias": True},
        experts=HFExperts(ff_shared="shared_expert_intermediate_size"),
    ),
    "Qwen3ForCausalLM": HFClass(
        "qwen3",
        defaults=_QWEN_DEFAULTS | {"num_key_value_heads": 32, "head_dim": 128, "max_window_layers": 28},
        windows=("sliding_window", "use_sliding_window", "layer_types", "max_window_layers"),
    ),
    "Qwen3MoeForCausalLM": HFClass(
        "qwen3moe",
        defaults=_QWEN_DEFAULTS
        | {"num_key_value_heads": 4, "moe_intermediate_size": 768, "num_experts": 128}
        | {"num_experts_per_tok": 8},
        windows=("sliding_window", "use_sliding_window"),
        required=_ALL_EXPERTS,
        experts=HFExperts(),
    ),
    "Qwen2VLForConditionalGeneration": _QWEN2VL,
    "Qwen2_5_VLForConditionalGeneration": _QWEN2VL,
    "Qwen3VLForConditionalGeneration": HFClass(
        "qwen3vl",
        defaults=LLAMA_DEFAULTS
        | {"max_position_embeddings": 128000, "num_key_value_heads": 32, "head_dim": 128, "rope_theta": 5e5},
        sections=True,
        sees=True,
        parts=(DeepStack,),
    ),
    "Qwen3VLMoeForConditionalGeneration": HFClass(
        "qwen3vlmoe",
        defaults=LLAMA_DEFAULTS
        | {
            "max_position_embeddings": 128000,
            "num_key_value_heads": 16,
            "rope_theta": 5e5,
            "moe_intermediate_size": 1408,
            "num_experts": 60,
            "num_experts_per_tok": 4,
        },
        required=_ALL_EXPERTS,
        sections=True,
        sees=True,
        experts=HFExperts(normalised=None),
        parts=(DeepStack, ExpertsByInput),
    ),
    "Qwen3NextForCausalLM": HFClass(
        "qwen3next",
        **_DELTA | {"parts": (GroupedDeltaNet,)},
        ff="moe_intermediate_size",
        defaults=_DELTA_DEFAULTS | _DELTA_EXPERTS | {"num_experts_per_tok": 10, "norm_topk_prob": True},
        required=_ALL_EXPERTS,
        experts=HFExperts(ff_shared="shared_expert_intermediate_size"),
    ),
    "Qwen3_5ForCausalLM": HFClass(
        "qwen35",
        **_DELTA,
        defaults=_DELTA_DEFAULTS | {"num_key_value_heads": 4},
        sections=True,
    ),
    "Qwen3_5MoeForCausalLM": HFClass(
        "qwen35moe",
        **_DELTA,
        ff="moe_intermediate_size",
        defaults=_DELTA_DEFAULTS | _DELTA_EXPERTS | {"num_experts": 256, "num_experts_per_tok": 8},
        sections=True,
        experts=HFExperts(normalised=None, ff_shared="shared_expert_intermediate_size"),
    ),
    "Qwen4ExpForCausalLM": _QWEN4,
    "Qwen4ExpForConditionalGeneration": _QWEN4,
    "QWenLMHeadModel": HFClass(  # beyond seq_length it is another function
        "qwen",
        layers="transformer.h",
        activation=None,
        epsilon="layer_norm_epsilon",
        own_names={
            "max_position_embeddings": "seq_length",
            "head_dim": "kv_channels",
            "rope_theta": "rotary_emb_base",
            "partial_rotary_factor": "rotary_pct",
        },
        required={"no_bias": True, "scale_attn_weights": True},
    ),
}
