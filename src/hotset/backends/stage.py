"""What a chain of stages is made of: some layers of a model each, and the residual stream between them.

A stage executes a range of the graph's operations where it is: on the CPU (cpu.CpuBackend), on a device
(gpu/stage.GpuStage). It takes the rows that its first layer reads and returns those that its last one makes,
so layers may stand in any order of places. backends/pipeline.py runs stages one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np

from hotset.backends.base import Batch
from hotset.model.graph import Graph
from hotset.model.operations import Value
from hotset.offload.cache_stats import CacheStats

if TYPE_CHECKING:
    import torch

Rows: TypeAlias = "np.ndarray | torch.Tensor"
"""float32 [n_rows, width], on the host or on a device."""

# What a stage on a device holds at a time (gpu/stage.py); placement/budget.py reserves as much.
STREAM_FROM = 64  # tokens of a step from which on cold rows come to a device, which computes whole layers
STREAM_BYTES = 64 << 20  # of cold rows that come at a time
OUTPUT_ROWS = 64  # of logits that a device holds at a time
SLICE_VALUES = 1 << 22  # decoded or copied at a time: bounds what a temporary takes, there and on the host


class Stage(Protocol):
    """A range of a model's operations, where they are computed.

    graph: its operations. entering: the value that they read and do not make, the residual stream; None where
    they begin with the tokens. has_output: whether they end in logits, rather than in the residual stream.
    n_layer: of the whole model. n_states: slots for recurrent states, 0 where the model has none. notes: what
    a person should know of how it runs, a sentence each.
    """

    graph: Graph
    entering: Value | None
    has_output: bool
    n_layer: int
    n_states: int

    @property
    def notes(self) -> Sequence[str]: ...

    @property
    def name(self) -> str:
        """Where it is, for a person."""
        ...

    @property
    def has_neurons(self) -> bool:
        """Whether its FFNs have zeros to count."""
        ...

    @property
    def nbytes(self) -> Mapping[str, int]:
        """Of a device's memory that the stage holds, by kind; empty where it has no such memory."""
        ...

    @property
    def tapped(self) -> Mapping[str, np.ndarray]:
        """Values of the latest step that its batch asked for, by name."""
        ...

    @property
    def largest(self) -> np.ndarray | None:
        """Of the logits of the latest step, as StepResult.largest."""
        ...

    @property
    def candidates(self) -> np.ndarray | None:
        """Of the logits of the latest step, as StepResult.candidates."""
        ...

    def run(self, batch: Batch, x: Rows | None = None) -> Rows:
        """One step of a batch that was checked (base.cache_slots); all its taps are values of this stage.

        x: what enters, [n_tokens, width], from any place; None where the stage begins with the tokens.
        Returns the residual stream, [n_tokens, width], or logits, as StepResult, where the stage has them;
        valid until the next step. Raises InvalidRequestError for rows that it does not take, and
        StepCancelledError, as Backend.step.
        """
        ...

    def counts(self) -> np.ndarray:
        """Of the latest step, int64 [n_layer, len(base.COUNTS)]."""
        ...

    def active_on_cpu(self) -> np.ndarray:
        """Of the latest step, int64 [n_layer]: of the active neurons those that the CPU computed."""
        ...

    def seconds(self) -> np.ndarray:
        """Of the latest step, float64 [n_layer, len(graph.PARTS)]: as far as they are measured."""
        ...

    def cpu_worker_seconds(self) -> np.ndarray:
        """Of the latest step, float64 [n_layer]: how long the CPU took for the cold neurons of a device's
        layers. They pass at the same time as those of `seconds`."""
        ...

    def expert_counts(self) -> CacheStats:
        """What became of experts for whose layers a device asks the CPU."""
        ...

    def cancel(self) -> None:
        """Ends the step in flight, from any thread; it raises StepCancelledError."""
        ...

    def close(self) -> None:
        """Frees threads and memory; safe to call twice."""
        ...


def on_host(rows: Rows) -> np.ndarray:
    """The same rows as an array; waits for the device that has them."""
    return rows if isinstance(rows, np.ndarray) else rows.numpy(force=True)
