"""The host memory of a model under a budget: permanent weights, rows of neurons, and streamed weights.

A budget is a promise: the program, weights, rows, keys and values, and workspace together never exceed it. So
everything is counted before anything is read. With devices, it covers the CPU's part (build.host_part) and
the bytes that pass through host memory on their way to devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hotset.backends.cpu.backend import CpuBackend
from hotset.backends.stage import BackendOptions
from hotset.errors import OutOfMemoryError
from hotset.formats.overlay import Overlay
from hotset.memory import own_memory
from hotset.model.graph import Graph
from hotset.offload.weight_store import STEP, Sizes, StoredWeights, Use, share_out, sizes_of
from hotset.placement.budget import MemoryBudget
from hotset.placement.build import host_part, opener_of
from hotset.placement.disk import DiskRates
from hotset.units import human_size

if TYPE_CHECKING:
    from hotset import _core
    from hotset.placement.table import Placement
    from hotset.settings import LoadSettings
    from hotset.sparsity.profile import Profile

PROGRAM = 48 << 20  # bytes that the program takes after loading a model, for answers and templates
_PER_TOKEN = 800  # bytes of the tokenizer per vocabulary entry
_GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class RamPlan(MemoryBudget):
    """The plan of host memory.

    all_rows: bytes of all rows of neurons. streamed: bytes of streamed weights that each step reads. least:
    the smallest limit that works. max_batch: most tokens of a step. disk: the rates and reader of the file.
    """

    all_rows: int
    streamed: int
    least: int
    max_batch: int
    disk: DiskRates

    @property
    def seconds_streaming(self) -> float:
        """Return the least seconds that each step needs for streamed weights, at this disk's rate."""
        return self.streamed / self.disk.rates[-1][1]

    def as_dict(self) -> dict[str, Any]:
        """Return the plan for JSON."""
        return {
            "limit": self.limit, "total": self.total, "program": self.context, "resident": self.weights,
            "rows": self.neurons, "all_rows": self.all_rows, "ring": self.ring, "streamed": self.streamed,
            "kv": self.kv, "workspace": self.workspace, "least": self.least, "max_batch": self.max_batch,
            "reads": "io_uring" if self.disk.ring else "threads", "depth": self.disk.depth,
            "disk_rates": {str(size): round(rate) for size, rate in self.disk.rates},
        }  # fmt: skip


class HostMemory:
    """The CPU's part of a model, with or without devices, and the memory that it takes.

    graph: the graph of this part. n_blocks, n_states: KV blocks and state slots of the cache. A step has at
    most STEP tokens unless everything fits, since longer steps need larger buffers. Steps stay long if the
    CPU has no whole layers.
    """

    def __init__(
        self,
        weights: Overlay,
        graph: Graph,
        settings: LoadSettings,
        *,
        sparse: bool,
        n_blocks: int,
        n_states: int = 0,
        placement: Placement | None = None,
    ) -> None:
        self._weights, self._whole, self._settings, self._placement = weights, graph, settings, placement
        self._n_blocks, self._n_states = n_blocks, n_states
        # An encoder computes a text in one step.
        step = max(settings.max_batch, STEP) if graph.is_encoder else STEP
        self.graph, self._use = graph, Use(sparse=sparse, step=step)
        if placement is not None:
            part = host_part(placement, graph)
            step = STEP if part.n_layers else max(settings.max_batch, STEP)
            self.graph, self._use = part.graph, Use(sparse=sparse, step=step, helped=part.helped)

    def plan(self, limit: int, disk: DiskRates, cache_bytes: int) -> RamPlan:
        """Plan host memory within `limit` bytes. cache_bytes: of the CPU's layers.

        Raises OutOfMemoryError with the smallest limit that works.
        """
        sizes = sizes_of(self.graph, self._weights.tensors, self._use)
        self._weights.let_go()
        program = own_memory() + PROGRAM + self._whole.result.width * _PER_TOKEN
        devices = () if self._placement is None else self._placement.devices
        program += opener_of(self._placement).software_bytes(devices) if self._placement is not None else 0
        max_batch = self._settings.max_batch
        step = min(max_batch, self._use.step)
        workspace = self._workspace(disk, sizes, step, sizes.least_of_all)
        fixed = program + cache_bytes + workspace
        least = fixed + sizes.least_of_all
        if limit < least:
            beside = f", without the parts on {', '.join(devices)}" if devices else ""
            raise OutOfMemoryError(
                f"a memory budget of {limit / _GIB:.2f} GiB is too small: this model works within "
                f"{-(-least * 100 // _GIB) / 100:.2f} GiB ({human_size(sizes.least_of_all)} of "
                f"weights, {human_size(cache_bytes)} for the context, {human_size(program + workspace)} for "
                f"the program{beside}); raise ram_budget, or lower the context"
            )
        if step < max_batch and limit - fixed >= sizes.all:
            larger = self._workspace(disk, sizes, max_batch, sizes.all)
            if limit - program - cache_bytes - larger >= sizes.all:
                step, workspace = max_batch, larger
                fixed = program + cache_bytes + workspace
        shares = share_out(sizes, min(limit - fixed, sizes.all))
        return RamPlan(
            "cpu", limit, shares.resident, shares.rows, cache_bytes, workspace, program,
            ring=shares.streaming.ring, all_rows=sizes.most, streamed=shares.streamed, least=least,
            max_batch=step, disk=disk,
        )  # fmt: skip

    def open(self, planned: RamPlan, needed: Mapping[int, np.ndarray] | None = None) -> StoredWeights:
        """Read the weights of a plan. needed: see StoredWeights."""
        n_bytes = planned.weights + planned.neurons + planned.ring
        return self._stored(n_bytes, planned.disk.reader(), gap=planned.disk.gap, needed=needed)

    def _stored(self, n_bytes: int, reader: _core.Reader, **options: Any) -> StoredWeights:
        return StoredWeights(
            self._weights, self.graph, n_bytes, self._use, reader=reader, **options
        )  # fmt: skip

    def _workspace(self, disk: DiskRates, sizes: Sizes, max_batch: int, n_bytes: int) -> int:
        """Return the bytes of a backend's buffers and scratch, by building one with an empty weight store.

        n_bytes: the size of the store, to which nothing is written.
        """
        reader = disk.reader()
        empty = self._stored(n_bytes, reader, gap=0, empty=True)
        options = BackendOptions(
            n_blocks=self._n_blocks if self._placement is not None else 1, n_states=self._n_states,
            max_batch=max_batch, sparse=self._use.sparse, n_threads=self._settings.n_threads,
        )  # fmt: skip
        if self._placement is not None:
            taken = opener_of(self._placement).host_workspace(self._placement, empty, self._whole, options)
        else:
            backend = CpuBackend(empty, self._whole, options)
            taken = backend.workspace_bytes
            backend.close()
        return taken + reader.buffer_bytes + sizes.tables


def needed_by_profile(profile: Profile, graph: Graph) -> dict[int, np.ndarray]:
    """Return the share of a profile's tokens that needed each neuron or expert, for layers that skip rows."""
    counts = {
        ffn.layer: profile.counts[ffn.layer] if ffn.route is None else profile.experts.get(ffn.layer)
        for ffn in graph.ffns
        if ffn.leaves_out
    }
    return {
        layer: of.astype(np.float64) / max(profile.n_tokens, 1)
        for layer, of in counts.items()
        if of is not None
    }
