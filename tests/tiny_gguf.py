"""Writes tiny random GGUF models: any shape, any tensor type, with or without a tokenizer. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from make_blocks import random_blocks

from hotset.formats.gguf import GGUFWriter
from hotset.formats.quants import GGMLType


def write_llama(
    path: Path,
    *,
    architecture: str = "llama",
    n_layer: int = 2,
    n_embd: int = 64,
    n_ff: int = 96,
    n_head: int = 4,
    n_head_kv: int = 2,
    head_dim: int = 32,
    n_vocab: int = 96,
    n_ctx: int = 256,
    tied: bool = False,
    type_of: Callable[[str], GGMLType] = lambda name: GGMLType.F32,
    spread: Callable[[str], float] | None = None,
    keys: Mapping[str, Any] | None = None,
    seed: int = 1,
) -> Path:
    """A random model of the llama family. tied: without a matrix of its own for the output.

    type_of: the type of each matrix. keys: adds to the metadata and replaces it; None leaves a key out.
    spread: matrices are normal with a deviation of spread(name) / sqrt(columns). Without it those of float
    types are, with 1.5, and others are random valid blocks.
    """
    rng = np.random.default_rng(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(path, architecture)
    facts: dict[str, Any] = {
        f"{architecture}.block_count": n_layer,
        f"{architecture}.context_length": n_ctx,
        f"{architecture}.embedding_length": n_embd,
        f"{architecture}.feed_forward_length": n_ff,
        f"{architecture}.attention.head_count": n_head,
        f"{architecture}.attention.head_count_kv": n_head_kv,
        f"{architecture}.attention.key_length": head_dim,
        f"{architecture}.attention.value_length": head_dim,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{architecture}.rope.freq_base": 10000.0,
    }
    for key, value in {**facts, **(keys or {})}.items():
        if value is not None:
            writer.add(key, value)

    def matrix(name: str, rows: int, cols: int) -> None:
        type_ = type_of(name)
        if spread or type_ in (GGMLType.F32, GGMLType.F16, GGMLType.BF16):
            deviation = (spread(name) if spread else 1.5) / math.sqrt(cols)
            data = (rng.standard_normal((rows, cols)) * deviation).astype(np.float32)
            writer.add_tensor(f"{name}.weight", data, type_)
        else:
            writer.add_tensor(f"{name}.weight", random_blocks(type_, rows, cols, rng), type_, (cols, rows))

    def norm(name: str, width: int) -> None:
        writer.add_tensor(f"{name}.weight", rng.uniform(0.5, 1.5, width).astype(np.float32), GGMLType.F32)

    def bias(name: str, width: int) -> None:
        writer.add_tensor(f"{name}.bias", rng.standard_normal(width).astype(np.float32) * 0.1, GGMLType.F32)

    matrix("token_embd", n_vocab, n_embd)
    if not tied:
        matrix("output", n_vocab, n_embd)
    norm("output_norm", n_embd)
    for i in range(n_layer):
        widths = {"attn_q": n_head * head_dim, "attn_k": n_head_kv * head_dim, "attn_v": n_head_kv * head_dim}
        norm(f"blk.{i}.attn_norm", n_embd)
        for name, width in widths.items():
            matrix(f"blk.{i}.{name}", width, n_embd)
            if architecture == "qwen2":
                bias(f"blk.{i}.{name}", width)
        if architecture == "qwen3":
            norm(f"blk.{i}.attn_q_norm", head_dim)
            norm(f"blk.{i}.attn_k_norm", head_dim)
        matrix(f"blk.{i}.attn_output", n_embd, n_head * head_dim)
        norm(f"blk.{i}.ffn_norm", n_embd)
        matrix(f"blk.{i}.ffn_gate", n_ff, n_embd)
        matrix(f"blk.{i}.ffn_up", n_ff, n_embd)
        matrix(f"blk.{i}.ffn_down", n_embd, n_ff)
    writer.write()
    return path
