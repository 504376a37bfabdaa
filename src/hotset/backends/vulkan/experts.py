"""Experts of MoE layers in slots of a Vulkan device's memory (offload/expert_cache.py).

The CPU computes the experts without a slot (split.py). Both sides compute quantised products in the same
order (docs/contributing/internals/numerics.md), so the results are bitwise identical. The device and the CPU
need a matrix's rows in different orders. A thread rearranges the next experts during the steps, and they are
written to the device between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from hotset import _core
from hotset.backends.decoded import expert_biases
from hotset.backends.device.experts import expert_rows, why_not_cached
from hotset.backends.vulkan.memory import BufferRange, aligned
from hotset.backends.vulkan.weights import (
    COMPUTED,
    FLOATS,
    Placed,
    VulkanMatrix,
    VulkanWeights,
    placed,
    write_all,
)
from hotset.formats.gguf import TensorInfo
from hotset.formats.quants import GGMLType
from hotset.formats.source import WeightSource
from hotset.model.graph import Graph
from hotset.model.operations import Ffn, Value
from hotset.offload.expert_cache import ExpertCache, Group, parts_of


class VulkanExpertCache(ExpertCache):
    """The expert cache of a VulkanStage.

    in_thread: a thread rearranges experts during the steps; False: all work is done between two steps.
    nbytes: bytes of device memory, all allocated at the start.
    """

    most_coming = 16  # pending experts of a group
    coming_bytes = 256 << 20  # of pending experts in host memory, all written before a step can begin

    def __init__(
        self,
        source: WeightSource,
        device: _core.VulkanDevice,
        ffns: Sequence[Ffn],
        n_slots: int,
        *,
        in_thread: bool,
    ) -> None:
        super().__init__(ffns, source.tensors, n_slots, in_thread=in_thread, least=1)
        self._source, weights = source, VulkanWeights(source, device)
        self._slots: list[dict[str, tuple[VulkanMatrix, BufferRange | None]]] = []
        for group in self.groups:
            n, widths = group.n_slots, group.layout.biases
            self._slots.append({
                name: (
                    weights.empty(GGMLType(type_), n, n_rows, n_cols),
                    weights.arena.piece(4 * n * widths[name]) if name in widths else None,
                )
                for name, (type_, n_rows, n_cols) in group.layout.matrices.items()
            })  # fmt: skip
        of_group = self.coming_bytes // len(self.groups)
        self.most_coming = max(min(self.most_coming, of_group // max(map(self._slot_bytes, self.groups))), 1)
        own = [ffn for group in self.groups for ffn in group.ffns.values()]
        self._names = {op.out: name for ffn in own for name, op in parts_of(ffn).items()}
        sizes = {layer: 4 * len(self.on_host(layer)) for layer in self.layers}
        tables, at = device.allocate(sum(map(aligned, sizes.values())), "to_device"), 0
        self._tables: dict[int, BufferRange] = {}
        for layer, size in sizes.items():
            self._tables[layer] = BufferRange(tables, at, size)
            at += aligned(size)
        self.nbytes = weights.arena.nbytes + tables.reserved

    def _slot_bytes(self, group: Group) -> int:
        """Return the bytes of one expert's matrices in a slot."""
        parts = [part for matrix, _ in self._slots[group.number].values() for part in matrix.parts]
        pieces = [piece for part in parts for piece in (part.codes, part.more) if piece is not None]
        return sum(piece.size for piece in pieces) // group.n_slots

    def table(self, layer: int) -> BufferRange:
        """Return the device's table of slots for a layer, int32 [n_expert]; -1 if an expert has no slot."""
        return self._tables[layer]

    def slots_of(self, layer: int, product: Value) -> tuple[VulkanMatrix, BufferRange | None]:
        """Return the matrices and the biases of all slots, for the product that makes a value.

        The biases are float32 [n_slots, rows], or None.
        """
        return self._slots[self.group_of(layer).number][self._names[product]]

    def _publish(self, group: Group) -> None:
        write_all(
            (self._tables[layer], 0, group.table[i].view(np.uint8)) for i, layer in enumerate(group.layers)
        )

    def _fetch(self, group: Group, layer: int, id: int, slot: int) -> Callable[[], None]:
        found: list[Placed] = []
        for name, op in parts_of(group.ffns[layer]).items():
            matrix, biases = self._slots[group.number][name]
            found += placed(matrix, slot, expert_rows(self._source, op, id))
            if biases is not None:
                own = expert_biases(self._source, op)[id]
                found.append((biases, slot * own.nbytes, own.view(np.uint8)))
        return partial(write_all, found)


def cached_layers(graph: Graph, tensors: Mapping[str, TensorInfo]) -> tuple[dict[int, Ffn], str]:
    """Return the MoE layers whose experts a cache may hold, and why the first other MoE layer has none."""
    types = set(COMPUTED).difference(FLOATS)
    reasons = [(ffn, why_not_cached(ffn, tensors, types)) for ffn in graph.ffns if ffn.route is not None]
    held = {ffn.layer: ffn for ffn, why in reasons if not why}
    refused = (f"blk.{ffn.layer}: no expert cache on Vulkan holds {why}" for ffn, why in reasons if why)
    return held, next(refused, "")
