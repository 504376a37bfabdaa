"""What a cache of experts or neurons would have hit over a trace: any size, several policies, and the best.

    replayed = replay(trace)
    replayed.points[3].hit_rates["budget"]

The trace is run as decoding would: token by token, each layer's entries looked up when it is known which are
needed. The first half of the tokens warms the caches; rates are those of the second half. What is counted is
exact: a cache in use, of the same slots and policy, hits as often on this text, when it comes token by token;
`budget` as long as the rows of a token that have no slot find the room that is set apart for them, so that
none is borrowed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hotset.errors import InvalidRequestError
from hotset.offload.replacement import HALF_LIFE, Replacement, arrange, optimal_hits, slots_in
from hotset.offload.weight_store import HALF_LIFE as STORED_HALF_LIFE
from hotset.sparsity.trace import EVERY, RouteTrace, StoredGroup, Trace

SHARES = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # of all entries, resident
_PIECE = 32  # tokens that are looked up at a time
# Which entries are kept, by name: what it is.
POLICIES = {
    "lru": "least recently used, slots shared by all layers",
    "hotset": "least credit, which halves every 16 tokens; below 1.5 token cycles slots of each layer",
    "budget": "what --ram-budget does with this memory: slots of each layer, credit halves every 64 tokens",
    "optimum": "Belady's: what is needed again the latest is not kept; it knows the future",
}


def policies(trace: Trace) -> dict[str, str]:
    """Those of POLICIES that a trace can be replayed by: `hotset` is that of experts on a device."""
    return {name: said for name, said in POLICIES.items() if name != "hotset" or trace.what == "experts"}


@dataclass(frozen=True)
class Point:
    """A size of the cache. share: of all entries; cycles: in token cycles; hit_rates: by policy, 0 to 1.

    cache_hit_rate, disk_bytes_per_token: what a run under a budget would say that has n_bytes for rows, with
    all that it keeps so: rows that every token needs count there too. Bytes are of rows that are read each by
    itself; neighbours in a plain file come in one read, of fewer bytes.
    """

    share: float
    n_slots: int
    n_bytes: int
    cycles: float
    hit_rates: dict[str, float]
    cache_hit_rate: float
    disk_bytes_per_token: float


@dataclass(frozen=True)
class Replay:
    """n_counted: requests that the rates are of. cliff: the share of the entries that a token cycle is, below
    which slots that all layers share hit nothing by LRU."""

    points: tuple[Point, ...]
    n_tokens: int
    n_counted: int
    cliff: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def replay(trace: Trace, shares: Sequence[float] = SHARES, *, sizes: Sequence[int] = ()) -> Replay:
    """Hit rates at these shares of all entries, and at these sizes in bytes, by every policy of the trace.

    A slot is as large as the largest entry. Raises InvalidRequestError for a trace of one token.
    """
    if trace.n_tokens < 2:
        raise InvalidRequestError("the trace has one token; trace a longer text")
    n_all, slot = sum(trace.sizes), max(trace.entry_bytes)
    half, n_layers = trace.n_tokens // 2, len(trace.layers)
    requests = np.array([trace.chosen(i)[half:].sum() for i in range(n_layers)])
    n_counted = int(requests.sum())
    spans, n_lookups, first = _spans(trace), trace.n_tokens * n_layers, half * n_layers
    points = []
    asked = [(share, round(share * n_all), round(share * n_all) * slot) for share in shares]
    asked += [(min(size // slot, n_all) / n_all, min(size // slot, n_all), size) for size in sizes]
    for share, n_slots, n_bytes in asked:
        by_layer = _hits(trace, n_slots, n_bytes)
        if _slots(trace.groups, n_bytes) == [group.n_rows for group in trace.groups]:
            by_layer["budget"] = requests  # what has room for all is read at once
        hits = {name: int(each.sum()) for name, each in by_layer.items()}
        hits["optimum"] = optimal_hits(spans, n_lookups, first, n_slots)
        rates = {name: hits[name] / max(n_counted, 1) for name in policies(trace)}
        stored = _under_budget(trace, requests, n_bytes, by_layer["budget"])
        points.append(Point(share, n_slots, n_bytes, n_slots / max(trace.cycle, 1), rates, *stored))
    return Replay(tuple(points), trace.n_tokens, n_counted, trace.cycle / n_all)


def _pieces(trace: Trace) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """The requests of some tokens at a time: the number of the first, ids and counts."""
    for first in range(0, trace.n_tokens, _PIECE):
        yield first, *trace.requests(first, min(first + _PIECE, trace.n_tokens))


def _hits(trace: Trace, n_slots: int, n_bytes: int) -> dict[str, np.ndarray]:
    """Hits of the second half by the policies that are run: by layer, int64 [n_layers]."""
    n_layers, n_ids, half = len(trace.layers), max(trace.sizes), trace.n_tokens // 2

    def cache(slots: tuple[int, ...], half_life: int = HALF_LIFE) -> Replacement:
        return Replacement(slots, n_layers, n_ids, half_life)

    caches = {"lru": cache((n_slots,), 0), "budget": cache(_stored_slots(trace, n_bytes), STORED_HALF_LIFE)}
    if isinstance(trace, RouteTrace):
        caches["hotset"] = cache(arrange(n_slots, n_layers, trace.n_used))
    hits = {name: np.zeros(n_layers, np.int64) for name in caches}
    for first, ids, counts in _pieces(trace):
        rising = np.sort(ids.reshape(-1, trace.n_used)).ravel() if isinstance(trace, RouteTrace) else ids
        for name, one in caches.items():
            asked = rising if name == "budget" else ids  # a store is asked for rows in their order
            hits[name] += one.replay(asked, max(half - first, 0), counts=counts, by_layer=name == "lru")
    return hits


def _slots(groups: Sequence[StoredGroup], n_bytes: int) -> list[int]:
    """Of a store with so much room for rows: slots of each group."""
    sizes = [(group.n_rows, group.slot_bytes, group.usual) for group in groups]
    return slots_in(sizes, n_bytes)


def _stored_slots(trace: Trace, n_bytes: int) -> tuple[int, ...]:
    """Those of each layer's entries."""
    slots = zip(trace.groups, _slots(trace.groups, n_bytes), strict=True)
    own = {group.layer: n for group, n in slots if group.layer >= 0}
    return tuple(own[i] for i in range(len(trace.layers)))


def _under_budget(trace: Trace, requests: np.ndarray, n_bytes: int, hits: np.ndarray) -> tuple[float, float]:
    """cache_hit_rate and disk_bytes_per_token of a Point, of the requests and hits of each layer."""
    n_tokens = trace.n_tokens - trace.n_tokens // 2
    n_hits, n_asked, n_read = int(hits.sum()), int(requests.sum()), 0.0
    for group, n_slots in zip(trace.groups, _slots(trace.groups, n_bytes), strict=True):
        if group.layer >= 0:
            n_read += int(requests[group.layer] - hits[group.layer]) * group.read_bytes
        elif group.layer == EVERY:  # what has a slot keeps it, since all are needed as often
            n_asked += n_tokens * group.n_rows
            n_hits += n_tokens * n_slots
            n_read += n_tokens * group.all_bytes * (group.n_rows - n_slots) / group.n_rows
    return n_hits / max(n_asked, 1), n_read / n_tokens


def _spans(trace: Trace) -> np.ndarray:
    """From each lookup to those that ask again for entries of it, as `optimal_hits` takes them."""
    n_layers, parts = len(trace.layers), []
    for layer in range(n_layers):
        entries, tokens = np.nonzero(trace.chosen(layer).T)
        again = entries[1:] == entries[:-1]
        keys = tokens[:-1][again] * trace.n_tokens + tokens[1:][again]
        keys, counts = np.unique(keys, return_counts=True)
        ends = np.stack([keys // trace.n_tokens, keys % trace.n_tokens])
        parts.append(np.stack([*(ends * n_layers + layer), counts], axis=1))
    spans = np.concatenate(parts)
    return spans[np.argsort(spans[:, 0], kind="stable")].astype(np.int32)
