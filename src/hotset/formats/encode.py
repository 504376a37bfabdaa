"""Encodes matrices natively, on all cores, for writing files. The readable reference is `quants.quantize`.

Round-to-nearest types yield the same bytes as the reference, and so as GGML's. K and IQ types, which the
reference lacks, are fitted: among some trial scales per group, the best by weighted least squares is used
(csrc/kernels/encode_kernels.h, codebook_encoders.h). An importance matrix provides the weights; Q4_0, Q4_1,
Q5_0 and Q5_1 are then fitted, too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hotset import _core
from hotset.cores import usable_cores
from hotset.errors import InvalidRequestError
from hotset.formats.quants import GGMLType, row_bytes

_T = GGMLType
WRITABLE: tuple[GGMLType, ...] = (
    _T.F32, _T.F16, _T.BF16, _T.Q8_0, _T.Q6_K, _T.Q5_K, _T.Q5_1, _T.Q5_0, _T.Q4_K, _T.Q4_1, _T.Q4_0,
    _T.IQ4_NL, _T.IQ4_XS, _T.MXFP4, _T.Q3_K, _T.IQ3_S, _T.IQ3_XXS, _T.Q2_K, _T.IQ2_S, _T.IQ2_XS, _T.TQ2_0,
    _T.IQ2_XXS, _T.IQ1_M, _T.TQ1_0, _T.IQ1_S,
)  # fmt: skip
"""The types that can be written, most bits first."""
FITTED = frozenset(type for type in WRITABLE if type.name.startswith(("Q2", "Q3", "Q4", "Q5", "Q6", "IQ")))
"""The types whose encoding an importance matrix changes."""


def encode(values: np.ndarray, type: GGMLType, n_threads: int | None = None) -> np.ndarray:
    """Encode rows of floats [..., ne0] as uint8 [..., row_bytes(type, ne0)].

    n_threads: default, the usable cores. Raises InvalidRequestError for a type that cannot be written, and
    for NaN, infinity or a value too large for the type's float16 (F32 and BF16 keep any value, MXFP4 any
    finite one). Raises FormatError if ne0 is not a multiple of the block size.
    """
    data = np.ascontiguousarray(values, np.float32)
    encoded = recode(data.reshape(-1).view(np.uint8), _T.F32, data.shape[-1], type, n_threads)
    return encoded.reshape(*data.shape[:-1], encoded.shape[-1])


@dataclass(frozen=True)
class Importance:
    """The weights of errors by column.

    weights: float32 [n_matrices, ne0]. Each matrix has rows_per_matrix rows. The data begin at row first_row.
    """

    weights: np.ndarray
    rows_per_matrix: int
    first_row: int = 0


def recode(
    data: np.ndarray,
    source: GGMLType,
    ne0: int,
    type: GGMLType,
    n_threads: int | None = None,
    importance: Importance | None = None,
) -> np.ndarray:
    """Convert rows of ne0 values from one type, uint8, to another, uint8 [rows, row_bytes(type, ne0)].

    source: any type that the kernels decode. importance: of the columns, for fitted types. Raises the errors
    of `encode`.
    """
    if type not in WRITABLE:
        names = ", ".join(t.name for t in WRITABLE)
        raise InvalidRequestError(f"values cannot be quantised to {type.name}; choose one of {names}")
    n_rows, rest = divmod(data.size, row_bytes(source, ne0))
    assert not rest, "data must be whole rows"
    out = np.empty((n_rows, row_bytes(type, ne0)), np.uint8)
    if n_rows:
        threads = n_threads or usable_cores()
        bad = _core.quantize(
            int(source),
            np.ascontiguousarray(data).reshape(-1),
            n_rows,
            ne0,
            int(type),
            out.reshape(-1),
            threads,
            *(() if importance is None else _weights(importance)),
        )
        if bad >= 0:
            raise InvalidRequestError(
                f"values that are NaN, infinite or too large for float16 cannot be stored as {type.name}; "
                "check the model, or store this tensor as F32 or BF16"
            )
    return out


def _weights(importance: Importance) -> tuple[np.ndarray, int, int]:
    mean = float(importance.weights.mean(dtype=np.float64))  # scale the mean to 1 to avoid overflow
    weights = np.ascontiguousarray(importance.weights / (mean or 1.0), np.float32)
    return weights, importance.rows_per_matrix, importance.first_row
