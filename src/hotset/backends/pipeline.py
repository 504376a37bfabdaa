"""The Backend protocol over stages, one after the other: one model on several processors.

    CPU         layers that are on no device: the native engine over their part of the graph
    device 0    a stage of a device backend: attention, norms, predictor, hot neurons of its layers
      + CPU     the cold neurons of these layers, at the same time (backends/cpu/worker.py)
    device 1 …  the next layers; the last stage has the output

Between them goes the residual stream alone, and stages stand in any order, the CPU's too. A dense model, or
layers of which a device has every neuron, need no host-device synchronisation: then this is the split by
layers that llama.cpp's users know as -ngl. Which stages there are is decided elsewhere (placement/build.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from hotset.backends.base import COUNTS, Batch, StepResult, StepStats, cache_slots
from hotset.backends.stage import Rows, Stage, on_host
from hotset.errors import InvalidRequestError, StepCancelledError
from hotset.model.operations import PARTS
from hotset.offload.cache_stats import CacheStats

if TYPE_CHECKING:
    from hotset import _core

HOST = -1  # in place of the index of a device


class ChainBackend:
    """Stages that make up a model, in order; they are closed with it.

    devices: which device each stage is on, by index, HOST (-1) for the CPU; several stages may share one.
    n_pages, max_batch: of every stage. runtime: what its stages on the CPU share,
    and is closed with them; None where the CPU computes nothing.

    Whatever fails in a step, the other stages are released, and the next step works or says why not. Taps
    may be any value but those inside an FFN whose neurons are split.

    Raises InvalidRequestError for stages that do not follow one another.
    """

    def __init__(
        self,
        name: str,
        stages: Sequence[Stage],
        devices: Sequence[int],
        *,
        n_pages: int,
        max_batch: int,
        runtime: _core.Runtime | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        leaving = None
        for i, stage in enumerate(stages):
            if stage.entering != leaving or stage.has_output != (i == len(stages) - 1):
                raise InvalidRequestError(
                    f"stage {i} on {stage.name} does not go on where the one before it ends: stages go from "
                    "the tokens to the logits, and each begins with the residual stream that is left to it"
                )
            leaving = stage.graph.ops[-1].out
        if leaving is None or len(devices) != len(stages):
            raise InvalidRequestError("a chain needs stages, and to know the device of each")
        self.name, self.stages, self.devices = name, tuple(stages), tuple(devices)
        self.n_pages, self.max_batch, self.n_vocab = n_pages, max_batch, leaving.width
        self.n_states = min((stage.n_states for stage in stages if stage.n_states), default=0)
        self.runtime, self._notes = runtime, tuple(notes)
        self.n_threads = None if runtime is None else runtime.n_threads
        self._values = [frozenset(op.out.name for op in stage.graph.primitives) for stage in stages]
        self._has_thresholds = any(stage.graph.has_thresholds for stage in stages)
        self._latest: tuple[int, float] | None = None  # tokens and seconds of the latest step
        self._cancelled = False

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know of how it runs, a sentence each: its own, and those of its stages."""
        return *self._notes, *(note for stage in self.stages for note in stage.notes)

    def device_bytes(self) -> list[dict[str, int]]:
        """Bytes that each device holds, by kind (GpuStage.nbytes), in the order of their indices."""
        held: list[dict[str, int]] = [{} for _ in range(1 + max(self.devices))]
        for device, stage in zip(self.devices, self.stages, strict=True):
            for kind, n_bytes in stage.nbytes.items():
                held[device][kind] = held[device].get(kind, 0) + n_bytes
        return held

    def step(self, batch: Batch) -> StepResult:
        """Runs one step. Raises InvalidRequestError, StepCancelledError; DeviceError where a side failed or
        took too long."""
        self._cancelled = False
        cache_slots(batch, max_batch=self.max_batch, n_pages=self.n_pages, n_vocab=self.n_vocab)
        if batch.taps and (unknown := set(batch.taps).difference(*self._values)):
            raise InvalidRequestError(f"the model has no value named {min(unknown)!r} to tap")
        began = time.perf_counter()
        taps: dict[str, np.ndarray] = {}
        rows: Rows | None = None
        for stage, values in zip(self.stages, self._values, strict=True):
            if self._cancelled:
                raise StepCancelledError
            own = batch
            if batch.taps:
                own = replace(batch, taps=tuple(name for name in batch.taps if name in values))
            rows = stage.run(own, rows)
            if own.taps:
                taps |= stage.tapped
        assert rows is not None
        logits = on_host(rows)
        self._latest = len(batch.tokens), time.perf_counter() - began
        return StepResult(logits, taps, self.stages[-1].largest, self.stages[-1].candidates)

    def stats(self) -> StepStats | None:
        """Counts and times of the latest step; None where FFNs have no zeros and the graph has no thresholds.

        Of a step with taps that lie inside an FFN there are no counts for it. Times are those of the stages;
        what they do not assign to a layer is `other`: on a GPU all of it, unless its stage is `timed`.
        """
        if self._latest is None or not (
            self._has_thresholds or any(stage.has_neurons for stage in self.stages)
        ):
            return None
        n_tokens, total = self._latest
        counts = sum(
            (stage.counts() for stage in self.stages), np.zeros((self.n_layer, len(COUNTS)), np.int64)
        )
        seconds = sum((stage.seconds() for stage in self.stages), np.zeros((self.n_layer, len(PARTS))))
        other = max(total - float(seconds[:, :3].sum()), 0.0)
        on_cpu = sum((stage.active_on_cpu() for stage in self.stages), np.zeros(self.n_layer, np.int64))
        return StepStats.of(
            n_tokens, counts, seconds, other, has_thresholds=self._has_thresholds, active_on_cpu=on_cpu
        )

    @property
    def workspace_bytes(self) -> int:
        """Return 0: a placement plans the values of a step."""
        return 0

    @property
    def n_layer(self) -> int:
        """Layers of the model."""
        return self.stages[0].n_layer

    def cpu_worker_seconds(self) -> np.ndarray:
        """Of the latest step: how long the CPU took for the cold neurons of each layer, float64 [n_layer]."""
        return sum((stage.cpu_worker_seconds() for stage in self.stages), np.zeros(self.n_layer))

    def expert_counts(self) -> CacheStats:
        """What became of the experts of the devices' layers, since the stages were made."""
        return sum((stage.expert_counts() for stage in self.stages), CacheStats())

    def cancel(self) -> None:
        """Ends the step in flight on all sides, from any thread; it raises StepCancelledError."""
        self._cancelled = True
        for stage in self.stages:
            stage.cancel()

    def close(self) -> None:
        """Stops the threads and frees the memory of all stages; safe to call twice."""
        self._latest = None
        for stage in self.stages:
            stage.close()
        if self.runtime is not None:
            self.runtime.close()
