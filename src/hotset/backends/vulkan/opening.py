"""From a Placement to the backend that computes it on Vulkan devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hotset.backends.cpu.backend import CpuBackend, new_runtime
from hotset.backends.cpu.worker import CpuWorker
from hotset.backends.pipeline import ChainBackend
from hotset.backends.stage import BackendOptions, Stage
from hotset.backends.vulkan.autotune import product_types, tuned
from hotset.backends.vulkan.backend import WholeVulkan
from hotset.backends.vulkan.devices import NAME, VulkanInfo, find_device
from hotset.backends.vulkan.experts import cached_layers
from hotset.backends.vulkan.pipelines import open_device
from hotset.backends.vulkan.shapes import DeviceShapes
from hotset.backends.vulkan.stage import VulkanStage
from hotset.formats.source import WeightSource
from hotset.model.graph import Graph
from hotset.placement.build import PlacedPiece, hot_of, pieces_of, share_of
from hotset.placement.table import CPU, Placement

if TYPE_CHECKING:
    from hotset import _core
    from hotset.placement.channels import ChannelPlan


def reserved_bytes(device: str) -> int:  # noqa: ARG001
    """Return 0, as Opener.reserved_bytes: the backend counts every byte of a device."""
    return 0


def open_placed(
    placement: Placement,
    weights: WeightSource,
    graph: Graph,
    options: BackendOptions,
    channels: ChannelPlan | None = None,  # noqa: ARG001 - a device reads every channel
    *,
    staged: bool = False,
) -> ChainBackend:
    """Build a chain of the CPU and the Vulkan devices of a placement, as Opener.open_placed.

    options.sparse: of the CPU's layers and neurons. staged: as in VulkanStage. Each device is opened once and
    tuned if it was not (autotune.py); its stages together stay within its limit. After an error nothing stays
    open.
    """
    pieces = pieces_of(graph, placement)
    budgets = placement.budget.devices if placement.budget else ()
    opened: dict[int, tuple[VulkanInfo, _core.VulkanDevice, DeviceShapes]] = {}
    stages: list[Stage] = []
    runtime = None
    try:
        for piece in pieces:
            span: dict[str, Any] = {"first_op": piece.first_op, "last_op": piece.last_op}
            if piece.device == CPU:
                runtime = runtime or new_runtime(options.n_threads)
                stages.append(
                    CpuBackend(
                        weights, graph, runtime=runtime, sparse=options.sparse, **span, **options.sizes
                    )
                )
                continue
            if piece.device not in opened:
                info = find_device(placement.devices[piece.device])
                limit = budgets[piece.device].limit if budgets else None
                device = open_device(info, budget=limit, staged=staged)
                types = product_types(graph, weights.tensors)
                opened[piece.device] = info, device, tuned(info, device, types, progress=options.progress)
            info, device, shapes = opened[piece.device]
            hot, experts, n_slots = _split(placement, piece, weights, graph)
            worker = None
            if hot or experts:
                runtime = runtime or new_runtime(options.n_threads)
                worker = CpuWorker(
                    weights, graph, hot, experts=experts, sparse=options.sparse, max_batch=options.max_batch,
                    runtime=runtime,
                )  # fmt: skip
            try:
                stages.append(
                    VulkanStage(
                        weights, graph, info, opened=device, hot=hot, worker=worker, expert_slots=n_slots,
                        shapes=shapes, **span, **options.sizes,
                    )
                )  # fmt: skip
            except BaseException:
                if worker is not None:
                    worker.close()
                raise
        kind = WholeVulkan if runtime is None and len(stages) == 1 else ChainBackend
        chain = kind(
            NAME, stages, [piece.device for piece in pieces], n_pages=options.n_pages,
            max_batch=options.max_batch, runtime=runtime,
        )  # fmt: skip
        chain.n_vocab = graph.n_vocab(weights.tensors)  # an encoder leaves no logits
        return chain
    except BaseException:
        for stage in stages:
            stage.close()
        if runtime is not None:
            runtime.close()
        raise


def _split(
    placement: Placement, piece: PlacedPiece, weights: WeightSource, graph: Graph
) -> tuple[dict[int, np.ndarray], list[int], int]:
    """Return the hot neurons of split layers of a piece, its layers with experts on the CPU, and slots for
    these on the device."""
    # A kernel multiplies with a row at least: if no neuron pays on the device, it has the first.
    masks = hot_of(placement, piece)
    hot = {i: mask if mask.any() else np.arange(len(mask)) == 0 for i, mask in masks.items()}
    n_slots = placement.expert_slots[piece.device] if placement.expert_slots else 0
    cached = cached_layers(graph, weights.tensors)[0] if n_slots else {}
    experts = [i for i in piece.layers if i in cached]
    return hot, experts, share_of(n_slots, cached, piece, placement)
