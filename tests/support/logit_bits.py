"""Small models whose logits have hashes in tests/data/bits.json, and the hash function.

test_bits.py compares them, with the hashes of recipes and of real files. This module needs only hotset and
NumPy, so that platforms without PyTorch can compare theirs (tests/platforms/hashes.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from paths import DATA
from tiny_gguf import write_llama, write_relu

import hotset
from hotset.formats.quants import DECODABLE, GGMLType

T = GGMLType
TABLE = DATA / "bits.json"
DENSE = {
    "llama": {}, "llama-window": {"keys": {"llama.attention.sliding_window": 24}},
    "llama-tied": {"tied": True}, "qwen2": {"architecture": "qwen2"}, "qwen3": {"architecture": "qwen3"},
}  # fmt: skip
RELU = {
    "llama": {"architecture": "llama"},
    "bamboo": {"architecture": "bamboo"},
    "falcon-7b": {"architecture": "falcon", "n_head_kv": 1},
    "falcon-40b": {"architecture": "falcon", "two_norms": True},
    "opt": {"architecture": "opt"},
    "relu2": {"architecture": "llama", "keys": {"llama.hidden_activation": "relu2"}},
    "fatrelu": {
        "architecture": "llama",
        "keys": {"llama.hidden_activation": "fatrelu", "hotset.fatrelu_threshold": 0.4},
    },
}
RELU_TYPES = (T.F32, T.F16, T.Q8_0, T.Q4_0)
LENGTHS = (61, 64, 65, 69, 90)  # tokens
N_VOCAB = 96


def dense_cases() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    for name, options in DENSE.items():
        yield f"dense/{name}/F32", options, {}
    for type_ in sorted(DECODABLE):
        yield f"dense/llama/{type_.name}", {"type": type_}, {}
    for kv_type in ("q8_0", "q4_0", "q8_0/q4_0"):
        yield f"dense/llama/Q4_1/{kv_type} cache", {"type": T.Q4_1}, {"kv_type": kv_type}


def relu_cases() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    for name, options in RELU.items():
        for type_ in RELU_TYPES:
            for mode in ("dense", "exact", "predicted"):
                yield f"powerinfer/{name}/{type_.name}/{mode}", {**options, "type": type_}, {"sparsity": mode}
            for mode in ("dense", "exact"):
                plain = {**options, "type": type_, "dialect": "gguf"}
                yield f"plain/{name}/{type_.name}/{mode}", plain, {"sparsity": mode}


DENSE_CASES = {name: (model, settings) for name, model, settings in dense_cases()}
RELU_CASES = {name: (model, settings) for name, model, settings in relu_cases()}


def write_case(name: str, folder: Path) -> Path:
    """Write the model of a case of DENSE_CASES or RELU_CASES."""
    if name in DENSE_CASES:
        options = dict(DENSE_CASES[name][0])
        type_ = options.pop("type", T.F32)
        options = {"type_of": lambda _: type_, "head_dim": 64, "n_embd": 256, "n_ff": 256, **options}
        return write_llama(folder / "model.gguf", **options)
    options = dict(RELU_CASES[name][0])
    type_ = options.pop("type")
    return write_relu(
        folder / "model.gguf", **{"n_embd": 64, "n_ff": 736, "type_of": lambda _: type_, **options}
    )


def bits_of(model: hotset.Model, n_vocab: int) -> str:
    """Return the SHA-256 of logits.

    The inputs are whole prompts, a single token, and tokens after a reused KV block. For an encoder, the hash
    is of hidden states.
    """
    ids = np.random.default_rng(0).integers(0, n_vocab, LENGTHS[-1]).tolist()
    hasher = hashlib.sha256()
    for n in LENGTHS:  # later prompts reuse the second one's full KV block
        encodes = model.graph.is_encoder
        rows = model.taps(ids[:n], ["result"])["result"] if encodes else model.logits(ids[:n])
        hasher.update(np.ascontiguousarray(rows).tobytes())
    return hasher.hexdigest()[:24]


def written_bits() -> tuple[str, dict[str, str]]:
    """Return the platform on which the hashes were recorded, and the hashes by name."""
    table = json.loads(TABLE.read_text())
    return table["platform"], table["bits"]
