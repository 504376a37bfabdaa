"""The Backend protocol for a Vulkan device that holds a whole model."""

from __future__ import annotations

from hotset.backends.adapters import AdapterSet
from hotset.backends.pipeline import ChainBackend
from hotset.backends.stage import BackendOptions
from hotset.backends.vulkan.stage import Loaded, VulkanStage
from hotset.formats.source import WeightSource
from hotset.model.graph import Graph


class WholeVulkan(ChainBackend):
    """A whole model on a Vulkan device. It also supports adapters (backends/adapters.py)."""

    is_on_device = True

    @property
    def stage(self) -> VulkanStage:
        """Return the only stage, which has the whole model."""
        (stage,) = self.stages
        assert isinstance(stage, VulkanStage)
        return stage

    def open_draft(self, weights: WeightSource, graph: Graph, options: BackendOptions) -> WholeVulkan:
        """Open a draft, as WholeModel.open_draft. It uses the weights on the device."""
        loaded = Loaded(self.stage.matrices, self.stage.cache)
        stage = VulkanStage(weights, graph, self.stage.opened, options, loaded=loaded)
        return WholeVulkan("vulkan", [stage], [0], n_blocks=stage.n_blocks, max_batch=stage.max_batch)

    def open_layer(self, weights: WeightSource, graph: Graph, options: BackendOptions) -> VulkanStage:
        """Open a layer, as WholeModel.open_layer."""
        loaded = Loaded(self.stage.matrices)
        return VulkanStage(weights, graph, self.stage.opened, options, loaded=loaded)

    @property
    def graph(self) -> Graph:
        """Return the graph of the model, without adapters."""
        return self.stage.graph

    @property
    def weights(self) -> WeightSource:
        """Return the weights of the model."""
        return self.stage.weights

    @property
    def adapters(self) -> AdapterSet:
        """Return the adapters that sequences may have. Set them only between two steps."""
        return self.stage.adapters

    @adapters.setter
    def adapters(self, adapters: AdapterSet) -> None:
        self.stage.adapters = adapters
        self._values = [frozenset(op.out.name for op in adapters.graph.primitives)]
