"""The decoder on a GPU: torch for memory and streams, Triton for the kernels that matter.

Nothing here is imported unless a GPU is asked for, and nothing of torch before `open_gpu`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hotset.backends.triton.devices import find_device
from hotset.formats.source import WeightSource
from hotset.model.cost import KVType
from hotset.model.graph import Graph

if TYPE_CHECKING:
    from hotset.backends.triton.backend import GpuBackend


def open_gpu(
    weights: WeightSource,
    graph: Graph,
    *,
    device: str = "cuda",
    n_pages: int,
    max_batch: int = 512,
    kv_type: KVType = "f16",
    sparse: bool = True,
    **options: Any,
) -> GpuBackend:
    """The whole of a model on one device.

    device: a name (devices.find_device). sparse: leaves out rows of neurons that do not fire.
    options: see GpuBackend. Raises DeviceError where the device or PyTorch is missing, OutOfMemoryError where
    the model does not fit, UnsupportedModelError for tensor types without a kernel.
    """
    find_device(device)  # before anything that imports torch
    from hotset.backends.triton.backend import GpuBackend

    return GpuBackend(
        weights,
        graph,
        device=device,
        n_pages=n_pages,
        max_batch=max_batch,
        kv_type=kv_type,
        sparse=sparse,
        **options,
    )
