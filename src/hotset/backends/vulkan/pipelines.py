"""A disk cache of compiled kernels, so that the next start does not compile them again.

The cache of the store has a file for each device and driver:

    8 bytes    _MAGIC
    32 bytes   SHA-256 of the rest
    the rest   the driver's pipeline cache, whose header names vendor, device and compiler

Drivers validate this data poorly. Before a driver gets it, hotset checks its size, its digest, and that it
belongs to this device and driver. A file that fails a check is ignored and later replaced.
"""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

from hotset import _core
from hotset.backends.vulkan.devices import VulkanInfo, validates
from hotset.errors import HotsetError
from hotset.files import read_small_file, write_whole
from hotset.storage.store import home

_MAGIC = b"hotsetVK"
MOST_BYTES = 64 << 20  # the largest file to read or write


def path_of(info: VulkanInfo) -> Path:
    """Return the path of the file for a device and its driver."""
    names = " | ".join([info.name, info.kind, info.driver, info.api])
    return home() / "cache" / "vulkan" / f"{hashlib.sha256(names.encode()).hexdigest()[:32]}.bin"


def read(info: VulkanInfo) -> bytes:
    """Return the cached pipelines; empty if the file does not exist or is damaged.

    The device compares the header with its own (csrc/vulkan/device.h) before the driver gets it.
    """
    try:
        data = read_small_file(path_of(info), MOST_BYTES)
    except (OSError, HotsetError):
        return b""
    magic, digest, kept = data[:8], data[8:40], data[40:]
    return kept if magic == _MAGIC and digest == hashlib.sha256(kept).digest() else b""


def keep(info: VulkanInfo, device: _core.VulkanDevice) -> None:
    """Write the driver's pipeline cache if it is larger than the file, or if the file is unusable."""
    data, known, path = device.compiled(), read(info), path_of(info)
    is_more = len(data) > len(known) or not device.is_cache_of(known)
    if not is_more or not device.is_cache_of(data) or len(data) > MOST_BYTES - 40:
        return
    with contextlib.suppress(OSError, HotsetError):  # compiled again next time
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole({path: _MAGIC + hashlib.sha256(data).digest() + data}, sync=False)


def open_device(info: VulkanInfo, *, budget: int | None = None, staged: bool = False) -> _core.VulkanDevice:
    """Open a device with its cached kernels. Raises DeviceError.

    budget: the most bytes to allocate on it. staged: copy data to the device even if the host could write its
    memory directly.
    """
    device = _core.VulkanDevice(info.index, validates(), staged, read(info))
    if budget is not None:
        device.limit(budget)
    return device
