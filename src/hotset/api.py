"""The Python API: `hotset.load(...)` returns a Model that generates, chats and scores.

Several threads may use one Model: its engine runs in its own thread, whose steps serve all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import numpy as np

from hotset.backends.base import AdapterScales, Backend, StepStats
from hotset.comparison import compare_chunks
from hotset.engine import taps as engine_taps
from hotset.engine.driver import EngineThread
from hotset.engine.engine import Engine
from hotset.engine.images import ImagePrompt
from hotset.engine.log_likelihood import all_logits
from hotset.engine.perplexity import PerplexityResult
from hotset.engine.sampler import SamplingParams, takes_sampling
from hotset.errors import InvalidRequestError, OutOfMemoryError
from hotset.generation import (
    ChatMessage,
    ChatOptions,
    Chunk,
    Completion,
    Generation,
    Messages,
    Prompt,
    checked_messages,
    sampling_params,
    template_variables,
)
from hotset.loader.adapters import open_adapters
from hotset.loader.build import build, measured_predictor, open_model, plan_model
from hotset.loader.decide import Decided, Opened
from hotset.loader.images import with_images
from hotset.loader.prompt_cache import open_prompt_cache
from hotset.loader.reserved import reserved_for
from hotset.loader.speculate import open_speculator
from hotset.outputs import Reading, ToolUse, output_of
from hotset.parameters import whole_number
from hotset.sampling_parameters import Sampling
from hotset.settings import LoadSettings, ModelPath, taking
from hotset.sparsity.taps import whole
from hotset.text.image_text import PromptTokens, without_images
from hotset.text.messages import BY_LAST_ROLE

if TYPE_CHECKING:
    from hotset.engine.embedding import Embedder, TextVectors
    from hotset.engine.reranking import RankedDocument
    from hotset.engine.sequence import Owner
    from hotset.placement.build import DeviceMemory
    from hotset.placement.table import Placement
    from hotset.sparsity.stats import PredictorQuality, StatsSummary, StepCosts
    from hotset.text.chat import ChatTemplate
    from hotset.text.constraint import Grammars
    from hotset.text.output import OutputForm
    from hotset.text.tokenizer import Tokenizer


@taking(LoadSettings)
def load(model: ModelPath, settings: LoadSettings) -> Model:
    """Load a model: a GGUF file, a name (stored, created, catalogue), or "hf:owner/repository[:file]".

    The options are a LoadSettings, or its fields as keywords. Raises ModelNotFoundError, DownloadError,
    FormatError, UnsupportedModelError, OutOfMemoryError (with the smallest sufficient budget, if one is too
    small), DeviceError for a missing device, and InvalidRequestError for an invalid setting, or a mode that
    the model does not have.
    """
    return load_opened(open_model(model, settings))


def load_opened(opened: Opened) -> Model:
    """Load a model that `open_model` opened. Its `close`, or a failure here, closes the file too."""
    with ExitStack() as undone:
        undone.callback(opened.gguf.close)
        opened = with_images(opened)
        if opened.images is not None:
            undone.callback(opened.images.close)
        decided = plan_model(opened, reserved=reserved_for(opened))
        undone.callback(decided.weights.close)
        decided, backend = build(decided)
        undone.callback(backend.close)
        model = Model(decided, backend)
        undone.pop_all()
    return model


@taking(LoadSettings)
def plan(model: ModelPath, settings: LoadSettings) -> Placement | None:
    """Return where `load` would place a model with its settings; None if only the CPU computes.

    Nothing is loaded on a device. Missing files of the model are built as in `load`; the errors are the same.
    """
    with open_model(model, settings) as opened, with_images(opened) as seeing:
        decided = plan_model(seeing, reserved=reserved_for(seeing))
        decided.weights.close()
        return decided.placement


class Model:
    """A loaded model, from `load`. Use it as a context manager, or call `close`.

    decided: how it was loaded, with its settings. config: the architecture's parameters. backend, engine,
    thread: the parts that run it. cost: bytes and FLOPs of its tokens. n_ctx: tokens of one conversation.
    kv_type: the type of the KV cache. adapters: its LoRA adapters. images: the reader of its images; None:
    it reads only text.
    sparsity: which neurons are computed, and why. notes: messages about files that were built or opened for
    it. placement: the contents of each device; None if only the CPU computes. ram, stored: the split of a
    memory budget, and the weights that are read under it; None if files are mapped.

    The sampling parameters of `generate`, `stream` and `chat` are the fields of SamplingParams.
    """

    def __init__(self, decided: Decided, backend: Backend) -> None:
        self.decided = decided
        self.gguf, self.weights, self.config = decided.gguf, decided.weights, decided.config
        self.graph, self.cost = decided.graph, decided.cost
        self.backend = backend
        self.n_ctx, self.kv_type, self.images = decided.n_ctx, decided.settings.kv_type, decided.images
        self.sparsity, self.notes = decided.choice, decided.notes
        self.placement, self.ram, self.stored = decided.placement, decided.ram, decided.stored
        speculator = open_speculator(decided, backend, lambda: self.tokenizer)
        self.engine = Engine(
            backend, self.n_ctx, decided.settings.max_sequences, speculator=speculator,
            traits=decided.traits, prompt_cache=open_prompt_cache(decided, backend, speculator),
        )  # fmt: skip
        self.engine.collect_stats = self.config.leaves_out or self.graph.has_thresholds
        self.thread = EngineThread(self.engine)
        self.adapters = open_adapters(decided, self.thread)
        self._closed = False

    # ---- text ----

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the file. Raises TokenizerError if it is unusable."""
        from hotset.text.tokenizer import load_tokenizer

        return load_tokenizer(self.gguf.metadata)

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The chat template of the file. Raises TokenizerError if it is unusable."""
        from hotset.text.chat import chat_template
        from hotset.text.renderer import Renderer

        self._check_open()
        renderer = Renderer()
        renderer.start()  # while the tokenizer is built
        try:
            return chat_template(self.gguf.metadata, self.tokenizer, renderer=renderer)
        except BaseException:
            renderer.close()
            raise

    @cached_property
    def output_form(self) -> OutputForm:
        """The form of reasoning and function calls in the model's output, from its chat template."""
        from hotset.text.output import OutputForm

        return OutputForm.of(self.chat_template.source, self.tokenizer)

    @cached_property
    def grammars(self) -> Grammars:
        """The grammars that answers can be constrained to. Their vocabulary is built with the first one."""
        from hotset.text.constraint import Grammars

        return Grammars(self.tokenizer)

    def encode_chat(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        variables: Mapping[str, Any] | None = None,
        stop: threading.Event | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation up to the start of the answer, by the file's template.

        add_generation_prompt, continue_final_message: text/messages.py, Opening. variables: other variables
        of the template, such as enable_thinking; InvalidRequestError for its own. With images, the result is
        a PromptTokens (text/image_text.py), which `prepare` takes. stop: ends their decoding with
        StepCancelledError once it is set. Raises as `encode`.
        """
        from hotset.text.messages import Opening, encoded

        self.engine.require_logits()
        checked, more = checked_messages(messages), template_variables(variables or {})
        images = None if self.images is None else self.images.until(stop)
        if images is None:
            checked = without_images(checked, self.decided.blind)
        opening = Opening(add_generation_prompt, continue_final_message)
        return encoded(
            self.chat_template, self.tokenizer, self.n_ctx, checked, tools, opening, images, **more
        )

    def encode(self, prompt: Prompt, *, parse_special: bool = False) -> list[int]:
        """Return the token ids of a prompt of `generate`. Raises InvalidRequestError, ContextLengthError."""
        if isinstance(prompt, str):
            return self.tokenizer.encode_prompt(prompt, parse_special, most=self.n_ctx)
        if isinstance(prompt, PromptTokens) and self.images is not None:
            return prompt
        return self.engine.checked(list(prompt) if isinstance(prompt, Iterator) else prompt)

    # ---- generation ----

    @takes_sampling
    def generate(
        self, prompt: Prompt, *, reuse_prefix: bool = True, **params: Unpack[Sampling]
    ) -> Completion:
        """Return the answer to a prompt: a text (in which special tokens are plain text), or token ids.

        reuse_prefix: False computes the whole prompt even if its beginning is in the cache.
        The other keywords are the fields of SamplingParams, which `help(hotset.SamplingParams)` explains.
        Raises InvalidRequestError for a bad parameter, ContextLengthError for a prompt that does not fit.
        """
        return self.generate_many([prompt], reuse_prefix=reuse_prefix, **params)[0]

    @takes_sampling
    def generate_many(
        self, prompts: Sequence[Prompt], *, reuse_prefix: bool = True, **params: Unpack[Sampling]
    ) -> list[Completion]:
        """Answer several prompts in one batch; each answer is the same as from `generate`."""
        checked = sampling_params(params, self.decided.sampling)
        generations = [self.prepare(self.encode(prompt), checked, reuse_prefix) for prompt in prompts]
        with self._explained(), ExitStack() as running:
            for generation in generations:
                running.enter_context(generation)
            return [generation.finish() for generation in generations]

    @takes_sampling
    def stream(
        self, prompt: Prompt, *, reuse_prefix: bool = True, **params: Unpack[Sampling]
    ) -> Iterator[Chunk]:
        """Yield the answer in pieces, a chunk per token; leaving the loop cancels the rest.

        The call checks the prompt and the parameters, as in `generate`; the work starts with the first chunk.
        """
        checked = sampling_params(params, self.decided.sampling)
        return self._stream(self.prepare(self.encode(prompt), checked, reuse_prefix))

    @overload
    def chat(
        self, messages: Messages, *, stream: Literal[False] = ..., **options: Unpack[ChatOptions]
    ) -> ChatMessage: ...

    @overload
    def chat(
        self, messages: Messages, *, stream: Literal[True], **options: Unpack[ChatOptions]
    ) -> Iterator[Chunk]: ...

    @takes_sampling
    def chat(
        self,
        messages: Messages,
        *,
        stream: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] = "auto",
        parallel_tool_calls: bool = True,
        variables: Mapping[str, Any] | None = None,
        **params: Unpack[Sampling],
    ) -> ChatMessage | Iterator[Chunk]:
        """Return the next message of a conversation; a last message of the assistant is continued.

        messages: in OpenAI's form, [{"role": "user", "content": "Hello"}, ...]. A content may be a list with
        images: {"type": "image", "image": X}, X a path, bytes, a data URL or an image of Pillow.
        stream: return chunks instead of the whole message. tools: functions that the model may call, in
        OpenAI's form; its calls are the message's `tool_calls`. tool_choice: "auto", "none", "required", or
        one function, {"name": ...}. parallel_tool_calls: False ends an answer with its first call.
        variables: for the chat template, such as enable_thinking. Sampling: as in `generate`.
        """
        use = ToolUse(tools or (), tool_choice, parallel_tool_calls)
        generation = self.prepare_chat(messages, use, variables, **params)
        if stream:
            return self._stream(generation)
        with self._explained(), generation:
            generation.finish()
        return generation.message

    def prepare_chat(
        self,
        messages: Messages,
        use: ToolUse,
        variables: Mapping[str, Any] | None = None,
        **params: Unpack[Sampling],
    ) -> Generation:
        """Return an answer to a conversation that has not started. Raises as `encode_chat` and `prepare`."""
        checked = checked_messages(messages)
        sampling = sampling_params(params, self.decided.sampling)
        output = output_of(self.output_form, sampling, checked, BY_LAST_ROLE, use, variables or {})
        tokens = self.encode_chat(checked, output.tools, variables=output.variables)
        return self.prepare(tokens, output.params, reading=output.reading(tokens))

    def prepare(
        self,
        tokens: list[int],
        params: SamplingParams,
        reuse_prefix: bool = True,
        *,
        reading: Reading | None = None,
        owner: Owner | None = None,
        adapters: AdapterScales | None = None,
    ) -> Generation:
        """Return an answer that has not started; the caller submits its sequence and takes the events.

        reading: how its text is parsed (outputs.py); None: as plain text. owner: the client that it runs for.
        adapters: from `adapters.resolve`; None: the default adapters. Raises ContextLengthError;
        InvalidRequestError for a token or a bias outside the vocabulary, and for an unusable schema or
        grammar; HotsetError if a needed package is not installed.
        """
        self._check_open()
        if reading is None:
            limited = params.reasoning_budget is not None
            reading = Reading.of_text(self.output_form, params, tokens) if limited else Reading()
        form = (*params.form, reading.around, reading.begun) if params.form else None
        prompt: list[int] | ImagePrompt = tokens
        if isinstance(tokens, PromptTokens) and self.images is not None:
            self.engine.require_room(len(tokens))  # before anything is encoded
            prompt = self.images.prompt(tokens)
        sequence = self.engine.prepare(
            prompt, params, stop_ids=self.tokenizer.stop_ids, reuse_prefix=reuse_prefix,
            constraint=self.grammars.constraint(*form) if form else None,
            breakers=self.tokenizer.sequences_with(params.breakers), owner=owner, adapters=adapters,
        )  # fmt: skip
        return Generation(self.thread, sequence, params, self.tokenizer, self.summary, reading)

    def _stream(self, generation: Generation) -> Iterator[Chunk]:
        with self._explained(), generation:
            yield from generation.chunks()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Add a smaller plan to the message if a device runs out of memory."""
        try:
            yield
        except OutOfMemoryError as error:
            if self.placement is None:
                raise
            from hotset.placement.build import smaller_plan

            raise OutOfMemoryError(f"{error}; {smaller_plan(self.placement)}") from None

    # ---- scores ----

    def logits(self, tokens: Prompt, *, reuse_prefix: bool = True) -> np.ndarray:
        """Return the logits after each token: float32 [n_tokens, n_vocab]. Text is encoded like a prompt."""
        ids = self.engine.fitting(self.encode(tokens))
        with self._explained():
            return all_logits(self.thread, ids, self._check_open, reuse_prefix=reuse_prefix)

    @cached_property
    def embedder(self) -> Embedder:
        """The source of vectors and scores of texts, which `embed` and `rerank` use."""
        from hotset.engine.embedding import Embedder

        return Embedder(self.engine, self.graph, self.weights, self.gguf.metadata)

    def embed(
        self, texts: Sequence[Prompt], *, pooling: str | None = None, dimensions: int | None = None
    ) -> np.ndarray:
        """Return a vector of length 1 for each text or list of token ids: float32 [n_texts, width].

        pooling: "mean" of the hidden states, "cls" (the first token's), "last", or "rank": a classifier's
        score for each label. The default is the file's pooling, or the mean.
        dimensions: keep only the first values. Raises ContextLengthError for a text that does not fit.
        """
        if pooling == "none":
            raise InvalidRequestError("without pooling a text has a vector for each token; use embed_tokens")
        return self._embedded(texts, pooling, dimensions).vectors()

    def embed_tokens(self, texts: Sequence[Prompt], *, dimensions: int | None = None) -> list[np.ndarray]:
        """Return unnormalised vectors per token: float32 [n_tokens, width] for each text. Else as `embed`."""
        return self._embedded(texts, "none", dimensions).tokens()

    def _embedded(self, texts: Sequence[Prompt], *how: Any) -> TextVectors:
        if isinstance(texts, str):
            raise InvalidRequestError('embed takes a list of texts, such as ["Hello"]')
        self._check_open()
        with self._explained():
            found = self.embedder.vectors([self.encode(text) for text in texts], *how)
            return found.computed(self.thread)

    def rerank(
        self, query: str, documents: Sequence[str], *, top_n: int | None = None
    ) -> list[RankedDocument]:
        """Return documents by how well they answer a query, best first, with scores. top_n: only the best.

        Scores are the model's own: probabilities for Qwen3, any numbers for others. Raises
        UnsupportedModelError for a model that is not a reranker, and the errors of `embed`.
        """
        from hotset.engine.reranking import ranked, reranking_tokens

        self._check_open()
        self.embedder.check_ranks()
        most = None if top_n is None else whole_number("top_n", top_n, 1)
        texts = reranking_tokens(self.gguf.metadata, self.tokenizer, self.engine.n_ctx, query, documents)
        with self._explained():
            scores = self.embedder.scores(texts).computed(self.thread).vectors()
        return ranked(scores, documents, most)

    def perplexity(self, text: str, *, n_ctx: int = 512, chunks: int | None = None) -> PerplexityResult:
        """Return the perplexity of a text, measured like llama-perplexity (see engine/perplexity.py)."""
        *_, result = self.perplexity_chunks(text, n_ctx=n_ctx, chunks=chunks)
        return result

    def perplexity_chunks(
        self, text: str, *, n_ctx: int = 512, chunks: int | None = None
    ) -> Iterator[PerplexityResult]:
        """Yield the running result of `perplexity` after each chunk."""
        for (result,) in compare_chunks([self], text, n_ctx=n_ctx, chunks=chunks):
            yield result

    # ---- inspection ----

    def taps(self, tokens: Prompt, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Return intermediate values of a text, by name: float32 [n_tokens, width].

        names: values of the graph (model/decoder.py lists them), such as "blk.0.ffn_act", one per neuron.
        Raises InvalidRequestError for an unknown name, and ContextLengthError or OutOfMemoryError if the text
        does not fit in the context or in the remaining memory.
        """
        return whole(self.tap_steps, self.encode(tokens), names)

    def tap_steps(self, tokens: Prompt, names: Sequence[str]) -> Iterator[dict[str, np.ndarray]]:
        """Yield the result of `taps` step by step, so that a long text's values need not fit in memory."""
        ids = np.array(self.engine.fitting(self.encode(tokens)), np.int32)
        return engine_taps.steps(self.thread, self.graph, ids, names)

    def summary(self, steps: Sequence[StepStats]) -> StatsSummary | None:
        """Return statistics of these steps of the backend, mean per token; None without any step."""
        return self._step_costs.summary(steps) if steps else None

    @cached_property
    def _step_costs(self) -> StepCosts:
        from hotset.sparsity.stats import StepCosts

        return StepCosts(self.graph, self.weights.tensors)

    def measure_predictor(self, tokens: Prompt) -> list[PredictorQuality]:
        """Return recall and precision of the predictor, by layer, for the neurons that fire on a text.

        The text runs once more, with all neurons. Raises InvalidRequestError without a predictor.
        """
        ids = np.array(self.encode(tokens), np.int32)
        self._check_open()
        return measured_predictor(self.decided, self.backend, ids)

    # ---- the rest ----

    def device_memory(self) -> list[DeviceMemory]:
        """Return the planned memory of each device, and the memory in use there now."""
        if self.placement is None:
            return []
        from hotset.placement.build import device_memory

        return device_memory(self.placement, self.backend)

    @property
    def bytes_per_token(self) -> float:
        """Bytes that decoding the first token reads; `cost` gives the bytes at any depth."""
        return self.cost.bytes_per_token(0, self.kv_type)

    def close(self) -> None:
        """End what still runs, and free threads, processes, cache and file; safe to call twice."""
        self._closed = True
        self.thread.close()
        if "chat_template" in self.__dict__:  # (a cached property)
            self.chat_template.close()
        self.engine.close()
        if self.images is not None:
            self.images.close()
        self.backend.close()
        self.weights.close()
        self.gguf.close()

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidRequestError("the model has been closed; load it again")

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<hotset.Model {self.gguf.path.name}, {self.backend.name}, n_ctx {self.n_ctx}>"
