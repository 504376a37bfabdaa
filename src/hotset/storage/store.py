"""The local store of models: a folder of GGUF files, and their names.

    $HOTSET_HOME (or the platform's data folder)
      models/
        smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf     a name of the catalogue
        owner--repository/model.gguf, activation/...      a repository of the Hugging Face hub
        mine.gguf                                         any file that the user puts there
        mine.down.hotset.gguf                             what hotset built from it (sparsity/sidecar.py)

The store has no index: it is the contents of the folder.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from hotset.errors import HotsetError, ModelNotFoundError, did_you_mean
from hotset.files import expanded, missing
from hotset.storage import catalogue

SIDECAR_SUFFIX = ".hotset.gguf"
SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_PROJECTOR = re.compile(r"mmproj", re.IGNORECASE)  # in the name of a file
_RELU_NAME = re.compile(r"relu|prosparse|bamboo|turbosparse|smallthinker", re.IGNORECASE)


@dataclass(frozen=True)
class StoredModel:
    """A model on this machine. `path` is its (first) file, `size` the bytes of all its shards.

    source: the program that stored it; "" for hotset's own store.
    """

    name: str
    path: Path
    size: int
    dialect: str  # "gguf" or "powerinfer"
    relu: bool  # naturally sparse, judged by name and dialect
    source: str = ""


def home() -> Path:
    """Return $HOTSET_HOME, or the platform's folder for application data (not created here)."""
    chosen = os.environ.get("HOTSET_HOME")
    if chosen:
        return expanded(chosen)
    name, below = {
        "win32": ("LOCALAPPDATA", Path("AppData", "Local")),
        "darwin": ("", Path("Library", "Application Support")),
    }.get(sys.platform, ("XDG_DATA_HOME", Path(".local", "share")))
    try:
        return Path(os.environ.get(name) or Path.home() / below) / "hotset"
    except RuntimeError:
        raise HotsetError("this user has no home folder; set HOTSET_HOME to a folder for models") from None


def models_folder() -> Path:
    return home() / "models"


def is_repository(name: str) -> bool:
    """Return whether a name has the form "owner/name", and neither is "." or ".."."""
    return bool(re.fullmatch(r"(?!\.+/)[\w.-]+/(?!\.+$)[\w.-]+", name))


def folder_of(name: str) -> Path:
    """Return the folder of a catalogue name or a repository "owner/name"."""
    entry = catalogue.find(name) or catalogue.find_repository(name)
    return models_folder() / (entry.name if entry else name.replace("/", "--"))


def _is_pulled(name: str) -> bool:
    """Return whether `folder_of` the name comes from a pull, so that all of it belongs to the model."""
    return is_repository(name) or bool(catalogue.find(name))


def shards(path: Path) -> list[Path]:
    """Return all files of a model, given one: the file itself, or all shards if it is one."""
    match = SHARD.search(path.name)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        return [path]
    stem, count = path.name[: match.start()], int(match[2])
    return [path.with_name(f"{stem}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]


def complete_models(folder: Path) -> list[Path]:
    """Return the models below `folder`: the first file of each, if all its shards are there.

    Projectors (storage/projectors.py) belong to models and are left out.
    """
    found = []
    for path in sorted(folder.rglob("*.gguf")):
        if is_part(path.name):
            continue
        parts = shards(path)
        if path == parts[0] and all(_is(part.is_file) for part in parts):
            found.append(path)
    return found


def _is(kind: Callable[[], bool]) -> bool:
    """Return whether a path is of a kind; False if the system refuses to tell, as for another user's file."""
    try:
        return kind()
    except OSError:
        return False


def is_part(name: str) -> bool:
    """Return whether a file belongs to a model next to it: a sidecar, or a projector of images."""
    return name.endswith(SIDECAR_SUFFIX) or bool(_PROJECTOR.search(name))


def list_models() -> list[StoredModel]:
    """Return every complete model of the store, by name."""
    folder = models_folder()
    if not folder.is_dir():
        return []
    files = [path for path in sorted(folder.glob("*.gguf")) if _is(path.is_file)]
    named = [(path, path.stem) for path in files if not is_part(path.name)]
    for child in sorted(path for path in folder.iterdir() if _is(path.is_dir)):
        paths = complete_models(child)
        base = child.name.replace("--", "/", 1)
        for path in paths:
            name = base if len(paths) == 1 else f"{base}:{path.relative_to(child).as_posix()}"
            named.append((path, name))
    models = []
    for path, name in named:
        with contextlib.suppress(OSError):  # a part is missing, or was just deleted
            models.append(describe(path, name))
    return sorted(models, key=lambda model: model.name.lower())


def sidecars(path: Path) -> list[Path]:
    """Return the files that hotset built from the model at `path` and keeps next to it."""
    stem = re.escape(path.name.removesuffix(".gguf"))
    name = re.compile(
        rf"{stem}\.[a-z][^.]*(\.\d+)?{re.escape(SIDECAR_SUFFIX)}"
    )  # .down, .svd-256, .sign-0.1 (an old one)
    return sorted(file for file in path.parent.glob(f"*{SIDECAR_SUFFIX}") if name.fullmatch(file.name))


def describe(path: Path, name: str, source: str = "") -> StoredModel:
    """Return a model by its (first) file, of which only the first bytes are read."""
    magic = b""
    with contextlib.suppress(PermissionError), path.open("rb") as file:  # reported when it is loaded
        magic = file.read(4)
    dialect = "powerinfer" if magic == b"PWRI" else "gguf"
    size = sum(part.stat().st_size for part in shards(path))
    relu = dialect == "powerinfer" or bool(_RELU_NAME.search(name) or _RELU_NAME.search(path.name))
    return StoredModel(name, path, size, dialect, relu, source)


def find_local(name: str) -> StoredModel | None:
    """Return the stored model of that name or file name (case does not matter), or None.

    Raises ModelNotFoundError if several models have that name.
    """
    wanted = catalogue.canonical(name).removeprefix("hf:").lower()
    models = list_models()
    by_name = [model for model in models if model.name.lower() == wanted]
    by_file = [m for m in models if wanted in (m.path.name.lower(), m.path.stem.lower())]
    if found := by_name or by_file:
        if len(found) > 1:
            names = " and ".join(model.name for model in found[:4])
            raise ModelNotFoundError(f"Several models are called '{name}': choose one of {names}.")
        return found[0]
    repo, _, file = wanted.partition(":")
    if not _is_pulled(repo):
        return None
    entry = catalogue.find(repo) or catalogue.find_repository(repo)
    folder = folder_of(repo)
    inside = [model for model in models if folder in model.path.parents]
    if not file and entry and (entry.file or len(inside) > 1):
        file = (entry.file or entry.quant).lower()
    if file:
        quant = re.compile(rf"(?<![a-z0-9]){re.escape(file)}(?![a-z0-9_])")  # hf:owner/repository:Q4_K_M
        named = [m for m in inside if m.path.relative_to(folder).as_posix().lower() == file]
        inside = named or [m for m in inside if quant.search(m.path.name.lower())]
    return inside[0] if len(inside) == 1 or (inside and file) else None


def remove(name: str) -> tuple[list[Path], int]:
    """Delete a stored model, its sidecars, and its pulled folder unless another model is left there.

    The name of an interrupted pull deletes its files. Returns the deleted files and their bytes. Raises
    ModelNotFoundError for a name without a model, and for models outside the store; HotsetError if the system
    refuses.
    """
    root = models_folder()
    model = find_local(name)
    repo = name.removeprefix("hf:").partition(":")[0]
    folder = None
    if model is not None:
        doomed = [*shards(model.path), *sidecars(model.path)]
        folder = next((p for p in model.path.parents if p.parent == root), None)
        if (
            folder
            and _is_pulled(folder.name.replace("--", "/", 1))
            and complete_models(folder) == [model.path]
        ):
            doomed = _files_in(folder)
    elif _is_pulled(repo) and folder_of(repo).is_dir() and not complete_models(folder_of(repo)):
        folder = folder_of(repo)
        doomed = _files_in(folder)
    else:
        raise ModelNotFoundError(f"there is no model '{name}' in {root}{_suggest(name, local_only=True)}")
    for path in doomed:
        if not path.resolve().is_relative_to(root.resolve()):
            raise ModelNotFoundError(f"'{name}' leads outside the store to {path.resolve()}: not deleted.")
    try:
        freed = sum(path.stat().st_size for path in doomed)
        for path in doomed:
            path.unlink()
        if folder is not None and folder.is_dir() and not _files_in(folder):
            shutil.rmtree(folder)
    except OSError as error:
        raise HotsetError(f"{error.filename} cannot be deleted ({error.strerror or error}).") from None
    return doomed, freed


def _files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def local_path(name: str) -> Path | None:
    """Return the file of a model on this machine: a path, a stored name, or a folder; otherwise None.

    Raises ModelNotFoundError for a name or folder of several models, and for a folder without models.
    """
    if not name:  # for pathlib the current folder
        return None
    try:
        path = Path(name).expanduser()
        is_file, is_folder = path.is_file(), path.is_dir()
    except (OSError, ValueError, RuntimeError):  # too long, a zero byte, no such user: not a file
        return None
    if is_file:
        return path
    if (local := find_local(name)) is not None:
        return local.path
    return _only_model(path) if is_folder else None


def unknown(name: str, more: Iterable[str] = ()) -> ModelNotFoundError:
    """Return the error about an unknown name, with the nearest names.

    more: known names that are not in the store or the catalogue.
    """
    if "://" in name:
        found = re.match(r"https?://(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)", name)
        hint = f"write hf:{found[1]}" if found else "download the file and give its path"
        return ModelNotFoundError(f"'{name}' is a URL, not the name of a model: {hint}.")
    if name.startswith("hf:"):
        return ModelNotFoundError(f"'{name}' is not a repository: write hf:owner/repository.")
    if name.endswith(".gguf") or Path(name).is_absolute() or name.startswith((".", "~")):
        return ModelNotFoundError(missing(name, remedy="check the path, or choose a model of 'hotset list'"))
    if is_repository(name):
        return ModelNotFoundError(
            missing(name, remedy=f"for the repository of that name on the hub, write hf:{name}")
        )
    return ModelNotFoundError(
        f"there is no model '{name}'{_suggest(name, more)}; give a path, a name from 'hotset list --all', "
        "or hf:owner/repository."
    )


def _only_model(folder: Path) -> Path:
    models = complete_models(folder)
    if len(models) == 1:
        return models[0]
    if not models:
        raise ModelNotFoundError(
            f"The folder {folder} has no GGUF file; convert a Hugging Face checkpoint with "
            f"'hotset convert {folder} OUT.gguf'."
        )
    names = ", ".join(path.name for path in models[:4]) + (", ..." if len(models) > 4 else "")
    raise ModelNotFoundError(f"The folder {folder} has {len(models)} models ({names}): choose one of them.")


def _suggest(name: str, more: Iterable[str] = (), *, local_only: bool = False) -> str:
    names = [*(model.name for model in list_models()), *more]
    if not local_only:
        names += list(catalogue.BY_NAME)
    meant = did_you_mean(name.lower(), {known.lower(): known for known in names})
    return f" ({meant})" if meant else ""


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
    """Return whether a file of `size` bytes and its cache fit in memory, with a tenth left for the system."""
    return catalogue.memory_for(size) <= 0.9 * (usable_memory() if memory is None else memory)
