"""PEFT's folders of adapters: adapter_config.json, and adapter_model.safetensors or .bin.

Their matrices have the names and row order of the checkpoint that they were trained with, which is not
available. The classes of the model's architecture give the names (convert/checkpoints/). Rows of queries and
keys are permuted if the model's rows were (convert/hf.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hotset.convert.checkpoints import CLASSES
from hotset.convert.checkpoints.classes import HFClass
from hotset.convert.hf_checkpoint import map_safetensors
from hotset.convert.hf_config import read_json
from hotset.convert.hf_rope import neighbours
from hotset.errors import FormatError, ModelNotFoundError, UnsupportedModelError
from hotset.escaping import clause
from hotset.formats.lora import AdapterFile, FloatMatrix, StoredMatrix
from hotset.formats.mapped import MappedFile
from hotset.formats.quants import GGMLType
from hotset.formats.torch_file import BFLOAT16, map_torch
from hotset.parameters import shown

CONFIG = "adapter_config.json"
_MATRIX = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
_MOST_ALPHA = 1e30
_MOST_PAIRS = 4096  # of matrices; also the maximum number of patterns
_CONFIG_BYTES, HEADER_BYTES = 1 << 20, 16 << 20
_LITERAL = re.compile(r"[A-Za-z0-9_.]+")
# Entries that change the meaning of an adapter, and their values without effect.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "use_dora": (False,), "lora_bias": (False,), "fan_in_fan_out": (False,), "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"), "layer_replication": (),
    "target_parameters": ([],), "trainable_token_indices": (), "alora_invocation_tokens": (),
    "use_qalora": (False,), "arrow_config": (),
}  # fmt: skip


def open_peft_adapter(
    folder: Path, architecture: str, head_dim: int, check: Callable[[], object] = lambda: None
) -> AdapterFile:
    """Open an adapter for a model of an architecture, whose heads have head_dim channels.

    check: called before each tensor; an error in it ends the reading.

    Raises ModelNotFoundError for missing files, FormatError for damaged ones, UnsupportedModelError for other
    kinds of adapters, and for models whose matrices a conversion changes in other ways.
    """
    config = read_json(folder / CONFIG, _CONFIG_BYTES)
    if config.get("peft_type") != "LORA":
        raise UnsupportedModelError(
            f"the adapter {folder} is of the kind {clause(shown(config.get('peft_type')))}; LORA is supported"
        )
    for entry, plain in _PLAIN.items():
        if (value := config.get(entry)) is not None and value not in plain:
            raise UnsupportedModelError(
                f"the adapter {folder} has {entry} {clause(shown(value))}, which is not supported"
            )
    alphas = _Alphas(config, folder)
    names = _Names(folder, architecture)
    halves: dict[tuple[str, str], StoredMatrix] = {}
    modules: dict[str, str] = {}
    tensors, mapped = _tensors(folder)
    if len(tensors) > 2 * _MOST_PAIRS:
        raise FormatError(f"{folder} has {len(tensors)} tensors; at most {2 * _MOST_PAIRS} are supported")
    for name, values in tensors.items():
        check()
        match = _MATRIX.fullmatch(name)
        if match is None:
            raise UnsupportedModelError(
                f"the adapter {folder} has the tensor {clause(name)}, which plain LoRA adapters do not have"
            )
        target, half = names.target(match[1]), match[2].lower()
        if (target, half) in halves:
            raise FormatError(f"{folder} has two tensors for {target}, one of them {clause(name)}")
        permuted = head_dim if half == "b" and names.permutes(target) else None
        halves[target, half] = _matrix(values, permuted, folder, name)
        modules[target] = match[1]
    return AdapterFile.of(
        folder, None, halves, lambda target, rank: alphas.factor(modules[target], rank), mapped
    )


class _Names:
    """The names in GGUF files of modules in checkpoints of an architecture."""

    def __init__(self, folder: Path, architecture: str) -> None:
        self._folder, self._architecture = folder, architecture
        classes = {id(one): one for one in CLASSES.values() if one.architecture == architecture}
        self._classes = [one for one in classes.values() if not _changes(one)]
        if not self._classes:
            raise UnsupportedModelError(
                f"the adapter {folder} is a folder of PEFT's, which is not read for {architecture} models; "
                "convert it to GGUF with llama.cpp's convert_lora_to_gguf.py"
            )

    def target(self, module: str) -> str:
        """Return the name of a module's weight. Raises UnsupportedModelError."""
        found = {name for hf in self._classes if (name := _target(module, hf)) is not None}
        if len(found) != 1 or " " in (name := found.pop()):
            raise UnsupportedModelError(
                f"the adapter {self._folder} changes {clause(module)}, but adapters cannot change it in "
                f"{self._architecture} models"
            )
        return name

    def permutes(self, target: str) -> bool:
        """Return whether the rows of a tensor have another order in files."""
        stem = target.rpartition(".")[0].rpartition(".")[2]
        return self._classes[0].turns_rows(self._architecture) and stem in ("attn_q", "attn_k")


def _changes(hf: HFClass) -> bool:
    """Return whether a conversion changes matrices by more than the order of the rows of q and k."""
    return hf.grouped_qkv or bool(hf.stored_by_input) or not all(part.adapts for part in hf.parts)


def _target(module: str, hf: HFClass) -> str | None:
    module = hf.full_name(f"{hf.text_name(module)}.weight").removesuffix(".weight")
    match = re.fullmatch(re.escape(hf.layers) + r"\.([0-9]{1,5})\.(.+)", module)
    if match is not None:
        inside = hf.target(match[2])
        return None if inside is None else f"blk.{int(match[1])}.{inside}.weight"
    outside = hf.outer_target(module)
    return None if outside is None else f"{outside}.weight"


def _tensors(folder: Path) -> tuple[dict[str, np.ndarray], MappedFile]:
    map_bounded = partial(map_safetensors, header_bytes=HEADER_BYTES)
    for name, mapped in (("adapter_model.safetensors", map_bounded), ("adapter_model.bin", map_torch)):
        if (folder / name).exists():
            return mapped(folder / name)
    raise ModelNotFoundError(f"{folder} holds no adapter_model.safetensors; the adapter is not complete")


def _matrix(values: np.ndarray, permuted: int | None, folder: Path, name: str) -> StoredMatrix:
    """Return the matrix of a tensor. permuted: channels of the heads whose rows are permuted, or None."""
    kinds = {
        np.dtype("<f8"): GGMLType.F32, np.dtype("<f4"): GGMLType.F32, np.dtype("<f2"): GGMLType.F16,
        BFLOAT16: GGMLType.BF16,
    }  # fmt: skip
    if values.ndim != 2 or 0 in values.shape or values.dtype not in kinds:
        raise FormatError(
            f"{folder}: {clause(name)} is {list(values.shape)} of {values.dtype}, and no matrix of floats"
        )
    if permuted is not None and values.shape[0] % permuted:
        raise FormatError(f"{folder}: {clause(name)} has no whole heads of {permuted} channels")
    rows = None if permuted is None else neighbours(values.shape[0], permuted)

    def read() -> FloatMatrix:
        floats = values.astype(np.float32) if values.dtype == np.dtype("<f8") else values
        data = np.frombuffer((floats if rows is None else floats[rows]).tobytes(), np.uint8)
        return FloatMatrix(kinds[values.dtype], values.shape, data)

    return StoredMatrix(kinds[values.dtype], values.shape, read)


class _Alphas:
    """The factors of the products of pairs: alpha divided by the rank, or by its square root."""

    def __init__(self, config: Mapping[str, Any], folder: Path) -> None:
        pattern = config.get("alpha_pattern") or {}
        if not isinstance(pattern, dict):
            raise FormatError(f"{folder / CONFIG}: alpha_pattern is {clause(shown(pattern))}, and no object")
        if len(pattern) > _MOST_PAIRS:
            raise FormatError(
                f"{folder / CONFIG}: alpha_pattern has {len(pattern)} patterns; at most {_MOST_PAIRS} are "
                "supported"
            )
        for names in pattern:
            if _LITERAL.fullmatch(names) is None:
                raise UnsupportedModelError(
                    f"{folder / CONFIG}: alpha_pattern has the pattern {clause(names)}; plain names are "
                    "supported"
                )
        by_root = config.get("use_rslora")
        if by_root is not None and not isinstance(by_root, bool):
            raise FormatError(f"{folder / CONFIG}: use_rslora is true or false, not {clause(shown(by_root))}")
        alphas = {names: self._checked(value, folder) for names, value in pattern.items()}
        self._default = self._checked(config.get("lora_alpha", 8), folder)
        self._by_root = bool(by_root)
        self._patterns = {names: (i, alpha) for i, (names, alpha) in enumerate(alphas.items())}

    def _checked(self, alpha: Any, folder: Path) -> float:
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) <= _MOST_ALPHA:
            raise FormatError(f"{folder / CONFIG}: lora_alpha is {clause(shown(alpha))}, and no number")
        return alpha

    def factor(self, module: str, rank: int) -> float:
        """Return the factor of a module. The first pattern of the file that its name ends with counts."""
        parts = module.split(".")
        suffixes = (".".join(parts[i:]) for i in range(len(parts)))
        found = [self._patterns[suffix] for suffix in suffixes if suffix in self._patterns]
        alpha = min(found)[1] if found else self._default
        return alpha / (math.sqrt(rank) if self._by_root else rank)
