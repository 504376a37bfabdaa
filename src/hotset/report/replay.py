"""Replay of a trace through caches of experts or neurons: hit rates by size and policy, and the optimum.

    replayed = replay(trace)
    replayed.points[3].hit_rates["budget"]

The trace is run like decoding: token by token, each layer's entries are looked up once they are known. The
first half of the tokens warms the caches; hit rates are from the second half. They are exact: a real cache
with the same slots and policy hits as often when this text is decoded token by token. For `budget` this is
true only while a token's rows without a slot fit in the room reserved for them, so that none is borrowed.
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

SHARES = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # of all entries, in the cache
_PIECE = 32  # tokens that are looked up at a time
# The replacement policies, by name, with a description.
POLICIES = {
    "lru": "least recently used, slots shared by all layers",
    "hotset": "least credit, which halves every 16 tokens; slots per layer below 1.5 token cycles",
    "budget": "what --ram-budget does with this memory: slots per layer, credit halves every 64 tokens",
    "optimum": "Belady's: drops the entry that is needed last, since it knows the future",
}


def policies(trace: Trace) -> dict[str, str]:
    """Return the POLICIES that apply to a trace; `hotset` is only for experts on a device."""
    return {name: said for name, said in POLICIES.items() if name != "hotset" or trace.what == "experts"}


@dataclass(frozen=True)
class Point:
    """A size of the cache. share: of all entries; cycles: in token cycles; hit_rates: by policy, 0 to 1.

    cache_hit_rate, disk_bytes_per_token: as a run under a budget would report with n_bytes for rows,
    including rows that every token needs. Bytes assume that each row is read separately; in a plain file,
    neighbouring rows are read together, in fewer bytes.
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
    """The results of a replay. n_counted: requests that the rates count.

    cliff: a token cycle as a share of all entries; with fewer slots shared by all layers, LRU never hits.
    """

    points: tuple[Point, ...]
    n_tokens: int
    n_counted: int
    cliff: float

    def as_dict(self) -> dict[str, Any]:
        """Return the results for JSON."""
        return asdict(self)


def replay(trace: Trace, shares: Sequence[float] = SHARES, *, sizes: Sequence[int] = ()) -> Replay:
    """Return hit rates at these shares of all entries, and at these sizes in bytes, for every policy.

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
            by_layer["budget"] = requests  # if all fit, all are read when loading
        hits = {name: int(each.sum()) for name, each in by_layer.items()}
        hits["optimum"] = optimal_hits(spans, n_lookups, first, n_slots)
        rates = {name: hits[name] / max(n_counted, 1) for name in policies(trace)}
        stored = _under_budget(trace, requests, n_bytes, by_layer["budget"])
        points.append(Point(share, n_slots, n_bytes, n_slots / max(trace.cycle, 1), rates, *stored))
    return Replay(tuple(points), trace.n_tokens, n_counted, trace.cycle / n_all)


def _pieces(trace: Trace) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield the requests of some tokens at a time: the number of the first token, ids and counts."""
    for first in range(0, trace.n_tokens, _PIECE):
        yield first, *trace.requests(first, min(first + _PIECE, trace.n_tokens))


def _hits(trace: Trace, n_slots: int, n_bytes: int) -> dict[str, np.ndarray]:
    """Return the hits of the second half for all policies but the optimum: by layer, int64 [n_layers]."""
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
            asked = rising if name == "budget" else ids  # a store gets ids in ascending order
            hits[name] += one.replay(asked, max(half - first, 0), counts=counts, by_layer=name == "lru")
    return hits


def _slots(groups: Sequence[StoredGroup], n_bytes: int) -> list[int]:
    """Return the slots of each group in a store with n_bytes for rows."""
    sizes = [(group.n_rows, group.slot_bytes, group.usual) for group in groups]
    return slots_in(sizes, n_bytes)


def _stored_slots(trace: Trace, n_bytes: int) -> tuple[int, ...]:
    """Return the slots for each layer's entries."""
    slots = zip(trace.groups, _slots(trace.groups, n_bytes), strict=True)
    own = {group.layer: n for group, n in slots if group.layer >= 0}
    return tuple(own[i] for i in range(len(trace.layers)))


def _under_budget(trace: Trace, requests: np.ndarray, n_bytes: int, hits: np.ndarray) -> tuple[float, float]:
    """Return cache_hit_rate and disk_bytes_per_token of a Point, from each layer's requests and hits."""
    n_tokens = trace.n_tokens - trace.n_tokens // 2
    n_hits, n_asked, n_read = int(hits.sum()), int(requests.sum()), 0.0
    for group, n_slots in zip(trace.groups, _slots(trace.groups, n_bytes), strict=True):
        if group.layer >= 0:
            n_read += int(requests[group.layer] - hits[group.layer]) * group.read_bytes
        elif group.layer == EVERY:  # a row with a slot keeps it, because all are needed equally often
            n_asked += n_tokens * group.n_rows
            n_hits += n_tokens * n_slots
            n_read += n_tokens * group.all_bytes * (group.n_rows - n_slots) / group.n_rows
    return n_hits / max(n_asked, 1), n_read / n_tokens


def _spans(trace: Trace) -> np.ndarray:
    """Return spans from each lookup to those that need its entries next, for `optimal_hits`."""
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
