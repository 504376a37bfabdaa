"""One model behind the event loop. The loop never waits while the model is loaded, used or closed.

Tokenizing and templates run in threads of the service (preparation.py), steps in the engine's thread. Events
arrive from there in groups, no more often than a reader can see: each wake-up of the loop takes a core
from the step that computes the next tokens.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar

from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from hotset.api import Model
from hotset.engine.driver import EngineThread
from hotset.engine.embedding import TextVectors
from hotset.engine.prompt_logprobs import PromptLogprobs
from hotset.engine.sampler import SamplingParams
from hotset.engine.saved_prefix import SessionFiles
from hotset.engine.sequence import Event, Owner
from hotset.engine.sequence import Sequence as EngineSequence
from hotset.errors import HotsetError, UnsupportedModelError
from hotset.escaping import clause
from hotset.loader.prompt_cache import session_files
from hotset.outputs import Output, ToolUse, output_of
from hotset.parameters import shown
from hotset.server.activity import ActivityReport
from hotset.server.answers import Answer, AnswerRequest, Delivery, PreparedPrompt
from hotset.server.catalogue import FileFacts
from hotset.server.errors import NotReadyError, RequestError, without_folders
from hotset.server.logs import Notices
from hotset.server.metrics import Metrics, engine_metrics
from hotset.server.preparation import Preparation
from hotset.server.remote_images import with_fetched
from hotset.server.settings import ServerSettings
from hotset.server.vectors import Vectors
from hotset.storage.aliases import untagged
from hotset.text.fitting import Fitted, fitted
from hotset.text.image_text import PromptTokens
from hotset.text.infill import encode_gap

_P = ParamSpec("_P")
_T = TypeVar("_T")

_THREADS = 2  # for rare work that is not for the text of requests: loading, memory of devices
PACE_SECONDS = 0.02  # least time between two pieces of a stream: a reader notices no shorter one
_SHARE_SECONDS = 0.002  # for events of whole answers, before the loop does anything else


@dataclass(frozen=True, kw_only=True)
class ListedModel:
    """A model in a list of served models.

    created: seconds since 1970. n_ctx: tokens of a conversation. state: on a server with several models, the
    state of this one (models.py). expires: seconds since 1970 at which it is unloaded; None: it stays.
    n_bytes: its own memory. adapters: names of its adapters (LoRA). needs: bytes that a load is expected to
    reserve, in all and for weights and cache; None if the model is loaded, or if only the load can tell.
    """

    name: str
    created: int
    facts: FileFacts
    n_ctx: int
    state: Mapping[str, Any] | None = None
    expires: float | None = None
    n_bytes: int = 0
    adapters: tuple[str, ...] = ()
    needs: Mapping[str, int] | None = None

    @property
    def is_loaded(self) -> bool:
        return self.state is None or self.state["value"] == "loaded"


class Host(Protocol):
    """The host of an application: a Service, with its one model, or Models."""

    settings: ServerSettings
    stopping: bool
    error: Exception | None  # why it cannot start
    metrics: Metrics
    preparation: Preparation

    def start(self) -> None:
        """Start; call it in the event loop."""

    async def loaded(self) -> None:
        """Wait until it can answer. Raises the error that prevents it."""

    def end_answers(self) -> None:
        """End running answers; each client gets an error that says that the server ends."""

    async def close(self) -> None:
        """End everything. A second call does nothing."""

    def check_ready(self) -> None:
        """Raise NotReadyError if it cannot answer."""

    def at_once(self, name: str | None, held: list[Any], /, *, required: bool) -> Service | None:
        """Return the service of a loaded model; None if the caller must await `when_loaded`.

        name: of a request; None for any. required: whether requests must name one of several models. held:
        receives the object that keeps the model loaded until the request ends. Raises RequestError.
        """

    async def when_loaded(self, name: str | None, held: list[Any], /) -> Service:
        """Wait until the model is loaded, and return its service. Raises the error of a failed load."""

    def keep(self, service: Service, keep_alive: float | str | None) -> None:
        """Set how long a model stays after its requests, as a request says; None changes nothing."""

    async def unload(self, name: str, *, spares_pinned: bool = False) -> bool:
        """Unload a model once it is idle; return False if the host keeps it. Raises RequestError."""

    async def listed(self) -> list[ListedModel]:
        """Return the served models."""

    async def file_of(self, name: str) -> tuple[Service | None, str, Path]:
        """Return a model's service, or None if it is not loaded, its name and file. Raises RequestError."""


class Service:
    """A model for the consumers of one event loop.

    load: makes the model, in a thread. name: the model's name. aliases: its other names.
    ready: called once requests are answered. sampling: default parameters; they override a created model's.
    metrics: the counters to use; by default its own.
    Call `start` in the event loop, and `close` at the end.
    """

    def __init__(
        self,
        load: Callable[[], Model],
        settings: ServerSettings | None = None,
        *,
        name: str,
        aliases: tuple[str, ...] = (),
        ready: Callable[[], object] = lambda: None,
        sampling: Mapping[str, Any] | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self.settings = settings or ServerSettings()
        self.name = name
        self.aliases = aliases
        self.sampling: Mapping[str, Any] = sampling or {}
        self.created = int(time.time())
        self.error: Exception | None = None  # why the model could not be loaded
        self.stopping = False
        self._load, self._ready = load, ready
        self._model: Model | None = None
        self._answers: set[Answer | Vectors] = set()
        self.slots: SessionFiles | HotsetError | None = None  # saves slots, or the reason that it cannot
        self.notices = Notices()
        self._n_prepared = 0  # answers whose prompts are tokenized now
        self.metrics = metrics or Metrics(self._now)
        self._mail = Mail()
        self.preparation = Preparation()
        self._threads = ThreadPoolExecutor(_THREADS, "hotset-service")
        self._loading: asyncio.Task[None] | None = None

    # ---- the model ----

    def start(self) -> None:
        """Begin to load the model."""
        self._mail.loop = asyncio.get_running_loop()
        self._loading = asyncio.create_task(self._loaded())

    async def loaded(self) -> None:
        """Wait until the model is loaded. Raises the error of a failed load."""
        assert self._loading is not None
        await asyncio.shield(self._loading)
        if self.error is not None:
            raise self.error

    async def _loaded(self) -> None:
        try:
            model = await self.in_thread(self._opened)
            model.thread.max_waiting = self.settings.max_queue
            self.preparation.limit(model.engine.max_sequences + self.settings.max_queue)
            self.sampling = {**self.settings.sampling, **model.decided.sampling, **self.sampling}
            self._model = model
            self._ready()
        except Exception as error:
            self.error = error

    def _opened(self) -> Model:
        model = self._load()
        try:
            # Make these now: otherwise the first request waits for them, or two requests make them twice.
            _ = model.tokenizer, model.chat_template.folding, model.output_form
            model.grammars.prepare()
            if self.settings.slot_save_path is not None:
                self.slots = _slots_of(model)
        except BaseException:
            model.close()
            raise
        return model

    @property
    def is_ready(self) -> bool:
        return self._model is not None and not self.stopping

    @property
    def model(self) -> Model:
        """Return the model. Raises NotReadyError while it is loaded, and if the server is shutting down."""
        if self.stopping:
            raise NotReadyError("the server is shutting down; ask another one")
        if self.error is not None:
            raise NotReadyError(f"the model could not be loaded: {without_folders(str(self.error))}")
        if self._model is None:
            raise NotReadyError("the model is being loaded; try again in a moment", retry_after=2)
        return self._model

    @cached_property
    def activity(self) -> ActivityReport:
        """Return the reporter of activity for each token of this model."""
        return ActivityReport(self.model)

    def is_called(self, name: str) -> bool:
        """Return whether the model has this name or alias; `:latest` may follow it."""
        names = (self.name, *self.aliases)
        return name in names or untagged(name) in names

    def check_name(self, name: str) -> None:
        """Raise RequestError (404) for the name of another model."""
        if not self.is_called(name):
            raise RequestError(
                f"the model {clause(shown(name))} is not served here; this server has {self.name!r}",
                404,
                param="model",
                code="model_not_found",
            )

    # ---- as a host of one model ----

    def check_ready(self) -> None:
        _ = self.model

    def at_once(self, name: str | None, _held: list[Any], /, *, required: bool) -> Service | None:
        """Return this service. It answers requests that name another model, or none."""
        if not name:
            if required:
                self.notices.log(f"requests name no model; {self.name!r} answers them")
        elif not self.is_called(name):
            model, _, adapter = name.rpartition(":")
            if self.is_called(model) and any(adapter == each.name for each in self.model.adapters.loaded):
                self.check_name(name)  # the route accepts no adapter: the model without it is another model
            self.notices.log(f"requests name the model {clause(shown(name))}; {self.name!r} answers them")
        return self

    async def when_loaded(self, _name: str | None, _held: list[Any], /) -> Service:
        return self

    def keep(self, service: Service, keep_alive: float | str | None) -> None:
        """Do nothing: the model was loaded when the server started, and stays."""

    async def unload(self, name: str, *, spares_pinned: bool = False) -> bool:  # noqa: ARG002
        self.check_name(name)
        return False

    async def listed(self) -> list[ListedModel]:
        n_ctx = self.model.n_ctx
        adapters = tuple(each.name for each in self.model.adapters.loaded)
        facts, created = self.facts(), self.created
        return [ListedModel(name=self.name, created=created, facts=facts, n_ctx=n_ctx, adapters=adapters)]

    async def file_of(self, name: str) -> tuple[Service | None, str, Path]:
        self.check_name(name)
        return self, self.name, self.model.gguf.path

    def facts(self) -> FileFacts:
        """Return facts of the model's file at the time of loading."""
        model = self.model
        config, n_vocab = model.config, model.backend.n_vocab
        return replace(
            FileFacts.of(model.gguf), n_ctx_train=config.n_ctx_train, n_vocab=n_vocab, n_embd=config.n_embd,
            sees=model.images is not None,
        )  # fmt: skip

    async def in_thread(self, work: Callable[_P, _T], *args: _P.args, **more: _P.kwargs) -> _T:
        """Return the result of `work`, run in a thread. Work on texts of requests uses `preparation`."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: work(*args, **more))

    # ---- answers ----

    async def ask(self, request: AnswerRequest) -> Answer:
        """Begin to answer. Raises NotReadyError, QueueFullError, or the error in the request."""
        asked, model = time.perf_counter(), self.model
        request = self._bounded(request)
        n = request.n_answers
        model.thread.check_room(n + self._n_prepared)
        self._n_prepared += n
        left = threading.Event()
        try:
            threads = self.preparation.text(long=request.is_long)
            prompts = await threads.run(request.client, _prepared, model, request, self.settings, left)
        except asyncio.CancelledError:  # the client disconnected
            if model.images is not None:
                model.images.end(left)
            raise
        finally:
            self._n_prepared -= n
        answer = Answer(request, prompts, partial(self._submit, model.thread), self._closed, asked)
        self._begin(answer)
        return answer

    def prompt(self, request: AnswerRequest, left: threading.Event) -> list[int]:
        """Return the tokens of a conversation's prompt, as `ask` computes them. It takes a thread's time.

        left: ends the decoding of images once it is set.
        """
        request = replace(request, params=request.thinking.limited(request.params))
        return _conversation(self.model, request, request.messages or (), self.settings, left)[1].tokens

    async def ask_vectors(
        self, make: Callable[[Model, Owner], TextVectors], n_texts: int, client: str | None, *, long: bool
    ) -> Vectors:
        """Begin to compute the vectors, or scores, of texts. Raises the errors of `ask` and of `make`.

        make: checks the texts of a request, in a thread. long: as in Preparation.text.
        A request has at most `max_sequences` texts in the engine, and takes as many places in its queue.
        """
        asked, model = time.perf_counter(), self.model
        n = min(n_texts, model.engine.max_sequences)
        model.thread.check_room(n + self._n_prepared)
        self._n_prepared += n
        try:
            threads, owner = self.preparation.text(long=long), Owner.of(client, self.settings.max_seconds)
            prepared = await threads.run(client, make, model, owner)
        finally:
            self._n_prepared -= n
        submit = partial(self._submit, model.thread)
        vectors = Vectors(prepared, model.thread, n, submit, self._closed, asked)
        self._begin(vectors)
        return vectors

    def _begin(self, answer: Answer | Vectors) -> None:
        self._answers.add(answer)
        try:
            _ = self.model  # raises if the server is shutting down
            answer.begin()
        except BaseException:
            answer.close()
            raise

    def _submit(
        self,
        thread: EngineThread,
        sequence: EngineSequence,
        take: Callable[[Event], None],
        delivery: Delivery,
    ) -> None:
        thread.submit(sequence, Sink(self._mail, take, delivery))

    def _bounded(self, request: AnswerRequest) -> AnswerRequest:
        """Return a request with this server's limit of tokens. Raises RequestError beyond another limit."""
        settings, n = self.settings, request.n_answers
        if not n:
            raise RequestError("there is nothing to answer; give a prompt or messages")
        most = min(settings.max_answers, self.model.engine.max_sequences + settings.max_queue)
        if n > most:
            raise RequestError(f"a request gets at most {most} answers, not {n}", param="n")
        n_slots = self.model.engine.max_sequences
        if request.id_slot is not None and request.id_slot >= n_slots:
            raise RequestError(
                f"there is no slot {request.id_slot}: this server has {n_slots}", param="id_slot"
            )
        asked = request.params.max_tokens
        if (longest := self.most_tokens(asked)) == asked:
            return request
        return replace(request, params=replace(request.params, max_tokens=longest))

    def most_tokens(self, asked: int | None) -> int | None:
        """Return the limit of an answer: the server's, or the lower one of a request; None: the context."""
        limits = [limit for limit in (asked, self.settings.max_tokens) if limit is not None]
        return min(limits, default=None)

    def _closed(self, answer: Answer | Vectors) -> None:
        self._answers.discard(answer)
        self.metrics.count(answer)

    @property
    def n_open(self) -> int:
        """Return the number of answers, and of texts to embed, that clients wait for or read."""
        return sum(answer.n_open for answer in self._answers)

    def _now(self) -> Iterator[Metric]:
        """Yield the metrics of the engine and of the current state."""
        yield GaugeMetricFamily("hotset_ready", "1 once the model answers.", float(self.is_ready))
        yield GaugeMetricFamily("hotset_answers_open", "Answers that clients wait for.", self.n_open)
        if self.is_ready:
            yield from engine_metrics([((), self.model)])

    # ---- the end ----

    def end_answers(self) -> None:
        """End running answers; each client gets an error that says that the server ends."""
        error = NotReadyError("the server was shut down before the answer was complete")
        for answer in list(self._answers):
            answer.fail(error)

    async def close(self) -> None:
        """End everything and free the model. A second call does nothing."""
        self.stopping = True
        self.end_answers()
        if self._loading is not None:
            await asyncio.wait([self._loading])
        model, self._model = self._model, None
        if model is not None:
            await asyncio.get_running_loop().run_in_executor(None, model.close)
        self._threads.shutdown(wait=False)
        self.preparation.close()


def _prepared(
    model: Model, request: AnswerRequest, settings: ServerSettings, left: threading.Event
) -> list[PreparedPrompt]:
    """Return the checked prompts of a request with their sequences. left: ends the work on its images."""
    output: Output | None = None
    params = request.thinking.limited(request.params)
    request = replace(request, params=params)
    scales = None if request.adapters is None else model.adapters.resolve(request.adapters)
    if request.messages is not None:
        output, prompt = _conversation(model, request, request.messages, settings, left)
        prompts = [prompt]
    elif request.gap is not None:
        most = _room(model, request.params) if request.gap.trims else model.n_ctx
        prompts = [Fitted(encode_gap(model.tokenizer, model.gguf.metadata, request.gap, most), 0)]
    else:
        texts = request.prompts
        prompts = [Fitted(model.encode(text, parse_special=request.parse_special), 0) for text in texts]
    for prompt in prompts:
        tokens, sees = prompt.tokens, request.prompt_logprobs is None
        if sees and isinstance(tokens, PromptTokens) and model.images is not None:
            model.engine.require_room(len(tokens))
            model.images.prompt(tokens, left)
    owner = Owner.of(request.client, settings.max_seconds)
    prepared = [_prepared_prompt(model, request, output, prompt, owner) for prompt in prompts]
    if scales is not None:
        for one in prepared:
            for sequence in one.sequences:
                sequence.choose(scales)
    return prepared


def _conversation(
    model: Model,
    request: AnswerRequest,
    messages: Sequence[Mapping[str, Any]],
    settings: ServerSettings,
    left: threading.Event,
) -> tuple[Output, Fitted]:
    """Return the form of the answer, and the prompt, without its oldest turns if the request allows that."""
    if model.images is not None:
        messages = with_fetched(messages, settings, left)
    use = ToolUse(request.tools, request.tool_choice, request.parallel_tool_calls)
    variables = {**request.thinking.variables, **request.template}
    output = output_of(model.output_form, request.params, messages, request.opening, use, variables)
    how = {"variables": output.variables, **request.opening._asdict()}

    def encode(messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return model.encode_chat(messages, output.tools, **how, stop=left)

    if not request.truncates:
        return output, Fitted(encode(messages), 0)
    return output, fitted(messages, encode, model.n_ctx, request.params.max_tokens)


def _slots_of(model: Model) -> SessionFiles | HotsetError:
    try:
        return session_files(model, "--slot-save-path")
    except UnsupportedModelError as error:
        return error


def _room(model: Model, params: SamplingParams) -> int:
    """Return the length of a prompt that leaves room for the answer; never less than half the context."""
    return model.n_ctx - min(params.max_tokens or model.n_ctx, model.n_ctx // 2)


def _prepared_prompt(
    model: Model, request: AnswerRequest, output: Output | None, prompt: Fitted, owner: Owner
) -> PreparedPrompt:
    tokens, scores = prompt.tokens, None
    if request.prompt_logprobs is not None:
        if isinstance(tokens, PromptTokens):
            raise RequestError("prompt_logprobs cannot be combined with images", param="prompt_logprobs")
        scores = PromptLogprobs(model.engine, tokens, request.prompt_logprobs, owner)
    generations, params = [], request.params if output is None else output.params
    seed = params.seed
    for i in range(request.n):
        own = params if seed is None or not i else replace(params, seed=(seed + i) % 2**64)
        reading = None if output is None else output.reading(tokens)
        generations.append(model.prepare(tokens, own, request.reuse_prefix, reading=reading, owner=owner))
        generations[-1].sequence.id_slot = request.id_slot
    return PreparedPrompt(tokens, generations, prompt.n_dropped, scores)


class Mail:
    """A queue that brings events from the engine's thread into the event loop, several at a time.

    An `urgent` event is delivered at once. So are others, if they come slowly. If steps are quicker than
    PACE_SECONDS, the loop checks the queue after that time, and the engine's thread need not wake it. Events
    of a whole answer, perhaps a hundred thousand, are delivered after the others, some at a time.
    """

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self._events: deque[tuple[Callable[[Event], None], Event]] = deque()
        self._whole: deque[tuple[Callable[[Event], None], Iterator[Event]]] = deque()
        self._goes_on = False  # whether the loop will soon deliver more whole answers
        self._is_called = False
        self._will_look = False
        self._delivered = -math.inf  # time of the last delivery, by the loop's clock

    def put(self, take: Callable[[Event], None], event: Event, *, urgent: bool) -> None:
        self._events.append((take, event))  # append first: a loop that has just looked is then called again
        self._call(urgent=urgent)

    def put_all(self, take: Callable[[Event], None], events: Sequence[Event]) -> None:
        """Queue all events of an answer, in order."""
        self._whole.append((take, iter(events)))
        self._call(urgent=True)

    def _call(self, *, urgent: bool) -> None:
        if self._is_called or self.loop is None or (self._will_look and not urgent):
            return
        self._is_called = True
        try:
            self.loop.call_soon_threadsafe(self._come)
        except RuntimeError:  # the loop is closed, and no client waits
            self._events.clear()
            self._whole.clear()

    def _come(self) -> None:
        """Deliver events after a call of the engine's thread."""
        self._is_called = False  # before the delivery: an event that arrives meanwhile calls again
        now = asyncio.get_running_loop().time()
        if not self._will_look and now - self._delivered < PACE_SECONDS:
            self._look_later()
        self._deliver()
        self._delivered = now

    def _look(self) -> None:
        self._will_look = False
        if self._events or self._whole:
            self._look_later()
            self._delivered = asyncio.get_running_loop().time()
            self._deliver()

    def _look_later(self) -> None:
        self._will_look = True
        asyncio.get_running_loop().call_later(PACE_SECONDS, self._look)

    def _deliver(self) -> None:
        while self._events:
            take, event = self._events.popleft()
            take(event)
        if self._whole and not self._goes_on:
            self._deliver_some()

    def _deliver_some(self) -> None:
        """Deliver whole answers for a short time, taking turns."""
        loop = asyncio.get_running_loop()
        end = loop.time() + _SHARE_SECONDS
        while self._whole:
            take, events = self._whole.popleft()
            for event in events:
                take(event)
                if loop.time() > end:
                    self._whole.append((take, events))
                    self._goes_on = True
                    loop.call_soon(self._go_on)
                    return

    def _go_on(self) -> None:
        self._goes_on = False
        self._deliver()


def _ignore(_: Event) -> None:
    """Ignore an event that comes after the end of an answer."""


class Sink:
    """The receiver of one sequence's events. The first token and the end are passed on without delay."""

    def __init__(self, mail: Mail, take: Callable[[Event], None], delivery: Delivery) -> None:
        self._mail, self._delivery = mail, delivery
        self._take: Callable[[Event], None] = take
        self._held: list[Event] = []
        self._has_begun = False

    def put(self, event: Event) -> None:
        ends = event.finish_reason is not None
        if self._delivery == "end" and not ends:
            self._held.append(event)
            return
        if self._held:
            self._mail.put_all(self._take, [*self._held, event])
            self._held.clear()
        else:
            self._mail.put(self._take, event, urgent=ends or not self._has_begun)
        self._has_begun = True
        if ends:
            # Otherwise answer, sequence and model would hold each other until the next garbage collection.
            self._take = _ignore
