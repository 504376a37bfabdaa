"""Mapped files that another program may cut short while they are in use.

Reading a missing page would end the process (SIGBUS). csrc/mapped.cpp puts zeros there instead, so any later
read may be wrong. A reader therefore calls `check`, and a writer that reads such a file `check_unharmed`,
before it returns results.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import weakref
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from hotset.errors import FormatError

Truncated = tuple[int, Path]  # serial number of the map, because a path may be mapped again

_open: weakref.WeakSet[MappedFile] = weakref.WeakSet()
_truncated: set[Truncated] = set()  # closed ones
_serial = itertools.count()


class MappedFile(mmap.mmap):
    """A whole file, mapped for reading. `descriptor` may be closed afterwards. Raises OSError, ValueError."""

    path: Path
    number: int
    _core: Any  # the native module while the file is guarded; otherwise None
    _guard: int

    def __new__(cls, path: Path, descriptor: int) -> MappedFile:
        mapped = super().__new__(cls, descriptor, 0, access=mmap.ACCESS_READ)
        mapped.path, mapped.number, mapped._core = path, next(_serial), None
        try:
            from hotset import _core
        except ImportError:  # the native core is not built
            return mapped
        try:
            mapped._guard = _core.guard_file(np.frombuffer(mapped, np.uint8), descriptor)
        except RuntimeError as error:
            raise OSError(errno.EMFILE, str(error)) from None
        mapped._core = _core
        _open.add(mapped)
        return mapped

    def seekable(self) -> bool:
        """Return True, as zipfile expects."""
        return True

    @property
    def is_truncated(self) -> bool:
        """Return whether an open file became shorter than its map, or a page could not be read."""
        return self._core is not None and self._core.is_truncated(self._guard)

    def check(self) -> None:
        """Raise FormatError if the file was cut short, so that earlier reads may be wrong."""
        if self.is_truncated:
            raise truncated_error(self.path)

    def map_cached(self, begin: int, end: int) -> None:
        """Map the pages of bytes begin..end that are in the system's cache, so that their first use is fast.

        Nothing is read from disk. Does nothing if the system does not support it.
        """
        if self._core is not None:
            self._core.map_cached(self._guard, begin, end)

    def close(self) -> None:
        """Unmap the file. Raises BufferError, without changing anything, while views of it exist."""
        super().close()
        self._release()

    def __del__(self) -> None:
        self._release()

    def _release(self) -> None:
        core, self._core = self._core, None
        if core is not None:
            if core.is_truncated(self._guard):
                _truncated.add((self.number, self.path))
            core.unguard_file(self._guard)


def truncated_files() -> frozenset[Truncated]:
    """Return the files that were cut short while this process had them open."""
    return frozenset(_truncated) | {
        (mapped.number, mapped.path) for mapped in list(_open) if mapped.is_truncated
    }


def check_unharmed(before: Collection[Truncated]) -> None:
    """Raise FormatError if a file that is not in `before` has been cut short."""
    for _, path in truncated_files().difference(before):
        raise truncated_error(path)


def truncated_error(path: Path) -> FormatError:
    """Return the error for a file that was cut short. It omits the folder, because server clients see it."""
    return FormatError(
        f"{path.name} was cut short, or could not be read, while it was in use; put the whole file there "
        "and load it again"
    )
