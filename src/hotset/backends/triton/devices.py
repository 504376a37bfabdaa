"""Devices by name: which exist, how much memory they have, and what to install if one is missing.

A requested device that cannot be used is an error. Nothing here falls back to another device.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from hotset.errors import DeviceError, InvalidRequestError, OutOfMemoryError, install_command

if TYPE_CHECKING:
    import torch

# PyTorch's CPU in place of a GPU, for tests. It computes this backend's steps with plain versions of the
# kernels (fallback.py), so the device is a part of this backend.
SIMULATED = "simulated"
LEAST_CAPABILITY = (
    8,
    0,
)  # for NVIDIA devices: Triton does not compile the kernels for older ones ("Compatibility")


def find_device(name: str) -> torch.device:
    """Return the torch device with a name such as "cuda", "rocm:1", "mps", "xpu:0" or "simulated".

    Raises InvalidRequestError for a name without a device of torch, DeviceError if the device, its driver or
    PyTorch is missing, or if kernels are not compiled for it; the message says what to install or to do.
    """
    try:
        import torch
    except ImportError:
        raise DeviceError(
            f"a GPU needs PyTorch, which is not installed; run {install_command('gpu')}, or use device='cpu'"
        ) from None
    kind, _, number = name.partition(":")
    index = int(number or 0)
    if kind == SIMULATED:
        return torch.device("cpu")
    built = {
        "cuda": torch.version.cuda is not None or torch.version.hip is not None,  # includes AMD devices
        "rocm": torch.version.hip is not None,
        "mps": torch.backends.mps.is_built(),
        "xpu": getattr(torch.version, "xpu", None) is not None,
    }
    if kind not in built:
        raise InvalidRequestError(f"{name} is not a device of PyTorch")
    if not built[kind]:
        raise DeviceError(
            f"the device {name} cannot be used: PyTorch {torch.__version__} is built without {kind}; install "
            "the build for it from pytorch.org/get-started/locally, or use device='cpu'"
        )
    found = "cuda" if kind == "rocm" else kind  # torch's name of the kind
    count = _count(found)
    if count == 0:
        raise DeviceError(
            f"the device {name} is not there: PyTorch finds no {kind} device; check its driver, or use "
            "device='cpu'"
        )
    if index >= count:
        raise DeviceError(f"the device {name} is not there: PyTorch finds {count}, numbered from 0")
    if kind == "cuda" and torch.version.hip is None and os.environ.get("HOTSET_TRITON") != "0":
        capability = torch.cuda.get_device_capability(index)
        if capability < LEAST_CAPABILITY:
            has, least = (".".join(map(str, one)) for one in (capability, LEAST_CAPABILITY))
            raise DeviceError(
                f"the device {name} has compute capability {has}, and Triton's kernels need {least}; use "
                "device='cpu' (or set HOTSET_TRITON=0 for the slow path in plain torch)"
            )
    return torch.device(found, index)


def device_name(device: torch.device) -> str:
    """Return the name of a torch device, as find_device accepts it."""
    return SIMULATED if device.type == "cpu" else str(device)


def _count(kind: str) -> int:
    import torch

    if kind == "cuda":
        return torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "xpu":
        return torch.xpu.device_count() if torch.xpu.is_available() else 0
    return int(torch.backends.mps.is_available())


def free_bytes(device: torch.device) -> int:
    """Return the bytes that are free on a device. For a simulated device, return the machine's free bytes."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type == "xpu":
        return int(torch.xpu.mem_get_info(device)[0])
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    import psutil

    return int(psutil.virtual_memory().available)


@contextmanager
def memory_errors(device: torch.device, what: str, advice: str) -> Iterator[None]:
    """Convert torch's out-of-memory error to an OutOfMemoryError that names the activity and the remedy."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError:
        if device.type == "cuda":
            torch.cuda.empty_cache()
        raise OutOfMemoryError(f"{device} ran out of memory while {what}; {advice}") from None


def current(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which kernels are launched on `device`."""
    import torch

    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def synchronize(device: torch.device) -> None:
    """Wait until the current stream of the device is idle."""
    import torch

    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    elif device.type == "xpu":
        torch.xpu.current_stream(device).synchronize()
    elif device.type == "mps":
        torch.mps.synchronize()


def limit_memory(device: torch.device, n_bytes: int) -> None:
    """Limit torch to n_bytes of a CUDA device, the device's context not counted, to enforce a budget."""
    import torch

    if device.type == "cuda":
        total = torch.cuda.mem_get_info(device)[1]
        torch.cuda.set_per_process_memory_fraction(min(n_bytes / total, 1.0), device)
