"""The replacement policy equals a plain simulation of it, and keeps the rules that every cache relies on."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hotset.errors import InvalidRequestError
from hotset.offload.replacement import Replacement, arrange


class Plain:
    """The same policy, written like its documentation: every choice looks at every slot."""

    def __init__(self, slots: tuple[int, ...], n_layers: int, n_ids: int, half_life: int) -> None:
        self.n_layers, self.n_ids, self.half_life = n_layers, n_ids, half_life
        self.pools, first = [], 0
        for n in slots:
            self.pools.append(range(first, first + n))
            first += n
        self.free = [list(pool) for pool in self.pools]
        self.holds: dict[int, int] = {}  # slot → entry
        self.credit: dict[int, float] = {}
        self.used: dict[int, int] = {}
        self.needed: set[int] = set()
        self.credited: set[int] = set()
        self.step, self.n_uses = 1, 0
        root = 2.0
        for _ in range(max(half_life, 1).bit_length() - 1):
            root = math.sqrt(root)
        self.powers = [1.0]
        for _ in range(half_life - 1):
            self.powers.append(self.powers[-1] * root)

    def begin_step(self) -> None:
        self.step += 1
        self.needed, self.credited = set(), set()

    def rank(self, entry: int) -> tuple[float, int]:
        return self.credit.get(entry, 0.0), self.used.get(entry, 0)

    def use(self, entry: int, credit: bool) -> None:
        self.needed.add(entry)
        if credit and entry not in self.credited:
            self.credited.add(entry)
            self.n_uses += 1
            self.used[entry] = self.n_uses
            if self.half_life:
                whole, part = divmod(self.step, self.half_life)
                worth = math.ldexp(self.powers[part], whole)
                self.credit[entry] = self.credit.get(entry, 0.0) + worth

    def slot_of(self, entry: int) -> int:
        return next((slot for slot, held in self.holds.items() if held == entry), -1)

    def lookup(self, layer: int, ids: list[int], credit: bool) -> list[tuple[int, bool, int]]:
        entries = [layer * self.n_ids + id for id in ids]
        found = [self.slot_of(entry) for entry in entries]
        for entry, slot in zip(entries, found, strict=True):
            if slot >= 0:
                self.use(entry, credit)
        return [
            (slot, True, -1) if slot >= 0 else self.bring(layer, entry, credit)
            for entry, slot in zip(entries, found, strict=True)
        ]

    def bring(self, layer: int, entry: int, credit: bool) -> tuple[int, bool, int]:
        if (slot := self.slot_of(entry)) >= 0:
            return slot, True, -1
        self.use(entry, credit)
        pool = layer if len(self.pools) > 1 else 0
        evicted = -1
        if self.free[pool]:
            slot = self.free[pool].pop(0)
        else:
            victims = [
                (self.rank(self.holds[s]), s) for s in self.pools[pool] if self.holds[s] not in self.needed
            ]
            if not victims or not min(victims)[0] < self.rank(entry):
                return -1, False, -1
            slot = min(victims)[1]
            evicted = self.holds[slot]
        self.holds[slot] = entry
        return slot, False, evicted

    def drop(self, layer: int, id: int) -> None:
        slot = self.slot_of(layer * self.n_ids + id)
        if slot >= 0:
            del self.holds[slot]
            self.free[layer if len(self.pools) > 1 else 0].insert(0, slot)


@pytest.mark.parametrize("half_life", [0, 1, 8])
@pytest.mark.parametrize("slots", [(0,), (1,), (7,), (20,), (64,), (3, 3, 2, 2), (16, 0, 5, 1)])
def test_policy_equals_the_plain_simulation(slots: tuple[int, ...], half_life: int) -> None:
    """Compare the results of every lookup, with and without credit, with repeated ids and dropped entries."""
    n_layers, n_ids = 4, 16
    policy = Replacement(slots, n_layers, n_ids, half_life)
    plain = Plain(slots, n_layers, n_ids, half_life)
    rng = np.random.default_rng(sum(slots) + half_life)
    popular = rng.permutation(n_ids)
    for step in range(200):
        policy.begin_step()
        plain.begin_step()
        for layer in range(n_layers):
            draws = popular[np.minimum(rng.geometric(0.2, rng.integers(1, 9)) - 1, n_ids - 1)]
            credit = bool(rng.random() < 0.7)
            ids = draws.astype(np.int32)
            places = policy.lookup(layer, ids, credit=credit)
            got = zip(places.slots.tolist(), places.hits.tolist(), places.evicted.tolist(), strict=True)
            assert list(got) == plain.lookup(layer, ids.tolist(), credit), f"step {step}, layer {layer}"
            if rng.random() < 0.1:
                policy.drop(layer, int(ids[0]))
                plain.drop(layer, int(ids[0]))
            id = int(rng.integers(n_ids))
            assert policy.find(layer, id) == plain.slot_of(layer * n_ids + id)
        if step % 50 == 0:
            popular = rng.permutation(n_ids)


def test_credits_are_scaled_down_before_they_overflow() -> None:
    """Compare with LRU: with a half-life of one step a use outweighs all before it, however large 2^step."""
    policy, lru = Replacement((5,), 1, 12, half_life=1), Replacement((5,), 1, 12, half_life=0)
    rng = np.random.default_rng(7)
    for step in range(3000):
        id = rng.integers(12, size=1, dtype=np.int32)
        policy.begin_step()
        lru.begin_step()
        assert policy.lookup(0, id).slots.tolist() == lru.lookup(0, id).slots.tolist(), f"step {step}"


def test_entries_of_a_step_stay_until_it_ends() -> None:
    policy = Replacement((4,), 2, 8)
    policy.begin_step()
    first = policy.lookup(0, np.array([0, 1, 2], np.int32))
    second = policy.lookup(1, np.array([3, 4, 5], np.int32))
    assert first.slots.tolist() == [0, 1, 2]
    assert second.slots.tolist() == [3, -1, -1], "every slot is in use"
    assert not second.hits.any()
    assert second.evicted.tolist() == [-1, -1, -1]
    assert list(second.to_fill(np.array([3, 4, 5]))) == [(3, 3)]
    policy.begin_step()
    again = policy.lookup(1, np.array([4, 5], np.int32))
    assert again.slots.tolist() == [0, 1]
    assert again.evicted.tolist() == [0, 1]


def test_prompt_does_not_evict_entries_of_decoding() -> None:
    policy = Replacement((4,), 1, 64)
    for _ in range(3):
        policy.begin_step()
        policy.lookup(0, np.array([1, 2, 3], np.int32))
    policy.begin_step()
    prompt = policy.lookup(0, np.arange(10, 40, dtype=np.int32), credit=False)
    assert (prompt.slots >= 0).sum() == 1, "the one that was free"
    policy.begin_step()
    assert policy.lookup(0, np.array([1, 2, 3], np.int32)).hits.all()
    policy.begin_step()
    assert policy.lookup(0, np.array([50], np.int32)).evicted.tolist() == [10], "the prompt's goes first"


def test_frequent_entry_returns_to_stay_unlike_with_lru() -> None:
    """Check that an evicted frequent entry keeps the credit of its earlier uses."""
    outcomes = {}
    for half_life in (0, 16):
        policy = Replacement((2,), 1, 100, half_life)
        hits = 0
        for step in range(40):
            policy.begin_step()
            hits += int(policy.lookup(0, np.array([0], np.int32)).hits.sum())
            for other in (1 + 2 * step, 2 + 2 * step):  # two that are never needed again
                policy.begin_step()
                policy.lookup(0, np.array([other], np.int32))
        outcomes[half_life] = hits
    assert outcomes == {0: 0, 16: 38}


@pytest.mark.parametrize(
    ("n_slots", "expected"),
    [
        (0, (0, 0, 0)),
        (2, (1, 1, 0)),
        (5, (2, 2, 1)),  # a token needs six
        (6, (2, 2, 2)),
        (8, (3, 3, 2)),
        (9, (9,)),  # one and a half cycles
        (100, (100,)),
    ],
)
def test_slots_are_shared_above_one_and_a_half_cycles(n_slots: int, expected: tuple[int, ...]) -> None:
    assert arrange(n_slots, n_layers=3, n_used=2) == expected


def test_below_a_cycle_a_shared_lru_hits_nothing() -> None:
    """Show the cliff of LRU: 8 layers of 2 experts, and every token uses the same two.

    The policy itself keeps the entries of the current token, so the first layers still hit.
    """
    routes = np.tile(np.array([0, 1], np.int32), (50, 8, 1))
    assert Replacement((14,), 8, 4, half_life=0).replay(routes, by_layer=True).sum() == 0
    assert Replacement((16,), 8, 4, half_life=0).replay(routes, by_layer=True).tolist() == [98] * 8
    assert Replacement((14,), 8, 4).replay(routes).tolist() == [98] * 7 + [0]
    assert Replacement((1,) * 8, 8, 4).replay(routes).tolist() == [49] * 8


def test_a_replay_is_the_lookups_one_by_one() -> None:
    rng = np.random.default_rng(3)
    routes = np.argsort(rng.random((40, 3, 10)), axis=2)[:, :, :4].astype(np.int32)
    one = Replacement((14,), 3, 10)
    hits = np.zeros(3, np.int64)
    for token, layers in enumerate(routes):
        one.begin_step()
        for layer, ids in enumerate(layers):
            hits[layer] += one.lookup(layer, np.ascontiguousarray(ids)).hits.sum() * (token >= 10)
    assert Replacement((14,), 3, 10).replay(routes, first=10).tolist() == hits.tolist()


def test_invalid_cache_sizes_give_one_message() -> None:
    for slots, n_layers, n_ids, half_life in (
        ((1, 2), 3, 4, 0), ((-1,), 3, 4, 0), ((1,), 0, 4, 0), ((1,), 1 << 16, 1 << 16, 0), ((1,), 3, 4, 3),
        ((2**31 - 1, 1), 2, 4, 0), ((2**40,), 2, 4, 0),
    ):  # fmt: skip
        with pytest.raises(InvalidRequestError, match="numbers are invalid"):
            Replacement(slots, n_layers, n_ids, half_life)
    with pytest.raises(InvalidRequestError):
        arrange(-1, 3, 2)
    policy = Replacement((4,), 2, 8)
    for layer, id in ((2, 0), (-1, 0), (0, 8), (0, -1)):
        with pytest.raises(ValueError, match="there is no"):
            policy.lookup(layer, np.array([id], np.int32))
        with pytest.raises(ValueError, match="there is no"):
            policy.drop(layer, id)


def test_expected_entries_stay_until_use_differs() -> None:
    """Check that expected entries, counted elsewhere, are not evicted for the first other entry."""
    for shares, stay in (([0.0] * 4, False), ([0.9, 0.8, 0.1, 0.0], True)):
        cache = Replacement((2,), 1, 4, 64)
        cache.expect(0, np.array(shares, np.float32))
        cache.begin_step()
        cache.lookup(0, np.array([0, 1], np.int32), credit=False)  # as if read ahead
        cache.begin_step()
        cache.lookup(0, np.array([2, 3], np.int32))
        assert ([cache.find(0, id) >= 0 for id in range(4)] == [True, True, False, False]) == stay
    for _ in range(30):  # until the expectation has faded
        cache.begin_step()
        cache.lookup(0, np.array([3], np.int32))
    assert cache.find(0, 3) >= 0
    with pytest.raises(ValueError, match="one share per entry"):
        cache.expect(0, np.zeros(3, np.float32))
