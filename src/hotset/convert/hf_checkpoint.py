"""The tensors of a Hugging Face checkpoint in place: safetensors, or `torch.save`'s files, in shards.

Neither torch nor the safetensors library is needed. Files are mapped, so a tensor uses memory only
while a piece of it is read, and none after `release`.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import re
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from hotset.convert import fp8, mxfp4
from hotset.convert.hf_config import read_json
from hotset.errors import FormatError, ModelNotFoundError, UnsupportedModelError
from hotset.files import SMALL_FILE, missing, open_regular, unreadable
from hotset.formats.mapped import MappedFile
from hotset.formats.torch_file import BFLOAT16, MAX_DIMS, map_torch

# Files of a checkpoint; the first that exists counts.
INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")
DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": BFLOAT16,
    "F8_E4M3": fp8.CODES,
}
PACKED = re.compile(r".*_(blocks|scales)")  # names of tensors that hold bytes: weights in MXFP4
BYTES: dict[str, np.dtype] = {"U8": np.dtype("u1")}
WHOLE = re.compile(r".*\.(ple_embedding\.\w+|tid2eid)")  # tensors of whole numbers: hashes, experts
NUMBERS: dict[str, np.dtype] = {"I64": np.dtype("<i8"), "I32": np.dtype("<i4")}
OF_EXPERT = re.compile(r".*\.experts\.[0-9]+\.w[123]\.weight")  # tensors that may hold FP4, as in DeepSeek V4
FP4: dict[str, np.dtype] = DTYPES | {"I8": mxfp4.PAIRS}
SCALES: dict[str, np.dtype] = DTYPES | {"F8_E8M0": mxfp4.EXPONENTS}
OLD_NAMES = {".LayerNorm.gamma": ".LayerNorm.weight", ".LayerNorm.beta": ".LayerNorm.bias"}  # TensorFlow's


class Checkpoint:
    """All tensors of a folder: name → array, outermost dimension first, read-only, in the mapped file.

    Matrices in FP8 are joined to their scales (fp8.Scaled), as are experts in FP4 (mxfp4.Matrix). A published
    checkpoint may hold tensors that the model does not need, such as masks and positions, in any type.

    Attributes:
        tensors: the tensors whose type hotset reads under their name.
        unread: name → "NAME in FILE is TYPE" of all other tensors; `check_readable` rejects the needed ones.
        embeds: whether it is a checkpoint of sentence-transformers, which needs no output matrix.

    Args:
        folder: holds safetensors or `.bin` files, whole or in shards.
        block: rows and columns of FP8 that share a scale.

    Raises:
        ModelNotFoundError: files are missing.
        FormatError: a file is damaged.
    """

    def __init__(self, folder: Path, block: tuple[int, int] = (128, 128)) -> None:
        self.tensors: dict[str, np.ndarray] = {}
        self.unread: dict[str, str] = {}
        self._maps: list[MappedFile] = []
        self.embeds = (folder / "modules.json").exists()
        for path in _files(folder):
            unread: dict[str, str] = {}
            if path.suffix == ".bin":
                tensors, mapped = map_torch(path)
                unread = {
                    name: str(values.dtype)
                    for name, values in tensors.items()
                    if values.dtype not in _dtypes_of(name).values()
                }
            else:
                tensors, mapped = map_safetensors(path, unread=unread)
            self._maps.append(mapped)
            self.unread |= {name: f"{name} in {path} is {type}" for name, type in unread.items()}
            for old_name, values in tensors.items():
                if old_name in unread:
                    continue
                name = _current_name(old_name)
                if name in self.tensors:
                    raise FormatError(f"{folder} holds the tensor {name} twice; download it again")
                self.tensors[name] = values
        scaled = (fp8.CODES, mxfp4.PAIRS, mxfp4.EXPONENTS)
        if any(values.dtype in scaled for values in self.tensors.values()):
            stems = {name: name.removesuffix(".weight") for name in self.unread}
            self.check_readable(
                n for n, stem in stems.items() if any(stem + s in self.tensors for s in fp8.SCALES)
            )
            self.tensors = fp8.scaled(self.tensors, block)

    def check_readable(self, names: Iterable[str]) -> None:
        """Raise UnsupportedModelError if one of these tensors has a type that hotset does not read."""
        for name in names:
            if name in self.unread:
                raise UnsupportedModelError(f"the tensor {self.unread[name]}, which is not supported")

    def release(self) -> None:
        """Release the memory of the data read so far (the system may keep it cached)."""
        if hasattr(mmap, "MADV_DONTNEED"):
            for mapped in self._maps:
                mapped.madvise(mmap.MADV_DONTNEED)


def _files(folder: Path) -> list[Path]:
    for name in INDICES:
        if not (folder / name).exists():
            continue
        listed = read_json(folder / name).get("weight_map")
        if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
            raise FormatError(f"{folder / name} has no weight_map")
        return sorted({folder / Path(file).name for file in listed.values()})
    for name in SINGLE_FILES:
        if (folder / name).exists():
            return [folder / name]
    raise ModelNotFoundError(f"{folder} holds none of {', '.join((*INDICES, *SINGLE_FILES))}")


def _current_name(name: str) -> str:
    """Return the current name in transformers of a tensor."""
    for old, new in OLD_NAMES.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


def map_safetensors(
    path: Path, header_bytes: int = SMALL_FILE, unread: dict[str, str] | None = None
) -> tuple[dict[str, np.ndarray], MappedFile]:
    """Map a file, and return its tensors as views of the mapping, and the mapping.

    Format: u64 header length, JSON header, raw little-endian values.

    Args:
        header_bytes: the longest header that is read.
        unread: receives name and type of each tensor whose type hotset does not read under its name. Without
            it such a tensor raises UnsupportedModelError.

    Raises:
        ModelNotFoundError: the file does not exist.
        FormatError: the file is damaged.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\xff"))
            if length > size - 8:
                raise FormatError(f"{path} is cut short inside its header; download it again")
            if length > header_bytes:
                raise FormatError(f"{path} has a header of {length} bytes, more than any model needs")
            header = json.loads(file.read(length))
            mapped = MappedFile(path, file.fileno())
    except FileNotFoundError:
        raise ModelNotFoundError(missing(path, remedy="the checkpoint is not complete")) from None
    except OSError as error:
        raise FormatError(unreadable(path, error)) from None
    except (ValueError, RecursionError):
        raise FormatError(f"{path} has a damaged header; download it again") from None
    if not isinstance(header, dict):
        raise FormatError(f"{path} has a damaged header; download it again")
    return dict(_tensors(path, header, 8 + length, mapped, unread)), mapped


def _dtypes_of(name: str) -> dict[str, np.dtype]:
    if PACKED.fullmatch(name):
        return BYTES
    if WHOLE.fullmatch(name):
        return NUMBERS
    return FP4 if OF_EXPERT.fullmatch(name) else SCALES if name.endswith(".scale") else DTYPES


def _counts(values: object) -> tuple[int, ...]:
    """Return whole numbers of JSON, none negative. Raises ValueError for others, such as Infinity."""
    if not isinstance(values, list) or not all(type(n) is int and 0 <= n < 1 << 62 for n in values):
        raise ValueError
    return tuple(values)


def _tensors(
    path: Path,
    header: dict[str, object],
    data_start: int,
    mapped: MappedFile,
    unread: dict[str, str] | None,
) -> Iterator[tuple[str, np.ndarray]]:
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype: object = None
        shape: tuple[int, ...] = ()
        start, end = 0, -1
        with contextlib.suppress(KeyError, TypeError, ValueError):
            if not isinstance(entry, dict):
                raise TypeError
            dtype, shape = entry["dtype"], _counts(entry["shape"])
            start, end = (data_start + offset for offset in _counts(entry["data_offsets"]))
        if not isinstance(dtype, str) or end < 0 or len(shape) > MAX_DIMS:
            raise FormatError(f"{path} describes the tensor {name} wrongly; download it again")
        dtypes = _dtypes_of(name)
        if dtype not in dtypes:
            if unread is None:
                raise UnsupportedModelError(f"the tensor {name} in {path} is {dtype}, which is not supported")
            unread[name] = dtype
            continue
        n = math.prod(shape)
        if not data_start <= start <= end <= len(mapped) or end - start != n * dtypes[dtype].itemsize:
            raise FormatError(f"{path} is cut short or damaged at the tensor {name}; download it again")
        yield name, np.frombuffer(mapped, dtypes[dtype], n, start).reshape(shape) if n else np.empty(0)
