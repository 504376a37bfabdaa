"""The Backend protocol for one device that holds the whole model."""

from __future__ import annotations

from hotset.backends.pipeline import ChainBackend
from hotset.backends.stage import BackendOptions
from hotset.backends.triton.devices import find_device, free_bytes
from hotset.backends.triton.options import DEFAULT_OPTIONS, GpuOptions
from hotset.backends.triton.stage import GpuStage
from hotset.errors import OutOfMemoryError
from hotset.formats.source import WeightSource
from hotset.model.graph import Graph
from hotset.units import human_size


class GpuBackend(ChainBackend):
    """A backend of one stage with the whole graph. It has the arguments and errors of GpuStage.

    needed: planned bytes of the model on the device, cache and workspace included. If the device has less
    memory free, the constructor raises OutOfMemoryError before it loads anything.
    """

    def __init__(
        self,
        weights: WeightSource,
        graph: Graph,
        device: str,
        options: BackendOptions,
        *,
        needed: int = 0,
        gpu: GpuOptions = DEFAULT_OPTIONS,
    ) -> None:
        found = find_device(device)
        free = free_bytes(found)
        if needed > free:
            raise OutOfMemoryError(
                f"the model needs {human_size(needed)} on {found}, cache and workspace included, "
                f"and {human_size(free)} are free; share it with the CPU (vram_budget) or lower the context"
            )
        self.kv_type, self.sparse = options.kv_type, options.sparse
        self.stage = GpuStage(weights, graph, device, options, gpu=gpu)
        super().__init__("gpu", [self.stage], [0], n_blocks=options.n_blocks, max_batch=options.max_batch)

    @property
    def device(self) -> str:
        """Return torch's name of the device."""
        return self.stage.name
