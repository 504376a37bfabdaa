"""The names of models, and the files that they mean: on this machine, or fetched."""

from __future__ import annotations

import os
from pathlib import Path

from hotset.errors import ModelNotFoundError, UnsupportedModelError
from hotset.reporter import Reporter
from hotset.storage import aliases, catalogue, created, elsewhere, store
from hotset.storage.created import Created
from hotset.storage.store import StoredModel


def resolve(name: str | os.PathLike[str], *, download: bool = True, progress: Reporter | None = None) -> Path:
    """Return the file of a model.

    name: a path; the name of a stored or a created model, or an alias of these; a name of Ollama, LM Studio
    or the Hugging Face cache; a catalogue name; or hf:owner/repository[:file] (or hf.co/ for hf:).

    A missing model is fetched if `download` is true, with reports to `progress`. Raises ModelNotFoundError
    (with the nearest names), DownloadError, and UnsupportedModelError for a catalogue entry that this version
    cannot run and that is not on this machine.
    """
    text = given = os.fspath(name)
    local = store.local_path(text)
    if local is None:
        text = given = _without_alias(text)
        made = created.find(text)
        text = catalogue.canonical(text if made is None else made.base)
        local = store.local_path(text)
    if local is not None:
        return local
    # Ollama itself has names that begin with hf.co/.
    if (other := elsewhere.find(given) or elsewhere.find(text)) is not None:
        return other.path
    entry = catalogue.find(text)
    if entry is None and not text.startswith("hf:"):
        raise store.unknown(text, (*created.read(), *aliases.read()))
    if entry is not None and entry.unsupported:
        raise UnsupportedModelError(f"{entry.unsupported[0].upper()}{entry.unsupported[1:]}.")
    if not download:
        raise ModelNotFoundError(f"'{text}' is not on this machine: fetch it with 'hotset pull {text}'.")
    from hotset.storage import fetch  # loads HTTP only if needed

    return fetch.pull(text, progress=progress)


def find_created(name: str | os.PathLike[str]) -> tuple[str, Created] | None:
    """Return the created model of a name or an alias, after its name; None for any other model."""
    text = os.fspath(name)
    return None if store.local_path(text) is not None else created.find_named(_without_alias(text))


def _without_alias(name: str) -> str:
    """Return the model name of an alias, or the given name. A created model hides an alias."""
    return name if created.find(name) is not None else aliases.find(name) or name


def on_this_machine() -> list[StoredModel]:
    """Return the stored models, then other programs' models unless a stored one has the name."""
    stored = store.list_models()
    names = {model.name.lower() for model in stored}
    return [*stored, *(model for model in elsewhere.list_models() if model.name.lower() not in names)]
