"""The source of weights: tensors by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from hotset.formats.gguf import TensorInfo


class WeightSource(Protocol):
    """The weights of a backend: a GGUFFile, or one under sidecars (formats/overlay.py)."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Return name → type and shape."""
        ...

    def data(self, name: str) -> np.ndarray:
        """Return the tensor's bytes, uint8 [nbytes], without copying if possible."""
        ...

    def check(self) -> None:
        """Raise FormatError if a file was cut short, so that earlier reads may be wrong."""
        ...
