"""From a Placement to the backend that computes it on torch's devices, and the memory that it takes here.

Layers may be placed in any order; the solver has reasons of its own to put the CPU's first
(placement/solver.py).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hotset.backends.base import Backend
from hotset.backends.cpu.backend import CpuBackend, new_runtime
from hotset.backends.cpu.worker import TIMEOUT
from hotset.backends.pipeline import ChainBackend
from hotset.backends.registry import SIMULATED
from hotset.backends.stage import OUTPUT_ROWS, SLICE_VALUES, STREAM_FROM, BackendOptions, Stage
from hotset.backends.triton import open_gpu
from hotset.backends.triton.devices import find_device, limit_memory
from hotset.backends.triton.measuring import synchronisation
from hotset.formats.source import WeightSource
from hotset.model.cost import Cost
from hotset.model.graph import Graph
from hotset.model.operations import Embed, ExpertLinear, ExpertSum, NgramEmbed
from hotset.offload.uploads import Uploads
from hotset.offload.weight_store import StoredWeights
from hotset.placement.budget import FLOAT_BYTES, MemoryBudget
from hotset.placement.build import PlacedPiece, hot_of, mixed_layers, pieces_of, share_of
from hotset.placement.table import CPU, Placement

if TYPE_CHECKING:
    from hotset import _core
    from hotset.backends.triton.cpu_offload import CpuOffload, Kind
    from hotset.model.cost import KVType
    from hotset.placement.channels import ChannelPlan


def open_placed(
    placement: Placement,
    weights: WeightSource,
    graph: Graph,
    how: BackendOptions,
    channels: ChannelPlan | None,
) -> Backend:
    """Build one GPU's backend if it has everything, otherwise a chain of stages, as Opener.open_placed."""
    planned = placement.budget.devices if placement.budget else ()
    for device in planned:
        limit_memory(find_device(device.device), device.limit - device.context)
    given = {**how.sizes, "sparse": how.sparse}
    if placement.is_whole and not mixed_layers(graph):
        needed = planned[0].total - planned[0].context if planned else 0
        return open_gpu(
            _of_devices(weights), graph, device=placement.devices[0], needed=needed,
            weight_bytes=_weight_bytes(planned),
            input_major=() if channels is None else channels.on_device, **given,
        )  # fmt: skip
    if placement.budget is not None and placement.budget.stream:
        given["stream_bytes"] = placement.budget.stream // 2
    return open_chain(placement, weights, graph, n_threads=how.n_threads, channels=channels, **given)


def reserved_bytes(device: str) -> int:
    """Return the bytes that torch reserved on a CUDA device, as Opener.reserved_bytes."""
    if not device.startswith("cuda"):
        return 0
    import torch

    return int(torch.cuda.max_memory_reserved(device))


def open_chain(  # noqa: PLR0913
    placement: Placement,
    weights: WeightSource,
    graph: Graph,
    *,
    n_pages: int,
    max_batch: int = 512,
    kv_type: KVType = "f16",
    n_threads: int | None = None,
    sparse: bool = True,
    stream_from: int | None = STREAM_FROM,
    synchronisation: Kind | None = None,
    timeout: float | None = None,
    isa: str | None = None,
    channels: ChannelPlan | None = None,
    **options: Any,
) -> ChainBackend:
    """The CPU and the devices of a placement in a chain.

    sparse: as in CpuBackend and GpuStage; layers can be split only with it. n_threads: of the CPU, for its
    own layers and for cold neurons. synchronisation: forces a kind (cpu_offload.KINDS). timeout: seconds that
    the CPU may take for the cold neurons of a layer. stream_from: see GpuStage. channels: as in open_placed.
    options: of every GpuStage.

    Raises InvalidRequestError for a placement that is not of this model, and what GpuStage, CpuOffload and
    CpuBackend raise; then nothing stays open.
    """
    pieces = pieces_of(graph, placement)
    mixed = mixed_layers(graph)
    splits = any(
        place.is_split or (place.device != CPU and i in mixed) for i, place in enumerate(placement.layers)
    )
    given: dict[str, Any] = {
        "n_pages": n_pages, "max_batch": max_batch, "kv_type": kv_type, "sparse": sparse,
    }  # fmt: skip
    of_cpu: dict[str, Any] = {}
    whole: Collection[str] = ()
    if channels is not None:
        whole, options = channels.whole, {"input_major": channels.on_device, **options}
        of_cpu = {"channel_rates": channels.rates, "whole": whole}
    stages: list[Stage] = []
    notes: list[str] = []
    runtime = None
    try:
        if splits or any(piece.device == CPU for piece in pieces):
            runtime = new_runtime(n_threads)  # one for the CPU's layers and all CPU workers: they take turns
        for piece in pieces:
            span: dict[str, Any] = {"first_op": piece.first_op, "last_op": piece.last_op}
            if piece.device == CPU:
                stages.append(CpuBackend(weights, graph, runtime=runtime, isa=isa, **span, **given, **of_cpu))
                continue
            stage, more = _device_stage(
                placement, piece, weights, graph,
                {
                    **given, **options, **span, "stream_from": stream_from,
                    "weight_bytes": _weight_bytes(_planned_for(piece, pieces, placement)),
                },
                {"runtime": runtime, "kind": synchronisation, "isa": isa, "timeout": timeout, "whole": whole},
            )  # fmt: skip
            stages.append(stage)
            notes += more
        return ChainBackend(
            "hybrid", stages, [piece.device for piece in pieces], n_pages=n_pages, max_batch=max_batch,
            runtime=runtime, notes=notes,
        )  # fmt: skip
    except BaseException:
        for stage in stages:
            stage.close()
        if runtime is not None:
            runtime.close()
        raise


def _device_stage(
    placement: Placement,
    piece: PlacedPiece,
    weights: WeightSource,
    graph: Graph,
    options: dict[str, Any],
    cpu_worker_options: dict[str, Any],
) -> tuple[Stage, list[str]]:
    """A stage on a device, with a CPU worker of its own where layers are split; and what to say of it."""
    from hotset.backends.triton.stage import GpuStage

    device = placement.devices[piece.device]
    hot, experts = _shared(placement, piece, graph)
    service = None
    notes = []
    if hot or experts:
        chosen = None if cpu_worker_options["kind"] else synchronisation(device)
        cpu_worker_options = cpu_worker_options | {
            "kind": chosen.kind if chosen else cpu_worker_options["kind"]
        }
        service = _cpu_offload(placement, piece, weights, graph, device, options, cpu_worker_options)
        shared = [f"{len(hot)} layers share their neurons"] if hot else []
        shared += [f"{len(experts)} layers their experts"] if experts else []
        reason = chosen.reason if chosen else service.reason
        notes.append(f"{device}: {' and '.join(shared)} with the CPU; {reason}")
    if experts and placement.expert_slots:
        mixed, n_slots = mixed_layers(graph), placement.expert_slots[piece.device]
        options = {"expert_slots": share_of(n_slots, mixed, piece, placement)} | options
        if placement.fetching and (fetching := placement.fetching[piece.device]) is not None:
            n_spare = share_of(fetching.n_spare, mixed, piece, placement)
            options = {"fetching": replace(fetching, n_spare=n_spare)} | options
    try:
        source = _of_devices(weights, cpu_worker_options["runtime"])
        stage = GpuStage(source, graph, device, hot=hot, cold=service, **options)
    except BaseException:
        if service is not None:
            service.close()
        raise
    notes.append(f"{device}: kernels in {stage.kernels.name}")
    return stage, notes


def _shared(
    placement: Placement, piece: PlacedPiece, graph: Graph
) -> tuple[dict[int, np.ndarray], list[int]]:
    """Of a device's piece the hot neurons of the layers that are split, and the layers with experts."""
    return hot_of(placement, piece), [i for i in piece.layers if i in mixed_layers(graph)]


def _cpu_offload(
    placement: Placement,
    piece: PlacedPiece,
    weights: WeightSource,
    graph: Graph,
    device: str,
    options: dict[str, Any],
    cpu_worker_options: dict[str, Any],
) -> CpuOffload:
    """What the CPU does of a device's layers."""
    from hotset.backends.triton.cpu_offload import CpuOffload

    hot, experts = _shared(placement, piece, graph)
    stream_from, most = options["stream_from"], options["max_batch"]
    if stream_from is not None and not experts:
        most = max(min(most, stream_from - 1), 1)
    return CpuOffload(
        weights, graph, hot, find_device(device), experts=experts,
        sparse=options["sparse"], max_batch=most,
        **cpu_worker_options | {"timeout": cpu_worker_options["timeout"] or TIMEOUT},
    )  # fmt: skip


def _of_devices(weights: WeightSource, runtime: _core.Runtime | None = None) -> WeightSource:
    """Where devices find what is theirs. runtime: of the CPU's stages and services."""
    return Uploads(weights, runtime) if isinstance(weights, StoredWeights) else weights


def _weight_bytes(planned: Sequence[MemoryBudget]) -> int:
    return sum(budget.weights + budget.neurons for budget in planned)


def _planned_for(
    piece: PlacedPiece, pieces: list[PlacedPiece], placement: Placement
) -> Sequence[MemoryBudget]:
    """The budget of a device that has one piece; of several it is not known which takes how much."""
    alone = sum(other.device == piece.device for other in pieces) == 1
    return placement.budget.devices[piece.device :][:1] if placement.budget and alone else ()


def host_workspace(
    placement: Placement,
    weights: StoredWeights,
    graph: Graph,
    *,
    n_pages: int,
    max_batch: int,
    sparse: bool,
    n_threads: int | None,
) -> int:
    """Bytes of this machine's memory that the chain of a placement takes beside weights and cache: of the
    CPU's stages and services, which are built for this without devices, and for what goes to devices and
    comes from them. weights: empty ones."""
    given: dict[str, Any] = {"max_batch": max_batch, "sparse": sparse}
    cpu_worker_options: dict[str, Any] = {"kind": "direct", "isa": None, "timeout": None}
    total, is_on_host = 0, False
    runtime = new_runtime(n_threads)
    try:
        for piece in pieces_of(graph, placement):
            is_on_host = piece.device == CPU
            if is_on_host:
                span: dict[str, Any] = {"first_op": piece.first_op, "last_op": piece.last_op}
                stage = CpuBackend(weights, graph, n_pages=1, runtime=runtime, **span, **given)
                total += stage.buffer_bytes
                stage.close()
                continue
            total += _exchanged_bytes(graph, n_pages, max_batch)
            if any(_shared(placement, piece, graph)):
                service = _cpu_offload(
                    placement, piece, weights, graph, SIMULATED, given | {"stream_from": STREAM_FROM},
                    cpu_worker_options | {"runtime": runtime},
                )  # fmt: skip
                total += service.buffer_bytes
                service.close()
        total += runtime.nbytes
    finally:
        runtime.close()
    if not is_on_host:  # logits, in slices that are put together where there are several
        total += FLOAT_BYTES * max_batch * graph.result.width * (1 if max_batch <= OUTPUT_ROWS else 2)
    return total + _staged_bytes(placement, weights, graph)


def _exchanged_bytes(graph: Graph, n_pages: int, max_batch: int) -> int:
    """Of the host's for one stage on a device: numbers of a step, rows that enter (looked up, and as they are
    copied) and leave."""
    return FLOAT_BYTES * max_batch * (n_pages + 4 + 4 * graph.ops[0].out.width)


def _staged_bytes(placement: Placement, weights: StoredWeights, graph: Graph) -> int:
    """Of the host's while weights are on their way to devices: a slice of a matrix, or an expert, as it is
    read and as it is taken apart; and of a prompt the cold rows that come at a time."""
    n_bytes = 0
    for op in graph.primitives:
        for name in (weight.name for weight in op.weights_read):
            info = weights.tensors[name]
            if not isinstance(op, Embed | NgramEmbed | ExpertLinear | ExpertSum):
                n_bytes = max(n_bytes, min(info.nbytes, SLICE_VALUES * info.nbytes // info.n_elements))
    experts = Cost(graph, weights.tensors).expert_bytes
    slices = 3 * max(n_bytes, max(experts.values(), default=0))
    return slices + (placement.budget.stream // 2 if placement.budget is not None else 0)
