"""GGUF files: a memory-mapped reader for untrusted files, and a streaming writer.

Layout (versions 2 and 3, little-endian; specification: docs/gguf.md of the ggml repository):

    magic "GGUF" | version u32 | n_tensors u64 | n_kv u64
    n_kv     x  key string | type u32 | value
    n_tensors x name string | n_dims u32 | dims u64[n_dims], ne0 first | type u32 | offset u64
    padding to `general.alignment` (default 32), then the data; offsets count from here

A string is a length u64 and bytes; an array is an element type u32, a count u64 and the elements.
PowerInfer's format is version 3 with the magic "PWRI", other type ids for integers, and vectors that may be
empty. A model may be split into shards named `<name>-00001-of-0000N.gguf`; each is a whole GGUF file with
some of the tensors.

Every count, length, offset and dimension is checked against the file's size before it is used. So a damaged
or hostile file yields one error message (FormatError), never a crash or a large allocation.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
import os
import re
import shutil
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Literal
from weakref import WeakValueDictionary

import numpy as np

from hotset.errors import (
    FormatError,
    HotsetError,
    InvalidRequestError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from hotset.files import check_target, missing, open_regular, replacing
from hotset.formats import bundle
from hotset.formats.encode import WRITABLE, encode
from hotset.formats.mapped import MappedFile, check_unharmed, truncated_error, truncated_files
from hotset.formats.quants import TYPES, GGMLType, row_bytes
from hotset.units import human_size

if TYPE_CHECKING:
    from hotset.reporter import Reporter

Dialect = Literal["gguf", "powerinfer"]
MAGICS: dict[bytes, Dialect] = {b"GGUF": "gguf", b"PWRI": "powerinfer"}
# Its ggml predates the IQ types, which have these ids today.
POWERINFER_TYPES = {16: GGMLType.I8, 17: GGMLType.I16, 18: GGMLType.I32}
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
MAX_ARRAY_DEPTH = 4  # arrays of arrays are legal, but no published file has them
MAX_ELEMENT = 1 << 20  # bytes of a string in an array; decoding random bytes takes a second for each 16 MB
MAX_NAME = 1024  # bytes of a key or tensor name (GGML itself stops at 64 for tensors)
SHARD_NAME = re.compile(r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")


class ValueType(IntEnum):
    """Type ids of metadata values."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


_NUMBERS: dict[int, tuple[struct.Struct, np.dtype]] = {
    ValueType.UINT8: (struct.Struct("<B"), np.dtype("u1")),
    ValueType.INT8: (struct.Struct("<b"), np.dtype("i1")),
    ValueType.UINT16: (struct.Struct("<H"), np.dtype("<u2")),
    ValueType.INT16: (struct.Struct("<h"), np.dtype("<i2")),
    ValueType.UINT32: (struct.Struct("<I"), np.dtype("<u4")),
    ValueType.INT32: (struct.Struct("<i"), np.dtype("<i4")),
    ValueType.FLOAT32: (struct.Struct("<f"), np.dtype("<f4")),
    ValueType.BOOL: (struct.Struct("<?"), np.dtype("?")),
    ValueType.UINT64: (struct.Struct("<Q"), np.dtype("<u8")),
    ValueType.INT64: (struct.Struct("<q"), np.dtype("<i8")),
    ValueType.FLOAT64: (struct.Struct("<d"), np.dtype("<f8")),
}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_MIN_KEY_VALUE = 8 + 4 + 1  # bytes of the smallest key-value; the next line: of the smallest tensor info
_MIN_TENSOR_INFO = 8 + 4 + 4 + 8


@dataclass(frozen=True)
class TensorInfo:
    """The place of a tensor in a file.

    shape: GGUF order, ne0 (contiguous) first. offset: bytes from the start of file `shard`. stride: in a
    bundle (formats/bundle.py), bytes from one neuron or expert to the next; otherwise 0. nbytes is 0 if the
    type is unknown; `GGUFFile.data` rejects such a tensor.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    nbytes: int
    offset: int
    shard: int = 0
    stride: int = 0

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one row of ne0 values."""
        return row_bytes(self.type, self.shape[0])


class _Cursor:
    """A forward reader of the mapped header that checks every step against the end of the file."""

    def __init__(self, buffer: MappedFile | bytes, path: Path) -> None:
        self.buffer, self.path, self.pos, self.size = buffer, path, 0, len(buffer)

    def fail(self, what: str) -> FormatError:
        return FormatError(f"{self.path}: {what}; the file is damaged, download or convert it again.")

    def take(self, n_bytes: int, what: str) -> int:
        """Skip n_bytes and return where they start."""
        start = self.pos
        if n_bytes > self.size - start:
            raise self.fail(f"the file ends at byte {self.size}, inside {what}")
        self.pos = start + n_bytes
        return start

    def u32(self, what: str) -> int:
        return int(_U32.unpack_from(self.buffer, self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack_from(self.buffer, self.take(8, what))[0])

    def count(self, what: str, min_bytes: int) -> int:
        """Read a count of items of at least min_bytes each. Raises FormatError if they cannot fit."""
        n = self.u64(what)
        if n * min_bytes > self.size - self.pos:
            raise self.fail(f"{n} {what} cannot fit in a file of {self.size} bytes")
        return n

    def bytes(self, what: str) -> bytes:
        start = self.take(self.u64(what), what)
        return self.buffer[start : self.pos]

    def name(self, what: str) -> str:
        name = self.bytes(what)
        if len(name) > MAX_NAME:
            raise self.fail(f"{what} is {len(name)} bytes long, more than {MAX_NAME}")
        try:
            return name.decode()
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not valid UTF-8") from None

    def value(self, type: int, key: str) -> object:
        if type == ValueType.STRING:
            return self.bytes(f"the value of {key!r}").decode(errors="replace")
        if type == ValueType.ARRAY:
            return self.array(key, 1)
        if type not in _NUMBERS:
            raise self.fail(f"key {key!r} has the unknown value type {type}")
        number = _NUMBERS[type][0]
        return number.unpack_from(self.buffer, self.take(number.size, f"the value of {key!r}"))[0]

    def array(self, key: str, depth: int) -> object:
        what = f"elements of {key!r}"
        type = self.u32(what)
        if type == ValueType.STRING:
            return self.strings(self.count(what, 8), key)
        if type == ValueType.ARRAY:
            if depth == MAX_ARRAY_DEPTH:
                raise self.fail(f"key {key!r} nests arrays more than {MAX_ARRAY_DEPTH} deep")
            return [self.array(key, depth + 1) for _ in range(self.count(what, 12))]
        if type not in _NUMBERS:
            raise self.fail(f"key {key!r} is an array of the unknown value type {type}")
        dtype = _NUMBERS[type][1]
        n = self.count(what, dtype.itemsize)
        start = self.take(n * dtype.itemsize, what)
        if type == ValueType.BOOL:  # any byte but 0 is true; NumPy requires bytes of 0 and 1
            return np.frombuffer(self.buffer[start : self.pos], np.uint8) != 0
        return np.frombuffer(self.buffer[start : self.pos], dtype)

    def strings(self, n: int, key: str) -> list[str]:
        """Read n strings in a flat loop: 300,000 tokens and merges dominate the time to open a file."""
        out = []
        buffer, pos, unpack = self.buffer, self.pos, _U64.unpack_from
        try:
            for _ in range(n):
                start = pos + 8
                n_bytes = unpack(buffer, pos)[0]
                if n_bytes > MAX_ELEMENT:
                    self.pos = start
                    self.take(n_bytes, f"elements of {key!r}")
                    raise self.fail(f"an element of {key!r} has {n_bytes} bytes, more than {MAX_ELEMENT}")
                pos = start + n_bytes
                # Lossless: different token bytes that are not UTF-8 must remain different.
                out.append(buffer[start:pos].decode("utf-8", "surrogateescape"))
        except (struct.error, OverflowError):
            pos = self.size + 1
        if pos > self.size:
            raise self.fail(f"the file ends at byte {self.size}, inside elements of {key!r}")
        self.pos = pos
        return out


@dataclass
class _MappedShard:
    """A mapped file: its map and its header, with offsets from the start of the file."""

    path: Path
    buffer: MappedFile
    version: int
    dialect: Dialect
    metadata: dict[str, object]
    metadata_types: dict[str, tuple[int, ...]]
    tensors: list[TensorInfo]


def _map_file(path: Path) -> MappedFile:
    try:
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise FormatError(f"{path} is empty; download or convert it again.")
            return MappedFile(path, file.fileno())
    except FileNotFoundError:
        raise ModelNotFoundError(missing(path)) from None
    except (OSError, ValueError) as error:  # mapping failed, or the file just became empty
        raise FormatError(f"{path} cannot be mapped: {getattr(error, 'strerror', None) or error}.") from None


def _read_shard(path: Path, index: int) -> _MappedShard:
    buffer = _map_file(path)
    try:
        shard = _parse(buffer, path, index)
        buffer.check()
    except Exception:
        truncated = buffer.is_truncated  # then the error is only a consequence
        buffer.close()
        if truncated:
            raise truncated_error(path) from None
        raise
    except BaseException:
        buffer.close()
        raise
    return shard


def _parse(buffer: MappedFile, path: Path, index: int) -> _MappedShard:
    cursor = _Cursor(buffer, path)
    magic = cursor.buffer[:4]
    dialect = MAGICS.get(magic)
    if dialect is None:
        raise FormatError(f"{path} is not a GGUF file (it starts with {magic!r}); name a .gguf model.")
    cursor.take(4, "the header")
    version = cursor.u32("the header")
    if version not in (2, 3):
        if version & 0xFFFF == 0:
            raise FormatError(
                f"{path} is a big-endian GGUF file; convert the model for a little-endian machine."
            )
        raise FormatError(
            f"{path} is GGUF version {version}, only 2 and 3 are read; convert the model again."
        )
    n_tensors = cursor.count("tensors", _MIN_TENSOR_INFO)
    n_kv = cursor.count("key-values", _MIN_KEY_VALUE)
    metadata: dict[str, object] = {}
    types: dict[str, tuple[int, ...]] = {}
    for _ in range(n_kv):
        key = cursor.name("a key")
        if key in metadata:
            raise cursor.fail(f"key {key!r} occurs twice")
        type = cursor.u32(f"the type of {key!r}")
        # An array's element type follows, and value() reads it again: peek at it for exact copies.
        start = cursor.pos
        metadata[key] = cursor.value(type, key)
        types[key] = (type,) if type != ValueType.ARRAY else (type, _U32.unpack_from(cursor.buffer, start)[0])
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
        raise cursor.fail(f"general.alignment is {alignment!r}, not a power of two of at least 8")
    infos = [_read_tensor_info(cursor, index) for _ in range(n_tensors)]
    data_start = -(-cursor.pos // alignment) * alignment
    tensors = [_place(cursor, info, data_start, alignment) for info in infos]
    _check_overlap(cursor, tensors)
    return _MappedShard(path, buffer, version, dialect, metadata, types, tensors)


def _read_tensor_info(cursor: _Cursor, index: int) -> TensorInfo:
    """Read a tensor info, whose offset still counts from the start of the data."""
    name = cursor.name("a tensor name")
    what = f"the description of tensor {name!r}"
    n_dims = cursor.u32(what)
    if n_dims > MAX_DIMS:
        raise cursor.fail(f"tensor {name!r} has {n_dims} dimensions, at most {MAX_DIMS} are possible")
    shape = tuple(cursor.u64(what) for _ in range(n_dims)) or (1,)
    powerinfer = MAGICS[cursor.buffer[:4]] == "powerinfer"
    id = cursor.u32(what)
    type = POWERINFER_TYPES.get(id, GGMLType(id)) if powerinfer else GGMLType(id)
    offset = cursor.u64(what)
    if math.prod(shape) == 0 and not (powerinfer and shape == (0,)):  # a GPU index without neurons is valid
        raise cursor.fail(f"tensor {name!r} has a dimension of zero: {list(shape)}")
    if type not in TYPES:
        return TensorInfo(name, shape, type, 0, offset, index)
    if shape[0] % TYPES[type].block_size:
        raise cursor.fail(
            f"tensor {name!r} has rows of {shape[0]} values, "
            f"which blocks of {TYPES[type].block_size} ({type.name}) do not divide"
        )
    return TensorInfo(name, shape, type, row_bytes(type, shape[0]) * math.prod(shape[1:]), offset, index)


def _place(cursor: _Cursor, info: TensorInfo, data_start: int, alignment: int) -> TensorInfo:
    if info.offset % alignment:
        raise cursor.fail(f"tensor {info.name!r} is at offset {info.offset}, not a multiple of {alignment}")
    offset = data_start + info.offset
    if offset + info.nbytes > cursor.size:
        raise FormatError(
            f"{cursor.path} is cut short: tensor {info.name!r} ends at byte {offset + info.nbytes}, the file "
            f"at {cursor.size}; download it again."
        )
    return TensorInfo(info.name, info.shape, info.type, info.nbytes, offset, info.shard)


def _check_overlap(cursor: _Cursor, tensors: list[TensorInfo]) -> None:
    in_order = sorted(tensors, key=lambda info: (info.offset, info.nbytes))
    for one, other in itertools.pairwise(in_order):
        if one.offset + one.nbytes > other.offset:
            raise cursor.fail(f"tensors {one.name!r} and {other.name!r} overlap")


class GGUFFile:
    """An open model file. Tensor bytes stay in the mapped file. Use `open_gguf`.

    metadata: key → int, float, bool, str, NumPy array (numbers; do not write), list[str] or list of arrays.
      Strings that are not UTF-8 have U+FFFD for the bad bytes; strings in arrays keep the bytes as lone
      surrogates (errors="surrogateescape"), so that tokens stay distinct.
    metadata_types: key → (ValueType,) or (ValueType.ARRAY, element type), for exact copies.
    tensors: name → TensorInfo, in file order, shard after shard.
    paths: the files, in the order of the shards. version: of the first shard.

    If another program cuts the file short while it is open, missing bytes read as zeros, and `check` raises:
    call it after reading.
    """

    def __init__(self, shards: list[_MappedShard]) -> None:
        first = shards[0]
        self.path = first.path
        self.paths = [shard.path for shard in shards]
        self.version = first.version
        self.dialect: Dialect = first.dialect
        self.metadata = first.metadata
        self.metadata_types = first.metadata_types
        self.tensors: dict[str, TensorInfo] = {}
        for shard in shards:
            for info in shard.tensors:
                if info.name in self.tensors:
                    raise FormatError(
                        f"{shard.path}: tensor {info.name!r} occurs twice; convert the model again."
                    )
                self.tensors[info.name] = info
        self.tensors = bundle.opened(first.path, self.tensors, self.metadata)
        self._unbundled: WeakValueDictionary[str, np.ndarray] = WeakValueDictionary()
        self._maps = [shard.buffer for shard in shards]
        self._bytes = [np.frombuffer(buffer, np.uint8) for buffer in self._maps]

    @property
    def architecture(self) -> str:
        """Return `general.architecture`. Raises FormatError if it is missing."""
        architecture = self.metadata.get("general.architecture")
        if not isinstance(architecture, str):
            raise FormatError(f"{self.path} does not name its general.architecture; convert the model again.")
        return architecture

    @property
    def nbytes(self) -> int:
        """Return the size of all files together."""
        return sum(len(data) for data in self._bytes)

    @property
    def n_parameters(self) -> int:
        """Return the number of values in all tensors."""
        return sum(info.n_elements for info in self.tensors.values())

    def data(self, name: str) -> np.ndarray:
        """Return the tensor's bytes: uint8 [nbytes], read-only, a view of the map; for a bundle a copy.

        Nothing is read yet. Raises UnsupportedModelError if the tensor is missing or its type is unknown.
        """
        info = self.tensors.get(name)
        if info is None:
            raise UnsupportedModelError(
                f"{self.path} has no tensor {name!r}; the model cannot be run without it."
            )
        if info.type not in TYPES:
            raise UnsupportedModelError(
                f"{self.paths[info.shard]}: tensor {name!r} has type {int(info.type)}, which this version "
                "does not support; use a file of another type."
            )
        if not self._bytes:
            raise InvalidRequestError(f"{self.path} has been closed; open it again to read tensors.")
        self._maps[info.shard].check()
        if info.stride:
            return self._gathered(info)
        return self._bytes[info.shard][info.offset : info.offset + info.nbytes]

    def _gathered(self, info: TensorInfo) -> np.ndarray:
        """Return a copy of a matrix in a bundle, shared by all callers that hold it."""
        if (known := self._unbundled.get(info.name)) is not None:
            return known
        n = info.shape[-1]
        row = info.nbytes // n
        of_file = self._bytes[info.shard][info.offset :]
        rows = np.lib.stride_tricks.as_strided(of_file, (n, row), (info.stride, 1), writeable=False)
        copy = np.ascontiguousarray(rows).reshape(-1)
        copy.flags.writeable = False
        self._unbundled[info.name] = copy
        return copy

    def check(self) -> None:
        """Raise FormatError if a file was cut short, so that earlier reads may be wrong."""
        for mapped in self._maps:
            mapped.check()

    def advise(self, name: str, start: int, stop: int, *, needed: bool) -> None:
        """Advise the system that bytes start..stop of a tensor will be read soon, or not again.

        Reading a file once, piece by piece, then streams from disk without growing the process's memory. Does
        nothing on systems without such advice.
        """
        info = self.tensors[name]
        stop = min(stop, info.nbytes)
        if not hasattr(mmap, "MADV_WILLNEED") or start >= stop:
            return
        first = (info.offset + start) // mmap.PAGESIZE * mmap.PAGESIZE
        advice = mmap.MADV_WILLNEED if needed else mmap.MADV_DONTNEED
        self._maps[info.shard].madvise(advice, first, info.offset + stop - first)

    def ask_for_large_pages(self) -> None:
        """Ask the system to read uncached parts in large pages, as Linux can.

        Call this after reading small tensors scattered over the file: from now on, each page fault reads
        megabytes.
        """
        if hasattr(mmap, "MADV_HUGEPAGE"):
            for buffer in self._maps:
                with contextlib.suppress(OSError):  # a kernel built without it
                    buffer.madvise(mmap.MADV_HUGEPAGE)

    def map_cached(self, name: str) -> None:
        """Call MappedFile.map_cached for the bytes of a tensor."""
        info = self.tensors[name]
        if not info.stride:  # matrices in a bundle are copied
            self._maps[info.shard].map_cached(info.offset, info.offset + info.nbytes)

    def let_go(self) -> None:
        """Free the memory of pages that were used; they are read from the files again when needed."""
        if hasattr(mmap, "MADV_DONTNEED"):
            for buffer in self._maps:
                buffer.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Unmap the files. A file with existing views is unmapped when the last one is freed."""
        self._bytes = []
        for buffer in self._maps:
            with contextlib.suppress(BufferError):
                buffer.close()
        self._maps = []

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Open a model file or, given any of its shards, the whole split model.

    Raises ModelNotFoundError if a file is missing, and FormatError if it cannot be read.
    """
    path = Path(path)
    shards = [_read_shard(path, 0)]
    try:
        if _split(shards[0], "count", 1) != 1:
            shards = _read_siblings(shards.pop())
        return GGUFFile(shards)
    except BaseException:
        for shard in shards:
            shard.buffer.close()
        raise


def _split(shard: _MappedShard, key: str, default: int) -> int:
    """Return a key of the split; a hostile file may have any type, and an array cannot be compared."""
    value = shard.metadata.get(f"split.{key}", default)
    if not isinstance(value, int) or value < 0:
        raise FormatError(f"{shard.path}: split.{key} is not a count; download or convert the model again.")
    return value


def _read_siblings(opened: _MappedShard) -> list[_MappedShard]:
    """Return all shards of the model of `opened`, in order."""
    path, n_shards = opened.path, _split(opened, "count", 1)
    opened.buffer.close()
    match = SHARD_NAME.match(path.name)
    if match is None or int(match["count"]) != n_shards:
        raise FormatError(
            f"{path} is one of {n_shards} shards, but its name is not; restore the names of all of them "
            f"(<name>-00001-of-{n_shards:05d}.gguf) in one folder."
        )
    shards: list[_MappedShard] = []
    try:
        for i in range(n_shards):
            sibling = path.with_name(f"{match['stem']}-{i + 1:05d}-of-{n_shards:05d}.gguf")
            if not sibling.exists():
                raise ModelNotFoundError(missing(sibling, "shard", f"put all {n_shards} in one folder"))
            shard = _read_shard(sibling, i)
            shards.append(shard)
            found = (_split(shard, "no", i), _split(shard, "count", 1), shard.dialect)
            if found != (i, n_shards, shards[0].dialect):
                raise FormatError(
                    f"{sibling} is not shard {i + 1} of {n_shards} of this model; download it again."
                )
        n_tensors = sum(len(shard.tensors) for shard in shards)
        expected = _split(shards[0], "tensors.count", n_tensors)
        if n_tensors != expected:
            raise FormatError(
                f"{path}: the shards have {n_tensors} tensors, not {expected}; download them again."
            )
        return shards
    except BaseException:
        for shard in shards:
            shard.buffer.close()
        raise


_INTEGERS = (ValueType.UINT32, ValueType.INT32, ValueType.UINT64, ValueType.INT64)  # as llama.cpp expects
TensorData = np.ndarray | Callable[[], np.ndarray | Iterable[np.ndarray]]
PIECE_VALUES = 1 << 22  # values encoded at a time: enough for all cores, at most 16 MB
PIECES_BEHIND = 2  # encoded pieces that may wait for the disk


@dataclass(frozen=True)
class PlannedFile:
    """The contents of a file that a GGUFWriter would write now (see GGUFFile).

    Offsets of tensors count from the start of the data.
    """

    path: Path
    dialect: Dialect
    metadata: dict[str, object]
    tensors: dict[str, TensorInfo]
    _data: dict[str, TensorData]

    def data(self, name: str) -> np.ndarray:
        """Return the tensor's bytes, encoded now: uint8 [nbytes]."""
        pieces = b"".join(_pieces(self.tensors[name], self._data[name]))
        return np.frombuffer(pieces, np.uint8)


class GGUFWriter:
    """A writer of a GGUF file (version 3), which appears under its name only when it is complete.

        writer = GGUFWriter("model.gguf", "llama")
        writer.add("llama.block_count", 2)
        writer.add_tensor("output_norm.weight", np.ones(64, np.float32), GGMLType.F32)
        writer.write()

    Every method raises InvalidRequestError for data that the format cannot hold.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        architecture: str | None,
        alignment: int = DEFAULT_ALIGNMENT,
        dialect: Dialect = "gguf",
    ) -> None:
        if alignment < 8 or alignment & (alignment - 1):
            raise InvalidRequestError(f"alignment {alignment} is not a power of two of at least 8.")
        self.path = Path(path)
        self.alignment = alignment
        self.dialect = dialect
        self._magic = next(magic for magic, name in MAGICS.items() if name == dialect)
        self._type_ids = {t: id for id, t in POWERINFER_TYPES.items()} if dialect == "powerinfer" else {}
        self._values: dict[str, bytes] = {}
        self._tensors: dict[str, tuple[TensorInfo, TensorData]] = {}
        self._truncated_before = truncated_files()
        if architecture is not None:  # None for files other than models
            self.add("general.architecture", architecture)
        if alignment != DEFAULT_ALIGNMENT:
            self.add("general.alignment", alignment)

    def add(self, key: str, value: object, type: ValueType | None = None) -> None:
        """Add a key-value: bool, int, float, str, list (of one of these) or one-dimensional array.

        Without `type`, an int is UINT32 (INT32 if negative, 64 bits if needed), a float FLOAT32, a list of
        int INT32, and an array follows its dtype. With `type`, the value or each element gets this type:
        `writer.add(key, file.metadata[key], file.metadata_types[key][-1])` copies a value exactly.
        """
        if key in self._values:
            raise InvalidRequestError(f"key {key!r} has been added already; add it once.")
        _encode_string(key, MAX_NAME)
        try:
            self._values[key] = _encode_value(value, type)
        except (struct.error, OverflowError, TypeError, ValueError) as error:
            raise InvalidRequestError(f"the value of key {key!r} cannot be stored: {error}.") from None

    def add_tensor(
        self, name: str, data: TensorData, type: GGMLType, shape: Sequence[int] | None = None
    ) -> None:
        """Add a tensor; `write` encodes its data, or calls its function, one tensor at a time.

        data: floats [..., ne0], quantised to `type`; or uint8, blocks as in the file; or, for data that do
        not fit in memory, a function without arguments that returns either, or an iterable of such arrays of
        whole rows. Arrays must not change until then. shape: GGUF order, ne0 first; required with a function,
        otherwise taken from the array.
        """
        if name in self._tensors:
            raise InvalidRequestError(f"tensor {name!r} has been added already; add it once.")
        _encode_string(name, MAX_NAME)
        type = GGMLType(type)
        facts = TYPES.get(type)
        if facts is None:
            raise InvalidRequestError(f"tensor {name!r} has the unknown type {int(type)}; update hotset.")
        if shape is None:
            if callable(data):
                raise InvalidRequestError(f"tensor {name!r} comes from a function; give its shape.")
            shape = data.shape[::-1]
            if data.dtype == np.uint8 and shape:
                shape = (shape[0] // facts.block_bytes * facts.block_size, *shape[1:])
        shape = tuple(int(n) for n in shape)
        # Only a vector may be empty, such as an empty list of neurons in PowerInfer's GPU index.
        smallest = 0 if len(shape) == 1 else 1
        if not 1 <= len(shape) <= MAX_DIMS or min(shape) < smallest or shape[0] % facts.block_size:
            raise InvalidRequestError(
                f"tensor {name!r} of shape {list(shape)} cannot be stored as {facts.name}."
            )
        n_bytes = row_bytes(type, shape[0]) * math.prod(shape[1:])
        info = TensorInfo(name, shape, type, n_bytes, self.nbytes)
        if not callable(data):
            _check_tensor(info, data)
        self._tensors[name] = (info, data)

    @property
    def keys(self) -> frozenset[str]:
        """Return the keys that were added."""
        return frozenset(self._values)

    def planned(self) -> PlannedFile:
        """Return the file as `open_gguf` would read it, for checks before it is written."""
        metadata = {}
        for key, value in self._values.items():
            cursor = _Cursor(value, self.path)
            metadata[key] = cursor.value(cursor.u32("a type"), key)
        tensors = {name: info for name, (info, _) in self._tensors.items()}
        data = {name: data for name, (_, data) in self._tensors.items()}
        return PlannedFile(self.path, self.dialect, metadata, tensors, data)

    @property
    def nbytes(self) -> int:
        """Return the size of all tensors' data, which is the offset of the next tensor."""
        last = next((info for info, _ in reversed(self._tensors.values())), None)
        return 0 if last is None else self._aligned(last.offset + last.nbytes)

    def _aligned(self, n: int) -> int:
        return -(-n // self.alignment) * self.alignment

    def write(self, progress: Reporter | None = None) -> None:
        """Write the file to disk without a name (or under a temporary one), then give it its name.

        Replaces a file of that name. On an error nothing is left; if the system has files without a name
        (Linux), a killed process leaves nothing either. Raises HotsetError if the file cannot be written.
        """
        check_target(self.path)
        try:
            free = shutil.disk_usage(self.path.parent).free
        except OSError as error:
            reason = error.strerror or error
            raise HotsetError(f"{self.path} cannot be written ({reason}); choose another folder.") from error
        if self.nbytes > free:
            raise HotsetError(
                f"{self.path} takes {human_size(self.nbytes)}, but {self.path.parent} has only "
                f"{human_size(free)} left; make room or choose another folder."
            )
        with replacing(self.path) as file:
            try:
                self._write_to(file, progress)
                file.flush()
            except OSError:
                # The system reports a missing page of a source file as a bad address.
                check_unharmed(self._truncated_before)
                raise
            check_unharmed(self._truncated_before)  # otherwise the data may be wrong

    def _write_to(self, file: BinaryIO, progress: Reporter | None) -> None:
        file.write(self._magic + struct.pack("<IQQ", 3, len(self._tensors), len(self._values)))
        for key, value in self._values.items():
            file.write(_encode_string(key) + value)
        for info, _ in self._tensors.values():
            file.write(
                _encode_string(info.name)
                + struct.pack(f"<I{len(info.shape)}Q", len(info.shape), *info.shape)
                + struct.pack("<IQ", self._type_ids.get(info.type, info.type), info.offset)
            )
        file.write(bytes(-file.tell() % self.alignment))
        from concurrent.futures import Future, ThreadPoolExecutor

        done, behind = 0, deque[Future[int]]()
        if progress is not None:
            progress.advance(self.path.name, 0, self.nbytes)
        # One thread writes while this one reads and encodes the next pieces.
        with ThreadPoolExecutor(1) as disk:
            for info, data in self._tensors.values():
                padding = bytes(self._aligned(info.nbytes) - info.nbytes)
                for piece in itertools.chain(_pieces(info, data), [memoryview(padding)]):
                    if len(behind) == PIECES_BEHIND:
                        behind.popleft().result()
                    behind.append(disk.submit(file.write, piece))
                    done += len(piece)
                    if progress is not None:
                        progress.advance(self.path.name, done, self.nbytes)
            while behind:
                behind.popleft().result()


def copy_metadata(file: GGUFFile, writer: GGUFWriter, without: Sequence[str] = ()) -> None:
    """Add the keys of a file, except `without`, keys that the writer has, and keys of shards."""
    for key, value in file.metadata.items():
        if key not in without and key not in writer.keys and not key.startswith("split."):
            writer.add(key, value, ValueType(file.metadata_types[key][-1]))


def _encode_string(text: str, limit: int | None = None) -> bytes:
    # surrogateescape restores bytes that were read as lone surrogates
    try:
        data = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise InvalidRequestError(f"{text!r} cannot be stored as UTF-8.") from None
    if limit is not None and len(data) > limit:
        raise InvalidRequestError(f"the name {text[:40]!r}... is longer than {limit} bytes.")
    return _U64.pack(len(data)) + data


def _encode_value(value: object, type: ValueType | None) -> bytes:
    """Return type id and payload."""
    if isinstance(value, list | tuple | np.ndarray):
        return _encode_array(value, type)
    if isinstance(value, str):
        if type not in (None, ValueType.STRING):
            raise TypeError(f"it is a string, not {ValueType(type).name}")
        return _U32.pack(ValueType.STRING) + _encode_string(value)
    if isinstance(value, np.generic):
        type = _type_of(value.dtype) if type is None else type
        value = value.item()
    if type is None:
        type = _default_type(value)
    if type not in _NUMBERS or (type == ValueType.BOOL and not isinstance(value, bool)):
        raise TypeError(f"{value!r} is not of type {ValueType(type).name}")
    return _U32.pack(type) + _NUMBERS[type][0].pack(value)


def _default_type(value: object) -> ValueType:
    if isinstance(value, bool):
        return ValueType.BOOL
    if isinstance(value, float):
        return ValueType.FLOAT32
    if isinstance(value, int):
        for type in _INTEGERS:
            limits = np.iinfo(_NUMBERS[type][1])
            if limits.min <= value <= limits.max:
                return type
    raise TypeError(f"{value!r} is not a bool, number or string that the format can hold")


def _type_of(dtype: np.dtype) -> ValueType:
    for type, (_, known) in _NUMBERS.items():
        if dtype == known:
            return ValueType(type)
    raise TypeError(f"numbers of dtype {dtype} are not part of the format")


def _encode_array(values: list[Any] | tuple[Any, ...] | np.ndarray, type: ValueType | None) -> bytes:
    if not isinstance(values, np.ndarray) and len(values) and isinstance(values[0], str):
        if not all(isinstance(value, str) for value in values):
            raise TypeError("the elements of a list must be of one type")
        type = ValueType.STRING if type is None else type
    if type == ValueType.STRING:
        payload = b"".join(_encode_string(value) for value in values)
    else:
        array = np.asarray(values)
        if array.ndim != 1:
            raise ValueError("an array must have one dimension")
        if type is None and not isinstance(values, np.ndarray):
            if not len(values):
                raise TypeError("an empty list does not say its type: give it")
            type = _list_type(array)
            if type == ValueType.FLOAT32 and all(isinstance(value, int) for value in values):
                raise ValueError("no integer type holds all the numbers")  # NumPy would use floats
        type = _type_of(array.dtype) if type is None else type
        if type not in _NUMBERS:
            raise TypeError(f"numbers cannot be {ValueType(type).name}")
        stored = array.astype(_NUMBERS[type][1])
        if stored.dtype.kind in "iub" and not np.array_equal(stored, array):
            raise ValueError(f"the numbers do not fit in {ValueType(type).name}")
        payload = stored.tobytes()
    return struct.pack("<IIQ", ValueType.ARRAY, type, len(values)) + payload


def _list_type(array: np.ndarray) -> ValueType:
    if array.dtype.kind == "i":
        fits = not len(array) or (array.min() >= -(1 << 31) and array.max() < 1 << 31)
        return ValueType.INT32 if fits else ValueType.INT64
    return ValueType.FLOAT32 if array.dtype.kind == "f" else _type_of(array.dtype)


def _check_tensor(info: TensorInfo, data: np.ndarray) -> None:
    """Raise InvalidRequestError for a wrong shape, size or dtype, before anything is encoded."""
    facts = TYPES[info.type]
    if data.dtype == np.uint8:
        if data.size != info.nbytes:
            raise InvalidRequestError(f"tensor {info.name!r} takes {info.nbytes} bytes, not {data.size}.")
    elif data.shape != info.shape[::-1]:
        expected, found = list(info.shape[::-1]), list(data.shape)
        raise InvalidRequestError(f"tensor {info.name!r} must have shape {expected}, not {found}.")
    # Check for None first: NumPy treats None as float64 in comparisons.
    elif (facts.block is None or data.dtype != facts.block) and not (
        info.type in WRITABLE and data.dtype.kind == "f"
    ):
        raise InvalidRequestError(
            f"tensor {info.name!r}: {data.dtype} values cannot be stored as {facts.name}."
        )


def _pieces(info: TensorInfo, data: TensorData) -> Iterator[memoryview]:
    """Yield the bytes for the file, encoded if necessary, a few megabytes at a time."""
    given = data() if callable(data) else data
    if isinstance(given, np.ndarray):
        _check_tensor(info, given)
        given = [given]
    n_bytes = 0
    for part in given:
        for piece in _encoded(info, part):
            n_bytes += len(piece)
            yield piece
    if n_bytes != info.nbytes:
        raise InvalidRequestError(f"tensor {info.name!r} takes {info.nbytes} bytes, not {n_bytes}.")


def _encoded(info: TensorInfo, part: np.ndarray) -> Iterator[memoryview]:
    if part.dtype in (np.uint8, TYPES[info.type].block):
        stored = np.ascontiguousarray(part).reshape(-1).view(np.uint8).data
        for i in range(0, len(stored), 4 * PIECE_VALUES):
            yield stored[i : i + 4 * PIECE_VALUES]
        return
    if part.dtype.kind != "f" or part.shape[-1:] != info.shape[:1] or info.type not in WRITABLE:
        raise InvalidRequestError(
            f"tensor {info.name!r} takes rows of {info.shape[0]} values of {info.type.name}, not "
            f"{part.dtype} {list(part.shape)}."
        )
    rows = part.reshape(-1, info.shape[0])
    step = max(PIECE_VALUES // info.shape[0], 1)
    for i in range(0, len(rows), step):
        try:
            yield encode(rows[i : i + step], info.type).reshape(-1).data
        except InvalidRequestError as error:
            raise InvalidRequestError(f"tensor {info.name!r}: {error}") from None
