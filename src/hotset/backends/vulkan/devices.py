"""Vulkan devices by name: which are there, and why one cannot be used."""

from __future__ import annotations

import os
from dataclasses import dataclass

from hotset import _core
from hotset.errors import DeviceError

NAME = "vulkan"
_ORDER = ("discrete", "integrated", "virtual", "other", "software")  # which one the bare name means


@dataclass(frozen=True)
class VulkanInfo:
    """A device as its driver describes it.

    kind: discrete, integrated, virtual, software or other. api: of Vulkan, "1.3.230". memory, free: bytes of
    its own, or of what it shares with the host. refusal: why it cannot be used; empty where it can.
    features: what it has that is not needed, for a person. subgroup: lanes of its subgroups.
    vendor: its PCI number.
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
        """Whether it computes on the CPU: for tests."""
        return self.kind == "software"

    @property
    def shares_memory(self) -> bool:
        """Whether its memory is this machine's, and its bandwidth that of the CPU."""
        return self.kind in ("integrated", "software")


def validates() -> bool:
    """Whether the validation layer watches every call (tests set it; it is slow)."""
    return os.environ.get("HOTSET_VULKAN_VALIDATION") == "1"


def is_vulkan(name: object) -> bool:
    """Whether a device's name is one of these."""
    return isinstance(name, str) and name.partition(":")[0] == NAME


def list_devices() -> list[VulkanInfo]:
    """The devices of this machine in the driver's order. Raises DeviceError where there is no driver."""
    return [VulkanInfo(**facts) for facts in _core.vulkan_devices(validates())]


def find_device(name: str) -> VulkanInfo:
    """The device of a name: the best for "vulkan", that with the number for "vulkan:1".

    Raises DeviceError if there is none, or if it cannot be used.
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
