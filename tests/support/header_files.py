"""Model files of real shapes with a header and no tensor data, for planning only."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import gguf
import numpy as np
from synthetic import Shape

from hotset.formats.quants import GGMLType, row_bytes

Tensor = tuple[str, tuple[int, ...], GGMLType]  # name without ".weight", shape as in GGUF, type


def tensors_of(architecture: str, shape: Shape, type: GGMLType, n_vocab: int) -> Iterator[Tensor]:
    """Yield a llama's tensors; in PowerInfer's files (bamboo) the down projection is neuron-major."""
    for name, of in shape.matrices(n_vocab):
        if architecture == "bamboo" and name.endswith("ffn_down"):
            name, of = f"{name}_t", of[::-1]
        yield name, of, GGMLType.F32 if name.endswith("ffn_gate_inp") else type
    for i in range(shape.layers):
        yield f"blk.{i}.attn_norm", (shape.d,), GGMLType.F32
        yield f"blk.{i}.ffn_norm", (shape.d,), GGMLType.F32
    yield "output_norm", (shape.d,), GGMLType.F32


def write_header(
    path: Path, architecture: str, shape: Shape, tensors: Iterable[Tensor], n_ctx: int, **more: int
) -> None:
    """Write the header. more: further keys of the architecture."""
    writer = gguf.GGUFWriter(path, architecture)
    facts = {
        "block_count": shape.layers, "context_length": n_ctx, "embedding_length": shape.d,
        "feed_forward_length": shape.ff, "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads, "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
    }  # fmt: skip
    if shape.experts:
        facts |= {"expert_count": shape.experts, "expert_used_count": shape.used}
    for key, value in (facts | more).items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32(f"{architecture}.rope.freq_base", 1e4)
    n_bytes = 0
    for name, of, own in tensors:
        size = row_bytes(own, of[0]) * int(np.prod(of[1:]))
        writer.add_tensor_info(
            f"{name}.weight", of[::-1], np.dtype(np.float32), size, gguf.GGMLQuantizationType(own)
        )
        n_bytes += -(-size // 32) * 32
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(path, -(-path.stat().st_size // 32) * 32 + n_bytes)
    if architecture == "bamboo":
        with path.open("r+b") as file:
            file.write(b"PWRI")
