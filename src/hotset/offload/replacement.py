"""The replacement policy of all caches with few slots: which experts or neurons they hold.

    policy = Replacement(arrange(n_slots, n_layers, n_used), n_layers, n_experts)
    policy.begin_step()                       # once for each step of the model
    places = policy.lookup(layer, ids)        # a layer's needed entries, before they are computed
    for id, slot in places.to_fill(ids): ...  # copy the expert into the slot; drop(layer, id) if that fails

The policy handles slot numbers, and knows no devices, files or bytes: the owner allocates the memory once, in
slots of one size, and fills the slots that the policy returns. It is native (csrc/replacement.h has the
details), because a token needs 48 lookups between routers and experts; C++ code uses the same class. Its
decisions depend only on the lookups: equal lookups give equal places on every machine. It is not thread-safe.

A *token cycle* is the entries that one token needs: n_used experts of each layer. Layers take turns. So an
LRU cache that all layers share and that is smaller than a cycle never hits, because it has always just
evicted the next entries. In that case `arrange` gives each layer separate slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hotset import _core
from hotset.errors import InvalidRequestError

# Steps after which a use counts half; a power of two. In published replays, 16 to 128 are equal. In replays
# of bench/expert_cache.py, longer ones gain up to 5% for skewed routes and lose to LRU for drifting ones.
HALF_LIFE = 16
SHARED_CYCLES = 1.5  # with at least this many token cycles, all layers share the slots


@dataclass(frozen=True)
class Places:
    """The places of a lookup's entries, in its order; arrays of length n.

    slots: int32, the entry's slot, or the slot to copy it into; -1: none, use the entry from its source.
    hits: bool, the entry is in its slot. evicted: int32, layer * n_ids + id of the slot's previous entry; -1
    for an empty slot or a hit. A repeated id has the same slot, and is a hit the second time.
    """

    slots: np.ndarray
    hits: np.ndarray
    evicted: np.ndarray

    def to_fill(self, ids: np.ndarray) -> Iterator[tuple[int, int]]:
        """Return the entries that must be copied, with their slots."""
        missing = ~self.hits & (self.slots >= 0)
        return zip(ids[missing].tolist(), self.slots[missing].tolist(), strict=True)


def arrange(n_slots: int, n_layers: int, n_used: int) -> tuple[int, ...]:
    """Return the split of the slots: one number if all layers share them, otherwise one per layer.

    n_layers: layers with experts. n_used: experts of a token in each. A layer's own slots hit even if they
    cannot hold the experts of one token, because entries with more credit keep their slots
    (decision 013).
    """
    if n_slots < 0 or n_layers < 1 or n_used < 1:
        raise InvalidRequestError(
            "a cache needs layers, experts per token, and a number of slots that is not < 0"
        )
    cycle = n_layers * n_used
    if n_slots >= SHARED_CYCLES * cycle:
        return (n_slots,)
    each, rest = divmod(n_slots, n_layers)
    return tuple(each + (i < rest) for i in range(n_layers))


class Replacement:
    """The policy of one cache: entries 0..n_ids of each of n_layers, `slots` from `arrange`.

    A use adds a credit of 1, which halves every `half_life` steps. The entry with the least credit is evicted
    first; among equal ones, the least recently used (with half_life=0 only this counts: LRU). Entries keep
    their credit when they are evicted. Entries used since `begin_step` are never evicted. Raises
    InvalidRequestError for invalid numbers.
    """

    def __init__(self, slots: tuple[int, ...], n_layers: int, n_ids: int, half_life: int = HALF_LIFE) -> None:
        try:
            self._core = _core.Replacement(n_layers, n_ids, list(slots), half_life)
        except (ValueError, TypeError) as error:  # TypeError: a number beyond 32 bits
            raise InvalidRequestError(f"the cache's numbers are invalid: {error}") from None

    @property
    def n_slots(self) -> int:
        """Return the slots of all layers together, numbered from 0, with a layer's slots in a row."""
        return self._core.n_slots

    def expect(self, layer: int, shares: np.ndarray) -> None:
        """Set the expected uses of a layer's entries, before the first lookup.

        shares: float32 [n_ids], of steps that used each entry elsewhere. They are worth a quarter of the
        credit of as many uses here.
        """
        self._core.expect(layer, shares)

    def begin_step(self) -> None:
        """Begin a step: no entry is in use any more, and credits age."""
        self._core.begin_step()

    def lookup(self, layer: int, ids: np.ndarray, *, credit: bool = True) -> Places:
        """Use the entries ids (int32 [n]) of a layer; return their current or new places.

        An entry takes a free slot, or the slot of an entry with less credit; otherwise it is used from its
        source. credit: False for entries that a prompt needs or that are fetched on a guess, so that
        decoding's entries stay.
        """
        slots, hits, evicted = self._core.lookup(layer, ids, credit)
        return Places(slots, hits.astype(bool), evicted)

    def drop(self, layer: int, id: int) -> None:
        """Free the slot of an entry, if it has one, because it could not be read."""
        self._core.drop(layer, id)

    def find(self, layer: int, id: int) -> int:
        """Return the slot of an entry, or -1, without counting a use."""
        return self._core.find(layer, id)

    def replay(
        self,
        ids: np.ndarray,
        first: int = 0,
        *,
        counts: np.ndarray | None = None,
        by_layer: bool = False,
    ) -> np.ndarray:
        """Return hits of each layer, int64 [n_layers], from token `first` on, if each token is a step.

        ids: int32 [n_tokens, n_layers, n_used]; or [n] in that order, if the number of entries varies, with
        counts, int32 [n_tokens, n_layers]. by_layer: each layer of a token is a step, so that its entries may
        be evicted for the next layer: textbook LRU, with half_life=0. The next replay continues from the
        resulting state.
        """
        if counts is None:
            counts = np.full(ids.shape[:2], ids.shape[2])
        flat = np.ascontiguousarray(ids, np.int32).reshape(-1)
        n = np.ascontiguousarray(counts, np.int32)
        return np.array(self._core.replay(flat, n, first, by_layer), np.int64)


def optimal_hits(spans: np.ndarray, n_lookups: int, first: int, n_slots: int) -> int:
    """Return hits, from lookup `first` on, of a cache that knows all future lookups (Belady).

    spans: int32 [n, 3]: a lookup, a later one that needs entries of it again, and how many; ordered by the
    first. The cache starts with the best of the entries needed before `first`. After each lookup it keeps the
    entries that are needed again soonest.
    """
    return _core.optimal_hits(np.ascontiguousarray(spans, np.int32), n_lookups, first, n_slots)


def slots_in(groups: Sequence[tuple[int, int, int]], n_bytes: int) -> list[int]:
    """Return the slots of each group (n_rows, slot_bytes, usual) in a row store of n_bytes."""
    return _core.RowStore.slots_in(list(groups), n_bytes)
