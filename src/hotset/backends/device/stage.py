"""The part of a stage that does not depend on its device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from hotset.backends.base import COUNTS
from hotset.backends.stage import BackendOptions, Rows, Span
from hotset.errors import InvalidRequestError
from hotset.model.graph import Graph
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


class WorkerCounts(Protocol):
    """The counts of a CPU worker after a step (backends/cpu/worker.py)."""

    @property
    def layers(self) -> Sequence[int]:
        """Return the worker's layers, ascending."""
        ...

    def counts(self) -> np.ndarray:
        """Return the counts of each of `layers`, as Stage.counts does."""
        ...

    def seconds(self) -> np.ndarray:
        """Return the seconds of each of `layers`."""
        ...


class DeviceStage:
    """The base of the stages on devices: a range of a graph, and the counts of its CPU worker."""

    worker: WorkerCounts | None = None

    def __init__(self, graph: Graph, options: BackendOptions, span: Span) -> None:
        self.graph, self.entering = span.of(graph)
        self.n_layer, self.n_blocks, self.max_batch = graph.n_layer, options.n_blocks, options.max_batch
        self.tapped: dict[str, np.ndarray] = {}  # taps of the latest step: name → [n_rows, width]
        self._is_served = False  # whether the CPU worker took part in the latest step

    def check_rows(self, x: Rows | None, n: int) -> None:
        """Raise InvalidRequestError unless x has the entering rows of a step of n tokens."""
        if (self.entering is None) != (x is None):
            raise InvalidRequestError("a stage that begins with tokens takes no residual; another needs it")
        if self.entering is not None and x is not None and tuple(x.shape) != (n, self.entering.width):
            raise InvalidRequestError(
                f"the input rows must be [{n}, {self.entering.width}], a row per token; these are "
                f"{list(x.shape)}"
            )

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
