"""The Hugging Face hub: the files of a repository, the choice of a model, and its download.

A listing is not trusted: its names, sizes and checksums are checked before they are used.
"""

from __future__ import annotations

import json
import re
import urllib.error
from collections.abc import Iterable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from typing import Any

from hotset.errors import DownloadError, ModelNotFoundError
from hotset.escaping import clause
from hotset.reporter import Reporter
from hotset.storage import projectors, store
from hotset.storage.download import (
    Checksum,
    cause,
    check_room,
    download,
    http_message,
    is_whole,
    read_url,
)
from hotset.units import human_size

_SMALL = 10**7  # bytes; a smaller file is fetched without a progress bar
LISTING = (64 << 20, 60.0)  # bytes and seconds; a hundred thousand files need a third of these
_LARGEST = 1 << 50  # bytes of a file, so that sums of sizes stay realistic
_LONGEST = 240  # bytes of a name, so that NAME.part is a valid name too


@dataclass(frozen=True)
class HubFile:
    """A file of a repository: its path, bytes (None: unknown), and checksum if the hub has one."""

    path: str
    size: int | None
    checksum: Checksum | None


@dataclass(frozen=True)
class Selection:
    """The files to fetch. `model` is the (first) model file; `reason` says why it was chosen."""

    repo: str
    revision: str
    model: str
    files: tuple[HubFile, ...]
    reason: str

    @property
    def size(self) -> int:
        return _size(self.files)


def _size(files: Iterable[HubFile]) -> int:
    return sum(file.size or 0 for file in files)


# -- the listing ---------------------------------------------------------------------------------


def repository_files(repo: str) -> tuple[str, list[HubFile]]:
    """Return the revision (commit) of a hub repository, and its files. Raises DownloadError."""
    return _files_of(repo, repository_listing(repo))


def repository_listing(repo: str) -> bytes:
    """Return the hub's JSON description of a repository. Raises DownloadError or ModelNotFoundError."""
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repo)
    except HFValidationError:
        raise ModelNotFoundError(f"'{repo}' is not a repository: write hf:owner/repository.") from None
    if constants.HF_HUB_OFFLINE:
        raise DownloadError(
            "HF_HUB_OFFLINE is set, so the Hugging Face hub is not used; unset it to fetch models."
        )
    # Not with HfApi: it reads an answer of any length (decision 030).
    url = f"{constants.ENDPOINT}/api/models/{repo}?blobs=true"
    try:
        return read_url(url, get_token(), *LISTING)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code in (401, 404):  # without a login a private repository looks like a missing one
            raise ModelNotFoundError(
                f"The Hugging Face hub has no repository {repo} "
                "(or it is private: log in with 'hf auth login')."
            ) from None
        raise DownloadError(http_message(error.code, repo, "the Hugging Face hub")) from None
    except (OSError, HTTPException) as error:
        raise DownloadError(
            f"The Hugging Face hub does not answer ({cause(error)}): check the network and its proxy. "
            "Models in the store ('hotset list') run without a network."
        ) from None


def _files_of(repo: str, body: bytes) -> tuple[str, list[HubFile]]:
    try:
        listing = json.loads(body)
        revision, siblings = listing.get("sha") or "main", listing.get("siblings") or []
        files = [_file(sibling) for sibling in siblings]
        if not re.fullmatch(r"[\w.-]{1,100}", revision):
            raise ValueError("sha")
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise DownloadError(
            f"The hub's listing of {repo} is invalid ({clause(error)}): try again later."
        ) from None
    return revision, files


def _file(sibling: dict[str, Any]) -> HubFile:
    path, size, lfs, blob = (sibling.get(key) for key in ("rfilename", "size", "lfs", "blobId"))
    if not isinstance(path, str):
        raise TypeError("a name that is not a text")
    check_path(path)
    if size is not None and (type(size) is not int or not 0 <= size <= _LARGEST):
        raise DownloadError(f"The repository gives {path} the size {clause(size)}: refused.")
    checksum = None
    if lfs:
        checksum = Checksum("sha256", str(lfs["sha256"]).lower())
    elif blob:
        checksum = Checksum("git", str(blob).lower())
    if checksum and not re.fullmatch("[0-9a-f]{64}" if lfs else "[0-9a-f]{40}", checksum.value):
        raise ValueError(f"the checksum of {path}")
    return HubFile(path, size, checksum)


def check_path(path: str) -> None:
    """Raise DownloadError for a file name that leads out of its folder, or could control the terminal."""
    parts = PurePosixPath(path).parts
    if path.startswith("/") or ".." in parts or "\\" in path or ":" in path or "\0" in path:
        raise DownloadError(
            f"The repository has a file name '{clause(path)}' that leads out of its folder: refused."
        )
    if not parts or not path.isprintable() or path != "/".join(parts):
        raise DownloadError(f"The repository has an invalid file name '{clause(path)}': refused.")


# -- the choice ----------------------------------------------------------------------------------

# Quantised files from the most to the least precise, then files whose name has no type. Full precision is
# last: it reads twice the bytes of Q8_0 for every token, without a visible difference.
# fmt: off
_PRECISION = (
    "Q8_0", "Q6_K", "Q5_K_M", "Q5_K", "Q5_K_S", "Q5_1", "Q5_0", "Q4_K_M", "Q4_K", "Q4_1", "IQ4_NL", "Q4_K_S",
    "Q4_0", "IQ4_XS", "MXFP4", "Q3_K_L", "Q3_K_M", "Q3_K", "Q3_K_S", "IQ3_M", "IQ3_S", "IQ3_XS",
    "IQ3_XXS", "Q2_K", "IQ2_M", "IQ2_S", "IQ2_XS", "IQ2_XXS", "TQ2_0", "IQ1_M", "TQ1_0", "IQ1_S", "Q1_0",
    None, "BF16", "F16", "F32",
)
# fmt: on
_TYPE = re.compile(r"(?<![A-Z0-9])(I?Q\d_[A-Z0-9]+(?:_(?:[SML]|X[SL]))?|TQ\d_\d|B?F16|F32|MXFP4)(?![A-Z0-9])")


def type_of(path: str) -> str | None:
    """Return the quantisation in a file name ("Q4_K_M"), or None."""
    found = _TYPE.findall(PurePosixPath(path).name.upper())
    if not found:
        return None
    kind = str(found[-1])
    return kind if kind in _PRECISION else re.sub(r"_X?L$", "", kind)  # Q4_K_L: a larger embedding


def _models(files: list[HubFile]) -> tuple[dict[str, list[HubFile]], str | None]:
    """Return the models among files, as shards by the first path, and an error message about one of them.

    The message is None if no model is broken.
    """
    groups: dict[str, list[HubFile]] = {}
    by_path = {file.path: file for file in files}
    problem = None
    for path in sorted(by_path):
        name = PurePosixPath(path).name.lower()
        if not name.endswith(".gguf") or store.is_part(name) or "imatrix" in name:
            continue
        parts = [part.as_posix() for part in store.shards(Path(path))]
        if (path != parts[0] and parts[0] in by_path) or type_of(name) not in _PRECISION:
            continue
        missing = [part for part in parts if part not in by_path]
        empty = [part for part in parts if part in by_path and not by_path[part].size]
        if missing:
            problem = f"The repository lacks {missing[0]}, a part of {path}."
        elif empty:
            problem = f"The repository lists {empty[0]} without a size, or with no bytes."
        else:
            groups[path] = [by_path[part] for part in parts]
    return groups, problem


def choose_model(files: list[HubFile], memory: int) -> tuple[list[HubFile], str]:
    """Choose the best model of a repository that fits in `memory` bytes; return its files and the reason.

    The best is the most precise quantised file; full precision only if nothing else is left. Plain GGUF is
    preferred to PowerInfer's dialect. Models of types that hotset has no kernels for are skipped, and so are
    empty ones and those with a missing shard. Raises ModelNotFoundError if no GGUF file can be chosen, and
    DownloadError if all are broken.
    """
    groups, problem = _models(files)
    if not groups and problem:
        raise DownloadError(problem)
    if not groups:
        raise ModelNotFoundError(
            "The repository has no GGUF file that hotset can run; "
            "convert a checkpoint with 'hotset convert FOLDER OUT.gguf'."
        )

    def rank(path: str) -> tuple[bool, int, str]:
        return (".powerinfer." in path.lower(), _PRECISION.index(type_of(path)), path)

    def size(path: str) -> int:
        return _size(groups[path])

    def whole_name(path: str) -> str:
        return store.SHARD.sub(".gguf", PurePosixPath(path).name)

    ranked = sorted(groups, key=rank)
    fitting = [path for path in ranked if store.fits(size(path), memory)]
    best = fitting[0] if fitting else min(ranked, key=size)
    name = whole_name(best)
    if len(ranked) == 1:
        reason = f"{name} ({human_size(size(best))}), the repository's only model"
    elif fitting:
        reason = f"{name} ({human_size(size(best))}), the most precise of {len(ranked)} models that fits"
        reason += f" in {human_size(memory)}"
        larger = ranked[: ranked.index(best)]
        if larger:
            reason += f"; {whole_name(larger[-1])} ({human_size(size(larger[-1]))}) does not fit"
    else:
        reason = f"{name} ({human_size(size(best))}), the smallest of {len(ranked)} models"
    if not fitting:
        reason += f"; it does not fit in {human_size(memory)} of memory, so it is slow, read from the disk"
    return groups[best], reason


def select_files(
    repo: str, file: str | None = None, *, everything: bool = False, memory: int | None = None
) -> Selection:
    """Select the files to fetch: `file` or the best model, and its activation statistics.

    file: a path, or the wanted quantisation, such as Q4_K_M (case does not matter). everything: all files of
    the repository instead. Raises ModelNotFoundError, and DownloadError for a listing that cannot be stored
    in one folder.
    """
    revision, files = repository_files(repo)
    by_path = {hub_file.path: hub_file for hub_file in files}
    if len(by_path) < len(files):
        raise DownloadError(f"The repository {repo} lists a file twice: refused.")
    if file is not None and file not in by_path:
        file = _of_type(files, file) or file
    if file is not None:
        if file not in by_path:
            known = ", ".join(sorted(p for p in by_path if p.endswith(".gguf"))) or "none"
            raise ModelNotFoundError(f"The repository {repo} has no file {file}; its GGUF files: {known}.")
        parts = [part.as_posix() for part in store.shards(Path(file))]
        if missing := [part for part in parts if part not in by_path]:
            raise DownloadError(f"The repository {repo} lacks {missing[0]}, a part of {file}.")
        model = [by_path[part] for part in parts]
        if empty := [f.path for f in model if not f.size]:
            raise DownloadError(f"The repository {repo} lists {empty[0]} without a size, or with no bytes.")
        reason = f"{file} ({human_size(_size(model))})"
    else:
        model, reason = choose_model(files, store.usable_memory() if memory is None else memory)
    beside = files if everything else [f for f in files if _belongs(f.path)]
    if projector := _projector(model[0].path, files):
        beside = [*beside, projector]
    chosen = {f.path: f for f in [*model, *beside]}
    _check_names(chosen)
    if extra := len(chosen) - len(model):
        reason += f", with {extra} file{'s' if extra > 1 else ''} that belong to it"
    return Selection(repo, revision, model[0].path, tuple(chosen.values()), reason)


def _projector(model: str, files: list[HubFile]) -> HubFile | None:
    """Return the projector of a model in a repository, from the model's folder or the first one."""
    for folder in (PurePosixPath(model).parent, PurePosixPath(".")):
        names = {f.path: f for f in files if PurePosixPath(f.path).parent == folder and f.size}
        found = projectors.best(filter(projectors.is_projector, names), model, any_name=True)
        if found is not None:
            return names[found]
    return None


def _of_type(files: list[HubFile], kind: str) -> str | None:
    """Return the (first) file of the smallest model with this quantisation in its name, or None."""
    groups, _ = _models([file for file in files if type_of(file.path) == kind.upper()])
    return min(groups, key=lambda path: (_size(groups[path]), path), default=None)


def _check_names(chosen: dict[str, HubFile]) -> None:
    """Raise DownloadError if the files, their .part and their .lock files conflict in one folder."""
    for path, file in chosen.items():
        folders = [parent.as_posix() for parent in PurePosixPath(path).parents]
        problem = None
        if file.size is None:
            problem = "without a size"
        elif any(len(part.encode()) > _LONGEST for part in PurePosixPath(path).parts) or len(path) > 1000:
            problem = "with a name that is too long"
        elif any(folder in chosen for folder in folders):
            problem = "inside another file"
        elif path.endswith((".part", ".lock")) and path[:-5] in chosen:
            problem = "with a name that the download of another file needs"
        if problem:
            raise DownloadError(f"The repository lists a file {problem}, {clause(path)}: refused.")


def _belongs(path: str) -> bool:
    """Return whether a file belongs to the model: activation statistics or the configuration."""
    parts = PurePosixPath(path).parts
    return path == "config.json" or (len(parts) > 1 and parts[0].endswith("activation"))


# -- the files -----------------------------------------------------------------------------------


class _Quiet(Reporter):
    """A reporter of messages without progress: 80 layers' statistics need no 80 progress bars."""

    def __init__(self, report: Reporter) -> None:
        self.say = report.say  # type: ignore[method-assign]


def fetch_selection(
    selection: Selection, folder: Path, progress: Reporter | None = None, *, check: bool = False
) -> Path:
    """Fetch every selected file into `folder` unless it is there; return the model file.

    check: compare existing files with their checksums, and fetch those that differ again.
    """
    from huggingface_hub import get_token, hf_hub_url

    token = get_token()
    report = progress or Reporter()
    todo = [f for f in selection.files if not is_whole(folder / f.path, f.size or 0)]
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    begun = sum(_begun(folder / f.path) for f in todo)
    check_room(_size(todo) - begun, existing, selection.repo)
    for file in sorted(selection.files, key=lambda f: f.size or 0):
        download(
            hf_hub_url(selection.repo, file.path, revision=selection.revision),
            folder / file.path,
            size=file.size or 0,
            checksum=file.checksum,
            check=check,
            token=token,
            label=file.path,
            progress=report if (file.size or 0) >= _SMALL else _Quiet(report),
        )
    return folder / selection.model


def _begun(target: Path) -> int:
    try:
        return target.with_name(target.name + ".part").stat().st_size
    except OSError:
        return 0
