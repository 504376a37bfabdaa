"""The pool of KV blocks: reference counts, shared prefixes, eviction."""

from __future__ import annotations

import random

import pytest

from hotset.backends.base import PAGE_SIZE
from hotset.engine.kv_cache import ROOT, PagePool
from hotset.errors import InvalidRequestError


def prompt(n: int, seed: int = 0) -> list[int]:
    return [random.Random(f"{seed}-{i}").randrange(1000) for i in range(n)]


def fill(pool: PagePool, tokens: list[int]) -> list[int]:
    """Allocate and register the full blocks of `tokens`, like a sequence that computes all of them."""
    pages, chain = [], ROOT
    for start in range(0, len(tokens) - PAGE_SIZE + 1, PAGE_SIZE):
        page = pool.allocate()
        assert page is not None
        chain = pool.register(page, chain, tokens[start : start + PAGE_SIZE])
        pages.append(page)
    return pages


def test_allocates_every_page_once_and_then_none():
    pool = PagePool(5)
    pages = [pool.allocate() for _ in range(5)]
    assert sorted(pages) == [0, 1, 2, 3, 4]
    assert pool.allocate() is None
    pool.release(pages[2:3])
    assert pool.n_available == 1
    assert pool.allocate() == pages[2]


def test_a_released_prefix_is_found_again():
    pool = PagePool(8)
    tokens = prompt(3 * PAGE_SIZE + 10)
    pages = fill(pool, tokens)
    pool.release(pages)
    assert pool.n_available == 8
    assert pool.match(tokens, 99)[0] == pages
    assert pool.n_available == 5
    assert pool.match(tokens, 2)[0] == pages[:2]


def test_a_prefix_in_use_is_shared_until_its_last_user_leaves():
    pool = PagePool(4)
    tokens = prompt(2 * PAGE_SIZE)
    pages = fill(pool, tokens)
    shared, _ = pool.match(tokens, 2)
    assert shared == pages
    pool.release(pages)
    assert pool.n_available == 2
    assert {pool.allocate(), pool.allocate()}.isdisjoint(pages)
    assert pool.allocate() is None
    pool.release(shared)
    assert pool.n_available == 2


def test_a_prefix_matches_only_up_to_the_first_different_token():
    pool = PagePool(8)
    tokens = prompt(4 * PAGE_SIZE)
    pages = fill(pool, tokens)
    changed = tokens.copy()
    changed[2 * PAGE_SIZE + 5] += 1
    assert pool.match(changed, 4)[0] == pages[:2]
    assert pool.match(tokens[1:], 4)[0] == []


def test_equal_tokens_after_different_prefixes_are_different_pages():
    pool = PagePool(8)
    same = prompt(PAGE_SIZE, seed=1)
    first, second = prompt(PAGE_SIZE, seed=2) + same, prompt(PAGE_SIZE, seed=3) + same
    first_pages, second_pages = fill(pool, first), fill(pool, second)
    assert pool.match(first, 2)[0] == first_pages
    assert pool.match(second, 2)[0] == second_pages
    assert pool.match(same, 1)[0] == []


def test_a_prefix_computed_twice_is_found_once():
    pool = PagePool(8)
    tokens = prompt(2 * PAGE_SIZE)
    first, second = fill(pool, tokens), fill(pool, tokens)
    assert pool.match(tokens, 2)[0] == first
    pool.release(first)
    pool.release(first)
    pool.release(second)
    assert pool.n_available == 8
    # The duplicate blocks cannot be found by any prefix, so they are allocated first.
    assert {pool.allocate() for _ in range(6)}.isdisjoint(first)


def test_the_least_recently_used_prefix_is_evicted_from_its_end():
    pool = PagePool(4)
    old, recent = prompt(2 * PAGE_SIZE, seed=1), prompt(2 * PAGE_SIZE, seed=2)
    old_pages = fill(pool, old)
    recent_pages = fill(pool, recent)
    pool.release(old_pages)
    pool.release(recent_pages)
    assert pool.allocate() == old_pages[1]
    assert pool.match(old, 2)[0] == old_pages[:1]
    pool.release(old_pages[:1])  # now the most recently used
    assert pool.allocate() == recent_pages[1]
    assert pool.allocate() == recent_pages[0]
    assert pool.match(recent, 2)[0] == []
    assert pool.match(old, 2)[0] == old_pages[:1]


def test_a_page_whose_parent_was_evicted_is_never_found():
    pool = PagePool(3)
    tokens = prompt(2 * PAGE_SIZE)
    pages = fill(pool, tokens)
    pool.release(pages[:1])  # the second stays in use
    assert pool.allocate() is not None
    assert pool.allocate() == pages[0]
    assert pool.match(tokens, 2)[0] == []
    pool.release([pages[0]])
    again = fill(pool, tokens[:PAGE_SIZE])
    assert pool.match(tokens, 2)[0] == again


def test_clear_forgets_prefixes_and_keeps_pages_in_use():
    pool = PagePool(4)
    tokens = prompt(2 * PAGE_SIZE)
    pages = fill(pool, tokens)
    pool.release(pages[1:])
    pool.clear()
    assert pool.match(tokens, 2)[0] == []
    assert pool.n_available == 3
    pool.release(pages[:1])
    assert pool.n_available == 4


def test_random_use_never_loses_or_doubles_a_page():
    random_source = random.Random(7)
    pool = PagePool(12)
    prompts = [prompt(3 * PAGE_SIZE, seed=i % 3) for i in range(6)]
    users: list[list[int]] = []
    for _ in range(2000):
        if users and random_source.random() < 0.5:
            pool.release(users.pop(random_source.randrange(len(users))))
        else:
            tokens = random_source.choice(prompts)
            pages, chain = pool.match(tokens, random_source.randrange(4))
            while len(pages) < 3 and (page := pool.allocate()) is not None:
                start = len(pages) * PAGE_SIZE
                chain = pool.register(page, chain, tokens[start : start + PAGE_SIZE])
                pages.append(page)
            users.append(pages)
        in_use = {page for pages in users for page in pages}
        assert len(in_use) + pool.n_available == 12


def test_a_pool_needs_a_page():
    with pytest.raises(InvalidRequestError, match="at least one block"):
        PagePool(0)
