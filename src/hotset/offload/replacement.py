"""Which experts (or neurons) a cache of few slots holds: the replacement policy of every such cache.

    policy = Replacement(arrange(n_slots, n_layers, n_used), n_layers, n_experts)
    policy.begin_step()                       # once for each step of the model
    places = policy.lookup(layer, ids)        # what the step needs of a layer, before it computes that
    for id, slot in places.to_fill(ids): ...  # bring the expert into the slot; drop(layer, id) if that fails

It knows slots by their number and nothing of devices, files or bytes: the owner of the memory allocates it
once, in slots of one size, and fills those that are named. The policy is native (csrc/replacement.h says it
whole), since a lookup stands between a router and its experts 48 times in a token; code in C++ uses the same
class. What it does depends on the lookups alone: the same ones give the same places, on every machine. It is
not for several threads at once.

A *token cycle* is what one token needs: n_used experts of each layer. Layers come in turn, so a cache that
all layers share and that is smaller than a cycle has always just evicted what comes next, and with LRU hits
nothing: `arrange` gives each layer slots of its own there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hotset import _core
from hotset.errors import InvalidRequestError

# Steps after which a use counts half; a power of two. In published replays 16 to 128 are equal; in those of
# bench/expert_cache.py longer ones gain up to 5% where routes are skewed and lose to LRU where they drift.
HALF_LIFE = 16
SHARED_CYCLES = 1.5  # from so many token cycles on all layers share the slots


@dataclass(frozen=True)
class Places:
    """Where the entries of a lookup are, in its order; arrays of length n.

    slots: int32, the slot where the entry is or is to be put; -1: it gets none, and must be used from where
    it lies. hits: bool, it is there already. evicted: int32, layer * n_ids + id of what was in the slot until
    now; -1: nothing was, or it is a hit. An id that comes twice has the same slot, as a hit the second time.
    """

    slots: np.ndarray
    hits: np.ndarray
    evicted: np.ndarray

    def to_fill(self, ids: np.ndarray) -> Iterator[tuple[int, int]]:
        """The entries that must be brought, with their slots."""
        missing = ~self.hits & (self.slots >= 0)
        return zip(ids[missing].tolist(), self.slots[missing].tolist(), strict=True)


def arrange(n_slots: int, n_layers: int, n_used: int) -> tuple[int, ...]:
    """How so many slots are shared: one number where all layers share them, else a number for each layer.

    n_layers: those with experts. n_used: experts of a token in each. A layer's own slots hit even where they
    do not hold the experts of one token, since what has more credit keeps them (decision 013).
    """
    if n_slots < 0 or n_layers < 1 or n_used < 1:
        raise InvalidRequestError("a cache needs layers, experts of a token, and no negative number of slots")
    cycle = n_layers * n_used
    if n_slots >= SHARED_CYCLES * cycle:
        return (n_slots,)
    each, rest = divmod(n_slots, n_layers)
    return tuple(each + (i < rest) for i in range(n_layers))


class Replacement:
    """The policy of one cache: entries 0..n_ids of each of n_layers, `slots` as `arrange` gives them.

    A use credits an entry with 1, which halves every `half_life` steps; the entry with the least credit goes
    first, of equal ones that which was used longest ago (with half_life=0 that alone counts: LRU). Credit
    stays with entries that are not resident. What was used since `begin_step` is never evicted. Raises
    InvalidRequestError for numbers that make no cache.
    """

    def __init__(self, slots: tuple[int, ...], n_layers: int, n_ids: int, half_life: int = HALF_LIFE) -> None:
        try:
            self._core = _core.Replacement(n_layers, n_ids, list(slots), half_life)
        except (ValueError, TypeError) as error:  # TypeError: a number beyond 32 bits
            raise InvalidRequestError(f"there is no such cache: {error}") from None

    @property
    def n_slots(self) -> int:
        """Of all layers together; they are numbered from 0, those of a layer in a row."""
        return self._core.n_slots

    def expect(self, layer: int, shares: np.ndarray) -> None:
        """Before the first lookup: the share of the steps that have used each entry of a layer elsewhere,
        float32 [n_ids]. It is worth a quarter of the credit that so many uses would have come to here."""
        self._core.expect(layer, shares)

    def begin_step(self) -> None:
        """A new step: nothing is in use any more, and credits have aged."""
        self._core.begin_step()

    def lookup(self, layer: int, ids: np.ndarray, *, credit: bool = True) -> Places:
        """Uses the entries ids (int32 [n]) of a layer, and says where they are or are to be put.

        An entry takes a free slot, or that of an entry with less credit; else it is used from where it is.
        credit: False for those that a prompt needs, or that are fetched on a guess: decoding's stay.
        """
        slots, hits, evicted = self._core.lookup(layer, ids, credit)
        return Places(slots, hits.astype(bool), evicted)

    def drop(self, layer: int, id: int) -> None:
        """Frees the slot of an entry, if it has one: it could not be read."""
        self._core.drop(layer, id)

    def find(self, layer: int, id: int) -> int:
        """The slot of an entry, or -1; not a use of it."""
        return self._core.find(layer, id)

    def replay(
        self,
        ids: np.ndarray,
        first: int = 0,
        *,
        counts: np.ndarray | None = None,
        by_layer: bool = False,
    ) -> np.ndarray:
        """Hits of each layer, int64 [n_layers], from token `first` on, when each token is a step.

        ids: int32 [n_tokens, n_layers, n_used]; or, where tokens need more or less, [n] in that order, and
        counts, int32 [n_tokens, n_layers], says how many they need of each layer. by_layer: each layer of a
        token is a step, so that what the token has used in others may be evicted: the textbook's LRU, with
        half_life=0. The state that they leave is the next replay's beginning.
        """
        if counts is None:
            counts = np.full(ids.shape[:2], ids.shape[2])
        flat = np.ascontiguousarray(ids, np.int32).reshape(-1)
        n = np.ascontiguousarray(counts, np.int32)
        return np.array(self._core.replay(flat, n, first, by_layer), np.int64)


def optimal_hits(spans: np.ndarray, n_lookups: int, first: int, n_slots: int) -> int:
    """Hits, from lookup `first` on, of a cache of any entries that knows what will be asked for (Belady).

    spans: int32 [n, 3]: a lookup, a later one that asks again for entries of it, and for how many; in order
    of the first. It begins with the best of what was asked for before `first`; after each lookup it keeps, of
    that and what is there, what is needed again the soonest.
    """
    return _core.optimal_hits(np.ascontiguousarray(spans, np.int32), n_lookups, first, n_slots)


def slots_in(groups: Sequence[tuple[int, int, int]], n_bytes: int) -> list[int]:
    """Of a store of rows with n_bytes of room: slots of each group (n_rows, slot_bytes, usual)."""
    return _core.RowStore.slots_in(list(groups), n_bytes)
