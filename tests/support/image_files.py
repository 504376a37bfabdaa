"""Image files for tests: sound ones in every format, and damaged ones."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

Image = pytest.importorskip("PIL.Image")

FORMATS = ("JPEG", "PNG", "WEBP", "GIF")
ORIENTATION = 0x0112  # in EXIF
_PNG = b"\x89PNG\r\n\x1a\n"


def colours(height: int = 24, width: int = 40) -> np.ndarray:
    """Return smooth colours, which every format keeps approximately, uint8 [height, width, 3]."""
    y, x = np.indices((height, width))
    return np.stack([6 * x, 10 * y, 4 * (x + y)], axis=2).astype(np.uint8)


def file_of(image: Any, format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    """Return a chunk of a PNG file."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(
    width: int,
    height: int,
    rows: int | None = None,
    *,
    depth: int = 8,
    colour: int = 2,
    row: bytes | None = None,
    more: Sequence[bytes] = (),
) -> bytes:
    """Return a PNG file with as many equal rows of data as given (None: all), made without its pixels.

    depth, colour: its bits per channel and colour type. row: the bytes of a row; None: zeros of RGB. more:
    chunks before the data.
    """
    data, compress = b"", zlib.compressobj(9)
    for _ in range(height if rows is None else rows):
        data += compress.compress(b"\0" + (bytes(3 * width) if row is None else row))
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    parts = [chunk(b"IHDR", header), *more, chunk(b"IDAT", data + compress.flush()), chunk(b"IEND", b"")]
    return _PNG + b"".join(parts)


# ---- damage


def cut_off(data: bytes, rng: np.random.Generator) -> bytes:
    return data[: rng.integers(len(data))]


def flipped(data: bytes, rng: np.random.Generator) -> bytes:
    """Replace up to 19 bytes by others."""
    out = np.frombuffer(data, np.uint8).copy()
    at = rng.integers(len(data), size=rng.integers(1, 20))
    out[at] = rng.integers(0, 256, len(at))
    return out.tobytes()


def repeated(data: bytes, rng: np.random.Generator) -> bytes:
    """Repeat up to 59 bytes up to 49 times."""
    start, n = rng.integers(len(data)), rng.integers(1, 60)
    return data[:start] + data[start : start + n] * int(rng.integers(2, 50)) + data[start:]


def extreme(data: bytes, rng: np.random.Generator) -> bytes:
    """Replace four bytes, such as a length, by an extreme number."""
    out = np.frombuffer(data, np.uint8).copy()
    start = rng.integers(len(data) - 4)
    out[start : start + 4] = rng.choice([0, 255, 127, 128])
    return out.tobytes()


DAMAGE: Mapping[str, Callable[[bytes, np.random.Generator], bytes]] = {
    one.__name__: one for one in (cut_off, flipped, repeated, extreme)
}
