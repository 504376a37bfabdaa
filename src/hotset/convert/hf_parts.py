"""Parts of a config.json that few classes have: latent attention, AltUp, heads by window, gated streams."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any, ClassVar

from hotset.convert.hf_layers import ATTENTION_TYPES, checked_types
from hotset.convert.hf_values import integer
from hotset.errors import FormatError, UnsupportedModelError
from hotset.model.keys import MAX_CONV_KERNEL, MAX_HEAD_DIM, MAX_NGRAM, MAX_NGRAM_HEADS, MAX_STREAMS


class HFLatent:
    """Sizes of latent attention (model/config.py, Latent): ranks, the channels of a head of q and k that are
    rotated and those that are not, the channels of v."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.rank = integer(config, "kv_lora_rank", high=1 << 20)
        self.rank_q = 0  # null: queries come from the input
        if config.get("q_lora_rank") is not None:
            self.rank_q = integer(config, "q_lora_rank", high=1 << 20)
        self.n_own = integer(config, "qk_nope_head_dim", high=1 << 12)
        self.n_rot = integer(config, "qk_rope_head_dim", high=1 << 12)
        self.n_value = integer(config, "v_head_dim", high=1 << 12)
        self.plain = config.get("architectures") == ["PLMForCausalLM"]  # keys as of the first deepseek2 files

    def keys(self) -> dict[str, Any]:
        """Keys of the file, as llama.cpp's converter writes them: heads are those of the latent vector, or
        what is made of it."""
        if self.plain:
            return {
                "attention.key_length": self.n_own + self.n_rot,
                "attention.value_length": self.n_value,
                "attention.kv_lora_rank": self.rank,
            }
        return {
            "attention.head_count_kv": 1,
            "attention.key_length": self.rank + self.n_rot,
            "attention.value_length": self.rank,
            "attention.key_length_mla": self.n_own + self.n_rot,
            "attention.value_length_mla": self.n_value,
            "attention.kv_lora_rank": self.rank,
        } | ({"attention.q_lora_rank": self.rank_q} if self.rank_q else {})


class HFAltUp:
    """Sizes of Gemma 3n (model/config.py, AltUp): streams, the width of a layer's embedding of a token and
    its tokens, the rank of the branch beside attention, layers without keys and values of their own."""

    def __init__(self, config: dict[str, Any], n_layer: int) -> None:
        self.n_streams = integer(config, "altup_num_inputs", high=1 << 10)
        self.width = integer(config, "hidden_size_per_layer_input", high=1 << 16)
        self.n_vocab = integer(config, "vocab_size_per_layer_input", high=1 << 24)
        self.rank = integer(config, "laurel_rank", high=1 << 16)
        self.n_shared = integer(config, "num_kv_shared_layers", high=n_layer - 1, low=0)
        pattern = config.get("activation_sparsity_pattern")
        if pattern is None:  # transformers' class has it so
            n_sparse = 10 if n_layer > 10 else 0
            pattern = [0.95] * n_sparse + [0.0] * (n_layer - n_sparse)
        if not isinstance(pattern, list) or not all(type(v) is float and 0 <= v < 1 for v in pattern):
            raise FormatError("activation_sparsity_pattern in config.json must hold numbers from 0 to 1")
        self.multipliers = [NormalDist().inv_cdf(v) if v else -math.inf for v in pattern]

    def keys(self) -> dict[str, Any]:
        """Keys of the GGUF file."""
        return {
            "altup.num_inputs": self.n_streams,
            "altup.active_idx": 0,
            "embedding_length_per_layer_input": self.width,
            "attention.shared_kv_layers": self.n_shared,
            "activation_sparsity_scale": self.multipliers,
        }


class HFGatedStreams:
    """Sizes of Qwen4-Exp (model/config.py, GatedStreams and Ngrams): streams, the rank of their gates, heads
    of the indexer and the channels of one, tokens that it chooses and those of a block, embeddings of
    n-grams (None: no layer has them)."""

    def __init__(self, config: dict[str, Any], n_layer: int) -> None:
        self.n = integer(config, "hc_count", high=MAX_STREAMS, low=2)
        self.rank = integer(config, "hc_lowrank", high=1 << 20)
        self.n_index_heads = integer(config, "indexer_n_heads", high=1 << 14)
        self.index_dim = integer(config, "indexer_head_dim", high=1 << 14)
        self.budget, self.block = integer(config, "indexer_budget"), integer(config, "indexer_compress_ratio")
        layers = config.get("ple_layer_ids")
        self.ngrams = HFNgrams(config, layers, n_layer) if layers else None
        if isinstance(types := config.get("layer_types"), list):  # transformers writes what it makes of them
            config["layer_types"] = ["full_attention" if t == "indexed_attention" else t for t in types]

    def keys(self) -> dict[str, Any]:
        """Keys of the GGUF file."""
        keys = {
            "hyper_connection.count": self.n,
            "hyper_connection.low_rank": self.rank,
            "attention.indexer.head_count": self.n_index_heads,
            "attention.indexer.key_length": self.index_dim,
            "attention.indexer.top_k": self.budget,
        }
        return keys | ({} if self.ngrams is None else self.ngrams.keys())

    def block_keys(self, keys: dict[str, Any]) -> dict[str, Any]:
        """Tokens of a block, of the layers that attend. keys: those that say which these are."""
        recurrent = keys["attention.recurrent_layers"]
        return {"attention.compress_ratios": [0 if own else self.block for own in recurrent]}

    def shapes(self, d: int) -> dict[str, tuple[int, ...]]:
        """Of the tensors that only such models have, of the width d."""
        width, rank = self.n * d, self.rank
        shapes: dict[str, tuple[int, ...]] = {
            "q_proj": (self.n_index_heads * self.index_dim, d),
            "k_proj": (self.index_dim, d),
            **dict.fromkeys(("q_norm", "k_norm"), (self.index_dim,)),
        }
        for stem in ("hc_attn", "hc_ffn", "output_hc"):
            shapes |= {f"{stem}_norm": (width,), f"{stem}_down": (rank, width), f"{stem}_up": (width, rank)}
            shapes |= {} if stem == "output_hc" else {f"{stem}_inject": (self.n, width)}
        if (ngrams := self.ngrams) is not None:
            shapes |= {
                "per_layer_token_embd": (ngrams.n_parts, -1, ngrams.width),
                "ple_key": (width, ngrams.width * ngrams.n_heads),
                "ple_value": (d, ngrams.width * ngrams.n_heads),
                "ple_conv1d": (width, ngrams.kernel),
                **dict.fromkeys(("ple_norm_key", "ple_norm_query", "ple_norm_conv"), (width,)),
            }
        return shapes


class HFNgrams:
    """Embeddings of n-grams: the layer that adds them, the length of the longest, heads of all lengths, the
    width of one's embedding, tensors that their rows are split into, the kernel of their convolution, the
    token that ends a text.

    constants: tensors of the layer that are keys of the file.
    """

    constants: ClassVar = {
        "ple.ple_embedding.layer_multipliers": "ple.layer_multipliers",
        "ple.ple_embedding.ngram_heads_offsets": "ple.head_offsets",
        "ple.ple_embedding.ngram_heads_vocab_sizes": "ple.head_vocab_sizes",
    }

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
        # Of several llama.cpp's converter takes the last.
        first = eos[0] if isinstance(eos, list) and eos else eos
        self.eos = integer({"eos_token_id": first}, "eos_token_id", high=1 << 24, low=0)
        self.image = None
        if config.get("image_token_id") is not None:
            self.image = integer(config, "image_token_id", high=1 << 24, low=0)

    def keys(self) -> dict[str, Any]:
        """Keys of the GGUF file, but for the constants."""
        return {
            "ple.layers": [self.layer],
            "ple.ngram_size": self.n,
            "ple.heads_per_ngram": self.per_length,
            "ple.conv_kernel": self.kernel,
            "ple.eos_token_id": self.eos,
            "embedding_length_per_layer_input": self.width,
        } | ({} if self.image is None else {"ple.image_token_id": self.image})


class HFWindowHeads:
    """Gemma 4's layers: heads of keys and values and the channels of one, of layers with a window and of the
    others; which take keys for values; the width of the embedding that each layer adds and its tokens; how
    many layers at the end attend the keys and values of others, whose FFNs may be twice as wide."""

    def __init__(self, config: dict[str, Any], n_layer: int, n_head: int) -> None:
        if config.get("use_bidirectional_attention") not in (None, "vision", False):
            raise UnsupportedModelError("use_bidirectional_attention in config.json is not supported")
        types = config.get("layer_types")
        if types is None:
            types = ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(n_layer)]
            types[-1] = "full_attention"
        types = checked_types(types, n_layer, ATTENTION_TYPES)
        self.windowed = [kind == "sliding_attention" for kind in types]
        of_layers = config.get("per_layer_config")
        of_layers = of_layers if isinstance(of_layers, dict) else {}
        self.key_is_value = config.get("attention_k_eq_v") is True
        self.dim = integer(config, "head_dim", high=MAX_HEAD_DIM)
        first_full = next((i for i, windowed in enumerate(self.windowed) if not windowed), 0)
        own = of_layers.get(str(first_full))
        own = own if isinstance(own, dict) else {}
        # transformers writes what differs layer by layer; checkpoints have two entries for it.
        self.dim_full = integer(
            config | own if own else config, "head_dim" if own else "global_head_dim", 512
        )
        self.n_kv = integer(config, "num_key_value_heads", high=n_head)
        self.n_kv_full = integer(own, "num_key_value_heads", self.n_kv)
        if not own and self.key_is_value:
            self.n_kv_full = integer(config, "num_global_key_value_heads", self.n_kv)
        self.width = integer(config, "hidden_size_per_layer_input", high=1 << 16, low=0)
        self.n_vocab = integer(config, "vocab_size_per_layer_input", high=1 << 24)
        self.n_shared = integer(config, "num_kv_shared_layers", high=n_layer - 1, low=0)
        self.doubles_ff = config.get("use_double_wide_mlp") is True

    def heads_of(self, layer: int) -> tuple[int, int]:
        """Heads of keys and values, and the channels of one."""
        return (self.n_kv, self.dim) if self.windowed[layer] else (self.n_kv_full, self.dim_full)

    def keys(self) -> dict[str, Any]:
        """Keys of the GGUF file."""
        n_kv = [self.heads_of(i)[0] for i in range(len(self.windowed))]
        return {
            "attention.head_count_kv": n_kv if len(set(n_kv)) > 1 else n_kv[0],
            "attention.key_length": self.dim_full,
            "attention.value_length": self.dim_full,
            "attention.key_length_swa": self.dim,
            "attention.value_length_swa": self.dim,
            "rope.dimension_count": self.dim_full,
            "rope.dimension_count_swa": self.dim,
            "attention.sliding_window_pattern": self.windowed,
            "attention.shared_kv_layers": self.n_shared,
            "embedding_length_per_layer_input": self.width,
        }
