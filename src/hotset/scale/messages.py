"""Messages between stages: a head in JSON, then the bytes of the arrays. Nothing is unpickled."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from hotset import errors
from hotset.backends.base import MAX_AXES, Batch
from hotset.errors import HotsetError, StepCancelledError
from hotset.settings import LoadSettings

_MESSAGE_LETTERS = 4096  # of an error message; the rest is left out
_DTYPES = ("<i4", "<f4", "|b1")


@dataclass(frozen=True)
class Failed:
    """An error that kept a stage from computing. kind: the name of its class."""

    kind: str
    message: str

    @staticmethod
    def of(error: Exception) -> Failed:
        return Failed(type(error).__name__, (str(error) or type(error).__name__)[:_MESSAGE_LETTERS])

    def error(self) -> Exception:
        """Return the error as an exception."""
        if self.kind == StepCancelledError.__name__:
            return StepCancelledError()
        kind = getattr(errors, self.kind, None)
        if isinstance(kind, type) and issubclass(kind, HotsetError):
            return kind(self.message)
        return RuntimeError(f"{self.kind}: {self.message}")


Passed = np.ndarray | Failed  # the result of a stage for a piece: rows, float32 [n_rows, width], or an error


@dataclass(frozen=True)
class Message:
    """A message of a stage.

    Between stages: a piece of a step, with the previous stage's result (None for the first stage). From the
    last stage: batch is None, and rows are logits.
    """

    step: int
    batch: Batch | None
    passed: Passed | None

    def encode(self) -> tuple[bytes, list[np.ndarray]]:
        """Return the head, and the arrays in its order."""
        found: dict[str, Any] = {}
        if self.batch is not None:
            assert self.batch.adapter_scales is None, "stages have no adapters"
            found = {field.name: getattr(self.batch, field.name) for field in fields(Batch)}
        failed = None
        if isinstance(self.passed, Failed):
            failed = self.passed.kind, self.passed.message
        else:
            found["rows"] = self.passed
        given = [(key, value) for key, value in found.items() if isinstance(value, np.ndarray)]
        arrays = dict(sorted(given, key=lambda item: -item[1].itemsize))  # so that each is aligned
        head = {
            "step": self.step,
            "taps": found.get("taps", ()),
            "failed": failed,
            "arrays": [(name, array.dtype.str, array.shape) for name, array in arrays.items()],
        }
        return json.dumps(head).encode(), list(arrays.values())


@dataclass(frozen=True)
class Header:
    """The decoded head of a message. arrays: the name, dtype and shape of each."""

    step: int
    taps: Sequence[str]
    failed: Sequence[str] | None
    arrays: Sequence[tuple[str, str, Sequence[int]]]

    @staticmethod
    def decode(data: bytes) -> Header:
        """Return the decoded head. Raises ValueError, TypeError or KeyError for invalid data."""
        head = Header(**json.loads(data))
        for _, dtype, shape in head.arrays:
            if dtype not in _DTYPES or any(n < 0 for n in shape):
                raise ValueError
        return head

    @property
    def n_bytes(self) -> int:
        """The bytes of the arrays."""
        return sum(math.prod(shape) * np.dtype(dtype).itemsize for _, dtype, shape in self.arrays)

    def message(self, body: np.ndarray) -> Message:
        """Return the message, whose arrays are views of `body`, uint8 [n_bytes]."""
        arrays: dict[str, Any] = {}
        for name, dtype, shape in self.arrays:
            n = math.prod(shape) * np.dtype(dtype).itemsize
            arrays[name], body = body[:n].view(dtype).reshape(shape), body[n:]
        passed: Passed | None = arrays.pop("rows", None)
        if self.failed is not None:
            passed = Failed(*self.failed)
        return Message(self.step, Batch(**arrays, taps=tuple(self.taps)) if arrays else None, passed)


def most_bytes(settings: LoadSettings, n_blocks: int, width: int) -> int:
    """Return the most bytes of the arrays of a message. width: of its rows."""
    n_sequences = max(settings.max_batch, settings.max_sequences)
    columns = len(fields(Batch)) + MAX_AXES + 1 + width  # `rotary` and `groups` have several each
    return 4 * (settings.max_batch * columns + n_sequences * n_blocks)
