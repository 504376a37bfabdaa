"""A model file with sidecar files over it: tensors that hotset built, beside those that were published."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from hotset.formats.gguf import GGUFFile, TensorInfo


class Overlay:
    """A WeightSource: a tensor is taken from the last of the files that has it.

    The files stay the property of the caller, except that `close` closes the sidecars.
    """

    def __init__(self, model: GGUFFile, *sidecars: GGUFFile) -> None:
        self._files = [*reversed(sidecars), model]

    def under(self, *sidecars: GGUFFile) -> Overlay:
        """The same files with more sidecars over them."""
        return Overlay(self._files[-1], *reversed(self._files[:-1]), *sidecars)

    @property
    def sidecars(self) -> list[GGUFFile]:
        """The files over the model's."""
        return self._files[:-1]

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Name → type and shape, over all files."""
        return ChainMap(*(file.tensors for file in self._files))

    def data(self, name: str) -> np.ndarray:
        """The tensor's bytes, uint8 [nbytes], in the map of its file."""
        return self._owner(name).data(name)

    def _owner(self, name: str) -> GGUFFile:
        """The file that has a tensor; where none has it the model, which says so."""
        return next((file for file in self._files if name in file.tensors), self._files[-1])

    def ask_for_large_pages(self) -> None:
        """GGUFFile.ask_for_large_pages, of all files."""
        for file in self._files:
            file.ask_for_large_pages()

    def map_cached(self, name: str) -> None:
        """GGUFFile.map_cached, in the tensor's file."""
        self._owner(name).map_cached(name)

    def place(self, name: str) -> tuple[Path, int]:
        """The file in which a tensor lies, and the offset of its first byte."""
        owner = self._owner(name)
        info = owner.tensors[name]
        return owner.paths[info.shard], info.offset

    def let_go(self) -> None:
        """Gives back the memory of what was touched; it is read again from the files where it is."""
        for file in self._files:
            file.let_go()

    def check(self) -> None:
        """Raises FormatError where a file was truncated while it was open (GGUFFile.check)."""
        for file in self._files:
            file.check()

    def close(self) -> None:
        """Closes the sidecars."""
        for file in self._files[:-1]:
            file.close()
