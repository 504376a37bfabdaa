"""Slots for recurrent states: which are free, which a sequence has, which hold the end of a prefix.

What operations with a state (operations.Recurrent) leave of all tokens before a position cannot be cut out of
pages: a prefix is reused up to the end of a page whose state was kept. The backend owns the memory, this
module the numbering. A slot is written by one step and never again while anybody has it, so that a step which
failed is run again from where it began, sequences of one prefix share a slot, and nothing is ever copied.
"""

from __future__ import annotations

from collections import OrderedDict

from hotset.errors import InvalidRequestError


class StatePool:
    """Hands out `n_states` slots with reference counts; states of prefixes stay until room is needed (LRU).

    A kept state is found by the serial number of the page that it stands behind (kv_cache.PagePool).
    """

    def __init__(self, n_states: int) -> None:
        if n_states < 1:
            raise InvalidRequestError(f"the cache needs at least one slot for states, not {n_states}")
        self.n_states = n_states
        self._empty = list(range(n_states - 1, -1, -1))  # unused slots, the lowest on top
        self._idle: OrderedDict[int, None] = OrderedDict()  # unused, but the end of a prefix; LRU first
        self._references = [0] * n_states
        self._n_uses = [0] * n_states
        self._serials: list[int | None] = [None] * n_states
        self._slots: dict[int, int] = {}  # serial number → slot

    @property
    def n_available(self) -> int:
        """Slots that `allocate` could hand out now."""
        return len(self._empty) + len(self._idle)

    @property
    def references(self) -> list[int]:
        """How many sequences have each slot."""
        return list(self._references)

    @property
    def n_kept(self) -> int:
        """Slots that hold the end of a prefix, in use or not."""
        return len(self._slots)

    @property
    def n_idle(self) -> int:
        """Those of them that are not in use."""
        return len(self._idle)

    def allocate(self, *, evict: bool = True) -> int | None:
        """A slot for one sequence; None if all are in use. evict: or the oldest state of a prefix, if need
        be."""
        if self._empty:
            slot = self._empty.pop()
        elif self._idle and evict:
            slot, _ = self._idle.popitem(last=False)
            self._unkeep(slot)
        else:
            return None
        self._references[slot] = 1
        self._n_uses[slot] += 1
        return slot

    def has(self, serial: int) -> bool:
        """Whether the state behind a page was kept."""
        return serial in self._slots

    def find(self, serial: int) -> tuple[int, int] | None:
        """The slot with that state, and how often the slot was handed out; None where it was not kept. From
        any thread, as `holds`; the slot may hold something else a moment later."""
        slot = self._slots.get(serial)
        if slot is None:
            return None
        n_uses = self._n_uses[slot]
        return (slot, n_uses) if self._slots.get(serial) == slot else None

    def holds(self, slot: int, n_uses: int) -> bool:
        """Whether a slot still holds what it had when `find` said so."""
        return self._n_uses[slot] == n_uses

    def take(self, serial: int) -> int:
        """The slot with the state that was kept behind a page, now referenced once more."""
        slot = self._slots[serial]
        if self._references[slot] == 0:
            del self._idle[slot]
        self._references[slot] += 1
        return slot

    def keep(self, slot: int, serial: int) -> None:
        """Makes the state in a slot that is in use findable behind a page, unless there is one already."""
        if serial not in self._slots and self._serials[slot] is None:
            self._slots[serial] = slot
            self._serials[slot] = serial

    def release(self, slot: int) -> None:
        """Drops one reference."""
        self._references[slot] -= 1
        if self._references[slot] == 0:
            if self._serials[slot] is None:
                self._empty.append(slot)
            else:
                self._idle[slot] = None

    def forget(self, serial: int) -> None:
        """A page can be found no longer, and so its state."""
        slot = self._slots.get(serial)
        if slot is None:
            return
        self._unkeep(slot)
        if slot in self._idle:
            del self._idle[slot]
            self._empty.append(slot)

    def _unkeep(self, slot: int) -> None:
        serial = self._serials[slot]
        if serial is not None:
            del self._slots[serial]
            self._serials[slot] = None
