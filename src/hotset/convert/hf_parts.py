"""Parts of attention that few families have: latent and compressed attention, AltUp, heads by window."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import numpy as np

from hotset.convert.hf_part import Facts, FamilyPart
from hotset.convert.hf_rope import HFRope
from hotset.convert.hf_values import ATTENTION_TYPES, checked_types, integer, number, positive
from hotset.convert.sources import Origin, Source, Stack, Table
from hotset.errors import FormatError, UnsupportedModelError
from hotset.model.keys import LLAMA3_FACTORS, MAX_HEAD_DIM, MAX_STREAMS, YARN_LOG_MULTIPLIER
from hotset.parameters import shown


class LatentPart(FamilyPart):
    """Latent attention (model/config.py, Latent).

    Its facts are the ranks, the rotated and other channels of a head of q and k, and the channels of v.
    """

    adapts = False

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        config = facts.raw
        self.rank = integer(config, "kv_lora_rank", high=1 << 20)
        self.rank_q = 0  # null: queries come from the input
        if config.get("q_lora_rank") is not None:
            self.rank_q = integer(config, "q_lora_rank", high=1 << 20)
        self.n_own = integer(config, "qk_nope_head_dim", high=1 << 12)
        self.n_rot = integer(config, "qk_rope_head_dim", high=1 << 12)
        self.n_value = integer(config, "v_head_dim", high=1 << 12)
        facts.head_dim, facts.n_rot = self.n_own + self.n_rot, self.n_rot

    def sizes(self) -> dict[str, Any]:
        """Return keys as llama.cpp's converter writes them, in which a head is the latent vector."""
        return {
            "attention.head_count_kv": 1,
            "attention.key_length": self.rank + self.n_rot,
            "attention.value_length": self.rank,
            "attention.key_length_mla": self.n_own + self.n_rot,
            "attention.value_length_mla": self.n_value,
            "attention.kv_lora_rank": self.rank,
        } | ({"attention.q_lora_rank": self.rank_q} if self.rank_q else {})

    def split(self, values: np.ndarray, i: int, stems: list[str]) -> np.ndarray | None:
        return values if "attn_k_b" in stems else None

    def source(self, values: np.ndarray, stem: str, layer: int) -> Source | None:
        """Split the matrix that makes keys and values from a latent vector, head by head.

        Values are stored by output, keys by input, since engines multiply the query with them.
        """
        if stem not in ("attn_k_b", "attn_v_b"):
            return None
        if values.shape[1:] != (self.rank,):
            raise ValueError(f"a latent vector of {self.rank}")
        heads = values.reshape(self.facts.n_head, self.n_own + self.n_value, self.rank)
        if stem == "attn_k_b":
            return Stack(tuple(Origin(head[: self.n_own], transposed=True) for head in heads))
        return Stack(tuple(Origin(head[self.n_own :]) for head in heads))


class LatentRope(HFRope):
    """The rotation of latent attention, in which YaRN's mscale_all_dim also scales the scores."""

    def own_keys(self, rope: dict[str, Any]) -> dict[str, Any]:
        if rope["rope_type"] not in ("default", "yarn") and rope.get("mscale_all_dim"):
            raise UnsupportedModelError("mscale_all_dim in config.json is supported only with yarn")
        return {}

    def magnitude_keys(self, rope: dict[str, Any], log_factor: float) -> dict[str, Any]:
        keys: dict[str, Any] = {}
        if rope.get("mscale_all_dim"):  # the first key marks the file as having it
            keys[YARN_LOG_MULTIPLIER] = 0.1 * number(rope, "mscale_all_dim")
            keys["rope.scaling.yarn_attn_factor"] = log_factor + 1
        return keys | super().magnitude_keys(rope, log_factor)


class PlainLatent(LatentPart):
    """The latent attention of PLM, with the keys of early deepseek2 files: heads from the latent vector."""

    def sizes(self) -> dict[str, Any]:
        return {
            "attention.key_length": self.n_own + self.n_rot,
            "attention.value_length": self.n_value,
            "attention.kv_lora_rank": self.rank,
        }


class IndexedLatent(LatentPart):
    """Latent attention with an indexer, which chooses the keys that a token sees (model/indexing.py)."""

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self.n_index_head = integer(facts.raw, "index_n_heads", high=1 << 14)
        self.index_dim = integer(facts.raw, "index_head_dim", high=1 << 14)

    def keys(self) -> dict[str, Any]:
        config = self.facts.raw
        own = _own_indexers(config, self.facts.n_layer)
        return ({} if all(own) else {"attention.indexer.types": own}) | {
            "attention.indexer.head_count": self.n_index_head,
            "attention.indexer.key_length": self.index_dim,
            "attention.indexer.top_k": integer(config, "index_topk"),
        }

    def shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        return {
            "indexer.attn_q_b": (self.n_index_head * self.index_dim, self.rank_q),
            "indexer.attn_k": (self.index_dim, self.facts.n_embd),
            "indexer.k_norm": (self.index_dim,),
            "indexer.proj": (self.n_index_head, self.facts.n_embd),
        }


def _own_indexers(config: dict[str, Any], n_layer: int) -> list[bool]:
    """Return whether each layer has its own indexer; all have one if config.json says nothing about it."""
    types = config.get("indexer_types") or config.get("index_topk_pattern")
    if types is not None:
        known = {"full": True, "F": True, "shared": False, "S": False}
        is_known = isinstance(types, str | list) and all(isinstance(t, str) and t in known for t in types)
        if not is_known or len(types) < n_layer:
            raise FormatError(
                f"indexer_types in config.json must hold full or shared for {n_layer} layers, not "
                f"{shown(types)}"
            )
        return [known[each] for each in types[:n_layer]]
    if config.get("index_topk_freq") is None:
        return [True] * n_layer
    period = integer(config, "index_topk_freq")
    offset = integer(config, "index_skip_topk_offset", 2, low=0)
    return [max(i - offset + 1, 0) % period == 0 for i in range(n_layer)]


class CompressedPart(FamilyPart):
    """DeepSeek V4's attention (model/config.py, Compressed), its streams and its tables of experts.

    block_sizes: tokens per compressed block of keys, for each layer; 0 without compression.
    """

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        config, n_layer, head_dim = facts.raw, facts.n_layer, facts.head_dim
        self.rank_q = integer(config, "q_lora_rank", high=1 << 20)
        if config.get("partial_rotary_factor") is None and config.get("qk_rope_head_dim") is not None:
            facts.n_rot = integer(config, "qk_rope_head_dim", high=head_dim)
        else:  # transformers reads this entry first
            factor = number(config, "partial_rotary_factor", 0.125)
            if not 0 < factor <= 1:
                raise FormatError(f"partial_rotary_factor in config.json is {factor:g}, not from 0 to 1")
            facts.n_rot = int(head_dim * factor)
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
        self.block_sizes = _block_sizes(config, n_layer)

    @staticmethod
    def prepared(config: dict[str, Any]) -> dict[str, Any]:
        """Replace the entries that transformers writes by the published entries."""
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

    def sizes(self) -> dict[str, Any]:
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

    def reads(self, name: str) -> bool:
        """Return False for the biases of layers in which a table chooses the experts."""
        layers = range(self.n_hashed)
        return name not in {f"{self.facts.layers}.{i}.ffn.gate.bias" for i in layers}

    def shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        d, dim, size = self.facts.n_embd, self.index_dim, self.block_sizes[layer]
        return {
            "indexer.attn_q_b": (self.n_index_head * dim, self.rank_q),
            "indexer.proj": (self.n_index_head, d),
            "indexer_compressor_ape": (size, 2 * dim),
            "indexer_compressor_norm": (dim,),
            **dict.fromkeys(("indexer_compressor_kv", "indexer_compressor_gate"), (2 * dim, d)),
        }

    def source(self, values: np.ndarray, stem: str, layer: int) -> Source | None:
        """Return the table of each token's experts, which the file has in 32 bits."""
        if stem == "attn_compressor_ape" and len(values) != self.block_sizes[layer]:
            raise ValueError(f"blocks of {self.block_sizes[layer]} tokens")
        if stem != "ffn_gate_tid2eid":
            return None
        n = self.facts.n_expert
        if values.min() < 0 or values.max() >= n:
            raise FormatError(
                f"the table ffn.gate.tid2eid of layer {layer} of the checkpoint must name experts from 0 to "
                f"{n - 1}, and has {values.min()} to {values.max()}; download it again"
            )
        return Table(values)


def _block_sizes(config: dict[str, Any], n_layer: int) -> list[int]:
    """Return the value of CompressedPart.block_sizes."""
    ratios: list[int] | None = config.get("compress_ratios")
    if ratios is not None:  # the published entry, perhaps with layers after the model's own
        known = isinstance(ratios, list) and all(type(n) is int and n in (0, 4, 128) for n in ratios)
        if not known or len(ratios) < n_layer:
            raise FormatError("compress_ratios in config.json must hold 0, 4 or 128 for each layer")
        return ratios[:n_layer]
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
    if types is None:  # the default of transformers' class
        types = [hca if i < 2 or i % 2 == 0 else csa for i in range(n_layer)]
    return [sizes[kind] for kind in checked_types(types, n_layer, tuple(sizes))]


def token_rows(values: np.ndarray, n_vocab: int) -> Origin:
    """Return one row per token. A token without a row gets the first one, as in transformers."""
    ids = np.arange(n_vocab)
    return Origin(values, rows=np.where(ids < len(values), ids, 0))


class AltUpPart(FamilyPart):
    """Gemma 3n (model/config.py, AltUp).

    Its facts are the number of streams, the width of a layer's embedding of a token, the layers without their
    own keys and values, and the widths of the FFN by layer.
    """

    adapts = False

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        config, n_layer = facts.raw, facts.n_layer
        widths = config.get("intermediate_sizes")
        if widths is not None and len(widths) != n_layer:
            raise FormatError(
                f"intermediate_size in config.json must hold a number for each of {n_layer} layers"
            )
        if widths is not None:
            entry = "intermediate_size"
            widths = [integer({entry: width}, entry, high=1 << 22) for width in widths]
            facts.n_ff_of_layers = widths if len(set(widths)) > 1 else None
        self.n_streams = integer(config, "altup_num_inputs", high=1 << 10)
        self.width = integer(config, "hidden_size_per_layer_input", high=1 << 16)
        self.n_shared = integer(config, "num_kv_shared_layers", high=n_layer - 1, low=0)
        pattern = config.get("activation_sparsity_pattern")
        if pattern is None:  # the default of transformers' class
            n_sparse = 10 if n_layer > 10 else 0
            pattern = [0.95] * n_sparse + [0.0] * (n_layer - n_sparse)
        if not isinstance(pattern, list) or not all(type(v) is float and 0 <= v < 1 for v in pattern):
            raise FormatError("activation_sparsity_pattern in config.json must hold numbers from 0 to 1")
        self.multipliers = [NormalDist().inv_cdf(v) if v else -math.inf for v in pattern]

    @staticmethod
    def prepared(config: dict[str, Any]) -> dict[str, Any]:
        """Move a list of the widths of FFNs to a separate entry."""
        widths = config.get("intermediate_size")
        return (
            config | {"intermediate_size": widths[0], "intermediate_sizes": widths}
            if (isinstance(widths, list) and widths)
            else config
        )

    def n_parts(self, stem: str) -> int | None:
        """Return the number of residual streams except the first."""
        return self.n_streams - 1 if stem.startswith("altup_") else None

    def source(self, values: np.ndarray, stem: str, layer: int) -> Source | None:
        return token_rows(values, self.facts.n_vocab) if stem == "per_layer_token_embd" else None

    def sizes(self) -> dict[str, Any]:
        return {
            "altup.num_inputs": self.n_streams,
            "altup.active_idx": 0,
            "embedding_length_per_layer_input": self.width,
            "attention.shared_kv_layers": self.n_shared,
            "activation_sparsity_scale": self.multipliers,
        }


class ProportionalRope(HFRope):
    """Gemma 4's rotation: the first pairs of channels turn, the others stay."""

    as_tensors = (*HFRope.as_tensors, "proportional")

    def divisors(self) -> dict[str, np.ndarray]:
        rope = self.parameters()
        if rope["rope_type"] != "proportional":
            return super().divisors()
        pairs, n = np.arange(self.head_dim // 2), self.head_dim
        turn = pairs < int(number(rope, "partial_rotary_factor", 1.0) * n // 2)
        return {LLAMA3_FACTORS: np.where(turn, np.float32(1), np.float32(1e30))}


class WindowHeads(FamilyPart):
    """Gemma 4's layers, whose heads and other sizes depend on the layer.

    Its facts are the heads of keys and values and their channels, in layers with and without a window;
    whether keys serve as values; the width of the embedding that each layer adds, and its tokens; the number
    of last layers that use the keys and values of other layers, and whether their FFNs are twice as wide.
    """

    adapts = False

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        config, n_layer, n_head = facts.raw, facts.n_layer, facts.n_head
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
        # transformers writes the differences layer by layer; checkpoints have two entries for them.
        self.dim_full = integer(
            config | own if own else config, "head_dim" if own else "global_head_dim", 512
        )
        self.n_kv = integer(config, "num_key_value_heads", high=n_head)
        self.n_kv_full = integer(own, "num_key_value_heads", self.n_kv)
        if not own and self.key_is_value:
            self.n_kv_full = integer(config, "num_global_key_value_heads", self.n_kv)
        self.width = integer(config, "hidden_size_per_layer_input", high=1 << 16, low=0)
        self.n_shared = integer(config, "num_kv_shared_layers", high=n_layer - 1, low=0)
        if config.get("use_double_wide_mlp") is True and self.n_shared:
            wide = integer({"intermediate_size": 2 * facts.n_ff}, "intermediate_size", high=1 << 22)
            facts.n_ff_of_layers = [facts.n_ff] * (n_layer - self.n_shared) + [wide] * self.n_shared
        facts.head_dim = facts.n_rot = self.dim_full  # unrotated channels have no frequency

    def source(self, values: np.ndarray, stem: str, layer: int) -> Source | None:
        return token_rows(values, self.facts.n_vocab) if stem == "per_layer_token_embd" else None

    def sizes(self) -> dict[str, Any]:
        n_kv = [self.n_kv if windowed else self.n_kv_full for windowed in self.windowed]
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
