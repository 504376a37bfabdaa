"""From a name to what computes it: a file is opened, what runs of it and where is decided, a backend built.

    opened = open_model("model.gguf", LoadSettings(n_ctx=512))
    decided = decide(opened)
    decided, backend = build(decided)

Whoever calls them closes what they gave.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from hotset.backends.base import PAGE_SIZE, Backend
from hotset.backends.cpu.backend import CpuBackend
from hotset.engine.engine import CutTokens
from hotset.errors import (
    ContextLengthError,
    DeviceError,
    HotsetError,
    InvalidRequestError,
    OutOfMemoryError,
    UnsupportedModelError,
)
from hotset.formats.gguf import GGUFFile, open_gguf
from hotset.formats.overlay import Overlay
from hotset.formats.source import WeightSource
from hotset.memory import free_memory
from hotset.model.config import ModelConfig, config_from_gguf
from hotset.model.cost import Cost
from hotset.model.decoder import describe
from hotset.model.graph import Graph
from hotset.model.operations import ExpertLinear, ExpertSum
from hotset.model.predictor import Predictor
from hotset.placement import detect
from hotset.settings import LoadSettings, ModelPath
from hotset.sparsity.modes import Choice, choose, open_channels, prepare
from hotset.sparsity.profile import Profile, profile_path
from hotset.sparsity.sidecar import fingerprint
from hotset.sparsity.thresholds import Thresholds, thresholds_path
from hotset.units import human_size

if TYPE_CHECKING:
    import numpy as np

    from hotset.offload.weight_store import StoredWeights
    from hotset.placement.cards import Card
    from hotset.placement.channels import ChannelPlan
    from hotset.placement.ram import RamPlan
    from hotset.placement.table import Placement

DEFAULT_N_CTX = 4096
_SMALLEST_DEFAULT_N_CTX = 512
_KEPT_STATES = 8  # of prefixes, at least, where a recurrent state is large
_SHARE_OF_FREE = 0.9  # that a model may have which is larger than what is free
_CANNOT_PLACE = (DeviceError, OutOfMemoryError, UnsupportedModelError)


@dataclass(frozen=True)
class Opened:
    """A model file and the facts of its architecture. devices: to place it on; none: the CPU alone."""

    settings: LoadSettings
    gguf: GGUFFile
    config: ModelConfig
    devices: tuple[str | Card, ...]

    def with_settings(self, **changes: Any) -> Opened:
        """The same file, to be loaded otherwise: where settings depend on what is in it."""
        return replace(self, settings=replace(self.settings, **changes))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.gguf.close()


@dataclass(frozen=True)
class Decided:
    """All that was decided about a model before anything of it computes.

    n_states: slots of the cache for recurrent states, 0 where there are none.
    config: with the rotation that serves n_ctx. weights: the file with what was built beside it. graph: of
    a step. n_ctx: tokens of one conversation; n_pages: of the cache. notes: what was built or opened, a
    sentence each. placement: what is on which device; None: the CPU computes alone. predictor: in the graph.
    ram: what of memory is for what, under a budget; None: files are mapped. stored: the weights that were
    read then, once it is built. channels: what leaving out the zeros of cutoffs is expected to gain.
    """

    settings: LoadSettings
    gguf: GGUFFile
    config: ModelConfig
    choice: Choice
    weights: Overlay
    graph: Graph
    cost: Cost
    n_ctx: int
    n_pages: int
    n_states: int
    notes: list[str]
    placement: Placement | None
    predictor: Predictor | None = None
    ram: RamPlan | None = None
    stored: StoredWeights | None = None
    channels: ChannelPlan | None = None

    @property
    def cut(self) -> CutTokens:
        """Which tokens lose their small values (engine.Engine)."""
        if not self.graph.is_cut:
            return "none"
        thresholds = self.choice.thresholds
        prompts = self.settings.sparse_prompts or (thresholds is not None and thresholds.prompts)
        return "all" if prompts else "answers"

    def with_predictor(self, choice: Choice, weights: Overlay, predictor: Predictor) -> Decided:
        """The same model, with a predictor whose tensors are among `weights`."""
        graph = describe(self.config, weights.tensors, predictor, choice.cutoffs)
        cost = Cost(graph, weights.tensors)
        return replace(
            self, choice=choice, weights=weights, graph=graph, cost=cost, notes=[], predictor=predictor
        )

    def with_thresholds(self, thresholds: Thresholds) -> Decided:
        """The same model with its small values cut, in addition to the mode that it has."""
        choice = replace(self.choice, mode="threshold", thresholds=thresholds)
        graph = describe(self.config, self.weights.tensors, self.predictor, choice.cutoffs)
        return replace(self, choice=choice, graph=graph)


def open_model(model: ModelPath, settings: LoadSettings) -> Opened:
    """Opens a model: a GGUF file, a stored or catalogue name, or "hf:owner/repository[:file]".

    Devices are looked for first: a model is not fetched for one that is not there. Raises DeviceError,
    ModelNotFoundError, DownloadError, FormatError, UnsupportedModelError.
    """
    devices, unused = detect.wanted_devices(settings) if settings.backend == "auto" else ((), None)
    if unused is not None:
        _warn(unused)
    path = Path(model)
    if not path.is_file():
        from hotset.storage import resolve

        path = resolve(model)
    gguf = open_gguf(path)
    try:
        config = config_from_gguf(gguf, activation=settings.activation)
    except BaseException:
        gguf.close()
        raise
    return Opened(settings, gguf, config, devices)


def decide(opened: Opened, *, mapped: bool = False) -> Decided:
    """Which neurons are computed and by which predictor, the graph of a step, what it costs, how long a
    context fits, and what goes on which device. What this needs and the file lacks is built, in files beside.

    Raises UnsupportedModelError, ContextLengthError, OutOfMemoryError (with the smallest budget that works,
    where a budget is too small), and InvalidRequestError for a mode that the model does not have. Nothing but
    the file is open then. mapped: its files are mapped however large they are, for who holds a part of it.
    """
    settings, gguf, config = opened.settings, opened.gguf, opened.config
    thresholds = _thresholds(opened)
    choice = choose(config, gguf.tensors, settings.sparsity, settings.predictor, thresholds)
    profile = _profile(settings, choice, opened.devices)
    counted = profile if choice.spec is not None else None
    prepared = prepare(gguf, config, choice, profile=counted, progress=settings.progress, by_channel=False)
    weights = prepared.weights
    try:
        graph = describe(config, weights.tensors, prepared.predictor, choice.cutoffs)
        cost = Cost(graph, weights.tensors)
        sparse = choice.mode != "dense"
        limit = None if mapped else _ram_limit(opened)
        free = math.inf if mapped else free_memory()  # whose part of it is another's to say
        n_ctx = _context(settings, config, cost, free, gguf.nbytes if limit is None else 0)
        if limit is not None and settings.n_ctx is None and not opened.devices:
            n_ctx = _context_beside_rows(limit, n_ctx, settings, cost, graph, weights, sparse=sparse)
        if (longer := config.for_context(n_ctx)) is not config:
            config, graph = longer, describe(longer, weights.tensors, prepared.predictor, choice.cutoffs)
        if thresholds is None and (unused := thresholds_path(gguf.path)).is_file():
            prepared.notes.append(f"{unused} has thresholds that are not used; --sparsity threshold does")
        decided = Decided(
            settings, gguf, config, choice, weights, graph, cost, n_ctx, _n_pages(settings, n_ctx),
            _n_states(settings, cost, n_ctx), prepared.notes, None, prepared.predictor,
        )  # fmt: skip
        return _with_channels(_shared_out(decided, opened.devices, profile, limit))
    except BaseException:
        weights.close()
        raise


def build(decided: Decided) -> tuple[Decided, Backend]:
    """The backend that computes what was decided; without the placement, where nobody asked for a device and
    that which was found cannot be used. `weights` and file stay the caller's."""
    placement, settings = decided.placement, decided.settings
    options: dict[str, Any] = {
        "n_pages": decided.n_pages,
        "max_batch": settings.max_batch if decided.ram is None else decided.ram.max_batch,
        "kv_type": settings.kv_type,
        "n_threads": settings.n_threads,
        "sparse": decided.choice.mode != "dense",
    }
    if placement is not None:
        from hotset.placement.build import open_placed

        if settings.progress is not None:
            settings.progress.planned(placement)
        try:
            stored = _stored(decided, options["sparse"])
            backend = open_placed(
                placement, stored or decided.weights, decided.graph, channels=decided.channels, **options
            )
            if stored is not None:
                stored.start_counting()
            return replace(decided, stored=stored), _ready(decided, backend)
        except _CANNOT_PLACE as error:
            if settings.asks_for_a_device:
                raise
            _say_unplaced(error)
            decided = replace(decided, placement=None)
            if decided.ram is not None:
                decided = replace(decided, ram=_plan_ram(decided, decided.ram.limit))
            decided = _with_channels(decided)
    name = "cpu" if settings.backend == "auto" else settings.backend
    if decided.channels is not None and name == "cpu":
        options |= {"channel_rates": decided.channels.rates, "whole": decided.channels.whole}
    if decided.n_states:
        options["n_states"] = decided.n_states
    if (stored := _stored(decided, options["sparse"])) is not None:
        backend = open_backend("cpu", stored, decided.graph, **options)
        return replace(decided, stored=stored), _ready(decided, backend)
    return decided, _ready(decided, open_backend(name, decided.weights, decided.graph, **options))


def _stored(decided: Decided, sparse: bool) -> StoredWeights | None:
    """The weights that the CPU computes with under a budget of memory; None without one."""
    if decided.ram is None:
        return None
    from hotset.placement.ram import open_stored

    return open_stored(
        decided.ram, decided.weights, decided.graph, sparse=sparse, needed=_needed(decided),
        placement=decided.placement,
    )  # fmt: skip


def _ready(decided: Decided, backend: Backend) -> Backend:
    """Vectors, and devices, have copies of what was read: of a file that was cut meanwhile they are wrong.
    What is read from now on are large matrices."""
    try:
        decided.weights.check()
        if decided.ram is None:
            decided.weights.ask_for_large_pages()
            _map_experts(decided)
    except BaseException:
        backend.close()
        raise
    return backend


def _map_experts(decided: Decided) -> None:
    """What a dense model reads is mapped by its first token. Experts come one by one: without this hundreds
    of tokens pay for the first use of their pages, up to a tenth of their time (docs/decisions/019)."""
    parts = [part for ffn in decided.graph.ffns for part in (ffn.gate, ffn.up, ffn.down)]
    experts = [part for part in parts if isinstance(part, ExpertLinear | ExpertSum)]
    for name in dict.fromkeys(name for part in experts for name in part.weights):
        decided.weights.map_cached(name)


def open_backend(
    name: str, weights: WeightSource, graph: Graph, *, n_threads: int | None, **options: Any
) -> Backend:
    """A backend without a device: "cpu" or "reference". options: of both."""
    if name == "cpu":
        return CpuBackend(weights, graph, n_threads=n_threads, **options)
    from hotset.backends.reference import ReferenceBackend

    return ReferenceBackend(weights, graph, **options)


def _ram_limit(opened: Opened) -> int | None:
    """Bytes that the model may have in memory; None: its files are mapped."""
    settings = opened.settings
    if settings.ram_budget is not None:
        return int(settings.ram_budget * 2**30)
    free = free_memory()
    if settings.backend == "reference" or opened.gguf.nbytes <= free:
        return None
    return int(free * _SHARE_OF_FREE)


def _context_beside_rows(
    limit: int,
    n_ctx: int,
    settings: LoadSettings,
    cost: Cost,
    graph: Graph,
    weights: Overlay,
    *,
    sparse: bool,
) -> int:
    """A default context that leaves most of a budget to rows."""
    from hotset.placement.ram import context_that_fits

    kv_bytes = settings.n_seqs * cost.kv_bytes_per_token(settings.kv_type)
    limit -= _n_states(settings, cost, n_ctx) * cost.state_bytes
    fitting = context_that_fits(limit, graph, weights, kv_bytes, sparse=sparse)
    return min(n_ctx, max(fitting, _SMALLEST_DEFAULT_N_CTX))


def _shared_out(
    decided: Decided, devices: Sequence[str | Card], profile: Profile | None, limit: int | None
) -> Decided:
    """With what goes on which device, and what this machine's memory is for. Beside devices a context that
    nobody asked for is the default, or, where a budget has no room for that, the smallest."""
    smallest, may_shrink = _SMALLEST_DEFAULT_N_CTX, bool(devices) and decided.settings.n_ctx is None
    placed = replace(decided, placement=_placement(decided, devices, profile, limit is not None))
    if limit is None:
        return placed
    try:
        return _within(placed, limit)
    except OutOfMemoryError:
        if not may_shrink or decided.n_ctx <= smallest:
            raise
    config = decided.config.for_context(smallest)
    shorter = replace(
        decided, config=config, n_ctx=smallest, n_pages=_n_pages(decided.settings, smallest),
        n_states=_n_states(decided.settings, decided.cost, smallest),
        graph=describe(config, decided.weights.tensors, decided.predictor, decided.choice.cutoffs),
    )  # fmt: skip
    return _within(replace(shorter, placement=_placement(shorter, devices, profile, True)), limit)


def _within(placed: Decided, limit: int) -> Decided:
    """With a plan of this machine's memory."""
    ram, placement = _plan_ram(placed, limit), placed.placement
    if ram is not None and placement is not None and (ram.streamed or ram.rows < ram.all_rows):
        note = (
            "what has no room in this machine's memory is read from the disk, which no predicted time counts"
        )
        placement = replace(placement, notes=(*placement.notes, note))
    return replace(placed, ram=ram, placement=placement)


def _plan_ram(decided: Decided, limit: int) -> RamPlan | None:
    """None where nobody asked for a budget, and the model does not fit in what is free."""
    from hotset.placement.disk import measure_disk
    from hotset.placement.ram import plan_ram

    settings, cost = decided.settings, decided.cost
    if decided.placement is not None:
        from hotset.placement.build import host_part

        cost = Cost(host_part(decided.placement, decided.graph).graph, decided.weights.tensors)
    disk = measure_disk(decided.gguf.path, progress=settings.progress)
    try:
        planned = plan_ram(
            limit, decided.weights, decided.graph, disk, sparse=decided.choice.mode != "dense",
            cache_bytes=_cache_bytes(settings, cost, decided.n_ctx), n_states=decided.n_states,
            max_batch=settings.max_batch, n_threads=settings.n_threads, n_pages=decided.n_pages,
            placement=decided.placement,
        )  # fmt: skip
    except OutOfMemoryError:
        if settings.ram_budget is not None:
            raise
        return None
    if settings.ram_budget is None:
        _warn(
            f"the model's {human_size(decided.gguf.nbytes)} are more than what is free: what has no room is "
            f"read as it is needed, within {limit / 2**30:.1f} GiB (--ram-budget)"
        )
    return planned


def _placement(
    decided: Decided, devices: Sequence[str | Card], profile: Profile | None, limited: bool
) -> Placement | None:
    """limited: whether this machine's memory has a budget."""
    if not devices:
        return None
    from hotset.placement.planner import place

    try:
        return place(
            decided.gguf, decided.config, decided.weights, decided.graph, decided.choice.base,
            decided.settings, devices, n_pages=decided.n_pages, profile=profile, limited=limited,
        )  # fmt: skip
    except _CANNOT_PLACE as error:
        if decided.settings.asks_for_a_device:
            raise
        _say_unplaced(error)
    return None


def _needed(decided: Decided) -> dict[int, np.ndarray]:
    """How often neurons, or experts, are needed, under a budget: by the profile that was named, or that lies
    beside the model."""
    from hotset.placement.ram import needed_by_profile

    settings, config = decided.settings, decided.config
    path = profile_path(decided.gguf.path) if settings.profile is None else Path(settings.profile)
    if not path.is_file():
        return {}
    profile, model = Profile.open(path), fingerprint(decided.gguf)
    if settings.profile is not None:
        profile.check_model(model, config.n_ff)
    elif not profile.is_of(model, config.n_ff):
        return {}
    decided.notes.append(f"{path} says which rows are in memory first")
    return needed_by_profile(profile, decided.graph)


def _profile(settings: LoadSettings, choice: Choice, devices: Sequence[str | Card]) -> Profile | None:
    """The activation profile of a file; refused where nothing would use it."""
    if settings.profile is None:
        return None
    serves = choice.spec is not None or settings.ram_budget is not None
    if not serves and (choice.mode == "dense" or not devices):
        raise InvalidRequestError(
            f"a profile serves predicted sparsity, and this model runs {choice.mode}; name a predictor too"
        )
    if not Path(settings.profile).is_file():
        raise InvalidRequestError(f"there is no profile {settings.profile}; make one with 'hotset profile'")
    return Profile.open(settings.profile)


def _with_channels(decided: Decided) -> Decided:
    """With what leaving out the zeros of cutoffs is expected to gain where each layer is, and the copies by
    channel that the CPU reads; under a budget of its memory, which has no room for them, without these."""
    thresholds, placement, graph = decided.choice.thresholds, decided.placement, decided.graph
    if thresholds is None:
        return decided
    from hotset.placement import channel_rates
    from hotset.placement.channels import Workload, plan_channels, with_devices
    from hotset.placement.table import CPU

    layers = range(graph.n_layer) if placement is None else placement.layers_of(CPU)
    own = Graph([op for op in graph.ops if op.layer in layers], graph.values)
    # Of a mixture on a device the experts are the CPU's.
    mixed = [ffn for ffn in graph.ffns if ffn.route is not None and ffn.layer not in layers]
    tensors, progress = decided.weights.tensors, decided.settings.progress
    works = Workload.of(Graph([*own.ops, *mixed], graph.values), tensors)
    rates = channel_rates.of_cpu(works, decided.settings.n_threads, progress=progress)
    plan = plan_channels(graph, tensors, thresholds, rates, layers)
    if placement is not None and (of_all := Workload.of(graph, tensors)):
        found = [channel_rates.of_device(name, of_all, progress=progress) for name in placement.devices]
        plan = with_devices(plan, graph, tensors, thresholds, placement, found)
    decided = replace(decided, channels=plan)
    if decided.ram is not None or not layers:
        return decided
    copies = open_channels(decided.gguf, own, decided.weights, plan.chosen, decided.notes, progress)
    weights = decided.weights.under(*copies)
    graph = describe(decided.config, weights.tensors, decided.predictor, decided.choice.cutoffs)
    return replace(decided, weights=weights, graph=graph)


def _thresholds(opened: Opened) -> Thresholds | None:
    """Those that were asked for; None where the mode does not cut.

    Raises ModelNotFoundError, FormatError, and InvalidRequestError for those of another model.
    """
    if not opened.settings.cuts:
        return None
    found = Thresholds.open(opened.settings.thresholds or thresholds_path(opened.gguf.path))
    found.check_model(opened.gguf, opened.config.n_layer)
    return found


def _context(settings: LoadSettings, config: ModelConfig, cost: Cost, free: float, file_bytes: int) -> int:
    """The context length to use: what was asked, or the default that fits in the free memory."""
    asked, n_ctx_train, n_ctx_max = settings.n_ctx, config.n_ctx_train, config.n_ctx_max
    if asked is not None and n_ctx_max is not None and asked > n_ctx_max:
        raise ContextLengthError(
            f"a context of {asked} tokens is longer than the {n_ctx_max} positions that the model has; "
            f"lower n_ctx to {n_ctx_max}"
        )
    if asked is None:
        most = min(n_ctx_train, DEFAULT_N_CTX)
        lengths = most, *range(most // PAGE_SIZE * PAGE_SIZE, 0, -PAGE_SIZE)
        fitting = (n for n in lengths if _cache_bytes(settings, cost, n) <= free - file_bytes)
        return min(most, max(next(fitting, 0), _SMALLEST_DEFAULT_N_CTX))
    if (n_bytes := _cache_bytes(settings, cost, asked)) > free:
        raise OutOfMemoryError(
            f"a context of {asked} tokens needs a cache of {n_bytes / 1e9:.1f} GB and "
            f"{free / 1e9:.1f} GB are free; lower n_ctx, or use kv_type q8_0"
        )
    if asked > n_ctx_train:
        _warn(f"a context of {asked} tokens is longer than the {n_ctx_train} that the model was trained for")
    return asked


def _n_pages(settings: LoadSettings, n_ctx: int) -> int:
    """Of the cache."""
    return settings.n_seqs * -(-n_ctx // PAGE_SIZE)


def _cache_bytes(settings: LoadSettings, cost: Cost, n_ctx: int) -> int:
    """Of keys, values and recurrent states."""
    kv_bytes = settings.n_seqs * n_ctx * cost.kv_bytes_per_token(settings.kv_type)
    return kv_bytes + _n_states(settings, cost, n_ctx) * cost.state_bytes


def _n_states(settings: LoadSettings, cost: Cost, n_ctx: int) -> int:
    """Slots for recurrent states: as many as take the memory of keys and values, but enough for n_seqs
    sequences and some prefixes, and no more than max_sequences and every page can use."""
    if not cost.state_bytes:
        return 0
    n_pages = _n_pages(settings, n_ctx)
    kv_bytes = n_pages * PAGE_SIZE * cost.kv_bytes_per_token(settings.kv_type)
    least = 2 * (settings.n_seqs + 1) + _KEPT_STATES
    most = 2 * (settings.max_sequences + 1) + n_pages
    return max(least, min(most, kv_bytes // cost.state_bytes))


def _say_unplaced(error: HotsetError) -> None:
    """A GPU that nobody asked for and that cannot be used costs a line, and the CPU computes alone."""
    _warn(f"the GPU is not used: {error} (--no-gpu: without this line)")


def _warn(sentence: str) -> None:
    """A warning of the line that called hotset."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("hotset."):
        level, frame = level + 1, frame.f_back
    warnings.warn(sentence, stacklevel=level)
