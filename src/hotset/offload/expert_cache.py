"""The cache of MoE experts in slots of a device's memory, for any kind of device.

A step uses the experts in the table at its start: the device computes those that have a slot, the CPU the
others. After the step the policy (replacement.py) learns which experts were used, and chooses which to load
and which to evict. They are copied while the next steps run. Tables change only between steps, and no slot is
written while a table lists it. Subclasses define how experts are copied and where tables and slots are:
triton/experts.py, vulkan/experts.py.

Layers whose matrices have different types or shapes have separate slots and policies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import numpy as np

from hotset.formats.gguf import TensorInfo
from hotset.model.operations import ActivationKind, ExpertLinear, ExpertSum, Ffn
from hotset.offload.cache_stats import CacheStats
from hotset.offload.replacement import Replacement, arrange

LEARN_TOKENS = 8  # larger steps are prompts, which do not show what decoding often needs
ACTIVATIONS: tuple[ActivationKind, ...] = (
    "silu", "gelu_tanh", "relu", "relu2", "fatrelu", "sigmoid", "clamped_silu", "clamped_plus_one",
)  # fmt: skip
"""Activations of experts that need no library function, so that devices and the CPU agree bitwise."""

Copy = Future[Callable[[], None] | None]


@dataclass(frozen=True)
class ExpertLayout:
    """The properties that experts must share to share slots.

    For gate (None: no gate), up and down: the type, rows and columns of an expert's matrix, and whether there
    are biases.
    """

    gate: tuple[int, int, int] | None
    up: tuple[int, int, int]
    down: tuple[int, int, int]
    biased: tuple[bool, bool, bool]
    neuron_major: bool

    @property
    def matrices(self) -> dict[str, tuple[int, int, int]]:
        """Return type, rows and columns by the name of the product."""
        found = {"gate": self.gate, "up": self.up, "down": self.down}
        return {name: shape for name, shape in found.items() if shape is not None}

    @property
    def biases(self) -> dict[str, int]:
        """Return the bias's width by the name of the product."""
        width = {"gate": self.up[1], "up": self.up[1], "down": self.up[2]}
        names = zip(width, self.biased, strict=True)
        return {name: width[name] for name, is_biased in names if is_biased}


@dataclass
class Group:
    """Layers that share slots.

    number: of the group. table: int32 [layers, n_expert], the slot of each expert in the next step, or -1;
    changed: the device's table is older.
    """

    number: int
    layout: ExpertLayout
    n_slots: int
    layers: list[int]
    ffns: dict[int, Ffn]
    policy: Replacement
    table: np.ndarray
    changed: bool = True
    coming: dict[tuple[int, int], Copy] = field(default_factory=dict)  # (index of a layer, expert) → copy


class ExpertCache(ABC):
    """The experts of some MoE layers in about n_slots slots of a device's memory.

    ffns: of one stage; all that share slots have the same n_used. in_thread: copy in a thread while steps
    run; False: copy between steps. least: the smallest number of slots per layout. empty: keep layouts
    without slots, too. most_coming: how many copies may be pending. n_fetched: copied experts; n_streamed:
    experts of tokens that were copied only for their step.
    """

    most_coming = 64

    def __init__(
        self,
        ffns: Sequence[Ffn],
        tensors: Mapping[str, TensorInfo],
        n_slots: int,
        *,
        in_thread: bool,
        least: int = 0,
        empty: bool = False,
    ) -> None:
        self.groups: list[Group] = []
        by_layout: dict[ExpertLayout, list[Ffn]] = {}
        for ffn in ffns:
            by_layout.setdefault(layout_of(ffn, tensors), []).append(ffn)
        for (layout, own), n in zip(by_layout.items(), _shares(by_layout.values(), n_slots), strict=True):
            if max(n, least) or empty:
                self.groups.append(_group(len(self.groups), layout, own, max(n, least)))
        self._of_layer = {layer: group for group in self.groups for layer in group.layers}
        self.n_fetched = self.n_streamed = self._n_hits = self._n_on_cpu = 0
        self._copies = ThreadPoolExecutor(1, "hotset-experts") if in_thread else None

    def __contains__(self, layer: int) -> bool:
        return layer in self._of_layer

    @property
    def layers(self) -> tuple[int, ...]:
        """Return the layers with slots."""
        return tuple(self._of_layer)

    @property
    def stats(self) -> CacheStats:
        """Return the counts of experts since the cache was made."""
        hits = self._n_hits - self.n_streamed
        return CacheStats(hits=hits, on_cpu=self._n_on_cpu, fetched=self.n_fetched, streamed=self.n_streamed)

    def group_of(self, layer: int) -> Group:
        return self._of_layer[layer]

    def on_host(self, layer: int) -> np.ndarray:
        """Return the current table of a layer, int32 [n_expert]; -1: no slot."""
        group = self._of_layer[layer]
        table: np.ndarray = group.table[group.layers.index(layer)]
        return table

    # ---- implemented by a device

    @abstractmethod
    def _fetch(self, group: Group, layer: int, id: int, slot: int) -> Callable[[], None] | None:
        """Copy an expert into a slot that no table lists, in any thread; return work to do between steps."""

    @abstractmethod
    def _publish(self, group: Group) -> None:
        """Update the device's tables from a group's."""

    # ---- between steps

    def begin_step(self) -> None:
        """Add completed copies to the tables and remove evicted experts. Raises the error of a copy."""
        for group in self.groups:
            for (layer, id), copy in list(group.coming.items()):
                if copy.done():
                    del group.coming[layer, id]
                    self._enter(group, layer, id, copy)
            if group.changed:
                self._publish(group)
                group.changed = False

    def _enter(self, group: Group, layer: int, id: int, copy: Copy) -> None:
        try:
            if (finish := copy.result()) is not None:
                finish()
        except BaseException:
            group.policy.drop(layer, id)
            raise
        group.table[layer, id] = group.policy.find(layer, id)
        group.changed = True

    def learn(self, routes: Mapping[int, np.ndarray]) -> None:
        """Update the policy with the experts that a step used.

        routes: of each layer int32 [n_tokens, n_used], -1 - id for experts that the device computed.
        """
        n_hits = sum(int((asked < 0).sum()) for asked in routes.values())
        self._n_hits += n_hits
        self._n_on_cpu += sum(asked.size for asked in routes.values()) - n_hits
        for group in self.groups:
            group.policy.begin_step()
            for i, layer in enumerate(group.layers):
                asked = routes[layer]
                if not len(asked):
                    continue
                ids = np.unique(np.where(asked < 0, -1 - asked, asked)).astype(np.int32)
                self._look_up(group, i, ids, credit=len(asked) <= LEARN_TOKENS)

    def _look_up(self, group: Group, layer: int, ids: np.ndarray, *, credit: bool) -> None:
        places = group.policy.lookup(layer, ids, credit=credit)
        n_expert = group.table.shape[1]
        for gone in places.evicted[places.evicted >= 0].tolist():
            group.table[divmod(gone, n_expert)] = -1
            group.changed = True
            group.coming.pop(divmod(gone, n_expert), None)  # its copy ends before the next one begins
        to_fill = list(places.to_fill(ids))
        for n, (id, slot) in enumerate(to_fill):
            if len(group.coming) >= self.most_coming:
                group.policy.drop(layer, id)
                continue
            self.n_fetched += 1
            try:
                self._bring(group, layer, id, slot)
            except BaseException:  # such as a disk error
                for other, _ in to_fill[n:]:
                    group.policy.drop(layer, other)
                raise

    def _bring(self, group: Group, layer: int, id: int, slot: int) -> None:
        """Copy an expert into a slot. layer: its index in the group."""
        if self._copies is not None:
            group.coming[layer, id] = self._copies.submit(self._fetch, group, group.layers[layer], id, slot)
            return
        if (finish := self._fetch(group, group.layers[layer], id, slot)) is not None:
            finish()
        group.table[layer, id] = slot
        group.changed = True

    def settle(self) -> None:
        """Wait for all pending copies."""
        wait(copy for group in self.groups for copy in group.coming.values())

    def close(self) -> None:
        """Wait for the running copy and drop the others; safe to call twice."""
        if self._copies is not None:
            self._copies.shutdown(wait=True, cancel_futures=True)


def parts_of(ffn: Ffn) -> dict[str, ExpertLinear | ExpertSum]:
    """Return the products of an MoE layer by name: gate, up, down."""
    found = {"gate": ffn.gate, "up": ffn.up, "down": ffn.down}
    return {name: op for name, op in found.items() if isinstance(op, ExpertLinear | ExpertSum)}


def layout_of(ffn: Ffn, tensors: Mapping[str, TensorInfo]) -> ExpertLayout:
    """Return the layout of an MoE layer's experts."""
    parts = parts_of(ffn)
    shapes: dict[str, tuple[int, int, int]] = {}
    for name, op in parts.items():
        info = tensors[op.weights[0]]
        n_rows = op.n_rows if isinstance(op, ExpertLinear) else info.shape[1]
        shapes[name] = int(info.type), n_rows, info.shape[0]
    gate, up, down = (parts.get(name) for name in ("gate", "up", "down"))
    biased = tuple(op is not None and op.bias is not None for op in (gate, up, down))
    neuron_major = isinstance(down, ExpertSum) and down.neuron_major
    return ExpertLayout(shapes.get("gate"), shapes["up"], shapes["down"], biased, neuron_major)  # type: ignore[arg-type]


def layout_numbers(ffns: Iterable[Ffn], tensors: Mapping[str, TensorInfo]) -> dict[int, int]:
    """Return a number per layer, equal for layers that share slots."""
    layouts = {ffn.layer: layout_of(ffn, tensors) for ffn in ffns}
    numbers = {layout: n for n, layout in enumerate(dict.fromkeys(layouts.values()))}
    return {layer: numbers[layout] for layer, layout in layouts.items()}


def _group(number: int, layout: ExpertLayout, ffns: list[Ffn], n_slots: int) -> Group:
    up = ffns[0].up
    assert isinstance(up, ExpertLinear)
    arranged = arrange(n_slots, len(ffns), up.n_used)
    return Group(
        number,
        layout,
        n_slots,
        [ffn.layer for ffn in ffns],
        {ffn.layer: ffn for ffn in ffns},
        Replacement(arranged, len(ffns), up.n_expert),
        np.full((len(ffns), up.n_expert), -1, np.int32),
    )


def _shares(groups: Iterable[list[Ffn]], n_slots: int) -> list[int]:
    """Return the slots of each group of layers, in proportion to their experts and at most as many."""
    sizes = [sum(ffn.up.n_expert for ffn in group if isinstance(ffn.up, ExpertLinear)) for group in groups]
    ends = np.floor(np.cumsum(sizes) * (n_slots / sum(sizes)) + 1e-9).astype(int)
    slots: list[int] = np.minimum(np.diff(ends, prepend=0), sizes).tolist()
    return slots
