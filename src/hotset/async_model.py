"""A loaded model for programs that run on asyncio: nothing waits in the event loop, and no thread per answer.

What takes a moment (encoding, templates, vectors) is done in a thread. An answer is a sequence of the engine,
whose events come to the loop as they are made; a task that is cancelled cancels its answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from types import TracebackType
from typing import Any, Protocol, Unpack

import numpy as np

from hotset.engine.reranking import RankedDocument
from hotset.engine.sampler import Sampling, SamplingParams
from hotset.engine.sequence import Event
from hotset.generation import ChatMessage, Chunk, Completion, Generation, Messages, Prompt, sampling_params
from hotset.loader.decide import Decided

Tools = list[dict[str, Any]] | None


class LoadedModel(Protocol):
    """What is used of a hotset.Model."""

    decided: Decided

    def encode(self, prompt: Prompt) -> list[int]: ...

    def encode_chat(
        self, messages: Messages, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]: ...

    def prepare(self, tokens: list[int], params: SamplingParams, reuse_prefix: bool = ...) -> Generation: ...

    def embed(
        self, texts: Sequence[Prompt], *, pooling: str | None = None, dimensions: int | None = None
    ) -> np.ndarray: ...

    def rerank(
        self, query: str, documents: Sequence[str], *, top_n: int | None = None
    ) -> list[RankedDocument]: ...

    def close(self) -> None: ...


class AsyncModel:
    """The methods of a Model as coroutines. Use it with `async with`, or call `close`: the model is closed.

    model: of `hotset.load`, which takes a while: `AsyncModel(await asyncio.to_thread(hotset.load, "name"))`.
    Answers that run at the same time are computed side by side, as many as the model's max_sequences; each is
    the same as from the Model. Errors are the Model's.
    """

    def __init__(self, model: LoadedModel) -> None:
        self.model = model

    async def generate(
        self, prompt: Prompt, *, reuse_prefix: bool = True, **params: Unpack[Sampling]
    ) -> Completion:
        """As Model.generate."""
        checked = sampling_params(params, self.model.decided.sampling)
        return await self._finished(prompt, checked, reuse_prefix)

    async def generate_many(
        self, prompts: Sequence[Prompt], *, reuse_prefix: bool = True, **params: Unpack[Sampling]
    ) -> list[Completion]:
        """As Model.generate_many; where one fails the others are cancelled."""
        checked = sampling_params(params, self.model.decided.sampling)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._finished(one, checked, reuse_prefix)) for one in prompts]
        return [task.result() for task in tasks]

    async def stream(
        self, prompt: Prompt, *, reuse_prefix: bool = True, **params: Unpack[Sampling]
    ) -> AsyncGenerator[Chunk, None]:
        """As Model.stream. Leaving the loop early cancels the rest when the generator is closed, which
        `contextlib.aclosing` does at once."""
        checked = sampling_params(params, self.model.decided.sampling)
        async with aclosing(self._chunks(prompt, checked, reuse_prefix)) as chunks:
            async for chunk, _ in chunks:
                yield chunk

    async def chat(
        self,
        messages: Messages,
        *,
        tools: Tools = None,
        **params: Unpack[Sampling],
    ) -> ChatMessage:
        """As Model.chat."""
        tokens = await asyncio.to_thread(self.model.encode_chat, messages, tools)
        completion = await self.generate(tokens, **params)
        return ChatMessage(completion.text, completion)

    async def stream_chat(
        self,
        messages: Messages,
        *,
        tools: Tools = None,
        **params: Unpack[Sampling],
    ) -> AsyncGenerator[Chunk, None]:
        """As Model.chat with stream=True."""
        tokens = await asyncio.to_thread(self.model.encode_chat, messages, tools)
        async with aclosing(self.stream(tokens, **params)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def embed(
        self, texts: Sequence[Prompt], *, pooling: str | None = None, dimensions: int | None = None
    ) -> np.ndarray:
        """As Model.embed: float32 [n_texts, width]."""
        return await asyncio.to_thread(self.model.embed, texts, pooling=pooling, dimensions=dimensions)

    async def rerank(
        self, query: str, documents: Sequence[str], *, top_n: int | None = None
    ) -> list[RankedDocument]:
        """As Model.rerank."""
        return await asyncio.to_thread(self.model.rerank, query, documents, top_n=top_n)

    async def close(self) -> None:
        """Ends what runs, and frees the model; safe to call twice."""
        await asyncio.to_thread(self.model.close)

    async def __aenter__(self) -> AsyncModel:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _finished(self, prompt: Prompt, params: SamplingParams, reuse_prefix: bool) -> Completion:
        async with aclosing(self._chunks(prompt, params, reuse_prefix)) as chunks:
            async for _, completion in chunks:
                if completion is not None:
                    return completion
        raise AssertionError("an answer has an end")

    async def _chunks(
        self, prompt: Prompt, params: SamplingParams, reuse_prefix: bool
    ) -> AsyncGenerator[tuple[Chunk, Completion | None], None]:
        """The pieces of an answer, and with the last the whole of it."""

        def prepared() -> Generation:
            return self.model.prepare(self.model.encode(prompt), params, reuse_prefix)

        generation = await asyncio.to_thread(prepared)
        mailbox = _Mailbox(asyncio.get_running_loop())
        try:
            generation.thread.submit(generation.sequence, mailbox)
            while generation.completion is None:
                chunk = generation.take(await mailbox.events.get())
                yield chunk, generation.completion
        finally:
            generation.cancel_soon()  # (of one that has ended nothing is left to cancel)


class _Mailbox:
    """Brings the events of a sequence from the engine's thread into the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self._loop = loop

    def put(self, event: Event) -> None:
        with suppress(RuntimeError):  # the loop is closed: no task waits for it
            self._loop.call_soon_threadsafe(self.events.put_nowait, event)
