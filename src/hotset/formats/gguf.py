"""GGUF files: a memory-mapped reader that trusts nothing, and a streaming writer.

Layout (versions 2 and 3, little-endian; specification: docs/gguf.md of the ggml repository):

    magic "GGUF" | version u32 | n_tensors u64 | n_kv u64
    n_kv     x  key string | type u32 | value
    n_tensors x name string | n_dims u32 | dims u64[n_dims], ne0 first | type u32 | offset u64
    padding to `general.alignment` (default 32), then the data; offsets count from here

A string is a length u64 and bytes; an array is an element type u32, a count u64 and the elements.
PowerInfer's dialect is version 3 with the magic "PWRI", its own type ids for integers, and vectors that may
be empty. A model may be split into shards named `<name>-00001-of-0000N.gguf`; each is a whole GGUF file with
some of the tensors.

Every count, length, offset and dimension is checked against the bytes that are there before it is used,
so that a damaged or hostile file costs one message (FormatError), never a crash or a large allocation.
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
from hotset.files import check_target, open_regular, replacing
from hotset.formats import bundle
from hotset.formats.encode import WRITABLE, encode
from hotset.formats.mapped import MappedFile, check_unharmed, truncated_error, truncated_files
from hotset.formats.quants import TYPES, GGMLType, row_bytes
from hotset.units import human_size

if TYPE_CHECKING:
    from hotset.reporter import Reporter

Dialect = Literal["gguf", "powerinfer"]
MAGICS: dict[bytes, Dialect] = {b"GGUF": "gguf", b"PWRI": "powerinfer"}
# Its ggml is older than the IQ types, whose ids these are today.
POWERINFER_TYPES = {16: GGMLType.I8, 17: GGMLType.I16, 18: GGMLType.I32}
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
MAX_ARRAY_DEPTH = 4  # arrays of arrays are legal and unknown in the wild
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
_MIN_KEY_VALUE = 8 + 4 + 1  # bytes of the smallest key-value and of the smallest tensor info
_MIN_TENSOR_INFO = 8 + 4 + 4 + 8


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies.

    shape: GGUF order, ne0 (contiguous) first. offset: bytes from the start of file `shard`. stride: bytes
    from one neuron, or expert, to the next, where they lie in a bundle (formats/bundle.py); else 0.
    nbytes is 0 where the type is not known (its size cannot be); `GGUFFile.data` refuses such a tensor.
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
        """Of one row of ne0 values."""
        return row_bytes(self.type, self.shape[0])


class _Cursor:
    """Reads forward through the mapped header; every step is checked against the end of the file."""

    def __init__(self, buffer: MappedFile | bytes, path: Path) -> None:
        self.buffer, self.path, self.pos, self.size = buffer, path, 0, len(buffer)

    def fail(self, what: str) -> FormatError:
        return FormatError(f"{self.path}: {what}; the file is damaged, download or convert it again.")

    def take(self, n_bytes: int, what: str) -> int:
        """Moves over n_bytes and returns where they start."""
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
        """A count of things of at least min_bytes each: one that cannot fit in the file is refused now."""
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
        if type == ValueType.BOOL:  # any byte but 0 is true; NumPy must not see other bytes than 0 and 1
            return np.frombuffer(self.buffer[start : self.pos], np.uint8) != 0
        return np.frombuffer(self.buffer[start : self.pos], dtype)

    def strings(self, n: int, key: str) -> list[str]:
        """n strings. Written flat: with 300,000 tokens and merges this loop is most of the time to open."""
        out = []
        buffer, pos, unpack = self.buffer, self.pos, _U64.unpack_from
        try:
            for _ in range(n):
                start = pos + 8
                pos = start + unpack(buffer, pos)[0]
                # Lossless: token bytes that are not UTF-8 must not merge into one replacement character.
                out.append(buffer[start:pos].decode("utf-8", "surrogateescape"))
        except (struct.error, OverflowError):
            pos = self.size + 1
        if pos > self.size:
            raise self.fail(f"the file ends at byte {self.size}, inside elements of {key!r}")
        self.pos = pos
        return out


@dataclass
class _Shard:
    """One mapped file: its map and what its header says (offsets are already those of the file)."""

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
        raise ModelNotFoundError(f"{path} does not exist; check the path.") from None
    except (OSError, ValueError) as error:  # what maps are refused for; it became empty just now
        raise FormatError(f"{path} cannot be mapped: {getattr(error, 'strerror', None) or error}.") from None


def _read_shard(path: Path, index: int) -> _Shard:
    buffer = _map_file(path)
    try:
        shard = _parse(buffer, path, index)
        buffer.check()
    except Exception:
        truncated = buffer.is_truncated  # then what it found wrong is a consequence
        buffer.close()
        if truncated:
            raise truncated_error(path) from None
        raise
    except BaseException:
        buffer.close()
        raise
    return shard


def _parse(buffer: MappedFile, path: Path, index: int) -> _Shard:
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
            raise cursor.fail(f"key {key!r} stands twice")
        type = cursor.u32(f"the type of {key!r}")
        # An array's element type follows and is read again by value(): peek at it for a faithful copy.
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
    return _Shard(path, buffer, version, dialect, metadata, types, tensors)


def _read_tensor_info(cursor: _Cursor, index: int) -> TensorInfo:
    """The info as it stands: the offset still counts from the start of the data."""
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
    if math.prod(shape) == 0 and not (powerinfer and shape == (0,)):  # a GPU index of no neurons
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
        raise cursor.fail(f"tensor {info.name!r} lies at offset {info.offset}, not a multiple of {alignment}")
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
    """An open model: facts at once, tensor bytes where they lie in the mapped file.

    metadata: key → int, float, bool, str, NumPy array (numbers; do not write), list[str] or list of arrays.
      Of strings that are not UTF-8, single ones have U+FFFD for the bad bytes; those of an array keep the
      bytes as lone surrogates (errors="surrogateescape"), so that tokens stay distinct.
    metadata_types: key → (ValueType,) or (ValueType.ARRAY, element type), for a faithful copy.
    tensors: name → TensorInfo, in file order, shard after shard.
    paths: the files, in the order of the shards. version: of the first shard.

    Use `open_gguf`. Where others cut the file short while it is open, what is gone reads as zeros, and
    `check` raises: ask it after reading.
    """

    def __init__(self, shards: list[_Shard]) -> None:
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
                        f"{shard.path}: tensor {info.name!r} stands twice; convert the model again."
                    )
                self.tensors[info.name] = info
        self.tensors = bundle.opened(first.path, self.tensors, self.metadata)
        self._unbundled: WeakValueDictionary[str, np.ndarray] = WeakValueDictionary()
        self._maps = [shard.buffer for shard in shards]
        self._bytes = [np.frombuffer(buffer, np.uint8) for buffer in self._maps]

    @property
    def architecture(self) -> str:
        """`general.architecture`; FormatError where it is missing."""
        architecture = self.metadata.get("general.architecture")
        if not isinstance(architecture, str):
            raise FormatError(f"{self.path} does not name its general.architecture; convert the model again.")
        return architecture

    @property
    def nbytes(self) -> int:
        """Size of all files together."""
        return sum(len(data) for data in self._bytes)

    @property
    def n_parameters(self) -> int:
        """Number of values in all tensors."""
        return sum(info.n_elements for info in self.tensors.values())

    def data(self, name: str) -> np.ndarray:
        """The tensor's bytes: uint8 [nbytes], read-only, a view into the map (no copy; nothing is read
        yet); of one in a bundle a copy.

        Raises UnsupportedModelError where the tensor is missing or its type is not known.
        """
        info = self.tensors.get(name)
        if info is None:
            raise UnsupportedModelError(
                f"{self.path} has no tensor {name!r}; the model cannot be run without it."
            )
        if info.type not in TYPES:
            raise UnsupportedModelError(
                f"{self.paths[info.shard]}: tensor {name!r} has type {int(info.type)}, which this version "
                "does not know; use a file of another type."
            )
        if not self._bytes:
            raise InvalidRequestError(f"{self.path} has been closed; open it again to read tensors.")
        self._maps[info.shard].check()
        if info.stride:
            return self._gathered(info)
        return self._bytes[info.shard][info.offset : info.offset + info.nbytes]

    def _gathered(self, info: TensorInfo) -> np.ndarray:
        """A copy of a matrix of a bundle; one for all who have it."""
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
        """Raises FormatError where what was read of the files may be anything: one was truncated
        meanwhile."""
        for mapped in self._maps:
            mapped.check()

    def advise(self, name: str, start: int, stop: int, *, needed: bool) -> None:
        """Advises the system that bytes start..stop of a tensor will be read soon, or not again.

        A file that is read once, piece by piece, then streams from the disk and takes no memory of the
        process. (Nothing happens where the system takes no advice.)
        """
        info = self.tensors[name]
        stop = min(stop, info.nbytes)
        if not hasattr(mmap, "MADV_WILLNEED") or start >= stop:
            return
        first = (info.offset + start) // mmap.PAGESIZE * mmap.PAGESIZE
        advice = mmap.MADV_WILLNEED if needed else mmap.MADV_DONTNEED
        self._maps[info.shard].madvise(advice, first, info.offset + stop - first)

    def ask_for_large_pages(self) -> None:
        """Asks the system to read what is not in its cache yet in large pages (as Linux can).

        To be called when small tensors, here and there in the file, have been read: from now on a page that
        is touched brings megabytes.
        """
        if hasattr(mmap, "MADV_HUGEPAGE"):
            for buffer in self._maps:
                with contextlib.suppress(OSError):  # a kernel that was built without
                    buffer.madvise(mmap.MADV_HUGEPAGE)

    def map_cached(self, name: str) -> None:
        """MappedFile.map_cached, of the bytes of a tensor."""
        info = self.tensors[name]
        if not info.stride:  # of a bundle there is a copy
            self._maps[info.shard].map_cached(info.offset, info.offset + info.nbytes)

    def let_go(self) -> None:
        """Gives back the memory of what was touched; it is read again from the files where it is."""
        if hasattr(mmap, "MADV_DONTNEED"):
            for buffer in self._maps:
                buffer.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Unmaps the files. A file of which views are still alive is unmapped when the last of them goes."""
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
    """Opens a model file, or, given any of its shards, the whole split model.

    Raises ModelNotFoundError where a file is missing and FormatError for all that cannot be read.
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


def _split(shard: _Shard, key: str, default: int) -> int:
    """A key of the split; it can be of any type in a hostile file, and an array does not compare."""
    value = shard.metadata.get(f"split.{key}", default)
    if not isinstance(value, int) or value < 0:
        raise FormatError(f"{shard.path}: split.{key} is not a count; download or convert the model again.")
    return value


def _read_siblings(opened: _Shard) -> list[_Shard]:
    """All shards of the model that `opened` is one of, in order."""
    path, n_shards = opened.path, _split(opened, "count", 1)
    opened.buffer.close()
    match = SHARD_NAME.match(path.name)
    if match is None or int(match["count"]) != n_shards:
        raise FormatError(
            f"{path} is one of {n_shards} shards but is not named so; give all of them their names back "
            f"(<name>-00001-of-{n_shards:05d}.gguf) in one folder."
        )
    shards: list[_Shard] = []
    try:
        for i in range(n_shards):
            sibling = path.with_name(f"{match['stem']}-{i + 1:05d}-of-{n_shards:05d}.gguf")
            if not sibling.exists():
                raise ModelNotFoundError(f"{sibling} is missing: put all {n_shards} shards in one folder.")
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
                f"{path}: the shards hold {n_tensors} tensors, not {expected}; download them again."
            )
        return shards
    except BaseException:
        for shard in shards:
            shard.buffer.close()
        raise


_INTEGERS = (
    ValueType.UINT32,
    ValueType.INT32,
    ValueType.UINT64,
    ValueType.INT64,
)  # as llama.cpp expects them
TensorData = np.ndarray | Callable[[], np.ndarray | Iterable[np.ndarray]]
PIECE_VALUES = 1 << 22  # values encoded at a time: all cores work on them, and they take 16 MB at most
PIECES_BEHIND = 2  # encoded pieces that may wait for the disk


@dataclass(frozen=True)
class PlannedFile:
    """What a reader will find in a file that a GGUFWriter would write now (see GGUFFile).

    Offsets of tensors count from the start of the data.
    """

    path: Path
    dialect: Dialect
    metadata: dict[str, object]
    tensors: dict[str, TensorInfo]
    _data: dict[str, TensorData]

    def data(self, name: str) -> np.ndarray:
        """The tensor's bytes, encoded at the call: uint8 [nbytes]."""
        pieces = b"".join(_pieces(self.tensors[name], self._data[name]))
        return np.frombuffer(pieces, np.uint8)


class GGUFWriter:
    """Writes a GGUF file (version 3), tensor by tensor, under its name only when it is whole.

        writer = GGUFWriter("model.gguf", "llama")
        writer.add("llama.block_count", 2)
        writer.add_tensor("output_norm.weight", np.ones(64, np.float32), GGMLType.F32)
        writer.write()

    Every method raises InvalidRequestError for what the format cannot hold.
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
        if architecture is not None:  # a file of no model has none
            self.add("general.architecture", architecture)
        if alignment != DEFAULT_ALIGNMENT:
            self.add("general.alignment", alignment)

    def add(self, key: str, value: object, type: ValueType | None = None) -> None:
        """Adds a key-value: bool, int, float, str, list (of one of these) or one-dimensional array.

        Without `type` an int is UINT32 (INT32 if negative, 64 bits if it must), a float FLOAT32, a list of
        int INT32, and an array what its dtype says. With `type`, the value or each element is stored so:
        `writer.add(key, file.metadata[key], file.metadata_types[key][-1])` copies a value as it was.
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
        """Adds a tensor; its data is encoded, or asked for, in `write`, one tensor at a time.

        data: floats [..., ne0], quantised to `type` where they are not stored as they are; or uint8, the
        blocks as they go into the file; or a function without arguments that returns either, or an iterable
        of such arrays, whole rows each, for what does not fit in memory. Arrays must then stay as they are.
        shape: GGUF order, ne0 first; needed with a function, else found from the array.
        """
        if name in self._tensors:
            raise InvalidRequestError(f"tensor {name!r} has been added already; add it once.")
        _encode_string(name, MAX_NAME)
        type = GGMLType(type)
        facts = TYPES.get(type)
        if facts is None:
            raise InvalidRequestError(
                f"tensor {name!r} has type {int(type)}, which this version does not know."
            )
        if shape is None:
            if callable(data):
                raise InvalidRequestError(f"tensor {name!r} comes from a function: give its shape.")
            shape = data.shape[::-1]
            if data.dtype == np.uint8 and shape:
                shape = (shape[0] // facts.block_bytes * facts.block_size, *shape[1:])
        shape = tuple(int(n) for n in shape)
        # Only a vector may be empty, such as the list of no neurons in PowerInfer's GPU index.
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
        """What has been added."""
        return frozenset(self._values)

    def planned(self) -> PlannedFile:
        """What has been added, as `open_gguf` will read it: for checks before anything is written."""
        metadata = {}
        for key, value in self._values.items():
            cursor = _Cursor(value, self.path)
            metadata[key] = cursor.value(cursor.u32("a type"), key)
        tensors = {name: info for name, (info, _) in self._tensors.items()}
        data = {name: data for name, (_, data) in self._tensors.items()}
        return PlannedFile(self.path, self.dialect, metadata, tensors, data)

    @property
    def nbytes(self) -> int:
        """Size of the data of all tensors; where the next one goes, from its start."""
        last = next((info for info, _ in reversed(self._tensors.values())), None)
        return 0 if last is None else self._aligned(last.offset + last.nbytes)

    def _aligned(self, n: int) -> int:
        return -(-n // self.alignment) * self.alignment

    def write(self, progress: Reporter | None = None) -> None:
        """Writes the file: without a name (or to a temporary one), to the disk, then under its name.

        Replaces a file of that name. On any error nothing is left, and where the system has files without a
        name (Linux) nor does a killed process leave anything; HotsetError where the system refuses.
        """
        check_target(self.path)
        try:
            free = shutil.disk_usage(self.path.parent).free
        except OSError as error:
            reason = error.strerror or error
            raise HotsetError(f"{self.path} cannot be written ({reason}); choose another folder.") from error
        if self.nbytes > free:
            raise HotsetError(
                f"{self.path} takes {human_size(self.nbytes)}, and {self.path.parent} has "
                f"{human_size(free)} left; make room or choose another folder."
            )
        with replacing(self.path) as file:
            try:
                self._write_to(file, progress)
                file.flush()
            except OSError:
                # The system, too, cannot read what is gone: a bad address.
                check_unharmed(self._truncated_before)
                raise
            check_unharmed(self._truncated_before)  # what was read meanwhile may be anything

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
        # One thread writes while this one reads and encodes what comes next.
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
    """Adds the keys of a file, but for `without`, those that the writer has, and those of shards."""
    for key, value in file.metadata.items():
        if key not in without and key not in writer.keys and not key.startswith("split."):
            writer.add(key, value, ValueType(file.metadata_types[key][-1]))


def _encode_string(text: str, limit: int | None = None) -> bytes:
    # surrogateescape: bytes that were read as lone surrogates go back as they were
    try:
        data = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise InvalidRequestError(f"{text!r} cannot be stored as UTF-8.") from None
    if limit is not None and len(data) > limit:
        raise InvalidRequestError(f"the name {text[:40]!r}... is longer than {limit} bytes.")
    return _U64.pack(len(data)) + data


def _encode_value(value: object, type: ValueType | None) -> bytes:
    """Type id and payload."""
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
                raise ValueError("no integer type holds all the numbers")  # NumPy would make them floats
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
    """A mismatch of shape, size or dtype is found before anything is encoded."""
    facts = TYPES[info.type]
    if data.dtype == np.uint8:
        if data.size != info.nbytes:
            raise InvalidRequestError(f"tensor {info.name!r} takes {info.nbytes} bytes, not {data.size}.")
    elif data.shape != info.shape[::-1]:
        expected, found = list(info.shape[::-1]), list(data.shape)
        raise InvalidRequestError(f"tensor {info.name!r} must have shape {expected}, not {found}.")
    # `is None` first: NumPy takes None for float64, and compares it so
    elif (facts.block is None or data.dtype != facts.block) and not (
        info.type in WRITABLE and data.dtype.kind == "f"
    ):
        raise InvalidRequestError(
            f"tensor {info.name!r}: {data.dtype} values cannot be stored as {facts.name}."
        )


def _pieces(info: TensorInfo, data: TensorData) -> Iterator[memoryview]:
    """The bytes that go into the file, encoded where they must be, a few megabytes at a time."""
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
