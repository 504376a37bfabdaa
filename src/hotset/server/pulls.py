"""Fetches of models into the store for clients: one fetch per name, however many clients wait for it.

A fetch runs in a thread of its own. It ends when the last client has gone. The part that it has fetched is
kept, and the next fetch resumes there.
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
    """The error that ends a fetch whose clients have gone."""


class _Pull(Reporter):
    """One fetch. state: its latest report in Ollama's format."""

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
        # Clients use the digest to tell the files apart.
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
        """Yield the state of a fetch whenever it changes, until it is done.

        Raises the error of the fetch, and QueueFullError if too many run.
        """
        name = full_name(name)
        while (pull := self._running.get(name)) is not None and pull.is_cancelled:
            await asyncio.wait([pull.task])  # the next fetch resumes where this one ends
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
        """Cancel all fetches, when the server ends."""
        for pull in self._running.values():
            pull.cancel()


def full_name(name: str) -> str:
    """Return a name of the catalogue, or hf:owner/repository[:file], from a name in Ollama's spelling.

    Raises InvalidRequestError.
    """
    name = untagged(name)
    if not name or len(name) > MAX_CHARS or not name.isprintable():
        raise InvalidRequestError(f"a model to fetch is a name or owner/repository, not {shown(name)}")
    for hub in _HUBS:
        if name.lower().startswith(hub):
            return "hf:" + name[len(hub) :]
    # A fetch would search such a path, and perhaps a whole folder, and its client could not stop it.
    if Path(name).is_absolute() or name.startswith((".", "~")) or ".." in Path(name).parts:
        raise InvalidRequestError(
            f"a model to fetch is a name or owner/repository, not a path: {shown(name)}"
        )
    return name
