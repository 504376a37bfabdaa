"""A loaded model for asyncio programs: no call blocks the event loop, and answers need no threads.

Slow calls (encoding, templates, vectors) run in a thread. An answer is a sequence of the engine, whose events
are sent to the loop as they occur. Cancelling a task cancels its answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import partial
from types import TracebackType
from typing import Any, Unpack

import numpy as np

from hotset.api import Model, load
from hotset.engine.perplexity import PerplexityResult
from hotset.engine.reranking import RankedDocument
from hotset.engine.sampler import takes_sampling
from hotset.engine.sequence import Event
from hotset.generation import ChatMessage, Chunk, Completion, Generation, Messages, Prompt, sampling_params
from hotset.outputs import ToolUse
from hotset.sampling_parameters import Sampling
from hotset.settings import LoadSettings, ModelPath, taking

_Prepare = Callable[[], Generation]


@taking(LoadSettings)
async def _load(model: ModelPath, settings: LoadSettings) -> AsyncModel:
    """Load a model like `hotset.load`, in a thread. A cancelled task leaves no model behind."""
    loading = asyncio.create_task(asyncio.to_thread(load, model, settings))
    try:
        return AsyncModel(await asyncio.shield(loading))
    except asyncio.CancelledError:
        loading.add_done_callback(_close)
        raise


def _close(loading: asyncio.Task[Model]) -> None:
    if not loading.cancelled() and loading.exception() is None:
        loading.get_loop().run_in_executor(None, loading.result().close)


class AsyncModel:
    """A Model with coroutines as methods. Use it with `async with`, or call `close`, to close the model.

    `await AsyncModel.load("name")` has the parameters of `hotset.load`. model: a loaded Model; it stays
    available as `model`, with its attributes and other methods.
    Answers that run at the same time are computed together, up to the model's max_sequences; each is the same
    as from the Model. Errors are the Model's.
    """

    load = staticmethod(_load)

    def __init__(self, model: Model) -> None:
        self.model = model

    @takes_sampling
    async def generate(
        self, prompt: Prompt, *, reuse_prefix: bool = True, **params: Unpack[Sampling]
    ) -> Completion:
        """Do as Model.generate."""
        return (await self._finished(self._prompted(prompt, reuse_prefix, params)))[0]

    @takes_sampling
    async def generate_many(
        self, prompts: Sequence[Prompt], *, reuse_prefix: bool = True, **params: Unpack[Sampling]
    ) -> list[Completion]:
        """Do as Model.generate_many; if one fails the others are cancelled."""
        prepared = [self._prompted(one, reuse_prefix, params) for one in prompts]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._finished(one)) for one in prepared]
        return [task.result()[0] for task in tasks]

    @takes_sampling
    async def stream(
        self, prompt: Prompt, *, reuse_prefix: bool = True, **params: Unpack[Sampling]
    ) -> AsyncGenerator[Chunk, None]:
        """Do as Model.stream. Leaving the loop cancels the rest once the generator is closed.

        Use `contextlib.aclosing` to close it at once.
        """
        async with aclosing(self._chunks(self._prompted(prompt, reuse_prefix, params))) as chunks:
            async for chunk, _ in chunks:
                yield chunk

    @takes_sampling
    async def chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] = "auto",
        parallel_tool_calls: bool = True,
        variables: Mapping[str, Any] | None = None,
        **params: Unpack[Sampling],
    ) -> ChatMessage:
        """Do as Model.chat."""
        use = ToolUse(tools or (), tool_choice, parallel_tool_calls)
        prepared = partial(self.model.prepare_chat, messages, use, variables, **params)
        return (await self._finished(prepared))[1]

    @takes_sampling
    async def stream_chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] = "auto",
        parallel_tool_calls: bool = True,
        variables: Mapping[str, Any] | None = None,
        **params: Unpack[Sampling],
    ) -> AsyncGenerator[Chunk, None]:
        """Do as Model.chat with stream=True."""
        use = ToolUse(tools or (), tool_choice, parallel_tool_calls)
        prepared = partial(self.model.prepare_chat, messages, use, variables, **params)
        async with aclosing(self._chunks(prepared)) as chunks:
            async for chunk, _ in chunks:
                yield chunk

    async def encode(self, prompt: Prompt, *, parse_special: bool = False) -> list[int]:
        """Do as Model.encode."""
        return await asyncio.to_thread(self.model.encode, prompt, parse_special=parse_special)

    async def encode_chat(
        self, messages: Messages, tools: Sequence[Mapping[str, Any]] | None = None, **how: Any
    ) -> list[int]:
        """Do as Model.encode_chat."""
        return await asyncio.to_thread(self.model.encode_chat, messages, tools, **how)

    async def logits(self, tokens: Prompt, *, reuse_prefix: bool = True) -> np.ndarray:
        """Do as Model.logits: float32 [n_tokens, n_vocab]."""
        return await asyncio.to_thread(self.model.logits, tokens, reuse_prefix=reuse_prefix)

    async def perplexity(self, text: str, *, n_ctx: int = 512, chunks: int | None = None) -> PerplexityResult:
        """Do as Model.perplexity."""
        return await asyncio.to_thread(self.model.perplexity, text, n_ctx=n_ctx, chunks=chunks)

    async def embed(
        self, texts: Sequence[Prompt], *, pooling: str | None = None, dimensions: int | None = None
    ) -> np.ndarray:
        """Do as Model.embed: float32 [n_texts, width]."""
        return await asyncio.to_thread(self.model.embed, texts, pooling=pooling, dimensions=dimensions)

    async def embed_tokens(
        self, texts: Sequence[Prompt], *, dimensions: int | None = None
    ) -> list[np.ndarray]:
        """Do as Model.embed_tokens: float32 [n_tokens, width] of each text."""
        return await asyncio.to_thread(self.model.embed_tokens, texts, dimensions=dimensions)

    async def rerank(
        self, query: str, documents: Sequence[str], *, top_n: int | None = None
    ) -> list[RankedDocument]:
        """Do as Model.rerank."""
        return await asyncio.to_thread(self.model.rerank, query, documents, top_n=top_n)

    async def close(self) -> None:
        """Cancel running answers, and free the model; safe to call twice."""
        await asyncio.to_thread(self.model.close)

    async def __aenter__(self) -> AsyncModel:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _prompted(self, prompt: Prompt, reuse_prefix: bool, params: Mapping[str, Any]) -> _Prepare:
        """Return a function that prepares the answer. Raises InvalidRequestError for bad parameters."""
        checked = sampling_params(params, self.model.decided.sampling)
        return lambda: self.model.prepare(self.model.encode(prompt), checked, reuse_prefix)

    async def _finished(self, prepare: _Prepare) -> tuple[Completion, ChatMessage]:
        async with aclosing(self._chunks(prepare)) as chunks:
            async for _, generation in chunks:
                if generation.completion is not None:
                    return generation.completion, generation.message
        raise AssertionError("an answer has an end")

    async def _chunks(self, prepare: _Prepare) -> AsyncGenerator[tuple[Chunk, Generation], None]:
        """Yield the pieces of an answer, each with its generation."""
        generation = await asyncio.to_thread(prepare)
        mailbox = _Mailbox(asyncio.get_running_loop())
        try:
            generation.thread.submit(generation.sequence, mailbox)
            while generation.completion is None:
                chunk = generation.take(await mailbox.events.get())
                yield chunk, generation
        finally:
            generation.cancel_soon()  # (does nothing if it has ended)


class _Mailbox:
    """A mailbox that sends the events of a sequence from the engine's thread to the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self._loop = loop

    def put(self, event: Event) -> None:
        with suppress(RuntimeError):  # the loop is closed: no task waits
            self._loop.call_soon_threadsafe(self.events.put_nowait, event)
