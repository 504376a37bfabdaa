"""A chain of stages for a placement: on the CPU and on devices of one backend."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Protocol, TypeVar

from hotset.backends.cpu.backend import CpuBackend, new_runtime
from hotset.backends.cpu.worker import CpuWorker
from hotset.backends.device.stage import CpuShare
from hotset.backends.pipeline import ChainBackend
from hotset.backends.stage import BackendOptions, Stage
from hotset.formats.source import WeightSource
from hotset.model.graph import Graph
from hotset.placement.build import PlacedPiece, hot_of, pieces_of, share_of
from hotset.placement.table import CPU, Placement

if TYPE_CHECKING:
    from hotset import _core


Worker = TypeVar("Worker", bound=CpuWorker)


class StageOpener(Protocol[Worker]):
    """The part of a device backend that opens its stages."""

    name: str

    @property
    def notes(self) -> Sequence[str]:
        """Return sentences for the user about the stages that it opened."""
        ...

    @property
    def chain(self) -> type[ChainBackend]:
        """Return the class of a chain that has one stage and no CPU stage."""
        ...

    def share(self, piece: PlacedPiece) -> CpuShare:
        """Return the work that the device leaves to the CPU in a piece."""
        ...

    def open_worker(self, piece: PlacedPiece, share: CpuShare, runtime: _core.Runtime) -> Worker:
        """Open the worker that computes `share` on the CPU runtime."""
        ...

    def open_stage(
        self, piece: PlacedPiece, share: CpuShare, worker: Worker | None, runtime: _core.Runtime | None
    ) -> Stage:
        """Open the stage of a piece, which closes its worker. runtime: of the CPU's stages and workers."""
        ...


def shared_with_cpu(placement: Placement, piece: PlacedPiece, cached: Collection[int]) -> CpuShare:
    """Return the hot neurons of a device's piece and its experts. cached: layers with experts on the CPU."""
    experts = [i for i in piece.layers if i in cached]
    n_slots = placement.expert_slots[piece.device] if placement.expert_slots else 0
    return CpuShare(hot_of(placement, piece), experts, share_of(n_slots, cached, piece, placement))


def open_chain(
    opener: StageOpener[Worker],
    placement: Placement,
    weights: WeightSource,
    graph: Graph,
    options: BackendOptions,
    *,
    isa: str | None = None,
) -> ChainBackend:
    """Open the stages of a placement. After an error nothing stays open.

    options: options of every stage; n_threads applies to the CPU. isa: as in CpuBackend. Raises
    InvalidRequestError for a placement of another model, and the errors of the stages.
    """
    pieces = pieces_of(graph, placement)
    shares = [None if piece.device == CPU else opener.share(piece) for piece in pieces]
    with ExitStack() as opened:
        runtime = None
        if not all(share is not None and not share for share in shares):
            runtime = new_runtime(options.n_threads)  # the CPU's stages and workers share it and take turns
            opened.callback(runtime.close)
        stages: list[Stage] = []
        for piece, share in zip(pieces, shares, strict=True):
            if share is None:
                stages.append(CpuBackend(weights, graph, options, span=piece.span, runtime=runtime, isa=isa))
            else:
                stages.append(_stage(opener, piece, share, runtime))
            opened.callback(stages[-1].close)
        kind = opener.chain if runtime is None and len(stages) == 1 else ChainBackend
        chain = kind(
            opener.name, stages, [piece.device for piece in pieces], n_blocks=options.n_blocks,
            max_batch=options.max_batch, runtime=runtime, notes=opener.notes,
        )  # fmt: skip
        chain.n_vocab = graph.n_vocab(weights.tensors)  # an encoder has no logits
        opened.pop_all()
    return chain


def _stage(
    opener: StageOpener[Worker], piece: PlacedPiece, share: CpuShare, runtime: _core.Runtime | None
) -> Stage:
    """Open the stage of a piece and its worker. After an error both are closed."""
    worker = opener.open_worker(piece, share, runtime) if share and runtime is not None else None
    try:
        return opener.open_stage(piece, share, worker, runtime)
    except BaseException:
        if worker is not None:
            worker.close()
        raise
