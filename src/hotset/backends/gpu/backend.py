"""The Backend protocol over one device that has the whole model."""

from __future__ import annotations

import time
from typing import Any

from hotset.backends.base import Batch, StepResult, StepStats, WeightSource, cache_slots
from hotset.backends.gpu.devices import find_device, free_bytes
from hotset.backends.gpu.kernels import Kernels
from hotset.backends.gpu.stage import GpuStage
from hotset.errors import OutOfMemoryError
from hotset.model.cost import KVType
from hotset.model.graph import Graph
from hotset.placement.budget import model_facts
from hotset.units import human_size


class GpuBackend:
    """One stage that is the whole graph; see GpuStage for `options` and what is raised.

    OutOfMemoryError is raised before anything is loaded where the device has too little memory free.

    kernels: None chooses Triton or plain torch (kernels.Kernels). sparse: False computes every neuron.
    """

    name = "gpu"

    def __init__(
        self,
        weights: WeightSource,
        graph: Graph,
        *,
        device: str,
        n_pages: int,
        max_batch: int = 512,
        kv_type: KVType = "f16",
        sparse: bool = True,
        kernels: Kernels | None = None,
        **options: Any,
    ) -> None:
        found = find_device(device)
        facts = model_facts(
            graph, weights.tensors, mode="dense", kv_type=kv_type, n_pages=n_pages, max_batch=max_batch
        )
        free = free_bytes(found)
        if facts.whole_bytes > free:
            raise OutOfMemoryError(
                f"the model needs {human_size(facts.whole_bytes)} on {found}, cache and workspace included, "
                f"and {human_size(free)} are free; share it with the CPU (--vram-budget) or lower the context"
            )
        self.n_pages, self.max_batch, self.kv_type, self.sparse = n_pages, max_batch, kv_type, sparse
        self.n_vocab = graph.logits.width
        self.stage = GpuStage(
            weights,
            graph,
            device,
            n_pages=n_pages,
            max_batch=max_batch,
            kv_type=kv_type,
            sparse=sparse,
            kernels=kernels,
            **options,
        )
        self._latest: tuple[int, float] | None = None  # tokens and seconds of the latest step

    @property
    def device(self) -> str:
        """The device's name as torch has it."""
        return str(self.stage.device)

    def step(self, batch: Batch) -> StepResult:
        """Runs one step. Raises InvalidRequestError, OutOfMemoryError."""
        cache_slots(batch, max_batch=self.max_batch, n_pages=self.n_pages, n_vocab=self.n_vocab)
        began = time.perf_counter()
        logits = self.stage.run(batch).cpu().numpy()  # waits for the device
        self._latest = len(batch.tokens), time.perf_counter() - began
        return StepResult(logits, self.stage.tapped if batch.taps else {})

    def stats(self) -> StepStats | None:
        """Counts and times of the latest step; None for a model whose FFNs have no zeros.

        On a GPU all of its time is `other`, unless `stage.timed` is set. Of a step with taps that lie inside
        an FFN there are no counts for it.
        """
        if self._latest is None or not self.stage.has_neurons:
            return None
        n_tokens, total = self._latest
        selected, active, gate_rows, up_rows, down_rows = self.stage.counts().T
        predictor, ffn, attention, _ = self.stage.seconds().T
        other = max(total - float((predictor + ffn + attention).sum()), 0.0)
        return StepStats(
            n_tokens, selected, active, gate_rows, up_rows, down_rows, predictor, ffn, attention, other
        )

    def close(self) -> None:
        """Frees the memory of the device; safe to call twice."""
        self._latest = None
        self.stage.close()
