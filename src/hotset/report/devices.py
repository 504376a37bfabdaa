"""Devices for a person: what they are, how fast, how they compute, and why one is not used."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hotset.units import human_size

if TYPE_CHECKING:
    from hotset.placement.vulkan import Examined


def vulkan_dict(one: Examined) -> dict[str, Any]:
    """For JSON: what the driver says, rates, workgroups, and why it is not used."""
    rates = None if one.rates is None else asdict(one.rates)
    tuned = {type_.name: asdict(shapes) for type_, shapes in one.shapes.tuned.items()}
    shapes = {"default": asdict(one.shapes.default), "tuned": tuned, "untuned": one.untuned}
    return asdict(one.info) | {"measured": rates, "unused": one.unused, "workgroups": shapes}


def _shapes_text(shapes: dict[str, Any]) -> str:
    """Rows × lanes of workgroups for matrices with few rows and with many."""
    one, large, few, few_large = (
        "×".join(map(str, shapes[name])) for name in ("one", "one_large", "few", "few_large")
    )
    return f"{one} and {large} for one token, {few} and {few_large} for several up to {shapes['most_few']}"


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
    shapes = {"default": one["workgroups"]["default"], **one["workgroups"]["tuned"]}
    why = one["workgroups"]["untuned"]
    parts.append("workgroups of products" + (f" (not tuned: {why})" if why else ""))
    parts[-1] += ": " + ", ".join(f"{name} {_shapes_text(own)}" for name, own in shapes.items())
    name = f"--device vulkan:{one['index']}"
    parts.append(f"not used by --device auto: {one['unused']}" if one["unused"] else name)
    return "; ".join(parts)
