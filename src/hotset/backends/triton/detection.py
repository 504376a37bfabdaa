"""Detection of the PyTorch devices that a model can run on. It looks for a GPU without importing torch."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Sequence
from contextlib import suppress
from ctypes.util import find_library
from typing import TYPE_CHECKING

from hotset.backends.triton import drivers
from hotset.backends.triton.devices import SIMULATED, device_name, find_device
from hotset.errors import DeviceError, InvalidRequestError
from hotset.placement.detect import Examined, Software

if TYPE_CHECKING:
    from hotset.reporter import Reporter

_DRIVERS = {"NVIDIA driver (libcuda)": ("cuda", "nvcuda"), "AMD runtime (libamdhip64)": ("amdhip64",)}


def named_devices(names: Sequence[str]) -> tuple[str, ...]:
    """Check device names, as Detector.named_devices does. A simulated device may be named several times."""
    _pack_memory()
    found = [find_device(name) for name in names]
    named = tuple(device_name(one) for one in found)
    if len({*named} - {SIMULATED}) < len(named) - named.count(SIMULATED):
        raise InvalidRequestError(f"a device is named twice: {', '.join(names)}")
    return named


def found_device(progress: Reporter | None) -> tuple[str | None, str | None]:  # noqa: ARG001
    """Return the first GPU whose driver and libraries are installed, as Detector.found_device does."""
    gpu = drivers.detect_gpu()
    if gpu is None:
        return None, None
    if missing := drivers.missing_libraries():
        verb = "is" if len(missing) == 1 else "are"
        return None, f"{gpu} is there, but {' and '.join(missing)} {verb} not installed: {drivers.INSTALL}"
    try:
        return named_devices(["cuda:0"])[0], None
    except DeviceError as error:
        return None, f"{gpu} is there, but {error}"


def _pack_memory() -> None:
    """Configure torch, before its import, to allocate CUDA memory in segments that grow in small pages.

    Otherwise tensors of some megabytes share segments of 20 MiB that they do not fill, and the model exceeds
    a budget that is planned to the byte. The function keeps a setting of the user.
    """
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # since torch 2.9, and before
    if sys.platform == "linux" and not any(name in os.environ for name in names):
        os.environ.update(dict.fromkeys(names, "expandable_segments:True"))


def examine(progress: Reporter) -> list[Examined]:  # noqa: ARG001
    """Return the GPUs that drivers report without PyTorch, and a simulated one, as Detector.examine does."""
    missing = " and ".join(drivers.missing_libraries())
    needs = f"; needs {missing}: {drivers.INSTALL}" if missing else ""
    found = []
    if (gpu := drivers.detect_gpu()) is not None:
        kind = "rocm" if gpu.vendor == "AMD" else "cuda"
        found = [(f"{kind}:{i}", gpu.name) for i in range(gpu.count)]
    if sys.platform == "darwin" and platform.machine() == "arm64":
        found.append(("mps", "Apple's GPU"))
    found.append((SIMULATED, "a GPU that the CPU simulates, for tests"))
    return [Examined(name, title + needs, title + needs, {"name": name}) for name, title in found]


def software() -> Software:
    """Return drivers, packages and advice, as Detector.software does, without importing torch."""
    packages: dict[str, str | None] = {"torch": None, "triton": None}
    for name in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    gpu = drivers.detect_gpu()
    if gpu is None:
        advice = "no NVIDIA or AMD GPU was found: the CPU computes alone"
    elif missing := drivers.missing_libraries():
        advice = f"{gpu} is there; it is used once {' and '.join(missing)} are installed: {drivers.INSTALL}"
    else:
        advice = f"{gpu} is used ('hotset plan MODEL' shows how; device='cpu': without it)"
    found = {name: any(map(find_library, libraries)) for name, libraries in _DRIVERS.items()}
    return Software(found, packages, None if gpu is None else str(gpu), advice)
