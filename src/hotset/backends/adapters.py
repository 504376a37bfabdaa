"""The adapters (LoRA) of a backend, and their scales for the sequences of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from hotset.backends.base import NO_ADAPTERS, AdapterScales, Batch
from hotset.backends.registry import all_capabilities
from hotset.errors import InvalidRequestError, UnsupportedModelError
from hotset.formats.lora import LoraAdapter, LowRankPair
from hotset.model.graph import Graph
from hotset.model.low_rank import adaptable, adapted
from hotset.model.operations import LowRank

if TYPE_CHECKING:
    from hotset.backends.base import Backend
    from hotset.formats.gguf import TensorInfo
    from hotset.formats.source import WeightSource

ADAPTER_GONE = "an adapter of the request is not loaded any more; name another"
MOST_ADAPTERS = 100  # loaded adapters per model
_LARGEST = float(np.finfo(np.float32).max)


class AdapterSet:
    """The adapters that a backend has in memory. Only `default`, for batches that name none, may change.

    graph: the graph of the model, without adapters. Adapters are sorted and added by digest, so the order of
    loading does not change a result.
    """

    def __init__(
        self,
        graph: Graph,
        tensors: Mapping[str, TensorInfo],
        adapters: Sequence[LoraAdapter] = (),
        default: AdapterScales = NO_ADAPTERS,
    ) -> None:
        """Raise InvalidRequestError for too many adapters, or for a default that names an unknown one."""
        if len(adapters) > MOST_ADAPTERS:
            raise InvalidRequestError(f"a model takes {MOST_ADAPTERS} adapters at once; unload some first")
        self._plain, self._tensors = graph, tensors
        self.adapters = tuple(sorted(adapters, key=lambda adapter: adapter.digest))
        self._columns = {adapter.digest: i for i, adapter in enumerate(self.adapters)}
        self.default = default
        self._row(default)

    @cached_property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Return the matrices that adapters can change: name → outputs, inputs."""
        return adaptable(self._plain, self._tensors)

    @cached_property
    def graph(self) -> Graph:
        """Return the model's graph with the operations of the adapters."""
        return adapted(self._plain, {name for adapter in self.adapters for name in adapter.pairs})

    def has(self, scales: AdapterScales) -> bool:
        """Return whether all of these adapters are loaded."""
        return all(digest in self._columns for digest, _ in scales)

    def pairs_of(self, op: LowRank) -> list[tuple[int, LowRankPair]]:
        """Return each adapter's column of `scales` and its pair of matrices at `op`, in order."""
        pairs = ((i, adapter.pairs.get(op.matrix)) for i, adapter in enumerate(self.adapters))
        return [(i, pair) for i, pair in pairs if pair is not None]

    def scales(self, batch: Batch) -> np.ndarray | None:
        """Return the scale of each adapter for each sequence, float32 [rows of block_tables, n_adapters].

        Return None if no token uses an adapter. Raises InvalidRequestError for an adapter that is not loaded.
        """
        of_sequences = batch.adapter_scales
        if not self.adapters and of_sequences is None:
            return None
        if of_sequences is None:
            row = self._row(self.default)
            return np.tile(row, (len(batch.block_tables), 1)) if row.any() else None
        if len(of_sequences) != len(batch.block_tables):
            raise InvalidRequestError("a batch has adapter_scales for each sequence")
        scales = np.zeros((len(of_sequences), len(self.adapters)), np.float32)
        for sequence in set(batch.sequences.tolist()):
            scales[sequence] = self._row(of_sequences[sequence])
        return scales if scales.any() else None

    def _row(self, scales: AdapterScales) -> np.ndarray:
        row = np.zeros(len(self.adapters), np.float32)
        for digest, scale in scales:
            column = self._columns.get(digest)
            if column is None:
                raise InvalidRequestError(ADAPTER_GONE)
            if not abs(scale) <= _LARGEST:
                raise InvalidRequestError(f"the scale of an adapter is a finite number, not {scale}")
            row[column] = scale
        return row


@runtime_checkable
class TakesAdapters(Protocol):
    """A backend that supports adapters."""

    graph: Graph
    weights: WeightSource
    adapters: AdapterSet


def taking_adapters(backend: Backend) -> TakesAdapters:
    """Return the same backend. Raises UnsupportedModelError if it does not support adapters."""
    if not isinstance(backend, TakesAdapters):
        titles = (one.title for one in all_capabilities() if one.adapters)
        places = " or on ".join(["this machine's CPU", *titles])
        raise UnsupportedModelError(
            f"adapters (LoRA) need the whole model on {places}, not on {backend.name!r}; leave them out, or "
            "use device='cpu' and no `stages`"
        )
    return backend
