"""From a name to a backend: open files, measure this machine, build a backend.

    opened = open_model("model.gguf", LoadSettings(n_ctx=512))
    decided = plan_model(opened)
    decided, backend = build(decided)

decide.py makes the decisions. The caller closes the results.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hotset.backends.base import BLOCK_SIZE, Backend
from hotset.backends.cpu.backend import CpuBackend
from hotset.backends.registry import CPU, REFERENCE, plugin_of
from hotset.backends.stage import BackendOptions, WholeModel
from hotset.errors import (
    DeviceError,
    HotsetError,
    InvalidRequestError,
    OutOfMemoryError,
    UnsupportedModelError,
)
from hotset.escaping import clause
from hotset.formats.channels import COPY_SUFFIX
from hotset.formats.gguf import GGUFFile, open_gguf
from hotset.formats.recommended import recommended
from hotset.formats.source import WeightSource
from hotset.loader.decide import (
    NOTHING_RESERVED,
    SMALLEST_DEFAULT_N_CTX,
    Decided,
    MachineFacts,
    Opened,
    Reserved,
    cache_bytes,
    channel_work,
    cpu_graph,
    cpu_layers,
    decide,
    with_applied,
    with_channels,
    with_ram,
)
from hotset.loader.modelfile import replaced_template
from hotset.memory import free_memory, own_memory
from hotset.model.config import ModelConfig
from hotset.model.cost import Cost
from hotset.model.graph import Graph
from hotset.model.operations import ExpertLinear, ExpertSum
from hotset.model.supported import read_config
from hotset.parameters import shown
from hotset.placement import detect
from hotset.settings import LoadSettings, ModelPath
from hotset.sparsity.modes import Choice, choose
from hotset.sparsity.preparing import Computes, open_channels, prepare
from hotset.sparsity.profile import Profile, profile_path
from hotset.sparsity.sidecar import fingerprint
from hotset.sparsity.taps import MAX_SEQUENCE, of_backend
from hotset.sparsity.thresholds import Thresholds, thresholds_path
from hotset.units import human_size

if TYPE_CHECKING:
    import numpy as np

    from hotset import _core
    from hotset.offload.weight_store import StoredWeights
    from hotset.placement.cards import Card
    from hotset.placement.ram import HostMemory, RamPlan
    from hotset.placement.table import Placement
    from hotset.sparsity.stats import PredictorQuality
    from hotset.storage.created import Created

_MEASURED_STEP = 128  # tokens per step of a backend that measures a predictor
_CANNOT_PLACE = (DeviceError, OutOfMemoryError, UnsupportedModelError)


def open_model(model: ModelPath, settings: LoadSettings) -> Opened:
    """Open a model: a GGUF file, a stored or catalogue name, or "hf:owner/repository[:file]".

    A created model (`hotset create`) has its template and sampling, and its context and adapters if the
    settings have none. Devices are looked for first, so no model is downloaded for a missing device. With
    adapters, only devices that can compute them are used. Raises DeviceError,
    ModelNotFoundError, DownloadError, FormatError, UnsupportedModelError.
    """
    path, made = Path(model), None
    if not path.is_file():
        from hotset.storage import find_created, resolve

        if (found := find_created(model)) is not None:
            made = found[1]
            settings = _with_created(settings, made)
    named = settings.device_capabilities
    takes_lora = settings.lora is None or (named is not None and named.adapters)
    devices, unused = detect.wanted_devices(settings) if takes_lora else ((), None)
    if unused is not None:
        _warn(unused)
    if not path.is_file():
        path = resolve(model, progress=settings.progress)
    gguf = open_gguf(path)
    try:
        if copy := next((name for name in gguf.tensors if name.endswith(COPY_SUFFIX)), None):
            raise UnsupportedModelError(
                f"{path} has the tensor {clause(shown(copy))}, a copy that hotset itself stores "
                "next to a model"
            )
        config = read_config(gguf, activation=settings.activation)
    except BaseException:
        gguf.close()
        raise
    template = settings.chat_template
    if made is not None:
        template = made.template if template is None else replaced_template(made, template)
    if template:
        gguf.metadata["tokenizer.chat_template"] = template
    sampling, problems = recommended(gguf)
    for problem in problems:
        _warn(problem)
    return Opened(settings, gguf, config, devices, sampling | ({} if made is None else dict(made.sampling)))


def _with_created(settings: LoadSettings, made: Created) -> LoadSettings:
    """Fill settings that are None with the load settings of a created model."""
    return replace(
        settings,
        **{name: value for name, value in made.load.items() if getattr(settings, name) is None},
    )


def plan_model(
    opened: Opened, *, mapped: bool = False, for_device: bool = False, reserved: Reserved = NOTHING_RESERVED
) -> Decided:
    """Decide the neurons and predictor, the graph of a step, its cost, the context, and the placement.

    Sidecar files that this needs and that are missing are built next to the model file.

    Raises UnsupportedModelError, ContextLengthError, OutOfMemoryError (with the smallest possible budget, if
    one is too small), and InvalidRequestError for a mode that the model does not have. After an error only
    the file is open. mapped: map its files whatever their size, for a caller that holds only part of them.
    for_device: a device of another model computes it. reserved: memory for its drafter and adapters.

    If no device was requested, and the device that was found cannot hold the model, the CPU computes it.
    """
    try:
        return _planned(opened, mapped=mapped, reserved=reserved, for_device=for_device)
    except _CANNOT_PLACE as error:
        if not opened.devices or opened.settings.asks_for_a_device:
            raise
        decided = _planned(opened.on_cpu(), mapped=mapped, reserved=reserved)
        if opened.settings.is_auto:  # `auto` compares devices, so a note is enough
            decided.notes.append(f"the device {opened.devices[0]} is not used: {error}")
        else:
            _say_unplaced(error)
        return decided


def _planned(opened: Opened, *, mapped: bool, reserved: Reserved, for_device: bool = False) -> Decided:
    """Plan a model like plan_model, without the second attempt."""
    gguf, config = opened.gguf, opened.config
    settings = opened.settings.verifying(config.has_zeros)
    thresholds = _thresholds(settings, gguf, config)
    mode = settings.sparsity
    splits = settings.split == "neurons" or settings.gpu_index is not None
    device, named = opened.capabilities, (mode, settings.predictor, thresholds)
    if device is not None and not device.sparse_ffn and not splits and named == (None, None, None):
        mode = "dense"  # the results are the same, and no sidecar file is built
    choice = choose(config, gguf.tensors, mode, settings.predictor, thresholds)
    if mode != settings.sparsity:
        assert device is not None
        reason = f"dense: all neurons, the default of {device.title}"
        choice = replace(choice, reason=reason)
    profile = _profile(settings, choice, opened.devices)
    counted = profile if choice.spec is not None else None
    machine = MachineFacts(math.inf if mapped else _free(opened), own_memory(), reserved)
    prepared = prepare(
        gguf, config, choice, profile=counted, progress=settings.progress, input_major=False,
        computes="device" if for_device else _computes(opened, machine.free - reserved.total),
    )  # fmt: skip
    try:
        decided = decide(opened, choice, prepared, machine)
        if settings.n_ctx is not None and settings.n_ctx > (usual := config.n_ctx_train):
            asked = f"a context of {settings.n_ctx} tokens"
            _warn(f"{asked} is longer than the {usual} that the model was trained for")
        unused = thresholds_path(gguf.path)
        if opened.settings.drafter != "self" and thresholds is None and unused.is_file():
            decided.notes.append(f"{unused} has thresholds that are not used; sparsity='threshold' uses them")
        placed = _shared_out(decided, opened.devices, profile)
        return placed if for_device else _with_channels(placed)
    except BaseException:
        prepared.weights.close()
        raise


def _computes(opened: Opened, free: float) -> Computes:
    """Return who computes the model. free: bytes of memory; copies take up to half the file's size."""
    if opened.devices:
        return "device"
    is_roomy = opened.settings.ram_budget is None and 1.5 * opened.gguf.nbytes <= free
    return "memory" if is_roomy else "budget"


def build(
    decided: Decided, *, runtime: _core.Runtime | None = None, drafts_for: WholeModel | None = None
) -> tuple[Decided, Backend]:
    """Build the backend of a model.

    If no device was requested, and the device that was found cannot be used after all, the model is planned
    again for the CPU. The caller still owns `weights` and the file. runtime: threads of another model, which
    this one shares. drafts_for: a model whose device or threads, and cache, this one shares; this one is the
    same model in a sparser mode.
    """
    placement, settings, options = decided.placement, decided.settings, decided.backend_options
    if placement is not None and settings.progress is not None:
        settings.progress.planned(placement)
    try:
        stored = _stored(decided)
        source = stored or decided.weights
        if drafts_for is not None:
            backend = drafts_for.open_draft(source, decided.graph, options)
        elif placement is not None:
            from hotset.placement.build import open_placed

            backend = open_placed(placement, source, decided.graph, options, decided.channels)
        else:
            name = REFERENCE if settings.is_reference else CPU
            backend = open_backend(name, source, decided.graph, options, runtime=runtime)
    except _CANNOT_PLACE as error:
        if placement is None or settings.asks_for_a_device:
            raise
        config = read_config(decided.gguf, activation=settings.activation)
        opened = Opened(settings, decided.gguf, config, (), decided.sampling)
        opened = opened.with_images(decided.images, decided.blind)
        decided.weights.close()
        _say_unplaced(error)
        return build(plan_model(opened, reserved=decided.reserved), runtime=runtime)
    if stored is not None:
        decided = replace(decided, stored=stored)
        if placement is not None:
            stored.start_counting()
    return decided, _ready(decided, backend)


def _free(opened: Opened) -> float:
    """Return the bytes of memory for the model, of this machine and of devices with their own memory."""
    if not opened.devices:
        return free_memory()
    from hotset.placement.planner import planner_of

    planner = planner_of(opened.devices[0])
    return planner.free_for_model(opened.devices, opened.settings.vram_gib, opened.gguf.nbytes)


def _host_memory(decided: Decided) -> HostMemory:
    from hotset.placement.ram import HostMemory

    return HostMemory(
        decided.weights, decided.graph, decided.settings, sparse=decided.is_sparse, n_blocks=decided.n_blocks,
        n_states=decided.n_states, placement=decided.placement,
    )  # fmt: skip


def _stored(decided: Decided) -> StoredWeights | None:
    """Open the weights that the CPU computes with under a memory limit; None without one."""
    return None if decided.ram is None else _host_memory(decided).open(decided.ram, _needed(decided))


def _ready(decided: Decided, backend: Backend) -> Backend:
    """Check the weights after the build: copies of a file that was truncated meanwhile are wrong.

    Vectors and devices have copies by now. All later reads are of large matrices."""
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
    """Map the experts before the first token.

    The first token of a dense model maps all of its weights, but experts are used one by one. Otherwise
    hundreds of tokens take up to a tenth longer (decision 019).
    """
    parts = [part for ffn in decided.graph.ffns for part in (ffn.gate, ffn.up, ffn.down)]
    experts = [part for part in parts if isinstance(part, ExpertLinear | ExpertSum)]
    names = dict.fromkeys(name for part in experts for name in part.weights)
    copies = (part.input_major for part in experts if isinstance(part, ExpertSum))
    for name in (*names, *filter(None, copies)):
        decided.weights.map_cached(name)


def open_backend(
    name: str,
    weights: WeightSource,
    graph: Graph,
    options: BackendOptions,
    *,
    runtime: _core.Runtime | None = None,
) -> Backend:
    """Build a backend without a device: CPU or REFERENCE. runtime: as in CpuBackend."""
    if name == CPU:
        return CpuBackend(weights, graph, options, runtime=runtime)
    from hotset.backends.reference import ReferenceBackend

    return ReferenceBackend(
        weights, graph, sparse=options.sparse, n_blocks=options.n_blocks, max_batch=options.max_batch,
        kv_type=options.kv_type, n_states=options.n_states,
    )  # fmt: skip


def open_measuring(decided: Decided, backend: Backend) -> Backend:
    """Open a small backend without a device, which computes every neuron of a text.

    It measures the predictor of another backend.
    """
    options = BackendOptions(
        n_blocks=MAX_SEQUENCE // BLOCK_SIZE, max_batch=_MEASURED_STEP, kv_type=decided.settings.kv_type,
        n_threads=backend.n_threads,
    )  # fmt: skip
    name = REFERENCE if backend.name == REFERENCE else CPU
    return open_backend(name, decided.weights, decided.graph, options)


def measured_predictor(decided: Decided, backend: Backend, ids: np.ndarray) -> list[PredictorQuality]:
    """Return the quality of a model's predictor for the neurons that fire on a text. ids: int32 [n_tokens].

    Raises InvalidRequestError without a predictor.
    """
    from hotset.sparsity.stats import measure_predictor

    if decided.choice.mode != "predicted":
        raise InvalidRequestError(
            f"the sparsity mode {decided.choice.mode} has no predictor to measure; load the model "
            'with sparsity="predicted"'
        )
    every = open_measuring(decided, backend)
    try:
        return measure_predictor(of_backend(every), decided.graph, ids)
    finally:
        every.close()


def _shared_out(decided: Decided, devices: Sequence[str | Card], profile: Profile | None) -> Decided:
    """Add the placement on devices and the plan of this machine's memory.

    With devices, a context that was not requested is the default, or the smallest if a budget has no room for
    the default.
    """
    may_shrink = bool(devices) and decided.settings.n_ctx is None
    placed = replace(decided, placement=_placement(decided, devices, profile))
    if decided.limit is None:
        return placed
    try:
        return with_ram(placed, _plan_ram(placed))
    except OutOfMemoryError:
        if not may_shrink or decided.n_ctx <= SMALLEST_DEFAULT_N_CTX:
            raise
    shorter = decided.with_context(SMALLEST_DEFAULT_N_CTX)
    placed = replace(shorter, placement=_placement(shorter, devices, profile))
    return with_ram(placed, _plan_ram(placed))


def _plan_ram(decided: Decided) -> RamPlan | None:
    """Plan the division of the memory limit.

    Return None without a requested budget if the model does not fit in the free memory.
    """
    from hotset.placement.disk import measure_disk

    settings, limit, host = decided.settings, decided.limit, _host_memory(decided)
    assert limit is not None
    n_bytes = cache_bytes(settings, Cost(host.graph, decided.weights.tensors), decided.n_ctx)
    disk = measure_disk(decided.gguf.path, progress=settings.progress)
    try:
        planned = host.plan(limit, disk, n_bytes)
    except OutOfMemoryError:
        if settings.ram_budget is not None:
            raise
        return None
    if settings.ram_budget is None:
        _warn(
            f"the model's {human_size(decided.gguf.nbytes)} are more than what is free: what has no room is "
            f"read as it is needed, within {limit / 2**30:.1f} GiB (ram_budget)"
        )
    return planned


def _placement(decided: Decided, devices: Sequence[str | Card], profile: Profile | None) -> Placement | None:
    if not devices:
        return None
    from hotset.placement.gather import planned
    from hotset.placement.planner import ModelToPlace

    model = ModelToPlace(
        decided.gguf, decided.config, decided.weights, decided.graph, decided.choice.base, decided.settings,
        decided.n_blocks, decided.n_states, profile, limited=decided.limit is not None,
    )  # fmt: skip
    return planned(model, devices)


def _needed(decided: Decided) -> dict[int, np.ndarray]:
    """Return how often neurons or experts are needed, by layer; {} without a profile.

    The profile is the one that the settings name, or the one next to the model.
    """
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
    """Open the activation profile of the settings. Raises InvalidRequestError if nothing would use it."""
    if settings.profile is None:
        return None
    serves = choice.spec is not None or settings.ram_budget is not None
    if not serves and (choice.mode == "dense" or not devices):
        raise InvalidRequestError(
            f"a profile serves predicted sparsity, and this model runs {choice.mode}; name a predictor too"
        )
    if not Path(settings.profile).is_file():
        raise InvalidRequestError(
            f"there is no profile {settings.profile}; make one with 'hotset sparse profile'"
        )
    return Profile.open(settings.profile)


def _with_channels(decided: Decided) -> Decided:
    """Plan which matrices skip thresholded inputs, and open the input-major copies that the CPU reads.

    Thresholds that skip nothing are dropped. A memory budget has no room for copies, so it gets none.
    """
    thresholds, settings, placement = decided.choice.thresholds, decided.settings, decided.placement
    device = decided.capabilities
    if thresholds is None:
        return decided
    from hotset.placement import channel_rates
    from hotset.placement.channels import ChannelPlan

    if device is not None and not device.thresholds:  # it reads every channel
        return with_applied(decided, thresholds, ChannelPlan((), {}))

    of_cpu, of_devices = channel_work(decided)
    rates = channel_rates.of_cpu(of_cpu, settings.n_threads, progress=settings.progress)
    devices = placement.devices if placement is not None and of_devices else ()
    found = [
        plugin_of(name, "measuring").channel_rates(name, of_devices, progress=settings.progress)
        for name in devices
    ]
    decided = with_channels(decided, thresholds, rates, found)
    if decided.ram is not None:  # its rows follow the thresholds
        return with_ram(decided, _plan_ram(decided))
    if decided.channels is None or not cpu_layers(decided):
        return decided
    weights, chosen = decided.weights, decided.channels.chosen
    copies = open_channels(
        decided.gguf, cpu_graph(decided), weights, chosen, decided.notes, settings.progress
    )
    return decided.changed(weights=weights.under(*copies))


def _thresholds(settings: LoadSettings, gguf: GGUFFile, config: ModelConfig) -> Thresholds | None:
    """Open the requested thresholds; None if the mode has no thresholds.

    Raises ModelNotFoundError, FormatError, and InvalidRequestError for thresholds of another model.
    """
    if not settings.asks_for_thresholds:
        return None
    found = Thresholds.open(settings.thresholds or thresholds_path(gguf.path))
    found.check_model(gguf, config.n_layer)
    return found


def _say_unplaced(error: HotsetError) -> None:
    """Warn that a GPU that was not requested cannot be used, so the CPU computes."""
    _warn(f"the GPU is not used: {error} (device='cpu': without this line)")


def _warn(sentence: str) -> None:
    """Warn with the line of the caller of hotset."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith("hotset."):
        level, frame = level + 1, frame.f_back
    warnings.warn(sentence, stacklevel=level)
