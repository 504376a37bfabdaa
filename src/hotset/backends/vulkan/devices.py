"""Vulkan devices by name, and why a device cannot be used."""

from __future__ import annotations

import os
from dataclasses import dataclass

from hotset import _core
from hotset.errors import DeviceError

NAME = "vulkan"
_ORDER = ("discrete", "integrated", "virtual", "other", "software")  # preference for the name "vulkan"


@dataclass(frozen=True)
class VulkanInfo:
    """A device as its driver describes it.

    kind: discrete, integrated, virtual, software or other. api: the Vulkan version, such as "1.3.230".
    memory, free: bytes of its own memory, or of the memory it shares with the host. refusal: why it cannot
    be used; empty if it can. features: its optional features. subgroup: lanes of a subgroup.
    vendor: the PCI vendor number.
    """

    index: int
    name: str
    kind: str
    driver: str
    api: str
    memory: int
    free: int
    refusal: str
    features: list[str]
    subgroup: int
    vendor: int

    @property
    def is_software(self) -> bool:
        """Return whether the device computes on the CPU; such devices are for tests."""
        return self.kind == "software"

    @property
    def has_timelines(self) -> bool:
        """Return whether layers can be split between the device and the CPU (csrc/vulkan/program.h)."""
        return "timeline semaphores" in self.features

    @property
    def has_timestamps(self) -> bool:
        """Return whether the device can time its dispatches."""
        return "timestamps" in self.features

    @property
    def shares_memory(self) -> bool:
        """Return whether the device uses the host's memory, and so has the CPU's bandwidth."""
        return self.kind in ("integrated", "software")


def validates() -> bool:
    """Return whether the validation layer checks every call. It is slow; tests enable it."""
    return os.environ.get("HOTSET_VULKAN_VALIDATION") == "1"


def list_devices() -> list[VulkanInfo]:
    """Return the devices of this machine in the driver's order. Raises DeviceError without a driver."""
    return [VulkanInfo(**facts) for facts in _core.vulkan_devices(validates())]


def find_device(name: str) -> VulkanInfo:
    """Return the device of a name: the best one for "vulkan", device number 1 for "vulkan:1".

    Raises DeviceError if the device does not exist or cannot be used.
    """
    _, colon, number = name.partition(":")
    found = list_devices()
    if not found:
        raise DeviceError(
            "the Vulkan driver has no device; install the driver of the GPU, or leave `device` out"
        )
    if not colon:
        found.sort(key=lambda one: (bool(one.refusal), _ORDER.index(one.kind)))
        chosen = found[0]
    elif int(number) < len(found):
        chosen = found[int(number)]
    else:
        raise DeviceError(f"there is no {name}: devices are numbered from 0, and the driver has {len(found)}")
    if chosen.refusal:
        raise DeviceError(f"{chosen.name} cannot be used: {chosen.refusal}")
    return chosen
