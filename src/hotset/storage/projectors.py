"""Projectors: files with the encoder of a model's images, called mmproj.

llama.cpp, LM Studio and the repositories of the hub keep one next to the model, and Ollama names it in the
model's manifest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from hotset.storage import elsewhere, store

_TYPES = ("f16", "bf16", "q8_0", "f32", "q4_0")  # the preferred first
_TYPE = re.compile(r"(?<![a-z0-9])(bf16|f16|f32|q\d_\w+?)(?![a-z0-9])")
_WORDS = re.compile(r"[a-z]+|\d+")
_COMMON = frozenset({"mmproj", "model", "gguf", "vision", "proj"})  # words that say nothing about the model


def is_projector(name: str) -> bool:
    """Return whether a name belongs to a projector's file."""
    file = PurePosixPath(name).name
    return name.lower().endswith(".gguf") and store.is_part(file) and not file.endswith(store.SIDECAR_SUFFIX)


def projector_of(model: Path) -> Path | None:
    """Return the projector of a stored model, or None.

    It is the file next to the model. If the folder has several models, its name must also fit the model's. Of
    several, the best fit is chosen, then F16, then the name.
    """
    if (found := elsewhere.projector_of(model)) is not None:
        return found
    try:
        names = [path.name for path in model.parent.glob("*.gguf") if is_projector(path.name)]
        is_alone = bool(names) and len(store.complete_models(model.parent)) <= 1
    except OSError:
        return None
    chosen = best(names, model.name, any_name=is_alone)
    return None if chosen is None else model.parent / chosen


def best(names: Iterable[str], model: str, *, any_name: bool) -> str | None:
    """Return the projector that fits a model's file name best, or None.

    any_name: also those whose names are not the beginning of the model's.
    """
    wanted = _words(PurePosixPath(model).name)
    ranked = []
    for name in names:
        own = _words(PurePosixPath(name).name)
        n_same = sum(1 for word in own if word in wanted)
        fits = bool(own) and n_same == len(own)
        if fits or any_name:
            kind = _TYPE.search(PurePosixPath(name).name.lower())
            rank = _TYPES.index(kind[1]) if kind and kind[1] in _TYPES else len(_TYPES)
            ranked.append((-n_same, rank, name))
    return min(ranked)[2] if ranked else None


def _words(name: str) -> list[str]:
    """Return the words and numbers of a file name, without its type of tensors."""
    return [word for word in _WORDS.findall(_TYPE.sub(" ", name.lower())) if word not in _COMMON]
