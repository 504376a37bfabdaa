"""The mask of tokens that may come next, and the thread that finds it while the model computes."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np

_FEW = 64  # ids are listed if at most one in 64 bytes of the bits has a bit


class TokenMask(NamedTuple):
    """A set of allowed tokens.

    bits: uint8; token i is bit i % 8 of byte i // 8; tokens beyond the end are not allowed. ids: the same
    tokens in rising order, int64, if they are few; otherwise None.
    """

    bits: np.ndarray
    ids: np.ndarray | None

    @classmethod
    def of(cls, bits: np.ndarray, n_vocab: int) -> TokenMask:
        """Build the mask of a vocabulary of `n_vocab` tokens. Bits of further tokens are left out."""
        bits = bits[: -(-n_vocab // 8)]
        whole = len(bits) // 8 * 8
        words = bits[:whole].view(np.uint64)  # usually most are zero
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
    """A thread that finds masks for the constraints of one model. It ends when this object is collected.

    It uses a queue and the constraint's own lock. Futures would cost the engine's thread half of the saving.
    """

    def __init__(self) -> None:
        self._process = 0
        self._starting = threading.Lock()
        self._wanted: _Wanted
        self._thread: threading.Thread

    def put(self, find: Callable[[], None]) -> None:
        """Have the thread call `find`, which must not raise. Calls run in the order of `put`."""
        if self._process != os.getpid():  # not started, or only the parent of a fork has the thread
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
        """Wait until all calls are done. No `put` may follow."""
        if self._process == os.getpid():
            self._wanted.put(None)
            self._thread.join()


_Wanted = SimpleQueue[Callable[[], None] | None]
_living: weakref.WeakSet[MaskThread] = weakref.WeakSet()


def _serve(wanted: _Wanted) -> None:
    while (find := wanted.get()) is not None:
        find()
        del find  # and its constraint, which must not stay alive until the next call


@atexit.register
def _end_all() -> None:
    """End the threads before the interpreter ends; one that returned from native code later would crash.

    This runs after the end of the engine's threads, which use masks. That order holds because engine/ imports
    this module before it registers their end.
    """
    for thread in list(_living):
        thread.end()
