"""The Backend protocol over a chain of stages: one model on several processors.

    CPU         layers that are on no device: the native engine over their part of the graph
    device 0    a stage of a device backend: attention, norms, predictor, hot neurons of its layers
      + CPU     the cold neurons of these layers, at the same time (backends/cpu/worker.py)
    device 1 …  the next layers; the last stage has the output

Only the residual stream passes between stages, and they may be in any order, including the CPU's. A dense
model, or layers whose neurons are all on a device, need no host-device synchronisation within a stage. This
is the split by layers that llama.cpp's users know as -ngl. placement/build.py decides on the stages.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from hotset.backends.base import COUNTS, Batch, StepResult, StepStats, cache_slots
from hotset.backends.stage import Rows, Stage, on_host
from hotset.backends.timings import DeviceTimes, Timed
from hotset.errors import InvalidRequestError, StepCancelledError
from hotset.model.operations import PARTS
from hotset.offload.cache_stats import CacheStats

if TYPE_CHECKING:
    from hotset import _core

HOST = -1  # the CPU, instead of the index of a device


class ChainBackend:
    """A model as a chain of stages, which are closed with it.

    devices: the device index of each stage, HOST (-1) for the CPU; several stages may share a device.
    n_blocks, max_batch: of every stage. runtime: the thread pool that the stages on the CPU share, closed
    with them; None if the CPU computes nothing.

    After a failure in a step the other stages are released; the next step works or raises an error. Any value
    can be tapped, except inside an FFN whose neurons are split.

    The constructor raises InvalidRequestError if a stage does not begin where the previous one ends.
    """

    def __init__(
        self,
        name: str,
        stages: Sequence[Stage],
        devices: Sequence[int],
        *,
        n_blocks: int,
        max_batch: int,
        runtime: _core.Runtime | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        leaving = None
        for i, stage in enumerate(stages):
            if stage.entering != leaving or stage.has_output != (i == len(stages) - 1):
                raise InvalidRequestError(
                    f"stage {i} on {stage.name} does not continue where the stage before it ends: stages go "
                    "from the tokens to the logits, and each begins with the previous stage's residual stream"
                )
            leaving = stage.graph.ops[-1].out
        if leaving is None or len(devices) != len(stages):
            raise InvalidRequestError("a chain needs stages, and to know the device of each")
        self.name, self.stages, self.devices = name, tuple(stages), tuple(devices)
        self.n_blocks, self.max_batch, self.n_vocab = n_blocks, max_batch, leaving.width
        self.n_states = min((stage.n_states for stage in stages if stage.n_states), default=0)
        self.runtime, self._notes = runtime, tuple(notes)
        self.n_threads = None if runtime is None else runtime.n_threads
        self._values = [frozenset(op.out.name for op in stage.graph.primitives) for stage in stages]
        self._has_thresholds = any(stage.graph.has_thresholds for stage in stages)
        self._latest: tuple[int, float] | None = None  # tokens and seconds of the latest step
        self._cancelled = False

    @property
    def notes(self) -> tuple[str, ...]:
        """Return sentences about the chain and its stages, for display."""
        return *self._notes, *(note for stage in self.stages for note in stage.notes)

    def device_bytes(self) -> list[dict[str, int]]:
        """Return the bytes that each device holds, by kind (Stage.nbytes), in the order of their indices."""
        held: list[dict[str, int]] = [{} for _ in range(1 + max(self.devices))]
        for device, stage in zip(self.devices, self.stages, strict=True):
            for kind, n_bytes in stage.nbytes.items():
                held[device][kind] = held[device].get(kind, 0) + n_bytes
        return held

    def step(self, batch: Batch) -> StepResult:
        """Run one step.

        Raises InvalidRequestError or StepCancelledError, and DeviceError if a device or the CPU worker failed
        or took too long.
        """
        self._cancelled = False
        cache_slots(batch, max_batch=self.max_batch, n_blocks=self.n_blocks, n_vocab=self.n_vocab)
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
        """Return counts and times of the latest step; None if FFNs have no zeros and no thresholds exist.

        An FFN with taps inside is not counted. The stages measure the times. Time that they do not assign to
        a layer counts as `other`: on a GPU all time, unless its stage is `timed`.
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
        """Return the number of layers of the model."""
        return self.stages[0].n_layer

    def cpu_worker_seconds(self) -> np.ndarray:
        """Return the CPU's seconds for cold neurons in the latest step, by layer: float64 [n_layer]."""
        return sum((stage.cpu_worker_seconds() for stage in self.stages), np.zeros(self.n_layer))

    def expert_counts(self) -> CacheStats:
        """Return the cache statistics of the devices' experts, since the stages were built."""
        return sum((stage.expert_counts() for stage in self.stages), CacheStats())

    def start_timing(self) -> bool:
        """Time the operations of the stages that can, as Timed.start_timing."""
        started = [stage.start_timing() for stage in self.stages if isinstance(stage, Timed)]
        return any(started)

    def end_timing(self) -> list[DeviceTimes]:
        """Return the times of all stages, as Timed.end_timing."""
        timed = (stage.end_timing() for stage in self.stages if isinstance(stage, Timed))
        return [times for of_stage in timed for times in of_stage]

    def cancel(self) -> None:
        """End the step in flight in all stages, from any thread. The step raises StepCancelledError."""
        self._cancelled = True
        for stage in self.stages:
            stage.cancel()

    def close(self) -> None:
        """Stop the threads and free the memory of all stages. Safe to call twice."""
        self._latest = None
        for stage in self.stages:
            stage.close()
        if self.runtime is not None:
            self.runtime.close()
