"""Builds the predictor `svd` from the weights of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hotset.errors import UnsupportedModelError
from hotset.formats.encode import encode
from hotset.formats.quants import GGMLType, dequantize, fitting
from hotset.model.decoder import describe
from hotset.sparsity.calibration import Calibration, Sample, samples, threshold, values_of

if TYPE_CHECKING:
    from hotset.formats.gguf import GGUFFile, GGUFWriter
    from hotset.formats.source import WeightSource
    from hotset.model.config import ModelConfig
    from hotset.reporter import Reporter
    from hotset.sparsity.predictor_spec import PredictorSpec

THRESHOLDS_KEY = "hotset.predictor.thresholds"
_BLOCK_VALUES = 1 << 23  # values of a matrix that are decoded at a time
_OVERSAMPLING = 16  # extra rank of the randomised decomposition (arXiv 0909.4061)


@dataclass(frozen=True)
class _PredictorLayer:
    """One layer's predictor: tensors by name, and a function: inputs [n, n_embd] → scores [n, n_rows]."""

    tensors: Mapping[str, tuple[np.ndarray, GGMLType, tuple[int, ...]]]
    score: Callable[[np.ndarray], np.ndarray]


def build(
    writer: GGUFWriter,
    gguf: GGUFFile,
    config: ModelConfig,
    spec: PredictorSpec,
    weights: WeightSource,
    first: tuple[int, ...],
    calibration: Calibration,
    progress: Reporter,
) -> None:
    """Add the predictor's tensors and thresholds. first: leading neurons per layer without prediction.

    The whole predictor is in memory at once, because the thresholds precede the tensors in the file.
    """
    graph = describe(config, weights.tensors)
    thresholds = []
    label = f"predictor {spec}"
    for i, sample in enumerate(samples(gguf, config, weights, calibration, progress)):
        progress.advance(label, i, config.n_layer, "layers")
        op = graph.ffns[i].decides
        matrix = _DecodedRows(weights, op.weight, op.first_row + first[i], op.out.width - first[i])
        bias = (
            None if op.bias is None else values_of(weights, op.bias)[op.first_row :][first[i] : op.out.width]
        )
        try:
            layer = _svd(f"blk.{i}", matrix, bias, sample, spec, np.random.default_rng(i))
        except np.linalg.LinAlgError:
            raise UnsupportedModelError(
                f"the predictor svd cannot be built: {op.weight} or its inputs contain values that are not "
                "finite"
            ) from None
        scores, neurons = layer.score(sample.inputs), sample.neurons[:, first[i] :]
        thresholds.append(threshold(scores, neurons, calibration.recall))
        for name, (data, type_, shape) in layer.tensors.items():
            writer.add_tensor(name, data, type_, shape)
    progress.advance(label, config.n_layer, config.n_layer, "layers")
    writer.add(THRESHOLDS_KEY, np.array(thresholds, np.float32))


class _DecodedRows:
    """Some rows of a matrix, decoded block by block: a large matrix would take gigabytes."""

    def __init__(self, weights: WeightSource, name: str, first: int, n: int) -> None:
        info = weights.tensors[name]
        self.n, self.n_embd, self._type = n, info.shape[0], info.type
        self._data = weights.data(name).reshape(info.shape[1], -1)[first : first + n]

    def blocks(self) -> Iterator[tuple[slice, np.ndarray]]:
        step = max(1, _BLOCK_VALUES // self.n_embd)
        for first in range(0, self.n, step):
            rows = slice(first, min(first + step, self.n))
            data = np.ascontiguousarray(self._data[rows]).reshape(-1)
            yield rows, dequantize(data, self._type, (self.n_embd, rows.stop - rows.start))


def _svd(
    blk: str,
    matrix: _DecodedRows,
    bias: np.ndarray | None,
    sample: Sample,
    spec: PredictorSpec,
    rng: np.random.Generator,
) -> _PredictorLayer:
    assert spec.rank is not None
    assert spec.type is not None
    rank = min(spec.rank, matrix.n, matrix.n_embd)
    # The error of the product counts, so channels are weighted by the magnitude of their inputs.
    weight = np.sqrt(np.square(sample.inputs, dtype=np.float64).mean(axis=0)).astype(np.float32)
    weight = np.maximum(weight, 1e-3 * max(float(weight.max()), 1e-20))
    a, b = decompose(matrix, weight, rank, rng)
    a_type = fitting(spec.type, matrix.n_embd)
    b_type = fitting(spec.type, rank)
    stored_a, stored_b = encode(a, a_type), encode(b, b_type)
    tensors: dict[str, Any] = {
        f"{blk}.svd_a.weight": (stored_a, a_type, (matrix.n_embd, rank)),
        f"{blk}.svd_b.weight": (stored_b, b_type, (rank, matrix.n)),
    }
    if bias is not None:
        tensors[f"{blk}.always.bias"] = (bias, GGMLType.F32, bias.shape)
    a = dequantize(stored_a, a_type, (matrix.n_embd, rank))
    b = dequantize(stored_b, b_type, (rank, matrix.n))

    def score(inputs: np.ndarray) -> np.ndarray:
        scores: np.ndarray = inputs @ a.T @ b.T
        return scores if bias is None else np.add(scores, bias)

    return _PredictorLayer(tensors, score)


def decompose(
    matrix: _DecodedRows, weight: np.ndarray, rank: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return a [rank, n_embd] and b [n, rank] such that b @ a approximates `matrix`.

    It is the best approximation of that rank for inputs whose channels have the root mean squares `weight`,
    computed by a randomised method (Halko, Martinsson, Tropp, arXiv 0909.4061): one subspace iteration finds
    the relevant input space, and the rest is exact within it. Columns of b have length one. The singular
    values are in a, where each quantised block has only one of them.
    """
    width = min(rank + _OVERSAMPLING, matrix.n, matrix.n_embd)
    scaled = np.empty((matrix.n, matrix.n_embd), np.float32)
    for rows, values in matrix.blocks():
        np.multiply(values, weight, out=scaled[rows])
    directions = rng.standard_normal((matrix.n_embd, width)).astype(np.float32)
    # Orthogonalise in between: with outliers, squaring in float32 would lose the other directions.
    directions = _thin_svd(scaled.T @ _thin_svd(scaled @ directions)[0])[0]
    left, values, right = _thin_svd(scaled @ directions)
    n = min(rank, len(values))  # lower if the matrix itself has a lower rank
    a, b = np.zeros((rank, matrix.n_embd), np.float32), np.zeros((matrix.n, rank), np.float32)
    a[:n] = (directions @ (right * values)[:, :n]).T / weight
    b[:, :n] = left[:, :n]
    return a, b


def _thin_svd(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return u [n, m], s [m] descending and v [k, m] of a tall x [n, k] = u * s @ v.T; m is x's rank.

    It decomposes x.T @ x, in a tenth of LAPACK's time; singular values below 1e-6 of the largest are lost.
    """
    exact = x.astype(np.float64)
    values, vectors = np.linalg.eigh(exact.T @ exact)
    kept = np.flatnonzero(values > 1e-12 * values[-1])[::-1]
    s, v = np.sqrt(values[kept]).astype(np.float32), vectors[:, kept].astype(np.float32)
    return x @ (v / s), s, v
