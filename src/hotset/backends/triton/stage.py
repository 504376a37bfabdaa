"""A stage: some layers of a model on one device, run step by step.

A model on one GPU is one stage. On several GPUs each stage runs a range of the graph's operations and passes
the residual stream to the next. A stage may hold only the hot neurons of a layer's FFN; a CPU worker then
computes the others at the same time.

Steps of a few tokens are captured in a CUDA graph, one per number of tokens. The first such step runs without
a graph. Its calls are then recorded, and later steps replay them without Python or launches. With or without
a graph, `_compute` defines the step. It reads the tensors of StepInputs and never the batch.
"""

from __future__ import annotations

import time
from contextlib import nullcontext, suppress

import numpy as np
import torch
from torch import Tensor

from hotset.backends.base import BLOCK_SIZE, Batch
from hotset.backends.device.stage import NOTHING_SHARED, CpuShare, DeviceStage
from hotset.backends.stage import (
    OUTPUT_ROWS,
    WHOLE,
    BackendOptions,
    Rows,
    Span,
)
from hotset.backends.triton.capture import MAX_CAPTURED, Captured, Graphs
from hotset.backends.triton.cpu_offload import CudaDriver
from hotset.backends.triton.devices import current, find_device, memory_errors, synchronize
from hotset.backends.triton.experts import GpuExpertCache, can_hold
from hotset.backends.triton.experts_fetch import Fetcher
from hotset.backends.triton.fallback import N_COUNTS
from hotset.backends.triton.kernels import Kernels
from hotset.backends.triton.kv import OUTPUTS, BlockCache, StepInputs, StepOutputs
from hotset.backends.triton.launch import compiled_first
from hotset.backends.triton.options import DEFAULT_OPTIONS, GpuOptions
from hotset.backends.triton.program import Call, CpuWorkerProtocol, Program, RunningStep, StageParts
from hotset.backends.triton.stream import CopyStream
from hotset.backends.triton.weights import DeviceWeights
from hotset.errors import DeviceError, InvalidRequestError, StepCancelledError
from hotset.formats.source import WeightSource
from hotset.model.graph import Graph
from hotset.model.operations import PARTS, Attention
from hotset.offload.cache_stats import CacheStats
from hotset.offload.misses import Fetching

# Tokens of the steps that warm up, in addition to the largest step: one step for each size of tiles.
WARM_SIZES = (512, 256, 128, 64, 32, 16, 8, 4, 2, 1)


class GpuStage(DeviceStage):
    """The Stage protocol for the operations of `span` on `device`.

    options.sparse: False computes every neuron (then no layer can be split). worker: computes the CPU's part
    of `share`; the stage closes it. notes: sentences for the user about how the stage runs. nbytes: bytes of
    the stage by kind: weights, experts, kv, workspace. Raises DeviceError, InvalidRequestError and
    UnsupportedModelError, and OutOfMemoryError if the stage does not fit.
    """

    n_states = 0
    experts: GpuExpertCache | None = None

    def __init__(
        self,
        weights: WeightSource,
        graph: Graph,
        device: str,
        options: BackendOptions,
        *,
        span: Span = WHOLE,
        share: CpuShare = NOTHING_SHARED,
        worker: CpuWorkerProtocol | None = None,
        gpu: GpuOptions = DEFAULT_OPTIONS,
    ) -> None:
        super().__init__(weights, graph, options, span)
        self.device = find_device(device)
        self.kernels = gpu.kernels or Kernels(self.device)
        self.sparse = options.sparse
        attention = [op for op in self.graph.ops if isinstance(op, Attention)]
        layers = {op.layer for op in attention}
        self._hot = {i: mask for i, mask in share.hot.items() if i in layers and not mask.all()}
        self._moe_layers = {ffn.layer for ffn in self.graph.ffns if ffn.route is not None}
        self.worker: CpuWorkerProtocol | None = self._checked(worker, gpu.stream_from)
        self._n_on_cpu = 0  # tokens' experts that the CPU computed; counted only without an expert cache
        self._stream_from, self._stream_bytes = gpu.stream_from, gpu.stream_bytes
        self._input_major = frozenset(gpu.input_major)
        entering = [op.out for op in self._embeds] + ([self.entering] if self.entering else [])
        self._matrices = DeviceWeights(weights, self.device, gpu.weight_bytes)
        self._copies = CopyStream(self.device)
        self._fetcher: Fetcher | None = None
        self._programs: dict[frozenset[str], Program] = {}
        self._captured: dict[int, tuple[Captured, Tensor]] = {}
        self._capture = gpu.capture
        worker_captures = self.worker is None or self.worker.capturable
        if gpu.capture is None and self.kernels.capturable and worker_captures:
            self._capture = Graphs(self.device)
        self.notes: list[str] = []
        self.largest: np.ndarray | None = None  # StepResult.largest of the latest step
        self.candidates = None  # all logits of a step are copied to the host
        self.timed = False  # measures each group, which forbids captured graphs on a GPU
        self._seconds = np.zeros((self.n_layer, len(PARTS)))
        self._warming = False
        self._cancelled = False
        advice = "lower the context, max_batch or vram_budget, or use device='cpu'"
        with memory_errors(self.device, "loading the model", advice), current(self.device):
            self._counts = torch.zeros((self.n_layer, N_COUNTS), dtype=torch.int64, device=self.device)
            self._outputs = StepOutputs(self._counts, self.graph.result.width if self.has_output else 0)
            self._cache = BlockCache(attention, self.n_blocks, options.kv_type, self.device)
            widths = {value.id: value.width for value in entering}
            self._inputs = StepInputs(self.max_batch, self.n_blocks, widths, self.device)
            self._add_experts(share.expert_slots, share.fetching)
            self._program(frozenset())
            if self.device.type == "cuda":
                self.warm_up()

    @property
    def name(self) -> str:
        """Return torch's name of the device."""
        return str(self.device)

    @property
    def has_neurons(self) -> bool:
        """Return whether the FFNs have zeros to count."""
        return self._program(frozenset()).has_neurons

    @property
    def nbytes(self) -> dict[str, int]:
        """Return the bytes of the stage by kind. workspace: a step's inputs, and its values at their peak."""
        values = 4 * self._program(frozenset()).n_live(self.max_batch, min(self.max_batch, OUTPUT_ROWS))
        streamed = 2 * self._stream_bytes if self._hot and self._stream_from is not None else 0
        inputs = self._inputs.nbytes + self._counts.nbytes + self._matrices.table_nbytes
        return {
            "weights": self._matrices.nbytes,
            "experts": 0 if self.experts is None else self.experts.nbytes,
            "kv": self._cache.nbytes,
            "workspace": values + streamed + inputs,
        }

    def run(self, batch: Batch, x: Rows | None = None) -> Tensor:
        """Run a step, as Stage.run does.

        Logits of up to kv.OUTPUTS rows, and of more than OUTPUT_ROWS, are on the host.
        """
        self._cancelled = False
        try:
            return self._step(batch, x)
        except DeviceError:
            if self._cancelled:  # the CPU worker was cancelled, too
                raise StepCancelledError from None
            raise

    def _step(self, batch: Batch, x: Rows | None) -> Tensor:
        program = self._program(frozenset(batch.taps))
        vectors = {value.id: rows for value, rows in self.entering_rows(batch, x).items()}
        n, n_outputs = len(batch.tokens), len(batch.outputs)
        cold = None if self._streams(n) and not self._moe_layers else self.worker
        self._is_served = cold is not None
        advice = "load the model with a smaller max_batch or vram_budget"
        with memory_errors(self.device, f"computing {n} tokens", advice), current(self.device):
            self._inputs.fill(batch, vectors)
            if self.experts is not None:
                self.experts.begin_step()
            try:
                with nullcontext() if cold is None else cold.step(n, batch.thresholded):
                    result = self._run(program, n, n_outputs)
                    self._outputs.end()
                if self.has_output and n_outputs:  # without outputs the next step may begin at once
                    self._outputs.wait()
            except BaseException:
                if self._fetcher is not None:
                    with suppress(RuntimeError):  # the failed device may raise again
                        self._fetcher.settle()
                raise
            if self._moe_layers and cold is not None and not self._warming:
                self._learn({layer: cold.route(layer) for layer in sorted(self._moe_layers)})
        largest = self._outputs.largest
        self.largest = None if largest is None or n_outputs > OUTPUTS else largest[:n_outputs].numpy()
        self.weights.check()
        return result

    def counts(self) -> np.ndarray:
        """Return the counts, as Stage.counts does, including the CPU worker's neurons."""
        self._outputs.wait()
        counts: np.ndarray = self._outputs.counts.numpy().copy()
        if self.worker is not None and self._is_served:
            cold = self.worker.counts()
            counts[list(self.worker.layers), : cold.shape[1]] += cold
        return counts

    def expert_counts(self) -> CacheStats:
        """Return the statistics of experts since the start of the stage."""
        return CacheStats(on_cpu=self._n_on_cpu) if self.experts is None else super().expert_counts()

    def seconds(self) -> np.ndarray:
        """Return the seconds of the latest step, float64 [n_layer, 4]: predictor, ffn, attention, other.

        On a GPU they are zeros unless `timed` is set.
        """
        return self._seconds

    def cancel(self) -> None:
        """Cancel the running step before its next call, from any thread. The step raises StepCancelledError.

        A replayed step, which has few tokens, runs to its end, but no longer waits for the CPU worker.
        """
        self._cancelled = True
        super().cancel()

    def close(self) -> None:
        """Close the CPU worker and free the device memory. It is safe to call this twice."""
        super().close()
        self._captured.clear()
        self._programs.clear()
        self._cache.layers.clear()
        self._matrices.clear()

    def _checked(self, cold: CpuWorkerProtocol | None, stream_from: int | None) -> CpuWorkerProtocol | None:
        """Return the CPU worker, or None if no layer needs one.

        Raises InvalidRequestError if it is missing or too small.
        """
        if not (shared := self._hot.keys() | self._moe_layers):
            return None
        if cold is None:
            what = "experts" if min(shared) in self._moe_layers else "cold neurons"
            raise InvalidRequestError(f"layer {min(shared)} has {what} and needs a CPU worker for them")
        most = self.max_batch
        if stream_from is not None and not self._moe_layers:
            most = min(most, stream_from - 1)
        if cold.max_batch < most:
            raise InvalidRequestError(
                f"steps of up to {most} tokens need a CPU worker for as many, not {cold.max_batch}"
            )
        return cold

    def _add_experts(self, n_slots: int, fetching: Fetching | None) -> None:
        """Create the expert cache and its fetcher.

        Create neither without slots, or if the device cannot compute the experts bitwise like the CPU.
        """
        mixed = [ffn for ffn in self.graph.ffns if ffn.route is not None]
        held = [ffn for ffn in mixed if can_hold(ffn, self.weights.tensors, self.device)]
        n_spare = 0 if fetching is None else fetching.n_spare
        if not held or not (n_slots or n_spare):
            return
        # Triton kernels read host memory directly.
        needs = n_spare and self.device.type == "cuda" and self.kernels.triton
        registrar = CudaDriver(self.device) if needs else None
        try:
            cache = GpuExpertCache(
                self._matrices, held, n_slots, sparse=self.sparse, n_spare=n_spare, registrar=registrar
            )
        except DeviceError as error:
            self.notes.append(f"experts are not fetched for the step that needs them: {error}")
            cache = GpuExpertCache(self._matrices, held, n_slots + n_spare, sparse=self.sparse)
        self.experts, self._fetcher = cache, Fetcher(cache, self.kernels, fetching)

    def _learn(self, routes: dict[int, np.ndarray]) -> None:
        """Update the cache or the counts by the submitted routes of a step. routes: layer → experts."""
        if self.experts is not None:
            self.experts.learn(routes)
        else:
            self._n_on_cpu += sum(asked.size for asked in routes.values())

    # ---- one step ----

    def _run(self, program: Program, n: int, n_outputs: int) -> Tensor:
        self._seconds[:] = 0
        small = n <= MAX_CAPTURED and not program.taps and not self.timed
        may_replay = self._capture is not None or n in self._captured
        if not may_replay or not small or self._streams(n):
            return self._eager(program, n, n_outputs)
        if n not in self._captured:
            return self._record(program, n, n_outputs)
        graph, result = self._captured[n]
        graph.replay()
        return self._outputs.logits[:n_outputs] if self.has_output else result

    def _record(self, program: Program, n: int, n_outputs: int) -> Tensor:
        """Run a step, and record it for later steps of its size.

        After a failed capture the stage captures no more, and `notes` reports it.
        """
        assert self._capture is not None
        # Run with as many outputs as the recording, because a capture cannot load new kernels.
        result = self._eager(program, n, n)
        if self.experts is not None:
            self.experts.settle()
        try:
            self._captured[n] = self._capture(lambda: self._computed(program, n, n, {}))
        except StepCancelledError:
            raise
        except Exception as error:
            self._capture = None
            why = str(error).strip().partition("\n")[0] or type(error).__name__
            self.notes.append(
                f"{self.device}: steps of {n} tokens cannot be captured, and are launched one kernel after "
                f"the other, which takes longer ({why})"
            )
        return result[:n_outputs] if self.has_output else result

    def _eager(self, program: Program, n: int, n_outputs: int) -> Tensor:
        taps: dict[str, list[Tensor]] = {}
        result = self._computed(program, n, n_outputs, taps)
        self.tapped = {
            name: np.concatenate([rows.cpu().numpy() for rows in parts]) for name, parts in taps.items()
        }
        return result

    def _computed(self, program: Program, n: int, n_outputs: int, taps: dict[str, list[Tensor]]) -> Tensor:
        """Run `_compute`, and start to copy counts, and the logits of few rows, to the host."""
        result = self._compute(program, n, n_outputs, taps)
        few = self.has_output and 0 < n_outputs <= OUTPUTS
        self._outputs.take(self._counts, result if few else None, self.kernels)
        return self._outputs.logits[:n_outputs] if few else result

    def _compute(self, program: Program, n: int, n_outputs: int, taps: dict[str, list[Tensor]]) -> Tensor:
        """Run the calls of a step on the current contents of the inputs."""
        self._counts.zero_()
        inputs = self._inputs
        frame = RunningStep(n, inputs, inputs.outputs[:0], self._streams(n), self._warming)
        if self.entering is not None:
            frame.values[self.entering.id] = inputs.vectors[self.entering.id][:n]
        for call in program.body:
            self._call(call, frame, program, taps)
        last = self.graph.result.id
        if not program.tail:
            return frame.values[last]
        if n_outputs == 0:
            for call in program.tail:
                for value in call.outs:
                    if value.id in program.taps:
                        taps[value.name] = [torch.zeros((0, value.width))]
            return torch.zeros((0, self.graph.result.width))
        slices = []
        for first in range(0, n_outputs, OUTPUT_ROWS):
            outputs = inputs.outputs[first : min(first + OUTPUT_ROWS, n_outputs)]
            part = RunningStep(n, inputs, outputs, frame.streamed, frame.warming, dict(frame.values))
            for call in program.tail:
                self._call(call, part, program, taps)
            slices.append(part.values[last] if n_outputs <= OUTPUT_ROWS else part.values[last].cpu())
        return slices[0] if len(slices) == 1 else torch.cat(slices)

    def _call(self, call: Call, frame: RunningStep, program: Program, taps: dict[str, list[Tensor]]) -> None:
        if self._cancelled:
            raise StepCancelledError
        if self.timed or self.device.type == "cpu":
            synchronize(self.device)
            began = time.perf_counter()
            call.run(frame)
            synchronize(self.device)
            self._seconds[call.layer, call.part] += time.perf_counter() - began
        else:
            call.run(frame)
        for value in call.outs:
            if value.id in program.taps:
                taps.setdefault(value.name, []).append(frame.values[value.id])
        for id in call.drops:
            frame.values.pop(id, None)

    def _streams(self, n: int) -> bool:
        return bool(self._hot) and self._stream_from is not None and n >= self._stream_from

    # ---- programs, graphs ----

    def _program(self, taps: frozenset[str]) -> Program:
        if taps not in self._programs:
            unknown = taps - {value.name for value in self.graph.values}
            if unknown:
                raise InvalidRequestError(f"the model has no value named {min(unknown)!r} to tap")
            while len(self._programs) > 2:  # keep the plain program and the latest two with taps
                self._programs.pop(next(key for key in self._programs if key))
            parts = StageParts(
                self._matrices, self._cache, self.kernels, self._hot, self.worker, self._counts, self._copies,
                self._fetcher, n_ctx=self.n_blocks * BLOCK_SIZE, sparse=self.sparse,
                stream_bytes=self._stream_bytes, input_major=self._input_major,
            )  # fmt: skip
            self._programs[taps] = Program(self.graph, taps, parts)
        return self._programs[taps]

    def warm_up(self) -> None:
        """Compile the kernels, several at a time, and allocate the memory of the largest step.

        No later step compiles or allocates.

        No token of these steps has a KV block, so the cache does not change.
        """
        self._warming = True
        if self.kernels.triton:
            capture, self._capture = self._capture, None  # these steps launch nothing to capture
            with compiled_first(self.device):
                self._warm()
            self._capture = capture
        self._warm()
        self._warming = False

    def _warm(self) -> None:
        """Run a step of each size that has kernels of its own."""
        # The largest step comes first; the others reuse its memory.
        for n in sorted({n for n in (self.max_batch, *WARM_SIZES) if n <= self.max_batch}, reverse=True):
            zeros, rows = np.zeros(n, np.int32), np.arange(n, dtype=np.int32)
            x = None if self.entering is None else torch.zeros((n, self.entering.width))
            self.run(Batch(zeros, zeros, zeros, np.full((1, 1), -1, np.int32), rows), x)
