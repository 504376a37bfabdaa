"""The Backend protocol over a Vulkan device that has a model, or its last layers."""

from __future__ import annotations

from hotset.backends.adapters import AdapterSet
from hotset.backends.cpu.backend import CpuBackend, new_runtime
from hotset.backends.pipeline import HOST, ChainBackend
from hotset.backends.stage import Stage
from hotset.backends.vulkan.devices import find_device
from hotset.backends.vulkan.stage import VulkanStage
from hotset.errors import UnsupportedModelError
from hotset.formats.source import WeightSource
from hotset.model.cost import KVType
from hotset.model.graph import Graph


class WholeVulkan(ChainBackend):
    """A whole model on a Vulkan device, which takes adapters too (backends/adapters.py)."""

    @property
    def _stage(self) -> VulkanStage:
        (stage,) = self.stages
        assert isinstance(stage, VulkanStage)
        return stage

    @property
    def graph(self) -> Graph:
        """Of the model, without adapters."""
        return self._stage.graph

    @property
    def weights(self) -> WeightSource:
        """Of the model."""
        return self._stage.weights

    @property
    def adapters(self) -> AdapterSet:
        """Those that sequences may have. Set between two steps."""
        return self._stage.adapters

    @adapters.setter
    def adapters(self, adapters: AdapterSet) -> None:
        self._stage.adapters = adapters
        self._values = [frozenset(op.out.name for op in adapters.graph.primitives)]


def open_vulkan(  # noqa: PLR0913
    weights: WeightSource,
    graph: Graph,
    device: str = "vulkan",
    *,
    n_pages: int,
    n_states: int = 2,
    max_batch: int = 512,
    kv_type: KVType = "f16",
    n_threads: int | None = None,
    n_layers: int | None = None,
    budget: int | None = None,
    staged: bool = False,
) -> ChainBackend:
    """A model on a Vulkan device; the first layers on the CPU where n_layers leaves some out.

    device: as devices.find_device takes it. n_layers: how many of the last ones are on the device; None: all.
    n_states: slots for recurrent states, where there are any. n_threads: of the CPU. budget: bytes that the
    device gives at most; staged: as in VulkanStage.
    Raises DeviceError, OutOfMemoryError, UnsupportedModelError; then nothing stays open.
    """
    info = find_device(device)
    first_op = 0
    if n_layers is not None and n_layers < graph.n_layer:
        if not graph.is_layered:
            raise UnsupportedModelError(
                "more than one value crosses from layer to layer in this model: it is not split between the "
                "CPU and a Vulkan device; leave -ngl out"
            )
        first_op = graph.layer_starts[graph.n_layer - n_layers]
    stages: list[Stage] = []
    runtime = new_runtime(n_threads) if first_op else None
    try:
        if runtime is not None:
            stages.append(
                CpuBackend(
                    weights, graph, n_pages=n_pages, n_states=n_states, max_batch=max_batch, kv_type=kv_type,
                    runtime=runtime, last_op=first_op,
                )
            )  # fmt: skip
        stages.append(
            VulkanStage(
                weights, graph, info, first_op=first_op, n_pages=n_pages, n_states=n_states,
                max_batch=max_batch, kv_type=kv_type, budget=budget, staged=staged,
            )
        )  # fmt: skip
        kind = ChainBackend if len(stages) > 1 else WholeVulkan
        chain = kind(
            "vulkan", stages, [HOST, 0][-len(stages) :], n_pages=n_pages, max_batch=max_batch, runtime=runtime
        )
        chain.n_vocab = graph.n_vocab(weights.tensors)  # an encoder leaves no logits
        return chain
    except BaseException:
        for stage in stages:
            stage.close()
        if runtime is not None:
            runtime.close()
        raise
