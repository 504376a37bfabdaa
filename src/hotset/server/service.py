"""One model behind the event loop: it is loaded, asked and closed without the loop ever waiting for it.

Tokenizing and templates run in threads of the service (preparation.py), steps in the engine's. Events come
back from there in bunches, and no more often than anyone could see: each wake-up of the loop takes a core
from the step that computes the next tokens.
"""

from __future__ import annotations

import asyncio
import math
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
from hotset.server.settings import ServerSettings
from hotset.server.vectors import Vectors
from hotset.storage.aliases import untagged
from hotset.text.fitting import Fitted, fitted
from hotset.text.infill import encode_gap

_P = ParamSpec("_P")
_T = TypeVar("_T")

_THREADS = 2  # for what no request of many can fill: loading, pictures of tokens, memory of devices
PACE_SECONDS = 0.02  # between two pieces of a stream where steps are quicker: a reader sees no more
_SHARE_SECONDS = 0.002  # for which the loop takes events of whole answers, before it does anything else


@dataclass(frozen=True, kw_only=True)
class ListedModel:
    """A model in a list of those that are served.

    created: seconds since 1970. n_ctx: tokens of a conversation. state: of a server with several models: what
    it is doing with this one (models.py). expires: seconds since 1970 at which it is unloaded; None: it
    stays. n_bytes: of memory that are its own. adapters: names of those (LoRA) that it has. needs: bytes that
    a load is expected to reserve, in all and for weights and cache; None if it is loaded, or only then known.
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
    """What stands behind an application: a Service, with its one model, or Models."""

    settings: ServerSettings
    stopping: bool
    error: Exception | None  # why it cannot begin
    metrics: Metrics
    preparation: Preparation

    def start(self) -> None:
        """Begins; in the event loop."""

    async def loaded(self) -> None:
        """Waits until it can answer. Raises what keeps it from that."""

    def end_answers(self) -> None:
        """Ends what runs; each client gets an error that the server ends."""

    async def close(self) -> None:
        """Ends everything; safe to call twice."""

    def check_ready(self) -> None:
        """Raises NotReadyError."""

    def at_once(self, name: str | None, held: list[Any], /, *, required: bool) -> Service | None:
        """The service of a model that is there; None where `when_loaded` is to be awaited.

        name: of a request; None for any. required: whether requests must name one of several models. held:
        receives the object that keeps the model loaded until the request ends. Raises RequestError.
        """

    async def when_loaded(self, name: str | None, held: list[Any], /) -> Service:
        """As `at_once`, once it is there. Raises what keeps it from being loaded."""

    def keep(self, service: Service, keep_alive: float | str | None) -> None:
        """How long a model stays after its requests, as one of them says; None: it says nothing."""

    async def unload(self, name: str, *, spares_pinned: bool = False) -> bool:
        """Unloads a model once it is idle; False where models stay. Raises RequestError."""

    async def listed(self) -> list[ListedModel]:
        """The models that are served."""

    async def file_of(self, name: str) -> tuple[Service | None, str, Path]:
        """Of a model: its service where it is loaded, its name and its file. Raises RequestError."""


class Service:
    """A model for the consumers of one event loop.

    load: makes the model, in a thread. name: what the model is called. aliases: what else it answers to.
    ready: called once requests are answered. sampling: of requests that leave it out, over that of a created
    model. metrics: where it counts; by default its own.
    Call `start` in the event loop and `close` when it is over.
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
        self.error: Exception | None = None  # why there is no model
        self.stopping = False
        self._load, self._ready = load, ready
        self._model: Model | None = None
        self._answers: set[Answer | Vectors] = set()
        self.slots: SessionFiles | HotsetError | None = None  # what saves them, or why none does
        self.notices = Notices()
        self._n_prepared = 0  # answers whose prompts are tokenized now
        self.metrics = metrics or Metrics(self._now)
        self._mail = Mail()
        self.preparation = Preparation()
        self._threads = ThreadPoolExecutor(_THREADS, "hotset-service")
        self._loading: asyncio.Task[None] | None = None

    # ---- the model ----

    def start(self) -> None:
        """Begins to load."""
        self._mail.loop = asyncio.get_running_loop()
        self._loading = asyncio.create_task(self._loaded())

    async def loaded(self) -> None:
        """Waits until the model is there. Raises what kept it from being loaded."""
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
            # Made now: the first to ask would wait for them, and two at once would make them twice.
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
        """Raises NotReadyError while it is loaded, and where the server is about to end."""
        if self.stopping:
            raise NotReadyError("the server is shutting down; ask another one")
        if self.error is not None:
            raise NotReadyError(f"the model could not be loaded: {without_folders(str(self.error))}")
        if self._model is None:
            raise NotReadyError("the model is being loaded; try again in a moment", retry_after=2)
        return self._model

    @cached_property
    def activity(self) -> ActivityReport:
        """What the model's tokens do, for those who ask."""
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
        """Return this service. Requests that name another model, or none, get the only one there is."""
        if not name:
            if required:
                self.notices.log(f"requests name no model; {self.name!r} answers them")
        elif not self.is_called(name):
            model, _, adapter = name.rpartition(":")
            if self.is_called(model) and any(adapter == each.name for each in self.model.adapters.loaded):
                self.check_name(name)  # the route takes no adapter, and this model alone is another one
            self.notices.log(f"requests name the model {clause(shown(name))}; {self.name!r} answers them")
        return self

    async def when_loaded(self, _name: str | None, _held: list[Any], /) -> Service:
        return self

    def keep(self, service: Service, keep_alive: float | str | None) -> None:
        """The model was loaded when the server began, and stays."""

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
        """Of the model's file, as it was loaded."""
        model = self.model
        config, n_vocab = model.config, model.backend.n_vocab
        return replace(
            FileFacts.of(model.gguf), n_ctx_train=config.n_ctx_train, n_vocab=n_vocab, n_embd=config.n_embd
        )

    async def in_thread(self, work: Callable[_P, _T], *args: _P.args, **more: _P.kwargs) -> _T:
        """What `work` returns, which takes a moment; `preparation` is for the text of requests."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: work(*args, **more))

    # ---- answers ----

    async def ask(self, request: AnswerRequest) -> Answer:
        """Begins to answer. Raises NotReadyError, QueueFullError, and what is wrong with the request."""
        asked, model = time.perf_counter(), self.model
        request = self._bounded(request)
        n = request.n_answers
        model.thread.check_room(n + self._n_prepared)
        self._n_prepared += n
        try:
            threads = self.preparation.text(long=request.is_long)
            prompts = await threads.run(request.client, _prepared, model, request, self.settings.max_seconds)
        finally:
            self._n_prepared -= n
        answer = Answer(request, prompts, partial(self._submit, model.thread), self._closed, asked)
        self._begin(answer)
        return answer

    async def ask_vectors(
        self, make: Callable[[Model, Owner], TextVectors], n_texts: int, client: str | None, *, long: bool
    ) -> Vectors:
        """Begins to compute the vectors, or scores, of texts. make: checks the texts of a request, in a
        thread. Raises as `ask`, and as `make` does. long: as of Preparation.text.

        A request has as many texts in the engine as run at once, and takes that many places in its queue.
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
            _ = self.model  # it may have begun to shut down
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
        """A request within the limits of this server. Raises RequestError where it asks for more."""
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
        """Answers, and texts of embeddings, that clients still wait for, or read."""
        return sum(answer.n_open for answer in self._answers)

    def _now(self) -> Iterator[Metric]:
        """What /metrics says of the engine, and of this moment."""
        yield GaugeMetricFamily("hotset_ready", "1 once the model answers.", float(self.is_ready))
        yield GaugeMetricFamily("hotset_answers_open", "Answers that clients wait for.", self.n_open)
        if self.is_ready:
            yield from engine_metrics([((), self.model)])

    # ---- the end ----

    def end_answers(self) -> None:
        """Ends what runs; each client gets an error that the server ends."""
        error = NotReadyError("the server was shut down before the answer was complete")
        for answer in list(self._answers):
            answer.fail(error)

    async def close(self) -> None:
        """Ends everything and frees the model; safe to call twice."""
        self.stopping = True
        self.end_answers()
        if self._loading is not None:
            await asyncio.wait([self._loading])
        model, self._model = self._model, None
        if model is not None:
            await asyncio.get_running_loop().run_in_executor(None, model.close)
        self._threads.shutdown(wait=False)
        self.preparation.close()


def _prepared(model: Model, request: AnswerRequest, seconds: float | None) -> list[PreparedPrompt]:
    """What a request makes the engine do, checked, and over after so many seconds; in a thread."""
    output: Output | None = None
    params = request.thinking.limited(request.params)
    request = replace(request, params=params)
    scales = None if request.adapters is None else model.adapters.resolve(request.adapters)
    if request.messages is not None:
        use = ToolUse(request.tools, request.tool_choice, request.parallel_tool_calls)
        variables = {**request.thinking.variables, **request.template}
        output = output_of(model.output_form, params, request.messages, request.opening, use, variables)
        prompts = [_conversation(model, request, output, request.messages)]
    elif request.gap is not None:
        most = _room(model, request.params) if request.gap.trims else model.n_ctx
        prompts = [Fitted(encode_gap(model.tokenizer, model.gguf.metadata, request.gap, most), 0)]
    else:
        texts = request.prompts
        prompts = [Fitted(model.encode(text, parse_special=request.parse_special), 0) for text in texts]
    owner = Owner.of(request.client, seconds)
    prepared = [_prepared_prompt(model, request, output, prompt, owner) for prompt in prompts]
    if scales is not None:
        for one in prepared:
            for sequence in one.sequences:
                sequence.choose(scales)
    return prepared


def _conversation(
    model: Model, request: AnswerRequest, output: Output, messages: Sequence[Mapping[str, Any]]
) -> Fitted:
    """Return the prompt of a conversation, without its oldest turns if the request allows that."""
    how = {"variables": output.variables, **request.opening._asdict()}

    def encode(messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return model.encode_chat(messages, output.tools, **how)

    if not request.truncates:
        return Fitted(encode(messages), 0)
    return fitted(messages, encode, model.n_ctx, request.params.max_tokens)


def _slots_of(model: Model) -> SessionFiles | HotsetError:
    try:
        return session_files(model, "--slot-save-path")
    except UnsupportedModelError as error:
        return error


def _room(model: Model, params: SamplingParams) -> int:
    """Tokens of a prompt that leave room for the answer, or for half the context if that is less."""
    return model.n_ctx - min(params.max_tokens or model.n_ctx, model.n_ctx // 2)


def _prepared_prompt(
    model: Model, request: AnswerRequest, output: Output | None, prompt: Fitted, owner: Owner
) -> PreparedPrompt:
    tokens, scores = prompt.tokens, None
    if request.prompt_logprobs is not None:
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
    """Brings events from the engine's thread into the event loop, as many at a time as have come.

    What is `urgent` comes at once. Other events do so as long as they come slowly; where steps are quicker
    than PACE_SECONDS, the loop looks by itself after that time, and the engine's thread need not wake it.
    Those of a whole answer, which may be a hundred thousand, come behind the others and some at a time.
    """

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self._events: deque[tuple[Callable[[Event], None], Event]] = deque()
        self._whole: deque[tuple[Callable[[Event], None], Iterator[Event]]] = deque()
        self._goes_on = False  # the loop will soon take more of them
        self._is_called = False
        self._will_look = False
        self._delivered = -math.inf  # when, by the loop's clock

    def put(self, take: Callable[[Event], None], event: Event, *, urgent: bool) -> None:
        self._events.append((take, event))  # first: a loop that has just looked in vain says so afterwards
        self._call(urgent=urgent)

    def put_all(self, take: Callable[[Event], None], events: Sequence[Event]) -> None:
        """All events of an answer, in order."""
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
        """The engine's thread has called."""
        self._is_called = False  # before they are taken: one that comes meanwhile calls again
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
        """A share of the whole answers, each in turn."""
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
    """What comes behind the end of an answer: nothing."""


class Sink:
    """The events of one sequence on their way: its first token and its end without delay."""

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
            # Else answer and sequence would hold each other, and the model, until the garbage collector runs.
            self._take = _ignore
