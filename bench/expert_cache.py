"""Hit rates of a cache of experts: real and synthetic routes, compared with published rates of real routers.

usage: python bench/expert_cache.py [--trace FILE.trace.hotset.gguf ...] [--tokens 2048] [--plot FILE.svg]

Traces come from `hotset sparse trace`; bench/split_experts.py makes a real small MoE model for one. Synthetic
routes (routes.py) have the shapes of the published routers, and a locality that was fitted to the published
hit rates. For them the table shows how well the fit works, but nothing new about these routers. It
prints the hit rates of each policy by share of experts in the cache, with (published) ones in brackets. A
second table compares half-lives of the credits: misses relative to LRU's, with slots shared by all layers and
with slots per layer.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from routes import PUBLISHED, ROUTERS, Router, synthetic_routes

from hotset.offload.replacement import HALF_LIFE, Replacement
from hotset.report.replay import POLICIES, Replay, replay
from hotset.sparsity.trace import RouteTrace

HALF_LIVES = (4, 8, 16, 32, 64, 128)
CYCLES = (1.6, 2.4, 3.2, 4.8)  # sizes at which half-lives are compared


def synthetic_trace(name: str, router: Router, n_tokens: int, seed: int = 0) -> RouteTrace:
    """Return routes as a trace with experts of one byte."""
    routes = synthetic_routes(router, n_tokens, seed)
    layers = tuple(range(router.n_layers))
    return RouteTrace(
        routes=routes, layers=layers, n_experts=router.n_experts, expert_bytes=(1,) * len(layers),
        starts=(0,), model="", name=name, data="",
    )  # fmt: skip


def table(replayed: Replay, published: dict[float, dict[str, float]]) -> list[str]:
    """Return a Markdown table."""
    lines = ["| resident | token cycles | " + " | ".join(POLICIES) + " |", "|---" * (2 + len(POLICIES)) + "|"]
    for point in replayed.points:
        said = published.get(point.share, {})
        cells = [f"{100 * point.share:.0f}%", f"{point.cycles:.2f}"]
        for name, rate in point.hit_rates.items():
            cells.append(f"{rate:.3f}" + (f" ({said[name]:.3f})" if name in said else ""))
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def half_lives(trace: RouteTrace) -> list[str]:
    """Return a Markdown table of misses relative to a shared LRU's."""
    n_layers, n_experts, first = len(trace.layers), trace.n_experts, trace.n_tokens // 2
    n = (trace.n_tokens - first) * trace.cycle

    def misses(slots: tuple[int, ...], half_life: int, *, by_layer: bool = False) -> float:
        cache = Replacement(slots, n_layers, n_experts, half_life)
        return float(n - cache.replay(trace.routes, first, by_layer=by_layer).sum())

    columns = [f"{half_life}" for half_life in HALF_LIVES]
    lines = [
        "| token cycles | slots | LRU | " + " | ".join(columns) + " |",
        "|---" * (3 + len(columns)) + "|",
    ]
    for cycles in CYCLES:
        n_slots = round(cycles * trace.cycle)
        if n_slots > 0.9 * n_layers * n_experts:
            continue
        lru = misses((n_slots,), 0, by_layer=True)
        own = tuple(n_slots // n_layers + (i < n_slots % n_layers) for i in range(n_layers))
        for name, slots in (("shared", (n_slots,)), ("own", own)):
            rates = [misses(slots, half_life) / lru for half_life in (0, *HALF_LIVES)]
            lines.append(f"| {cycles} | {name} | " + " | ".join(f"{rate:.3f}" for rate in rates) + " |")
    return lines


def plot(replays: Sequence[tuple[str, Replay, dict[float, dict[str, float]]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colours = dict(
        zip(
            POLICIES,
            ("#b9541b", "#2063a4", "#2a9d9a", "#1c2126"),
            strict=True,
        )
    )
    n = len(replays)
    figure, axes = pyplot.subplots(
        1, n, figsize=(4.2 * n, 4.1), layout="constrained", squeeze=False, sharey=True
    )
    for axis, (title, replayed, published) in zip(axes[0], replays, strict=True):
        shares = [100 * point.share for point in replayed.points]
        for name, colour in colours.items():
            rates = [100 * point.hit_rates[name] for point in replayed.points]
            style = "--" if name == "optimum" else "-"
            axis.plot(shares, rates, style, color=colour, lw=2.4 if name == "hotset" else 1.4, label=name)
            marks = [(100 * share, 100 * said[name]) for share, said in published.items() if name in said]
            if marks:
                axis.plot(*zip(*marks, strict=True), "o", color=colour, ms=5, mfc="white")
        axis.axvline(100 * replayed.cliff, color="#8a939b", lw=1, ls=":")
        axis.text(
            100 * replayed.cliff, 2, " token cycle", rotation=90, fontsize=7.5, color="#667078", va="bottom"
        )
        axis.set(xlim=(0, 92), ylim=(0, 101), title=title, xlabel="experts resident (%)")
        axis.title.set_fontsize(9)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("hit rate (%)")
    axes[0][-1].legend(
        fontsize=8, frameon=False, loc="lower right", title="circles: published", title_fontsize=8
    )
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, action="append", default=[], metavar="FILE", help="repeatable")
    parser.add_argument("--tokens", type=int, default=2048, help="of synthetic routes")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="SVG or PNG")
    arguments = parser.parse_args()
    traces = [(RouteTrace.open(path), {}) for path in arguments.trace]
    traces += [
        (synthetic_trace(name, router, arguments.tokens), PUBLISHED[name]) for name, router in ROUTERS.items()
    ]
    replays, numbers = [], {}
    for trace, published in traces:
        replayed = replay(trace)
        kind = "synthetic routes of the shape of " if published else ""
        shape = f"{len(trace.layers)} layers, {trace.n_used} of {trace.n_experts} experts"
        print(f"\n{kind}{trace.name}: {shape}, {trace.n_tokens} tokens\n")
        print("\n".join(table(replayed, published)))
        print(f"\nmisses relative to LRU's, by half-life in tokens (hotset's: {HALF_LIFE})\n")
        print("\n".join(half_lives(trace)), flush=True)
        title = f"{'synthetic: ' if published else ''}{trace.name.removesuffix('.gguf')}\n{shape}"
        replays.append((title, replayed, published))
        numbers[trace.name] = replayed.as_dict()
    if arguments.plot:
        plot(replays, arguments.plot)
    print(json.dumps(numbers))


if __name__ == "__main__":
    main()
