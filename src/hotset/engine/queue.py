"""The queue of waiting sequences: round-robin between clients, first come first served within one."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar


class Client(Protocol):
    """An entry of a queue. client: any key."""

    client: str | None


T = TypeVar("T", bound=Client)


class WaitingQueue(Generic[T]):
    """Sequences of several clients: the next of each client in turn, and within a client in order of arrival.

    Preempted sequences (`push_front`) come before all others. Iteration yields the order in which they would
    run if no other arrived.
    """

    def __init__(self) -> None:
        self._front: deque[T] = deque()
        self._clients: OrderedDict[str | None, deque[T]] = OrderedDict()  # the next client comes first
        self._n = 0

    def append(self, sequence: T) -> None:
        self._clients.setdefault(sequence.client, deque()).append(sequence)
        self._n += 1

    def push_front(self, sequence: T) -> None:
        """Put a preempted sequence back to the front."""
        self._front.appendleft(sequence)
        self._n += 1

    def first(self) -> T:
        """Return the next sequence."""
        return self._front[0] if self._front else next(iter(self._clients.values()))[0]

    def remove(self, sequence: T) -> None:
        """Remove a waiting sequence from any position."""
        if sequence in self._front:
            self._front.remove(sequence)
        else:
            self._clients[sequence.client].remove(sequence)
            if not self._clients[sequence.client]:
                del self._clients[sequence.client]
        self._n -= 1

    def pop(self) -> T:
        """Remove and return the next sequence; the other clients come before its client's next one."""
        sequence = self.first()
        had_turn = bool(self._front)
        self.remove(sequence)
        if not had_turn and sequence.client in self._clients:
            self._clients.move_to_end(sequence.client)
        return sequence

    def __len__(self) -> int:
        return self._n

    def __contains__(self, sequence: T) -> bool:
        return sequence in self._front or sequence in self._clients.get(sequence.client, ())

    def __iter__(self) -> Iterator[T]:
        yield from self._front
        lines = [list(line) for line in self._clients.values()]
        for turn in range(max(map(len, lines), default=0)):
            yield from (line[turn] for line in lines if turn < len(line))
