"""From a Placement to the backend that computes it: a stage for each run of layers in one place.

    backend = open_placed(placement, weights, graph, sparse=True, n_pages=64, ...)

Layers may be placed in any order; the solver has reasons of its own to put the CPU's first (solver.py).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hotset.backends.base import Backend
from hotset.backends.cpu.backend import CpuBackend, new_runtime
from hotset.backends.cpu.worker import TIMEOUT, CpuWorker
from hotset.backends.gpu import open_gpu
from hotset.backends.gpu.devices import find_device, limit_memory
from hotset.backends.pipeline import ChainBackend
from hotset.backends.stage import OUTPUT_ROWS, SLICE_VALUES, STREAM_FROM, Stage
from hotset.backends.vulkan.backend import WholeVulkan
from hotset.backends.vulkan.devices import VulkanInfo
from hotset.backends.vulkan.devices import find_device as find_vulkan
from hotset.backends.vulkan.experts import cached_layers
from hotset.backends.vulkan.pipelines import open_device
from hotset.backends.vulkan.shapes import DeviceShapes
from hotset.backends.vulkan.stage import VulkanStage
from hotset.errors import InvalidRequestError, OutOfMemoryError
from hotset.formats.source import WeightSource
from hotset.model.cost import Cost
from hotset.model.graph import Graph
from hotset.model.operations import Embed, ExpertLinear, ExpertSum, Ffn, NgramEmbed
from hotset.offload.uploads import Uploads
from hotset.offload.weight_store import Helped, StoredWeights
from hotset.placement import machine
from hotset.placement.autotune import product_types, tuned
from hotset.placement.budget import FLOAT_BYTES, MemoryBudget
from hotset.placement.table import CPU, Placement

if TYPE_CHECKING:
    from hotset import _core
    from hotset.backends.gpu.cpu_offload import CpuOffload, Kind
    from hotset.model.cost import KVType
    from hotset.placement.channels import ChannelPlan
    from hotset.reporter import Reporter


@dataclass(frozen=True)
class HostPart:
    """What of a model this machine's memory is needed for, where devices compute too.

    graph: the CPU's layers, embeddings, and the FFNs in which it helps a device; helped: those, as
    StoredWeights takes them. It describes and is never run. n_layers: of the CPU's own.
    """

    graph: Graph
    helped: Helped
    n_layers: int


def host_part(placement: Placement, graph: Graph) -> HostPart:
    """Raises InvalidRequestError for a placement that is not of this model."""
    own = [
        op
        for piece in _pieces(graph, placement)
        if piece.device == CPU
        for op in graph.ops[piece.first_op : piece.last_op]
    ]
    helped: dict[int, np.ndarray | None] = {
        i: None if i in mixed_layers(graph) or place.hot is None else ~place.hot
        for i, place in enumerate(placement.layers)
        if place.is_split or (place.device != CPU and i in mixed_layers(graph))
    }
    kept = {id(op) for op in own}
    ops = [
        op
        for op in graph.ops
        if id(op) in kept
        or isinstance(op, Embed | NgramEmbed)
        or (isinstance(op, Ffn) and not op.shared and op.layer in helped)
    ]
    return HostPart(Graph(ops, graph.values), helped, placement.n_cpu_layers)


def open_placed(
    placement: Placement,
    weights: WeightSource,
    graph: Graph,
    *,
    n_threads: int | None = None,
    sparse: bool,
    channels: ChannelPlan | None = None,
    **options: Any,
) -> Backend:
    """The backend of a placement: one GPU's where it has everything, else a chain of stages.

    A CUDA device gives torch no more than was planned. OutOfMemoryError, where it has less than that free
    after all, names a smaller budget. weights: StoredWeights of the placement's host_part keep this machine's
    memory within a budget; devices then read what is theirs past it. channels: of a graph with thresholds,
    what is left out of which matrices.
    """
    planned = placement.budget.devices if placement.budget else ()
    for device in () if placement.on_vulkan else planned:
        limit_memory(find_device(device.device), device.limit - device.context)
    try:
        if placement.on_vulkan:
            return open_on_vulkan(placement, weights, graph, n_threads=n_threads, **options)
        if placement.is_whole and not mixed_layers(graph):
            needed = planned[0].total - planned[0].context if planned else 0
            return open_gpu(
                _of_devices(weights), graph, device=placement.devices[0], sparse=sparse, needed=needed,
                weight_bytes=_weight_bytes(planned),
                input_major=() if channels is None else channels.on_device, **options,
            )  # fmt: skip
        if placement.budget is not None and placement.budget.stream:
            options["stream_bytes"] = placement.budget.stream // 2
        return open_chain(
            placement, weights, graph, n_threads=n_threads, sparse=sparse, channels=channels, **options
        )
    except OutOfMemoryError as error:
        raise OutOfMemoryError(f"{error}; {smaller_plan(placement)}") from None


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
    own layers and for cold neurons. host-device synchronisation: forces a kind (cpu_offload.KINDS).
    timeout: seconds that the CPU
    may take for the cold neurons of a layer. stream_from: see GpuStage. channels: as in open_placed.
    options: of every GpuStage.

    Raises InvalidRequestError for a placement that is not of this model, and what GpuStage, CpuOffload and
    CpuBackend raise; then nothing stays open.
    """
    pieces = _pieces(graph, placement)
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


def open_on_vulkan(  # noqa: PLR0913
    placement: Placement,
    weights: WeightSource,
    graph: Graph,
    *,
    n_pages: int,
    n_states: int = 2,
    max_batch: int = 512,
    kv_type: KVType = "f16",
    n_threads: int | None = None,
    sparse: bool = True,
    staged: bool = False,
    progress: Reporter | None = None,
) -> ChainBackend:
    """The CPU and the Vulkan devices of a placement in a chain.

    n_states: slots for recurrent states, where there are any. sparse: of the CPU's layers and neurons.
    staged: as of VulkanStage. Each device is opened once, tuned where it was not (autotune.py, which says so
    to progress), and its stages together stay within its limit.
    Raises what VulkanStage and CpuBackend raise; then nothing stays open.
    """
    pieces = _pieces(graph, placement)
    given: dict[str, Any] = {"n_pages": n_pages, "max_batch": max_batch, "kv_type": kv_type}
    budgets = placement.budget.devices if placement.budget else ()
    opened: dict[int, tuple[VulkanInfo, _core.VulkanDevice, DeviceShapes]] = {}
    stages: list[Stage] = []
    runtime = None
    try:
        for piece in pieces:
            span: dict[str, Any] = {"first_op": piece.first_op, "last_op": piece.last_op}
            if piece.device == CPU:
                runtime = runtime or new_runtime(n_threads)
                stages.append(
                    CpuBackend(
                        weights, graph, runtime=runtime, sparse=sparse, n_states=n_states, **span, **given
                    )
                )
                continue
            if piece.device not in opened:
                info = find_vulkan(placement.devices[piece.device])
                limit = budgets[piece.device].limit if budgets else None
                device = open_device(info, budget=limit, staged=staged)
                shapes = tuned(info, device, product_types(graph, weights.tensors), progress=progress)
                opened[piece.device] = info, device, shapes
            info, device, shapes = opened[piece.device]
            hot, experts, n_slots = _split_on_vulkan(placement, piece, weights, graph)
            worker = None
            if hot or experts:
                runtime = runtime or new_runtime(n_threads)
                worker = CpuWorker(
                    weights, graph, hot, experts=experts, sparse=sparse, max_batch=max_batch, runtime=runtime
                )
            try:
                stages.append(
                    VulkanStage(
                        weights, graph, info, opened=device, n_states=n_states, hot=hot, worker=worker,
                        expert_slots=n_slots, shapes=shapes, **span, **given,
                    )
                )  # fmt: skip
            except BaseException:
                if worker is not None:
                    worker.close()
                raise
        kind = WholeVulkan if runtime is None and len(stages) == 1 else ChainBackend
        chain = kind(
            "vulkan", stages, [piece.device for piece in pieces], n_pages=n_pages, max_batch=max_batch,
            runtime=runtime,
        )  # fmt: skip
        chain.n_vocab = graph.n_vocab(weights.tensors)  # an encoder leaves no logits
        return chain
    except BaseException:
        for stage in stages:
            stage.close()
        if runtime is not None:
            runtime.close()
        raise


def _split_on_vulkan(
    placement: Placement, piece: _Piece, weights: WeightSource, graph: Graph
) -> tuple[dict[int, np.ndarray], list[int], int]:
    """What the CPU computes of a Vulkan device's piece: all but the hot neurons of layers, and experts of
    layers; and the slots for these on the device."""
    # A kernel multiplies with a row at least: where no neuron pays on the device it has the first.
    masks = _hot_of(placement, piece)
    hot = {i: mask if mask.any() else np.arange(len(mask)) == 0 for i, mask in masks.items()}
    n_slots = placement.expert_slots[piece.device] if placement.expert_slots else 0
    cached = cached_layers(graph, weights.tensors)[0] if n_slots else {}
    experts = [i for i in piece.layers if i in cached]
    return hot, experts, _share_of(n_slots, cached, piece, placement)


def _of_devices(weights: WeightSource, runtime: _core.Runtime | None = None) -> WeightSource:
    """Where devices find what is theirs. runtime: of the CPU's stages and services."""
    return Uploads(weights, runtime) if isinstance(weights, StoredWeights) else weights


def mixed_layers(graph: Graph) -> set[int]:
    """The MoE layers, whose experts a device requests of the CPU."""
    return {ffn.layer for ffn in graph.ffns if ffn.route is not None}


def _share_of(n: int, layers: Collection[int], piece: _Piece, placement: Placement) -> int:
    """Of n slots for a device's experts, of these layers, those of a piece."""
    on_device = set(layers).intersection(placement.layers_of(piece.device))
    return n * len(on_device.intersection(piece.layers)) // max(len(on_device), 1)


def _weight_bytes(planned: Sequence[MemoryBudget]) -> int:
    return sum(budget.weights + budget.neurons for budget in planned)


def _planned_for(piece: _Piece, pieces: list[_Piece], placement: Placement) -> Sequence[MemoryBudget]:
    """The budget of a device that has one piece; of several it is not known which takes how much."""
    alone = sum(other.device == piece.device for other in pieces) == 1
    return placement.budget.devices[piece.device :][:1] if placement.budget and alone else ()


@dataclass
class _Piece:
    """Operations [first_op, last_op) on one device."""

    device: int
    first_op: int
    last_op: int
    layers: range


def _pieces(graph: Graph, placement: Placement) -> list[_Piece]:
    """The graph in pieces, in order: each as long as it stays on one device."""
    *starts, after = graph.layer_starts
    devices = [layer.device for layer in placement.layers]
    if len(devices) != len(starts):
        raise InvalidRequestError(
            f"the placement has {len(devices)} layers and the model {len(starts)}; plan it for this model"
        )
    if not all(CPU <= device < len(placement.devices) for device in [*devices, placement.output_device]):
        raise InvalidRequestError(
            f"the placement names a device that is not among its {len(placement.devices)}"
        )
    pieces: list[_Piece] = []
    # The embedding goes with the first layer; the output may be anywhere.
    ends = [*starts[1:], after, len(graph.ops)]
    for layer, (device, end) in enumerate(zip([*devices, placement.output_device], ends, strict=True)):
        own = range(layer, min(layer + 1, len(devices)))
        if pieces and pieces[-1].device == device:
            pieces[-1].last_op, pieces[-1].layers = end, range(pieces[-1].layers.start, own.stop)
        else:
            pieces.append(_Piece(device, pieces[-1].last_op if pieces else 0, end, own))
    return pieces


def _device_stage(
    placement: Placement,
    piece: _Piece,
    weights: WeightSource,
    graph: Graph,
    options: dict[str, Any],
    cpu_worker_options: dict[str, Any],
) -> tuple[Stage, list[str]]:
    """A stage on a device, with a CPU worker of its own where layers are split; and what to say of it."""
    from hotset.backends.gpu.stage import GpuStage

    device = placement.devices[piece.device]
    hot, experts = _shared(placement, piece, graph)
    service = None
    notes = []
    if hot or experts:
        chosen = None if cpu_worker_options["kind"] else machine.synchronisation(device)
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
        options = {"expert_slots": _share_of(n_slots, mixed, piece, placement)} | options
        if placement.fetching and (fetching := placement.fetching[piece.device]) is not None:
            n_spare = _share_of(fetching.n_spare, mixed, piece, placement)
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


def _shared(placement: Placement, piece: _Piece, graph: Graph) -> tuple[dict[int, np.ndarray], list[int]]:
    """Of a device's piece the hot neurons of the layers that are split, and the layers with experts."""
    return _hot_of(placement, piece), [i for i in piece.layers if i in mixed_layers(graph)]


def _hot_of(placement: Placement, piece: _Piece) -> dict[int, np.ndarray]:
    """The hot neurons of the layers of a device's piece that are split."""
    split = {i: placement.layers[i] for i in piece.layers if placement.layers[i].is_split}
    return {i: layer.hot for i, layer in split.items() if layer.hot is not None}


def _cpu_offload(
    placement: Placement,
    piece: _Piece,
    weights: WeightSource,
    graph: Graph,
    device: str,
    options: dict[str, Any],
    cpu_worker_options: dict[str, Any],
) -> CpuOffload:
    """What the CPU does of a device's layers."""
    from hotset.backends.gpu.cpu_offload import CpuOffload

    hot, experts = _shared(placement, piece, graph)
    stream_from, most = options["stream_from"], options["max_batch"]
    if stream_from is not None and not experts:
        most = max(min(most, stream_from - 1), 1)
    return CpuOffload(
        weights, graph, hot, device, experts=experts,
        sparse=options["sparse"], max_batch=most,
        **cpu_worker_options | {"timeout": cpu_worker_options["timeout"] or TIMEOUT},
    )  # fmt: skip


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
        for piece in _pieces(graph, placement):
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
                    placement, piece, weights, graph, "cpu", given | {"stream_from": STREAM_FROM},
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


def smaller_plan(placement: Placement) -> str:
    """What to try where a plan did not hold, as the end of a message."""
    planned = max((d.total for d in placement.budget.devices), default=0) if placement.budget else 0
    return f"try --vram-budget {max(0.9 * planned / 2**30, 0.01):.2g}, nine tenths of what was planned"


@dataclass(frozen=True)
class DeviceMemory:
    """One device after loading. planned: bytes; measured: bytes by kind as the backend holds them, and, of a
    CUDA device, `reserved`, all that torch took there at most.
    """

    planned: MemoryBudget
    measured: dict[str, int]

    @property
    def used(self) -> int:
        """Bytes that are really used, the runtime's own context as it was planned."""
        held = self.measured.get("reserved") or sum(self.measured.values())
        return held + self.planned.context


def device_memory(placement: Placement, backend: Backend) -> list[DeviceMemory]:
    """Planned and measured bytes of each device of a placement."""
    planned = placement.budget.devices if placement.budget else ()
    found = []
    for device, measured in zip(planned, backend.device_bytes(), strict=True):
        if device.device.startswith("cuda"):
            import torch

            measured = measured | {"reserved": torch.cuda.max_memory_reserved(device.device)}
        found.append(DeviceMemory(device, measured))
    return found
