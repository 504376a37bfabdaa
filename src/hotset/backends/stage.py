"""The interface of a stage in a chain: some layers of a model, with the residual stream between stages.

A stage executes a range of the graph's operations on the CPU (cpu.CpuBackend), or on a device (the stage of a
device backend). It takes the input rows of its first layer and returns the output rows of its last one, so
consecutive stages may run anywhere. backends/pipeline.py runs stages one after the other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

import numpy as np

from hotset.backends.base import Backend, Batch, CacheMemory
from hotset.formats.source import WeightSource
from hotset.load_parameters import KVType
from hotset.model.graph import Graph
from hotset.model.operations import Value
from hotset.offload.cache_stats import CacheStats
from hotset.reporter import Reporter

if TYPE_CHECKING:
    import torch

Rows: TypeAlias = "np.ndarray | torch.Tensor"
"""float32 [n_rows, width], on the host or on a device."""

# Bytes and rows that a stage on a device holds at a time; placement/budget.py reserves the same.
STREAM_FROM = 64  # from this many tokens on, cold rows are copied to a device, which computes whole layers
STREAM_BYTES = 64 << 20  # of cold rows copied at a time
OUTPUT_ROWS = 64  # rows of logits that a device holds at a time
SLICE_VALUES = 1 << 22  # decoded or copied at a time, to bound temporaries on the device and the host


class Stage(Protocol):
    """A range of a model's operations on one processor.

    graph: its operations. entering: their input value, the residual stream; None if they begin with the
    tokens. has_output: they end in logits, not in the residual stream. n_layer: layers of the whole model.
    n_states: slots for recurrent states; 0 if the model has none. notes: sentences about the stage, for
    display.
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
        """Return the name of its processor or device, for display."""
        ...

    @property
    def has_neurons(self) -> bool:
        """Return whether its FFNs have zeros to count."""
        ...

    @property
    def nbytes(self) -> Mapping[str, int]:
        """Return the bytes of device memory that the stage holds, by kind; empty without device memory."""
        ...

    @property
    def tapped(self) -> Mapping[str, np.ndarray]:
        """Return the tapped values of the latest step, by name."""
        ...

    @property
    def largest(self) -> np.ndarray | None:
        """Return the largest logits of the latest step, as StepResult.largest."""
        ...

    @property
    def candidates(self) -> np.ndarray | None:
        """Return the candidates of the latest step, as StepResult.candidates."""
        ...

    def run(self, batch: Batch, x: Rows | None = None) -> Rows:
        """Run one step of a checked batch (base.cache_slots). All its taps must be values of this stage.

        x: input rows, [n_tokens, width], on any device; None if the stage begins with the tokens. Returns
        the residual stream, [n_tokens, width], or logits, as StepResult, if the stage has the output. They
        are valid until the next step. Raises InvalidRequestError for rows that do not fit, and
        StepCancelledError, as Backend.step.
        """
        ...

    def counts(self) -> np.ndarray:
        """Return the counts of the latest step, int64 [n_layer, len(base.COUNTS)]."""
        ...

    def active_on_cpu(self) -> np.ndarray:
        """Return the active neurons that the CPU computed in the latest step, int64 [n_layer]."""
        ...

    def seconds(self) -> np.ndarray:
        """Return the measured seconds of the latest step, float64 [n_layer, len(graph.PARTS)]."""
        ...

    def cpu_worker_seconds(self) -> np.ndarray:
        """Return the CPU's seconds for a device's cold neurons in the latest step, float64 [n_layer].

        They overlap the times of `seconds`.
        """
        ...

    def expert_counts(self) -> CacheStats:
        """Return the cache statistics of experts in layers that a device shares with the CPU."""
        ...

    def cancel(self) -> None:
        """End the step in flight, from any thread. The step raises StepCancelledError."""
        ...

    def close(self) -> None:
        """Free threads and memory. Safe to call twice."""
        ...


class CacheStage(Stage, CacheMemory, Protocol):
    """A stage whose cache can be copied."""

    n_blocks: int
    max_batch: int


@dataclass(frozen=True)
class Span:
    """The operations [first, last) of a graph. last: None for the end of the graph."""

    first: int = 0
    last: int | None = None

    def of(self, graph: Graph) -> tuple[Graph, Value | None]:
        """Return these operations, and the value that enters them; None if they begin with the tokens."""
        return graph.split(self.first, len(graph.ops) if self.last is None else self.last)

    def ends(self, graph: Graph) -> bool:
        """Return whether the graph ends with these operations."""
        return self.last in (None, len(graph.ops))


WHOLE = Span()


@dataclass(frozen=True, kw_only=True)
class BackendOptions:
    """The options of a model's backend, on any processor.

    n_blocks: KV blocks of the cache. max_batch: most tokens of a step. kv_type: the storage type of keys and
    values (model/cost.py; f32 for tests). n_states: slots for recurrent states, if the model has any.
    n_threads: of the CPU; None: every core that this process may use.

    sparse: skip the unneeded rows of an FFN with zeros: up rows of neurons whose gate does not fire, down
    rows of zero neurons, and all rows of neurons that a predictor does not name. The bits are the same.
    channel_rates: by matrix, the rate of input-major reads divided by the rate of reads by row; 1 for other
    matrices (placement/channels.py). whole: up matrices that are read as a whole although their gates have
    thresholds, because skipping rows does not pay off.
    """

    n_blocks: int
    max_batch: int = 512
    kv_type: KVType = "f16"
    n_states: int = 2
    n_threads: int | None = None
    sparse: bool = False
    channel_rates: Mapping[str, float] = field(default_factory=dict)
    whole: Collection[str] = ()
    progress: Reporter | None = field(default=None, compare=False)


@runtime_checkable
class WholeModel(Backend, Protocol):
    """A backend with a whole model in one stage, whose cache can be copied and read by a draft model.

    is_on_device: a device computes the model, not the CPU.
    """

    is_on_device: bool

    @property
    def stage(self) -> CacheStage:
        """Return the stage with the whole model."""
        ...

    def open_draft(self, weights: WeightSource, graph: Graph, options: BackendOptions) -> Backend:
        """Open the same layers in a sparser mode. They use this model's cache, and its threads or device."""
        ...

    def open_layer(self, weights: WeightSource, graph: Graph, options: BackendOptions) -> CacheStage:
        """Open a layer that reads this model's hidden states and uses its threads or device."""
        ...


def on_host(rows: Rows) -> np.ndarray:
    """Return rows as an array on the host. Waits for the device that has them."""
    return rows if isinstance(rows, np.ndarray) else rows.numpy(force=True)
