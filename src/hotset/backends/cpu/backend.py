"""The CPU backend: lowering.py turns a graph into a plan once; a step is one call into C++.

A tapped value is kept, and fusions that would remove it are not applied; the bits stay the same.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from hotset import _core
from hotset.backends.adapters import AdapterSet
from hotset.backends.base import (
    BLOCK_SIZE,
    COUNTS,
    LOGIT_GROUP,
    SAVED_TOKENS,
    Batch,
    StepResult,
    StepStats,
    WithoutDevices,
)
from hotset.backends.cpu.lowering import Lowered, LoweringOptions, lower
from hotset.backends.stage import WHOLE, BackendOptions, Rows, Span, on_host
from hotset.cores import usable_cores
from hotset.errors import InvalidRequestError
from hotset.formats.source import WeightSource
from hotset.model.cost import check_cache, index_slots, kv_formats
from hotset.model.graph import Graph
from hotset.model.operations import PARTS, Attention, Indexer, Recurrent
from hotset.offload.weight_store import StoredWeights

assert (_core.KV_BLOCK_SIZE, _core.LOGIT_GROUP) == (BLOCK_SIZE, LOGIT_GROUP)
assert _core.SAVED_TOKENS == SAVED_TOKENS

_PlanKey = tuple[frozenset[str], bool]  # the taps of a plan, and whether it has adapters


def native_code() -> bytes:
    """Return the bytes of the native module. Values that another module computed may have other bits."""
    return Path(_core.__file__).read_bytes()


def new_runtime(n_threads: int | None = None) -> _core.Runtime:
    """Start threads for the plans of one model; None uses every core that this process may use.

    The caller must close the runtime. Raises InvalidRequestError if the number is out of range, or if not all
    threads can be started.
    """
    if n_threads is not None and not 1 <= n_threads <= 256:
        raise InvalidRequestError(f"the number of threads must be 1 to 256, not {n_threads}")
    return _core.Runtime(n_threads or min(usable_cores(), 256))


class CpuBackend(WithoutDevices):
    """The Backend protocol over the native core, and the Stage protocol over a part of a graph.

    span: the operations that it executes; a part of the model supports only `run`, not `step`. isa: forces a
    set of kernels, like the environment variable HOTSET_ISA. runtime: shared threads and memory, used instead
    of n_threads own threads; the backend does not close it. cache_of: another backend with the same layers,
    n_blocks and kv_type, whose keys and values it reads and writes.
    The constructor raises UnsupportedModelError if a tensor type has no kernel, or if kv_type does not fit
    the heads.
    """

    name = "cpu"
    is_on_device = False

    def __init__(
        self,
        weights: WeightSource,
        graph: Graph,
        options: BackendOptions,
        *,
        span: Span = WHOLE,
        isa: str | None = None,
        runtime: _core.Runtime | None = None,
        cache_of: CpuBackend | None = None,
    ) -> None:
        self.weights, self.sparse = weights, options.sparse
        self.graph, self.entering = span.of(graph)
        self._has_thresholds = self.graph.has_thresholds
        self.has_output = span.ends(graph)
        self.n_layer = max(graph.n_layer, 1)
        self.n_blocks, self.max_batch, self.kv_type = options.n_blocks, options.max_batch, options.kv_type
        self.n_vocab = graph.n_vocab(weights.tensors)
        self._isa, self._channel_rates = isa, options.channel_rates
        self._whole = frozenset(options.whole)
        self._cache: dict[tuple[type, int], tuple[np.ndarray | None, ...]] = {}  # by operation and layer
        if cache_of is not None:
            self._cache = cache_of._cache  # noqa: SLF001
        else:
            for op in self.graph.ops:
                if isinstance(op, Attention) and op.source is None:
                    self._cache[Attention, op.layer] = self._shared_cache(op) or self._new_cache(op)
                elif isinstance(op, Indexer):
                    self._cache[Indexer, op.layer] = self._new_index(op)
        self.n_states = options.n_states if graph.recurrent else 0
        # Untouched slots cost no memory.
        self._states = {
            op.out: np.zeros((self.n_states, math.prod(op.state_shape)), np.float32)
            for op in self.graph.recurrent
        }
        # As in CacheMemory.
        self.block_nbytes = sum(part.shape[1] for part in self._block_parts())
        self.state_nbytes = sum(state[0].nbytes for state in self._states.values())
        self._lowered: dict[_PlanKey, Lowered] = {}
        self._adapters = AdapterSet(self.graph, weights.tensors)
        self._latest: tuple[Lowered, int] | None = None  # plan and tokens of the latest step
        self.tapped: dict[str, np.ndarray] = {}
        self.candidates = None  # the host has all logits
        self.notes: tuple[str, ...] = ()
        self._closes_runtime = runtime is None
        self._runtime: _core.Runtime | None = runtime or new_runtime(options.n_threads)
        self.n_threads = self._runtime.n_threads
        try:
            self._plan_for(frozenset())
        except BaseException:
            self.close()
            raise

    @property
    def runtime(self) -> _core.Runtime | None:
        """Return the threads, also used by another model's plans between two steps; None once closed."""
        return self._runtime

    @property
    def stage(self) -> CpuBackend:
        """Return this backend, which is a stage too."""
        return self

    def open_draft(self, weights: WeightSource, graph: Graph, options: BackendOptions) -> CpuBackend:
        """Open a draft, as WholeModel.open_draft."""
        return CpuBackend(weights, graph, options, runtime=self._runtime, cache_of=self)

    def open_layer(self, weights: WeightSource, graph: Graph, options: BackendOptions) -> CpuBackend:
        """Open a layer, as WholeModel.open_layer."""
        return CpuBackend(weights, graph, options, runtime=self._runtime)

    @property
    def isa(self) -> str:
        """Return the instruction set in use: amx, avx512, avxvnni, avx2, i8mm, neon or scalar."""
        return str(self._plan_for(frozenset()).plan.isa)

    def step(self, batch: Batch) -> StepResult:
        """Run one step. The logits are a view that the next step overwrites.

        Raises InvalidRequestError if the backend has only a part of the model.
        """
        if self.entering is not None or not self.has_output:
            raise InvalidRequestError("a part of a model has no step of its own; it is a stage of a chain")
        return StepResult(self.run(batch), self.tapped, self.largest)

    @property
    def largest(self) -> np.ndarray | None:
        """Return the largest logits of the latest step, as StepResult.largest."""
        return None if self._latest is None else self._latest[0].largest_logits()

    def run(self, batch: Batch, x: Rows | None = None) -> np.ndarray:
        """Check and run a batch, as Stage.run. The rows are a view that the next step overwrites."""
        scales = self._adapters.scales(batch)
        lowered = self._plan_for(frozenset(batch.taps), with_adapters=scales is not None)
        plan = lowered.plan
        self._latest = None
        # Check before the step too: if another SIGBUS handler has replaced ours, reading a lost page of the
        # file ends the process.
        self.weights.check()
        try:
            plan.run(
                batch.tokens, batch.positions, batch.sequences, batch.block_tables, batch.outputs,
                None if x is None else on_host(x),
                None if batch.thresholded is None else batch.thresholded.view(np.uint8),
                *((batch.states, batch.saves) if self.n_states else (None, None)),
                scales, batch.rotary, batch.groups,
                *(() if batch.image_rows is None else (batch.image_rows.places, batch.image_rows.rows)),
            )  # fmt: skip
        except ValueError as error:
            raise InvalidRequestError(str(error)) from None
        self.weights.check()
        self._latest = lowered, len(batch.tokens)
        self.tapped = {name: plan.rows(lowered.buffers[name]).copy() for name in batch.taps}
        rows: np.ndarray = plan.rows(lowered.result)
        return rows

    def stats(self) -> StepStats | None:
        """Return counts and times of the latest step; None if FFNs have no zeros and no thresholds exist.

        An FFN with taps inside is not counted.
        """
        if self._latest is None or not (self._latest[0].has_neurons or self._has_thresholds):
            return None
        seconds = self.seconds()
        other = sum(seconds[:, PARTS.index("other")].tolist())  # NumPy is slower for few values
        return StepStats.of(
            self._latest[1], self.counts(), seconds, other, has_thresholds=self._has_thresholds
        )

    @property
    def has_neurons(self) -> bool:
        """Return whether the FFNs have zeros to count."""
        return self._plan_for(frozenset()).has_neurons

    @property
    def workspace_bytes(self) -> int:
        """Return the bytes of intermediates and scratch in the plain plan, without weights and cache."""
        return int(self._plan_for(frozenset()).plan.nbytes)

    @property
    def buffer_bytes(self) -> int:
        """Return the part of workspace_bytes that is not in the runtime, which stages share."""
        return int(self._plan_for(frozenset()).plan.own_nbytes)

    @property
    def nbytes(self) -> dict[str, int]:
        """Return nothing: the backend uses no device memory."""
        return {}

    def counts(self) -> np.ndarray:
        """Return the counts of the latest step, int64 [n_layer, len(COUNTS)]."""
        if self._latest is None:
            return np.zeros((self.n_layer, len(COUNTS)), np.int64)
        lowered, n = self._latest[0], self.n_layer * len(COUNTS)
        counts: np.ndarray = lowered.plan.op_counts(lowered.counted, n + 1)
        return counts[1:].reshape(self.n_layer, len(COUNTS))

    def active_on_cpu(self) -> np.ndarray:
        """Return the active neurons of the latest step, int64 [n_layer]. The CPU computes all of them."""
        return self.counts()[:, 1]

    def seconds(self) -> np.ndarray:
        """Return the seconds of the latest step, float64 [n_layer, len(PARTS)]."""
        shape = self.n_layer, len(PARTS)
        if self._latest is None:
            return np.zeros(shape)
        lowered = self._latest[0]
        seconds: np.ndarray = lowered.plan.op_seconds(lowered.cell, self.n_layer * len(PARTS))
        return seconds.reshape(shape)

    def cpu_worker_seconds(self) -> np.ndarray:
        """Return zeros [n_layer]: this backend computes no neurons for a device."""
        return np.zeros(self.n_layer)

    def _block_parts(self) -> list[np.ndarray]:
        """Return the keys, values and scales of all layers, each uint8 [n_blocks, bytes of a KV block]."""
        parts = [part for layer in self._cache.values() for part in layer]
        return [part.reshape(self.n_blocks, -1) for part in parts if part is not None]

    def read_block(self, block: int) -> bytes:
        """Read a KV block, as CacheMemory.read_block."""
        return b"".join(part[block].tobytes() for part in self._block_parts())

    def write_block(self, block: int, data: bytes) -> None:
        """Write a KV block, as CacheMemory.write_block."""
        rows, at = np.frombuffer(data, np.uint8), 0
        for part in self._block_parts():
            part[block] = rows[at : at + part.shape[1]]
            at += part.shape[1]

    def read_state(self, slot: int) -> bytes:
        """Read a state, as CacheMemory.read_state."""
        return b"".join(state[slot].tobytes() for state in self._states.values())

    def write_state(self, slot: int, data: bytes) -> None:
        """Write a state, as CacheMemory.write_state."""
        values, at = np.frombuffer(data, np.float32), 0
        for state in self._states.values():
            state[slot] = values[at : at + state.shape[1]]
            at += state.shape[1]

    def cancel(self) -> None:
        """End the step in flight, from any thread. The step raises StepCancelledError."""
        for lowered in list(self._lowered.values()):
            lowered.plan.cancel()

    def close(self) -> None:
        """End the backend's own threads, and release plans and cache. Safe to call twice."""
        self.cancel()
        runtime, self._runtime = self._runtime, None
        if runtime is not None and self._closes_runtime:
            runtime.close()
        self._latest = None
        self.tapped = {}
        self._lowered.clear()
        self._cache = {}
        self._states.clear()

    @property
    def adapters(self) -> AdapterSet:
        """Return the adapters that sequences may have.

        Set them only between two steps. A part of a model does not accept adapters.
        """
        return self._adapters

    @adapters.setter
    def adapters(self, adapters: AdapterSet) -> None:
        self._latest = None
        for key in [key for key in self._lowered if key[1]]:
            del self._lowered[key]
        self._adapters = adapters

    def _plan_for(self, taps: frozenset[str], *, with_adapters: bool = False) -> Lowered:
        key = taps, with_adapters
        if key not in self._lowered:
            with_taps = [known for known in self._lowered if known[0]]
            while len(with_taps) > 1:  # the plain plans and the latest two with taps stay
                self._lowered.pop(with_taps.pop(0))
            self._lowered[key] = self._lower(*key)
        return self._lowered[key]

    def _lower(self, taps: frozenset[str], with_adapters: bool) -> Lowered:
        if self._runtime is None:
            raise InvalidRequestError("the model has been closed; load it again")
        try:
            plan = _core.Plan(self.max_batch, self.n_blocks, self.n_blocks, self._runtime, self._isa)
        except ValueError as error:  # a wrong HOTSET_ISA, or a processor without the required instructions
            raise InvalidRequestError(str(error)) from None
        streamed = self.weights.streamed if isinstance(self.weights, StoredWeights) else None
        options = LoweringOptions(
            self.sparse, self._channel_rates, self._whole, streamed, self._cache_of, self._states_of,
            self._adapters,
        )  # fmt: skip
        graph = self._adapters.graph if with_adapters else self.graph
        return lower(graph, taps, self.weights, plan, self.entering, options)

    def _states_of(self, op: Recurrent) -> np.ndarray:
        """Return the state slots of an operation, float32 [n_states, size]."""
        return self._states[op.out]

    def _cache_of(self, op: Attention | Indexer) -> dict[str, Any]:
        """Return the keys and values, or the index keys, of a layer as facts of a native operation."""
        if isinstance(op, Indexer):
            keys, scales = self._cache[Indexer, op.layer]
            return {"kv_type": self.kv_type, "k_cache": keys, "k_scale": scales}
        names = ["k_cache", "v_cache", "k_scale", "v_scale"]
        names += [f"block_{name}" for name in names if op.blocks is not None]
        return {
            "kv_type": self.kv_type,
            **dict(zip(names, self._cache[Attention, op.cache_layer], strict=True)),
        }

    def _shared_cache(self, op: Attention) -> tuple[np.ndarray | None, ...] | None:
        """Return the cache of an encoder's first layer; None for a decoder or the first layer itself.

        An encoder needs keys and values only while it computes a layer, so its layers share one cache.
        """
        return None if op.causal else next(iter(self._cache.values()), None)

    def _new_index(self, op: Indexer) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Allocate index keys and their scales, or None without scales."""
        check_cache(op, self.kv_type)
        format, _ = kv_formats(self.kv_type)
        n = self.n_blocks * index_slots(op.size) * op.head_dim
        scales = np.zeros(2 * n // format.n_channels, np.uint8) if format.n_channels > 1 else None
        return np.zeros(n * format.bits // 8, np.uint8), scales

    def _new_cache(self, op: Attention) -> tuple[np.ndarray | None, ...]:
        """Allocate keys, values and their scales; for block attention, the same again for the blocks.

        Scales are None if kv_type has none. Untouched KV blocks use no memory.
        """
        check_cache(op, self.kv_type)
        slots = self.n_blocks * op.n_head_kv * BLOCK_SIZE
        found: list[np.ndarray | None] = []
        for _ in range(1 if op.blocks is None else 2):
            scales: list[np.ndarray | None] = []
            widths = op.head_dim, -(-op.head_dim_v // 16) * 16  # values are padded to whole vectors
            for format, width in zip(kv_formats(self.kv_type), widths, strict=True):
                found.append(np.zeros(slots * width * format.bits // 8, np.uint8))
                n_scales = slots * width // format.n_channels if format.n_channels > 1 else 0
                scales.append(np.zeros(2 * n_scales, np.uint8) if n_scales else None)
            found += scales
        return tuple(found)
