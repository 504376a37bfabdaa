"""Which devices a model runs on: what was asked for, and what this machine has.

A GPU is found without torch, since every `hotset run` asks whether there is one.

Counted are those whose kernels are compiled (NVIDIA, and AMD with ROCm). Apple's and Intel's are used when
they are named (--device mps, xpu).
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotset.errors import DeviceError, InvalidRequestError, install_command

if TYPE_CHECKING:
    from hotset.settings import LoadSettings

INSTALL = install_command("gpu")
_CUDA = {"win32": "nvcuda.dll"}
_HIP = {"win32": "amdhip64.dll"}
_NO_LAYERS = "no GPU was found: the CPU computes all layers, and --n-gpu-layers has no effect"


def wanted_devices(settings: LoadSettings) -> tuple[tuple[str, ...], str | None]:
    """Return the devices to use, none for the CPU alone; and a line for a person if a GPU is left unused.

    Raises DeviceError if a requested device cannot be used, unless only n_gpu_layers requests it.
    """
    if settings.n_gpu_layers == 0:
        return (), None
    if settings.vulkan:
        from hotset.placement.vulkan import named_devices

        return named_devices(settings.vulkan), None
    if settings.device is not None and not settings.is_auto:
        _pack_memory()
        from hotset.backends.gpu.devices import find_device

        named = tuple(str(find_device(name)) for name in settings.device)
        if len(set(named)) < len(named) and any(name != "cpu" for name in named):
            raise InvalidRequestError(f"a device is named twice: {', '.join(settings.device)}")
        return named, None
    gpu = detect_gpu()
    if settings.is_auto and (gpu is None or missing_libraries()):
        return _auto(settings)
    if gpu is None:
        if _needs_a_device(settings):
            raise DeviceError(
                "no NVIDIA or AMD GPU was found to place anything on; name a device (--device mps, xpu, or "
                "cpu as a stand-in), or leave the GPU's options out"
            )
        return (), _NO_LAYERS if settings.n_gpu_layers else None
    missing = missing_libraries()
    problem = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed: {INSTALL}"
    if not missing:
        _pack_memory()
        from hotset.backends.gpu.devices import find_device

        try:
            return (str(find_device("cuda:0")),), None
        except DeviceError as error:
            problem = str(error)
    if _needs_a_device(settings):
        raise DeviceError(f"{gpu} is there, but {problem}")
    return (), f"{gpu} is there, but {problem}. The CPU computes alone (--no-gpu: without this line)."


def _needs_a_device(settings: LoadSettings) -> bool:
    """Return whether the settings need a device for more than a number of layers."""
    return replace(settings, n_gpu_layers=None).asks_for_a_device


def _auto(settings: LoadSettings) -> tuple[tuple[str, ...], str | None]:
    """The Vulkan device that --device auto tries, and why one that is there is left unused. Whether it is
    faster depends on the model, and is decided with the placement."""
    from hotset.placement.vulkan import best_device

    name = best_device(settings.progress)
    if name is None:
        if _needs_a_device(settings):
            raise DeviceError(
                "no GPU was found to place anything on; 'hotset doctor' shows why, or leave its options out"
            )
        return (), _NO_LAYERS if settings.n_gpu_layers else None
    try:
        replace(settings, device=(name,))
    except InvalidRequestError as error:  # what no Vulkan device does
        return (), f"{name} is not used: {error}"
    return (name,), None


def _pack_memory() -> None:
    """Asks torch, before it starts, for CUDA memory that grows in small pages.

    Otherwise tensors of some megabytes share segments of 20 MiB that they do not fill, and a budget that is
    planned to the byte does not hold. What a user has set stays.
    """
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # since torch 2.9, and before
    if sys.platform == "linux" and not any(name in os.environ for name in names):
        os.environ.update(dict.fromkeys(names, "expandable_segments:True"))


@dataclass(frozen=True)
class GPU:
    """vendor: NVIDIA or AMD. name: of its first device, where the driver reports it without being started."""

    vendor: str
    name: str
    count: int

    def __str__(self) -> str:
        return f"{self.count} x {self.name}" if self.count > 1 else self.name


def detect_gpu(
    root: Path = Path("/"),
    open_library: Callable[[str], Any] = ctypes.CDLL,
    environment: Mapping[str, str] = os.environ,
) -> GPU | None:
    """The GPUs of this machine, or None. On Linux some file look-ups; a driver's library is opened only where
    the files leave it open. Arguments are for tests.
    """
    if environment.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return None
    found = sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
    if found:
        return GPU("NVIDIA", _model(found[0]), len(found))
    if sys.platform == "win32" or (root / "dev/dxg").exists() or (root / "dev/nvidia0").exists():
        count = _count(open_library, _CUDA.get(sys.platform, "libcuda.so.1"), "cuInit", "cuDeviceGetCount")
        if count:
            return GPU("NVIDIA", "an NVIDIA GPU", count)
    if sys.platform == "win32" or (root / "dev/kfd").exists():
        count = _count(open_library, _HIP.get(sys.platform, "libamdhip64.so"), "hipInit", "hipGetDeviceCount")
        if count:
            return GPU("AMD", "an AMD GPU", count)
    return None


def missing_libraries(find: Callable[[str], Any] = importlib.util.find_spec) -> list[str]:
    """Those of torch and triton that are not installed; asked without importing them."""
    wanted = ["torch"] if sys.platform == "win32" else ["torch", "triton"]
    return [name for name in wanted if find(name) is None]


def _model(information: Path) -> str:
    try:
        lines = information.read_text().splitlines()
    except OSError:
        lines = []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("Model:")), "an NVIDIA GPU"
    )


def _count(open_library: Callable[[str], Any], library: str, init: str, count: str) -> int:
    """Devices that a driver's library finds; 0 where there is no such library, or it does not start."""
    try:
        driver = open_library(library)
    except OSError:
        return 0
    n = ctypes.c_int(0)
    if getattr(driver, init)(0) != 0 or getattr(driver, count)(ctypes.byref(n)) != 0:
        return 0
    return n.value
