"""A Hugging Face config.json as the keys of a GGUF file: the row of its class (checkpoints/) and its entries.

config.json is a stranger's file: every number that is read has a type and a range, and what is known to
change a model in a way that no key describes is refused.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, assert_never

import numpy as np

from hotset.convert.checkpoints import CLASSES, encoders, llama
from hotset.convert.checkpoints.classes import SYNONYMS, HFClass
from hotset.convert.fp8 import block_of, is_fp8
from hotset.convert.hf_experts import HFMoE
from hotset.convert.hf_layers import (
    check_bases,
    check_unrotated,
    conv_keys,
    delta_keys,
    hybrid_keys,
    layout_keys,
    parts_of,
    window_keys,
)
from hotset.convert.hf_mixers import (
    channel_delta_keys,
    channel_delta_layers,
    channel_deltas,
    channel_keys,
    channel_space,
    delta_mixer,
    factors,
    state_keys,
    state_space,
)
from hotset.convert.hf_parts import HFAltUp, HFCompressed, HFGatedStreams, HFLatent, HFWindowHeads
from hotset.convert.hf_rope import HFRope
from hotset.convert.hf_rwkv import HFRwkv
from hotset.convert.hf_values import flag, integer, number, positive
from hotset.errors import FormatError, ModelNotFoundError, UnsupportedModelError, did_you_mean
from hotset.files import SMALL_FILE, read_small_text
from hotset.model.activation import DRELU, FFNActivation, parse_activation
from hotset.model.architectures import ARCHITECTURES, REFUSED
from hotset.model.keys import EPSILON_KEYS, FATRELU_THRESHOLD_KEY, MAX_CONV_KERNEL, UP_ACTIVATION_KEY
from hotset.parameters import shown


def read_json(path: Path, limit: int = SMALL_FILE) -> dict[str, Any]:
    """The object in a JSON file of at most `limit` bytes; ModelNotFoundError or FormatError where there is
    none."""
    try:
        value = json.loads(read_small_text(path, limit))
    except FileNotFoundError:
        raise ModelNotFoundError(f"{path} does not exist: name the folder of a checkpoint") from None
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path} is not readable JSON: {error}") from None
    if not isinstance(value, dict):
        raise FormatError(f"{path} is not a JSON object")
    return value


def _renamed(config: dict[str, Any]) -> dict[str, Any]:
    """config.json without synonyms; of several names of one entry, the first of `SYNONYMS` wins."""
    renamed = {entry: value for entry, value in config.items() if entry not in SYNONYMS}
    for other, entry in SYNONYMS.items():
        if renamed.get(entry) is None and config.get(other) is not None:
            renamed[entry] = config[other]
    return renamed


def _with_defaults(config: dict[str, Any], hf_class: HFClass) -> dict[str, Any]:
    """The entries of the model that generates, under one name each, with the class's defaults."""
    if hf_class.sees and isinstance(text := config.get("text_config", config.get("language_config")), dict):
        whole = {k: config[k] for k in ("tie_word_embeddings", "architectures") if k in config}
        config = config | text | whole  # the output is the whole model's
    if hf_class.architecture == "mpt" and isinstance(of_attention := config.get("attn_config"), dict):
        config = config | of_attention
    config = _renamed(config)
    if hf_class.compressed:
        config = HFCompressed.renamed(config)
    for plain, own in hf_class.own_names.items():
        config.pop(plain, None)
        if (value := config.pop(own, None)) is not None:
            config[plain] = value
    return hf_class.defaults | config


def _check_required(config: dict[str, Any], hf_class: HFClass) -> None:
    if config.get("is_causal") is False and not hf_class.is_encoder:
        raise UnsupportedModelError(
            "is_causal set to 'False' in config.json is not supported for this class: its tokens would see "
            "those behind them"
        )
    for key, value in hf_class.required.items():
        found = config.get(key, value)
        same = type(found) is type(value) and found == value
        if not same and not (found is None and not value):
            raise UnsupportedModelError(
                f"{key} set to {str(found)[:60]!r} in config.json is not supported, only {str(value)!r} is"
            )


def _is_online_bitnet(quantised: Any) -> bool:
    """Whether matrices are as they were trained, and become ternary when they are loaded."""
    known = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}
    if not isinstance(quantised, dict) or quantised.get("use_rms_norm"):
        return False
    return all(quantised.get(entry) == value for entry, value in known.items())


def _class_of(config: dict[str, Any]) -> HFClass:
    classes = config.get("architectures")
    name = classes[0] if isinstance(classes, list) and classes else None
    stem = name.partition("For")[0].lower() if isinstance(name, str) else ""
    if refused := REFUSED.get(stem):
        raise UnsupportedModelError(f"the architecture {name!r} in config.json is not supported: {refused}")
    if isinstance(name, str) and name not in CLASSES and name.endswith("Model"):
        name = f"{name.removesuffix('Model')}ForCausalLM"  # which has an output beside it
    if not isinstance(name, str):
        raise UnsupportedModelError(
            "config.json has no list 'architectures' that names the model's class: the folder must hold a "
            "Hugging Face checkpoint of a language model"
        )
    if name not in CLASSES:
        meant = did_you_mean(name.lower(), {known.lower(): known for known in CLASSES}, 0.7)
        hint = f" ({meant})" if meant else ""
        raise UnsupportedModelError(
            f"the architecture {shown(name)} in config.json is not supported{hint}; "
            "'hotset list --architectures' lists what hotset runs"
        )
    if name == "NomicBertModel" and "activation_function" in config:
        return encoders.NOMIC_MOE if config.get("moe_every_n_layers") else encoders.PUBLISHED_NOMIC
    if CLASSES[name].architecture == "baichuan" and config.get("max_position_embeddings") is None:
        return llama.BAICHUAN_13B
    return CLASSES[name]


class HFConfig:
    """A checked config.json.

    activation: overrides what it says (see parse_activation). Raises UnsupportedModelError for what cannot be
    converted, FormatError for what makes no sense.
    """

    def __init__(self, config: dict[str, Any], activation: str | None = None) -> None:
        self.hf_class = _class_of(config)
        self.class_name: str = config["architectures"][0]
        quantised = config.get("quantization_config")
        method = quantised.get("quant_method") if isinstance(quantised, dict) else None
        self.fp8_block = block_of(quantised)
        self.is_ternary = self.hf_class.ternary and _is_online_bitnet(quantised)
        is_packed = self.hf_class.packed and method == "mxfp4"
        if quantised is not None and not (is_packed or self.is_ternary or is_fp8(quantised)):
            raise UnsupportedModelError(
                "the checkpoint is quantised (quantization_config); convert the original"
            )
        self.raw = config = _with_defaults(config, self.hf_class)
        self.parts = parts_of(config) if self.hf_class.parts else None  # what each layer is
        self.hf_class = _without_experts(self.hf_class, self.parts, config)
        self.architecture = self.hf_class.architecture
        _check_required(config, self.hf_class)
        self.n_layer = integer(config, "num_hidden_layers", high=1 << 12)
        # Behind the model's own some have layers that predict more than one token. n_nextn: those that the
        # file has too, which the tensors of the checkpoint say.
        self.n_extra_layers = self.n_nextn = 0
        if config.get("num_nextn_predict_layers"):
            self.n_extra_layers = integer(config, "num_nextn_predict_layers", high=1 << 10)
        self.n_embd = integer(config, "hidden_size", high=1 << 20)
        if self.architecture == "opt" and config.get("word_embed_proj_dim") not in (None, self.n_embd):
            raise UnsupportedModelError("word_embed_proj_dim other than hidden_size is not supported")
        self.n_head, self.n_head_kv, self.head_dim = self._heads()
        self.latent = HFLatent(config) if self.hf_class.latent else None
        if self.latent is not None:
            self.head_dim = self.latent.n_own + self.latent.n_rot
        self.altup = HFAltUp(config, self.n_layer) if self.hf_class.altup else None
        self.streams = HFGatedStreams(config, self.n_layer) if self.hf_class.gated_streams else None
        self.compressed = None
        if self.hf_class.compressed:
            self.compressed = HFCompressed(config, self.n_layer, self.head_dim)
        self.window_heads = None
        if self.hf_class.window_heads:
            self.window_heads = HFWindowHeads(config, self.n_layer, self.n_head)
            self.head_dim = self.window_heads.dim_full
        self.n_ff, self.n_ff_of_layers = self._neurons()
        self.row = ARCHITECTURES[self.architecture]
        self.delta = self.kda = None
        if self.row.delta_net == "channels":
            self.kda = channel_deltas(config, self.n_head)
            self.kda_layers = channel_delta_layers(config, self.n_layer)
        elif self.row.delta_net is not None:
            self.delta = delta_mixer(config, self.hf_class)
        self.space = state_space(config, self.hf_class, self.n_embd, limited=self.parts is not None)
        self.channels = channel_space(config, self.hf_class, self.n_embd)
        version = self.row.rwkv
        self.rwkv = None if version is None else HFRwkv(config, version, self.n_embd)
        self.conv_kernel = (
            integer(config, "conv_L_cache", 3, MAX_CONV_KERNEL) if self.hf_class.short_conv else 0
        )
        self.n_expert = self.n_expert_used = self.n_ff_expert = self.n_ff_shared = 0
        self.moe: HFMoE | None = None
        if (experts := self.hf_class.experts) is not None:
            self.moe = moe = HFMoE(config, self.hf_class, experts, self.n_layer)
            self.n_expert, self.n_expert_used = moe.n, moe.n_used
            self.n_ff_expert, self.n_ff_shared = moe.n_ff, moe.n_ff_shared
        self.n_vocab = integer(config, "vocab_size", high=1 << 24)
        self.n_ctx = integer(config, "max_position_embeddings")
        if config.get("max_trained_positions") is not None:  # beyond them the rotation is another
            self.n_ctx = min(self.n_ctx, integer(config, "max_trained_positions"))
        self.n_unused_positions = self.n_cut_positions = 0
        if self.hf_class.padded_positions:
            self.n_unused_positions = 1 + int(number(config, "pad_token_id"))
            self.n_ctx = integer(
                {"max_position_embeddings": self.n_ctx - self.n_unused_positions}, "max_position_embeddings"
            )
        n_rot = None
        if self.latent is not None:
            n_rot = self.latent.n_rot
        elif self.compressed is not None:
            n_rot = self.compressed.n_rot
        elif self.window_heads is not None:  # those that are not rotated have no frequency
            n_rot = self.head_dim
        self.rope = HFRope(config, self.hf_class, self.n_ctx, self.head_dim, n_rot)
        self.activation = self._activation(activation)

    def limit_positions(self, n: int) -> None:
        """Limit the context to n tokens. Learned positions beyond them are left out of the file."""
        self.n_cut_positions = max(self.n_ctx - n, 0)
        self.n_ctx -= self.n_cut_positions

    @property
    def tied(self) -> bool:
        """Whether the embedding is the output matrix as well."""
        tied = self.raw.get("tie_word_embeddings", self.hf_class.tied)
        if self.hf_class.short_conv:  # as LFM2's first checkpoints call it
            tied = self.raw.get("tie_embedding", tied)
        return tied is True

    @property
    def n_latent(self) -> int:
        """Width of what experts read and yield, where it is not the model's."""
        has = self.parts is not None and self.n_expert and self.raw.get("moe_latent_size") is not None
        return integer(self.raw, "moe_latent_size", high=1 << 20) if has else 0

    def heads_of(self, layer: int) -> tuple[int, int]:
        """Heads of keys and values of a layer, and the channels of one."""
        own = self.window_heads
        return (self.n_head_kv, self.head_dim) if own is None else own.heads_of(layer)

    @property
    def transposes_experts(self) -> bool:
        """See HFExperts.transposed."""
        return self.hf_class.experts is not None and self.hf_class.experts.transposed

    def _neurons(self) -> tuple[int, list[int] | None]:
        """Of an FFN, and of each layer's where they differ."""
        config = self.raw
        of_width = self.hf_class.ff_of_width
        n_ff = None if of_width is None else of_width(self.n_embd)
        each: list[int] = []
        if (ff := self.hf_class.ff) is not None:
            widths = config.get(ff)
            if self.altup is None or not isinstance(widths, list):
                widths = [integer(config, ff, n_ff, 1 << 22)]
            elif len(widths) != self.n_layer:
                raise FormatError(f"{ff} in config.json must hold a number for each of {self.n_layer} layers")
            if (own := self.window_heads) is not None and own.doubles_ff:
                widths = widths * (self.n_layer - own.n_shared) + [2 * widths[0]] * own.n_shared
            each = [integer({ff: width}, ff, high=1 << 22) for width in widths]
        first = each[0] if each else 0
        if ARCHITECTURES[self.architecture].halved_ff:
            first //= 2
        if self.hf_class.adjusted_ff:
            first = self._adjusted_ff(first)
        return first, each if len(set(each)) > 1 else None

    def _heads(self) -> tuple[int, int, int]:
        """Heads, those of keys and values, and the channels of one; without attention zeros."""
        if not ARCHITECTURES[self.architecture].attends:
            return 0, 0, 0
        self.n_head = n_head = integer(self.raw, "num_attention_heads", high=1 << 14)
        n_head_kv = self._n_head_kv()
        if n_head % n_head_kv:
            raise FormatError(f"config.json has {n_head} heads, not a multiple of {n_head_kv} KV heads")
        return n_head, n_head_kv, integer(self.raw, "head_dim", max(self.n_embd // n_head, 1), 1 << 14)

    def _n_head_kv(self) -> int:
        if self.hf_class.latent:
            return self.n_head
        if self.hf_class.scattered_groups:
            return max(self.n_head // integer(self.raw, "n_shared_head", high=self.n_head), 1)
        of_all = 1 if self.raw.get("multi_query", True) is True else self.n_head
        match self.hf_class.kv_heads:
            case "grouped":
                return integer(self.raw, "num_key_value_heads", self.n_head)
            case "every":
                return self.n_head
            case "multi_query":
                return of_all
            case "falcon":
                if self.raw.get("new_decoder_architecture") is True or "n_head_kv" in self.raw:
                    return integer(self.raw, "num_kv_heads", self.raw.get("n_head_kv", self.n_head))
                return of_all
        assert_never(self.hf_class.kv_heads)

    def _adjusted_ff(self, n_ff: int) -> int:
        """LFM2's neurons: two thirds of what config.json says, times a factor, in whole multiples."""
        config = self.raw
        n_ff = integer(config, "block_ff_dim", n_ff, 1 << 22)
        if config.get("block_auto_adjust_ff_dim", True) is False:
            return n_ff
        n_ff = 2 * n_ff // 3
        if config.get("block_ffn_dim_multiplier", 1.0) is not None:
            multiple = integer(config, "block_multiple_of", 256, 1 << 22)
            n_ff = int(number(config, "block_ffn_dim_multiplier", 1.0) * n_ff)
            n_ff = -(-n_ff // multiple) * multiple
        return integer({"block_ff_dim": n_ff}, "block_ff_dim", high=1 << 22)

    def _activation(self, override: str | None) -> FFNActivation:
        row = self.row
        if override is not None:
            activation = parse_activation(override)
        else:
            key = self.hf_class.activation
            if key is None:
                return row.activation
            name = self.raw.get(key)
            if not isinstance(name, str):
                raise FormatError(f"{key} in config.json must be a name, not {name!r}")
            threshold = number(self.raw, "hidden_act_param") if name == "fatrelu" else None
            means = self.hf_class.means
            meant = means if isinstance(means, str) else means.get(name, name)
            activation = parse_activation(meant, threshold)
            # Bamboo's checkpoints say "relu" and mean both relus of dReLU: the second is in the class.
            if activation == FFNActivation(row.activation.gate):
                activation = row.activation
            if self.hf_class.activates_up:
                activation = DRELU  # `required` sees to it that it is relu
        if activation == DRELU and not row.gated:
            raise UnsupportedModelError(
                f"the {self.architecture} model's feed-forward network has no gate, so its activation cannot "
                "be dReLU"
            )
        return activation

    def keys(self, name: str, n_positions: int) -> dict[str, Any]:
        """Keys of the GGUF file, for the architecture `name`, with a context of n_positions."""
        row = self.row
        keys: dict[str, Any] = {
            "block_count": self.n_layer + self.n_nextn,
            "context_length": n_positions,
            "embedding_length": self.n_embd,
            "feed_forward_length": self.n_ff_of_layers or self.n_ff * (2 if row.halved_ff else 1),
            "vocab_size": self.n_vocab,
            "attention.head_count": self.n_head,
        }
        if row.attends:
            keys |= {
                "attention.head_count_kv": self.n_head_kv,
                "attention.key_length": self.head_dim,
                "attention.value_length": self.head_dim,
            }
        for part in (self.latent, self.altup, self.window_heads, self.streams, self.compressed):
            keys |= {} if part is None else part.keys()
        if not row.norm_weights:  # OLMo's class has it in its code, and llama.cpp needs the key
            keys[EPSILON_KEYS[row.norm]] = 1e-5
        if self.hf_class.epsilon is not None:
            keys[EPSILON_KEYS[row.norm]] = float(number(self.raw, self.hf_class.epsilon))
        keys |= {"attention.causal": False} if self.hf_class.is_encoder else {}
        keys |= self._scale_keys() | ({} if self.moe is None else self.moe.keys())
        keys |= self._mixer_keys() | ({"nextn_predict_layers": self.n_nextn} if self.n_nextn else {})
        if self.hf_class.indexed:
            keys |= self._indexer_keys()
        if row.rope is not None:
            check_unrotated(self.raw, self.n_layer, row.unrotated_period)
            if self.hf_class.from_last:
                check_bases(self.raw, self.n_layer, row.window_period, self.rope.keys()["rope.freq_base"])
            if self.hf_class.layouts:
                windows = layout_keys(self.raw, self.n_layer)
            else:
                windows = window_keys(self.raw, self.hf_class, self.n_layer)
            keys |= windows | self.rope.keys()
            if self.hf_class.sections:
                keys["rope.dimension_sections"] = self.rope.sections()
            if row.unscaled_windows and windows:
                keys |= self.rope.unscaled_keys(number(self.hf_class.defaults, "rope_theta"))
            if row.windowed_rope_base is not None:
                base = number(self.raw, "rope_local_base_freq", row.windowed_rope_base)
                keys["rope.freq_base_swa"] = self.rope.windowed_base(base)
        if self.hf_class.activation is not None:
            keys["hidden_activation"] = self.activation.gate
        keys = {f"{name}.{key}": value for key, value in keys.items()}
        if self.activation.gate == "fatrelu":
            keys[FATRELU_THRESHOLD_KEY] = float(self.activation.threshold)
        if self.activation.up is not None and self.hf_class.activation is not None:
            keys[UP_ACTIVATION_KEY] = self.activation.up
        return keys | self._text_keys()

    def _mixer_keys(self) -> dict[str, Any]:
        """What stands in attention's place: in which layers, and its sizes."""
        raw, n_layer = self.raw, self.n_layer
        if self.hf_class.short_conv:
            keys = conv_keys(raw, self.hf_class, n_layer, self.n_head_kv)
            return keys | {"shortconv.l_cache": self.conv_kernel}
        if self.delta is not None:
            keys = delta_keys(raw, n_layer, self.n_nextn, state_keys(self.delta))
            return keys if self.streams is None else keys | self.streams.block_keys(keys)
        if self.kda is not None and self.latent is not None:
            return channel_delta_keys(self.kda_layers, self.kda, self.latent.n_rot, self.latent.n_value)
        if self.rwkv is not None:
            return self.rwkv.keys()
        if self.channels is not None:
            return channel_keys(raw, self.channels, n_layer, self.n_head_kv)
        if self.space is None:
            return {}
        keys = {}
        if self.row.attends and not self.row.beside:
            parts = self.parts
            keys = hybrid_keys(raw, n_layer, self.n_head_kv) if parts is None else self._part_keys(parts)
        return keys | state_keys(self.space)

    def _part_keys(self, parts: list[str]) -> dict[str, Any]:
        """What each layer is, and what only such models have."""
        kv = [self.n_head_kv if part == "full_attention" else 0 for part in parts]
        widths = {"mlp": self.n_ff, "moe": self.n_ff_expert}
        n_ff = [widths.get(part, 0) for part in parts]
        kv += [self.n_head_kv] * self.n_nextn
        n_ff += [self.n_ff_expert] * self.n_nextn
        keys: dict[str, Any] = {"attention.head_count_kv": kv, "feed_forward_length": n_ff}
        keys[EPSILON_KEYS["layer"]] = float(number(self.raw, "layer_norm_epsilon"))  # engines read either
        return keys | ({"moe_latent_size": self.n_latent} if self.n_latent else {})

    def rope_divisors(self) -> dict[str, np.ndarray]:
        """See HFRope.divisors."""
        return self.rope.divisors()

    def factors(self, stem: str) -> np.ndarray | None:
        """Falcon-H1's multipliers of a tensor: float32, one or one for each row; None: there are none."""
        if not self.hf_class.multiplied or self.space is None:
            return None
        return factors(self.raw, self.space, stem)

    def query_norms(self) -> dict[str, np.ndarray]:
        """Norms that the file has and the checkpoint has not, of equal weights, float32 [head_dim]."""
        if (entry := self.hf_class.query_factor) is None:
            return {}
        factors = {"attn_q_norm": positive(self.raw, entry), "attn_k_norm": 1.0}
        norms = {stem: np.full(self.head_dim, factor, np.float32) for stem, factor in factors.items()}
        return {f"blk.{i}.{stem}.weight": norm for i in range(self.n_layer) for stem, norm in norms.items()}

    def _text_keys(self) -> dict[str, Any]:
        """Of encoders: how many types of tokens there are."""
        if "type_vocab_size" not in self.raw or not self.hf_class.is_encoder:
            return {}
        return {"tokenizer.ggml.token_type_count": integer(self.raw, "type_vocab_size", high=1 << 16)}

    def _indexer_keys(self) -> dict[str, Any]:
        """Of what chooses the keys that a token sees (model/architectures.py, Architecture.indexed)."""
        types = self.raw.get("indexer_types")
        if types is not None and types != ["full"] * self.n_layer:
            raise UnsupportedModelError("layers without an indexer of their own are not supported")
        return {
            "attention.indexer.head_count": integer(self.raw, "index_n_heads", high=1 << 14),
            "attention.indexer.key_length": integer(self.raw, "index_head_dim", high=1 << 14),
            "attention.indexer.top_k": integer(self.raw, "index_topk"),
        }

    def _scale_keys(self) -> dict[str, Any]:
        """Scales and caps: those that stand in config.json, and that of the scores where it is another."""
        numbers = self.hf_class.numbers.items()
        keys: dict[str, Any] = {
            key: positive(self.raw, entry) for key, entry in numbers if self.raw.get(entry) is not None
        }
        keys |= {key: integer(self.raw, entry) for key, entry in self.hf_class.integers.items()}
        keys |= {key: flag(self.raw, entry) for key, entry in self.hf_class.flags.items()}
        if self.hf_class.depth_scales:
            keys["embedding_scale"] = positive(self.raw, "scale_emb")
            keys["residual_scale"] = positive(self.raw, "scale_depth") / math.sqrt(self.n_layer)
            keys["logit_scale"] = self.n_embd / positive(self.raw, "dim_model_base")
        if self.hf_class.query_scalar is not None:
            scalar = positive(self.raw, self.hf_class.query_scalar)
            narrow = self.n_layer == self.row.narrow_scale_at
            if scalar != (self.n_embd // self.n_head if narrow else self.head_dim):
                keys["attention.scale"] = scalar**-0.5
        return keys


def _without_experts(hf_class: HFClass, parts: list[str] | None, config: dict[str, Any]) -> HFClass:
    """The class, or that of models without experts where a model of it has none. parts: see parts_of."""
    if hf_class.architecture == "granitehybrid" and config.get("num_experts") == 0:
        names = {
            "shared_mlp.input_linear": "ffn_gate ffn_up",
            "shared_mlp.output_linear": "ffn_down",
        }
        return replace(
            hf_class,
            ff="shared_intermediate_size",
            layer_tensors=hf_class.layer_tensors | names,
            experts=None,
        )
    if hf_class.window_heads and config.get("enable_moe_block") is not True:
        return replace(hf_class, experts=None)
    if parts is None:
        return hf_class
    if "moe" not in parts:
        return replace(hf_class, architecture="nemotron_h", numbers={}, experts=None)
    return hf_class if "mlp" in parts else replace(hf_class, ff="moe_intermediate_size")
