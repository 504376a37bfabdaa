"""Parts of a config.json that few classes have: latent attention, AltUp, heads by window."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

from hotset.convert.hf_layers import ATTENTION_TYPES, checked_types
from hotset.convert.hf_values import integer
from hotset.errors import FormatError, UnsupportedModelError
from hotset.model.keys import MAX_HEAD_DIM


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
