"""Kernels as a driver compiled them, kept on disk: the next start compiles nothing that was compiled before.

A file for each device and driver, in the cache of the store:

    8 bytes    _MAGIC
    32 bytes   SHA-256 of what follows
    the rest   the driver's pipeline cache, whose header names vendor, device and compiler

Drivers read such data without much care: it is bounded, whole, and of this device and this driver before one
gets it. A file that is not is left out, and written anew.
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
MOST_BYTES = 64 << 20  # of a file that is read or written


def path_of(info: VulkanInfo) -> Path:
    """The file of a device and its driver."""
    names = " | ".join([info.name, info.kind, info.driver, info.api])
    return home() / "cache" / "vulkan" / f"{hashlib.sha256(names.encode()).hexdigest()[:32]}.bin"


def read(info: VulkanInfo) -> bytes:
    """What was kept; nothing where there is no such file, or it is damaged. The device compares the header
    with its own (csrc/vulkan/device.h) before the driver gets it."""
    try:
        data = read_small_file(path_of(info), MOST_BYTES)
    except (OSError, HotsetError):
        return b""
    magic, digest, kept = data[:8], data[8:40], data[40:]
    return kept if magic == _MAGIC and digest == hashlib.sha256(kept).digest() else b""


def keep(info: VulkanInfo, device: _core.VulkanDevice) -> None:
    """Writes what the driver has compiled, where that is more than is kept."""
    data, known, path = device.compiled(), read(info), path_of(info)
    is_more = len(data) > len(known) or not device.is_cache_of(known)
    if not is_more or not device.is_cache_of(data) or len(data) > MOST_BYTES - 40:
        return
    with contextlib.suppress(OSError, HotsetError):  # compiled again next time
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole({path: _MAGIC + hashlib.sha256(data).digest() + data}, sync=False)


def open_device(info: VulkanInfo, *, budget: int | None = None, staged: bool = False) -> _core.VulkanDevice:
    """A device, opened; with the kernels that were compiled before. budget: bytes that it gives at most;
    staged: the host copies to the device even if it could write its memory. Raises DeviceError."""
    device = _core.VulkanDevice(info.index, validates(), staged, read(info))
    if budget is not None:
        device.limit(budget)
    return device
