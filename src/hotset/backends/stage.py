"""What a chain of stages is made of: some layers of a model each, and the residual stream between them.

A stage executes a range of the graph's operations where it is: on the CPU (cpu.CpuBackend), on a device
(the stage of a device backend). It takes the rows that its first layer reads and returns those that its last
one makes, so layers may be in any order of places. backends/pipeline.py runs stages one after the other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

import numpy as np

from hotset.backends.base import Backend, Batch, CacheMemory
from hotset.formats.quants import GGMLType
from hotset.formats.source import WeightSource
from hotset.model.cost import KVType
from hotset.model.graph import Graph
from hotset.model.operations import Value
from hotset.offload.cache_stats import CacheStats
from hotset.reporter import Reporter

if TYPE_CHECKING:
    import torch

Rows: TypeAlias = "np.ndarray | torch.Tensor"
"""float32 [n_rows, width], on the host or on a device."""

# Bytes and rows that a stage on a device holds at a time; placement/budget.py reserves as much.
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


class CacheStage(Stage, CacheMemory, Protocol):
    """A stage whose cache can be copied."""

    n_pages: int
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
    """How the backend of a model is built, wherever it computes.

    n_pages: pages of the cache. max_batch: most tokens of a step. kv_type: how keys and values are stored
    (model/cost.py; f32 for tests). n_states: slots for recurrent states, if the model has any. n_threads: of
    the CPU; None: every core that this process may use.

    sparse: skip the unneeded rows of an FFN with zeros: up rows of neurons whose gate does not fire, down
    rows of zero neurons, and all rows of neurons that a predictor does not name. The bits are the same.
    channel_rates: of types, the bytes per second read input-major over those read by row, 1 for the others
    (placement/channels.py). whole: up matrices that are read as a whole, although their gates have
    thresholds, because leaving rows out does not pay.
    """

    n_pages: int
    max_batch: int = 512
    kv_type: KVType = "f16"
    n_states: int = 2
    n_threads: int | None = None
    sparse: bool = False
    channel_rates: Mapping[GGMLType, float] = field(default_factory=dict)
    whole: Collection[str] = ()
    progress: Reporter | None = field(default=None, compare=False)


@runtime_checkable
class WholeModel(Backend, Protocol):
    """A backend with a whole model in one stage, whose cache can be copied and read by a model that drafts.

    is_on_device: a device computes the model, not the CPU.
    """

    is_on_device: bool

    @property
    def stage(self) -> CacheStage:
        """The stage with all of the model."""
        ...

    def open_draft(self, weights: WeightSource, graph: Graph, options: BackendOptions) -> Backend:
        """Open the same layers in a sparser mode. They use this model's cache, and its threads or device."""
        ...

    def open_layer(self, weights: WeightSource, graph: Graph, options: BackendOptions) -> CacheStage:
        """Open a layer that reads this model's hidden states and uses its threads or device."""
        ...


def on_host(rows: Rows) -> np.ndarray:
    """The same rows as an array; waits for the device that has them."""
    return rows if isinstance(rows, np.ndarray) else rows.numpy(force=True)
