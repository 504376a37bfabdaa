"""To which replica a request goes: to the one that has the beginning of its prompt in its cache.

The router has no tokenizer, and needs none: a prompt is taken as the text of the request, in pages of
so many characters, and a page's key is a hash of it and of all before it.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_PAGE = 64  # characters
_MOST_PAGES = 2048  # of a prompt
_MOST_KEYS = 200_000  # that are remembered: some ten megabytes
_BRANCHES = 3  # that go on from a page which several conversations share
_PARTS = ("tools", "system", "instructions", "messages", "input", "prompt")  # in the order of a prompt


def prefix_keys(body: bytes) -> list[str]:
    """Keys of the first pages of the prompt that a request's JSON has, in order; none where it has none."""
    try:
        given = json.loads(body.decode("utf-8-sig"))  # as a replica reads it
    except (ValueError, RecursionError):
        return []
    if not isinstance(given, dict):
        return []
    text = "".join(json.dumps(given[part]) for part in _PARTS if given.get(part)).rstrip("]}\"'")
    keys, hashed = [], hashlib.blake2b(digest_size=12)
    for start in range(0, min(len(text), _MOST_PAGES * _PAGE) - _PAGE + 1, _PAGE):
        hashed.update(text[start : start + _PAGE].encode("utf-8", "replace"))
        keys.append(hashed.hexdigest())
    return keys


@dataclass(slots=True)
class _Page:
    """replicas: who has it. following: keys of pages behind it, as many as matter."""

    replicas: set[str] = field(default_factory=set)
    following: set[str] = field(default_factory=set)


class PrefixTable:
    """Which replica has which pages, as far as it was given them; the least lately used are forgotten.

    ahead: how many more requests than the least loaded one a replica may have and still be given those whose
    prefix it has.
    """

    def __init__(self, ahead: int = 8) -> None:
        self._ahead = ahead
        self._pages: OrderedDict[str, _Page] = OrderedDict()
        self._n_pages: Counter[str] = Counter()

    def order(self, keys: Sequence[str], loads: Mapping[str, int]) -> list[str]:
        """The replicas, the best first. loads: requests that each has now."""
        least = min(loads.values(), default=0)
        depths = {replica: self._depth(keys, replica) for replica in loads}
        shared = self._shared(keys)

        def rank(replica: str) -> tuple[bool, int, int, int, str]:
            # What only one conversation has is worth following; what many share is soon had by all.
            is_its_own = depths[replica] > shared and loads[replica] <= least + self._ahead
            if is_its_own:
                return False, -depths[replica], loads[replica], self._n_pages[replica], replica
            return True, loads[replica], self._n_pages[replica], -depths[replica], replica

        return sorted(loads, key=rank)

    def note(self, keys: Sequence[str], replica: str) -> None:
        """The replica was given a prompt."""
        for i, key in enumerate(keys):
            page = self._pages.setdefault(key, _Page())
            self._pages.move_to_end(key)
            if replica not in page.replicas:
                page.replicas.add(replica)
                self._n_pages[replica] += 1
            if i + 1 < len(keys) and len(page.following) < _BRANCHES:
                page.following.add(keys[i + 1])
        while len(self._pages) > _MOST_KEYS:
            _, page = self._pages.popitem(last=False)
            self._n_pages.subtract(page.replicas)

    def forget(self, replica: str) -> None:
        """The replica is gone."""
        for page in self._pages.values():
            page.replicas.discard(replica)
        del self._n_pages[replica]

    def _depth(self, keys: Sequence[str], replica: str) -> int:
        """How many of the first pages it has."""
        for i, key in enumerate(keys):
            if (page := self._pages.get(key)) is None or replica not in page.replicas:
                return i
        return len(keys)

    def _shared(self, keys: Sequence[str]) -> int:
        """Up to where several conversations go together."""
        found = 0
        for i, key in enumerate(keys):
            if (page := self._pages.get(key)) is None:
                break
            if len(page.following) >= _BRANCHES:
                found = i + 1
        return found
