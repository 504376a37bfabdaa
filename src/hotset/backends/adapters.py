"""The adapters (LoRA) of a backend, and which of them the sequences of a batch have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from hotset.backends.base import NO_ADAPTERS, AdapterScales, Batch
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
MOST_ADAPTERS = 100  # of a model at once
_LARGEST = float(np.finfo(np.float32).max)


class AdapterSet:
    """The adapters that a backend has in memory; immutable, but for the default of batches that name none.

    graph: of the model, without adapters. They are in the order of their digests, in which they are added: so
    a result depends on what they are, and not on when they came.
    """

    def __init__(
        self,
        graph: Graph,
        tensors: Mapping[str, TensorInfo],
        adapters: Sequence[LoraAdapter] = (),
        default: AdapterScales = NO_ADAPTERS,
    ) -> None:
        """Raises InvalidRequestError for too many adapters, and for a default that names others."""
        if len(adapters) > MOST_ADAPTERS:
            raise InvalidRequestError(f"a model takes {MOST_ADAPTERS} adapters at once; unload some first")
        self._plain, self._tensors = graph, tensors
        self.adapters = tuple(sorted(adapters, key=lambda adapter: adapter.digest))
        self._columns = {adapter.digest: i for i, adapter in enumerate(self.adapters)}
        self.default = default
        self._row(default)

    @cached_property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Those that adapters can change: name → outputs, inputs."""
        return adaptable(self._plain, self._tensors)

    @cached_property
    def graph(self) -> Graph:
        """The model's with what the adapters add."""
        return adapted(self._plain, {name for adapter in self.adapters for name in adapter.pairs})

    def has(self, scales: AdapterScales) -> bool:
        """Whether all of these adapters are here."""
        return all(digest in self._columns for digest, _ in scales)

    def pairs_of(self, op: LowRank) -> list[tuple[int, LowRankPair]]:
        """What adapters add at an operation: their columns of `scales`, in order."""
        pairs = ((i, adapter.pairs.get(op.matrix)) for i, adapter in enumerate(self.adapters))
        return [(i, pair) for i, pair in pairs if pair is not None]

    def scales(self, batch: Batch) -> np.ndarray | None:
        """How much each sequence of a batch has of each adapter, float32 [rows of page_tables, n_adapters];
        None where no token has any. Raises InvalidRequestError for an adapter that is not here."""
        of_sequences = batch.adapter_scales
        if not self.adapters and of_sequences is None:
            return None
        if of_sequences is None:
            row = self._row(self.default)
            return np.tile(row, (len(batch.page_tables), 1)) if row.any() else None
        if len(of_sequences) != len(batch.page_tables):
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
    """A backend that computes what adapters add."""

    graph: Graph
    weights: WeightSource
    adapters: AdapterSet


def taking_adapters(backend: Backend) -> TakesAdapters:
    """The same backend. Raises UnsupportedModelError for one that takes no adapters."""
    if not isinstance(backend, TakesAdapters):
        raise UnsupportedModelError(
            "adapters (LoRA) need a model that this machine's CPU, or a Vulkan device, computes alone, and "
            f"this one is computed by {backend.name!r}; leave them out, or use device='cpu' and "
            "no `stages`"
        )
    return backend
