"""A placement as tables and text: the weights on each device, their bytes, and the work that they cover."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hotset.placement.table import CPU, Placement
from hotset.report.bars import percent
from hotset.units import human_size

if TYPE_CHECKING:
    from hotset.placement.budget import MemoryBudget
    from hotset.placement.build import DeviceMemory

KINDS = ("weights", "neurons", "experts", "kv", "workspace", "context")
Table = tuple[list[str], list[list[str]]]


def placement_table(placement: Placement) -> Table:
    """Return a row for the CPU and for each device, with planned bytes."""
    rows = []
    hot = _hot_counts(placement)
    host = placement.budget.host if placement.budget else 0
    layers = placement.layers_of(CPU)
    cold = [i for i, place in enumerate(placement.layers) if place.is_split]
    where = [f"{_ranges(layers)} whole"] if layers else []
    where += [f"cold neurons of {len(cold)}"] if cold else []
    where += ["output"] if placement.output_device == CPU else []
    if where:
        rows.append(["CPU", ", ".join(where), "", human_size(host), *[""] * 5, human_size(host), ""])
    for d, planned in enumerate(placement.budget.devices if placement.budget else ()):
        n_hot, n_all = hot[d]
        kinds = [human_size(getattr(planned, kind)) for kind in KINDS]
        total = f"{human_size(planned.total)} ({percent(planned.total / planned.limit)})"
        share = f"{n_hot} of {n_all}" if n_all else "-"
        where_ = _ranges(placement.layers_of(d)) + (", output" if placement.output_device == d else "")
        rows.append([planned.device, where_, share, *kinds, total, human_size(planned.limit)])
    columns = ["where", "layers", ">hot neurons", ">weights", ">neurons", ">experts"]
    columns += [">cache", ">workspace", ">context"]
    return [*columns, ">together", ">budget"], rows


def layer_table(placement: Placement) -> Table:
    """Return a row per layer: its device, its hot neurons, and its predicted times."""
    rows = []
    times = placement.predicted.layers if placement.predicted else [None] * len(placement.layers)
    for i, (place, time) in enumerate(zip(placement.layers, times, strict=True)):
        where = "CPU" if place.device == CPU else placement.devices[place.device]
        hot = "all" if place.hot is None else f"{int(place.hot.sum())} of {len(place.hot)}"
        row = [str(i), where, "" if place.device == CPU else hot]
        if time is not None:
            row += [f"{1e6 * t:.1f}" for t in (time.attention, time.hot, time.cold, time.sync, time.total)]
        rows.append(row)
    columns = [">layer", "where", ">hot neurons", ">attention", ">hot", ">cold", ">round trip", ">µs"]
    return columns, rows


def placement_lines(placement: Placement) -> list[str]:
    """Return a placement as sentences."""
    lines = []
    if placement.hot_share is not None and placement.served_share is not None:
        where = "the GPU" if len(placement.devices) == 1 else f"{len(placement.devices)} devices"
        hot, served = percent(placement.hot_share), percent(placement.served_share)
        if any(place.is_split for place in placement.layers):
            lines.append(f"hot {hot} on {where} serve {served} of activations")
    if placement.predicted is not None:
        total = placement.predicted.total
        parts = {
            "attention": sum(layer.attention for layer in placement.predicted.layers),
            "hot": sum(layer.hot for layer in placement.predicted.layers),
            "cold on the CPU": sum(layer.cold for layer in placement.predicted.layers),
            "round trips": sum(layer.sync for layer in placement.predicted.layers),
        }
        shown = ", ".join(f"{name} {1e3 * seconds:.3g} ms" for name, seconds in parts.items() if seconds)
        lines.append(f"predicted {1e3 * total:.3g} ms per token ({1 / total:.3g} t/s): {shown}")
    return [*lines, *placement.notes]


def memory_table(memory: Sequence[DeviceMemory]) -> Table:
    """Return a row per device, with planned and measured bytes."""
    rows = []
    for one in memory:
        row = [one.planned.device]
        for kind, planned, measured in _pairs(one):
            del kind
            row.append(f"{human_size(planned)} / {human_size(measured)}")
        rows.append([*row, human_size(one.planned.limit)])
    columns = [">weights", ">experts", ">cache", ">workspace", ">all, with context"]
    return ["planned / measured", *columns, ">budget"], rows


def _pairs(one: DeviceMemory) -> list[tuple[str, int, int]]:
    planned, measured = one.planned, one.measured
    return [
        ("weights", planned.weights + planned.neurons, measured.get("weights", 0)),
        ("experts", planned.experts, measured.get("experts", 0)),
        ("kv", planned.kv, measured.get("kv", 0)),
        ("workspace", planned.workspace, measured.get("workspace", 0)),
        ("total", planned.total, one.used),
    ]


def placement_dict(placement: Placement) -> dict[str, Any]:
    """Return a placement for JSON."""
    predicted = placement.predicted
    return {
        "devices": [_budget_dict(planned) for planned in placement.budget.devices]
        if placement.budget
        else [],
        "host_bytes": placement.budget.host if placement.budget else None,
        "pinned_bytes": placement.budget.pinned if placement.budget else None,
        "expert_slots": list(placement.expert_slots),
        "expert_spare": [0 if one is None else one.n_spare for one in placement.fetching],
        "n_cpu_layers": placement.n_cpu_layers,
        "output_device": placement.output_device,
        "hot_share": placement.hot_share,
        "served_share": placement.served_share,
        "predicted_seconds": predicted.total if predicted else None,
        "layers": [
            {
                "layer": i,
                "device": placement.devices[place.device] if place.device != CPU else "CPU",
                "hot_neurons": None if place.hot is None else int(place.hot.sum()),
                "seconds": None
                if predicted is None
                else {
                    "attention": predicted.layers[i].attention,
                    "hot": predicted.layers[i].hot,
                    "cold": predicted.layers[i].cold,
                    "sync": predicted.layers[i].sync,
                    "total": predicted.layers[i].total,
                },
            }
            for i, place in enumerate(placement.layers)
        ],
        "notes": list(placement.notes),
    }


def memory_dict(memory: Sequence[DeviceMemory]) -> list[dict[str, Any]]:
    """Return planned and measured bytes of each device, for JSON."""
    return [
        _budget_dict(one.planned) | {"measured": dict(one.measured) | {"total": one.used}} for one in memory
    ]


def _budget_dict(planned: MemoryBudget) -> dict[str, Any]:
    bytes_of = {kind: getattr(planned, kind) for kind in KINDS}
    return {"device": planned.device, "limit": planned.limit, **bytes_of, "total": planned.total}


def _hot_counts(placement: Placement) -> list[tuple[int, int]]:
    """Return for each device the hot neurons, and all neurons, of its split layers."""
    counts = []
    for d in range(len(placement.devices)):
        masks = [place.hot for place in placement.layers if place.device == d and place.hot is not None]
        counts.append((sum(int(mask.sum()) for mask in masks), sum(map(len, masks))))
    return counts


def _ranges(layers: list[int]) -> str:
    """Return ascending numbers as text, in ranges: "0 to 3, 6"."""
    runs: list[list[int]] = []
    for i in layers:
        if runs and i == runs[-1][-1] + 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    return ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs) or "none"
