"""The Backend protocol over one device that has the whole model."""

from __future__ import annotations

from typing import Any

from hotset.backends.pipeline import ChainBackend
from hotset.backends.triton.devices import find_device, free_bytes
from hotset.backends.triton.kernels import Kernels
from hotset.backends.triton.stage import GpuStage
from hotset.errors import OutOfMemoryError
from hotset.formats.source import WeightSource
from hotset.model.cost import KVType
from hotset.model.graph import Graph
from hotset.units import human_size


class GpuBackend(ChainBackend):
    """One stage that is the whole graph; see GpuStage for `options` and what is raised.

    needed: bytes that the model was planned to take there, cache and workspace included; where the device has
    less than that free, OutOfMemoryError is raised before anything is loaded.

    kernels: None chooses Triton or plain torch (kernels.Kernels). sparse: False computes every neuron.
    """

    def __init__(  # noqa: PLR0913
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
        needed: int = 0,
        **options: Any,
    ) -> None:
        found = find_device(device)
        free = free_bytes(found)
        if needed > free:
            raise OutOfMemoryError(
                f"the model needs {human_size(needed)} on {found}, cache and workspace included, "
                f"and {human_size(free)} are free; share it with the CPU (--vram-budget) or lower the context"
            )
        self.kv_type, self.sparse = kv_type, sparse
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
        super().__init__("gpu", [self.stage], [0], n_pages=n_pages, max_batch=max_batch)

    @property
    def device(self) -> str:
        """The device's name as torch has it."""
        return self.stage.name
