"""Construction of the backend that computes a Placement on Vulkan devices."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from hotset.backends.cpu.worker import CpuWorker
from hotset.backends.device.opening import open_chain, shared_with_cpu
from hotset.backends.device.stage import CpuShare
from hotset.backends.pipeline import ChainBackend
from hotset.backends.stage import BackendOptions, Stage
from hotset.backends.vulkan.autotune import product_types, tuned
from hotset.backends.vulkan.backend import WholeVulkan
from hotset.backends.vulkan.devices import NAME, VulkanInfo, find_device
from hotset.backends.vulkan.experts import cached_layers
from hotset.backends.vulkan.pipelines import open_device
from hotset.backends.vulkan.shapes import DeviceShapes
from hotset.backends.vulkan.stage import OpenDevice, VulkanStage
from hotset.backends.vulkan.timings import trace_file
from hotset.formats.source import WeightSource
from hotset.model.graph import Graph
from hotset.placement.build import PlacedPiece
from hotset.placement.table import Placement

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

    options.sparse: applies to the CPU's layers and neurons. staged: as in pipelines.open_device.
    """
    opener = _VulkanOpener(placement, weights, graph, options, staged=staged)
    return open_chain(opener, placement, weights, graph, options)


class _VulkanOpener:
    """The opener of a placement's stages.

    It opens each device once and tunes it if needed (autotune.py). All stages of a device together stay
    within its limit.
    """

    name, chain, notes = NAME, WholeVulkan, ()

    def __init__(
        self,
        placement: Placement,
        weights: WeightSource,
        graph: Graph,
        options: BackendOptions,
        *,
        staged: bool,
    ) -> None:
        self._placement, self._weights, self._graph = placement, weights, graph
        self._options, self._staged = options, staged
        self._opened: dict[int, tuple[VulkanInfo, _core.VulkanDevice, DeviceShapes]] = {}

    def share(self, piece: PlacedPiece) -> CpuShare:
        """Return the CPU's share, as StageOpener.share."""
        placement = self._placement
        n_slots = placement.expert_slots[piece.device] if placement.expert_slots else 0
        cached = cached_layers(self._graph, self._weights.tensors)[0] if n_slots else {}
        share = shared_with_cpu(placement, piece, cached)
        # A kernel needs at least one row: if no neuron pays off on the device, it gets the first.
        hot = {i: mask if mask.any() else np.arange(len(mask)) == 0 for i, mask in share.hot.items()}
        return replace(share, hot=hot)

    def open_worker(self, piece: PlacedPiece, share: CpuShare, runtime: _core.Runtime) -> CpuWorker:  # noqa: ARG002
        """Open the worker of a stage, as StageOpener.open_worker."""
        return CpuWorker(
            self._weights, self._graph, share.hot, self._options, experts=share.experts, runtime=runtime
        )

    def open_stage(
        self,
        piece: PlacedPiece,
        share: CpuShare,
        worker: CpuWorker | None,
        runtime: _core.Runtime | None,  # noqa: ARG002
    ) -> Stage:
        """Open a stage, as StageOpener.open_stage."""
        opened = OpenDevice.of(*self._device(piece.device))
        stage = VulkanStage(
            self._weights, self._graph, opened, self._options, span=piece.span, share=share, worker=worker
        )
        if trace_file() is not None:
            try:
                stage.start_timing()
            except BaseException:
                stage.close()
                raise
        return stage

    def _device(self, i: int) -> tuple[VulkanInfo, _core.VulkanDevice, DeviceShapes]:
        if i not in self._opened:
            budgets = self._placement.budget.devices if self._placement.budget else ()
            info = find_device(self._placement.devices[i])
            device = open_device(info, budget=budgets[i].limit if budgets else None, staged=self._staged)
            types = product_types(self._graph, self._weights.tensors)
            self._opened[i] = info, device, tuned(info, device, types, progress=self._options.progress)
        return self._opened[i]
