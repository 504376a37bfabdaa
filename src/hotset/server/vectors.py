"""Vectors of a request's texts: queued, counted and cancelled like answers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial

from hotset.engine.driver import EngineThread
from hotset.engine.embedding import TextVectors
from hotset.engine.sequence import Event
from hotset.engine.sequence import Sequence as EngineSequence
from hotset.errors import QueueFullError
from hotset.server.answers import Submit, raise_end


class Vectors:
    """The vectors of one request; made by `Service.ask_vectors`, and used only in its event loop.

    n_at_once: most texts of it in the engine at once. submit, closed, asked: as in Answer.
    """

    def __init__(
        self,
        texts: TextVectors,
        thread: EngineThread,
        n_at_once: int,
        submit: Submit,
        closed: Callable[[Vectors], None],
        asked: float,
    ) -> None:
        self.asked = asked
        self._texts, self._thread, self._n_at_once = texts, thread, n_at_once
        self._left = deque(range(len(texts)))
        self._running: dict[int, EngineSequence] = {}
        self._submit = submit
        self._closed: Callable[[Vectors], None] | None = closed
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def total_tokens(self) -> int:
        """Return the number of tokens of all texts."""
        return self._texts.n_tokens

    @property
    def n_open(self) -> int:
        """Return the number of texts without a vector."""
        return len(self._left) + len(self._running)

    @property
    def reasons(self) -> list[str]:
        """Return why each text ended, or will end if this is closed now."""
        failed = self._end.done() and not self._end.cancelled() and self._end.exception() is not None
        n_open = self.n_open
        n_done = len(self._texts) - n_open
        return ["stop"] * n_done + ["error" if failed else "cancelled"] * n_open

    async def whole(self) -> TextVectors:
        """Wait for all vectors, and return the texts. Raises the first error."""
        await self._end
        return self._texts

    def begin(self) -> None:
        """Submit texts to the engine. Raises an error if the engine accepts none."""
        while self._left and len(self._running) < self._n_at_once:
            i = self._left[0]
            sequence = self._texts.sequence(i)
            try:
                self._submit(sequence, partial(self._take, i), "end")
            except QueueFullError:
                if self._running:  # a text that ends makes room
                    return
                raise
            self._running[self._left.popleft()] = sequence

    def fail(self, error: Exception) -> None:
        """End all texts with an error."""
        if not self._end.done():
            self._end.set_exception(error)
            self._cancel()

    def close(self) -> None:
        """End the texts that still run. A second call does nothing."""
        self._cancel()
        if self._closed is not None:
            self._closed(self)
            self._closed = None
        if self._end.done() and not self._end.cancelled():
            self._end.exception()  # marks it as read: it may not have been awaited
        self._end.cancel()

    def _take(self, i: int, event: Event) -> None:
        if event.finish_reason is None or self._end.done():
            return
        try:
            raise_end(event)
            del self._running[i]
            self.begin()
        except Exception as error:
            self.fail(error)
            return
        if not self.n_open:
            self._end.set_result(None)

    def _cancel(self) -> None:
        self._thread.cancel_soon(self._running.values())
