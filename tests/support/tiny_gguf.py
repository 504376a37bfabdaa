"""Writes tiny random GGUF models: any shape, any tensor type, with or without a tokenizer, without torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from make_blocks import random_blocks

from hotset.formats.gguf import Dialect, GGUFFile, GGUFWriter, ValueType, open_gguf
from hotset.formats.quants import ENCODABLE, GGMLType


def write_relu(  # noqa: C901
    path: Path,
    architecture: str = "llama",
    *,
    dialect: Dialect = "powerinfer",
    two_norms: bool = False,
    ranks: tuple[int, ...] = (32, 64),
    threshold: float | None = 0.1,
    n_embd: int = 64,
    n_ff: int = 96,
    n_head: int = 4,
    n_head_kv: int = 2,
    n_vocab: int = 96,
    n_ctx: int = 256,
    type_of: Callable[[str], GGMLType] = lambda name: GGMLType.F32,
    keys: Mapping[str, Any] | None = None,
    replaced: Mapping[str, np.ndarray] | None = None,
    seed: int = 1,
) -> Path:
    """Write a random model of one of PowerInfer's architectures: llama, bamboo, falcon, opt.

    In PowerInfer's dialect it has predictors, one layer per rank of `ranks`. As a plain file (dialect="gguf")
    it has the same values, the down projection by output, the activation in its key, and no predictors.
    two_norms: as in falcon 40B. threshold: None leaves the key out. type_of: the type of each matrix; for
    types that cannot be encoded, values differ. replaced: matrices instead of random ones.
    """
    rng, of_predictor = np.random.default_rng(seed), np.random.default_rng(seed + 1)
    layer_norm, gated = architecture in ("falcon", "opt"), architecture in ("llama", "bamboo")
    head_dim = n_embd // n_head
    n_head_kv = n_head if architecture == "opt" else n_head_kv
    epsilon = "layer_norm_epsilon" if layer_norm else "layer_norm_rms_epsilon"
    facts: dict[str, Any] = {
        f"{architecture}.block_count": len(ranks), f"{architecture}.context_length": n_ctx,
        f"{architecture}.embedding_length": n_embd, f"{architecture}.feed_forward_length": n_ff,
        f"{architecture}.attention.head_count": n_head, f"{architecture}.attention.head_count_kv": n_head_kv,
        f"{architecture}.attention.{epsilon}": None if architecture == "opt" else 1e-5,
        "powerinfer.sparse_threshold": threshold if dialect == "powerinfer" else None,
        f"{architecture}.hidden_activation": None
        if dialect == "powerinfer" or architecture == "bamboo"
        else "relu",
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(path, architecture, dialect=dialect)
    for key, value in {**facts, **(keys or {})}.items():
        if value is not None:
            writer.add(key, value)

    def matrix(name: str, rows: int, cols: int, *, scale: float = 1.5, by_column: bool = False) -> None:
        source = of_predictor if ".fc" in name else rng
        data = (source.standard_normal((rows, cols)) * scale / math.sqrt(cols)).astype(np.float32)
        data = (replaced or {}).get(name, data)
        data, type_ = np.ascontiguousarray(data.T if by_column else data), type_of(name)
        if type_ in ENCODABLE:
            writer.add_tensor(f"{name}.weight", data, type_)
        else:  # of about the same size
            blocks = random_blocks(type_, len(data), data.shape[1], source)
            writer.add_tensor(f"{name}.weight", blocks, type_, (data.shape[1], len(data)))

    def bias(name: str, width: int) -> None:
        writer.add_tensor(f"{name}.bias", rng.standard_normal(width).astype(np.float32) * 0.1, GGMLType.F32)

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", rng.uniform(0.5, 1.5, n_embd).astype(np.float32), GGMLType.F32)
        if layer_norm:
            bias(name, n_embd)

    matrix("token_embd", n_vocab, n_embd, scale=8)
    if architecture == "opt":
        matrix("position_embd", n_ctx + 2, n_embd, scale=4)
    else:
        matrix("output", n_vocab, n_embd)
    norm("output_norm")
    for i, rank in enumerate(ranks):
        blk, kv = f"blk.{i}", n_head_kv * head_dim
        if architecture == "falcon":
            matrices = {"attn_qkv": (n_embd + 2 * kv, n_embd), "attn_output": (n_embd, n_embd)}
            norms = ["attn_norm", "attn_norm_2"] if two_norms else ["attn_norm"]
        else:
            matrices = {"attn_q": (n_embd, n_embd), "attn_k": (kv, n_embd), "attn_v": (kv, n_embd)}
            matrices |= {"attn_output": (n_embd, n_embd)}
            norms = ["attn_norm", "ffn_norm"]
        matrices |= dict.fromkeys(("ffn_gate", "ffn_up") if gated else ("ffn_up",), (n_ff, n_embd))
        for name in norms:
            norm(f"{blk}.{name}")
        for name, (rows, cols) in matrices.items():
            matrix(f"{blk}.{name}", rows, cols)
        down = "ffn_down_t" if dialect == "powerinfer" else "ffn_down"
        matrix(f"{blk}.{down}", n_ff, n_embd, scale=1.0, by_column=dialect == "gguf")
        if architecture == "opt":
            for name, width in {**{n: rows for n, (rows, _) in matrices.items()}, down: n_embd}.items():
                bias(f"{blk}.{name}", width)
        if dialect == "powerinfer":
            matrix(f"{blk}.fc1", rank, n_embd)
            matrix(f"{blk}.fc2", n_ff, rank)
    writer.write()
    return path


def write_llama(  # noqa: C901
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
    experts: tuple[int, int] | None = None,
    one_by_one: bool = False,
    down_neuron_major: bool = False,
    n_ff_shared: int = 0,
    biased: bool = False,
    type_of: Callable[[str], GGMLType] = lambda name: GGMLType.F32,
    spread: Callable[[str], float] | None = None,
    keys: Mapping[str, Any] | None = None,
    vectors: Mapping[str, Sequence[float] | np.ndarray] | None = None,
    seed: int = 1,
) -> Path:
    """Write a random model of the llama family.

    tied: without an output matrix of its own.

    experts: their number, and the number per token, with n_ff neurons each. one_by_one: in one tensor each,
    with the same values. down_neuron_major: their down matrices have a row per neuron. n_ff_shared: neurons
    that all tokens share. biased: experts and router have biases.

    type_of: the type of each matrix. keys: adds to the metadata and replaces it; None leaves a key out.
    vectors: more F32 tensors. spread: matrices are normal with a deviation of spread(name) / sqrt(columns).
    Without it, matrices of float types use 1.5, and others are random valid blocks.
    """
    rng = np.random.default_rng(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(path, architecture)
    facts: dict[str, Any] = {
        f"{architecture}.block_count": n_layer, f"{architecture}.context_length": n_ctx,
        f"{architecture}.embedding_length": n_embd, f"{architecture}.feed_forward_length": n_ff,
        f"{architecture}.attention.head_count": n_head, f"{architecture}.attention.head_count_kv": n_head_kv,
        f"{architecture}.attention.key_length": head_dim, f"{architecture}.attention.value_length": head_dim,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5, f"{architecture}.rope.freq_base": 10000.0,
    }  # fmt: skip
    n_expert = experts[0] if experts else 0
    if experts:
        facts[f"{architecture}.expert_count"], facts[f"{architecture}.expert_used_count"] = experts
        facts[f"{architecture}.expert_shared_feed_forward_length"] = n_ff_shared
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

    def of_experts(blk: str, name: str, rows: int, cols: int, n_bias: int) -> None:
        type_ = type_of(f"{blk}.{name}_exps")
        if type_ in (GGMLType.F32, GGMLType.F16, GGMLType.BF16):
            data = (rng.standard_normal((n_expert, rows, cols)) * 1.5 / math.sqrt(cols)).astype(np.float32)
        else:
            data = random_blocks(type_, n_expert * rows, cols, rng).reshape(n_expert, -1)
        for e in range(n_expert) if one_by_one else ():
            writer.add_tensor(f"{blk}.{name}.{e}.weight", data[e], type_, (cols, rows))
        if not one_by_one:
            writer.add_tensor(f"{blk}.{name}_exps.weight", data, type_, (cols, rows, n_expert))
        if biased:
            bias(f"{blk}.{name}_exps", n_expert, n_bias)

    def norm(name: str, width: int) -> None:
        writer.add_tensor(f"{name}.weight", rng.uniform(0.5, 1.5, width).astype(np.float32), GGMLType.F32)

    def bias(name: str, *shape: int) -> None:
        writer.add_tensor(f"{name}.bias", rng.standard_normal(shape).astype(np.float32) * 0.1, GGMLType.F32)

    for name, numbers in (vectors or {}).items():
        writer.add_tensor(name, np.array(numbers, np.float32), GGMLType.F32)
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
        if experts:
            data = (rng.standard_normal((n_expert, n_embd)) * 1.5 / math.sqrt(n_embd)).astype(np.float32)
            writer.add_tensor(f"blk.{i}.ffn_gate_inp.weight", data, GGMLType.F32)
            if biased:
                bias(f"blk.{i}.ffn_gate_inp", n_expert)
            down = (n_ff, n_embd) if down_neuron_major else (n_embd, n_ff)
            for name, shape in (("gate", (n_ff, n_embd)), ("up", (n_ff, n_embd)), ("down", down)):
                of_experts(f"blk.{i}", f"ffn_{name}", *shape, n_embd if name == "down" else n_ff)
        if n_ff_shared:
            matrix(f"blk.{i}.ffn_gate_shexp", n_ff_shared, n_embd)
            matrix(f"blk.{i}.ffn_up_shexp", n_ff_shared, n_embd)
            matrix(f"blk.{i}.ffn_down_shexp", n_embd, n_ff_shared)
        if not experts:
            matrix(f"blk.{i}.ffn_gate", n_ff, n_embd)
            matrix(f"blk.{i}.ffn_up", n_ff, n_embd)
            matrix(f"blk.{i}.ffn_down", n_embd, n_ff)
    writer.write()
    return path


def with_other_keys(
    path: Path,
    out: Path,
    keys: Mapping[str, Any],
    lists: ValueType | None = None,
    without: str | None = None,
) -> GGUFFile:
    """Rewrite a file with other keys of its architecture; None removes one.

    lists: the type of numbers in lists. without: tensors whose names contain this text are left out.
    """
    with open_gguf(path) as gguf:
        writer = GGUFWriter(out, gguf.architecture)
        given = {f"{gguf.architecture}.{key}": value for key, value in keys.items()}
        for key, value in (dict(gguf.metadata) | given).items():
            if value is not None and not key.startswith(("general.", "GGUF.")):
                is_list = key in given and isinstance(value, list)
                writer.add(key, value, lists if is_list else None)
        for name, info in gguf.tensors.items():
            if without is None or without not in name:
                writer.add_tensor(name, np.array(gguf.data(name)), info.type, info.shape)
        writer.write()
    return open_gguf(out)
