"""One model of a server with several: its state, its memory, and the error of a failed load."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hotset.api import Model
from hotset.backends.base import BLOCK_SIZE
from hotset.errors import HotsetError, OutOfMemoryError
from hotset.loader.build import open_model
from hotset.loader.decide import MachineFacts, Opened, cache_bytes, context, longest_default
from hotset.loader.reserved import reserved_for
from hotset.model.cost import Cost
from hotset.model.decoder import describe
from hotset.reporter import Reporter
from hotset.server.catalogue import Offered
from hotset.server.errors import RequestError, without_folders
from hotset.server.service import Service
from hotset.settings import LoadSettings

State = Literal["unloaded", "queued", "loading", "loaded", "unloading"]

_TOKENIZER_BYTES = 800  # per entry of a vocabulary
_PROGRESS_SECONDS = 0.1  # between two progress reports of a load


class LoadError(RequestError):
    """The error of a request whose model could not be loaded."""

    @classmethod
    def of(cls, name: str, path: Path, error: Exception) -> LoadError:
        """Return the error for a client: without folders, and only the kind of an unexpected error.

        path: of the model.
        """
        said = without_folders(str(error), path)
        why = said if isinstance(error, HotsetError) else f"it failed with {type(error).__name__}"
        message = f"the model {name!r} could not be loaded: {why}"
        if isinstance(error, OutOfMemoryError):
            return cls(message, 503, code="out_of_memory")
        return cls(message, 500, code="model_load_failed")

    def again(self) -> LoadError:
        """Return a copy for another request: a raised exception collects a traceback."""
        return LoadError(str(self), self.status, code=self.code)


class NotWantedError(Exception):
    """The error that ends a load for which no request waits any more."""


@dataclass(eq=False)
class Slot:
    """A model of the catalogue, with its state and the loaded service.

    n_bytes: memory that it uses, or that is reserved for it. parts: bytes of weights and cache in it.
    n_ctx: the context of its latest load, if a request gave one. holds: requests that use it.
    waiting: requests that wait for it, with the objects that they hold. used: its last request, by a clock
    that counts requests. is_victim: unload it when it is idle, since another model needs its memory.
    n_unloading: requests to unload it that wait. starts: load it even if no request waits. needed:
    the size of its file, and the bytes that it took when it was loaded last.
    """

    offered: Offered
    keep_alive: float
    state: State = "unloaded"
    service: Service | None = None
    n_bytes: int = 0
    parts: tuple[int, int] = 0, 0
    n_ctx: int | None = None
    holds: int = 0
    waiting: list[tuple[asyncio.Future[Service], list[Any]]] = field(default_factory=list)
    used: int = 0
    is_victim: bool = False
    n_unloading: int = 0
    starts: bool = False
    timer: asyncio.TimerHandle | None = None
    expires: float | None = None
    failure: tuple[LoadError, float] | None = None
    progress: tuple[str, int, int] | None = None
    needed: tuple[int, int] = 0, 0

    @property
    def name(self) -> str:
        return self.offered.name

    @property
    def is_open(self) -> bool:
        """Return whether requests get it at once."""
        return self.state == "loaded" and not self.is_victim and not self.n_unloading

    def stop_timer(self) -> None:
        """Cancel the timer that unloads it when it is idle."""
        if self.timer is not None:
            self.timer.cancel()
        self.timer = self.expires = None

    @property
    def is_wanted(self) -> bool:
        return bool(self.waiting) or self.starts

    def counts(self) -> dict[str, float]:
        """Return the values for the metrics."""
        _, done, total = (self.progress if self.state == "loading" else None) or ("", 0, 0)
        return {
            "loaded": float(self.state == "loaded"),
            "memory": self.n_bytes,
            "holds": self.holds,
            "waiting": len(self.waiting),
            "progress": done / total if total else 0.0,
        }

    def as_dict(self) -> dict[str, Any]:
        """Return its state for clients: `status` of a model in a list, and an event of /models/events."""
        found: dict[str, Any] = {"value": self.state}
        if self.state == "loading" and self.progress is not None:
            label, done, total = self.progress
            found["progress"] = {"label": label, "done": done, "total": total}
        if self.state == "unloaded" and self.failure is not None:
            found |= {"failed": True, "error": str(self.failure[0])}
        if self.n_bytes:
            found["memory"] = self.n_bytes
        if self.service is not None and self.state == "loaded":
            found |= {"weights": self.parts[0], "cache": self.parts[1]}
        if self.waiting:
            found["waiting"] = len(self.waiting)
        return found


class Expected(NamedTuple):
    """The memory that a load is expected to take, by the file, for a context of n_ctx tokens.

    weights, cache, more: bytes; more: for adapters, a draft model and buffers.
    """

    n_ctx: int
    weights: int
    cache: int
    more: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.more


def fitted(opened: Opened, budget: int) -> tuple[Opened, Expected | None]:
    """Return a model with the default context that the budget has room for, and the expected memory.

    The context does not depend on other loaded models. Under a RAM budget without a requested context
    only the load decides it, so None is returned in place of the memory.
    """
    settings, gguf = opened.settings, opened.gguf
    graph = describe(opened.config, gguf.tensors)
    cost, machine = Cost(graph, gguf.tensors), MachineFacts(budget, 0, reserved_for(opened))
    reserved = machine.reserved.total
    if settings.n_ctx is None and settings.ram_budget is None:
        longest = longest_default(opened, graph, machine)
        n_ctx = context(settings, opened.config, cost, budget - reserved, gguf.nbytes, longest)
        opened = opened.with_settings(n_ctx=n_ctx)
        settings = opened.settings
    if settings.n_ctx is None:
        return opened, None
    cache = cache_bytes(settings, cost, settings.n_ctx)
    return opened, Expected(settings.n_ctx, gguf.nbytes, cache, reserved)


def expected(path: Path, settings: LoadSettings, budget: int) -> Expected | None:
    """Return the expected memory of a model that is not loaded; None if only the load can tell, or fails.

    Only the metadata is read. A draft model is not opened, since it may have to be fetched.
    """
    if settings.draft is not None or settings.ram_budget is not None:
        return None
    try:
        with open_model(path, settings) as opened:
            return fitted(opened, budget)[1]
    except (OSError, HotsetError):
        return None


def bytes_of(model: Model) -> int:
    """Return the bytes of a loaded model.

    They include weights (mapped or read), cache, buffers, tokenizer, drafter, adapters and images.
    """
    decided, backend = model.decided, model.backend
    beside = decided.reserved.drafter + decided.reserved.images + model.adapters.nbytes
    if model.ram is not None:
        return model.ram.limit + beside
    more = backend.workspace_bytes + beside + backend.n_vocab * _TOKENIZER_BYTES
    return sum(parts_of(model)) + more


def parts_of(model: Model) -> tuple[int, int]:
    """Return the bytes of a loaded model's weights, and of its cache: keys, values and recurrent states.

    Under a RAM budget the weights get the budget without the cache.
    """
    decided = model.decided
    keys_and_values = decided.n_blocks * BLOCK_SIZE * model.cost.kv_bytes_per_token(model.kv_type)
    cache = int(keys_and_values + decided.n_states * model.cost.state_bytes)
    if model.ram is not None:
        return max(model.ram.limit - cache, 0), cache
    return sum(info.nbytes for info in decided.weights.tensors.values()), cache


class LoadProgress(Reporter):
    """A reporter that puts the progress of a load into its slot."""

    def __init__(self, slot: Slot, loop: asyncio.AbstractEventLoop, changed: Callable[[], object]) -> None:
        self._slot, self._loop, self._changed = slot, loop, changed
        self._told = -math.inf

    def advance(self, label: str, done: int, total: int, unit: str = "bytes") -> None:  # noqa: ARG002
        self._slot.progress = label, done, total
        if (now := time.monotonic()) - self._told >= _PROGRESS_SECONDS:
            self._told = now
            self._loop.call_soon_threadsafe(self._changed)
