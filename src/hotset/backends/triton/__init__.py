"""The decoder on a GPU: torch for memory and streams, Triton for the kernels that matter.

The package is imported only if a GPU is requested, and torch only inside `open_gpu`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hotset.backends.stage import BackendOptions
from hotset.backends.triton.devices import find_device
from hotset.formats.source import WeightSource
from hotset.model.graph import Graph

if TYPE_CHECKING:
    from hotset.backends.triton.backend import GpuBackend


def open_gpu(
    weights: WeightSource, graph: Graph, device: str, options: BackendOptions, **given: Any
) -> GpuBackend:
    """Open a whole model on one device.

    device: a device name of LoadSettings (devices.find_device). given: keyword arguments of GpuBackend.
    Raises DeviceError if the device or PyTorch is missing, OutOfMemoryError if the model does not fit, and
    UnsupportedModelError for tensor types without a kernel.
    """
    find_device(device)  # before anything that imports torch
    from hotset.backends.triton.backend import GpuBackend

    return GpuBackend(weights, graph, device, options, **given)
