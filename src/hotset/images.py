"""The images of a model's prompts: decoded, laid out, and encoded once per conversation.

A conversation sends its images again with each message. So the results of the encoder are kept, the least
recently used ones are dropped beyond a limit, and an image whose rows are there is not even decoded again.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np

from hotset.engine.images import ImagePrompt, ImageTokens
from hotset.errors import InvalidRequestError, StepCancelledError
from hotset.text.image_text import GivenImage, ImageSource, PromptTokens

if TYPE_CHECKING:
    from hotset.vision import ImageEncoder, Layout, Picture

CACHE_BYTES = 256 << 20
"""Bytes of encoded images that are kept by default."""
PICTURE_BYTES = 64 << 20
"""Bytes of decoded pictures that wait to be encoded; one larger picture is kept alone."""
_MOST_LAYOUTS = 4096  # of images whose place in a prompt is remembered


@dataclass
class ImageCounts:
    """Counters of images. read: in prompts. encoded: those that the encoder computed, in `seconds`.

    tokens: of the images in prompts. cached_bytes: of kept results.
    """

    read: int = 0
    encoded: int = 0
    tokens: int = 0
    seconds: float = 0.0
    cached_bytes: int = 0


class Decode(Protocol):
    """A function that decodes a file, as `vision.decoded`. Raises its errors."""

    def __call__(self, data: bytes, /, *, stop: threading.Event) -> Picture: ...


class ImageReader:
    """The source of a model's images. Any thread may use it; one image at a time is encoded.

    An event `stop` ends the work on the images of one request, with StepCancelledError, once it is given to
    `end`. encoder: of the model. decode: turns the bytes of a file into a picture. scale: the model
    multiplies embeddings of tokens by it, but not rows of images. cache_bytes: of results to keep.
    max_tokens: the most tokens of an image; None: as its family has it.
    """

    def __init__(
        self,
        encoder: ImageEncoder,
        decode: Decode,
        *,
        scale: float = 1.0,
        cache_bytes: int = CACHE_BYTES,
        max_tokens: int | None = None,
    ) -> None:
        self._encoder, self._decode, self._scale = encoder, decode, scale
        self._cache_bytes, self._max_tokens = cache_bytes, max_tokens
        self._counts, self._closed = ImageCounts(), False
        self._guard = threading.Lock()  # of the attributes below and the counts
        self._encoding = threading.Lock()  # held while the encoder computes
        self._stop: threading.Event | None = None  # of the image that is being encoded
        self._layouts: OrderedDict[bytes, tuple[bytes, Layout]] = OrderedDict()  # and the picture's digest
        self._pictures: OrderedDict[bytes, Picture] = OrderedDict()
        self._encoded: OrderedDict[tuple[bytes, str], list[ImageTokens]] = OrderedDict()

    @property
    def grouped(self) -> bool:
        """Return whether the tokens of an image see one another."""
        return not self._encoder.causal

    @property
    def n_layers(self) -> int:
        """Return how many of the model's first layers get a part of the rows of images."""
        return self._encoder.n_layers

    @property
    def nbytes(self) -> int:
        """Return the most bytes of the encoder, of kept results and of pictures that wait."""
        return self._encoder.nbytes + self._cache_bytes + PICTURE_BYTES

    @property
    def counts(self) -> ImageCounts:
        """Return a copy of the counters."""
        with self._guard:
            return replace(self._counts)

    def until(self, stop: threading.Event | None = None) -> ImageSource:
        """Return the source of the places of images in prompts, which decodes them until `stop`."""
        pieces = partial(self._pieces, stop or threading.Event())
        return ImageSource(self._encoder.marker, self._encoder.plain_marker, pieces)

    def _pieces(self, stop: threading.Event, image: GivenImage) -> Sequence[str | int]:
        return self._laid_out(image, stop)[1].pieces

    def prompt(self, tokens: PromptTokens, stop: threading.Event | None = None) -> ImagePrompt:
        """Return a prompt with the rows of its images, the same one for all of its answers.

        Encodes the images that are not kept.
        """
        if tokens.placed is None:
            placed = self._placed(tokens, stop or threading.Event())
            tokens.placed = ImagePrompt([max(token, 0) for token in tokens], placed)
        found: ImagePrompt = tokens.placed
        return found

    def _placed(self, tokens: PromptTokens, stop: threading.Event) -> list[ImageTokens]:
        """Return the rows of all images of a prompt at their places."""
        found = []
        for one in tokens.images:
            runs = self._runs(one.image, stop)
            found += [run.at(first) for run, first in zip(runs, one.firsts, strict=True)]
        with self._guard:
            self._counts.read += len(tokens.images)
            self._counts.tokens += sum(len(run.rows) for run in found)
        return found

    def end(self, stop: threading.Event) -> None:
        """End the work with this event, from any thread."""
        stop.set()
        with self._guard:
            if self._stop is stop:
                self._encoder.cancel()

    def close(self) -> None:
        """End the encoder's step, and free it and the kept images; safe to call twice."""
        self._closed = True
        self._encoder.cancel()
        with self._encoding:
            self._encoder.close()
        with self._guard:
            self._pictures.clear()
            self._encoded.clear()
            self._counts.cached_bytes = 0

    def _laid_out(self, image: GivenImage, stop: threading.Event) -> tuple[bytes, Layout]:
        """Return the digest of the picture, and its layout."""
        with self._guard:
            if (known := self._layouts.get(image.key)) is not None:
                self._layouts.move_to_end(image.key)
                return known
        picture = self._picture(image, stop)
        found = picture.digest, self._encoder.layout(picture, image.detail, self._max_tokens)
        with self._guard:
            self._layouts[image.key] = found
            if len(self._layouts) > _MOST_LAYOUTS:
                self._layouts.popitem(last=False)
        return found

    def _picture(self, image: GivenImage, stop: threading.Event) -> Picture:
        """Return the decoded picture, and keep it until it is encoded."""
        if stop.is_set():
            raise StepCancelledError
        if image.address:
            raise InvalidRequestError(
                "an image must be given as data or a file; only a server that allows it opens addresses"
            )
        with self._guard:
            if (known := self._pictures.get(image.key)) is not None:
                return known
        picture = self._decode(image.data, stop=stop)
        with self._guard:
            self._pictures[image.key] = picture
            while (
                len(self._pictures) > 1
                and sum(one.pixels.nbytes for one in self._pictures.values()) > PICTURE_BYTES
            ):
                self._pictures.popitem(last=False)
        return picture

    def _runs(self, image: GivenImage, stop: threading.Event) -> list[ImageTokens]:
        """Return the rows of an image, divided as its layout says, each beginning at 0."""
        digest, layout = self._laid_out(image, stop)
        key = digest, image.detail
        with self._encoding:
            with self._guard:
                if (known := self._encoded.get(key)) is not None:
                    self._encoded.move_to_end(key)
                    self._pictures.pop(image.key, None)
                    return known
            if self._closed:
                raise InvalidRequestError("the model has been closed; load it again")
            began = time.perf_counter()
            picture = self._picture(image, stop)
            with self._guard:
                self._stop = stop
            try:
                rows = self._encoder.encode(picture, image.detail, self._max_tokens, stop.is_set)
            finally:
                with self._guard:
                    self._stop = None
            runs = _divided(np.asarray(rows, np.float32) / np.float32(self._scale), layout, self._encoder)
            seconds = time.perf_counter() - began
            with self._guard:  # before another request for this image, or `close`, may begin
                self._counts.encoded += 1
                self._counts.seconds += seconds
                self._pictures.pop(image.key, None)
                self._keep(key, runs)
        return runs

    def _keep(self, key: tuple[bytes, str], runs: list[ImageTokens]) -> None:
        """Keep a result within the limit; the caller holds the guard."""
        if (n_bytes := _bytes_of(runs)) > self._cache_bytes:
            return
        self._encoded[key] = runs
        self._counts.cached_bytes += n_bytes
        while self._counts.cached_bytes > self._cache_bytes:
            self._counts.cached_bytes -= _bytes_of(self._encoded.popitem(last=False)[1])


def _bytes_of(runs: Sequence[ImageTokens]) -> int:
    return sum(run.rows.nbytes for run in runs)


def _divided(rows: np.ndarray, layout: Layout, encoder: ImageEncoder) -> list[ImageTokens]:
    """Return the rows of an encoded image, divided by the counts of its layout."""
    counts = [piece for piece in layout.pieces if isinstance(piece, int)]
    width = encoder.n_embd * (1 + encoder.n_layers)
    assert rows.shape == (sum(counts), width), "an encoder returns a row per token of the layout"
    assert layout.positions is None or len(counts) == 1, "positions belong to one stretch of tokens"
    ends = np.cumsum(counts)
    return [
        ImageTokens(0, rows[end - n : end], layout.positions, layout.n_positions, grouped=not encoder.causal)
        for n, end in zip(counts, ends, strict=True)
    ]
