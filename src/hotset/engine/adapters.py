"""The adapters (LoRA) of a loaded model, which can be loaded, unloaded and chosen while it generates.

An adapter has a name and a number, as in llama-server. Its scale applies to sequences that choose no
adapters. A sequence that chooses adapters gets exactly these. If a sequence still uses an adapter when it is
unloaded, the adapter stays in memory until the next change of adapters after the sequence finishes.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hotset.backends.adapters import AdapterSet, taking_adapters
from hotset.backends.base import AdapterScales
from hotset.engine.driver import EngineThread
from hotset.errors import InvalidRequestError
from hotset.escaping import clause
from hotset.parameters import real_number, shown
from hotset.settings import LARGEST_SCALE

if TYPE_CHECKING:
    from hotset.formats.lora import AdapterFile, LoraAdapter


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter that a model has loaded.

    id: never reused. scale: for sequences that choose no adapters.
    """

    id: int
    name: str
    scale: float
    adapter: LoraAdapter


class Adapters:
    """The adapters of one model. Every method may be called from any thread.

    thread: runs the engine. architecture: of the model. open_file: opens the adapter at a path; it calls its
    second argument repeatedly while it reads. change_memory: receives the bytes that an adapter is about to
    take or, as a negative number, has freed. It raises OutOfMemoryError; the default does nothing.
    """

    def __init__(
        self,
        thread: EngineThread,
        architecture: str,
        open_file: Callable[[str, Callable[[], object]], AdapterFile],
    ) -> None:
        self._thread, self._architecture, self._open = thread, architecture, open_file
        self._ids = itertools.count()
        self.loaded: tuple[LoadedAdapter, ...] = ()
        self.change_memory: Callable[[int], object] = lambda _: None

    @property
    def nbytes(self) -> int:
        """Return the bytes of memory that the loaded adapters take."""
        return sum(each.adapter.nbytes for each in self.loaded)

    def load(
        self,
        path: str,
        scale: float = 1.0,
        name: str | None = None,
        *,
        check: Callable[[], object] = lambda: None,
    ) -> LoadedAdapter:
        """Load an adapter, a GGUF file or a PEFT folder, and apply it from the next step on.

        name: by default the name of the file or folder. check: called repeatedly during the load; an
        exception from it ends the load. Raises ModelNotFoundError, FormatError, OutOfMemoryError,
        UnsupportedModelError if the adapter's kind or the backend is not supported, and InvalidRequestError
        if the adapter belongs to another model or is already loaded.
        """
        backend = taking_adapters(self._thread.engine.backend)
        scale = checked_scale(scale)
        with self._open(path, check) as file:
            file.check_model(self._architecture, backend.adapters.matrices)
            self._check_new(None, name)  # before anything is unloaded for it
            self.change_memory(file.nbytes)  # before it is read
            try:
                adapter = file.read(check)
                digest = adapter.digest  # takes a while: no answer waits for it
                with self._thread.exclusive():
                    check()
                    self._check_new(digest, name)
                    name = name or self._free_name(_name_of(adapter.path))
                    made = LoadedAdapter(next(self._ids), name, scale, adapter)
                    grown = self._set((*self.loaded, made))
            except BaseException:
                self.change_memory(-file.nbytes)
                raise
        self.change_memory(grown - file.nbytes)
        return made

    def unload(self, which: int | str) -> LoadedAdapter:
        """Unload an adapter, by its number or name, and return it. Sequences that use it continue.

        Raises InvalidRequestError if it is not loaded.
        """
        with self._thread.exclusive():
            gone = self.find(which)
            grown = self._set(each for each in self.loaded if each is not gone)
        self.change_memory(grown)
        return gone

    def set_scales(self, scales: Mapping[int | str, float]) -> None:
        """Set the scales for future sequences that choose no adapters; adapters not in `scales` get 0.

        Raises InvalidRequestError.
        """
        with self._thread.exclusive():
            chosen = {self.find(which).id: checked_scale(scale) for which, scale in scales.items()}
            grown = self._set(replace(each, scale=chosen.get(each.id, 0.0)) for each in self.loaded)
        self.change_memory(grown)

    def find(self, which: int | str) -> LoadedAdapter:
        """Return the adapter with this number or name. Raises InvalidRequestError."""
        for each in self.loaded:
            if which == (each.id if isinstance(which, int) else each.name):
                return each
        names = ", ".join(f"{each.id} ({each.name!r})" for each in self.loaded) or "none"
        raise InvalidRequestError(f"there is no adapter {clause(shown(which))}; the loaded ones are {names}")

    def resolve(self, scales: Mapping[int | str, float]) -> AdapterScales:
        """Return the adapters of a sequence that chooses `scales`. Raises InvalidRequestError."""
        chosen = [(self.find(which), checked_scale(scale)) for which, scale in scales.items()]
        return _nonzero((each.adapter.digest, scale) for each, scale in chosen)

    def _check_new(self, digest: str | None, name: str | None) -> None:
        """Raise InvalidRequestError if the digest (None: unknown) or the name is already in use."""
        for each in self.loaded:
            if each.adapter.digest == digest:
                raise InvalidRequestError(f"the adapter {each.name!r} is loaded already, as {each.id}")
            if each.name == name:
                raise InvalidRequestError(f"an adapter is called {name!r} already; choose another name")

    def _set(self, loaded: Iterable[LoadedAdapter]) -> int:
        """Replace the adapters, between two steps, and return by how many bytes those in memory grew."""
        engine = self._thread.engine
        backend = taking_adapters(engine.backend)
        loaded = tuple(loaded)
        in_use = {digest for each in engine.scheduler.unfinished for digest, _ in each.adapter_scales}
        before = backend.adapters.adapters
        kept = {each.digest: each for each in before if each.digest in in_use}
        kept |= {each.adapter.digest: each.adapter for each in loaded}
        default = _nonzero((each.adapter.digest, each.scale) for each in loaded)
        tensors = backend.weights.tensors
        engine.set_adapters(AdapterSet(backend.graph, tensors, list(kept.values()), default))
        self.loaded = loaded
        return sum(each.nbytes for each in kept.values()) - sum(each.nbytes for each in before)

    def _free_name(self, name: str) -> str:
        taken = {each.name for each in self.loaded}
        names = (name, *(f"{name}-{n}" for n in range(2, len(taken) + 2)))
        return next(one for one in names if one not in taken)


def _name_of(path: Path) -> str:
    """Return the name of a file or folder, in characters that requests can use."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", path.name if path.is_dir() else path.stem)


def _nonzero(chosen: Iterable[tuple[str, float]]) -> AdapterScales:
    """Return adapters with a nonzero scale in canonical form: sorted by digest, scales in float32."""
    scales = {digest: float(np.float32(scale)) for digest, scale in chosen}
    return tuple(sorted((digest, scale) for digest, scale in scales.items() if scale))


def checked_scale(scale: float) -> float:
    """Return `scale`. Raises InvalidRequestError if it is not a number in the allowed range."""
    return real_number("the scale of an adapter", scale, -LARGEST_SCALE, LARGEST_SCALE)
