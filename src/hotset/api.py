"""The Python API: `hotset.load(...)` gives a Model that generates, chats and scores.

Several threads may use one Model: the engine is driven by a thread of its own, whose steps serve everyone.
"""

from __future__ import annotations

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
from hotset.engine.perplexity import PerplexityResult
from hotset.engine.sampler import Sampling, SamplingParams, takes_sampling
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
from hotset.loader.build import build, open_measuring, open_model, plan_model
from hotset.loader.decide import Decided, Opened
from hotset.loader.prompt_cache import open_prompt_cache
from hotset.loader.reserved import reserved_for
from hotset.loader.speculate import open_speculator
from hotset.outputs import Reading, ToolUse, output_of
from hotset.parameters import whole_number
from hotset.settings import LoadSettings, ModelPath, taking
from hotset.sparsity.taps import of_backend, whole
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
    """Opens a model: a GGUF file, a name (stored, created, catalogue), or "hf:owner/repository[:file]".

    How is said by LoadSettings, or by keywords, which are its fields; it describes them. Raises
    ModelNotFoundError, DownloadError, FormatError, UnsupportedModelError, OutOfMemoryError (with the smallest
    budget that works, where a budget is too small), DeviceError for a device that is asked for and not there,
    and InvalidRequestError for a setting that means nothing, or a mode that the model does not have.
    """
    return load_opened(open_model(model, settings))


def load_opened(opened: Opened) -> Model:
    """As `load`, of a file that `open_model` gave: its `close` closes that too, and so does a failure."""
    with ExitStack() as undone:
        undone.callback(opened.gguf.close)
        decided = plan_model(opened, reserved=reserved_for(opened))
        undone.callback(decided.weights.close)
        decided, backend = build(decided)
        undone.callback(backend.close)
        model = Model(decided, backend)
        undone.pop_all()
    return model


@taking(LoadSettings)
def plan(model: ModelPath, settings: LoadSettings) -> Placement | None:
    """What `load` would put where with these settings, which are its own; None where the CPU computes alone.

    Nothing is loaded on a device. What the model lacks is built as in `load`, whose errors these are.
    """
    with open_model(model, settings) as opened:
        decided = plan_model(opened, reserved=reserved_for(opened))
        decided.weights.close()
        return decided.placement


class Model:
    """A loaded model; made by `load`. Use it as a context manager, or call `close`.

    decided: how it was loaded, with its settings. config: facts of the architecture. backend, engine, thread:
    what runs it. cost: bytes and FLOPs of its tokens. n_ctx: tokens of one conversation. kv_type: how keys
    and values are stored. adapters: those (LoRA) that it has.
    sparsity: which neurons are computed, and why. notes: what was built or opened for it, a message each.
    placement: what is on which device; None where the CPU computes alone. ram, stored: what of memory is for
    what under a budget, and the weights that are read under it; None where files are mapped.

    Sampling parameters of `generate`, `stream` and `chat` are the fields of SamplingParams.
    """

    def __init__(self, decided: Decided, backend: Backend) -> None:
        self.decided = decided
        self.gguf, self.weights, self.config = decided.gguf, decided.weights, decided.config
        self.graph, self.cost = decided.graph, decided.cost
        self.backend = backend
        self.n_ctx, self.kv_type = decided.n_ctx, decided.settings.kv_type
        self.sparsity, self.notes = decided.choice, decided.notes
        self.placement, self.ram, self.stored = decided.placement, decided.ram, decided.stored
        speculator = open_speculator(decided, backend, lambda: self.tokenizer)
        self.engine = Engine(
            backend, self.n_ctx, decided.settings.max_sequences,
            collect_stats=self.config.leaves_out or self.graph.has_thresholds,
            thresholded=decided.thresholded, flops=self.cost.flops_per_token,
            is_encoder=self.graph.is_encoder, speculator=speculator,
            prompt_cache=open_prompt_cache(decided, backend, speculator),
        )  # fmt: skip
        self.thread = EngineThread(self.engine)
        self.adapters = open_adapters(decided, self.thread)
        self._closed = False

    # ---- text ----

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the file. Raises TokenizerError where it cannot be used."""
        from hotset.text.tokenizer import load_tokenizer

        return load_tokenizer(self.gguf.metadata)

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The chat template of the file. Raises TokenizerError where it cannot be used."""
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
        """How the model writes reasoning and calls of functions, by its chat template."""
        from hotset.text.output import OutputForm

        return OutputForm.of(self.chat_template.source, self.tokenizer)

    @cached_property
    def grammars(self) -> Grammars:
        """What answers may have to follow. Its vocabulary is made with the first."""
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
    ) -> list[int]:
        """Token ids of a conversation up to where the answer begins, by the template of the file.

        add_generation_prompt, continue_final_message: text/messages.py, Opening. variables: whatever else the
        template knows, such as enable_thinking; InvalidRequestError for its own. Raises as `encode`.
        """
        from hotset.text.messages import Opening, encoded

        self.engine.require_logits()
        checked, more = checked_messages(messages), template_variables(variables or {})
        opening = Opening(add_generation_prompt, continue_final_message)
        return encoded(self.chat_template, self.tokenizer, self.n_ctx, checked, tools, opening, **more)

    def encode(self, prompt: Prompt, *, parse_special: bool = False) -> list[int]:
        """Token ids of a prompt of `generate`. Raises InvalidRequestError, ContextLengthError."""
        if isinstance(prompt, str):
            return self.tokenizer.encode_prompt(prompt, parse_special, most=self.n_ctx)
        return self.engine.checked(list(prompt) if isinstance(prompt, Iterator) else prompt)

    # ---- generation ----

    @takes_sampling
    def generate(
        self, prompt: Prompt, *, reuse_prefix: bool = True, **params: Unpack[Sampling]
    ) -> Completion:
        """The answer to a prompt: text (special tokens in it are plain text), or token ids taken as they are.

        reuse_prefix: False computes the prompt even where its beginning is in the cache.
        The other keywords are the fields of SamplingParams, which `help(hotset.SamplingParams)` explains.
        Raises InvalidRequestError for a bad parameter, ContextLengthError for a prompt that does not fit.
        """
        return self.generate_many([prompt], reuse_prefix=reuse_prefix, **params)[0]

    @takes_sampling
    def generate_many(
        self, prompts: Sequence[Prompt], *, reuse_prefix: bool = True, **params: Unpack[Sampling]
    ) -> list[Completion]:
        """Answers several prompts side by side; each answer is the same as from `generate`."""
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
        """The answer piece by piece, a chunk per token; leaving the loop cancels the rest.

        Prompt and parameters are checked at the call, as in `generate`; the work begins with the first chunk.
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

        messages: as OpenAI's clients write them, [{"role": "user", "content": "Hello"}, ...].
        stream: chunks instead of the whole message. tools: functions that the model may call, in OpenAI's
        shape; its calls are the message's `tool_calls`. tool_choice: "auto", "none", "required", or one
        function, {"name": ...}. parallel_tool_calls: False ends an answer with its first call.
        variables: for the chat template, such as enable_thinking. Sampling: as of `generate`.
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
        """Return an answer to a conversation that has not begun. Raises as `encode_chat` and `prepare` do."""
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
        """Return an answer that has not begun, for a caller that submits its sequence and takes the events.

        reading: how its text is read (outputs.py); None: as text. owner: for whom it runs. adapters: of
        `adapters.resolve`; None: the default adapters.
        Raises ContextLengthError, and InvalidRequestError for a token or a bias outside the vocabulary and
        for a schema or grammar that cannot be used; HotsetError where what it needs is not installed.
        """
        self._check_open()
        if reading is None:
            limited = params.reasoning_budget is not None
            reading = Reading.of_text(self.output_form, params, tokens) if limited else Reading()
        form = (*params.form, reading.around, reading.begun) if params.form else None
        sequence = self.engine.prepare(
            tokens, params, stop_ids=self.tokenizer.stop_ids, reuse_prefix=reuse_prefix,
            constraint=self.grammars.constraint(*form) if form else None,
            breakers=self.tokenizer.sequences_with(params.breakers), owner=owner, adapters=adapters,
        )  # fmt: skip
        return Generation(self.thread, sequence, params, self.tokenizer, self.summary, reading)

    def _stream(self, generation: Generation) -> Iterator[Chunk]:
        with self._explained(), generation:
            yield from generation.chunks()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Where a device runs out of memory the message offers a smaller plan."""
        try:
            yield
        except OutOfMemoryError as error:
            if self.placement is None:
                raise
            from hotset.placement.build import smaller_plan

            raise OutOfMemoryError(f"{error}; {smaller_plan(self.placement)}") from None

    # ---- scores ----

    def logits(self, tokens: Prompt, *, reuse_prefix: bool = True) -> np.ndarray:
        """The logits after each token: float32 [n_tokens, n_vocab]. Text is encoded as a prompt is."""
        ids = self.engine.fitting(self.encode(tokens))
        rows = np.empty((len(ids), self.backend.n_vocab), np.float32)

        def keep(position: int, logits: np.ndarray) -> None:
            rows[position : position + len(logits)] = logits

        with self._explained(), self.thread.exclusive() as engine:
            sequence = engine.enqueue(engine.prepare_score(ids, keep, reuse_prefix=reuse_prefix))
            try:
                while sequence.finish_reason is None:
                    engine.step()
                self._check_open()
            finally:
                engine.cancel(sequence)
        if sequence.error is not None:
            raise sequence.error
        return rows

    @cached_property
    def embedder(self) -> Embedder:
        """What makes vectors and scores of texts; `embed` and `rerank` use it."""
        from hotset.engine.embedding import Embedder

        return Embedder(self.engine, self.graph, self.weights, self.gguf.metadata)

    def embed(
        self, texts: Sequence[Prompt], *, pooling: str | None = None, dimensions: int | None = None
    ) -> np.ndarray:
        """Each text, or list of token ids, as a vector of length 1: float32 [n_texts, width].

        pooling: "mean" of the hidden states, "cls" (the first token's), "last", or "rank": a classifier's
        number for each label. By default what the file says, else the mean.
        dimensions: the first values alone. Raises ContextLengthError for a text that does not fit.
        """
        if pooling == "none":
            raise InvalidRequestError("without pooling a text has a vector for each token; use embed_tokens")
        return self._embedded(texts, pooling, dimensions).vectors()

    def embed_tokens(self, texts: Sequence[Prompt], *, dimensions: int | None = None) -> list[np.ndarray]:
        """A vector for each token, as it is: float32 [n_tokens, width] of each text. Otherwise as `embed`."""
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
        """Documents by how well they answer a query, the best first (top_n: only so many), with a score each.

        Scores are as the model gives them: probabilities of Qwen3's, any numbers of others'. Raises
        UnsupportedModelError for a model that is no reranker, and as `embed`.
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
        """Perplexity of a text by the protocol of llama-perplexity (see engine/perplexity.py)."""
        *_, result = self.perplexity_chunks(text, n_ctx=n_ctx, chunks=chunks)
        return result

    def perplexity_chunks(
        self, text: str, *, n_ctx: int = 512, chunks: int | None = None
    ) -> Iterator[PerplexityResult]:
        """As `perplexity`, yielding the running result after each chunk."""
        for (result,) in compare_chunks([self], text, n_ctx=n_ctx, chunks=chunks):
            yield result

    # ---- what happens inside ----

    def taps(self, tokens: Prompt, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Intermediate values of a text, by name: float32 [n_tokens, width].

        names: of values of the graph (model/decoder.py lists them), such as "blk.0.ffn_act", one per neuron.
        Raises InvalidRequestError for a name that the graph lacks, ContextLengthError and OutOfMemoryError
        where the text does not fit in the context or beside what runs.
        """
        return whole(self.tap_steps, self.encode(tokens), names)

    def tap_steps(self, tokens: Prompt, names: Sequence[str]) -> Iterator[dict[str, np.ndarray]]:
        """As `taps`, a step at a time: what a long text yields need not be in memory at once."""
        ids = np.array(self.engine.fitting(self.encode(tokens)), np.int32)
        return engine_taps.steps(self.thread, self.graph, ids, names)

    def summary(self, steps: Sequence[StepStats]) -> StatsSummary | None:
        """What these steps of the backend did, mean per token; None without any."""
        return self._step_costs.summary(steps) if steps else None

    @cached_property
    def _step_costs(self) -> StepCosts:
        from hotset.sparsity.stats import StepCosts

        return StepCosts(self.graph, self.weights.tensors)

    def measure_predictor(self, tokens: Prompt) -> list[PredictorQuality]:
        """Recall and precision of the predictor, layer by layer, against the neurons that fire on a text.

        The text runs once more, with all neurons. Raises InvalidRequestError where no predictor is in use.
        """
        from hotset.sparsity.stats import measure_predictor

        if self.sparsity.mode != "predicted":
            raise InvalidRequestError(
                f"there is no predictor to measure in the sparsity mode {self.sparsity.mode}; load the model "
                'with sparsity="predicted"'
            )
        ids = np.array(self.encode(tokens), np.int32)
        self._check_open()
        every = open_measuring(self.decided, self.backend)
        try:
            return measure_predictor(of_backend(every), self.graph, ids)
        finally:
            every.close()

    # ---- the rest ----

    def device_memory(self) -> list[DeviceMemory]:
        """What was planned of each device, and what is really used there now."""
        if self.placement is None:
            return []
        from hotset.placement.build import device_memory

        return device_memory(self.placement, self.backend)

    @property
    def bytes_per_token(self) -> float:
        """Bytes that decoding the first token reads; `cost` says how many at a depth."""
        return self.cost.bytes_per_token(0, self.kv_type)

    def close(self) -> None:
        """Ends what still runs and frees threads, processes, cache and file; safe to call twice."""
        self._closed = True
        self.thread.close()
        if "chat_template" in self.__dict__:  # (a cached property)
            self.chat_template.close()
        self.engine.close()
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
