"""Random adapters (LoRA) of tiny models, in both formats, and models with merged adapters."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hotset.backends.adapters import AdapterSet
from hotset.backends.base import AdapterScales
from hotset.formats.gguf import GGUFFile, GGUFWriter, copy_metadata
from hotset.formats.lora import FloatMatrix, LoraAdapter, LowRankPair
from hotset.formats.quants import GGMLType, dequantize
from hotset.model.graph import Graph
from hotset.model.low_rank import adaptable


def random_pairs(
    graph: Graph,
    tensors: Mapping[str, Any],
    *,
    rank: int = 4,
    seed: int = 0,
    names: Callable[[str], bool] = lambda name: True,
    type: GGMLType = GGMLType.F32,
    factor: float = 0.5,
) -> dict[str, LowRankPair]:
    """Return pairs for the adaptable matrices that `names` accepts.

    Their products are about as large as the matrices.
    """
    rng = np.random.default_rng(seed)
    pairs = {}
    for name, (n_out, n_in) in adaptable(graph, tensors).items():
        a = rng.standard_normal((rank, n_in)).astype(np.float32) / np.sqrt(n_in, dtype=np.float32)
        b = rng.standard_normal((n_out, rank)).astype(np.float32)
        if names(name):
            pairs[name] = LowRankPair(FloatMatrix.of(a, type), FloatMatrix.of(b, type), factor)
    return pairs


def random_adapter(graph: Graph, tensors: Mapping[str, Any], **options: Any) -> LoraAdapter:
    return LoraAdapter(Path("random"), random_pairs(graph, tensors, **options))


def scales_of(*adapters: LoraAdapter, scales: Sequence[float] = ()) -> AdapterScales:
    return tuple(
        (each.digest, scale) for each, scale in zip(adapters, scales or [1.0] * len(adapters), strict=True)
    )


def give(backend: Any, adapters: Sequence[LoraAdapter], default: AdapterScales = ()) -> None:
    """Give adapters to a backend."""
    backend.adapters = AdapterSet(backend.graph, backend.weights.tensors, adapters, default)


def write_adapter(
    path: Path,
    pairs: Mapping[str, LowRankPair],
    *,
    architecture: str = "llama",
    alpha: float = 8.0,
    keys: Mapping[str, Any] | None = None,
    type: GGMLType = GGMLType.F32,
) -> Path:
    """Write a file in llama.cpp's format, whose factors are alpha / rank for any pairs' factors."""
    writer = GGUFWriter(path, architecture)
    facts = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": alpha, **(keys or {})}
    for key, value in facts.items():
        if value is not None:
            writer.add(key, value)
    for name, pair in pairs.items():
        writer.add_tensor(f"{name}.lora_a", pair.a.floats, type)
        writer.add_tensor(f"{name}.lora_b", pair.b.floats, type)
    writer.write()
    return path


def write_peft(
    folder: Path,
    tensors: Mapping[str, np.ndarray],
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write a PEFT folder. tensors: names as in the file, without "base_model.model."."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    facts = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", **(config or {})}
    (folder / "adapter_config.json").write_text(json.dumps(facts))
    named = {f"base_model.model.{name}": np.ascontiguousarray(value) for name, value in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors")
    return folder


def write_merged(
    path: Path, gguf: GGUFFile, added: Iterable[tuple[Mapping[str, LowRankPair], float]]
) -> Path:
    """Write the model with adapters, each times its scale, added to its matrices, which become F32."""
    writer = GGUFWriter(path, gguf.architecture)
    copy_metadata(gguf, writer)
    added = list(added)
    for name, info in gguf.tensors.items():
        values = dequantize(gguf.data(name), info.type, info.shape).astype(np.float64)
        for pairs, scale in added:
            if (pair := pairs.get(name)) is not None:
                values += pair.b.floats.astype(np.float64) @ pair.a.floats * pair.factor * scale
        writer.add_tensor(name, values.astype(np.float32), GGMLType.F32)
    writer.write()
    return path
