"""The numbers of a report on experts: how hot each is, and how that changes over a text.

The hotness of an expert is the share of tokens that use it, which a profile counts. Drift needs a trace of a
text (sparsity/trace.py): which of a token's experts the previous tokens used, and how many of the later
choices go to the experts that are hot at the beginning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hotset.offload.cache_stats import CacheStats
from hotset.offload.replacement import arrange
from hotset.report.activity import LAGS
from hotset.report.bars import percent
from hotset.report.replay import SHARES
from hotset.units import human_size

if TYPE_CHECKING:
    from hotset.backends.base import Backend
    from hotset.model.graph import Graph
    from hotset.offload.weight_store import StoredWeights
    from hotset.report.layers import Table
    from hotset.sparsity.profile import Profile
    from hotset.sparsity.trace import RouteTrace

N_WINDOWS = 16  # per text, at most
SMALLEST_WINDOW = 32  # tokens: hotness over fewer is mostly chance
HOT_EXPERTS = 0.25  # the share of a layer's experts that count as hot


@dataclass(frozen=True)
class ExpertHotness:
    """The hotness of experts. layers: their numbers.

    hotness: float64 [n_layers, n_experts], the share of tokens that use each expert, in file order. n_used:
    experts per token.
    """

    layers: tuple[int, ...]
    hotness: np.ndarray
    n_used: int

    def as_dict(self) -> dict[str, Any]:
        return {
            "layers": list(self.layers),
            "n_used": self.n_used,
            "hotness": self.hotness.round(6).tolist(),
        }


@dataclass(frozen=True)
class ExpertDrift:
    """The drift over a text, in windows of `window` tokens.

    overlap: float64 [n_layers, len(LAGS)], the share of a token's experts that the token this far before
    used; NaN if the text is too short. independent: [n_layers], the same if each expert were as hot, but
    tokens were independent. hot_then: [n_layers, n_windows], the share of a window's choices that go to the
    HOT_EXPERTS of the first window; hot_now: of the window itself.
    """

    window: int
    n_tokens: int
    overlap: np.ndarray
    independent: np.ndarray
    hot_then: np.ndarray
    hot_now: np.ndarray

    def as_dict(self) -> dict[str, Any]:
        numbers = ("overlap", "independent", "hot_then", "hot_now")
        return {
            "window": self.window,
            "n_tokens": self.n_tokens,
            "lags": list(LAGS),
            "hot_experts": HOT_EXPERTS,
        } | {name: getattr(self, name).round(6).tolist() for name in numbers}


def hotness_of(profile: Profile, n_used: int) -> ExpertHotness:
    """Return the hotness from a profile with experts, equally many in all their layers."""
    return _hotness(profile.experts, profile.n_tokens, n_used)


def _hotness(counts: Mapping[int, np.ndarray], n_tokens: int, n_used: int) -> ExpertHotness:
    hotness = np.stack(list(counts.values())).astype(np.float64) / max(n_tokens, 1)
    return ExpertHotness(tuple(counts), hotness, n_used)


def expert_counts(graph: Graph, backend: Backend | None, stored: StoredWeights | None) -> CacheStats | None:
    """Count the sources of an MoE model's experts since it was loaded.

    Returns None if no cache is between experts and their computation, or none was needed yet.
    """
    if not any(ffn.route is not None for ffn in graph.ffns):
        return None
    beside = None if backend is None else backend.expert_counts()
    if beside is not None and not beside.needed:  # a device has all experts
        beside = None
    if stored is None:
        return beside
    counts = stored.counts()  # its rows are only experts, except in layers without any
    if beside is None:
        return CacheStats(hits=counts.hits, misses=counts.misses)
    read = min(counts.misses, beside.on_cpu)  # of those that the CPU computed for devices
    return replace(beside, on_cpu=beside.on_cpu - read, misses=read)


def experts_dict(counts: CacheStats) -> dict[str, Any]:
    """Return the counts for JSON."""
    return {
        "hits": counts.hits,
        "on_cpu": counts.on_cpu,
        "fetched": counts.fetched,
        "read": counts.misses,
        "streamed": counts.streamed,
        "hit_rate": counts.hit_rate,
    }


def experts_line(counts: CacheStats) -> str:
    """Return the counts as text."""
    rate = "" if counts.hit_rate is None else f" ({percent(counts.hit_rate)})"
    parts = [f"{counts.hits:,} of {counts.needed:,} experts were in the cache{rate}"]
    parts += [f"{counts.streamed:,} streamed"] if counts.streamed else []
    parts += [f"{counts.fetched:,} fetched"] if counts.fetched else []
    parts += [f"{counts.on_cpu:,} computed by the CPU"] if counts.on_cpu else []
    parts += [f"{counts.misses:,} read from the disk"] if counts.misses else []
    return ", ".join(parts)


def cache_sizes(n_layers: int, n_experts: int, n_used: int, token_cycle: int) -> list[dict[str, Any]]:
    """Return possible caches for an MoE model's experts, before any text is known.

    For each of the shares of a replay: its slots, bytes and token cycles, and the policy's split of the slots
    (`slots`: "shared" by all layers, "per_layer", or "none").
    """
    sizes = []
    for share in SHARES:
        n_slots = round(share * n_layers * n_experts)
        slots = arrange(n_slots, n_layers, n_used)
        cycles = n_slots / (n_layers * n_used)
        how = "shared" if len(slots) == 1 < n_layers else "per_layer" if any(slots) else "none"
        n_bytes = round(cycles * token_cycle)
        sizes.append({"share": share, "n_slots": n_slots, "n_bytes": n_bytes, "cycles": cycles, "slots": how})
    return sizes


def size_table(sizes: list[dict[str, Any]]) -> Table:
    """Return `cache_sizes` as a table."""
    words = {
        "shared": "all layers share the slots",
        "per_layer": "each layer has its own slots",
        "none": "no cache: it cannot hold an expert",
    }
    rows = [
        [percent(size["share"]), human_size(size["n_bytes"]), f"{size['cycles']:.2f}", words[size["slots"]]]
        for size in sizes
    ]
    return [">experts", ">size", ">token cycles", "a cache of this size"], rows


def drift_of(trace: RouteTrace) -> ExpertDrift:
    """Return the drift of a trace, which must have at least one token."""
    n_layers, n_experts = len(trace.layers), trace.n_experts
    chosen = np.zeros((trace.n_tokens, n_layers, n_experts), bool)
    np.put_along_axis(chosen, trace.routes.astype(np.int64), True, axis=2)
    sequence = np.searchsorted(np.array(trace.starts), np.arange(trace.n_tokens), side="right")
    overlap = np.full((n_layers, len(LAGS)), np.nan)
    for i, lag in enumerate(LAGS):
        later = np.flatnonzero(sequence[lag:] == sequence[:-lag]) + lag  # both in one sequence
        if len(later):
            both = np.count_nonzero(chosen[later] & chosen[later - lag], axis=(0, 2))
            overlap[:, i] = both / (len(later) * trace.n_used)
    hotness = chosen.mean(axis=0)
    n_windows = min(N_WINDOWS, max(trace.n_tokens // SMALLEST_WINDOW, 1))
    window = trace.n_tokens // n_windows
    counts = np.stack(
        [chosen[i * window : (i + 1) * window].sum(axis=0, dtype=np.int64) for i in range(n_windows)], axis=1
    )  # [n_layers, n_windows, n_experts]
    n_hot = max(round(HOT_EXPERTS * n_experts), 1)
    now = -np.sort(-counts, axis=2)[:, :, :n_hot].sum(axis=2)
    hot = np.argsort(-counts[:, 0], axis=1, kind="stable")[:, :n_hot]
    then = np.take_along_axis(counts, hot[:, None, :], axis=2).sum(axis=2)
    every = window * trace.n_used
    return ExpertDrift(
        window, trace.n_tokens, overlap, (hotness**2).sum(axis=1) / trace.n_used, then / every, now / every
    )
