"""Tables of a run's or profile's layers, and of a replayed trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotset.report.bars import bar, percent
from hotset.units import human_size

if TYPE_CHECKING:
    from hotset.report.replay import Replay
    from hotset.sparsity.profile import LayerProfile
    from hotset.sparsity.stats import StatsSummary

Table = tuple[list[str], list[list[str]]]  # columns (">": right-aligned), rows


def stats_table(stats: StatsSummary) -> Table:
    """Return a row per layer, mean per token, and a row for all of them. Times in milliseconds.

    Columns of a predictor are omitted without one, columns of its quality if it was not measured, and the
    column of experts (the share whose weights a step read) if no layer has any.
    """
    layers = stats.layers
    # (Experts that a token does not use do not count as selected.)
    predicted = any(layer.predictor_s for layer in layers) or any(
        layer.expert_share is None and layer.selected_share < 1 for layer in layers
    )
    measured = any(layer.recall is not None for layer in layers)
    routed = any(layer.expert_share is not None for layer in layers)
    widest = max((layer.active_share for layer in layers), default=0.0)
    columns = [">layer", ">active", f"to {percent(widest)}"]
    columns += [">experts"] if routed else []
    columns += [">chosen"] if predicted else []
    columns += [">recall", ">precise"] if measured else []
    columns += [">FFN\nbytes"] + ([">pred.\nms"] if predicted else []) + [">FFN\nms", ">attn.\nms"]
    rows = []
    for layer in layers:
        row = [str(layer.layer), percent(layer.active_share), bar(layer.active_share, 7, full=widest)]
        row += ["" if layer.expert_share is None else percent(layer.expert_share)] if routed else []
        row += [percent(layer.selected_share)] if predicted else []
        row += [percent(layer.recall), percent(layer.precision)] if measured else []
        row += [human_size(layer.bytes)] + ([_ms(layer.predictor_s)] if predicted else [])
        rows.append([*row, _ms(layer.ffn_s), _ms(layer.attention_s)])
    total = ["all", percent(stats.active_share), ""]
    total += [""] if routed else []
    total += [percent(stats.selected_share)] if predicted else []
    total += ["", ""] if measured else []
    total += [human_size(sum(layer.bytes for layer in layers))]
    total += [_ms(stats.seconds["predictor"])] if predicted else []
    rows.append([*total, _ms(stats.seconds["ffn"]), _ms(stats.seconds["attention"])])
    return columns, rows


def profile_table(layers: list[LayerProfile]) -> Table:
    """Return a row per layer: the share of neurons that fire, and of those that make most activations."""
    columns = [">layer", ">neurons", ">active", "", ">make 80%", "", ">always", ">never"]
    rows = []
    for layer in layers:
        row = [str(layer.layer), str(layer.n_ff)]
        for share in (layer.active_share, layer.hot_share):
            row += [percent(share), bar(share)]
        rows.append([*row, str(layer.n_always), str(layer.n_never)])
    return columns, rows


def expert_table(layers: list[LayerProfile]) -> Table:
    """Return a row per layer with experts: the share of those that get most of the choices."""
    columns = [">layer", ">experts", ">make 80%", "", ">busiest has", ">never"]
    rows = []
    for layer in layers:
        if layer.experts is not None:
            one = layer.experts
            shares = [percent(one.hot_share), bar(one.hot_share), percent(one.busiest)]
            rows.append([str(layer.layer), str(one.n), *shares, str(one.n_never)])
    return columns, rows


def replay_table(replayed: Replay, what: str) -> Table:
    """Return a row per cache size: its share of the entries (`what`), each policy's hit rate, and reads.

    The reads are the bytes per token that a run under a budget would read from the disk.
    """
    names = list(replayed.points[0].hit_rates)
    columns = [f">{what}", ">size", ">token cycles", *(f">{name}" for name in names), ">read\nper token"]
    rows = [
        [percent(point.share), human_size(point.n_bytes), f"{point.cycles:.2f}"]
        + [f"{100 * point.hit_rates[name]:.1f}%" for name in names]
        + [human_size(round(point.disk_bytes_per_token))]
        for point in replayed.points
    ]
    return columns, rows


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}" if seconds < 0.01 else f"{1e3 * seconds:.1f}"
