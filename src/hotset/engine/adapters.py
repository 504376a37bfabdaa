"""The adapters (LoRA) of a loaded model: loaded, unloaded and chosen while it answers.

An adapter has a number, as llama-server's have, and a name. Its scale counts for sequences that choose none;
one that does choose gets what it names, and nothing else. An adapter that is unloaded while a sequence has it
stays in memory until adapters change again after that.
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
    """id: never used twice. scale: of sequences that choose no adapters."""

    id: int
    name: str
    scale: float
    adapter: LoraAdapter


class Adapters:
    """Those of one model. Every method may be called from any thread.

    thread: that drives the engine. architecture: of the model. open_file: the file of an adapter, by its
    path; it calls what it is given beside the path again and again. change_memory: is given the bytes that
    an adapter is about to take, or, negative, has left; by default any. It raises OutOfMemoryError.
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
        """Of memory that they take."""
        return sum(each.adapter.nbytes for each in self.loaded)

    def load(
        self,
        path: str,
        scale: float = 1.0,
        name: str | None = None,
        *,
        check: Callable[[], object] = lambda: None,
    ) -> LoadedAdapter:
        """Reads an adapter, a GGUF file or a folder of PEFT's, and has it from the next step on.

        name: by default that of the file or folder. check: is called again and again before the adapter is
        there; what it raises ends the load. Raises ModelNotFoundError, FormatError, UnsupportedModelError for
        a kind of adapter, or a backend, that is not supported, OutOfMemoryError, and InvalidRequestError for
        one of another model, and one that is loaded already.
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
        """Forgets an adapter, by its number or name; sequences that have it go on. Raises
        InvalidRequestError for one that is not loaded."""
        with self._thread.exclusive():
            gone = self.find(which)
            grown = self._set(each for each in self.loaded if each is not gone)
        self.change_memory(grown)
        return gone

    def set_scales(self, scales: Mapping[int | str, float]) -> None:
        """Of sequences that choose no adapters and come from now on; those that are not named get 0. Raises
        InvalidRequestError."""
        with self._thread.exclusive():
            chosen = {self.find(which).id: checked_scale(scale) for which, scale in scales.items()}
            grown = self._set(replace(each, scale=chosen.get(each.id, 0.0)) for each in self.loaded)
        self.change_memory(grown)

    def find(self, which: int | str) -> LoadedAdapter:
        """By number or name. Raises InvalidRequestError."""
        for each in self.loaded:
            if which == (each.id if isinstance(which, int) else each.name):
                return each
        names = ", ".join(f"{each.id} ({each.name!r})" for each in self.loaded) or "none"
        raise InvalidRequestError(f"there is no adapter {clause(shown(which))}; loaded are {names}")

    def resolve(self, scales: Mapping[int | str, float]) -> AdapterScales:
        """What a sequence has that chooses these. Raises InvalidRequestError."""
        chosen = [(self.find(which), checked_scale(scale)) for which, scale in scales.items()]
        return _nonzero((each.adapter.digest, scale) for each, scale in chosen)

    def _check_new(self, digest: str | None, name: str | None) -> None:
        """digest: None where the adapter was not read."""
        for each in self.loaded:
            if each.adapter.digest == digest:
                raise InvalidRequestError(f"the adapter {each.name!r} is loaded already, as {each.id}")
            if each.name == name:
                raise InvalidRequestError(f"an adapter is called {name!r} already; choose another name")

    def _set(self, loaded: Iterable[LoadedAdapter]) -> int:
        """Between two steps. Returns by how many bytes the adapters in memory have grown."""
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
    """That of a file or folder, as requests can name it."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", path.name if path.is_dir() else path.stem)


def _nonzero(chosen: Iterable[tuple[str, float]]) -> AdapterScales:
    """One form for all that is the same: those that add something, by digest, with their scales as they are
    computed with."""
    scales = {digest: float(np.float32(scale)) for digest, scale in chosen}
    return tuple(sorted((digest, scale) for digest, scale in scales.items() if scale))


def checked_scale(scale: float) -> float:
    """Raises InvalidRequestError."""
    return real_number("the scale of an adapter", scale, -LARGEST_SCALE, LARGEST_SCALE)
