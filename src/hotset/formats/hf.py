"""Converts a Hugging Face checkpoint (config.json, safetensors, tokenizer) to a GGUF file.

Neither torch nor transformers is needed: safetensors is a JSON header and raw values. Tensors stream one at
a time, and the file appears under its name only when it is whole. What is not known is refused, never
guessed: an architecture, a RoPE scaling, an activation, a tensor, a pre-tokenizer.

Trap: Hugging Face's llama rotates the halves of a head (i, i + n/2), GGUF's neighbours (2i, 2i + 1), so the
rows of q and k are permuted for the architectures whose row in `ARCHITECTURES` says rope="norm".
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hotset.errors import (
    FormatError,
    InvalidRequestError,
    ModelNotFoundError,
    TokenizerError,
    UnsupportedModelError,
)
from hotset.formats.gguf import GGUFWriter
from hotset.formats.quants import TYPES, GGMLType
from hotset.model.config import (
    ARCHITECTURES,
    FATRELU_THRESHOLD_KEY,
    UP_ACTIVATION_KEY,
    FFNActivation,
    parse_activation,
)

# What config.json calls a class → the row of ARCHITECTURES that runs it.
CLASSES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "BambooForCausalLM": "bamboo",
}
TENSORS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
LAYER_TENSORS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
LAYER_TENSOR = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
OUTPUT_TYPES = {GGMLType.F32: 0, GGMLType.F16: 1, GGMLType.Q8_0: 7, GGMLType.BF16: 32}  # → general.file_type


def convert_hf(
    src_dir: str | os.PathLike[str], out_path: str | os.PathLike[str], type: GGMLType | str = GGMLType.F16
) -> None:
    """Writes the checkpoint in the folder `src_dir` as a GGUF file.

    type: of the matrices, F32, F16, BF16 or Q8_0 (a matrix whose rows Q8_0's blocks do not divide becomes
    F16); vectors are F32. A checkpoint without tokenizer files gives a file without tokenizer. Raises
    ModelNotFoundError, FormatError, UnsupportedModelError, TokenizerError or InvalidRequestError, and then
    leaves no file.
    """
    src = Path(src_dir)
    stored = next((t for t in OUTPUT_TYPES if type == t or str(type).upper() == t.name), None)
    if stored is None:
        raise InvalidRequestError(
            f"the converter writes {', '.join(t.name for t in OUTPUT_TYPES)}, not {type}"
        )
    config = _read_json(src / "config.json")
    name = _architecture(config)
    writer = GGUFWriter(out_path, name)
    writer.add("general.name", src.resolve().name)
    writer.add("general.file_type", OUTPUT_TYPES[stored])
    writer.add("general.quantization_version", 2)
    for key, value in _model_keys(config, name).items():
        writer.add(key, value)
    for key, value in _tokenizer_keys(src, config).items():
        writer.add(key, value)
    checkpoint = Checkpoint(src)
    if (divisors := _llama3_divisors(config)) is not None:
        writer.add_tensor("rope_freqs.weight", divisors, GGMLType.F32)
    for source, target in _tensor_names(checkpoint, config):
        shape = checkpoint.tensors[source].shape
        read = partial(_tensor, checkpoint, source, target, config, name)
        writer.add_tensor(target, read, _stored_type(shape, stored), shape[::-1])
    writer.write()


# ---- configuration -------------------------------------------------------------------------------------


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelNotFoundError(f"{path} does not exist: name the folder of a checkpoint") from None
    except (OSError, ValueError, RecursionError) as error:
        raise FormatError(f"{path} is not readable JSON: {error}") from None
    if not isinstance(value, dict):
        raise FormatError(f"{path} is not a JSON object")
    return value


def _architecture(config: dict[str, Any]) -> str:
    classes = config.get("architectures")
    name = classes[0] if isinstance(classes, list) and classes else None
    if not isinstance(name, str) or name not in CLASSES:
        raise UnsupportedModelError(
            f"the architecture {name!r} in config.json is not supported; supported are {', '.join(CLASSES)}"
        )
    if "quantization_config" in config:
        raise UnsupportedModelError("the checkpoint is quantised (quantization_config); convert the original")
    return CLASSES[name]


def _number(config: dict[str, Any], key: str, default: float | None = None) -> float:
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:  # NaN too
        raise FormatError(f"{key} in config.json must be a number, not {str(value)[:60]!r}")
    return value


def _integer(config: dict[str, Any], key: str, default: int | None = None, high: int = 1 << 31) -> int:
    value = _number(config, key, default)
    if not isinstance(value, int) or not 1 <= value <= high:
        raise FormatError(f"{key} in config.json must be an integer from 1 to {high}, not {value!r}")
    return value


def _head_dim(config: dict[str, Any]) -> int:
    default = _integer(config, "hidden_size") // _integer(config, "num_attention_heads")
    return _integer(config, "head_dim", default, 1 << 14)


def _model_keys(config: dict[str, Any], name: str) -> dict[str, Any]:
    n_layer, n_head = (
        _integer(config, "num_hidden_layers", high=1 << 12),
        _integer(config, "num_attention_heads"),
    )
    activation = _activation(config, name)
    keys: dict[str, Any] = {
        "block_count": n_layer,
        "context_length": _integer(config, "max_position_embeddings"),
        "embedding_length": _integer(config, "hidden_size"),
        "feed_forward_length": _integer(config, "intermediate_size"),
        "vocab_size": _integer(config, "vocab_size", high=1 << 24),
        "attention.head_count": n_head,
        "attention.head_count_kv": _integer(config, "num_key_value_heads", n_head),
        "attention.key_length": _head_dim(config),
        "attention.value_length": _head_dim(config),
        "attention.layer_norm_rms_epsilon": float(_number(config, "rms_norm_eps")),
        "rope.dimension_count": _head_dim(config),
        **_window_keys(config, n_layer),
        **_rope_keys(config),
        "hidden_activation": activation.gate,
    }
    keys = {f"{name}.{key}": value for key, value in keys.items()}
    if activation.gate == "fatrelu":
        keys[FATRELU_THRESHOLD_KEY] = float(activation.threshold)
    if activation.up is not None:
        keys[UP_ACTIVATION_KEY] = activation.up
    return keys


def _activation(config: dict[str, Any], name: str) -> FFNActivation:
    act = config.get("hidden_act")
    if not isinstance(act, str):
        raise FormatError(f"hidden_act in config.json must be a name, not {act!r}")
    threshold = _number(config, "hidden_act_param") if act == "fatrelu" else None
    activation = parse_activation(act, threshold)
    of_row = ARCHITECTURES[name].activation
    # Bamboo's checkpoints say "relu" and mean both relus of dReLU: the second is in the class.
    return of_row if activation == FFNActivation(of_row.gate) else activation


def _window_keys(config: dict[str, Any], n_layer: int) -> dict[str, Any]:
    """Mistral slides every layer, Qwen those that layer_types (older: max_window_layers) says, if told to."""
    window = config.get("sliding_window")
    if (
        window is None
        or config.get("use_sliding_window", config["architectures"][0] == "MistralForCausalLM") is False
    ):
        return {}
    keys: dict[str, Any] = {"attention.sliding_window": _integer(config, "sliding_window")}
    types = config.get("layer_types")
    if types is not None:
        known = ("full_attention", "sliding_attention")
        if not isinstance(types, list) or len(types) != n_layer or any(kind not in known for kind in types):
            raise UnsupportedModelError(
                "layer_types in config.json holds a kind of layer that is not supported"
            )
        windowed = [kind == "sliding_attention" for kind in types]
    else:
        first = _number(config, "max_window_layers", 0)
        windowed = [i >= first for i in range(n_layer)]
    if not any(windowed):
        return {}
    if not all(windowed):
        keys["attention.sliding_window_pattern"] = windowed
    return keys


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """RoPE's parameters in today's spelling (older files: rope_theta beside rope_scaling, "type")."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise FormatError("rope_parameters in config.json must be an object")
    rope = dict(rope)
    rope["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
    rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    original = config.get("original_max_position_embeddings", config.get("max_position_embeddings"))
    rope.setdefault("original_max_position_embeddings", original)
    return rope


def _rope_keys(config: dict[str, Any]) -> dict[str, Any]:
    rope = _rope(config)
    kind = rope["rope_type"]
    if _number(rope, "partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedModelError("a partial_rotary_factor other than 1 in config.json is not supported")
    keys: dict[str, Any] = {"rope.freq_base": float(_number(rope, "rope_theta"))}
    if kind in ("default", "llama3"):  # llama3's scaling is the tensor rope_freqs.weight
        return keys
    if kind not in ("linear", "yarn"):
        raise UnsupportedModelError(
            f"the RoPE scaling {kind!r} in config.json is not supported; supported are linear, yarn, llama3"
        )
    original = _integer(rope, "original_max_position_embeddings")
    keys["rope.scaling.type"] = kind
    keys["rope.scaling.factor"] = float(_number(rope, "factor", config["max_position_embeddings"] / original))
    if kind == "yarn":
        if rope.get("truncate", True) is False:
            raise UnsupportedModelError("YaRN with truncate set to false in config.json is not supported")
        keys["rope.scaling.original_context_length"] = original
        keys["rope.scaling.yarn_beta_fast"] = float(_number(rope, "beta_fast", 32.0))
        keys["rope.scaling.yarn_beta_slow"] = float(_number(rope, "beta_slow", 1.0))
        if rope.get("attention_factor") is not None:
            keys["rope.scaling.yarn_attn_factor"] = float(_number(rope, "attention_factor"))
        elif rope.get("mscale") and rope.get("mscale_all_dim"):
            scale = 0.1 * math.log(max(keys["rope.scaling.factor"], 1.0))
            ratio = (scale * _number(rope, "mscale") + 1) / (scale * _number(rope, "mscale_all_dim") + 1)
            keys["rope.scaling.yarn_attn_factor"] = ratio
    return keys


def _llama3_divisors(config: dict[str, Any]) -> np.ndarray | None:
    """Llama 3.1's scaling as GGUF stores it: what each frequency is divided by, float32 [head_dim / 2].

    Channels that turn less than low_freq_factor times in the original context are slowed by `factor`, those
    that turn more than high_freq_factor times stay, and between them 1 / divisor is interpolated.
    """
    rope = _rope(config)
    if rope["rope_type"] != "llama3":
        return None
    factor, low, high = (_number(rope, k) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    n_rot = _head_dim(config)
    freq = _number(rope, "rope_theta") ** (-np.arange(0, n_rot, 2, dtype=np.float64) / n_rot)
    turns = _integer(rope, "original_max_position_embeddings") * freq / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


# ---- tensors -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SourceTensor:
    """Where one tensor of a checkpoint lies; shape is outermost first, as Hugging Face writes it."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class Checkpoint:
    """All safetensors files of a folder. Format: u64 header length, JSON header, raw little-endian values."""

    DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}  # noqa: RUF012

    def __init__(self, folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        if index.exists():
            listed = _read_json(index).get("weight_map")
            if not isinstance(listed, dict) or not all(isinstance(f, str) for f in listed.values()):
                raise FormatError(f"{index} has no weight_map")
            files = sorted({folder / Path(name).name for name in listed.values()})
        else:
            files = [folder / "model.safetensors"]
        self.tensors: dict[str, SourceTensor] = {}
        for path in files:
            self.tensors.update(self._read_header(path))

    def _read_header(self, path: Path) -> Iterator[tuple[str, SourceTensor]]:
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\xff"))
                if length > size - 8:
                    raise FormatError(f"{path} is cut short inside its header; download it again")
                header = json.loads(file.read(length))
        except FileNotFoundError:
            raise ModelNotFoundError(f"{path} does not exist: the checkpoint must be safetensors") from None
        except (ValueError, RecursionError):
            raise FormatError(f"{path} has a damaged header; download it again") from None
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            try:
                dtype, shape = entry["dtype"], tuple(int(n) for n in entry["shape"])
                start, end = (8 + length + int(offset) for offset in entry["data_offsets"])
            except (KeyError, TypeError, ValueError):
                raise FormatError(f"{path} describes the tensor {name} wrongly; download it again") from None
            if dtype not in self.DTYPES:
                raise UnsupportedModelError(f"the tensor {name} in {path} is {dtype}, which is not supported")
            n_bytes = math.prod(shape) * np.dtype(self.DTYPES[dtype]).itemsize
            if not 8 + length <= start <= end <= size or end - start != n_bytes or min(shape, default=1) < 1:
                raise FormatError(f"{path} is cut short or damaged at the tensor {name}; download it again")
            yield name, SourceTensor(path, dtype, shape, start, end)

    def read(self, name: str) -> np.ndarray:
        """The tensor as float32, outermost dimension first."""
        source = self.tensors[name]
        dtype = np.dtype(self.DTYPES[source.dtype])
        n = math.prod(source.shape)
        raw = np.fromfile(source.path, dtype, n, offset=source.start).reshape(source.shape)
        if source.dtype == "BF16":  # the high half of a float32
            return (raw.astype(np.uint32) << 16).view(np.float32)
        return raw.astype(np.float32, copy=False)


def _tensor_names(checkpoint: Checkpoint, config: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(name in the checkpoint, name in the file), layer by layer; refuses a tensor that has no place."""
    tied = config.get("tie_word_embeddings", False) is True
    if not tied and "lm_head.weight" not in checkpoint.tensors:
        raise UnsupportedModelError("the checkpoint lacks lm_head.weight, and its config does not tie it")

    def place(name: str) -> tuple[int, str]:
        stem, _, kind = name.rpartition(".")
        if stem in TENSORS:
            return -1, f"{TENSORS[stem]}.{kind}"
        if (match := LAYER_TENSOR.fullmatch(name)) and match[2] in LAYER_TENSORS:
            return int(match[1]), f"blk.{int(match[1])}.{LAYER_TENSORS[match[2]]}.{match[3]}"
        raise UnsupportedModelError(f"the checkpoint has a tensor that is not known: {name}")

    ignored = {"lm_head.weight"} if tied else set()
    names = [n for n in checkpoint.tensors if n not in ignored and not n.endswith("rotary_emb.inv_freq")]
    for name in sorted(names, key=place):
        yield name, place(name)[1]


def _stored_type(shape: tuple[int, ...], type: GGMLType) -> GGMLType:
    if len(shape) < 2:
        return GGMLType.F32
    return type if shape[-1] % TYPES[type].block_size == 0 else GGMLType.F16


def _tensor(
    checkpoint: Checkpoint, source: str, target: str, config: dict[str, Any], name: str
) -> np.ndarray:
    values = checkpoint.read(source)
    if ARCHITECTURES[name].rope == "norm" and re.search(r"attn_[qk]\.(weight|bias)$", target):
        return _interleave(values, _head_dim(config), source)
    return values


def _interleave(values: np.ndarray, head_dim: int, name: str) -> np.ndarray:
    """Rows of each head from halves to neighbours: rows i and i + head_dim / 2 become 2i and 2i + 1."""
    if values.shape[0] % head_dim or head_dim % 2:
        raise FormatError(f"the tensor {name} has {values.shape[0]} rows, not whole heads of {head_dim}")
    rest = values.shape[1:]
    return values.reshape(-1, 2, head_dim // 2, *rest).swapaxes(1, 2).reshape(values.shape)


# ---- tokenizer -----------------------------------------------------------------------------------------

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # tokenizer.ggml.token_type

# Steps of a tokenizer.json's pre-tokenizer, and whether a word that is a token is taken whole whatever the
# merges say (ignore_merges) → tokenizer.ggml.pre. A Split is its regular expression; "bytelevel" splits too.
_CL100K = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS: dict[tuple[tuple[str, ...], bool], str] = {
    (("bytelevel",), False): "gpt-2",
    (("digits", "bytelevel"), False): "smollm",
    ((_CL100K + r"\p{N}{1,3}" + _REST,), True): "llama-bpe",
    ((_CL100K + r"\p{N}{1,3}" + _REST,), False): "dbrx",
    ((_CL100K + r"\p{N}" + _REST,), False): "qwen2",
    ((_TEKKEN,), True): "tekken",
}


def _tokenizer_keys(src: Path, config: dict[str, Any]) -> dict[str, Any]:
    """tokenizer.* keys from tokenizer.model (SentencePiece) or tokenizer.json (byte-level BPE), if any."""
    n_vocab = _integer(config, "vocab_size", high=1 << 24)
    path = src / "tokenizer_config.json"
    settings = _read_json(path) if path.exists() else {}
    if (src / "tokenizer.model").exists():
        tokens, types, keys = _sentencepiece(src, settings)
    elif (src / "tokenizer.json").exists():
        tokens, types, keys = _byte_level_bpe(_read_json(src / "tokenizer.json"), settings)
    else:
        return {}
    if len(tokens) > n_vocab:
        raise TokenizerError(f"the tokenizer has {len(tokens)} tokens, the model only {n_vocab}")
    missing = range(len(tokens), n_vocab)  # rows that pad the embedding to a round number
    keys["tokenizer.ggml.tokens"] = tokens + [f"[PAD{i}]" for i in missing]
    keys["tokenizer.ggml.token_type"] = np.array(types + [UNUSED for _ in missing], np.int32)
    if "tokenizer.ggml.scores" in keys:
        scores = keys["tokenizer.ggml.scores"] + [-1000.0 for _ in missing]
        keys["tokenizer.ggml.scores"] = np.array(scores, np.float32)
    ids = {token: i for i, token in enumerate(tokens)}
    for kind, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (id := _special_id(f"{kind}_token", settings, config, ids)) is not None:
            keys[f"tokenizer.ggml.{key}_token_id"] = id
    if (template := _chat_template(src, settings)) is not None:
        keys["tokenizer.chat_template"] = template
    return keys


def _special_id(
    kind: str, settings: dict[str, Any], config: dict[str, Any], ids: dict[str, int]
) -> int | None:
    """By its text in tokenizer_config.json, else by its number in config.json (the first of several)."""
    token = settings.get(kind)
    token = token.get("content") if isinstance(token, dict) else token
    if isinstance(token, str) and token in ids:
        return ids[token]
    id = config.get(f"{kind}_id")
    id = id[0] if isinstance(id, list) and id else id
    return id if isinstance(id, int) and 0 <= id < len(ids) else None


def _chat_template(src: Path, settings: dict[str, Any]) -> str | None:
    if (path := src / "chat_template.jinja").exists():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, each with a name
        named = [t for t in template if isinstance(t, dict) and t.get("name") == "default"]
        template = named[0].get("template") if named else None
    return template if isinstance(template, str) else None


def _byte_level_bpe(
    tokenizer: dict[str, Any], settings: dict[str, Any]
) -> tuple[list[str], list[int], dict[str, Any]]:
    try:
        model, added = tokenizer["model"], tokenizer.get("added_tokens") or []
        if model.get("type", "BPE") != "BPE" or model.get("byte_fallback"):
            raise TokenizerError(
                "tokenizer.json is not byte-level BPE, and there is no tokenizer.model to read instead"
            )
        # NFC (Qwen's) has no key in GGUF; text is nearly always in that form already.
        if (normalizer := tokenizer.get("normalizer")) and normalizer["type"] != "NFC":
            raise TokenizerError(f"the normalizer {normalizer['type']!r} in tokenizer.json is not supported")
        by_id = {id: (token, NORMAL) for token, id in model["vocab"].items()}
        for token in added:
            by_id[token["id"]] = (token["content"], CONTROL if token["special"] else USER_DEFINED)
        # Written "left right" by older versions of the library, as a pair by newer ones.
        merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
        n = max(by_id) + 1
        if n > 2 * len(by_id) + 65536:
            raise TokenizerError(f"tokenizer.json numbers its {len(by_id)} tokens up to {n - 1}")
        rows = [by_id.get(i, (f"[PAD{i}]", UNUSED)) for i in range(n)]
        keys: dict[str, Any] = {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": _pre_tokenizer(
                tokenizer["pre_tokenizer"], model.get("ignore_merges") is True
            ),
            "tokenizer.ggml.merges": merges,
            "tokenizer.ggml.add_bos_token": _adds_bos(tokenizer.get("post_processor"), settings),
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TokenizerError(f"tokenizer.json is damaged: {str(error)[:100]!r}") from None
    return [token for token, _ in rows], [kind for _, kind in rows], keys


def _pre_tokenizer(step: Any, ignore_merges: bool) -> str:
    """The name that GGUF files give to a tokenizer.json's pre-tokenizer."""
    steps = (
        step.get("pretokenizers", []) if isinstance(step, dict) and step.get("type") == "Sequence" else [step]
    )
    found = []
    for one in steps:
        kind = one.get("type") if isinstance(one, dict) else None
        if kind == "Split" and one.get("behavior") == "Isolated" and not one.get("invert"):
            found.append(str((one.get("pattern") or {}).get("Regex")))
        elif kind == "Digits" and one.get("individual_digits"):
            found.append("digits")
        elif kind == "ByteLevel" and not one.get("add_prefix_space"):
            found += ["bytelevel"] if one.get("use_regex", True) else []
        else:
            found.append(f"an unknown step {kind!r}")
    name = PRE_TOKENIZERS.get((tuple(found), ignore_merges))
    if name is None:
        raise TokenizerError(f"the pre-tokenizer in tokenizer.json is not known: {', '.join(found)[:200]}")
    return name


def _adds_bos(post_processor: Any, settings: dict[str, Any]) -> bool:
    """Whether a single text starts with a special token (Llama 3's template says so, Qwen has none)."""
    steps = [post_processor] if isinstance(post_processor, dict) else []
    for step in steps:
        steps += [s for s in step.get("processors") or [] if isinstance(s, dict)]
        single = step.get("single")
        if step.get("type") == "TemplateProcessing" and isinstance(single, list) and single:
            return "SpecialToken" in single[0]
    return settings.get("add_bos_token") is True


def _sentencepiece(src: Path, settings: dict[str, Any]) -> tuple[list[str], list[int], dict[str, Any]]:
    from sentencepiece import SentencePieceProcessor

    path = src / "tokenizer.model"
    try:
        proto = path.read_bytes()
        sp = SentencePieceProcessor(model_proto=proto)
    except (OSError, RuntimeError):
        raise TokenizerError(f"{path} is not a SentencePiece model") from None
    facts = dict(_proto_fields(proto))  # of sentencepiece_model.proto: 2 is the trainer, 3 the normalizer
    trainer, normalizer = (dict(_proto_fields(facts.get(number, b""))) for number in (2, 3))
    if trainer.get(3) != 2 or normalizer.get(2):
        raise TokenizerError(f"{path} is not BPE without normalisation, the only kind that is supported")
    n = sp.vocab_size()
    tokens = [sp.id_to_piece(i) for i in range(n)]
    scores = [sp.get_score(i) for i in range(n)]
    types = [NORMAL] * n
    for kind, is_kind in (
        (UNKNOWN, sp.is_unknown),
        (CONTROL, sp.is_control),
        (UNUSED, sp.is_unused),
        (BYTE, sp.is_byte),
    ):
        types = [kind if is_kind(i) else t for i, t in enumerate(types)]
    for id, token, special in _added_tokens(src):
        while len(tokens) <= id:
            tokens.append(f"[PAD{len(tokens)}]")
            scores.append(-1000.0)
            types.append(UNUSED)
        if id < n and types[id] != NORMAL:
            continue  # <s> and </s>, which are control tokens of the model already
        tokens[id], types[id] = token, CONTROL if special else USER_DEFINED
    keys: dict[str, Any] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.add_space_prefix": bool(normalizer.get(3, True)),
        "tokenizer.ggml.add_bos_token": settings.get("add_bos_token") is not False,
        "tokenizer.ggml.add_eos_token": settings.get("add_eos_token") is True,
    }
    return tokens, types, keys


def _proto_fields(message: bytes | int) -> Iterator[tuple[int, bytes | int]]:
    """(field number, value) of a protocol buffer that the sentencepiece library has accepted."""
    data = message if isinstance(message, bytes) else b""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while at < len(data):
        tag = varint()
        kind, n_bytes = tag & 7, {1: 8, 5: 4}.get(tag & 7, 0)
        value = varint() if kind in (0, 2) else int.from_bytes(data[at : at + n_bytes], "little")
        if kind == 2:
            n_bytes = value
            yield tag >> 3, data[at : at + n_bytes]
        else:
            yield tag >> 3, value
        at += n_bytes


def _added_tokens(src: Path) -> list[tuple[int, str, bool]]:
    """(id, text, special) of the tokens that Hugging Face added to a SentencePiece model, by id."""
    found: dict[int, tuple[str, bool]] = {}
    try:
        if (path := src / "added_tokens.json").exists():
            found |= {int(id): (token, False) for token, id in _read_json(path).items()}
        if (path := src / "tokenizer.json").exists():
            for token in _read_json(path).get("added_tokens") or []:
                found[int(token["id"])] = (str(token["content"]), bool(token["special"]))
    except (KeyError, TypeError, ValueError):
        raise TokenizerError(f"the added tokens in {path} are damaged") from None
    if found and not 0 <= min(found) <= max(found) < 1 << 24:
        raise TokenizerError(f"an added token has the id {max(found)}, which is out of range")
    return [(id, *found[id]) for id in sorted(found)]
