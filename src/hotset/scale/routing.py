"""The choice of a replica for a request: the one with the beginning of its prompt in its cache.

The router has no tokenizer and needs none. It takes the text of the request as the prompt, in blocks of
_BLOCK characters. A block's key is a hash of it and of all blocks before it.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_BLOCK = 64  # characters
_MOST_BLOCKS = 2048  # of a prompt
_MOST_KEYS = 200_000  # in the table: about ten megabytes
_BRANCHES = 3  # continuations that make a block shared by several conversations
_PARTS = ("tools", "system", "instructions", "messages", "input", "prompt")  # in the order of a prompt


def prefix_keys(body: bytes) -> list[str]:
    """Return keys of the first blocks of the prompt in a request's JSON, in order; [] without a prompt."""
    try:
        given = json.loads(body.decode("utf-8-sig"))  # as a replica reads it
    except (ValueError, RecursionError):
        return []
    if not isinstance(given, dict):
        return []
    text = "".join(json.dumps(given[part]) for part in _PARTS if given.get(part)).rstrip("]}\"'")
    keys, hashed = [], hashlib.blake2b(digest_size=12)
    for start in range(0, min(len(text), _MOST_BLOCKS * _BLOCK) - _BLOCK + 1, _BLOCK):
        hashed.update(text[start : start + _BLOCK].encode("utf-8", "replace"))
        keys.append(hashed.hexdigest())
    return keys


@dataclass(slots=True)
class _Block:
    """A block of a prompt. replicas: those that have it. following: keys of next blocks, up to _BRANCHES."""

    replicas: set[str] = field(default_factory=set)
    following: set[str] = field(default_factory=set)


class PrefixTable:
    """The blocks that each replica was given; the least recently used are forgotten.

    ahead: how many more requests than the least loaded replica a replica may have and still get requests
    whose prefix it has.
    """

    def __init__(self, ahead: int = 8) -> None:
        self._ahead = ahead
        self._blocks: OrderedDict[str, _Block] = OrderedDict()
        self._n_blocks: Counter[str] = Counter()

    def order(self, keys: Sequence[str], loads: Mapping[str, int]) -> list[str]:
        """Return the replicas, the best first. loads: the current requests of each."""
        least = min(loads.values(), default=0)
        depths = {replica: self._depth(keys, replica) for replica in loads}
        shared = self._shared(keys)

        def rank(replica: str) -> tuple[bool, int, int, int, str]:
            # A prefix of only one conversation is worth following; all replicas soon have a shared one.
            is_its_own = depths[replica] > shared and loads[replica] <= least + self._ahead
            if is_its_own:
                return False, -depths[replica], loads[replica], self._n_blocks[replica], replica
            return True, loads[replica], self._n_blocks[replica], -depths[replica], replica

        return sorted(loads, key=rank)

    def note(self, keys: Sequence[str], replica: str) -> None:
        """Note that the replica was given a prompt."""
        for i, key in enumerate(keys):
            block = self._blocks.setdefault(key, _Block())
            self._blocks.move_to_end(key)
            if replica not in block.replicas:
                block.replicas.add(replica)
                self._n_blocks[replica] += 1
            if i + 1 < len(keys) and len(block.following) < _BRANCHES:
                block.following.add(keys[i + 1])
        while len(self._blocks) > _MOST_KEYS:
            _, block = self._blocks.popitem(last=False)
            self._n_blocks.subtract(block.replicas)

    def forget(self, replica: str) -> None:
        """Remove a replica that is gone."""
        for block in self._blocks.values():
            block.replicas.discard(replica)
        del self._n_blocks[replica]

    def _depth(self, keys: Sequence[str], replica: str) -> int:
        """Return how many of the first blocks a replica has."""
        for i, key in enumerate(keys):
            if (block := self._blocks.get(key)) is None or replica not in block.replicas:
                return i
        return len(keys)

    def _shared(self, keys: Sequence[str]) -> int:
        """Return the number of first blocks that several conversations share."""
        found = 0
        for i, key in enumerate(keys):
            if (block := self._blocks.get(key)) is None:
                break
            if len(block.following) >= _BRANCHES:
                found = i + 1
        return found
