"""A stage on a Vulkan device: some layers of a model, or all of them, run step by step.

What a step does is recorded once for each number of tokens (program.py) and then submitted: nothing is
recorded for a token. The host writes the numbers of a batch (inputs.py), submits, and waits for logits.
"""

from __future__ import annotations

import numpy as np

from hotset import _core
from hotset.backends.base import COUNTS, PAGE_SIZE, Batch, cache_slots
from hotset.backends.embedding import lookup
from hotset.backends.stage import Rows, on_host
from hotset.backends.vulkan.devices import VulkanInfo, validates
from hotset.backends.vulkan.inputs import OUTPUT_ROWS, StepInputs
from hotset.backends.vulkan.kernels import Kernels
from hotset.backends.vulkan.memory import Arena
from hotset.backends.vulkan.program import (
    KV_CHANNELS,
    KV_CODES,
    CacheOfLayer,
    Lowered,
    StageParts,
    stride_of,
)
from hotset.backends.vulkan.weights import DeviceWeights
from hotset.errors import InvalidRequestError, UnsupportedModelError
from hotset.formats.source import WeightSource
from hotset.model.cost import KVType, check_cache
from hotset.model.graph import Graph
from hotset.model.operations import PARTS, Attention, Embed, Rotate, Value
from hotset.offload.cache_stats import CacheStats


class VulkanStage:
    """The Stage protocol over graph.ops[first_op:last_op] on a Vulkan device.

    budget: bytes of the device's memory that it takes at most, loading and computing; None: what is there.
    staged: the host copies to the device even where it could write its memory (of tests). nbytes: what the
    stage holds, by kind: weights, kv, workspace. Raises DeviceError, OutOfMemoryError where the model does
    not fit, and UnsupportedModelError for what no kernel computes.
    """

    def __init__(  # noqa: PLR0913
        self,
        weights: WeightSource,
        graph: Graph,
        device: VulkanInfo,
        *,
        first_op: int = 0,
        last_op: int | None = None,
        n_pages: int,
        max_batch: int,
        kv_type: KVType = "f16",
        budget: int | None = None,
        staged: bool = False,
    ) -> None:
        self.graph, self.entering = graph.split(first_op, len(graph.ops) if last_op is None else last_op)
        self.has_output = last_op in (None, len(graph.ops))
        self.n_layer, self.n_pages, self.max_batch, self.kv_type = graph.n_layer, n_pages, max_batch, kv_type
        if self.graph.recurrent:
            raise UnsupportedModelError(
                "models with recurrent layers have no Vulkan kernels yet; leave --device out, and the CPU "
                "computes this one"
            )
        if kv_type not in KV_CODES:
            raise UnsupportedModelError(
                f"a {kv_type} cache has no Vulkan kernels; use f16 or q8_0, or leave --device out, and the "
                "CPU computes"
            )
        self.name = device.name
        self._source, self._info = weights, device
        self._device = _core.VulkanDevice(device.index, validates(), staged)
        if budget is not None:
            self._device.limit(budget)
        self._kernels = Kernels(self._device)
        self._weights = DeviceWeights(weights, self._device)
        self._kv = Arena(self._device)
        self._cancel = _core.VulkanCancel()
        self._embeds = [op for op in self.graph.ops if isinstance(op, Embed)]
        entering = [op.out for op in self._embeds] + ([self.entering] if self.entering else [])
        attention = [op for op in self.graph.ops if isinstance(op, Attention)]
        self._inputs = StepInputs(
            self._device,
            max_batch=max_batch,
            n_pages=n_pages,
            ropes=tuple(dict.fromkeys(op.rope for op in self.graph.ops if isinstance(op, Rotate))),
            entering={value: stride_of(value) for value in entering},
            heads=tuple(dict.fromkeys(op.n_head for op in attention)),
        )
        self._cache = {op.layer: self._new_cache(op) for op in attention if op.source is None}
        self._parts = StageParts(
            self._weights, self._kernels, self._inputs, self._cache, kv_type, max_batch, n_pages
        )
        self._lowered: dict[frozenset[str], Lowered] = {}
        self.tapped: dict[str, np.ndarray] = {}
        self.largest = None  # of logits: it is not found here
        self._closed = False
        self._program(frozenset())

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know of how it runs, a sentence each."""
        name = f"{self._info.name} (Vulkan {self._info.api})"
        if self._info.kind == "software":
            return (f"{name} is a software driver: it computes on the CPU, and makes nothing faster",)
        return (f"the model is on {name}",)

    @property
    def has_neurons(self) -> bool:
        """No neurons are counted: every one is computed."""
        return False

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes of the device's memory that the stage holds; workspace: values and inputs of the plain
        steps."""
        values = self._lowered[frozenset()].nbytes if self._lowered else 0
        return {
            "weights": self._weights.arena.nbytes,
            "kv": self._kv.nbytes,
            "workspace": values + self._inputs.nbytes,
        }

    def run(self, batch: Batch, x: Rows | None = None) -> np.ndarray:
        """As Stage.run."""
        n = len(batch.tokens)
        lowered = self._program(frozenset(batch.taps))
        rows: dict[Value, np.ndarray] = {op.out: lookup(self._source, op, batch) for op in self._embeds}
        if (self.entering is None) != (x is None):
            raise InvalidRequestError("a stage that begins with tokens takes no residual; another needs it")
        if self.entering is not None and x is not None:
            if tuple(x.shape) != (n, self.entering.width):
                raise InvalidRequestError(
                    f"the rows that enter are [{n}, {self.entering.width}], a row per token; these are "
                    f"{list(x.shape)}"
                )
            rows[self.entering] = on_host(x)
        # Without n_vocab: the chain has checked the tokens.
        slots = cache_slots(batch, max_batch=self.max_batch, n_pages=self.n_pages, n_vocab=None)
        self._cancel.asked = False
        self._inputs.fill(batch, slots, rows)
        result = self._run(lowered, batch)
        self._source.check()
        return result

    def _run(self, lowered: Lowered, batch: Batch) -> np.ndarray:
        n, result = len(batch.tokens), self.graph.result
        body = lowered.recorded("body", n).program
        taps = [value for value in lowered.tapped if lowered.is_of_tail(value)]
        found: dict[str, list[np.ndarray]] = {value.name: [] for value in taps}
        if not self.has_output:
            _core.vulkan_run([body], self._cancel)
            logits = lowered.rows(result, n)
        else:
            logits = np.empty((len(batch.outputs), result.width), np.float32)
            before = [body]
            for at in range(0, len(batch.outputs), OUTPUT_ROWS):
                chosen = batch.outputs[at : at + OUTPUT_ROWS]
                self._inputs.choose(chosen)
                _core.vulkan_run([*before, lowered.recorded("tail", len(chosen)).program], self._cancel)
                logits[at : at + len(chosen)] = lowered.rows(result, len(chosen))
                for value in taps:
                    found[value.name].append(lowered.rows(value, len(chosen)))
                before = []
            if before:
                _core.vulkan_run(before, self._cancel)
        self.tapped = {name: np.concatenate(parts) for name, parts in found.items() if parts}
        embedded = {op.out: op for op in self._embeds}
        for value in lowered.tapped:
            if value in embedded:
                self.tapped[value.name] = lookup(self._source, embedded[value], batch)
            elif not lowered.is_of_tail(value):
                self.tapped[value.name] = lowered.rows(value, n)
        return logits

    def counts(self) -> np.ndarray:
        """As Stage.counts: no neurons are counted."""
        return np.zeros((self.n_layer, len(COUNTS)), np.int64)

    def active_on_cpu(self) -> np.ndarray:
        """The CPU computes no neurons here: zeros [n_layer]."""
        return np.zeros(self.n_layer, np.int64)

    def seconds(self) -> np.ndarray:
        """As Stage.seconds: nothing is measured by layer."""
        return np.zeros((self.n_layer, len(PARTS)))

    def cpu_worker_seconds(self) -> np.ndarray:
        """No CPU worker takes part: zeros [n_layer]."""
        return np.zeros(self.n_layer)

    def expert_counts(self) -> CacheStats:
        """The device has all experts."""
        return CacheStats()

    def cancel(self) -> None:
        """Ends the step in flight after what was submitted, at most two layers of a prompt."""
        self._cancel.asked = True

    def close(self) -> None:
        """Frees the memory of the device; safe to call twice."""
        self._closed = True
        self._cancel.asked = True
        self.tapped = {}
        for name in ("_lowered", "_parts", "_cache", "_weights", "_kv", "_inputs", "_kernels", "_device"):
            self.__dict__.pop(name, None)

    def _program(self, taps: frozenset[str]) -> Lowered:
        if self._closed:
            raise InvalidRequestError("the model has been closed; load it again")
        if taps not in self._lowered:
            while len(self._lowered) > 2:  # the plain program and the latest two with taps stay
                self._lowered.pop(next(key for key in self._lowered if key))
            self._lowered[taps] = Lowered(self.graph, taps, self._parts)
        return self._lowered[taps]

    def _new_cache(self, op: Attention) -> CacheOfLayer:
        """Keys, values, and of q8_0 their scales as float32."""
        check_cache(op, self.kv_type)
        per, places = KV_CHANNELS[self.kv_type], self.n_pages * op.n_head_kv * PAGE_SIZE
        sizes = [16 * -(-dim // per) * places for dim in (op.head_dim, op.head_dim_v)]
        if max(sizes) > self._device.max_range:
            raise UnsupportedModelError(
                f"the keys or values of a layer take {max(sizes) >> 20} MiB, and the device binds "
                f"{self._device.max_range >> 20} MiB at a time; lower the context"
            )
        keys, values = (self._kv.piece(size) for size in sizes)
        if self.kv_type != "q8_0":
            return CacheOfLayer(keys, values, keys, values)
        scales = [self._kv.piece(4 * -(-dim // 32) * places) for dim in (op.head_dim, op.head_dim_v)]
        return CacheOfLayer(keys, values, *scales)
