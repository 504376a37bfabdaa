"""Weights in a device's memory, each loaded at its first use and kept as long as the stage."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import numpy as np

from hotset.backends.decoded import decoded_vector
from hotset.formats.source import WeightSource

W = TypeVar("W")
Numbers = TypeVar("Numbers")  # a device's array of numbers


class KeptWeights(ABC, Generic[Numbers]):
    """The weights of a stage on a device. A backend defines how numbers and matrices get there.

    kept: the weights on the device, by key. loaded: weights of another stage of the model; they are not
    loaded again.
    """

    def __init__(self, source: WeightSource, loaded: Mapping[object, Any] | None = None) -> None:
        self.source = source
        self.kept: dict[object, Any] = dict(loaded or {})

    @abstractmethod
    def upload(self, values: np.ndarray) -> Numbers:
        """Copy an array to the device."""

    def once(self, key: object, load: Callable[[], W]) -> W:
        """Return the weights that the first call with `key` loads."""
        if key not in self.kept:
            self.kept[key] = load()
        found: W = self.kept[key]
        return found

    def made(self, key: object, make: Callable[[], np.ndarray]) -> Numbers:
        """Return an array on the device that no file has in this form, made by the first call with `key`."""
        return self.once(key, lambda: self.upload(make()))

    def vector(self, name: str, first: int = 0, width: int | None = None) -> Numbers:
        """Return the numbers of a tensor as float32, or `width` of them from `first` on."""
        own = slice(first, None if width is None else first + width)
        return self.made((name, "vector", first, width), lambda: decoded_vector(self.source, name)[own])

    def bias(self, name: str | None, first: int = 0, width: int | None = None) -> Numbers | None:
        """Return `vector(name, first, width)`, or None if `name` is None."""
        return None if name is None else self.vector(name, first, width)
