"""Bundles: the data of a neuron or expert from several matrices, stored together so that one read suffices.

A tensor `blk.N.ffn_bundle.weight` (I8 [record, n]) has a record for each neuron, or expert, of a layer: its
rows of the gate, of up and of down, one after the other. Records begin at pages of 4 KB; several smaller ones
share a page. Keys describe the contents of records in order, layer after layer:

    hotset.bundle.version  1
    hotset.bundle.names    names of the original matrices
    hotset.bundle.types    their types
    hotset.bundle.columns  values of a row
    hotset.bundle.rows     rows of an expert; 0 for neurons

In such a file the matrices are found under their names (`TensorInfo.stride`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hotset.errors import FormatError
from hotset.formats.quants import TYPES, GGMLType, row_bytes
from hotset.parameters import shown

PAGE = 4096
VERSION_KEY = "hotset.bundle.version"
NAMES_KEY, TYPES_KEY = "hotset.bundle.names", "hotset.bundle.types"
COLUMNS_KEY, ROWS_KEY = "hotset.bundle.columns", "hotset.bundle.rows"
KEYS = (VERSION_KEY, NAMES_KEY, TYPES_KEY, COLUMNS_KEY, ROWS_KEY)
_VERSION = 1
_MOST = 2**31  # columns and rows


@dataclass(frozen=True)
class Part:
    """A matrix of a bundle. rows: of an expert; 0 if a record has one row."""

    name: str
    type: GGMLType
    columns: int
    rows: int = 0

    @property
    def nbytes(self) -> int:
        """Return the bytes in each record."""
        return row_bytes(self.type, self.columns) * max(self.rows, 1)


def bundle_name(part: str) -> str:
    """Return the bundle that holds a matrix: "blk.3.ffn_up.weight" → "blk.3.ffn_bundle.weight"."""
    return f"{'.'.join(part.split('.')[:2])}.ffn_bundle.weight"


def record_bytes(parts: Sequence[Part]) -> int:
    """Return the distance of records: whole pages, or a power of two, so that no small one crosses a page."""
    n = sum(part.nbytes for part in parts)
    return -(-n // PAGE) * PAGE if n > PAGE else 1 << (n - 1).bit_length()


def keys_of(bundles: Sequence[Sequence[Part]]) -> dict[str, Any]:
    """Return the keys of a file with these bundles."""
    parts = [part for bundle in bundles for part in bundle]
    return {
        VERSION_KEY: _VERSION,
        NAMES_KEY: [part.name for part in parts],
        TYPES_KEY: [int(part.type) for part in parts],
        COLUMNS_KEY: [part.columns for part in parts],
        ROWS_KEY: [part.rows for part in parts],
    }


def opened(path: Path, tensors: Mapping[str, Any], metadata: Mapping[str, object]) -> dict[str, Any]:
    """Return the tensors (gguf.TensorInfo), with bundles replaced by the matrices in them.

    Raises FormatError if keys and tensors contradict each other.
    """
    found = dict(tensors)
    if VERSION_KEY not in metadata:
        return found
    version = metadata[VERSION_KEY]
    if type(version) is not int or version != _VERSION:  # check the type first: an array cannot be compared
        raise FormatError(f"{path} has bundles of version {shown(version)}; update hotset")
    for name, parts in _by_bundle(path, metadata).items():
        info = found.pop(name, None)
        if info is None or info.type != GGMLType.I8 or len(info.shape) != 2:
            raise FormatError(f"{path} describes {name} but lacks it; write the bundle again")
        record, n = info.shape
        if sum(part.nbytes for part in parts) > record:
            raise FormatError(f"{path}: {name} is smaller than its described contents; write it again")
        at = info.offset
        for part in parts:
            if part.name in found:
                raise FormatError(f"{path}: tensor {part.name!r} occurs twice; write the bundle again")
            shape = (part.columns, part.rows, n) if part.rows else (part.columns, n)
            found[part.name] = dataclasses.replace(
                info, name=part.name, shape=shape, type=part.type, nbytes=part.nbytes * n, offset=at,
                stride=record,
            )  # fmt: skip
            at += part.nbytes
    return found


def _by_bundle(path: Path, metadata: Mapping[str, object]) -> dict[str, list[Part]]:
    columns = [metadata.get(key) for key in (NAMES_KEY, TYPES_KEY, COLUMNS_KEY, ROWS_KEY)]
    lists = [list(value) if isinstance(value, list | np.ndarray) else [] for value in columns]
    if not lists[0] or len({len(one) for one in lists}) != 1:
        raise FormatError(f"{path} does not describe its bundles; write them again")
    bundles: dict[str, list[Part]] = {}
    for name, type, n_columns, n_rows in zip(*lists, strict=True):
        is_text = isinstance(name, str) and name.startswith("blk.")
        numbers = [value for value in (type, n_columns, n_rows) if isinstance(value, int | np.integer)]
        if not is_text or len(numbers) != 3 or not (0 < n_columns < _MOST and 0 <= n_rows < _MOST):
            raise FormatError(f"{path} describes a bundle incorrectly: {shown(name)}; write it again")
        if type not in TYPES:  # look up a plain number, because GGMLType rejects numbers out of range
            raise FormatError(f"{path}: {name} in a bundle has the unknown type {type}; update hotset")
        if n_columns % TYPES[type].block_size:
            raise FormatError(f"{path}: {name} in a bundle has rows that are not whole blocks of its type")
        bundles.setdefault(bundle_name(name), []).append(
            Part(name, GGMLType(int(type)), int(n_columns), int(n_rows))
        )
    return bundles
