"""The door through which files are read whole: bounded, and only where a file is what it should be.

A path from a person or a download may be a pipe that nobody writes to, a device without an end, or a file of
a terabyte. Whoever reads a whole file says how large it may be.
"""

from __future__ import annotations

import io
import os
import stat
from pathlib import Path
from typing import BinaryIO

from hotset.errors import FormatError
from hotset.units import human_size

# Above the largest of published tokenizers and listings of tensors by a factor of ten.
SMALL_FILE = 256 << 20


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """A regular file, open for reading bytes. Raises FileNotFoundError, and FormatError for what is none.

    The file that was opened is looked at, not its name: what stands there may change between the two.
    """
    # A pipe is opened without waiting for its writer; for a regular file O_NONBLOCK means nothing.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:  # no permission, a socket; a name with a zero byte
        raise FormatError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FormatError(f"{path} is not a regular file (a folder, a pipe, a device?): name one.")
    return os.fdopen(descriptor, "rb")


def read_small_file(path: str | os.PathLike[str], limit: int = SMALL_FILE) -> bytes:
    """The bytes of a regular file. Errors as `open_regular`; FormatError too above `limit` bytes."""
    with open_regular(path) as file:
        return read_bounded(file, Path(path), limit)


def read_bounded(file: BinaryIO, name: Path | str, limit: int) -> bytes:
    """What is left in an open file, pipe or device. Raises FormatError above `limit` bytes."""
    data = bytearray()
    # Piece by piece: memory is taken for what comes, not for what a size says (files of /proc say 0).
    while len(data) <= limit and (piece := file.read(min(1 << 20, limit + 1 - len(data)))):
        data += piece
    if len(data) > limit:
        raise FormatError(f"{name} is larger than {human_size(limit)}, the most that is read of such a file.")
    return bytes(data)


def read_small_text(path: str | os.PathLike[str], limit: int = SMALL_FILE) -> str:
    """UTF-8 text with every newline as "\\n". Errors as `read_small_file`; FormatError too for other text."""
    data = read_small_file(path, limit)
    try:
        return io.TextIOWrapper(io.BytesIO(data), encoding="utf-8").read()
    except UnicodeDecodeError as error:
        raise FormatError(f"{path} is not UTF-8 text (byte {error.start}).") from None
