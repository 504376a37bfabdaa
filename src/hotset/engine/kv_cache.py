"""Pages of the KV cache: which are free, which are shared, which still hold a prefix worth reusing.

The backend owns the memory; this module owns the numbering. A page holds PAGE_SIZE positions of one
sequence. Only full pages are shared, and a full page never changes, so nothing is ever copied.

A full page is found again by what was computed into it: the serial number of the page before it (of the first
one, what adapters its sequence has), its own token ids, and the first of them that is thresholded (those of a
prompt are not, those of an answer may be).
The dictionary compares the whole key, so two prefixes that merely hash alike are never mixed up, and a serial
number is never used twice, so a page whose parent was evicted can no longer be reached.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from hotset.backends.base import PAGE_SIZE, AdapterScales
from hotset.engine.states import StatePool
from hotset.errors import InvalidRequestError

ROOT = 0  # the serial number that stands before the first page of a sequence without adapters
NONE_THRESHOLDED = 1 << 62  # of a sequence without thresholded tokens

_Key = tuple[int, int, bytes]


def root_of(scales: AdapterScales) -> int:
    """The serial number that stands before the first page of a sequence with these adapters: no page has it,
    and no other adapters."""
    if not scales:
        return ROOT
    return -1 - int.from_bytes(hashlib.blake2b(repr(scales).encode(), digest_size=32).digest(), "little")


def n_unthresholded_in_page(first_thresholded_token: int, index: int) -> int:
    """How many tokens of page `index` come before the first thresholded token of their sequence."""
    return min(max(first_thresholded_token - index * PAGE_SIZE, 0), PAGE_SIZE)


class PagePool:
    """Hands out `n_pages` pages with reference counts; released prefixes stay until room is needed (LRU).

    states: of a model with recurrent layers, whose prefixes end where a state was kept.
    """

    def __init__(self, n_pages: int, states: StatePool | None = None) -> None:
        if n_pages < 1:
            raise InvalidRequestError(f"the KV cache needs at least one page, not {n_pages}")
        self.n_pages, self.states = n_pages, states
        self._empty = list(range(n_pages - 1, -1, -1))  # unused pages, the lowest on top
        self._idle: OrderedDict[int, None] = (
            OrderedDict()
        )  # unused, but a prefix can be found in them; LRU first
        self._references = [0] * n_pages
        self._keys: list[_Key | None] = [None] * n_pages
        self._serials = [ROOT] * n_pages
        self._pages: dict[_Key, int] = {}
        self._next_serial = ROOT + 1

    @property
    def n_available(self) -> int:
        """Pages that `allocate` could hand out now (unused ones, whether or not they hold a prefix)."""
        return len(self._empty) + len(self._idle)

    @property
    def n_idle(self) -> int:
        """Those of them that hold a prefix."""
        return len(self._idle)

    @property
    def references(self) -> list[int]:
        """How many sequences have each page."""
        return list(self._references)

    @property
    def n_findable(self) -> int:
        """Pages that hold a prefix, in use or not."""
        return len(self._pages)

    def allocate(self) -> int | None:
        """A page for one sequence, evicting the oldest idle prefix if need be; None if all are in use."""
        if self._empty:
            page = self._empty.pop()
        elif self._idle:
            page, _ = self._idle.popitem(last=False)
            self._forget(page)
        else:
            return None
        self._references[page] = 1
        return page

    def match(
        self,
        tokens: Sequence[int],
        max_pages: int,
        *,
        first_thresholded_token: int = NONE_THRESHOLDED,
        first: int = 0,
        parent: int = ROOT,
    ) -> tuple[list[int], int]:
        """The longest stored prefix of `tokens`, in whole pages, `max_pages` at most; with states, the
        longest behind which one was kept.

        first_thresholded_token: tokens before it are computed with small values, those from it on without.
        Of a sequence whose first pages are there already: those after its `first` pages, the last of which
        has the serial number `parent`. Returns the pages, each now referenced once more, and the serial
        number of the last (see `register`).
        """
        pages: list[int] = []
        serial = parent
        if max_pages <= first or not self._pages:
            return pages, serial
        n_whole = 0  # pages up to a state
        data = np.asarray(tokens[first * PAGE_SIZE : max_pages * PAGE_SIZE], dtype=np.int32)
        for start in range(0, len(data) - PAGE_SIZE + 1, PAGE_SIZE):
            n = n_unthresholded_in_page(first_thresholded_token, first + start // PAGE_SIZE)
            page = self._pages.get((serial, n, data[start : start + PAGE_SIZE].tobytes()))
            if page is None:
                break
            pages.append(page)
            serial = self._serials[page]
            if self.states is None or self.states.has(serial):
                n_whole = len(pages)
        del pages[n_whole:]
        for page in pages:
            if self._references[page] == 0:
                del self._idle[page]
            self._references[page] += 1
        return pages, self._serials[pages[-1]] if pages else parent

    def find(self, parent: int, tokens: Sequence[int], n_unthresholded: int) -> tuple[int, int] | None:
        """The page that holds these tokens after `parent`, and its serial number; None where there is none.

        From any thread, as `holds`; the page may hold something else a moment later.
        """
        key = (parent, n_unthresholded, np.asarray(tokens, dtype=np.int32).tobytes())
        page = self._pages.get(key)
        if page is None:
            return None
        serial = self._serials[page]
        return (page, serial) if self._pages.get(key) == page else None

    def holds(self, page: int, serial: int) -> bool:
        """Whether a page still holds what it had with this serial number. It is forgotten before it is
        written again, so what was copied out before this says yes is what the page held."""
        return self._keys[page] is not None and self._serials[page] == serial

    def n_known(
        self, tokens: Sequence[int], max_pages: int, first_thresholded_token: int, root: int = ROOT
    ) -> int:
        """How many pages `match` would find now. root: the parent of the first."""
        n_whole, serial = 0, root
        for i in range(max_pages):
            page = tokens[i * PAGE_SIZE : (i + 1) * PAGE_SIZE]
            found = self.find(serial, page, n_unthresholded_in_page(first_thresholded_token, i))
            if found is None:
                break
            serial = found[1]
            if self.states is None or self.states.has(serial):
                n_whole = i + 1
        return n_whole

    def register(
        self, page: int, parent: int, tokens: Sequence[int], n_unthresholded: int = PAGE_SIZE
    ) -> int:
        """Makes a page that was just filled with `tokens` findable after `parent`; returns its serial number.

        n_unthresholded: how many of them were computed with small values (n_unthresholded_in_page). Where
        another page already holds the same prefix, that one stays the one to find, and its number is
        returned.
        """
        key = (parent, n_unthresholded, np.asarray(tokens, dtype=np.int32).tobytes())
        known = self._pages.get(key)
        if known is not None:
            return self._serials[known]
        # In this order: `find` and `holds` look on from other threads.
        self._serials[page] = self._next_serial
        self._next_serial += 1
        self._keys[page] = key
        self._pages[key] = page
        return self._serials[page]

    def release(self, pages: Iterable[int]) -> None:
        """Drops one reference of each page, given in the order of the sequence.

        The last page becomes the oldest: a prefix is evicted from its end, never from its beginning.
        """
        for page in reversed(list(pages)):
            self._references[page] -= 1
            if self._references[page] == 0:
                if self._keys[page] is None:
                    self._empty.append(page)
                else:
                    self._idle[page] = None

    def erase(
        self, tokens: Sequence[int], n_pages: int, first_thresholded_token: int, root: int = ROOT
    ) -> None:
        """Forgets the pages of a prefix that no sequence has, from its end on. root: the parent of the
        first."""
        found: list[int] = []
        serial = root
        for i in range(n_pages):
            page = tokens[i * PAGE_SIZE : (i + 1) * PAGE_SIZE]
            place = self.find(serial, page, n_unthresholded_in_page(first_thresholded_token, i))
            if place is None:
                break
            found.append(place[0])
            serial = place[1]
        while found and self._references[page_ := found.pop()] == 0:
            del self._idle[page_]
            self._forget(page_)
            self._empty.append(page_)

    def clear(self) -> None:
        """Forgets every prefix; pages in use stay in use."""
        for page in self._idle:
            self._empty.append(page)
        self._idle.clear()
        for page in range(self.n_pages):
            self._forget(page)

    def _forget(self, page: int) -> None:
        key = self._keys[page]
        if key is not None:
            del self._pages[key]
            self._keys[page] = None
            if self.states is not None:
                self.states.forget(self._serials[page])
