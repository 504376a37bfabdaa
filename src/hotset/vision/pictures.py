"""Image files, which are hostile: each is decoded in a process of its own (`text/child.py`)."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass

import numpy as np

from hotset.errors import InvalidRequestError, StepCancelledError, install_command
from hotset.text.child import Cause, Child, ChildError, ChildLimits, encoded
from hotset.units import human_size

LIMITS = ChildLimits(seconds=10.0, longest=60.0, n_bytes=1 << 30)
"""Limits of decoding an image. A photo of 12 megapixels takes 0.2 seconds and 100 MiB."""


@dataclass(frozen=True)
class ImageLimits:
    """Limits of an image file, which are checked before it is decoded. n_bytes: of the file."""

    n_bytes: int = 32 << 20
    n_pixels: int = 50_000_000


DEFAULT_LIMITS = ImageLimits()


@dataclass(frozen=True)
class Picture:
    """A decoded image. pixels: uint8 [height, width, 3]. digest: 32 bytes, of pixels and shape."""

    pixels: np.ndarray
    digest: bytes

    @classmethod
    def of(cls, pixels: np.ndarray) -> Picture:
        """Return the picture with these pixels, uint8 [height, width, 3].

        Raises InvalidRequestError for an array of another shape or type.
        """
        if pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.dtype != np.uint8 or not pixels.size:
            raise InvalidRequestError(
                f"pixels must be uint8 [height, width, 3], not {pixels.dtype} {list(pixels.shape)}"
            )
        pixels = np.ascontiguousarray(pixels)
        digest = hashlib.sha256(f"{pixels.shape[0]} x {pixels.shape[1]}\n".encode())
        digest.update(pixels.data)
        return cls(pixels, digest.digest())


_SENTENCES = {
    Cause.NO_PACKAGE: "Images need the package Pillow; install it with {install}.",
    Cause.NOT_STARTED: "The process that decodes images cannot be started ({detail}).",
    Cause.NOT_READY: "The process that decodes images ended as it started ({detail}).",
    Cause.TIME: "The image takes more than {detail} to decode; send a smaller one.",
    Cause.MEMORY: "The image takes more than {detail} of memory to decode; send a smaller one.",
    Cause.DIED: "The image brought down the process that decodes it ({detail}); send another file.",
}


def decoded(
    data: bytes, limits: ImageLimits = DEFAULT_LIMITS, *, stop: threading.Event | None = None
) -> Picture:
    """Decode a JPEG, PNG, WebP or GIF file: the first frame, upright, over white.

    stop: ends the process once it is set. Raises InvalidRequestError for a file that is larger than the
    limits, damaged, or of another format, and StepCancelledError once `stop` is set.
    """
    if len(data) > limits.n_bytes:
        raise InvalidRequestError(
            f"The image has {human_size(len(data))}, more than the limit of {human_size(limits.n_bytes)}."
        )
    request = encoded({"n_pixels": limits.n_pixels, "n_raw": len(data)})
    try:
        with Child("hotset.formats.image_child", ("PIL",), LIMITS) as child:
            answer = child.ask(request, data, 3 * limits.n_pixels, stop, height=int, width=int, raw=bytes)
    except ChildError as error:
        if error.cause == Cause.STOPPED:
            raise StepCancelledError from None
        sentence = _SENTENCES[error.cause]
        raise InvalidRequestError(
            sentence.format(detail=error.detail, install=install_command("vision"))
        ) from None
    match answer.get("error"):
        case "format":
            raise InvalidRequestError("The image is not a JPEG, PNG, WebP or GIF file; send one of these.")
        case "pixels":
            raise InvalidRequestError(
                f"The image has {answer.get('reason')} pixels, more than the limit of {limits.n_pixels}; "
                "send a smaller one."
            )
        case "damaged":
            raise InvalidRequestError(f"The image file is damaged ({answer.get('reason')}).")
    height, width, raw = answer["height"], answer["width"], answer["raw"]
    if min(height, width) < 1 or len(raw) != 3 * height * width:
        raise InvalidRequestError(_SENTENCES[Cause.DIED].format(detail="a wrong answer"))
    return Picture.of(np.frombuffer(raw, np.uint8).reshape(height, width, 3))
