"""Construction of the backend of a Placement on torch devices, and the host memory that it needs.

Layers may be placed in any order. The solver has its own reasons to put the CPU's layers first
(placement/solver.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hotset.backends.base import Backend
from hotset.backends.cpu.backend import CpuBackend, new_runtime
from hotset.backends.cpu.worker import TIMEOUT
from hotset.backends.device.opening import open_chain as chain_of
from hotset.backends.device.opening import shared_with_cpu
from hotset.backends.device.stage import CpuShare
from hotset.backends.pipeline import ChainBackend
from hotset.backends.stage import OUTPUT_ROWS, SLICE_VALUES, STREAM_BYTES, STREAM_FROM, BackendOptions, Stage
from hotset.backends.triton import open_gpu
from hotset.backends.triton.devices import SIMULATED, find_device, limit_memory
from hotset.backends.triton.measuring import synchronisation
from hotset.backends.triton.options import DEFAULT_OPTIONS, GpuOptions
from hotset.formats.source import WeightSource
from hotset.model.cost import Cost
from hotset.model.graph import Graph
from hotset.model.operations import Embed, ExpertLinear, ExpertSum, NgramEmbed
from hotset.offload.uploads import Uploads
from hotset.offload.weight_store import StoredWeights
from hotset.placement.budget import FLOAT_BYTES, MemoryBudget
from hotset.placement.build import PlacedPiece, mixed_layers, pieces_of, share_of
from hotset.placement.table import CPU, Placement

if TYPE_CHECKING:
    from hotset import _core
    from hotset.backends.triton.cpu_offload import CpuOffload, Kind
    from hotset.placement.channels import ChannelPlan

_SOFTWARE = 384 << 20  # bytes of compiled and loaded kernels, and of memory that a GPU's driver pins


def open_placed(
    placement: Placement,
    weights: WeightSource,
    graph: Graph,
    options: BackendOptions,
    channels: ChannelPlan | None,
) -> Backend:
    """Build the backend of one GPU if it holds the whole model, otherwise a chain of stages."""
    planned = placement.budget.devices if placement.budget else ()
    for device in planned:
        limit_memory(find_device(device.device), device.limit - device.context)
    input_major = () if channels is None else channels.on_device
    if placement.is_whole and not mixed_layers(graph):
        needed = planned[0].total - planned[0].context if planned else 0
        gpu = GpuOptions(weight_bytes=_weight_bytes(planned), input_major=input_major)
        return open_gpu(_of_devices(weights), graph, placement.devices[0], options, needed=needed, gpu=gpu)
    stream = placement.budget.stream // 2 if placement.budget is not None else 0
    gpu = GpuOptions(stream_bytes=stream or STREAM_BYTES, input_major=input_major)
    return open_chain(placement, weights, graph, options, gpu=gpu)


def reserved_bytes(device: str) -> int:
    """Return the bytes that torch reserved on a CUDA device, as Opener.reserved_bytes does."""
    if not device.startswith("cuda"):
        return 0
    import torch

    return int(torch.cuda.max_memory_reserved(device))


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """Options of the CPU worker of a device.

    synchronisation: forces a kind (cpu_offload.KINDS). timeout: most seconds for the cold neurons of a layer.
    isa: as in CpuBackend.
    """

    synchronisation: Kind | None = None
    timeout: float = TIMEOUT
    isa: str | None = None


DEFAULT_WORKER = WorkerOptions()


def open_chain(
    placement: Placement,
    weights: WeightSource,
    graph: Graph,
    options: BackendOptions,
    *,
    worker: WorkerOptions = DEFAULT_WORKER,
    gpu: GpuOptions = DEFAULT_OPTIONS,
) -> ChainBackend:
    """Open the CPU and the devices of a placement in a chain, as device.opening.open_chain.

    options.sparse: applies to all stages; layers can be split only if it is set. Raises the errors of
    GpuStage, CpuOffload and CpuBackend.
    """
    opener = _TorchOpener(placement, weights, graph, options, worker, gpu)
    return chain_of(opener, placement, weights, graph, options, isa=worker.isa)


class _TorchOpener:
    """An opener of stages on torch devices, each with a CPU worker of its own if layers are split."""

    name, chain = "hybrid", ChainBackend

    def __init__(
        self,
        placement: Placement,
        weights: WeightSource,
        graph: Graph,
        options: BackendOptions,
        worker: WorkerOptions,
        gpu: GpuOptions,
    ) -> None:
        self._placement, self._weights, self._graph = placement, weights, graph
        self._options, self._worker, self._gpu = options, worker, gpu
        self._pieces = pieces_of(graph, placement)
        self.notes: list[str] = []

    def share(self, piece: PlacedPiece) -> CpuShare:
        """Return the CPU's share of a piece, as StageOpener.share does."""
        return _share(self._placement, piece, self._graph)

    def open_stage(
        self, piece: PlacedPiece, share: CpuShare, worker: CpuOffload | None, runtime: _core.Runtime | None
    ) -> Stage:
        """Open a stage, as StageOpener.open_stage does."""
        from hotset.backends.triton.stage import GpuStage

        device = self._placement.devices[piece.device]
        planned = _planned_for(piece, self._pieces, self._placement)
        gpu = replace(self._gpu, weight_bytes=_weight_bytes(planned))
        stage = GpuStage(
            _of_devices(self._weights, runtime), self._graph, device, self._options, span=piece.span,
            share=share, worker=worker, gpu=gpu,
        )  # fmt: skip
        self.notes.append(f"{device}: kernels in {stage.kernels.name}")
        return stage

    def open_worker(self, piece: PlacedPiece, share: CpuShare, runtime: _core.Runtime) -> CpuOffload:
        """Open the CPU worker of a device's layers, and note the reason for its synchronisation."""
        device = self._placement.devices[piece.device]
        chosen = None if self._worker.synchronisation else synchronisation(device)
        worker = replace(self._worker, synchronisation=chosen.kind) if chosen else self._worker
        opened = _cpu_offload(
            self._weights, self._graph, share, device, self._options, worker, self._gpu.stream_from, runtime
        )
        shared = [f"{len(share.hot)} layers share their neurons"] if share.hot else []
        shared += [f"{len(share.experts)} layers their experts"] if share.experts else []
        reason = chosen.reason if chosen else opened.reason
        self.notes.append(f"{device}: {' and '.join(shared)} with the CPU; {reason}")
        return opened


def _share(placement: Placement, piece: PlacedPiece, graph: Graph) -> CpuShare:
    """Return the hot neurons of split layers of a piece, and its layers with experts on the CPU."""
    mixed = mixed_layers(graph)
    share = shared_with_cpu(placement, piece, mixed)
    fetching = placement.fetching[piece.device] if placement.fetching else None
    if fetching is None or not share.experts or not placement.expert_slots:
        return share
    n_spare = share_of(fetching.n_spare, mixed, piece, placement)
    return replace(share, fetching=replace(fetching, n_spare=n_spare))


def _cpu_offload(
    weights: WeightSource,
    graph: Graph,
    share: CpuShare,
    device: str,
    options: BackendOptions,
    worker: WorkerOptions,
    stream_from: int | None,
    runtime: _core.Runtime | None,
) -> CpuOffload:
    """Open the CPU worker of a device's layers."""
    from hotset.backends.triton.cpu_offload import CpuOffload

    most = options.max_batch
    if stream_from is not None and not share.experts:
        most = max(min(most, stream_from - 1), 1)
    return CpuOffload(
        weights, graph, share.hot, find_device(device), replace(options, max_batch=most),
        experts=share.experts, runtime=runtime, kind=worker.synchronisation, timeout=worker.timeout,
        isa=worker.isa,
    )  # fmt: skip


def _of_devices(weights: WeightSource, runtime: _core.Runtime | None = None) -> WeightSource:
    """Return the weight source that devices read. runtime: the runtime of the CPU's stages and workers."""
    return Uploads(weights, runtime) if isinstance(weights, StoredWeights) else weights


def _weight_bytes(planned: Sequence[MemoryBudget]) -> int:
    return sum(budget.weights + budget.neurons for budget in planned)


def _planned_for(
    piece: PlacedPiece, pieces: list[PlacedPiece], placement: Placement
) -> Sequence[MemoryBudget]:
    """Return the budget of a device that has one piece. The shares of several pieces are not known."""
    alone = sum(other.device == piece.device for other in pieces) == 1
    return placement.budget.devices[piece.device :][:1] if placement.budget and alone else ()


def software_bytes(devices: Sequence[str]) -> int:
    """Return the bytes of host memory for the devices' software, as Opener.software_bytes does."""
    return _SOFTWARE if {*devices} - {SIMULATED} else 0


def host_workspace(
    placement: Placement, weights: StoredWeights, graph: Graph, options: BackendOptions
) -> int:
    """Return the bytes of host memory of a placement, as Opener.host_workspace does.

    They are the memory of the CPU's stages and workers, which are built for this without devices, and of the
    bytes in transfer to and from devices. weights: an empty store.
    """
    worker = WorkerOptions(synchronisation="direct")
    total, is_on_host = 0, False
    runtime = new_runtime(options.n_threads)
    try:
        for piece in pieces_of(graph, placement):
            is_on_host = piece.device == CPU
            if is_on_host:
                small = replace(options, n_blocks=1)
                stage = CpuBackend(weights, graph, small, span=piece.span, runtime=runtime)
                total += stage.buffer_bytes
                stage.close()
                continue
            total += _exchanged_bytes(graph, options.n_blocks, options.max_batch)
            if share := _share(placement, piece, graph):
                offload = _cpu_offload(
                    weights, graph, share, SIMULATED, options, worker, STREAM_FROM, runtime
                )
                total += offload.buffer_bytes
                offload.close()
        total += runtime.nbytes
    finally:
        runtime.close()
    max_batch = options.max_batch
    if not is_on_host:  # logits; several slices are concatenated, which doubles the bytes
        total += FLOAT_BYTES * max_batch * graph.result.width * (1 if max_batch <= OUTPUT_ROWS else 2)
    return total + _staged_bytes(placement, weights, graph)


def _exchanged_bytes(graph: Graph, n_blocks: int, max_batch: int) -> int:
    """Return the host bytes for the inputs and outputs of one stage on a device.

    They are a step's numbers, the entering rows (looked up, and their copy), and the leaving rows.
    """
    return FLOAT_BYTES * max_batch * (n_blocks + 4 + 4 * graph.ops[0].out.width)


def _staged_bytes(placement: Placement, weights: StoredWeights, graph: Graph) -> int:
    """Return the host bytes of weights in transfer to devices.

    They are a slice of a matrix or an expert, as read and as unpacked, and the cold rows that a long prompt
    streams at a time.
    """
    n_bytes = 0
    for op in graph.primitives:
        for name in (weight.name for weight in op.weights_read):
            info = weights.tensors[name]
            if not isinstance(op, Embed | NgramEmbed | ExpertLinear | ExpertSum):
                n_bytes = max(n_bytes, min(info.nbytes, SLICE_VALUES * info.nbytes // info.n_elements))
    experts = Cost(graph, weights.tensors).expert_bytes
    slices = 3 * max(n_bytes, max(experts.values(), default=0))
    return slices + (placement.budget.stream // 2 if placement.budget is not None else 0)
