"""The choice of devices for a model, from the settings and the devices of this machine.

A GPU is detected without torch, since every `hotset run` does this.

Only GPUs with compiled kernels are detected (NVIDIA, and AMD with ROCm). Apple's and Intel's GPUs are used if
they are named (--device mps, xpu).
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hotset.backends.registry import DEVICE_BACKENDS, backend_of, capabilities, part_of
from hotset.errors import DeviceError, InvalidRequestError, install_command

if TYPE_CHECKING:
    from hotset.reporter import Reporter
    from hotset.settings import LoadSettings

INSTALL = install_command("gpu")
_CUDA = {"win32": "nvcuda.dll"}
_HIP = {"win32": "amdhip64.dll"}
_NO_LAYERS = "no GPU was found: the CPU computes all layers, and n_gpu_layers has no effect"


@dataclass(frozen=True)
class Examined:
    """A device for display: its name in options, a title, all facts as a line, and facts for JSON."""

    name: str
    title: str
    line: str
    facts: dict[str, Any]


class Detector(Protocol):
    """The part of a device backend that finds its devices: its module `detection`."""

    def named_devices(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the devices of names, each with its number.

        Raises InvalidRequestError for a name without a meaning, DeviceError for a device that cannot be used.
        """
        ...

    def found_device(self, progress: Reporter | None) -> tuple[str | None, str | None]:
        """Return the device to try if none is named, or None, and why a device of this machine is unused."""
        ...

    def examine(self, progress: Reporter) -> list[Examined]:
        """Return the devices of this machine, measured if that takes no library that may be missing.

        Raises DeviceError if the driver is missing.
        """
        ...


def detector_of(backend: str) -> Detector:
    """Return the detector of a device backend."""
    detector: Detector = part_of(backend, "detection")
    return detector


def wanted_devices(settings: LoadSettings) -> tuple[tuple[str, ...], str | None]:
    """Return the devices to use, none for the CPU, and a message if a GPU is left unused.

    With --device auto the placement decides later whether the device is faster than the CPU for this model.
    Raises DeviceError if a requested device cannot be used, unless only n_gpu_layers requests it.
    """
    if settings.n_gpu_layers == 0 or settings.is_on_cpu:
        return (), None
    if settings.device is not None and not settings.is_auto:
        return detector_of(backend_of(settings.device[0])).named_devices(settings.device), None
    problems = []
    for backend in DEVICE_BACKENDS:
        if not (capabilities(backend).unasked or settings.is_auto):
            continue
        device, problem = detector_of(backend).found_device(settings.progress)
        if device is not None and settings.is_auto:
            try:
                replace(settings, device=(device,))
            except InvalidRequestError as error:  # a setting that this device does not support
                device, problem = None, f"{device} is not used: {error}"
        if device is not None:
            return (device,), None
        problems += [problem] if problem else []
    if replace(settings, n_gpu_layers=None).asks_for_a_device:  # by other settings
        none = "no GPU" if settings.is_auto else "no NVIDIA or AMD GPU"
        raise DeviceError(
            "; ".join(problems)
            or f"{none} was found to place anything on; name a device ('hotset doctor' shows "
            "them), or leave out the settings of the GPU"
        )
    if problems:
        said = "; ".join(problems)
        return (), f"{said}. The CPU computes alone (device='cpu': without this line)."
    return (), _NO_LAYERS if settings.n_gpu_layers else None


@dataclass(frozen=True)
class GPU:
    """The GPUs of this machine.

    vendor: NVIDIA or AMD. name: the first device's, if the driver reports it without being started.
    """

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
    """Return the GPUs of this machine, or None. The arguments are for tests.

    On Linux it first looks at files, and opens a driver's library only if the files do not decide.
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
    """Return the missing ones of torch and triton, without importing them."""
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
    """Return the number of devices that a driver's library finds; 0 if it is missing or does not start."""
    try:
        driver = open_library(library)
    except OSError:
        return 0
    n = ctypes.c_int(0)
    if getattr(driver, init)(0) != 0 or getattr(driver, count)(ctypes.byref(n)) != 0:
        return 0
    return n.value
