"""Embeddings, looked up on the host: the matrix is large, and a step needs a few of its rows."""

from __future__ import annotations

import math

import numpy as np

from hotset.backends.base import Batch
from hotset.errors import InvalidRequestError
from hotset.formats.quants import dequantize
from hotset.formats.source import WeightSource
from hotset.model.operations import Embed
from hotset.offload.uploads import rows_at


def lookup(weights: WeightSource, op: Embed, batch: Batch) -> np.ndarray:
    """The rows that an Embed takes for the tokens of a batch, float32 [n_tokens, width].

    Raises InvalidRequestError for a position past the last that the model has learned.
    """
    info = weights.tensors[op.weight]
    width, n_rows = info.shape[0], math.prod(info.shape[1:])  # one row may be a vector
    rows = {"token": batch.tokens, "position": batch.positions + op.first_row}.get(op.of)
    if rows is None:
        rows = np.zeros_like(batch.tokens)
    if op.of == "position" and rows.max() >= n_rows:
        raise InvalidRequestError(
            f"position {batch.positions.max()} lies past {n_rows - op.first_row - 1}, "
            "the last that the model has learned"
        )
    encoded = rows_at(weights, op.weight, rows)
    return dequantize(np.ascontiguousarray(encoded).ravel(), info.type, (width, len(rows))).reshape(-1, width)
