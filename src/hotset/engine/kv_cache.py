"""Blocks of the KV cache: which are free, which are shared, and which hold a reusable prefix.

The backend owns the memory; this module assigns the numbers. A block
holds BLOCK_SIZE positions of one sequence. Only full blocks are shared, and a full block never changes, so
nothing is ever copied.

The key of a full block consists of the serial number of the block before it (for the first block, a number
for the sequence's adapters), its own token ids, and how many of them precede the first thresholded token. The
dictionary compares whole keys, so prefixes with equal hashes are never confused. A serial number is never
used twice, so a block whose parent was evicted cannot be found.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from hotset.backends.base import BLOCK_SIZE, AdapterScales
from hotset.engine.states import StatePool
from hotset.errors import InvalidRequestError

ROOT = 0  # the parent of the first block of a sequence without adapters
NONE_THRESHOLDED = 1 << 62  # first_thresholded_token of a sequence without thresholded tokens

_Key = tuple[int, int, bytes]


def root_of(scales: AdapterScales) -> int:
    """Return the parent of the first block of a sequence with these adapters: unique to them."""
    if not scales:
        return ROOT
    return -1 - int.from_bytes(hashlib.blake2b(repr(scales).encode(), digest_size=32).digest(), "little")


def n_unthresholded_in_block(first_thresholded_token: int, index: int) -> int:
    """Return how many tokens of block `index` precede the first thresholded token of their sequence."""
    return min(max(first_thresholded_token - index * BLOCK_SIZE, 0), BLOCK_SIZE)


class BlockPool:
    """A pool of `n_blocks` reference-counted blocks; released prefixes stay until room is needed (LRU).

    states: for models with recurrent layers, in which a prefix can be reused only up to a saved state.
    """

    def __init__(self, n_blocks: int, states: StatePool | None = None) -> None:
        if n_blocks < 1:
            raise InvalidRequestError(f"the KV cache needs at least one block, not {n_blocks}")
        self.n_blocks, self.states = n_blocks, states
        self._empty = list(range(n_blocks - 1, -1, -1))  # unused blocks, the lowest on top
        self._idle: OrderedDict[int, None] = OrderedDict()  # unused blocks that hold a prefix, LRU first
        self._references = [0] * n_blocks
        self._keys: list[_Key | None] = [None] * n_blocks
        self._serials = [ROOT] * n_blocks
        self._blocks: dict[_Key, int] = {}
        self._next_serial = ROOT + 1

    @property
    def n_available(self) -> int:
        """Return how many blocks `allocate` could hand out now, with or without a prefix."""
        return len(self._empty) + len(self._idle)

    @property
    def n_idle(self) -> int:
        """Return how many available blocks hold a prefix."""
        return len(self._idle)

    @property
    def references(self) -> list[int]:
        """Return how many sequences use each block."""
        return list(self._references)

    @property
    def n_findable(self) -> int:
        """Return how many blocks hold a prefix, in use or not."""
        return len(self._blocks)

    def allocate(self) -> int | None:
        """Return a block for one sequence, evicting the oldest idle one if needed; None if all are used."""
        if self._empty:
            block = self._empty.pop()
        elif self._idle:
            block, _ = self._idle.popitem(last=False)
            self._forget(block)
        else:
            return None
        self._references[block] = 1
        return block

    def match(
        self,
        tokens: Sequence[int],
        max_blocks: int,
        *,
        first_thresholded_token: int = NONE_THRESHOLDED,
        first: int = 0,
        parent: int = ROOT,
    ) -> tuple[list[int], int]:
        """Return the blocks of the longest cached prefix of `tokens`, and the serial number of the last.

        The prefix has at most `max_blocks` blocks, and ends at a saved state if there are states. Each block
        gets one more reference. first_thresholded_token: as in Sequence. To extend a sequence that already
        has its `first` blocks, pass the serial number of the last one as `parent`; only later blocks are
        returned.
        """
        found = self._prefix(tokens, range(first, max_blocks), first_thresholded_token, parent)
        for block, _ in found:
            if self._references[block] == 0:
                del self._idle[block]
            self._references[block] += 1
        return [block for block, _ in found], found[-1][1] if found else parent

    def _prefix(
        self, tokens: Sequence[int], blocks: range, first_thresholded_token: int, parent: int
    ) -> list[tuple[int, int]]:
        """Return the blocks that `match` finds, and their serial numbers."""
        found = list(self._cached(tokens, blocks, first_thresholded_token, parent))
        while found and self.states is not None and not self.states.has(found[-1][1]):
            found.pop()
        return found

    def _cached(
        self, tokens: Sequence[int], blocks: range, first_thresholded_token: int, parent: int
    ) -> Iterator[tuple[int, int]]:
        """Yield the cached blocks of a sequence and their serial numbers, up to the first that is missing."""
        for i in blocks:
            block = tokens[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE]
            found = self.find(parent, block, n_unthresholded_in_block(first_thresholded_token, i))
            if found is None:
                return
            yield found
            parent = found[1]

    def find(self, parent: int, tokens: Sequence[int], n_unthresholded: int) -> tuple[int, int] | None:
        """Return the block with these tokens after `parent`, and its serial number; None if not found.

        May run in any thread, like `holds`. The block may be overwritten at any time.
        """
        key = (parent, n_unthresholded, np.asarray(tokens, dtype=np.int32).tobytes())
        block = self._blocks.get(key)
        if block is None:
            return None
        serial = self._serials[block]
        return (block, serial) if self._blocks.get(key) == block else None

    def holds(self, block: int, serial: int) -> bool:
        """Return whether a block still has the contents of this serial number.

        A block is forgotten before it is overwritten. So a copy that was made before this returns True is
        valid.
        """
        return self._keys[block] is not None and self._serials[block] == serial

    def n_known(
        self, tokens: Sequence[int], max_blocks: int, first_thresholded_token: int, root: int = ROOT
    ) -> int:
        """Return how many blocks `match` would find now. root: the parent of the first block."""
        return len(self._prefix(tokens, range(max_blocks), first_thresholded_token, root))

    def register(
        self, block: int, parent: int, tokens: Sequence[int], n_unthresholded: int = BLOCK_SIZE
    ) -> int:
        """Register a block that was just filled with `tokens` after `parent`; return its serial number.

        n_unthresholded: how many of the tokens are not thresholded (n_unthresholded_in_block). If another
        block already holds the same prefix, that block remains registered, and its number is returned.
        """
        key = (parent, n_unthresholded, np.asarray(tokens, dtype=np.int32).tobytes())
        known = self._blocks.get(key)
        if known is not None:
            return self._serials[known]
        # The order matters: `find` and `holds` read from other threads.
        self._serials[block] = self._next_serial
        self._next_serial += 1
        self._keys[block] = key
        self._blocks[key] = block
        return self._serials[block]

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference of each block; `blocks` are in the order of the sequence.

        The last block becomes the oldest: a prefix is evicted from its end.
        """
        for block in reversed(list(blocks)):
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._keys[block] is None:
                    self._empty.append(block)
                else:
                    self._idle[block] = None

    def erase(
        self, tokens: Sequence[int], n_blocks: int, first_thresholded_token: int, root: int = ROOT
    ) -> None:
        """Forget the blocks of a prefix that no sequence uses, from its end. root: the first one's parent."""
        cached = self._cached(tokens, range(n_blocks), first_thresholded_token, root)
        found = [block for block, _ in cached]
        while found and self._references[block := found.pop()] == 0:
            del self._idle[block]
            self._forget(block)
            self._empty.append(block)

    def clear(self) -> None:
        """Forget every prefix; blocks in use stay in use."""
        for block in self._idle:
            self._empty.append(block)
        self._idle.clear()
        for block in range(self.n_blocks):
            self._forget(block)

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            del self._blocks[key]
            self._keys[block] = None
            if self.states is not None:
                self.states.forget(self._serials[block])
