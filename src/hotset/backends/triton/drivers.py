"""Detection of GPUs without torch, since every `hotset run` does this.

Only GPUs with compiled kernels are detected (NVIDIA, and AMD with ROCm). Apple's and Intel's GPUs are used if
they are named (--device mps, xpu).
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotset.errors import install_command

INSTALL = install_command("gpu")
_CUDA = {"win32": "nvcuda.dll"}
_HIP = {"win32": "amdhip64.dll"}


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
