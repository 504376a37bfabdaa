"""Where weights come from: the tensors of a file, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from hotset.formats.gguf import TensorInfo


class WeightSource(Protocol):
    """Where a backend finds its weights: a GGUFFile, or one under sidecars (formats/overlay.py)."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Name → type and shape."""
        ...

    def data(self, name: str) -> np.ndarray:
        """The tensor's bytes, uint8 [nbytes], where they lie."""
        ...

    def check(self) -> None:
        """Raises FormatError where what was read may be anything: a file was truncated meanwhile."""
        ...
