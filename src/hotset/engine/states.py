"""Slots for recurrent states: which are free, which sequences use, and which hold the end of a prefix.

The state of a recurrent operation (operations.Recurrent) summarises all tokens before a position, and cannot
be cut like a KV block. So a prefix is reused up to the end of a block whose state was saved. The backend owns
the memory; this module assigns the numbers. One step writes a slot, and no later step does while it is in
use. So a failed step can be run again from its start, sequences with one prefix share a slot, and nothing is
ever copied.
"""

from __future__ import annotations

from collections import OrderedDict

from hotset.errors import InvalidRequestError


class StatePool:
    """A pool of `n_states` reference-counted slots; states of prefixes stay until room is needed (LRU).

    A kept state is found by the serial number of the block before it (kv_cache.BlockPool).
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
        """Return how many slots `allocate` could hand out now."""
        return len(self._empty) + len(self._idle)

    @property
    def references(self) -> list[int]:
        """Return how many sequences use each slot."""
        return list(self._references)

    @property
    def n_kept(self) -> int:
        """Return how many slots hold the end of a prefix, in use or not."""
        return len(self._slots)

    @property
    def n_idle(self) -> int:
        """Return how many unused slots hold the end of a prefix."""
        return len(self._idle)

    def allocate(self, *, evict: bool = True) -> int | None:
        """Return a slot for one sequence; None if all are in use. evict: allow evicting a prefix."""
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
        """Return whether the state after a block was kept."""
        return serial in self._slots

    def find(self, serial: int) -> tuple[int, int] | None:
        """Return the slot of the state after a block, and its use count; None if it was not kept.

        May run in any thread, like `holds`. The slot may be overwritten at any time.
        """
        slot = self._slots.get(serial)
        if slot is None:
            return None
        n_uses = self._n_uses[slot]
        return (slot, n_uses) if self._slots.get(serial) == slot else None

    def holds(self, slot: int, n_uses: int) -> bool:
        """Return whether a slot still has the contents that `find` reported."""
        return self._n_uses[slot] == n_uses

    def take(self, serial: int) -> int:
        """Return the slot of the state that was kept after a block, with one more reference."""
        slot = self._slots[serial]
        if self._references[slot] == 0:
            del self._idle[slot]
        self._references[slot] += 1
        return slot

    def keep(self, slot: int, serial: int) -> None:
        """Make the state in a used slot findable after a block, unless the block already has one."""
        if serial not in self._slots and self._serials[slot] is None:
            self._slots[serial] = slot
            self._serials[slot] = serial

    def release(self, slot: int) -> None:
        """Drop one reference."""
        self._references[slot] -= 1
        if self._references[slot] == 0:
            if self._serials[slot] is None:
                self._empty.append(slot)
            else:
                self._idle[slot] = None

    def forget(self, serial: int) -> None:
        """Forget the state of a block that can no longer be found."""
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
