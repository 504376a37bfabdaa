"""Parts of a config.json that few classes have: latent attention, AltUp, heads by window, gated streams."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any, ClassVar

from hotset.convert.hf_layers import ATTENTION_TYPES, checked_types
from hotset.convert.hf_values import integer, number, positive
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


class HFCompressed:
    """Sizes of DeepSeek V4's attention (model/config.py, Compressed), its streams and its tables of experts.

    block_sizes: tokens of a compressed block of keys of each layer, 0: there are none; overlaps: whether a
    block has tokens of the one before, and an indexer chooses among blocks.
    """

    def __init__(self, config: dict[str, Any], n_layer: int, head_dim: int) -> None:
        self.rank_q = integer(config, "q_lora_rank", high=1 << 20)
        self.n_embd, self.head_dim = integer(config, "hidden_size", high=1 << 20), head_dim
        self.n_head = integer(config, "num_attention_heads", high=1 << 14)
        if config.get("partial_rotary_factor") is None and config.get("qk_rope_head_dim") is not None:
            self.n_rot = integer(config, "qk_rope_head_dim", high=head_dim)
        else:  # which transformers heeds first
            factor = number(config, "partial_rotary_factor", 0.125)
            if not 0 < factor <= 1:
                raise FormatError(f"partial_rotary_factor in config.json is {factor:g}, not from 0 to 1")
            self.n_rot = int(head_dim * factor)
        self.n_groups = integer(config, "o_groups", high=1 << 14)
        self.rank_out = integer(config, "o_lora_rank", high=1 << 20)
        self.n_index_head = integer(config, "index_n_heads", high=1 << 14)
        self.index_dim = integer(config, "index_head_dim", high=1 << 14)
        self.top_k = integer(config, "index_topk")
        self.base = positive(config, "compress_rope_theta")
        self.n_streams = integer(config, "hc_mult", high=MAX_STREAMS)
        self.n_iterations = integer(config, "hc_sinkhorn_iters", high=1 << 10)
        self.eps = positive(config, "hc_eps")
        self.limit = positive(config, "swiglu_limit")
        self.n_hashed = integer(config, "num_hash_layers", min(3, n_layer), n_layer, 0)
        self.block_sizes, self.overlaps = _block_sizes(config, n_layer)

    @staticmethod
    def renamed(config: dict[str, Any]) -> dict[str, Any]:
        """config.json with the entries of the published one in place of those that transformers writes."""
        config = dict(config)
        kinds = config.pop("mlp_layer_types", None)
        if isinstance(kinds, list):
            n_hashed = kinds.count("hash_moe")
            if kinds != ["hash_moe"] * n_hashed + ["moe"] * (len(kinds) - n_hashed):
                raise UnsupportedModelError(
                    "mlp_layer_types in config.json must be hash_moe in the first layers, and then moe"
                )
            config["num_hash_layers"] = n_hashed
        ropes = config.get("rope_parameters")
        if isinstance(ropes, dict) and isinstance(main := ropes.get("main"), dict):
            of_blocks = ropes.get("compress")
            of_blocks = dict(of_blocks) if isinstance(of_blocks, dict) else {}
            if main.get("rope_type", "default") != "default":
                raise UnsupportedModelError("a scaling of the main rotation in config.json is not supported")
            for entry, rope in (("rope_theta", main), ("compress_rope_theta", of_blocks)):
                config[entry] = rope.get("rope_theta", config.get(entry))
            unread = ("rope_theta", "partial_rotary_factor", "attention_factor")
            config["rope_parameters"] = {k: v for k, v in of_blocks.items() if k not in unread}
        return config

    def keys(self) -> dict[str, Any]:
        """Keys of the GGUF file."""
        n_layer = len(self.block_sizes)
        return {
            "attention.q_lora_rank": self.rank_q,
            "attention.indexer.head_count": self.n_index_head,
            "attention.indexer.key_length": self.index_dim,
            "attention.indexer.top_k": self.top_k,
            "attention.output_group_count": self.n_groups,
            "attention.output_lora_rank": self.rank_out,
            "attention.compress_ratios": self.block_sizes,
            "attention.compress_rope_freq_base": self.base,
            "hyper_connection.count": self.n_streams,
            "hyper_connection.sinkhorn_iterations": self.n_iterations,
            "hyper_connection.epsilon": self.eps,
            "hash_layer_count": self.n_hashed,
            "swiglu_clamp_exp": [self.limit] * n_layer,
            "swiglu_clamp_shexp": [self.limit] * n_layer,
        }

    def shapes(self, layer: int, table: tuple[int, int]) -> dict[str, tuple[int, ...]]:
        """Of the tensors that only such models have, outermost first. table: tokens, and experts of one."""
        d, dim, n, streams = self.n_embd, self.head_dim, self.n_head, self.n_streams
        size, of_index = self.block_sizes[layer], 2 * self.index_dim
        mix, of_blocks = streams * (streams + 2), (2 if self.overlaps[layer] else 1) * dim
        shapes: dict[str, tuple[int, ...]] = {
            "attn_q_a": (self.rank_q, d),
            "attn_q_a_norm": (self.rank_q,),
            "attn_q_b": (n * dim, self.rank_q),
            "attn_kv": (dim, d),
            "attn_kv_a_norm": (dim,),
            "attn_output_a": (self.n_groups * self.rank_out, n * dim // self.n_groups),
            "attn_output_b": (d, self.n_groups * self.rank_out),
            "ffn_gate_tid2eid": table,
            **dict.fromkeys(("hc_attn_fn", "hc_ffn_fn"), (mix, streams * d)),
            **dict.fromkeys(("hc_attn_base", "hc_ffn_base"), (mix,)),
            **dict.fromkeys(("hc_attn_scale", "hc_ffn_scale"), (3,)),
            "output_hc_fn": (streams, streams * d),
            "output_hc_base": (streams,),
            "output_hc_scale": (1,),
        }
        if size:
            shapes |= dict.fromkeys(("attn_compressor_kv", "attn_compressor_gate"), (of_blocks, d))
            shapes |= {"attn_compressor_ape": (size, of_blocks), "attn_compressor_norm": (dim,)}
        if self.overlaps[layer]:
            shapes |= dict.fromkeys(("indexer_compressor_kv", "indexer_compressor_gate"), (of_index, d))
            shapes |= {
                "indexer_compressor_ape": (size, of_index),
                "indexer_compressor_norm": (self.index_dim,),
                "indexer.attn_q_b": (self.n_index_head * self.index_dim, self.rank_q),
                "indexer.proj": (self.n_index_head, d),
            }
        return shapes


def _block_sizes(config: dict[str, Any], n_layer: int) -> tuple[list[int], list[bool]]:
    """See HFCompressed."""
    ratios = config.get("compress_ratios")
    if ratios is not None:  # as published, perhaps also of layers behind the model's
        known = isinstance(ratios, list) and all(type(n) is int and n in (0, 4, 128) for n in ratios)
        if not known or len(ratios) < n_layer:
            raise FormatError("compress_ratios in config.json must hold 0, 4 or 128 for each layer")
        return ratios[:n_layer], [ratio == 4 for ratio in ratios[:n_layer]]
    csa, hca = "compressed_sparse_attention", "heavily_compressed_attention"
    rates = config.get("compress_rates") or {}
    if not isinstance(rates, dict):
        raise FormatError("compress_rates in config.json must be an object")
    sizes = {
        "sliding_attention": 0,
        csa: integer(rates, csa, integer(config, "compress_rate_csa", 4)),
        hca: integer(rates, hca, integer(config, "compress_rate_hca", 128)),
    }
    types = config.get("layer_types")
    if types is None:  # as transformers' class has it
        types = [hca if i < 2 or i % 2 == 0 else csa for i in range(n_layer)]
    types = checked_types(types, n_layer, tuple(sizes))
    return [sizes[kind] for kind in types], [kind == csa for kind in types]


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
