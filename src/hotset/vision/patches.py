"""Preprocessing: from the pixels of an image to the rows that an encoder's graph reads.

The pixels equal the results of the family's processor in transformers with its PIL backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hotset.errors import InvalidRequestError, install_command
from hotset.model.vision.config import VisionConfig
from hotset.vision.layouts import ScaledSizes

RESCALE = 1 / 255
_FILTERS = {"tiles": "LANCZOS", "square": "BILINEAR"}  # others: BICUBIC


@dataclass(frozen=True)
class Patches:
    """The input of one step of the encoder.

    rows: float32 [n_patches, config.n_input]. tokens, rotary, groups: as in Batch. order: for each image
    token of the image, in the prompt's order, its row in the step's result; None: they are in order.
    n_class: rows of the class, after the patches.
    """

    rows: np.ndarray
    tokens: np.ndarray
    rotary: np.ndarray | None = None
    groups: np.ndarray | None = None
    order: np.ndarray | None = None
    n_class: int = 0


def steps_of(config: VisionConfig, pixels: np.ndarray, sizes: ScaledSizes) -> Iterator[Patches]:
    """Yield the steps of an image: one, or one for each tile and for the whole image.

    pixels: uint8 [height, width, 3]. Raises InvalidRequestError if Pillow is not installed.
    """
    for image in images_of(config, pixels, sizes):
        rows, columns = image.shape[0] // config.patch, image.shape[1] // config.patch
        patches = patches_of(config, image)
        at = _in_tokens(np.indices((rows, columns), np.int32).reshape(2, rows, columns), config.merge)
        if config.family.rope is None:
            places = np.ascontiguousarray(at[:, 0] * columns + at[:, 1])
            yield _with_class(patches, places) if config.has_class else Patches(patches, places)
            continue
        if config.family.resized:
            around = rows_around(at, (rows, columns), config.side // config.patch)
            patches = np.concatenate([patches, around], axis=1)
        elif config.family.by_axis:  # a table of columns, then one of rows
            numbers = at[:, ::-1] + (0, config.tower.n_vocab // 2)
            patches = np.hstack([patches, numbers, np.ones_like(at)]).astype(np.float32)
        tokens = np.zeros(len(patches), np.int32)
        if not config.window:
            yield Patches(patches, tokens, at)
            continue
        windows, groups, order = _windows(rows // config.merge, columns // config.merge, config)
        of_patches = (windows[:, None] * config.merge**2 + np.arange(config.merge**2)).ravel()
        yield Patches(patches[of_patches], tokens, np.ascontiguousarray(at[of_patches]), groups, order)


def images_of(config: VisionConfig, pixels: np.ndarray, sizes: ScaledSizes) -> Iterator[np.ndarray]:
    """Yield the scaled image, or its tiles row by row and the whole image, uint8 [height, width, 3].

    The whole image is the first one in a grid with borders, and the last one otherwise.
    """
    side, by = config.side, _FILTERS.get(config.family.sizes, "BICUBIC")
    scaled = pixels
    for size in sizes.scalings:
        scaled = resized(scaled, size, by)
    if sizes.canvas is not None:
        scaled = _centred(scaled, sizes.canvas)
    if not sizes.rows:
        yield scaled
        return
    whole = resized(scaled if config.family.sizes == "tiles" else pixels, (side, side), by)
    if config.family.sizes == "points":
        yield whole
    for row in range(sizes.rows):
        for column in range(sizes.columns):
            yield scaled[row * side : (row + 1) * side, column * side : (column + 1) * side]
    if config.family.sizes != "points":
        yield whole


def _centred(pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Return the middle of an image, or the image with black borders."""
    height, width = size
    for axis, most in enumerate(size):
        if (rest := pixels.shape[axis] - most) > 0:
            pixels = np.take(pixels, np.arange(most) + rest // 2, axis)
    top, left = (height - pixels.shape[0]) // 2, (width - pixels.shape[1]) // 2
    out = np.zeros((height, width, 3), np.uint8)
    out[top : top + pixels.shape[0], left : left + pixels.shape[1]] = pixels
    return out


def _with_class(patches: np.ndarray, places: np.ndarray) -> Patches:
    """Return the input of a step with the row of the class, which has the first learned position."""
    rows = np.zeros((len(patches) + 1, patches.shape[1] + 2), np.float32)
    rows[:-1, :-2], rows[:-1, -2], rows[-1, -1] = patches, 1, 1
    return Patches(rows, np.append(places + 1, 0).astype(np.int32), n_class=1)


def resized(pixels: np.ndarray, size: tuple[int, int], by: str) -> np.ndarray:
    """Return pixels [height, width, 3] scaled to another height and width, by one of Pillow's filters."""
    try:
        from PIL import Image
    except ImportError:
        raise no_pillow() from None
    image = Image.fromarray(np.ascontiguousarray(pixels))
    return np.asarray(image.resize(size[::-1], Image.Resampling[by]))


def no_pillow() -> InvalidRequestError:
    """Return the error for a missing Pillow."""
    return InvalidRequestError(f"images need the package Pillow; install it with {install_command('vision')}")


def patches_of(config: VisionConfig, image: np.ndarray) -> np.ndarray:
    """Return the normalised patches of an image uint8 [height, width, 3], one row each, token by token."""
    levels = (np.arange(256, dtype=np.float64) * RESCALE).astype(np.float32)
    mean, std = np.array(config.mean, np.float32), np.array(config.std, np.float32)
    table = (levels[:, None] - mean) / std  # of a level and channel
    normalised = table[image, np.arange(3)]
    size = config.patch
    rows, columns = image.shape[0] // size, image.shape[1] // size
    channels = normalised.reshape(rows, size, columns, size, 3).transpose(0, 2, 4, 1, 3)
    grid = channels.reshape(rows, columns, -1).transpose(2, 0, 1)
    return np.ascontiguousarray(_in_tokens(grid, config.merge))


def rows_around(at: np.ndarray, grid: tuple[int, int], side: int) -> np.ndarray:
    """Return the four learned positions around each patch, and their shares by bilinear interpolation.

    at: int32 [n_patches, 2], the row and column of each patch in the grid. The corners of the grid are the
    corners of the square of learned positions. The result is float32 [n_patches, 8], as MixRows reads it.
    """
    places = at * (side - 1) / np.maximum(np.array(grid) - 1, 1)
    first = np.minimum(places.astype(np.int32), max(side - 2, 0))
    rest = (places - first).astype(np.float32)
    out = np.empty((len(at), 8), np.float32)
    for i, corner in enumerate(np.ndindex(2, 2)):
        row, column = np.minimum(first + corner, side - 1).T
        out[:, i] = row * side + column
        out[:, 4 + i] = np.where(corner, rest, 1 - rest).prod(axis=1)
    return out


def _in_tokens(grid: np.ndarray, merge: int) -> np.ndarray:
    """Return the cells of grid [width, rows, columns] token by token: [rows * columns, width]."""
    width, rows, columns = grid.shape
    cells = grid.reshape(width, rows // merge, merge, columns // merge, merge)
    return np.ascontiguousarray(cells.transpose(1, 3, 2, 4, 0).reshape(-1, width))


def _windows(rows: int, columns: int, config: VisionConfig) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the image tokens of a grid window by window, and their inverse order.

    The second result are the groups of their patches, int32 [n_patches, 2].
    """
    side = config.window // config.merge
    row, column = np.indices((rows, columns)).reshape(2, -1)
    window = row // side * -(-columns // side) + column // side
    order = np.argsort(window, kind="stable")
    counts = np.unique(window, return_counts=True)[1] * config.merge**2
    ends = np.cumsum(counts)
    bounds = np.stack([ends - counts, ends], axis=1).astype(np.int32)
    return order, np.repeat(bounds, counts, axis=0), np.argsort(order)
