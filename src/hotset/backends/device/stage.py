"""The part of a stage that does not depend on its device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from hotset.backends.base import COUNTS, Batch
from hotset.backends.embedding import lookup
from hotset.backends.stage import BackendOptions, Rows, Span
from hotset.errors import InvalidRequestError
from hotset.formats.source import WeightSource
from hotset.model.graph import Graph
from hotset.model.operations import Embed, Value
from hotset.offload.cache_stats import CacheStats
from hotset.offload.expert_cache import ExpertCache
from hotset.offload.misses import Fetching


@dataclass(frozen=True)
class CpuShare:
    """The work that a device leaves to the CPU in its layers.

    hot: layer → bool [n_ff], the neurons on the device; the CPU computes the others. Layers without an entry
    are completely on the device. experts: the layers whose experts the CPU computes, except `expert_slots`
    experts that the device holds. fetching: how the device fetches missing experts of a step if that is
    faster than the CPU; None: never.
    """

    hot: Mapping[int, np.ndarray] = field(default_factory=dict)
    experts: Sequence[int] = ()
    expert_slots: int = 0
    fetching: Fetching | None = None

    def __bool__(self) -> bool:
        """Return whether the CPU computes anything."""
        return bool(self.hot or self.experts)


NOTHING_SHARED = CpuShare()


class DeviceWorker(Protocol):
    """The methods of a CPU worker (backends/cpu/worker.py) that do not depend on the device."""

    @property
    def layers(self) -> Sequence[int]:
        """Return the worker's layers, ascending."""
        ...

    def counts(self) -> np.ndarray:
        """Return the first 5 of base.COUNTS of each layer in the latest step, int64 [len(layers), 5]."""
        ...

    def seconds(self) -> np.ndarray:
        """Return the seconds of each of `layers` in the latest step, float64 [len(layers)]."""
        ...

    def cancel(self, reason: str) -> None:
        """Abort the running step, from any thread."""
        ...

    def close(self) -> None:
        """Close the worker. It is safe to call this twice."""
        ...


class DeviceStage:
    """The base of the stages on devices: a range of a graph, its CPU worker and its expert cache."""

    worker: DeviceWorker | None = None
    experts: ExpertCache | None = None

    def __init__(self, weights: WeightSource, graph: Graph, options: BackendOptions, span: Span) -> None:
        self.weights = weights
        self.graph, self.entering = span.of(graph)
        self.has_output = span.ends(graph)
        self.n_layer, self.n_blocks, self.max_batch = graph.n_layer, options.n_blocks, options.max_batch
        self.tapped: dict[str, np.ndarray] = {}  # taps of the latest step: name → [n_rows, width]
        self._is_served = False  # whether the CPU worker took part in the latest step
        self._embeds = [op for op in self.graph.ops if isinstance(op, Embed)]

    def entering_rows(self, batch: Batch, x: Rows | None) -> dict[Value, Rows]:
        """Return the rows that enter a step: of the tokens' embeddings, and x, of the stage before.

        Raises InvalidRequestError unless x has the entering rows of the batch.
        """
        n = len(batch.tokens)
        rows: dict[Value, Rows] = {op.out: lookup(self.weights, op, batch) for op in self._embeds}
        if (self.entering is None) != (x is None):
            raise InvalidRequestError("a stage that begins with tokens takes no residual; another needs it")
        if self.entering is not None and x is not None:
            if tuple(x.shape) != (n, self.entering.width):
                raise InvalidRequestError(
                    f"the input rows must be [{n}, {self.entering.width}], a row per token; these are "
                    f"{list(x.shape)}"
                )
            rows[self.entering] = x
        return rows

    def active_on_cpu(self) -> np.ndarray:
        """Return the active neurons of the CPU worker in the latest step, int64 [n_layer]."""
        active = np.zeros(self.n_layer, np.int64)
        if self.worker is not None and self._is_served:
            active[list(self.worker.layers)] = self.worker.counts()[:, COUNTS.index("active")]
        return active

    def cpu_worker_seconds(self) -> np.ndarray:
        """Return the seconds of the CPU worker for each layer of the latest step, float64 [n_layer]."""
        seconds = np.zeros(self.n_layer)
        if self.worker is not None and self._is_served:
            seconds[list(self.worker.layers)] = self.worker.seconds()
        return seconds

    def expert_counts(self) -> CacheStats:
        """Return the statistics of the expert cache since the start of the stage."""
        return CacheStats() if self.experts is None else self.experts.stats

    def cancel(self) -> None:
        """Abort the step of the CPU worker, from any thread."""
        if self.worker is not None:
            self.worker.cancel("it was cancelled")

    def close(self) -> None:
        """Close the CPU worker and the expert cache. It is safe to call this twice."""
        if self.worker is not None:
            self.worker.close()
        if self.experts is not None:
            self.experts.close()
