"""Mapped files that another program may cut short while they are in use.

To read a page that is gone would end the process (SIGBUS); csrc/mapped.cpp puts zeros there instead. What was
read since may be anything: so a reader calls `check`, and a writer of a file from it `check_unharmed`, before
it returns the result.
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

Truncated = tuple[int, Path]  # serial number of the map, since a name may come again

_open: weakref.WeakSet[MappedFile] = weakref.WeakSet()
_truncated: set[Truncated] = set()  # of those that are closed
_serial = itertools.count()


class MappedFile(mmap.mmap):
    """A whole file, mapped to be read. `descriptor` may be closed afterwards. Raises OSError, ValueError."""

    path: Path
    number: int
    _core: Any  # the native module, while the file is under guard
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
        """As zipfile likes a file."""
        return True

    @property
    def is_truncated(self) -> bool:
        """Whether the file has become shorter than its map, or a page could not be read; not when closed."""
        return self._core is not None and self._core.is_truncated(self._guard)

    def check(self) -> None:
        """Raises FormatError where what was read may be anything, since the file was truncated."""
        if self.is_truncated:
            raise truncated_error(self.path)

    def map_cached(self, begin: int, end: int) -> None:
        """Maps what the system's cache has of bytes begin..end, whose first use then costs no fault.

        Nothing is read from the disk, and nothing happens where the system cannot be asked.
        """
        if self._core is not None:
            self._core.map_cached(self._guard, begin, end)

    def close(self) -> None:
        """Unmaps the file; BufferError, and nothing changes, where views of it are alive."""
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
    """Files that were truncated while this process had them open."""
    return frozenset(_truncated) | {
        (mapped.number, mapped.path) for mapped in list(_open) if mapped.is_truncated
    }


def check_unharmed(before: Collection[Truncated]) -> None:
    """Raises FormatError where a file has been truncated that is not among those of `before`."""
    for _, path in truncated_files().difference(before):
        raise truncated_error(path)


def truncated_error(path: Path) -> FormatError:
    """Return the error of a truncated file. It has no folder, since clients of a server read it."""
    return FormatError(
        f"{path.name} was cut short, or could not be read, while it was in use; put the whole file there "
        "and load it again"
    )
