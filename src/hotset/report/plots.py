"""The plots of a report, drawn with matplotlib (the extra `plot`), for any number of layers.

A model has 30 to 80 layers, so no plot has a line for each. Instead, a curve is the median over layers, with
bands for the middle half and for all of them, and values per layer have the layer as an axis.

`Plot.draw` returns an ordinary figure in the colours of COLOURS; in dark mode, a page replaces these colours
(report/page.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hotset.errors import HotsetError, install_command
from hotset.report.activity import GRID, LAGS, PUBLISHED, LayerCurves, TextActivity, median
from hotset.report.bars import percent
from hotset.report.experts import HOT_EXPERTS, ExpertDrift, ExpertHotness
from hotset.sparsity.profile import HOT_MASS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Every colour of a figure except in heat maps. The page replaces them, so no two may be equal.
COLOURS = {
    "ink": "#1c2126",
    "muted": "#667078",
    "grid": "#dde1e4",
    "blue": "#2063a4",
    "orange": "#b9541b",
    "green": "#2f7a4d",
    "purple": "#76489c",
}
_WIDTH = 9.2  # inches of every figure, so that all have the same text size
_MARKS = ("orange", "green", "purple")  # colours of the published models
_SHOWN = 3  # layers whose co-activation is drawn: the first, the middle one, the last

Table = tuple[list[str], list[list[str]]]


@dataclass(frozen=True)
class Plot:
    """A plot. name: of its file. alt: its content as text, with the main numbers. table: its numbers."""

    name: str
    title: str
    caption: str
    alt: str
    table: Table
    draw: Callable[[], Figure]


def require_matplotlib() -> None:
    """Raise HotsetError, which says what to install, if matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise HotsetError(
            "the plots of a report need matplotlib, which is not installed; install it with "
            f"{install_command('plot')} (or pip install matplotlib), or get the numbers as JSON"
        ) from None


def plots_of(curves: Sequence[LayerCurves], run: TextActivity | None) -> list[Plot]:
    """Return the plots of a profile, and of a run of the text if there was one."""
    plots = [_power_law(curves), _sparsity(curves, run)]
    if run is not None:
        plots += [_overlap(run), _coactivation(run)]
    return plots


def plots_of_experts(experts: ExpertHotness, drift: ExpertDrift | None) -> list[Plot]:
    """Return the plots of experts' hotness, and of a trace of a text if there was one."""
    return [_hotness(experts), *([_drift(experts, drift)] if drift is not None else [])]


# ---- the plots of neurons ----


def _power_law(curves: Sequence[LayerCurves]) -> Plot:
    layers = [one.summary.layer for one in curves]
    hot = np.array([one.summary.hot_share for one in curves])
    cumulative = 100 * np.array([one.cumulative for one in curves])
    mass = percent(HOT_MASS)
    typical = median(hot)

    def draw() -> Figure:
        figure, (left, right) = _figure(3.7, 2, (3, 2))
        left.plot([0, 100], [0, 100], color=COLOURS["muted"], ls=":", lw=1)
        left.text(
            74, 72, "all neurons equal", rotation=45, transform_rotates_text=True, rotation_mode="anchor",
            ha="center", va="top", color=COLOURS["muted"], fontsize=8,
        )  # fmt: skip
        left.axhline(100 * HOT_MASS, color=COLOURS["muted"], lw=0.8, ls="--")
        band(left, 100 * GRID, cumulative)
        for (name, share), colour in zip(PUBLISHED.items(), _MARKS, strict=True):
            left.plot(
                100 * share,
                100 * HOT_MASS,
                "o",
                ms=6,
                color=COLOURS[colour],
                label=f"{name} {percent(share)}",
            )
        left.plot(
            100 * typical,
            100 * HOT_MASS,
            "D",
            ms=6,
            color=COLOURS["blue"],
            label=f"this model {percent(typical)}",
        )
        left.set(xlim=(0, 100), ylim=(0, 101), xlabel="neurons of a layer, hottest first (%)")
        left.set_ylabel("share of all activations (%)")
        _legend(left, loc="lower right")
        _by_layer(right, layers, 100 * hot)
        for (name, share), colour in zip(PUBLISHED.items(), _MARKS, strict=True):
            right.axhline(100 * share, color=COLOURS[colour], lw=1, ls="--")
            right.annotate(
                name, (1, 100 * share), xycoords=("axes fraction", "data"), ha="right", va="bottom",
                xytext=(-2, 1), textcoords="offset points", fontsize=7.5, color=COLOURS[colour],
            )  # fmt: skip
        right.set(ylim=(0, max(100.0 * max(PUBLISHED.values()), 100 * hot.max()) + 8))
        right.set_ylabel(f"neurons that make {mass} (%)")
        return figure

    marks = (5, 10, 20, 50)  # of GRID
    columns = [">layer", ">neurons", f">make {mass}", *(f">hottest {mark}% make" for mark in marks)]
    rows = [
        [str(one.summary.layer), str(one.summary.n_ff), percent(one.summary.hot_share)]
        + [percent(float(one.cumulative[i])) for i in marks]
        for one in curves
    ]
    return Plot(
        "power-law",
        "Activation by neuron rank",
        "Left: the share of all activations that come from the hottest neurons, as the median over layers, "
        "with bands for the middle half of the layers and for all. The marks show where the curves of "
        f"published models reach {mass} (PowerInfer, arXiv 2312.12456). Right: the share of neurons that "
        f"make {mass}, by layer.",
        f"Cumulative share of activations by neuron rank. In the median layer {percent(typical)} of the "
        f"neurons make {mass} of the activations; over layers that ranges from {percent(float(hot.min()))} "
        f"to {percent(float(hot.max()))}. Published: "
        + ", ".join(f"{name} {percent(share)}" for name, share in PUBLISHED.items()) + ".",
        (columns, rows),
        draw,
    )  # fmt: skip


def _sparsity(curves: Sequence[LayerCurves], run: TextActivity | None) -> Plot:
    layers = [one.summary.layer for one in curves]
    active = np.array([one.summary.active_share for one in curves])
    weights = np.array([one.summary.n_ff for one in curves])
    mean = float((active * weights).sum() / weights.sum())
    frequency = 100 * np.array([one.frequency for one in curves])
    spread = None if run is None else 100 * np.array([layer.active for layer in run.layers])

    def draw() -> Figure:
        from matplotlib.colors import PowerNorm  # most neurons fire rarely: half of the colours are below 25%

        figure, (left, right) = _figure(3.7, 2, (2, 3))
        if spread is not None:
            left.vlines(
                layers, spread[:, 0], spread[:, 2], color=COLOURS["blue"], alpha=0.3, lw=_thick(len(layers)),
                label="10th to 90th percentile of tokens",
            )  # fmt: skip
        _by_layer(left, layers, 100 * active, label="mean")
        left.set_ylim(0, None)
        _legend_above(left)
        left.set_ylabel("neurons that fire for a token (%)")
        image = right.pcolormesh(
            100 * GRID, np.arange(len(curves)), frequency, cmap="viridis", rasterized=True, shading="nearest",
            norm=PowerNorm(0.5, 0, 100),
        )  # fmt: skip
        right.invert_yaxis()
        _numbered(right, layers)
        right.set(xlabel="neurons of a layer, hottest first (%)", ylabel="layer")
        _colour_bar(figure, image, right, "fires for tokens (%)", ticks=(0, 1, 5, 10, 25, 50, 75, 100))
        return figure

    columns = [">layer", ">fire for a token", ">always fire", ">never fire"]
    rows = [
        [str(s.layer), percent(s.active_share), str(s.n_always), str(s.n_never)]
        for s in (one.summary for one in curves)
    ]
    caption = "Left: the share of a layer's neurons that fire for a token, mean over tokens"
    if run is not None:
        columns[2:2] = [">10% of tokens: at most", ">90%: at most"]
        for row, layer in zip(rows, run.layers, strict=True):
            row[2:2] = [percent(layer.active[0]), percent(layer.active[2])]
        caption += "; the bars extend from the 10th to the 90th percentile of the text's tokens"
    least, most = int(active.argmin()), int(active.argmax())
    return Plot(
        "sparsity",
        "Sparsity by layer",
        f"{caption}. Right: how often each neuron fires, with a row per layer and its neurons in order of "
        "hotness. A sharp edge means a clear difference between hot and cold neurons.",
        f"Share of neurons that fire for a token, by layer: {percent(mean)} of all neurons on average, from "
        f"{percent(float(active[least]))} in layer {layers[least]} to {percent(float(active[most]))} in "
        f"layer {layers[most]}. A heat map shows how often the neurons of each layer fire.",
        (columns, rows),
        draw,
    )


def _overlap(run: TextActivity) -> Plot:
    layers = [layer.layer for layer in run.layers]
    overlap = 100 * np.array([layer.overlap for layer in run.layers])
    chance = 100 * np.array([layer.overlap_independent for layer in run.layers])
    known = ~np.isnan(overlap).all(axis=0)
    lags = np.array(LAGS)[known]
    next_token, by_chance = median(overlap[:, 0]) / 100, median(chance) / 100

    def draw() -> Figure:
        figure, (left, right) = _figure(3.6, 2, (3, 2))
        _by_layer(left, layers, overlap[:, 0], label="measured")
        left.plot(
            layers,
            chance,
            ls="none",
            marker="_",
            ms=7,
            mew=1.5,
            color=COLOURS["orange"],
            label="if tokens were independent",
        )
        left.set_ylim(0, 100)
        left.set_ylabel("fired for the token before (%)")
        _legend_above(left)
        band(right, lags, (overlap - chance[:, None])[:, known])
        right.axhline(0, color=COLOURS["orange"], ls="--", lw=1.2)
        right.set_xscale("log", base=2)
        right.set_xticks(lags, [str(lag) for lag in lags])
        right.minorticks_off()
        right.set(xlabel="tokens apart", ylabel="more than if independent (points)")
        _legend_above(right)
        return figure

    rows = []
    for layer in run.layers:
        shares = [*(layer.overlap[i] for i in np.flatnonzero(known)), layer.overlap_independent]
        rows.append([str(layer.layer), *map(percent, shares)])
    return Plot(
        "overlap",
        "Overlap from token to token",
        "Left: the share of a token's firing neurons that fired for the previous token too, by layer, over "
        "all tokens of the text. Hot neurons fire for most tokens anyway; the dashes show the overlap if "
        "each neuron fired as often, but independently for each token. Right: the difference from the "
        "dashes, in percentage points, for tokens further apart, with bands as above. It shows how much the "
        "context adds, and how long that lasts.",
        f"Token-to-token overlap: in the median layer, {percent(next_token)} of a token's firing neurons "
        f"also fired for the previous token; {percent(by_chance)} would if tokens were independent.",
        ([">layer", *(f">{lag} apart" for lag in lags), ">if independent"], rows),
        draw,
    )  # fmt: skip


def _coactivation(run: TextActivity) -> Plot:
    means = np.array([layer.coactivation for layer in run.layers])
    n = len(run.layers)
    shown = [run.layers[i] for i in sorted({0, n // 2, n - 1})[:_SHOWN]]
    drawn = [layer for layer in shown if len(layer.sampled) > 1]

    def draw() -> Figure:
        figure = new_figure(5.4 if drawn else 2.4)
        grid = figure.add_gridspec(2, max(len(drawn), 1), height_ratios=(2.2, 1) if drawn else (0.01, 1))
        axes = [figure.add_subplot(grid[0, i]) for i in range(len(drawn))]
        limit = _limit([layer.correlation for layer in drawn])
        for axis, layer in zip(axes, drawn, strict=True):
            _style(axis)
            axis.grid(False)
            image = axis.imshow(
                layer.correlation, cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest"
            )
            axis.spines[:].set_visible(False)
            axis.set_title(f"layer {layer.layer}", fontsize=9, color=COLOURS["ink"])
            axis.set(xticks=[], yticks=[], xlabel=f"{len(layer.sampled)} neurons")
            if axis is axes[-1]:
                _colour_bar(figure, image, axes, "correlation φ", extend="both")
        below = figure.add_subplot(grid[1, :])
        _style(below)
        _by_layer(below, [layer.layer for layer in run.layers], means)
        below.axhline(
            run.coactivation_independent, color=COLOURS["orange"], ls="--", lw=1.2, label="chance alone"
        )
        below.set_ylabel("mean |φ| of pairs")
        below.set_ylim(0, None)
        _legend_above(below)
        return figure

    rows = []
    for layer in run.layers:
        pairs = layer.correlation[np.triu_indices(len(layer.sampled), 1)]
        largest = f"{pairs.max():.2f}" if len(pairs) else "-"
        strong = percent(float((np.abs(pairs) > 0.3).mean())) if len(pairs) else "-"
        mean = f"{layer.coactivation:.3f}" if len(pairs) else "-"
        rows.append([str(layer.layer), str(len(layer.sampled)), mean, strong, largest])
    typical = f"{median(means):.3f}" if not np.isnan(means).all() else "unknown"
    return Plot(
        "coactivation",
        "Co-activation of neurons",
        "How often pairs of neurons fire for the same tokens (φ: 1 always together, 0 independent, -1 "
        "never), for random neurons among those that fire for some tokens and not for others, with neurons "
        "that fire together next to each other. Above: the first, the middle and the last layer; below: the "
        "mean size of φ in each layer. The dashed line is the expected mean for independent neurons in this "
        "text.",
        f"Co-activation of sampled neurons. The mean of |φ| over pairs is {typical} in the median layer; "
        f"independent neurons would have {run.coactivation_independent:.3f}.",
        ([">layer", ">neurons sampled", ">mean |φ|", ">pairs with |φ| > 0.3", ">largest φ"], rows),
        draw,
    )


# ---- the plots of experts ----


def _hotness(experts: ExpertHotness) -> Plot:
    sorted_ = -np.sort(-experts.hotness, axis=1)
    n_layers, n_experts = sorted_.shape
    shares = np.arange(n_experts + 1) / n_experts
    made = np.cumsum(sorted_, axis=1) / np.maximum(sorted_.sum(axis=1, keepdims=True), 1e-12)
    curves = np.concatenate([np.zeros((n_layers, 1)), made], axis=1)
    need = (np.argmax(made >= HOT_MASS - 1e-9, axis=1) + 1) / n_experts
    even = experts.n_used / n_experts

    def draw() -> Figure:
        figure, (left, right) = _figure(3.7, 2, (2, 3))
        left.plot([0, 100], [0, 100], color=COLOURS["muted"], ls=":", lw=1)
        band(left, 100 * shares, 100 * curves)
        left.set(xlim=(0, 100), ylim=(0, 101), xlabel="experts of a layer, hottest first (%)")
        left.set_ylabel("share of all choices (%)")
        _legend(left, loc="lower right")
        image = right.pcolormesh(
            np.arange(n_experts), np.arange(n_layers), 100 * sorted_, cmap="viridis", rasterized=True,
            shading="nearest", vmin=0,
        )  # fmt: skip
        right.invert_yaxis()
        _numbered(right, experts.layers)
        right.set(xlabel="experts, hottest first", ylabel="layer")
        _colour_bar(figure, image, right, f"of the tokens have it (%; {100 * even:.3g} if all equal)")
        return figure

    columns = [">layer", f">make {percent(HOT_MASS)}", ">hottest has", ">median has", ">coldest has"]
    rows = []
    for layer, share, row in zip(experts.layers, need, sorted_, strict=True):
        marks = [share, row[0], np.median(row), row[-1]]
        rows.append([str(layer), *(percent(float(mark)) for mark in marks)])
    typical = median(need)
    return Plot(
        "experts",
        "Hotness of experts",
        "Left: the share of all choices that go to the hottest experts of a layer, as the median over "
        "layers, with bands for the middle half of the layers and for all; on the dotted line, every expert "
        "is chosen equally often. Right: the share of tokens that use each expert, with a row per layer and "
        f"its experts in order of hotness. A token uses {experts.n_used} of {n_experts}.",
        f"Hotness of experts: in the median layer {percent(typical)} of the experts get {percent(HOT_MASS)} "
        f"of the choices. A token uses {experts.n_used} of {n_experts} experts.",
        (columns, rows),
        draw,
    )


def _drift(experts: ExpertHotness, drift: ExpertDrift) -> Plot:
    overlap = 100 * drift.overlap
    known = ~np.isnan(overlap).all(axis=0)
    lags = np.array(LAGS)[known]
    chance = 100 * median(drift.independent)
    then, now = 100 * drift.hot_then, 100 * drift.hot_now

    def draw() -> Figure:
        figure, (left, right) = _figure(3.6, 2, (1, 1))
        band(left, lags, overlap[:, known])
        left.axhline(chance, color=COLOURS["orange"], ls="--", lw=1.2, label="if tokens were independent")
        left.set_xscale("log", base=2)
        left.set_xticks(lags, [str(lag) for lag in lags])
        left.minorticks_off()
        left.set(xlabel="tokens apart", ylabel="experts that both tokens have (%)", ylim=(0, None))
        _legend_above(left)
        x = (np.arange(then.shape[1]) + 0.5) * drift.window
        band(right, x, then)
        right.plot(
            x, np.median(now, axis=0), color=COLOURS["green"], lw=1.5, label="hot at that time, median layer"
        )
        right.axhline(100 * HOT_EXPERTS, color=COLOURS["muted"], ls=":", lw=1)
        right.set(xlabel="token of the text", ylabel="choices of experts hot at first (%)", ylim=(0, 101))
        _legend_above(right)
        return figure

    last = float(np.median(then[:, -1])) / 100
    first = float(np.median(then[:, 0])) / 100
    columns = [">layer", *(f">{lag} apart" for lag in lags), ">if independent", ">at the end: hot at first"]
    columns.append(">hot at that time")
    rows = []
    for i, layer in enumerate(experts.layers):
        shares = [*drift.overlap[i, known], drift.independent[i], drift.hot_then[i, -1], drift.hot_now[i, -1]]
        rows.append([str(layer), *(percent(float(share)) for share in shares)])
    return Plot(
        "drift",
        "Drift of experts over the text",
        "Left: the share of a token's experts that an earlier token used too, by distance, as the median "
        "over layers, with bands as above. Right: the share of choices that go to the "
        f"{percent(HOT_EXPERTS)} of a layer's experts that are hottest in the first {drift.window} tokens, "
        "and in green to those that are hottest at the time. Where the blue line falls and the green one "
        "does not, a cache must follow the text, because a fixed choice of experts is soon wrong.",
        f"Drift of experts: those hottest at the beginning get {percent(first)} of the choices there, but "
        f"{percent(last)} at the end of the text, in the median layer.",
        (columns, rows),
        draw,
    )


# ---- drawing ----


def new_figure(height: float) -> Figure:
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with rc_context({"font.size": 9}):
        layout = ConstrainedLayoutEngine(w_pad=0.09, h_pad=0.09)
        figure = Figure(figsize=(_WIDTH, height), layout=layout)
    FigureCanvasAgg(figure)  # no window, no global state
    return figure


def _figure(height: float, n: int, widths: Sequence[float]) -> tuple[Figure, list[Axes]]:
    figure = new_figure(height)
    axes = list(figure.subplots(1, n, width_ratios=widths))
    for axis in axes:
        _style(axis)
    return figure, axes


def _style(axis: Axes) -> None:
    axis.set_facecolor("none")
    axis.spines[["top", "right"]].set_visible(False)
    for spine in axis.spines.values():
        spine.set_color(COLOURS["muted"])
    axis.tick_params(colors=COLOURS["muted"], labelcolor=COLOURS["ink"], labelsize=8)
    axis.xaxis.label.set(color=COLOURS["ink"], fontsize=9)
    axis.yaxis.label.set(color=COLOURS["ink"], fontsize=9)
    axis.grid(True, color=COLOURS["grid"], lw=0.7)
    axis.set_axisbelow(True)


def band(axis: Axes, x: np.ndarray, values: np.ndarray) -> None:
    """Draw the median of values [n_layers, n] over layers, with bands for the middle half and for all."""
    values = values[~np.isnan(values).any(axis=1)]  # layers in which no neuron fired have no curve
    n = len(values)
    if n == 0:
        return
    low, first, median, third, high = np.percentile(values, (0, 25, 50, 75, 100), axis=0)
    if n > 1:
        axis.fill_between(x, low, high, color=COLOURS["blue"], alpha=0.16, lw=0, label=f"all {n} layers")
    if n > 3:
        axis.fill_between(x, first, third, color=COLOURS["blue"], alpha=0.3, lw=0, label="middle half")
    axis.plot(x, median, color=COLOURS["blue"], lw=2, label="median layer" if n > 1 else "the layer")


def _by_layer(axis: Axes, layers: Sequence[int], values: np.ndarray, label: str | None = None) -> None:
    """Draw a point per layer, connected by a line, since a layer has neighbours."""
    axis.plot(layers, values, color=COLOURS["blue"], lw=1, alpha=0.6)
    axis.plot(layers, values, "o", color=COLOURS["blue"], ms=5 if len(layers) <= 24 else 3, label=label)
    axis.set_xlim(layers[0] - 0.6, layers[-1] + 0.6)
    axis.set_xlabel("layer")
    _whole_numbers(axis.xaxis)


def _numbered(axis: Axes, layers: Sequence[int]) -> None:
    """Label the rows of a heat map with these layers' numbers."""
    step = -(-len(layers) // 8)
    axis.set_yticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])


def _whole_numbers(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))


def _thick(n: int) -> float:
    return 6.0 if n <= 16 else 3.0 if n <= 48 else 1.8


def _legend(axis: Axes, **where: Any) -> None:
    axis.legend(fontsize=7.5, frameon=False, labelcolor=COLOURS["ink"], handlelength=1.4, **where)


def _legend_above(axis: Axes) -> None:
    """Draw a legend on a line above the plot, where it covers nothing."""
    _legend(axis, loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderaxespad=0.2, columnspacing=1.2)


def _limit(matrices: Sequence[np.ndarray]) -> float:
    """Return the end of the colour scale: few correlations exceed it, apart from the diagonal, which is 1."""
    pairs = [np.abs(one[np.triu_indices(len(one), 1)]) for one in matrices]
    largest = float(np.percentile(np.concatenate(pairs), 99.5)) if pairs else 1.0
    return float(np.clip(np.ceil(10 * largest) / 10, 0.2, 1.0))


def _colour_bar(figure: Figure, image: Any, axes: Any, label: str, **how: Any) -> None:
    bar = figure.colorbar(image, ax=axes, fraction=0.05, pad=0.02, **how)
    bar.set_label(label, color=COLOURS["ink"], fontsize=8.5)
    bar.ax.tick_params(colors=COLOURS["muted"], labelcolor=COLOURS["ink"], labelsize=8)
    bar.outline.set_visible(False)
