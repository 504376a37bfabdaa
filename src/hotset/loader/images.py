"""The encoder of a model's images: its file, and the reader that the model gets."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from hotset.errors import HotsetError, UnsupportedModelError
from hotset.images import PICTURE_BYTES, ImageReader
from hotset.loader.decide import Opened
from hotset.storage.projectors import projector_of

if TYPE_CHECKING:
    from hotset.vision import ImageEncoder


def with_images(opened: Opened) -> Opened:
    """Return a model with the reader of its images, if it has a projector and can use it.

    The caller closes `Opened.images`. A named projector that cannot be used raises an error; one that is next
    to the model is left out with a warning. Raises ModelNotFoundError, FormatError, UnsupportedModelError.
    """
    settings, path = opened.settings, opened.gguf.path
    named = None if settings.mmproj is None else Path(settings.mmproj)
    if settings.no_mmproj:
        return opened.with_images(None, "no_mmproj leaves its projector out")
    found = named or projector_of(path)
    if found is None:
        return opened.with_images(
            None,
            f"there is no projector next to {path.name}; put its mmproj file into the same folder, or name "
            "it with mmproj",
        )
    try:
        encoder = open_encoder(found, opened)
        try:
            if (reason := _obstacle(opened, encoder)) is not None:
                raise UnsupportedModelError(f"{found.name} is not used: {reason}")
            return opened.with_images(_reader(encoder, opened))
        except BaseException:
            encoder.close()
            raise
    except HotsetError as error:
        if named is not None:
            raise
        warnings.warn(f"the model gets no images: {error}", stacklevel=2)
        return opened.with_images(None, str(error).replace(str(found), found.name))  # clients may read it


def image_bytes(opened: Opened) -> int:
    """Return the bytes of memory for a model's images, estimated by the file if it is not open yet."""
    settings = opened.settings
    if opened.images is not None:
        return opened.images.nbytes
    if opened.blind or settings.no_mmproj:
        return 0
    path = settings.mmproj or projector_of(opened.gguf.path)
    if path is None:
        return 0
    try:
        return Path(path).stat().st_size + settings.image_cache_bytes + PICTURE_BYTES
    except OSError:  # reported when it is opened
        return 0


def open_encoder(path: Path, opened: Opened) -> ImageEncoder:
    """Open an encoder for a model, with as many threads. Raises the errors of ImageEncoder.open."""
    from hotset.vision import ImageEncoder

    return ImageEncoder.open(path, n_embd=opened.config.n_embd, threads=opened.settings.n_threads)


def _reader(encoder: ImageEncoder, opened: Opened) -> ImageReader:
    from hotset.vision import decoded

    settings = opened.settings
    return ImageReader(
        encoder, decoded, scale=opened.config.embedding_scale, cache_bytes=settings.image_cache_bytes,
        max_tokens=settings.image_max_tokens,
    )  # fmt: skip


def _obstacle(opened: Opened, encoder: ImageEncoder) -> str | None:
    """Return why the settings do not allow images; None if they do."""
    config, settings, device = opened.config, opened.settings, opened.capabilities
    if not config.causal:
        return "an embedding model reads only text"
    if config.indexing is not None and not encoder.causal:
        return "an indexer does not choose among the tokens of an image that see one another"
    if encoder.n_layers > config.n_layer:
        return f"it makes rows for {encoder.n_layers} layers, and the model has {config.n_layer}"
    if config.has_image_positions and settings.kv_type.startswith("q4_0"):
        return "keys in q4_0 have no rotary positions of images; use kv_type f16 or q8_0"
    if device is None or (device.images and encoder.causal and not config.has_image_positions):
        return None
    return f"{device.title} does not compute images of this family; use device='cpu'"
