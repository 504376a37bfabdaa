"""Decisions about loading a model, from settings, facts of its files and facts of the machine.

Nothing is opened, measured or written here: build.py gathers the facts and acts on the decisions.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from hotset.backends.base import BLOCK_SIZE
from hotset.backends.registry import Capabilities, capabilities_of
from hotset.backends.stage import BackendOptions
from hotset.engine.engine import ModelTraits, ThresholdedTokens
from hotset.errors import ContextLengthError, OutOfMemoryError
from hotset.formats.gguf import GGUFFile
from hotset.formats.overlay import Overlay
from hotset.images import ImageReader
from hotset.load_parameters import KVType
from hotset.model.config import ModelConfig
from hotset.model.cost import Cost, check_cache
from hotset.model.decoder import describe
from hotset.model.graph import Graph
from hotset.model.operations import Attention, Indexer
from hotset.model.predictor import Predictor
from hotset.offload.weight_store import Use, sizes_of
from hotset.settings import LoadSettings
from hotset.sparsity.modes import Choice
from hotset.sparsity.preparing import Prepared
from hotset.sparsity.thresholds import Thresholds
from hotset.units import human_size

if TYPE_CHECKING:
    from hotset.offload.weight_store import StoredWeights
    from hotset.placement.cards import Card
    from hotset.placement.channels import ChannelPlan, KindRates, TypeRates, Workload
    from hotset.placement.ram import RamPlan
    from hotset.placement.table import Placement

DEFAULT_N_CTX = 4096
"""The longest default context in tokens if `longest_default` sets a limit."""
SMALLEST_DEFAULT_N_CTX = 512
_KEPT_STATES = 8  # recurrent states of prefixes, at least, even if a state is large
_SHARE_OF_FREE = 0.9  # of free memory, for a model that is larger than it
_SHARE_OF_CONTEXT = 0.25  # of free memory, for the cache of a default context


@dataclass(frozen=True)
class Opened:
    """A model file and the facts of its architecture.

    devices: to place it on; empty: only the CPU computes. sampling: fields of SamplingParams that a created
    model has for requests that leave them out. images: the reader of its images; None: it gets no images,
    and blind says why.
    """

    settings: LoadSettings
    gguf: GGUFFile
    config: ModelConfig
    devices: tuple[str | Card, ...]
    sampling: Mapping[str, Any] = field(default_factory=dict)
    images: ImageReader | None = None
    blind: str = ""

    def with_images(self, images: ImageReader | None, blind: str = "") -> Opened:
        """Return the same file with the reader of its images, or with the reason why it has no reader."""
        config = self.config
        if images is not None:
            config = config.for_images(groups=images.grouped, n_layers=images.n_layers)
        return replace(self, config=config, images=images, blind=blind)

    def on_cpu(self) -> Opened:
        """Return the same file, for the CPU only."""
        return replace(self, devices=())

    def with_settings(self, **changes: Any) -> Opened:
        """Return the same file with changed settings, if they depend on its contents."""
        return replace(self, settings=replace(self.settings, **changes))

    @property
    def capabilities(self) -> Capabilities | None:
        """Return the capabilities of its devices; None without devices."""
        return capabilities_of(self.devices)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.images is not None:
            self.images.close()
        self.gguf.close()


class Reserved(NamedTuple):
    """Bytes of memory that a model's drafter, the adapters of its settings and its images take."""

    drafter: int = 0
    adapters: int = 0
    images: int = 0

    @property
    def total(self) -> int:
        return self.drafter + self.adapters + self.images


NOTHING_RESERVED = Reserved()


@dataclass(frozen=True)
class MachineFacts:
    """Memory of the machine, in bytes.

    free: for the model; inf: another model decides, and its files are mapped. program: of this process
    without the model. reserved: for its drafter and adapters.
    """

    free: float
    program: int
    reserved: Reserved = NOTHING_RESERVED


@dataclass(frozen=True)
class Decided:
    """All decisions about a model before its backend is built.

    n_states: slots of the cache for recurrent states, 0 without such layers.
    config: with the rotation for n_ctx. weights: the file with its sidecars. graph: of
    a step. n_ctx: tokens of one conversation. n_blocks: KV blocks of the cache. notes: a sentence for each
    file that was built or opened. placement: the layers of each device; None: only the CPU computes.
    predictor: in the graph. limit: bytes of memory for the model; None: its files are mapped. ram: the
    division of the limit. stored: the weights in memory under the limit, once the backend is built. channels:
    the expected gain of leaving out thresholded zeros. reserved: memory for its drafter and adapters.
    sampling, images, blind: see Opened.
    """

    settings: LoadSettings
    gguf: GGUFFile
    config: ModelConfig
    choice: Choice
    weights: Overlay
    graph: Graph
    cost: Cost
    n_ctx: int
    n_blocks: int
    n_states: int
    notes: list[str]
    limit: int | None = None
    placement: Placement | None = None
    predictor: Predictor | None = None
    ram: RamPlan | None = None
    stored: StoredWeights | None = None
    channels: ChannelPlan | None = None
    reserved: Reserved = NOTHING_RESERVED
    sampling: Mapping[str, Any] = field(default_factory=dict)
    images: ImageReader | None = None
    blind: str = ""

    @property
    def is_sparse(self) -> bool:
        return self.choice.mode != "dense"

    @property
    def capabilities(self) -> Capabilities | None:
        """Return the capabilities of its devices; None if only the CPU computes."""
        return None if self.placement is None else capabilities_of(self.placement.devices)

    @property
    def backend_options(self) -> BackendOptions:
        """Return the options to build its backend with."""
        settings, channels = self.settings, self.channels
        return BackendOptions(
            n_blocks=self.n_blocks, n_states=self.n_states, kv_type=settings.kv_type,
            max_batch=settings.max_batch if self.ram is None else self.ram.max_batch,
            n_threads=settings.n_threads, sparse=self.is_sparse,
            channel_rates={} if channels is None else channels.rates,
            whole=() if channels is None else channels.whole,
            progress=settings.progress,
        )  # fmt: skip

    @property
    def traits(self) -> ModelTraits:
        """Return the facts of the model that the engine needs."""
        return ModelTraits(
            thresholded=self._thresholded, flops=self.cost.flops_per_token, is_encoder=self.graph.is_encoder
        )

    @property
    def _thresholded(self) -> ThresholdedTokens:
        if not self.graph.has_thresholds:
            return "none"
        thresholds = self.choice.thresholds
        prompts = self.settings.sparse_prompts or (thresholds is not None and thresholds.prompts)
        return "all" if prompts else "answers"

    def with_predictor(self, choice: Choice, weights: Overlay, predictor: Predictor) -> Decided:
        """Return the same model with a predictor, whose tensors are among `weights`."""
        changed = self.changed(choice=choice, weights=weights, notes=[], predictor=predictor, images=None)
        return replace(changed, cost=Cost(changed.graph, weights.tensors))

    def with_thresholds(self, thresholds: Thresholds) -> Decided:
        """Return the same model with activation thresholds, in addition to its mode."""
        choice = replace(self.choice, mode="threshold", thresholds=thresholds)
        return self.changed(choice=choice, images=None)

    def changed(self, **changes: Any) -> Decided:
        """Return a copy with changed facts, and the graph that they describe."""
        new = replace(self, **changes)
        graph = describe(new.config, new.weights.tensors, new.predictor, new.choice.layer_thresholds)
        return replace(new, graph=graph)

    def with_context(self, n_ctx: int) -> Decided:
        """Return a copy with a context of n_ctx tokens, and the cache and rotation for it."""
        settings = self.settings
        if self.graph.is_encoder:  # computes a text in one step
            settings = replace(settings, max_batch=max(settings.max_batch, n_ctx))
        sizes: dict[str, Any] = {
            "n_ctx": n_ctx, "n_blocks": _n_blocks(settings, n_ctx), "settings": settings,
            "n_states": _n_states(settings, self.cost, n_ctx),
        }  # fmt: skip
        config = self.config.for_context(n_ctx)
        if config is self.config:
            return replace(self, **sizes)
        changed = self.changed(config=config, **sizes)
        return replace(changed, cost=Cost(changed.graph, self.weights.tensors))


def decide(opened: Opened, choice: Choice, prepared: Prepared, machine: MachineFacts) -> Decided:
    """Decide the graph of a step, its cost, its memory limit, and the length of the context.

    prepared: for the choice. Raises UnsupportedModelError, ContextLengthError, OutOfMemoryError.
    """
    settings, gguf, config, weights = opened.settings, opened.gguf, opened.config, prepared.weights
    if settings.n_ctx is not None:
        config = config.for_context(settings.n_ctx)
    graph = describe(config, weights.tensors, prepared.predictor, choice.layer_thresholds)
    for op in graph.ops:
        if isinstance(op, Indexer) or (isinstance(op, Attention) and op.source is None):
            check_cache(op, settings.kv_type)
    cost = Cost(graph, weights.tensors)
    free = machine.free - machine.reserved.total
    limit, device = None, opened.capabilities
    if device is None or device.ram_budget:
        limit = ram_limit(settings, gguf.nbytes, free, machine.reserved.total)
    file_bytes = gguf.nbytes if limit is None else 0
    n_ctx = context(settings, config, cost, free, file_bytes, longest_default(opened, graph, machine))
    decided = Decided(
        settings, gguf, config, choice, weights, graph, cost, n_ctx, 0, 0, prepared.notes, limit,
        predictor=prepared.predictor, reserved=machine.reserved, sampling=opened.sampling,
        images=opened.images, blind=opened.blind,
    )  # fmt: skip
    if limit is not None and settings.n_ctx is None and not opened.devices:
        n_ctx = _context_beside_rows(decided, limit - machine.program)
    return decided.with_context(n_ctx)


def ram_limit(settings: LoadSettings, n_bytes: int, free: float, reserved: int = 0) -> int | None:
    """Return the bytes that a model of n_bytes may have in memory; None: files are mapped.

    reserved: bytes of a budget for other uses. Raises OutOfMemoryError if they leave nothing.
    """
    if math.isinf(free):
        return None
    if (budget := settings.ram_gib) is not None:
        limit = int(budget * 2**30) - reserved
        if limit <= 0:
            raise OutOfMemoryError(
                f"the draft model, adapters and images need {human_size(reserved)} of the RAM budget, which "
                "leaves nothing for the model; raise the budget, or lower image_cache, or choose a smaller "
                "draft model"
            )
        return limit
    if settings.is_reference or n_bytes <= free:
        return None
    return int(free * _SHARE_OF_FREE)


def _context_beside_rows(decided: Decided, n_bytes: int) -> int:
    """Return a default context that leaves most of n_bytes to rows, and streams none; whole KV blocks."""
    settings, cost = decided.settings, decided.cost
    sizes = sizes_of(decided.graph, decided.weights.tensors, Use(sparse=decided.is_sparse))
    n_bytes -= _n_states(settings, cost, decided.n_ctx) * cost.state_bytes + sizes.resident + sizes.least
    kv_bytes = settings.n_seqs * cost.kv_bytes_per_token(settings.kv_type)
    if not kv_bytes:  # without attention a longer context costs nothing
        return decided.n_ctx
    fitting = int(n_bytes * _SHARE_OF_CONTEXT) // kv_bytes // BLOCK_SIZE * BLOCK_SIZE
    return min(decided.n_ctx, max(fitting, SMALLEST_DEFAULT_N_CTX))


def with_ram(decided: Decided, ram: RamPlan | None) -> Decided:
    """Return a copy with a plan of this machine's memory."""
    placement = decided.placement
    if ram is not None and placement is not None and (ram.streamed or ram.neurons < ram.all_rows):
        note = (
            "what has no room in this machine's memory is read from the disk, which no predicted time counts"
        )
        placement = replace(placement, notes=(*placement.notes, note))
    return replace(decided, ram=ram, placement=placement)


def cpu_layers(decided: Decided) -> Collection[int]:
    """Return the layers that the CPU computes as a whole."""
    from hotset.placement.table import CPU

    placement = decided.placement
    return range(decided.graph.n_layer) if placement is None else placement.layers_of(CPU)


def cpu_graph(decided: Decided) -> Graph:
    """Return the graph of the layers that the CPU computes as a whole."""
    layers, graph = cpu_layers(decided), decided.graph
    return Graph([op for op in graph.ops if op.layer in layers], graph.values)


def channel_work(decided: Decided) -> tuple[tuple[Workload, ...], tuple[Workload, ...]]:
    """Return the work to measure the CPU and the devices with before `with_channels`."""
    from hotset.placement.channels import Workload

    graph, layers, tensors = decided.graph, cpu_layers(decided), decided.weights.tensors
    # In an MoE model on a device the CPU computes the experts.
    mixed = [ffn for ffn in graph.ffns if ffn.route is not None and ffn.layer not in layers]
    of_cpu = Workload.of(Graph([*cpu_graph(decided).ops, *mixed], graph.values), tensors)
    return of_cpu, () if decided.placement is None else Workload.of(graph, tensors)


def with_channels(
    decided: Decided, thresholds: Thresholds, of_cpu: KindRates, of_devices: Sequence[TypeRates]
) -> Decided:
    """Add the expected gain of skipping thresholded zeros, and drop thresholds that skip nothing.

    of_devices: rates of each device of the placement; empty if none of its matrices has zeros.
    """
    from hotset.placement.channels import plan_channels, with_devices

    graph, tensors, placement = decided.graph, decided.weights.tensors, decided.placement
    copies = decided.ram is None  # a memory budget has no room for them
    plan = plan_channels(graph, tensors, thresholds, of_cpu, cpu_layers(decided), copies=copies)
    if placement is not None and of_devices:
        plan = with_devices(plan, graph, tensors, thresholds, placement, of_devices)
    return replace(with_applied(decided, thresholds, plan), channels=plan)


def with_applied(decided: Decided, thresholds: Thresholds, plan: ChannelPlan) -> Decided:
    """Drop the thresholds with which the plan skips nothing; a note says how many."""
    from hotset.placement.channels import applied

    places = () if decided.placement is None else decided.placement.layers
    split = [i for i, place in enumerate(places) if place.is_split]
    left = applied(plan, decided.graph, thresholds, stored=decided.ram is not None, split=split)
    if left.layers == thresholds.layers:
        return decided
    n, of = thresholds.n_nonzero - left.n_nonzero, thresholds.n_nonzero
    decided = decided.changed(choice=replace(decided.choice, thresholds=left))
    decided.notes.append(f"{n} of {of} thresholds are not applied, because they save no time on this machine")
    return decided


def longest_default(opened: Opened, graph: Graph, machine: MachineFacts) -> int | None:
    """Return the longest default context, or None without such a limit.

    The limit applies to encoders, on devices, with draft models, and if the free memory is unknown. Devices
    without a kernel for the model's indexer get the contexts that need none.
    """
    is_short = opened.devices or graph.is_encoder or machine.reserved.drafter or math.isinf(machine.free)
    indexing, device = opened.config.indexing, opened.capabilities
    if indexing is not None and device is not None and Indexer not in device.operations:
        return min(DEFAULT_N_CTX, indexing.n_ctx)
    return DEFAULT_N_CTX if is_short else None


def context(
    settings: LoadSettings, config: ModelConfig, cost: Cost, free: float, file_bytes: int, longest: int | None
) -> int:
    """Return the requested context length, or the default.

    The default is the model's own length, or `longest`. It is shorter if its cache takes more than a quarter
    of the free memory, or does not fit next to the file.
    """
    asked, n_ctx_max = settings.n_ctx, config.n_ctx_max
    if asked is None:
        limits = (config.n_ctx_train, longest, n_ctx_max)
        most = min(limit for limit in limits if limit is not None)
        room = min(free * _SHARE_OF_CONTEXT, free - file_bytes)
        if cache_bytes(settings, cost, most) <= room:
            return most
        lengths = range(BLOCK_SIZE, most + 1, BLOCK_SIZE)
        n_fitting = bisect_right(lengths, room, key=lambda n: cache_bytes(settings, cost, n))
        return min(most, max(n_fitting * BLOCK_SIZE, SMALLEST_DEFAULT_N_CTX))
    if n_ctx_max is not None and asked > n_ctx_max:
        raise ContextLengthError(
            f"a context of {asked} tokens is longer than the {n_ctx_max} positions that this model can be "
            f"computed for; lower n_ctx to {n_ctx_max}"
        )
    if (n_bytes := cache_bytes(settings, cost, asked)) > free:
        kv_bytes = cost.kv_bytes_per_token(settings.kv_type)
        types: tuple[KVType, ...] = () if settings.asks_for_a_device else ("q8_0", "q8_0/q4_0", "q4_0")
        smaller = next((name for name in types if cost.kv_bytes_per_token(name) < kv_bytes), None)
        raise OutOfMemoryError(
            f"a context of {asked} tokens needs a cache of {human_size(n_bytes)} and "
            f"{human_size(free)} are free; lower n_ctx" + (f", or use kv_type {smaller}" if smaller else "")
        )
    return asked


def cache_bytes(settings: LoadSettings, cost: Cost, n_ctx: int) -> int:
    """Return the bytes of keys, values and recurrent states."""
    kv_bytes = settings.n_seqs * n_ctx * cost.kv_bytes_per_token(settings.kv_type)
    return kv_bytes + _n_states(settings, cost, n_ctx) * cost.state_bytes


def _n_blocks(settings: LoadSettings, n_ctx: int) -> int:
    """Return the number of KV blocks of the cache."""
    return settings.n_seqs * -(-n_ctx // BLOCK_SIZE)


def _n_states(settings: LoadSettings, cost: Cost, n_ctx: int) -> int:
    """Return the number of slots for recurrent states: as many as fit in the memory of keys and values.

    There are enough for n_seqs sequences, their drafts and some prefixes, and no more than max_sequences and
    every block can use."""
    if not cost.state_bytes:
        return 0
    n_blocks = _n_blocks(settings, n_ctx)
    kv_bytes = n_blocks * BLOCK_SIZE * cost.kv_bytes_per_token(settings.kv_type)
    n_drafted = 0 if settings.drafter == "off" else settings.draft_max
    least = (2 + n_drafted) * settings.n_seqs + 2 + _KEPT_STATES
    most = (2 + n_drafted) * settings.max_sequences + 2 + n_blocks
    return max(least, min(most, kv_bytes // cost.state_bytes))
