"""The pool of KV blocks: reference counts, shared prefixes, eviction."""

from __future__ import annotations

import random

import pytest

from hotset.backends.base import BLOCK_SIZE
from hotset.engine.kv_cache import ROOT, BlockPool
from hotset.errors import InvalidRequestError


def prompt(n: int, seed: int = 0) -> list[int]:
    return [random.Random(f"{seed}-{i}").randrange(1000) for i in range(n)]


def fill(pool: BlockPool, tokens: list[int]) -> list[int]:
    """Allocate and register the full blocks of `tokens`, like a sequence that computes all of them."""
    blocks, chain = [], ROOT
    for start in range(0, len(tokens) - BLOCK_SIZE + 1, BLOCK_SIZE):
        block = pool.allocate()
        assert block is not None
        chain = pool.register(block, chain, tokens[start : start + BLOCK_SIZE])
        blocks.append(block)
    return blocks


def test_allocates_every_block_once_and_then_none():
    pool = BlockPool(5)
    blocks = [pool.allocate() for _ in range(5)]
    assert sorted(blocks) == [0, 1, 2, 3, 4]
    assert pool.allocate() is None
    pool.release(blocks[2:3])
    assert pool.n_available == 1
    assert pool.allocate() == blocks[2]


def test_a_released_prefix_is_found_again():
    pool = BlockPool(8)
    tokens = prompt(3 * BLOCK_SIZE + 10)
    blocks = fill(pool, tokens)
    pool.release(blocks)
    assert pool.n_available == 8
    assert pool.match(tokens, 99)[0] == blocks
    assert pool.n_available == 5
    assert pool.match(tokens, 2)[0] == blocks[:2]


def test_a_prefix_in_use_is_shared_until_its_last_user_leaves():
    pool = BlockPool(4)
    tokens = prompt(2 * BLOCK_SIZE)
    blocks = fill(pool, tokens)
    shared, _ = pool.match(tokens, 2)
    assert shared == blocks
    pool.release(blocks)
    assert pool.n_available == 2
    assert {pool.allocate(), pool.allocate()}.isdisjoint(blocks)
    assert pool.allocate() is None
    pool.release(shared)
    assert pool.n_available == 2


def test_a_prefix_matches_only_up_to_the_first_different_token():
    pool = BlockPool(8)
    tokens = prompt(4 * BLOCK_SIZE)
    blocks = fill(pool, tokens)
    changed = tokens.copy()
    changed[2 * BLOCK_SIZE + 5] += 1
    assert pool.match(changed, 4)[0] == blocks[:2]
    assert pool.match(tokens[1:], 4)[0] == []


def test_equal_tokens_after_different_prefixes_are_different_blocks():
    pool = BlockPool(8)
    same = prompt(BLOCK_SIZE, seed=1)
    first, second = prompt(BLOCK_SIZE, seed=2) + same, prompt(BLOCK_SIZE, seed=3) + same
    first_blocks, second_blocks = fill(pool, first), fill(pool, second)
    assert pool.match(first, 2)[0] == first_blocks
    assert pool.match(second, 2)[0] == second_blocks
    assert pool.match(same, 1)[0] == []


def test_a_prefix_computed_twice_is_found_once():
    pool = BlockPool(8)
    tokens = prompt(2 * BLOCK_SIZE)
    first, second = fill(pool, tokens), fill(pool, tokens)
    assert pool.match(tokens, 2)[0] == first
    pool.release(first)
    pool.release(first)
    pool.release(second)
    assert pool.n_available == 8
    # The duplicate blocks cannot be found by any prefix, so they are allocated first.
    assert {pool.allocate() for _ in range(6)}.isdisjoint(first)


def test_the_least_recently_used_prefix_is_evicted_from_its_end():
    pool = BlockPool(4)
    old, recent = prompt(2 * BLOCK_SIZE, seed=1), prompt(2 * BLOCK_SIZE, seed=2)
    old_blocks = fill(pool, old)
    recent_blocks = fill(pool, recent)
    pool.release(old_blocks)
    pool.release(recent_blocks)
    assert pool.allocate() == old_blocks[1]
    assert pool.match(old, 2)[0] == old_blocks[:1]
    pool.release(old_blocks[:1])  # now the most recently used
    assert pool.allocate() == recent_blocks[1]
    assert pool.allocate() == recent_blocks[0]
    assert pool.match(recent, 2)[0] == []
    assert pool.match(old, 2)[0] == old_blocks[:1]


def test_a_block_whose_parent_was_evicted_is_never_found():
    pool = BlockPool(3)
    tokens = prompt(2 * BLOCK_SIZE)
    blocks = fill(pool, tokens)
    pool.release(blocks[:1])  # the second stays in use
    assert pool.allocate() is not None
    assert pool.allocate() == blocks[0]
    assert pool.match(tokens, 2)[0] == []
    pool.release([blocks[0]])
    again = fill(pool, tokens[:BLOCK_SIZE])
    assert pool.match(tokens, 2)[0] == again


def test_clear_forgets_prefixes_and_keeps_blocks_in_use():
    pool = BlockPool(4)
    tokens = prompt(2 * BLOCK_SIZE)
    blocks = fill(pool, tokens)
    pool.release(blocks[1:])
    pool.clear()
    assert pool.match(tokens, 2)[0] == []
    assert pool.n_available == 3
    pool.release(blocks[:1])
    assert pool.n_available == 4


def test_random_use_never_loses_or_doubles_a_block():
    random_source = random.Random(7)
    pool = BlockPool(12)
    prompts = [prompt(3 * BLOCK_SIZE, seed=i % 3) for i in range(6)]
    users: list[list[int]] = []
    for _ in range(2000):
        if users and random_source.random() < 0.5:
            pool.release(users.pop(random_source.randrange(len(users))))
        else:
            tokens = random_source.choice(prompts)
            blocks, chain = pool.match(tokens, random_source.randrange(4))
            while len(blocks) < 3 and (block := pool.allocate()) is not None:
                start = len(blocks) * BLOCK_SIZE
                chain = pool.register(block, chain, tokens[start : start + BLOCK_SIZE])
                blocks.append(block)
            users.append(blocks)
        in_use = {block for blocks in users for block in blocks}
        assert len(in_use) + pool.n_available == 12


def test_a_pool_needs_a_block():
    with pytest.raises(InvalidRequestError, match="at least one block"):
        BlockPool(0)
