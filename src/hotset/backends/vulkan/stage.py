"""A stage on a Vulkan device: some layers of a model, or all of them, run step by step.

A step is recorded once for each number of tokens (program.py); later steps submit the recording. The host
writes the inputs of a batch (inputs.py), submits, and waits for logits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

import numpy as np

from hotset import _core
from hotset.backends.adapters import AdapterSet
from hotset.backends.base import COUNTS, N_CANDIDATES, Batch, cache_slots
from hotset.backends.cpu.backend import CpuBackend
from hotset.backends.cpu.worker import CpuWorker, moe_layers
from hotset.backends.device.stage import NOTHING_SHARED, CpuShare, DeviceStage
from hotset.backends.stage import WHOLE, BackendOptions, Rows, Span, on_host
from hotset.backends.timings import DeviceTimes
from hotset.backends.vulkan import pipelines
from hotset.backends.vulkan.adapters import DeviceAdapters
from hotset.backends.vulkan.budget import cache_sizes, state_bytes
from hotset.backends.vulkan.devices import VulkanInfo
from hotset.backends.vulkan.experts import VulkanExpertCache
from hotset.backends.vulkan.inputs import OUTPUT_ROWS, InputShape, VulkanInputs
from hotset.backends.vulkan.kernels import Recorder, VulkanKernels
from hotset.backends.vulkan.memory import BufferArena, BufferRange
from hotset.backends.vulkan.plugin import refused
from hotset.backends.vulkan.program import KV_CODES, CacheOfLayer, RecordedGraph, VulkanParts
from hotset.backends.vulkan.shapes import DeviceShapes, default_shapes
from hotset.backends.vulkan.split import SharedLayers
from hotset.backends.vulkan.steps import steps_of
from hotset.backends.vulkan.timings import DispatchTimings
from hotset.backends.vulkan.weights import JoinedProducts, VulkanWeights
from hotset.errors import DeviceError, InvalidRequestError, StepCancelledError, UnsupportedModelError
from hotset.formats.source import WeightSource
from hotset.model.cost import check_cache
from hotset.model.graph import Graph
from hotset.model.operations import PARTS, Attention, NgramEmbed, PositionGain, Value
from hotset.model.rope import position_gain
from hotset.units import human_size

_PLAIN = frozenset[str](), False  # the program without taps and adapters


@dataclass
class OpenDevice:
    """An open device, and what its stages of one model share.

    in_use: held by the thread that uses the device, such as a prompt cache that copies from it. stages: the
    model's, and those that draft for it.
    """

    info: VulkanInfo
    device: _core.VulkanDevice
    kernels: VulkanKernels
    in_use: threading.RLock = field(default_factory=threading.RLock)
    stages: list[VulkanStage] = field(default_factory=list)

    @classmethod
    def of(
        cls, info: VulkanInfo, device: _core.VulkanDevice | None = None, shapes: DeviceShapes | None = None
    ) -> Self:
        """Return a device that is open, or open it. shapes: of workgroups; None for the device's defaults."""
        device = device or pipelines.open_device(info)
        return cls(info, device, VulkanKernels(device, shapes or DeviceShapes(default_shapes(info))))


class Loaded(NamedTuple):
    """The device memory of another stage on the same device, that a new stage uses too.

    weights: those that are uploaded. cache: keys and values of the same layers and blocks, to read and write.
    """

    weights: VulkanWeights | None = None
    cache: dict[int, CacheOfLayer] = {}  # noqa: RUF012 - never changed


NOTHING_LOADED = Loaded()


class VulkanStage(DeviceStage):
    """The Stage protocol over the operations of `span` on a Vulkan device.

    options.n_states: slots for recurrent states; fewer if the device cannot bind them all. share: a split
    layer needs at least one neuron on the device. worker: computes what `share` leaves to the CPU, for steps
    of max_batch tokens; it is closed with the stage. loaded: memory of a stage of the same model.

    nbytes: bytes of the stage, by kind: weights, experts, kv (with states), workspace. It is CacheMemory,
    too (backends/base.py). Raises DeviceError, OutOfMemoryError if the model does not fit, and
    UnsupportedModelError for operations without a kernel.
    """

    def __init__(
        self,
        weights: WeightSource,
        graph: Graph,
        opened: OpenDevice,
        options: BackendOptions,
        *,
        span: Span = WHOLE,
        share: CpuShare = NOTHING_SHARED,
        worker: CpuWorker | None = None,
        loaded: Loaded = NOTHING_LOADED,
    ) -> None:
        super().__init__(weights, graph, options, span)
        self.kv_type = options.kv_type
        if self.kv_type not in KV_CODES:
            raise refused("KV cache", f"the type {self.kv_type}")
        self.opened, self.info = opened, opened.info
        self.name = self.info.name
        self._device, self._kernels = opened.device, opened.kernels
        self.matrices: VulkanWeights = VulkanWeights(weights, self._device, loaded.weights)
        self._kv = BufferArena(self._device)
        self._cancel = _core.VulkanCancel()
        self._gains = [op for op in self.graph.ops if isinstance(op, PositionGain)]
        self._ngrams: dict[Value, CpuBackend] = {}
        self.n_states = self._most_states(options.n_states) if graph.recurrent else 0
        self._inputs = VulkanInputs(
            self._device,
            InputShape.of(
                self.graph, self.entering, heads_of=lambda op: self._kernels.attention(op).heads,
                max_batch=self.max_batch, n_blocks=self.n_blocks, n_states=self.n_states,
            ),
        )  # fmt: skip
        of_ngrams = replace(options, n_states=self.n_states, n_threads=1, sparse=False)
        for op in self.graph.ops:
            if isinstance(op, NgramEmbed):  # the CPU computes it: its table is large, its state is small
                self._ngrams[op.out] = CpuBackend(weights, Graph([op], graph.values), of_ngrams)
        self.cache: dict[int, CacheOfLayer] = dict(loaded.cache)
        self._allocate_caches()
        self.worker: CpuWorker | None = worker
        self._is_served = worker is not None
        self._shared: SharedLayers | None = None
        self.experts: VulkanExpertCache | None = None
        if worker is not None:
            self.experts = self._expert_cache(worker, share.expert_slots)
            self._shared = SharedLayers(self._device, self.graph, share.hot, self.experts, worker)
        steps, _ = steps_of(self.graph, weights.tensors, shared=self._shared)
        self.matrices.join(JoinedProducts(step.products, step.is_gated) for step in steps if step.products)
        self._parts = VulkanParts(
            self.matrices, self._kernels, self._inputs, self.cache, self._states, self.kv_type,
            self.max_batch, self.n_blocks, self._shared,
        )  # fmt: skip
        self._lowered: dict[tuple[frozenset[str], bool], RecordedGraph] = {}  # taps, with adapters
        self._adapters = AdapterSet(self.graph, weights.tensors)
        self._on_device: DeviceAdapters | None = None
        self.largest = None  # this stage does not find the largest logits
        self.candidates: np.ndarray | None = None  # of the latest step, as StepResult.candidates
        self._closed = False
        self._program(frozenset())
        pipelines.keep(self.info, self._device)
        self.opened.stages.append(self)  # last: a stage that fails is in no cycle, and frees its memory

    def _expert_cache(self, worker: CpuWorker, n_slots: int) -> VulkanExpertCache | None:
        """Return a cache for the worker's MoE layers; None if it has none."""
        ffns = [ffn for ffn in moe_layers(self.graph).values() if ffn.layer in worker.layers]
        if not ffns:
            return None
        # A software driver would compete with the thread for the CPU. Without the thread, experts arrive
        # before the next step.
        in_thread = not self.info.is_software
        return VulkanExpertCache(self.weights, self._device, ffns, n_slots, in_thread=in_thread)

    def _allocate_caches(self) -> None:
        """Allocate keys and values for layers that have none yet, and states."""
        for op in self.graph.ops:
            if isinstance(op, Attention) and op.source is None and op.layer not in self.cache:
                # An encoder needs keys and values only while it computes a layer, so its layers share them.
                shared = None if op.causal else next(iter(self.cache.values()), None)
                self.cache[op.layer] = shared or self._new_cache(op)
        self._states = {
            op.out.id: self._kv.piece(self.n_states * state_bytes(op))
            for op in self.graph.recurrent
            if not isinstance(op, NgramEmbed)
        }
        self.block_nbytes = sum(part.size for part in self._block_parts()) // self.n_blocks
        of_device = sum(part.size for part in self._states.values()) // max(self.n_states, 1)
        self.state_nbytes = of_device + sum(backend.state_nbytes for backend in self._ngrams.values())

    @property
    def notes(self) -> tuple[str, ...]:
        """Return sentences about the device and split layers, for display."""
        name = f"{self.info.name} (Vulkan {self.info.api})"
        shared = {} if self._shared is None else {"neurons": len(self._shared.neurons)}
        if self.experts is not None:
            shared["experts"] = len(self.experts.layers)
        split = [f"{n} layers share their {what} with the CPU" for what, n in shared.items() if n]
        if self.info.is_software:
            return (f"{name} is a software driver: it computes on the CPU, and makes nothing faster", *split)
        return (f"the model is on {name}", *split)

    @property
    def has_neurons(self) -> bool:
        """Return False: the stage counts no neurons."""
        return False

    @property
    def nbytes(self) -> dict[str, int]:
        """Return the bytes of device memory that the stage holds, by kind.

        workspace: values and inputs of steps. The first stage of a device includes the bytes of the others.
        """
        values = sum(lowered.nbytes for lowered in self._lowered.values())
        adapters = 0 if self._on_device is None else self._on_device.nbytes
        exchange = 0 if self._shared is None else self._shared.nbytes
        own = {
            "weights": self.matrices.arena.nbytes + adapters,
            "experts": 0 if self.experts is None else self.experts.nbytes,
            "kv": self._kv.nbytes,
            "workspace": values + self._inputs.nbytes + exchange,
        }
        if self is self.opened.stages[0]:
            for other in self.opened.stages[1:]:
                own = {kind: n + other.nbytes[kind] for kind, n in own.items()}
        return own

    def run(self, batch: Batch, x: Rows | None = None) -> np.ndarray:
        """Run a step, as Stage.run."""
        self._check_open()
        with self.opened.in_use:
            return self._checked_run(batch, x)

    def _checked_run(self, batch: Batch, x: Rows | None) -> np.ndarray:
        scales = self._adapters.scales(batch)
        lowered = self._program(frozenset(batch.taps), with_adapters=scales is not None)
        rows = {value: on_host(entering) for value, entering in self.entering_rows(batch, x).items()}
        if self._ngrams:
            plain = replace(batch, taps=(), adapter_scales=None)
            rows |= {value: backend.run(plain) for value, backend in self._ngrams.items()}
        rows |= {op.out: position_gain(op, batch.positions) for op in self._gains}
        # Without n_vocab: the chain has checked the tokens.
        slots = cache_slots(batch, max_batch=self.max_batch, n_blocks=self.n_blocks, n_vocab=None)
        self._cancel.requested = False
        if self.experts is not None:
            self.experts.begin_step()
        self._inputs.fill(batch, slots, rows)
        if scales is not None and self._on_device is not None:
            self._on_device.fill(scales[batch.sequences])
        result = self._in_step(lowered, batch, rows)
        if self.experts is not None and self.worker is not None:
            self.experts.learn({layer: self.worker.route(layer) for layer in self.experts.layers})
        self.weights.check()
        return result

    def rerun(self, n: int = 1) -> None:
        """Run a step of n tokens on the current inputs, without logits, to measure a device."""
        _core.vulkan_run([self._program(frozenset()).recorded("body", n).program], self._cancel)

    def device_seconds(self, n: int = 1) -> float:
        """Rerun a step, and return its seconds on the device. Needs start_timing."""
        self.rerun(n)
        ticks = self._program(frozenset()).recorded("body", n).program.times()
        return float(ticks[-1, 1] - ticks[0, 0]) * self._device.tick_nanoseconds * 1e-9

    def take_shapes(self, shapes: DeviceShapes) -> None:
        """Discard all recordings; later ones use workgroups of these shapes."""
        self._kernels.shapes = shapes
        self._record_again()

    def start_timing(self) -> bool:
        """Time the operations of all stages on the device, as Timed.start_timing."""
        self._kernels.timings = DispatchTimings(self._device)
        for stage in self.opened.stages:
            stage._record_again()  # noqa: SLF001
        return True

    def end_timing(self) -> list[DeviceTimes]:
        """Return the times, as Timed.end_timing; none if another stage of the device has returned them."""
        timings, self._kernels.timings = self._kernels.timings, None
        for stage in self.opened.stages:
            stage._record_again()  # noqa: SLF001
        return [] if timings is None else timings.taken()

    def _record_again(self) -> None:
        for lowered in self._lowered.values():
            lowered.record_anew()

    def _in_step(self, lowered: RecordedGraph, batch: Batch, rows: Mapping[Value, np.ndarray]) -> np.ndarray:
        """Call _run, within a step of the CPU worker if layers are split."""
        worker = self.worker
        with nullcontext() if worker is None else worker.step(len(batch.tokens), batch.thresholded):
            try:
                return self._run(lowered, batch, rows)
            except StepCancelledError:
                if worker is not None and not self._cancel.requested:
                    raise DeviceError(f"the hybrid step was given up: {worker.given_up()}") from None
                raise

    def _submit(self, recorded: list[Recorder], n: int) -> None:
        """Run the programs of a step of n tokens, and wait for them."""
        exchange = None if self._shared is None else self._shared.exchange
        began = time.perf_counter()
        _core.vulkan_run([one.program for one in recorded], self._cancel, exchange, n)
        if self._kernels.timings is not None:
            taken = time.perf_counter() - began
            self._kernels.timings.add(((one.program, one.dispatches) for one in recorded), n, taken)

    def _run(self, lowered: RecordedGraph, batch: Batch, rows: Mapping[Value, np.ndarray]) -> np.ndarray:
        """Run a step and return logits or the residual stream.

        rows: values that the host computed, and the entering value.
        """
        n, result = len(batch.tokens), self.graph.result
        body = lowered.recorded("body", n)
        tail = "candidates" if batch.wants_candidates and lowered.has_candidates else "logits"
        taps = [value for value in lowered.tapped if lowered.is_of_tail(value)]
        found: dict[str, list[np.ndarray]] = {value.name: [] for value in taps}
        if not self.has_output:
            self._submit([body], n)
            logits = lowered.rows(result, n)
        else:
            width = N_CANDIDATES if tail == "candidates" else result.width
            logits = np.empty((len(batch.outputs), width), np.float32)
            tokens = np.empty(logits.shape, np.int32) if tail == "candidates" else None
            before = [body]
            for at in range(0, len(batch.outputs), OUTPUT_ROWS):
                chosen, part = batch.outputs[at : at + OUTPUT_ROWS], slice(at, at + OUTPUT_ROWS)
                self._inputs.choose(chosen)
                if lowered.has_adapters and self._on_device is not None:
                    self._on_device.choose(chosen)
                self._submit([*before, lowered.recorded(tail, len(chosen))], n)
                if tokens is None:
                    logits[part] = lowered.rows(result, len(chosen))
                else:
                    tokens[part], logits[part] = lowered.candidate_rows(len(chosen))
                for value in taps:
                    found[value.name].append(lowered.rows(value, len(chosen)))
                before = []
            if before:
                self._submit(before, n)
            self.candidates = tokens
        self.tapped = {name: np.concatenate(parts) for name, parts in found.items() if parts}
        for value in lowered.tapped:
            if value in rows:
                self.tapped[value.name] = rows[value].copy()
            elif not lowered.is_of_tail(value):
                self.tapped[value.name] = lowered.rows(value, n)
        return logits

    @property
    def adapters(self) -> AdapterSet:
        """Return the adapters that sequences may have.

        Set them only between two steps, and only on a stage with the whole model. If memory is short, the
        previous adapters stay and OutOfMemoryError is raised.
        """
        return self._adapters

    @adapters.setter
    def adapters(self, adapters: AdapterSet) -> None:
        before = self._adapters
        with self.opened.in_use:
            try:
                self._use(adapters)
            except BaseException as error:
                error.__traceback__ = None  # its frames hold the uploaded matrices
                self._use(before)
                raise

    def _use(self, adapters: AdapterSet) -> None:
        """Free the memory of the previous adapters, and upload these. Raises OutOfMemoryError."""
        for key in [key for key in self._lowered if key[1]]:
            self._lowered.pop(key).free()
        self._on_device, self._adapters = None, adapters
        if adapters.adapters:
            self._on_device = DeviceAdapters(self._device, self.weights, adapters, self.max_batch)
            self._program(frozenset(), with_adapters=True)

    # ---- copies of KV blocks and states ----

    def _block_parts(self) -> list[BufferRange]:
        """Return the keys, values and scales of all layers, each range once."""
        caches = {id(cache): cache for cache in self.cache.values()}.values()
        parts = [(cache.keys, cache.values, cache.key_scales, cache.value_scales) for cache in caches]
        return [part for layer in parts for part in dict.fromkeys(layer)]

    def _read(self, piece: BufferRange, i: int, n: int) -> bytes:
        """Return the i-th of n parts of a piece."""
        size = piece.size // n
        with self.opened.in_use:
            return piece.part(i * size, size).read()

    def _write(self, pieces: Iterable[BufferRange], i: int, n: int, data: bytes) -> int:
        """Write the i-th of n parts of each piece, and return the number of bytes written."""
        rows, at = np.frombuffer(data, np.uint8), 0
        for piece in pieces:
            size = piece.size // n
            with self.opened.in_use:
                piece.buffer.write(piece.offset + i * size, rows[at : at + size])
            at += size
        return at

    def read_block(self, block: int) -> bytes:
        """Read a KV block, as CacheMemory.read_block."""
        return b"".join(self._read(part, block, self.n_blocks) for part in self._block_parts())

    def write_block(self, block: int, data: bytes) -> None:
        """Write a KV block, as CacheMemory.write_block."""
        self._write(self._block_parts(), block, self.n_blocks, data)

    def read_state(self, slot: int) -> bytes:
        """Read a state, as CacheMemory.read_state."""
        own = [self._read(part, slot, self.n_states) for part in self._states.values()]
        return b"".join([*own, *(backend.read_state(slot) for backend in self._ngrams.values())])

    def write_state(self, slot: int, data: bytes) -> None:
        """Write a state, as CacheMemory.write_state."""
        at = self._write(self._states.values(), slot, self.n_states, data)
        for backend in self._ngrams.values():
            backend.write_state(slot, data[at : at + backend.state_nbytes])
            at += backend.state_nbytes

    # ---- the end of a step, and of all ----

    def counts(self) -> np.ndarray:
        """Return zeros, as Stage.counts: no neurons are counted."""
        return np.zeros((self.n_layer, len(COUNTS)), np.int64)

    def seconds(self) -> np.ndarray:
        """Return zeros, as Stage.seconds: layers are not timed."""
        return np.zeros((self.n_layer, len(PARTS)))

    def cancel(self) -> None:
        """End the step in flight after the submitted work, at most two layers of a prompt."""
        self._cancel.requested = True
        super().cancel()

    def close(self) -> None:
        """Free the memory of the device. Safe to call twice."""
        if not self._closed:
            pipelines.keep(self.info, self._device)
            self.opened.stages.remove(self)
        for backend in self._ngrams.values():
            backend.close()
        super().close()
        self.experts = None
        self._closed = True
        self._cancel.requested = True
        self.tapped = {}
        for lowered in self.__dict__.get("_lowered", {}).values():
            lowered.free()
        for name in (
            "_lowered", "_parts", "_shared", "_on_device", "cache", "_states", "matrices", "opened", "_kv",
            "_inputs", "_kernels", "_device",
        ):  # fmt: skip
            self.__dict__.pop(name, None)

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidRequestError("the model has been closed; load it again")

    def _program(self, taps: frozenset[str], *, with_adapters: bool = False) -> RecordedGraph:
        self._check_open()
        key = taps, with_adapters
        if key not in self._lowered:
            with_taps = [known for known in self._lowered if known[0]]
            while len(with_taps) > 1:  # the plain programs and the latest two with taps stay
                self._lowered.pop(with_taps.pop(0)).free()
            graph, adapters = self.graph, None
            if with_adapters:
                graph, adapters = self._adapters.graph, self._on_device
            self._lowered[key] = RecordedGraph(graph, taps, self._parts, adapters)
        return self._lowered[key]

    def _most_states(self, n_states: int) -> int:
        """Return n_states, or fewer if the device cannot bind that many of the largest state.

        Raises UnsupportedModelError if it cannot bind two.
        """
        largest = max((state_bytes(op) for op in self.graph.recurrent), default=1)
        if self._device.max_range // largest < 2:
            raise UnsupportedModelError(
                f"the state of a layer takes {human_size(largest)}, and the device binds no two at a time"
            )
        return min(n_states, int(self._device.max_range) // largest)

    def _new_cache(self, op: Attention) -> CacheOfLayer:
        """Allocate keys, values and, for q8_0, their float32 scales.

        Raises UnsupportedModelError if the device cannot bind them at a time.
        """
        check_cache(op, self.kv_type)
        sizes = cache_sizes(op, self.kv_type, self.n_blocks)
        if max(sizes) > self._device.max_range:
            raise UnsupportedModelError(
                f"the keys or values of a layer take {max(sizes) >> 20} MiB, and the device binds "
                f"{self._device.max_range >> 20} MiB at a time; lower the context"
            )
        keys, values, *scales = map(self._kv.piece, sizes)
        return CacheOfLayer(keys, values, *(scales or (keys, values)))
