"""Which tokens may come next, and the thread that finds it while the model computes."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np

_FEW = 64  # one of so many bytes of the bits at most has a bit


class TokenMask(NamedTuple):
    """Tokens that are allowed.

    bits: uint8, token i is bit i % 8 of byte i // 8; tokens beyond are not allowed. ids: the same by rising
    id, int64, where they are few; else None.
    """

    bits: np.ndarray
    ids: np.ndarray | None

    @classmethod
    def of(cls, bits: np.ndarray, n_vocab: int) -> TokenMask:
        """What bits say of a vocabulary of so many tokens; what they say of others is left out."""
        bits = bits[: -(-n_vocab // 8)]
        whole = len(bits) // 8 * 8
        words = bits[:whole].view(np.uint64)  # most are zero in general
        filled = words.nonzero()[0]
        if len(filled) > len(bits) // _FEW:
            return cls(bits, None)
        inside = np.unpackbits(words[filled].view(np.uint8), bitorder="little").nonzero()[0]
        rest = np.unpackbits(bits[whole:], bitorder="little").nonzero()[0]
        ids = np.concatenate([64 * filled[inside >> 6] + (inside & 63), 8 * whole + rest])
        return cls(bits, ids[ids < n_vocab])

    def allows(self, token: int) -> bool:
        """Return whether a token is allowed."""
        byte, bit = divmod(token, 8)
        return byte < len(self.bits) and bool(self.bits[byte] >> bit & 1)


class MaskThread:
    """A thread that finds masks for the constraints of one model; it ends with this.

    A queue, and the constraint's own lock: futures would cost the engine's thread half of what is saved.
    """

    def __init__(self) -> None:
        self._process = 0
        self._starting = threading.Lock()
        self._wanted: _Wanted
        self._thread: threading.Thread

    def put(self, find: Callable[[], None]) -> None:
        """Has `find` called, which must raise nothing; those of one process in order."""
        if self._process != os.getpid():  # none yet, or a fork left it with the parent
            with self._starting:
                if self._process != os.getpid():
                    self._start()
        self._wanted.put(find)

    def _start(self) -> None:
        self._wanted = SimpleQueue()
        self._thread = threading.Thread(target=_serve, args=(self._wanted,), name="hotset-masks", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._wanted.put, None)
        _living.add(self)
        self._process = os.getpid()

    def end(self) -> None:
        """Waits until what was wanted is found; nothing may be wanted after it."""
        if self._process == os.getpid():
            self._wanted.put(None)
            self._thread.join()


_Wanted = SimpleQueue[Callable[[], None] | None]
_living: weakref.WeakSet[MaskThread] = weakref.WeakSet()


def _serve(wanted: _Wanted) -> None:
    while (find := wanted.get()) is not None:
        find()
        del find  # with its constraint: that is not to live until the next comes


@atexit.register
def _end_all() -> None:
    """Ends the threads before the interpreter does: back from native code, one would find no Python.

    This runs after the engine's threads were ended, which want masks: engine/ imports this module before it
    registers their end.
    """
    for thread in list(_living):
        thread.end()
