"""The Python API: `hotset.load(...)` gives a Model that generates, chats and scores.

Several threads may use one Model: the engine is driven by a thread of its own, whose steps serve everyone.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, get_args, overload

import numpy as np

from hotset.backends.base import PAGE_SIZE, Backend, Batch, StepStats
from hotset.engine import perplexity as engine_perplexity
from hotset.engine.driver import EngineThread
from hotset.engine.engine import Engine
from hotset.engine.perplexity import PerplexityResult
from hotset.engine.sampler import SamplingParams
from hotset.errors import (
    ContextLengthError,
    DeviceError,
    HotsetError,
    InvalidRequestError,
    OutOfMemoryError,
    UnsupportedModelError,
)
from hotset.generation import (
    ChatMessage,
    Chunk,
    Completion,
    Generation,
    checked_messages,
    sampling_params,
)
from hotset.model.cost import KVType
from hotset.parameters import shown

if TYPE_CHECKING:
    from hotset.formats.gguf import GGUFFile
    from hotset.formats.overlay import Overlay
    from hotset.model.config import ModelConfig
    from hotset.model.cost import Cost
    from hotset.model.graph import Graph
    from hotset.placement.build import DeviceMemory
    from hotset.placement.table import Placement
    from hotset.reporter import Reporter
    from hotset.sparsity.modes import Choice
    from hotset.sparsity.profile import Profile
    from hotset.sparsity.stats import PredictorQuality, StatsSummary
    from hotset.text.chat import ChatTemplate
    from hotset.text.tokenizer import Tokenizer

BackendName = Literal["auto", "cpu", "reference"]
Prompt = str | Sequence[int]

DEFAULT_N_CTX = 4096
_SMALLEST_DEFAULT_N_CTX = 512
_TAPPED_BYTES = 64 << 20  # of intermediate values that one step hands out
_MEASURED_PAGES, _MEASURED_STEP = 8, 128  # of the cache beside the model in which a predictor is measured


def load(
    model: str | os.PathLike[str],
    *,
    n_ctx: int | None = None,
    n_threads: int | None = None,
    kv_type: KVType = "f16",
    backend: BackendName = "auto",
    device: str | Sequence[str] | None = None,
    vram_budget: float | None = None,
    n_gpu_layers: int | None = None,
    gpu_index: str | os.PathLike[str] | None = None,
    split_neurons: bool = True,
    reset_gpu_index: bool = False,
    activation: str | None = None,
    sparsity: str | None = None,
    predictor: str | None = None,
    profile: str | os.PathLike[str] | None = None,
    max_batch: int = 512,
    n_seqs: int = 1,
    max_sequences: int = 16,
    progress: Reporter | None = None,
) -> Model:
    """Opens a model: a GGUF file, a stored or catalogue name, or "hf:owner/repository[:file]".

    n_ctx: tokens of one conversation, prompt and answers; by default what the model was trained for, 4096 at
    most, and less (down to 512) where file and cache would not fit in the memory that is free.
    n_threads: of the cpu backend; None takes the physical cores that this process may use.
    kv_type: how keys and values are stored: "f16", or "q8_0" in about half the memory.
    backend: "auto" uses the CPU and, where there is one, an NVIDIA or AMD GPU; "cpu" the CPU alone;
    "reference" is the slow one in plain NumPy that the others are checked against.
    device: which GPU, as torch names it: "cuda:0", "mps", "xpu", several in the order of their layers, or
    "cpu", which stands in for a GPU and makes nothing faster. vram_budget: GiB of each device that weights,
    cache, workspace and context together stay within; by default what is free. n_gpu_layers: that many of the
    last layers are on the device; by default the planner decides (placement/solver.py). gpu_index: a file
    in PowerInfer's format that says which neurons are. split_neurons: False keeps the neurons of a layer
    together. reset_gpu_index: solves the placement again although it is known. Model.placement has the
    decision.
    activation: overrides the FFN activation that the file names.
    sparsity: which neurons are computed: "dense", "exact" or "predicted" (sparsity/modes.py); by default the
    fastest that keeps the file's meaning. predictor: "mlp", "sign", "svd", with their settings
    (sparsity/predictors.py); implies "predicted". profile: a file of `hotset profile`, whose neurons that
    nearly always fire are computed without prediction. What these need and the file lacks is built once, in
    files beside the model.
    max_batch: tokens computed in one step at most. n_seqs: full contexts that the cache holds at once; more
    sequences than that run together while they are shorter, max_sequences at most. progress: is told of what
    takes long.
    Raises ModelNotFoundError, DownloadError, FormatError, UnsupportedModelError, OutOfMemoryError (with the
    smallest budget that works, where a budget is too small), DeviceError for a device that is asked for and
    not there, and InvalidRequestError for a mode that the model does not have.
    """
    described = _describe(
        model,
        n_ctx=n_ctx,
        n_threads=n_threads,
        kv_type=kv_type,
        backend=backend,
        device=device,
        vram_budget=vram_budget,
        n_gpu_layers=n_gpu_layers,
        gpu_index=gpu_index,
        split_neurons=split_neurons,
        reset_gpu_index=reset_gpu_index,
        activation=activation,
        sparsity=sparsity,
        predictor=predictor,
        profile=profile,
        max_batch=max_batch,
        n_seqs=n_seqs,
        max_sequences=max_sequences,
        progress=progress,
    )
    try:
        if progress is not None and described.placement is not None:
            progress.planned(described.placement)
        name = "cpu" if backend == "auto" else backend
        try:
            return described.open(name, max_batch, kv_type, n_threads)
        except _CANNOT_PLACE as error:
            if described.placement is None or described.is_asked:
                raise
            described.placement = None
            _say_unplaced(error)
        return described.open(name, max_batch, kv_type, n_threads)
    except BaseException:
        described.close()
        raise


_CANNOT_PLACE = (DeviceError, OutOfMemoryError, UnsupportedModelError)


def _say_unplaced(error: HotsetError) -> None:
    """A GPU that nobody asked for and that cannot be used costs a line, and the CPU computes alone."""
    warnings.warn(f"the GPU is not used: {error} (--no-gpu: without this line)", stacklevel=4)


def plan(model: str | os.PathLike[str], **settings: Any) -> Placement | None:
    """What `load` would put where with these settings, which are its own; None where the CPU computes alone.

    Nothing is loaded on a device. Predictors and the down matrices by neuron are built where the model needs
    them, as in `load`, whose errors these are.
    """
    described = _describe(model, **settings)
    described.close()
    return described.placement


@dataclass
class _Described:
    """A model that is open, with all that was decided about it, before its backend is."""

    gguf: GGUFFile
    weights: Overlay
    config: ModelConfig
    choice: Choice
    graph: Graph
    cost: Cost
    n_ctx: int
    n_pages: int
    notes: list[str]
    placement: Placement | None
    is_asked: bool  # whether a device was asked for, so that it must be used
    max_sequences: int

    def open(self, backend: str, max_batch: int, kv_type: KVType, n_threads: int | None) -> Model:
        options: dict[str, Any] = {
            "n_pages": self.n_pages,
            "max_batch": max_batch,
            "kv_type": kv_type,
            "n_threads": n_threads,
            "sparse": self.choice.mode != "dense",
        }
        if self.placement is None:
            opened = _open_backend(backend, self.weights, self.graph, **options)
        else:
            from hotset.placement.build import open_placed

            opened = open_placed(self.placement, self.weights, self.graph, **options)
        try:
            self.weights.check()  # vectors and devices have copies of what was read
            return Model(
                self.gguf, self.weights, self.config, self.graph, self.cost, opened, self.n_ctx, kv_type,
                self.choice, self.notes, self.placement, self.max_sequences,
            )  # fmt: skip
        except BaseException:
            opened.close()
            raise

    def close(self) -> None:
        self.weights.close()
        self.gguf.close()


def _describe(
    model: str | os.PathLike[str],
    *,
    n_ctx: int | None = None,
    n_threads: int | None = None,
    kv_type: KVType = "f16",
    backend: BackendName = "auto",
    device: str | Sequence[str] | None = None,
    vram_budget: float | None = None,
    n_gpu_layers: int | None = None,
    gpu_index: str | os.PathLike[str] | None = None,
    split_neurons: bool = True,
    reset_gpu_index: bool = False,
    activation: str | None = None,
    sparsity: str | None = None,
    predictor: str | None = None,
    profile: str | os.PathLike[str] | None = None,
    max_batch: int = 512,
    n_seqs: int = 1,
    max_sequences: int = 16,
    progress: Reporter | None = None,
) -> _Described:
    """Opens the file and decides; the settings are those of `load`."""
    for name, value in (
        ("n_ctx", n_ctx),
        ("n_threads", n_threads),
        ("max_batch", max_batch),
        ("n_seqs", n_seqs),
        ("max_sequences", max_sequences),
    ):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise InvalidRequestError(f"{name} must be a whole number of at least 1, not {value!r}")
    if kv_type not in get_args(KVType):
        raise InvalidRequestError(f"kv_type must be one of {', '.join(get_args(KVType))}, not {kv_type!r}")
    if backend not in get_args(BackendName):
        raise InvalidRequestError(f"backend must be {' or '.join(get_args(BackendName))}, not {backend!r}")
    from hotset.placement.detect import Wishes, wanted_devices

    wishes = Wishes(
        (device,) if isinstance(device, str) else tuple(device) if device else None,
        vram_budget,
        n_gpu_layers,
        None if gpu_index is None else Path(gpu_index),
        reset_gpu_index,
        split_neurons,
    )
    if backend != "auto" and wishes.are_made:
        raise InvalidRequestError(
            f"the backend {backend} computes on the CPU alone; leave it out to use a device, or leave out "
            "what is asked of a device"
        )
    devices, unused = wanted_devices(wishes) if backend == "auto" else ((), None)
    if unused is not None:
        warnings.warn(unused, stacklevel=3)

    from hotset.formats.gguf import open_gguf
    from hotset.model.config import config_from_gguf
    from hotset.model.cost import Cost
    from hotset.model.decoder import describe
    from hotset.sparsity.modes import choose, prepare

    gguf = open_gguf(_resolve(model))
    weights: Overlay | None = None
    try:
        config = config_from_gguf(gguf, activation=activation)
        choice = choose(config, gguf.tensors, sparsity, predictor)
        counted = _profile(profile, choice, devices)
        prepared = prepare(
            gguf, config, choice, profile=counted if choice.mode == "predicted" else None, progress=progress
        )
        weights = prepared.weights
        graph = describe(config, weights.tensors, prepared.predictor)
        cost = Cost(graph, weights.tensors)
        kv_bytes = n_seqs * cost.kv_bytes_per_token(kv_type)
        n_ctx = _context(n_ctx, config, kv_bytes, gguf.nbytes)
        if (fitted := config.for_context(n_ctx)) is not config:  # a rotation for long contexts
            config, graph = fitted, describe(fitted, weights.tensors, prepared.predictor)
        n_pages = n_seqs * -(-n_ctx // PAGE_SIZE)
        placement = None
        if devices:
            from hotset.placement.planner import place

            try:
                placement = place(
                    gguf,
                    config,
                    weights,
                    graph,
                    choice.mode,
                    wishes,
                    devices,
                    n_pages=n_pages,
                    max_batch=max_batch,
                    kv_type=kv_type,
                    n_threads=n_threads,
                    profile=counted,
                    progress=progress,
                )
            except _CANNOT_PLACE as error:
                if wishes.are_made:
                    raise
                _say_unplaced(error)
        return _Described(
            gguf, weights, config, choice, graph, cost, n_ctx, n_pages, prepared.notes, placement,
            wishes.are_made, max_sequences,
        )  # fmt: skip
    except BaseException:
        if weights is not None:
            weights.close()
        gguf.close()
        raise


def _open_backend(
    name: str, weights: Overlay, graph: Graph, *, n_threads: int | None, sparse: bool, **options: Any
) -> Backend:
    if name == "cpu":
        from hotset.backends.cpu import CpuBackend

        return CpuBackend(weights, graph, n_threads=n_threads, sparse=sparse, **options)
    from hotset.backends.reference import ReferenceBackend

    return ReferenceBackend(weights, graph, sparse=sparse, **options)


def _profile(path: str | os.PathLike[str] | None, choice: Choice, devices: Sequence[str]) -> Profile | None:
    """The activation profile of a file; refused where nothing would use it."""
    if path is None:
        return None
    if choice.mode != "predicted" and (choice.mode == "dense" or not devices):
        raise InvalidRequestError(
            f"a profile serves predicted sparsity, and this model runs {choice.mode}; name a predictor too"
        )
    from hotset.sparsity.profile import Profile

    if not Path(path).is_file():
        raise InvalidRequestError(f"there is no profile {path}; make one with 'hotset profile'")
    return Profile.open(path)


def _resolve(model: str | os.PathLike[str]) -> Path:
    path = Path(model)
    if path.is_file():
        return path
    from hotset.storage import resolve

    return resolve(model)


def _context(asked: int | None, config: ModelConfig, kv_bytes: int, file_bytes: int) -> int:
    """The context length to use: what was asked, or the default that fits in the free memory.

    kv_bytes: bytes of the cache per token of the context.
    """
    import psutil

    n_ctx_train, n_ctx_max = config.n_ctx_train, config.n_ctx_max
    if asked is not None and n_ctx_max is not None and asked > n_ctx_max:
        raise ContextLengthError(
            f"a context of {asked} tokens is longer than the {n_ctx_max} positions that the model has; "
            f"lower n_ctx to {n_ctx_max}"
        )

    free = psutil.virtual_memory().available
    if asked is None:
        fitting = (free - file_bytes) // kv_bytes // PAGE_SIZE * PAGE_SIZE
        return min(n_ctx_train, DEFAULT_N_CTX, max(fitting, _SMALLEST_DEFAULT_N_CTX))
    if asked * kv_bytes > free:
        raise OutOfMemoryError(
            f"a context of {asked} tokens needs a cache of {asked * kv_bytes / 1e9:.1f} GB and "
            f"{free / 1e9:.1f} GB are free; lower n_ctx, or use kv_type q8_0"
        )
    if asked > n_ctx_train:
        warnings.warn(
            f"a context of {asked} tokens is longer than the {n_ctx_train} that the model was trained for",
            stacklevel=4,
        )
    return asked


class Model:
    """A loaded model; made by `load`. Use it as a context manager, or call `close`.

    config: facts of the architecture. backend, engine, thread: what runs it. cost: bytes and FLOPs of its
    tokens. n_ctx: tokens of one conversation. kv_type: how keys and values are stored.
    sparsity: which neurons are computed, and why. notes: what was built or opened for it, a sentence each.
    placement: what is on which device; None where the CPU computes alone.

    Sampling parameters of `generate`, `stream` and `chat` are the fields of SamplingParams.
    """

    def __init__(
        self,
        gguf: GGUFFile,
        weights: Overlay,
        config: ModelConfig,
        graph: Graph,
        cost: Cost,
        backend: Backend,
        n_ctx: int,
        kv_type: KVType,
        sparsity: Choice,
        notes: list[str],
        placement: Placement | None = None,
        max_sequences: int = 16,
    ) -> None:
        self.gguf = gguf
        self.weights = weights
        self.config = config
        self.graph = graph
        self.cost = cost
        self.backend = backend
        self.n_ctx = n_ctx
        self.kv_type = kv_type
        self.sparsity = sparsity
        self.notes = notes
        self.placement = placement
        self.engine = Engine(backend, n_ctx, max_sequences, collect_stats=config.has_zeros)
        self.thread = EngineThread(self.engine)
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

    @property
    def _bos_id(self) -> int | None:
        """The token that every text of this model begins with, if there is one."""
        return self.tokenizer.bos_id if self.tokenizer.add_bos else None

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any] | ChatMessage], tools: list[dict[str, Any]] | None = None
    ) -> list[int]:
        """Token ids of a conversation up to where the answer begins, by the template of the file."""
        checked = checked_messages(messages)
        text = self.chat_template.render(checked, add_generation_prompt=True, tools=tools)
        tokens = list(self.tokenizer.encode(text, add_special=False, parse_special=True))
        # Most templates write BOS themselves: it belongs there once.
        if self._bos_id is not None and tokens[:1] != [self._bos_id]:
            tokens.insert(0, self._bos_id)
        return tokens

    def _encode(self, prompt: Prompt) -> list[int]:
        """Checked token ids. Raises InvalidRequestError for what is no prompt."""
        if isinstance(prompt, str):
            return list(self.tokenizer.encode(prompt, add_special=True, parse_special=False))
        if isinstance(prompt, Iterator):
            prompt = list(prompt)
        return self.engine.checked(prompt)

    # ---- generation ----

    def generate(self, prompt: Prompt, *, reuse_prefix: bool = True, **params: Any) -> Completion:
        """The answer to a prompt: text (special tokens in it are plain text), or token ids taken as they are.

        reuse_prefix: False computes the prompt even where its beginning is in the cache.
        Raises InvalidRequestError for a bad parameter, ContextLengthError for a prompt that does not fit.
        """
        return self.generate_many([prompt], reuse_prefix=reuse_prefix, **params)[0]

    def generate_many(
        self, prompts: Sequence[Prompt], *, reuse_prefix: bool = True, **params: Any
    ) -> list[Completion]:
        """Answers several prompts side by side; each answer is the same as from `generate`."""
        checked = sampling_params(params)
        generations = [self._prepare(self._encode(prompt), checked, reuse_prefix) for prompt in prompts]
        with self._explained(), ExitStack() as running:
            for generation in generations:
                running.enter_context(generation)
            return [generation.finish() for generation in generations]

    def stream(self, prompt: Prompt, *, reuse_prefix: bool = True, **params: Any) -> Iterator[Chunk]:
        """The answer piece by piece, a chunk per token; leaving the loop cancels the rest.

        Prompt and parameters are checked at the call, as in `generate`; the work begins with the first chunk.
        """
        return self._stream(self._prepare(self._encode(prompt), sampling_params(params), reuse_prefix))

    @overload
    def chat(
        self,
        messages: Sequence[Mapping[str, Any] | ChatMessage],
        *,
        stream: Literal[False] = ...,
        **params: Any,
    ) -> ChatMessage: ...

    @overload
    def chat(
        self, messages: Sequence[Mapping[str, Any] | ChatMessage], *, stream: Literal[True], **params: Any
    ) -> Iterator[Chunk]: ...

    def chat(
        self,
        messages: Sequence[Mapping[str, Any] | ChatMessage],
        *,
        stream: bool = False,
        tools: list[dict[str, Any]] | None = None,
        **params: Any,
    ) -> ChatMessage | Iterator[Chunk]:
        """The next message of a conversation.

        messages: as OpenAI's clients write them, [{"role": "user", "content": "Hello"}, ...].
        stream: chunks instead of the whole message. tools: handed to the chat template.
        """
        tokens = self.encode_chat(messages, tools)
        if stream:
            return self.stream(tokens, **params)
        completion = self.generate(tokens, **params)
        return ChatMessage(completion.text, completion)

    def _prepare(self, tokens: list[int], params: SamplingParams, reuse_prefix: bool) -> Generation:
        self._check_open()
        sequence = self.engine.prepare(
            tokens, params, stop_ids=self.tokenizer.stop_ids, reuse_prefix=reuse_prefix
        )
        return Generation(self.thread, sequence, params, self.tokenizer, self.summary)

    def _stream(self, generation: Generation) -> Iterator[Chunk]:
        with self._explained(), generation:
            yield from generation.chunks()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Where a device runs out of memory the sentence offers a smaller plan."""
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
        ids = self._encode(tokens)
        self._check_fits(ids)
        rows = np.empty((len(ids), self.backend.n_vocab), np.float32)

        def keep(position: int, logits: np.ndarray) -> None:
            rows[position : position + len(logits)] = logits

        with self._explained(), self.thread.exclusive() as engine:
            sequence = engine.score(ids, keep, reuse_prefix=reuse_prefix)
            try:
                while sequence.finish_reason is None:
                    engine.step()
                self._check_open()
            finally:
                engine.cancel(sequence)
        if sequence.error is not None:
            raise sequence.error
        return rows

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
        parts = list(self.tap_steps(tokens, names))
        return {name: np.concatenate([part[name] for part in parts]) for name in names}

    def tap_steps(self, tokens: Prompt, names: Sequence[str]) -> Iterator[dict[str, np.ndarray]]:
        """As `taps`, a step at a time: what a long text yields need not be in memory at once."""
        ids = np.array(self._encode(tokens), np.int32)
        self._check_fits(ids)
        from hotset.model.graph import SelectOutputs

        widths = {value.name: value.width for value in self.graph.values}
        for name in names:
            if name not in widths:
                raise InvalidRequestError(f"the model has no value named {name!r} to tap")
        ops = list(self.graph.primitives)
        selection = next(i for i, op in enumerate(ops) if isinstance(op, SelectOutputs))
        outputs = any(op.out.name in names for op in ops[selection:])  # these have rows of output tokens only
        n_bytes = 4 * sum(widths[name] for name in names)
        n_step = max(1, min(self.backend.max_batch, _TAPPED_BYTES // max(n_bytes, 1)))
        pages: list[int] = []
        try:
            with self.thread.exclusive() as engine:
                pages = engine.take_pages(len(ids))
            table = np.array([pages], np.int32)
            for start in range(0, len(ids), n_step):
                n = min(n_step, len(ids) - start)
                every = np.arange(n, dtype=np.int32)
                batch = Batch(
                    tokens=ids[start : start + n],
                    positions=every + np.int32(start),
                    sequences=np.zeros(n, np.int32),
                    page_tables=table,
                    outputs=every if outputs else every[:0],
                    taps=tuple(names),
                )
                with self.thread.exclusive():
                    taps = dict(self.backend.step(batch).taps)
                yield taps
        finally:
            if pages and not self._closed:
                with self.thread.exclusive() as engine:
                    engine.pool.release(pages)

    def summary(self, steps: Sequence[StepStats]) -> StatsSummary | None:
        """What these steps of the backend did, mean per token; None without any."""
        if not steps:
            return None
        from hotset.sparsity.stats import StatsAccumulator

        statistics = StatsAccumulator(self.graph, self.weights.tensors)
        for step in steps:
            statistics.add(step)
        return statistics.summary()

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
        ids = np.array(self._encode(tokens), np.int32)
        self._check_open()
        every = _open_backend(
            "reference" if self.backend.name == "reference" else "cpu",
            self.weights,
            self.graph,
            n_pages=_MEASURED_PAGES,
            max_batch=_MEASURED_STEP,
            kv_type=self.kv_type,
            n_threads=self.backend.n_threads,
            sparse=False,
        )
        try:
            return measure_predictor(every, self.graph, ids)
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
        """Bytes that decoding the first token reads; `cost` tells how many at a depth."""
        return self.cost.bytes_per_token(0, self.kv_type)

    def close(self) -> None:
        """Ends what still runs and frees threads, processes, cache and file; safe to call twice."""
        self._closed = True
        self.thread.close()
        if "chat_template" in self.__dict__:  # (a cached property)
            self.chat_template.close()
        self.backend.close()
        self.weights.close()
        self.gguf.close()

    def _check_fits(self, ids: Sequence[int] | np.ndarray) -> None:
        if len(ids) > self.n_ctx:
            raise ContextLengthError(
                f"{len(ids)} tokens do not fit in the context of {self.n_ctx}; "
                "load the model with a larger n_ctx"
            )

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


def compare(
    models: Sequence[Model], text: str, *, n_ctx: int = 512, chunks: int | None = None
) -> tuple[PerplexityResult, ...]:
    """Perplexity of several models side by side, and how far each is from the first (`divergence`).

    The models are loaded by the caller, one file in several modes or several files, and must share their
    tokens; the first one's tokenizer cuts the text. Raises InvalidRequestError for different vocabularies.
    """
    *_, results = compare_chunks(models, text, n_ctx=n_ctx, chunks=chunks)
    return results


def compare_chunks(
    models: Sequence[Model], text: str, *, n_ctx: int = 512, chunks: int | None = None
) -> Iterator[tuple[PerplexityResult, ...]]:
    """As `compare`, yielding the running results after each chunk."""
    if not models:
        raise InvalidRequestError("there is no model to compare; give at least one")
    _check_same_tokens(models)
    if not isinstance(text, str):
        raise InvalidRequestError(f"perplexity is measured over a text, not {shown(text)}")
    results = engine_perplexity.compare_chunks(
        [model.engine for model in models],
        models[0].tokenizer.encode(text, add_special=True),
        n_ctx=n_ctx,
        chunks=chunks,
        bos_id=models[0]._bos_id,
        n_neurons=[sum(model.config.n_ff) for model in models],
    )
    while True:
        with ExitStack() as turns:
            for model in sorted(set(models), key=id):  # one order for all threads: no two wait for each other
                turns.enter_context(model.thread.exclusive())
            now = next(results, None)
        if now is None:
            return
        yield now


def _check_same_tokens(models: Sequence[Model]) -> None:
    """Raises InvalidRequestError where token i of one model is another token in the next."""
    spelled = [model.gguf.metadata.get("tokenizer.ggml.tokens") for model in models]
    for model, tokens in zip(models[1:], spelled[1:], strict=True):
        if tokens != spelled[0]:
            raise InvalidRequestError(
                f"{models[0].gguf.path.name} and {model.gguf.path.name} have different vocabularies, so that "
                "their predictions cannot be compared token by token; compare models that share a tokenizer"
            )
