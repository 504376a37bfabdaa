"""Detection of Vulkan devices, and the choice of the device that a model runs on."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hotset.backends.vulkan.devices import NAME, VulkanInfo, find_device, list_devices
from hotset.backends.vulkan.planning import measured
from hotset.backends.vulkan.report import VulkanRates, examined
from hotset.errors import DeviceError, HotsetError

if TYPE_CHECKING:
    from hotset.placement.detect import Examined
    from hotset.reporter import Reporter


def may_be_there(root: Path = Path("/"), platform: str = sys.platform) -> bool:
    """Return whether a GPU may exist, without starting a driver. On Linux each GPU has a device node."""
    if not platform.startswith("linux"):
        return True
    nodes = [*(root / "dev/dri").glob("renderD*"), root / "dev/nvidia0", root / "dev/dxg"]
    return any(node.exists() for node in nodes)


def why_unused(info: VulkanInfo) -> str:
    """Return why --device auto never uses a device; empty if it may."""
    if info.refusal:
        return info.refusal
    return "a software driver, which computes on the CPU: for tests" if info.is_software else ""


def found_device(progress: Reporter | None = None) -> tuple[str | None, str | None]:
    """Return the usable device that reads weights fastest, as Detector.found_device."""
    if not may_be_there():
        return None, None
    found: list[tuple[float, int]] = []
    with contextlib.suppress(HotsetError):  # no driver
        for info in list_devices():
            with contextlib.suppress(HotsetError):  # skip a device that fails
                if not why_unused(info):
                    found.append((measured(info, progress=progress).read, -info.index))
    return (f"{NAME}:{-max(found)[1]}" if found else None), None


def named_devices(names: Sequence[str]) -> tuple[str, ...]:
    """Check names, as Detector.named_devices."""
    found = [find_device(name) for name in names]
    twice = {one.index for one in found if found.count(one) > 1 and not one.is_software}
    if twice:
        raise DeviceError(f"the Vulkan device {min(twice)} is named twice: {', '.join(names)}")
    return tuple(f"{NAME}:{one.index}" for one in found)


def software() -> None:
    """Return None, as Detector.software does: a Vulkan driver needs no package."""


def examine(progress: Reporter | None = None) -> list[Examined]:
    """Measure the devices without stored rates, as Detector.examine."""
    found: list[tuple[VulkanInfo, VulkanRates | None, str]] = []
    for info in list_devices():
        unused, rates = why_unused(info), None
        if not info.refusal:
            try:
                rates = measured(info, progress=progress)
            except HotsetError as error:
                unused = f"it fails: {error}"
        found.append((info, rates, unused))
    usable = [(rates.read, -info.index) for info, rates, unused in found if rates is not None and not unused]
    best = -max(usable)[1] if usable else None
    return [
        examined(info, rates, unused or ("" if info.index == best else f"{NAME}:{best} is faster"))
        for info, rates, unused in found
    ]
