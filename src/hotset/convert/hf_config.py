"""A Hugging Face config.json as the keys of a GGUF file: the row of its class (checkpoints/) and its entries.

config.json is not trusted: every number has a type and a range. Entries that are known to change a model in a
way that no key describes raise an error.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hotset.convert.checkpoints import CLASSES
from hotset.convert.checkpoints.classes import SYNONYMS, HFClass, text_config
from hotset.convert.fp8 import block_of, is_fp8
from hotset.convert.hf_experts import HFMoE
from hotset.convert.hf_layers import check_unrotated, window_keys
from hotset.convert.hf_part import Facts
from hotset.convert.hf_values import flag, integer, number, positive
from hotset.errors import FormatError, ModelNotFoundError, UnsupportedModelError, did_you_mean
from hotset.files import SMALL_FILE, missing, read_small_text
from hotset.model.activation import DRELU, FFNActivation, parse_activation
from hotset.model.architectures import ARCHITECTURES, REFUSED
from hotset.model.keys import EPSILON_KEYS, FATRELU_THRESHOLD_KEY, UP_ACTIVATION_KEY
from hotset.parameters import shown


def read_json(path: Path, limit: int = SMALL_FILE) -> dict[str, Any]:
    """Return the object in a JSON file of at most `limit` bytes. Raises ModelNotFoundError or FormatError."""
    try:
        value = json.loads(read_small_text(path, limit))
    except FileNotFoundError:
        raise ModelNotFoundError(missing(path, remedy="name the folder of a checkpoint")) from None
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path} is not readable JSON: {error}") from None
    if not isinstance(value, dict):
        raise FormatError(f"{path} is not a JSON object")
    return value


def _renamed(config: dict[str, Any]) -> dict[str, Any]:
    """Return config.json without synonyms. Among several names of an entry the first of `SYNONYMS` wins."""
    renamed = {entry: value for entry, value in config.items() if entry not in SYNONYMS}
    for other, entry in SYNONYMS.items():
        if renamed.get(entry) is None and config.get(other) is not None:
            renamed[entry] = config[other]
    return renamed


def _of_text(config: dict[str, Any], hf_class: HFClass) -> dict[str, Any]:
    """Return config.json with the entries of the model that generates on its top level."""
    text = text_config(config)
    if not hf_class.sees or text is None:
        return config
    whole = {k: config[k] for k in ("tie_word_embeddings", "architectures") if k in config}
    return config | text | whole  # the output belongs to the whole model


def _with_defaults(config: dict[str, Any], hf_class: HFClass) -> dict[str, Any]:
    """Return the entries under one name each, with the class's defaults."""
    config = _renamed(config)
    for part in hf_class.parts:
        config = part.prepared(config)
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


def _class_of(config: dict[str, Any]) -> HFClass:
    classes = config.get("architectures")
    name = classes[0] if isinstance(classes, list) and classes else None
    stem = name.partition("For")[0].lower() if isinstance(name, str) else ""
    if refused := REFUSED.get(stem):
        raise UnsupportedModelError(f"the architecture {name!r} in config.json is not supported: {refused}")
    if isinstance(name, str) and name not in CLASSES and name.endswith("Model"):
        name = f"{name.removesuffix('Model')}ForCausalLM"  # the same model with an output
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
    return CLASSES[name]


class HFConfig(Facts):
    """A checked config.json.

    activation: replaces the entry (see parse_activation). parts: the parts of the class. n_extra_layers:
    layers for multi-token prediction after the model's own. n_nextn: how many of these the file gets, which
    the checkpoint's tensors decide. Raises UnsupportedModelError for a model that cannot be converted,
    FormatError for a value out of its range.
    """

    def __init__(self, config: dict[str, Any], activation: str | None = None) -> None:
        hf_class = _class_of(config)
        self.class_name: str = config["architectures"][0]
        quantised = config.get("quantization_config")
        self.fp8_block = block_of(quantised)
        config = _of_text(config, hf_class)
        self.hf_class = hf_class = hf_class.variant(hf_class, config) if hf_class.variant else hf_class
        known = is_fp8(quantised) or any(part.dequantises(quantised) for part in hf_class.parts)
        if quantised is not None and not known:
            raise UnsupportedModelError(
                "the checkpoint is quantised (quantization_config); convert the original"
            )
        self.raw = config = _with_defaults(config, hf_class)
        self.architecture = hf_class.architecture
        self.row, self.layers = ARCHITECTURES[self.architecture], hf_class.layers
        self.partial, self.default_rope = hf_class.partial, hf_class.defaults.get("rope_parameters", {})
        _check_required(config, hf_class)
        self.n_layer = integer(config, "num_hidden_layers", high=1 << 12)
        self.n_extra_layers = 0
        if config.get("num_nextn_predict_layers"):
            self.n_extra_layers = integer(config, "num_nextn_predict_layers", high=1 << 10)
        self.n_embd = integer(config, "hidden_size", high=1 << 20)
        self.n_head, self.n_head_kv, self.head_dim = self._heads()
        self.n_ff = self._neurons()
        self.n_vocab = integer(config, "vocab_size", high=1 << 24)
        self.n_ctx = integer(config, "max_position_embeddings")
        if config.get("max_trained_positions") is not None:  # later positions rotate differently
            self.n_ctx = min(self.n_ctx, integer(config, "max_trained_positions"))
        self.moe: HFMoE | None = None
        if (experts := hf_class.experts) is not None:
            self.moe = moe = HFMoE(config, hf_class, experts, self.n_layer)
            self.n_expert, self.n_expert_used, self.n_ff_expert = moe.n, moe.n_used, moe.n_ff
        self.parts = [part(self) for part in hf_class.parts]
        self.rope = hf_class.rope(self)
        self.activation = self._activation(activation)

    def limit_positions(self, n: int) -> None:
        """Limit the context to n tokens. Learned positions beyond them are left out of the file."""
        self.n_cut_positions = max(self.n_ctx - n, 0)
        self.n_ctx -= self.n_cut_positions

    @property
    def tied(self) -> bool:
        """Return whether the embedding is also the output matrix."""
        return self.raw.get("tie_word_embeddings", self.hf_class.tied) is True

    def _neurons(self) -> int:
        """Return the neurons of an FFN, or 0 without an FFN."""
        of_width, ff = self.hf_class.ff_of_width, self.hf_class.ff
        default = None if of_width is None else of_width(self.n_embd)
        n_ff = 0 if ff is None else integer(self.raw, ff, default, 1 << 22)
        return n_ff // 2 if self.row.halved_ff else n_ff

    def _heads(self) -> tuple[int, int, int]:
        """Return heads, heads of keys and values, and the channels of one; without attention zeros."""
        if not self.row.attends:
            return 0, 0, 0
        n_head = integer(self.raw, "num_attention_heads", high=1 << 14)
        n_head_kv = self.hf_class.kv_heads(self.raw, n_head)
        if n_head % n_head_kv:
            raise FormatError(f"config.json has {n_head} heads, not a multiple of {n_head_kv} KV heads")
        return n_head, n_head_kv, integer(self.raw, "head_dim", max(self.n_embd // n_head, 1), 1 << 14)

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
            # Bamboo's checkpoints have "relu" and mean both relus of dReLU: the second is in the class.
            if activation == FFNActivation(row.activation.gate):
                activation = row.activation
        if activation == DRELU and not row.gated:
            raise UnsupportedModelError(
                f"the {self.architecture} model's feed-forward network has no gate, so its activation cannot "
                "be dReLU"
            )
        return activation

    def keys(self, name: str, n_positions: int) -> dict[str, Any]:
        """Return the keys of the file, for the architecture `name`, with a context of n_positions."""
        row, hf_class = self.row, self.hf_class
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
        for part in self.parts:
            keys |= part.sizes()
        if not row.norm_weights:  # OLMo's code has this value, and llama.cpp needs the key
            keys[EPSILON_KEYS[row.norm]] = 1e-5
        if hf_class.epsilon is not None:
            keys[EPSILON_KEYS[row.norm]] = float(number(self.raw, hf_class.epsilon))
        keys |= {"attention.causal": False} if hf_class.is_encoder else {}
        keys |= self._entry_keys() | ({} if self.moe is None else self.moe.keys())
        for part in self.parts:
            keys |= part.keys()
        keys |= {"nextn_predict_layers": self.n_nextn} if self.n_nextn else {}
        if row.rope is not None:
            check_unrotated(self.raw, self.n_layer, row.unrotated_period)
            windows = window_keys(self.raw, hf_class, self.n_layer)
            keys |= windows | self.rope.keys()
            if hf_class.sections:
                keys["rope.dimension_sections"] = self.rope.sections()
            if row.unscaled_windows and windows:
                keys |= self.rope.unscaled_keys(number(hf_class.defaults, "rope_theta"))
            if row.windowed_rope_base is not None:
                base = number(self.raw, "rope_local_base_freq", row.windowed_rope_base)
                keys["rope.freq_base_swa"] = self.rope.windowed_base(base)
        if hf_class.activation is not None:
            keys["hidden_activation"] = self.activation.gate
        keys = {f"{name}.{key}": value for key, value in keys.items()}
        if self.activation.gate == "fatrelu":
            keys[FATRELU_THRESHOLD_KEY] = float(self.activation.threshold)
        if self.activation.up is not None and hf_class.activation is not None:
            keys[UP_ACTIVATION_KEY] = self.activation.up
        return keys | self._text_keys()

    def _text_keys(self) -> dict[str, Any]:
        """Return how many types of tokens an encoder has."""
        if "type_vocab_size" not in self.raw or not self.hf_class.is_encoder:
            return {}
        return {"tokenizer.ggml.token_type_count": integer(self.raw, "type_vocab_size", high=1 << 16)}

    def _entry_keys(self) -> dict[str, Any]:
        """Return the keys whose value is an entry of config.json."""
        numbers = self.hf_class.numbers.items()
        keys: dict[str, Any] = {
            key: positive(self.raw, entry) for key, entry in numbers if self.raw.get(entry) is not None
        }
        keys |= {key: integer(self.raw, entry) for key, entry in self.hf_class.integers.items()}
        return keys | {key: flag(self.raw, entry) for key, entry in self.hf_class.flags.items()}
