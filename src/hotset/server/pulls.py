"""Models that clients have fetched into the store: one fetch a name, however many clients wait for it.

A fetch runs in a thread of its own. It ends when the last client has gone; what it has is kept, and the next
one goes on from there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

from hotset.errors import HotsetError, InvalidRequestError, QueueFullError
from hotset.parameters import shown
from hotset.reporter import Reporter
from hotset.storage import fetch
from hotset.storage.aliases import untagged

MAX_PULLS = 4
MAX_CHARS = 512  # of a name
_SECONDS = 0.1  # between two reports of progress
_HUBS = ("hf:", "hf.co/", "huggingface.co/")


class _CancelledError(HotsetError):
    """The clients of a fetch have gone."""


class _Pull(Reporter):
    """One fetch. state: its latest report, as a client of Ollama reads it."""

    def __init__(self, name: str) -> None:
        self.state: dict[str, Any] = {"status": "pulling manifest"}
        self.n_clients = 0
        self._name, self.is_cancelled = name, False
        self.task = asyncio.create_task(asyncio.to_thread(fetch.pull, name, progress=self))

    def say(self, text: str) -> None:
        self._check()
        self.state = {"status": text}

    def advance(self, label: str, done: int, total: int, unit: str = "bytes") -> None:  # noqa: ARG002
        self._check()
        # Clients tell the progress of one file from that of another by the digest.
        self.state = {"status": f"pulling {label}", "digest": label, "total": total, "completed": done}

    def cancel(self) -> None:
        self.is_cancelled = True

    def _check(self) -> None:
        if self.is_cancelled:
            raise _CancelledError(f"the fetch of {self._name} was cancelled")


class Pulls:
    """The fetches of one server, in its event loop."""

    def __init__(self) -> None:
        self._running: dict[str, _Pull] = {}

    async def states(self, name: str) -> AsyncIterator[dict[str, Any]]:
        """What a fetch is doing, whenever that changes, until it is done. Raises what it fails with, and
        QueueFullError where too many run."""
        name = full_name(name)
        while (pull := self._running.get(name)) is not None and pull.is_cancelled:
            await asyncio.wait([pull.task])  # the next one goes on from there
        if pull is None:
            if len(self._running) >= MAX_PULLS:
                raise QueueFullError(len(self._running), 60.0)
            pull = self._running[name] = _Pull(name)
            pull.task.add_done_callback(partial(self._done, name))
        pull.n_clients += 1
        last = None
        try:
            while not pull.task.done():
                if (state := pull.state) is not last:
                    yield state
                    last = state
                await asyncio.wait([pull.task], timeout=_SECONDS)
            await pull.task
        finally:
            pull.n_clients -= 1
            if not pull.n_clients and not pull.task.done():
                pull.cancel()

    def _done(self, name: str, task: asyncio.Task[Any]) -> None:
        del self._running[name]
        if not task.cancelled():
            task.exception()  # without a client, nothing else reads it

    def cancel(self) -> None:
        """Ends all; the server ends."""
        for pull in self._running.values():
            pull.cancel()


def full_name(name: str) -> str:
    """A name of the catalogue, or hf:owner/repository[:file], as clients of Ollama write either. Raises
    InvalidRequestError."""
    name = untagged(name)
    if not name or len(name) > MAX_CHARS or not name.isprintable():
        raise InvalidRequestError(f"a model to fetch is a name or owner/repository, not {shown(name)}")
    for hub in _HUBS:
        if name.lower().startswith(hub):
            return "hf:" + name[len(hub) :]
    # A fetch would look for such a file, and through all of a folder, without an end that a client can make.
    if Path(name).is_absolute() or name.startswith((".", "~")) or ".." in Path(name).parts:
        raise InvalidRequestError(
            f"a model to fetch is a name or owner/repository, not a path: {shown(name)}"
        )
    return name
