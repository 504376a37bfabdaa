"""Files that PowerInfer publishes with a model: activation counts and GPU indices.

    model.powerinfer.gguf
    model.powerinfer.gguf.generated.gpuidx   neurons that the original engine puts on the GPU
    activation/activation_<layer>.pt         how often each neuron fired: one torch tensor [n_ff] per layer

The model is GGUF with another magic, which `formats/gguf.py` reads; docs/reference/gguf.md lists the
differences.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hotset.errors import FormatError, HotsetError
from hotset.files import unreadable
from hotset.formats.gguf import GGUFWriter, ValueType, open_gguf
from hotset.formats.quants import GGMLType
from hotset.formats.torch_file import read_torch, write_torch

ACTIVATION_FILE = re.compile(r"activation_(\d+)\.pt")
GPU_INDEX_SUFFIX = ".generated.gpuidx"
GPU_INDEX_ARCHITECTURE = "generic.gpu_index"
VRAM_CAPACITY_KEY = "split.vram_capacity"


@dataclass(frozen=True)
class GPUIndex:
    """The neurons of each layer that are on the GPU.

    vram_capacity: bytes for which they were chosen. on_gpu: per layer, bool [n_ff].
    """

    vram_capacity: int
    on_gpu: list[np.ndarray]


def activation_files(model_path: str | os.PathLike[str]) -> Path | None:
    """Return the folder with activation counts next to a model, or None."""
    folder = Path(model_path).parent / "activation"
    return folder if folder.is_dir() and _activation_numbers(folder) else None


def gpu_index_file(model_path: str | os.PathLike[str]) -> Path | None:
    """Return the GPU index next to a model: one named after it, or the only one in its folder; or None."""
    model = Path(model_path)
    named = model.with_name(model.name + GPU_INDEX_SUFFIX)
    if named.is_file():
        return named
    others = [path for path in model.parent.glob(f"*{GPU_INDEX_SUFFIX}") if path.is_file()]
    return others[0] if len(others) == 1 else None


def read_activations(
    folder: str | os.PathLike[str], n_layer: int | None = None, n_ff: int | Sequence[int] | None = None
) -> list[np.ndarray]:
    """Return how often each neuron fired: per layer, float64 [n_ff], finite and not negative.

    n_layer, n_ff (of every layer, or one per layer): of the model; by default they follow the files. Raises
    FormatError if a layer is missing or the counts do not fit such a model.
    """
    folder = Path(folder)
    # By number, because as text 10 would precede 2.
    files = _activation_numbers(folder)
    if not files:
        raise FormatError(f"{folder} has no activation_<layer>.pt")
    n_layer = len(files) if n_layer is None else n_layer
    widths = [n_ff] * n_layer if n_ff is None or isinstance(n_ff, int) else list(n_ff)
    if files.keys() != set(range(n_layer)):
        odd = min(files.keys() ^ set(range(n_layer)))
        what = "lacks" if odd < n_layer else f"is of a model with more than {n_layer} layers: it has"
        raise FormatError(f"{folder} {what} activation_{odd}.pt")
    counts = []
    for layer, width in enumerate(widths):
        values = read_torch(files[layer])
        if isinstance(values, dict) or values.ndim != 1 or width not in (None, len(values)):
            found = "several tensors" if isinstance(values, dict) else f"a tensor {list(values.shape)}"
            neurons = "a vector is needed" if width is None else f"the layer has {width} neurons"
            raise FormatError(f"{files[layer]} has {found}, but {neurons}")
        values = values.astype(np.float64)
        if not (np.isfinite(values).all() and (values >= 0).all()):
            raise FormatError(f"{files[layer]} has a number that cannot be a count")
        counts.append(values)
    return counts


def write_activations(folder: str | os.PathLike[str], counts: Sequence[np.ndarray]) -> None:
    """Write activation_<layer>.pt for each layer, int64 [n_ff], for PowerInfer's solver."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HotsetError(f"{folder} cannot be created ({error.strerror or error}); choose another") from None
    for layer, values in enumerate(counts):
        write_torch(folder / f"activation_{layer}.pt", np.asarray(values).astype(np.int64))


def read_gpu_index(path: str | os.PathLike[str], n_ff: Sequence[int]) -> GPUIndex:
    """Read the GPU index of a model whose layers have n_ff[i] neurons.

    Raises FormatError for a file of another kind or model, or one that contradicts itself.
    """
    with open_gguf(path) as file:
        if file.dialect != "powerinfer" or file.architecture != GPU_INDEX_ARCHITECTURE:
            raise FormatError(f"{path} is not a GPU index of PowerInfer")
        capacity = file.metadata.get(VRAM_CAPACITY_KEY)
        if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 0:
            raise FormatError(f"{path} does not say its {VRAM_CAPACITY_KEY}; the file is damaged")
        if len(file.tensors) != 2 * len(n_ff):
            raise FormatError(
                f"{path} has {len(file.tensors)} tensors, not two for each of {len(n_ff)} layers"
            )
        on_gpu = []
        for layer, width in enumerate(n_ff):
            parts = []
            for name in (f"blk.{layer}.gpu_idx", f"blk.{layer}.gpu_bucket"):
                info = file.tensors.get(name)
                if info is None or info.type != GGMLType.I32 or len(info.shape) != 1:
                    raise FormatError(f"{path} lacks the vector {name} of 32-bit integers")
                parts.append(file.data(name).view("<i4").copy())
            index, bucket = parts
            if len(index) != width or not np.isin(index, (0, 1)).all():
                raise FormatError(f"{path}: blk.{layer}.gpu_idx is not 0 or 1 for each of {width} neurons")
            if not np.array_equal(np.flatnonzero(index), bucket):
                raise FormatError(f"{path}: blk.{layer}.gpu_bucket does not list the neurons of gpu_idx")
            on_gpu.append(index == 1)
        return GPUIndex(capacity, on_gpu)


def write_gpu_index(path: str | os.PathLike[str], index: GPUIndex) -> None:
    """Write a GPU index for the original engine: whole, or not at all.

    Each layer's vectors are adjacent and in order, because the engine reads them by number. A layer without
    neurons on the GPU has an empty bucket. Raises InvalidRequestError if the capacity is not a size.
    """
    writer = GGUFWriter(path, GPU_INDEX_ARCHITECTURE, dialect="powerinfer")
    writer.add(f"{GPU_INDEX_ARCHITECTURE}.block_count", len(index.on_gpu))
    for layer, mask in enumerate(index.on_gpu):
        bucket = np.flatnonzero(mask).astype("<i4")
        writer.add_tensor(f"blk.{layer}.gpu_idx", np.asarray(mask).astype("<i4").view(np.uint8), GGMLType.I32)
        writer.add_tensor(
            f"blk.{layer}.gpu_bucket", bucket.view(np.uint8), GGMLType.I32, shape=(len(bucket),)
        )
    writer.add(VRAM_CAPACITY_KEY, index.vram_capacity, ValueType.UINT64)
    writer.write()


def _activation_numbers(folder: Path) -> dict[int, Path]:
    """Return layer → file of activation counts."""
    try:
        names = os.listdir(folder)
    except OSError as error:
        raise FormatError(unreadable(folder, error)) from None
    matches = (ACTIVATION_FILE.fullmatch(name) for name in names)
    return {int(match[1]): folder / match[0] for match in matches if match}
