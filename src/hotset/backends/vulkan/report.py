"""Descriptions of Vulkan devices for display: names, rates, workgroups, and reasons not to use a device."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from hotset.backends.vulkan.autotune import known_shapes, why_untuned
from hotset.backends.vulkan.devices import NAME, VulkanInfo
from hotset.placement.detect import Examined
from hotset.units import human_size


@dataclass(frozen=True)
class VulkanRates:
    """The measured rates of a device.

    read: bytes of weights per second. launch: seconds from one dispatch to the next dependent one. sync:
    seconds of a submission and its wait, without the time of kernels.
    """

    read: float
    launch: float
    sync: float


def examined(info: VulkanInfo, rates: VulkanRates | None, unused: str) -> Examined:
    """Describe a device: the facts of its driver, rates, workgroups, and why --device auto does not use it.

    rates: None for a device that cannot be used. unused: the reason; empty if --device auto may use it.
    """
    shapes = known_shapes(info)
    tuned = {type_.name: asdict(own) for type_, own in shapes.tuned.items()}
    facts = asdict(info) | {
        "measured": None if rates is None else asdict(rates),
        "unused": unused,
        "workgroups": {"default": asdict(shapes.default), "tuned": tuned, "untuned": why_untuned(info)},
    }
    title = f"{info.name}, {info.kind}, {human_size(info.memory)}"
    title += f"; not used by --device auto: {unused}" if unused else ""
    return Examined(f"{NAME}:{info.index}", title, _line(facts), facts)


def _shapes_text(shapes: dict[str, Any]) -> str:
    """Format the rows × lanes of workgroups, for matrices with few rows and with many."""
    one, large, few, few_large = (
        "×".join(map(str, shapes[name])) for name in ("one", "one_large", "few", "few_large")
    )
    return (
        f"{one} and {large} for one token, {few} and {few_large} for several up to {shapes['most_few']}, "
        f"{shapes['ahead']} and {shapes['few_ahead']} blocks ahead"
    )


def _line(one: dict[str, Any]) -> str:
    """Format all facts in one line."""
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
    name = f"--device {NAME}:{one['index']}"
    parts.append(f"not used by --device auto: {one['unused']}" if one["unused"] else name)
    return "; ".join(parts)
