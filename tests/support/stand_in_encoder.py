"""An encoder of images for tests of everything around it: its rows are random numbers that a picture seeds.

A stand-in file is text, such as b"picture 8x12 1": height, width and a number. It has a token per 4 pixels.
"""

from __future__ import annotations

import hashlib
import re
import threading
from dataclasses import replace
from typing import Any

import numpy as np

import hotset
from hotset.errors import InvalidRequestError
from hotset.images import Decode, ImageReader
from hotset.vision import Layout, Picture


def file_of(height: int = 8, width: int = 12, number: int = 1) -> bytes:
    """Return a stand-in file of an image with height * width / 4 tokens."""
    return f"picture {height}x{width} {number}".encode()


def decoded(data: bytes, *, stop: threading.Event | None = None) -> Picture:
    found = re.fullmatch(rb"picture (\d+)x(\d+) \d+", data)
    if found is None:
        raise InvalidRequestError("the image is in no known format")
    pixels = np.zeros((int(found[1]), int(found[2]), 3), np.uint8)
    return Picture(pixels, hashlib.sha256(data).digest())


class StandInEncoder:
    """See the module. n_encoded: images that it encoded. tiles: stretches of tokens of an image.

    causal: False: the tokens of an image see one another. axes: images have rotary positions of rows and
    columns.
    """

    marker, plain_marker = "<|image|>", "(<|image|>)"
    nbytes, n_layers = 1 << 20, 0

    def __init__(self, n_embd: int, *, causal: bool = True, axes: bool = False, tiles: int = 1) -> None:
        self.n_embd, self.causal, self.axes, self.tiles = n_embd, causal, axes, tiles
        self.n_encoded = 0
        self.closed = False

    def layout(self, picture: Picture, detail: str = "auto", max_tokens: int | None = None) -> Layout:
        n = picture.pixels.shape[0] * picture.pixels.shape[1] // 4
        n = min(n, max_tokens or n) // (4 if detail == "low" else 1)
        pieces: list[str | int] = ["["]
        for i in range(self.tiles):
            pieces += [n // self.tiles, "]" if i == self.tiles - 1 else "|"]
        n = n // self.tiles * self.tiles
        if not self.axes:
            return Layout(tuple(pieces), n)
        rows = picture.pixels.shape[0] // 2
        at = np.arange(n, dtype=np.int32)
        columns = -(-n // rows)
        positions = np.stack([np.zeros_like(at), at // columns, at % columns], axis=1)
        return Layout(tuple(pieces), n, positions, max(rows, columns))

    def encode(
        self, picture: Picture, detail: str = "auto", max_tokens: int | None = None, stops: Any = None
    ) -> np.ndarray:
        self.n_encoded += 1
        seed = int.from_bytes(picture.digest[:8], "little")
        n = self.layout(picture, detail, max_tokens).n_tokens
        return np.random.default_rng(seed).standard_normal((n, self.n_embd)).astype(np.float32)

    def cancel(self) -> None:
        """Do nothing: it encodes at once."""

    def close(self) -> None:
        self.closed = True


def give_images(
    model: hotset.Model, *, cache_bytes: int = 1 << 20, decode: Decode = decoded, **traits: bool | int
) -> StandInEncoder:
    """Give a loaded model a stand-in encoder, and return it. traits: of StandInEncoder."""
    encoder = StandInEncoder(model.config.n_embd, **traits)  # type: ignore[arg-type]
    model.images = ImageReader(encoder, decode, cache_bytes=cache_bytes)  # type: ignore[arg-type]
    model.decided = replace(model.decided, images=model.images)
    return encoder


def asks(*parts: bytes | str, role: str = "user") -> dict[str, object]:
    """Return a message of texts and images."""
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part}
        for part in parts
    ]
    return {"role": role, "content": content}
