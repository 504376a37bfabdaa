"""Several models behind one server.

A request loads its model; idle models are unloaded, and models whose memory another one needs.

Everything runs in one event loop, except loading itself. A model is in one of these states:

    unloaded ──request──► queued ──its turn──► loading ──► loaded ──idle, or no room──► unloading
        ▲                                         │ fails                                   │
        └─────────────────────────────────────────┴─────────────────────────────────────────┘

Models are loaded one after the other, in the order of their first requests. If the budget has no room, idle
models are unloaded first, then the least recently used. A model that still answers is unloaded afterwards,
and new requests for it wait behind the model that needs the room. So no request waits for ever. A request
holds its model until it has finished (HoldMiddleware).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import Counter
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from starlette.types import ASGIApp, Receive, Scope, Send

from hotset.api import Model, load_opened
from hotset.errors import HotsetError, OutOfMemoryError, QueueFullError
from hotset.escaping import clause
from hotset.loader.build import open_model
from hotset.loader.decide import DEFAULT_N_CTX
from hotset.loader.modelfile import replaced_template
from hotset.memory import own_memory
from hotset.parameters import shown
from hotset.server.catalogue import Catalogue, FileFacts, Offered
from hotset.server.errors import NotReadyError, RequestError
from hotset.server.metrics import (
    MODEL_COUNTERS,
    MODEL_GAUGES,
    MODELS_LIMIT,
    Metrics,
    engine_metrics,
)
from hotset.server.model_settings import KEEP_ALIVE_SECONDS, until_unloaded
from hotset.server.preparation import Preparation
from hotset.server.service import ListedModel, Service
from hotset.server.settings import ServerSettings
from hotset.server.slots import (
    Expected,
    LoadError,
    LoadProgress,
    NotWantedError,
    Slot,
    bytes_of,
    expected,
    fitted,
    parts_of,
)
from hotset.server.streams import HELD
from hotset.settings import LoadSettings
from hotset.storage import created
from hotset.units import human_size

log = logging.getLogger("hotset.server")

_GIB = 1 << 30
SCAN_SECONDS = 1.0  # between two scans of the disk, however many requests name unknown models
FAILED_SECONDS = 5.0  # after a failed load, until it is tried again
_BUSY_SECONDS = 2.0  # after which a client may retry a request that found the queue full
_NAMES_SHOWN = 8  # in a message
_UNLOADED = {  # the reason, for the log
    "request": "by a request",
    "idle": "it was idle",
    "memory": "another model needs its memory",
}


class Models:
    """The models of a catalogue, in an event loop. It is a host of an application, like a Service.

    load: settings of every model that has none of its own. budget: bytes for all loaded models together.
    keep_alive: seconds that an idle model stays. first: names of models to load at the start, after the
    pinned ones and if there is room. report: gets a line for each load and unload.
    Raises InvalidRequestError if settings in the catalogue's file cannot be combined with `load`.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        settings: ServerSettings | None = None,
        *,
        load: LoadSettings | None = None,
        budget: int,
        keep_alive: float = KEEP_ALIVE_SECONDS,
        first: Sequence[str] = (),
        report: Callable[[str], object] = lambda _: None,
    ) -> None:
        self.catalogue = catalogue
        self.settings = settings or ServerSettings()
        self.budget = budget
        self.error: Exception | None = None  # always None: the start cannot fail, only a model's load
        self.preparation = Preparation()
        self.preparation.limit(self.settings.max_queue + 1)
        self.metrics = Metrics(self._now)
        self._loads, self._unloads = (
            Counter(name, what, labels, registry=self.metrics.registry)
            for name, (labels, what) in MODEL_COUNTERS.items()
        )
        self._load_settings, self.keep_alive = load or LoadSettings(), keep_alive
        for own in (catalogue.file.default, *catalogue.file.models.values()):
            replace(self._load_settings, **own.load)  # raises if they cannot be combined
        self.first, self._report = first, report
        self.slots: dict[str, Slot] = {}
        self._expected: dict[str, tuple[FileFacts, LoadSettings, Expected | None]] = {}
        self._queue: deque[Slot] = deque()
        self._clock = itertools.count(1)
        self._stopping = False
        self._program = 0  # bytes of the process before any model
        self._scanned = -math.inf
        self._scanning: asyncio.Task[None] | None = None
        self._loading: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._change = asyncio.Event()
        self._started = asyncio.Event()

    # ---- the life of the server ----

    def start(self) -> None:
        """Begin to load the pinned models and the models of `first`. The catalogue must have been scanned."""
        self._program = own_memory()
        self._scanned = asyncio.get_running_loop().time()
        pinned = [one for one in self.catalogue.models if one.settings.pinned]
        named = [one for name in self.first if (one := self.catalogue.find(name)) is not None]
        for offered in (*pinned, *named):
            slot = self._slot_of(offered)
            slot.starts = True
            self._want(slot)
        if not self._queue:
            self._started.set()

    async def loaded(self) -> None:
        """Wait until each model of the start is loaded or has failed."""
        await self._started.wait()

    @property
    def stopping(self) -> bool:
        return self._stopping

    @stopping.setter
    def stopping(self, value: bool) -> None:
        self._stopping = value
        for service in self._services():
            service.stopping = value
        self._changed()

    def check_ready(self) -> None:
        """Raise NotReadyError if the server is shutting down. It is ready without any loaded model."""
        if self._stopping:
            raise NotReadyError("the server is shutting down; ask another one")

    def end_answers(self) -> None:
        message = "the server was shut down before the model was loaded"
        for slot in self.slots.values():
            self._refuse(slot, lambda: NotReadyError(message))
        for service in self._services():
            service.end_answers()

    async def close(self) -> None:
        self.stopping = True
        self.end_answers()
        for slot in self.slots.values():
            slot.stop_timer()
        tasks = [task for task in (self._loading, self._scanning, *self._tasks) if task is not None]
        if tasks:
            await asyncio.wait(tasks)
        for slot in self.slots.values():
            if slot.service is not None:
                await slot.service.close()
                slot.service, slot.state, slot.n_bytes = None, "unloaded", 0
        self.preparation.close()

    def _services(self) -> list[Service]:
        return [slot.service for slot in self.slots.values() if slot.service is not None]

    # ---- requests ----

    def at_once(self, name: str | None, held: list[Any], /, *, required: bool) -> Service | None:
        if not name and required:
            raise RequestError(
                f"model is missing; this server has {self._names()}",
                param="model",
                code="missing_required_parameter",
            )
        offered = self.catalogue.find(name) if name else self._any()
        slot = None if offered is None else self.slots.get(offered.name)
        if slot is None or not slot.is_open:
            return None
        return self._hold(slot, held)

    async def when_loaded(self, name: str | None, held: list[Any], /) -> Service:
        self.check_ready()
        slot = self._slot_of(await self._found(name) if name else self._any())
        if slot.is_open:  # it was loaded in the meantime
            return self._hold(slot, held)
        if slot.failure is not None and asyncio.get_running_loop().time() < slot.failure[1]:
            raise slot.failure[0].again()
        if len(slot.waiting) >= max(self.settings.max_queue, 1):
            raise QueueFullError(len(slot.waiting), _BUSY_SECONDS)
        future: asyncio.Future[Service] = asyncio.get_running_loop().create_future()
        waiter = future, held
        slot.waiting.append(waiter)
        self._want(slot)
        self._changed()
        try:
            return await future
        finally:
            if waiter in slot.waiting:  # the client has gone
                slot.waiting.remove(waiter)
                self._changed()

    def keep(self, service: Service, keep_alive: float | str | None) -> None:
        if keep_alive is not None:
            self.slots[service.name].keep_alive = until_unloaded(keep_alive)

    def release(self, slot: Slot) -> None:
        """Release a model that a request has held."""
        slot.holds -= 1
        if not slot.holds:
            self._idle(slot)
            self._changed()

    async def _found(self, name: str) -> Offered:
        """Return the model of a name; an unknown name causes a scan of the disk. Raises RequestError."""
        offered = self.catalogue.find(name)
        if offered is None:
            await self.scan()
            offered = self.catalogue.find(name)
        if offered is None:
            raise RequestError(
                f"the model {clause(shown(name))} is not served here; this server has {self._names()}",
                404,
                param="model",
                code="model_not_found",
            )
        return offered

    async def scan(self, *, now: bool = False) -> None:
        """Look for models, unless the last scan is recent; now: even then. Concurrent calls share a scan."""
        loop = asyncio.get_running_loop()
        if self._scanning is not None and now:  # the running scan may have begun too early
            await asyncio.wait([self._scanning])
        if self._scanning is None or self._scanning.done():
            if not now and loop.time() - self._scanned < SCAN_SECONDS:
                return
            self._scanning = asyncio.create_task(self._scan())
        await asyncio.shield(self._scanning)

    async def _scan(self) -> None:
        try:
            await asyncio.to_thread(self.catalogue.scan)
        except (OSError, HotsetError) as error:  # keep the known models
            log.warning("the models cannot be listed: %s", error)
        self._scanned = asyncio.get_running_loop().time()
        for slot in self.slots.values():
            if self.catalogue.find(slot.name) is None:  # its file is gone: unload it once it is idle
                slot.keep_alive = 0.0
                if not slot.holds:
                    self._idle(slot)

    def _any(self) -> Offered:
        """Return the model for a request that names none: the loaded one used last, or the only one."""
        loaded = [slot for slot in self.slots.values() if slot.state == "loaded"]
        if loaded:
            return max(loaded, key=lambda slot: slot.used).offered
        if len(self.catalogue.models) == 1:
            return self.catalogue.models[0]
        raise RequestError(
            f"name a model: none is loaded, and this server has {self._names()}",
            param="model",
            code="missing_required_parameter",
        )

    def _names(self) -> str:
        names = [model.name for model in self.catalogue.models]
        if not names:
            return "none; fetch one with 'hotset pull'"
        more = len(names) - _NAMES_SHOWN
        return ", ".join(map(repr, names[:_NAMES_SHOWN])) + (f" and {more} more" if more > 0 else "")

    # ---- lists ----

    async def listed(self) -> list[ListedModel]:
        await self.scan()
        models = self.catalogue.models
        slots = [self.slots.get(model.name) or Slot(model, self.keep_alive) for model in models]
        settings = [self._settings_of(slot) for slot in slots]
        facts = await asyncio.to_thread(lambda: list(map(self._facts_of, models, settings)))
        found = []
        for offered, slot, of_load, (of_file, needs) in zip(models, slots, settings, facts, strict=True):
            if of_file is None:  # not the file of a model, or it has gone
                continue
            n_ctx = needs.n_ctx if needs else of_load.n_ctx or of_file.n_ctx_train or DEFAULT_N_CTX
            adapters: tuple[str, ...] = ()
            if slot.service is not None:
                needs, n_ctx = None, slot.service.model.n_ctx
                adapters = tuple(each.name for each in slot.service.model.adapters.loaded)
            found.append(
                ListedModel(
                    name=offered.name,
                    created=of_file.modified // 10**9,
                    facts=of_file,
                    n_ctx=n_ctx,
                    state=slot.as_dict(),
                    expires=slot.expires,
                    n_bytes=slot.n_bytes,
                    adapters=adapters,
                    needs=needs and {"memory": needs.total, "weights": needs.weights, "cache": needs.cache},
                )
            )
        return found

    def _facts_of(self, model: Offered, settings: LoadSettings) -> tuple[FileFacts | None, Expected | None]:
        """Return the facts of a file and the expected memory of its load. Both results are cached."""
        facts = self.catalogue.facts(model.path)
        if facts is None:
            return None, None
        known = self._expected.get(model.name)
        if known is None or known[:2] != (facts, settings):
            known = facts, settings, expected(model.path, settings, self.budget)
            self._expected[model.name] = known
        return facts, known[2]

    async def file_of(self, name: str) -> tuple[Service | None, str, Path]:
        offered = await self._found(name)
        slot = self.slots.get(offered.name)
        return None if slot is None else slot.service, offered.name, offered.path

    def states(self) -> dict[str, dict[str, Any]]:
        """Return the state of each model that is loaded, wanted or failed."""
        found = {name: slot.as_dict() for name, slot in self.slots.items()}
        return {name: state for name, state in found.items() if state != {"value": "unloaded"}}

    async def changed(self) -> None:
        """Wait until a state changes."""
        await self._change.wait()

    def _changed(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    # ---- in and out of memory ----

    async def load(self, name: str, n_ctx: int | None = None) -> None:
        """Begin to load a model, and do not wait for it. n_ctx: its context, also for later loads.

        Raises RequestError, also if the model is loaded with another context.
        """
        self.check_ready()
        slot = self._slot_of(await self._found(name))
        if n_ctx is not None and slot.state not in ("unloaded", "unloading"):
            if slot.service is None or slot.service.model.n_ctx != n_ctx:
                raise RequestError(
                    f"{name!r} is {slot.state}; unload it, then load it with a context of {n_ctx} tokens",
                    409,
                    param="n_ctx",
                )
            return
        if n_ctx is not None:
            slot.n_ctx = n_ctx
        if slot.state in ("unloaded", "unloading"):
            slot.failure, slot.starts = None, True
            self._want(slot)

    async def unload(self, name: str, *, spares_pinned: bool = False) -> bool:
        """Unload a model once its requests are answered, and wait for that.

        New requests wait until it is loaded again. spares_pinned: keep a pinned model and return False.
        Raises RequestError.
        """
        offered = await self._found(name)
        if spares_pinned and offered.settings.pinned:
            return False
        slot = self.slots.get(offered.name)
        if slot is None:
            return True
        slot.n_unloading += 1
        try:
            while slot.state in ("queued", "loading", "unloading") or (slot.state == "loaded" and slot.holds):
                self.check_ready()
                if slot.state == "queued" and not slot.waiting:
                    slot.starts = False
                await self._change.wait()
            if slot.state == "loaded":  # finish unloading even if the client leaves
                await asyncio.shield(self._begun(self._unload(slot, "request")))
        finally:
            slot.n_unloading -= 1
            self._reopen(slot)
        return True

    def _slot_of(self, offered: Offered) -> Slot:
        slot = self.slots.get(offered.name)
        if slot is None:
            slot = self.slots[offered.name] = Slot(offered, self.keep_alive)
            slot.keep_alive = self._usual_keep_alive(slot)
        if slot.state in ("unloaded", "queued"):
            slot.offered = offered  # the current entry of the catalogue
        return slot

    def _usual_keep_alive(self, slot: Slot) -> float:
        own = slot.offered.settings.keep_alive
        return self.keep_alive if own is None else own

    def _hold(self, slot: Slot, held: list[Any]) -> Service:
        assert slot.service is not None
        slot.holds += 1
        slot.used = next(self._clock)
        slot.stop_timer()
        held.append(slot)
        return slot.service

    def _idle(self, slot: Slot) -> None:
        """Start the timer that unloads an idle model."""
        if slot.state != "loaded" or slot.offered.settings.pinned or math.isinf(slot.keep_alive):
            return
        slot.stop_timer()
        slot.expires = time.time() + slot.keep_alive
        slot.timer = asyncio.get_running_loop().call_later(slot.keep_alive, self._expire, slot)

    def _expire(self, slot: Slot) -> None:
        if not self._stopping:
            self._begun(self._unload(slot, "idle"))

    def _begun(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _reopen(self, slot: Slot) -> None:
        """Give a model that is not unloaded after all to the requests that wait for it."""
        if slot.is_open:
            self._grant(slot)
        elif slot.state == "unloaded" and slot.is_wanted:
            self._want(slot)

    def _grant(self, slot: Slot) -> None:
        for future, held in slot.waiting:
            if not future.done():
                future.set_result(self._hold(slot, held))
        slot.waiting.clear()
        if not slot.holds:
            self._idle(slot)
        self._changed()

    def _refuse(self, slot: Slot, error: Callable[[], Exception]) -> None:
        for future, _ in slot.waiting:
            if not future.done():
                future.set_exception(error())
        slot.waiting.clear()
        self._changed()

    def _want(self, slot: Slot) -> None:
        if slot.state != "unloaded" or self._stopping:
            return
        slot.state = "queued"
        self._queue.append(slot)
        self._changed()
        if self._loading is None or self._loading.done():
            self._loading = asyncio.create_task(self._load_queued())

    async def _load_queued(self) -> None:
        while self._queue:
            slot = self._queue.popleft()
            if slot.is_wanted and not self._stopping:
                await self._load(slot)
            else:
                slot.state = "unloaded"
                self._changed()
            slot.starts = False
            if not any(one.starts for one in self._queue):
                self._started.set()

    async def _load(self, slot: Slot) -> None:
        slot.state, slot.progress, slot.failure = "loading", None, None
        slot.keep_alive = self._usual_keep_alive(slot)
        self._changed()
        loop = asyncio.get_running_loop()
        began = loop.time()
        service = Service(
            partial(self._opened, slot, loop), self.settings, name=slot.name,
            sampling=slot.offered.settings.sampling, metrics=self.metrics,
        )  # fmt: skip
        service.start()
        try:
            await service.loaded()
            self.check_ready()
        except Exception as error:
            await service.close()
            slot.state, slot.n_bytes = "unloaded", 0
            self._failed(slot, error)
            return
        finally:
            self._spare(())
        slot.service, slot.state = service, "loaded"
        slot.parts = weights, cache = parts_of(service.model)
        self._loads.labels(slot.name, "loaded").inc()
        self._report(
            f"INFO:     {slot.name} is loaded in {loop.time() - began:.1f} s: {human_size(slot.n_bytes)} "
            f"reserved, weights {human_size(weights)}, cache {human_size(cache)}, context "
            f"{service.model.n_ctx:,} tokens"
        )
        self._grant(slot)  # first, even if another model needs its memory: these requests came earlier

    def _failed(self, slot: Slot, error: Exception) -> None:
        if isinstance(error, NotWantedError):
            if slot.starts:
                self._report(f"{slot.name} has no room next to the others: a request for it loads it")
            slot.starts = False
            self._reopen(slot)  # requests may have arrived in the meantime
            self._changed()
            return
        if isinstance(error, NotReadyError):  # the server ends
            self._refuse(slot, lambda: error)
            return
        if not isinstance(error, HotsetError):
            log.error("%s could not be loaded", slot.name, exc_info=error)
        elif not slot.starts:
            log.warning("%s could not be loaded: %s", slot.name, error)
        failure = LoadError.of(slot.name, slot.offered.path, error)
        slot.failure = failure, asyncio.get_running_loop().time() + FAILED_SECONDS
        self._loads.labels(slot.name, "failed").inc()
        if slot.starts:
            self._report(f"the model {slot.name!r} could not be loaded: {error}")
        self._refuse(slot, failure.again)

    async def _unload(self, slot: Slot, reason: str) -> None:
        """Free a model, if it is idle."""
        if slot.service is None or slot.holds:
            return
        slot.stop_timer()
        service, slot.service, slot.state = slot.service, None, "unloading"
        self._changed()
        await service.close()
        slot.state, slot.n_bytes, slot.is_victim = "unloaded", 0, False
        self._report(f"INFO:     {slot.name} is unloaded ({_UNLOADED[reason]})")
        self._unloads.labels(slot.name, reason).inc()
        self._reopen(slot)
        self._changed()

    # ---- memory ----

    def _settings_of(self, slot: Slot) -> LoadSettings:
        settings = replace(self._load_settings, **slot.offered.settings.load)
        return settings if slot.n_ctx is None else replace(settings, n_ctx=slot.n_ctx)

    def _opened(self, slot: Slot, loop: asyncio.AbstractEventLoop) -> Model:
        """Load the model in a thread, once there is room for it, and return it."""

        def reserve(n_bytes: int) -> None:
            asyncio.run_coroutine_threadsafe(self._make_room(slot, n_bytes), loop).result()

        settings = replace(self._settings_of(slot), progress=LoadProgress(slot, loop, self._changed))
        budget = settings.ram_gib
        if budget is not None:  # it limits the whole process, so add the memory of other models
            more = max(own_memory() - self._program, 0) / _GIB
            settings = replace(settings, ram_budget=budget + more)
        opened = open_model(slot.offered.path, settings)
        try:
            if (template := _template_of(slot.offered, settings)) is not None:
                opened.gguf.metadata["tokenizer.chat_template"] = template
            opened, needs = fitted(opened, self.budget)
            file_bytes, n_bytes = opened.gguf.nbytes, needs.total if needs else 0
            if slot.needed[0] == file_bytes:
                n_bytes = max(n_bytes, slot.needed[1])
            reserve(n_bytes if budget is None else int(budget * _GIB))
        except BaseException:
            opened.gguf.close()
            raise
        model = load_opened(opened)
        try:
            if budget is None:
                slot.needed = file_bytes, bytes_of(model)
                reserve(slot.needed[1])
        except BaseException:
            model.close()
            raise

        grown = weakref.ref(model)  # avoids a reference cycle, which only garbage collection would free

        def change_memory(n_bytes: int) -> None:
            asyncio.run_coroutine_threadsafe(self._grow(slot, grown, n_bytes), loop).result()

        model.adapters.change_memory = change_memory
        return model

    async def _make_room(self, slot: Slot, n_bytes: int) -> None:
        """Reserve memory for a model; first unload others if necessary.

        Raises OutOfMemoryError if there cannot be enough, NotWantedError if no request waits any more.
        """
        while (lacking := self._taken(slot) + n_bytes - self.budget) > 0:
            self.check_ready()
            self._check_room(slot, n_bytes)  # a pinned model may have grown
            if not slot.waiting and not slot.offered.settings.pinned:
                raise NotWantedError
            victims = self._victims(slot, lacking)
            self._spare(victims)
            idle = [one for one in victims if not one.holds]
            for one in idle:
                await self._unload(one, "memory")
            if not idle:
                await self._change.wait()
        slot.n_bytes = n_bytes
        self._spare(())
        self._changed()

    def _check_room(self, slot: Slot, n_bytes: int) -> None:
        """Raise OutOfMemoryError if pinned models leave too little, whatever else is unloaded."""
        pinned = [one for one in self.slots.values() if one is not slot and one.offered.settings.pinned]
        kept = sum(one.n_bytes for one in pinned)
        if n_bytes > self.budget - kept:
            beside = f", and pinned models have {human_size(kept)} of it" if kept else ""
            raise OutOfMemoryError(
                f"it needs {human_size(n_bytes)}, and all models together have {human_size(self.budget)}"
                f"{beside}; raise --max-memory, lower its context, or give it a ram_budget in the file of "
                "models"
            )

    async def _grow(self, slot: Slot, model: weakref.ref[Model], n_bytes: int) -> None:
        """Change the reserved memory of a loaded model by `n_bytes`.

        Idle models are unloaded for it. Raises OutOfMemoryError if the other models are in use or pinned.
        """

        def is_loaded() -> bool:  # otherwise it was unloaded with all of its memory
            return slot.service is not None and slot.service.is_ready and slot.service.model is model()

        while is_loaded() and n_bytes > 0 and (lacking := self._taken() + n_bytes - self.budget) > 0:
            idle = [one for one in self._victims(slot, lacking) if not one.holds]
            if not idle and any(one.state == "unloading" for one in self.slots.values()):
                await self._change.wait()
            elif not idle:
                raise OutOfMemoryError(
                    f"the adapter needs {human_size(n_bytes)}, and the models that are in use have "
                    f"{human_size(self._taken())} of {human_size(self.budget)}; unload one, or raise "
                    "--max-memory"
                )
            for one in idle:
                await self._unload(one, "memory")
        if is_loaded():  # it may have been unloaded while others were
            slot.n_bytes += n_bytes
            self._changed()

    def _taken(self, but: Slot | None = None) -> int:
        return sum(one.n_bytes for one in self.slots.values() if one is not but)

    def _victims(self, slot: Slot, lacking: int) -> list[Slot]:
        """Return the models to unload: idle ones first, then the least recently used."""
        leaving = sum(one.n_bytes for one in self.slots.values() if one.state == "unloading")
        found: list[Slot] = []
        loaded = [one for one in self.slots.values() if one.state == "loaded" and one is not slot]
        for one in sorted(loaded, key=lambda one: (bool(one.holds), one.used)):
            if lacking <= leaving:
                break
            if not one.offered.settings.pinned:
                found.append(one)
                lacking -= one.n_bytes
        return found

    def _spare(self, victims: Sequence[Slot]) -> None:
        """Mark these models, and no others, as the ones to unload for another model."""
        for one in self.slots.values():
            was, one.is_victim = one.is_victim, one in victims
            if was != one.is_victim:
                self._reopen(one)
                self._changed()

    # ---- metrics ----

    @property
    def n_open(self) -> int:
        """Return the number of answers that clients wait for, or read."""
        return sum(service.n_open for service in self._services())

    def _now(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("hotset_ready", "1 once the model answers.", float(not self._stopping))
        yield GaugeMetricFamily("hotset_answers_open", "Answers that clients wait for.", self.n_open)
        name, what = MODELS_LIMIT
        yield GaugeMetricFamily(name, what, self.budget)
        counts = {name: slot.counts() for name, slot in self.slots.items()}
        for name, (field, what) in MODEL_GAUGES.items():
            family = GaugeMetricFamily(name, what, labels=("model",))
            for model, count in counts.items():
                family.add_metric((model,), count[field])
            yield family
        ready = [service for service in self._services() if service.is_ready]
        yield from engine_metrics([((service.name,), service.model) for service in ready])


class HoldMiddleware:
    """Middleware that releases the models that a request has held, however the request ends."""

    def __init__(self, app: ASGIApp, models: Models) -> None:
        self._app, self._models = app, models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        held: list[Slot] = []
        scope[HELD] = held
        try:
            await self._app(scope, receive, send)
        finally:
            for slot in held:
                self._models.release(slot)


def _template_of(offered: Offered, settings: LoadSettings) -> str | None:
    """Return the chat template that replaces the file's; None if `settings` already have it."""
    made = created.find(offered.name)
    if settings.chat_template is None or made is None:
        return offered.settings.template
    return replaced_template(made, settings.chat_template)
