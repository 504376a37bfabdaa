"""Fetching of missing experts by the device while the CPU computes others (offload/misses.py).

Experts go to the spare slots of the cache (experts.py), on a side stream next to the compute stream:

    few tokens   The device decides which experts to fetch, by a table from the number of missing experts to
                 the number to fetch. A kernel reads them from host memory, so a captured graph can hold all
                 of it. They arrive while the layer's input goes to the CPU, or during attention if the
                 router's input is ready before attention.
    many tokens  The host reads the route. Experts stream through two halves of the spare slots: the device
                 computes with one half while the other half is fetched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from hotset.backends.triton.capture import MAX_CAPTURED
from hotset.backends.triton.experts import GpuExpertCache
from hotset.backends.triton.fallback import TokenThreshold
from hotset.backends.triton.kernels import Kernels
from hotset.errors import DeviceError
from hotset.offload.misses import Fetching, fetched_of, n_fetched


class FetchStream(Protocol):
    """A side stream next to the compute stream: `SideStream`, or a test's stream."""

    def after_all(self) -> None:
        """Make the next work of this stream wait for all earlier work of the compute stream."""
        ...

    def put(self, work: Callable[[], None]) -> Any:
        """Put work on this stream, and return the argument for `wait`.

        The caller keeps the tensors that the work reads until it has called `wait`.
        """
        ...

    def wait(self, done: Any) -> None:
        """Make the compute stream wait until this work is done."""
        ...

    def settle(self) -> None:
        """Wait, on the host, for all work of this stream."""
        ...


class SideStream:
    """A second stream of a CUDA device. On other devices all work runs in order."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def after_all(self) -> None:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def put(self, work: Callable[[], None]) -> torch.cuda.Event | None:
        if self._stream is None:
            work()
            return None
        with torch.cuda.stream(self._stream):
            work()
            done: torch.cuda.Event = self._stream.record_event()
        return done

    def wait(self, done: torch.cuda.Event | None) -> None:
        if done is not None:
            torch.cuda.current_stream(self._device).wait_event(done)

    def settle(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


@dataclass
class FetchedGroup:
    """The experts of one half of the spare slots.

    ids: int32 on the device, one per slot; the side stream reads them, so the FetchPlan keeps a group until
    `wait` was called for `done`. first: the first slot. pairs: int64, the entries of the route that need
    these experts, token * n_used + rank. slots: int32, the slot of each pair.
    """

    ids: Tensor
    first: int
    pairs: Tensor
    slots: Tensor
    done: Any = None  # the argument for SideStream.wait


@dataclass
class FetchPlan:
    """The division of a layer's experts between CPU and device in one step.

    asked: int32 [T, n_used], as in CpuWorkerProtocol.submit: the CPU's ids, and -1 - id for the device.
    slots: int32 [T, n_used], slots of the cache, or spare slots that are valid after `done`; None: only
    groups have slots. fetched: the ids that the side stream reads until `done`. groups: the groups that
    stream.

    A plan must live until `compute` has waited for `done` and for its groups. torch's allocator tracks a
    tensor only on the stream of its allocation. It would give the memory of a dropped tensor to the next
    allocation there, while the side stream still reads it. `record_stream` would not help in a captured
    graph, where every replay uses the same memory.
    """

    asked: Tensor
    slots: Tensor | None
    done: Any = None
    fetched: Tensor | None = None
    groups: list[FetchedGroup] = field(default_factory=list)


class Fetcher:
    """The fetcher of missing experts of a stage.

    fetching: None: nothing is fetched. stream: for tests.
    """

    def __init__(
        self,
        cache: GpuExpertCache,
        kernels: Kernels,
        fetching: Fetching | None,
        stream: FetchStream | None = None,
    ) -> None:
        self._cache, self._kernels, self._fetching = cache, kernels, fetching
        self._beside = stream or SideStream(cache.device)
        self._most: dict[tuple[int, bool], tuple[Tensor, int]] = {}

    def __contains__(self, layer: int) -> bool:
        """Return whether the device computes experts of the layer."""
        return layer in self._cache

    def choose(self, layer: int, ids: Tensor, *, early: bool, warming: bool) -> FetchPlan:
        """Divide the experts of a step's tokens, int32 [T, n_used], and begin to fetch.

        early: attention is computed between this call and `compute`. warming: fetch as many as possible, to
        load all kernels.
        """
        fetches = self._fetching is not None and self._cache.slots(layer).n_spare > 1
        if fetches and len(ids) > MAX_CAPTURED:
            return self._choose_many(layer, ids, warming)
        if fetches and self._table_of(layer, ids.shape[1], early)[1]:
            return self._choose_few(layer, ids, early)
        own = self._cache.table(layer)[ids.long()]
        return FetchPlan(torch.where(own < 0, ids, -1 - ids), own)

    def compute(
        self,
        layer: int,
        choice: FetchPlan,
        h: Tensor,
        counts: Tensor,
        gate_threshold: TokenThreshold | None = None,
    ) -> Tensor:
        """Compute the device's experts, [T, n_used, n_embd].

        Rows of the CPU's experts are undefined. gate_threshold: as in fallback.experts.
        """
        k, given = self._kernels, self._cache.arguments(layer)
        n_used = choice.asked.shape[1]
        if choice.done is not None:
            self._beside.wait(choice.done)
        if choice.slots is None:
            own = torch.empty((len(h), n_used, h.shape[1]), device=h.device)
        else:
            own = k.experts(h, choice.slots, counts=counts, gate_threshold=gate_threshold, **given)
        for i, group in enumerate(choice.groups):
            self._beside.wait(group.done)
            tokens = torch.div(group.pairs, n_used, rounding_mode="floor")
            own_threshold = None if gate_threshold is None else gate_threshold.of(tokens)
            found = k.experts(
                h[tokens], group.slots[:, None], counts=counts, gate_threshold=own_threshold, **given
            )
            own.view(-1, h.shape[1])[group.pairs] = found[:, 0]
            if i + 2 < len(choice.groups):  # to the half that is free after this computation
                self._beside.after_all()
                self._bring(layer, choice.groups[i + 2])
        return own

    def settle(self) -> None:
        """Wait for all fetches of a failed step, whose tensors must live until then."""
        self._beside.settle()

    # ---- few tokens

    def _choose_few(self, layer: int, ids: Tensor, early: bool) -> FetchPlan:
        slots = self._cache.slots(layer)
        most, n_most = self._table_of(layer, ids.shape[1], early)
        asked, own, fetched = self._kernels.choose_experts(
            ids, self._cache.table(layer), most, n_most, slots.n_slots
        )
        self._beside.after_all()
        done = self._beside.put(partial(self._fetch, layer, fetched, slots.n_slots))
        return FetchPlan(asked, own, done, fetched)

    def _table_of(self, layer: int, n_used: int, early: bool) -> tuple[Tensor, int]:
        """Return the table from the number of missing experts to the number to fetch, and its largest entry.

        The table is int32 on the device.
        """
        if (layer, early) not in self._most:
            assert self._fetching is not None
            n_spare, ahead = self._cache.slots(layer).n_spare, self._fetching.ahead.get(layer, 0.0)
            ahead = ahead if early else 0.0
            counts = fetched_of(
                self._fetching.rates, MAX_CAPTURED * n_used, self._bytes(layer), n_spare, ahead
            )
            table = torch.tensor(counts, dtype=torch.int32, device=self._cache.device)
            self._most[layer, early] = table, max(counts)
        return self._most[layer, early]

    # ---- many

    def _choose_many(self, layer: int, ids: Tensor, warming: bool) -> FetchPlan:
        assert self._fetching is not None
        route, slots = ids.numpy(force=True), self._cache.slots(layer)
        own = self._cache.on_host(layer)[route]
        missing, n_tokens = np.unique(route[own < 0], return_counts=True)
        order = np.argsort(-n_tokens, kind="stable")  # experts with most tokens cost the CPU most
        half = slots.n_spare // 2
        n, _ = n_fetched(self._fetching.rates, n_tokens[order], self._bytes(layer))
        n = min(len(missing), 2 * half) if warming else n
        place = np.full(len(self._cache.on_host(layer)), -1)
        place[missing[order[:n]]] = np.arange(n)
        of_pair = np.where(own < 0, place[route], -1)
        is_own = (own >= 0) | (of_pair >= 0)
        asked = self._on_device(np.where(is_own, -1 - route, route))
        choice = FetchPlan(asked, self._on_device(own) if warming or (own >= 0).any() else None)
        pairs = np.argsort(of_pair.reshape(-1), kind="stable")
        places = of_pair.reshape(-1)[pairs]
        for first in range(0, n, half):
            at = slice(*np.searchsorted(places, [first, first + half]))
            to = slots.n_slots + (first // half % 2) * half
            choice.groups.append(
                FetchedGroup(
                    self._on_device(missing[order[first : min(first + half, n)]]),
                    to,
                    torch.from_numpy(pairs[at]).to(self._cache.device),
                    self._on_device(places[at] - first + to),
                )
            )
        self._beside.after_all()
        for group in choice.groups[:2]:
            self._bring(layer, group)
        return choice

    def _on_device(self, numbers: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(numbers, np.int32)).to(self._cache.device)

    def _bring(self, layer: int, group: FetchedGroup) -> None:
        group.done = self._beside.put(partial(self._fetch, layer, group.ids, group.first))

    def _fetch(self, layer: int, ids: Tensor, first: int) -> None:
        slots = self._cache.slots(layer)
        try:
            for name, part in self._cache.host.parts[layer].items():
                self._kernels.fetch_experts(part, ids, slots.field(name), first)
        except torch.OutOfMemoryError:
            raise
        except (OSError, RuntimeError, ValueError) as error:
            why = str(error).strip().partition("\n")[0] or type(error).__name__
            raise DeviceError(
                f"experts of layer {layer} could not be fetched to {self._cache.device}: {why}"
            ) from error

    def _bytes(self, layer: int) -> int:
        return sum(part.n_bytes for part in self._cache.host.parts[layer].values())
