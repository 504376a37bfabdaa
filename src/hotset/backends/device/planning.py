"""The part of planning that device backends share."""

from __future__ import annotations

from dataclasses import replace

from hotset.errors import OutOfMemoryError
from hotset.placement.table import Device

KEPT_FREE = 256 << 20  # bytes of a device that stay free without a budget


def within_budget(
    device: Device, gib: float | None, where: str, advice: str = "free some of its memory"
) -> Device:
    """Return a device with the bytes that may be used on it as its limit, instead of its free bytes.

    gib: the budget; None or -1: no budget. where, advice: parts of the message, after the size of the memory
    and at the end. Raises OutOfMemoryError if the budget exceeds the free memory.
    """
    if gib is None or gib == -1:
        return replace(device, limit=max(device.limit - KEPT_FREE, 0))
    if gib * 2**30 > device.limit:
        free = f"{device.limit / 2**30:.1f}".removesuffix(".0")
        raise OutOfMemoryError(
            f"a budget of {gib:g} GiB is more than the {free} GiB {where}; lower vram_budget, or {advice}"
        )
    return replace(device, limit=int(gib * 2**30))
