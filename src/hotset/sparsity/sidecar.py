"""Sidecar files: tensors that hotset builds once from a model.

A sidecar is a GGUF file `<model>.<what>.hotset.gguf` next to the model. If that folder cannot be written, is
full or belongs to another program (storage/elsewhere.py), it is `cache/<fingerprint>/<what>.hotset.gguf` in
the store's folder (storage.store.home). It records the fingerprint of its model and the settings it was built
with. hotset builds it again if these differ, its header is damaged, or its tensors are not the expected ones.
Writing is atomic (GGUFWriter), so two processes that build at once only waste time. Anyone who can write next
to a model can change its results.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hotset.errors import FormatError, HotsetError, InvalidRequestError
from hotset.files import check_target
from hotset.formats.gguf import DEFAULT_ALIGNMENT, GGUFWriter, open_gguf
from hotset.units import human_size

if TYPE_CHECKING:
    from hotset.formats.gguf import GGUFFile, TensorInfo
    from hotset.reporter import Reporter

SUFFIX = ".hotset.gguf"
MODEL_KEY, SETTINGS_KEY, VERSION_KEY = (
    "hotset.sidecar.model",
    "hotset.sidecar.settings",
    "hotset.sidecar.version",
)
VERSION = 1  # of the tensors' meaning; a sidecar of another version is built again
_SAMPLE_BYTES = 256  # of each tensor
_SMALL = 16 << 20  # bytes of a file that is read faster than threads start

Fill = Callable[[GGUFWriter], None]
Check = Callable[["GGUFFile"], None]  # raises a HotsetError if a sidecar has unexpected contents


@dataclass(frozen=True)
class Sidecar:
    """An open sidecar. seconds: time to build it; None if it existed."""

    file: GGUFFile
    seconds: float | None

    def note(self, what: str) -> str:
        """Return a note for users: "neuron-major down matrices: built in 3.1 s, 722 MB, /m/m.down..."."""
        how = "opened" if self.seconds is None else f"built in {self.seconds:.1f} s"
        return f"{what}: {how}, {human_size(self.file.nbytes)}, {self.file.path}"


def fingerprint(gguf: GGUFFile) -> str:
    """Return 32 hex digits that identify a model's content, without reading all of it.

    It is a SHA-256 of the size and the whole header of each file and some bytes from the middle of each
    tensor.
    """
    digest = hashlib.sha256()
    for shard, path in enumerate(gguf.paths):
        size = path.stat().st_size
        header = min((info.offset for info in gguf.tensors.values() if info.shard == shard), default=size)
        digest.update(f"{size} {header} ".encode())
        digest.update(_read(path, 0, header))
    infos = gguf.tensors.values()
    if gguf.nbytes < _SMALL:
        digest.update(b"".join(_sample(gguf, info) for info in infos))
        return digest.hexdigest()[:32]
    from concurrent.futures import ThreadPoolExecutor

    # In parallel: each read takes milliseconds on a cold disk, and a large model has a thousand tensors.
    with ThreadPoolExecutor(8) as pool:
        for sample in pool.map(lambda info: _sample(gguf, info), infos):
            digest.update(sample)
    return digest.hexdigest()[:32]


def _sample(gguf: GGUFFile, info: TensorInfo) -> bytes:
    first = max(info.nbytes - _SAMPLE_BYTES, 0) // 2
    return _read(gguf.paths[info.shard], info.offset + first, min(_SAMPLE_BYTES, info.nbytes))


def _read(path: Path, first: int, n_bytes: int) -> bytes:
    with path.open("rb") as file:  # buffered, because a single system call may return fewer bytes
        file.seek(first)
        return file.read(n_bytes)


def stem_of(path: Path) -> str:
    """Return the prefix of files that belong to a model: its (first) file without .gguf."""
    return path.name.removesuffix(".gguf")


def places(gguf: GGUFFile, what: str, model: str) -> list[Path]:
    """Return possible paths of a sidecar, best first; `model` is the fingerprint."""
    from hotset.storage.elsewhere import is_foreign
    from hotset.storage.store import home

    cached = home() / "cache" / model / f"{what}{SUFFIX}"
    if is_foreign(gguf.path):
        return [cached]
    beside = gguf.path.with_name(f"{stem_of(gguf.path)}.{what}{SUFFIX}")
    return [beside, cached]


def find(
    gguf: GGUFFile, what: str, settings: Mapping[str, object], model: str, check: Check
) -> GGUFFile | None:
    """Return the open sidecar of this model and these settings that passes the check, or None."""
    for path in places(gguf, what, model):
        if not path.is_file():
            continue
        try:
            file = open_gguf(path)
        except HotsetError:  # damaged: build it again
            continue
        expected = {MODEL_KEY: model, SETTINGS_KEY: _text(settings), VERSION_KEY: VERSION}
        try:
            # Check the type first: a hostile file may have an array, which cannot be compared.
            if all(
                type(file.metadata.get(k)) is type(v) and file.metadata[k] == v for k, v in expected.items()
            ):
                check(file)
                return file
        except HotsetError:
            pass
        file.close()
    return None


def same_tensors(fill: Fill) -> Check:
    """Return a check for exactly the tensors that `fill` adds; `fill` must compute their data in `write`."""

    def check(file: GGUFFile) -> None:
        writer = GGUFWriter(file.path, "hotset")
        fill(writer)
        expected = writer.planned().tensors
        if {n: (t.type, t.shape) for n, t in file.tensors.items()} != {
            n: (t.type, t.shape) for n, t in expected.items()
        }:
            raise FormatError(f"{file.path} does not have the expected tensors")

    return check


@dataclass(frozen=True)
class Contents:
    """The contents of a sidecar. fill: adds its keys and tensors. n_bytes: its approximate size.

    check: for an existing sidecar, which is built again if it fails; None: `same_tensors`. alignment: of the
    tensors in the file.
    """

    fill: Fill
    n_bytes: int
    check: Check | None = None
    alignment: int = DEFAULT_ALIGNMENT


def open_or_build(
    gguf: GGUFFile,
    what: str,
    settings: Mapping[str, object],
    contents: Contents,
    *,
    model: str | None = None,
    progress: Reporter | None = None,
) -> Sidecar:
    """Open the sidecar `what` of a model, or build it. Raises HotsetError if it cannot be stored anywhere."""
    model = model or fingerprint(gguf)
    found = find(gguf, what, settings, model, contents.check or same_tensors(contents.fill))
    if found is not None:
        return Sidecar(found, None)
    started = time.perf_counter()
    path = _writable(places(gguf, what, model), contents.n_bytes)
    if progress is not None:
        progress.say(f"Building {path} ({human_size(contents.n_bytes)}), once.")
    writer = GGUFWriter(path, "hotset", alignment=contents.alignment)
    writer.add(VERSION_KEY, VERSION)
    writer.add(MODEL_KEY, model)
    writer.add(SETTINGS_KEY, _text(settings))
    contents.fill(writer)
    writer.write(progress)
    return Sidecar(open_gguf(path), time.perf_counter() - started)


def _text(settings: Mapping[str, object]) -> str:
    return json.dumps(settings, sort_keys=True)


def _writable(paths: list[Path], n_bytes: int) -> Path:
    """Return the first path whose folder is writable and has room; the cache's folder is created."""
    reasons = []
    for i, path in enumerate(paths):
        folder = path.parent
        try:
            if i == len(paths) - 1:
                folder.mkdir(parents=True, exist_ok=True)
            check_target(path)
            if not os.access(folder, os.W_OK):
                reasons.append(f"{folder} cannot be written")
            elif shutil.disk_usage(folder).free < n_bytes + (64 << 20):
                reasons.append(f"{folder} has no room")
            else:
                return path
        except InvalidRequestError:
            reasons.append(f"{path} is not a regular file")
        except OSError as error:
            reasons.append(f"{folder} cannot be created ({error.strerror})")
    raise HotsetError(
        f"hotset must build a file of {human_size(n_bytes)} for the model, but {' and '.join(reasons)}; "
        "free some space, or set HOTSET_HOME to a folder with room."
    )
