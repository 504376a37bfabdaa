"""The matrices of a model that become bundles (formats/bundle.py), and their records."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from hotset.errors import InvalidRequestError
from hotset.formats.bundle import Part, bundle_name, record_bytes
from hotset.formats.gguf import GGUFFile, GGUFWriter, TensorInfo
from hotset.formats.quants import GGMLType
from hotset.model.graph import Graph
from hotset.model.operations import ExpertLinear, ExpertSum, Ffn, Linear, TransposedLinear

_RECORDS = 2048  # records that are assembled at a time

Rows = Callable[[], np.ndarray]  # uint8 [n, bytes of a record]


@dataclass(frozen=True)
class Bundle:
    """The bundle of one layer. n: records. rows: functions that return the rows of each part."""

    parts: tuple[Part, ...]
    n: int
    rows: tuple[Rows, ...]

    def add_to(self, writer: GGUFWriter) -> None:
        """Add the tensor to a file; its data is built when it is written."""
        writer.add_tensor(
            bundle_name(self.parts[0].name), self._records, GGMLType.I8, (record_bytes(self.parts), self.n)
        )

    def _records(self) -> Iterator[np.ndarray]:
        rows = [rows() for rows in self.rows]
        for first in range(0, self.n, _RECORDS):
            records = np.zeros((min(_RECORDS, self.n - first), record_bytes(self.parts)), np.uint8)
            at = 0
            for part, matrix in zip(self.parts, rows, strict=True):
                records[:, at : at + part.nbytes] = matrix[first : first + _RECORDS]
                at += part.nbytes
            yield records


def bundles_of(
    gguf: GGUFFile, graph: Graph, moved: Callable[[TensorInfo], Callable[[], np.ndarray]]
) -> list[Bundle]:
    """Return the bundles of a model: of neurons that can be skipped, and of experts.

    moved: returns the bytes of a tensor as the new file has them. A down matrix with a row per output is not
    bundled. Raises InvalidRequestError if the model has neither such neurons nor experts.
    """
    found = []
    for op in graph.ops:
        if isinstance(op, Ffn) and op.route is not None:
            found.append(_of_experts(gguf, op, moved))
        elif isinstance(op, Ffn) and op.has_zeros and not op.shared:  # a layer has only one bundle
            found.append(_of_neurons(gguf, op, moved))
    bundles = [bundle for bundle in found if bundle is not None]
    if not bundles:
        raise InvalidRequestError(
            f"{gguf.path} has neither neurons that can be skipped nor experts; there is nothing to bundle"
        )
    return bundles


def _of_neurons(
    gguf: GGUFFile, ffn: Ffn, moved: Callable[[TensorInfo], Callable[[], np.ndarray]]
) -> Bundle | None:
    parts: list[Part] = []
    rows: list[Rows] = []
    for matrix in (ffn.gate, ffn.up, ffn.down):
        if not isinstance(matrix, Linear | TransposedLinear):
            continue
        info = gguf.tensors[matrix.weight]
        if info.shape[-1] == ffn.n_ff and len(info.shape) == 2 and matrix is not _by_output(ffn):
            parts.append(Part(info.name, info.type, info.shape[0]))
            rows.append(_rows(moved(info), ffn.n_ff))
    return Bundle(tuple(parts), ffn.n_ff, tuple(rows)) if len(parts) > 1 else None


def _by_output(ffn: Ffn) -> Linear | None:
    return ffn.down if isinstance(ffn.down, Linear) else None


def _of_experts(
    gguf: GGUFFile, ffn: Ffn, moved: Callable[[TensorInfo], Callable[[], np.ndarray]]
) -> Bundle | None:
    found = [op for op in (ffn.gate, ffn.up, ffn.down) if isinstance(op, ExpertLinear | ExpertSum)]
    if any(len(op.weights) != 1 for op in found):
        return None  # an old file, with a tensor for each expert
    names = list(dict.fromkeys(op.weights[0] for op in found))  # gate and up may be one tensor
    infos = [gguf.tensors[name] for name in names]
    n = infos[0].shape[-1]
    parts = tuple(Part(info.name, info.type, info.shape[0], info.shape[1]) for info in infos)
    return Bundle(parts, n, tuple(_rows(moved(info), n) for info in infos))


def _rows(data: Callable[[], np.ndarray], n: int) -> Rows:
    return lambda: np.ascontiguousarray(data()).view(np.uint8).reshape(n, -1)
