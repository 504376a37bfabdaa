"""Reads and writes files of `torch.save` without torch and without unpickling.

A pickle is a program. This module interprets it with a dozen opcodes that call nothing. It recognises the
names that torch writes for a tensor (_rebuild_tensor_v2, the storage types, OrderedDict), and rejects every
other name, opcode or argument (FormatError).

There are two layouts: a zip archive `<any>/data.pkl` with uncompressed storages in `<any>/data/<key>`, and
torch's older stream of pickles (magic, protocol, machine, value, keys) followed by the storages, each a count
i64 and its elements.

A short pickle can describe much: hashing or printing a tuple whose halves are the previous tuple takes
forever, and a thousand names may share one storage. So the bytes and instructions of a pickle, its tuples,
its names, and the total size of its tensors are limited before they are used, and only strings, numbers and
this module's own objects are hashed, compared or printed.
"""

from __future__ import annotations

import io
import math
import os
import pickletools
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import numpy as np

from hotset.errors import FormatError
from hotset.files import open_regular, replacing, unreadable
from hotset.formats.mapped import MappedFile

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_PROTOCOL = 1001
MAX_DIMS = 8
MAX_PICKLE_BYTES, MAX_INSTRUCTIONS = 1 << 26, 1 << 22  # a tensor takes about 300 bytes and 40 instructions
_LONGEST_LINE = 1024  # of the name of a module or a class
MAX_TUPLE = 16  # elements; tuples may be nested only once
MAX_TENSORS = 1 << 16
MAX_COPIES = 8  # limit of the tensors' total size, in sizes of the file: several may share a storage

BFLOAT16 = np.dtype([("bfloat16", "<u2")])  # the high half of a float32, a type that NumPy lacks

STORAGES: dict[str, np.dtype] = {
    "DoubleStorage": np.dtype("<f8"),
    "FloatStorage": np.dtype("<f4"),
    "HalfStorage": np.dtype("<f2"),
    "LongStorage": np.dtype("<i8"),
    "IntStorage": np.dtype("<i4"),
    "ShortStorage": np.dtype("<i2"),
    "CharStorage": np.dtype("i1"),
    "ByteStorage": np.dtype("u1"),
    "BoolStorage": np.dtype("?"),
    "BFloat16Storage": BFLOAT16,
}


@dataclass(frozen=True)
class _Global:
    """A name that the pickle mentions, without the named object."""

    name: str


@dataclass(frozen=True)
class _Storage:
    dtype: np.dtype
    key: str
    n: int


@dataclass(frozen=True)
class _Tensor:
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


_MARK = object()
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "MARK": lambda: _MARK, "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple, "EMPTY_DICT": dict, "EMPTY_LIST": list,
}  # fmt: skip
_TENSOR, _DICT = _Global("torch._utils _rebuild_tensor_v2"), _Global("collections OrderedDict")
_STORAGE_TYPES: dict[Any, np.dtype] = {_Global(f"torch {name}"): dtype for name, dtype in STORAGES.items()}


def read_torch(path: str | os.PathLike[str]) -> np.ndarray | dict[str, np.ndarray]:
    """Return the tensor, or the tensors by name, of a file from torch.save; bfloat16 becomes float32.

    Raises FormatError if the file has anything else, is damaged, or was written on a big-endian machine.
    """
    path = Path(path)
    try:
        # Read the whole file, so that a hostile length cannot exceed its size.
        with open_regular(path) as file:
            data = file.read()
    except OSError as error:
        raise FormatError(unreadable(path, error)) from None
    value, storages = _read(path, io.BytesIO(data), len(data), None)

    def array(tensor: _Tensor) -> np.ndarray:
        values = _array(path, tensor, storages)
        return to_floats(values) if values.dtype == BFLOAT16 else values.copy()

    tensors = {"": value} if isinstance(value, _Tensor) else _state_dict(path, value)
    # bfloat16 doubles in size; a megabyte is always allowed.
    n_bytes = sum(math.prod(t.shape) * max(t.storage.dtype.itemsize, 4) for t in tensors.values())
    if n_bytes > MAX_COPIES * len(data) + (1 << 20):
        raise FormatError(
            f"{path} has {len(tensors)} tensors of {n_bytes} bytes in {len(data)} bytes of storage; export "
            "each tensor once"
        )
    if isinstance(value, _Tensor):
        return array(value)
    return {name: array(tensor) for name, tensor in _state_dict(path, value).items()}


def map_torch(path: str | os.PathLike[str]) -> tuple[dict[str, np.ndarray], MappedFile]:
    """Return a state dict as read-only views of the mapped file, and that file; it need not fit in memory.

    Checksums are not compared. Values of dtype BFLOAT16 remain in this type (see to_floats).
    """
    path = Path(path)
    try:
        with open_regular(path) as file:
            mapped = MappedFile(path, file.fileno())
    except (OSError, ValueError) as error:
        raise FormatError(f"{path} cannot be read: {error}") from None
    value, storages = _read(path, mapped, len(mapped), memoryview(mapped))
    return {name: _array(path, tensor, storages) for name, tensor in _state_dict(path, value).items()}, mapped


def to_floats(values: np.ndarray) -> np.ndarray:
    """Return float32 of the same shape, bfloat16 decoded."""
    if values.dtype == BFLOAT16:
        return (values["bfloat16"].astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float32)


def _state_dict(path: Path, value: Any) -> dict[str, _Tensor]:
    if not isinstance(value, dict) or not all(isinstance(v, _Tensor) for v in value.values()):
        raise FormatError(f"{path} has contents other than tensors; export a tensor or a state dict")
    if len(value) > MAX_TENSORS:
        raise FormatError(f"{path} has {len(value)} tensors, more than {MAX_TENSORS}; export fewer")
    return value


def _read(path: Path, file: Any, size: int, mapped: memoryview | None) -> tuple[Any, Mapping[str, Any]]:
    """Return the described value, and its storages: read, or for a mapped file as views."""
    magic = file.read(2)
    file.seek(0)
    return (_read_zip if magic == b"PK" else _read_legacy)(path, file, size, mapped)


def _read_zip(
    path: Path, file: BinaryIO, size: int, mapped: memoryview | None
) -> tuple[Any, Mapping[str, Any]]:
    try:
        with zipfile.ZipFile(file) as archive:
            entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            if (
                any(info.compress_type != zipfile.ZIP_STORED for info in entries.values())
                or sum(info.file_size for info in entries.values()) > size  # entries may overlap
            ):
                raise FormatError(f"{path} is a compressed or damaged archive; save it with torch.save")
            if "byteorder" in entries and archive.read(entries["byteorder"]) != b"little":
                raise FormatError(f"{path} was written on a big-endian machine; save it on another one")
            if "data.pkl" not in entries:
                raise FormatError(f"{path} is an archive without data.pkl: it was not written by torch.save")
            if entries["data.pkl"].file_size > MAX_PICKLE_BYTES:
                raise FormatError(
                    f"{path} has a data.pkl of more than {MAX_PICKLE_BYTES} bytes; export fewer tensors"
                )
            value, storages = _interpret(path, io.BytesIO(archive.read(entries["data.pkl"])))
            load: Callable[[zipfile.ZipInfo], Any] = archive.read
            if mapped is not None:
                load = lambda info: _stored(mapped, info)  # noqa: E731
            data = {}
            for key in storages:
                if f"data/{key}" not in entries:
                    raise FormatError(f"{path} lacks the storage {key!r}; the file is damaged")
                data[key] = load(entries[f"data/{key}"])
            return value, data
    except (zipfile.BadZipFile, RuntimeError, EOFError, ValueError, OverflowError, struct.error) as error:
        raise FormatError(f"{path} is a damaged archive ({type(error).__name__})") from None


def _stored(mapped: memoryview, info: zipfile.ZipInfo) -> memoryview:
    """Return the bytes of an uncompressed entry, which follow its local header, whose size varies."""
    n_name, n_extra = struct.unpack_from("<HH", mapped, info.header_offset + 26)
    start = info.header_offset + 30 + n_name + n_extra
    return mapped[start : start + info.file_size]


def _read_legacy(
    path: Path, file: BinaryIO, size: int, mapped: memoryview | None
) -> tuple[Any, Mapping[str, Any]]:
    magic, protocol, machine = (_interpret(path, file)[0] for _ in range(3))
    if magic != LEGACY_MAGIC or protocol != LEGACY_PROTOCOL or not isinstance(machine, dict):
        raise FormatError(f"{path} was not written by torch.save")
    if machine.get("little_endian") is not True:
        raise FormatError(f"{path} was written on a big-endian machine; save it on another one")
    value, storages = _interpret(path, file)
    keys, _ = _interpret(path, file)
    if not isinstance(keys, list) or not all(isinstance(key, str) and key in storages for key in keys):
        raise FormatError(f"{path} does not list its storages; the file is damaged")
    data: dict[str, Any] = {}
    for key in keys:
        head = file.read(8)
        n_bytes = storages[key].n * storages[key].dtype.itemsize
        start = file.tell()
        if len(head) < 8 or struct.unpack("<q", head)[0] != storages[key].n or n_bytes > size - start:
            raise FormatError(f"{path} ends inside the storage {key!r}; the file is damaged")
        if mapped is None:
            data[key] = file.read(n_bytes)
        else:
            data[key] = mapped[start : start + n_bytes]
            file.seek(start + n_bytes)
    return value, data


class _Bounded:
    """A file for pickletools that ends after MAX_PICKLE_BYTES."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._left = file, MAX_PICKLE_BYTES

    def read(self, n: int) -> bytes:
        return self._taken(self._file.read(min(n, self._left + 1)))

    def readline(self) -> bytes:
        start = self._file.tell()
        line, newline, _ = self._file.read(_LONGEST_LINE).partition(b"\n")
        self._file.seek(start + len(line + newline))
        return self._taken(line + newline)

    def tell(self) -> int:
        return self._file.tell()

    def _taken(self, data: bytes) -> bytes:
        self._left -= len(data)
        if self._left < 0:
            raise ValueError(f"a pickle of more than {MAX_PICKLE_BYTES} bytes")
        return data


def _tuple(items: list[Any]) -> tuple[Any, ...]:
    """Return a tuple as torch writes them: short, and with at most one level of nesting."""
    if len(items) > MAX_TUPLE:
        raise ValueError(f"a tuple of {len(items)} elements")
    if any(isinstance(part, tuple) for item in items if isinstance(item, tuple) for part in item):
        raise ValueError("tuples in tuples in tuples")
    return tuple(items)


def _interpret(path: Path, file: BinaryIO) -> tuple[Any, dict[str, _Storage]]:
    """Return the value of a pickle, with tensors as _Tensor, and the storages that it names, by key."""
    machine = _Machine()
    try:
        for n_done, (opcode, argument, _) in enumerate(pickletools.genops(cast(IO[bytes], _Bounded(file)))):
            if n_done == MAX_INSTRUCTIONS:
                raise ValueError(f"more than {MAX_INSTRUCTIONS} instructions")
            if opcode.name == "STOP":
                return machine.stack.pop(), machine.storages
            machine.execute(opcode.name, argument)
    except (ValueError, LookupError, StopIteration, TypeError, struct.error) as error:
        what = str(error) or type(error).__name__
        raise FormatError(f"{path} has contents other than plain tensors ({what[:100]})") from None
    raise FormatError(f"{path} ends inside a pickle; the file is damaged")


class _Machine:
    """An interpreter of the instructions that torch writes; others raise errors for _interpret.

    storages: the named ones, by key.
    """

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.storages: dict[str, _Storage] = {}
        self._memo: dict[int, Any] = {}

    def execute(self, name: str, argument: Any) -> None:
        stack = self.stack
        match name:
            case "PROTO" | "FRAME":
                pass
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINUNICODE" | "SHORT_BINUNICODE":
                stack.append(argument)
            case "TUPLE":
                stack.append(_tuple(self._marked()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                n = int(name[-1])
                stack[-n:] = [_tuple(stack[-n:])]
            case "BINPUT" | "LONG_BINPUT" | "MEMOIZE":
                self._memo[len(self._memo) if name == "MEMOIZE" else argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(self._memo[argument])
            case "GLOBAL":
                stack.append(_Global(argument))
            case "STACK_GLOBAL":
                attribute, module = stack.pop(), stack.pop()
                stack.append(_global(module, attribute))
            case "SETITEM" | "SETITEMS":
                self._set_items(self._marked() if name == "SETITEMS" else [stack.pop(-2), stack.pop()])
            case "APPEND" | "APPENDS":
                self._extend(self._marked() if name == "APPENDS" else [stack.pop()])
            case "BUILD":  # the attributes of a state dict (its _metadata)
                stack.pop()
                if not isinstance(stack[-1], dict):
                    raise ValueError("attributes of an object that is not a dictionary")
            case "BINPERSID" | "REDUCE":
                argument = stack.pop()
                stack.append(self._named(argument) if name == "BINPERSID" else _reduce(stack.pop(), argument))
            case _ if name in _CONSTANTS:
                stack.append(_CONSTANTS[name]())
            case _:
                raise ValueError(f"the instruction {name}")

    def _marked(self) -> list[Any]:
        """Remove and return the values above the last mark."""
        at = len(self.stack) - 1 - next(i for i, v in enumerate(reversed(self.stack)) if v is _MARK)
        items = self.stack[at + 1 :]
        del self.stack[at:]
        return items

    def _set_items(self, items: list[Any]) -> None:
        for key, item in zip(items[::2], items[1::2], strict=True):
            if not isinstance(self.stack[-1], dict) or not isinstance(key, str):
                raise ValueError("a key is not a string")
            self.stack[-1][key] = item

    def _extend(self, items: list[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            raise ValueError("an element is appended to an object that is not a list")
        self.stack[-1].extend(items)

    def _named(self, id: Any) -> _Storage:
        storage = _storage(id)
        if self.storages.setdefault(storage.key, storage) != storage:
            raise ValueError("two storages of one name")
        return storage


def _global(module: Any, name: Any) -> _Global:
    if not isinstance(name, str) or not isinstance(module, str):
        raise ValueError("a name that is not a string")
    return _Global(f"{module} {name}")


def _storage(id: Any) -> _Storage:
    """Return the storage of a persistent id ("storage", type, key, location, number of elements[, view])."""
    kind, type, key, _, n = id[:5]
    if (
        not isinstance(type, _Global)  # first, because other objects must not be hashed
        or type not in _STORAGE_TYPES
        or kind != "storage"
        or not isinstance(key, str)
        or not _is_count(n)
    ):
        raise ValueError(f"a storage of type {_named(type)}")
    if any(view is not None for view in id[5:]):
        raise ValueError("a view of a storage")
    return _Storage(_STORAGE_TYPES[type], key, n)


def _named(value: Any) -> str:
    """Return a name for a message: one that the pickle mentions, or the type of the value."""
    return value.name if isinstance(value, _Global) else f"a {type(value).__name__}"


def _reduce(function: Any, arguments: Any) -> Any:
    if function == _DICT and arguments == ():
        return {}
    if function != _TENSOR:
        raise ValueError(f"a call of {_named(function)}")
    storage, offset, shape, strides = arguments[:4]
    sizes = (offset, *shape, *strides)
    if not isinstance(storage, _Storage) or len(shape) != len(strides) or not all(map(_is_count, sizes)):
        raise ValueError("an invalid tensor")
    if len(shape) > MAX_DIMS or math.prod(shape) > storage.n:
        raise ValueError("a tensor larger than its storage")
    last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    if math.prod(shape) and last >= storage.n:
        raise ValueError("a tensor outside its storage")
    return _Tensor(storage, offset, tuple(shape), tuple(strides))


def _is_count(n: Any) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 1 << 48


def _array(path: Path, tensor: _Tensor, storages: Mapping[str, Any]) -> np.ndarray:
    storage = tensor.storage
    data, itemsize = storages.get(storage.key, b""), storage.dtype.itemsize
    if len(data) != storage.n * itemsize:
        raise FormatError(f"{path}: the storage {storage.key!r} is not {storage.n} elements; it is damaged")
    if storage.dtype == np.bool_:  # any byte but 0 is true; NumPy requires bytes of 0 and 1
        values = np.frombuffer(data, np.uint8) != 0
    else:
        values = np.frombuffer(data, storage.dtype)
    if not math.prod(tensor.shape):
        return np.empty(tensor.shape, storage.dtype)
    strides = tuple(stride * itemsize for stride in tensor.strides)
    return np.lib.stride_tricks.as_strided(values[tensor.offset :], tensor.shape, strides, writeable=False)


def write_torch(path: str | os.PathLike[str], values: np.ndarray | Mapping[str, np.ndarray]) -> None:
    """Write one tensor, or a state dict, like torch.save: torch.load(path, weights_only=True) reads it.

    Replaces the file when the new one is complete. Raises HotsetError if it cannot be written.
    """
    path = Path(path)
    one = isinstance(values, np.ndarray)
    tensors = {"": values} if isinstance(values, np.ndarray) else dict(values)
    tensors = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    pickles = [_pickled(str(key), tensor) for key, tensor in enumerate(tensors.values())]
    # PROTO 2, the value, STOP; a state dict: EMPTY_DICT, MARK, names and tensors, SETITEMS
    value = pickles[0] if one else b"}(" + b"".join(map(bytes.__add__, map(_text, tensors), pickles)) + b"u"
    pickle = b"\x80\x02" + value + b"."
    with replacing(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(f"{path.stem}/data.pkl", pickle)
        archive.writestr(f"{path.stem}/byteorder", b"little")
        for key, tensor in enumerate(tensors.values()):
            archive.writestr(f"{path.stem}/data/{key}", tensor.tobytes())
        archive.writestr(f"{path.stem}/version", b"3\n")


def _pickled(key: str, values: np.ndarray) -> bytes:
    """Return the opcodes that make a tensor of the storage `key`: the function, its arguments, REDUCE."""
    name = next(name for name, dtype in STORAGES.items() if dtype == values.dtype)
    storage = b"(" + _text("storage") + f"ctorch\n{name}\n".encode() + _text(key) + _text("cpu")
    storage += _integer(values.size) + b"tQ"  # TUPLE, BINPERSID
    strides = [stride // values.itemsize for stride in values.strides]
    shapes = b"".join(b"(" + b"".join(map(_integer, sizes)) + b"t" for sizes in (values.shape, strides))
    # NEWFALSE: no gradient; an empty OrderedDict: no hooks
    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + _integer(0) + shapes
    return tensor + b"\x89ccollections\nOrderedDict\n)RtR"


def _integer(n: int) -> bytes:
    return b"\x8a\x08" + struct.pack("<q", n)  # LONG1


def _text(s: str) -> bytes:
    return b"X" + struct.pack("<I", len(s)) + s.encode()  # BINUNICODE
