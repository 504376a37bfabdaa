"""What a cache of experts would have hit over a trace: any size, several policies, and the best there is.

    replayed = replay(trace)
    replayed.points[3].hit_rates["hotset"]

The trace is run as decoding would: token by token, each layer's experts looked up when its router has spoken.
The first half of the tokens warms the caches and tells the fixed choice which experts are frequent; rates are
those of the second half. What is counted is exact: a cache in use, of the same slots and policy, hits as
often on this text.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hotset.errors import InvalidRequestError
from hotset.replacement import HALF_LIFE, Replacement, arrange
from hotset.sparsity.trace import RouteTrace

SHARES = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # of all experts, resident
# Which experts are kept, by name: what it is.
POLICIES = {
    "static": "the experts that were most frequent before, for ever",
    "lru": "least recently used, slots shared by all layers",
    "per_layer": "least recently used, slots of each layer's own",
    "decayed": "least credit, which halves every 16 tokens, slots shared",
    "hotset": "as decayed, but what has more credit stays; below 1.5 token cycles slots of each layer",
    "optimum": "Belady's: what is needed again the latest is not kept; it knows the future",
}


@dataclass(frozen=True)
class Point:
    """A size of the cache. share: of all experts; cycles: in token cycles; hit_rates: by policy, 0 to 1."""

    share: float
    n_slots: int
    n_bytes: int
    cycles: float
    hit_rates: dict[str, float]


@dataclass(frozen=True)
class Replay:
    """n_counted: requests of experts that the rates are of. cliff: the share of experts that a token cycle
    is, below which slots that all layers share hit nothing by LRU."""

    points: tuple[Point, ...]
    n_tokens: int
    n_counted: int
    cliff: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def replay(trace: RouteTrace, shares: Sequence[float] = SHARES) -> Replay:
    """Hit rates at these shares of all experts, by every policy of POLICIES.

    A slot is as large as the largest expert. Raises InvalidRequestError for a trace of one token.
    """
    if trace.n_tokens < 2:
        raise InvalidRequestError("the trace has one token; trace a longer text")
    n_all = len(trace.layers) * trace.n_experts
    first = trace.n_tokens // 2
    n_counted = (trace.n_tokens - first) * trace.cycle
    future = _next_uses(trace)
    points = []
    for share in shares:
        n_slots = round(share * n_all)
        hits = {name: _hits(trace, name, n_slots, first) for name in POLICIES if name != "optimum"}
        hits["optimum"] = _optimum(*future, n_slots, first * trace.cycle, trace.n_used)
        rates = {name: n / n_counted for name, n in hits.items()}
        n_bytes = n_slots * max(trace.expert_bytes)
        points.append(Point(share, n_slots, n_bytes, n_slots / trace.cycle, rates))
    return Replay(tuple(points), trace.n_tokens, n_counted, trace.cycle / n_all)


def _hits(trace: RouteTrace, policy: str, n_slots: int, first: int) -> int:
    n_layers, n_experts = len(trace.layers), trace.n_experts

    def run(slots: tuple[int, ...], half_life: int = HALF_LIFE, **how: bool) -> int:
        cache = Replacement(slots, n_layers, n_experts, half_life)
        return int(cache.replay(trace.routes, first, **how).sum())

    match policy:
        case "static":
            return _static(trace, n_slots, first)
        case "lru":
            return run((n_slots,), 0, by_layer=True)
        case "per_layer":
            return run(_evenly(n_slots, n_layers), 0)
        case "decayed":
            return run((n_slots,))
        case _:
            return run(arrange(n_slots, n_layers, trace.n_used), keeps_better=True)


def _evenly(n_slots: int, n_layers: int) -> tuple[int, ...]:
    each, rest = divmod(n_slots, n_layers)
    return tuple(each + (i < rest) for i in range(n_layers))


def _entries(routes: np.ndarray, n_experts: int) -> np.ndarray:
    """Routes as numbers of (layer, expert), int64 [n_tokens, n_layers, n_used]."""
    return routes + n_experts * np.arange(routes.shape[1])[:, None]


def _static(trace: RouteTrace, n_slots: int, first: int) -> int:
    entries = _entries(trace.routes, trace.n_experts)
    counts = np.bincount(entries[:first].ravel(), minlength=len(trace.layers) * trace.n_experts)
    kept = np.argsort(-counts, kind="stable")[:n_slots]
    return int(np.isin(entries[first:], kept).sum())


def _next_uses(trace: RouteTrace) -> tuple[np.ndarray, np.ndarray]:
    """For each request in order: where the same expert was requested before (-1: nowhere), and where next."""
    requests = _entries(trace.routes, trace.n_experts).ravel()
    n = len(requests)
    order = np.argsort(requests, kind="stable")
    same = requests[order[1:]] == requests[order[:-1]]
    before, after = np.full(n, -1), np.full(n, n)
    before[order[1:][same]] = order[:-1][same]
    after[order[:-1][same]] = order[1:][same]
    return before, after


def _optimum(before: np.ndarray, after: np.ndarray, n_slots: int, first: int, n_used: int) -> int:
    """Hits of the best policy from request `first` on. It begins with the best of what was seen by then;
    after each lookup of n_used experts it keeps, of these and what is there, what is needed again soonest."""
    n, hits = len(before), 0
    kept = bytearray(n)  # whether what was requested there is held until it is requested again
    seen = np.flatnonzero((after[:first] >= first) & (after[:first] < n))
    held = seen[np.argsort(after[seen], kind="stable")[:n_slots]].tolist()
    for i in held:
        kept[i] = 1
    n_held = len(held)
    farthest = [-int(after[i]) for i in held]  # of what is held the next requests, negative, as a heap
    heapq.heapify(farthest)
    last, next = before.tolist(), after.tolist()
    for start in range(first, n, n_used):
        # What hits has its next request behind it now, and so lies at the bottom of the heap for ever.
        n_hits = sum(last[i] >= 0 and kept[last[i]] for i in range(start, start + n_used))
        hits += n_hits
        n_held -= n_hits
        for i in range(start, start + n_used):
            if next[i] < n:
                kept[i] = 1
                heapq.heappush(farthest, -next[i])
                n_held += 1
        for _ in range(n_held - n_slots):
            kept[last[-heapq.heappop(farthest)]] = 0
        n_held = min(n_held, n_slots)
    return hits
