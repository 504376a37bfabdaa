"""Devices for a person: what they are, how fast, and why one is not used."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hotset.units import human_size

if TYPE_CHECKING:
    from hotset.placement.vulkan import Examined


def vulkan_dict(one: Examined) -> dict[str, Any]:
    """For JSON: what the driver says, the rates, and why it is not used."""
    rates = None if one.rates is None else asdict(one.rates)
    return asdict(one.info) | {"measured": rates, "unused": one.unused}


def vulkan_line(one: dict[str, Any]) -> str:
    """All of it in a line."""
    parts = [
        f"{one['name']}, {one['kind']}, driver {one['driver']}, Vulkan {one['api']}",
        f"{human_size(one['memory'])}, {human_size(one['free'])} free",
        ", ".join([f"subgroups of {one['subgroup']}", *one["features"]]),
    ]
    if one["measured"] is not None:
        rates = one["measured"]
        parts.append(
            f"reads {rates['read'] / 1e9:.3g} GB/s, {1e6 * rates['launch']:.3g} µs a dispatch, "
            f"{1e6 * rates['sync']:.3g} µs a submission"
        )
    name = f"--device vulkan:{one['index']}"
    parts.append(f"not used by --device auto: {one['unused']}" if one["unused"] else name)
    return "; ".join(parts)
