"""Embedding lookup on the host: the matrix is large, and a step needs only a few of its rows."""

from __future__ import annotations

import math
from typing import assert_never

import numpy as np

from hotset import _core
from hotset.backends.base import Batch
from hotset.errors import InvalidRequestError
from hotset.formats.source import WeightSource
from hotset.model.operations import Embed
from hotset.offload.uploads import rows_at


def lookup(weights: WeightSource, op: Embed, batch: Batch) -> np.ndarray:
    """Return the embedding rows for the tokens of a batch, float32 [n_tokens, width].

    Native code decodes them, since this runs between two steps. Raises as `encoded_rows`.
    """
    rows = encoded_rows(weights, op, batch)
    info = weights.tensors[op.weight]
    return _core.dequantize(int(info.type), rows.reshape(-1), len(rows), info.shape[0])


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
