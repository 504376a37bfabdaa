"""Models that other programs have stored on this machine.

They run in place, and nothing is written there.

    Ollama        $OLLAMA_MODELS, ~/.ollama/models or /usr/share/ollama/.ollama/models
                    manifests/HOST/NAMESPACE/MODEL/TAG   JSON, whose layers name files of blobs/ by SHA-256
    LM Studio     ~/.lmstudio/models or ~/.cache/lm-studio/models
                    PUBLISHER/REPOSITORY/*.gguf
    Hugging Face  $HF_HUB_CACHE, $HF_HOME/hub or ~/.cache/huggingface/hub
                    models--OWNER--REPOSITORY/refs/main, snapshots/REVISION/**.gguf

The contents of these folders are not trusted: a name may have only letters, digits and ". _ -", and a
manifest may refer only to files of blobs/. HOTSET_ELSEWHERE=0 ignores all of them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from hotset.errors import HotsetError, ModelNotFoundError, UnsupportedModelError
from hotset.files import read_small_text
from hotset.storage import store
from hotset.storage.aliases import ANY_TAG
from hotset.storage.store import StoredModel

_Found = TypeVar("_Found")

_MOST_MANIFESTS = 10_000
_MAX_MANIFEST = 1 << 20  # bytes
_PART = re.compile(r"(?!\.+$)[\w.-]{1,128}", re.ASCII)  # of a name
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
_MODEL_LAYER, _ADAPTER_LAYER, _PROJECTOR_LAYER = (
    f"application/vnd.ollama.image.{kind}" for kind in ("model", "adapter", "projector")
)
_OWN_HOST, _OWN_NAMESPACE = "registry.ollama.ai", "library"


def list_models() -> list[StoredModel]:
    """Return the models of other programs, by name; of several with one name, the first."""
    found: dict[str, StoredModel] = {}
    for source, (roots, entries, models) in _SOURCES.items():
        for root in _folders(roots):
            for entry in _readable(entries(root)):
                for name, path in _readable(models(root, entry)):
                    with suppress(OSError):
                        if _is_gguf(path):
                            found.setdefault(name.lower(), store.describe(path, name, source))
    return sorted(found.values(), key=lambda model: model.name.lower())


def _readable(found: Iterator[_Found]) -> Iterator[_Found]:
    """Yield the items of an iterator until an OSError, such as for another user's file or a broken link."""
    with suppress(OSError):
        yield from found


def find(name: str) -> StoredModel | None:
    """Return the model of that name, or None; case, `:latest` and `hf:` do not matter.

    Raises ModelNotFoundError for a repository with several models, and UnsupportedModelError for an Ollama
    model with an adapter.
    """
    wanted = name.removeprefix("hf:").lower()
    models = list_models()
    for model in models:
        if model.name.lower() in (wanted, wanted + ANY_TAG):
            if model.source == "Ollama":
                _check_layers(model.name)
            return model
    inside = [model for model in models if model.name.lower().startswith(wanted + ":")]
    if len(inside) > 1 and store.is_repository(name):  # (hf:owner/repository chooses one, and fetches it)
        names = " and ".join(model.name for model in inside[:4])
        raise ModelNotFoundError(f"Several models are called '{name}': choose one of {names}.")
    return None


def is_foreign(path: Path) -> bool:
    """Return whether a file is in a folder of another program, where nothing may be written."""
    absolute = Path(os.path.abspath(path))
    return any(absolute.is_relative_to(root) for roots, *_ in _SOURCES.values() for root in _folders(roots))


def _folders(roots: Callable[[Path | None], Iterator[Path]]) -> Iterator[Path]:
    if os.environ.get("HOTSET_ELSEWHERE") == "0":
        return
    try:
        home = Path.home()
    except RuntimeError:  # a user without a home folder
        home = None
    for root in roots(home):
        with suppress(OSError):  # in a folder of another user
            if root.is_dir():
                yield Path(os.path.abspath(root))


def _is_gguf(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


# ---- Ollama ----


def _ollama_roots(home: Path | None) -> Iterator[Path]:
    if chosen := os.environ.get("OLLAMA_MODELS"):
        yield Path(chosen)
        return
    if home is not None:
        yield home / ".ollama" / "models"
    yield Path("/usr/share/ollama/.ollama/models")


def _ollama_manifests(root: Path) -> Iterator[Path]:
    return islice(sorted((root / "manifests").glob("*/*/*/*")), _MOST_MANIFESTS)


def _ollama_models(root: Path, manifest: Path) -> Iterator[tuple[str, Path]]:
    """Yield the name and the file of a manifest; nothing if the manifest is damaged."""
    parts = manifest.relative_to(root / "manifests").parts
    if not all(_PART.fullmatch(part) for part in parts):
        return
    paths = [_blob(root, digest) for digest in _layers(manifest).get(_MODEL_LAYER, [])]
    if len(paths) == 1 and paths[0] is not None:
        yield _ollama_name(parts), paths[0]


def _ollama_name(parts: tuple[str, ...]) -> str:
    host, namespace, model, tag = parts
    name = f"{model}:{tag}"
    if (host, namespace) == (_OWN_HOST, _OWN_NAMESPACE):
        return name
    return f"{namespace}/{name}" if host == _OWN_HOST else f"{host}/{namespace}/{name}"


def _layers(manifest: Path) -> dict[str, list[str]]:
    """Return the digests of a manifest by their media types; none if it is damaged."""
    try:
        read: Any = json.loads(read_small_text(manifest, _MAX_MANIFEST))
    except (OSError, ValueError, RecursionError, HotsetError):
        return {}
    layers = read.get("layers") if isinstance(read, dict) else None
    found: dict[str, list[str]] = {}
    for layer in layers if isinstance(layers, list) else ():
        kind, digest = (
            layer.get(key) if isinstance(layer, dict) else None for key in ("mediaType", "digest")
        )
        if isinstance(kind, str) and isinstance(digest, str):
            found.setdefault(kind, []).append(digest)
    return found


def _blob(root: Path, digest: str) -> Path | None:
    match = _DIGEST.fullmatch(digest)
    if match is None:
        return None
    paths = [root / "blobs" / f"sha256{between}{match[1]}" for between in "-:"]
    return next((path for path in paths if path.is_file()), None)


def projector_of(model: Path) -> Path | None:
    """Return the projector that an Ollama manifest names next to a model's blob, or None."""
    for root in _folders(_ollama_roots):
        if Path(os.path.abspath(model)).parent != root / "blobs":
            continue
        for manifest in _readable(_ollama_manifests(root)):
            layers = _layers(manifest)
            if model.name in [path.name for path in _blobs(root, layers.get(_MODEL_LAYER, []))]:
                found = _blobs(root, layers.get(_PROJECTOR_LAYER, []))
                if len(found) == 1:
                    return found[0]
    return None


def _blobs(root: Path, digests: list[str]) -> list[Path]:
    return [path for path in (_blob(root, digest) for digest in digests) if path is not None]


def _check_layers(name: str) -> None:
    for root in _folders(_ollama_roots):
        for manifest in (root / "manifests").glob("*/*/*/*"):
            parts = manifest.relative_to(root / "manifests").parts
            if _ollama_name(parts) == name and _ADAPTER_LAYER in _layers(manifest):
                raise UnsupportedModelError(
                    f"'{name}' of Ollama is a model with an adapter (LoRA), which is not applied: run the "
                    "model that it is based on."
                )


# ---- LM Studio and the Hugging Face cache ----


def _lm_studio_roots(home: Path | None) -> Iterator[Path]:
    if home is not None:
        yield home / ".lmstudio" / "models"
        yield home / ".cache" / "lm-studio" / "models"


def _lm_studio_folders(root: Path) -> Iterator[Path]:
    return iter(sorted(root.glob("*/*")))


def _lm_studio_models(root: Path, folder: Path) -> Iterator[tuple[str, Path]]:
    if folder.is_dir():
        yield from _of_folder("/".join(folder.relative_to(root).parts), folder)


def _hub_roots(home: Path | None) -> Iterator[Path]:
    if chosen := os.environ.get("HF_HUB_CACHE"):
        yield Path(chosen)
    elif chosen := os.environ.get("HF_HOME"):
        yield Path(chosen) / "hub"
    elif home is not None:
        yield Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "huggingface" / "hub"


def _hub_folders(root: Path) -> Iterator[Path]:
    return iter(sorted(root.glob("models--*--*")))


def _hub_models(_root: Path, folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the models of the revision in refs/main, or else of the latest snapshot."""
    _, owner, repository = folder.name.split("--", 2)
    snapshots = [path for path in (folder / "snapshots").glob("*") if path.is_dir()]
    try:
        main = read_small_text(folder / "refs" / "main", 256).strip()
    except (OSError, HotsetError):
        main = ""
    chosen = [path for path in snapshots if path.name == main] or sorted(
        snapshots, key=lambda path: path.stat().st_mtime_ns
    )
    if chosen:
        yield from _of_folder(f"{owner}/{repository}", chosen[-1])


def _of_folder(name: str, folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the models of a repository: its name, followed by the file's if there are several."""
    if not all(_PART.fullmatch(part) for part in name.split("/")):
        return
    paths = store.complete_models(folder)
    for path in paths:
        inside = path.relative_to(folder)
        if all(_PART.fullmatch(part) for part in inside.parts):
            yield (name if len(paths) == 1 else f"{name}:{inside.as_posix()}"), path


# For each program: its folders, the entries of a folder, and the models of an entry. Each entry fails
# separately.
_SOURCES: dict[
    str,
    tuple[
        Callable[[Path | None], Iterator[Path]],
        Callable[[Path], Iterator[Path]],
        Callable[[Path, Path], Iterator[tuple[str, Path]]],
    ],
] = {
    "Ollama": (_ollama_roots, _ollama_manifests, _ollama_models),
    "LM Studio": (_lm_studio_roots, _lm_studio_folders, _lm_studio_models),
    "Hugging Face cache": (_hub_roots, _hub_folders, _hub_models),
}
