"""Embedding lookup on the host: the matrix is large, and a step needs only a few of its rows."""

from __future__ import annotations

import math
from typing import assert_never

import numpy as np

from hotset import _core
from hotset.backends.base import Batch
from hotset.errors import InvalidRequestError
from hotset.formats.source import WeightSource
from hotset.model.operations import AddImage, Embed
from hotset.offload.uploads import rows_at


def lookup(weights: WeightSource, op: Embed, batch: Batch) -> np.ndarray:
    """Return the embedding rows for the tokens of a batch, float32 [n_tokens, width].

    Native code decodes them, since this runs between two steps. Raises as `encoded_rows`.
    """
    rows = encoded_rows(weights, op, batch)
    info = weights.tensors[op.weight]
    decoded = _core.dequantize(int(info.type), rows.reshape(-1), len(rows), info.shape[0])
    return with_images(op, decoded, batch)


def with_images(op: Embed, rows: np.ndarray, batch: Batch) -> np.ndarray:
    """Return embedding rows [n_tokens, width] in which rows of images replace their tokens' rows.

    Raises InvalidRequestError for rows of images that do not fit.
    """
    if batch.image_rows is None or not op.image_parts:
        return rows
    check_image_rows(batch, op.out.width * op.image_parts)
    out = rows.copy()
    out[batch.image_rows.places] = batch.image_rows.rows[:, : op.out.width]
    return out


def add_image(op: AddImage, x: np.ndarray, batch: Batch) -> np.ndarray:
    """Return x [n_tokens, width] plus a part of the rows of images. Raises as `with_images`."""
    if batch.image_rows is None:
        return x
    check_image_rows(batch, x.shape[1] * op.n_parts)
    out, first = x.copy(), op.index * x.shape[1]
    out[batch.image_rows.places] += batch.image_rows.rows[:, first : first + x.shape[1]]
    return out


def check_image_rows(batch: Batch, width: int) -> None:
    """Raise InvalidRequestError if the image rows of a batch break the contract of ImageRows."""
    assert batch.image_rows is not None
    places, rows = batch.image_rows.places, batch.image_rows.rows
    if rows.shape != (len(places), width) or rows.dtype != np.float32:
        raise InvalidRequestError(
            f"the rows of images must be float32 [{len(places)}, {width}], not {rows.dtype} "
            f"{list(rows.shape)}"
        )
    if len(places) and (places[0] < 0 or places[-1] >= len(batch.tokens) or (np.diff(places) <= 0).any()):
        raise InvalidRequestError("the places of image rows must rise and be tokens of the batch")


def encoded_rows(weights: WeightSource, op: Embed, batch: Batch) -> np.ndarray:
    """Return the embedding rows as stored in the file, uint8 [n_tokens, bytes of a row].

    Raises InvalidRequestError for a position after the last one that the model has learned.
    """
    match op.of:
        case "token":
            rows = batch.tokens
        case "position":
            rows = batch.positions + op.first_row
            n_rows = math.prod(weights.tensors[op.weight].shape[1:])
            if rows.max() >= n_rows:
                raise InvalidRequestError(
                    f"position {batch.positions.max()} lies past {n_rows - op.first_row - 1}, "
                    "the last that the model has learned"
                )
        case "type":  # only row 0; the tensor may be a vector
            rows = np.zeros_like(batch.tokens)
        case _:
            assert_never(op.of)
    return np.ascontiguousarray(rows_at(weights, op.weight, rows))
