"""Writes tiny random models whose tokens are bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tiny_gguf import write_llama, write_relu

from hotset.formats.quants import GGMLType

SPECIALS = ["<s>", "</s>", "<|im_start|>"]
BOS, EOS = 256, 257
PRINTABLE = {id: -math.inf for id in range(259) if not 32 <= id < 127}  # a bias; ids are bytes
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
)


def byte_letters() -> list[str]:
    """Return GPT-2's alphabet: printable bytes represent themselves, others are letters from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    letters, n = [], 0
    for byte in range(256):
        if byte in printable:
            letters.append(chr(byte))
        else:
            letters.append(chr(256 + n))
            n += 1
    return letters


def write_model(
    path: Path,
    *,
    n_layer: int = 2,
    n_embd: int = 32,
    n_ff: int = 48,
    experts: tuple[int, int] | None = None,
    type_of: Callable[[str], GGMLType] = lambda _: GGMLType.F32,
    down_neuron_major: bool = False,
    vectors: Mapping[str, np.ndarray] | None = None,
    more_tokens: Sequence[str] = (),
    **keys: Any,
) -> Path:
    """Write a llama of a few layers over bytes and three special tokens, with random parameters.

    vectors: more tensors. more_tokens: special tokens after those three.
    """
    specials = [*SPECIALS, *more_tokens]
    tokens = byte_letters() + specials
    tokenizer: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 256 + [3] * len(specials), "tokenizer.ggml.merges": ["h e"],
        "tokenizer.ggml.bos_token_id": BOS, "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.ggml.add_bos_token": True, "tokenizer.chat_template": TEMPLATE,
    }  # fmt: skip
    return write_llama(
        path, n_layer=n_layer, n_embd=n_embd, n_ff=n_ff, head_dim=8, n_vocab=len(tokens), experts=experts,
        type_of=type_of,
        down_neuron_major=down_neuron_major, spread=lambda name: 3.0 if name == "output" else 1.5,
        keys=tokenizer | keys, vectors=vectors, seed=5,
    )  # fmt: skip


def write_reranker(path: Path, **keys: Any) -> Path:
    """Write the same model with a reranker's classifier, which scores a query followed by a document."""
    rng = np.random.default_rng(6)
    shapes = {"cls.weight": (32, 32), "cls.bias": (32,), "cls.output.weight": (1, 32)}
    vectors = {
        name: (rng.standard_normal(shape) / math.sqrt(shape[-1])).astype(np.float32)
        for name, shape in shapes.items()
    }
    return write_model(path, vectors=vectors, **{"llama.pooling_type": 4} | keys)


N_LAYER, N_FF, N_VOCAB = 2, 96, 101
PLANTED_LAYERS, N_PLANTED = 6, 512  # for models with `counts`


def vocabulary() -> dict[str, Any]:
    """Return printable ASCII, a space, a newline and three special tokens, without a beginning of text."""
    tokens = [chr(c) for c in range(33, 127)] + ["Ġ", "Ċ", "<|endoftext|>", "<s>", "</s>", "th", "Ġt"]
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 96 + [3] * 3 + [1] * 2, "tokenizer.ggml.merges": ["t h", "Ġ t"],
        "tokenizer.ggml.eos_token_id": 98, "tokenizer.ggml.bos_token_id": 97,
        "tokenizer.ggml.add_bos_token": False,
    }  # fmt: skip


def write_sparse(path: Path, more: dict[str, Any] | None = None, **options: Any) -> Path:
    """Write a random PowerInfer model of two layers or, with dialect="gguf", the same as a plain file.

    more: keys of the file.
    """
    return write_relu(path, n_vocab=N_VOCAB, keys={**vocabulary(), **(more or {})}, **options)


def counts(hot: int) -> list[np.ndarray]:
    """Return counts in which 64 neurons from `hot` on always fire and the others seldom."""
    layers = [np.ones(N_PLANTED, np.int64) for _ in range(PLANTED_LAYERS)]
    for layer in layers:
        layer[hot : hot + 64] = 1000
    return layers
