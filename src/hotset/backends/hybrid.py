"""One model on several processors, as a Placement says: the CPU first, then a device after the other.

    CPU         layers that are on no device: the native engine over the head of the graph
    device 0    a stage (backends/gpu/stage.py): attention, norms, predictor, hot neurons of its layers
      + CPU     the cold neurons of these layers, at the same time (backends/gpu/handshake.py)
    device 1 …  the next layers; the last has the output

Between them goes the residual stream alone. A dense model, or layers of which a device has every neuron, need
no handshake: then this is the split by layers that llama.cpp's users know as -ngl.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hotset.backends.base import Batch, StepResult, StepStats, WeightSource, cache_slots
from hotset.backends.cpu import CpuBackend
from hotset.backends.fusion import PARTS, cut, layer_starts
from hotset.cores import usable_cores
from hotset.errors import InvalidRequestError
from hotset.model.cost import KVType
from hotset.model.graph import Graph
from hotset.placement.budget import STREAM_FROM
from hotset.placement.table import CPU, Placement

if TYPE_CHECKING:
    from hotset.backends.gpu.handshake import ColdService, Kind
    from hotset.backends.gpu.stage import GpuStage


@dataclass
class _Part:
    """Operations [first_op, last_op) on one device. taps: names of the values that they make."""

    device: int
    first_op: int
    last_op: int
    names: frozenset[str]


class HybridBackend:
    """The Backend protocol over the CPU and the devices of a placement.

    sparse: as in CpuBackend and GpuStage; layers can be split only with it. n_threads: of the CPU, for its
    own layers and for cold neurons. handshake: forces a kind (handshake.KINDS). timeout: seconds that the CPU
    may take for the cold neurons of a layer. stream_from: see GpuStage. options: of every GpuStage.

    Whatever fails in a step, the others are released, and the next step works or says why not. Taps may be
    any value but those inside an FFN whose neurons are split.

    Raises InvalidRequestError for a placement that is not of this model or not in order, and what GpuStage,
    ColdService and CpuBackend raise.
    """

    name = "hybrid"

    def __init__(
        self,
        weights: WeightSource,
        graph: Graph,
        placement: Placement,
        *,
        n_pages: int,
        max_batch: int = 512,
        kv_type: KVType = "f16",
        n_threads: int | None = None,
        sparse: bool = True,
        stream_from: int | None = STREAM_FROM,
        handshake: Kind | None = None,
        timeout: float | None = None,
        isa: str | None = None,
        **options: Any,
    ) -> None:
        self.graph, self.placement = graph, placement
        self.n_pages, self.max_batch, self.kv_type, self.sparse = n_pages, max_batch, kv_type, sparse
        self.n_threads = n_threads or usable_cores()
        self.n_vocab = graph.logits.width
        self.n_layer = len(layer_starts(graph)) - 1
        self._parts = _parts_of(graph, placement)
        self._head: CpuBackend | None = None
        self.stages: list[GpuStage] = []
        self._services: list[ColdService | None] = []
        self._latest: tuple[int, float] | None = None  # tokens and seconds of the latest step
        self.notes: list[str] = []
        given = {"n_pages": n_pages, "max_batch": max_batch, "kv_type": kv_type, "sparse": sparse}
        try:
            for part in self._parts:
                if part.device == CPU:
                    head, _ = cut(graph, part.first_op, part.last_op)
                    self._head = CpuBackend(weights, head, n_threads=self.n_threads, isa=isa, **given)  # type: ignore[arg-type]
                    continue
                self._add_stage(
                    weights, part, {**given, **options, "stream_from": stream_from}, handshake, timeout, isa
                )
        except BaseException:
            self.close()
            raise

    def _add_stage(
        self,
        weights: WeightSource,
        part: _Part,
        options: dict[str, Any],
        handshake: Kind | None,
        timeout: float | None,
        isa: str | None,
    ) -> None:
        from hotset.backends.gpu.devices import find_device
        from hotset.backends.gpu.handshake import TIMEOUT, ColdService
        from hotset.backends.gpu.stage import GpuStage

        device = self.placement.devices[part.device]
        hot = {
            i: layer.hot
            for i, layer in enumerate(self.placement.layers)
            if layer.device == part.device and layer.is_split and layer.hot is not None
        }
        service = None
        self._services.append(None)
        if hot:
            stream_from = options["stream_from"]
            most = self.max_batch if stream_from is None else min(self.max_batch, stream_from - 1)
            service = self._services[-1] = ColdService(
                weights, self.graph, hot, find_device(device), max_batch=max(most, 1),
                n_threads=self.n_threads, kind=handshake, timeout=timeout or TIMEOUT, isa=isa,
            )  # fmt: skip
            self.notes.append(
                f"{device}: {len(hot)} layers share their neurons with the CPU; {service.reason}"
            )
        stage = GpuStage(
            weights, self.graph, device, first_op=part.first_op, last_op=part.last_op, hot=hot, cold=service,
            **options,
        )  # fmt: skip
        self.stages.append(stage)
        self.notes.append(f"{device}: kernels in {stage.kernels.name}")

    @property
    def nbytes(self) -> dict[str, dict[str, int]]:
        """Bytes that each device of the placement holds, by kind (GpuStage.nbytes)."""
        held: dict[str, dict[str, int]] = {}
        parts = (part for part in self._parts if part.device != CPU)
        for part, stage in zip(parts, self.stages, strict=True):
            kinds = held.setdefault(self.placement.devices[part.device], {})
            for kind, n_bytes in stage.nbytes.items():
                kinds[kind] = kinds.get(kind, 0) + n_bytes
        return held

    def step(self, batch: Batch) -> StepResult:
        """Runs one step. Raises InvalidRequestError; DeviceError where a side failed or took too long."""
        import torch

        cache_slots(batch, max_batch=self.max_batch, n_pages=self.n_pages, n_vocab=self.n_vocab)
        known = frozenset().union(*(part.names for part in self._parts))
        if unknown := set(batch.taps) - known:
            raise InvalidRequestError(f"the model has no value named {min(unknown)!r} to tap")
        began = time.perf_counter()
        taps: dict[str, np.ndarray] = {}
        x: torch.Tensor | None = None
        logits: np.ndarray | None = None
        stages = iter(self.stages)
        for part in self._parts:
            own = replace(batch, taps=tuple(name for name in batch.taps if name in part.names))
            if part.device == CPU:
                assert self._head is not None
                result = self._head.step(own)
                taps |= result.taps
                logits, x = result.logits, torch.from_numpy(result.logits)
            else:
                stage = next(stages)
                x, logits = stage.run(own, x), None
                if own.taps:
                    taps |= stage.tapped
        if logits is None:
            assert x is not None
            logits = x.cpu().numpy()  # waits for the device
        self._latest = len(batch.tokens), time.perf_counter() - began
        return StepResult(logits, taps)

    def stats(self) -> StepStats | None:
        """Counts of both sides and times of the latest step; None for a model whose FFNs have no zeros.

        Times are as in the backends of the parts; what they do not assign to a layer is `other`. The cold
        neurons' time is not added, since it passes at the same time: cold_seconds has it.
        """
        if self._latest is None or not (
            any(stage.has_neurons for stage in self.stages) or (self._head and self._head.stats())
        ):
            return None
        n_tokens, total = self._latest
        counts = np.zeros((self.n_layer, 5), np.int64)
        seconds = np.zeros((self.n_layer, len(PARTS)))
        if self._head is not None and (head := self._head.stats()) is not None:
            n = min(len(head.selected), self.n_layer)
            columns = (head.selected, head.active, head.gate_rows, head.up_rows, head.down_rows)
            counts[:n] += np.stack(columns, axis=1)[:n]
            seconds[:n, :3] += np.stack((head.predictor, head.ffn, head.attention), axis=1)[:n]
        for stage in self.stages:
            own = stage.counts()
            counts[: len(own)] += own
            seconds[: len(own)] += stage.seconds()
        for service in self._services:
            if service is not None:
                cold = service.counts()
                columns = (cold.selected, cold.active, cold.gate_rows, cold.up_rows, cold.down_rows)
                counts[list(cold.layers)] += np.stack(columns, axis=1)
        selected, active, gate_rows, up_rows, down_rows = counts.T
        predictor, ffn, attention, _ = seconds.T
        other = max(total - float(seconds[:, :3].sum()), 0.0)
        return StepStats(
            n_tokens, selected, active, gate_rows, up_rows, down_rows, predictor, ffn, attention, other
        )

    def cold_seconds(self) -> np.ndarray:
        """Of the latest step: how long the CPU took for the cold neurons of each layer, float64 [n_layer]."""
        seconds = np.zeros(self.n_layer)
        for service in self._services:
            if service is not None:
                counts = service.counts()
                seconds[list(counts.layers)] += counts.seconds
        return seconds

    def cancel(self, reason: str) -> None:
        """Gives the step in flight up, from any thread: it raises DeviceError, and nobody hangs."""
        for service in self._services:
            if service is not None:
                service.cancel(reason)

    def close(self) -> None:
        """Stops the threads and frees the memory of all sides; safe to call twice."""
        self._latest = None
        for service in self._services:
            if service is not None:
                service.close()
        for stage in self.stages:
            stage.close()
        if self._head is not None:
            self._head.close()


def _parts_of(graph: Graph, placement: Placement) -> list[_Part]:
    """The graph in pieces, in order: of the CPU, then of each device that has something."""
    *starts, after = layer_starts(graph)
    devices = [layer.device for layer in placement.layers]
    if len(devices) != len(starts):
        raise InvalidRequestError(
            f"the placement has {len(devices)} layers and the model {len(starts)}; plan it for this model"
        )
    if not all(CPU <= device < len(placement.devices) for device in [*devices, placement.output_device]):
        raise InvalidRequestError(
            f"the placement names a device that is not among its {len(placement.devices)}"
        )
    if sorted(devices) != devices or placement.output_device < devices[-1]:
        raise InvalidRequestError(
            "a placement goes down the layers: those of the CPU first, then those of each device in order, "
            "and the output behind the last layer"
        )
    owners = [devices[0], *devices, placement.output_device]
    ends = [starts[0], *starts[1:], after, len(graph.ops)]
    parts: list[_Part] = []
    first = 0
    for owner, end in zip(owners, ends, strict=True):
        if parts and parts[-1].device == owner:
            parts[-1].last_op = end
        elif end > first:
            parts.append(_Part(owner, first, end, frozenset()))
        first = end
    for part in parts:
        part.names = _names(graph.ops[part.first_op : part.last_op])
    return parts


def _names(ops: Iterable[Any]) -> frozenset[str]:
    return frozenset(op.out.name for op in ops)
