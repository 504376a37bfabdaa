"""A model file with sidecar files over it: tensors that hotset built, in addition to the published ones."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from hotset.formats.gguf import GGUFFile, TensorInfo


class Overlay:
    """A WeightSource that takes a tensor from the last of the files that has it.

    The files remain the caller's, except that `close` closes the sidecars.
    """

    def __init__(self, model: GGUFFile, *sidecars: GGUFFile) -> None:
        self._files = [*reversed(sidecars), model]

    def under(self, *sidecars: GGUFFile) -> Overlay:
        """Return an overlay of the same files with more sidecars over them."""
        return Overlay(self._files[-1], *reversed(self._files[:-1]), *sidecars)

    @property
    def sidecars(self) -> list[GGUFFile]:
        """Return the files over the model's."""
        return self._files[:-1]

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Return name → type and shape, over all files."""
        return ChainMap(*(file.tensors for file in self._files))

    def data(self, name: str) -> np.ndarray:
        """Return the tensor's bytes, uint8 [nbytes], in the map of its file."""
        return self._owner(name).data(name)

    def _owner(self, name: str) -> GGUFFile:
        """Return the file that has a tensor; if none has it, the model, which then raises an error."""
        return next((file for file in self._files if name in file.tensors), self._files[-1])

    def ask_for_large_pages(self) -> None:
        """Call GGUFFile.ask_for_large_pages for all files."""
        for file in self._files:
            file.ask_for_large_pages()

    def map_cached(self, name: str) -> None:
        """Call GGUFFile.map_cached for the tensor's file."""
        self._owner(name).map_cached(name)

    def place(self, name: str) -> tuple[Path, int]:
        """Return the file of a tensor, and the offset of its first byte."""
        owner = self._owner(name)
        info = owner.tensors[name]
        return owner.paths[info.shard], info.offset

    def let_go(self) -> None:
        """Free the memory of pages that were used; they are read from the files again when needed."""
        for file in self._files:
            file.let_go()

    def check(self) -> None:
        """Raise FormatError if a file was cut short while it was open (GGUFFile.check)."""
        for file in self._files:
            file.check()

    def close(self) -> None:
        """Close the sidecars."""
        for file in self._files[:-1]:
            file.close()
