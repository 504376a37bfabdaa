"""The Backend protocol over one device that has the whole model."""

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
    """One stage that is the whole graph. It takes and raises the same as GpuStage.

    needed: bytes that the model was planned to take there, cache and workspace included; where the device has
    less than that free, OutOfMemoryError is raised before anything is loaded.
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
        super().__init__("gpu", [self.stage], [0], n_pages=options.n_pages, max_batch=options.max_batch)

    @property
    def device(self) -> str:
        """The device's name as torch has it."""
        return self.stage.name
