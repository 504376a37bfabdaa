"""The local store of models: a folder of GGUF files, and the rule that turns a name into a path.

    $HOTSET_HOME (or the platform's data folder)
      models/
        smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf     a name of the catalogue
        owner--repository/model.gguf, activation/...      a repository of the Hugging Face hub
        mine.gguf                                         whatever a person puts there
        mine.down.hotset.gguf                             what hotset built from it (sparsity/sidecar.py)

There is no index beside the files: what lies in the folder is what there is.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hotset.errors import ModelNotFoundError, UnsupportedModelError
from hotset.storage import catalogue

if TYPE_CHECKING:
    from hotset.storage.reporter import Reporter

SIDECAR_SUFFIX = ".hotset.gguf"
SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_RELU_NAME = re.compile(r"relu|prosparse|bamboo|turbosparse|smallthinker", re.IGNORECASE)


@dataclass(frozen=True)
class StoredModel:
    """A model on this machine. `path` is its (first) file, `size` the bytes of all its shards."""

    name: str
    path: Path
    size: int
    dialect: str  # "gguf" or "powerinfer"
    relu: bool  # sparse by nature, as far as the name and the dialect tell


def home() -> Path:
    """$HOTSET_HOME, or the platform's folder for application data (not created here)."""
    chosen = os.environ.get("HOTSET_HOME")
    if chosen:
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "hotset"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "hotset"
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "hotset"


def models_folder() -> Path:
    return home() / "models"


def folder_of(name: str) -> Path:
    """Where a catalogue name or a repository "owner/name" is kept."""
    entry = catalogue.find(name) or catalogue.find_repository(name)
    return models_folder() / (entry.name if entry else name.replace("/", "--"))


def shards(path: Path) -> list[Path]:
    """All files of the model that begins at `path` (itself alone, unless it is a shard)."""
    match = SHARD.search(path.name)
    if not match:
        return [path]
    stem, count = path.name[: match.start()], int(match[2])
    return [path.with_name(f"{stem}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]


def complete_models(folder: Path) -> list[Path]:
    """The models below `folder`, sharded ones by their first file and only with every shard there."""
    found = []
    for path in sorted(folder.rglob("*.gguf")):
        if path.name.endswith(SIDECAR_SUFFIX):
            continue
        match = SHARD.search(path.name)
        if match and int(match[1]) != 1:
            continue
        if all(part.is_file() for part in shards(path)):
            found.append(path)
    return found


def list_models() -> list[StoredModel]:
    """Every complete model of the store, by name."""
    folder = models_folder()
    if not folder.is_dir():
        return []
    files = [path for path in sorted(folder.glob("*.gguf")) if path.is_file()]
    models = [_describe(path, path.stem) for path in files if not path.name.endswith(SIDECAR_SUFFIX)]
    for child in sorted(p for p in folder.iterdir() if p.is_dir()):
        paths = complete_models(child)
        base = child.name.replace("--", "/", 1)
        for path in paths:
            name = base if len(paths) == 1 else f"{base}:{path.relative_to(child).as_posix()}"
            models.append(_describe(path, name))
    return sorted(models, key=lambda model: model.name.lower())


def sidecars(path: Path) -> list[Path]:
    """What hotset built from the model at `path` and keeps beside it."""
    stem = re.escape(path.name.removesuffix(".gguf"))
    name = re.compile(rf"{stem}\.[a-z][^.]*(\.\d+)?{re.escape(SIDECAR_SUFFIX)}")  # .down, .svd-256, .sign-0.1
    return sorted(file for file in path.parent.glob(f"*{SIDECAR_SUFFIX}") if name.fullmatch(file.name))


def _describe(path: Path, name: str) -> StoredModel:
    with path.open("rb") as file:
        dialect = "powerinfer" if file.read(4) == b"PWRI" else "gguf"
    size = sum(part.stat().st_size for part in shards(path))
    relu = dialect == "powerinfer" or bool(_RELU_NAME.search(name) or _RELU_NAME.search(path.name))
    return StoredModel(name, path, size, dialect, relu)


def find_local(name: str) -> StoredModel | None:
    """The stored model of that name, or of that file name (case does not matter), or None."""
    wanted = name.removeprefix("hf:").lower()
    models = list_models()
    for model in models:
        if wanted in (model.name.lower(), model.path.name.lower(), model.path.stem.lower()):
            return model
    repo, _, file = wanted.partition(":")
    entry = catalogue.find(repo) or catalogue.find_repository(repo)
    folder = folder_of(repo)
    inside = [model for model in models if folder in model.path.parents]
    if not file and entry and entry.file:
        file = entry.file.lower()
    if file:
        inside = [m for m in inside if m.path.relative_to(folder).as_posix().lower() == file]
    return inside[0] if len(inside) == 1 or (inside and file) else None


def remove(name: str) -> tuple[list[Path], int]:
    """Deletes a stored model with its sidecars (and its folder when no other model is left in it).

    Returns the deleted files and the bytes that they held. Raises ModelNotFoundError.
    """
    root = models_folder().resolve()
    model = find_local(name)
    folder = folder_of(name.removeprefix("hf:").partition(":")[0])
    if model is not None:
        doomed = [*shards(model.path), *sidecars(model.path)]
        parent = next((p for p in model.path.parents if p.parent == models_folder()), None)
        if parent is not None and complete_models(parent) == [model.path]:
            folder, doomed = parent, [p for p in parent.rglob("*") if p.is_file()]
    elif folder.is_dir() and not complete_models(folder):  # what an interrupted pull left
        doomed = [p for p in folder.rglob("*") if p.is_file()]
    else:
        raise ModelNotFoundError(f"There is no model '{name}' in {root}{_suggest(name, local_only=True)}.")
    freed = sum(path.stat().st_size for path in doomed)
    for path in doomed:
        if not path.resolve().is_relative_to(root):
            raise ModelNotFoundError(f"'{name}' leads outside the store to {path.resolve()}: not deleted.")
        path.unlink()
    if folder.is_dir() and not any(p.is_file() for p in folder.rglob("*")):
        shutil.rmtree(folder)
    return doomed, freed


def resolve(name: str | os.PathLike[str], *, download: bool = True, progress: Reporter | None = None) -> Path:
    """The file of a model: a path, a stored name, a catalogue name, or hf:owner/repository[:file].

    What is not here is fetched when `download` is true, reporting to `progress`.
    Raises ModelNotFoundError (with the nearest names), DownloadError, and UnsupportedModelError
    for a catalogue entry that this version cannot run and that is not here yet.
    """
    text = os.fspath(name)
    path = Path(text).expanduser()
    if path.is_file():
        return path
    local = find_local(text)
    if local is not None:
        return local.path
    if path.is_dir():
        return _only_model(path)
    if text.startswith("hf:"):
        return _fetch(text, download, progress)
    entry = catalogue.find(text)
    if entry is not None:
        if entry.unsupported:
            raise UnsupportedModelError(_sentence(entry.unsupported))
        return _fetch(text, download, progress)
    if text.endswith(".gguf") or path.is_absolute() or text.startswith((".", "~")):
        raise ModelNotFoundError(f"There is no file {text}.")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", text):
        raise ModelNotFoundError(
            f"There is no file {text}; for the repository of that name on the hub write hf:{text}."
        )
    raise ModelNotFoundError(
        f"There is no model '{text}'{_suggest(text)}; give a path, a name from 'hotset list --all', "
        "or hf:owner/repository."
    )


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


def _only_model(folder: Path) -> Path:
    models = complete_models(folder)
    if len(models) == 1:
        return models[0]
    if not models:
        raise ModelNotFoundError(
            f"The folder {folder} holds no GGUF file; a Hugging Face checkpoint becomes one with "
            f"'hotset convert {folder} OUT.gguf'."
        )
    names = ", ".join(path.name for path in models[:4]) + (", ..." if len(models) > 4 else "")
    raise ModelNotFoundError(f"The folder {folder} holds {len(models)} models ({names}): name one of them.")


def _fetch(text: str, download: bool, progress: Reporter | None) -> Path:
    if not download:
        raise ModelNotFoundError(f"'{text}' is not on this machine: fetch it with 'hotset pull {text}'.")
    from hotset.storage import fetch

    return fetch.pull(text, progress=progress)


def _suggest(name: str, *, local_only: bool = False) -> str:
    import difflib

    names = [model.name for model in list_models()]
    if not local_only:
        names += list(catalogue.BY_NAME)
    lowered = {known.lower(): known for known in names}
    near = difflib.get_close_matches(name.lower(), lowered, n=3, cutoff=0.5)
    return f" (did you mean {' or '.join(lowered[n] for n in near)}?)" if near else ""


def usable_memory() -> int:
    """Bytes of memory that this process may use: the machine's, or its container's limit if lower."""
    import psutil

    total = int(psutil.virtual_memory().total)
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(limit).read_text()))
        except (OSError, ValueError):  # absent, or "max"
            continue
    return total


def fits(size: int, memory: int | None = None) -> bool:
    """Whether a file of `size` bytes runs in memory: the file, its cache, and a tenth left to the system."""
    return size * 1.05 + 2**29 <= 0.9 * (usable_memory() if memory is None else memory)
